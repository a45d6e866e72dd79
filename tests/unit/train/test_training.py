"""The training loop against loops written by hand: in plain PyTorch with PEFT, and on the same leaves bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import lora
from befit.core.errors import TrainingDiverged
from befit.core.values import Payload, State, Tick
from befit.core.wire import from_bytes, to_bytes
from befit.models.backbone import checkpoint_activations
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.train.loop import train, training
from befit.train.optim import learning_rate, make_optimiser
from befit.train.passes import Pass
from befit.train.terms import L2, Distil
from tests.tiny import assert_near, assert_same, make_site, random_state
from tests.unit.adapters.peft_oracle import parameters_of, peft_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
FIRST = Tick("federate", 1, 2, 0)
SECOND = Tick("federate", 2, 2, 0)
SHARED = Pass(slot("shared"), ("shared",))
BUDGETS = {
    "adamw": TrainSettings(max_steps=4, batch_size=4, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95)),
    "sgd": TrainSettings(max_steps=4, batch_size=4, lr=1e-2, optimiser="sgd", momentum=0.9, weight_decay=0.1),
}


def optimiser_of(parameters: list[torch.nn.Parameter], budget: TrainSettings) -> torch.optim.Optimizer:
    if budget.optimiser == "adamw":
        return torch.optim.AdamW(parameters, budget.lr, budget.betas, weight_decay=budget.weight_decay)
    return torch.optim.SGD(parameters, budget.lr, momentum=budget.momentum, weight_decay=budget.weight_decay)


def plain_loop(kind: str, site: Site, start: State) -> tuple[State, float]:
    """What everybody writes first: PEFT, zero_grad, backward, clip, step."""
    oracle = peft_model(kind, site.model, start, "shared").train()
    parameters = parameters_of(oracle, site.model, "shared")
    base = {key: p.detach().clone() - start[key] for key, p in parameters.items()}  # a head's own weights, else 0
    optimiser, losses = optimiser_of(list(parameters.values()), site.budget), []
    for batch in site.batches("train", site.budget.max_steps, FIRST):
        optimiser.zero_grad()
        loss = site.task.loss(site.task.logits(oracle, batch), batch)
        loss.backward()
        if site.budget.grad_clip:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), site.budget.grad_clip)
        optimiser.step()
        losses.append(loss.item())
    return {key: p.detach() - base[key] for key, p in parameters.items()}, sum(losses) / len(losses)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("optimiser", BUDGETS)
def test_training_equals_a_plain_pytorch_loop_with_peft(kind: str, optimiser: str, clip: float) -> None:
    budget = replace(BUDGETS[optimiser], grad_clip=clip)
    if kind in ("vit", "bert"):  # befit decays the head's change, plain PyTorch the head itself
        budget = replace(budget, weight_decay=0.0)
    site = make_site(kind, budget=budget)
    start = random_state(site.model)
    site.model.load(start)
    expected, loss = plain_loop(kind, site, start)
    report = train(site, [SHARED], FIRST)
    assert report.steps == 4
    assert report.losses["train"] == pytest.approx(loss, rel=1e-5)
    found = site.model.dump(EVERYTHING)
    assert_near(found, expected, rtol=0, atol=2e-6)
    assert all(float((found[key] - start[key]).abs().max()) > 1e-5 for key in found)


def test_gradient_checkpointing_trains_to_the_same_numbers() -> None:
    found = []
    for checkpointing in (False, True):
        site = make_site("bert")
        if checkpointing:
            checkpoint_activations(site.model.backbone, "tiny")
        train(site, [SHARED], FIRST)
        found.append(site.model.dump(EVERYTHING))
    assert_near(*found)


def test_a_later_pass_sees_the_step_of_an_earlier_one_and_terms_the_values_of_the_start() -> None:
    """Ditto by hand: shared steps first; personal is pulled to shared as it was before the first batch."""
    mu, budget = 0.7, BUDGETS["sgd"]
    layout = lora(2, 6.0, slots=("shared", "personal"))
    passes = [
        Pass(slot("shared"), ("shared",), name="shared"),
        # Both active, so that the second pass's gradient depends on what the first one did.
        Pass(slot("personal"), ("shared", "personal"), (L2("personal", to="shared", weight=mu),), name="personal"),
    ]
    mine, hand = make_site("llama", layout, budget=budget), make_site("llama", layout, budget=budget)
    start = random_state(mine.model)
    mine.model.load(start)
    report = train(mine, passes, FIRST)

    oracle = peft_model("llama", hand.model, start, "shared", "personal")
    parameters = parameters_of(oracle, hand.model, "shared", "personal")
    target = {key: p.detach().clone() for key, p in parameters.items() if key.startswith("shared/")}
    groups = {
        name: {k: p for k, p in parameters.items() if k.startswith(f"{name}/")} for name in ("shared", "personal")
    }
    optimisers = {name: optimiser_of(list(group.values()), budget) for name, group in groups.items()}
    losses: dict[str, list[float]] = {"shared": [], "personal": []}
    for batch in hand.batches("train", budget.max_steps, FIRST):
        for name, active in (("shared", ["shared"]), ("personal", ["shared", "personal"])):
            oracle.base_model.set_adapter(active)
            for p in parameters.values():
                p.requires_grad_(True)
                p.grad = None
            loss = task_loss = hand.task.loss(hand.task.logits(oracle, batch), batch)
            if name == "personal":
                for key, p in groups["personal"].items():
                    loss = loss + mu * (p - target[key.replace("personal/", "shared/")]).square().sum()
            loss.backward()
            optimisers[name].step()
            losses[name].append(task_loss.item())
    assert_near(mine.model.dump(EVERYTHING), {k: p.detach() for k, p in parameters.items()}, rtol=0, atol=5e-6)
    numbers = report.numbers()
    assert numbers["loss"] == pytest.approx(sum(losses["shared"]) / 4, rel=1e-5)
    assert numbers["loss_personal"] == pytest.approx(sum(losses["personal"]) / 4, rel=1e-5)
    assert numbers["steps"] == 4


def test_adamw_gives_the_same_bits_for_any_number_of_threads() -> None:
    """The numbers of a run do not depend on the machine's cores or on `engine.threads`."""
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50_011))
        optimiser = make_optimiser([parameter], BUDGETS["adamw"])
        torch.set_num_threads(threads)
        try:
            for _ in range(3):
                parameter.grad = parameter.detach().sin()
                optimiser.step()
        finally:
            torch.set_num_threads(before)
        found.append(parameter.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("optimiser", BUDGETS)
def test_a_kept_optimiser_makes_two_rounds_one_uninterrupted_run_bit_for_bit(optimiser: str) -> None:
    """Also when its averages went through bytes in between, as they do on disk."""
    keeping = replace(SHARED, keep_optimiser=True)
    mine = make_site("bert", budget=BUDGETS[optimiser])
    first = train(mine, [keeping], FIRST)
    assert first.moments
    memory = Payload(from_bytes(to_bytes(first.memory.arrays, {}))[0])
    train(mine, [keeping], SECOND, memory=memory)

    hand = make_site("bert", budget=BUDGETS[optimiser])
    model = hand.model
    uninterrupted = make_optimiser(model.parameters(slot("shared")), hand.budget)
    for at in (FIRST, SECOND):
        for batch in hand.batches("train", hand.budget.max_steps, at):
            model.zero_gradients()
            with model.training(True), model.active("shared"), model.trainable(slot("shared")):
                hand.loss(batch).backward()
            uninterrupted.step()
    assert_same(mine.model.dump(EVERYTHING), model.dump(EVERYTHING))

    forgetful = make_site("bert", budget=BUDGETS[optimiser])
    assert not train(forgetful, [SHARED], FIRST).moments
    train(forgetful, [SHARED], SECOND, memory=memory)
    assert not torch.equal(
        forgetful.model.dump(EVERYTHING)["shared/block.00.q_proj/A"], model.dump(EVERYTHING)["shared/block.00.q_proj/A"]
    )


def test_batches_depend_on_client_and_round_and_cover_an_epoch() -> None:
    site = make_site("vit", rows=10)

    def batches(client: str, at: Tick, steps: int = 3) -> list[torch.Tensor]:
        one = replace(site, info=replace(site.info, id=client))
        return [batch["pixel_values"] for batch in one.batches("train", steps, at)]

    epoch = batches("a", FIRST)
    assert [len(batch) for batch in epoch] == [4, 4, 2]
    everything = site.examples("train").batch(range(10))["pixel_values"]
    assert {tuple(row.flatten().tolist()) for row in torch.cat(epoch)} == {
        tuple(row.flatten().tolist()) for row in everything
    }
    assert all(torch.equal(a, b) for a, b in zip(epoch, batches("a", FIRST), strict=True))
    for other in (batches("b", FIRST), batches("a", SECOND), batches("a", FIRST, 6)[3:]):
        assert not torch.equal(torch.cat(epoch), torch.cat(other))


def test_a_learning_rate_that_diverges_is_named() -> None:
    site = make_site("bert", budget=TrainSettings(max_steps=6, batch_size=4, lr=1e30, optimiser="sgd"))
    with pytest.raises(TrainingDiverged, match=r"'train' became (nan|inf).*1e\+30.*train\.lr or set train\.grad_clip"):
        train(site, [SHARED], FIRST)


def test_the_gradient_norm_is_clipped_over_all_that_a_pass_trains() -> None:
    """One step of plain SGD moves by lr * clip in all, whatever the gradient."""
    site = make_site("bert", budget=TrainSettings(max_steps=1, batch_size=4, lr=1.0, optimiser="sgd", grad_clip=0.01))
    start = random_state(site.model)
    site.model.load(start)
    train(site, [SHARED], FIRST)
    moved = sum(float((tensor - start[key]).square().sum()) for key, tensor in site.model.dump(EVERYTHING).items())
    assert math.sqrt(moved) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 3, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 2, [1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", 0, [(1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)]),
    ],
)
def test_schedules_run_over_all_rounds_of_a_stage(schedule, warmup: int, rates: list[float]) -> None:
    budget = TrainSettings(max_steps=3, lr=1.0, schedule=schedule, warmup_steps=warmup)
    found = [learning_rate(budget, step, at) for at in (FIRST, SECOND) for step in range(3)]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_ends_where_it_is_told(schedule: Any) -> None:
    """`end + (lr - end) (1 + cos(pi t / T)) / 2`, or along a line; half-way it is between both."""
    budget = TrainSettings(max_steps=4, lr=2e-5, lr_end=1e-6, schedule=schedule)
    rates = [learning_rate(budget, step, Tick("x", 1, 1, 0)) for step in range(5)]
    assert (rates[0], rates[2], rates[4]) == pytest.approx((2e-5, 1.05e-5, 1e-6), abs=1e-14)
    constant = TrainSettings(max_steps=4, lr=2e-5, lr_end=1e-6)
    assert learning_rate(constant, 3, Tick("x", 1, 1, 0)) == 2e-5


def test_a_schedule_over_the_round_is_the_same_in_every_round() -> None:
    budget = TrainSettings(max_steps=4, lr=1.0, schedule="linear", schedule_over="round", warmup_steps=2)
    for at in (FIRST, SECOND):
        assert [learning_rate(budget, step, at) for step in range(4)] == pytest.approx([1 / 2, 1, 1, 1 / 2])


def test_the_schedule_reaches_the_optimiser() -> None:
    """SGD's two steps are lr and lr/2 times the gradients."""
    budget = TrainSettings(max_steps=2, batch_size=12, lr=0.1, optimiser="sgd", schedule="linear")
    site = make_site("bert", budget=budget)
    start = random_state(site.model)
    site.model.load(start)
    train(site, [SHARED], Tick("federate", 1, 1, 0))
    hand = make_site("bert")
    hand.model.load(start)
    batch = hand.examples("train").batch(range(12))
    for rate in (0.1, 0.05):
        hand.model.zero_gradients()
        with hand.model.active("shared"), hand.model.trainable(EVERYTHING):
            hand.loss(batch).backward()
        leaves = hand.model.leaves(EVERYTHING)
        hand.model.load({key: leaf - rate * leaf.grad for key, leaf in leaves.items()})  # type: ignore[operator]
    assert_near(site.model.dump(EVERYTHING), hand.model.dump(EVERYTHING))


@pytest.mark.parametrize("kind", ["vit", "gpt2"])
def test_gradients_that_add_up_over_parts_are_those_of_the_whole_batch(kind: str) -> None:
    """Parts of 3, 3 and 1 of 7 examples, whose answers have other lengths, with terms of weights and of samples."""
    passes = [
        Pass(
            slot("personal"),
            ("shared", "personal"),
            (L2("personal", "shared", 0.1), Distil("shared", weight=0.5)),
        )
    ]
    layout, ends, sizes = lora(rank=2, alpha=6.0, slots=("shared", "personal")), [], []
    for most in (None, 3):
        budget = TrainSettings(max_steps=2, batch_size=7, lr=5e-2, optimiser="sgd", grad_clip=0.5, micro_batch=most)
        site = make_site(kind, layout, rows=7, budget=budget)
        site.model.load(random_state(site.model, seed=1))
        hook = site.model.backbone.register_forward_pre_hook(
            lambda _, args, kwargs: sizes.append(len(next(iter(kwargs.values())))), with_kwargs=True
        )
        ends.append((train(site, passes, Tick("federate", 1, 1, 0)).losses, site.model.dump(EVERYTHING)))
        hook.remove()
    assert set(sizes) == {7, 3, 1}
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    assert_near(ends[0][1], ends[1][1], 2e-6)
    with_parts = next(training(site, passes, Tick("federate", 1, 1, 0)))
    assert with_parts.kin is None  # one by one, for the memory


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_b_learns_at_a_multiple_of_the_rate_as_in_pefts_loraplus(kind: str) -> None:
    budget = replace(BUDGETS["adamw"], weight_decay=0.0, loraplus_ratio=4.0)
    site = make_site(kind, budget=budget)
    start = random_state(site.model)
    site.model.load(start)
    oracle = peft_model(kind, site.model, start, "shared").train()
    parameters = parameters_of(oracle, site.model, "shared")
    optimiser = create_loraplus_optimizer(
        oracle, torch.optim.AdamW, lr=budget.lr, loraplus_lr_ratio=4.0, betas=budget.betas
    )
    for batch in site.batches("train", budget.max_steps, FIRST):
        optimiser.zero_grad()
        site.task.loss(site.task.logits(oracle, batch), batch).backward()
        optimiser.step()
    train(site, [SHARED], FIRST)
    assert_near(site.model.dump(EVERYTHING), {key: p.detach() for key, p in parameters.items()}, rtol=0, atol=2e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_goes_by_the_steps_that_are_taken(schedule: str) -> None:
    """Methods that count passes over the data take other steps than train.max_steps says."""
    rates = []

    class Watched(L2):
        def bind(self, site: Site) -> Any:
            rates.extend(learning_rate(site.budget, step, Tick("federate", 1, 1, 0)) for step in range(9))
            return super().bind(site)

    budget = TrainSettings(max_steps=3, batch_size=4, lr=5e-2, schedule=schedule, optimiser="sgd")  # type: ignore[arg-type]
    site = make_site("vit", lora(2, 4.0, slots=("shared", "personal")), budget=budget)
    term = Watched("personal", to="shared", weight=1e-3)
    train(site, [Pass(slot("personal"), ("personal",), (term,))], Tick("federate", 1, 1, 0), steps=9)
    assert rates[0] == 5e-2 and all(0 < after < before for before, after in pairwise(rates))
