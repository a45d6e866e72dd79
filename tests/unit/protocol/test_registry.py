"""The registry: a signature is a schema."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from befit.adapters.layout import Layout
from befit.core.errors import ConfigError
from befit.core.values import Payload
from befit.protocol import registry
from befit.protocol.method import Deployment, Method, Use
from befit.protocol.registry import (
    METHODS,
    MethodEntry,
    build_method,
    check_method,
    get_method,
    method_names,
    register,
)
from befit.protocol.stage import Personal, Stage


@dataclass(frozen=True)
class Blend:
    """How two adapters are put together.

    share  part of the first
    """

    share: float = 0.5
    rule: Literal["mean", "stack"] = "mean"

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie between 0 and 1, got {self.share}")


class Nothing(Personal):
    def client_update(self, client, received, site, at):
        return client, Payload()


@dataclass(frozen=True)
class Fake(Method):
    """A method that does nothing.

    rank    rank of the adapter,
            the same at every client
    blend   how adapters are put together
    betas   two numbers
    """

    rank: int
    blend: Blend = Blend()
    betas: tuple[float, float] = (0.5, 1.0)
    names: tuple[str, ...] = ()
    layout = Layout(())
    use = Use(())

    def plan(self):
        return [Stage("nothing", Nothing())]

    def server_init(self, site):
        return Payload()

    def deploy(self, client, received, site):
        return Deployment({}, ())


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(registry, "METHODS", copy.copy(registry.METHODS))
    register("fake", paper="arXiv:0000.00000", year=1999, title="Fake")(Fake)
    return get_method("fake")


def test_the_signature_and_docstring_describe_a_method(fake):
    assert (fake.title, fake.paper, fake.year, fake.summary) == (
        "Fake",
        "arXiv:0000.00000",
        1999,
        "A method that does nothing.",
    )
    rank, blend, betas, _ = fake.parameters
    assert (rank.name, rank.type, rank.description) == ("rank", int, "rank of the adapter, the same at every client")
    assert (blend.default, betas.default) == (Blend(), (0.5, 1.0))


def test_nested_mappings_and_lists_become_the_types_of_the_signature(fake):
    method = build_method({"name": "fake", "rank": 4, "blend": {"share": 1}, "betas": [0.1, 2], "names": ["a"]})
    assert method == Fake(4, Blend(1.0), (0.1, 2.0), ("a",))
    assert type(method.blend.share) is float


def test_values_of_the_right_type_are_taken_as_they_are(fake):
    assert build_method({"name": "fake", "rank": 4, "blend": Blend(0.1)}) == Fake(4, Blend(0.1))


def test_all_mistakes_in_a_method_are_named_at_once(fake):
    with pytest.raises(ConfigError) as caught:
        build_method({"name": "fake", "blend": {"shaer": 1, "rule": "men"}, "betas": [1], "names": ["a", 1], "x": 0})
    assert sorted(caught.value.problems) == [
        "method.betas: must be a list of 2 numbers, got [1]",
        'method.blend.rule: "men" is not one of mean, stack. Did you mean: mean?',
        "method.blend.shaer: unknown key for blend. Did you mean: share?",
        'method.names: must be a list of texts, got ["a", 1]',
        "method.rank: is required (a whole number)",
        "method.x: unknown key for fake. Known: rank, blend, betas, names",
    ]


def test_what_a_method_itself_refuses_reads_like_any_other_mistake(fake):
    with pytest.raises(ConfigError, match=r"method\.blend: share must lie between 0 and 1, got 2"):
        build_method({"name": "fake", "rank": 1, "blend": {"share": 2}})


def test_several_refusals_of_a_factory_stand_each_under_its_key(fake, monkeypatch):
    def picky(rank: int, blend: Blend = Blend()):
        raise ConfigError([f"rank: must be even, got {rank}", "blend.share: is too small", "they do not fit"])

    register("picky")(picky)
    _, method, problems = check_method({"name": "picky", "rank": 3}, "baselines.0")
    assert method is None
    assert problems == [
        "baselines.0.rank: must be even, got 3",
        "baselines.0.blend.share: is too small",
        "baselines.0: they do not fit",
    ]


def test_the_plain_form_has_every_default_and_makes_the_same_method(fake):
    resolved, method, problems = check_method({"name": "fake", "rank": 2, "betas": (3, 4)})
    assert problems == []
    assert resolved == {
        "name": "fake",
        "rank": 2,
        "blend": {"share": 0.5, "rule": "mean"},
        "betas": [3, 4],
        "names": [],
    }
    assert build_method(resolved) == method


def test_an_unknown_method_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown method 'fedsaa'\. Did you mean: fedsa\? Known: .*potara"):
        build_method("fedsaa")


def test_two_methods_may_not_share_a_name(fake):
    with pytest.raises(ValueError, match="two methods are called 'fake'"):
        register("fake")(Blend)
    assert get_method("fake").factory is Fake


@pytest.mark.parametrize("name", method_names())
def test_every_method_explains_itself(name):
    entry = get_method(name)
    assert entry.summary.endswith(".")
    assert all(one.description for one in entry.parameters), [p.name for p in entry.parameters if not p.description]
    resolved, method, problems = check_method(name)
    assert not problems
    assert build_method(resolved) == method


def test_all_mistakes_in_a_methods_arguments_are_named_at_once():
    """Those of type and of every method's rules, and what the method itself says of the others."""
    given = {
        "name": "fedmosaic",
        "rank": 0,
        "mixing": "foo",
        "blocks": 0,
        "relevance": {"temperature": 0.0, "share": 2.0, "ema": 0.25},
    }
    _, method, problems = check_method(given)
    assert method is None
    keys = [problem.split(":")[0] for problem in problems]
    wrong = ("blocks", "mixing", "rank", "relevance.share", "relevance.temperature")
    assert sorted(keys) == [f"method.{key}" for key in wrong]
    _, method, problems = check_method({"name": "fedmosaic", "align": {"method": "closd", "samples": -5}, "blocks": 0})
    assert method is None and {"method.blocks", "method.align.method"} <= {one.split(":")[0] for one in problems}


def test_a_function_that_returns_no_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful() -> Any:
        build_method("fedit")

    monkeypatch.setitem(METHODS, "forgetful", MethodEntry("forgetful", "Forgetful", "", None, forgetful))
    with pytest.raises(ConfigError, match=rf"{Path(__file__).name} returns nothing"):
        build_method("forgetful")


def test_what_was_checked_is_kept_by_what_a_block_says_until_another_method_is_registered(fake):
    resolved, method, _ = check_method("fedit")
    assert check_method({"name": "fedit"})[1] is method
    resolved["rank"] = 3  # the caller's own
    assert check_method("fedit")[0]["rank"] == 8
    assert check_method({"name": "fedit", "rank": 1})[1] is not None
    assert check_method({"name": "fedit", "rank": True})[1] is None  # which equals 1
    problems = [check_method({"name": "fedit", "rank": 0}, path)[2] for path in ("method", "baselines.0")]
    assert [problem.split(":")[0] for (problem,) in problems] == ["method.rank", "baselines.0.rank"]
    assert check_method("kept")[1] is None
    register("kept")(lambda: Fake(2))
    assert check_method("kept")[1] == Fake(2)
