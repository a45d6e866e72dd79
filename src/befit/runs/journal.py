"""Writes the logs of a run into its directory, and sends its events to the observer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from befit.core.errors import NotTrained
from befit.core.names import folder_name
from befit.core.values import REFUSED, Cost, Failure, Payload, Score, Tick, Update
from befit.core.wire_form import Wire
from befit.protocol.engine import Best, Checkpoint, Memories
from befit.protocol.privacy import EPSILON
from befit.protocol.store import write_payload
from befit.report.comparison import compact
from befit.runs.directory import RunDirectory
from befit.runs.local import peak_memory_mib
from befit.runs.shared_stages import StageCache

_LOG = logging.getLogger(__name__)


def kept_path(run: Path, stage: str, round_: int) -> Path:
    """Where a run directory keeps the server's state after a round of a federated stage; see `checkpoint.keep`."""
    return run / "kept" / folder_name(stage) / f"{round_:05d}.safetensors"


def untrained_text(clients: Sequence[str], lack: str) -> str:
    """One line for all clients that never took part.

    >>> untrained_text(["a", "b"], "score")
    '2 clients were not trained in this run and have no score; first: a'
    """
    were = "client was" if len(clients) == 1 else "clients were"
    have = "has" if len(clients) == 1 else "have"
    return f"{len(clients):,} {were} not trained in this run and {have} no {lack}; first: {clients[0]}"


Observer = Callable[[dict[str, Any]], None]
Weights = Callable[[Payload], Mapping[str, Mapping[str, float]]]


class RunJournal:
    """The journal of one method in one directory.

    metrics.jsonl holds only what repeats exactly; what a run took goes to ledger.jsonl.

    cache      where stages that other runs have too are taken from and left
    keep       stages, by their number, and rounds after which the server's state is kept in `kept/`
    wire       the form in which arrays travel, for the list of what left clients
    stages     names of the run's stages, in order
    weights    how much clients count for each other, by the server's memory: `befit.protocol.method.Method.influence`
    """

    def __init__(
        self,
        directory: RunDirectory,
        store: Memories,
        name: str,
        observer: Observer | None,
        cache: StageCache | None = None,
        keep: Container[tuple[int, int]] = (),
        wire: Wire = Wire(),  # noqa: B008 frozen
        stages: Sequence[str] = (),
        weights: Weights | None = None,
    ) -> None:
        self._cache, self._keep, self._wire = cache, keep, wire
        self._stages, self._weights = stages, weights
        self._directory, self._store, self._name, self._observer = directory, store, name, observer
        self._untrained: dict[str, None] = {}
        self._told: dict[tuple[str, bool], str] = {}  # the last failure in training, and in scoring, of a client
        self._taken: tuple[str, int] = "", 0  # stage and round
        self._listed: set[str] = set()  # clients whose replies of that round are listed as taken
        self._point, self.outbound = directory.restore(store)
        self._count_bytes()

    def best_rounds(self) -> dict[str, Any]:
        """Stage to the line of the round that counts there, of stages that have gone back to their best one."""
        return {line["stage"]: line for line in self._directory.read("metrics") if line["kind"] == "best"}

    def _count_bytes(self) -> None:
        spent = [line for line in self._directory.read("ledger") if line["purpose"] == "train"]
        self._bytes_up, self._bytes_down = (sum(line[name] for line in spent) for name in ("bytes_up", "bytes_down"))

    @property
    def spool(self) -> Path:
        return self._directory.path / "state" / "spool"

    def resume(self) -> Checkpoint | None:
        return self._point

    def rounds_from_cache(self, stage: int, server: Payload) -> Iterator[Checkpoint]:
        for point in self._cache.take(stage, server, self.outbound) if self._cache else ():
            self._count_bytes()
            yield point

    def accepted(self, at: Tick, update: Update, step: bool = False) -> None:
        self.outbound.note(update, at.stage, self._wire)
        if step:
            return
        if self._taken != (at.stage, at.last):
            self._taken, self._listed = (at.stage, at.last), set()
        self._listed.add(update.client.id)

    def trained(self, at: Tick, update: Update) -> None:
        where = {"stage": at.stage, "round": at.last, "client": update.client.id}
        self._told.pop((update.client.id, False), None)
        report = dict(update.report)
        if not report.keys().isdisjoint(("loss", "steps", EPSILON)):  # a private training tells no loss
            line = {"loss": report.pop("loss", None), "steps": int(report.pop("steps", 0))}
            self._directory.log("metrics", {"kind": "train", **where, **line})
        for name, value in report.items():
            self._directory.log("metrics", {"kind": "diagnostic", **where, "name": name, "value": value})
        # Results count rounds, however many of them an engine makes of one message.
        self._spent(where, "train", update.cost, {"span": at.span} if at.span > 1 else {})
        self._bytes_up += update.cost.bytes_up
        self._bytes_down += update.cost.bytes_down

    def scored(self, at: Tick, score: Score) -> None:
        where = {"stage": at.stage, "round": at.last, "client": score.client}
        self._told.pop((score.client, True), None)
        for name, value in score.metrics.items():
            self._directory.log(
                "metrics",
                {
                    "kind": "score",
                    **where,
                    "split": score.split,
                    "metric": name,
                    "value": value,
                    "examples": score.examples,
                },
            )
        if score.others:
            self._directory.log("metrics", {"kind": "others", **where, "values": dict(score.others)})
        if score.each:
            self._directory.log("metrics", {"kind": "each", **where, "values": compact(score.each)})
        if score.confusion:
            self._directory.log("metrics", {"kind": "confusion", **where, "values": dict(score.confusion)})
        self._spent(where, "score", score.cost)
        self.outbound.note(score, at.stage, self._wire)

    def validated(self, at: Tick, score: Score) -> None:
        where = {"stage": at.stage, "round": at.last, "client": score.client}
        headline = next(iter(score.metrics.values()), None)
        self._directory.log("metrics", {"kind": "validation", **where, "value": headline, "examples": score.examples})
        self._spent(where, "score", score.cost)
        self.outbound.note(score, at.stage, self._wire)

    def back(self, at: Tick, best: Best) -> Payload:
        where = {"stage": at.stage, "round": best.round, "rounds": at.rounds}
        self._directory.log("metrics", {"kind": "best", **where, "value": best.mean})
        self.event({"kind": "best", **where, "mean": best.mean})
        return self._directory.back(self._store)

    def _spent(
        self, where: Mapping[str, Any], purpose: str, cost: Cost, more: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._directory.log(
            "ledger",
            {
                **where,
                "purpose": purpose,
                "bytes_up": cost.bytes_up,
                "bytes_down": cost.bytes_down,
                "seconds": cost.seconds,
                "cpu_seconds": cost.cpu_seconds,
                "peak_memory_mib": cost.peak_memory_mib,
                **more,
            },
        )

    def failed(self, failure: Failure, scoring: bool = False) -> None:
        if failure.kind == NotTrained.__name__:  # no accident of theirs, and there may be thousands
            self._untrained |= {failure.client: None}
        elif self._told.get((failure.client, scoring)) != (said := f"{failure.kind}: {failure.reason}"):
            self._told[failure.client, scoring] = said  # again only after a reply, or where it has another reason
            _LOG.warning(
                "client %s, stage %s, round %d: %s%s",
                failure.client,
                failure.stage,
                failure.round,
                said,
                f"\n{failure.traceback}" if failure.traceback else "",
            )
        where = {"stage": failure.stage, "round": failure.round, "client": failure.client}
        self._spent(where, "failed score" if scoring else "failed", failure.cost)
        listed = self._taken == (failure.stage, failure.round) and failure.client in self._listed
        if failure.kind != REFUSED or not listed:
            self.outbound.note(failure, failure.stage, self._wire)
        # A score that is missing cost its client nothing else: whoever tells of failures has to tell them apart.
        of = {"scoring": True} if scoring else {}
        line = {"kind": "failure", **where, "error": failure.kind, "reason": failure.reason, **of}
        self._directory.log("metrics", line)
        self.event({"kind": "failure", **where, "reason": f"{failure.kind}: {failure.reason}", "scoring": scoring})

    def served(self, stage: str, round_: int, cost: Cost) -> None:
        where = {"stage": stage, "round": round_, "client": None}
        self._spent(where, "server", replace(cost, peak_memory_mib=peak_memory_mib()))

    def event(self, event: dict[str, Any]) -> None:
        if self._observer is not None:
            counted = event["kind"] in ("run_started", "round")  # a run that goes on does not start from nothing
            sums = {"bytes_up": self._bytes_up, "bytes_down": self._bytes_down} if counted else {}
            self._observer({**event, "run": self._name, **sums})

    def completed(self, point: Checkpoint, force: bool) -> None:
        if self._untrained:
            _LOG.warning("%s", untrained_text(list(self._untrained), "score"))
            self._untrained = {}
        for client, row in self._weights(point.server).items() if self._weights else ():
            where = {"stage": self._stages[point.stage], "round": point.round, "client": client}
            values = {other: float(f"{weight:.6g}") for other, weight in row.items()}
            self._directory.log("metrics", {"kind": "weights", **where, "values": values})
        if (point.stage, point.round) in self._keep:
            write_payload(kept_path(self._directory.path, self._stages[point.stage], point.round), point.server)
        if self._cache is not None:
            self._cache.note(point)
        if force or self._directory.due():
            self._directory.commit(point, self._store, self.outbound)
            if self._cache is not None:
                self._cache.leave(point, self.outbound)
