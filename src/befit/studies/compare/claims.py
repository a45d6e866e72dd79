"""What a study claims, before it is run, and whether its results show it, refute it, or leave it open.

A claim is about contrasts: sums of runs' scores with weights that add up to zero, such as {Potara: 1, Local: -1}, or
{Potara: 1, FedIT: -1, Potara far: -1, FedIT far: 1} for a crossing. Seeds are the repetitions. A claim is *shown*
where every contrast is shown to be above `by`, *refuted* where one is shown to be below it, else *undecided*. Tests
are one-sided t tests at 2.5 %, as 95 % intervals are, adjusted by Holm's method for all claims of the study; a claim
of several contrasts is shown by the largest of their p values (Berger 1982) and refuted by the smallest times their
number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from befit.core.errors import did_you_mean
from befit.core.metrics import Spread, spread
from befit.report.numbers import score_of
from befit.studies.compare.collect import FinishedRun, Scores
from befit.studies.compare.results import ContrastResult, Verdict
from befit.studies.compare.series import rows_by_budget
from befit.studies.compare.statistics import LEVEL, holm

Of = Literal["mean", "worst", "others", "newcomers"]
Contrast = Mapping[str, float]
ByClient = Mapping[str, float | None]  # None: the client ended without a score
BySeed = Mapping[str, Mapping[int, ByClient]]  # by run's label and by seed


@dataclass(frozen=True)
class Claim:
    """One claim, with one of `better`, `order` and `contrasts`.

    says       it in a sentence
    source     where it is made, such as arXiv:2602.18658, Table 1
    better     {RUN: OTHER}: the first scores higher
    order      runs from the highest score to the lowest, each above the next
    contrasts  weights by run, each sum above `by`
    by         how much at least, in points of a hundred, or in the unit of a metric that is no share; below zero: at
               most so much less
    of         the mean over clients, the worst client, other clients' examples, or newcomers
    at         the rank of a budget at which runs are compared that measured several; default: as deployed
    """

    says: str
    source: str = ""
    better: dict[str, str] = field(default_factory=dict[str, str])
    order: list[str] = field(default_factory=list[str])
    contrasts: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    by: float = 0.0
    of: Of = "mean"
    at: int | None = None

    @property
    def measured(self) -> str:
        """Whose scores are compared, as in `scores_by_seed`."""
        of = "mean" if self.of == "worst" else self.of
        return of if self.at is None else f"{of} r{self.at}"

    @property
    def sums(self) -> list[dict[str, float]]:
        """All as contrasts."""
        pairs = [*self.better.items(), *zip(self.order, self.order[1:], strict=False)]
        return [*({run: 1.0, other: -1.0} if run != other else {run: 0.0} for run, other in pairs), *self.contrasts]


def claim_problems(claims: Mapping[str, Claim], runs: Sequence[str]) -> list[str]:
    """What is wrong with a study's claims."""
    problems: list[str] = []
    for name, claim in claims.items():
        where = f"claims.{name}"
        if sum(map(bool, (claim.better, claim.order, claim.contrasts))) != 1:
            problems.append(f"{where}: takes one of better, order and contrasts")
        elif claim.order and (len(claim.order) < 2 or len(set(claim.order)) < len(claim.order)):
            problems.append(f"{where}.order: must name at least two runs, each once")
        for label in dict.fromkeys(label for contrast in claim.sums for label in contrast):
            if label not in runs:
                problems.append(f"{where}: there is no run {label!r}.{did_you_mean(label, runs)}")
        if claim.at is not None and claim.of == "others":
            problems.append(f"{where}.at: others' examples are scored as deployed alone")
        problems += [
            f"{where}.better: names the same run twice, {run!r}" for run in claim.better if claim.better[run] == run
        ]
        problems += [
            f"{where}.contrasts: weights must add up to zero, got {contrast}"
            for contrast in claim.contrasts
            if abs(math.fsum(contrast.values())) > 1e-9 or says_nothing(contrast)
        ]
    return problems


def says_nothing(contrast: Contrast) -> bool:
    """Whether it is zero whatever its runs come to."""
    return not any(contrast.values())


def verdicts(
    claims: Mapping[str, Claim], scores: Mapping[str, BySeed], points: float = 100, level: float = LEVEL
) -> list[Verdict]:
    """What the scores say of each claim, with `points` of its margin in one unit of the scores.

    scores  by what is measured (`Claim.measured`), by run, seed and client; shares of one
    """
    tested = {
        name: [_tested(contrast, scores.get(claim.measured, {}), claim, points) for contrast in claim.sums]
        for name, claim in claims.items()
    }
    shown = holm({name: _largest([test["p_above"] for test in tests]) for name, tests in tested.items()})
    refuted = holm({name: _smallest([test["p_below"] for test in tests]) for name, tests in tested.items()})
    return [
        {
            "name": name,
            "says": claim.says,
            "source": claim.source,
            "of": claim.of,
            "at": claim.at,
            "by": claim.by,
            "contrasts": tested[name],
            "p_shown": shown[name],
            "p_refuted": refuted[name],
            "verdict": _word(shown[name], refuted[name], level),
        }
        for name, claim in claims.items()
    ]


def _word(shown: float | None, refuted: float | None, level: float) -> Literal["shown", "refuted", "undecided"]:
    if shown is not None and shown < level / 2:
        return "shown"
    return "refuted" if refuted is not None and refuted < level / 2 else "undecided"


def _tested(contrast: Contrast, scores: BySeed, claim: Claim, points: float) -> ContrastResult:
    """A contrast's mean over the seeds that all its runs have, its 95 % interval, and both p values."""
    seeds = set.intersection(*(set(scores.get(label, {})) for label in contrast))
    values = [_sum(contrast, {label: scores[label][seed] for label in contrast}, claim.of) for seed in sorted(seeds)]
    over = spread([value for value in values if value is not None])
    low, high, above, below = (None,) * 4 if over is None or over["sd"] is None else _test(over, claim.by / points)
    return {
        "weights": dict(contrast),
        "spread": over,
        "low": low,
        "high": high,
        "p_above": above,
        "p_below": below,
    }


def _sum(contrast: Contrast, scores: Mapping[str, ByClient], of: Of) -> float | None:
    """A contrast in one seed. A client without a score in one run is left out of all, so that none gains by losing the
    client that it serves worst; None where nobody is left."""
    lost = {client for of_run in scores.values() for client, score in of_run.items() if score is None}
    known = {
        label: [score for client, score in of_run.items() if score is not None and client not in lost]
        for label, of_run in scores.items()
    }
    if not all(known.values()):
        return None
    reduce = min if of == "worst" else statistics.fmean
    return math.fsum(weight * reduce(known[label]) for label, weight in contrast.items())


def _test(over: Spread, by: float) -> tuple[float, float, float, float]:
    """95 % interval of the mean, and the p values that it is above and below `by`.

    Where a contrast is the same in every seed there is no spread for a t test: the sign test, 1/2 to the power of n.
    """
    from scipy import stats  # half as long to import as torch, and a study is read before it is known to be one

    mean, sd, n = over["mean"], over["sd"] or 0.0, over["n"]
    error = sd / math.sqrt(n)
    if error <= 1e-12 * max(1.0, abs(mean)):
        p, equal = 0.5**n, abs(mean - by) <= 1e-12
        return mean, mean, 1.0 if equal or mean < by else p, 1.0 if equal or mean > by else p
    t, half = (mean - by) / error, float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
    return mean - half, mean + half, float(stats.t.sf(t, n - 1)), float(stats.t.cdf(t, n - 1))


def _largest(values: Sequence[float | None]) -> float | None:
    """A claim is shown where all of its contrasts are; None where one cannot be tested."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _smallest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(1.0, min(known) * len(known)) if known else None


def scores_by_seed(runs: Sequence[FinishedRun]) -> dict[str, dict[str, dict[int, ByClient]]]:
    """By what is measured ("mean", "newcomers", "others", the first two also at a budget, as "mean r4"), by run, seed
    and client. "others" is one number of the whole run."""
    scores: dict[str, dict[str, dict[int, ByClient]]] = {}
    for finished in runs:
        for cell in finished.cells:
            for of, by_client in _scores(finished, cell).items():
                scores.setdefault(of, {}).setdefault(finished.run.label, {})[cell.seed] = by_client
    return scores


def _scores(run: FinishedRun, cell: Scores) -> dict[str, ByClient]:
    scores: dict[str, ByClient] = {}
    if "others_last" in cell.beside:
        scores["others"] = {"": cell.beside["others_last"]}
    for who, of in (("clients", "mean"), ("newcomers", "newcomers")):
        for budget, rows in rows_by_budget(cell, run, who).items():
            scores[f"{of} {budget}".strip()] = {client: score_of(row, cell.metric) for client, row in rows.items()}
    return scores
