"""A mixture for somebody who never trained: by the likeness of a gradient of its data to those of all clients.

Specification fedmosaic.md, section 6 (fast adaptation): the gradient is of a few batches of the unseen task, and the
softmax runs over all old clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from befit.errors import PayloadMismatch
from befit.rela.bank import EVERYBODY, members, placed
from befit.rela.relevance import similarities
from befit.rela.sketch import SKETCH
from befit.types import Payload, State

__all__ = ["newcomer_mixture", "newcomer_weights"]


def newcomer_weights(sketches: Tensor, own: Tensor, temperature: float = 0.5, similarity: str = "flat") -> Tensor:
    """(N,) float32, positive and of sum 1: `softmax_j(cos(g, g_j) / tau)`.

    sketches  (N, …), of the clients; `own` (…) of the newcomer, the same entries. Raises PayloadMismatch for others.
    """
    if own.shape != sketches.shape[1:]:
        raise PayloadMismatch(f"the newcomer's gradient has shape {tuple(own.shape)}, those of the clients "
                              f"{tuple(sketches.shape[1:])}; take the same entries of the same model")  # fmt: skip
    cosines = similarities(torch.cat([own[None], sketches]), similarity)[0, 1:]
    return (cosines.double() / temperature).softmax(0).float()


def newcomer_mixture(
    server: Payload, own: Tensor, family: str, *, temperature: float = 0.5, similarity: str = "flat",
    name: str = "personal",
) -> State:  # fmt: skip
    """What a newcomer with this backbone starts from, in slot `name`, out of the server's memory after any round.

    own  the newcomer's gradient, see `befit.rela.sketch.mean_sketch`

    Cores of PQ sites are mixed over all clients, the rest over those of the backbone, each with weights of sum 1.
    Raises PayloadMismatch where nobody has this backbone, or no gradients are held.
    """
    whose = members(server.scalars)
    if family not in whose or SKETCH not in server.arrays:
        what = "nobody of its backbone has sent anything" if family not in whose else "the server holds no gradients"
        raise PayloadMismatch(f"a newcomer cannot be given a mixture by relevance: {what}")
    weights = newcomer_weights(server.arrays[SKETCH], own, temperature, similarity)
    by_group: dict[str, Tensor] = {}
    for group in (EVERYBODY, family):
        chosen = weights[[whose[EVERYBODY].index(client) for client in whose[group]]]
        by_group[group] = chosen / chosen.sum()
    return {key: torch.tensordot(by_group[group], stack, 1) for key, group, stack in placed(server, family, name)}
