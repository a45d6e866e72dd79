"""Epsilons and noise multipliers are those of Opacus and dp-accounting, in 20 settings.

The numbers in data/accountants/accountants.json were made once, by make.py beside it. The distribution of privacy
losses is counted on a coarser grid here, which may add a hundredth and never takes anything away.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import pytest

from befit.protocol.accountant import Release, epsilon, noise_for

pytest.importorskip("dp_accounting")
ROWS = json.loads((Path(__file__).parent / "data" / "accountants" / "accountants.json").read_text())
QUICK = (0.01, 0.02, 1.0)  # rates whose multipliers are found in a second: each takes twenty epsilons
# Opacus 1.6.0 (RDP and PRV) and dp-accounting 0.6.0 (RDP and PLD)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['rate']:.3g}-{row['noise']:g}-{row['steps']}")
def test_epsilons_are_those_of_two_libraries(row: dict[str, float]) -> None:
    releases, delta = (Release(row["rate"], row["noise"], int(row["steps"])),), row["delta"]
    by_loss, by_order = epsilon(releases, delta, "pld"), epsilon(releases, delta, "rdp")
    assert by_loss == pytest.approx(row["dp_accounting_pld"], rel=0.01) and by_loss >= row["dp_accounting_pld"] - 1e-6
    assert by_loss == pytest.approx(row["opacus_prv"], abs=0.02)
    assert by_order == pytest.approx(row["dp_accounting_rdp"], rel=1e-9)
    assert by_order == pytest.approx(row["opacus_rdp"], rel=0.01)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row["rate"] in QUICK else pytest.mark.slow) for row in ROWS[::3]],
    ids=lambda row: f"{row['rate']:.3g}-{row['noise']:g}-{row['steps']}",
)
def test_noise_multipliers_are_those_of_opacus(row: dict[str, float]) -> None:
    for ours, theirs in (("pld", "prv"), ("rdp", "rdp")):
        wanted = row[f"opacus_{theirs}"]
        found = noise_for((Release(row["rate"], 1.0, int(row["steps"])),), wanted, row["delta"], ours)  # type: ignore[arg-type]
        assert found == pytest.approx(row[f"opacus_{theirs}_noise"], rel=0.01)
        assert epsilon((Release(row["rate"], found, int(row["steps"])),), row["delta"], ours) <= wanted  # type: ignore[arg-type]


def test_passes_on_one_batch_are_one_release_of_a_smaller_multiplier() -> None:
    """Without sampling, two Gaussians of multiplier 2 one after the other are one of 2 / sqrt(2), by definition."""
    both = epsilon((Release(1.0, 2.0, 2),), 1e-5)
    assert epsilon((Release(1.0, 2.0 / 2**0.5, 1),), 1e-5) == pytest.approx(both, rel=1e-3)


def test_releases_of_several_kinds_are_counted_as_the_library_counts_them() -> None:
    """Distributions that are kept from one count to the next change no bit, nor does the order of counting."""
    import dp_accounting
    from dp_accounting import pld

    releases = (Release(0.25, 3.0, 5), Release(1.0, 8.0, 2), Release(0.1, 1.5, 40))
    counted = pld.PLDAccountant(value_discretization_interval=1e-3)
    for one in releases:
        noisy = dp_accounting.GaussianDpEvent(one.noise)
        counted.compose(noisy if one.rate == 1 else dp_accounting.PoissonSampledDpEvent(one.rate, noisy), one.count)
    assert epsilon(releases[:1], 1e-5) < epsilon(releases, 1e-5) == counted.get_epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("target", [0.1, pytest.param(3.0, marks=pytest.mark.slow), 50.0])
def test_no_less_noise_would_do(target: float, accountant: Literal["pld", "rdp"]) -> None:
    steps = (Release(0.3, 1.0, 10), Release(0.3, 2**-0.5, 10))
    noise = noise_for(steps, target, 1e-5, accountant)
    spent = [
        epsilon(tuple(Release(one.rate, one.noise * noise * more, one.count) for one in steps), 1e-5, accountant)
        for more in (1, 0.999)
    ]
    assert spent[0] <= target < spent[1]


def test_noise_of_almost_nothing_is_no_work() -> None:
    assert epsilon((Release(0.3, 1e-6, 1000),), 1e-5) == math.inf
