"""Clients that were away in a stage of one round, which nothing repeats for them."""

from __future__ import annotations

from typing import Any

import pytest

from befit.core.errors import NotTrained
from befit.core.values import Payload, Tick
from befit.protocol.jobs import finish
from befit.protocol.method import run_stages
from befit.protocol.registry import build_method
from tests.tiny import make_site

BASE = {"name": "fedit", "rounds": 1}


@pytest.mark.parametrize(
    ("block", "stage", "told"),
    [
        ({"name": "lora", "rank": 2, "base": BASE}, "budget", "has no base: it was away"),
        ({"name": "adalora", "rank": 2, "base": BASE}, "budget", "has no base: it was away"),
        ({"name": "bayestune", "rank": 2}, "budget", "has no scales of its ranks: it was away"),
        ({"name": "fedl2p", "rank": 2}, "budget", "has no rates of its own: it was away"),
        ({"name": "fedlease", "rank": 2}, "cluster", "has no adapter to be clustered by: it was away"),
        ({"name": "fedlease", "rank": 2}, "federate", "has no adapter to be clustered by: it was away"),
        ({"name": "feddpa", "rank": 2, "variant": "F"}, "local", "has no 'personal' adapter to train on: it was away"),
    ],
)
def test_a_client_that_was_away_fails_by_that_name(block: dict[str, Any], stage: str, told: str) -> None:
    method = build_method(block)
    site = make_site("bert", method.layout)
    stages = {planned.name: planned for planned in run_stages(method)}
    with pytest.raises(NotTrained, match=told):
        finish(stages[stage].exchange.client_update(Payload(), Payload(), site, Tick(stage, 1, 1, 0)))
