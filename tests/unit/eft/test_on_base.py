"""Whoever personalises a base looks, searches and trains on top of it in every stage (fedp2eft.md, section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import assert_near
from tests.unit.methods.federation import Clients

from befit.adapters.keys import join
from befit.families import part
from befit.method import Method
from befit.methods.adalora import AdaLora
from befit.methods.bayestune import BayesTune
from befit.methods.fedp2eft import FedP2EFT
from befit.methods.lora import Lora

BASE = {"name": "fedit", "rank": 2}
# Nobody has to choose: with ranks to drop, the rounding of a merge could decide which.
WAYS: dict[str, tuple[Callable[..., Method], dict[str, Any]]] = {
    "fedp2eft": (FedP2EFT, {"rank": 4, "rank_max": 2}),
    "bayestune": (BayesTune, {"rank": 4, "rank_max": 2}),
    "lora": (Lora, {"rank": 2}),
    "adalora": (AdaLora, {"rank": 2, "init_rank": 2}),
}


def merge_base(clients: Clients, into: Clients) -> None:
    """Add `scale B A` of what the clients fixed to the dense weights of another federation's backbone."""
    fixed, scale = part(clients.memory("a"), "fixed").arrays, clients.model.layout.slot("shared").scale
    for name, layer in into.model.layers.items():
        A, B = (fixed[join("shared", name, factor)] for factor in ("A", "B"))
        assert float(B.abs().max()) > 0.01  # a base that says something
        with torch.no_grad():
            layer.weight.add_(scale * B @ A)


def personal_reports(clients: Clients) -> dict[tuple[str, int, str], dict[str, float]]:
    """What clients reported of their own stages, those of the base left out."""
    own = ("generate", "scales", "search", "budget")
    return {(at.stage, at.round, u.client.id): u.report for at, u in clients.notes.updates if at.stage in own}


@pytest.mark.parametrize("way", WAYS)
def test_personalising_a_base_is_personalising_a_backbone_into_which_it_is_merged(way: str) -> None:
    """Features, scales, generator, losses and adapters of all rounds, within what the merge's rounding changes."""
    make, arguments = WAYS[way]
    on_base, merged = (Clients(make(**arguments, **more), kind="llama") for more in ({"base": BASE}, {}))
    server = on_base.run(cohort=1)  # so that some are first seen when their scales are predicted
    merge_base(on_base, into=merged)
    expected_server = merged.run(cohort=1)
    assert not any(one.notes.failures for one in (on_base, merged))
    assert_near({key: server.arrays[key] for key in expected_server.arrays}, expected_server.arrays, 1e-3, 1e-6)
    for client in "abc":
        found, expected = (one.memory(client).arrays for one in (on_base, merged))
        assert_near({key: found[key] for key in expected}, expected, rtol=1e-2, atol=1e-4)
    reports, expected_reports = personal_reports(on_base), personal_reports(merged)
    assert reports.keys() == expected_reports.keys()
    for key, report in expected_reports.items():
        # Scales that are still all but equal differ by little more than their rounding.
        assert reports[key] == pytest.approx(report, rel=1e-3, abs=1e-6), key
