"""Tokens of two models that stand for the same text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from befit.core.errors import ModelError
from befit.methods.parts.mosaic.align.tokens import Pooling, match_pieces, matched_rows
from befit.tasks.causal_lm import CausalLM
from tests.unit.models.tiny_models import word_tokenizer


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (["a", "b"], ["a", "b"], [([0], [0]), ([1], [1])]),
        (["ab", "c"], ["a", "bc"], [([0, 1], [0, 1])]),
        (["ab", "cd"], ["a", "b", "cd"], [([0], [0, 1]), ([1], [2])]),
        (["x", "ab"], ["ab", "y"], [([1], [0])]),
        (["a", "a"], ["a"], [([1], [0])]),
        (["", "a"], ["a", ""], [([1], [0])]),
        (["a"], ["b"], []),
        ([], ["b"], []),
    ],
)
def test_groups_are_as_short_as_can_be_and_unmatched_pieces_are_in_none(
    first: list[str], second: list[str], expected: list[tuple[list[int], list[int]]]
) -> None:
    found = match_pieces(first, second)
    if first == ["a", "a"]:  # either will do
        assert found in ([([0], [0])], [([1], [0])])
    else:
        assert found == expected


cuts = st.lists(st.integers(1, 4), min_size=1, max_size=8)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    return pieces


@given(st.text(alphabet="ab ", min_size=1, max_size=16), cuts, cuts)
def test_two_ways_to_cut_one_text_match_all_of_it_at_their_common_cuts(
    text: str, one: list[int], other: list[int]
) -> None:
    """As many groups as there are places where both ways cut."""
    first, second = cut(text, one), cut(text, other)
    matches = match_pieces(first, second)
    assert "".join(first[i] for left, _ in matches for i in left) == text
    ends = [{len("".join(pieces[: n + 1])) for n in range(len(pieces))} for pieces in (first, second)]
    assert len(matches) == len(ends[0] & ends[1])
    for left, right in matches:
        assert "".join(first[i] for i in left) == "".join(second[i] for i in right)


def task(words: list[str]) -> CausalLM:
    tokenizer = word_tokenizer(["<pad>", "<unk>", "<eos>"], words, pad_token="<pad>", eos_token="<eos>")
    return CausalLM(tokenizer, prompt="plain")


def batch_of(made: CausalLM, answers: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = made.tokenizer
    rows = [tokenizer.convert_tokens_to_ids(["q", *answer.split(), "<eos>"]) for answer in answers]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_models_with_the_same_tokens_are_compared_at_all_but_padding() -> None:
    made = task(["q", "a", "b"])
    batch = batch_of(made, ["a b", "a"])
    first, second = matched_rows((batch, batch), (made, made))
    assert first == second == [[0], [1], [2], [3], [4], [5], [6]]


def test_different_tokenizers_are_compared_at_answers_with_the_same_text() -> None:
    """Row 0: "un like" against "unlike"; row 1 "a" against "a". Questions, ends and padding count nowhere."""
    one, other = task(["q", "a", "un", "like"]), task(["q", "a", "unlike"])
    first, second = batch_of(one, ["un like", "a"]), batch_of(other, ["unlike", "a"])
    assert matched_rows((first, second), (one, other)) == ([[1, 2], [5]], [[1], [4]])


def test_inputs_that_cannot_be_matched_are_refused() -> None:
    made = task(["q", "a"])
    bare = {"input_ids": torch.tensor([[1]])}, {"input_ids": torch.tensor([[1, 2]])}
    with pytest.raises(ModelError, match="different tokenizers, and this task has no answers"):
        matched_rows(bare, (made, made))
    images = {"pixel_values": torch.zeros(1, 1, 4, 4)}, {"pixel_values": torch.zeros(1, 1, 8, 8)}
    with pytest.raises(ModelError, match="same tokens or patches"):
        matched_rows(images, (made, made))


def test_pooling_takes_the_mean_row_of_each_group() -> None:
    hidden = torch.arange(12.0).view(2, 3, 2)
    assert Pooling([[0, 1], [5]], hidden.device)(hidden).tolist() == [[1.0, 2.0], [10.0, 11.0]]
    assert Pooling([[4], [0]], hidden.device)(hidden).tolist() == [[8.0, 9.0], [0.0, 1.0]]
    assert Pooling([], hidden.device)(hidden).shape == (6, 2)
