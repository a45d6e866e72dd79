"""How much privacy Gaussian noise gives, by the library dp-accounting (extra `privacy`).

The neighbours of a data set are those with one record more or less.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

from befit.core.text import to_install

Accountant = Literal["pld", "rdp"]
MISSING = f"unit: the accountant is in an extra that is not installed: {to_install('privacy')}"
# Of the privacy loss, for so many releases and for more: what is finer changes the third digit of epsilon and takes ten
# times as long, and what is coarser adds up over many.
_GRID, _MANY, _FINE = 1e-3, 1000, 1e-4
_MOST = 10_000  # the largest noise multiplier that is looked for
_LEAST = 0.05  # the smallest that is counted
_FINENESS = 1000  # how many of them lie between one and its double


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
    for release in releases:
        counts[release.rate, release.noise] = counts.get((release.rate, release.noise), 0) + release.count
    return tuple(Release(rate, noise, count) for (rate, noise), count in counts.items() if count)


@lru_cache(maxsize=4096)
def epsilon(releases: tuple[Release, ...], delta: float, accountant: Accountant = "pld", fine: bool = False) -> float:
    """The least epsilon that the accountant shows for all of them together; 0 without any, infinite without noise or
    with less than a twentieth of the longest part, which hides nothing and would be counted for hours.

    "pld" is the privacy loss distribution (Koskela et al. 2020; Doroshenko et al. 2022), "rdp" Rényi differential
    privacy (Mironov et al. 2019), which is a little larger. Both are upper bounds.

    fine  "pld" counts few releases as finely as many
    """
    if not releases:
        return 0.0
    if not all(release.noise >= _LEAST for release in releases):
        return math.inf
    return _by_loss(releases, delta, fine) if accountant == "pld" else _by_order(releases, delta)


def above(releases: tuple[Release, ...], target: float, delta: float, accountant: Accountant = "pld") -> float | None:
    """The epsilon of the releases where it is above the target, else None.

    What seems to be above is counted again as finely as many releases are: no part of a run then has more than the
    whole run that was agreed to.
    """
    total = epsilon(releases, delta, accountant)
    if total > target:
        total = min(total, epsilon(releases, delta, accountant, fine=True))
    return total if total > target else None


@lru_cache(maxsize=4096)
def noise_for(steps: tuple[Release, ...], target: float, delta: float, accountant: Accountant = "pld") -> float:
    """The noise with which releases together have at most this epsilon, to a thousandth; theirs are multiples of what
    is looked for.

    Raises ValueError where no noise up to 10,000 is enough.
    """
    if not steps:
        return 1.0
    most = math.ceil(_FINENESS * math.log2(_MOST))
    enough, short = dict[int, float](), dict[int, float]()  # what was tried, with the logarithm of epsilon / target
    place = _guess(steps, target, delta)
    while not (enough and short and min(enough) - max(short) == 1):
        noise = 2 ** (place / _FINENESS)
        spent = epsilon(
            tuple(Release(release.rate, release.noise * noise, release.count) for release in steps), delta, accountant
        )
        over = math.log(spent / target) if 0 < spent < math.inf else math.copysign(math.inf, spent - target)
        (short if over > 0 else enough)[place] = over
        if enough and short:
            low, high = max(short), min(enough)
            share = short[low] / (short[low] - enough[high]) if math.isfinite(short[low] - enough[high]) else 0.5
            place = min(max(low + round(share * (high - low)), low + 1), high - 1)
        elif place == most and short:
            raise ValueError(f"no noise multiplier up to {_MOST} gives epsilon {target:g}")
        else:  # epsilon falls at least as fast as the noise grows
            by = math.ceil(_FINENESS * min(max(over, -1), 1) / math.log(2))
            place = min(place + by + (1 if over > 0 else -1), most)
    return 2 ** (min(enough) / _FINENESS)


def _guess(steps: Sequence[Release], target: float, delta: float) -> int:
    """About the noise, in steps of `_FINENESS`: all releases as one Gaussian (Bu et al. 2020, theorem 5; its epsilon
    bounded by a tail)."""
    tail = 2 * math.log(1 / delta)
    squares = (math.sqrt(tail + 2 * target) - math.sqrt(tail)) ** 2
    ratio = squares / sum(release.count * (release.rate / release.noise) ** 2 for release in steps)
    return round(_FINENESS * -0.5 * math.log2(math.log1p(ratio)))


def _by_loss(releases: Sequence[Release], delta: float, fine: bool) -> float:
    """What dp-accounting's PLDAccountant finds on this grid; of each kind of release the distribution is kept, which is
    most of the work."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    each, together = zip(*map(_reach, releases), strict=True)
    few = sum(release.count for release in releases) <= _MANY
    grid = max(_GRID if few and not fine else _FINE, max(each) / 5e5, sum(together) / 1e7)
    whole = pld.identity(value_discretization_interval=grid)
    for release in releases:
        whole = whole.compose(
            _losses(1.0, release.noise / math.sqrt(release.count), grid)
            if release.rate >= 1
            else _losses(release.rate, release.noise, grid).self_compose(release.count)
        )
    return float(whole.get_epsilon_for_delta(delta))


def _reach(release: Release) -> tuple[float, float]:
    """About the largest losses that are likely of one of the releases, and of all: with next to no noise they are so
    large that the grid has to be coarser, which shows more."""
    noise, count = release.noise, release.count
    return 1 / (2 * noise**2) + 12 / noise, release.rate * count / (2 * noise**2) + 6 * math.sqrt(count) / noise


@lru_cache(maxsize=64)
def _losses(rate: float, noise: float, grid: float) -> Any:
    """The distribution of the privacy loss of one release."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(noise, value_discretization_interval=grid, sampling_prob=rate)


def _by_order(releases: Sequence[Release], delta: float) -> float:
    import dp_accounting
    from dp_accounting import rdp

    counted, logger = rdp.RdpAccountant(), logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True  # it names every order of Rényi divergence that it does without
    try:
        for release in releases:
            noisy = dp_accounting.GaussianDpEvent(release.noise)
            drawn = noisy if release.rate >= 1 else dp_accounting.PoissonSampledDpEvent(release.rate, noisy)
            counted.compose(drawn, release.count)
    finally:
        logger.disabled = before
    return float(counted.get_epsilon(delta))
