"""The tasks of `skills`: twelve operations on a word, alone or in pairs, ten of which no backbone has ever seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from random import Random
from typing import Any


def swap_ends(text: str) -> str:
    """
    >>> swap_ends("word"), swap_ends("a")
    ('dorw', 'a')
    """
    return text[-1] + text[1:-1] + text[0] if len(text) > 1 else text


def star_vowels(text: str) -> str:
    """
    >>> star_vowels("Ukraine")
    '*kr**n*'
    """
    return "".join("*" if letter in "aeiouAEIOU" else letter for letter in text)


OPERATIONS: Mapping[str, Callable[[str], str]] = {
    "copy": lambda text: text,
    "reverse": lambda text: text[::-1],
    "upper": str.upper,
    "first three": lambda text: text[:3],
    "last three": lambda text: text[-3:],
    "double": lambda text: "".join(2 * letter for letter in text),
    "swap ends": swap_ends,
    "drop first": lambda text: text[1:],
    "drop last": lambda text: text[:-1],
    "twice": lambda text: f"{text} {text}",
    "star vowels": star_vowels,
    "count": lambda text: f"{len(text)} {text}",
}
CLIENT_PAIRS = (
    "reverse, upper",
    "drop first, reverse",
    "star vowels, reverse",
    "upper, swap ends",
    "last three, double",
    "first three, reverse",
    "drop last, twice",
    "swap ends, star vowels",
)
NEWCOMER_PAIRS = ("double, drop first", "count, upper")
HELD_OUT = (*CLIENT_PAIRS, *NEWCOMER_PAIRS)
ALLOWED_PAIRS = tuple(
    pair
    for first in OPERATIONS
    for then in OPERATIONS
    if first != then and (pair := f"{first}, {then}") not in HELD_OUT
)


def answer(instruction: str, word: str) -> str:
    """What `instruction` makes of `word`. "a, b" does a first: b(a(word)).

    >>> answer("drop first, reverse", "Paris"), answer("count", "Paris")
    ('sira', '5 Paris')
    """
    for operation in instruction.split(", "):
        word = OPERATIONS[operation](word)
    return word


def near_miss(instruction: str, word: str) -> str:
    """What the same operations make of `word` in the other order, or one of them alone; where that is the answer too,
    what the first other operation makes of it.

    >>> near_miss("drop first, reverse", "Paris"), near_miss("reverse, upper", "Paris"), near_miss("upper", "Paris")
    ('iraP', 'PARIS', 'Paris')
    """
    right, named = answer(instruction, word), instruction.split(", ")[::-1]
    return next(wrong for way in (", ".join(named), *named, *OPERATIONS) if (wrong := answer(way, word)) != right)


def random_words(draw: Random, avoid: Collection[str]) -> Iterator[str]:
    """Without end: lower-case words of 4 to 8 random letters. None is in `avoid`."""
    while True:
        word = "".join(chr(97 + draw.randrange(26)) for _ in range(draw.randint(4, 8)))
        if word not in avoid:
            yield word


def generated_records(seed: int, avoid: Collection[str], mixed_case: bool) -> Iterator[dict[str, Any]]:
    """Without end: the text that backbones are trained on. 40 % single operations, 60 % pairs, none held out.

    mixed_case  10 % of the words are capitalised, and 10 % in capitals
    """
    draw = Random(seed)
    for number, word in enumerate(random_words(draw, avoid)):
        tasks = tuple(OPERATIONS) if draw.random() < 0.4 else ALLOWED_PAIRS
        instruction = tasks[draw.randrange(len(tasks))]
        case = draw.random() if mixed_case else 1.0
        text = word.capitalize() if case < 0.1 else word.upper() if case < 0.2 else word
        yield {
            "id": f"public-{seed}-{number}",
            "instruction": instruction,
            "input": text,
            "output": answer(instruction, text),
        }
