"""Fisher information and correlation of two adapters: definitions, damping, and estimation at a site."""

from __future__ import annotations

import logging

import pytest
import torch

from befit.adapters.layout import lora
from befit.core.errors import DataError
from befit.core.values import Tick
from befit.methods.potara import closed_form_weight
from befit.train import paired_fisher
from befit.train.paired_fisher import Correlation, Damping, PairedFisher, Statistics, _quantile, estimate
from befit.train.persample import sample_gradients
from tests.tiny import make_site, random_state

AT = Tick("merge", 1, 1, 0)
TWO = lora(2, 6.0, slots=("shared", "personal"))


def moments_of(fed: torch.Tensor, local: torch.Tensor) -> PairedFisher:
    moments = PairedFisher({"m/A": (0, fed.shape[1])})
    moments.add(fed, local)
    return moments


def test_fisher_is_the_uncentred_mean_square_and_correlation_the_centred_one() -> None:
    """Three samples by hand: g_f = 1, 2, 3 and g_l = 2, 2, 5: F = 14/3 and 11; cov = 1, var = 2/3 and 2."""
    moments = moments_of(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[2.0], [2.0], [5.0]]))
    assert [float(f) for f in moments.fisher] == pytest.approx([14 / 3, 11])
    assert float(moments.correlation()) == pytest.approx(1 / (4 / 3) ** 0.5)
    assert float(moments.correlation(centred=False)) == pytest.approx(21 / (14 * 33) ** 0.5)


def test_variances_and_the_clipped_cross_covariance_by_hand() -> None:
    """F_f = 4, F_l = 1 and rho = 1: v = 1/4 and 1; sqrt(v_f v_l) = 1/2 is clipped to the smaller, 1/4. Then w = 1."""
    moments = moments_of(torch.tensor([[2.0], [-2.0]]), torch.tensor([[1.0], [-1.0]]))
    found = moments.variances(Damping("absolute", 1e-12))
    assert [float(v) for v in (found.fed, found.local, found.cross)] == pytest.approx([0.25, 1.0, 0.25])
    assert found.counts["rho_clipped_high"] == 1.0
    assert closed_form_weight(*found.traces())[0] == pytest.approx(1.0)
    opposite = moments_of(torch.tensor([[2.0], [-2.0]]), torch.tensor([[-1.0], [1.0]])).variances(Damping())
    assert float(opposite.cross) == 0.0 and opposite.counts["rho_clipped_low"] == 1.0


def test_damping_is_common_to_both_models_and_relative_to_the_mean_of_all_coordinates() -> None:
    """F_f = 1, 9 and F_l = 3, 3: the mean of all four is 4; by tensor it is 2 and 6."""
    fed, local = torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0, 3.0]]).sqrt()
    moments = PairedFisher({"m/A": (0, 1), "m/B": (1, 2)})
    moments.add(fed, local)
    client = moments.variances(Damping(delta=0.1))
    torch.testing.assert_close(client.fed, 1 / torch.tensor([1.4, 9.4], dtype=torch.float64), check_dtype=False)
    torch.testing.assert_close(client.local, 1 / torch.tensor([3.4, 3.4], dtype=torch.float64), rtol=1e-6, atol=0)
    tensor = moments.variances(Damping(delta=0.1, scope="tensor"))
    torch.testing.assert_close(tensor.fed, 1 / torch.tensor([1.2, 9.6], dtype=torch.float64), rtol=1e-6, atol=0)
    absolute = moments.variances(Damping("absolute", 1.0))
    torch.testing.assert_close(absolute.fed, 1 / torch.tensor([2.0, 10.0], dtype=torch.float64), rtol=1e-6, atol=0)


def test_quantile_damping_is_a_floor_at_the_quantile_of_positive_entries_of_both() -> None:
    """Positive F: 1, 4, 9, 16 (a zero does not count); their median lies between 4 and 9."""
    moments = moments_of(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[3.0, 4.0, 0.0]]))
    found = moments.variances(Damping("quantile", 0.5, drop_dead=False))
    floor = 1 / float(found.fed[0])
    assert 4.0 <= floor <= 9.0
    assert found.fed.tolist() == pytest.approx([1 / floor, 1 / floor, 1 / floor])
    assert found.local.tolist() == pytest.approx([1 / 9, 1 / 16, 1 / floor])


def test_quantile_damping_takes_more_entries_than_torch_quantile() -> None:
    """torch.quantile stops at 2^24 entries; a dense product space has more."""
    entries = torch.arange(2**24 + 1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(entries, 0.5)
    assert float(_quantile(entries, 0.5)) == 2**23


def test_a_quantile_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 1, got 1\.5"):
        Damping("quantile", 1.5)


@pytest.mark.parametrize("kind", ["relative", "absolute", "quantile"])
@pytest.mark.parametrize("drop_dead", [True, False])
@pytest.mark.parametrize("columns", [[0.0, 0.0], [0.0, 1.0]])
def test_coordinates_without_any_gradient_never_give_a_number_that_is_none(
    kind, drop_dead: bool, columns: list[float]
) -> None:
    gradients = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor(columns)
    found = moments_of(gradients, 2 * gradients).variances(Damping(kind, drop_dead=drop_dead))
    weight, _ = closed_form_weight(*found.traces())
    assert 0.0 <= weight <= 1.0
    assert all(torch.isfinite(value).all() for value in (found.fed, found.local, found.cross))
    assert found.counts["dead_share"] == (columns.count(0.0) / 2 if drop_dead else 0.0)
    if drop_dead:
        assert [float(v[0]) for v in (found.fed, found.local, found.cross)] == [0.0, 0.0, 0.0]


def test_a_coordinate_that_only_one_model_feels_is_kept() -> None:
    moments = moments_of(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
    found = moments.variances(Damping(delta=0.5))
    assert bool((found.local > 0).all()) and found.counts["dead_share"] == 0.0
    assert float(found.local[0]) > float(found.fed[0])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_raises(number: float) -> None:
    good = torch.ones(2, 3)
    bad = good.clone()
    bad[1, 2] = number
    for pair in ((bad, good), (good, bad)):
        with pytest.raises(FloatingPointError, match="not finite"):
            moments_of(*pair)


def test_shrinking_takes_the_noise_off_the_correlation() -> None:
    """rho = 1 with M = 4: 1 - 1/sqrt(4) = 0.5 of sqrt(v_f v_l)."""
    gradients = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    found = moments_of(gradients, gradients).variances(Damping("absolute", 1e-12), Correlation(shrink=1.0))
    assert float(found.cross) == pytest.approx(0.5)


@pytest.mark.parametrize("space", ["factors", "product"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_site_estimates_from_per_sample_gradients_of_both_slots_without_the_head(kind: str, space, reduction) -> None:
    site = make_site(kind, TWO)
    site.model.load(random_state(site.model))
    found = estimate(site, AT, "shared", "personal", Statistics(12, token_reduction=reduction), space)
    batch = site.examples("train").batch(range(12))
    targets = site.model.shapes.targets
    parts = ("A", "B") if space == "factors" else ("delta",)
    assert set(found.spans) == {f"{name}/{part}" for name in targets for part in parts}
    pairs = [sample_gradients(site, batch, name, space, reduction) for name in ("shared", "personal")]
    for key, (start, stop) in found.spans.items():
        fed, local = (
            pair[f"{name}/{key}"].flatten(1).double() for pair, name in zip(pairs, ("shared", "personal"), strict=True)
        )
        expected = [fed.sum(0), local.sum(0), fed.square().sum(0), local.square().sum(0), (fed * local).sum(0)]
        torch.testing.assert_close(found.sums[:, start:stop], torch.stack(expected), rtol=1e-4, atol=1e-6)
    assert found.count == 12


def test_micro_batches_do_not_change_the_estimate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = make_site(kind, TWO)
    site.model.load(random_state(site.model))
    whole = estimate(site, AT, "shared", "personal", Statistics(7))
    monkeypatch.setattr(paired_fisher, "_GRADIENT_BYTES", 1)
    single = estimate(site, AT, "shared", "personal", Statistics(7))
    assert single.count == whole.count == 7 and single.spans == whole.spans
    torch.testing.assert_close(single.sums, whole.sums, rtol=1e-3, atol=1e-4)


def test_samples_are_drawn_without_replacement_by_client() -> None:
    """The sums over all examples exceed those over a draw; two clients with the same data draw different ones."""
    sites = [make_site("vit", TWO, client=client) for client in ("a", "a", "b")]
    found = []
    for site in sites:
        site.model.load(random_state(site.model))
        found.append(estimate(site, AT, "shared", "personal", Statistics(5)))
    assert torch.equal(found[0].sums, found[1].sums)
    assert not torch.equal(found[0].sums, found[2].sums)
    every = sample_gradients(sites[0], sites[0].examples("train").batch(range(12)), "shared")
    first = every["shared/block.00.q_proj/A"].flatten(1).double().square()
    start, stop = found[0].spans["block.00.q_proj/A"]
    subsets = torch.combinations(torch.arange(12), 5)
    sums = first[subsets].sum(1)
    distance = (sums - found[0].sums[2, start:stop]).abs().sum(1)
    assert int((distance < 1e-4 * sums.sum(1)).sum()) == 1, "not the sum over five different examples"


def test_fewer_examples_than_asked_for_are_all_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    site = make_site("vit", TWO, rows=4)
    with caplog.at_level(logging.WARNING):
        assert estimate(site, AT, "shared", "personal", Statistics(30)).count == 4
    assert "client client-01 has 4 train examples" in caplog.text


def test_a_client_without_examples_is_named() -> None:
    with pytest.raises(DataError, match="client client-01 has no val examples"):
        estimate(make_site("vit", TWO, rows=0), AT, "shared", "personal", Statistics(3, "val"))
