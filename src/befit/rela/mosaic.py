"""FedMosaic's protocol (Seo et al.): a client's own adapter beside a mixture of the others', gated layer by layer.

The equations: PQ-LoRA in `befit.adapters.pq`, the gate in `befit.adapters.gates`, gradients in `befit.rela.sketch`,
weights in `befit.rela.relevance`; who gets what of whom in `befit.rela.bank`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from befit.adapters.keys import Selector, factor, select, slot, slot_of, to_slot
from befit.adapters.layout import GATE, Layout
from befit.adapters.pq import BASIS
from befit.align.run import aligned_bases
from befit.align.settings import Alignment
from befit.errors import NotTrained
from befit.method import Deployment, Method
from befit.rela.bank import EVERYBODY, absorb, described, members, mixed, received_by
from befit.rela.relevance import similarities
from befit.rela.sketch import SKETCH, Sketch, mean_sketch
from befit.site import ServerSite, Site
from befit.train.loop import Pass, train
from befit.train.work import Work
from befit.types import ClientInfo, Needs, Payload, Stage, TensorSpec, Tick, Update

__all__ = ["BOTH", "Mosaic", "Relevance"]

BOTH = ("personal", "shared")


@dataclass(frozen=True)
class Relevance:
    """How the server finds out who is relevant to whom.

    temperature   tau of the softmax of cosines
    similarity    cosine of whole gradients ("flat"), or the mean over their columns ("colmean")
    include_self  whether a client's own adapter is part of its mixture
    every         gradients are taken at every so many steps
    ema           weight of the new round's mean gradient in the running one
    noise         standard deviation of what is added to each gradient
    """

    temperature: float = 0.5
    similarity: Literal["flat", "colmean"] = "flat"
    include_self: bool = False
    every: int = 10
    ema: float = 0.5
    noise: float = 1e-4


@final
@dataclass(frozen=True)
class Mosaic(Method):
    """The method as a value.

    layout      slots `personal` and `shared`, gated, the sketch beside them, and the basis where there are PQ sites
    blocks      how many blocks have PQ sites
    pq_rate     learning rate of P and Q, as a multiple of train.lr
    align       how the bases of different backbones are aligned, before the first round
    """

    layout: Layout
    sketch: Sketch
    relevance: Relevance
    blocks: int = 0
    pq_rate: float = 1.0
    align: Alignment = Alignment()  # noqa: RUF009 frozen
    needs: Needs = Needs(individual_updates=True, mixed=True)  # noqa: RUF009 frozen

    @property
    def passes(self) -> tuple[Pass, ...]:
        rates = ((factor("P", "Q"), self.pq_rate),) if self.blocks else ()
        return (Pass(self.trainable(), BOTH, mixer="gate", keep_optimiser=True, rates=rates),)

    def plan(self) -> Sequence[Stage]:
        return [Stage("federate", self)]

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "up": str(slot("personal", slot_of(SKETCH))), "down": str(slot("shared")),
                "trained": str(self.trainable()), "deployed": f"{' + '.join(BOTH)}, mixed by: gate"}  # fmt: skip

    def trainable(self) -> Selector:
        return slot("personal", GATE)

    def work(self) -> tuple[Work, ...]:
        """Training beside the frozen mixture, and a bare pass at every `every`-th step.

        That pass counts as one of the client's own model; the smallest backbone's, which it is, costs no more.
        """
        return (*(work for one in self.passes for work in one.work), Work((), times=1 / self.relevance.every))

    def server_init(self, site: ServerSite) -> Payload:
        several = self.blocks > 0 and len(site.families) > 1
        bases = aligned_bases(site, self.blocks, self.align) if several else {}
        return Payload(bases, described(site.starts, self.blocks))

    def client_init(self, site: Site) -> Payload:
        return Payload()

    def uplink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {key: spec for key, spec in specs.items() if slot_of(key) in ("personal", slot_of(SKETCH))}

    def downlink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {key: spec for key, spec in specs.items() if slot_of(key) == "shared"}

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """The client's mixture of the round before; before it has sent anything, its backbone's aligned basis."""
        if client.id not in members(server.scalars)[EVERYBODY]:
            prefix = f"{BASIS}:{client.backbone}"
            aligned = {to_slot(key, BASIS): value for key, value in server.arrays.items() if slot_of(key) == prefix}
            return Payload(aligned)
        return Payload(received_by(server, client.id, client.backbone, "shared"))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        _restore(client, received, site)
        report = train(site, self.passes, at, moments=client.arrays)
        site.report.update(report.numbers())
        fresh = mean_sketch(site, at, self.sketch, self.relevance.every, self.relevance.noise)
        if SKETCH in client.arrays:  # the first round's mean is taken whole: released code, not Algorithm 1's zeros
            fresh = client.arrays[SKETCH].lerp(fresh, self.relevance.ema)
        kept = {
            **client.arrays, **select(received.arrays, slot(BASIS)), **site.model.dump(self.trainable()),
            **report.moments, SKETCH: fresh,
        }  # fmt: skip
        return Payload(kept), Payload({**site.model.dump(slot("personal")), SKETCH: fresh})

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        stacks, whose = absorb(server, updates)
        cosines = similarities(stacks[SKETCH], self.relevance.similarity)
        worlds, weights = mixed(stacks, whose, cosines, self.relevance.temperature, self.relevance.include_self)
        bases = {key: value for key, value in server.arrays.items() if slot_of(key).startswith(f"{BASIS}:")}
        clients = {f"clients:{family}": ids for family, ids in whose.items() if family != EVERYBODY}
        return Payload({**bases, **stacks, **worlds, "relevance/clients/weights": weights},
                       {**server.scalars, **clients})  # fmt: skip

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        if not client.arrays:
            raise NotTrained(f"client {site.info.id} has no 'personal' adapter: it never completed a round, so there "
                             "is nothing to deploy")  # fmt: skip
        _restore(client, received, site)
        return Deployment(site.model.dump(slot(BASIS, *BOTH, GATE)), BOTH, "gate")


def _restore(client: Payload, received: Payload, site: Site) -> None:
    known = set(site.model.keys)
    site.model.load({key: value for key, value in client.arrays.items() if key in known})
    site.model.load(received.arrays)
