"""Slots that a method names and its layout lacks: refused before a run, wherever the name stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from befit.adapters.forms import ModuleShape
from befit.adapters.keys import EVERYTHING, factor, slot
from befit.adapters.layout import ModelShapes, lora
from befit.data.registry import build
from befit.methods.parts.recipe.personal import Adopt
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.check import check
from befit.protocol.context import Context
from befit.protocol.method import Use
from befit.protocol.settings import TrainSettings
from befit.train.passes import Pass
from befit.train.terms import L2, Distil, ProductDistance

RECIPE = Recipe(
    layout=lora(2, 4.0, slots=("shared", "personal")),
    passes=(Pass(slot("shared"), ("shared",), name="shared"),),
    share=slot("shared"),
    use=Use(("shared",)),
)
SHAPES = ModelShapes({"block.00.q_proj": ModuleShape(4, 4)})


def errors(method: Recipe) -> list[str]:
    federation = build("digits", None, {"clients": 2})
    families = {client.id: "model" for client in federation.clients}
    context = Context(federation, families, TrainSettings(), {"model": SHAPES})
    return [str(problem) for problem in check(method, context) if problem.severity == "error"]


def guided(term: Any) -> dict[str, Any]:
    return {"passes": (*RECIPE.passes, Pass(slot("personal"), ("personal",), terms=(term,)))}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"use": Use(("shared", "gone"))}, "use"),
        ({"passes": (Pass(slot("shared"), ("gone",), name="first"),)}, "pass first"),
        (guided(L2("personal", "gone", 1.0)), "pass train"),
        (guided(ProductDistance("gone", "shared", 1.0)), "pass train"),
        (guided(Distil("gone")), "pass train"),
        ({"start": ("gone", "personal")}, "start"),
        ({"keep": ("shared", "gone", 1)}, "keep"),
        ({"then": (Adopt("shared", "gone"),)}, "Adopt"),
    ],
)
def test_a_recipe_that_names_a_slot_it_lacks_cannot_be_made(change: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=f"^{place}: no slot 'gone'; there are shared, personal"):
        replace(RECIPE, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"share": slot("shared", "gone")},
        {"share": slot("shared") & ~slot("gone")},
        {"share": slot("gone") | factor("A")},
        {"passes": (Pass(slot("gone"), ("shared",)),)},
    ],
)
def test_a_selector_of_a_slot_that_no_backbone_has_is_refused(change: dict[str, Any]) -> None:
    assert errors(RECIPE) == []
    found = errors(replace(RECIPE, **change))
    assert found and all("no slot 'gone'; there are shared, personal" in text for text in found)


def test_a_selector_knows_the_slots_that_it_names() -> None:
    assert (slot("a", "b") & ~slot("c") | factor("A")).slots == {"a", "b", "c"}
    assert EVERYTHING.slots == frozenset()
    assert slot("a") == replace(slot("a"), slots=frozenset()), "selectors are equal where their text is"


def test_the_slot_that_may_be_meant_is_suggested() -> None:
    with pytest.raises(ValueError, match="Did you mean: shared"):
        RECIPE.layout.slot("shaerd")
