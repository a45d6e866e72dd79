"""Likeness of layers: linear centred kernel alignment (Kornblith et al. 2019)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from befit.adapters.pq import orthonormal
from befit.core.errors import DataError, ModelError
from befit.protocol.site import Backbone
from befit.studies.cka import CentredProducts, LayerCka, layer_cka
from befit.tasks.base import Examples
from tests.federation import LARGE, SMALL, Families
from tests.tiny import tiny_examples
from tests.unit.methods.parts.mosaic.families import start

EXAMPLES = tiny_examples("llama", 30, 5)


def linear_cka(X: Tensor, Y: Tensor) -> float:
    """In [0, 1], 1 for the same up to rotation and scale, 0 where one of them never varies; float64."""
    X, Y = (Z.double() - Z.double().mean(0) for Z in (X, Y))
    common = (Y.T @ X).square().sum()
    scale = (X.T @ X).norm() * (Y.T @ Y).norm()
    return float(common / scale) if scale > 0 else 0.0


@pytest.fixture(scope="module")
def federation() -> Families:
    return start("rela")


def test_the_feature_form_is_the_one_of_centred_gram_matrices() -> None:
    """`<HKH, HLH> / (||HKH|| ||HLH||)` with K = X X^T and L = Y Y^T."""
    generator = torch.Generator().manual_seed(0)
    X, Y = torch.randn(20, 5, generator=generator) + 2, torch.randn(20, 8, generator=generator)
    Y[:, :5] += X
    H = torch.eye(20, dtype=torch.float64) - 1 / 20
    K, L = (H @ (Z.double() @ Z.double().T) @ H for Z in (X, Y))
    assert linear_cka(X, Y) == pytest.approx(float((K * L).sum() / (K.norm() * L.norm())), abs=1e-12)


def test_rotation_scale_and_shift_change_nothing_and_a_constant_is_like_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(30, 6, generator=generator)
    assert linear_cka(X, 3 * X @ orthonormal((6, 6), generator) + 1) == pytest.approx(1.0, abs=1e-6)
    assert linear_cka(X, torch.ones(30, 4)) == 0.0


def test_a_model_is_itself_layer_by_layer(federation: Families) -> None:
    one = federation.backbones[LARGE]
    found = layer_cka(one, one, (EXAMPLES, EXAMPLES)).values
    assert found.shape == (6, 6)
    torch.testing.assert_close(found.diagonal(), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(found, found.T)
    assert float(found[0, 5]) < 0.99


def test_layers_of_two_models_are_compared_at_answers_alone(federation: Families) -> None:
    """By hand: hidden states of both models at the places whose labels count."""
    first, second = federation.backbones[SMALL], federation.backbones[LARGE]
    found = layer_cka(first, second, (EXAMPLES, EXAMPLES), samples=30, batch_size=30).values
    assert found.shape == (3, 6)
    batch = EXAMPLES.batch(range(30))
    learnt = batch["labels"] != -100
    states = []
    for one in (first, second):
        with torch.no_grad():
            output = one.model.backbone(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
            )
        states.append([hidden[learnt] for hidden in output.hidden_states])
    assert float(found[1, 4]) == pytest.approx(linear_cka(states[0][1], states[1][4]), abs=1e-6)
    few = layer_cka(first, second, (EXAMPLES, EXAMPLES), tokens=10).values
    assert not torch.allclose(few, found)


@pytest.mark.parametrize("memory_mib", [0, 1])
def test_streamed_sums_give_what_all_activations_at_once_give(
    federation: Families, memory_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against `linear_cka` of hidden states of all records together; with no room, a pass for every pair of layers."""
    first, second = federation.backbones[SMALL], federation.backbones[LARGE]
    most, passes = [], []
    plain = CentredProducts.add

    def watched(self: CentredProducts, rows: dict[str, torch.Tensor]) -> None:
        most.append(max(len(X) for X in rows.values()))
        plain(self, rows)

    monkeypatch.setattr(CentredProducts, "add", watched)
    found = layer_cka(
        first,
        second,
        (EXAMPLES, EXAMPLES),
        batch_size=15,
        memory_mib=memory_mib,
        tell=lambda done, of: passes.append((done, of)),
    )
    assert len(passes) == (1 if memory_mib else 3 + 6 + 3 * 6) and passes[-1] == (len(passes), len(passes))
    assert max(most) < found.tokens
    states = [_hidden(one, EXAMPLES) for one in (first, second)]
    dense = torch.tensor([[linear_cka(X, Y) for Y in states[1]] for X in states[0]], dtype=torch.float64)
    torch.testing.assert_close(found.values, dense, rtol=0, atol=1e-9)
    assert found.tokens == len(states[0][0])


def _hidden(one: Backbone, examples: Examples) -> list[torch.Tensor]:
    batch = examples.batch(range(len(examples)))
    with torch.no_grad():
        output = one.model.backbone(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
        )
    return [hidden[batch["labels"] != -100] for hidden in output.hidden_states]


def test_products_do_not_change_by_rotation_and_follow_a_scale_and_an_offset_costs_no_digits() -> None:
    """`||(s Xc R)^T Yc|| = s ||Xc^T Yc||`; rows far from zero are as good as near ones."""
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(50, width, generator=generator) for width in (6, 4))
    R = orthonormal((6, 6), generator)
    variants = {"x": X, "turned": 3 * X @ R, "y": Y, "far": Y.double() + 1e6}
    sums = CentredProducts([(name, "y") for name in variants] + [("x", "far"), ("far", "far")])
    for part in range(0, 50, 7):
        sums.add({name: value[part : part + 7] for name, value in variants.items()})
    Xc, Yc = (Z.double() - Z.double().mean(0) for Z in (X, Y))
    assert sums.norm("x", "y") == pytest.approx(float((Xc.T @ Yc).norm()), rel=1e-12)
    assert sums.norm("turned", "y") == pytest.approx(3 * sums.norm("x", "y"), rel=1e-6)
    assert sums.norm("x", "far") == pytest.approx(sums.norm("x", "y"), rel=1e-9)
    assert sums.norm("far", "far") == pytest.approx(sums.norm("y", "y"), rel=1e-9)
    assert sums.count == 50


def test_the_blocks_that_pq_lora_matches_are_read_off_the_matrix() -> None:
    """Two of two and two of five blocks: 0, 1 and 1, 4; rows and columns begin with the embedding."""
    values = torch.arange(18, dtype=torch.float64).view(3, 6) / 18
    found = LayerCka(values, ("small", "large"), 9, 3).placed(2)
    assert [(row["first"], row["second"]) for row in found] == [(0, 1), (1, 4)]
    assert [row["cka"] for row in found] == [float(values[1, 2]), float(values[2, 5])]
    assert all(row["nearest"] == 4 and row["nearest_cka"] >= row["cka"] for row in found)
    with pytest.raises(ModelError, match="PQ-LoRA in 3 blocks: this model has 2"):
        LayerCka(values, ("small", "large"), 9, 3).placed(3)


def test_fewer_tokens_than_dimensions_are_told_of(federation: Families, caplog: pytest.LogCaptureFixture) -> None:
    one = federation.backbones[LARGE]
    layer_cka(one, one, (EXAMPLES, EXAMPLES), tokens=10)
    assert "up to 24 dimensions are compared at 10 tokens" in caplog.text


def test_records_that_differ_or_are_too_few_are_refused(federation: Families) -> None:
    one = federation.backbones[SMALL]
    with pytest.raises(DataError, match="there are 30 and 12"):
        layer_cka(one, one, (EXAMPLES, tiny_examples("llama", 12, 5)))
    with pytest.raises(DataError, match="at least two tokens, there are 0"):
        layer_cka(one, one, (EXAMPLES, EXAMPLES), samples=0)
