"""Weights of clients for each other (FedMosaic, eq. 4)."""

from __future__ import annotations

import math

import pytest
import torch

from befit.methods.parts.mosaic.relevance import mixtures, relevance, similarities


def sketches(count: int = 5, entries: int = 40) -> torch.Tensor:
    return torch.randn(count, entries, generator=torch.Generator().manual_seed(0))


def test_rows_are_positive_and_sum_to_one_without_the_client_itself() -> None:
    W = relevance(similarities(sketches()), 0.5, range(5))
    torch.testing.assert_close(W.sum(1), torch.ones(5))
    assert not W.diagonal().any() and int((W > 0).sum()) == 20


def test_cosines_are_those_of_the_vectors_and_no_scale_changes_them() -> None:
    g = sketches()
    cosines = similarities(g)
    for i in range(5):
        for j in range(5):
            expected = torch.nn.functional.cosine_similarity(g[i], g[j], dim=0)
            torch.testing.assert_close(cosines[i, j], expected, rtol=0, atol=1e-6)
    scaled = g * torch.tensor([1e-6, 1.0, 3.0, 1e4, 0.1])[:, None]
    torch.testing.assert_close(similarities(scaled), cosines, rtol=0, atol=1e-5)


def test_a_hot_temperature_takes_all_alike_and_a_cold_one_the_nearest() -> None:
    cosines = similarities(sketches())
    hot, cold = relevance(cosines, 1e6, range(5)), relevance(cosines, 1e-4, range(5))
    torch.testing.assert_close(hot, (torch.ones(5, 5) - torch.eye(5)) / 4, rtol=0, atol=1e-5)
    others = cosines.clone().fill_diagonal_(-2)
    assert torch.equal(cold.argmax(1), others.argmax(1)) and bool((cold.amax(1) > 0.999).all())


@pytest.mark.parametrize(("count", "own"), [(10, 0.4509), (52, 0.1266)])
def test_equation_4_as_printed_gives_the_client_itself_much_of_the_weight(count: int, own: float) -> None:
    """With orthogonal others and tau 0.5: e^2 / (e^2 + N - 1), 0.45 for ten clients and 0.13 for fifty-two."""
    W = relevance(similarities(torch.eye(count)), 0.5, range(count), include_self=True)
    assert own == pytest.approx(math.exp(2) / (math.exp(2) + count - 1), abs=1e-4)
    torch.testing.assert_close(W.diagonal(), torch.full((count,), own), rtol=0, atol=1e-4)


def test_two_clients_of_one_task_weigh_more_for_each_other_than_a_stranger() -> None:
    """cos 0.8 against 0: e^1.6 / (e^1.6 + 1) = 0.832 at tau 0.5."""
    g = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])
    W = relevance(similarities(g), 0.5, range(3))
    assert float(W[0, 1]) == pytest.approx(math.exp(1.6) / (math.exp(1.6) + 1), abs=1e-6)
    assert float(W[2, 0]) == pytest.approx(0.5)


def test_a_gradient_of_zero_is_like_nobody_and_nothing_is_not_a_number() -> None:
    g = torch.cat([sketches(3), torch.zeros(1, 40)])
    cosines = similarities(g)
    assert not cosines[3].any() and not cosines[:, 3].any()
    W = relevance(cosines, 0.5, range(4))
    torch.testing.assert_close(W[3, :3], torch.full((3,), 1 / 3))


def test_a_client_without_others_gets_its_own() -> None:
    assert relevance(torch.ones(1, 1), 0.5, [0]).tolist() == [[1.0]]
    own = torch.randn(1, 3, 2)
    assert torch.equal(mixtures(torch.ones(1, 1), own), own)


def test_the_mean_over_columns_is_another_similarity_and_zero_columns_count_as_zero() -> None:
    """Columns (1,0) and (1,0): 1; (0,1) and (3,4): 0.8; (0,0) and (1,1): 0. Their mean is 0.6; flat it is
    (1 + 4) / (sqrt(2) sqrt(1 + 25 + 2)) = 0.668."""
    g = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[1.0, 3.0, 1.0], [0.0, 4.0, 1.0]]])
    assert float(similarities(g, "colmean")[0, 1]) == pytest.approx(0.6, abs=1e-6)
    assert float(similarities(g)[0, 1]) == pytest.approx(5 / math.sqrt(2 * 28), abs=1e-6)


def test_cosines_do_not_depend_on_how_many_entries_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.randn(4, 6, 11, generator=torch.Generator().manual_seed(1))
    whole = {kind: similarities(g, kind) for kind in ("flat", "colmean")}
    monkeypatch.setattr("befit.methods.parts.mosaic.relevance._CHUNK", 4 * 6 * 2)
    for kind, expected in whole.items():
        torch.testing.assert_close(similarities(g, kind), expected, rtol=0, atol=1e-6)


def test_a_family_shares_its_weight_among_itself() -> None:
    """Inside {0, 2, 4} the weights are those over all others, made to sum to one again."""
    cosines = similarities(sketches())
    every, family = relevance(cosines, 0.5, range(5)), relevance(cosines, 0.5, [0, 2, 4])
    expected = every[0, [2, 4]] / every[0, [2, 4]].sum()
    torch.testing.assert_close(family[0, 1:], expected)
    assert float(family[0, 0]) == 0


def test_mixtures_are_the_weighted_sums_of_the_others() -> None:
    held = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(2))
    W = relevance(similarities(sketches()), 0.5, range(5))
    expected = sum(float(W[1, j]) * held[j] for j in range(5))
    torch.testing.assert_close(mixtures(W, held)[1], expected)
