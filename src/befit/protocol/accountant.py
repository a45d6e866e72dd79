"""How much privacy Gaussian noise gives, by the library dp-accounting (extra `privacy`).

The neighbours of a data set are those with one record more or less.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

Accountant = Literal["pld", "rdp"]
MISSING = "unit: the accountant is in an extra that is not installed: pip install 'befit[privacy]'"
# Of the privacy loss, for so many releases and for more: what is finer changes the third digit of epsilon and takes ten
# times as long, and what is coarser adds up over many.
_GRID, _MANY, _FINE = 1e-3, 1000, 1e-4
_MOST = 10_000  # the largest noise multiplier that is looked for


@dataclass(frozen=True)
class Release:
    """Sums of clipped parts that were released with noise: `count` of them, each of a batch of its own.

    rate   with which every record is in a batch, by itself (Poisson sampling)
    noise  standard deviation of the noise, in lengths of the longest part; 0 where there was none
    """

    rate: float
    noise: float
    count: int


def installed() -> bool:
    return find_spec("dp_accounting") is not None


def together(releases: Iterable[Release]) -> tuple[Release, ...]:
    """The same releases with equal ones counted, in the order of their first.

    >>> together([Release(0.1, 1.0, 5), Release(0.2, 1.0, 1), Release(0.1, 1.0, 3)])
    (Release(rate=0.1, noise=1.0, count=8), Release(rate=0.2, noise=1.0, count=1))
    """
    counts: dict[tuple[float, float], int] = {}
    for one in releases:
        counts[one.rate, one.noise] = counts.get((one.rate, one.noise), 0) + one.count
    return tuple(Release(rate, noise, count) for (rate, noise), count in counts.items() if count)


@lru_cache(maxsize=4096)
def epsilon(releases: tuple[Release, ...], delta: float, accountant: Accountant = "pld") -> float:
    """The least epsilon that the accountant shows for all of them together; 0 without any, infinite without noise.

    "pld" is the privacy loss distribution (Koskela et al. 2020; Doroshenko et al. 2022), "rdp" Rényi differential
    privacy (Mironov et al. 2019), which is faster and a little larger. Both are upper bounds.
    """
    if not releases:
        return 0.0
    if not all(one.noise > 0 for one in releases):
        return math.inf
    counted, told = _accountant(accountant, sum(one.count for one in releases)), logging.getLogger("absl")
    before, told.disabled = told.disabled, True  # it names every order of Rényi divergence that it does without
    try:
        for one in releases:
            counted.compose(_event(one))
    finally:
        told.disabled = before
    return float(counted.get_epsilon(delta))


@lru_cache(maxsize=4096)
def noise_for(steps: tuple[Release, ...], target: float, delta: float, accountant: Accountant = "pld") -> float:
    """The noise with which releases together have at most this epsilon, to a thousandth; theirs are multiples of what
    is looked for.

    Raises ValueError where no noise up to 10,000 is enough.
    """

    def spent(noise: float, counted: Accountant) -> float:
        return epsilon(tuple(Release(one.rate, one.noise * noise, one.count) for one in steps), delta, counted)

    if not steps:
        return 1.0
    high = 1.0
    while spent(high, "rdp") > target:  # what is enough for this accountant is for the other
        high *= 2
        if high > _MOST:
            raise ValueError(f"no noise multiplier up to {_MOST} gives epsilon {target:g}")
    low = high / 2
    while spent(low, accountant) <= target:
        high, low = low, low / 2
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle, accountant) <= target else (middle, high)
    return high


def _accountant(kind: Accountant, count: int) -> Any:
    if kind == "rdp":
        from dp_accounting import rdp

        return rdp.RdpAccountant()
    from dp_accounting import pld

    return pld.PLDAccountant(value_discretization_interval=_GRID if count <= _MANY else _FINE)


def _event(one: Release) -> Any:
    import dp_accounting

    noisy = dp_accounting.GaussianDpEvent(one.noise)
    drawn = noisy if one.rate >= 1 else dp_accounting.PoissonSampledDpEvent(one.rate, noisy)
    return dp_accounting.SelfComposedDpEvent(drawn, one.count)
