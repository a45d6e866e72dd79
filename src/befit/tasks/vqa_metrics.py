"""How answers about images are scored: choices read out of an answer, sets of tokens pooled over a task, task means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from befit.tasks.text_metrics import GENERATED, compare, lettered, normal, parsed_choice

SCORE, POOLED = "vqa_score", "token_f1_pooled"
VQA_METRICS = (SCORE, POOLED)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Answered:
    """One generated answer and what it is held against.

    expected    the right answers, one at least
    choices     the answers to choose from; none for an open question
    metric      how an open question is scored: `exact_match`, `token_f1_pooled`, or another of a generated answer
    ids         token ids of a text, without special ones, for `token_f1_pooled`
    """

    task: str
    answer: str
    expected: tuple[str, ...]
    choices: tuple[str, ...] = ()
    metric: str = "exact_match"
    ids: Callable[[str], Sequence[int]] = field(default=lambda _: (), compare=False)


def answered_choice(answer: str, choices: Sequence[str]) -> str | None:
    """The choice that an answer names first, else the one whose letter it begins with; None where it does neither.

    >>> answered_choice("I think: Odd", ["even", "odd"]), answered_choice("(B)", ["red", "blue"])
    ('odd', 'blue')
    """
    if (choice := parsed_choice(answer, choices)) is not None:
        return choice
    # (b), b., b: or b alone; a longer word that begins with the letter is none of these, nor is an article.
    word = (lettered(answer).split() or [""])[0].strip("().:")
    at = LETTERS.find(word) if len(word) == 1 else -1
    return choices[at] if 0 <= at < len(choices) else None


def pooled_f1(pairs: Sequence[tuple[frozenset[int], frozenset[int]]]) -> float:
    """F-measure of sets of token ids, answer and expected, pooled over a task (the F1 of FedMosaic).

    precision = sum |p & g| / sum |p|, recall = sum |p & g| / sum |g|; 1 where all sets are empty, 0 without overlap.

    >>> pooled_f1([(frozenset({1, 2}), frozenset({2})), (frozenset({3}), frozenset({3, 4}))])
    0.6666666666666666
    """
    shared = sum(len(given & wanted) for given, wanted in pairs)
    given, wanted = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    return 2 * shared / (given + wanted) if given + wanted else 1.0


def task_scores(answered: Sequence[Answered]) -> dict[str, float]:
    """The score of every task, in the order in which they appear.

    A choice counts where it is the expected one. Where open questions of one task are scored differently, or stand
    beside choices, the score is the mean over all questions, each kind's mean counted as often as it is asked.
    """
    scores = {}
    for task in dict.fromkeys(answer.task for answer in answered):
        of_task = [answer for answer in answered if answer.task == task]
        kinds = dict.fromkeys(kind(answer) for answer in of_task)
        parts = [(same := [answer for answer in of_task if kind(answer) == name], len(same)) for name in kinds]
        total = sum(_SCORES.get(kind(group[0]), _generated)(group) * size for group, size in parts)
        scores[task] = total / len(of_task)
    return scores


def kind(answer: Answered) -> str:
    return "choice" if answer.choices else answer.metric


def _choice(group: Sequence[Answered]) -> float:
    expected = [{normal(text) for text in answer.expected} for answer in group]
    chosen = [answered_choice(answer.answer, answer.choices) for answer in group]
    return statistics.fmean(
        choice is not None and normal(choice) in wanted for choice, wanted in zip(chosen, expected, strict=True)
    )


def _pooled(group: Sequence[Answered]) -> float:
    return pooled_f1(
        [(frozenset(answer.ids(answer.answer)), frozenset(answer.ids(answer.expected[0]))) for answer in group]
    )


def _generated(group: Sequence[Answered]) -> float:
    metric = group[0].metric
    return compare([answer.answer for answer in group], [answer.expected for answer in group], (metric,))[metric]


_SCORES: Mapping[str, Callable[[Sequence[Answered]], float]] = {"choice": _choice, POOLED: _pooled}


def vqa_metrics(answered: Sequence[Answered], metrics: Sequence[str]) -> dict[str, float]:
    """Each metric over all answers of a client.

    vqa_score        the mean over its tasks of their scores (see `task_scores`)
    choice_parse     share of the questions with choices whose answer names the expected one; `unparsable` is the share
                     of them whose answer names none. Without such questions there is neither
    token_f1_pooled  of the questions without choices, pooled over each task, mean over tasks; not without such ones
    others           as for text: `befit.tasks.text_metrics.compare`, over all questions
    """
    chosen = [answer for answer in answered if answer.choices]
    opened = [answer for answer in answered if not answer.choices]
    values: dict[str, float] = {}
    for name in metrics:
        if name == SCORE:
            values[name] = statistics.fmean(task_scores(answered).values())
        elif name == "choice_parse" and chosen:
            silent = [answered_choice(answer.answer, answer.choices) is None for answer in chosen]
            values |= {name: _choice(chosen), "unparsable": statistics.fmean(silent)}
        elif name == POOLED and opened:
            tasks = dict.fromkeys(answer.task for answer in opened)
            values[name] = statistics.fmean(
                _pooled([answer for answer in opened if answer.task == task]) for task in tasks
            )
        elif name in GENERATED and name != "choice_parse":
            values |= compare([answer.answer for answer in answered], [answer.expected for answer in answered], (name,))
    return values


def answered_of(record: Mapping[str, Any], answer: str, ids: Callable[[str], Sequence[int]]) -> Answered:
    """An answer beside what its record says of it. `ids` gives the tokens of a text, without special ones."""
    return Answered(
        record["task"],
        answer,
        tuple(record["references"]),
        tuple(record["choices"]),
        record["metric"],
        ids,
    )
