"""What metrics are called, how their values are spread, and by what clients fall into groups."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

EXAMPLES = "examples"  # the number of examples, as a metric
# Of classification; what they are is in `befit.tasks.class_metrics`.
CLASS_METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "calibration_error")
LOWER_IS_BETTER = ("calibration_error",)  # so that it is no headline
OVER_TOKENS = ("token_accuracy",)  # means over the tokens of all examples, so that one example has no score
LARGEST = 1e100  # beyond this no number is believed, for sums and squares of such could not be numbers any more
TIED = 1e-5  # relative; float32 rounds at 6e-8, files keep six digits, and sums over a network add to either


@dataclass(frozen=True)
class Measure:
    """What a number of a client is: a metric, the budget at which it was measured, and on which of its examples.

    metric  one word, such as "accuracy"; "examples" counts them
    budget  "r4", or "" for what the client deploys
    where   a value of the records' field `evaluate.by`, which may be any text; None for all examples

    On the wire and in files it has one name, `str(measure)`, which `Measure.named` reads again.

    >>> str(Measure("accuracy", "r4", "type r2")), Measure.named("accuracy r4 of type r2")
    ('accuracy r4 of type r2', Measure(metric='accuracy', budget='r4', where='type r2'))
    """

    metric: str
    budget: str = ""
    where: str | None = None

    def __str__(self) -> str:
        name = f"{self.metric} {self.budget}" if self.budget else self.metric
        return name if self.where is None else f"{name} of {self.where}"

    @classmethod
    def named(cls, name: str) -> Measure:
        measured, of, where = name.partition(" of ")
        metric, _, budget = measured.partition(" ")
        return cls(metric, budget, where if of else None)

    @property
    def counts(self) -> bool:
        """Whether it is how many examples there are, and no score."""
        return self.metric == EXAMPLES


class Spread(TypedDict):
    """Mean and standard deviation (n - 1; None for a single number) of n values."""

    mean: float
    sd: float | None
    n: int


def spread(values: Sequence[float]) -> Spread | None:
    """None without any value.

    >>> spread([1.0, 3.0])
    {'mean': 2.0, 'sd': 1.4142135623730951, 'n': 2}
    """
    if not values:
        return None
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "n": len(values)}


def group_keys(infos: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What divides these clients into more than one group, of which at least one has several members.

    >>> group_keys({"a": {"language": "en"}, "b": {"language": "en"}, "c": {"language": "de"}})
    ['language']
    """
    keys = dict.fromkeys(key for info in infos.values() for key in info)
    counts = {key: len({info.get(key) for info in infos.values()}) for key in keys}
    return [key for key, count in counts.items() if 1 < count < len(infos)]


def relative_range(scales: Sequence[float]) -> float:
    """How far the largest scale is from the smallest, as a part of the largest; 0 for equal ones.

    >>> relative_range([2.0, 1.5, 1.0])
    0.5
    """
    most = max(scales)
    return (most - min(scales)) / most if most else 0.0
