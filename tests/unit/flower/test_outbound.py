"""Everything that leaves a site is in its list, and the server's list and that of a local run say it in its words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from befit.config.experiment import Experiment
from befit.core.values import LEFT_OUT, NO_REPLY, Cost, Failure
from befit.flower.frame import from_content, to_content, unpack
from befit.flower.link import _WORDS
from befit.runs.outbound import _MOST_NUMBERS, Outbound
from befit.runs.runner import run
from tests.security.replies import hostile
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.states import site_folder
from tests.unit.flower.test_failures import go, of_train

Make = Callable[..., Experiment]
Row = dict[str, Any]
ECHOED = {"protocol", "run", "label", "at", "client", "request", "kind"}  # the server's own words, and who answers


def rows_of(path: Path, client: str) -> list[Row]:
    return json.loads((path / "outbound.json").read_text())[client]


def site_rows(site: Path, label: str) -> list[Row]:
    """What a site lists of one method of its only run: in the folders of the run and of the method."""
    (folder,) = (site.parent / "state" / "runs").iterdir()
    (client,) = json.loads((folder / "outbound.json").read_text())
    return [row for path in (folder, folder / label) for row in rows_of(path, client)]


def told(rows: list[Row], *but: str) -> set[str]:
    return {json.dumps({key: row[key] for key in row if key not in but}, sort_keys=True) for row in rows}


def leaves(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, key)
    else:
        yield name


def test_every_value_of_every_reply_is_on_the_list_of_its_site(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """Of hello, training, scores, the export and a failure: the names of all numbers, texts and arrays."""
    sent: dict[str, set[str]] = {}

    def note(reply: Message, node: int) -> Message:
        header, arrays = unpack(from_content(reply.content), "a reply")
        if node == 12:
            said = {key: value for key, value in header.items() if key not in ECHOED}
            sent.setdefault(header["kind"], set()).update(leaves(said, ""), arrays)
            if of_train(reply, 1):
                break_memory(sites[1])
        return reply

    grid.tamper = note
    go(grid, experiment("ditto"), tmp_path / "run")
    assert {"hello", "update", "failure"} <= sent.keys()
    listed = {row["name"] for row in site_rows(sites[1], "ditto")}
    for names in sent.values():
        assert names <= listed
    assert {
        "seconds",
        "cpu_seconds",
        "peak_memory_mib",
        "reason",
        "error",
        "examples",
        "loss",
        "steps",
        "data",
    } <= listed


@pytest.mark.parametrize("margin", [0.0, 0.9])
def test_a_sites_choice_leaves_it_and_the_losses_that_decide_it_do_not(
    margin: float, grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    said: list[dict[str, Any]] = []

    def note(reply: Message, node: int) -> Message:
        header, _ = unpack(from_content(reply.content), "a reply")
        said.append({key: value for key, value in header.items() if key not in ECHOED - {"kind"}})
        return reply

    grid.tamper = note
    best = {
        "baselines": [{"name": "local", "rounds": 1}],
        "federation": {"rounds": 4, "deploy": "best", "deploy_margin": margin},
    }
    remote = go(grid, experiment("fedit", **best), tmp_path / "run")
    results = json.loads((remote / "results.json").read_text())["clients"]
    local = run(experiment("fedit", {"store": "disk"}, **best), out=tmp_path / "local").results["clients"]
    assert {client: row["deployed"] for client, row in results.items()} == {
        client: row["deployed"] for client, row in local.items()
    }
    assert {client: row["accuracy"] for client, row in results.items()} == {
        client: row["accuracy"] for client, row in local.items()
    }
    assert {row["deployed"] for row in results.values()} == {"local" if margin else "fedit"}
    exported = [set(header) for header in said if header["kind"] == "exported"]
    assert exported == [{"kind"}, {"kind"}, {"kind", "deployed"}, {"kind", "deployed"}]
    for client, site in zip(("client-00", "client-01"), sites, strict=True):
        chosen = json.loads((site_folder(remote, site, "fedit").parent / "chosen.json").read_text())
        assert chosen == {"run": results[client]["deployed"], "held_out": local[client]["held_out"], "margin": margin}
        assert results[client]["held_out"] == {}
        assert ("export", "deployed") in {(row["stage"], row["name"]) for row in rows_of(remote, client)}


def break_memory(site: Path) -> None:
    for path in (site.parent / "state").rglob("memory.*"):
        path.write_bytes(b"damaged")


def test_site_server_and_local_run_list_the_same_in_the_same_words(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    """Bytes and counts too; a local run writes its adapters itself, so that nobody says that it did."""
    remote = go(grid, experiment("fedsa"), tmp_path / "run")
    local = run(experiment("fedsa", {"store": "disk"}), out=tmp_path / "local").path
    for client, site in zip(("client-00", "client-01"), sites, strict=True):
        ours = rows_of(remote, client)
        assert told(ours) == told(site_rows(site, "fedsa"))
        assert told([row for row in ours if row["stage"] != "export"]) == told(rows_of(local, client))
        stages = {row["stage"] for row in ours}
        assert {"hello", "federate report", "federate cost", "score test", "score test cost", "export"} <= stages


def test_a_failure_is_listed_in_the_same_words_at_site_and_server(
    grid: LoopbackGrid, sites: list[Path], experiment: Make, tmp_path: Path
) -> None:
    def damage(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            break_memory(sites[1])
        return reply

    grid.tamper = damage
    remote = go(grid, experiment("ditto"), tmp_path / "run")
    ours, theirs = rows_of(remote, "client-01"), site_rows(sites[1], "ditto")
    assert told(ours) == told(theirs)
    assert {row["name"] for row in ours if row["stage"] == "federate failure"} == {"error", "reason"}


def test_of_a_refused_reply_the_server_lists_its_size_alone(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    sizes = []

    def lie(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            frame = hostile("train: an array more", from_content(reply.content))
            sizes.append(len(frame))
            reply.content = to_content(frame)
        return reply

    grid.tamper = lie
    done = go(grid, experiment(federation={"rounds": 1}), tmp_path / "run")
    rows = [row for row in rows_of(done, "client-01") if row["stage"].startswith("federate")]
    assert [(row["stage"], row["name"], row["dtype"], row["count"]) for row in rows] == [
        ("federate failure", "refused reply", "bytes", 1)
    ]
    assert 0 < rows[0]["bytes"] <= sizes[0]


def test_nothing_is_listed_where_no_reply_came() -> None:
    assert _WORDS.keys() | {LEFT_OUT} == NO_REPLY
    outbound = Outbound()
    for kind in NO_REPLY:
        outbound.note(Failure("a", "federate", 1, kind, "", cost=Cost(seconds=1.0)), "federate", wire=None)  # type: ignore[arg-type]
    assert outbound.as_dict() == {}


def test_times_are_listed_with_the_same_bytes_whatever_they_are() -> None:
    """Equal runs have equal lists, and no two of them take equally long."""
    lists = []
    for seconds in (0.1, 123.456789012345678):
        outbound = Outbound()
        failure = Failure("a", "federate", 1, "OSError", "gone", cost=Cost(seconds=seconds, peak_memory_mib=seconds))
        outbound.note(failure, "federate", wire=None)  # type: ignore[arg-type]
        lists.append(outbound.as_dict())
    assert lists[0] == lists[1] and {row["bytes"] for row in lists[0]["a"] if row["stage"] == "federate cost"} == {24}


def test_a_client_with_a_new_name_in_every_round_has_a_list_that_ends(tmp_path: Path) -> None:
    outbound = Outbound()
    for number in range(_MOST_NUMBERS + 500):
        outbound.numbers("a", "federate report", {f"n{number}": 1.0})
    rows = outbound.as_dict()["a"]
    assert len(rows) == _MOST_NUMBERS + 1
    assert [row["count"] for row in rows if row["name"] == "further numbers"] == [500]
    assert Outbound(json.loads(json.dumps(outbound.saved()))).as_dict() == outbound.as_dict()
