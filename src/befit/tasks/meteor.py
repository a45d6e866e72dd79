"""METEOR (Banerjee and Lavie 2005) by NLTK: in full, and without the dictionary that has to be downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

METEORS = ("meteor_exact_stem", "meteor_nltk")
_CORPORA = {"tokenizers/punkt_tab/english": "punkt_tab", "corpora/wordnet": "wordnet", "corpora/omw-1.4": "omw-1.4"}


def meteor(name: str, reference: str, answer: str) -> float:
    """`F (1 - gamma (chunks / matches)^beta)`, `F = P R / (alpha P + (1 - alpha) R)`; alpha 0.9, beta 3, gamma 0.5.

    meteor_exact_stem  words match that are equal without capitals or have one Porter stem; Treebank words, line by line
    meteor_nltk        words match that are synonyms in the English WordNet too, if it has their stems; `word_tokenize`
                       of NLTK: the reference behaviour, for all languages alike, as FedP2EFT has it

    The first is another metric than METEOR, and no bound of it: it finds no synonyms, and divides lines, not sentences,
    into words, so that a full stop within a line stays with its word. In both an identical answer of one word scores
    0.5 and of two 0.9375, and in scripts without spaces a whole line is one word.
    """
    from nltk.stem.porter import PorterStemmer
    from nltk.translate.meteor_score import single_meteor_score

    if name == "meteor_nltk":
        words: Callable[[str], list[str]] = _full_words
        return float(single_meteor_score(words(reference), words(answer), stemmer=PorterStemmer()))
    return float(
        single_meteor_score(
            _lines(reference),
            _lines(answer),
            stemmer=PorterStemmer(),
            wordnet=_NoSynonyms(),  # pyright: ignore[reportArgumentType]
        )
    )


def unavailable(metrics: Sequence[str]) -> list[str]:
    """What a metric among these needs and this machine does not have, before anything is trained."""
    if "meteor_nltk" not in metrics:
        return []
    missing = [package for place, package in _CORPORA.items() if not _is_installed(place, package)]
    if not missing:
        return []
    return [
        f"evaluate.metrics: meteor_nltk needs {', '.join(missing)} of NLTK, which this machine does not have: "
        f"python -m nltk.downloader {' '.join(missing)}. meteor_exact_stem, another metric, needs nothing"
    ]


class _NoSynonyms:
    def synsets(self, word: str) -> list[object]:
        return []


def _lines(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in _treebank().tokenize(line)]


def _full_words(text: str) -> list[str]:
    from nltk.tokenize import word_tokenize

    return word_tokenize(text)


@cache
def _treebank() -> Any:
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()


def _is_installed(place: str, package: str) -> bool:
    import nltk

    for path in (place, f"{place.split('/')[0]}/{package}.zip"):
        try:
            nltk.data.find(path)
        except LookupError:
            continue
        return True
    return False
