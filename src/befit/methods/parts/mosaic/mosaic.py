"""FedMosaic's protocol (Seo et al.): a client's own adapter beside a mixture of the others', gated layer by layer.

The equations: PQ-LoRA in `befit.adapters.pq`, the gate in `befit.adapters.gates`; beside this file gradients in
`sketch`, weights in `relevance` and `mixing`, the clients' uploads in `bank`.

A client that never trained, a newcomer, gets a mixture by the likeness of a gradient of its data to those of all
clients (fast adaptation of Seo et al. 2026). The gradient is of a few batches of the unseen task, and the softmax runs
over all clients that trained. A newcomer sends only that gradient, and no client gets anything of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import final

from torch import Tensor

from befit.adapters.keys import factor, select, slot, slot_of
from befit.adapters.layout import GATE, Layout, ModelShapes
from befit.adapters.pq import BASIS, pq_modules
from befit.core.errors import NotTrained, nothing_to_deploy
from befit.core.values import ClientInfo, Payload, Scalar, State, Tick, Update
from befit.methods.parts.mosaic.align.memory import alignment_bytes
from befit.methods.parts.mosaic.align.run import aligned_bases
from befit.methods.parts.mosaic.align.settings import Alignment
from befit.methods.parts.mosaic.bank import (
    BASES,
    EVERYBODY,
    GROUPS,
    WEIGHTS,
    absorb,
    described,
    differing,
    members,
    mixed,
    received_before,
    received_by,
    remembered,
    server_bank,
    weights_of,
)
from befit.methods.parts.mosaic.mixing import Mixing, Relevance
from befit.methods.parts.mosaic.sketch import (
    SKETCH,
    Sketch,
    agreement,
    check_agreed,
    disturbed,
    few_records,
    mean_sketch,
    newcomer_sketch,
    one_gradient,
)
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps, Updated
from befit.protocol.method import Deployment, Diagnostic, Method, Needs, Use
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Gradients, Message, Stage
from befit.protocol.work import PublicWork, Work
from befit.train.loop import training
from befit.train.passes import Pass

BOTH = ("personal", "shared")
_TRAINED = slot("personal", GATE)
_WHO = Diagnostic(
    "weights",
    (),
    "Each row is a client, and says how much every client counts in the mixture that it is sent: a row sums to 1. "
    "The server knows this without being told, from what it compares.",
    "Who learns from whom",
)


@final
@dataclass(frozen=True)
class Mosaic(Method):
    """The method as a value.

    layout      slots `personal` and `shared`, gated, the sketch beside them if there is one, and the basis where there
                are PQ modules
    mixing      how much each adapter counts in each mixture; only relevance needs the sketch
    blocks      how many blocks have PQ modules
    pq_rate     learning rate of P and Q, as a multiple of train.lr
    gate_rate   that of the gates
    align       how the bases of different backbones are aligned, before the first round
    """

    layout: Layout
    mixing: Mixing
    sketch: Sketch | None = None
    blocks: int = 0
    pq_rate: float = 1.0
    gate_rate: float = 1.0
    align: Alignment = Alignment()  # noqa: RUF009 frozen
    needs: Needs = Needs(individual_updates=True, mixed=True)  # noqa: RUF009 frozen

    use = Use(BOTH, "gate")
    diagnostics = (_WHO,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", replace(self.needs, common_model=self.sketch is not None))

    @property
    def passes(self) -> tuple[Pass, ...]:
        rates = (factor("P", "Q"), self.pq_rate), (slot(GATE), self.gate_rate)
        own_rates = tuple((part, rate) for part, rate in rates if rate != 1)  # those with the run's rate stay together
        return (Pass(_TRAINED, BOTH, mixer=self.use.mixer, keep_optimiser=True, rates=own_rates),)

    def plan(self) -> Sequence[Stage]:
        gradient, agreed = ((slot_of(SKETCH),), ("sketch",)) if self.sketch else ((), ())
        up, shared = Message(slot("personal", *gradient)), slot("shared")
        down = Message(shared, agreed, besides=slot(BASIS), fewer=shared)  # a mixture once a client has sent something
        arrival, sent = Arrival(self.mixing, self.sketch), Message(slot(*gradient)) if gradient else Message()
        reads = "a sketch of gradients" if self.sketch else Gradients()
        return [
            Stage("federate", _Federate(self), up, down, trains=_TRAINED, reads=reads),
            Stage("arrive", arrival, sent, Message(numbers=agreed), rounds=1, who="newcomer", reads=reads),
        ]

    def check(self, context: Context) -> list[Problem]:
        """Backbones whose PQ modules are not at the same places have no cores to share; a gradient of few records says
        what they are."""
        places = {
            family: {f"{k}.{rest}" for k, rest in pq_modules(shapes.targets, self.blocks).values()}
            for family, shapes in context.shapes.items()
        }
        problems = [Problem("error", "", text) for text in (differing(places) if places else [])]
        if self.sketch is not None and isinstance(self.mixing, Relevance):
            counts = [len(client.train) for client in context.federation.clients]
            smallest = min(filter(None, counts), default=0)  # a site that has not come yet has said nothing
            steps = context.train.steps_for(smallest)
            problems += few_records(ceil(steps / self.mixing.every), context.train.batch_size, smallest)
            problems += one_gradient(steps, self.mixing.every)
        return problems

    def work(self) -> tuple[Work, ...]:
        """Training beside the frozen mixture, and a bare pass of the smallest backbone at every `every`-th step."""
        now_and_then = ()
        if isinstance(self.mixing, Relevance):
            now_and_then = (Work((), times=1 / self.mixing.every, smallest=True),)
        active = (*BOTH, BASIS) if self.blocks else BOTH
        return (Work(active, _TRAINED), *now_and_then)

    def public_work(self) -> PublicWork:
        """The bare passes of the alignment. Sums of products come to about a tenth of that; see the method's page."""
        passes = self.align.records if self.blocks else 0
        return PublicWork(opening=(Work((), times=passes), Work((), times=passes, smallest=True)) if passes else ())

    def opening_bytes(self, shapes: Mapping[str, ModelShapes], tokens: int) -> int:
        return (
            alignment_bytes(shapes, self.layout.slot(BASIS).rank, self.blocks, self.align, tokens) if self.blocks else 0
        )

    def server_init(self, site: ServerSite) -> Payload:
        several = self.blocks > 0 and len(site.families) > 1
        bases = aligned_bases(site, self.blocks, self.align) if several else {}
        about = described(site.starts, self.blocks) | Payload({}, self._smallest(site))
        return about.with_part(BASES, Payload.of_parts({family: Payload(basis) for family, basis in bases.items()}))

    def _smallest(self, site: ServerSite) -> dict[str, Scalar]:
        """Whose gradients are compared, where there are any."""
        if self.sketch is None or site.common is None:
            return {}
        return {"smallest": site.common.fingerprint, "last": list(site.common.model.shapes.last)}

    def influence(self, server: Payload) -> dict[str, dict[str, float]]:
        return weights_of(server)

    def deploy(self, client: Payload, received: Payload, site: Site) -> Deployment:
        if not client.arrays and any(slot_of(key) == "shared" for key in received.arrays):  # a newcomer's mixture
            Recipe.restore(client, received, site)
            return Deployment(site.model.dump(slot(BASIS, "shared")), ("shared",))
        if not client.arrays:
            raise nothing_to_deploy(site.info.id, "personal")
        Recipe.restore(client, received, site)
        arrays = site.model.dump(slot(BASIS, *BOTH, GATE))
        return Deployment(arrays, self.use.slots, self.use.mixer, own="personal")


@final
@dataclass(frozen=True)
class _Federate(Exchange):
    method: Mosaic

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """The client's mixture of the round before; before it has sent anything, its backbone's aligned basis, and with
        it what was mixed for a newcomer. A hash of what gradients are compared by goes along: a client refuses where
        its own is another."""
        agreed = agreement(server.scalars, self.method.sketch, at.seed)
        if client.id not in members(server).get(client.backbone, ()):
            return Payload({}, agreed) | server.part(BASES, client.backbone) | server.part(ARRIVED, client.id)
        return Payload(received_by(server, client.id, client.backbone, "shared"), agreed)

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        if self.method.sketch is not None:
            check_agreed(received, site, self.method.sketch, at.seed)
        Recipe.restore(client, received, site)
        report = yield from training(site, self.method.passes, at, memory=client)
        site.report.update(report.numbers())
        running, sent = self._gradients(client, site, at)
        kept = Payload({**select(received.arrays, slot(BASIS)), **site.model.dump(_TRAINED), **running})
        return client | kept | report.memory, Payload({**site.model.dump(slot("personal")), **sent})

    def _gradients(self, client: Payload, site: Site, at: Tick) -> tuple[State, State]:
        """The running mean of the frozen model's gradient, if the mixing takes it; kept and sent."""
        mixing, sketch = self.method.mixing, self.method.sketch
        if sketch is None or not isinstance(mixing, Relevance):
            return {}, {}
        running = mean_sketch(site, at, sketch, mixing.every, mixing.noise_on("gradient"))
        if SKETCH in client.arrays:  # the first round's mean is taken whole: released code, not Algorithm 1's zeros
            running = client.arrays[SKETCH].lerp(running, mixing.ema)
        return {SKETCH: running}, {SKETCH: disturbed(running, site, at, mixing.noise_on("upload"))}

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        mixing = self.method.mixing
        before = received_before(server, site.starts) if mixing.compares else {}
        stacks, whose = absorb(server, updates)
        return remembered(server, stacks, whose, mixing(server_bank(stacks, whose, before)))


ARRIVED = "arrived"  # the part of the server's memory with what was mixed for newcomers


def newcomer_mixture(
    server: Payload,
    own: Tensor | None,
    family: str,
    mixing: Mixing = Relevance(),  # noqa: B008 frozen
    name: str = "personal",
) -> State:
    """What a newcomer with this backbone starts from, in slot `name`, out of the server's memory after any round.

    own  the newcomer's gradient, see `newcomer_sketch`; none where the mixing takes no gradients

    Cores of PQ modules are mixed over all clients, the rest over those of the backbone, each with weights of sum 1.
    Raises NotTrained where nobody has this backbone, PayloadMismatch where no gradients are held.
    """
    whose = members(server)
    if family not in whose:
        raise NotTrained("a newcomer cannot be given a mixture: nobody of its backbone has sent anything")
    weights: dict[str, Tensor] = {}
    for group in (EVERYBODY, family):
        sketches = server.part(GROUPS, EVERYBODY).arrays.get(SKETCH)
        if sketches is not None and group != EVERYBODY:
            sketches = sketches[[whose[EVERYBODY].index(client) for client in whose[group]]]
        weights[group] = mixing.newcomer(sketches, own, server.part(GROUPS, group).arrays[WEIGHTS])
    return mixed(server, family, name, weights)


@dataclass(frozen=True)
class Arrival(Exchange):
    """A newcomer's only message: the gradient by which the server mixes the clients' adapters for it."""

    mixing: Mixing
    sketch: Sketch | None

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload({}, agreement(server.scalars, self.sketch, at.seed))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        if self.sketch is None or not isinstance(self.mixing, Relevance):
            return client, Payload()
        check_agreed(received, site, self.sketch, at.seed)
        gradient = newcomer_sketch(site, at, self.sketch, self.mixing.noise_on("gradient"))
        return client, Payload({SKETCH: disturbed(gradient, site, at, self.mixing.noise_on("upload"))})

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """The server's memory with a mixture for each of them beside it."""
        arrived: dict[str, Payload] = {}
        for update in updates:
            info, gradient = update.client, update.payload.arrays.get(SKETCH)
            arrived[info.id] = Payload(newcomer_mixture(server, gradient, info.backbone, self.mixing, "shared"))
        return server.with_part(ARRIVED, Payload.of_parts(arrived))
