"""Self and Others, at the last point and over all: the scores of FedMosaic (Seo et al. 2026)."""

import math

import pytest

from befit.core.errors import DataError
from befit.runs.over_time import a_auc, a_last, client_score, others_score, self_score, stream_scores

TWO = {"a": {"a": 0.9, "b": 0.3}, "b": {"a": 0.5, "b": 0.7}}


def test_self_is_the_mean_diagonal_and_others_the_mean_of_the_rest():
    """(0.9 + 0.7) / 2 and (0.3 + 0.5) / 2."""
    assert self_score(TWO) == pytest.approx(0.8)
    assert others_score(TWO) == pytest.approx(0.4)


def test_others_is_a_mean_over_models_of_means_over_clients():
    """Client b scores 0.6 under both other models, c 0.2 under a; a's row is (0.6 + 0.2) / 2, b's 1.0, c's 0.8."""
    matrix = {
        "a": {"a": 0.0, "b": 0.6, "c": 0.2},
        "b": {"a": 1.0, "b": 0.0, "c": 1.0},
        "c": {"a": 1.0, "b": 0.6, "c": 0.0},
    }
    assert others_score(matrix) == pytest.approx((0.4 + 1.0 + 0.8) / 3)


def test_where_all_scores_are_equal_self_and_others_agree():
    matrix = {c: {d: 0.25 for d in "abc"} for c in "abc"}
    assert self_score(matrix) == others_score(matrix) == 0.25


def test_others_of_one_client_is_not_a_number_rather_than_nought():
    assert self_score({"a": {"a": 0.5}}) == 0.5
    assert math.isnan(others_score({"a": {"a": 0.5}}))


def test_a_task_without_data_is_no_score_of_zero():
    assert client_score({"one": 0.5, "dummy": None}) == 0.5
    assert math.isnan(client_score({"dummy": None}))
    assert self_score({"a": {"a": 0.5, "b": 0.1}, "b": {"a": 0.2, "b": math.nan}}) == 0.5


def test_the_area_under_a_constant_curve_is_its_last_value():
    assert a_auc([0.3] * 4) == pytest.approx(a_last([0.3] * 4)) == 0.3
    assert a_auc([0.1, 0.2, 0.6]) == pytest.approx(0.3) and a_last([0.1, 0.2, 0.6]) == 0.6


def test_a_run_has_four_numbers_and_others_may_be_scored_at_the_last_point_only():
    better = {c: {d: score + 0.1 for d, score in row.items()} for c, row in TWO.items()}
    scores = stream_scores([TWO, better])
    assert (scores.self_last, scores.self_auc) == pytest.approx((0.9, 0.85))
    assert (scores.others_last, scores.others_auc) == pytest.approx((0.5, 0.45))
    only_own = {c: {c: row[c]} for c, row in TWO.items()}
    with pytest.raises(DataError, match="scored on other clients than there are models"):
        stream_scores([only_own, better])
    few = stream_scores([only_own, better], others=[better])
    assert (few.self_auc, few.others_last, few.others_auc) == pytest.approx((0.85, 0.5, 0.5))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ({}, "at least one client"),
        ({"a": {"b": 0.1}}, "client a is not scored on its own tasks; it has b"),
        ({"a": {"a": 0.1, "b": 0.2}, "b": {"b": 0.3}}, "client b is scored on other clients than there are models: a"),
    ],
)
def test_a_matrix_with_holes_is_refused(matrix, message):
    with pytest.raises(DataError, match=message):
        others_score(matrix)


def test_a_curve_without_points_is_refused():
    with pytest.raises(DataError, match="no point of evaluation"):
        a_auc([])
