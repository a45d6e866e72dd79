"""Scores of every client's model on every client's tasks: Self and Others, at the last point and over all of them.

Self, Others, A_last and A_AUC of Seo et al. 2026 (FedMosaic). A score matrix `a[c][d]` holds the score of client c's
model on client d's tasks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from befit.core.errors import DataError

Matrix = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class StreamScores:
    """The four numbers of a run: Self and Others, each at the last point of evaluation and on average over all."""

    self_last: float
    self_auc: float
    others_last: float
    others_auc: float


def client_score(tasks: Mapping[str, float | None]) -> float:
    """The mean over a client's tasks; one without data (None) is left out. NaN where none has any.

    >>> client_score({"name": 0.5, "count": 1.0, "nothing yet": None})
    0.75
    """
    scored = [score for score in tasks.values() if score is not None]
    return statistics.fmean(scored) if scored else math.nan


def self_score(matrix: Matrix) -> float:
    """The mean over clients of their model's score on their own tasks: `mean_c a[c][c]`. The rest need not be there.

    A client without a score of its own is left out. Raises DataError for a model whose own client is not scored.
    """
    check_diagonal(matrix)
    return mean([row[client] for client, row in matrix.items()])


def others_score(matrix: Matrix) -> float:
    """`mean_c mean_{d != c} a[c][d]`: how well models serve the other clients. NaN where there is one client.

    Raises DataError for a model that is not scored on the same clients as the others.
    """
    check_diagonal(matrix)
    everybody = set(matrix)
    for client, row in matrix.items():
        if odd := sorted(everybody ^ set(row)):
            raise DataError(
                f"the model of client {client} is scored on other clients than there are models: {', '.join(odd)}"
            )
    return mean([mean([score for other, score in row.items() if other != client]) for client, row in matrix.items()])


def mean(values: Sequence[float]) -> float:
    """Without those that are NaN, which stand for nothing to score."""
    scored = [value for value in values if not math.isnan(value)]
    return statistics.fmean(scored) if scored else math.nan


def check_diagonal(matrix: Matrix) -> None:
    """Raise DataError unless every model is scored on its own client."""
    if not matrix:
        raise DataError("a score matrix needs at least one client")
    for client, row in matrix.items():
        if client not in row:
            raise DataError(f"the model of client {client} is not scored on its own tasks; it has {', '.join(row)}")


def a_last(curve: Sequence[float]) -> float:
    """The value at the last point of evaluation."""
    return points(curve)[-1]


def a_auc(curve: Sequence[float]) -> float:
    """The mean over all points of evaluation, which lie evenly over the rounds.

    >>> a_auc([0.25, 0.5, 0.75])
    0.5
    """
    return statistics.fmean(points(curve))


def points(curve: Sequence[float]) -> Sequence[float]:
    if not len(curve):
        raise DataError("there is no point of evaluation")
    return curve


def stream_scores(matrices: Sequence[Matrix], others: Sequence[Matrix] | None = None) -> StreamScores:
    """Self and Others of a run, whose matrices are in the order of its points of evaluation.

    others  the complete matrices, where other clients are scored at fewer points; of the rest the diagonal is enough
    """
    own = [self_score(matrix) for matrix in matrices]
    foreign = [others_score(matrix) for matrix in (matrices if others is None else others)]
    return StreamScores(a_last(own), a_auc(own), a_last(foreign), a_auc(foreign))
