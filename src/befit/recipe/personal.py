"""What is deployed, and stages that a client takes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from befit.adapters.keys import Selector, slot, slot_of, union
from befit.adapters.layout import GATE, Layout
from befit.adapters.state import fingerprint
from befit.method import Deployment, Exchange, Personal
from befit.site import Site
from befit.train.loop import Pass, train
from befit.types import ClientInfo, Payload, Stage, State, TensorSpec, Tick

if TYPE_CHECKING:
    from befit.recipe.recipe import Recipe

__all__ = ["LocalTraining", "PersonalStage", "Use"]


@dataclass(frozen=True)
class Use:
    """What is deployed: the active slots and how they are mixed."""

    slots: tuple[str, ...]
    mixer: str = "sum"

    def deployment(self, site: Site) -> Deployment:
        """The slots with the values that the model holds now, and the gate's where there is one."""
        return Deployment(site.model.dump(slot(*self.slots, GATE)), self.slots, self.mixer)


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


def start_of(layout: Layout, initial: State) -> str:
    """What two branches must have in common to be merged: the initial arrays of a slot, its rank and its scale."""
    name = slot_of(min(initial)) if initial else ""
    held = layout.slot(name) if initial else None
    scale = f" rank {held.rank}, alpha {held.alpha:g}" if held else ""
    return f"{fingerprint(initial)}{scale}"


@dataclass(frozen=True)
class LocalTraining:
    """Train alone, from the initial adapter or from where an earlier stage left the slot.

    The optimiser stays with the client from round to round if the passes say so; a round is then only a count of
    steps (Potara specification, section 4).
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
            scalars = {**scalars, "initial": start_of(self.recipe.layout, site.model.dump(trained))}
        self.recipe.restore(client, received, site)
        report = train(site, self.stage.passes, at, moments=client.arrays)
        site.report.update(report.numbers())
        return Payload({**client.arrays, **site.model.dump(trained), **report.moments}, scalars), Payload()
