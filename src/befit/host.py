"""What all methods of one experiment share: the data, the task, and one backbone in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from befit.adapters.keys import EVERYTHING
from befit.adapters.model import AdaptedModel
from befit.benchmarks.base import ClientData, Federation
from befit.config import Experiment
from befit.errors import ConfigError, DataError
from befit.method import Method
from befit.models import load_backbone
from befit.site import ServerSite, Site
from befit.tasks import make_task
from befit.types import ClientInfo, Needs

if TYPE_CHECKING:
    from befit.tasks.base import Examples, Task

__all__ = ["Host", "check_needs", "load_federation", "load_model", "resolve_model", "trains_head"]


class Host:
    """Holds one backbone for any number of clients and methods. `install` makes it ready for one method."""

    def __init__(self, experiment: Experiment, federation: Federation | None = None) -> None:
        self.experiment = resolve_model(experiment)
        self.federation = load_federation(experiment) if federation is None else federation
        check_clients(self.federation, experiment)
        self.model, self.task, self.fingerprint = load_model(
            self.experiment, self.federation.task, self.federation.label_names
        )
        self.infos = tuple(self._info(client) for client in self.federation.clients)
        self._data = {client.id: client for client in (*self.federation.clients, *self.federation.newcomers)}
        self._prepared: dict[tuple[str, str], Examples] = {}

    def _info(self, client: ClientData) -> ClientInfo:
        return ClientInfo(client.id, self.fingerprint[:16], len(client.train))

    def install(self, method: Method) -> ServerSite:
        """Put the method's slots on the backbone; returns the server's site."""
        self.model.install(method.layout, self.experiment.federation.seed)
        self.model.reset()
        return ServerSite(self.model.dump(EVERYTHING), self.infos)

    def site(self, info: ClientInfo) -> Site:
        return Site(info, self.model, self.task, self.experiment.train, lambda split: self.examples(info.id, split))

    def examples(self, client: str, split: str) -> Examples:
        """A client's split, prepared once."""
        key = client, split
        if key not in self._prepared:
            try:
                self._prepared[key] = self.task.prepare(getattr(self._data[client], split))
            except DataError as error:
                raise DataError(f"client {client}, {split}: {error}") from error
        return self._prepared[key]


def load_model(experiment: Experiment, task: str, label_names: Sequence[str]) -> tuple[AdaptedModel, Task, str]:
    """The backbone with places for adapters, the task, and the backbone's fingerprint."""
    experiment = resolve_model(experiment)
    settings, adapter = experiment.model, experiment.adapter
    backbone = load_backbone(settings, task, label_names, experiment.federation.seed)
    evaluate = experiment.evaluate
    made = make_task(
        task,
        backbone.processor,
        label_names,
        max_length=settings.max_length,
        prompt=settings.prompt,
        generate=evaluate.generate,
        max_new_tokens=evaluate.max_new_tokens,
        metrics=evaluate.metrics or (),
    )
    model = AdaptedModel(
        backbone.model,
        adapter.targets,
        head=trains_head(experiment, task),
        dropout=adapter.dropout,
    )
    return model, made, backbone.fingerprint


def trains_head(experiment: Experiment, task: str) -> bool:
    """Whether slots carry the task head: as configured, or for all tasks that have one."""
    head = experiment.adapter.head
    return head if isinstance(head, bool) else task != "causal-lm"


def load_federation(experiment: Experiment) -> Federation:
    """The benchmark or the user's files that the configuration names."""
    if experiment.benchmark is not None:
        from befit.benchmarks.registry import build

        settings = experiment.benchmark
        return build(settings.name, settings.version, settings.arguments)
    from befit.benchmarks.files import load_files

    assert experiment.data is not None
    data = experiment.data
    return load_files(
        data.clients,
        task=data.task,
        columns=data.columns,
        label_names=data.label_names,
        val_fraction=data.val_fraction,
        test_fraction=data.test_fraction,
        seed=experiment.federation.seed,
    )


def resolve_model(experiment: Experiment) -> Experiment:
    """Fill in the benchmark's own model where the configuration names none."""
    if experiment.model.id:
        return experiment
    if experiment.benchmark is None:
        raise ConfigError(["model.id: is needed with your own data: a directory, a hub id or a model that ships"])
    from befit.benchmarks.registry import get

    return replace(experiment, model=replace(experiment.model, id=get(experiment.benchmark.name).default_model))


def check_clients(federation: Federation, experiment: Experiment) -> None:
    """Raise DataError naming every client that could not train or be scored, before anything is trained."""
    if not federation.clients:
        raise DataError(f"{federation.name} has no clients")
    split = experiment.evaluate.split
    problems = [f"client {c.id} has no training examples" for c in federation.clients if not len(c.train)]
    problems += [
        f"client {c.id} has no {split} examples to be scored on (evaluate.split)"
        for c in federation.clients
        if not len(getattr(c, split))
    ]
    if problems:
        raise DataError(f"{federation.name}: " + "; ".join(problems[:5]) + ("; …" if len(problems) > 5 else ""))
    cohort, wanted = experiment.federation.cohort, experiment.federation.min_replies
    refused = []
    if cohort is not None and cohort > len(federation.clients):
        refused.append(f"federation.cohort: {cohort} of {len(federation.clients)} clients cannot take part")
    if isinstance(wanted, int) and wanted > len(federation.clients):
        refused.append(f"federation.min_replies: {wanted} of {len(federation.clients)} clients cannot reply")
    if refused:
        raise ConfigError(refused)


def check_needs(name: str, method: Method, clients: Sequence[ClientData]) -> list[str]:
    """What the method demands and this federation does not have."""
    needs: Needs = method.needs
    problems = []
    if len(clients) < needs.min_clients:
        problems.append(f"method {name} needs at least {needs.min_clients} clients, there are {len(clients)}")
    for split in needs.splits:
        if empty := [client.id for client in clients if not len(getattr(client, split))]:
            problems.append(f"method {name} needs {split} examples at every client; {empty[0]} has none")
    return problems
