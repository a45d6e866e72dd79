"""Who gained, over what, and whether the difference is more than chance alone would show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from befit.report.numbers import counts_examples, plain, score_of
from befit.report.results import ClientRow, RunResults, baseline_labels, training_alone

Verdict = Literal["gain", "loss", "unclear", "unknown"]
BEST = ""  # in place of a baseline's label: each client's best baseline
CLEAR = 2.0  # standard errors beyond which the difference of one client is clear
FEWEST = 3  # clients for a statement about their mean


def run_title(label: str) -> str:
    """The method's name as its paper writes it; "fedit-2" is the second run of that method, "fedit-rank-4" the one that
    has another rank than the first."""
    from befit.core.errors import ConfigError
    from befit.protocol.registry import get_method

    name, _, other = label.partition("-")
    for candidate in (label, name):
        try:
            method = get_method(candidate)
        except ConfigError:  # a method that is not registered here, such as a user's own
            continue
        if candidate == label:
            return method.title
        words = other.split("-")
        pairs = dict(zip(words[::2], words[1::2], strict=False))
        if other.isdigit():
            return f"{method.title} {other}"
        if len(words) == 2 * len(pairs) and pairs.keys() <= {parameter.name for parameter in method.parameters}:
            return " ".join(
                [method.title, *(f"{'r' if key == 'rank' else key}={value}" for key, value in pairs.items())]
            )
    return plain(label)


def compared_with(results: RunResults) -> list[str]:
    """The baselines that get a column of gains: the best where there are several, and training alone."""
    labels = baseline_labels(results)
    if len(labels) < 2:
        return labels
    alone = training_alone(results)
    return [BEST] if alone is None else [BEST, alone]


def main_rival(results: RunResults) -> str:
    """Whom the method is compared with first: the only baseline, else training alone, else each client's best."""
    labels = baseline_labels(results)
    return labels[0] if len(labels) == 1 else training_alone(results) or BEST


@dataclass(frozen=True)
class Gain:
    """By how much the method is better than something else; positive is better, whatever the metric.

    error   one standard error: of one client by its test examples (`paired_error`, `difference_error`), of a mean over
            clients by their spread (`mean_gain`); None where that is not known
    beyond  how many of them a clear difference exceeds
    """

    value: float
    error: float | None
    beyond: float = CLEAR

    @property
    def verdict(self) -> Verdict:
        """`unclear` up to `beyond` standard errors, and for no difference at all; `unknown` without an error."""
        if self.error is None:
            return "unknown"
        if abs(self.value) <= self.beyond * self.error:
            return "unclear"
        return "gain" if self.value > 0 else "loss"


def difference_error(first: float, second: float, examples: int, metric: str) -> float | None:
    """`sqrt(2 p (1 - p) / n)`, the standard error of a difference of two independent shares of n examples each.

    For runs that do not have the scores of single examples, such as those of sites elsewhere. p is the mean of the two
    scores with two successes and two failures added, and n grows by those four (Agresti and Coull 1998), so that a
    client with every example right is not taken for certain. Two models that see the same examples mostly agree, which
    makes their difference less uncertain than this: see `paired_error`. None for metrics that are not shares of
    examples, and without examples.
    """
    if not counts_examples(metric) or examples <= 0:
        return None
    share = ((first + second) / 2 * examples + 2) / (examples + 4)
    return math.sqrt(max(0.0, 2 * share * (1 - share)) / (examples + 4))


def paired_error(first: str | Sequence[float], second: str | Sequence[float]) -> float:
    """`sqrt(sum d^2 + 1 - (sum d)^2 / (n + 2)) / (n + 2)`: the standard error of the mean of the differences d of two
    models on the same n examples, each score from 0 to 1, as `compact` gives them.

    Of examples that are right or wrong, `sum d^2` counts those on which the two models differ: McNemar's statistic with
    half an example added to each of the four cells, so that two models that agree are not taken for certain (Agresti
    and Min 2005).

    >>> round(paired_error("1110", "1100"), 4), round(paired_error("1" * 98, "1" * 98), 4)
    (0.2257, 0.01)
    """
    differences = [float(a) - float(b) for a, b in zip(first, second, strict=True)]
    n, total, squares = len(differences) + 2, sum(differences), sum(value * value for value in differences)
    return math.sqrt(squares + 1 - total * total / n) / n


def compact(each: Sequence[float]) -> str | list[float]:
    """Scores of single examples as files hold them: a text of 0 and 1 where there is nothing else, else six decimals.

    >>> compact([1.0, 0.0, 1.0]), compact([0.25, 1.0])
    ('101', [0.25, 1.0])
    """
    if all(value in (0, 1) for value in each):
        return "".join(str(int(value)) for value in each)
    return [round(value, 6) for value in each]


def gain_over(results: RunResults, row: ClientRow, baseline: str) -> Gain | None:
    """One client's gain over a baseline, or over its best one (BEST); None where either has no score."""
    metric = results["metric"]
    others = row.get("baselines") or {}
    scores = {label: score_of(others, label) for label in ([baseline] if baseline else others)}
    known = {label: score for label, score in scores.items() if score is not None}
    own_score = score_of(row, metric)
    if own_score is None or not known:
        return None
    label = max(known, key=lambda label: known[label])
    examples, added = row.get("examples") or 0, 2
    error = (row.get("errors") or {}).get(label)
    if error is None and label != row.get("deployed"):  # of a model from itself there is nothing to be uncertain of
        error, added = difference_error(own_score, known[label], examples, metric), 4
    # With the examples that either error adds, the difference itself is smaller: of a few it is mostly those.
    return Gain(own_score - known[label], error, CLEAR * (examples + added) / examples if examples else CLEAR)


def scores_by_run(results: RunResults) -> dict[str, list[float | None]]:
    """Every run's headline at each client, in the order of the clients: the baselines, and the method at last."""
    rows = list(results["clients"].values())
    scores = {
        label: [score_of(row.get("baselines") or {}, label) for row in rows] for label in baseline_labels(results)
    }
    return {**scores, results["method"]: [score_of(row, results["metric"]) for row in rows]}


def is_paired(results: RunResults) -> bool:
    """Whether differences at clients are of two models on the same examples, one by one."""
    return any(row.get("errors") for row in results["clients"].values())


def gains_over(results: RunResults, baseline: str) -> dict[str, Gain]:
    """The gain of every client for which it is known."""
    gains = {client: gain_over(results, row, baseline) for client, row in results["clients"].items()}
    return {client: gain for client, gain in gains.items() if gain is not None}


def mean_gain(gains: Mapping[str, Gain]) -> Gain:
    """Mean over clients; its error is the standard error over clients, `sd / sqrt(n)` of their gains (sd with ddof 1),
    and it is clear where the 95 % interval of Student's t with n - 1 degrees of freedom leaves zero out.

    The gains are paired: each is one client's with both. With fewer than three clients there is no error. Where all
    clients gain the same, as a few with one example each may by chance, it is that of their examples.
    """
    from scipy.special import stdtrit

    values, errors = zip(*((gain.value, gain.error) for gain in gains.values()), strict=True)
    mean, n = statistics.fmean(values), len(values)
    if n < FEWEST:
        return Gain(mean, None)
    if max(values) - min(values) <= 1e-12 and mean:
        return Gain(mean, None if None in errors else math.hypot(*errors) / n)
    return Gain(mean, statistics.stdev(values) / math.sqrt(n), float(stdtrit(n - 1, 0.975)))
