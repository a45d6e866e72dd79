"""Sites that are gone, slow or lie; messages that are lost, sent twice, replayed or altered; servers that go back."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError, pull_objects

from befit.config.experiment import Experiment
from befit.core.errors import NotEnoughReplies, RunError
from befit.flower import link, service
from befit.flower.agreement import agreed_methods
from befit.flower.frame import from_content, pack, to_content, unpack
from befit.flower.server_app import run_over
from befit.runs.runner import run
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import local_memories, same, server_memory, site_folder, site_memories

Make = Callable[..., Experiment]
FAST = {"kind": "flower", "deadline_s": 0.05, "wait_s": 0.05}


class Stop(Exception):
    """Ends the server as a crash would."""


def go(grid: LoopbackGrid, experiment: Experiment, out: Path, resume: bool = False, pinned: bool = True) -> Path:
    return run_over(grid, experiment, out, resume, pinned, poll_s=0.01).path


def failures(run_dir: Path) -> list[dict[str, object]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "failure"]


def of_train(message: Message, round_: int) -> bool:
    """Whether a reply is to the training of this round."""
    header, _ = unpack(from_content(message.content), "a reply")
    return header["kind"] == "update" and header["at"]["round"] == round_


def test_a_lost_reply_costs_one_round_of_one_client(grid: LoopbackGrid, experiment: Make, tmp_path: Path) -> None:
    grid.tamper = lambda reply, node: None if node == 12 and of_train(reply, 1) else reply
    done = go(grid, experiment(engine=FAST), tmp_path / "run")
    assert [(one["client"], one["round"], one["error"]) for one in failures(done)] == [("client-01", 1, "late")]
    results = json.loads((done / "results.json").read_text())
    assert [results["clients"][client]["updates"] for client in ("client-00", "client-01")] == [2, 1]


def test_too_few_replies_end_the_run_and_a_resumed_one_trains_nobody_twice(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """The lost reply of round 2 is given again, so the end is that of a run in which nothing was lost."""
    federation = {"rounds": 3, "min_replies": 2}
    grid.tamper = lambda reply, node: None if node == 12 and of_train(reply, 2) else reply
    with pytest.raises(NotEnoughReplies, match="round 2: 1 of 2 clients"):
        go(grid, experiment("ditto", FAST, federation=federation), tmp_path / "run")
    before = site_memories(tmp_path / "run", {"client-01": sites[1]}, "ditto")
    grid.tamper = lambda reply, node: reply
    count = len(grid.sent)
    done = go(grid, experiment("ditto", FAST, federation=federation), tmp_path / "run", resume=True)
    local = run(experiment("ditto", {"store": "disk"}, federation=federation), out=tmp_path / "local").path
    assert same(server_memory(done), server_memory(local))
    by_client = {f"client-0{number}": site for number, site in enumerate(sites)}
    ends = site_memories(done, by_client, "ditto")
    assert all(same(ends[client], memory) for client, memory in local_memories(local).items())
    assert not same(ends["client-01"], before["client-01"])
    assert [kind for _, kind in grid.sent[count:]].count("train") == 4  # rounds 2 and 3, two clients each


def test_a_server_that_stops_after_its_sites_have_trained_asks_again_and_gets_the_same(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    def crash(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 2):
            raise Stop
        return reply

    grid.tamper = crash
    with pytest.raises(Stop):
        go(grid, experiment("fedalt"), tmp_path / "run")
    replies: list[bytes] = []

    def keep(reply: Message, node: int) -> Message:
        if (data := from_content(reply.content)) and unpack(data, "a reply")[0]["kind"] == "update":
            replies.append(data)
        return reply

    grid.tamper = keep
    folder = sites[0].parent / "state"
    (kept,) = folder.rglob("reply.*")
    before = kept.read_bytes()
    done = go(grid, experiment("fedalt"), tmp_path / "run", resume=True)
    assert before in replies
    local = run(experiment("fedalt", {"store": "disk"}), out=tmp_path / "local").path
    assert same(server_memory(done), server_memory(local))


def test_a_reply_that_comes_twice_is_used_once(grid: LoopbackGrid, experiment: Make, tmp_path: Path) -> None:
    first = go(grid, experiment(), tmp_path / "first")
    pull = grid.pull_messages
    grid.pull_messages = lambda ids: [message for one in pull(ids) for message in (one, one)]  # type: ignore[method-assign]
    second = go(grid, experiment(), tmp_path / "second")
    assert not failures(second)
    assert same(server_memory(first), server_memory(second))


def test_a_replayed_reply_is_refused(grid: LoopbackGrid, experiment: Make, tmp_path: Path) -> None:
    """The reply of round 1 once more in round 2: well formed, of the right site, with its right hash."""
    held: list[Message] = []

    def replay(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            held.append(reply)
        if node == 12 and of_train(reply, 2):
            reply.content = held[0].content
        return reply

    grid.tamper = replay
    done = go(grid, experiment(), tmp_path / "run")
    (failure,) = failures(done)
    assert (failure["client"], failure["round"], failure["error"]) == ("client-01", 2, "refused")
    assert "its at is {'stage': 'federate', 'round': 1," in str(failure["reason"])


def test_altered_bytes_are_refused(grid: LoopbackGrid, experiment: Make, tmp_path: Path) -> None:
    def flip(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            array = reply.content.array_records["frame"]["frame"]
            array.data = array.data[:-1] + bytes([array.data[-1] ^ 1])
        return reply

    grid.tamper = flip
    (failure,) = failures(go(grid, experiment(), tmp_path / "run"))
    assert failure["error"] == "refused" and "altered" in str(failure["reason"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header, arrays: header.update(client="client-00"), "a reply to another request"),
        (lambda header, arrays: header.update(report={"loss": "low"}), "its loss is low"),
        (lambda header, arrays: header.pop("scalars"), "malformed"),
        (lambda header, arrays: arrays.update({key: value.half() for key, value in arrays.items()}), "wire.dtype"),
        (lambda header, arrays: arrays.update({key: value.double() for key, value in arrays.items()}), "declared has"),
        (lambda header, arrays: arrays.popitem(), "left out 1 declared"),
        (lambda header, arrays: arrays.update({key: value * 1e9 for key, value in arrays.items()}), "max_norm_ratio"),
    ],
)
def test_a_site_that_lies_is_refused(
    change: Callable[..., object], reason: str, grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    """What a site with a valid key may still send: another's name, wrong types, wrong arrays, huge ones."""

    def lie(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            header, arrays = unpack(from_content(reply.content), "a reply")
            change(header, arrays)
            reply.content = to_content(pack(header, arrays))
        return reply

    grid.tamper = lie
    (failure,) = failures(go(grid, experiment(), tmp_path / "run"))
    assert failure["error"] == "refused" and reason in str(failure["reason"])


def test_a_site_that_goes_away_and_comes_back_keeps_its_memory(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """Away in round 2 of 3: its memory has rounds 1 and 3, and the run has one failure, told as offline."""

    def leave(reply: Message, node: int) -> Message:
        if of_train(reply, 1) and node == 12:
            grid.online.discard(12)
        if of_train(reply, 2):
            grid.online.add(12)
        return reply

    grid.tamper = leave
    done = go(grid, experiment("fedsa", federation={"rounds": 3}), tmp_path / "run")
    assert [(one["client"], one["round"], one["error"]) for one in failures(done)] == [("client-01", 2, "offline")]
    stamp = json.loads(next(iter((sites[1].parent / "state").rglob("stamp.json"))).read_text())
    assert (stamp["number"], stamp["last"]["last"]) == (2, 3)


def away(grid: LoopbackGrid, *asked: tuple[str, str]) -> None:
    """Let the second site be away for these requests, each what it asks for and the method's label."""

    def answer(message: Message, node: int) -> Message:
        header, _ = unpack(from_content(message.content), "a request")
        if node == 12 and (header["do"], header["label"]) in asked:
            return Message(Error(5, "gone"), reply_to=message)
        return LoopbackGrid.answer(grid, message, node)

    grid.answer = answer  # type: ignore[method-assign]


def adapter(run_dir: Path, site: Path, label: str) -> Path:
    return site_folder(run_dir, site, label) / "clients" / "client-01" / "adapter" / "adapter_model.safetensors"


def test_a_site_without_room_for_its_adapter_is_asked_for_it_again(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = experiment("fedit", baselines=["local"], federation={"rounds": 2, "deploy": "best"})
    write = service.write_client

    def full(folder: Path, *rest: Any) -> None:
        if folder.name == "client-01":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, *rest)

    monkeypatch.setattr(service, "write_client", full)
    done = go(grid, settings, tmp_path / "run")
    first = json.loads((done / "results.json").read_text())["clients"]["client-01"]
    assert first["deployed"] is None and first["accuracy"] is None and first["examples"] == 0
    monkeypatch.setattr(service, "write_client", write)
    go(grid, settings, done, resume=True)
    again = json.loads((done / "results.json").read_text())
    assert again["failures"] == [] and again["clients"]["client-01"]["deployed"]
    assert adapter(done, sites[1], "local").exists() and adapter(done, sites[1], "fedit").exists()


@pytest.mark.parametrize("deploy", ["method", "best"])
def test_a_site_that_was_away_when_its_adapter_was_due_is_asked_for_it_again(
    deploy: str, grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    more = {"baselines": ["local"], "federation": {"rounds": 2, "deploy": deploy}}
    settings = experiment("fedit", **more)
    away(grid, ("export", "local"))
    done = go(grid, settings, tmp_path / "run")
    assert not adapter(done, sites[1], "local").exists() and adapter(done, sites[1], "fedit").exists()
    first = json.loads((done / "results.json").read_text())
    assert first["clients"]["client-01"].get("deployed") is None
    sent = len(grid.sent)
    away(grid)
    go(grid, settings, done, resume=True)
    assert adapter(done, sites[1], "local").exists()
    assert len(grid.sent) - sent == 4, "hello and one export, to both"
    again = json.loads((done / "results.json").read_text())
    assert again["failures"] == []
    local = run(experiment("fedit", {"store": "disk"}, **more), out=tmp_path / "local").results["clients"]
    for client, row in again["clients"].items():
        assert row["accuracy"] == local[client]["accuracy"]
        assert row.get("deployed") == local[client].get("deployed")


def test_a_site_that_missed_a_method_chooses_among_the_others(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    settings = experiment("fedit", baselines=["local"], federation={"rounds": 2, "deploy": "best"})
    away(grid, *((do, "local") for do in ("train", "score", "export")))
    done = go(grid, settings, tmp_path / "run")
    row = json.loads((done / "results.json").read_text())["clients"]["client-01"]
    assert row["deployed"] == "fedit" and row["accuracy"] is not None
    assert list(agreed_methods(site_folder(done, sites[1], "fedit").parent)) == ["local", "fedit"]
    away(grid)
    go(grid, settings, done, resume=True)
    again = json.loads((done / "results.json").read_text())
    assert [(one["client"], one["kind"]) for one in again["failures"] if one["stage"] == "export"] == [
        ("client-01", "NotTrained")
    ]
    assert again["clients"]["client-01"]["deployed"] == "fedit"


@pytest.mark.parametrize("scores", ["rounded", "none"])
def test_a_site_without_a_model_of_the_runs_own_method_chooses_among_the_others(
    scores: str, grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """As it would in one process; the failure comes with what it deploys."""
    sites[1] = grid.sites[12] = write_site(tmp_path / "site-1", "client-01", f"scores: {scores}\n")
    settings = experiment("local", baselines=["fedit"], federation={"rounds": 2, "deploy": "best"})
    away(grid, *((do, "local") for do in ("train", "score")))
    done = go(grid, settings, tmp_path / "run")
    results = json.loads((done / "results.json").read_text())
    assert json.loads((site_folder(done, sites[1], "fedit").parent / "chosen.json").read_text())["run"] == "fedit"
    assert results["clients"]["client-01"]["deployed"] == (None if scores == "none" else "fedit")
    assert [(one["client"], one["kind"]) for one in results["failures"] if one["stage"] == "export"] == [
        ("client-01", "NotTrained")
    ]
    assert results["clients"]["client-00"]["deployed"]


def test_a_site_that_was_never_trained_in_a_shared_method_still_chooses_it(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """As where no cohort had it: the server's adapter is a model of its own all the same."""
    more = {"baselines": ["local", "fedit"], "federation": {"rounds": 2, "deploy": "best"}}
    away(grid, ("train", "fedit"))
    done = go(grid, experiment("ditto", **more), tmp_path / "run")
    chosen = json.loads((site_folder(done, sites[1], "ditto").parent / "chosen.json").read_text())
    assert list(chosen["held_out"]) == ["local", "fedit", "ditto"]


class Announcing(LoopbackGrid):
    """Gets the rest of a reply as Flower's Grid does, which for one site never comes."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._whole(reply) for reply in super().pull_messages(message_ids)]

    def _whole(self, reply: Message) -> Message:
        tries = itertools.count()

        def pull(name: str) -> bytes:
            if reply.metadata.src_node_id == 12 and of_train(reply, 1):
                assert next(tries) < 4, "it is waited for longer than it may take"
                raise ObjectUnavailableError(name)
            return b""

        try:
            pull_objects(["rest"], pull)
        except ObjectPullError as error:
            late = Message(Error(3, str(error)), reply_to=reply)
            late.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
            return late
        return reply


def test_a_reply_of_which_only_the_announcement_comes_is_late(
    sites: list[Path], experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower would wait for the rest of it for two hours, and the server with it."""
    monkeypatch.setattr(link, "_BREATH_S", 0.1)
    done = go(Announcing(sites), experiment(engine=FAST), tmp_path / "run")
    assert [(one["client"], one["round"], one["error"]) for one in failures(done)] == [("client-01", 1, "late")]
    results = json.loads((done / "results.json").read_text())
    assert [results["clients"][client]["updates"] for client in ("client-00", "client-01")] == [2, 1]


def test_a_second_node_does_not_become_a_client_that_is_there(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """It is left alone, and cannot keep the run from its way: the first node goes on as client-00."""
    grid.sites = {11: sites[0], 12: write_site(tmp_path / "other", "client-00")}
    grid.online = {11, 12}
    done = go(grid, experiment(engine=FAST), tmp_path / "run")
    assert {one["client"] for one in failures(done)} == {"client-01"}
    assert {node for node, kind in grid.sent if kind == "train"} == {11}


@pytest.mark.parametrize("pinned", [True, False])
def test_a_client_may_move_to_another_node_only_without_authentication(
    pinned: bool, grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    def move(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            grid.online = {11, 13}
            grid.sites[13] = sites[1]
        return reply

    grid.tamper = move
    done = go(grid, experiment(), tmp_path / "run", pinned=pinned)
    assert [one["error"] for one in failures(done)][:1] == (["offline"] if pinned else [])


def test_a_site_of_another_run_is_left_alone(grid: LoopbackGrid, experiment: Make, tmp_path: Path) -> None:
    grid.sites[13] = write_site(tmp_path / "other", "client-07")
    grid.online.add(13)
    done = go(grid, experiment(), tmp_path / "run")
    assert not failures(done)
    assert [kind for node, kind in grid.sent if node == 13] == ["query"]


def test_a_run_says_which_sites_have_not_come(grid: LoopbackGrid, experiment: Make, tmp_path: Path) -> None:
    grid.online = {11}
    wanted = experiment(engine=FAST, federation={"rounds": 2, "min_replies": 2})
    with pytest.raises(NotEnoughReplies, match=r"\(engine.wait_s\) 1 of 2 sites have come, .*; missing: client-01"):
        go(grid, wanted, tmp_path / "run")


def test_a_broken_site_file_is_told_without_its_place(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    sites[1].write_text("client: [")
    wanted = experiment(engine=FAST, federation={"rounds": 2, "min_replies": 2})
    with pytest.raises(
        NotEnoughReplies, match=r"node 12 was left alone.*ConfigError: the site's log says more"
    ) as ended:
        go(grid, wanted, tmp_path / "run")
    assert str(sites[1]) not in str(ended.value)


def test_a_start_over_a_run_that_is_there_changes_nothing_of_it(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """Without resume it is refused before any site is greeted, so that a later resume is of the run that began."""
    out, federation = tmp_path / "run", {"rounds": 3}

    def crash(event: dict[str, object]) -> None:
        if event["kind"] == "round" and event["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        run_over(grid, experiment("fedsa", FAST, federation=federation), out, observer=crash, poll_s=0.01)
    before, sent = (out / ".sites.json").read_bytes(), len(grid.sent)
    with pytest.raises(RunError, match="resume it with --resume"):
        go(grid, experiment("fedsa", FAST, federation=federation), out)
    assert (out / ".sites.json").read_bytes() == before and len(grid.sent) == sent
    done = go(grid, experiment("fedsa", FAST, federation=federation), out, resume=True)
    local = run(experiment("fedsa", {"store": "disk"}, federation=federation), out=tmp_path / "local").path
    by_client = {f"client-0{number}": site for number, site in enumerate(sites)}
    ends = site_memories(done, by_client, "fedsa")
    assert all(same(ends[client], memory) for client, memory in local_memories(local).items())


def test_a_second_start_while_the_first_waits_for_its_sites_is_refused(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """As after a display that was ended by Ctrl-C while its run goes on. Both would name the run at the sites."""
    out, wanted = tmp_path / "run", experiment("fedsa", FAST, federation={"rounds": 1})
    refused: list[str] = []

    def start_again() -> None:
        try:
            go(LoopbackGrid(sites), wanted, out)
        except RunError as error:
            refused.append(str(error))

    class Waiting(LoopbackGrid):
        def get_node_ids(self) -> list[int]:
            if not refused:
                second = Thread(target=start_again)
                second.start()
                second.join()
            return [*super().get_node_ids()]

    done = go(Waiting(sites), wanted, out)
    assert refused == [f"{out} is in use by another process that is still running"]
    assert failures(done) == []


@pytest.mark.parametrize("told", [[""], []], ids=["empty", "none"])
def test_a_message_that_is_not_taken_costs_one_round_of_one_client(
    told: list[str], grid: LoopbackGrid, experiment: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower answers with an empty id where a node has just gone, and with none where a proxy refused the message."""
    push, refused = grid.push_messages, list[int]()

    def pushed(messages: list[Message]) -> list[str]:
        (message,) = messages
        if message.metadata.message_type == "train" and not refused:
            refused.append(message.metadata.dst_node_id)
            return told
        return push([message])

    monkeypatch.setattr(grid, "push_messages", pushed)
    done = go(grid, experiment(engine=FAST), tmp_path / "run")
    assert [(one["client"], one["round"], one["error"]) for one in failures(done)] == [("client-00", 1, "offline")]
    results = json.loads((done / "results.json").read_text())
    assert [results["clients"][client]["updates"] for client in ("client-00", "client-01")] == [1, 2]
