"""Methods that keep a second adapter beside the shared one: every round by dense weights, `torch.optim` and a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played
from tests.golden.reference import (
    MODULES,
    STEPS,
    Arrays,
    Learner,
    apply,
    assert_near,
    beside,
    change,
    logits,
    loss,
    mean,
    plus,
    soft_loss,
    trained,
)

CHECKED = {"fedalt": "by hand", "feddpa": "by hand", "fedsim": "by hand", "feddat": "by hand", "guidance": "by hand"}


def pixels(played: Played, client: str) -> Tensor:
    return played.data(client, "test")[0]


def assert_answers(played: Played, client: str, expected: Tensor) -> None:
    torch.testing.assert_close(played.answers(client), expected, rtol=1e-3, atol=3e-4)


def test_fedalt() -> None:
    """Bian et al. 2025b, Figure 1: `y = W x + s [alpha_R(x) B_R A_R x + alpha_I(x) B_I A_I x]`,
    `(alpha_R, alpha_I) = softmax(G x)` for every token; the rest of the world is the mean of all others' uploads."""
    played = Played({"name": "fedalt", **LORA})
    start = {**played.start("personal"), **{f"gate {key}": value for key, value in played.start("gate").items()}}
    own = dict.fromkeys(CLIENTS, start)
    world = dict.fromkeys(CLIENTS, played.start("shared"))

    def gated(data: Tensor, mine: Arrays, rest: Arrays) -> Tensor:
        def branch(name: str, x: Tensor) -> Tensor:
            alpha = (x @ mine[f"gate {name}/G"].T).softmax(-1)
            return alpha[..., :1] * apply(rest, name, x) + alpha[..., 1:] * apply(mine, name, x)

        return beside(data, branch)

    for round_ in (1, 2):
        for client in CLIENTS:
            data, labels = played.data(client)
            own[client] = trained(
                own[client],
                lambda mine: F.cross_entropy(gated(data, mine, world[client]), labels),
            )
            sent = {key: value for key, value in own[client].items() if not key.startswith("gate")}
            assert_near(played.sent(round_, client, "personal"), sent)
        world = {client: mean([own[other] for other in CLIENTS if other != client]) for client in CLIENTS}
    for client in CLIENTS:
        kept = {f"gate {key}": value for key, value in played.kept(client, "gate").items()}
        assert_near({**played.kept(client, "personal"), **kept}, own[client])
        assert_answers(played, client, gated(pixels(played, client), own[client], world[client]))


def halves(first: Arrays, second: Arrays) -> Arrays:
    """Half of each adapter's update."""
    return plus(change(first, 0.5), change(second, 0.5))


@pytest.mark.parametrize("variant", ["T", "halves"])
def test_feddpa(variant: str) -> None:
    """Yang et al. 2024, FedDPA-T: a round trains the personal adapter beside the frozen shared one, both at one half,
    then the shared one alone; instance-wise dynamic weighting: `omega = 0.5 mean_s max(0, cos(h_x, h_s))` weighs the
    personal one at use, h the last hidden state under it. "halves" trains the shared one first, and uses one half."""
    options = {"instances": 36} if variant == "T" else {}  # every example as often as any other: 6, 4 or 3 times
    played = Played({"name": "feddpa", **LORA, "variant": variant, **options})
    common = played.start("shared")
    personal = {client: Learner(played.start("personal")) for client in CLIENTS}
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            data, own = played.data(client), personal[client]
            if variant == "T" and round_ == 2:  # from the second round on, and before the shared one
                for _ in range(STEPS):
                    own.step(loss(data, halves(common, own.arrays)))
            each.append(trained(common, lambda shared: loss(data, change(shared))))
            if variant == "halves":
                for _ in range(STEPS):
                    own.step(loss(data, halves(each[-1], own.arrays)))
            assert_near(played.sent(round_, client), each[-1])
        common = mean(each)
    for client in CLIENTS:
        own = personal[client].now
        assert_near(played.kept(client, "personal"), own)
        if variant == "halves":
            assert_answers(played, client, logits(pixels(played, client), halves(common, own)))
            continue
        known = logits(played.data(client)[0], change(own), hidden=True)
        rows = []
        for one in pixels(played, client).split(1):
            likeness = torch.cosine_similarity(logits(one, change(own), hidden=True), known)
            omega = 0.5 * float(likeness.clamp_min(0).mean())
            assert 0.01 < omega < 0.5
            rows.append(logits(one, change(common, 1 - omega), change(own, omega)))
        assert_answers(played, client, torch.cat(rows))


def test_fedsim() -> None:
    """Pillutla et al. 2022b, LocalSim, with outputs that add up: `CE(z_shared + z_personal)`, one step of both."""
    played = Played({"name": "fedsim", **LORA})
    common = played.start("shared")
    both = {
        client: Learner(
            {f"{name} {key}": value for name in ("shared", "personal") for key, value in played.start(name).items()}
        )
        for client in CLIENTS
    }

    def part(arrays: Arrays, name: str) -> Arrays:
        return {key.removeprefix(f"{name} "): value for key, value in arrays.items() if key.startswith(name)}

    def together(data: Tensor, arrays: Arrays) -> Tensor:
        return logits(data, change(part(arrays, "shared"))) + logits(data, change(part(arrays, "personal")))

    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            (data, labels), learner = played.data(client), both[client]
            learner.put({f"shared {key}": value for key, value in common.items()})
            for _ in range(STEPS):
                learner.step(F.cross_entropy(together(data, learner.arrays), labels))
            each.append(part(learner.now, "shared"))
            assert_near(played.sent(round_, client), each[-1])
        common = mean(each)
    for client in CLIENTS:
        learner = both[client]
        learner.put({f"shared {key}": value for key, value in common.items()})
        assert_near(played.kept(client, "personal"), part(learner.now, "personal"))
        assert_answers(played, client, together(pixels(played, client), learner.now))


def test_feddat() -> None:
    """Chen et al. 2024, mutual knowledge distillation: `(CE(z_s) + T^2 KL(dual || shared)) / 2` for the shared adapter,
    then `(CE(z_d) + T^2 KL(shared || dual)) / 2` for the personal one, teachers frozen; dual is half the shared adapter
    as received and half the personal one."""
    T = 2.0
    played = Played({"name": "feddat", **LORA, "temperature": T})
    common = played.start("shared")
    personal = {client: Learner(played.start("personal")) for client in CLIENTS}
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            (data, labels), own, shared = played.data(client), personal[client], Learner(common)
            for _ in range(STEPS):
                for learner in (shared, own):
                    views = logits(data, change(shared.arrays)), logits(data, halves(common, own.arrays))
                    student, teacher = views if learner is shared else views[::-1]
                    divergence = T**2 * soft_loss((teacher.detach() / T).softmax(-1), student / T)
                    learner.step((F.cross_entropy(student, labels) + divergence) / 2)
            each.append(shared.now)
            assert_near(played.sent(round_, client), each[-1])
        common = mean(each)
    for client in CLIENTS:
        assert_near(played.kept(client, "personal"), personal[client].now)
        assert_answers(played, client, logits(pixels(played, client), halves(common, personal[client].now)))


@pytest.mark.parametrize("guide", ["hard", "parametric", "function"])
def test_guidance(guide: str) -> None:
    """Piorczynski et al. 2025, Tables 1 and 2: clients send their own adapters and are guided by the mean: `(1 - beta)
    CE + beta ||theta - theta_G||^2` or `(1 - beta) CE + beta T^2 KL(own || merged)`, beta 0 in the first round, or a
    start from the mean ("hard")."""
    options: dict[str, Any] = {} if guide == "hard" else {"beta": 0.4}
    played = Played({"name": "guidance", **LORA, "guide": guide, **options}, rounds=3)
    merged, own, T = played.start("shared"), dict.fromkeys(CLIENTS, played.start("personal")), 2.0
    for round_ in (1, 2, 3):
        for client in CLIENTS:
            data, labels = played.data(client)
            beta = options["beta"] if options and round_ > 1 else 0.0

            def objective(mine: Arrays) -> Tensor:
                rows = logits(data, change(mine))
                task = F.cross_entropy(rows, labels)
                if guide == "parametric":
                    extra = sum((mine[key] - merged[key]).square().sum() for key in mine)
                else:
                    p = (rows / T).softmax(-1)
                    q = (logits(data, change(merged)) / T).softmax(-1)
                    extra = T**2 * (p * (p / q).log()).sum(-1).mean()
                return (1 - beta) * task + beta * extra

            own[client] = trained(merged if guide == "hard" else own[client], objective)
            assert_near(played.sent(round_, client, "personal"), own[client], atol=5e-5)
        merged = mean([own[client] for client in CLIENTS], EXAMPLES)
    for client in CLIENTS:
        assert_answers(played, client, logits(pixels(played, client), change(own[client])))


def test_a_branch_is_the_dense_weight_where_it_does_not_depend_on_the_input() -> None:
    """The two ways of the reference to compute an adapter."""
    played = Played({"name": "fedit", **LORA})
    adapter, (data, _) = played.sent(2, "a"), played.data("a")
    found = beside(data, lambda name, x: apply(adapter, name, x))
    torch.testing.assert_close(found, logits(data, change(adapter)), rtol=1e-4, atol=1e-5)
    assert set(MODULES) == set(played.model.shapes.targets)
