"""METEOR without synonyms, by hand: F = P R / (0.9 P + 0.1 R) and the penalty 0.5 (chunks / matches)^3."""

import nltk
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from befit.errors import ConfigError
from befit.report.numbers import is_share
from befit.tasks import make_task
from befit.tasks.meteor import meteor, unavailable
from befit.tasks.text_metrics import METRICS, compare

CAT = "the cat sat on the mat"


@pytest.mark.parametrize(
    ("reference", "answer", "value"),
    [
        (CAT, CAT, 1 - 0.5 / 6**3),
        (CAT, "on the mat sat the cat", 1 - 0.5 * (6 / 6) ** 3),
        (CAT, "the cat was sat on the mat", 60 / 61 * (1 - 0.5 * (2 / 6) ** 3)),
        ("The runner runs.", "the runners running .", 1 - 0.5 / 4**3),
        ("cat", "cat", 0.5),
        ("the cat", "The Cat", 0.9375),
        ("猫が好き", "猫が好き", 0.5),
        ("кот спит дома", "кот спит", 20 / 29 * 0.9375),
        ("first line\nsecond", "first line second", 1 - 0.5 / 3**3),
        ("cat", "feline", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_meteor_of_one_answer(reference: str, answer: str, value: float) -> None:
    """The first three are the worked example of the metric's usual introduction: 0.9977, 0.5 and 0.9654.

    Third: 6 of 7 words match, P = 6/7, R = 1, F = (6/7) / (0.9 * 6/7 + 0.1) = 60/61, in two chunks. Fourth: "runs" and
    "running" have one stem, "runner" and "runners" too, and a full stop at the end is a word. кот спит: P = 1,
    R = 2/3, F = (2/3) / (0.9 + 0.1 * 2/3) = 20/29, one chunk of two. A line of Japanese is one word.
    """
    assert meteor("meteor_exact_stem", reference, answer) == pytest.approx(value, abs=1e-12)


def test_the_best_reference_counts_and_the_name_says_that_it_is_not_meteor() -> None:
    found = compare(["the cat"], [("a dog", "the cat")], ["meteor_exact_stem"])
    assert found == {"meteor_exact_stem": 0.9375}
    assert "meteor" not in METRICS and is_share("meteor_exact_stem") and is_share("meteor_nltk")


def test_the_full_metric_is_refused_before_training_where_its_dictionary_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nltk.data, "path", [])
    assert unavailable(["rougeL", "meteor_exact_stem"]) == []
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")
    with pytest.raises(ConfigError, match=r"meteor_nltk needs punkt_tab, wordnet, omw-1.4.*nltk\.downloader"):
        make_task("causal-lm", tokenizer, generate=True, metrics=["meteor_nltk"])
