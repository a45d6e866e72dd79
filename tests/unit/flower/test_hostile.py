"""What a malicious site or server may send: each is refused with a reason, and nobody dies of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.values import State
from befit.flower import replies
from befit.flower.engine import Lost, ask, checked
from befit.flower.frame import digest, from_content, pack, to_content, unpack
from befit.flower.replies import COLUMNS
from befit.flower.service import SiteService
from befit.flower.site_file import SiteFile
from befit.runs.runner import run
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.test_consent import SITE, begin, request_of
from tests.unit.flower.test_failures import FAST, failures, go, of_train

Make = Callable[..., Experiment]
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000  # valid JSON, deeper than Python's reader goes


def lying(kind: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Message, int], Message]:
    """Node 12 changes what it says in its replies of one kind."""

    def lie(reply: Message, node: int) -> Message:
        header, arrays = unpack(from_content(reply.content), "a reply")
        if node == 12 and header["kind"] == kind:
            change(header)
            reply.content = to_content(pack(header, arrays))
        return reply

    return lie


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("update", lambda said: said["report"].update(loss=10**400), "it has to be a number"),
        ("update", lambda said: said.update(kind="failure", error="E", reason="\x1b[2J" + "x" * 10**6), "[2Jxxx"),
        ("score", lambda said: said["metrics"].update(updates=10**6), "'updates', which is no metric's name"),
    ],
)
def test_a_run_goes_on_without_a_site_that_lies_beside_its_arrays(
    kind: str, change: Callable[..., object], reason: str, grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    """Its results are whole, and nothing that could write to a terminal is in its logs."""
    grid.tamper = lying(kind, change)
    done = go(grid, experiment(federation={"rounds": 1}), tmp_path / "run")
    (failure,) = failures(done)
    assert failure["client"] == "client-01" and reason in str(failure["reason"]) and "\x1b" not in str(failure)
    assert len(str(failure["reason"])) < 600
    results = json.loads((done / "results.json").read_text())
    assert results["clients"]["client-00"]["accuracy"] is not None


TRUE = {
    "client": "a",
    "backbone": "b",
    "data": "d",
    "version": "1",
    "examples": [3, 0, 1],
    "report": {"loss": 1.0, "steps": 2},
    "scalars": {"rank": 8, "names": ["x"]},
    "metrics": {"accuracy": 0.5, "loss": 1},
    "cost": {"seconds": 1.5, "peak_memory_mib": 2, "cpu_seconds": 3},
}


def read(said: dict[str, Any]) -> None:
    """All that is ever read of a reply beside its arrays."""
    replies.hello(said)
    replies.scalars(said)
    replies.report(said)
    replies.metrics(said, "accuracy", 3)
    replies.cost(said, 0, 0)
    replies.examples({"examples": said["examples"][0]}, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"report": {f"{n}": 1 for n in range(201)}}, "201 names"),
        ({"report": {"x" * 101: 1.0}}, "name of the report is x"),
        ({"report": {"a\x1b[2J": 1.0}}, r"name of the report is a\[2J"),
        ({"report": {"loss": "low"}}, "its loss is low; it has to be a number"),
        ({"report": {"loss": 10**400}}, "its loss is 1000.*; it has to be a number"),
        ({"scalars": {"a": {"b": 1}}}, "number a is"),
        ({"scalars": {"a": [[1]]}}, "number a is"),
        ({"cost": {"seconds": float("nan"), "peak_memory_mib": 1}}, "its seconds is nan"),
        ({"cost": {"seconds": -1, "peak_memory_mib": 1}}, "its seconds is -1"),
        ({"cost": {"seconds": "long", "peak_memory_mib": 1}}, "its seconds is long"),
        ({"cost": {"seconds": 1, "peak_memory_mib": 1}}, "its cpu_seconds is None"),
        ({"cost": 3}, "its cost is malformed"),
        ({"metrics": {}}, "has no accuracy"),
        ({"metrics": {"accuracy": float("inf")}}, "its accuracy is inf"),
        ({"metrics": {"accuracy": 1, "adapter": 2}}, "'adapter', which is no metric's name"),
        ({"examples": [10**12, 1, 1]}, "its number of examples is 1000000000000"),
        ({"examples": [True, 1, 1]}, "its number of examples is True"),
        ({"examples": [float("inf"), 1, 1]}, "its number of examples is inf"),
        ({"examples": [-1, 1, 1]}, "its number of examples is -1"),
        ({"examples": "many"}, "numbers of train, val and test examples"),
        ({"backbone": ["x"]}, "its backbone is"),
        ({"common_model": ["x"]}, "its common_model is"),
        ({"version": "\x1b[2J"}, "its version is"),
        ({"client": "a" * 201}, "its client is"),
    ],
)
def test_what_a_site_says_is_read_only_where_it_is_well_formed(change: dict[str, Any], reason: str) -> None:
    read(TRUE)
    with pytest.raises(PayloadMismatch, match=reason):
        read({**TRUE, **change})


def test_no_column_of_the_results_can_be_a_metric(experiment: Make, tmp_path: Path) -> None:
    """A column that is added later has to be added to those names too."""
    done = run(experiment("fedit", {"store": "disk"}, baselines=["local"]), out=tmp_path / "run")
    row = done.results["clients"]["client-00"]
    assert row.keys() - {"accuracy", "loss"} <= COLUMNS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"examples": [10**12, 1, 1]}, "its number of examples is 1000000000000"),
        ({"examples": [9000, 1, 1]}, r"client-01 reports \[9000, 1, 1\] examples, where digits has"),
    ],
)
def test_a_site_is_believed_neither_a_weight_nor_a_name_that_it_cannot_have(
    change: dict[str, Any], reason: str, grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    grid.tamper = lying("hello", lambda said: said.update(change))
    wanted = experiment(engine=FAST, federation={"rounds": 1, "min_replies": 2})
    with pytest.raises(ConfigError, match=reason):
        go(grid, wanted, tmp_path / "run")


def deep() -> RecordDict:
    """A frame of the right form, whose header nests too deep for a reader that calls itself."""
    text = json.dumps({"__metadata__": {"header": DEEP}}).encode()
    return to_content(len(text).to_bytes(8, "little") + text)


def bare() -> RecordDict:
    return RecordDict({"frame": ConfigRecord({"frame": 1}), "proof": ConfigRecord({"sha256": 3})})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (deep(), "has no header"),
        (to_content(b"cos\nsystem\n(S'true'\ntR."), "not a readable safetensors file"),
        (bare(), "it is not befit's"),
        (to_content(b""), "not a readable safetensors file"),
        (to_content((2**62).to_bytes(8, "little") + b"{}"), "not a readable safetensors file"),
    ],
)
def test_bytes_that_are_no_reply_are_refused(content: RecordDict, reason: str) -> None:
    with pytest.raises(PayloadMismatch, match=reason):
        checked(from_content(content), {}, "update")


def test_a_run_goes_on_without_a_site_that_sends_bytes_of_no_sense_or_too_many(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    def send(reply: Message, node: int) -> Message:
        if node == 12 and of_train(reply, 1):
            reply.content = deep()
        elif node == 12 and of_train(reply, 2):
            header, arrays = unpack(from_content(reply.content), "a reply")
            reply.content = to_content(pack(header, {**arrays, "more": torch.zeros(2**19)}))
        return reply

    grid.tamper = send
    done = go(grid, experiment(), tmp_path / "run")
    first, second = failures(done)
    assert first["error"] == second["error"] == "refused"
    assert "has no header" in str(first["reason"]) and "the largest reply declared has" in str(second["reason"])


@pytest.mark.parametrize("kind", ["hello", "exported", "score"])
def test_answers_that_have_no_arrays_are_refused_with_some(
    kind: str, grid: LoopbackGrid, experiment: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be memory of the server, and bytes that no list has."""

    def send(reply: Message, node: int) -> Message:
        header, arrays = unpack(from_content(reply.content), "a reply")
        if node == 12 and header["kind"] == kind:
            reply.content = to_content(pack(header, {**arrays, "more": torch.zeros(2**19)}))
        return reply

    grid.tamper = send
    wanted = experiment(engine=FAST, federation={"rounds": 2, "min_replies": 1})
    done = go(grid, wanted, tmp_path / "run")
    said = caplog.text + str([one["reason"] for one in failures(done)]) + (done / "results.json").read_text()
    assert "it has 2097152 bytes of arrays; the largest reply declared has 0" in said


def test_a_site_writes_no_lines_into_the_servers_log(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def send(reply: Message, node: int) -> Message:
        header, arrays = unpack(from_content(reply.content), "a reply")
        if node == 12 and header["kind"] == "hello":
            reply.content = to_content(
                pack({**header, "client": "x\n12:00:00 all is fine\x1b[31m" + "y" * 999}, arrays)
            )
        return reply

    grid.tamper = send
    go(grid, experiment(engine=FAST, federation={"rounds": 2, "min_replies": 1}), tmp_path / "run")
    (line,) = {record.getMessage() for record in caplog.records if "all is fine" in record.getMessage()}
    assert line.startswith("node 12 is left alone: x 12:00:00 all is fine[31my") and line.isprintable()
    assert "y" * 200 not in line


def test_a_record_of_other_arrays_is_no_frame() -> None:
    array = Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=b"\x00" * 4)
    content = RecordDict({"frame": ArrayRecord({"frame": array}), "proof": ConfigRecord({"sha256": digest(b"")})})
    with pytest.raises(PayloadMismatch, match=r"frame of 4 bytes .* hash"):
        from_content(content)


@pytest.fixture
def service(tmp_path: Path) -> SiteService:
    return SiteService(SiteFile(**{**vars(SITE), "state": str(tmp_path / "state")}))


NOW = {"stage": "federate", "round": 1, "rounds": 2, "seed": 0, "span": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"at": {**NOW, "span": 2**31}}, "the request is for rounds 1 to 2147483648 of 2 of stage federate"),
        ({"at": {**NOW, "span": 2}}, "the request is for rounds 1 to 2 of 2"),
        ({"at": {**NOW, "rounds": 10**9}}, "of 1000000000 of stage federate, which has 2"),
        ({"at": {**NOW, "round": 0}}, "the request is for rounds 0 to 0"),
        ({"at": {**NOW, "round": "1"}}, "unknown stage or round"),
        ({"at": {**NOW, "stage": "../x"}}, "unknown stage or round"),
        ({"at": None}, "unknown stage or round"),
        ({"do": "score", "split": "train"}, "a score on 'train'"),
        ({"do": "score", "split": "__class__"}, "a score on '__class__'"),
        ({"do": ["train"]}, "asks for ['train']"),
        ({"scalars": [1]}, "numbers are no mapping"),
        ({"run": ".."}, "run name '..'"),
        ({"run": ["r"]}, "invalid run name"),
        ({"settings": {"model": 3}}, "began with other settings"),
        ({"method": "fedit"}, 'methods.fedit is "fedit" and was not given'),
        ({"do": "hello", "run": "s", "settings": {"model": 3}}, "are not mappings"),
        ({"do": "hello", "run": "s", "methods": {"fedit": "fedit"}}, "its method is no mapping"),
        ({"do": "hello", "run": "s", "settings": None}, "settings are no mapping"),
    ],
)
def test_a_request_of_no_sense_is_refused_and_writes_nowhere_else(
    changes: dict[str, Any], reason: str, service: SiteService, experiment: Make, tmp_path: Path
) -> None:
    settings = experiment(model={"id": "digits-vit"})
    said, arrays = unpack(begin(service.answer, settings)(request_of(settings, **changes)), "a reply")
    assert said["kind"] == "failure" and reason in said["reason"] and not arrays
    state = tmp_path / "state"
    written = {path.relative_to(state).parts[0] for path in state.rglob("*") if path.is_file()}
    assert written <= {"client", ".lock", "runs", "outbound.json", ".outbound.json"}
    assert not list(tmp_path.rglob("stamp.json")) and [path.name for path in tmp_path.iterdir()] == ["state"]


def test_arrays_of_a_server_that_are_wrong_leave_the_memory_as_it_was(
    service: SiteService, experiment: Make, tmp_path: Path
) -> None:
    """NaN, infinity, other shapes: refused, and the right request is answered after them all."""
    settings = experiment("fedit", model={"id": "digits-vit"})
    first = begin(service.answer, settings)(request_of(settings))
    _, arrays = unpack(first, "a reply")
    stamp = next((tmp_path / "state").rglob("stamp.json"))
    before = stamp.read_bytes()
    header, _ = unpack(request_of(settings, at={**NOW, "round": 2}), "a request")
    do = header.pop("do")
    key = min(arrays)
    for wrong in (
        {name: value * float("nan") for name, value in arrays.items()},
        {**arrays, key: torch.zeros(3)},
        {**arrays, key: torch.zeros(2**20)},
        {**arrays, key: arrays[key].to(torch.int64)},
        {**arrays, "../../x": torch.full((1,), float("inf"))},
    ):
        said, sent = unpack(service.answer(ask(do, header, wrong)), "a reply")
        assert said["kind"] == "failure" and not sent
        assert stamp.read_bytes() == before
    for other in ("score", "export"):
        said, _ = unpack(service.answer(ask(other, header, {key: arrays[key] * float("nan")})), "a reply")
        assert said["kind"] == "failure" and f"(first in {key})" in said["reason"]
    assert not list((tmp_path / "state").rglob("adapter*"))
    said, _ = unpack(service.answer(ask(do, header, arrays)), "a reply")
    assert said["kind"] == "update"


def test_bytes_that_are_no_request_are_answered(service: SiteService) -> None:
    for data in (b"", b"cos\nsystem\n(S'true'\ntR.", pack({"x": 1}, {})):
        said, _ = unpack(service.answer(data), "a reply")
        assert said["kind"] == "failure"


def test_a_refusal_with_a_path_of_the_site_stays_there(experiment: Make, tmp_path: Path) -> None:
    """A memory that is damaged: its place is in the error, which is told otherwise."""
    service = SiteService(SiteFile(**{**vars(SITE), "state": str(tmp_path / "state")}))
    settings = experiment("ditto", model={"id": "digits-vit"})
    begin(service.answer, settings, label="ditto")(request_of(settings, label="ditto"))
    for path in (tmp_path / "state").rglob("memory.*"):
        path.write_bytes(b"damaged")
    said, _ = unpack(service.answer(request_of(settings, label="ditto", at={**NOW, "round": 2})), "a reply")
    assert said["kind"] == "failure" and str(tmp_path) not in said["reason"]


@pytest.mark.parametrize("scores", ["rounded", "none"])
def test_a_server_that_exports_ever_other_models_learns_one_choice(
    scores: str, experiment: Make, tmp_path: Path
) -> None:
    """Else it would learn which of any two models has the lower loss on the site's records; with scores: none not even
    of two. What the site chose from stays what it deploys."""
    service = SiteService(SiteFile(**{**vars(SITE), "scores": scores, "state": str(tmp_path)}))
    best = experiment(model={"id": "digits-vit"}, federation={"rounds": 1, "deploy": "best"})
    methods = {label: {"name": "fedit", "rank": rank} for label, rank in (("one", 2), ("two", 4))}
    begin(service.answer, best, methods=methods)
    trained: dict[str, State] = {}

    def request(label: str) -> bytes:
        return request_of(best, label=label, method=methods[label], at={**NOW, "rounds": 1})

    def export(label: str, change: float) -> str | None:
        header, _ = unpack(request(label), "a request")
        arrays = {key: value + change for key, value in trained[label].items()}
        said, _ = checked(service.answer(ask("export", {**header, "do": "export"}, arrays)), {}, "exported")
        return said.get("deployed")

    for label in methods:
        trained[label] = unpack(service.answer(request(label)), "a reply")[1]
    assert export("one", 0.0) is None
    assert export("two", 5.0) == (told := None if scores == "none" else "one")  # far away, so its loss is larger
    folder = tmp_path / "runs" / "r"
    kept = {path: path.read_bytes() for path in folder.rglob("adapter/*")}
    assert len({path.parent for path in kept}) == len(methods)
    assert [export(label, change) for change in (9.0, 0.0) for label in ("one", "two")] == [told] * 4
    assert json.loads((folder / "chosen.json").read_text())["run"] == "one"
    assert kept and all(path.read_bytes() == before for path, before in kept.items())
    with pytest.raises(Lost, match="answered 10 requests of this kind"):
        for change in range(20, 40):
            export("two", change)
