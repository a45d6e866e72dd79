"""A site that lies loses its own reply: the run of the others goes on to the same numbers, resumes and is reported."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import PayloadMismatch
from befit.core.text import readable
from befit.core.values import REFUSED, Failure, Payload, Score, Tick, Update
from befit.core.wire_form import Wire
from befit.flower import replies
from befit.flower.at_sites import hello, largest_reply
from befit.flower.engine import Lost, RemoteEngine, RemoteMemories, UnderWay, checked
from befit.flower.frame import digest, from_content, to_content, unpack
from befit.flower.policy import method_of, settings_of
from befit.flower.remote_clients import Infos, RemoteClients
from befit.flower.server_app import run_over
from befit.flower.service import SiteService
from befit.flower.site_file import load_site
from befit.protocol.engine import Checkpoint
from befit.protocol.federate import federate
from befit.protocol.method import run_stages
from befit.protocol.registry import build_method
from befit.protocol.round import Check, Requests
from befit.protocol.site import ServerSite
from befit.runs.directory import RunDirectory
from befit.runs.engines import schedule_of
from befit.runs.host import Host
from befit.runs.journal import RunJournal
from befit.runs.loading import resolve_model
from befit.runs.runner import run
from tests.security.replies import CORPUS, FEW, MARK, Lie, hostile
from tests.unit.flower.conftest import SMALL
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import same

HONEST, LIAR = "client-00", "client-01"
ROUNDS = 2


def asked(purpose: str) -> str:
    """What a message is for, in befit's words."""
    return {"train": "train", "evaluate": "score", "query": "export"}[purpose]


@dataclass
class Line:
    """A link to two real sites in this process, of which one lies in the last round. A site is asked the same thing
    once: what it has answered is kept for the next run."""

    services: Mapping[str, SiteService]
    lie: Lie | None = None
    late: bool = False
    known: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def answer(self, client: str, request: bytes) -> bytes:
        key = f"{client} {digest(request)}"
        if key not in self.known:
            self.known[key] = self.services[client].answer(request)
        return self.known[key]

    def deliver(
        self, purpose: str, clients: Sequence[str], frame: Callable[[str], bytes], group: str, under_way: UnderWay
    ) -> Iterator[tuple[str, bytes | Lost]]:
        for client in clients:
            reply = self.answer(client, frame(client))
            last = client == LIAR and group.endswith(f" {ROUNDS}")
            if last and self.late and asked(purpose) == "train":
                yield client, Lost("late", "no reply")
            elif last and self.lie is not None and asked(purpose) == self.lie.to:
                yield client, self.lie.make(reply, self.known[f"{LIAR} first"])
            else:
                yield client, reply
            if client == LIAR:
                self.known.setdefault(f"{LIAR} first", reply)


@dataclass
class Federation:
    """Two sites, the server's picture of them, and what came out of honest runs."""

    experiment: Experiment
    host: Host
    site: ServerSite
    line: Line

    def engine(self, lie: Lie | None = None, late: bool = False) -> RemoteEngine:
        self.line.lie, self.line.late = lie, late
        infos = Infos(self.host)
        return RemoteEngine(
            self.line,
            infos,
            "trial",
            "fedit",
            settings_of(self.experiment),
            method_of(self.experiment.method),
            Wire(),
            metric="accuracy",
            examples=infos.examples,
            max_bytes=largest_reply(self.host, self.experiment.method),
        )

    def play(self, path: Path, lie: Lie | None = None, late: bool = False) -> list[Checkpoint]:
        """All rounds and the score, with a journal in `path`; returns where the server stood after each round."""
        method, engine = build_method(self.experiment.method), self.engine(lie, late)
        with closing(RunDirectory(path)) as directory:
            journal = Remembering(directory, RemoteMemories(), "fedit", None)
            federate(method, engine, self.site, schedule_of(self.experiment), journal)
        return journal.points

    def last(self, do: str, lie: Lie, before: Payload) -> dict[str, Update | Score | Failure]:
        """What the server makes of the replies in the last round, or of the last scores, by client."""
        method, at = build_method(self.experiment.method), Tick("federate", ROUNDS, ROUNDS, 0)
        (stage,) = run_stages(method)
        cohort = self.host.infos
        requests = Requests(cohort, lambda info: stage.exchange.dispatch(before, info, at))
        if do == "score":
            return {reply.client: reply for reply in self.engine(lie).score(requests, at, "test")}
        check = Check(stage, self.site, requests, at)
        found = [check(reply, at) for reply in self.engine(lie).exchange(requests, at)]
        good = check.replies([reply for reply in found if isinstance(reply, Update)])
        _, reasons = good.judged(schedule_of(self.experiment).guard)
        found = [_judged(reply, reasons, at) for reply in found]
        return {reply.client if isinstance(reply, Failure) else reply.client.id: reply for reply in found}


def _judged(reply: Update | Failure, reasons: Mapping[str, str], at: Tick) -> Update | Failure:
    if isinstance(reply, Failure) or reply.client.id not in reasons:
        return reply
    return Failure(reply.client.id, at.stage, at.last, REFUSED, reasons[reply.client.id])


class Remembering(RunJournal):
    """A journal that keeps all points at which the run has been."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.points: list[Checkpoint] = []

    def completed(self, point: Checkpoint, force: bool) -> None:
        super().completed(point, force)
        self.points.append(point)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    experiment = resolve_model(load_experiment({**SMALL, "method": "fedit", "engine": {"kind": "flower"}}))
    sites = tmp_path_factory.mktemp("sites")
    services = {client: SiteService(load_site(write_site(sites / client, client))) for client in (HONEST, LIAR)}
    line = Line(services)
    question = hello(experiment, "trial")
    hellos = {client: replies.hello(checked(line.answer(client, question), {}, "hello")[0]) for client in services}
    host = RemoteClients(experiment, hellos).host(list(hellos))
    return Federation(experiment, host, host.install(build_method(experiment.method)), line)


@pytest.fixture(scope="module")
def honest(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    return federation.play(tmp_path_factory.mktemp("honest") / "run")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def of(client: str, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["client"] == client]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def check_texts(path: Path) -> None:
    """Whatever was written can be read, and shown on a terminal."""
    for file in path.rglob("*"):
        if file.suffix in (".json", ".jsonl", ".md", ".html"):
            text = file.read_text(encoding="utf-8")
            assert all(letter.isprintable() or letter == "\n" for letter in text), file


def lies_about(to: str, *ends: str) -> list[Lie]:
    return [lie for lie in CORPUS if lie.to == to and lie.end in ends]


def test_the_corpus_is_large_and_every_lie_has_its_own_name() -> None:
    assert len({lie.name for lie in CORPUS}) == len(CORPUS) >= 200
    to, end = Counter(lie.to for lie in CORPUS), Counter(lie.end for lie in CORPUS)
    told = (
        f"| {len(CORPUS)}: {to['train']} to training, {to['score']} to scoring, {to['hello']} to hello, {to['export']}"
    )
    became = f"| {end['refused']} refused, {end['failure']} failures in the site's own words, {end['used']} well-formed"
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert told in page and became in page
    assert len(FEW) == 20 and set(FEW) <= {lie.name for lie in CORPUS if lie.end != "used"}


@pytest.mark.parametrize("do", ["train", "score"])
def test_of_every_lie_there_is_a_failure_of_the_liar_and_nothing_else(
    do: str, federation: Federation, honest: list[Checkpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever one site sends, the other one's reply is used as ever; all that is kept is a line of why."""
    caplog.set_level(logging.INFO)
    before = honest[0].server if do == "train" else honest[1].server
    unchanged = federation.last(do, Lie("", "", lambda reply, earlier: reply), before)
    lies, wrong = lies_about(do, "refused", "failure"), list[str]()
    with closing(RunDirectory(tmp_path / "run")) as directory:
        journal = RunJournal(directory, RemoteMemories(), "fedit", None)
        for lie in lies:
            found = federation.last(do, lie, before)
            ours, failure = found[HONEST], found[LIAR]
            if not isinstance(failure, Failure) or (failure.kind == REFUSED) != (lie.end == "refused"):
                wrong.append(f"{lie.name}: {readable(failure)}")
                continue
            journal.failed(failure)
            if not alike(ours, unchanged[HONEST]):
                wrong.append(f"{lie.name}: the other reply")
        journal.completed(Checkpoint(0, 1, before), force=True)
    assert not wrong
    check_texts(tmp_path / "run")
    assert all(record.getMessage() == readable(record.getMessage(), 1000) for record in caplog.records)
    assert MARK not in (tmp_path / "run" / "checkpoint.json").read_text()
    assert all(len(line["reason"]) <= 500 for line in lines_of(tmp_path / "run"))
    assert len(lines_of(tmp_path / "run")) == len(lies)
    resumed = RunJournal(RunDirectory(tmp_path / "run"), RemoteMemories(), "fedit", None)
    rows = resumed.outbound.as_dict()[LIAR]
    assert {row["name"] for row in rows} <= {
        "refused reply",
        "error",
        "reason",
        "seconds",
        "cpu_seconds",
        "peak_memory_mib",
    }


def alike(one: Any, other: Any) -> bool:
    """The same reply but for what it took."""
    if isinstance(one, Score):
        return one.metrics == other.metrics and one.examples == other.examples
    return same(one.payload, other.payload) and one.report == other.report


@pytest.mark.parametrize("name", FEW)
def test_a_run_with_a_lie_in_it_has_the_others_numbers_to_the_bit(
    name: str, federation: Federation, honest: list[Checkpoint], tmp_path: Path
) -> None:
    """Those of a run in which the liar's last training is late, or of the honest one where it lies about its score."""
    (lie,) = [lie for lie in CORPUS if lie.name == name]
    lied = federation.play(tmp_path / "lied", lie)
    late = federation.play(tmp_path / "late", late=True) if lie.to == "train" else honest
    assert same(lied[-1].server, late[-1].server)
    (failure,) = [line for line in lines_of(tmp_path / "lied") if line["kind"] == "failure"]
    assert failure["client"] == LIAR and failure["round"] == ROUNDS
    if lie.to == "train":
        ours, theirs = (lines_of(tmp_path / run) for run in ("lied", "late"))
        assert [line for line in ours if line["kind"] != "failure"] == [
            line for line in theirs if line["kind"] != "failure"
        ]
        assert size_of(tmp_path / "lied") < size_of(tmp_path / "late") + 4000
    resumed = RunJournal(RunDirectory(tmp_path / "lied"), RemoteMemories(), "fedit", None).resume()
    assert resumed is not None and same(resumed.server, lied[-1].server)


@pytest.mark.parametrize(
    "lie", [lie for lie in CORPUS if lie.end == "used"], ids=[lie.name for lie in CORPUS if lie.end == "used"]
)
def test_a_lie_that_is_well_formed_disturbs_no_results_and_no_report(
    lie: Lie, federation: Federation, tmp_path: Path
) -> None:
    """It may be wrong, and change the mean; the run is finished, and its report written, with and without it."""
    done = whole_run(federation, tmp_path / "run", lie)
    assert not [line for line in lines_of(done) if line["kind"] == "failure"]
    check_texts(done)


def whole_run(federation: Federation, path: Path, lie: Lie | None) -> Path:
    return run(
        federation.experiment,
        out=path,
        host=federation.host,
        engines=lambda label, method: (federation.engine(lie), RemoteMemories()),
    ).path


@pytest.mark.parametrize("lie", lies_about("hello", "refused"), ids=lambda lie: lie.name)
def test_a_lie_about_itself_is_refused_with_a_reason(lie: Lie, federation: Federation) -> None:
    question = hello(federation.experiment, "trial")
    reply = lie.make(federation.line.answer(LIAR, question), b"")
    with pytest.raises((PayloadMismatch, Lost)) as refused:
        replies.hello(checked(reply, {"request": digest(question)}, "hello")[0])
    assert str(refused.value) == readable(refused.value, 1000)


@pytest.mark.parametrize("lie", lies_about("export", "refused"), ids=lambda lie: lie.name)
def test_a_lie_about_an_adapter_is_in_the_results(lie: Lie, federation: Federation, tmp_path: Path) -> None:
    done = whole_run(federation, tmp_path / "run", lie)
    (failure,) = json.loads((done / "results.json").read_text())["failures"]
    assert (failure["client"], failure["stage"], failure["kind"]) == (LIAR, "export", "refused")


def test_a_second_reply_of_one_client_is_refused(
    federation: Federation, honest: list[Checkpoint], tmp_path: Path
) -> None:
    class Twice(Line):
        def deliver(self, *question: Any) -> Iterator[tuple[str, bytes | Lost]]:
            for client, reply in super().deliver(*question):
                yield client, reply
                if client == LIAR and question[0] == "train":
                    yield client, reply

    federation.line.__class__ = Twice
    try:
        twice = federation.play(tmp_path / "twice")
    finally:
        federation.line.__class__ = Line
    assert same(twice[-1].server, honest[-1].server)
    reasons = [line["reason"] for line in lines_of(tmp_path / "twice") if line["kind"] == "failure"]
    assert len(reasons) == ROUNDS and all("a second reply" in reason for reason in reasons)


class Stop(Exception):
    """Ends the server as a crash would."""


def test_a_run_at_sites_of_which_one_lies_in_every_round_is_finished_resumed_and_reported(tmp_path: Path) -> None:
    """Over Flower's records, another lie each round, with a crash of the server in between; the other site's numbers
    are those of a run in which no training of the liar arrives."""
    lies = [name for name in FEW if name.startswith("train")][::2]
    experiment = load_experiment(
        {
            **SMALL,
            "method": "fedit",
            "engine": {"kind": "flower", "deadline_s": 0.05},
            "federation": {"rounds": len(lies)},
        }
    )

    def grid(folder: Path) -> LoopbackGrid:
        return LoopbackGrid([write_site(folder / client, client) for client in (HONEST, LIAR)])

    def lying(stop_at: int) -> Callable[[Message, int], Message | None]:
        before: list[bytes] = []

        def tamper(reply: Message, node: int) -> Message:
            frame = from_content(reply.content)
            header, _ = unpack(frame, "a reply")
            if node == 12 and header["kind"] == "update" and header["label"] == "fedit":
                if header["at"]["round"] == stop_at:
                    raise Stop
                lie = lies[header["at"]["round"] - 1]
                reply.content = to_content(hostile(lie, frame, before[-1] if before else frame[:-1]))
                before.append(frame)
            return reply

        return tamper

    lied, lost = grid(tmp_path / "lied"), grid(tmp_path / "lost")
    lied.tamper = lying(stop_at=4)
    with pytest.raises(Stop):
        run_over(lied, experiment, tmp_path / "run", poll_s=0.01)
    lied.tamper = lying(stop_at=0)
    done = run_over(lied, experiment, tmp_path / "run", resume=True, poll_s=0.01).path

    def lose(reply: Message, node: int) -> Message | None:
        header, _ = unpack(from_content(reply.content), "a reply")
        return None if node == 12 and header["kind"] == "update" and header["label"] == "fedit" else reply

    lost.tamper = lose
    without = run_over(lost, experiment, tmp_path / "without", poll_s=0.01).path
    assert of(HONEST, lines_of(done)) == of(HONEST, lines_of(without))
    failures = [line for line in lines_of(done) if line["kind"] == "failure"]
    assert [line["round"] for line in failures] == list(range(1, len(lies) + 1))
    assert {line["client"] for line in failures} == {LIAR}
    check_texts(done)
    assert (done / "report.html").exists() and size_of(done) < size_of(without) + 40_000
