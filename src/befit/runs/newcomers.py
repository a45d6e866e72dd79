"""Newcomers: clients that took no part in training, measured when a run is over.

Each is given what the server has by then: first it uses the download as it is, then it runs the method's personal
stages as any client would, from their first to their last. Where the method has an arrival, a newcomer goes through
that before its download, and sends what it declares; the run's own state, and so all other clients, stay unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.core.errors import BefitError, DataError, NotTrained
from befit.core.names import folder_name
from befit.core.storage import read_sealed, write_json, write_sealed
from befit.core.values import ClientInfo, Failure, Payload, Tick, Update
from befit.core.wire_form import Wire
from befit.protocol.federate import final_download
from befit.protocol.method import Method, newcomer_stage
from befit.protocol.stage import Stage
from befit.protocol.store import ClientStore
from befit.runs.artifacts import export_name, gone_from, write_client
from befit.runs.directory import finished
from befit.runs.journal import Observer
from befit.runs.local import LocalEngine
from befit.runs.outbound import Outbound
from befit.runs.results import over_clients, over_rows

if TYPE_CHECKING:
    from befit.runs.host import Host

_LOG = logging.getLogger(__name__)


def measure_newcomers(
    host: Host,
    method: Method,
    label: str,
    server: Payload,
    stages: Sequence[Stage],
    path: Path,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """What each newcomer of the host gets out of a finished run, and its adapter in `path/newcomers/<id>`.

    server  the server's final state
    stages  the method's, with every number of rounds filled in
    ->  clients (per newcomer: the metrics at the end; the headline before any stage of its own, `download`, and of the
        backbone without adapters, `backbone`; bytes, seconds, diagnostics; `reason` where it has no model; `unchanged`
        where all metrics are the backbone's), summary, failures

    Every newcomer's result is written when it is known. A resumed run makes it again only where it failed, for its
    records may have been mended since, or where its adapter was removed.
    """
    rows: dict[str, dict[str, Any]] = {}
    for done, info in enumerate(host.newcomers, start=1):
        file = path / "newcomers" / folder_name(info.id) / "result.json"
        if (row := finished(file)) is None or row["failures"] or gone_from(path, [row]):
            write_sealed(file, _measure(host, method, label, server, stages, file.parent, info))
            row = read_sealed(file)
        rows[info.id] = row
        if observer:
            observer({"kind": "newcomer", "run": label, "done": done, "of": len(host.newcomers)})
    metric = host.task.metric
    summary = {
        **over_rows(rows, metric),
        **{
            name: over_clients({client: row[name] for client, row in rows.items()}) for name in ("download", "backbone")
        },
        **{key: sum(row[key] for row in rows.values()) for key in ("bytes_up", "bytes_down", "seconds", "cpu_seconds")},
    }
    failures = [{"client": client, **failure} for client, row in rows.items() for failure in row["failures"]]
    return {"clients": rows, "summary": summary, "failures": failures}


def _measure(
    host: Host, method: Method, label: str, server: Payload, stages: Sequence[Stage], folder: Path, info: ClientInfo
) -> dict[str, Any]:
    """One newcomer from its first contact to its adapter."""
    experiment, metric = host.experiment, host.backbone_of(info.id).task.metric
    engine, outbound, wire = newcomer_engine(host, method, info), Outbound(), host.wire(method)
    last = stages[-1].rounds or 1
    at = Tick(stages[-1].name, last, last, experiment.federation.seed)
    row: dict[str, Any] = {
        metric: None,
        "download": None,
        "backbone": None,
        "unchanged": False,
        "examples": len(host.examples(info.id, experiment.evaluate.split)),
        "train_examples": info.num_examples,
        "bytes_up": 0,
        "bytes_down": 0,
        "seconds": 0.0,
        "cpu_seconds": 0.0,
        "diagnostics": {},
        "adapter": None,
        "reason": "",
        "failures": [],
    }
    personal = [stage for stage in stages if not stage.federated]
    request: dict[str, Payload] = {}
    try:
        bare = _backbone(host, info)
        row["backbone"] = bare[metric]
        welcome = arrive(engine, host, method, server, info, row, outbound)
    except DataError as error:  # its examples have no such metric, as those of one class have none of several
        bare, welcome = {}, Failure.of(info.id, at.stage, at.round, error)
    if isinstance(welcome, Failure):
        scored = welcome
    else:
        request = {info.id: final_download(method, welcome, info, at)}
        (scored,) = engine.score(request, at, experiment.evaluate.split)
        outbound.note(scored, at.stage, wire)
        if not isinstance(scored, Failure):
            row["download"] = scored.metrics[metric]
        if not personal:
            row["bytes_down"] += scored.cost.bytes_down
        else:
            failure = _personalise(engine, personal, welcome, info, at, row, outbound, wire)
            if failure is None:
                (scored,) = engine.score(request, at, experiment.evaluate.split)
                outbound.note(scored, at.stage, wire)
            else:
                scored = failure
    if newcomer_stage(method) is not None:
        write_json(folder / "outbound.json", outbound.as_dict())
    if isinstance(scored, Failure):
        row["reason"] = scored.reason
        if scored.kind != NotTrained.__name__:  # the method's own answer, not an accident
            _LOG.warning("newcomer %s, stage %s: %s: %s", info.id, scored.stage, scored.kind, scored.reason)
            row["failures"] += [
                {"stage": scored.stage, "round": scored.round, "kind": scored.kind, "reason": scored.reason}
            ]
        return row
    if scored.confusion:
        row["confusion"] = dict(scored.confusion)
    row |= {**scored.metrics, "unchanged": dict(scored.metrics) == bare}
    write_client(folder, engine.deployment(info.id, request[info.id], at), host, label, info.id)
    row["adapter"] = f"newcomers/{folder.name}/{export_name(folder)}"
    return row


def newcomer_engine(host: Host, method: Method, info: ClientInfo) -> LocalEngine:
    """An engine for one newcomer, which has no state yet."""
    experiment = host.experiment
    return LocalEngine(
        method,
        (info,),
        host.site,
        ClientStore(None),
        wire=host.wire(method),
        eval_batch_size=experiment.evaluate.batch_size,
        rounds=experiment.federation.rounds,
        most_rounds=experiment.limit.rounds,
    )


def arrive(
    engine: LocalEngine,
    host: Host,
    method: Method,
    server: Payload,
    info: ClientInfo,
    row: dict[str, Any],
    outbound: Outbound,
) -> Payload | Failure:
    """The server's state for this newcomer, after the method's arrival stage; `server` itself for a method without one.
    Adds the cost to the row, and what left the newcomer to the list.
    """
    if (stage := newcomer_stage(method)) is None:
        return server
    at = Tick(stage.name, 1, 1, host.experiment.federation.seed)
    (reply,) = engine.exchange({info.id: stage.exchange.dispatch(server, info, at)}, at)
    _spend(row, reply)
    outbound.note(reply, at.stage, host.wire(method))
    if isinstance(reply, Failure):
        return reply
    try:
        return stage.exchange.aggregate(server, [reply], host.server_site(), at)
    except BefitError as error:
        return Failure.of(info.id, stage.name, 1, error, cost=reply.cost)


def _backbone(host: Host, info: ClientInfo) -> dict[str, float]:
    """The metrics of the newcomer's backbone without adapters."""
    site, evaluate = host.site(info), host.experiment.evaluate
    site.model.reset()
    with site.model.active():
        return site.task.evaluate(
            site.model.backbone,
            site.examples(evaluate.split),
            evaluate.batch_size,
            site.model.device,
            site.values(evaluate.split),
        )


def _personalise(
    engine: LocalEngine,
    stages: Sequence[Stage],
    server: Payload,
    info: ClientInfo,
    at: Tick,
    row: dict[str, Any],
    outbound: Outbound,
    wire: Wire,
) -> Failure | None:
    """Run all personal stages from the server's final state. Adds their costs and diagnostics to the row, and what left
    the newcomer to the list."""
    for stage in stages:
        rounds = stage.rounds or 0
        for number in range(1, rounds + 1):
            now = replace(at, stage=stage.name, round=number, rounds=rounds)
            (reply,) = engine.exchange({info.id: stage.exchange.dispatch(server, info, now)}, now)
            outbound.note(reply, now.stage, wire)
            _spend(row, reply)
            if isinstance(reply, Failure):
                return reply
            row["diagnostics"] |= _diagnostics(reply.report)
    return None


def _spend(row: dict[str, Any], reply: Update | Failure) -> None:
    """Add what an exchange took to a row. What a failure brought up is no part of what was used."""
    row["bytes_up"] += 0 if isinstance(reply, Failure) else reply.cost.bytes_up
    row["bytes_down"] += reply.cost.bytes_down
    row["seconds"] += reply.cost.seconds
    row["cpu_seconds"] += reply.cost.cpu_seconds


def _diagnostics(report: Mapping[str, float]) -> dict[str, float]:
    """What the method reports beside the loss; as `RunJournal.trained` divides them."""
    return {name: value for name, value in report.items() if name not in ("loss", "steps")}
