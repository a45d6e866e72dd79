"""What becomes of clients' updates if up to f of them may be anything (docs/robust.md).

An update is what a client sends back minus what it started from, in the arrays that both have. Rules by coordinates
take these differences as they are. Rules by distance need the distances of updates alone, (K, K), and give the clients
that count or their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from befit.adapters.keys import slot_of
from befit.adapters.lowrank import Pair, inner
from befit.core.values import State

Update = Callable[[], tuple[State, State]]  # what came back and what it started from, made when asked for

_STEPS, _NEARLY = 10_000, 1e-12


def least_replies(attackers: int) -> int:
    """How many updates a rule needs so that more than half of them are honest."""
    return 2 * attackers + 1


def median(parts: Sequence[Tensor]) -> Tensor:
    """The median of every coordinate, of an even number the mean of the middle two (Yin et al. 2018, definition 1).

    >>> median([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([90.0]), torch.tensor([4.0])])
    tensor([3.])
    """
    return trimmed_mean(parts, (len(parts) - 1) // 2)


def trimmed_mean(parts: Sequence[Tensor], attackers: int) -> Tensor:
    """The mean of every coordinate without its `attackers` largest and smallest values (Yin et al. 2018, definition 2).

    Raises ValueError where nothing is left.
    """
    if len(parts) < least_replies(attackers):
        raise ValueError(f"{len(parts)} tensors without the {attackers} largest and smallest leave nothing")
    ordered = torch.stack(list(parts)).sort(0).values
    return ordered[attackers : len(parts) - attackers].mean(0)


def most_central(squared: Tensor, attackers: int) -> list[int]:
    """All clients, the one that Krum picks first: by the sum of the squared distances to its K - f nearest, itself
    among them (Blanchard et al. 2017, section 3, with the K - f of Allouah et al. 2023 in place of K - f - 2, for which
    K > 2f is enough). The first of equal ones is the first in the order given.

    squared  (K, K) squared distances
    """
    nearest = squared.sort(1).values[:, : len(squared) - attackers]
    return torch.argsort(nearest.sum(1), stable=True).tolist()


def geometric_weights(squared: Tensor) -> list[float]:
    """Weights of sum 1 whose mean is the geometric median, the point of least total distance (Pillutla et al. 2022a).

    squared  (K, K) squared distances

    Weiszfeld's iteration, `w_k` in proportion to `1 / ||x_k - z||` for `z = sum w_k x_k`. No z is formed, since
    `||x_k - z||^2 = sum_j w_j D_kj - (sum_ij w_i w_j D_ij) / 2`. A distance counts as 1e-9 of the median one at least.
    """
    squared = squared.double()
    weights = torch.full((len(squared),), 1 / len(squared), dtype=torch.float64)
    least = 1e-18 * squared[squared > 0].median() if bool((squared > 0).any()) else torch.tensor(1.0)
    for _ in range(_STEPS):
        across = squared @ weights
        far = (across - weights @ across / 2).clamp_min(least)
        after = far.rsqrt() / far.rsqrt().sum()
        done = bool((after - weights).abs().max() < _NEARLY)
        weights = after
        if done:
            break
    return weights.tolist()


def squared_distances(updates: Sequence[Update]) -> Tensor:
    """(K, K) float64: how far updates are apart, in what a server averages and in what a model makes of it.

    The sum over slots of two squared distances, each over the median of the updates' squared norms: of the arrays, and
    of the products `B A - B_0 A_0` of modules of which both factors are there. Products alone would not do where
    factors are averaged: `(c B, A / c)` has the product of `(B, A)`, and ruins a mean of factors.

    Reads two updates at a time, each K times, and forms nothing larger than them and r x r.
    """
    grams: dict[str, Tensor] = {}
    for i, first in enumerate(updates):
        spaces = _spaces(*first())
        for j, second in enumerate(updates[i:], start=i):
            other = spaces if i == j else _spaces(*second())
            for name in spaces:
                gram = grams.setdefault(name, torch.zeros(len(updates), len(updates), dtype=torch.float64))
                gram[i, j] = gram[j, i] = _inner(spaces[name], other[name])
    squared = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in sorted(grams):
        sizes = grams[name].diagonal()
        usual = sizes.median() if bool(sizes.median() > 0) else sizes.max()
        if bool(usual > 0):
            squared += (sizes[:, None] + sizes[None, :] - 2 * grams[name]).clamp_min(0) / usual
    return squared


def change(reply: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> State:
    """An update: what came back minus what it started from, in the type of the reply."""
    return {key: reply[key] - value for key, value in start.items()}


def _spaces(reply: State, start: State) -> dict[str, list[Pair]]:
    """The arrays of an update by slot, and its products; arrays as pairs (1, n) of which only A says anything."""
    spaces: dict[str, list[Pair]] = {}
    one = torch.ones(1, 1, dtype=torch.float64)
    for key, array in sorted(change(reply, start).items()):
        slot = slot_of(key)
        spaces.setdefault(slot, []).append((one, array.double().reshape(1, -1)))
        module, _, part = key.rpartition("/")
        if part == "A" and (product := _product(reply, start, module)) is not None:
            spaces.setdefault(f"{slot} products", []).append(product)
    return spaces


def _product(reply: State, start: State, module: str) -> Pair | None:
    """A pair of rank 2r whose product is `B A - B_0 A_0`; None without a B that fits."""
    a, b = f"{module}/A", f"{module}/B"
    if b not in start or reply[a].ndim != 2 or reply[b].ndim != 2 or len(reply[a]) != reply[b].shape[1]:
        return None
    B = torch.cat([reply[b].double(), -start[b].double()], dim=1)
    return B, torch.cat([reply[a].double(), start[a].double()], dim=0)


def _inner(first: Sequence[Pair], second: Sequence[Pair]) -> float:
    """`<B1 A1, B2 A2>`, summed over modules."""
    return sum(inner(mine, other) for mine, other in zip(first, second, strict=True))
