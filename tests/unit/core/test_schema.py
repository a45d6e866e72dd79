"""Values against signatures, and YAML as people mean it."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from befit.core.schema import POSITIVE, Mark, check_values, parameters_of, plain
from befit.core.yamlfile import parse_yaml, write_yaml

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))  # which parse_yaml refuses
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@given(st.dictionaries(texts, values, max_size=4))
def test_what_is_written_as_yaml_is_read_back_with_its_types(mapping):
    """The text "1e-3", the text "no" and the number 1.0 must come back as what they were."""
    back = parse_yaml(write_yaml(mapping))
    assert back == mapping and repr(back) == repr(mapping)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1.0", 1.0),
        ("1", 1),
        ("-7", -7),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("012", "012"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("null", None),
        ("e5", "e5"),
        (".inf", math.inf),
        ("1.2.3", "1.2.3"),
        ("0x1F", "0x1F"),
        ("-", "-"),
        ("=", "="),
    ],
)
def test_scalars_are_read_as_people_mean_them(text, value):
    found = parse_yaml(f"key: {text}" if text != "-" else 'key: "-"')["key"]
    assert found == value and type(found) is type(value)


def test_only_what_was_given_comes_back():
    def factory(rank: int = 8, *, alpha: float, **more: int): ...

    parameters = parameters_of(factory)
    assert [one.name for one in parameters] == ["rank", "alpha"]
    assert check_values(parameters, {"alpha": 1}) == ({"alpha": 1.0}, [])
    assert check_values(parameters, {"rank": 1})[1] == ["alpha: is required (a number)"]


def test_true_is_no_number_and_text_is_no_number():
    def factory(count: int = 0, size: float = 0.0, flag: bool = False): ...

    parameters = parameters_of(factory)
    _, problems = check_values(parameters, {"count": True, "size": "1", "flag": 1}, "here.")
    assert problems == [
        "here.count: must be a whole number, got true",
        'here.size: must be a number, got "1"',
        "here.flag: must be true or false, got 1",
    ]


def test_the_parameters_of_a_class_are_those_of_its_init():
    """Whatever the class says of its attributes, which need not have the names or types of its parameters."""

    class Method:
        rank: str
        layout: str

        def __init__(
            self,
            rank: Annotated[int, POSITIVE] = 8,
            how: Literal["mean", "median"] = "mean",
            base: Annotated[dict[str, int] | None, Mark.METHOD] = None,
        ):
            """Its docstring's table is the class's."""

    class Heir(Method):
        """Takes what it takes.

        rank  of the adapter
        """

    @dataclass
    class Fields:
        rank: Annotated[int, POSITIVE] = 8

    @dataclass
    class ByHand(Fields):
        def __init__(self, share: float = 0.5):
            super().__init__()

    for kind in (Method, Heir):
        rank, how, base = parameters_of(kind)
        assert (rank.type, rank.rule, how.type) == (int, POSITIVE, Literal["mean", "median"])
        assert base.marks == {Mark.METHOD}
        _, problems = check_values(parameters_of(kind), {"rank": 4.5, "how": "middle"}, "method.")
        assert problems == [
            "method.rank: must be a whole number, got 4.5",
            'method.how: "middle" is not one of mean, median',
        ]
        assert check_values(parameters_of(kind), {"rank": 0})[1] == ["rank: must be positive, got 0"]
    assert parameters_of(Heir)[0].description == "of the adapter"
    (rank,) = parameters_of(Fields)
    assert (rank.type, rank.rule) == (int, POSITIVE)
    (share,) = parameters_of(ByHand)
    assert (share.name, share.type) == ("share", float)


def test_a_description_may_run_over_lines():
    def factory(rank: int = 8, alpha: float = 1.0):
        """Do something.

        rank   first line
               and second
        alpha  other

        rank of nothing: a sentence that only begins with a name.
        """

    assert [one.description for one in parameters_of(factory)] == ["first line and second", "other"]


def test_plain_leaves_plain_values_alone():
    assert plain({"a": (1, [2.0, "x"]), "b": None}) == {"a": [1, [2.0, "x"]], "b": None}


def test_a_key_of_a_mapping_is_named_where_a_text_would_do_too():
    def site(data: str | dict[str, str] | None = None):
        pass

    _, problems = check_values(parameters_of(site), {"data": {"train": "a.csv", "columns": {"text": "note"}}})
    assert len(problems) == 1 and problems[0].startswith("data.columns: ")
    assert check_values(parameters_of(site), {"data": 3})[1] == ["data: must be text or a mapping or null, got 3"]
