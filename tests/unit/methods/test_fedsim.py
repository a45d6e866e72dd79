"""FedSim: the sum of two models' logits as FedMosaic compares with it, against two models run one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import EVERYTHING, select, slot, slot_of
from befit.adapters.model import AdaptedModel
from befit.core.values import Payload, Tick
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.protocol.work import Work
from befit.runs.peft_io import write_adapter
from befit.tasks.causal_lm import CausalLM
from befit.train.loop import train
from tests.federation import Clients
from tests.tiny import assert_near, federated, make_site, random_state, tiny_model, tiny_task

BOTH = ("shared", "personal")
AT = Tick("federate", 1, 2, 0)


def method(**settings: Any) -> Recipe:
    made = build_method({"name": "fedsim", "rank": 2, **settings})
    assert isinstance(made, Recipe)
    return made


def loaded(kind: str, **settings: Any) -> Site:
    site = make_site(kind, method().layout, **settings)
    site.model.load(random_state(site.model))
    return site


def one_by_one(site: Site, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for name in BOTH:
        with site.model.active(name):
            total = total + site.logits(batch)
    return total


def test_logits_are_the_sum_of_two_models_and_so_are_gradients(kind: str) -> None:
    """By the chain rule on two forward passes, one with each adapter."""
    site = loaded(kind, targets="all")
    batch = site.examples("train").batch(range(5))
    gradients = []
    with site.model.trainable(slot(*BOTH)):
        for together in (False, True):
            site.model.zero_gradients()
            if together:
                with site.model.active(*BOTH, mixer="logits"):
                    logits = site.logits(batch)
                    site.task.loss(logits, batch).backward()
            else:
                expected = one_by_one(site, batch)
                site.task.loss(expected, batch).backward()
            gradients.append(
                {key: leaf.grad.clone() for key, leaf in site.model.leaves(EVERYTHING).items() if leaf.grad is not None}
            )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert_near(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    assert {slot_of(key) for key, grad in gradients[0].items() if grad.any()} == set(BOTH)


def test_a_text_is_generated_from_the_sum_with_a_cache_for_each_model() -> None:
    """Greedy decoding without any cache, from both models' logits added up by hand."""
    site = loaded("llama")
    task = tiny_task("llama")
    assert isinstance(task, CausalLM)
    task = CausalLM(task.tokenizer, max_new_tokens=6)
    prompts = [[5, 7, 9], [3, 4, 6, 8, 11], [2]]
    with site.model.active(*BOTH, mixer="logits"):
        found = task._answers(site.model.backbone, prompts, 3, "cpu")
    apart = set()
    for prompt, text in zip(prompts, found, strict=True):
        tokens = list(prompt)
        for _ in range(6):
            batch = {
                "input_ids": torch.tensor([[*tokens, 0]]),
                "attention_mask": torch.ones(1, len(tokens) + 1).long(),
                "labels": torch.tensor([[-100] * len(tokens) + [0]]),  # what follows the last token is asked for
            }
            with torch.no_grad():
                following = int(one_by_one(site, batch).argmax())
            if following == task.tokenizer.eos_token_id:
                break
            tokens.append(following)
        assert text == task.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
        with site.model.active("personal"):
            (alone,) = task._answers(site.model.backbone, [prompt], 1, "cpu")
        apart.add(alone != text)
    assert True in apart


def test_gradient_checkpointing_changes_nothing() -> None:
    """Recomputing a block has to see the adapter of its own copy."""
    trained = []
    for checkpointing in (False, True):
        backbone: Any = tiny_model("llama")
        if checkpointing:
            backbone.activation_checkpointing_enable({"use_reentrant": False})
        site = make_site("llama", method().layout, model=AdaptedModel(backbone, "all", head=False))
        site.model.load(random_state(site.model))
        train(site, method().passes, AT)
        trained.append(site.model.dump(EVERYTHING))
    assert_near(trained[1], trained[0], rtol=1e-4, atol=1e-6)


def test_a_teacher_s_pass_inside_is_of_one_model() -> None:
    site = loaded("vit")
    batch = site.examples("train").batch(range(4))
    with site.model.active("shared"):
        expected = site.logits(batch)
    with site.model.active(*BOTH, mixer="logits"):
        with site.model.active("shared"):
            torch.testing.assert_close(site.logits(batch), expected, rtol=0, atol=0)
        assert len(site.logits(batch)) == 4
    torch.testing.assert_close(site.logits(batch), make_site("vit", method().layout).logits(batch))


def test_only_the_shared_adapter_is_averaged_and_both_learn() -> None:
    clients = Clients(method())
    server = clients.run(rounds=2)
    sent = clients.uploads(2)
    assert {slot_of(key) for arrays in sent.values() for key in arrays} == {"shared"}
    for key, value in server.arrays.items():
        torch.testing.assert_close(value, torch.stack([arrays[key] for arrays in sent.values()]).mean(0))
    own = [select(clients.memory(name).arrays, slot("personal")) for name in "ab"]
    key = "personal/block.00.q_proj/B"
    assert own[0][key].any() and not torch.equal(own[0][key], own[1][key])


LEGACY = [{"name": "fedsim"}, {"name": "ditto"}, {"name": "feddpa", "variant": "halves"}]


@pytest.mark.parametrize("settings", LEGACY, ids=lambda one: one["name"])
def test_the_legacy_flag_averages_what_should_be_personal(settings: dict[str, Any]) -> None:
    """As in the released code of FedMosaic: with it, all clients are deployed one and the same model."""
    clients = Clients(build_method({**settings, "rank": 2, "legacy_average_personal": True, "weights": "uniform"}))
    server = clients.run(rounds=2)
    assert {slot_of(key) for key in server.arrays} == set(BOTH)
    for key, value in server.arrays.items():
        torch.testing.assert_close(value, torch.stack([one[key] for one in clients.uploads(2).values()]).mean(0))
    assert not any(slot_of(key) == "personal" for key in clients.memory("a").arrays)
    with pytest.raises(AssertionError):
        plain = Clients(build_method({**settings, "rank": 2, "weights": "uniform"})).run(rounds=2)
        assert {slot_of(key) for key in plain.arrays} == set(BOTH)


def test_a_step_is_counted_as_two_models_each_forward_and_backward() -> None:
    """2 (2N + 3n): the paper's 1.487 counts one backward pass."""
    works = method().work()
    assert [(work.active, str(work.trainable)) for work in works] == [
        (("shared",), str(slot(*BOTH) & slot("shared"))),
        (("personal",), str(slot(*BOTH) & slot("personal"))),
    ]
    assert all(isinstance(work, Work) and work.times == 1 for work in works)


def test_an_export_says_that_it_is_one_of_two_models(tmp_path: Path) -> None:
    site = loaded("bert")
    clients = method().use.deployment(site)
    write_adapter(tmp_path, clients, site.model, base="tiny", task="text-classification", label_names=("a", "b", "c"))
    card = (tmp_path / "README.md").read_text()
    assert "adds up the logits" in card and "'personal' alone" in card


def test_one_optimiser_keeps_its_averages_of_both() -> None:
    site = make_site("vit", method().layout)
    memory, _ = finish(federated(method()).client_update(Payload(), Payload(), site, AT))
    averages = [value for key, value in memory.arrays.items() if key.endswith("/exp_avg")]
    assert sum(one.numel() for one in averages) == site.model.count(slot(*BOTH))
