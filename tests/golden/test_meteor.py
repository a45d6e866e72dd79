"""METEOR by hand: F = P R / (0.9 P + 0.1 R) and the penalty 0.5 (chunks / matches)^3."""

from collections.abc import Iterator
from pathlib import Path

import nltk
import nltk.tokenize
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from befit.core.errors import ConfigError
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


def write_dictionary(folder: Path, *synonyms: str) -> None:
    """NLTK's data in its own file formats, with one set of synonyms in the dictionary and no abbreviation in Punkt."""
    punkt, words = folder / "tokenizers" / "punkt_tab" / "english", folder / "corpora" / "wordnet"
    for path in (punkt, words, folder / "corpora" / "omw-1.4"):
        path.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (punkt / name).write_text("")
    for part in ("adj", "adv", "noun", "verb"):
        for name in (f"index.{part}", f"data.{part}", f"{part}.exc"):
            (words / name).write_text("")
    (words / "data.adj").write_text("  1 WordNet 3.0 Copyright 2006 by Princeton University.\n")
    lemmas = " ".join(f"{word} 0" for word in synonyms)
    (words / "data.noun").write_text(f"00000000 00 n {len(synonyms):02x} {lemmas} 000 | the same  \n")
    (words / "index.noun").write_text("".join(f"{word} n 1 0 1 0 00000000  \n" for word in synonyms))
    (words / "index.sense").write_text("".join(f"{word}%1:00:00:: 00000000 1 0\n" for word in synonyms))
    (words / "lexnames").write_text("00\tnoun.Tops\t1\n")


@pytest.fixture
def dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One in which car, auto and automobile are synonyms. NLTK forgets it afterwards, which keeps what it has read."""
    write_dictionary(tmp_path, "car", "auto", "automobile")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    yield
    nltk.corpus.wordnet._unload()
    nltk.tokenize._get_punkt_tokenizer.cache_clear()


def test_synonyms_match_in_full_meteor_alone(dictionary: None) -> None:
    """All four words match in one chunk; without synonyms three of four do, P = R = F = 3/4, in two chunks.

    NLTK looks up stems, and "automobil" is no entry: that word matches no synonym, in the reference either.
    """
    assert unavailable(["meteor_nltk"]) == []
    apart = 3 / 4 * (1 - 0.5 * (2 / 3) ** 3)
    for answer, name, value in (
        ("the auto stopped .", "meteor_nltk", 1 - 0.5 / 4**3),
        ("the auto stopped .", "meteor_exact_stem", apart),
        ("the automobile stopped .", "meteor_nltk", apart),
        ("car stopped .", "meteor_nltk", 30 / 39 * (1 - 0.5 / 3**3)),  # P = 1, R = 3/4, F = (3/4) / (0.9 + 0.1 3/4)
    ):
        assert meteor(name, "The car stopped .", answer) == pytest.approx(value, abs=1e-12), (answer, name)


def test_full_meteor_takes_sentences_apart_and_the_other_one_lines(dictionary: None) -> None:
    """A full stop within a line is a word where a sentence ends there: eight of eight words match in one chunk. Else
    "stopped." is one of seven, and six match the answer's eight, P = 6/8, R = 6/7, in two chunks."""
    reference, answer = "It stopped. The car is red.", "It stopped . The car is red ."
    assert meteor("meteor_nltk", reference, answer) == pytest.approx(1 - 0.5 / 8**3, abs=1e-12)
    precision, recall = 6 / 8, 6 / 7
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    expected = mean * (1 - 0.5 * (2 / 6) ** 3)
    assert meteor("meteor_exact_stem", reference, answer) == pytest.approx(expected, abs=1e-12)
