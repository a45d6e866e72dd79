"""Two adapters of one start become one: by interpolating their factors or their products; and how far apart they are.

The first adapter is in the slot `shared`, the second in `personal`; the result goes to `merged`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from befit.adapters.keys import join, split, to_slot
from befit.adapters.lowrank import concatenate, product_norm, truncate
from befit.adapters.state import norms
from befit.core.values import State


def merge_pair(fed: State, local: State, weights: Mapping[str, Tensor | float], space: str) -> State:
    """The merged slot from the two parents, module by module.

    "factors": `A = w A_f + (1-w) A_l` and B likewise (Appendix B); "product": `w B_f A_f + (1-w) B_l A_l` exactly, at
    rank 2r; "product-truncated": its best approximation of rank r. Heads are always interpolated.
    """
    merged: State = {}
    for key, fed_array in fed.items():
        _, name, part = split(key)
        local_array = local[to_slot(key, "personal")]
        w = weights.get(f"{name}/{part}", weights.get(f"{name}/delta", weights[""]))
        if space == "factors" or part not in ("A", "B"):
            w = w.view_as(fed_array).to(fed_array.dtype) if isinstance(w, Tensor) else w
            merged[to_slot(key, "merged")] = torch.lerp(local_array, fed_array, w)
        elif part == "A":
            A_f, B_f = fed_array, fed[join("shared", name, "B")]
            A_l, B_l = local_array, local[join("personal", name, "B")]
            pair = concatenate((B_f, A_f), (B_l, A_l), float(w))
            if space == "product-truncated":
                pair = truncate(pair, len(A_f))
            merged[join("merged", name, "B")], merged[join("merged", name, "A")] = pair
    return merged


def comparison(fed: State, local: State, w: float) -> dict[str, float]:
    """How far the parents are apart, and how much the merge of factors differs from a merge of products.

    `B_m A_m = w B_f A_f + (1-w) B_l A_l - w (1-w) (B_f - B_l)(A_f - A_l)`: `product_gap` is the size of the last term
    over that of the first two. `norm_ratio_A` and `_B` far from 1, over all modules or at one of them (`_min`, `_max`),
    mean that the gauges of the parents differ.
    """
    gaps, sizes = [], []
    for key, A_f in fed.items():
        _, name, part = split(key)
        if part == "A":
            B_f = fed[join("shared", name, "B")]
            A_l, B_l = local[join("personal", name, "A")], local[join("personal", name, "B")]
            both = concatenate((B_f, A_f), (B_l, A_l), w)
            difference = (B_f - B_l, A_f - A_l)
            sizes.append(product_norm(both))
            gaps.append(w * (1 - w) * product_norm(difference))
    ratios: dict[str, float] = {}
    both_sides = ((fed, "shared"), (local, "personal"))
    for part in ("A", "B"):
        keys = [key for key in fed if split(key)[2] == part]
        sides = [norms([side[to_slot(key, slot)] for key in keys]).tolist() for side, slot in both_sides]
        fed_size, local_size = (math.hypot(*side) for side in sides)
        by_array = list(map(_ratio, *sides))
        ratios |= {
            f"norm_ratio_{part}": _ratio(fed_size, local_size),
            f"norm_ratio_{part}_min": min(by_array),
            f"norm_ratio_{part}_max": max(by_array),
        }
    gap, size = math.hypot(*gaps), math.hypot(*sizes)
    return {"product_gap": gap / size if size > 0 else 0.0, **ratios}


def _ratio(size: float, other: float) -> float:
    """size / other; 1 where both are zero, and a very large number where only the other is."""
    if other > 0:
        return size / other
    return 1.0 if size == 0 else 1e30
