"""Errors that can be read."""

from befit.core.errors import ConfigError


def test_of_very_many_problems_the_first_hundred_are_shown() -> None:
    error = ConfigError([f"evaluate.metrics: number {n}" for n in range(9000)])
    assert len(error.problems) == 9000 and str(error).startswith("9000 problems")
    assert len(str(error).splitlines()) == 102 and str(error).endswith("and 8900 more")
