"""`Merge` in a federation: what its options mean, which combinations it refuses, and what it says of bad updates."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.schema import check_values, parameters_of
from befit.core.values import ClientInfo, Payload, State, Update
from befit.merge.clients import counts_of
from befit.merge.merge import Merge, MergeContext
from befit.merge.rules import Elementwise, Isotropic
from befit.merge.spaces import Delta, Knots, ModuleUpdates, merge_updates
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import METHODS, check_method, register
from befit.train.passes import Pass
from tests.unit.merge.oracle import random_updates


def update(client: str, arrays: State, examples: int = 1) -> Update:
    return Update(ClientInfo(client, "m", examples), Payload(arrays))


def federation(ranks: tuple[int, ...] = (2, 2, 2), seed: int = 0) -> list[Update]:
    """Clients of 1, 2, 3, ... examples, with one module and a head."""
    return [
        update(f"c{k}", {"s/m/A": A.float(), "s/m/B": B.float(), "s/head/bias": torch.full((4,), float(k))}, k + 1)
        for k, (B, A, _) in enumerate(random_updates(ranks, seed=seed))
    ]


def product(state: State) -> Tensor:
    return state["s/m/B"].double() @ state["s/m/A"].double()


def mean_product(updates: list[Update], weights: list[float]) -> Tensor:
    parts = [w * product(one.payload.arrays) for one, w in zip(updates, weights, strict=True)]
    return torch.stack(parts).sum(0) / sum(weights)


@pytest.mark.parametrize("space", ["factors", "knots", "delta"])
@pytest.mark.parametrize("rule", ["mean", "ties", "dare", "iso-c", "magnitude", "task-arithmetic"])
def test_heads_are_averaged_whatever_the_rule(space: Any, rule: Any) -> None:
    """(1*0 + 2*1 + 3*2) / 6 = 4/3."""
    merged = Merge(space=space, rule=rule)(federation())
    torch.testing.assert_close(merged["s/head/bias"], torch.full((4,), 4 / 3))
    assert merged.keys() == {"s/m/A", "s/m/B", "s/head/bias"}
    assert merged["s/m/A"].shape == (2, 11) and merged["s/m/A"].dtype == torch.float32


def test_the_mean_in_factors_is_not_the_mean_of_products_and_in_knots_it_is() -> None:
    updates = federation()
    expected = mean_product(updates, [1, 2, 3])
    factors = product(Merge()(updates))
    whole = product(Merge(space="knots", rank=6)(updates))
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    assert float((factors - expected).norm() / expected.norm()) > 0.3


def test_a_rank_of_its_own_pads_or_truncates() -> None:
    updates = federation((1, 3, 2))
    assert Merge(space="delta")(updates)["s/m/A"].shape == (3, 11)  # the largest
    assert Merge(space="delta", rank=1)(updates)["s/m/B"].shape == (13, 1)
    padded = Merge(space="delta", rank=8)(updates)
    assert not bool(padded["s/m/B"][:, 6:].any()) and bool(padded["s/m/A"][6:].any())


def test_scales_of_clients_enter_once_and_that_of_the_result_is_divided_out_once() -> None:
    updates = federation((1, 3, 2))
    context = MergeContext(scales={"c0": 4.0, "c1": 0.5, "c2": 1.0}, scale=2.0)
    merged = Merge("uniform", space="knots", rank=6)(updates, context)
    expected = mean_product(updates, [4.0, 0.5, 1.0]) * 5.5 / 3
    torch.testing.assert_close(2.0 * product(merged), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["mean", "ties"])
def test_in_factors_a_client_of_another_scale_counts_by_its_product(rule: Any) -> None:
    """Client 0 at scale 4 with B is client 0 at scale 1 with 4 B."""
    updates = federation()
    own = updates[0].payload.arrays
    moved = [update("c0", {**own, "s/m/B": own["s/m/B"] / 4}), *updates[1:]]
    merge = Merge("uniform", rule=rule)
    found = merge(moved, MergeContext(scales={"c0": 4.0}))
    torch.testing.assert_close(found, merge(updates))


@pytest.mark.parametrize("rule", ["mean", "task-arithmetic", "ties", "iso-c"])
def test_the_scale_in_factors_is_on_b_alone(rule: Any) -> None:
    once, twice = Merge(rule=rule)(federation()), Merge(rule=rule, scale=2.0)(federation())
    assert torch.equal(once["s/m/A"], twice["s/m/A"])
    torch.testing.assert_close(twice["s/m/B"], 2 * once["s/m/B"])
    assert torch.equal(once["s/head/bias"], twice["s/head/bias"])


def test_task_arithmetic_is_the_sum_for_uniform_weights() -> None:
    updates = federation()
    found = Merge("uniform", rule="task-arithmetic")(updates)
    torch.testing.assert_close(found["s/m/A"], torch.stack([u.payload.arrays["s/m/A"] for u in updates]).sum(0))
    whole = Merge("uniform", rule="task-arithmetic", space="delta", rank=6)(updates)
    torch.testing.assert_close(product(whole), 3 * mean_product(updates, [1, 1, 1]), rtol=1e-5, atol=1e-5)


def test_rules_on_changes_since_the_start_of_the_round_add_the_start_again() -> None:
    updates = federation()
    start = {key: torch.full_like(value, 100.0) for key, value in updates[0].payload.arrays.items()}
    shifted = [update(u.client.id, {k: v + start[k] for k, v in u.payload.arrays.items()}) for u in updates]
    for rule in ("ties", "task-arithmetic", "dare", "iso-c"):
        merge = Merge("uniform", rule=rule, delta_reference="round_start")  # type: ignore[arg-type]
        found, plain = merge(shifted, MergeContext(start=start)), Merge("uniform", rule=rule)(updates)  # type: ignore[arg-type]
        torch.testing.assert_close(found["s/m/A"] - start["s/m/A"], plain["s/m/A"], rtol=0, atol=2e-4)
    with pytest.raises(PayloadMismatch, match="keys, first 's/m/A'"):
        Merge(rule="task-arithmetic", delta_reference="round_start")(updates)


def test_dare_depends_on_seed_round_and_client_and_repeats() -> None:
    merge, updates = Merge(rule="dare", density=0.5), federation()
    found = [merge(updates, MergeContext(seed=s, round=r))["s/m/A"] for s, r in ((0, 1), (0, 1), (0, 2), (1, 1))]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[0], found[3])
    renamed = [update(f"x{u.client.id}", u.payload.arrays, u.client.num_examples) for u in updates]
    assert not torch.equal(merge(renamed, MergeContext(seed=0, round=1))["s/m/A"], found[0])


def test_where_nobody_learnt_anything_the_present_a_is_kept() -> None:
    updates = [update(f"c{k}", {"s/m/A": torch.randn(2, 5), "s/m/B": torch.zeros(4, 2)}) for k in range(3)]
    start = {"s/m/A": torch.arange(10.0).view(2, 5), "s/m/B": torch.zeros(4, 2)}
    for rule in ("mean", "ties", "iso-c"):
        found = Merge(space="knots", rule=rule)(updates, MergeContext(start=start))  # type: ignore[arg-type]
        assert torch.equal(found["s/m/A"], start["s/m/A"]) and not bool(found["s/m/B"].any())


def test_rules_work_on_a_share_of_one_factor_in_factors_only() -> None:
    updates = [update(f"c{k}", {"s/m/A": torch.full((2, 3), 1.0 + k)}) for k in range(2)]
    assert torch.equal(Merge(rule="ties", density=1.0)(updates)["s/m/A"], torch.full((2, 3), 1.5))
    with pytest.raises(PayloadMismatch, match=r"'s/m/B' is missing.*both factors"):
        Merge(space="knots")(updates)


def test_ranks_that_differ_are_refused_in_factors() -> None:
    for rule in ("mean", "ties"):
        with pytest.raises(PayloadMismatch, match="s/m/A"):
            Merge(rule=rule)(federation((2, 3)))  # type: ignore[arg-type]


def test_modules_and_widths_that_differ_are_named_with_their_client() -> None:
    first = {"s/m/A": torch.ones(2, 5), "s/m/B": torch.ones(4, 2)}
    wide = {"s/m/A": torch.ones(2, 6), "s/m/B": torch.ones(4, 2)}
    torn = {"s/m/A": torch.ones(2, 5), "s/m/B": torch.ones(4, 3)}
    for other in (wide, torn):
        with pytest.raises(PayloadMismatch, match="client b: s/m has A"):
            Merge(space="knots")([update("a", first), update("b", other)])
    more = {**first, "s/n/A": torch.ones(2, 5), "s/n/B": torch.ones(4, 2)}
    with pytest.raises(PayloadMismatch, match="client b: 's/n/A'"):
        Merge(space="delta")([update("a", first), update("b", more)])


def test_clients_without_examples_cannot_be_weighed_by_them() -> None:
    updates = [update("a", {"s/m/A": torch.ones(1, 1)}, 0)]
    for rule in ("mean", "ties"):
        with pytest.raises(PayloadMismatch, match="positive sum"):
            Merge(rule=rule)(updates)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0.5}, "density: .*the rule is mean"),
        ({"rule": "ties", "density": 0.0}, "density: must be above 0"),
        ({"rule": "dare", "density": float("nan")}, "density: must be finite"),
        ({"rule": "dare", "trim_scope": "global"}, "trim_scope: .*the rule is dare"),
        ({"rule": "iso-c", "zero_sign": "majority"}, "zero_sign: .*the rule is iso-c"),
        ({"rule": "ties", "iso_mean": "full"}, "iso_mean: .*the rule is ties"),
        ({"space": "factors", "rank": 4}, "rank: .*the space is factors"),
        ({"space": "knots", "rank": 0}, "rank: must be positive"),
        ({"split": "B"}, "split: .*the space is factors"),
        ({"space": "delta", "knots_input": "v"}, "knots_input: .*the space is delta"),
        ({"space": "knots", "delta_reference": "round_start"}, "delta_reference: .*the space is knots"),
        ({"scale": -1.0}, "scale: must be 0 or more"),
        ({"scale": float("inf")}, "scale: must be finite"),
        ({"tolerance": 1e-3}, "tolerance: factors are decomposed by the rule iso-c only, and the rule is mean"),
        ({"space": "knots", "tolerance": 1.0}, "tolerance: must be at least 0"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Merge(**options)


@pytest.mark.parametrize("space", ["knots", "delta"])
def test_ranks_below_the_tolerance_start_afresh(space: Any) -> None:
    """Of singular values 4 and 0.04 the second is 1 % of the first: at 0.1 its rank is zero in B."""
    arrays = {"s/m/A": torch.eye(2, 5), "s/m/B": torch.tensor([[4.0, 0.0], [0.0, 0.04], [0.0, 0.0]])}
    updates = [update("a", arrays), update("b", arrays)]
    for tolerance, ranks in ((None, 2), (1e-3, 2), (0.1, 1)):
        merged = Merge(space=space, tolerance=tolerance)(updates)
        assert int((merged["s/m/B"].norm(dim=0) > 1e-6).sum()) == ranks


@pytest.mark.parametrize(
    "options",
    [
        {"space": "knots", "rule": "ties", "density": 1.0},
        {"space": "knots", "rule": "iso-c", "knots_input": "v"},
        {"space": "delta", "rule": "iso-c"},
    ],
)
def test_directions_below_the_tolerance_are_not_merged(options: dict[str, Any]) -> None:
    """The same two singular values, in the whole update before anything is cut."""
    arrays = {"s/m/A": torch.eye(2, 5), "s/m/B": torch.tensor([[4.0, 0.0], [0.0, 0.04], [0.0, 0.0]])}
    for tolerance, directions in ((None, 2), (0.1, 1)):
        merge = Merge(tolerance=tolerance, **options)
        [(_, (B, A))] = merge.updates_of([update("a", arrays), update("b", arrays)])
        assert int((torch.linalg.svdvals(B.double() @ A.double()) > 1e-6).sum()) == directions


def test_all_mistakes_are_named_at_once_with_their_path_in_a_configuration() -> None:
    def method(merge: Merge = Merge()) -> None:  # noqa: B008
        """A method with a merge."""

    for merge in ({"density": 2.0, "scale": -1.0}, {"density": 0.3, "rank": 3}):
        _, problems = check_values(parameters_of(method), {"merge": merge}, "method.")
        assert [problem.split(":")[0] for problem in problems] == [f"method.merge.{key}" for key in merge]
    values, problems = check_values(
        parameters_of(method), {"merge": {"space": "knots", "rule": "ties", "density": 0.3}}, "method."
    )
    assert not problems and values["merge"] == Merge(space="knots", rule="ties", density=0.3)


def test_every_option_is_described() -> None:
    described = {parameter.name: parameter.description for parameter in parameters_of(Merge)}
    assert all(described[option.name] for option in fields(Merge))


def test_a_registered_method_takes_a_merge_from_yaml() -> None:
    try:

        @register("a-test-of-merges")
        def method(merge: Merge = Merge()) -> Recipe:  # noqa: B008
            """A method with a merge."""
            return Recipe(lora(2, 4.0), Use(("shared",)), (Pass(slot("shared"), ("shared",)),), slot("shared"), merge)

        resolved, built, problems = check_method({"name": "a-test-of-merges", "merge": {"rule": "ties"}})
        assert not problems and isinstance(built, Recipe)
        assert built.merge == Merge(rule="ties") and resolved["merge"]["rule"] == "ties"
    finally:
        METHODS.pop("a-test-of-merges", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("space", [Knots(), Delta()])
@pytest.mark.parametrize("rule", [Elementwise(), Isotropic()])
def test_updates_that_are_not_finite_are_refused_by_module_and_number(value: float, space: Any, rule: Any) -> None:
    good, bad = (torch.ones(4, 2), torch.ones(2, 3)), (torch.ones(4, 2), torch.full((2, 3), value))
    module = ModuleUpdates("block.00.q_proj", [good, bad], [1.0, 1.0])
    with pytest.raises(PayloadMismatch, match=r"block.00.q_proj: update 1 has numbers that are not finite"):
        list(merge_updates(lambda: [module], space, rule, [1.0, 1.0], lambda *_: torch.Generator()))


@pytest.mark.parametrize("option", [{"iso_mean": "foo"}, {"knots_input": "x"}, {"split": "Q"}, {"density": "all"}])
def test_python_may_not_give_a_value_that_a_configuration_may_not(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        Merge(space="knots", rule="ties", **option)


def test_clients_count_by_their_examples_or_all_the_same() -> None:
    assert (counts_of(federation(), "examples"), counts_of(federation(), "uniform")) == ([1, 2, 3], [1, 1, 1])


@pytest.mark.parametrize("examples", [(0, 0), (3, -1)])
def test_examples_that_are_no_weights_are_refused(examples: tuple[int, int]) -> None:
    updates = [update(f"c{place}", {}, count) for place, count in enumerate(examples)]
    with pytest.raises(PayloadMismatch, match="non-negative with a positive sum"):
        counts_of(updates, "examples")
