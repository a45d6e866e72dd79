"""Personalising what another method made: its stages first, then one in which each client fixes its model as it is.

What the other method keeps, at the server and at the clients, is the part `base` of our memories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any

from befit.adapters.bayestune import BUDGETED, SCALES
from befit.adapters.keys import EVERYTHING, NOTHING, join, select, slot, slot_of, split
from befit.adapters.layout import Layout
from befit.adapters.mixers import Mix, Weighted, constant_weights
from befit.core.errors import ConfigError, NotTrained
from befit.core.schema import Mark, check_values, parameters_of
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.budget.generator import GENERATOR
from befit.methods.parts.budget.personal import steps_for
from befit.methods.parts.budget.rates import RATES, VALIDATION
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps, Updated, steps_of
from befit.protocol.method import Deployment, Method, federated_stage, run_stages
from befit.protocol.settings import BaseSettings, TrainSettings
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Message, Personal, SharedStages, Stage

MethodBlock = Annotated[dict[str, Any] | None, Mark.METHOD]

BASE, FIXED = "base", "fixed"
_SLOTS = "slots"
_LINEAR = ("B", "weight", "bias")  # of an adapter and of a dense update: the output is as many times as large as they
_OURS = slot(BUDGETED, SCALES, GENERATOR, RATES, VALIDATION)


def make_base(block: Mapping[str, Any] | None, taken: Sequence[str], owner: str) -> Method | None:
    """The method of a block such as `{name: fedit, rank: 8, rounds: 100}`, which has `BaseSettings` beside its options.

    Raises ConfigError for one that cannot be a base.
    """
    if block is None:
        return None
    from befit.protocol.registry import check_method

    options, base_settings = _apart(block)
    _, method, problems = check_method(options, "base")
    names = ", ".join(parameter.name for parameter in parameters_of(BaseSettings))
    problems = [f"{problem} A base has {names} too" if ": unknown key" in problem else problem for problem in problems]
    problems += check_values(parameters_of(BaseSettings), base_settings, "base.")[1]
    if isinstance(base_settings.get("train"), Mapping):
        problems += _otherwise(base_settings["train"])[1]
    if method is None or problems:
        raise ConfigError(problems, owner)
    if clash := {stage.name for stage in method.plan()} & set(taken):
        raise ConfigError(
            [f"base: {block['name']} has a stage {min(clash)!r} as {owner} has; they cannot follow each other"], owner
        )
    if method.use.mixer != "sum" and not isinstance(method.use.mixer, Weighted):
        raise ConfigError([_no_sum(str(block["name"]), method.use.mixer)], owner)
    return method


def settings_of(block: Mapping[str, Any]) -> BaseSettings:
    """What a checked block has for itself."""
    return BaseSettings(**_apart(block)[1])


def _apart(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A base's own options, and what it has otherwise than the run, unless its method has options of those names."""
    from befit.protocol.registry import METHODS

    named = block.get("name")
    METHODS.load()
    entry = METHODS.get(named) if isinstance(named, str) else None
    if entry is None:
        return dict(block), {}
    names = {parameter.name for parameter in parameters_of(BaseSettings)} - {
        parameter.name for parameter in entry.parameters
    }
    return (
        {key: value for key, value in block.items() if key not in names},
        {key: value for key, value in block.items() if key in names},
    )


def _otherwise(changes: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings of training that a base has for itself, and what is wrong with them."""
    if "max_steps" in changes:
        reason = "a base trains for train.max_steps in a round; give it epochs, or more or fewer rounds"
        return {}, [f"base.train.max_steps: {reason}"]
    runs = ("max_steps", "epochs", "class_weights", "dpo_beta")
    parameters = [parameter for parameter in parameters_of(TrainSettings) if parameter.name not in runs]
    return check_values(parameters, changes, "base.train.")


def check_base(block: Mapping[str, Any] | None, base: Method | None, context: Context) -> list[Problem]:
    """What a base's own settings of training contradict, among themselves and in the run's; else what it says."""
    if block is None or base is None:
        return []
    train = replace(context.train, **_otherwise(settings_of(block).train or {})[0])
    if train != context.train and (problems := train.contradictions()):
        return [Problem("error", "base.train", problem) for problem in problems]
    return [replace(problem, key="base", text=str(problem)) for problem in base.check(replace(context, train=train))]


def with_layout(layout: Layout, block: Mapping[str, Any] | None, base: Method | None) -> Layout:
    """Our slots and extras after those of the base, which may sit on fewer modules."""
    if block is None or base is None:
        return layout
    slots, targets = base.layout.slots, settings_of(block).targets
    if targets is not None:
        slots = tuple(replace(base_slot, targets=tuple(targets)) for base_slot in slots)
    return replace(base.layout, slots=slots + layout.slots, extras=base.layout.extras + layout.extras)


def with_base(ours: Payload, base: Payload | None) -> Payload:
    """One memory from the base's and ours."""
    return ours if base is None else ours.with_part(BASE, base)


def base_stages(block: Mapping[str, Any] | None, base: Method | None) -> list[Stage]:
    """The base's stages, and a personal one that fixes its result."""
    if block is None or base is None:
        return []
    settings = settings_of(block)
    stages = [
        replace(
            stage,
            exchange=_OfBase(stage.exchange, settings),
            up=None if stage.up is None else stage.up.without(_OURS),
            down=stage.down.without(_OURS),
            rounds=settings.rounds if stage.rounds is None else stage.rounds,
            lasts=False,
            shared=None,  # the base's own; those of this plan end with the next stage
            reads="gradients by settings of its own" if settings.train or settings.epochs else stage.reads,
        )
        for stage in run_stages(base)
    ]
    last = federated_stage(stages)
    down = Message() if last is None else last.down
    shared = _shared(block, len(stages) + 1)
    fixed = Stage(BASE, _Fix(base), None, down, 1, trains=NOTHING, shared=shared, reads="what the base deploys")
    return [*stages, fixed]


def _shared(block: Mapping[str, Any], count: int) -> SharedStages:
    """Those stages, for runs that share them."""
    from befit.protocol.registry import check_method

    options, base_settings = _apart(block)
    kept = {key: base_settings[key] for key in ("rounds", "epochs", "targets") if base_settings.get(key) is not None}
    dropout = base_settings.get("dropout")
    settings = {
        "train": _otherwise(base_settings.get("train") or {})[0],
        "adapter": {} if dropout is None else {"dropout": dropout},
    }
    return SharedStages({**check_method(options, "base")[0], **kept}, count, (BASE, FIXED), (BASE, FIXED), settings)


def base_slots(client: Payload) -> tuple[str, ...]:
    """The slots of the model that the client fixed; none without a base."""
    slots = client.part(FIXED).scalars.get(_SLOTS, [])
    return tuple(str(name) for name in slots) if isinstance(slots, list) else ()


def fixed(client: Payload) -> State:
    """The values of those slots."""
    return client.part(FIXED).arrays


def load_base(client: Payload, site: Site) -> tuple[str, ...]:
    """Put the fixed model into the site's; returns its slots. Raises NotTrained where the client was away when it was
    fixed."""
    slots = base_slots(client)
    if not slots and any(not _OURS(join(each.name, "", "")) for each in site.model.layout.slots):
        raise NotTrained(f"client {site.info.id} has no base: it was away in the round in which the base was fixed")
    site.model.load(fixed(client))
    return slots


@dataclass(frozen=True)
class _OfBase(Exchange):
    """A stage of the base on its part of the memories, with its own settings."""

    exchange: Exchange
    own: BaseSettings

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.exchange.dispatch(server.part(BASE), client, at)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        site = replace(site, budget=self._budget(site.budget))
        if (epochs := self.own.epochs or site.budget.epochs) is not None:
            site = replace(site, budget=replace(site.budget, epochs=epochs, max_steps=steps_for(site, epochs)))
        dropping = nullcontext() if self.own.dropout is None else site.model.dropping(self.own.dropout)
        with dropping:
            memory, reply = yield from steps_of(self.exchange.client_update(client.part(BASE), _of(received), site, at))
        return client.with_part(BASE, memory), reply

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        site = replace(site, budget=None if site.budget is None else self._budget(site.budget))
        return server.with_part(BASE, self.exchange.aggregate(server.part(BASE), updates, site, at))

    def _budget(self, budget: TrainSettings) -> TrainSettings:
        return replace(budget, **_otherwise(self.own.train or {})[0])


@dataclass(frozen=True)
class _Fix(Personal):
    """The client takes what the base would deploy and keeps it, frozen. A client that took no part in the base has what
    it received, and its own part as that starts; its report then says `base_untrained`."""

    method: Method

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        last = federated_stage(run_stages(self.method))
        return Payload() if last is None else last.exchange.dispatch(server.part(BASE), client, at)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        memory = client.part(BASE)
        try:
            deployed = self.method.deploy(memory, _of(received), site)
        except NotTrained:
            # A small cohort may never have come to this client: its own part is then as it starts.
            own_slots = {base_slot.name for base_slot in self.method.layout.slots}
            site.model.reset()
            start = {key: value for key, value in site.model.dump(EVERYTHING).items() if slot_of(key) in own_slots}
            deployed = self.method.deploy(Payload(start) | memory, _of(received), site)
            site.report["base_untrained"] = 1.0
        model = Payload(_summed(deployed, self.method.layout), {_SLOTS: list(deployed.slots)})
        return client.with_part(FIXED, model), Payload()


def _summed(deployed: Deployment, layout: Layout) -> State:
    """The arrays with which the slots' plain sum is what they are mixed to by numbers of their own."""
    if deployed.mixer == "sum":
        return deployed.arrays
    weights = constant_weights(deployed.mixer, layout, deployed.slots, deployed.arrays)
    if weights is None:  # of a method that does not say so beforehand
        raise ConfigError([_no_sum("it", deployed.mixer)])
    arrays: State = {}
    for key, value in deployed.arrays.items():
        name, module, factor = split(key)
        linear = name in deployed.slots and factor in _LINEAR
        arrays[key] = value * weights(module)[deployed.slots.index(name)] if linear else value
    return arrays


def _no_sum(name: str, mixer: Mix) -> str:
    return (
        f"base: {name} mixes its slots by {str(mixer)!r}, and only sums with numbers as weights can be "
        "personalised on top; take a base that deploys one, such as fedit"
    )


def _of(received: Payload) -> Payload:
    """What arrived for the base: a download for several stages holds our generator too."""
    return Payload(select(received.arrays, ~_OURS), received.scalars)
