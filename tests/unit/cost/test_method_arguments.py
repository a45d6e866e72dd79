"""`--set` for one method or for all that have the argument."""

import pytest

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.core.errors import ConfigError
from befit.cost.arguments import chosen_methods
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import METHODS, MethodEntry
from befit.train.passes import Pass


def blocks(names, *assignments):
    return {name: block for name, (block, _) in chosen_methods(names, assignments).items()}


def problems(names, *assignments):
    with pytest.raises(ConfigError) as caught:
        chosen_methods(names, assignments)
    return caught.value.problems


def test_an_argument_goes_to_every_method_that_has_it():
    found = blocks(["fedit", "potara", "local"], "rounds_fedit=50", "rank=4")
    assert [block["rank"] for block in found.values()] == [4, 4, 4]
    assert found["potara"]["rounds_fedit"] == 50
    assert "rounds_fedit" not in found["fedit"]


def test_one_method_s_own_value_wins_wherever_it_stands():
    found = blocks(["fedit", "potara"], "potara.rank=2", "rank=4")
    assert (found["potara"]["rank"], found["fedit"]["rank"]) == (2, 4)


def test_the_last_of_two_equal_assignments_wins():
    assert blocks(["fedit"], "rank=4", "rank=6")["fedit"]["rank"] == 6


def merging(rank: int = 8, merge: Merge = Merge()) -> Recipe:  # noqa: B008 frozen
    """A method with options of its own within an argument."""
    return Recipe(lora(rank, 16.0), Use(("shared",)), (Pass(slot("shared"), ("shared",)),), slot("shared"), merge)


def test_values_are_yaml_and_nested_keys_have_dots(monkeypatch):
    monkeypatch.setitem(METHODS, "merging", MethodEntry("merging", "", "", None, merging))
    chosen = chosen_methods(["merging", "potara"], ["merging.merge.space=knots", "merge.rank=4", "damping.delta=1e-3"])
    assert chosen["merging"][1].merge == Merge(space="knots", rank=4)
    assert chosen["potara"][0]["damping"]["delta"] == 0.001


def test_every_mistake_is_named_at_once():
    found = problems(
        ["potara", "fedit", "fedit", "fedsaa"],
        "rounds_fdit=3",
        "potara.granularty=3",
        "fedsa.rank=3",
        "rank",
        "potara.rank=zero",
        "potara.name=x",
        "name=x",
    )
    assert "method: fedit is named twice" in found
    assert any(one.startswith("method: there is none called 'fedsaa'. Did you mean: fedsa?") for one in found)
    assert "rounds_fdit: unknown key for potara, fedit. Did you mean: rounds_fedit?" in found
    assert "potara.granularty: unknown key for potara. Did you mean: granularity?" in found
    assert "fedsa.rank: fedsa is not among the methods (potara, fedit); add --method fedsa" in found
    assert '"rank": must be key=value or METHOD.key=value, such as rank=4' in found
    assert 'potara.rank: must be a whole number, got "zero"' in found
    assert "potara.name=x: choose the method with --method" in found
    assert any(one.startswith("name: unknown key for potara, fedit.") for one in found)
    assert len(found) == 9


def test_a_value_that_the_method_refuses_is_placed_under_it():
    assert problems(["potara"], "statistics.samples=0") == ("potara.statistics.samples: must be positive, got 0",)
