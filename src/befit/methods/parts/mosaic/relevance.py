"""How much each client's knowledge counts for each other client (FedMosaic, eq. 4), and the mixtures by those weights.

All mixtures at once would be another copy of all adapters, in memory and in every checkpoint. The server keeps the
weights instead. Clients ask in their order: a block of clients is mixed by one matrix product when its first client
asks, and forgotten when two later blocks have been made, or the stack is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from befit.core.errors import PayloadMismatch

_CHUNK = 2**24  # entries of what is normalised at a time: 64 MiB


def similarities(sketches: Tensor, kind: str = "flat") -> Tensor:
    """Cosines of all pairs of clients' gradients: (N, N) float32.

    sketches  (N, entries), or (N, rows, columns)
    kind      "flat" compares them as vectors; "colmean" is the mean over columns of the cosine of each column, which is
              what the released code computes

    A gradient, or a column, of zero has cosine 0 with everything. Memory beyond the arguments: a chunk, and N x N.
    """
    N = len(sketches)
    if kind == "flat":
        flat = sketches.reshape(N, -1)
        products = flat.new_zeros(N, N, dtype=torch.float64)
        for part in flat.split(max(1, _CHUNK // N), 1):
            part = part.float()
            products += part @ part.T
        inverse = _inverse(products.diagonal().sqrt())
        return (inverse[:, None] * products * inverse).float()
    columns = sketches.shape[2]
    products = sketches.new_zeros(N, N, dtype=torch.float64)
    for part in sketches.split(max(1, _CHUNK // (N * sketches.shape[1])), 2):  # (N, rows, some columns)
        part = part.float()
        unit = (part * _inverse(part.norm(dim=1, keepdim=True))).reshape(N, -1)
        products += unit @ unit.T
    return (products / columns).float()


def _inverse(lengths: Tensor) -> Tensor:
    return torch.where(lengths > 0, 1 / lengths, 0.0)


def relevance(cosines: Tensor, temperature: float, members: Sequence[int], include_self: bool = False) -> Tensor:
    """`W_ij = exp(S_ij / tau) / sum_n exp(S_in / tau)` over some clients: (M, M) float32, whose rows sum to 1.

    members       the clients that count, by their place in `cosines` (N, N)
    include_self  count the client itself, as eq. 4 is printed; without it the diagonal is 0, as in the released code

    A client that is alone gets its own: W = 1.
    """
    chosen = cosines[members][:, members].double() / temperature
    if not include_self and len(members) > 1:
        chosen.fill_diagonal_(float("-inf"))
    return chosen.softmax(1).float()


def newcomer_weights(sketches: Tensor, own: Tensor, temperature: float = 0.5, kind: str = "flat") -> Tensor:
    """`w_j = softmax_j(cos(g, g_j) / tau)` for somebody who never trained: (N,) float32, positive and of sum 1.

    sketches  (N, …) of the clients, `own` (…) of the newcomer: the same entries. Raises PayloadMismatch for others.
    """
    if own.shape != sketches.shape[1:]:
        raise PayloadMismatch(
            f"the newcomer's gradient has shape {tuple(own.shape)}, those of the clients "
            f"{tuple(sketches.shape[1:])}; take the same entries of the same model"
        )
    cosines = torch.stack([similarities(torch.stack([own, sketch]), kind)[0, 1] for sketch in sketches])
    return (cosines.double() / temperature).softmax(0).float()


def mixtures(weights: Tensor, stack: Tensor) -> Tensor:
    """`G_i = sum_j W_ij X_j` for some clients at once: (K, …) from K rows of W (K, M) and X (M, …), float32."""
    return (weights @ stack.reshape(len(stack), -1)).view(len(weights), *stack.shape[1:])


ROWS = 64  # clients in a block: enough for a matrix product to be limited by arithmetic, not by reading X
_KEPT = 2


@dataclass
class _Blocks:
    """The last blocks of one stack, by their first row, and the weights that they are of."""

    weights: weakref.ref[Tensor]
    blocks: dict[int, Tensor] = field(default_factory=dict)


_BLOCKS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mixture(weights: Tensor, stack: Tensor, row: int) -> Tensor:
    """`G_i = sum_j W_ij X_j` of one client: (…) from W (M, M) and X (M, …), float32.

    The same to the bit in whatever order clients ask: a row is always computed with its whole block. Neither argument
    may be changed in place. Keeps at most 128 rows of a stack beside it.
    """
    cached: _Blocks | None = _BLOCKS.get(stack)
    if cached is None or cached.weights() is not weights:
        cached = _BLOCKS[stack] = _Blocks(weakref.ref(weights))
    start = row - row % ROWS
    block = cached.blocks.get(start)
    if block is None:
        block = mixtures(weights[start : start + ROWS], stack)
        cached.blocks[start] = block
        for first in list(cached.blocks)[:-_KEPT]:
            cached.blocks.pop(first, None)
    return block[row - start]
