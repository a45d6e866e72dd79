"""What is deployed, and stages that a client takes alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from befit.adapters.instance import summaries
from befit.adapters.keys import NOTHING, Selector, slot, slot_of, split, union
from befit.adapters.layout import GATE, REFERENCES, Layout
from befit.adapters.mixers import Mix
from befit.adapters.state import fingerprint, rename
from befit.core.values import ClientInfo, Payload, State, TensorSpec, Tick
from befit.protocol.method import Deployment
from befit.protocol.site import Site
from befit.protocol.stage import Exchange, Personal, Stage
from befit.train.loop import Pass, train

if TYPE_CHECKING:
    from befit.methods.parts.recipe.recipe import Recipe

__all__ = ["Adopt", "LocalTraining", "PersonalStage", "Remember", "Use", "start_of"]


@dataclass(frozen=True)
class Use:
    """What is deployed: the active slots and how they are mixed."""

    slots: tuple[str, ...]
    mixer: Mix = "sum"

    def deployment(self, site: Site) -> Deployment:
        """The slots with the values that the model holds now, and the gate's where there is one."""
        return Deployment(site.model.dump(slot(*self.slots, GATE, slot_of(REFERENCES))), self.slots, self.mixer)


class PersonalStage(Protocol):
    """A stage as a value; it becomes an exchange once it knows the recipe it belongs to."""

    @property
    def name(self) -> str: ...

    @property
    def rounds(self) -> int | None: ...

    @property
    def passes(self) -> tuple[Pass, ...]: ...

    @property
    def trainable(self) -> Selector: ...

    def exchange(self, recipe: Recipe) -> Exchange: ...


def start_of(layout: Layout, initial: State, backbone: str) -> str:
    """What two branches must have in common to be merged, field by field, as text: `rank=8; alpha=16; …`."""
    if not initial:
        return ""
    held = layout.slot(slot_of(min(initial)))
    modules = {split(key)[1] for key in initial}
    targets = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
    names = hashlib.sha256("\n".join(sorted(modules)).encode()).hexdigest()[:8]
    return (
        f"backbone={backbone}; rank={held.rank}; alpha={held.alpha:g}; targets={targets}; "
        f"modules={len(modules)} ({names}); initial values={fingerprint(initial)[:16]}"
    )


@dataclass(frozen=True)
class LocalTraining:
    """Train alone, from the initial adapter or from where an earlier stage left the slot.

    The optimiser stays with the client from round to round if the passes say so; a round is then only a count of
    steps (Zou et al. 2026).
    """

    passes: tuple[Pass, ...]
    name: str = "local"
    rounds: int | None = None
    receives: bool = False

    @property
    def trainable(self) -> Selector:
        return union(one.trainable for one in self.passes)

    def exchange(self, recipe: Recipe) -> Exchange:
        return _LocalTraining(self, recipe)


@dataclass(frozen=True)
class _LocalTraining(Personal):
    stage: LocalTraining
    recipe: Recipe

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.recipe.dispatch(server, client, at) if self.stage.receives else Payload()

    def downlink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return self.recipe.downlink(stage, specs) if self.stage.receives else {}

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        trained = self.stage.trainable
        scalars = client.scalars
        if "initial" not in scalars:
            scalars = {**scalars, "initial": start_of(self.recipe.layout, site.model.dump(trained), site.info.backbone)}
        self.recipe.restore(client, received, site)
        report = train(site, self.stage.passes, at, moments=client.arrays)
        site.report.update(report.numbers())
        return Payload({**client.arrays, **site.model.dump(trained), **report.moments}, scalars), Payload()


@dataclass(frozen=True)
class Adopt:
    """Start slot `into` from what arrives in slot `source`, once."""

    source: str
    into: str
    name: str = "adopt"
    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()
    trainable: Selector = NOTHING

    def exchange(self, recipe: Recipe) -> Exchange:
        return _Adopt(self, recipe)


@dataclass(frozen=True)
class _Adopt(Personal):
    stage: Adopt
    recipe: Recipe

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.recipe.dispatch(server, client, at)

    def downlink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return self.recipe.downlink(stage, specs)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        self.recipe.restore(client, received, site)
        adopted = rename(site.model.dump(slot(self.stage.source)), self.stage.into)
        return Payload({**client.arrays, **adopted}, client.scalars), Payload()


@dataclass(frozen=True)
class Remember:
    """Keep the last hidden states, under slot `under`, of `count` training examples: what new inputs are compared with.

    A client with fewer examples repeats them.
    """

    count: int
    under: str
    name: str = "remember"
    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()
    trainable: Selector = NOTHING

    def exchange(self, recipe: Recipe) -> Exchange:
        return _Remember(self, recipe)


@dataclass(frozen=True)
class _Remember(Personal):
    stage: Remember
    recipe: Recipe

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        self.recipe.restore(client, received, site)
        examples = site.examples("train")
        generator = torch.Generator().manual_seed(at.seed_for(site.info.id, "references"))
        chosen = torch.randperm(len(examples), generator=generator)[: self.stage.count]
        batch = site.to_device(examples.batch(chosen))
        model = site.model
        with torch.no_grad(), model.training(False), model.active(self.stage.under), summaries(model.backbone) as found:
            site.logits(batch)
        places = torch.arange(self.stage.count) % len(chosen)
        return Payload({**client.arrays, REFERENCES: found[0].cpu()[places]}, client.scalars), Payload()
