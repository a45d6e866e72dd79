"""What an alignment costs: how often it goes through the records, what it holds, and what it leaves out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from befit.methods.parts.mosaic.align.features import Paired, Pairs
from befit.methods.parts.mosaic.align.run import align
from befit.methods.parts.mosaic.align.settings import Alignment
from tests.federation import LARGE, SMALL, Families
from tests.unit.methods.parts.mosaic.align.test_run import bases, paired
from tests.unit.methods.parts.mosaic.families import start


@pytest.fixture(scope="module")
def federation() -> Families:
    return start()


def test_one_pass_over_the_records_finds_what_two_find(federation: Families) -> None:
    """A `samples_up` of its own, here above their number, makes a second pass with sums of Z alone."""
    pair, (pivot, initial) = paired(federation), bases(federation)
    once = align(pair, pivot, initial, Alignment(), 0)
    more = align(pair, pivot, initial, Alignment(samples_up=10**6), 0)
    assert once.report.keys() == more.report.keys()
    for site, row in once.report.items():
        assert row == pytest.approx(more.report[site], rel=1e-4, abs=1e-6), site
    for key, value in once.arrays.items():
        torch.testing.assert_close(value, more.arrays[key], rtol=1e-3, atol=1e-4)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many passes began, and the most rows of activations that were alive when a batch was ready."""
    found = {"passes": 0, "alive": 0, "batch": 0, "all": 0}
    original = Paired.batches

    def batches(self: Paired, *settings: int) -> Iterator[Pairs]:
        found["passes"] += 1
        known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        for pairs in original(self, *settings):
            fresh = {id(X): (weakref.ref(X), len(X)) for both in pairs.values() for X in both}
            known.update(fresh)
            rows = sum(count for _, count in fresh.values())
            found["batch"] = max(found["batch"], rows)
            found["all"] += rows
            found["alive"] = max(found["alive"], sum(count for ref, count in known.values() if ref() is not None))
            del fresh
            yield pairs

    monkeypatch.setattr(Paired, "batches", batches)
    return found


@pytest.mark.parametrize(
    ("settings", "passes"),
    [(Alignment(), 1), (Alignment(samples_up=30), 2), (Alignment(method="train", epochs=2), 3)],
    ids=["closed", "fewer for B", "train"],
)
def test_two_batches_of_activations_are_alive_at_most(
    federation: Families, monkeypatch: pytest.MonkeyPatch, settings: Alignment, passes: int
) -> None:
    """The one that was just made and the one before: of 15 batches of four records."""
    pair, (pivot, initial) = paired(federation), bases(federation)
    found = counted(monkeypatch)
    align(pair, pivot, initial, replace(settings, batch_size=4), 0)
    assert found["passes"] == passes
    assert found["alive"] <= 2 * found["batch"] and found["all"] > 6 * found["batch"]


def test_sites_that_read_the_same_tensor_share_its_rows_and_its_products(federation: Families) -> None:
    (found,) = paired(federation).batches(4, 4, 0)
    for side in (0, 1):
        assert found["0.q_proj"][side] is found["0.k_proj"][side] is found["0.v_proj"][side]
        assert found["1.gate_proj"][side] is found["1.up_proj"][side]
        assert len({id(both[side]) for both in found.values()}) == 2 * 4


def test_neither_model_makes_logits_and_none_keeps_a_hook(federation: Families) -> None:
    called: list[str] = []
    models = {key: federation.backbones[key].model for key in (SMALL, LARGE)}
    handles = [
        model.backbone.lm_head.register_forward_pre_hook(lambda *_, key=key: called.append(key))  # type: ignore[union-attr]
        for key, model in models.items()
    ]
    batches = list(paired(federation).batches(8, 4, 0))
    for handle in handles:
        handle.remove()
    assert len(batches) == 2 and not called
    assert not any(layer._forward_pre_hooks for model in models.values() for layer in model.layers.values())
