"""How much each client's knowledge counts for each other client (FedMosaic, eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from befit.core.errors import PayloadMismatch

__all__ = ["mixtures", "newcomer_weights", "relevance", "similarities"]

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

    A client without anybody else gets its own: W = 1.
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
    cosines = torch.stack([similarities(torch.stack([own, one]), kind)[0, 1] for one in sketches])
    return (cosines.double() / temperature).softmax(0).float()


def mixtures(weights: Tensor, held: Tensor) -> Tensor:
    """`G_i = sum_j W_ij X_j` for some clients at once: (K, …) from K rows of W (K, M) and X (M, …), float32."""
    return (weights @ held.reshape(len(held), -1)).view(len(weights), *held.shape[1:])
