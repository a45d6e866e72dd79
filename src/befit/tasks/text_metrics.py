"""How close generated answers are to what was expected. Every metric has a name; higher is better in all of them."""

from __future__ import annotations

import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from befit.core.errors import DataError
from befit.tasks.meteor import METEORS, meteor

# Of a generated answer; those of the likelihood of given answers are `befit.tasks.choices`.
GENERATED = (
    "exact_match",
    "token_f1",
    "rouge1",
    "rouge2",
    "rougeL",
    "rouge1_stem",
    "rouge2_stem",
    "rougeL_stem",
    "rouge1_unicode",
    "rouge2_unicode",
    "rougeL_unicode",
    "rougeL_char",
    *METEORS,
    "choice_parse",
)
LIKELIHOOD = ("choice_sum", "choice_per_token", "choice_per_char")
METRICS = ("token_accuracy", *GENERATED, *LIKELIHOOD)


def compare(
    answers: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = ("exact_match", "rougeL"),
    choices: Sequence[Sequence[str]] = (),
    names: Sequence[Sequence[str]] = (),
) -> dict[str, float]:
    """The mean of each metric over all answers, each against the best of its references.

    exact_match     equal after NFKC, case folding and stripping
    token_f1        F-measure of the bags of words, in the same normal form
    rouge1, rouge2, rougeL  F-measures of rouge-score, which sees only a-z and 0-9: no use for other scripts
    …_stem          with Porter's stemmer, for English
    …_unicode       words of any script, with their marks; one character each where a script has no spaces
    rougeL_char     on characters other than white space, capitals and signs among them; for answers of a word or two
    meteor_…        see `befit.tasks.meteor`: with exact words and stems alone, or as NLTK has it
    choice_parse    the first of the record's choices that the answer names is the expected one (see `parsed_choice`);
                    `unparsable` is the share of answers that name none. `names` are how answers name the choices, where
                    that is shorter, such as answer1 of "the correct answer is answer1"

    Source: Lin 2004 (ROUGE). Raises DataError without answers.
    """
    if not answers:
        raise DataError("there are no answers to compare; give the split records, or evaluate another split")
    values: dict[str, float] = {}
    for name in metrics:
        if name == "choice_parse":
            answered = [
                parsed_choice(answer, *named) for answer, *named in zip(answers, choices, names or choices, strict=True)
            ]
            right = [choice in accepted for choice, accepted in zip(answered, references, strict=True)]
            values |= {name: statistics.fmean(right), "unparsable": answered.count(None) / len(answered)}
        else:
            score = _score(name)
            scores = [
                max(score(reference, answer) for reference in accepted)
                for answer, accepted in zip(answers, references, strict=True)
            ]
            values[name] = statistics.fmean(scores)
    return values


def normal(text: str) -> str:
    """Text as exact match compares it.

    >>> normal(" Caf\\u00e9 ") == normal("CAFE\\u0301")
    True
    """
    return unicodedata.normalize("NFKC", text).casefold().strip()


# An article or the pronoun, which are no letter of a choice: "a" or "I" before a word, and "A" where a sentence begins.
_BEFORE_A_WORD = r"(?=['’]\w|[ \t]+(?!(?:is|was|and|or|because)\b)\w)"
_NO_LETTER = re.compile(rf"(?m)(?<![a-zA-Z0-9])(?:[aiI]|(?:^|(?<=[.!?]\s))A){_BEFORE_A_WORD}")


def lettered(text: str) -> str:
    """Text as exact match compares it, in which every "a" and "i" that is a word names a letter.

    >>> lettered("A giraffe."), lettered("I think A is right"), lettered("(a) giraffe")
    ('_ giraffe.', '_ think a is right', '(a) giraffe')
    """
    return normal(_NO_LETTER.sub("_", unicodedata.normalize("NFKC", text).strip()))


def parsed_choice(answer: str, choices: Sequence[str], names: Sequence[str] = ()) -> str | None:
    """The choice that stands first in the answer, whatever its case; of those at one place the longest. None: none.

    names  how an answer names each choice; the choices themselves without. The article a and the pronoun I name none

    >>> parsed_choice("The correct answer is Answer10.", ["answer1", "answer10"])
    'answer10'
    >>> parsed_choice("It is B.", ["I choose a", "I choose b"], ["a", "b"])
    'I choose b'
    >>> parsed_choice("это неправда", ["да", "нет"]), parsed_choice("答案A", ["A", "B"])
    (None, 'A')
    """
    text, letters = normal(answer), lettered(answer)
    named = zip(choices, map(normal, names or choices), strict=True)
    places = [(_place(name, letters if name in ("a", "i") else text), -len(name), choice) for choice, name in named]
    return min((place for place in places if place[0] >= 0), default=(0, 0, None))[2]


def _place(name: str, text: str) -> int:
    """Where a text has a name, not within a longer word; -1 where it has not. Scripts without blanks have no words."""
    for found in re.finditer(f"(?={re.escape(name)})", text) if name else ():
        first, after = found.start(), found.start() + len(name)
        before, behind = text[max(first - 1, 0) : first], text[after : after + 1]
        if not _in_a_word(before, name[0]) and not _in_a_word(name[-1], behind):
            return first
    return -1


def _in_a_word(character: str, following: str) -> bool:
    """Whether two characters are of one word; at an edge of the text one of them is empty."""
    together = character.isalnum() and following.isalnum()
    return together and not _unspaced(character) and not _unspaced(following)


def _score(name: str) -> Callable[[str, str], float]:
    """`score(reference, answer)` of one metric."""
    if name in _PLAIN:
        return _PLAIN[name]
    if name in METEORS:
        return lambda reference, answer: meteor(name, reference, answer)
    kind, _, variant = name.partition("_")
    return lambda reference, answer: _rouge(kind, variant).score(reference, answer)[kind].fmeasure


@cache
def _rouge(kind: str, variant: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=variant == "stem", tokenizer=_TOKENIZERS.get(variant))


def _token_f1(reference: str, answer: str) -> float:
    """
    >>> _token_f1("the red house", "The house")
    0.8
    """
    wanted, given = normal(reference).split(), normal(answer).split()
    if not wanted or not given:
        return float(wanted == given)
    return 2 * sum((Counter(wanted) & Counter(given)).values()) / (len(wanted) + len(given))


_PLAIN: Mapping[str, Callable[[str, str], float]] = {
    "exact_match": lambda reference, answer: float(normal(answer) == normal(reference)),
    "token_f1": _token_f1,
}


class _Characters:
    def tokenize(self, text: str) -> list[str]:
        return [character for character in text if not character.isspace()]


class _Words:
    """Runs of letters, marks and digits of any script; scripts without spaces character by character.

    >>> _Words().tokenize("Caf\u00e9 au lait") == ["caf\u00e9", "au", "lait"], len(_Words().tokenize("\u4e2d\u6587"))
    (True, 2)
    """

    def tokenize(self, text: str) -> list[str]:
        words: list[str] = []
        before = ""  # "word", "single" (a character of a script without spaces), or nothing
        for character in normal(text):
            category = unicodedata.category(character)[0]
            if category == "M" and before:
                words[-1] += character
            elif category in "LN" and _unspaced(character):
                words.append(character)
                before = "single"
            elif category in "LN" and before == "word":
                words[-1] += character
            elif category in "LMN":
                words.append(character)
                before = "word"
            else:
                before = ""
        return words


def _unspaced(character: str) -> bool:
    name = unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
    return name in ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")


_TOKENIZERS: Mapping[str, Any] = {"char": _Characters(), "unicode": _Words()}
