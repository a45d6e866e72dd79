"""docs/fidelity.md: no equation, algorithm, table or figure of the four papers is missing, and what it names is there.

What a paper has is written down here: how many numbered things of each kind, and by name what has no number. A row of
the page stands for those that its first cell names, such as `Eqs. 3 and 4` or `Figures 13 and 15 to 18`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from tests.golden.fidelity import ITEMS, NUMBERS, PAGE, ROOT, Row, difference, rows

KINDS = {"Eq": "equations", "Table": "tables", "Figure": "figures", "Algorithm": "algorithms"}
NAMED = re.compile(r"\b(Eq|Table|Figure|Algorithm)s?\.? (\d+[a-z]?(?:(?:, | and | to )\d+[a-z]?)*)")
STATES = ("checked", "differs", "ready", "not here", "nothing to compute")


@dataclass(frozen=True)
class Paper:
    """How many of each kind it has, numbered from 1, and other items by the words that a row begins with."""

    equations: int
    tables: int
    figures: int
    algorithms: int
    others: tuple[str, ...]


PAPERS = {
    "Potara": Paper(
        59,
        11,
        4,
        1,
        (
            "Definition 2.1",
            "Definition 3.1, Assumptions 3.2 to 3.5",
            "Theorem 3.6",
            "Lemma 3.7",
            "Lemma A.2",
            "Appendix B",
            "damping",
            "Local",
            "FFA-LoRA",
            "FedSA-LoRA",
            "FedDPA",
            "FedALT",
            "Fisher merging",
        ),
    ),
    "From Aggregation to Guidance": Paper(
        0,
        3,
        0,
        0,
        (
            "objective",
            "round",
            "global model",
            "FedAvg",
            "Task Arithmetic",
            "TIES",
            "DARE",
            "Iso-C",
            "A & B",
            "KnOTS, shared basis",
            "KnOTS, what is merged",
            "truncated decomposition",
            "ReLoRA",
            "hard initialisation",
            "guided loss",
            "parametric penalty",
            "function-space guidance",
            "strength by similarity",
            "cosine",
            "subspace alignment ratio",
            "protocol",
            "ten largest tasks",
            "scale chosen on validation data",
        ),
    ),
    "FedMosaic": Paper(
        23,
        34,
        21,
        4,
        (
            "Theorem 1",
            "Theorem 2",
            "RELA",
            "PFL-Dynamic, PFL-Static",
            "A_last, A_AUC",
            "scores of answers",
            "judge of Fed-Aya",
            "SFT, FedIT",
            "Ditto",
            "FedSim",
            "FedDPA",
            "FedDAT",
            "PerAda",
            "TAKFL",
            "FedMKT",
            "HETLoRA, FlexLoRA",
            "client model selection (A.3)",
            "base models of the text benchmarks (A.6)",
        ),
    ),
    "FedP2EFT": Paper(
        6,
        11,
        15,
        0,
        (
            "layer",
            "footnotes 1 to 3",
            "features",
            "pruning",
            "hyperparameters",
            "LoRA",
            "AdaLoRA",
            "BayesTune-LoRA",
            "FedL2P",
            "base: Standard FL",
            "base: FedDPA-T",
            "base: DEPT",
            "XNLI, MasakhaNEWS, Fed-Aya",
            "accuracy by language",
            "METEOR, ROUGE-1, ROUGE-L",
            "limitations (4.3.1)",
        ),
    ),
}


def expanded(name: str) -> list[tuple[str, str]]:
    """The numbered things that a row's name says, one by one."""
    found: list[tuple[str, str]] = []
    for kind, numbers in NAMED.findall(name):
        for part in re.split(r", | and ", numbers):
            first, _, last = part.partition(" to ")
            each = [first] if not last else [str(number) for number in range(int(first), int(last) + 1)]
            found += [(KINDS[kind], one) for one in each]
    return found


def of(paper: str) -> list[Row]:
    return [row for row in rows(ITEMS) if row.paper == paper]


@cache
def functions(path: str) -> frozenset[str]:
    """The tests of a file, which is read and not imported."""
    parsed = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(
        one.name for one in parsed.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")
    )


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Lemma 3.7, Eqs. 17 and 18", [("equations", "17"), ("equations", "18")]),
        ("Figures 2a and 4 to 6", [("figures", "2a"), ("figures", "4"), ("figures", "5"), ("figures", "6")]),
        ("Section 3.5, Table 1", [("tables", "1")]),
        ("Definition 2.1", []),
    ],
)
def test_a_name_stands_for_the_numbers_it_says(name: str, found: list[tuple[str, str]]) -> None:
    assert expanded(name) == found


@pytest.mark.parametrize(
    ("paper", "ours", "expected"),
    [
        ("8.6 %", "8.63 %", "none"),
        ("10.9 %", "10.60 %", "-0.30 points"),
        ("3.4 %", "3.45 %", "+0.05 points"),
        ("1.487", "2.000", "+0.513"),
        ("147,456", "147,456", "none"),
        ("8.26 MB", "8.258 MB", "none"),
        ("-", "91.7 %", "-"),
        ("6, 12, 18, 24", "6, 12, 18, 24", "none"),
    ],
)
def test_a_difference_is_in_our_digits_and_none_where_ours_rounds_to_the_papers(
    paper: str, ours: str, expected: str
) -> None:
    assert difference(paper, ours) == expected


def test_the_page_has_the_four_papers_and_no_other() -> None:
    for head in (ITEMS, NUMBERS):
        assert list(dict.fromkeys(row.paper for row in rows(head))) == list(PAPERS)


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("kind", KINDS.values())
def test_every_numbered_item_of_a_paper_has_a_row(paper: str, kind: str) -> None:
    named = Counter(number for row in of(paper) for one, number in expanded(row.name) if one == kind)
    assert [number for number, times in named.items() if times > 1] == []
    assert {int(re.sub(r"\D", "", number)) for number in named} == set(range(1, getattr(PAPERS[paper], kind) + 1))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_item_without_a_number_has_a_row(paper: str) -> None:
    names = [row.name for row in of(paper)]
    assert [item for item in PAPERS[paper].others if not any(name.startswith(item) for name in names)] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", rows(ITEMS), ids=lambda row: f"{row.paper}, {row.name}")
def test_a_row_says_its_state_and_what_it_is_checked_by_or_why_not(row: Row) -> None:
    begins = re.match(r"\*\*([a-z ]+)\*\*: \S", row.cells["here"])
    assert begins and begins[1] in STATES
    if begins[1] in ("not here", "nothing to compute"):
        assert (row.cells["checked against"], row.cells["test"]) == ("-", "-")
    elif row.cells["test"] == "-":
        assert begins[1] == "differs" and row.cells["checked against"] == "measured; no test asserts times"
    else:
        assert row.cells["checked against"] != "-" and row.tests


@pytest.mark.parametrize("row", [*rows(ITEMS), *rows(NUMBERS)], ids=lambda row: f"{row.paper}, {row.name}")
def test_every_test_that_a_row_names_exists(row: Row) -> None:
    assert len(row.tests) == row.cells["test"].count("::") == row.cells["test"].count("`") / 2
    assert [(path, name) for path, name in row.tests if name not in functions(path)] == []


@pytest.mark.parametrize("row", rows(NUMBERS), ids=lambda row: f"{row.paper}, {row.name}")
def test_every_number_is_held_by_a_golden_test(row: Row) -> None:
    """The first test that a row names computes the number from the row itself, and the others are golden too."""
    assert row.tests[0][0] == "tests/golden/test_numbers_of_the_papers.py"
    assert all(path.startswith("tests/golden/") for path, _ in row.tests)


def slug(heading: str) -> str:
    """A heading as GitHub's links name it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_link_resolves_and_so_does_its_heading() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) > 100
    for link in set(links):
        target, _, heading = link.partition("#")
        path = PAGE.parent / target if target else PAGE
        assert path.is_file(), link
        if heading:
            text = path.read_text(encoding="utf-8")
            assert heading in {slug(one) for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}, link
