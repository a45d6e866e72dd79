"""What is deployed, and stages that a client takes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from befit.adapters.instance import omega, summaries
from befit.adapters.keys import NOTHING, select, slot
from befit.adapters.layout import REFERENCES
from befit.adapters.state import rename
from befit.core.errors import NotTrained
from befit.core.values import ClientInfo, Payload, Tick
from befit.methods.parts.recipe.of_passes import described, lone, plain_slot, start_of, trained
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Diagnostic
from befit.protocol.site import Site
from befit.protocol.stage import Gradients, Message, Personal, SharedStages, Stage
from befit.train.loop import training
from befit.train.passes import Pass


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

    def stage(self, recipe: Recipe) -> Stage:
        down = recipe.download if self.receives else Message()
        exchange, shared = _LocalTraining(self, recipe), self._shared(recipe)
        chosen, reads = trained(self.passes), Gradients(len(self.passes))
        return Stage(self.name, exchange, None, down, self.rounds, trains=chosen, shared=shared, reads=reads)

    def _shared(self, recipe: Recipe) -> SharedStages | None:
        """The stage itself where a plan begins with it: it is then the same in every recipe with such a slot."""
        name = plain_slot(self.passes)
        if name is None or self.receives or self not in recipe.before[:1]:
            return None
        about = described(recipe.layout.slot(name), self.passes)
        return SharedStages({"name": "alone", **about, "stage": self.name, "rounds": self.rounds}, server=())


@dataclass(frozen=True)
class _LocalTraining(Personal):
    stage: LocalTraining
    recipe: Recipe

    @property
    def lone(self) -> str:
        return lone(self.stage.passes)

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.recipe.dispatch(server, client) if self.stage.receives else Payload()

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        chosen = trained(self.stage.passes)
        for name in self._adopted():
            if not select(client.arrays, slot(name)):
                raise NotTrained(
                    f"client {site.info.id} has no {name!r} adapter to train on: it was away in the round in which "
                    "that started from the common one"
                )
        if "initial" not in client.scalars:
            start = start_of(self.recipe.layout, site.model.dump(chosen), site.info.backbone)
            client |= Payload({}, {"initial": start})
        self.recipe.restore(client, received, site)
        report = yield from training(site, self.stage.passes, at, memory=client)
        site.report.update(report.numbers())
        return client | Payload(site.model.dump(chosen)) | report.memory, Payload()

    def _adopted(self) -> list[str]:
        """Slots that a stage before this one starts from others."""
        before = self.recipe.then[: self.recipe.then.index(self.stage)] if self.stage in self.recipe.then else ()
        return [stage.into for stage in before if isinstance(stage, Adopt)]


@dataclass(frozen=True)
class Adopt:
    """Start slot `into` from what arrives in slot `source`, once."""

    source: str
    into: str
    name: str = "adopt"
    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return self.source, self.into

    def stage(self, recipe: Recipe) -> Stage:
        adopt, nothing = _Adopt(self, recipe), Gradients(0)
        return Stage(self.name, adopt, None, recipe.download, self.rounds, trains=NOTHING, reads=nothing)


@dataclass(frozen=True)
class _Adopt(Personal):
    stage: Adopt
    recipe: Recipe

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return self.recipe.dispatch(server, client)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        self.recipe.restore(client, received, site)
        adopted = rename(site.model.dump(slot(self.stage.source)), self.stage.into)
        return client | Payload(adopted), Payload()


OMEGA = (
    Diagnostic(
        "share",
        ("omega_min", "omega_max"),
        "omega is the weight of one adapter by how like an input is to the client's own examples: shown is its range "
        "over training examples other than those that inputs are compared with.",
        "Weights by input",
    ),
    Diagnostic(
        "alarm",
        ("omega_spread",),
        "The weight by input differs by less than 0.01 between all inputs looked at for {clients}: there it is a "
        "constant, and fixed weights would do the same.",
        limit=0.01,
    ),
)
_LOOKED_AT = 32  # inputs: enough for a range, one pass at most


@dataclass(frozen=True)
class Remember:
    """Keep the last hidden states, under slot `under`, of `count` training examples: what new inputs are compared with.

    A client with fewer examples repeats them. One with more reports the weights `omega` that others of them would get,
    at most `limit` each: `omega_min`, `omega_max`, `omega_mean` and `omega_spread`, see `OMEGA`.
    """

    count: int
    under: str
    limit: float
    name: str = "remember"
    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return (self.under,)

    def stage(self, recipe: Recipe) -> Stage:
        return Stage(self.name, _Remember(self, recipe), rounds=self.rounds, trains=NOTHING, reads="hidden states")


@dataclass(frozen=True)
class _Remember(Personal):
    stage: Remember
    recipe: Recipe

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        self.recipe.restore(client, received, site)
        examples = site.examples("train")
        generator = torch.Generator().manual_seed(at.seed_for(site.info.id, "references"))
        order, count = torch.randperm(len(examples), generator=generator), self.stage.count
        model, size = site.model, site.budget.batch_size
        # The references are one batch: what stands in one batch decides the last bits of its states.
        groups = [order[:count], *order[count : count + _LOOKED_AT].split(size)]
        with (
            torch.no_grad(),
            model.training(False),
            model.active(self.stage.under),
            summaries(model.backbone) as hidden,
        ):
            for group in groups:
                if len(group):
                    site.logits(site.to_device(examples.batch(group)))
        states, *others = (state.cpu() for state in hidden)
        references = states[torch.arange(count) % len(states)]
        if others:
            weights = omega(torch.cat(others), references, self.stage.limit)
            least, most = float(weights.min()), float(weights.max())
            site.report |= {
                "omega_min": least,
                "omega_max": most,
                "omega_mean": float(weights.mean()),
                "omega_spread": most - least,
            }
        return client | Payload({REFERENCES: references}), Payload()
