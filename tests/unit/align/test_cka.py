"""Likeness of layers (specification, section 6)."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import tiny_examples
from tests.unit.rela.test_mosaic import LARGE, SMALL, Federation, start

from befit.adapters.pq import orthonormal
from befit.align.cka import layer_cka, linear_cka
from befit.errors import DataError

EXAMPLES = tiny_examples("llama", 30, 5)


@pytest.fixture(scope="module")
def federation() -> Federation:
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


def test_a_model_is_itself_layer_by_layer(federation: Federation) -> None:
    one = federation.backbones[LARGE]
    found = layer_cka(one, one, (EXAMPLES, EXAMPLES))
    assert found.shape == (6, 6)
    torch.testing.assert_close(found.diagonal(), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(found, found.T)
    assert float(found[0, 5]) < 0.99


def test_layers_of_two_models_are_compared_at_answers_alone(federation: Federation) -> None:
    """By hand: hidden states of both models at the places whose labels count."""
    first, second = federation.backbones[SMALL], federation.backbones[LARGE]
    found = layer_cka(first, second, (EXAMPLES, EXAMPLES), samples=30, batch_size=30)
    assert found.shape == (3, 6)
    batch = EXAMPLES.batch(range(30))
    learnt = batch["labels"] != -100
    states = []
    for one in (first, second):
        with torch.no_grad():
            output = one.model.backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                                        output_hidden_states=True)  # fmt: skip
        states.append([hidden[learnt] for hidden in output.hidden_states])
    assert float(found[1, 4]) == pytest.approx(linear_cka(states[0][1], states[1][4]), abs=1e-6)
    few = layer_cka(first, second, (EXAMPLES, EXAMPLES), tokens=10)
    assert not torch.allclose(few, found)


def test_records_that_differ_or_are_too_few_are_refused(federation: Federation) -> None:
    one = federation.backbones[SMALL]
    with pytest.raises(DataError, match="there are 30 and 12"):
        layer_cka(one, one, (EXAMPLES, tiny_examples("llama", 12, 5)))
    with pytest.raises(DataError, match="at least two tokens, there are 0"):
        layer_cka(one, one, (EXAMPLES, EXAMPLES), samples=0)
