"""The server's picture of a federation whose data it never sees: who the clients are and how much each one has."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, DataError
from befit.data.federation import ClientData, Federation, Record
from befit.protocol.registry import build_method
from befit.runs.host import Host
from befit.runs.loading import load_federation
from befit.tasks import get_task

_LOG = logging.getLogger(__name__)


class Elsewhere(Sequence[Record]):
    """Records at another site: they can be counted, but not read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise DataError("this data is at its site and cannot be read here")


def client_ids(experiment: Experiment) -> list[str]:
    """The clients that a run needs, in the order that decides cohorts: the local run's.

    Raises ConfigError where only a client's files would tell.
    """
    if experiment.benchmark is not None:
        return [client.id for client in load_federation(experiment).clients]
    assert experiment.data is not None
    problems = []
    if not isinstance(experiment.data.clients, dict):
        problems.append(
            "data.clients: on Flower must list the clients, such as {hospital-a: site, hospital-b: site}; "
            "where their data is, each site says itself"
        )
    if get_task(experiment.data.task).has_classes and experiment.data.label_names is None:
        problems.append("data.label_names: is required on Flower; the server sees no data to collect them from")
    if problems:
        raise ConfigError(problems)
    return list(experiment.data.clients)[: experiment.limit.clients]


def remote_host(experiment: Experiment, hellos: Mapping[str, Mapping[str, Any]]) -> Host:
    """A host with clients that are elsewhere. `hellos` is what each site said of itself.

    The server has the backbone's shapes, and its weights only where a method runs it there: then they are compared with
    the sites', otherwise the sites' with each other. Raises ConfigError that names every site with another backbone, or
    with other data of a benchmark.
    """
    known = load_federation(experiment) if experiment.benchmark is not None else None
    counts = {client: [Elsewhere(count) for count in hello["examples"]] for client, hello in hellos.items()}
    infos = {client.id: client.info for client in known.clients} if known is not None else {}
    clients = tuple(
        ClientData(client, train, val, test, infos.get(client, {})) for client, (train, val, test) in counts.items()
    )
    if known is not None:
        if known.newcomers and experiment.evaluate.newcomers:
            _LOG.warning("the %d newcomers of %s are not measured on Flower", len(known.newcomers), known.name)
        federation = replace(known, clients=clients, newcomers=())
        wanted = known.manifest["partition"]["sha256"]
        problems = [
            f"site {client} made other data of {known.name}: hash {hello['data'][:12]}, the server's {wanted[:12]}"
            for client, hello in hellos.items()
            if hello["data"] != wanted
        ]
        problems += [
            f"site {client.id} reports {hellos[client.id]['examples']} examples, where {known.name} has {there}"
            for client in known.clients
            if (there := [len(client.train), len(client.val), len(client.test)])
            != hellos.get(client.id, {}).get("examples", there)
        ]
    else:
        assert experiment.data is not None
        data = json.dumps({client: hello["data"] for client, hello in hellos.items()})
        manifest = {"partition": {"name": "sites", "sha256": hashlib.sha256(data.encode()).hexdigest()}}
        names = tuple(experiment.data.label_names or ())
        federation = Federation("files", "1", experiment.data.task, clients, label_names=names, manifest=manifest)
        problems = []
    ((common, _),) = Counter(hello["backbone"] for hello in hellos.values()).most_common(1)
    methods = (build_method(block) for block in (experiment.method, *experiment.baselines))
    runs_here = any(method.needs.server_model for method in methods)
    host = Host(experiment, federation, None if runs_here else common)
    whose = "the server's" if runs_here else "the others'"
    problems += [
        f"site {client} has another backbone: fingerprint {hello['backbone'][:12]}, {whose} {host.fingerprint[:12]}"
        for client, hello in hellos.items()
        if hello["backbone"] != host.fingerprint
    ]
    if problems:
        raise ConfigError(problems, "the federation")
    return host
