"""Fisher merging: each entry averaged with the clients' diagonal Fisher information as weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from befit.adapters.keys import slot_of, to_slot
from befit.adapters.state import check_same
from befit.core.errors import PayloadMismatch
from befit.core.values import State

FISHER = "fisher"
_EPSILON = 1e-20  # where the weighted Fishers sum to less, the entry is the weighted mean


def fisher_mean(states: Iterable[State], weights: Sequence[float]) -> State:
    """`sum_k p_k F_k X_k / (sum_k p_k F_k + 1e-20)` entry by entry (Matena and Raffel 2022), the weighted mean where
    the weighted Fishers sum to less than that.

    states  of the clients, one at a time: arrays, and beside each its diagonal F_k of that shape in slot "fisher"

    Heads and other arrays without a diagonal are averaged. Raises PayloadMismatch for a diagonal that is negative,
    has no array or another shape.
    """
    total = float(sum(weights))
    numerator: State = {}
    denominator: State = {}
    plain: State = {}
    dtypes: dict[str, torch.dtype] = {}
    for state, weight in zip(states, weights, strict=True):
        values = {key: value for key, value in state.items() if slot_of(key) != FISHER}
        if not dtypes:
            dtypes = {key: value.dtype for key, value in values.items()}
            plain = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in values.items()}
            marked = {key for key in values if to_slot(key, FISHER) in state}
            if not marked:
                raise PayloadMismatch(f"no array comes with its Fisher information in slot {FISHER!r}")
            numerator = {key: torch.zeros_like(plain[key]) for key in marked}
            denominator = {key: torch.zeros_like(plain[key]) for key in marked}
        check_same(plain, values, "states to merge")
        check_same(
            {to_slot(key, FISHER): value for key, value in numerator.items()},
            {key: value for key, value in state.items() if slot_of(key) == FISHER},
            "Fisher information and arrays",
        )
        for key, value in values.items():
            plain[key].add_(value, alpha=weight / total)
            if key in numerator:
                fisher = state[to_slot(key, FISHER)].double()
                if not bool((fisher >= 0).all()):
                    raise PayloadMismatch(f"the Fisher information of {key} has negative entries or NaN")
                numerator[key].addcmul_(fisher, value.double(), value=weight / total)
                denominator[key].add_(fisher, alpha=weight / total)
    for key, top in numerator.items():
        weighted = top / (denominator[key] + _EPSILON)
        plain[key] = torch.where(denominator[key] < _EPSILON, plain[key], weighted)
    return {key: value.to(dtypes[key]) for key, value in plain.items()}
