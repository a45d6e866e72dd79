"""Which of two rounds is the better one."""

from __future__ import annotations

from befit.protocol.engine import Best


def test_the_higher_mean_is_better_and_of_two_alike_the_earlier() -> None:
    first = Best(1, 3, 0.5)
    assert Best(1, 4, 0.6).beats(first) and not Best(1, 4, 0.5).beats(first) and not Best(1, 4, 0.4).beats(first)


def test_another_stage_begins_anew() -> None:
    assert Best(2, 1, 0.1).beats(Best(1, 3, 0.5)) and Best(1, 1, 0.0).beats(None)


def test_as_long_as_clients_have_no_model_fewer_of_them_are_better_than_a_better_mean() -> None:
    lucky = Best(1, 1, 0.9, without=2)
    assert Best(1, 2, 0.4, without=1).beats(lucky) and not lucky.beats(Best(1, 2, 0.4, without=1))
