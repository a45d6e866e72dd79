"""The end of a method's rounds: every client's adapter is written, here or where the client is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from befit.adapters.mixers import gate_values
from befit.adapters.model import in_order
from befit.core.errors import PASSING, BefitError, NotTrained
from befit.core.names import folder_name
from befit.core.plugins import reason_of
from befit.core.values import Failure, Payload, Tick
from befit.core.wire_form import Wire
from befit.protocol.method import Deployment, Method, trained_alone
from befit.runs.artifacts import write_client
from befit.runs.deploy import note_held_out
from befit.runs.engines import Remote
from befit.runs.host import Host
from befit.runs.journal import RunJournal, untrained_text
from befit.runs.local import LocalEngine
from befit.runs.processes import MultiprocessEngine

_LOG = logging.getLogger(__name__)


def write_models(
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
            folder = path / "clients" / folder_name(client)
            write_client(folder, deployed, host, label, client)
            rows[client] = _gates(host, client, deployed)
            if host.experiment.federation.deploy == "best":
                site, size = host.site(infos[client]), host.experiment.evaluate.batch_size
                note_held_out(folder, deployed, site, size, trained_alone(method))
        except PASSING:
            raise  # a resumed run writes the model
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


def _gates(host: Host, client: str, deployed: Deployment) -> dict[str, Any]:
    """What a model whose gates are one number each has to say of them, by module in the backbone's order."""
    model = host.backbone_of(client).model
    values = gate_values(deployed.mixer, model.layout, deployed.slots, deployed.arrays)
    names = dict.fromkeys([*in_order(model), *values])
    return {"gates": {name: values[name] for name in names if name in values}} if values else {}


def told_elsewhere(
    engine: Remote, requests: Mapping[str, Payload], at: Tick, journal: RunJournal, wire: Wire
) -> tuple[dict[str, Failure], dict[str, dict[str, Any]]]:
    """As `write_models`, where clients write their adapters themselves."""
    missing, chosen = engine.export(requests, at)
    rows: dict[str, dict[str, Any]] = {client: {"deployed": run} for client, run in chosen.items()}
    for client in requests:
        if client in missing:
            journal.outbound.note(missing[client], "export", wire)
        told = {} if client in missing else {"exported": True}
        journal.outbound.numbers(client, "export", {**told, **rows.get(client, {})})
    return missing, rows
