"""Fed-SB (Singhal et al. 2025b): an r x r core is trained and averaged, between factors of the clients' first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from befit.adapters.core import Cores
from befit.adapters.keys import NOTHING, factor, select, slot
from befit.adapters.layer import Branch
from befit.adapters.layout import Layout, Slot
from befit.adapters.lowrank import spectrum
from befit.core.schema import Mark, at_least
from befit.core.values import ClientInfo, ClientWeights, Payload, State, Tick, Update
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.parts.recipe.route import Broadcast, Once
from befit.protocol.method import Needs, Use
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Message, Personal, Stage
from befit.train.passes import Pass

SHARED = slot("shared")
BASES = SHARED & factor("A", "B")


@register("fed_sb", title="Fed-SB", paper="arXiv:2502.15436", year=2025)
def fed_sb(
    rank: int = 8,
    alpha: float = 16.0,
    estimate_batches: Annotated[int, Mark.LOOP, at_least(0)] = 4,
    weights: ClientWeights = "examples",
) -> Recipe:
    """Train and average a core R between frozen factors: exact, in r^2 numbers per module and round.

    rank              r: the core is r x r, and no module may be narrower
    alpha             its scaling: delta = alpha / rank * B R A
    estimate_batches  batches of training data of which a client takes its first step; 0: no step is taken, B and A are
                      orthonormal, drawn from the seed, and R starts at zero, so that nothing but gradients of R is
                      read from records (privacy.unit: example) and sums are enough (federation.secure_sums)
    weights           "examples" weighs a client by its training examples, "uniform" gives all the same

    Once: `D_k = -lr sign(grad_W L_k)`, of which a client sends the best rank r; `sum_k p_k D_k = U S V^T`,
    `B = U_r`, `A = V_r^T`, `R = S_r / s`. Then in every round `R <- sum_k p_k R_k`.
    up = down = r^2 per module and round; before them r(d_in + d_out), once up and once down, unless no step is taken. A
    head travels with R. Deviations: the step is the mean of the clients' own, where the paper has that of data that the
    server sees; factors without a step are ours.

    Source: Singhal et al. 2025b, Fed-SB; putssander/fed-sb, fed_sb/utils/gradient_utils.py and
    fed_sb/utils/initialization_utils.py; docs/methods/fed_sb.md.
    """
    core = SHARED & ~factor("A", "B")
    estimated = estimate_batches > 0
    return Recipe(
        layout=Layout((Slot("shared", rank, alpha, form=Cores()),)),
        before=(FirstStep(rank, estimate_batches, weights), Bases()) if estimated else (),
        passes=(Pass(core, ("shared",)),),
        share=core,
        merge=Merge(weights),
        route=Once(BASES) if estimated else Broadcast(),
        use=Use(("shared",)),
        needs=Needs(individual_updates=estimated),
    )


@dataclass(frozen=True)
class FirstStep:
    """Every client sends the best approximation, of the rank, of the step that it would take first; the server makes
    the factors and the core of their mean."""

    rank: int
    batches: int
    weights: ClientWeights
    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()

    def stage(self, recipe: Recipe) -> Stage:
        reads = "the gradient of all weights"
        return Stage(
            "estimate", _FirstStep(self, recipe), Message(BASES), rounds=self.rounds, trains=NOTHING, reads=reads
        )


@dataclass(frozen=True)
class _FirstStep(Exchange):
    how: FirstStep
    recipe: Recipe

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload()

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        sent: State = {}
        gradients, loss = _gradients(site, self.how.batches, at)
        site.report["loss"] = loss
        for name, gradient in gradients.items():
            step = -site.budget.lr * gradient.double().sign()
            U, S, Vh = torch.linalg.svd(step, full_matrices=False)
            root = S[: self.how.rank].sqrt()
            sent[f"{name}/A"] = (root[:, None] * Vh[: self.how.rank]).float()
            sent[f"{name}/B"] = (U[:, : self.how.rank] * root).float()
        return client, Payload({key: sent[key] for key in site.model.specs if BASES(key)})

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        scale, arrays = self.recipe.layout.slot("shared").scale, dict(server.arrays)
        for name, (P, Q) in Merge(self.how.weights, space="delta").updates_of(updates):
            step = spectrum((P, Q), self.how.rank)
            arrays[f"{name}/A"], arrays[f"{name}/B"] = step.right.float(), step.left.float()
            arrays[f"{name}/R"] = torch.diag(step.sigma[: self.how.rank] / scale).float()
        return Payload(arrays, server.scalars)


def _gradients(site: Site, batches: int, at: Tick) -> tuple[dict[str, Tensor], float]:
    """The gradient of the mean loss in every target module's weight, by `slot/module`, and that loss; (d_out, d_in), on
    the CPU.

    Dropout is off. The core is zero, so it is the gradient at the backbone as it is; of a module that no example
    reaches, as a projector without images, it is zero.
    """
    gradients: dict[str, Tensor] = {}
    total = 0.0

    def record(name: str, branch: Branch, inputs: Tensor, grad: Tensor) -> None:
        g = grad.detach().float().flatten(0, -2)
        part = (g.T @ inputs.detach().float().flatten(0, -2) / (branch.scale * batches)).cpu()
        gradients[name] = gradients[name] + part if name in gradients else part

    adapted = site.model.adapted("shared")
    model, core = site.model, SHARED & factor("R")
    with model.training(False), model.active("shared"), model.trainable(core), model.recording(record):
        for batch in site.batches("train", batches, at):
            loss = site.loss(batch)
            loss.backward()
            total += loss.item() / batches
    model.zero_gradients()
    places = {f"shared/{name}": shape for name, shape in adapted.items()}
    return {key: gradients.get(key, torch.zeros(shape.d_out, shape.d_in)) for key, shape in places.items()}, total


@dataclass(frozen=True)
class Bases:
    """Every client downloads the factors, and keeps them."""

    rounds: int | None = 1
    passes: tuple[Pass, ...] = ()

    def stage(self, recipe: Recipe) -> Stage:
        return Stage("bases", _Bases(), None, Message(BASES), self.rounds, trains=NOTHING)


@dataclass(frozen=True)
class _Bases(Personal):
    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(select(server.arrays, BASES))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        return client | Payload(received.arrays), Payload()

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return Once.mark_received(server, updates)
