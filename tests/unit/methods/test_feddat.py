"""FedDAT's two losses (snumprlab/fedmosaic, federated_methods/feddat.py)."""

from __future__ import annotations

import pytest
import torch

from befit.adapters.keys import select, slot
from befit.adapters.mixers import Mix, Weighted
from befit.adapters.state import rename
from befit.core.errors import ConfigError
from befit.core.values import Payload, Tick
from befit.methods.feddat import Learn
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.tasks.examples import StackedExamples
from befit.train.loop import train
from tests.tiny import assert_near, assert_same, federated, make_site, random_state

HALVES = Weighted((0.5, 0.5))
AT = Tick("federate", 1, 2, 0)


def method() -> Recipe:
    made = build_method({"name": "feddat", "rank": 2})
    assert isinstance(made, Recipe)
    return made


def objective(site: Site, active: tuple[str, ...], mixer: Mix, term: Learn) -> tuple[torch.Tensor, torch.Tensor]:
    """What a pass minimises on a batch, and the task's loss alone."""
    batch = site.examples("train").batch(range(5))
    with site.model.active(*active, mixer=mixer):
        logits = site.logits(batch)
        task = site.task.loss(logits, batch)
        return (task + term.bind(site)(batch, logits)) / 2, task


def test_both_losses_are_half_the_task_and_half_the_divergence(kind: str) -> None:
    """`KL_T(t -> s) = T^2 mean sum p_t (log p_t - log p_s)` from the probabilities themselves, T = 2."""
    site = make_site(kind, method().layout)
    site.model.load(random_state(site.model))
    batch = site.examples("train").batch(range(5))
    with torch.no_grad():
        with site.model.active("shared"):
            w, _ = site.task.judged(site.logits(batch), batch)
        with site.model.active("frozen", "personal", mixer=HALVES):
            dual, _ = site.task.judged(site.logits(batch), batch)
    first, second = method().passes
    for one, student, teacher in ((first, w, dual), (second, dual, w)):
        (term,) = one.terms
        assert isinstance(term, Learn)
        p, q = ((z.double() / 2).softmax(-1) for z in (teacher, student))
        kl = 4 * (p * (p / q).log()).sum(-1).mean()
        with torch.no_grad():
            found, task = objective(site, one.active, one.mixer, term)
        assert float(found) == pytest.approx((float(task) + float(kl)) / 2, rel=1e-4)
        assert float(kl) > 1e-3


def test_equal_adapters_have_nothing_to_teach_each_other(kind: str) -> None:
    site = make_site(kind, method().layout)
    one = select(random_state(site.model), slot("shared"))
    site.model.load({**one, **rename(one, "frozen"), **rename(one, "personal")})
    for part in method().passes:
        (term,) = part.terms
        assert isinstance(term, Learn)
        with torch.no_grad():
            found, task = objective(site, part.active, part.mixer, term)
        assert float(found) == pytest.approx(float(task) / 2, rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "vit"])
def test_parts_of_a_batch_add_up_to_both_losses(kind: str) -> None:
    """Parts of 3, 3 and 1 of 7 examples: answers of other lengths, or examples of other weights, which count in the
    task's half alone."""
    ends = []
    for most in (None, 3):
        budget = TrainSettings(max_steps=2, batch_size=7, lr=5e-2, optimiser="sgd", micro_batch=most)
        site = make_site(kind, method().layout, rows=7, budget=budget)
        if kind == "vit":
            arrays = site.examples("train").batch(range(7))
            weighed = StackedExamples({**arrays, "weights": torch.linspace(0.1, 4, 7)})
            site = Site(site.info, site.model, site.task, budget, lambda split, weighed=weighed: weighed)
        site.model.load(random_state(site.model, seed=1))
        losses = train(site, method().passes, AT).losses
        ends.append((losses, site.model.dump(slot("shared", "personal"))))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-5)
    assert_near(ends[0][1], ends[1][1], 2e-6)


def test_a_teacher_gets_no_gradient() -> None:
    site = make_site("llama", method().layout)
    site.model.load(random_state(site.model))
    term = Learn(("shared",), "sum", 2.0)
    with site.model.trainable(slot("shared", "personal")):
        found, _ = objective(site, ("frozen", "personal"), HALVES, term)
        site.model.zero_gradients()
        found.backward()
    gradients = {key: leaf.grad for key, leaf in site.model.leaves(slot("shared", "personal")).items()}
    assert all(bool(grad.any()) == key.startswith("personal") for key, grad in gradients.items() if grad is not None)


def test_a_round_starts_the_frozen_copy_from_the_download_and_only_the_shared_adapter_leaves() -> None:
    site = make_site("llama", method().layout)
    received = Payload(select(random_state(site.model), slot("shared")))
    memory, reply = finish(federated(method()).client_update(Payload(), received, site, AT))
    assert_same(site.model.dump(slot("frozen")), rename(received.arrays, "frozen"))
    assert {key.partition("/")[0] for key in reply.arrays} == {"shared"}
    assert {key.partition("/")[0] for key in memory.arrays} >= {"personal"}
    deployed = method().deploy(memory, received, site)
    assert deployed.slots == ("shared", "personal") and deployed.mixer == HALVES
    assert_same(select(deployed.arrays, slot("shared")), received.arrays)


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"temperature: must be positive, got 0\.0"):
        build_method({"name": "feddat", "temperature": 0.0})
