"""Means, spreads, weights of a grid, and the registry."""

from __future__ import annotations

import pytest

from befit.core.errors import ConfigError
from befit.studies.ablations import base
from befit.studies.ablations.base import evenly
from befit.studies.ablations.summary import curve, gain, over_seeds
from befit.studies.ablations.weights import best_weight, check_step, grid

ROWS = [
    {"seed": 0, "client": "a", "x": 1, "y": 1.0, "z": 0.0},
    {"seed": 0, "client": "b", "x": 1, "y": 3.0, "z": None},
    {"seed": 1, "client": "a", "x": 1, "y": 6.0, "z": 4.0},
]


def test_a_spread_is_over_seeds_of_means_over_clients() -> None:
    """Seed 0: (1 + 3) / 2 = 2; seed 1: 6. Mean 4, deviation sqrt(((2-4)^2 + (6-4)^2) / 1) = 2.83."""
    found = over_seeds(ROWS, "y")
    assert found.value == 4 and found.spread == pytest.approx(8**0.5)
    assert over_seeds(ROWS[:2], "y").spread is None and over_seeds(ROWS[:2], "y").value == 2
    assert over_seeds(ROWS[1:2], "z").value is None


def test_a_difference_is_paired_and_leaves_out_clients_without_one_side() -> None:
    """Seed 0: 1 - 0 = 1, client b does not count; seed 1: 6 - 4 = 2. Mean 1.5."""
    assert gain(ROWS, "y", "z", "loss").value == 1.5


def test_a_curve_has_a_band_only_with_several_seeds() -> None:
    line = curve("", ROWS, "x", "y")
    assert list(line.y) == [4] and list(line.low) == [pytest.approx(4 - 8**0.5)]
    assert curve("", ROWS[:2], "x", "y").low == ()


def test_the_best_weight_of_a_tie_is_the_least_extreme() -> None:
    assert best_weight({0.0: 1.0, 0.4: 1.0, 0.6: 1.0, 1.0: 1.0}) == 0.4
    assert best_weight({0.0: 2.0, 0.5: 1.0}) == 0.0


def test_a_grid_has_both_ends_exactly() -> None:
    assert grid(0.1)[0] == 0.0 and grid(0.1)[-1] == 1.0 and len(grid(0.1)) == 11 and grid(0.1)[3] == 0.3
    for step in (0.0, -0.1, 0.3, 2.0):
        with pytest.raises(ValueError, match="step: must divide 1"):
            check_step(step)


def test_evenly_spread_rounds_end_with_the_last() -> None:
    for total in (1, 7, 10, 11, 600):
        rounds = evenly(total)
        assert rounds[-1] == total and len(rounds) == min(10, total) and rounds[0] >= 1


def test_every_ablation_says_what_it_shows_in_one_line_and_describes_its_options() -> None:
    assert len(base.names()) == 8
    for name in base.names():
        entry = base.get(name)
        assert entry.summary.endswith(".") and len(entry.summary) <= 58
        assert all(one.description for one in entry.parameters)


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        base.build("potara-samples", {"draws": "many", "sample": [1]})
    assert "ablation.draws" in str(caught.value) and "Did you mean: samples" in str(caught.value)
    with pytest.raises(ConfigError, match="at least 2, got 1"):
        base.build("potara-samples", {"draws": 1})
    with pytest.raises(ConfigError, match="Did you mean: potara-rounds"):
        base.get("potara-round")
