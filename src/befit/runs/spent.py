"""What a run says of the privacy that it protected: what each client has spent, and whose replies were not read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.storage import read_lines
from befit.core.values import LEFT_OUT
from befit.protocol.client_privacy import hides_clients
from befit.protocol.method import Method
from befit.protocol.privacy import EPSILON, hides
from befit.protocol.stage import Stage
from befit.runs.host import Host

# Kinds of failures before which nothing was trained: a site that refuses a request, or was not asked.
_UNTRAINED = {ConfigError.__name__, PayloadMismatch.__name__, LEFT_OUT}


def protected(
    path: Path,
    host: Host,
    method: Method,
    stages: Sequence[Stage],
    clients: Mapping[str, Any],
    elsewhere: Mapping[str, int],
) -> dict[str, Any]:
    """What was protected, and of whom not every reply was read; nothing in a run that protects nothing.

    path       the method's directory
    clients    their rows of the results
    elsewhere  how many training examples clients on other machines have, as far as they have come
    """
    if host.experiment.privacy.unit == "none":
        return {}
    found, privacy = _spent(host, method, clients), host.context.privacy
    hidden = {stage.name for stage in stages if privacy is not None and hides(privacy, method, stage)}
    unread: Collection[str] = _unread(read_lines(path / "metrics.jsonl"), hidden)
    if hidden and host.experiment.federation.asynchronous is not None:
        unread = clients  # anybody may have been at work when the last round ended
    if met := [client for client in unread if elsewhere.get(client)]:
        found["unread"] = met
    return found


def _spent(host: Host, method: Method, clients: Mapping[str, Any]) -> dict[str, Any]:
    """What was protected, how, and what each client has spent of it: as it reports, or as is known of all."""
    plan = hides_clients(method, host.context)
    if plan is not None and plan.rounds:
        spent = dict.fromkeys(clients, plan.epsilon)
    else:
        reported = {client: row["diagnostics"] for client, row in clients.items()}
        spent = {client: numbers[EPSILON] for client, numbers in reported.items() if EPSILON in numbers}
    return {**asdict(host.experiment.privacy), "spent": spent}


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
