"""Secure sums over Flower: the local run's numbers, and what the server gets to see of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, NotEnoughReplies
from befit.core.storage import read_sealed
from befit.flower.agreement import check_sums
from befit.flower.frame import from_content, to_content, unpack
from befit.flower.keys import write_site_keys
from befit.flower.server_app import run_over
from befit.flower.service import SiteService
from befit.flower.site_file import load_site
from befit.runs.runner import run
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import same, server_memory

SUMS: dict[str, Any] = {
    "benchmark": {"name": "digits", "clients": 4},
    "federation": {"rounds": 2, "secure_sums": {"clip": 20.0}},
}


class WarmGrid(LoopbackGrid):
    """With a resident service at every site, which spares loading the model for every message."""

    def __init__(self, sites: list[Path]) -> None:
        super().__init__(sites)
        self.services = {node: SiteService(load_site(path)) for node, path in self.sites.items()}

    def answer(self, message: Message, node: int) -> Message:
        return Message(to_content(self.services[node].answer(from_content(message.content))), reply_to=message)


def grid_of(folder: Path, more: str = "") -> WarmGrid:
    more = f"limits: {{min_records: 1}}\n{more}"
    return WarmGrid([write_site(folder / f"site-{n}", f"client-0{n}", more) for n in range(4)])


def test_a_run_at_sites_is_the_local_run_and_no_frame_has_an_update(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Everything that the server gets, read as it comes. Masked numbers are bytes that nothing makes shorter; the
    plain ones, in steps of 2^-23 of the clip, become less than half as long."""
    four = grid_of(tmp_path)
    frames: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []

    def tamper(reply: Any, node: int) -> Any:
        frames.append(unpack(from_content(reply.content), "a reply"))
        return reply

    four.tamper = tamper
    remote = run_over(four, experiment("fedit", **SUMS), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment("fedit", {"store": "disk"}, **SUMS), out=tmp_path / "local").path
    assert same(server_memory(remote), server_memory(local))
    sent = [(header, name, array) for header, arrays in frames for name, array in arrays.items()]
    assert {name for _, name, _ in sent} == {"keys", "boxes", "hidden", "shares"}
    assert {array.dtype for _, _, array in sent} == {torch.uint8}
    hidden = [bytes(array.numpy()) for _, name, array in sent if name == "hidden"]
    assert len(hidden) == 8 and all(len(zlib.compress(each, 9)) > len(each) for each in hidden)
    lists = [json.loads((path / "outbound.json").read_text()) for path in (remote, local)]
    rows = [
        [row for row in each["client-00"] if row["stage"] == "federate"] for each in (*lists, _listed(four, remote))
    ]
    assert rows[0] == rows[1] == rows[2] and {row["name"] for row in rows[0]} >= {"boxes", "hidden", "keys", "shares"}


def _listed(grid: LoopbackGrid, remote: Path) -> dict[str, Any]:
    name = json.loads((remote / ".sites.json").read_text())["run"]
    site = next(path for path in grid.sites.values() if path.parent.name == "site-0")
    return json.loads((site.parent / "state" / "runs" / name / "fedit" / "outbound.json").read_text())


def test_a_site_that_is_lost_in_any_step_costs_its_update_and_nothing_else(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """One round for each step. Who is lost in the last step has sent its update already."""
    four = grid_of(tmp_path)
    steps = ["keys", "boxes", "hidden", "shares"]

    def tamper(reply: Any, node: int) -> Any:
        header, arrays = unpack(from_content(reply.content), "a reply")
        lose = header["client"] == "client-02" and arrays and steps[header["at"]["round"] - 1] in arrays
        return None if lose else reply

    four.tamper = tamper
    values = {**SUMS, "federation": {**SUMS["federation"], "rounds": 4}}
    engine = {"kind": "flower", "deadline_s": 0.2}
    done = run_over(four, experiment("fedit", engine, **values), tmp_path / "remote", poll_s=0.01)
    failures = [(each["client"], each["round"], each["kind"]) for each in done.results["failures"]]
    assert failures == [("client-02", number, "late") for number in (1, 2, 3, 4)]
    lines = [json.loads(line) for line in (done.path / "metrics.jsonl").read_text().splitlines()]
    trained = {(line["client"], line["round"]) for line in lines if line["kind"] == "train"}
    assert trained == {(f"client-0{n}", r) for n in range(4) for r in (1, 2, 3, 4) if n != 2 or r == 4}


def test_a_run_of_sums_begins_with_three_sites_or_says_who_refuses(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """min_replies would let two begin, which have no sum; nobody trains in vain, the baseline neither."""
    grid = grid_of(tmp_path)
    for number in (1, 3):
        path = tmp_path / f"site-{number}" / "site.yaml"
        path.write_text(path.read_text() + "methods: [potara]\n")
    grid = WarmGrid(list(grid.sites.values()))
    made = experiment("fedit", {"kind": "flower", "wait_s": 0.2}, **SUMS, baselines=["local"])
    with pytest.raises(ConfigError, match=r"2 sites are left, 3 are needed \(.*3 for any secure sum\)") as error:
        run_over(grid, made, tmp_path / "run", poll_s=0.01)
    assert "client client-01: " in str(error.value) and {kind for _, kind in grid.sent} == {"query"}


def test_a_site_that_is_lost_when_the_sum_is_uncovered_is_named_as_the_reason(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    grid = grid_of(tmp_path)

    def tamper(reply: Any, node: int) -> Any:
        header = unpack(from_content(reply.content), "a reply")[0]
        return None if header["kind"] == "step" and grid.trained and node != min(grid.sites) else reply

    def answer(message: Message, node: int) -> Message:
        reply = WarmGrid.answer(grid, message, node)
        grid.trained |= unpack(from_content(reply.content), "a reply")[0]["kind"] == "update"
        return reply

    grid.trained, grid.tamper, grid.answer = False, tamper, answer  # type: ignore[attr-defined,method-assign]
    made = experiment("fedit", {"kind": "flower", "deadline_s": 0.2}, **SUMS)
    with pytest.raises(NotEnoughReplies, match=r"stage federate, round 1: secure sums: .*; client-0\d: late: no reply"):
        run_over(grid, made, tmp_path / "remote", poll_s=0.01)


def test_a_site_can_demand_secure_sums(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    four = grid_of(tmp_path, "require_secure_sums: true\n")
    open_run = {**SUMS, "federation": {"rounds": 1}}
    with pytest.raises(ConfigError, match=r"the site's file demands secure sums \(require_secure_sums\)"):
        run_over(four, experiment("fedit", **open_run), tmp_path / "open", poll_s=0.01)
    run_over(four, experiment("local", **open_run), tmp_path / "alone", poll_s=0.01)  # nothing leaves


def test_sites_that_know_each_others_keys_believe_no_server_that_poses_as_one(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """The same sum with signatures; with the key of another in a site's file, that site has no part in any sum."""
    pairs = [write_site_keys(tmp_path / f"keys-{n}") for n in range(5)]
    lines = [pub.read_text().strip() for _, pub in pairs]

    def trusting(folder: Path, of: dict[int, int]) -> WarmGrid:
        """`of`: whose key client-03 takes for each site's."""
        paths = list[Path]()
        for n in range(4):
            known = {f"client-0{k}": lines[of.get(k, k) if n == 3 else k] for k in range(4) if k != n}
            more = f"limits: {{min_records: 1}}\nkey: {pairs[n][0]}\npeers: {json.dumps(known)}\n"
            paths.append(write_site(folder / f"site-{n}", f"client-0{n}", more))
        return WarmGrid(paths)

    one = {**SUMS, "federation": {**SUMS["federation"], "rounds": 1}}
    signed = trusting(tmp_path / "signed", {})
    done = run_over(signed, experiment("fedit", **one), tmp_path / "a", poll_s=0.01)
    plain = run_over(grid_of(tmp_path / "plain"), experiment("fedit", **one), tmp_path / "b", poll_s=0.01)
    assert same(server_memory(done.path), server_memory(plain.path)) and not done.results["failures"]
    wrong = run_over(trusting(tmp_path / "wrong", {0: 4}), experiment("fedit", **one), tmp_path / "c", poll_s=0.01)
    (failure,) = wrong.results["failures"]
    assert failure["client"] == "client-03" and "keys of client-00 that client-00 did not sign" in failure["reason"]


def test_keys_of_sites_that_are_none_are_refused(tmp_path: Path) -> None:
    key, pub = write_site_keys(tmp_path)
    for more, text in (
        (f"key: {key}\n", "peers: and key belong together"),
        (f"key: {pub}\npeers: {{b: {pub}}}\n", "site.pub is no site.key"),
        (f"key: {key}\npeers: {{b: {key}}}\n", "is no public key"),
    ):
        with pytest.raises(ConfigError, match=text):
            SiteService(load_site(write_site(tmp_path, "a", more)))


class Stop(BaseException):
    """Ends a run in the middle, as a crash does."""


def test_a_round_that_was_uncovered_is_done_again_over_the_same_sites_and_over_no_others(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """The server ends after the sum of the first round is there, and before it is kept."""
    grid, out = grid_of(tmp_path), tmp_path / "remote"

    def tamper(reply: Any, node: int) -> Any:
        says_hello = unpack(from_content(reply.content), "a reply")[0]["kind"] == "hello"
        return reply if node != silent or says_hello else None

    grid.tamper = tamper
    silent, one = 0, {**SUMS, "federation": {**SUMS["federation"], "rounds": 1}}
    made = experiment("fedit", {"kind": "flower", "deadline_s": 0.2}, **one)

    def crash(event: dict[str, Any]) -> None:
        if event["kind"] == "round":
            raise Stop

    with pytest.raises(Stop):
        run_over(grid, made, out, observer=crash, poll_s=0.01)
    silent = min(grid.sites)
    with pytest.raises(NotEnoughReplies, match="0 of 3 clients gave a share"):
        run_over(grid, made, out, resume=True, poll_s=0.01)
    silent = 0
    again = run_over(grid, made, out, resume=True, poll_s=0.01)
    whole = run_over(grid_of(tmp_path / "whole"), made, tmp_path / "b", poll_s=0.01)
    assert same(server_memory(again.path), server_memory(whole.path))


def test_a_site_without_room_for_a_round_says_so_before_others_are_charged_for_it(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """The first round is done again after a crash, so three sites have nothing left for the second one; with epsilon
    alone the noise is for exactly two. The fourth had not trained yet: it could, and for no sum."""
    pytest.importorskip("dp_accounting")
    grid, out = grid_of(tmp_path), tmp_path / "remote"
    privacy = {"unit": "example", "epsilon": 8, "delta": 1e-3}
    made = experiment("fedit", privacy=privacy, **SUMS)
    trained: list[int] = []

    def tamper(reply: Any, node: int) -> Any:
        header, _ = unpack(from_content(reply.content), "a reply")
        if header["kind"] == "update":
            trained.append(node)
            if len(trained) == 3:
                raise Stop
        return reply

    grid.tamper = tamper
    with pytest.raises(Stop):
        run_over(grid, made, out, poll_s=0.01)
    match = (
        r"round 2: secure sums: 1 of 4 clients sent keys, and 3 are needed for any sum; client-0\d: .*privacy\.epsilon"
    )
    with pytest.raises(NotEnoughReplies, match=match):
        run_over(grid, made, out, resume=True, poll_s=0.01)
    assert sorted(trained.count(node) for node in grid.sites) == [1, 2, 2, 2]
    counts = [
        len(rows)
        for n in range(4)
        for rows in read_sealed(tmp_path / f"site-{n}" / "state" / "privacy.json")["runs"].values()
    ]
    assert sorted(counts) == [1, 2, 2, 2]


def test_too_few_updates_for_a_sum_are_told_by_what_the_sum_needs(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    grid = grid_of(tmp_path)

    def tamper(reply: Any, node: int) -> Any:
        is_update = unpack(from_content(reply.content), "a reply")[0]["kind"] == "update"
        return None if is_update and node != min(grid.sites) else reply

    grid.tamper = tamper
    made = experiment("fedit", {"kind": "flower", "deadline_s": 0.2}, **SUMS)
    match = r"1 of 4 .* usable reply, 3 are needed \(federation\.secure_sums\.threshold\)"
    with pytest.raises(NotEnoughReplies, match=match):
        run_over(grid, made, tmp_path / "remote", poll_s=0.01)


def test_methods_of_one_run_that_are_the_same_are_refused(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Sums of other sites under each of two labels would differ by one site's update."""
    other, block = experiment("ditto", **SUMS), {"name": "fedit"}
    with pytest.raises(ConfigError, match="fedit and again"):
        check_sums(other, {"fedit": block, "again": dict(block)})
    for alike in ({"name": "fedit", "rank": 8}, {"name": "fedit", "alpha": 16}):  # both are the defaults
        with pytest.raises(ConfigError, match="fedit and again"):
            check_sums(other, {"fedit": block, "again": alike})
        with pytest.raises(ConfigError, match="fedit and again"):
            check_sums(other, {"fedit": {"name": "lora", "base": block}, "again": {"name": "lora", "base": alike}})
    for name, at_server in (
        ("fedavgm", {"server_lr": 0.5, "momentum": 0.5, "variant": "reference"}),
        ("fedadam", {"server_lr": 0.5, "beta1": 0.5, "beta2": 0.5, "tau": 0.5}),
        ("scaffold", {"server_lr": 0.5}),
        ("fdlora", {"server_lr": 0.5, "momentum": 0.1}),
        ("relora", {"merge": {"scale": 0.5}}),
    ):  # in the first round, and where the server wants it in every one
        with pytest.raises(ConfigError, match="one and another"):
            check_sums(other, {"one": {"name": name}, "another": {"name": name, **at_server}})
        with pytest.raises(ConfigError, match="one and another"):
            inner = {"name": "lora", "base": {"name": name}}
            check_sums(other, {"one": inner, "another": inner | {"base": {"name": name, **at_server}}})
    check_sums(other, {"fedit": block, "ditto": {"name": "ditto"}})
    check_sums(experiment("fedit"), {"fedit": block, "again": block})
