"""A model that several clients have is measured once on a client's examples, and another one is another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from befit.adapters.layout import lora
from befit.protocol.method import Deployment
from befit.protocol.serve import ScoresOnOthers
from befit.protocol.site import Site
from tests.tiny import make_site, random_state, tiny_examples


@pytest.fixture
def site() -> Site:
    """A client with two adapters in place, and another with examples in each of two splits."""
    own = make_site("vit", lora(rank=2, alpha=6.0, slots=("one", "two")))
    own.model.load(random_state(own.model, size=1.0))
    examples = {split: tiny_examples("vit", 60, seed) for seed, split in enumerate(("val", "test"))}
    return replace(own, others=lambda split: {"other": examples[split]})


def measured(scores: ScoresOnOthers, site: Site, split: str, *slots: str) -> dict[str, float]:
    with site.model.scoring(*slots):
        return scores.headlines(site, Deployment({}, slots), split, 16)


def test_what_is_kept_is_of_the_same_slots_and_split(site: Site) -> None:
    kept = ScoresOnOthers(always=True)
    cases = [("test", "one"), ("test", "two"), ("val", "two"), ("test", "one", "two")]
    anew = [measured(ScoresOnOthers(always=True), site, *case) for case in cases]
    assert len({found["other"] for found in anew}) == len(cases)
    assert [measured(kept, site, *case) for case in cases] == anew
    assert [measured(kept, site, *case) for case in reversed(cases)] == anew[::-1]
