"""What all methods of one experiment share: the data, the task, and one backbone in memory for each family."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from befit.adapters.keys import EVERYTHING
from befit.adapters.layout import ModelShapes
from befit.adapters.model import AdaptedModel
from befit.benchmarks.base import ClientData, Federation
from befit.config import AdapterSettings, Experiment, FamilySettings
from befit.errors import ConfigError, DataError, ModelError, did_you_mean
from befit.families import each_family
from befit.left_out import left_out_sentence, without_left_out
from befit.limit import limited
from befit.method import Method
from befit.models import load_backbone, load_shapes
from befit.registry import build_method
from befit.site import Backbone, ServerSite, Site
from befit.stream import Stream
from befit.tasks import GENERATIVE, make_task
from befit.types import ClientInfo, Needs, State

if TYPE_CHECKING:
    from befit.tasks.base import Examples, Task

__all__ = [
    "OWN_MODEL", "Host", "check_needs", "check_shapes", "family_experiment", "family_settings", "load_federation",
    "load_model", "resolve_model", "trains_head",
]  # fmt: skip

OWN_MODEL = "model"
logger = logging.getLogger(__name__)


class Host:
    """Holds one backbone for each family of clients and any number of methods. `install` makes it ready for one.

    elsewhere  fingerprint of the weights that the clients have on other machines; here are shapes then, and no weights
    """

    def __init__(
        self, experiment: Experiment, federation: Federation | None = None, elsewhere: str | None = None
    ) -> None:
        self._elsewhere = elsewhere
        self.experiment = resolve_model(experiment)
        self.federation = load_federation(experiment) if federation is None else federation
        arriving = self.federation.newcomers if experiment.evaluate.newcomers else ()
        check_clients(self.federation, experiment)
        check_newcomers(self.federation.name, arriving, experiment.evaluate.split)
        everybody = {one.id: one.info for one in (*self.federation.clients, *arriving)}
        settings = family_settings(self.experiment, everybody, whole="limit" not in self.federation.manifest)
        check_families(settings, [one.id for one in self.federation.clients])
        loaded = {name: self._load(name) for name in dict.fromkeys(settings.values())}
        self.backbones = {one.key: one for one in loaded.values()}
        self._family = {client: self.backbones[loaded[name].key] for client, name in settings.items()}
        if drops(self.experiment):
            self.federation = without_left_out(self.federation, {key: one.task for key, one in self._family.items()})
            logger.warning("%s", left_out_sentence(self.federation.manifest["left_out"]))
        self.smallest = self._load_common() or min(
            self.backbones.values(), key=lambda one: (one.parameters, one.fingerprint)
        )
        for one in self.backbones.values():
            one.model.shapes = replace(one.model.shapes, last=self.smallest.model.shapes.last)
        self.infos = tuple(self._info(client) for client in self.federation.clients)
        self.newcomers = tuple(self._info(client) for client in arriving)
        self._data = {client.id: client for client in (*self.federation.clients, *self.federation.newcomers)}
        self._prepared: dict[tuple[str, str, str, str], Examples] = {}
        self._public: dict[str, Examples] = {}
        self._streams: dict[str, Stream] = {}

    def _load(self, name: str) -> Backbone:
        experiment = family_experiment(self.experiment, name)
        model, task, fingerprint = load_model(
            experiment, self.federation.task, self.federation.label_names, self._elsewhere
        )
        return Backbone(name, fingerprint, model, task)

    def _load_common(self) -> Backbone | None:
        """The configuration's common model, bare; one that a family has already is not loaded twice."""
        settings = self.experiment.common_model
        if settings is None:
            return None
        for one in self.backbones.values():
            if family_experiment(self.experiment, one.name).model == settings:
                return one
        bare = AdapterSettings(head=False)
        experiment = replace(self.experiment, model=settings, families={}, adapter=bare)
        model, task, fingerprint = load_model(experiment, self.federation.task, self.federation.label_names)
        return Backbone("common_model", fingerprint, model, task)

    def _info(self, client: ClientData) -> ClientInfo:
        return ClientInfo(client.id, self._family[client.id].key, len(client.train))

    @property
    def families(self) -> dict[str, str]:
        """The name of every client's family, newcomers included."""
        return {client: one.name for client, one in self._family.items()}

    def backbone_of(self, client: str) -> Backbone:
        """The backbone of a client. Newcomers that are not measured have that of the first client."""
        return self._family.get(client, self._first)

    @property
    def _first(self) -> Backbone:
        return next(iter(self.backbones.values()))

    @property
    def model(self) -> AdaptedModel:
        """The backbone of the first client, which is everybody's where there are no families."""
        return self._first.model

    @property
    def task(self) -> Task:
        return self._first.task

    @property
    def fingerprint(self) -> str:
        """Of the backbone; of all of them, where there are several."""
        if len(self.backbones) == 1:
            return self._first.fingerprint
        return hashlib.sha256(" ".join(one.fingerprint for one in self.backbones.values()).encode()).hexdigest()

    def build(self, config: str | Mapping[str, Any]) -> Method:
        """The method of a configuration block, for all families of clients."""
        return each_family(build_method(config), len(self.backbones))

    def problems(self, label: str, config: Mapping[str, Any]) -> list[str]:
        """Why this method cannot run here; nothing where it can."""
        method = build_method(config)
        found = check_needs(label, method, self.federation, self.families)
        for key, one in self.backbones.items():
            clients = [info.id for info in (*self.infos, *self.newcomers) if info.backbone == key]
            found += check_shapes(label, method, one.model.shapes, clients)
        if found:
            return found
        shapes = {one.name: one.model.shapes for one in self.backbones.values()}
        return [f"method {label}: {reason}" for reason in method.mismatches(shapes)]

    def install(self, method: Method) -> ServerSite:
        """Put the method's slots on every backbone; returns the server's site."""
        starts: dict[str, State] = {}
        for key, one in self.backbones.items():
            if self._elsewhere is not None:  # nobody runs the model here, so its slots need no memory
                starts[key] = method.layout.initial(one.model.shapes, self.experiment.federation.seed)
                continue
            one.model.install(method.layout, self.experiment.federation.seed)
            one.model.reset()
            starts[key] = one.model.dump(EVERYTHING)
        return self.server_site(starts)

    def server_site(self, starts: Mapping[str, State] | None = None) -> ServerSite:
        """The server's site; initial adapters by backbone are those of the installed slots unless given."""
        if starts is None:
            for one in self.backbones.values():
                one.model.reset()
            starts = {key: one.model.dump(EVERYTHING) for key, one in self.backbones.items()}
        return ServerSite(starts, self.infos, self.backbones, self.public, self.experiment.train, self.smallest)

    def site(self, info: ClientInfo) -> Site:
        own, smallest = self._family[info.id], self.smallest
        return Site(
            info,
            own.model,
            own.task,
            self.experiment.train,
            lambda split: self.examples(info.id, split),
            smallest=smallest,
            small_examples=lambda split: self.examples(info.id, split, smallest),
            public=lambda: self.public(own.key),
            stream=self._stream(info.id),
            others=lambda split: {
                one.id: self.examples(one.id, split, own) for one in self.federation.clients if one.id != info.id
            },
        )

    def _stream(self, client: str) -> Stream | None:
        settings = self.experiment.stream
        if settings.kind == "none":
            return None
        if client not in self._streams:
            self._streams[client] = Stream.of(client, self._data[client].train, settings.kind, settings.sampling)
        return self._streams[client]

    def examples(self, client: str, split: str, backbone: Backbone | None = None) -> Examples:
        """A client's split in the terms of its own backbone, or of another; prepared once."""
        backbone = backbone or self.backbone_of(client)
        key = backbone.name, backbone.key, client, split
        if key not in self._prepared:
            try:
                self._prepared[key] = backbone.task.prepare(getattr(self._data[client], split))
            except DataError as error:
                raise DataError(f"client {client}, {split}: {error}") from error
        return self._prepared[key]

    def public(self, key: str) -> Examples:
        """The federation's public records in the terms of one backbone, by its key; prepared once."""
        if key not in self._public:
            try:
                self._public[key] = self.backbones[key].task.prepare(self.federation.public)
            except DataError as error:
                raise DataError(f"public records: {error}") from error
        return self._public[key]


def family_settings(
    experiment: Experiment, clients: Mapping[str, Mapping[str, str]], whole: bool = True
) -> dict[str, str]:
    """The family of every client, by the configuration's patterns; "model" for those that none names.

    clients  what is known of each client, by its id
    whole    these are all clients, of whom every pattern has to fit one
    Raises ConfigError for a client in two families and for a pattern that fits nobody.
    """
    found: dict[str, str] = {}
    problems: list[str] = []
    for client, info in clients.items():
        named = [
            name
            for name, family in experiment.families.items()
            if any(_fits(pattern, client, info) for pattern in family.clients)
        ]
        if len(named) > 1:
            problems.append(f"families: client {client} is in {' and in '.join(named)}")
        found[client] = named[0] if named else OWN_MODEL
    for name, family in experiment.families.items() if whole else ():
        for pattern in family.clients:
            if not any(_fits(pattern, client, info) for client, info in clients.items()):
                problems.append(f"families.{name}.clients: {pattern} is no client.{_hint(pattern, clients)}")
    if problems:
        raise ConfigError(problems)
    return found


def _fits(pattern: str, client: str, info: Mapping[str, str]) -> bool:
    key, equals, value = pattern.partition("=")
    return fnmatchcase(info.get(key, ""), value) if equals and key in info else fnmatchcase(client, pattern)


def family_experiment(experiment: Experiment, name: str) -> Experiment:
    """The experiment as one family's clients see it: with their model."""
    if name == OWN_MODEL:
        return experiment
    return replace(experiment, model=experiment.families[name].model, families={})


def load_model(
    experiment: Experiment, task: str, label_names: Sequence[str], elsewhere: str | None = None
) -> tuple[AdaptedModel, Task, str]:
    """The backbone with places for adapters, the task, and the backbone's fingerprint.

    elsewhere  as for `Host`: the backbone's shapes, on the meta device, with this fingerprint
    """
    experiment = resolve_model(experiment)
    settings, adapter = experiment.model, experiment.adapter
    if elsewhere is None:
        backbone = load_backbone(settings, task, label_names, experiment.federation.seed)
    else:
        backbone = load_shapes(settings, task, label_names, elsewhere)
    evaluate = experiment.evaluate
    made = make_task(
        task,
        backbone.processor,
        label_names,
        max_length=settings.max_length,
        prompt=settings.prompt,
        long_prompts=settings.long_prompts,
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


def drops(experiment: Experiment) -> bool:
    """Whether a model's settings leave records out of training."""
    models = (experiment.model, *(family.model for family in experiment.families.values()))
    return any(one.long_prompts == "drop" for one in models)


def trains_head(experiment: Experiment, task: str) -> bool:
    """Whether slots carry the task head: as configured, or for all tasks that have one."""
    head = experiment.adapter.head
    return head if isinstance(head, bool) else task not in GENERATIVE


def load_federation(experiment: Experiment) -> Federation:
    """The benchmark or the user's files that the configuration names, as much of them as it wants."""
    federation = _whole_federation(experiment)
    everybody = {one.id: one.info for one in (*federation.clients, *federation.newcomers)}
    return limited(federation, experiment.limit, family_settings(resolve_model(experiment), everybody))


def _whole_federation(experiment: Experiment) -> Federation:
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
        newcomers=data.newcomers,
        public=data.public,
    )


def resolve_model(experiment: Experiment) -> Experiment:
    """Fill in the benchmark's own model, and those of its families, where the configuration names none."""
    if experiment.model.id:
        return experiment
    if experiment.benchmark is None:
        raise ConfigError(["model.id: is needed with your own data: a directory, a hub id or a model that ships"])
    from befit.benchmarks.registry import get

    known, own = get(experiment.benchmark.name), experiment.families
    families = own or {
        pattern.partition("=")[2]: FamilySettings([pattern], replace(experiment.model, id=id_))
        for pattern, id_ in known.families.items()
    }
    return replace(experiment, model=replace(experiment.model, id=known.default_model), families=families)


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


def check_newcomers(name: str, newcomers: Sequence[ClientData], split: str) -> None:
    """Raise DataError naming every newcomer that could not be scored. One may well have nothing to train on."""
    problems = [
        f"newcomer {one.id} has no {split} examples to be scored on (evaluate.split)"
        for one in newcomers
        if not len(getattr(one, split))
    ]
    if problems:
        problems = problems[:5] + ["…"] * (len(problems) > 5)
        raise DataError(f"{name}: {'; '.join(problems)}. evaluate.newcomers: false leaves them out")


def check_families(settings: Mapping[str, str], clients: Sequence[str]) -> None:
    """Raise ConfigError for newcomers of a family without clients: the server would have nothing for them."""
    known = {settings[client] for client in clients}
    alone = [client for client, family in settings.items() if family not in known]
    if alone:
        families = ", ".join(sorted({settings[client] for client in alone}))
        raise ConfigError([f"families: no client has the backbone of {families}, so the server has nothing for "
                           f"newcomer {alone[0]}; name clients of it, or set evaluate.newcomers: false"])  # fmt: skip


def check_needs(
    name: str, method: Method, federation: Federation, families: Mapping[str, str] | None = None
) -> list[str]:
    """What the method demands and this federation does not have. `families` is every client's, where they differ."""
    needs: Needs = method.needs
    groups: dict[str, int] = {}
    for client in federation.clients:
        family = OWN_MODEL if families is None or needs.mixed else families[client.id]
        groups[family] = groups.get(family, 0) + 1
    problems = []
    for family, size in groups.items():
        if size >= needs.min_clients:
            continue
        if len(groups) == 1:
            problems.append(f"method {name} needs at least {needs.min_clients} clients, there are {size}")
        else:
            problems.append(f"method {name} serves each backbone by itself and needs at least {needs.min_clients} "
                            f"clients of each; the family {family} has {size}")  # fmt: skip
    for split in needs.splits:
        if empty := [client.id for client in federation.clients if not len(getattr(client, split))]:
            problems.append(f"method {name} needs {split} examples at every client; {empty[0]} has none")
    if needs.public and not len(federation.public):
        problems.append(f"method {name} needs public records, and {federation.name} has none")
    several = len({(families or {}).get(client.id) for client in federation.clients}) > 1
    if needs.public_mixed and several and not len(federation.public):
        problems.append(f"method {name} needs public records to let clients of different backbones learn from each "
                        f"other, and {federation.name} has none; give one backbone to all, or take a method that "
                        "serves each by itself")  # fmt: skip
    everybody = [client.id for client in (*federation.clients, *federation.newcomers)]
    for pattern in needs.named if "limit" not in federation.manifest else ():  # which leaves clients out on purpose
        if not any(fnmatchcase(client, pattern) for client in everybody):
            problems.append(f"method {name} has options for {pattern}, which is no client.{_hint(pattern, everybody)}")
    return problems


def check_shapes(label: str, method: Method, shapes: ModelShapes, clients: Sequence[str]) -> list[str]:
    """Why these clients' model cannot have the method's adapters, or not what its options ask for."""
    try:
        method.layout.specs(shapes)
    except ModelError as error:
        return [f"method {label}: {error}"]
    return [f"method {label}: {fault}" for fault in method.faults(shapes, clients)]


def _hint(pattern: str, clients: Collection[str]) -> str:
    """The client that may be meant, or who there is."""
    known = ", ".join([*clients][:10]) + (", …" if len(clients) > 10 else "")
    return did_you_mean(pattern, clients) or f" The clients are {known}"
