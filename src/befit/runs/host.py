"""What all methods of one experiment share: the data, the task, and one backbone in memory for each family."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.adapters.keys import EVERYTHING
from befit.adapters.model import AdaptedModel
from befit.config.experiment import (
    NO_CHOICE,
    AdapterSettings,
    CheckpointSettings,
    EngineSettings,
    EvaluateSettings,
    Experiment,
    ReportSettings,
    WireSettings,
)
from befit.core.errors import DataError
from befit.core.freed_memory import keep_freed_memory
from befit.core.metrics import CLASS_METRICS
from befit.core.values import ClientInfo, State
from befit.core.version import __version__
from befit.core.wire_form import Wire
from befit.data.federation import ClientData, Federation
from befit.data.folds import without_part
from befit.data.long_prompts import left_out_sentence, without_left_out
from befit.data.streams import Stream
from befit.protocol.check import check
from befit.protocol.context import Context
from befit.protocol.method import Method
from befit.protocol.per_family import each_family
from befit.protocol.registry import build_method
from befit.protocol.settings import GuardSettings, PrivacySettings, TrainSettings
from befit.protocol.site import Backbone, ServerSite, Site
from befit.protocol.wire import wire_of
from befit.runs.clients import (
    check_clients,
    check_families,
    context_of,
    family_experiment,
    family_settings,
    privacy_of,
    refuse,
    values_of,
    warning_of,
)
from befit.runs.loading import drops, load_federation, load_model, resolve_model
from befit.runs.peft_start import start_from, start_problems
from befit.tasks import get_task
from befit.tasks.class_metrics import majority_score
from befit.tasks.classification import class_index
from befit.tasks.examples import balanced

if TYPE_CHECKING:
    from befit.tasks.base import Examples, Record, Task

_LOG = logging.getLogger(__name__)
Part = tuple[int, int]  # its number, and how many there are


class Host:
    """Holds one backbone for each family of clients and any number of methods. `install` makes it ready for one.

    elsewhere  by family, fingerprint of the weights that its clients have on other machines; here are shapes then, and
               no weights
    """

    def __init__(
        self,
        experiment: Experiment,
        federation: Federation | None = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        keep_freed_memory()
        self._elsewhere = elsewhere
        self.experiment = resolve_model(experiment)
        self.federation = load_federation(experiment) if federation is None else federation
        arriving = self.federation.newcomers if experiment.evaluate.newcomers else ()
        check_clients(self.federation, experiment)
        everybody = {client.id: client.info for client in (*self.federation.clients, *arriving)}
        settings = family_settings(self.experiment, everybody, whole=self.federation.has_all_clients)
        check_families(settings, [client.id for client in self.federation.clients])
        loaded = {name: self._load(name) for name in dict.fromkeys(settings.values())}
        self.backbones = {backbone.key: backbone for backbone in loaded.values()}
        self._family = {client: self.backbones[loaded[name].key] for client, name in settings.items()}
        if drops(self.experiment):
            self.federation = without_left_out(
                self.federation, {key: backbone.task for key, backbone in self._family.items()}
            )
            _LOG.warning("%s", left_out_sentence(self.federation.manifest["left_out"]))
        self.common = self._load_common() or min(self.backbones.values(), key=lambda backbone: backbone.parameters)
        for backbone in self.backbones.values():
            backbone.model.shapes = replace(backbone.model.shapes, last=self.common.model.shapes.last)
        self.infos = tuple(self._info(client) for client in self.federation.clients)
        self.newcomers = tuple(self._info(client) for client in arriving)
        self._data = {client.id: client for client in (*self.federation.clients, *self.federation.newcomers)}
        self._prepared: dict[tuple[object, ...], Examples] = {}
        self._public: dict[tuple[str, int], Examples] = {}
        self._streams: dict[tuple[str, Part | None], Stream] = {}
        self._in_parts: dict[str, tuple[Part, ClientData]] = {}
        self._valued: dict[tuple[str, str, Part | None], Sequence[str]] = {}

    def _load(self, name: str) -> Backbone:
        experiment = family_experiment(self.experiment, name)
        model, task, fingerprint = load_model(
            experiment,
            self.federation.task,
            self.federation.label_names,
            None if self._elsewhere is None else self._elsewhere[name],
        )
        return Backbone(name, fingerprint, model, task)

    def _load_common(self) -> Backbone | None:
        """The configuration's common model, bare; one that a family has already is not loaded twice."""
        settings = self.experiment.common_model
        if settings is None:
            return None
        for backbone in self.backbones.values():
            if family_experiment(self.experiment, backbone.name).model == settings:
                return backbone
        bare = AdapterSettings(head=False)
        experiment = replace(self.experiment, model=settings, families={}, adapter=bare)
        model, task, fingerprint = load_model(experiment, self.federation.task, self.federation.label_names)
        return Backbone("common_model", fingerprint, model, task)

    def _info(self, client: ClientData) -> ClientInfo:
        return ClientInfo(client.id, self._family[client.id].key, len(client.train))

    @property
    def has_weights(self) -> bool:
        """Whether the backbones' weights are here."""
        return self._elsewhere is None

    @property
    def families(self) -> dict[str, str]:
        """The name of every client's family, newcomers included."""
        return {client: backbone.name for client, backbone in self._family.items()}

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
        return hashlib.sha256(
            " ".join(backbone.fingerprint for backbone in self.backbones.values()).encode()
        ).hexdigest()

    def hello(self, client: str) -> dict[str, Any]:
        """What a client says of itself when it joins: its id, the fingerprint of its backbone, and of the common model
        where the configuration names one, numbers of train, val and test examples, a hash of its data, and befit's
        version."""
        data = self._data[client]
        return {
            "client": client,
            "backbone": self.backbone_of(client).fingerprint,
            **({"common_model": self.common.fingerprint} if self.experiment.common_model is not None else {}),
            "examples": [len(data.train), len(data.val), len(data.test)],
            "data": str(self.federation.manifest.get("partition", {}).get("sha256", "")),
            "version": __version__,
        }

    def build(self, config: str | Mapping[str, Any]) -> Method:
        """The method of a configuration block, for all families of clients."""
        return each_family(build_method(config), len(self.backbones))

    def check_methods(self, configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Raise ConfigError where a method cannot run here; methods by the names of their runs. Returns warnings."""
        methods, context = {label: build_method(block) for label, block in configs.items()}, self.context
        found = [(label, problem) for label, method in methods.items() for problem in check(method, context)]
        for backbone in self.backbones.values():
            found += start_problems(self.experiment, methods.items(), backbone.model.paths, backbone.model.shapes)
        refuse(found)
        return list(dict.fromkeys(warning_of(label, problem) for label, problem in found))

    @property
    def context(self) -> Context:
        """What methods are to run on here."""
        shapes = {backbone.name: backbone.model.shapes for backbone in self.backbones.values()}
        return context_of(self.experiment, self.federation, self.families, shapes)

    def install(self, method: Method) -> ServerSite:
        """Put the method's slots on every backbone; returns the server's site."""
        starts: dict[str, State] = {}
        for key, backbone in self.backbones.items():
            if self._elsewhere is not None:  # nobody runs the model here, so its slots need no memory
                starts[key] = method.layout.initial(backbone.model.shapes, self.experiment.federation.seed)
                continue
            backbone.model.install(method.layout, self.experiment.federation.seed)
            if (folder := self.experiment.adapter.start) is not None:
                start_from(Path(folder), backbone.model, method.starting())
            backbone.model.reset()
            starts[key] = backbone.model.dump(EVERYTHING)
        return self.server_site(starts)

    def server_site(self, starts: Mapping[str, State] | None = None) -> ServerSite:
        """The server's site; initial adapters by backbone are those of the installed slots unless given."""
        if starts is None:
            for backbone in self.backbones.values():
                backbone.model.reset()
            starts = {key: backbone.model.dump(EVERYTHING) for key, backbone in self.backbones.items()}
        return ServerSite(starts, self.infos, self.backbones, self.public, self.experiment.train, self.common)

    def wire(self, method: Method) -> Wire:
        """How the arrays of a method travel, as the configuration says."""
        layouts = [method.layout.specs(backbone.model.shapes) for backbone in self.backbones.values()]
        return wire_of(method, self.experiment.wire, layouts)

    def site(self, info: ClientInfo) -> Site:
        backbone, common = self._family[info.id], self.common
        return Site(
            info,
            backbone.model,
            backbone.task,
            _in_steps(self.experiment.train, info.num_examples),
            lambda split: self.examples(info.id, split),
            common=common,
            common_examples=lambda split: self.examples(info.id, split, common),
            public=lambda: self.public(backbone.key),
            stream=self._stream(info.id),
            values=lambda split: self._values(info.id, split),
            others=lambda split: {
                other.id: self.examples(other.id, split, backbone)
                for other in self.federation.clients
                if other.id != info.id
            },
            parts=self._in_part,
            privacy=privacy_of(self.experiment),
        )

    def _in_part(self, site: Site, number: int, of: int) -> Site:
        """What `Site.in_part` says."""
        client, part = site.info.id, (number, of)
        info = replace(site.info, num_examples=len(self._records(client, part).train))
        return replace(
            site,
            info=info,
            budget=_in_steps(site.budget, info.num_examples),
            examples=lambda split: self.examples(client, split, part=part),
            common_examples=lambda split: self.examples(client, split, self.common, part),
            stream=self._stream(client, part),
            values=lambda split: self._values(client, split, part),
        )

    def _records(self, client: str, part: Part | None) -> ClientData:
        if part is None:
            return self._data[client]
        kept, data = self._in_parts.get(client, (None, self._data[client]))
        if part != kept:  # one part of a client at a time, or its records would be here several times
            data = without_part(self._data[client], *part, self.experiment.federation.seed)
            self._in_parts[client] = part, data
            self._prepared = {key: made for key, made in self._prepared.items() if key[2] != client or key[-1] is None}
            self._valued = {key: made for key, made in self._valued.items() if key[0] != client or key[-1] is None}
        return data

    def _stream(self, client: str, part: Part | None = None) -> Stream | None:
        settings = self.experiment.stream
        if settings.kind == "none":
            return None
        if (client, part) not in self._streams:
            records = self._records(client, part).train
            self._streams[client, part] = Stream.of(client, records, settings.kind, settings.sampling)
        return self._streams[client, part]

    def examples(self, client: str, split: str, backbone: Backbone | None = None, part: Part | None = None) -> Examples:
        """A client's split in the terms of its own backbone, or of another; prepared once.

        part  number and count, for a client without this part of its training examples
        """
        backbone = backbone or self.backbone_of(client)
        weights = self.experiment.train.class_weights if split == "train" else "none"
        key = backbone.name, backbone.key, client, split, weights, self.experiment.evaluate.batch_size, part
        if key not in self._prepared:
            try:
                examples = self._ready(backbone, getattr(self._records(client, part), split))
                self._prepared[key] = balanced(examples) if weights == "balanced" else examples
            except DataError as error:
                raise DataError(f"client {client}, {split}: {error}") from error
        return self._prepared[key]

    def _ready(self, backbone: Backbone, records: Sequence[Record]) -> Examples:
        """Records as the task has them, with what the bare backbone makes of them where the task asks for that."""
        model, task = backbone.model, backbone.task
        examples = task.prepare(records)
        with model.active():
            return task.refer(model.backbone, examples, self.experiment.evaluate.batch_size, model.device)

    def _values(self, client: str, split: str, part: Part | None = None) -> Sequence[str]:
        """What `evaluate.by` says of each example; read once."""
        if (field := self.experiment.evaluate.by) is None:
            return ()
        key = client, split, part
        if key not in self._valued:
            records, names = getattr(self._records(client, part), split), self.federation.label_names
            self._valued[key] = values_of(records, field, names, f"client {client}, {split}")
        return self._valued[key]

    def majority(self) -> dict[str, float | None]:
        """By client, newcomers included, what the most frequent class of its training data scores as the answer to
        everything; nothing for tasks without classes."""
        names, split = self.federation.label_names, self.experiment.evaluate.split
        measurable = get_task(self.federation.task).has_classes and self.task.metric in CLASS_METRICS
        if not measurable:
            return {}
        scores: dict[str, float | None] = {}
        for client, data in self._data.items():
            tested, trained = (
                [class_index(record["label"], names, f"client {client}") for record in records]
                for records in (getattr(data, split), data.train)
            )
            scores[client] = majority_score(tested, trained, len(names), self.task.metric)
        return scores

    def public(self, key: str) -> Examples:
        """The federation's public records in the terms of one backbone, by its key; prepared once."""
        batched = key, self.experiment.evaluate.batch_size
        if batched not in self._public:
            try:
                self._public[batched] = self._ready(self.backbones[key], self.federation.public)
            except DataError as error:
                raise DataError(f"public records: {error}") from error
        return self._public[batched]


def _in_steps(budget: TrainSettings, examples: int) -> TrainSettings:
    """The settings of a client with so many examples, whose epochs are a number of steps."""
    return budget if budget.epochs is None else replace(budget, max_steps=budget.steps_for(examples))


def shared(experiment: Experiment) -> Experiment:
    """What a host depends on, which are its data, models and measurements; the rest may change from run to run."""
    plain, usual = resolve_model(experiment), EvaluateSettings()
    return replace(
        plain,
        name="",
        method={},
        baselines=[],
        train=TrainSettings(dpo_beta=plain.train.dpo_beta),  # which the task has
        federation=replace(
            plain.federation,
            rounds=1,
            max_weight=None,
            secure_sums=None,
            asynchronous=None,
            patience=None,
            **NO_CHOICE,
        ),
        evaluate=replace(plain.evaluate, every=0, batch_size=usual.batch_size, others="never", wins=None),
        engine=EngineSettings(),
        wire=WireSettings(),
        guard=GuardSettings(),
        privacy=PrivacySettings(unit=plain.privacy.unit if plain.data else "none"),  # which splits files
        checkpoint=CheckpointSettings(),
        report=ReportSettings(),
        trackers=[],
    )
