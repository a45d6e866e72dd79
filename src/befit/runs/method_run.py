"""One method of a run in its own directory: its rounds, every client's adapter, and its results."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from befit.adapters.mixers import gate_values
from befit.adapters.model import in_order
from befit.config.experiment import Experiment
from befit.core.errors import BefitError, ConfigError, NotTrained, PayloadMismatch, RunError
from befit.core.names import folder_name
from befit.core.plugins import reason_of
from befit.core.schema import plain
from befit.core.storage import read_lines, write_json, write_sealed
from befit.core.values import LEFT_OUT, ClientInfo, Failure, Payload, Tick
from befit.core.wire_form import Wire
from befit.protocol.check import check as check_method
from befit.protocol.client_privacy import hides_clients
from befit.protocol.engine import Engine, Memories
from befit.protocol.federate import federate, final_download
from befit.protocol.method import Method, run_stages, trained_alone
from befit.protocol.privacy import EPSILON, hides
from befit.protocol.round import Requests
from befit.protocol.schedule import Schedule, resolved_stages
from befit.protocol.stage import Stage
from befit.protocol.store import ClientStore
from befit.runs.artifacts import export_name, gone_from, write_client
from befit.runs.clients import family_experiment, warning_of
from befit.runs.clock import SimulatedEngine
from befit.runs.deploy import HELD_OUT, note_held_out
from befit.runs.directory import METHOD_RESULTS, RunDirectory, finished
from befit.runs.engines import Engines, Remote, make_engine, schedule_of
from befit.runs.fleets import Fleets
from befit.runs.host import Host
from befit.runs.journal import Observer, RunJournal, untrained_text
from befit.runs.local import LocalEngine
from befit.runs.newcomers import measure_newcomers
from befit.runs.processes import MultiprocessEngine
from befit.runs.results import method_results
from befit.runs.shared_stages import SharedFolder, StageCache

_LOG = logging.getLogger(__name__)
WEIGHED = 100  # clients up to which their weights for each other are written down after every round


def run_method(
    host: Host,
    config: Mapping[str, Any],
    label: str,
    path: Path,
    observer: Observer | None,
    engines: Engines | None,
    shared_stages: SharedFolder | None,
) -> dict[str, Any]:
    """Run one method in its directory, or finish it where it was interrupted, and return its own results."""
    if (results := _finished_before(host, label, path, observer)) is not None:
        return results
    method = host.build(config)
    for problem in check_method(method, host.context):
        _LOG.warning("%s", warning_of(label, problem))
    ended = _played(host, method, config, label, path, observer, engines, shared_stages)
    results = _results(host, method, path, ended, elsewhere=engines is not None)
    write_json(path / "outbound.json", ended.journal.outbound.as_dict())
    write_sealed(path / METHOD_RESULTS, results)
    ended.journal.event({"kind": "run_finished", "mean": results["summary"]["mean"]})
    return results


@dataclass(frozen=True)
class _Ended:
    """A method whose rounds are over and whose adapters are written.

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


def _played(
    host: Host,
    method: Method,
    config: Mapping[str, Any],
    label: str,
    path: Path,
    observer: Observer | None,
    engines: Engines | None,
    shared_stages: SharedFolder | None,
) -> _Ended:
    """Play the method's rounds, or what is left of them, and write every client's adapter."""
    site = host.install(method)
    if engines is None:
        _read_beforehand(host, method)
    directory = RunDirectory(path, host.experiment.checkpoint.every_s)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(directory.close)
        fleets = Fleets(host.experiment.engine.fleet, host.model, directory.notes) if engines is None else None
        if fleets is not None:
            engine, store = make_engine(host, method, config, directory, cleanup, fleets)
        else:
            assert engines is not None
            engine, store = engines(label, config)
        journal = _journal(host, method, label, directory, store, observer, shared_stages)
        if fleets is not None:
            fleets.told = journal.event
        _note_members(journal, host, engine, engines is not None)
        schedule = replace(schedule_of(host.experiment), clients=hides_clients(method, host.context))
        stages = resolved_stages(method, schedule.rounds, schedule.most_rounds)
        listed = [{"name": stage.name, "rounds": stage.rounds} for stage in stages]
        journal.event({"kind": "run_started", "stages": listed, **_about(host)})
        clock = _clock(engine, schedule, stages, directory) if engines is None else None
        server = federate(method, clock or engine, site, schedule, journal)
        name, best = stages[-1].name, journal.best_rounds()
        last = (name, best[name]["round"] if name in best else stages[-1].rounds or 0)
        at = Tick(name, last[1] or 1, last[1] or 1, schedule.seed)
        infos = engine.clients()
        _note_members(journal, host, engine, engines is not None)
        downloads = Requests(infos, lambda info: final_download(method, server, info, at))
        if isinstance(engine, (LocalEngine, MultiprocessEngine)):
            missing, rows = export_clients(path, host, method, label, engine, downloads, at)
        else:
            missing, rows = _exported_elsewhere(engine, downloads, at, journal, host.wire(method))
        newcomers: dict[str, Any] = {}
        if engines is None and host.newcomers:
            newcomers = measure_newcomers(host, method, label, server, stages, path, observer)
        directory.forget_previous(store)
    beside = {
        "fleet": fleets.chosen() if fleets is not None else None,
        "clock": clock.over() if clock is not None else None,
    }
    return _Ended(journal, stages, last, best, infos, missing, rows, newcomers, beside)


def _results(host: Host, method: Method, path: Path, ended: _Ended, elsewhere: bool) -> dict[str, Any]:
    """What method.json holds, from its directory and what became of its clients.

    elsewhere  whether the clients are on other machines, with their adapters
    """
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
        "privacy": _privacy(path, host, method, stages, results["clients"], examples if elsewhere else {}),
        "best_rounds": [
            {"stage": stage, "round": line["round"], "of": line["rounds"], "validation": line["value"]}
            for stage, line in ended.best.items()
        ],
    }
    return results | {key: value for key, value in beside.items() if value}


def _finished_before(host: Host, label: str, path: Path, observer: Observer | None) -> dict[str, Any] | None:
    """The results that an earlier process wrote, where nothing is missing since; the observer counts the method too."""
    results = finished(path / METHOD_RESULTS)
    if results is None:
        return None
    if gone := missing_of(path, results, host.experiment):
        _LOG.warning("%s: %s is gone from %s; what is missing is made again", label, gone[0], path)
        return None
    if observer:
        observer({"kind": "run_started", "run": label, "stages": [], **_about(host)})
        observer({"kind": "run_finished", "run": label, "mean": results["summary"]["mean"]})
    return results


def _about(host: Host) -> dict[str, Any]:
    return {"clients": len(host.infos), "metric": host.task.metric}


def _read_beforehand(host: Host, method: Method) -> None:
    """Read what is needed after training, so that what cannot be read is told before it."""
    for info in host.newcomers:
        host.examples(info.id, host.experiment.evaluate.split)
        if info.num_examples:
            host.examples(info.id, "train")
    if method.needs.public or (method.needs.public_mixed and len(host.backbones) > 1):
        for key in host.backbones:
            host.public(key)


def missing_of(path: Path, results: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """Files of a finished method that were removed since, without which it is no longer what its results say."""
    return gone_from(path, results, *([HELD_OUT] if experiment.federation.deploy == "best" else []))


def _journal(
    host: Host,
    method: Method,
    label: str,
    directory: RunDirectory,
    store: Memories,
    observer: Observer | None,
    shared_stages: SharedFolder | None,
) -> RunJournal:
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
    if shared_stages is not None and isinstance(store, ClientStore) and whole:
        cache = StageCache(shared_stages, host, method, directory, store, kept)
    names = [stage.name for stage in stages]
    weights = method.influence if len(host.infos) <= WEIGHED else None
    return RunJournal(directory, store, label, observer, cache, kept, host.wire(method), names, weights)


def _note_members(journal: RunJournal, host: Host, engine: Engine, elsewhere: bool) -> None:
    """List what clients said of themselves when they joined; a site that has not come has said nothing."""
    for info in engine.clients():
        if not elsewhere or info.num_examples:
            journal.outbound.hello(info.id, host.hello(info.id))


def _clock(
    engine: Engine, schedule: Schedule, stages: Sequence[Stage], directory: RunDirectory
) -> SimulatedEngine | None:
    """Clients whose replies come when a simulated clock says, where rounds are asynchronous."""
    if schedule.asynchronous is None:
        return None
    names = [stage.name for stage in stages if stage.federated]
    course = directory.notes.setdefault("simulated clock", {})
    return SimulatedEngine(engine, schedule.asynchronous, schedule.seed, names, course)


def _exported_elsewhere(
    engine: Remote, requests: Mapping[str, Payload], at: Tick, journal: RunJournal, wire: Wire
) -> tuple[dict[str, Failure], dict[str, dict[str, Any]]]:
    """As `export_clients`, where clients write their adapters themselves."""
    missing, chosen = engine.export(requests, at)
    rows: dict[str, dict[str, Any]] = {client: {"deployed": run} for client, run in chosen.items()}
    for client in requests:
        if client in missing:
            journal.outbound.note(missing[client], "export", wire)
        else:
            journal.outbound.numbers(client, "export", {"exported": True, **rows.get(client, {})})
    return missing, rows


def export_clients(
    path: Path,
    host: Host,
    method: Method,
    label: str,
    engine: LocalEngine | MultiprocessEngine,
    requests: Mapping[str, Payload],
    at: Tick,
) -> tuple[dict[str, Failure], dict[str, dict[str, Any]]]:
    """Write every client's adapter. A client that has none, or a broken one, is returned with its failure.

    ->  these failures; and by client what its row of the results says of it: `gates` of one number each, see
        `befit.adapters.mixers.gate_values`
    """
    missing: dict[str, Failure] = {}
    rows: dict[str, dict[str, Any]] = {}
    infos = {info.id: info for info in host.infos}
    untrained: list[str] = []
    for client, request in requests.items():
        try:
            deployed = engine.deployment(client, request, at)
            folder, rows[client] = path / "clients" / folder_name(client), {}
            write_client(folder, deployed, host, label, client)
            layout, order = host.backbone_of(client).model.layout, in_order(host.backbone_of(client).model)
            values = gate_values(deployed.mixer, layout, deployed.slots, deployed.arrays)
            if values:
                rows[client]["gates"] = {
                    name: values[name] for name in dict.fromkeys([*order, *values]) if name in values
                }
            if host.experiment.federation.deploy == "best":
                site, size = host.site(infos[client]), host.experiment.evaluate.batch_size
                note_held_out(folder, deployed, site, size, trained_alone(method))
        except RunError:
            raise
        except NotTrained as error:
            missing[client] = Failure.of(client, "export", 0, error)
            untrained.append(client)
        except Exception as error:
            kind = "" if isinstance(error, BefitError) else f"{type(error).__name__}: "  # a KeyError says a key alone
            _LOG.warning("client %s gets no adapter: %s%s", client, kind, reason_of(error))
            missing[client] = Failure.of(client, "export", 0, error)
    if untrained:
        _LOG.warning("%s", untrained_text(untrained, "adapter"))
    return missing, rows


def relative_costs(host: Host, method: Method) -> dict[str, Any]:
    """By family, what `befit cost` says of a step of the method on its backbone; see `befit.cost.compare`.

    Nothing where backbones are quantised: their packed weights do not say how many parameters they stand for.
    """
    from befit.cost.compare import relative_cost

    if any(family_experiment(host.experiment, name).model.quantise != "none" for name in host.families.values()):
        return {}
    pivot = min(backbone.parameters for backbone in host.backbones.values())
    return {
        backbone.name: relative_cost(method, backbone.model.shapes, backbone.parameters, host.common.parameters, pivot)
        for backbone in host.backbones.values()
    }


def spent_in(host: Host, method: Method, clients: Mapping[str, Any]) -> dict[str, Any]:
    """What was protected in a run, how, and what each client has spent of it: as it reports, or as is known of all."""
    plan = hides_clients(method, host.context)
    if plan is not None and plan.rounds:
        spent = dict.fromkeys(clients, plan.epsilon)
    else:
        reported = {client: row["diagnostics"] for client, row in clients.items()}
        spent = {client: numbers[EPSILON] for client, numbers in reported.items() if EPSILON in numbers}
    return {**asdict(host.experiment.privacy), "spent": spent}


def _privacy(
    path: Path,
    host: Host,
    method: Method,
    stages: Sequence[Stage],
    clients: Mapping[str, Any],
    elsewhere: Mapping[str, int],
) -> dict[str, Any]:
    """What was protected, and of whom not every reply was read; nothing in a run that protects nothing.

    elsewhere  how many training examples clients on other machines have, as far as they have come
    """
    if host.experiment.privacy.unit == "none":
        return {}
    found, privacy = spent_in(host, method, clients), host.context.privacy
    hidden = {stage.name for stage in stages if privacy is not None and hides(privacy, method, stage)}
    unread: Collection[str] = _unread(read_lines(path / "metrics.jsonl"), hidden)
    if hidden and host.experiment.federation.asynchronous is not None:
        unread = clients  # anybody may have been at work when the last round ended
    if met := [client for client in unread if elsewhere.get(client)]:
        found["unread"] = met
    return found


# Kinds of failures before which nothing was trained: a site that refuses a request, or was not asked.
_UNTRAINED = {ConfigError.__name__, PayloadMismatch.__name__, LEFT_OUT}


def _unread(metrics: Iterable[Mapping[str, Any]], stages: Collection[str]) -> list[str]:
    """Clients from which a reply of one of these stages may have left that was not read, since they last told what they
    had spent in all."""
    unread: dict[str, None] = {}
    for line in metrics:
        if line["kind"] == "failure" and line["stage"] in stages:
            if line["error"] not in _UNTRAINED and not line.get("scoring"):
                unread[line["client"]] = None
        elif line["kind"] == "diagnostic" and line["name"] == EPSILON:
            unread.pop(line["client"], None)
    return list(unread)


def _curve_stages(stages: Sequence[Stage]) -> list[str]:
    """The stage whose rounds are the curve's, then those after it: the first federated one whose result lasts, else the
    first federated one, else the first of all."""
    federated = [index for index, stage in enumerate(stages) if stage.federated]
    lasting = [index for index in federated if stages[index].lasts]
    return [stage.name for stage in stages[next(iter([*lasting, *federated]), 0) :]]
