"""Which ranks a budget keeps (Lee et al. 2025a): the largest scales over the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import join
from befit.adapters.layout import ModuleShape
from befit.core.values import State


def order(scales: Tensor) -> Tensor:
    """Indices of all entries, the largest first; of equal ones the earlier first, so that budgets nest.

    scales  (L, r_init) float32; module l and rank k lie at `l * r_init + k`
    """
    return torch.sort(scales.flatten().float(), descending=True, stable=True).indices


def keep(scales: Tensor, count: int) -> Tensor:
    """The scales with all but the `count` largest set to zero, (L, r_init).

    Raises ValueError for a count outside 0 to L * r_init, or where a kept scale is not positive: zero means dropped.

    >>> keep(torch.tensor([[3.0, 1.0], [2.0, 2.0]]), 2)
    tensor([[3., 0.],
            [2., 0.]])
    """
    if not 0 <= count <= scales.numel():
        raise ValueError(f"a budget of {count} ranks; there are {scales.numel()}")
    chosen = order(scales)[:count]
    if count and not bool((scales.flatten()[chosen] > 0).all()):
        raise ValueError(f"scales have to be positive to be kept, the smallest kept is {scales.min():g}")
    kept = torch.zeros_like(scales).flatten()
    kept[chosen] = scales.flatten()[chosen]
    return kept.view_as(scales)


def affordable(scales: Tensor, shapes: Sequence[ModuleShape], parameters: int) -> int:
    """How many of the largest scales fit into so many trained parameters, at `d_in + d_out` for each rank of a module.

    Ranks are taken in the order of `keep` until the next one does not fit, so that smaller limits keep subsets.
    """
    widths = torch.tensor([shape.d_in + shape.d_out for shape in shapes])
    costs = widths.repeat_interleave(scales.shape[1])[order(scales).cpu()].cumsum(0)
    return int((costs <= parameters).sum())


def kept_ranks(scales: Mapping[str, Tensor]) -> dict[str, int]:
    """Rank of every module, from its kept scales."""
    return {name: int((values != 0).sum()) for name, values in scales.items()}


def compact(arrays: Mapping[str, Tensor], slot: str) -> State:
    """A budgeted adapter as it is stored: kept rows of A and columns of B, under another slot; the rest unchanged.

    Modules without ranks have scales only.
    """
    stored: State = {}
    for key, value in arrays.items():
        _, module, factor = key.split("/")
        scales = arrays.get(join(BUDGETED, module, "lambda"))
        if scales is not None and factor in ("A", "B"):
            kept = scales.nonzero().flatten()
            if not len(kept):
                continue
            value = value[kept] if factor == "A" else value[:, kept]
        stored[join(slot, module, factor)] = value.clone()
    return stored


def expand(stored: Mapping[str, Tensor], slot: str, initial: Mapping[str, Tensor]) -> State:
    """What `compact` stored, in the shape of the model; dropped ranks are those of `initial`."""
    arrays: State = {}
    for key, start in initial.items():
        _, module, factor = key.split("/")
        value = stored.get(join(slot, module, factor))
        if value is not None and factor in ("A", "B") and value.shape != start.shape:
            kept = stored[join(slot, module, "lambda")].nonzero().flatten()
            full = start.clone()
            if factor == "A":
                full[kept] = value
            else:
                full[:, kept] = value
            value = full
        arrays[key] = start if value is None else value
    return arrays
