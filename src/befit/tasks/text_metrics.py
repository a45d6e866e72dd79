"""How close generated answers are to what was expected."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

__all__ = ["compare", "normal"]


def compare(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean exact match and ROUGE-L F-measure of answers against one reference each."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=False)
    matches = [normal(answer) == normal(reference) for answer, reference in zip(answers, references, strict=True)]
    rouge = [
        scorer.score(reference, answer)["rougeL"].fmeasure
        for answer, reference in zip(answers, references, strict=True)
    ]
    return {"exact_match": sum(matches) / len(matches), "rougeL": sum(rouge) / len(rouge)}


def normal(text: str) -> str:
    """Text as exact match compares it.

    >>> normal(" Caf\\u00e9 ") == normal("CAFE\\u0301")
    True
    """
    return unicodedata.normalize("NFKC", text).casefold().strip()
