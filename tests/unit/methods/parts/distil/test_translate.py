"""What one model says, in the terms of a model with another tokenizer (docs/methods/perada.md)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from befit.core.errors import ModelError
from befit.methods.parts.distil.translate import View, same_rows, spread, translate_rows
from tests.unit.methods.parts.mosaic.align.test_tokens import batch_of, task

ONE = task(["q", "a", "un", "like", "b"])  # <pad> 0, <unk> 1, <eos> 2, q 3, a 4, un 5, like 6, b 7
OTHER = task(["q", "b", "unlike", "a"])  # q 3, b 4, unlike 5, a 6


def views(first: str, second: str) -> tuple[View, View]:
    return View(ONE, batch_of(ONE, [first])), View(OTHER, batch_of(OTHER, [second]))


def test_a_token_for_a_token_takes_the_teachers_probabilities_by_text() -> None:
    """0.6 a, 0.3 b, 0.1 un: the student has no "un", so 2/3 and 1/3 are left; not put through a second softmax."""
    teacher, student = views("a b", "a b")
    values = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.25, 0.25], [0.9, 0.1, 0.0]])
    tokens = torch.tensor([[4, 7, 5], [7, 2, 4], [2, 4, 5]])
    target = translate_rows(values, tokens, teacher, student, 7)
    expected = torch.zeros(3, 7)
    expected[0, [6, 4]] = torch.tensor([2 / 3, 1 / 3])
    expected[1, [4, 2, 6]] = torch.tensor([0.5, 0.25, 0.25])  # the end of a text goes to its end
    expected[2, 2] = 1.0  # special tokens have no text to be matched by: the student's own, its end
    torch.testing.assert_close(target, expected)


def test_places_that_no_single_token_stands_for_have_the_students_own_next_token() -> None:
    """ "un like" against "unlike": the target is the token predicted there, not the one it is predicted from."""
    teacher, student = views("un like b", "unlike b")
    values, tokens = torch.ones(4, 1), torch.tensor([[7], [7], [4], [2]])
    target = translate_rows(values, tokens, teacher, student, 7)
    assert target.argmax(1).tolist() == [5, 6, 2]  # own "unlike"; the teacher's "a" where "b" stands; own end
    assert student.own.tolist() == [5, 4, 2] and torch.equal(target.sum(1), torch.ones(3))


def test_what_a_teacher_says_of_foreign_classes_alone_leaves_the_own_token() -> None:
    teacher, student = views("a", "a")
    target = translate_rows(torch.ones(2, 1), torch.tensor([[5], [5]]), teacher, student, 7)
    assert target.argmax(1).tolist() == student.own.tolist()


def test_one_vocabulary_needs_no_translation_and_the_likeliest_are_made_to_sum_to_one() -> None:
    view = View(ONE, batch_of(ONE, ["a b", "a"]))
    assert same_rows(view, View(ONE, dict(view.batch)))
    values, tokens = torch.tensor([[0.4, 0.1]]).expand(5, 2), torch.tensor([[4, 7]]).expand(5, 2)
    target = translate_rows(values, tokens, view, view, 8)
    assert target[0].tolist() == pytest.approx([0, 0, 0, 0, 0.8, 0, 0, 0.2])
    assert torch.equal(target, target[:1].expand(5, 8))


def test_rows_that_did_not_travel_have_the_own_token_and_extra_ones_nobody() -> None:
    view = View(ONE, batch_of(ONE, ["a b"]))
    known = torch.nn.functional.one_hot(torch.tensor([6]), 8).float()
    short = translate_rows(known, None, view, view, 8)
    assert short.argmax(1).tolist() == [6, 7, 2]
    long = translate_rows(torch.cat([known, torch.zeros(1, 8), known.expand(9, 8)]), None, view, view, 8)
    assert long.argmax(1).tolist() == [6, 7, 6]


@pytest.mark.parametrize("tokens", [[[-1, 4]], [[2**31 - 1, 4]], [[99, 4]]])
def test_foreign_tokens_and_negative_values_count_as_nothing(tokens: list[list[int]]) -> None:
    found, used = spread(torch.tensor([[0.7, 0.2]]), torch.tensor(tokens), 8)
    assert found[0, 4] == 1.0 and found.sum() == 1.0 and used.all()
    teacher, student = views("a", "a")
    assert translate_rows(torch.tensor([[0.7, 0.2]]), torch.tensor(tokens), teacher, student, 7)[0, 6] == 1.0
    assert spread(torch.tensor([[-1.0, 0.0]]), torch.tensor(tokens), 8)[1].tolist() == [False]


def test_classes_of_a_classifier_have_to_agree() -> None:
    view = View(ONE, {"labels": torch.tensor([0, 1])})
    assert same_rows(view, View(OTHER, {"labels": torch.tensor([0, 1])}))
    with pytest.raises(ModelError, match="probabilities of 3 classes for a model that has 4"):
        translate_rows(torch.ones(2, 3), None, view, view, 4)


def test_other_numbers_for_the_same_words_change_nothing() -> None:
    """A teacher whose vocabulary is shuffled says, translated, what it says without: but for tokens without a text."""
    words = ["q", "a", "b", "c", "d"]
    plain, shuffled = task(words), task(words[::-1])
    answers = ["a b", "c", "d d a"]
    teacher, student = View(shuffled, batch_of(shuffled, answers)), View(plain, batch_of(plain, answers))
    place = torch.tensor([0, 1, 2, 7, 6, 5, 4, 3])  # of every word of the student, in the teacher
    probabilities: Tensor = torch.rand(9, 8, generator=torch.Generator().manual_seed(0)).softmax(1)
    target = translate_rows(
        probabilities[:, place].topk(8).values, probabilities[:, place].topk(8).indices, teacher, student, 8
    )
    expected = probabilities.clone()
    expected[:, :2] = 0  # padding and the unknown
    expected /= expected.sum(1, keepdim=True)
    ends = student.own == 2
    torch.testing.assert_close(target[~ends], expected[~ends])
    assert target[ends].argmax(1).tolist() == [2, 2, 2]
