"""Groups of clients: which of several adapters fits a client, and clusters by distances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from befit.core.values import State
from befit.protocol.site import Site


def fitting(site: Site, groups: Sequence[State], prefer: int) -> int:
    """The group whose adapter, of slot `shared`, has the least loss on the client's training examples; of equal ones
    the preferred, then the first."""
    if len(groups) == 1:
        return 0
    losses: list[float] = []  # of a group that has diverged: infinite
    for group in groups:
        with site.model.using(group, "shared"):
            examples, size = site.examples("train"), site.budget.batch_size
            loss = site.task.total_loss(site.model.backbone, examples, size, site.model.device)
            losses.append(loss if math.isfinite(loss) else math.inf)
    return min(range(len(groups)), key=lambda group: (losses[group], group != prefer, group))


def cosine_distances(states: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """(states, states) float64: the mean over their arrays of `1 - cos`, each array as one vector; 1 where one is zero.

    All states have the same keys.
    """
    total = torch.zeros(len(states), len(states), dtype=torch.float64)
    for key in states[0]:
        rows = torch.stack([state[key].double().flatten() for state in states])
        unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        total += 1 - unit @ unit.T
    return (total / len(states[0])).fill_diagonal_(0)


def clusters(distances: Tensor, most: int) -> list[list[int]]:
    """Groups of points by agglomeration with average linkage, as many of 2 to `most` as have the best silhouette.

    distances  (points, points), symmetric
    ->         each group in rising order, and the groups by their first points; one group where `most` is 1, and of
               one or two points, which have no silhouette
    """
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score

    values, best, best_labels = distances.numpy(), -math.inf, [0] * len(distances)
    for count in range(2, min(most, len(values) - 1) + 1):
        labels = AgglomerativeClustering(count, metric="precomputed", linkage="average").fit_predict(values)
        quality = float(silhouette_score(values, labels, metric="precomputed"))
        if quality > best:
            best, best_labels = quality, labels.tolist()
    return sorted([point for point, group in enumerate(best_labels) if group == label] for label in set(best_labels))
