"""How clients' updates become one state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from befit.adapters.state import weighted_mean
from befit.types import State, Update

__all__ = ["Merge"]


@dataclass(frozen=True)
class Merge:
    """The weighted mean of each factor on its own (FedAvg on LoRA: McMahan et al. 2017, algorithm 1).

    weights  "examples" weighs a client by its training examples, "uniform" gives all the same

    `A = sum_k p_k A_k`, `B = sum_k p_k B_k`: not the mean of the products, unless all A or all B agree.
    """

    weights: Literal["examples", "uniform"] = "examples"

    def __call__(self, updates: Sequence[Update]) -> State:
        weights = [update.client.num_examples if self.weights == "examples" else 1 for update in updates]
        return weighted_mean([update.payload.arrays for update in updates], weights)
