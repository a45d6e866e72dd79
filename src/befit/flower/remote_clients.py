"""The server's picture of a federation whose data it never sees: who the clients are and how much each one has."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from befit.config.experiment import Experiment, ModelSettings, method_blocks
from befit.core.errors import ConfigError, DataError
from befit.core.values import ClientInfo
from befit.data.federation import SPLITS, ClientData, Federation, Record
from befit.data.files.load import load_public
from befit.data.limit import first_of_each_task
from befit.models import skeleton
from befit.protocol.method import Method
from befit.protocol.private_checks import refused_client
from befit.protocol.registry import build_method
from befit.runs.clients import OWN_MODEL, check_choice, family_experiment, family_settings, privacy_of
from befit.runs.host import Host
from befit.runs.loading import load_federation
from befit.tasks import get_task

_LOG = logging.getLogger(__name__)
Introduction = Mapping[str, Any]  # what a site says of itself when it comes


class RemoteRecords(Sequence[Record]):
    """Records at another site: they can be counted, but not read.

    count  how many; None while nobody has said
    """

    def __init__(self, count: Callable[[], int | None]) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count() or 0

    def __bool__(self) -> bool:
        """Whether there are any, as far as is known: a site that has not connected yet may have some."""
        return self._count() != 0

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


@dataclass(frozen=True)
class Families:
    """Which backbone every client of a run has.

    of      the family of every client, in the order that decides cohorts
    models  of every family that has clients, in the order of their first ones
    """

    of: Mapping[str, str]
    models: Mapping[str, ModelSettings]


def families_of(experiment: Experiment, benchmark: Federation | None = None) -> Families:
    """`benchmark` is the experiment's, where it has been made already.

    Raises ConfigError as `client_ids` and `family_settings` do.
    """
    infos: Mapping[str, Mapping[str, str]]
    if experiment.benchmark is not None:
        infos = {client.id: client.info for client in (benchmark or load_federation(experiment)).clients}
    else:
        infos = {client: {} for client in client_ids(experiment)}
    of = family_settings(experiment, infos, whole=experiment.limit.clients is None)
    return Families(of, {name: family_experiment(experiment, name).model for name in dict.fromkeys(of.values())})


def common_model(experiment: Experiment, families: Families) -> ModelSettings | None:
    """The smallest backbone, where there are several and a method has every client run it."""
    if len(families.models) < 2 or not any(method.needs.common_model for method in methods_of(experiment)):
        return None
    if experiment.benchmark is not None:
        federation = load_federation(experiment)
        task, names = federation.task, federation.label_names
    else:
        assert experiment.data is not None
        task, names = experiment.data.task, tuple(experiment.data.label_names or ())

    def parameters(model: ModelSettings) -> int:
        return sum(parameter.numel() for parameter in skeleton(model, task, names).parameters())

    return min(families.models.values(), key=parameters)


def needs_model(experiment: Experiment) -> bool:
    """Whether a method runs the models at the server, so that the server's weights are those that count."""
    several = bool(experiment.families)
    return any(one.needs.server_model or (several and one.needs.public_mixed) for one in methods_of(experiment))


def methods_of(experiment: Experiment) -> list[Method]:
    return [build_method(block) for block in experiment.blocks]


class RemoteClients:
    """The clients of an experiment as the server knows them: who they are, and what their sites have to say.

    said       what each site said of itself; it may grow while the run goes on
    backbones  by family, fingerprint that every site's backbone has to have; none while nobody has decided
    """

    def __init__(
        self,
        experiment: Experiment,
        said: Mapping[str, Introduction] | None = None,
        backbones: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment, self.backbones = experiment, dict(backbones or {})
        self._said: Mapping[str, Introduction] = {} if said is None else said  # itself: it fills as sites come
        self._host: Host | None = None
        self._runs_here = needs_model(experiment)
        needs = (method.needs.splits for method in methods_of(experiment))
        federation = experiment.federation
        choice = ["val"] if federation.deploy == "best" or federation.patience is not None else []
        self._needed: tuple[str, ...] = ("train", experiment.evaluate.split, *choice, *itertools.chain(*needs))
        self._known = load_federation(experiment) if experiment.benchmark is not None else None
        if self._known is not None:
            self.ids = [client.id for client in self._known.clients]
            self._data = self._known.manifest["partition"]["sha256"]
            self._counts = {c.id: [len(c.train), len(c.val), len(c.test)] for c in self._known.clients}
        else:
            self.ids, self._data, self._counts = client_ids(experiment), "", {}
        families = families_of(experiment, self._known)
        self._families, common = families.of, common_model(experiment, families)
        self._smallest = next((name for name, model in families.models.items() if model == common), None)
        public, self._public_hash = ((), "") if experiment.data is None else load_public(experiment.data)
        self._public = first_of_each_task(public, experiment.limit.records)

    def check_methods(self) -> None:
        """Raise, before any site has come, what a run would raise once they have, as far as it does not depend on
        their data: ConfigError where clients, models and methods do not fit, ModelError for a model that cannot be
        built. Warn of what it would warn of."""
        check_choice(self._experiment)
        unknown = {family: str(number) for number, family in enumerate(dict.fromkeys(self._families.values()))}
        host = Host(self._experiment, self._federation(), unknown)
        for warning in host.check_methods(method_blocks(self._experiment)):
            _LOG.warning("%s", warning)

    def problem(self, client: str, said: Introduction) -> str:
        """Why a site that says this cannot be this client; empty where it can."""
        if self._known is not None and said["data"] != self._data:
            whose = f"hash {said['data'][:12]}, the server's {self._data[:12]}"
            return f"site {client} made other data of {self._known.name}: {whose}"
        if self._known is not None and said["examples"] != self._counts[client]:
            there = self._counts[client]
            return f"site {client} reports {said['examples']} examples, where {self._known.name} has {there}"
        counts: dict[str, int] = dict(zip(SPLITS, said["examples"], strict=True))
        if empty := [split for split in self._needed if not counts[split]]:
            return f"site {client} has no {empty[0]} examples"
        if reason := self._unprotected(client, counts["train"]):
            return f"site {client}: {reason}"
        return self._other_backbone(client, said)

    def _other_backbone(self, client: str, said: Introduction) -> str:
        """Why a site's own backbone, or the smallest one, is not that of the family that has it."""
        whose = "the server's" if self._runs_here else "the others'"
        for family, key in ((self._families[client], "backbone"), (self._smallest, "common_model")):
            expected, its = self.backbones.get(family or ""), said.get(key, "none")
            if expected is not None and its != expected:
                of = "" if family == OWN_MODEL else f" of family {family}"
                what = "backbone" if key == "backbone" else "smallest backbone, which a method has every client run"
                return f"site {client} has another {what}: fingerprint {its[:12]}, {whose}{of} {expected[:12]}"
        return ""

    @property
    def awaited(self) -> Mapping[str, str]:
        """The family of every client of which some site has to come before the run can begin, since it alone knows the
        family's backbone."""
        if self._runs_here or len(set(self._families.values())) == 1:
            return {}
        return {client: family for client, family in self._families.items() if family not in self.backbones}

    def _unprotected(self, client: str, examples: int) -> str:
        """Why this run cannot protect single examples of so many. A site that says so, true or not, is refused by
        itself: told of all clients, it would end the run."""
        privacy = privacy_of(self._experiment)
        if self._known is not None or privacy is None or not privacy.by_example:
            return ""
        for label, block in method_blocks(self._experiment).items():
            for problem in refused_client(build_method(block), privacy, self._experiment.train, client, examples):
                return f"method {label}: {problem}"
        return ""

    def read_backbones(self) -> None:
        """Read the weights of the models that a method runs at the server, if one does, before any site has come: every
        site is then held against them when it comes."""
        if self._runs_here and self._host is None:
            self._host = Host(self._experiment, self._federation())
            self._decide(self._host)

    def host(self, began: Sequence[str]) -> Host:
        """A host with clients that are elsewhere, and the backbone that all of a family have to have: the server's own
        where a method runs it there, otherwise what most of the family's sites have.

        began  the clients that were there when the run began
        """
        self.read_backbones()
        if self._host is None:
            for family in dict.fromkeys(self._families.values()):
                theirs = [self._said[client]["backbone"] for client in began if self._families[client] == family]
                self.backbones.setdefault(family, Counter(theirs).most_common(1)[0][0])
            self._host = Host(self._experiment, self._federation(), self.backbones)
            self._decide(self._host)
        if self._known is None:
            data = json.dumps({client: self._said[client]["data"] for client in began}) + self._public_hash
            manifest = {"partition": {"name": "sites", "sha256": hashlib.sha256(data.encode()).hexdigest()}}
            self._host.federation = replace(self._host.federation, manifest=manifest)
        return self._host

    def _decide(self, host: Host) -> None:
        self.backbones = {family: host.backbone_of(client).fingerprint for client, family in self._families.items()}

    def _federation(self) -> Federation:
        infos = {client.id: client.info for client in self._known.clients} if self._known is not None else {}

        def count(client: str, split: int) -> int | None:
            counts = self._said[client]["examples"] if client in self._said else self._counts.get(client)
            return None if counts is None else counts[split]

        def client_data(client: str) -> ClientData:
            train, val, test = (RemoteRecords(partial(count, client, split)) for split in range(3))
            return ClientData(client, train, val, test, infos.get(client, {}))

        clients = tuple(map(client_data, self.ids))
        if self._known is not None:
            if self._known.newcomers and self._experiment.evaluate.newcomers:
                number, name = len(self._known.newcomers), self._known.name
                _LOG.warning("the %d newcomers of %s are not measured on Flower", number, name)
            return replace(self._known, clients=clients, newcomers=())
        assert self._experiment.data is not None
        names = tuple(self._experiment.data.label_names or ())
        return Federation("files", "1", self._experiment.data.task, clients, names, public=self._public)


class Infos(Mapping[str, ClientInfo]):
    """Every client of a host by its id, with as many examples as its site has said by now."""

    def __init__(self, host: Host) -> None:
        self._clients = {client.id: client for client in host.federation.clients}
        self._backbones = {info.id: info.backbone for info in host.infos}

    def __getitem__(self, client: str) -> ClientInfo:
        return ClientInfo(client, self._backbones[client], len(self._clients[client].train))

    def examples(self, client: str, split: str) -> int:
        return len(getattr(self._clients[client], split))

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
