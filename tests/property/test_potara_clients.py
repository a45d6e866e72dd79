"""Properties of Potara's merge at a client, for whatever adapters (Zou et al. 2026, appendix B)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from befit.adapters.keys import join, select, slot, to_slot
from befit.adapters.model import AdaptedModel
from befit.adapters.state import rename
from befit.core.values import Payload, State, Tick
from befit.methods.potara import merged_trace
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.tasks.base import Batch, Examples
from befit.tasks.examples import PaddedExamples
from befit.train.persample import sample_gradients
from tests.tiny import assert_near, make_site, random_state, tiny_model

ROWS = 7
AT = Tick("merge", 1, 1, 0)
MODELS = {kind: AdaptedModel(tiny_model(kind), head=kind != "llama") for kind in ("vit", "bert", "llama")}
KINDS = pytest.mark.parametrize("kind", MODELS)


def parents(site: Site, seed: int = 0, size: float = 0.3) -> tuple[State, State]:
    values = random_state(site.model, seed, size)
    return select(values, slot("shared")), select(values, slot("personal"))


def client(kind: str, **options: Any) -> tuple[Site, Any]:
    """A site whose every example goes into the statistics, and the method."""
    site = make_site(kind, rows=ROWS, model=MODELS[kind])
    method: Any = build_method({"name": "potara", "rank": 2, "statistics": {"samples": ROWS}, **options})
    site.model.install(method.layout, seed=0)
    return site, method


def merge(site: Site, method: Any, fed: State, local: State) -> tuple[State, dict[str, float]]:
    site = replace(site, report={})
    same = {"initial": "the same"}
    kept, reply = finish(
        method.plan()[-1].exchange.client_update(Payload(local, dict(same)), Payload(fed, dict(same)), site, AT)
    )
    assert not reply.arrays
    return select(kept.arrays, slot("merged")), site.report


def on(site: Site, change: Callable[[Examples], Examples]) -> Site:
    """The same client with other examples."""
    return replace(site, examples=lambda split: change(site.examples(split)))


class Reordered:
    """The examples of another set in another order."""

    def __init__(self, source: Examples, order: Tensor) -> None:
        self.source, self.order = source, order

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices: Any) -> Batch:
        return self.source.batch(self.order[torch.as_tensor(indices)])


@KINDS
@given(st.integers(0, 1000), st.sampled_from([0.01, 0.3, 3.0]))
@settings(max_examples=8)
def test_the_weight_is_a_share_whose_bound_is_below_both_parents(kind: str, seed: int, size: float) -> None:
    site, method = client(kind)
    merged, numbers = merge(site, method, *parents(site, seed, size))
    a, b, c = (numbers[f"trace_{name}"] for name in ("fed", "local", "shared"))
    assert 0 <= numbers["w"] <= 1
    assert 0 <= c <= min(a, b)
    assert numbers["trace_merged"] <= min(a, b) * (1 + 1e-9)
    assert numbers["trace_merged"] <= min(merged_trace(a, b, c, w / 100) for w in range(101)) * (1 + 1e-9)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in merged.values())


@KINDS
@given(st.integers(0, 1000))
@settings(max_examples=5)
def test_the_order_of_the_examples_changes_nothing(kind: str, seed: int) -> None:
    site, method = client(kind)
    fed, local = parents(site)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    found = [
        merge(one, method, fed, local)[1]["w"] for one in (site, on(site, lambda source: Reordered(source, order)))
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def padded(source: Examples) -> Examples:
    """The same examples with six more places, which no token of theirs fills."""
    assert isinstance(source, PaddedExamples)
    wider = {
        name: torch.nn.functional.pad(rows, (0, 6), value=-100 if name == "labels" else 0)
        for name, rows in source.sequences.items()
    }
    return Wider(wider, source.lengths, source.columns)


class Wider(PaddedExamples):
    """Batches as wide as the longest of the split."""

    def batch(self, indices: Any) -> Batch:
        rows = torch.as_tensor(indices, dtype=torch.long)
        width = next(iter(self.sequences.values())).shape[1]
        batch = {name: tokens[rows].long() for name, tokens in self.sequences.items()}
        batch["attention_mask"] = (torch.arange(width) < self.lengths[rows, None]).long()
        return batch | {name: column[rows] for name, column in self.columns.items()}


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_more_padding_changes_nothing(kind: str) -> None:
    site, method = client(kind)
    fed, local = parents(site)
    wider = on(site, padded)
    widths = [one.examples("train").batch(range(ROWS))["input_ids"].shape[1] for one in (site, wider)]
    assert widths[1] == widths[0] + 6
    weights = [merge(one, method, fed, local)[1]["w"] for one in (site, wider)]
    assert weights[0] == pytest.approx(weights[1], abs=1e-4)


@KINDS
@pytest.mark.parametrize("scale", [1e-2, 1e2])
def test_a_constant_factor_of_the_loss_changes_nothing_but_under_absolute_damping(kind: str, scale: float) -> None:
    """Gradients times s: F times s^2 and v divided by it; a fixed eps then counts for more or less."""
    weights: dict[str, list[float]] = {}
    for damping, delta in (("relative", 1e-2), ("quantile", 0.2), ("absolute", 1e-3)):
        site, method = client(kind, damping={"kind": damping, "delta": delta})
        fed, local = parents(site)
        plain = site.task.sample_losses

        def scaled(logits: Tensor, batch: Batch, reduction: Any = "mean", plain: Any = plain) -> Tensor:
            return scale * plain(logits, batch, reduction)

        weights[damping] = [merge(site, method, fed, local)[1]["w"]]
        site.task.sample_losses = scaled  # type: ignore[method-assign]
        weights[damping].append(merge(site, method, fed, local)[1]["w"])
    assert weights["relative"][0] == pytest.approx(weights["relative"][1], abs=1e-4)
    assert weights["quantile"][0] == pytest.approx(weights["quantile"][1], abs=1e-4)
    assert abs(weights["absolute"][0] - weights["absolute"][1]) > 5e-4


@KINDS
@given(st.integers(0, 1000))
@settings(max_examples=5)
def test_single_coordinates_without_correlation_are_fisher_merging(kind: str, seed: int) -> None:
    """`(F_f W_f + F_l W_l) / (F_f + F_l)` with one eps on both F (Matena and Raffel 2022)."""
    site, method = client(
        kind, granularity="coordinate", correlation={"estimate": False}, damping={"drop_dead": False, "delta": 1e-3}
    )
    fed, local = parents(site, seed)
    merged, numbers = merge(site, method, fed, local)
    site.model.load({**fed, **local})
    batch = site.examples("train").batch(range(ROWS))
    factors = [key for key in fed if key.endswith(("/A", "/B"))]
    fisher = []
    for name in ("shared", "personal"):
        gradients = sample_gradients(site, batch, name)
        fisher.append({key: gradients[to_slot(key, name)].double().square().mean(0) for key in factors})
    mean = torch.cat([value.flatten() for one in fisher for value in one.values()]).mean()
    for key in factors:
        F_f, F_l = (information[key] + 1e-3 * mean for information in fisher)
        expected = (F_f * fed[key] + F_l * local[to_slot(key, "personal")]) / (F_f + F_l)
        torch.testing.assert_close(merged[to_slot(key, "merged")], expected.float(), rtol=0, atol=1e-5)
    for key in fed.keys() - set(factors):  # no statistics of the head: the client's own weight
        head = torch.lerp(local[to_slot(key, "personal")], fed[key], numbers["w"])
        torch.testing.assert_close(merged[to_slot(key, "merged")], head)


@KINDS
@given(st.integers(0, 1000))
@settings(max_examples=5)
def test_finer_weights_have_smaller_bounds(kind: str, seed: int) -> None:
    """Coordinate <= tensor <= layer and factor <= client, with one damping for all."""
    totals: dict[str, float] = {}
    for granularity in ("client", "factor", "layer", "tensor"):
        site, method = client(kind, granularity=granularity)
        numbers = merge(site, method, *parents(site, seed))[1]
        totals[granularity] = numbers.get("trace_merged_groups", numbers["trace_merged"])
    slack = 1 + 1e-9
    assert totals["tensor"] <= totals["layer"] * slack and totals["tensor"] <= totals["factor"] * slack
    assert max(totals["layer"], totals["factor"]) <= totals["client"] * slack
    assert totals["tensor"] < totals["client"]


@KINDS
@pytest.mark.parametrize("merge_space", ["product", "product-truncated"])
def test_identical_parents_give_their_own_update_in_product_space_too(kind: str, merge_space: str) -> None:
    site, method = client(kind, merge_space=merge_space)
    fed, _ = parents(site)
    merged, numbers = merge(site, method, fed, rename(fed, "personal"))
    assert numbers["degenerate"] == 1.0 and numbers["w"] == 0.5
    for module in site.model.shapes.targets:
        found, wanted = (
            state[join(name, module, "B")].double() @ state[join(name, module, "A")].double()
            for name, state in (("merged", merged), ("shared", fed))
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@KINDS
def test_one_sample_has_no_correlation_and_still_gives_a_weight(kind: str) -> None:
    site, method = client(kind, statistics={"samples": 1})
    _, numbers = merge(site, method, *parents(site))
    a, b = numbers["trace_fed"], numbers["trace_local"]
    assert numbers["samples"] == 1.0 and numbers["trace_shared"] == 0.0
    assert numbers["w"] == pytest.approx(b / (a + b), rel=1e-9)


@KINDS
def test_fewer_examples_than_samples_are_a_warning_with_both_numbers(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    site, method = client(kind, statistics={"samples": 30})
    with caplog.at_level(logging.WARNING):
        merged, numbers = merge(site, method, *parents(site))
    assert "client client-01 has 7 train examples; the statistics use all of them instead of 30" in caplog.text
    assert numbers["samples"] == ROWS
    whole, same = client(kind)
    assert_near(merged, merge(whole, same, *parents(whole))[0])
    caplog.clear()
    merge(whole, same, *parents(whole))
    assert "instead of" not in caplog.text
