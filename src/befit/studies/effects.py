"""Differences at several sites that have something in common: what each of them says of all, and all of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from befit.studies.compare.statistics import NORMAL

SPREAD = 0.1  # of true gains between sites, before anything is measured: half-normal, so that twice this is rare
_GRID = 60


@dataclass(frozen=True)
class Effect:
    """What is known of a difference: its mean, half of the 95 % interval, and the probability that it is above zero."""

    value: float
    half: float
    probability: float


def together(differences: Sequence[float], errors: Sequence[float]) -> tuple[Effect, list[Effect]]:
    """The mean difference of these sites, and every site's own in the light of the others'.

    differences, errors  by site, the difference of two shares that was measured, and its standard error

    The hierarchical normal model, `d_k ~ N(theta_k, s_k^2)`, `theta_k ~ N(mu, tau^2)`, with a flat prior for mu and a
    half-normal one of scale `SPREAD` for tau (Gelman 2006; Gelman et al. 2013, section 5.4): exact given tau, and
    summed over a grid of tau, so that not knowing how much sites differ is in the intervals. Sites that agree are
    surer together, and a site that nobody resembles stays by itself. The mean is that of the theta_k and not mu, which
    is about sites that nobody has seen and less certain.

    >>> mean, sites = together([0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1])
    >>> round(mean.value, 3), sites[0].half < 1.96 * 0.1
    (0.1, True)
    """
    grid = [4 * SPREAD * step / _GRID for step in range(_GRID + 1)]
    by_tau = [_given(tau, differences, errors) for tau in grid]
    most = max(likelihood for likelihood, _, _ in by_tau)
    shares = [math.exp(likelihood - most) for likelihood, _, _ in by_tau]
    total = math.fsum(shares)
    shares = [share / total for share in shares]
    mean = _mixture(shares, [law for _, law, _ in by_tau])
    return mean, [_mixture(shares, [sites[k] for _, _, sites in by_tau]) for k in range(len(differences))]


Law = tuple[float, float]  # of a normal distribution, mean and variance


def _given(tau: float, differences: Sequence[float], errors: Sequence[float]) -> tuple[float, Law, list[Law]]:
    """For one tau: its log posterior up to a constant, the laws of the mean of the theta_k and of every theta_k."""
    variances = [error**2 + tau**2 for error in errors]
    total = math.fsum(1 / variance for variance in variances)
    centre = math.fsum(d / variance for d, variance in zip(differences, variances, strict=True)) / total
    squares = math.fsum((d - centre) ** 2 / variance for d, variance in zip(differences, variances, strict=True))
    logs = math.fsum(map(math.log, variances))
    posterior = -0.5 * (logs + squares + math.log(total) + (tau / SPREAD) ** 2)
    # How much of what is said of a site is said by the others, and what is left of its own error.
    pulled = [error**2 / variance for error, variance in zip(errors, variances, strict=True)]
    own = [(1 - pull) * error**2 for pull, error in zip(pulled, errors, strict=True)]
    values = [pull * centre + (1 - pull) * d for pull, d in zip(pulled, differences, strict=True)]
    sites = [(value, left + pull**2 / total) for value, left, pull in zip(values, own, pulled, strict=True)]
    count = len(sites)
    # Given mu the theta_k are independent, with variances `own`; all move with mu, whose variance is 1 / total.
    mean = math.fsum(values) / count, (math.fsum(own) + math.fsum(pulled) ** 2 / total) / count**2
    return posterior, mean, sites


def _mixture(shares: Sequence[float], laws: Sequence[Law]) -> Effect:
    """Mean, 1.96 standard deviations and the probability of being above zero."""
    value = math.fsum(share * mean for share, (mean, _) in zip(shares, laws, strict=True))
    variance = math.fsum(
        share * (spread + (mean - value) ** 2) for share, (mean, spread) in zip(shares, laws, strict=True)
    )
    above = math.fsum(
        share * float(stats.norm.cdf(mean / math.sqrt(spread)))
        for share, (mean, spread) in zip(shares, laws, strict=True)
    )
    return Effect(value, NORMAL * math.sqrt(variance), above)
