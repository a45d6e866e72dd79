"""The simulation behind the default damping: the table of docs/methods/potara.md, Damping.

1e5 coordinates with a log-normal Fisher spectrum of log-std sigma, the federated Fisher twice the local one, M = 30
Gaussian gradients. The table does not give the correlation of the two models' gradients. A common rho of 0.3 meets
every row within 0.015 (its true weight is (1 - 0.3/sqrt 2) / (1.5 - 0.3 sqrt 2) = 0.732), where 0 misses by 0.05.
"""

from __future__ import annotations

import pytest
import torch

from befit.methods.potara import closed_form_weight
from befit.train.paired_fisher import Correlation, Damping, PairedFisher

DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
TABLE = {
    1.0: (0.729, 0.729, 0.729, 0.725, 0.707, 0.651, 0.571),
    2.5: (0.709, 0.693, 0.663, 0.625, 0.585, 0.548, 0.520),
    4.0: (0.599, 0.576, 0.554, 0.535, 0.520, 0.510, 0.504),
}


def simulate(sigma: float, rho: float, samples: int, coordinates: int) -> PairedFisher:
    draw = torch.Generator().manual_seed(0)
    spectrum = torch.exp(sigma * torch.randn(coordinates, generator=draw, dtype=torch.float64))
    moments = PairedFisher({"module/A": (0, coordinates)})
    for _ in range(samples):
        local, other = torch.randn(2, 1, coordinates, generator=draw, dtype=torch.float64)
        fed = rho * local + (1 - rho**2) ** 0.5 * other
        moments.add((2 * spectrum).sqrt() * fed, spectrum.sqrt() * local)
    return moments


@pytest.mark.parametrize("sigma", TABLE)
def test_the_estimated_weights_are_those_of_the_table(sigma: float) -> None:
    moments = simulate(sigma, rho=0.3, samples=30, coordinates=100_000)
    found = [closed_form_weight(*moments.variances(Damping(delta=delta)).traces())[0] for delta in DELTAS]
    assert found == pytest.approx(TABLE[sigma], abs=0.015)


def test_many_samples_find_the_true_weight() -> None:
    moments = simulate(1.0, rho=0.3, samples=2000, coordinates=2000)
    a, b, c = moments.variances(Damping(delta=1e-8)).traces()
    assert b / a == pytest.approx(2.0, rel=0.02)
    assert closed_form_weight(a, b, c)[0] == pytest.approx((1 - 0.3 / 2**0.5) / (1.5 - 0.3 * 2**0.5), abs=0.004)


def test_without_correlation_the_weight_is_the_ratio_of_the_traces() -> None:
    a, b, c = (
        simulate(1.0, rho=0.3, samples=30, coordinates=20_000)
        .variances(Damping(), Correlation(estimate=False))
        .traces()
    )
    assert c == 0.0
    assert closed_form_weight(a, b, c)[0] == pytest.approx(2 / 3, abs=0.01)
