"""Differences at several sites that have something in common: what each of them says of all, and all of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats


@dataclass(frozen=True)
class Effect:
    """A difference and its standard error; `freedom` of Student's t, None for a normal distribution."""

    value: float
    error: float
    freedom: int | None = None

    @property
    def probability(self) -> float:
        """That the difference is above zero, if nothing was known of it before."""
        return float(self._law.cdf(self.value / self.error))

    @property
    def half(self) -> float:
        """Half of the 95 % interval."""
        return self.error * float(self._law.ppf(0.975))

    @property
    def _law(self) -> Any:
        return stats.norm if self.freedom is None else stats.t(self.freedom)


def together(differences: Sequence[float], errors: Sequence[float]) -> tuple[Effect, list[Effect]]:
    """The mean difference over sites, and every site's own in the light of the others'.

    differences, errors  by site, the difference that was measured and its standard error

    A random-effects model, theta_k ~ N(mu, tau^2) and d_k ~ N(theta_k, s_k^2): tau^2 by Paule and Mandel (1982), mu
    with the t interval of Hartung and Knapp (2001), theta_k by its normal posterior, in which the error of mu counts
    and that of tau^2 does not. Below three sites nothing can be said of tau: each stands by itself, and the mean is
    theirs.

    >>> mean, sites = together([0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1])
    >>> round(mean.value, 3), round(sites[0].error, 3)
    (0.1, 0.05)
    """
    count = len(differences)
    if count < 3:
        mean = Effect(math.fsum(differences) / count, math.hypot(*errors) / count)
        return mean, [Effect(value, error) for value, error in zip(differences, errors, strict=True)]
    between = _between(differences, errors)
    weights = [1 / (error**2 + between) for error in errors]
    total = math.fsum(weights)
    centre = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / total
    spread = math.fsum(w * (d - centre) ** 2 for w, d in zip(weights, differences, strict=True)) / (count - 1)
    # Never below what the errors of the sites alone give: few sites can agree by chance.
    mean = Effect(centre, math.sqrt(max(1.0, spread) / total), count - 1)
    sites = []
    for difference, error in zip(differences, errors, strict=True):
        pulled = error**2 / (error**2 + between)  # how much of what is said of a site is said by the others
        value = pulled * centre + (1 - pulled) * difference
        variance = (1 - pulled) * error**2 + pulled**2 * mean.error**2
        sites.append(Effect(value, math.sqrt(variance)))
    return mean, sites


def _between(differences: Sequence[float], errors: Sequence[float]) -> float:
    """tau^2 at which the weighted squares of the deviations are as many as expected; 0 where they are fewer anyway."""

    def excess(between: float) -> float:
        weights = [1 / (error**2 + between) for error in errors]
        centre = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / math.fsum(weights)
        squares = math.fsum(w * (d - centre) ** 2 for w, d in zip(weights, differences, strict=True))
        return squares - (len(differences) - 1)

    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, max(d * d for d in differences) + max(error * error for error in errors)
    while excess(high) > 0:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2
