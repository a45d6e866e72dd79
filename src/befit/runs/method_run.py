"""One method of a run in its own directory: its rounds, every client's adapter, and its results."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment
from befit.core.errors import PASSING
from befit.core.names import folder_name
from befit.core.schema import plain
from befit.core.storage import write_json, write_sealed
from befit.core.values import NO_REPLY, ClientInfo, Failure, Tick
from befit.protocol.check import check as check_method
from befit.protocol.client_privacy import hides_clients
from befit.protocol.engine import Engine, Memories
from befit.protocol.federate import federate, final_download
from befit.protocol.method import Method, run_stages
from befit.protocol.round import Requests
from befit.protocol.schedule import Schedule, resolved_stages
from befit.protocol.stage import Stage
from befit.protocol.store import ClientStore
from befit.runs.artifacts import export_name, gone_from
from befit.runs.clients import warning_of
from befit.runs.clock import SimulatedEngine
from befit.runs.deploy import HELD_OUT
from befit.runs.directory import METHOD_RESULTS, RunDirectory, finished
from befit.runs.engines import Engines, make_engine, schedule_of
from befit.runs.final_models import told_elsewhere, write_models
from befit.runs.fleets import Fleets
from befit.runs.host import Host
from befit.runs.journal import Observer, RunJournal
from befit.runs.local import LocalEngine
from befit.runs.newcomers import measure_newcomers
from befit.runs.processes import MultiprocessEngine
from befit.runs.results import method_results
from befit.runs.shared_stages import SharedFolder, StageCache
from befit.runs.spent import protected

_LOG = logging.getLogger(__name__)
WEIGHED = 100  # clients up to which their weights for each other are written down after every round


@dataclass(frozen=True)
class _Ended:
    """A method whose rounds are over and whose adapters are written.

    stages    with every number of rounds filled in
    last      stage and round in which the models stand
    best      by stage, the line of the round that was kept, of those that keep their best
    missing   clients without an adapter, with why
    rows      by client, what its export adds to its row of the results
    beside    what the engine chose or measured, where it did
    """

    journal: RunJournal
    stages: Sequence[Stage]
    last: tuple[str, int]
    best: Mapping[str, Any]
    infos: Sequence[ClientInfo]
    missing: Mapping[str, Failure]
    rows: Mapping[str, Mapping[str, Any]]
    newcomers: Mapping[str, Any]
    beside: Mapping[str, Any]


@dataclass(frozen=True)
class MethodRun:
    """One method of a run.

    config         its block of the configuration
    path           its directory
    engines        makes its engine, where the clients are on other machines, with their data and adapters
    shared_stages  where stages that other methods have too are left, and taken from
    """

    host: Host
    config: Mapping[str, Any]
    label: str
    path: Path
    observer: Observer | None
    engines: Engines | None
    shared_stages: SharedFolder | None

    def results(self) -> dict[str, Any]:
        """Run it, or finish it where it was interrupted; its own results, which are in `method.json` from then on."""
        if (before := self._finished_before()) is not None:
            return before
        for problem in check_method(self._method, self.host.context):
            _LOG.warning("%s", warning_of(self.label, problem))
        ended = self._played()
        results = self._results(ended)
        write_json(self.path / "outbound.json", ended.journal.outbound.as_dict())
        write_sealed(self.path / METHOD_RESULTS, results)
        ended.journal.event({"kind": "run_finished", "mean": results["summary"]["mean"]})
        return results

    @cached_property
    def _method(self) -> Method:
        return self.host.build(self.config)

    @property
    def _about(self) -> dict[str, Any]:
        return {"clients": len(self.host.infos), "metric": self.host.task.metric}

    def _finished_before(self) -> dict[str, Any] | None:
        """What an earlier process wrote, where all of it is there and whole; the observer counts the method too."""
        results = finished(self.path / METHOD_RESULTS)
        if results is None:
            return None
        if gone := missing_of(self.path, results, self.host.experiment):
            _LOG.warning("%s: %s is missing in %s, or damaged; it is made again", self.label, gone[0], self.path)
            return None
        if self.observer:
            self.observer({"kind": "run_started", "run": self.label, "stages": [], **self._about})
            self.observer({"kind": "run_finished", "run": self.label, "mean": results["summary"]["mean"]})
        return results

    def _played(self) -> _Ended:
        """Play the method's rounds, or what is left of them, and write every client's adapter."""
        host, method, engines = self.host, self._method, self.engines
        site = host.install(method)
        if engines is None:
            self._read_beforehand()
        directory = RunDirectory(self.path, host.experiment.checkpoint.every_s)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(directory.close)
            fleets = Fleets(host.experiment.engine.fleet, host.model, directory.notes) if engines is None else None
            if fleets is not None:
                engine, store = make_engine(host, method, self.config, directory, cleanup, fleets)
            else:
                assert engines is not None
                engine, store = engines(self.label, self.config)
            journal = self._journal(directory, store)
            if fleets is not None:
                fleets.told = journal.event
            self._note_members(journal, engine)
            schedule = replace(schedule_of(host.experiment), clients=hides_clients(method, host.context))
            stages = resolved_stages(method, schedule.rounds, schedule.most_rounds)
            listed = [{"name": stage.name, "rounds": stage.rounds} for stage in stages]
            journal.event({"kind": "run_started", "stages": listed, **self._about})
            clock = _clock(engine, schedule, stages, directory) if engines is None else None
            server = federate(method, clock or engine, site, schedule, journal)
            name, best = stages[-1].name, journal.best_rounds()
            last = (name, best[name]["round"] if name in best else stages[-1].rounds or 0)
            at = Tick(name, last[1] or 1, last[1] or 1, schedule.seed)
            infos = engine.clients()
            self._note_members(journal, engine)
            downloads = Requests(infos, lambda info: final_download(method, server, info, at))
            if isinstance(engine, (LocalEngine, MultiprocessEngine)):
                missing, rows = write_models(self.path, host, method, self.label, engine, downloads, at)
            else:
                missing, rows = told_elsewhere(engine, downloads, at, journal, host.wire(method))
            newcomers: dict[str, Any] = {}
            if engines is None and host.newcomers:
                newcomers = measure_newcomers(host, method, self.label, server, stages, self.path, self.observer)
            directory.forget_previous(store)
        beside = {
            "fleet": fleets.chosen() if fleets is not None else None,
            "clock": clock.over() if clock is not None else None,
        }
        return _Ended(journal, stages, last, best, infos, missing, rows, newcomers, beside)

    def _read_beforehand(self) -> None:
        """Read what is needed after training, so that what cannot be read is told before it."""
        host, needs = self.host, self._method.needs
        for info in host.newcomers:
            host.examples(info.id, host.experiment.evaluate.split)
            if info.num_examples:
                host.examples(info.id, "train")
        if needs.public or (needs.public_mixed and len(host.backbones) > 1):
            for key in host.backbones:
                host.public(key)

    def _journal(self, directory: RunDirectory, store: Memories) -> RunJournal:
        host, method = self.host, self._method
        stages, federation = run_stages(method), host.experiment.federation
        kept = {
            (number, round_)
            for number, stage in enumerate(stages)
            for round_ in host.experiment.checkpoint.keep
            if stage.federated
        }
        cache = None
        # With patience a stage ends by what comes after it; and a clock's course is no part of what is shared.
        whole = federation.patience is None and federation.asynchronous is None
        if self.shared_stages is not None and isinstance(store, ClientStore) and whole:
            cache = StageCache(self.shared_stages, host, method, directory, store, kept)
        names = [stage.name for stage in stages]
        weights = method.influence if len(host.infos) <= WEIGHED else None
        return RunJournal(directory, store, self.label, self.observer, cache, kept, host.wire(method), names, weights)

    def _note_members(self, journal: RunJournal, engine: Engine) -> None:
        """List what clients said of themselves when they joined; a site that has not come has said nothing."""
        for info in engine.clients():
            if self.engines is None or info.num_examples:
                journal.outbound.hello(info.id, self.host.hello(info.id))

    def _results(self, ended: _Ended) -> dict[str, Any]:
        """What method.json holds, from the method's directory and what became of its clients."""
        host, method, path, elsewhere = self.host, self._method, self.path, self.engines is not None
        stages, newcomers = ended.stages, dict(ended.newcomers)
        clients = [info.id for info in ended.infos]
        examples = {info.id: info.num_examples for info in ended.infos}
        federated = {stage.name for stage in stages if stage.federated} or {stage.name for stage in stages}
        best = {stage: line["round"] for stage, line in ended.best.items()}
        results = method_results(
            path, clients, examples, host.task.metric, _curve_stages(stages), ended.last, federated, best
        )
        for client, row in results["clients"].items():
            row |= ended.rows.get(client, {})
            if client in ended.missing:
                row["adapter"] = None
            elif not elsewhere:
                row["adapter"] = f"clients/{folder_name(client)}/{export_name(path / 'clients' / folder_name(client))}"
        results["failures"] += [
            {"client": client, "stage": "export", "round": 0, "kind": failure.kind, "reason": failure.reason}
            for client, failure in ended.missing.items()
        ]
        results["failures"] += newcomers.pop("failures", [])
        results["cost"] = relative_costs(host, method)
        beside = {
            **ended.beside,
            "diagnostics": plain(method.diagnostics),
            "newcomers": newcomers,
            "privacy": protected(path, host, method, stages, results["clients"], examples if elsewhere else {}),
            "best_rounds": [
                {"stage": stage, "round": line["round"], "of": line["rounds"], "validation": line["value"]}
                for stage, line in ended.best.items()
            ],
        }
        return results | {key: value for key, value in beside.items() if value}


# Kinds of failures that say nothing against another try: no answer came, or the site's machine lacked what it needs.
_TRY_AGAIN = NO_REPLY | {"app", *(error.__name__ for error in PASSING), PermissionError.__name__}


def missing_of(path: Path, results: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """Files of a finished method that were removed since, without which it is no longer what its results say, and
    adapters that sites have yet to write, since they could not be asked when these were due, or had no room."""
    clients, newcomers = results["clients"], results.get("newcomers", {}).get("clients", {})
    more = [HELD_OUT] if experiment.federation.deploy == "best" else []
    again = [one for one in results["failures"] if one["stage"] == "export" and one["kind"] in _TRY_AGAIN]
    unwritten = [f"the adapter of {one['client']}" for one in again]
    return unwritten + gone_from(path, clients.values(), *more) + gone_from(path, newcomers.values())


def relative_costs(host: Host, method: Method) -> dict[str, Any]:
    """By family, what `befit cost` says of a step of the method on its backbone; see `befit.cost.compare`."""
    from befit.cost.compare import relative_cost

    pivot = min(backbone.parameters for backbone in host.backbones.values())
    return {
        backbone.name: relative_cost(method, backbone.model.shapes, backbone.parameters, host.common.parameters, pivot)
        for backbone in host.backbones.values()
    }


def _clock(
    engine: Engine, schedule: Schedule, stages: Sequence[Stage], directory: RunDirectory
) -> SimulatedEngine | None:
    """Clients whose replies come when a simulated clock says, where rounds are asynchronous."""
    if schedule.asynchronous is None:
        return None
    names = [stage.name for stage in stages if stage.federated]
    course = directory.notes.setdefault("simulated clock", {})
    return SimulatedEngine(engine, schedule.asynchronous, schedule.seed, names, course)


def _curve_stages(stages: Sequence[Stage]) -> list[str]:
    """The stage whose rounds are the curve's, then those after it: the first federated one whose result lasts, else the
    first federated one, else the first of all."""
    federated = [index for index, stage in enumerate(stages) if stage.federated]
    lasting = [index for index in federated if stages[index].lasts]
    return [stage.name for stage in stages[next(iter([*lasting, *federated]), 0) :]]
