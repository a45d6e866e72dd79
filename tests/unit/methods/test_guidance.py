"""Guidance, server optimisers, FedProx and SCAFFOLD: what their formulas imply (pages of docs/methods)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor

from befit.adapters.keys import select, slot, split, to_slot
from befit.adapters.layout import lora
from befit.adapters.lowrank import align, factor_cosine, product_cosine, subspace_alignment
from befit.adapters.state import add, scale
from befit.core.errors import ConfigError
from befit.core.values import Payload, State, Tick
from befit.merge.merge import Merge
from befit.merge.server_opt import ServerOptimiser
from befit.methods.fedit import fedit
from befit.methods.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from befit.methods.fedprox import fedprox
from befit.methods.guidance import guidance
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.scaffold import CONTROL, Scaffold
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.train.blend import Blend
from befit.train.terms import L2, Distil, ProductDistance
from tests.federation import Clients
from tests.tiny import federated, make_site, random_state

SMALL = {"rank": 2, "alpha": 4.0}
LATER = Tick("federate", 2, 3, 0)


def personal(clients: Clients) -> dict[str, State]:
    return {name: select(clients.memory(name).arrays, slot("personal")) for name in clients.sites}


def equal(first: dict[str, State], second: dict[str, State]) -> bool:
    return all(torch.equal(first[c][key], second[c][key]) for c in first for key in first[c])


def two_slots(kind: str) -> Site:
    site = make_site(kind, lora(2, 6.0, slots=("shared", "personal")))
    site.model.load(random_state(site.model))
    return site


def pairs(site: Site, name: str) -> list[tuple[Tensor, Tensor]]:
    state = site.model.dump(slot(name))
    return [(state[f"{name}/{module}/B"], state[f"{name}/{module}/A"]) for module in site.model.shapes.targets]


# what clients do


@pytest.mark.parametrize("guide", ["parametric", "function"])
def test_without_strength_guidance_is_plain_training_bit_for_bit(guide: str) -> None:
    guided, own = Clients(guidance(**SMALL, guide=guide, beta=0.0)), Clients(guidance(**SMALL, guide="own"))  # type: ignore[arg-type]
    guided.run(3)
    own.run(3)
    assert equal(personal(guided), personal(own))


@pytest.mark.parametrize("guide", ["parametric", "function"])
def test_guidance_begins_in_the_second_round_and_then_changes_the_outcome(guide: str) -> None:
    runs = {}
    for rounds in (1, 2):
        guided, own = Clients(guidance(**SMALL, guide=guide, beta=0.5)), Clients(guidance(**SMALL, guide="own"))  # type: ignore[arg-type]
        guided.run(rounds)
        own.run(rounds)
        runs[rounds] = equal(personal(guided), personal(own))
    assert runs == {1: True, 2: False}


def test_a_hard_start_is_fedit_whose_clients_keep_what_they_trained_last() -> None:
    hard, plain = Clients(guidance(**SMALL)), Clients(fedit(**SMALL))
    server, other = hard.run(3), plain.run(3)
    assert all(torch.equal(server.arrays[key], other.arrays[key]) for key in other.arrays)
    for name, sent in plain.uploads(3).items():
        assert all(
            torch.equal(hard.memory(name).arrays[to_slot(key, "personal")], value) for key, value in sent.items()
        )


def test_the_strength_is_beta_times_the_similarity_and_nothing_in_the_first_round() -> None:
    site = two_slots("vit")
    assert Blend(0.3).strength(site, replace(LATER, round=1)) == 0
    assert Blend(0.3).strength(site, LATER) == 0.3
    own, other = site.model.dump(slot("personal")), site.model.dump(slot("shared"))
    factors = [key for key in own if split(key)[2] in ("A", "B")]
    a = torch.cat([own[key].flatten() for key in factors])
    b = torch.cat([other[to_slot(key, "shared")].flatten() for key in factors])
    cosine = float(torch.cosine_similarity(a, b, dim=0))
    assert Blend(0.3, "cosine").strength(site, LATER) == pytest.approx(0.3 * max(0.0, cosine), abs=1e-6)
    assert Blend(0.3, "cosine", negative="shift").strength(site, LATER) == pytest.approx(0.15 * (1 + cosine), abs=1e-6)
    site.model.load({to_slot(key, "shared"): -value for key, value in own.items()})
    assert Blend(0.3, "cosine").strength(site, LATER) == 0.0
    site.model.load({to_slot(key, "shared"): value for key, value in own.items()})
    for similarity in ("cosine", "min"):
        assert Blend(0.3, similarity).strength(site, LATER) == pytest.approx(0.3, abs=1e-6)  # type: ignore[arg-type]


def test_similarities_of_products_equal_those_of_dense_updates_and_do_not_depend_on_the_factors() -> None:
    site = two_slots("llama")
    own, merged = pairs(site, "personal"), pairs(site, "shared")
    dense_own, dense_merged = ([B.double() @ A.double() for B, A in one] for one in (own, merged))
    flat = [torch.cat([delta.flatten() for delta in one]) for one in (dense_own, dense_merged)]
    expected = float(torch.cosine_similarity(*flat, dim=0))
    assert product_cosine(own, merged) == pytest.approx(expected, abs=1e-6)
    ratios = []
    for mine, other in zip(dense_own, dense_merged, strict=True):
        u, s, _ = torch.linalg.svd(other)
        count = int(((s.square().cumsum(0) / s.square().sum()) < 0.95).sum()) + 1
        ratios.append(float((u[:, :count] @ u[:, :count].T @ mine).norm() / mine.norm()))
    assert subspace_alignment(own, merged) == pytest.approx(sum(ratios) / len(ratios), abs=1e-6)
    G = torch.tensor([[2.0, 1.0], [0.5, -1.0]])
    turned = [(B @ torch.linalg.inv(G), 3 * G @ A) for B, A in own]
    assert product_cosine(turned, merged) == pytest.approx(expected, abs=1e-5)
    assert subspace_alignment(turned, merged) == pytest.approx(subspace_alignment(own, merged), abs=1e-5)
    assert 0 <= subspace_alignment(own, merged) <= 1
    assert subspace_alignment(own, own) == pytest.approx(1.0, abs=0.05)  # 95 % of the energy
    zero = [(torch.zeros_like(B), A) for B, A in own]
    assert subspace_alignment(zero, merged) == subspace_alignment(own, zero) == product_cosine(zero, merged) == 0
    assert factor_cosine({"a": torch.ones(2)}, {"a": torch.zeros(2)}) == 0


def test_rank_rules_of_the_alignment_keep_as_many_directions_as_they_say() -> None:
    """Singular values 3, 2, 1: shares of the energy 0.643, 0.929, 1; of its root 0.802, 0.964, 1."""
    merged = (torch.eye(4)[:, :3] * torch.tensor([3.0, 2.0, 1.0]), torch.eye(5)[:3])
    own = (torch.eye(4)[:, :3], torch.eye(5)[:3])
    kept = {"energy": 3, "norm": 2, "reference": 1}
    for rule, count in kept.items():
        assert subspace_alignment([own], [merged], rule) == pytest.approx(math.sqrt(count / 3))  # type: ignore[arg-type]


def test_the_alignment_by_approximation_error_leaves_a_twentieth_of_the_norm() -> None:
    """Singular values 20, 1, 1: one direction leaves sqrt(2 / 402) = 0.0705 of the norm, two sqrt(1 / 402) = 0.0499."""
    merged = (torch.eye(4)[:, :3] * torch.tensor([20.0, 1.0, 1.0]), torch.eye(5)[:3])
    own = (torch.eye(4)[:, :3], torch.eye(5)[:3])
    assert subspace_alignment([own], [merged], "error") == pytest.approx(math.sqrt(2 / 3))
    assert subspace_alignment([own], [merged]) == pytest.approx(math.sqrt(1 / 3))


# terms


@pytest.mark.parametrize("kind", ["vit", "llama"])
def test_the_penalty_is_zero_at_its_centre_and_its_gradient_twice_the_distance(kind: str) -> None:
    site = two_slots(kind)
    batch = site.examples("train").batch(range(2))
    guide = L2("personal", to="shared", weight=0.5).bind(site)
    leaves, centre = site.model.leaves(slot("personal")), site.model.dump(slot("shared"))
    with site.model.trainable(slot("personal")):
        site.model.zero_gradients()
        guide(batch, torch.empty(0)).backward()
    for key, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, leaf.detach() - centre[to_slot(key, "shared")])
    site.model.load({to_slot(key, "personal"): value for key, value in centre.items()})
    assert float(guide(batch, torch.empty(0))) == 0


def test_turning_the_centre_keeps_its_product_and_never_adds_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        own, other = ((torch.randn(6, 3, generator=generator), torch.randn(3, 5, generator=generator)) for _ in "ab")
        B, A = align(other, own)
        torch.testing.assert_close(B @ A, other[0] @ other[1], rtol=1e-4, atol=1e-5)
        before, after = (
            sum(float((x - y).square().sum()) for x, y in zip(pair, own, strict=True)) for pair in (other, (B, A))
        )
        assert after <= before + 1e-4
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator))
    B, A = align((own[0] @ rotation.T, rotation @ own[1]), own)
    torch.testing.assert_close(B, own[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(A, own[1], rtol=1e-4, atol=1e-5)


def test_the_distance_of_products_is_that_of_dense_updates() -> None:
    site = two_slots("llama")
    batch = site.examples("train").batch(range(2))
    own, other = pairs(site, "personal"), pairs(site, "shared")
    expected = sum(
        float((3.0 * (B @ A - C @ D)).double().square().sum()) for (B, A), (C, D) in zip(own, other, strict=True)
    )
    found = float(ProductDistance("personal", to="shared", weight=0.1).bind(site)(batch, torch.empty(0)))
    assert found == pytest.approx(0.1 * expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("direction", ["local_global", "global_local", "js"])
def test_distillation_equals_a_loop_over_samples_and_tokens(kind: str, direction: str) -> None:
    site = two_slots(kind)
    model = site.model
    batch = site.examples("train").batch(range(4))
    with torch.no_grad(), model.active("personal"):
        logits = site.logits(batch)
    with torch.no_grad(), model.active("shared"):
        teacher = site.logits(batch)
    T = 3.0
    total = 0.0
    answers = zip(logits, teacher, strict=True)  # of a language model one for each answer token, row after row
    for row in range(4):
        if kind == "llama":
            tokens = list(islice(answers, int((batch["labels"][row, 1:] != -100).sum())))
        else:
            tokens = [(logits[row], teacher[row])]
        for own, theirs in tokens:
            p, q = (torch.softmax(x.double() / T, -1) for x in (own, theirs))
            m = (p + q) / 2
            kl = {
                "local_global": (p * (p / q).log()).sum(),
                "global_local": (q * (q / p).log()).sum(),
                "js": ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2,
            }[direction]
            total += float(kl) / len(tokens) / 4
    with model.active("personal"):
        found = float(Distil("shared", T, direction).bind(site)(batch, logits))  # type: ignore[arg-type]
        divided = float(Distil("shared", T, direction, divide_by_vocab=True).bind(site)(batch, logits))  # type: ignore[arg-type]
        same = float(Distil("personal", T, direction).bind(site)(batch, logits))  # type: ignore[arg-type]
        shifted = float(Distil("shared", T, direction).bind(site)(batch, logits + 5.0))  # type: ignore[arg-type]
    assert found == pytest.approx(T**2 * total, rel=1e-4)
    assert divided == pytest.approx(found / logits.shape[-1], rel=1e-5)
    assert abs(same) < 1e-6 <= found and shifted == pytest.approx(found, rel=1e-4)


def test_no_gradient_reaches_the_teacher() -> None:
    site = two_slots("bert")
    model = site.model
    batch = site.examples("train").batch(range(4))
    with model.active("personal"), model.trainable(slot("personal", "shared")):
        model.zero_gradients()
        Distil("shared").bind(site)(batch, site.logits(batch)).backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in model.leaves(slot("shared")).values())
    assert any(leaf.grad is not None and leaf.grad.any() for leaf in model.leaves(slot("personal")).values())


# what the server does


def test_momentum_without_memory_is_averaging_and_fedprox_without_pull_too() -> None:
    plain = Clients(fedit(**SMALL)).run(3)
    for method in (fedavgm(**SMALL, momentum=0.0, server_lr=1.0), fedprox(**SMALL, mu=0.0)):
        server = Clients(method).run(3)
        for key, value in plain.arrays.items():
            torch.testing.assert_close(server.arrays[key], value, rtol=1e-5, atol=1e-7)


def test_fedprox_pulls_back_to_where_the_round_started() -> None:
    start = Clients(fedit(**SMALL))
    moved = {}
    for mu in (0.0, 100.0):
        clients = Clients(fedprox(**SMALL, mu=mu))
        server = clients.run(1)
        moved[mu] = math.sqrt(
            sum(float((value - start.initial[key]).square().sum()) for key, value in server.arrays.items())
        )
    assert moved[100.0] < 0.8 * moved[0.0]


def test_server_steps_against_arithmetic_by_hand() -> None:
    """One entry: theta 1, merged 3, so D = 2; then merged 3 again from where the first step led."""
    server, merged = {"shared/m/A": torch.tensor([1.0])}, {"shared/m/A": torch.tensor([3.0])}
    key = "shared/m/A"

    def theta(state: State) -> float:
        return float(state[key])

    avgm = ServerOptimiser("avgm", 0.5, 0.9)
    first = avgm.step(server, merged)
    assert theta(first) == pytest.approx(1 + 0.5 * 2)
    assert theta(avgm.step(first, merged)) == pytest.approx(2 + 0.5 * (0.9 * 2 + 1))
    reference = ServerOptimiser("avgm", 0.5, 0.9, variant="reference")
    first = reference.step(server, merged)
    assert theta(first) == pytest.approx(2) and theta(reference.step(first, merged)) == pytest.approx(
        2 + 0.5 * (1.8 + 0.1)
    )
    adagrad = ServerOptimiser("adagrad", 0.1, tau=0.5).step(server, merged)
    assert theta(adagrad) == pytest.approx(1 + 0.1 * 2 / (math.sqrt(0.25 + 4) + 0.5))
    adam = ServerOptimiser("adam", 0.1, 0.9, 0.99, 0.5).step(server, merged)
    assert theta(adam) == pytest.approx(1 + 0.1 * 0.2 / (math.sqrt(0.99 * 0.25 + 0.01 * 4) + 0.5))
    yogi = ServerOptimiser("yogi", 0.1, 0.9, 0.99, 0.5).step(server, merged)
    assert theta(yogi) == pytest.approx(1 + 0.1 * 0.2 / (math.sqrt(0.25 + 0.01 * 4) + 0.5))
    for kind in ("adagrad", "adam", "yogi"):
        still = ServerOptimiser(kind).step(server, server)  # type: ignore[arg-type]
        assert torch.equal(still[key], server[key])


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_the_reference_variant_starts_its_average_at_the_first_change_and_squares_the_average(kind: str) -> None:
    """By hand. The last change leaves little of the average, so that u is above its square: there Yogi's sign turns."""
    key, tau = "shared/m/A", 0.5
    optimiser = ServerOptimiser(kind, 0.1, 0.9, 0.99, tau, "reference")  # type: ignore[arg-type]
    server = {key: torch.tensor([1.0])}
    theta, m, u = 1.0, 0.0, tau**2
    for number, change in enumerate((2.0, -1.0, -11.5)):
        server = optimiser.step(server, {key: server[key] + change})
        m = 0.9 * m + 0.1 * change if number else change
        u = 0.99 * u + 0.01 * m * m if kind == "adam" else u - 0.01 * m * m * math.copysign(1, u - m * m)
        theta += 0.1 * m / (math.sqrt(u) + tau)
        assert float(server[key]) == pytest.approx(theta)
    assert u > m * m


def test_a_servers_averages_are_in_float32_whatever_type_its_adapter_has() -> None:
    """In bfloat16 a momentum of 256 + 1 would be 256, and a change of 1 beside it nothing."""
    key, optimiser = "shared/m/A", ServerOptimiser("avgm", 1.0, 0.5)
    server = optimiser.step({key: torch.zeros(1).bfloat16()}, {key: torch.full((1,), 512.0).bfloat16()})
    server = optimiser.step(server | {key: torch.zeros(1).bfloat16()}, {key: torch.ones(1).bfloat16()})
    assert server["server:momentum/m/A"].tolist() == [257.0]
    assert server[key].dtype == torch.bfloat16 and server["server:momentum/m/A"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("fedavgm", {"momentum": 1.0}, "momentum: must be at least 0 and below 1"),
        ("fedavgm", {"momentum": -0.1}, "momentum: must be at least 0 and below 1"),
        ("fdlora", {"momentum": 1.0}, "momentum: must be at least 0 and below 1"),
        ("fedadam", {"beta1": 1.0}, "beta1: must be at least 0 and below 1"),
        ("fedyogi", {"beta2": 1.0}, "beta2: must be at least 0 and below 1"),
        ("fedadagrad", {"server_lr": 0.0}, "server_lr: must be positive"),
        ("fedadam", {"tau": 0.0}, "tau: must be positive"),
    ],
)
def test_steps_of_a_server_that_would_not_end_or_not_begin_are_refused(
    name: str, arguments: dict[str, float], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_method({"name": name, **arguments})


@pytest.mark.parametrize("make", [fedavgm, fedadagrad, fedadam, fedyogi])
def test_the_servers_averages_never_travel(make) -> None:  # type: ignore[no-untyped-def]
    clients = Clients(make(**SMALL))
    server = clients.run(2)
    assert any(key.startswith("server:") for key in server.arrays)
    received = federated(clients.method).dispatch(server, clients.infos[0], LATER)
    assert received.arrays.keys() == {key for key in clients.initial if key.startswith("shared/")}


def test_scaffold_keeps_the_servers_control_at_the_mean_of_the_clients() -> None:
    clients = Clients(Scaffold(rank=2, alpha=4.0))
    server = clients.run(3)
    controls = [select(clients.memory(name).arrays, slot(CONTROL)) for name in clients.sites]
    total = controls[0]
    for other in controls[1:]:
        total = add(total, other)
    for key, value in scale(total, 1 / len(controls)).items():
        torch.testing.assert_close(server.arrays[key], value, rtol=1e-4, atol=1e-5)
    assert any(bool(value.any()) for value in controls[0].values())


def test_scaffold_of_one_client_with_plain_sgd_is_sgd() -> None:
    budget = {"optimiser": "sgd", "momentum": 0.0, "lr": 0.05}
    results = []
    for method in (Scaffold(rank=2, alpha=4.0), fedit(**SMALL)):
        clients = Clients(method, count=1)
        site = clients.sites["a"]
        clients.sites["a"] = replace(site, budget=replace(site.budget, **budget))
        results.append(clients.run(3).arrays)
    for key, value in results[1].items():
        torch.testing.assert_close(results[0][key], value, rtol=1e-4, atol=1e-6)


# what is refused, and the cells


@pytest.mark.parametrize("rule", ["mean", "ties", "dare", "iso-c"])
@pytest.mark.parametrize("space", ["factors", "knots"])
def test_every_cell_of_merge_and_space_runs_and_two_runs_agree(rule: str, space: str) -> None:
    def run() -> Payload:
        return Clients(guidance(**SMALL, merge=Merge(rule=rule, space=space))).run(2)  # type: ignore[arg-type]

    first, second = run(), run()
    assert all(torch.equal(first.arrays[key], second.arrays[key]) for key in first.arrays)
    assert all(torch.isfinite(value).all() for value in first.arrays.values())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"beta": 1.0}, "beta: must be at least 0 and below 1"),
        ({"guide": "hard", "similarity": "sar"}, "similarity: 'sar' adjusts the strength of guidance"),
        ({"guide": "own", "start": "global"}, "start: only guide parametric and function"),
        ({"guide": "function", "align": "procrustes"}, "penalty: penalty and align belong to guide parametric"),
        ({"guide": "parametric", "penalty": "product", "align": "procrustes"}, "align: the distance of products"),
        ({"guide": "hard", "keep_optimiser": True}, "keep_optimiser: the averages would be of other coordinates"),
        ({"temperature": 0.0}, "temperature: must be positive"),
    ],
)
def test_combinations_that_mean_nothing_are_refused_with_the_reason(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_method({"name": "guidance", **arguments})


def test_a_penalty_in_a_basis_of_its_own_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made = guidance(merge=Merge(space="knots"), guide="parametric")
    assert isinstance(made, Recipe) and "procrustes" in caplog.text
