"""DP-SGD against a loop over single examples, and what stands around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from befit.adapters.core import Cores
from befit.adapters.keys import factor, slot
from befit.adapters.layout import Layout, Slot, lora
from befit.core.chance import Chance
from befit.core.errors import RunError
from befit.core.values import Tick
from befit.methods.parts.recipe.ranked import to_rank
from befit.protocol.mechanism import Mechanism
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.protocol.stage import Gradients
from befit.tasks.examples import PaddedExamples
from befit.train.loop import train, training
from befit.train.passes import Pass
from befit.train.private import Private
from befit.train.terms import L2, Distil, Term
from tests.tiny import make_site, random_state

AT = Tick("federate", 1, 1, 0)
BUDGET = TrainSettings(max_steps=3, batch_size=4, lr=0.1, optimiser="sgd", micro_batch=3)
TWO = lora(2, 6.0, slots=("shared", "personal"))
SHARED = Pass(slot("shared"), ("shared",))


def private_site(
    kind: str, noise: float = 0.0, clip: float = 1e9, key: bytes = b"k", passes: int = 1, **more: Any
) -> Site:
    """A site whose training goes through the mechanism, with values that are no start."""
    site = make_site(kind, TWO, budget=BUDGET, **more)
    site.model.load(random_state(site.model))
    mechanism = Mechanism(noise, clip, 4 / 12, Chance(key), site.examples, Gradients(passes), left=3)
    return replace(site, mechanism=mechanism)


def gradient_of(site: Site, place: int, terms: Sequence[Term] = ()) -> dict[str, Tensor]:
    """Of one example alone, by automatic differentiation."""
    guides = [term.bind(site) for term in terms]
    leaves = site.model.leaves(slot("shared"))
    batch = site.examples("train").batch(torch.tensor([place]))
    with site.model.active("shared"), site.model.trainable(slot("shared")):
        logits = site.logits(batch)
        loss = site.task.sample_losses(logits, batch).sum() + sum(guide(batch, logits) for guide in guides)
        found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def by_hand(site: Site, clip: float, key: bytes, noise: float = 0.0, terms: Sequence[Term] = ()) -> dict[str, Tensor]:
    """Three steps of SGD as Abadi et al. 2016, Algorithm 1, example by example."""
    chance, leaves = Chance(key), site.model.leaves(slot("shared"))
    for _ in range(3):
        places = (chance.uniform(12) <= 4 / 12).nonzero().flatten().tolist()
        sums = {key: torch.zeros_like(leaf) for key, leaf in leaves.items()}
        for place in places:
            each = gradient_of(site, place, terms)
            norm = torch.stack([value.square().sum() for value in each.values()]).sum().sqrt()
            for name, value in each.items():
                sums[name] += value * min(1.0, clip / float(norm))
        drawn = chance.normal(sum(value.numel() for value in sums.values()))
        for name, part in zip(sums, drawn.split([value.numel() for value in sums.values()]), strict=True):
            with torch.no_grad():
                leaves[name].sub_(0.1 * (sums[name] + noise * clip * part.view_as(sums[name])) / 4)
    return {name: leaf.detach().clone() for name, leaf in leaves.items()}


@pytest.mark.parametrize("kind", ["vit", "bert", "llama", "gpt2"])
@pytest.mark.parametrize(("clip", "noise"), [(1e9, 0.0), (0.5, 0.0), (0.5, 0.8)])
def test_private_training_is_clipped_and_noisy_example_by_example(kind: str, clip: float, noise: float) -> None:
    """With an infinite clip and no noise it is plain SGD on Poisson batches."""
    site = private_site(kind, noise, clip)
    train(site, [SHARED], AT)
    trained = site.model.dump(slot("shared"))
    other = private_site(kind)
    wanted = by_hand(other, clip, b"k", noise)
    for key, value in wanted.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_of_cores_from_one_pass_are_those_of_single_examples(heads: int) -> None:
    trained = []
    for at_once in (True, False):
        site = make_site("bert", Layout((Slot("shared", 2, 6.0, form=Cores(heads)),)), budget=BUDGET)
        site.model.load(random_state(site.model))
        mechanism = Mechanism(0.5, 0.5, 4 / 12, Chance(b"k"), site.examples, Gradients(), left=3)
        asked = next(training(site, [Pass(slot("shared") & ~factor("A", "B"), ("shared",))], AT))
        learner = Private(asked, mechanism)
        assert learner._hooked == [True]
        learner._hooked = [at_once]
        asked.run(asked.optimisers(), learner)
        trained.append(site.model.dump(slot("shared")))
    for key, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("terms", [(L2("shared", to="personal", weight=0.1),), (Distil("personal"),)])
def test_terms_are_clipped_with_the_example_unless_they_depend_on_weights_alone(terms: tuple[Term, ...]) -> None:
    """A term of weights is the same whatever the records are: it is added once, after the noise."""
    site = private_site("bert", clip=0.5)
    train(site, [replace(SHARED, terms=terms)], AT)
    trained = site.model.dump(slot("shared"))
    other = private_site("bert")
    if isinstance(terms[0], Distil):
        wanted = by_hand(other, 0.5, b"k", terms=terms)
        for key, value in wanted.items():
            torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-5)
        return
    there, leaves = other.model.dump(slot("personal")), other.model.leaves(slot("shared"))
    chance = Chance(b"k")
    for _ in range(3):
        places = (chance.uniform(12) <= 4 / 12).nonzero().flatten().tolist()
        steps = [gradient_of(other, place) for place in places]
        norms = [math.sqrt(sum(float(value.square().sum()) for value in each.values())) for each in steps]
        chance.normal(sum(leaf.numel() for leaf in leaves.values()))
        for name, leaf in leaves.items():
            clipped = sum((e[name] * min(1.0, 0.5 / n) for e, n in zip(steps, norms, strict=True)), torch.tensor(0.0))
            pull = 0.2 * (leaf.detach() - there[name.replace("shared", "personal")])
            with torch.no_grad():
                leaf.sub_(0.1 * (clipped / 4 + pull))
    for name, leaf in leaves.items():
        torch.testing.assert_close(trained[name], leaf.detach(), rtol=1e-4, atol=1e-5)


def test_ranks_that_a_client_does_not_have_get_no_noise() -> None:
    """Zero in A and in B, they have no gradient. All other ranks get the noise that they would get beside real ones."""
    trained = []
    for rank in (2, 1):
        site = private_site("bert", noise=0.8, clip=1e-9)
        site.model.load(to_rank(site.model.dump(slot("shared")), rank))
        train(site, [SHARED], AT)
        trained.append(site.model.dump(slot("shared")))
    for key, low in trained[1].items():
        assert torch.equal(low, to_rank({key: low}, 1)[key])
    for key, value in to_rank(trained[0], 1).items():
        torch.testing.assert_close(trained[1][key], value, rtol=1e-5, atol=1e-6)


def test_a_batch_without_examples_is_a_step_of_noise() -> None:
    site = private_site("vit", noise=1.0, clip=1.0)
    assert site.mechanism is not None
    site.mechanism.rate = 1e-9
    before = site.model.dump(slot("shared"))
    site.mechanism.__dict__["rate"] = 1e-9
    train(site, [SHARED], AT, steps=1)
    moved = torch.cat([(site.model.dump(slot("shared"))[key] - before[key]).flatten() for key in before])
    assert float(moved.std()) == pytest.approx(0.1 / (1e-9 * 12), rel=0.2)


def test_an_example_whose_gradient_is_no_number_adds_nothing() -> None:
    from befit.train.private import add_clipped

    sums = {"a": torch.zeros(2), "b": torch.zeros(1)}
    add_clipped(sums, {"a": torch.tensor([[3.0, 0.0], [float("inf"), 0.0]]), "b": torch.tensor([[4.0], [1.0]])}, 1.0)
    assert torch.allclose(sums["a"], torch.tensor([0.6, 0.0])) and torch.allclose(sums["b"], torch.tensor([0.8]))


@pytest.mark.parametrize("size", [1e-30, 1e-24, 1.0, 1e30])
def test_gradients_are_clipped_whose_squares_float32_does_not_hold(size: float) -> None:
    from befit.train.private import add_clipped

    count, clip = 5, size * 1e-3
    gradients = {"a": torch.full((count, 8, 4), size), "b": torch.full((count, 3), -size)}
    sums = {key: torch.zeros_like(value[0]) for key, value in gradients.items()}
    add_clipped(sums, gradients, clip)
    norm = torch.cat([value.flatten() for value in sums.values()]).double().norm()
    assert float(norm) == pytest.approx(count * clip, rel=1e-5)  # all in one direction: as long as may be


def test_the_numbers_are_normal_and_nobody_else_has_them() -> None:
    """Moments of 200,000 draws within five standard errors; two keys, or the same key later, have nothing in common.

    The first numbers are what hashlib and math alone make of the key.
    """
    chance = Chance(b"one")
    values = chance.normal(200_000)
    error = 5 / math.sqrt(200_000)
    assert abs(float(values.mean())) < error and abs(float(values.square().mean()) - 1) < error * math.sqrt(2)
    assert abs(float(values.pow(4).mean()) - 3) < error * math.sqrt(96)
    later, other = chance.normal(200_000), Chance(b"two").normal(200_000)
    assert abs(float((values * later).mean())) < error and abs(float((values * other).mean())) < error
    first = [-1.66337419, 0.34006268, -3.02493977, -0.89630473, -1.05853689]
    assert Chance(b"one").normal(5).tolist() == pytest.approx(first, abs=1e-6)


def test_every_example_joins_a_batch_by_itself() -> None:
    site = private_site("vit")
    assert site.mechanism is not None
    sizes = torch.tensor([float(len(batch)) for batch in site.mechanism.batches(4000)])
    assert float(sizes.mean()) == pytest.approx(4, abs=0.15)
    assert float(sizes.var()) == pytest.approx(12 * (4 / 12) * (8 / 12), rel=0.12)


def test_texts_go_through_the_model_by_length() -> None:
    """Of 40 short texts and 8 long ones, no batch pads a short one to the length of a long one; none is left out."""
    site = make_site("bert", TWO, budget=replace(BUDGET, batch_size=64, micro_batch=None))
    lengths = torch.tensor([5, 60, 5, 5, 5, 5] * 8)
    examples = PaddedExamples({"input_ids": torch.ones(48, 60, dtype=torch.int32)}, lengths)
    mechanism = Mechanism(0.0, 1.0, 0.8, Chance(b"k"), lambda split: examples, Gradients(), left=3)
    (step,) = training_of(replace(site, mechanism=mechanism), 1).batches()
    drawn = next(Mechanism(0.0, 1.0, 0.8, Chance(b"k"), lambda split: examples, Gradients()).batches(1))
    assert torch.equal(torch.cat(step).sort().values, drawn)
    assert [set(lengths[part].tolist()) for part in step] == [{60}, {5}]


def training_of(site: Site, steps: int) -> Private:
    asked = next(training(site, [SHARED], AT, steps=steps))
    assert site.mechanism is not None
    return Private(asked, site.mechanism)


def test_training_beyond_what_a_stage_declares_is_refused() -> None:
    site = private_site("vit")
    train(site, [SHARED], AT)
    with pytest.raises(RunError, match="1 steps on the train examples"):
        train(site, [SHARED], AT, steps=1)
    with pytest.raises(RunError, match="2 passes"):
        train(private_site("vit"), [SHARED, replace(SHARED, name="again")], AT)
    with pytest.raises(RunError, match="steps on the val examples"):
        train(private_site("vit"), [SHARED], AT, split="val")
