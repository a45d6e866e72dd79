"""Potara: both branches, the merge in its spaces, its properties (docs/methods/potara.md), its refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from befit.adapters.keys import EVERYTHING, join, select, slot
from befit.adapters.lowrank import concatenate, inner, truncate
from befit.adapters.state import norm, rename
from befit.core.errors import ConfigError
from befit.core.values import Failure, Payload, State, Tick
from befit.methods.potara import comparison, merge_pair
from befit.protocol.federate import final_download
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from tests.federation import Clients
from tests.tiny import assert_near, assert_same, random_state

MERGE = Tick("merge", 1, 1, 0)
SAMPLES = 6


def potara(**options: Any) -> Any:
    statistics = {"samples": SAMPLES, **options.pop("statistics", {})}
    return build_method({"name": "potara", "rank": 2, "statistics": statistics, **options})


def parents(clients: Clients, seed: int = 1, size: float = 0.3) -> tuple[State, State]:
    values = random_state(clients.model, seed, size)
    return select(values, slot("shared")), select(values, slot("personal"))


def merged_at(clients: Clients, fed: State, local: State) -> tuple[State, dict[str, float]]:
    """The merged slot and the log's numbers of client a, with these two adapters."""
    site = clients.fresh("a")
    exchange = clients.method.plan()[-1].exchange
    same = {"initial": "the same"}
    memory, reply = finish(exchange.client_update(Payload(local, dict(same)), Payload(fed, dict(same)), site, MERGE))
    assert not reply.arrays and not reply.scalars
    return select(memory.arrays, slot("merged")), dict(site.report)


def delta(state: State, slot_name: str, module: str) -> torch.Tensor:
    return state[join(slot_name, module, "B")].double() @ state[join(slot_name, module, "A")].double()


def test_both_branches_are_the_local_and_the_fedit_method_bit_for_bit() -> None:
    both, local, fedit = (
        Clients(m) for m in (potara(), *(build_method({"name": n, "rank": 2}) for n in ("local", "fedit")))
    )
    server = both.run(rounds=3)
    local.run(rounds=3)
    assert_same(server.arrays, fedit.run(rounds=3).arrays)
    for name in "abc":
        alone = {key: t for key, t in local.memory(name).arrays.items() if key.startswith("personal/")}
        assert alone
        assert_same({key: both.memory(name).arrays[key] for key in alone}, alone)


def test_the_whole_run_merges_each_clients_two_adapters_with_its_own_weight() -> None:
    clients = Clients(potara())
    server = clients.run(rounds=3)
    weights = []
    for info in clients.infos:
        memory = clients.memory(info.id)
        w = memory.scalars["w"]
        assert isinstance(w, float) and 0 < w < 1
        fed = server.arrays
        for key, tensor in fed.items():
            local = memory.arrays[key.replace("shared/", "personal/")]
            torch.testing.assert_close(
                memory.arrays[key.replace("shared/", "merged/")], w * tensor + (1 - w) * local, rtol=1e-5, atol=1e-6
            )
        request = final_download(clients.method, server, info, MERGE)
        deployed = clients.engine.deployment(info.id, request, MERGE)
        assert deployed.slots == ("merged",)
        assert_same(deployed.arrays, select(memory.arrays, slot("merged")))
        weights.append(w)
    assert len(set(weights)) == 3
    assert all(not update.payload.arrays for at, update in clients.journal.updates if at.stage != "federate")


SPACES = [("factors", "factors"), ("product", "factors"), ("factors", "product"), ("product", "product-truncated")]


@pytest.mark.parametrize("granularity", ["client", "factor", "layer", "tensor", "coordinate"])
@pytest.mark.parametrize(("estimate_space", "merge_space"), SPACES)
def test_every_valid_combination_runs_and_the_others_are_refused(
    granularity: str, estimate_space: str, merge_space: str
) -> None:
    options = {"granularity": granularity, "estimate_space": estimate_space, "merge_space": merge_space}
    if granularity not in ("client", "layer") and (estimate_space, merge_space) != ("factors", "factors"):
        with pytest.raises(ConfigError, match=f"granularity: '{granularity}'.*client or layer"):
            potara(**options)
        return
    clients = Clients(potara(**options))
    fed, local = parents(clients)
    merged, numbers = merged_at(clients, fed, local)
    assert {key: tuple(t.shape) for key, t in merged.items()} == {
        key: spec.shape for key, spec in clients.model.specs.items() if key.startswith("merged/")
    }
    assert 0 <= numbers["w"] <= 1 and numbers["samples"] == SAMPLES
    assert numbers["trace_merged"] <= min(numbers["trace_fed"], numbers["trace_local"])
    if "trace_merged_groups" in numbers:
        assert numbers["trace_merged_groups"] <= numbers["trace_merged"] * (1 + 1e-12)


@pytest.mark.parametrize("granularity", ["client", "factor", "layer", "tensor", "coordinate"])
def test_identical_adapters_come_back_bit_for_bit_and_are_flagged(granularity: str) -> None:
    clients = Clients(potara(granularity=granularity))
    fed, _ = parents(clients)
    merged, numbers = merged_at(clients, fed, rename(fed, "personal"))
    assert_same(merged, rename(fed, "merged"))
    assert numbers["degenerate"] == 1.0 and numbers["w"] == 0.5
    assert numbers.get("product_gap", 0.0) == 0.0  # logged for one weight per client only


def test_adapters_with_B_zero_merge_to_finite_numbers() -> None:
    clients = Clients(potara())
    fed, local = (select(clients.initial, slot(name)) for name in ("shared", "personal"))
    local = {key: tensor + 0.1 if key.endswith("q_proj/B") else tensor for key, tensor in local.items()}
    merged, numbers = merged_at(clients, fed, local)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in merged.values())
    assert all(math.isfinite(value) for value in numbers.values())


def test_swapping_the_two_adapters_gives_the_other_share() -> None:
    clients = Clients(potara())
    fed, local = parents(clients)
    merged, there = merged_at(clients, fed, local)
    swapped, back = merged_at(clients, rename(local, "shared"), rename(fed, "personal"))
    assert there["w"] + back["w"] == pytest.approx(1.0, abs=1e-9)
    assert abs(there["w"] - 0.5) > 1e-3
    assert_near(merged, swapped)


def rescaled(state: State, t: float) -> State:
    """The same model in another gauge: (A / t, t B)."""
    return {key: x / t if key.endswith("/A") else x * t if key.endswith("/B") else x for key, x in state.items()}


@pytest.mark.parametrize("merge_space", ["product", "product-truncated"])
def test_the_product_space_does_not_see_the_gauge_of_an_adapter(merge_space: str) -> None:
    clients = Clients(potara(estimate_space="product", merge_space=merge_space))
    fed, local = parents(clients)
    merged, numbers = merged_at(clients, fed, local)
    other, numbers_other = merged_at(clients, rescaled(fed, 8.0), local)
    assert numbers_other["w"] == pytest.approx(numbers["w"], rel=1e-6)
    assert numbers_other["norm_ratio_A"] == pytest.approx(numbers["norm_ratio_A"] / 8)
    for module in clients.model.shapes.targets:
        torch.testing.assert_close(
            delta(other, "merged", module), delta(merged, "merged", module), rtol=1e-4, atol=1e-6
        )
    factors = Clients(potara())
    weights = [merged_at(factors, one, local)[1]["w"] for one in (fed, rescaled(fed, 8.0))]
    assert abs(weights[0] - weights[1]) > 0.05  # the factor space does, as documented


def test_the_statistics_take_the_split_that_is_asked_for() -> None:
    found = []
    for split in ("train", "val"):
        clients = Clients(potara(statistics={"split": split}))
        found.append(merged_at(clients, *parents(clients))[1]["w"])
    assert found[0] != found[1]


def test_the_weight_is_logged_for_three_sizes_of_relative_damping() -> None:
    clients = Clients(potara())
    fed, local = parents(clients)
    numbers = merged_at(clients, fed, local)[1]
    assert numbers["w_at_delta_1e-04"] == numbers["w"]
    for delta_ in (1e-5, 1e-3):
        other = Clients(potara(damping={"delta": delta_}))
        assert merged_at(other, fed, local)[1]["w"] == numbers[f"w_at_delta_{delta_:.0e}"]


def two_sides() -> tuple[Clients, State, State]:
    clients = Clients(potara())
    return clients, *parents(clients)


@pytest.mark.parametrize("w", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_product_of_merged_factors_differs_from_the_merged_product_by_the_known_term(w: float) -> None:
    """B_m A_m = w B_f A_f + (1-w) B_l A_l - w (1-w) (B_f - B_l)(A_f - A_l)."""
    clients, fed, local = two_sides()
    merged = merge_pair(fed, local, {"": w}, "factors")
    gap = size = 0.0
    for module in clients.model.shapes.targets:
        A, B = ((fed[join("shared", module, part)] - local[join("personal", module, part)]).double() for part in "AB")
        product = w * delta(fed, "shared", module) + (1 - w) * delta(local, "personal", module)
        torch.testing.assert_close(delta(merged, "merged", module), product - w * (1 - w) * B @ A, rtol=0, atol=1e-6)
        gap, size = gap + float((w * (1 - w) * B @ A).square().sum()), size + float(product.square().sum())
    assert comparison(fed, local, w)["product_gap"] == pytest.approx((gap / size) ** 0.5, rel=1e-6, abs=1e-12)


def test_the_ratios_of_norms_are_over_all_modules_and_of_the_extreme_ones() -> None:
    """A: 5 / 10 and 12 / 4, in all 13 / sqrt(116). B: 0 / 0 counts as equal, 2 / 0 as a number beyond all others."""
    fed = {"one/A": [[3.0, 4.0]], "one/B": [[0.0]], "two/A": [[0.0, 12.0]], "two/B": [[2.0]]}
    local = {"one/A": [[6.0, 8.0]], "one/B": [[0.0]], "two/A": [[4.0, 0.0]], "two/B": [[0.0]]}
    sides = [
        {f"{name}/{key}": torch.tensor(value) for key, value in arrays.items()}
        for name, arrays in (("shared", fed), ("personal", local))
    ]
    found = comparison(sides[0], sides[1], 0.5)
    assert (found["norm_ratio_A_min"], found["norm_ratio_A_max"]) == pytest.approx((0.5, 3.0))
    assert found["norm_ratio_A"] == pytest.approx(13 / math.sqrt(116))
    assert (found["norm_ratio_B_min"], found["norm_ratio_B_max"], found["norm_ratio_B"]) == (1.0, 1e30, 1e30)
    nothing = {key: torch.zeros_like(value) for key, value in sides[0].items()}
    same = {key.replace("shared", "personal"): value for key, value in nothing.items()}
    assert comparison(nothing, same, 0.5)["product_gap"] == 0


@pytest.mark.parametrize("w", [0.0, 0.3, 1.0])
def test_the_product_merge_holds_both_updates_exactly_and_its_truncation_the_best_of_its_rank(w: float) -> None:
    clients, fed, local = two_sides()
    exact, short = (merge_pair(fed, local, {"": w}, space) for space in ("product", "product-truncated"))
    for module in clients.model.shapes.targets:
        wanted = w * delta(fed, "shared", module) + (1 - w) * delta(local, "personal", module)
        assert exact[join("merged", module, "A")].shape[0] == 4
        torch.testing.assert_close(delta(exact, "merged", module), wanted, rtol=0, atol=1e-6)
        u, s, vh = torch.linalg.svd(wanted)
        best = u[:, :2] @ torch.diag(s[:2]) @ vh[:2]
        torch.testing.assert_close(delta(short, "merged", module), best, rtol=0, atol=1e-6)
        A, B = (short[join("merged", module, part)].double() for part in "AB")
        torch.testing.assert_close(B.T @ B, A @ A.T, rtol=1e-4, atol=1e-5)  # balanced
    for merged in (exact, short):
        head = "shared/classifier/weight"
        torch.testing.assert_close(
            merged["merged/classifier/weight"], w * fed[head] + (1 - w) * local["personal/classifier/weight"]
        )


def test_with_a_common_A_merging_factors_is_merging_products() -> None:
    clients, fed, local = two_sides()
    local = {key: fed[key.replace("personal/", "shared/")] if key.endswith("/A") else t for key, t in local.items()}
    factors, products = (merge_pair(fed, local, {"": 0.3}, space) for space in ("factors", "product"))
    for module in clients.model.shapes.targets:
        torch.testing.assert_close(
            delta(factors, "merged", module), delta(products, "merged", module), rtol=0, atol=1e-6
        )


def test_the_ends_of_the_segment_are_the_parents_bit_for_bit() -> None:
    _, fed, local = two_sides()
    assert_same(merge_pair(fed, local, {"": 1.0}, "factors"), rename(fed, "merged"))
    assert_same(merge_pair(fed, local, {"": 0.0}, "factors"), rename(local, "merged"))


def test_weights_go_to_the_keys_they_were_computed_for() -> None:
    """The module's own where there is one, the client's for heads; single coordinates where they are tensors."""
    _, fed, local = two_sides()
    coordinates = torch.linspace(0, 1, fed["shared/block.01.v_proj/B"].numel(), dtype=torch.float64)
    merged = merge_pair(fed, local, {"": 0.5, "block.00.q_proj/A": 1.0, "block.01.v_proj/B": coordinates}, "factors")
    assert torch.equal(merged["merged/block.00.q_proj/A"], fed["shared/block.00.q_proj/A"])
    mine, other = fed["shared/block.01.v_proj/B"], local["personal/block.01.v_proj/B"]
    w = coordinates.view_as(mine).float()
    torch.testing.assert_close(merged["merged/block.01.v_proj/B"], w * mine + (1 - w) * other)
    for key in ("block.00.q_proj/B", "classifier/weight", "classifier/bias"):
        torch.testing.assert_close(merged[f"merged/{key}"], (fed[f"shared/{key}"] + local[f"personal/{key}"]) / 2)


def test_low_rank_arithmetic_agrees_with_dense() -> None:
    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(7, r, generator=draw), torch.randn(r, 5, generator=draw)) for r in (2, 3)]
    dense = [(B @ A).double() for B, A in pairs]
    assert inner(pairs[0], pairs[1]) == pytest.approx(float((dense[0] * dense[1]).sum()), rel=1e-5)
    B, A = concatenate(pairs[0], pairs[1], 0.3)
    torch.testing.assert_close((B @ A).double(), 0.3 * dense[0] + 0.7 * dense[1], rtol=1e-5, atol=1e-5)
    assert norm({"s/m/A": dense[0]}) == pytest.approx(inner(pairs[0], pairs[0]) ** 0.5, rel=1e-6)
    again = truncate((B, A), 5)
    torch.testing.assert_close(again[0] @ again[1], B @ A, rtol=1e-5, atol=1e-5)
    wide = truncate((B, A), 9)  # a rank above the width of the module, which has 5
    assert (wide[0].shape, wide[1].shape) == ((7, 9), (9, 5))
    torch.testing.assert_close(wide[0] @ wide[1], B @ A, rtol=1e-5, atol=1e-5)
    nothing = truncate((torch.zeros(7, 2), A[:2]), 1)
    assert not bool(torch.cat([part.flatten() for part in nothing]).any())


@pytest.mark.parametrize("tampered", ["client", "server"])
def test_adapters_of_different_initial_values_are_refused_by_the_name_of_the_client(tampered: str) -> None:
    clients = Clients(potara())
    server = clients.run(rounds=1)
    exchange = clients.method.plan()[-1].exchange
    memory = clients.memory("b")
    if tampered == "client":
        start = {"initial": "rank=8; initial values=0123456789abcdef"}
        clients.store.save("b", Payload(memory.arrays, {**memory.scalars, **start}))
    else:
        server = Payload(server.arrays, {**server.scalars, "initial": "rank=8; initial values=0123456789abcdef"})
    requests = {"b": exchange.dispatch(server, clients.infos[1], MERGE)}
    (reply,) = list(clients.engine.exchange(requests, MERGE))
    assert isinstance(reply, Failure)
    assert reply.client == "b" and reply.kind == "IncompatibleAdapters"
    assert "client b" in reply.reason and "initial values" in reply.reason and "0123456789ab" in reply.reason


def test_a_local_branch_of_another_seed_is_refused() -> None:
    """The real thing: the second branch starts on a model that was installed with another seed."""
    clients = Clients(potara())
    *_, merging = clients.method.plan()
    at = Tick("local", 1, 1, 0)
    list(clients.engine.exchange({"a": Payload()}, at))
    other = Clients(potara(), seed=1)
    server = other.method.server_init(other.server_site)
    (reply,) = list(clients.engine.exchange({"a": merging.exchange.dispatch(server, clients.infos[0], MERGE)}, MERGE))
    assert isinstance(reply, Failure) and reply.kind == "IncompatibleAdapters"
    same = clients.method.server_init(clients.server_site)
    (reply,) = list(clients.engine.exchange({"a": merging.exchange.dispatch(same, clients.infos[0], MERGE)}, MERGE))
    assert not isinstance(reply, Failure)


def test_a_gradient_that_is_no_number_stops_that_client_by_name_and_no_other() -> None:
    """Client b's validation images are broken; statistics on them must not turn into a weight."""
    clients = Clients(potara(statistics={"split": "val"}))
    clients.sites["b"].examples("val").columns["pixel_values"].fill_(float("nan"))  # type: ignore[attr-defined]
    clients.run(rounds=1, min_replies=0.5)
    failure, unscored = clients.journal.failures
    assert (unscored.client, unscored.kind) == ("b", "NotTrained")  # and it does not pass for a merged one afterwards
    assert (failure.client, failure.stage, failure.kind) == ("b", "merge", "FloatingPointError")
    assert "not finite" in failure.reason
    assert "w" not in clients.memory("b").scalars
    assert all("w" in clients.memory(name).scalars for name in "ac")


def test_merging_changes_neither_parent() -> None:
    clients = Clients(potara())
    fed, local = parents(clients)
    before = {**fed, **local}
    copies = {key: tensor.clone() for key, tensor in before.items()}
    merged_at(clients, fed, local)
    assert_same(before, copies)
    assert_same(select(clients.model.dump(EVERYTHING), slot("shared", "personal")), copies)
