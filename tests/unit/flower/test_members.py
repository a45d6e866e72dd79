"""Who is a member of a run: by key, by name without keys; who may refuse; who is waited for, and what they all see."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Message

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, ModelError, NotEnoughReplies, RunError
from befit.flower.app_folder import write_app
from befit.flower.frame import from_content, pack, to_content, unpack
from befit.flower.keys import fingerprint, public_key, write_site_keys
from befit.flower.members import Members
from befit.flower.run_log import Ended, RunLog, lined_up, tell_results, told_in_a_line
from befit.flower.server_app import run_over
from befit.report.tables import client_table
from befit.runs.artifacts import predict
from befit.runs.runner import Run, run
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import same, server_memory
from tests.unit.flower.test_failures import FAST, failures, of_train

Make = Callable[..., Experiment]


def key_of(folder: Path) -> tuple[str, bytes]:
    """A new key pair's public half: its file, and the form in which Flower holds it."""
    write_site_keys(folder)
    known = load_ssh_public_key((folder / "site.pub").read_bytes())
    return str(folder / "site.pub"), known.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def keys(grid: LoopbackGrid, tmp_path: Path) -> dict[str, str]:
    """Node 11 has the key of client-00, node 12 that of client-01, node 10 one of its own."""
    files = {}
    for number, node in enumerate((11, 12, 10)):
        files[f"client-0{number}"], grid.keys[node] = key_of(tmp_path / f"keys-{number}")
    del files["client-02"]
    return files


def go(grid: LoopbackGrid, experiment: Experiment, out: Path, **more: bool) -> Run:
    return run_over(grid, experiment, out, poll_s=0.01, **more)


def trained(grid: LoopbackGrid) -> set[int]:
    return {node for node, kind in grid.sent if kind == "train"}


def test_only_the_owner_of_its_key_is_a_client(
    grid: LoopbackGrid, experiment: Make, keys: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 10, asked first, says that it is client-00: it is not even asked, and node 11 is client-00 when it comes."""
    grid.sites[10] = write_site(tmp_path / "impostor", "client-00")
    grid.online = {10, 12}

    def come(reply: Message, node: int) -> Message:
        grid.online.add(11)
        return reply

    grid.tamper = come
    done = go(grid, experiment(engine={"kind": "flower", "keys": keys}), tmp_path / "run")
    assert trained(grid) == {11, 12} and not failures(done.path)
    assert not [kind for node, kind in grid.sent if node == 10]
    lines = [line for line in caplog.messages if "node 10" in line]
    assert len(lines) == 1 and fingerprint(grid.keys[10]) in lines[0]
    local = run(experiment(engine={"store": "disk"}), out=tmp_path / "local")
    assert same(server_memory(done.path), server_memory(local.path))


def test_a_site_whose_key_is_another_clients_is_that_clients_failure(
    grid: LoopbackGrid, experiment: Make, keys: dict[str, str], sites: list[Path], tmp_path: Path
) -> None:
    """The owner of client-01's key says that it is client-00: nobody is client-00 through it, whoever comes first."""
    sites[1].write_text(sites[1].read_text().replace("client-01", "client-00"))
    done = go(grid, experiment(engine={"kind": "flower", "keys": keys}), tmp_path / "run")
    assert trained(grid) == {11}
    assert {one["client"] for one in failures(done.path)} == {"client-01"}
    assert "its key is client-01's" in str(failures(done.path)[0]["reason"])


def test_without_keys_the_first_is_the_client_and_the_log_warns(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid.sites[10] = write_site(tmp_path / "impostor", "client-00")
    grid.online.add(10)
    go(grid, experiment(engine=FAST), tmp_path / "run")
    assert trained(grid) == {10, 12}
    assert "engine.keys lists no keys" in caplog.text
    assert "node 11 is left alone: it says that it is client-00, but node 10 is" in caplog.text


@pytest.mark.parametrize(
    "text", ["client: [", "client: client-07\nmodels: {other: digits-vit}\nbenchmarks: [digits]\n"]
)
def test_a_stranger_cannot_keep_a_run_from_starting(
    text: str, grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    """Registered, but of no client of this run: it refuses while client-01 is still to come."""
    grid.sites[10] = tmp_path / "stranger.yaml"
    grid.sites[10].write_text(text)
    grid.online = {10, 11}

    def come(reply: Message, node: int) -> Message:
        if node == 11:
            grid.online.add(12)
        return reply

    grid.tamper = come
    done = go(grid, experiment(federation={"rounds": 1, "min_replies": 2}), tmp_path / "run")
    assert trained(grid) == {11, 12} and not failures(done.path)


def test_a_member_that_refuses_costs_its_own_replies(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """With enough left the run goes on, with the reason in its report; with too few it ends at once, with the same."""
    sites[1].write_text(re.sub("models: .*", "models: {other: digits-vit}", sites[1].read_text()))
    done = go(grid, experiment(), tmp_path / "run")
    (*_, last) = failures(done.path)
    assert (last["client"], last["error"]) == ("client-01", "left out") and "site's models" in str(last["reason"])
    assert done.results["clients"]["client-01"]["updates"] == 0
    with pytest.raises(ConfigError, match=r"client client-01: .*site's models"):
        go(grid, experiment(federation={"rounds": 2, "min_replies": 2}), tmp_path / "both")


def test_a_run_starts_with_enough_sites_and_a_latecomer_joins_at_the_next_round(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    """client-01 connects during round 2 of 4: it has replies in rounds 3 and 4, and its hello is kept for a resume."""
    grid.online = {11}

    def come(reply: Message, node: int) -> Message:
        if of_train(reply, 2):
            grid.online.add(12)
        return reply

    grid.tamper = come
    done = go(grid, experiment("fedsa", FAST, federation={"rounds": 4}), tmp_path / "run")
    assert [(one["client"], one["round"], one["error"]) for one in failures(done.path)] == [
        ("client-01", round_, "offline") for round_ in (1, 2)
    ]
    rows = done.results["clients"]
    assert [rows[client]["updates"] for client in ("client-00", "client-01")] == [4, 2]
    assert rows["client-01"]["accuracy"] is not None
    record = json.loads((done.path / ".sites.json").read_text())
    assert record["nodes"] == {"client-00": 11, "client-01": 12} and record["began"] == ["client-00"]


OWN = {
    "model": {"id": "digits-vit"},
    "benchmark": None,
    "data": {"task": "image-classification", "clients": {"client-00": "x", "client-01": "x"}},
}


@pytest.fixture
def own(sites: list[Path], tmp_path: Path) -> dict[str, object]:
    """Sites with pictures of their own, 12 and 20 of them; the server knows neither how many nor which."""
    from PIL import Image

    for site, count in zip(sites, (20, 30), strict=True):
        lines = []
        for number in range(count):
            Image.new("L", (8, 8), 20 * (number % 2) + number).save(site.parent / f"{number}.png")
            lines.append(json.dumps({"image": f"{number}.png", "label": "ab"[number % 2]}))
        (site.parent / "data.jsonl").write_text("\n".join(lines))
        site.write_text(site.read_text().replace("benchmarks: [digits]", "data: data.jsonl"))
    data = {**OWN["data"], "label_names": ["a", "b"], "val_fraction": 0.1, "test_fraction": 0.2}  # type: ignore[dict-item]
    return {**OWN, "data": data}


def test_what_sites_deploy_is_said_to_be_there(
    grid: LoopbackGrid, experiment: Make, own: dict[str, object], tmp_path: Path
) -> None:
    """The server has no adapter, and no resuming makes one."""
    done = go(grid, experiment(engine=FAST, federation={"rounds": 1}, **own), tmp_path / "run")
    with pytest.raises(RunError, match="ran at sites, and what client client-00 deploys is at its own: there, name"):
        predict(done.path, "client-00", ["x.png"])


def test_a_site_of_as_many_records_as_no_noise_hides_is_left_out_of_a_private_run(
    grid: LoopbackGrid, experiment: Make, own: dict[str, object], tmp_path: Path
) -> None:
    """Whether it has them or says so; the others' run goes on, also when it is resumed."""
    pytest.importorskip("dp_accounting")

    def lie(reply: Message, node: int) -> Message:
        header, arrays = unpack(from_content(reply.content), "a reply")
        if node == 12 and header["kind"] == "hello":
            reply.content = to_content(pack({**header, "examples": [10**6, 1, 1]}, arrays))
        return reply

    grid.tamper = lie
    privacy = {"unit": "example", "delta": 1e-3, "noise_multiplier": 1.0}
    several = {"rounds": 2, "min_replies": 1}
    wanted = experiment(engine=FAST, limit=None, federation=several, privacy=privacy, **own)
    done = go(grid, wanted, tmp_path / "run")
    assert {row["client"] for row in failures(done.path)} == {"client-01"} and trained(grid) == {11}
    assert "0.001 is not below 1 / 1000000" in str(failures(done.path)[0]["reason"])
    (done.path / "report.html").unlink()
    (done.path / "method.json").unlink()
    assert go(grid, wanted, tmp_path / "run", resume=True).results["clients"]["client-00"]["updates"] == 2


def test_a_latecomers_examples_are_its_weight_once_it_has_come(
    grid: LoopbackGrid, experiment: Make, own: dict[str, object], sites: list[Path], tmp_path: Path
) -> None:
    """Unknown while it is away, and in the end as many as its site said. A resume accepts who came in between, and
    refuses a site whose data has changed since."""
    grid.online = {11}

    def come(reply: Message, node: int) -> Message:
        if of_train(reply, 1):
            grid.online.add(12)
        return reply

    grid.tamper = come
    wanted = experiment(engine=FAST, federation={"rounds": 2}, **own)
    done = go(grid, wanted, tmp_path / "run")
    said = json.loads((done.path / ".sites.json").read_text())["said"]
    assert said["client-01"]["examples"][0] > said["client-00"]["examples"][0] > 0
    rows = done.results["clients"]
    assert {client: row["train_examples"] for client, row in rows.items()} == {
        client: about["examples"][0] for client, about in said.items()
    }
    (done.path / "report.html").unlink()
    (done.path / "method.json").unlink()
    again = go(grid, wanted, tmp_path / "run", resume=True)
    assert again.results["clients"]["client-01"]["train_examples"] == said["client-01"]["examples"][0]
    (done.path / "report.html").unlink()
    (done.path / "method.json").unlink()
    lines = (sites[1].parent / "data.jsonl").read_text().splitlines()
    (sites[1].parent / "data.jsonl").write_text("\n".join(lines[:-1]))
    changed = go(grid, wanted, tmp_path / "run", resume=True)
    assert "its data is not what it was" in str(changed.results["failures"][-1]["reason"])


def test_data_that_changes_during_a_run_is_refused(
    grid: LoopbackGrid, experiment: Make, own: dict[str, object], sites: list[Path], tmp_path: Path
) -> None:
    """In another order other records would be held out, and some of them were trained on."""
    data = sites[1].parent / "data.jsonl"
    lines = data.read_text().splitlines()

    def turn(reply: Message, node: int) -> Message:
        if of_train(reply, 1) and node == 12:
            data.write_text("\n".join(reversed(lines)))
        return reply

    grid.tamper = turn
    done = go(grid, experiment(engine=FAST, federation={"rounds": 2}, **own), tmp_path / "run")
    refused = [row for row in done.results["failures"] if "its data is not what it was" in str(row["reason"])]
    assert {row["client"] for row in refused} == {"client-01"} and 2 in {row["round"] for row in refused}
    assert [done.results["clients"][client]["updates"] for client in ("client-00", "client-01")] == [2, 1]


def test_a_node_that_hangs_over_hello_holds_nobody_up(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 10 never answers, and the server says so; client-01 comes after it was asked, and is asked all the same."""
    caplog.set_level(logging.INFO, "befit")
    grid.sites[10] = write_site(tmp_path / "slow", "client-07")
    grid.online = {10, 11}

    def hang(reply: Message, node: int) -> Message | None:
        grid.online.add(12)
        return None if node == 10 else reply

    grid.tamper = hang
    done = go(grid, experiment(federation={"rounds": 1, "min_replies": 2}), tmp_path / "run")
    assert trained(grid) == {11, 12} and not failures(done.path)
    assert [node for node, kind in grid.sent if kind == "query"].count(10) == 1
    (line,) = [line for line in caplog.messages if line.startswith("1 of 2 sites are here")]
    assert "; missing: client-01; connected, but no answer yet: 1 that has not said who it is (waiting" in line


def test_a_site_that_is_connected_and_slow_is_not_called_missing() -> None:
    """Its key tells who it is before it has said anything; what to do stands in the error too."""
    members = Members(["north", "south"], needed=2, keys={"north": "key"}, silent={11: "north"})
    slow = "missing: south; connected, but no answer yet: north"
    assert members.attendance_text() == f"0 of 2 sites are here; {slow}"
    assert members.why("north") == ("late", "the site is connected and has not answered yet")
    assert members.why("south") == ("offline", "the site has not come yet")
    with pytest.raises(
        NotEnoughReplies, match=r"after 5 s .* 0 of 2 sites have come.*; missing: south; connected, but.*slow site"
    ):
        members.demand_enough(5)


def saying(client: str, data: str = "d") -> dict[str, str]:
    """What matters of an answer to hello."""
    return {"client": client, "data": data}


def test_who_says_that_it_is_nobody_of_the_run_is_left_alone_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    members = Members(["north"])
    for _ in range(2):
        assert not members.admit(11, "", saying("south"), {11})
    assert caplog.messages == ["node 11 is left alone: it says that it is south, which is no client of this run"]
    assert not members.nodes and not members.met and not members.refused and members.missing == ["north"]


def test_without_keys_a_client_stays_at_its_node_and_in_a_trial_moves_once_that_is_gone() -> None:
    for pinned, online, moves in ((True, {12}, False), (False, {11, 12}, False), (False, {12}, True)):
        members = Members(["north"], pinned=pinned)
        assert members.admit(11, "", saying("north"), {11})
        assert members.admit(12, "", saying("north"), online) is moves
        assert members.nodes == {"north": 12 if moves else 11} and not members.refused


def test_in_a_trial_a_client_that_has_moved_and_cannot_take_part_is_refused() -> None:
    """Left alone, it would be waited for until the time is over."""
    members = Members(["north"], pinned=False, nodes={"north": 11}, introductions={"north": saying("north")})
    assert not members.admit(12, "", saying("north", "other"), {12})
    assert members.refused["north"].startswith("its data is not what it was") and not members.nodes
    with pytest.raises(ConfigError, match="client north: its data is not what it was"):
        members.demand_enough(1)


def test_with_its_key_a_client_may_come_from_anywhere() -> None:
    members = Members(["north"], keys={"north": "key"})
    assert members.admit(11, "north", saying("north"), {11}) and members.admit(12, "north", saying("north"), {11, 12})
    assert members.nodes == {"north": 12}
    assert not members.admit(12, "north", saying("south"), {12})
    assert members.refused["north"].startswith("it says that it is south, but its key is north's") and not members.met


def test_a_client_whose_data_has_changed_is_refused_until_it_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    members = Members(["north", "south"])
    assert members.admit(11, "", saying("north"), {11})
    for _ in range(2):
        assert not members.admit(11, "", saying("north", "other"), {11})
    (line,) = caplog.messages
    assert line.startswith("client north does not take part: its data is not what it was")
    assert members.missing == ["south"] and not members.met and members.why("north")[0] == "left out"
    assert members.admit(11, "", saying("north"), {11})
    assert members.missing == ["south"] and members.met == {"north"} and not members.refused


def test_only_a_client_itself_can_refuse_in_its_name() -> None:
    members = Members(["north"], nodes={"north": 11})
    for node, client in ((12, "north"), (12, "south"), (12, "")):
        assert not members.refuse(node, client, "no")
    assert not members.refused and not members.broken
    with pytest.raises(NotEnoughReplies, match="node 12 was left alone: it says: no"):
        members.demand_enough(1)
    members.refuse(11, "north", "no")
    assert members.refused == {"north": "no"}
    with pytest.raises(ConfigError, match="client north: no"):
        members.demand_enough(1)
    members = Members(["north"], keys={"north": "key"}, nodes={"north": 11})
    members.refuse(12, "north", "no")  # whose key it has
    assert members.refused == {"north": "no"}


def test_a_trial_ends_with_what_is_wrong_at_a_node_that_cannot_say_who_it_is() -> None:
    members = Members(["north"], needed=0, pinned=False)
    members.refuse(11, "south", "of another run")
    members.demand_enough(1)
    members.refuse(12, "", "its file is broken")
    with pytest.raises(ConfigError, match="node 12: its file is broken"):
        members.demand_enough(1)


def test_what_becomes_known_later_counts_against_those_that_are_here() -> None:
    problems = {"north": "", "south": "another model"}
    members = Members(["north", "south"], lambda client, said: problems[client], needed=1)
    assert not members.admit(12, "", saying("south"), {12}) and members.refused == {"south": "another model"}
    problems["south"] = ""
    for node, client in ((11, "north"), (12, "south")):
        assert members.admit(node, "", saying(client), {11, 12})
    members.check_again(1)
    problems["south"] = "another model"
    members.check_again(1)
    assert members.met == {"north"} and members.refused == {"south": "another model"}
    problems["north"] = "another model"
    with pytest.raises(ConfigError, match="client north: another model"):
        members.check_again(1)


def test_a_round_waits_for_enough_sites_to_be_connected(grid: LoopbackGrid, experiment: Make, tmp_path: Path) -> None:
    """Both are away when round 2 begins, as after a restart of the SuperLink; they come back, and nothing is lost."""
    nodes, asked = grid.get_node_ids, 0

    def leave(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            grid.online.clear()
        return reply

    def back() -> list[int]:
        nonlocal asked
        asked += not grid.online
        if asked == 5:
            grid.online.update({11, 12})
        return nodes()

    grid.tamper, grid.get_node_ids = leave, back  # type: ignore[method-assign]
    done = go(grid, experiment(federation={"rounds": 3, "min_replies": 2}), tmp_path / "run")
    assert asked >= 5 and not failures(done.path)


def test_everybody_sees_who_has_come_and_who_is_missing(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit in each line is that of the wait it is about."""
    grid.online = {11}
    caplog.set_level(logging.INFO, "befit")
    wanted = experiment(engine={"kind": "flower", "wait_s": 0.05, "deadline_s": 77}, federation={"rounds": 1})
    done = run_over(grid, wanted, tmp_path / "run", observer=RunLog(), poll_s=0.01)
    assert "1 of 2 sites are here; missing: client-01 (waiting up to 0.05 s, engine.wait_s)" in caplog.messages
    (round_,) = [line for line in caplog.messages if "round 1 of 1" in line]
    assert round_.startswith("fedit, federate round 1 of 1: 1 of 2 clients replied, without client-01, loss ")
    assert any(line.startswith("fedit, federate round 1: mean accuracy") for line in caplog.messages)
    assert not [line for line in caplog.messages if "deadline_s" in line]
    table = lined_up(client_table(done.results)).splitlines()
    assert [line.split()[0] for line in table if line.startswith("client-")] == ["client-00", "client-01"]


def test_who_has_no_score_is_told_with_the_score_and_not_with_the_next_round(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "befit")
    told, at = RunLog(), {"run": "fedit", "stage": "federate", "round": 1}
    told({"kind": "failure", **at, "client": "islet", "scoring": True})
    told({"kind": "score", **at, "metric": "accuracy", "mean": 0.5})
    amounts = {"rounds": 2, "clients": 3, "failed": 0, "left_out": [], "loss": None, "bytes_up": 0, "bytes_down": 0}
    told({"kind": "round", **at, **amounts})
    assert caplog.messages[0].endswith("mean accuracy 50.0%, without islet") and "without" not in caplog.messages[1]


def test_scores_that_are_refused_are_told_apart_from_replies_that_were_left_out(
    experiment: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody trains and counts, in two runs, and nobody tells a score: no line and no page says otherwise."""
    paths = [write_site(tmp_path / f"site-{number}", f"client-0{number}", "scores: none\n") for number in range(2)]
    caplog.set_level(logging.INFO, "befit")
    wanted = experiment(baselines=["local"], evaluate={"every": 1}, federation={"rounds": 2})
    done = run_over(LoopbackGrid(paths), wanted, tmp_path / "run", observer=RunLog(), poll_s=0.01)
    tell_results(done.path, done.results)
    rounds = [line for line in caplog.messages if "clients replied" in line]
    assert len(rounds) == 4 and all("2 of 2 clients replied" in line and "without" not in line for line in rounds)
    assert "8 scores missing; the report says which and why" in caplog.messages
    assert not [line for line in caplog.messages if "left out" in line]
    assert [failure["scoring"] for failure in done.results["failures"]] == 8 * [True]
    assert all(line["scoring"] for line in failures(done.path))
    report = (done.path / "report.md").read_text()
    assert "8 scores missing; each is listed in the report." in report and "federate, score" in report
    assert "its training counts as ever" in report
    assert "left out of that round" not in report and "on the way" not in report


def test_a_reply_that_was_left_out_is_no_score_that_is_missing(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "befit")
    grid.tamper = lambda reply, node: None if node == 12 and grid.sent[-1][1] == "train" else reply
    wanted = experiment(engine={"kind": "flower", "deadline_s": 0.05}, federation={"rounds": 1})
    done = run_over(grid, wanted, tmp_path / "run", observer=RunLog(), poll_s=0.01)
    tell_results(done.path, done.results)
    assert "1 reply was left out; the report says which and why" in caplog.messages
    report = (done.path / "report.md").read_text()
    assert "left out of that round" in report and "its training counts" not in report and "scores missing" not in report


def test_the_server_says_whom_a_rule_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "befit")
    guarded = {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "method": {"name": "fedit", "rank": 2},
        "baselines": [],
        "train": {"max_steps": 1},
        "federation": {"rounds": 1},
        "guard": {"rule": "multi-krum", "attackers": 1},
        "report": {"plots": False},
    }
    run(guarded, out=tmp_path / "run", observer=RunLog())
    (line,) = [line for line in caplog.messages if "federate round 1 of 1" in line]
    assert re.search(r"3 of 3 clients replied, client-0[012] left out by guard\.rule, loss", line)


def test_a_run_that_ends_with_an_error_says_so_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Flower logs what an app raises with its traceback; ours is in a file instead."""
    with pytest.raises(Ended) as ended, told_in_a_line(tmp_path / "run"):
        raise NotEnoughReplies("2 of 3\nsites have come")
    try:
        raise ended.value
    except Ended:
        logging.getLogger("flwr").error("ServerApp raised an exception", exc_info=True)
    assert "the run has ended: 2 of 3 sites have come" in caplog.text and "Traceback" not in caplog.text
    assert "NotEnoughReplies" in (tmp_path / "run" / ".traceback.txt").read_text()


def test_every_message_has_a_name_that_nobody_can_guess() -> None:
    """Two of the same frame differ: a site that knows a frame cannot name another site's message to reply to it."""
    assert to_content(b"frame").object_id != to_content(b"frame").object_id
    assert from_content(to_content(b"frame")) == b"frame"


def app_of(engine: dict[str, object], folder: Path, **options: bool) -> Experiment:
    values = {"benchmark": {"name": "digits", "clients": 2}, "method": "fedit", "baselines": []}
    write_app(load_experiment({**values, "engine": {"kind": "flower", **engine}}), folder, folder / "run", **options)
    return load_experiment(folder / "befit_app" / "experiment.yaml")


def test_an_app_holds_the_keys_themselves(keys: dict[str, str], tmp_path: Path) -> None:
    held = app_of({"keys": keys}, tmp_path / "app").engine.keys
    assert held == {client: public_key(place) for client, place in keys.items()}
    assert all(key.startswith("ecdsa-sha2-nistp384 ") for key in held.values())
    assert app_of({"keys": keys}, tmp_path / "simulated", simulation=True).engine.keys == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda keys: keys.pop("client-01"), "has none for client-01"),
        (lambda keys: keys.update(north=keys["client-00"]), "north is no client of this run"),
        (lambda keys: keys.update({"client-01": keys["client-00"]}), "client-01 has the key of client-00"),
        (lambda keys: keys.update({"client-01": "/none"}), "/none: No such file"),
        (lambda keys: keys.update({"client-01": "ecdsa-sha2-nistp384 AAAA"}), "is no public key"),
    ],
)
def test_keys_that_leave_anything_open_are_refused(
    change: Callable[[dict[str, str]], object], problem: str, keys: dict[str, str], tmp_path: Path
) -> None:
    change(keys)
    with pytest.raises(ConfigError, match=problem):
        app_of({"keys": keys}, tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_keys_need_node_authentication(keys: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.keys: have no effect without node authentication"):
        app_of({"keys": keys}, tmp_path / "app", insecure=True)


def test_a_model_that_only_sites_know_is_named_before_anything_is_written(tmp_path: Path) -> None:
    """Sites may call a model as they like; the server has to find it under the same name."""
    values = {"benchmark": {"name": "digits", "clients": 2}, "method": "fedit", "model": {"id": "package:none/MiniLM"}}
    experiment = load_experiment({**values, "engine": {"kind": "flower"}})
    with pytest.raises(ModelError, match="package:none/MiniLM") as refused:
        write_app(experiment, tmp_path / "app", tmp_path / "run")
    assert "\n" not in str(refused.value) and not (tmp_path / "app").exists()
