"""Ravan (Raje et al. 2025): several r x r cores between frozen factors are trained and averaged, each with a weight."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from befit.adapters.core import Cores
from befit.adapters.keys import factor, slot, split
from befit.adapters.layout import Layout, Slot
from befit.core.schema import at_least
from befit.core.values import ClientWeights, Payload, State, Update
from befit.merge.merge import Merge, MergeContext
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("ravan", title="Ravan", paper="arXiv:2506.05568", year=2025)
def ravan(
    rank: int = 8,
    alpha: float = 16.0,
    heads: Annotated[int, at_least(2)] = 2,
    weights: ClientWeights = "examples",
) -> Recipe:
    """Train the cores of several heads and how much each counts; average the weighed cores, which is exact.

    rank     of each head's core
    alpha    scaling of all heads: delta = alpha / rank * sum_i c_i B_i R_i A_i
    heads    how many; heads times rank must not exceed the width of a module
    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `R_i <- sum_k p_k c_ki R_ki`, `c_i <- 1`. The update has up to the rank of all heads together.
    up = down = heads (r^2 + 1) per module. A task head travels with the cores. Deviation: the server weighs the cores,
    where clients upload them weighed; all clients train all heads.

    Source: Raje et al. 2025, Algorithm 1; boyi-liu/FedLLM-Factory, alg/ravan.py; docs/methods/ravan.md.
    """
    cores = slot("shared") & ~factor("A", "B")
    return Recipe(
        layout=Layout((Slot("shared", rank, alpha, form=Cores(heads)),)),
        passes=(Pass(cores, ("shared",)),),
        share=cores,
        merge=WeighedCores(heads, Merge(weights)),
        use=Use(("shared",)),
    )


@dataclass(frozen=True)
class WeighedCores:
    """The mean of cores times their weights, and weights of one again."""

    heads: int
    mean: Merge
    individual: bool = True

    def __call__(self, updates: Sequence[Update], context: MergeContext) -> State:
        return self.mean(
            [replace(update, payload=Payload(self._weighed(update.payload.arrays))) for update in updates], context
        )

    def _weighed(self, arrays: State) -> State:
        weighed = dict(arrays)
        for key, c in arrays.items():
            if split(key)[2] == "c":
                cores = f"{key.removesuffix('c')}R"
                weighed[cores] = (c[:, None, None] * arrays[cores].unflatten(0, (self.heads, -1))).flatten(0, 1)
                weighed[key] = torch.ones_like(c)
        return weighed
