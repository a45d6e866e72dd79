"""Loss, gradients and scores of `preference` against TRL's DPOTrainer, to 1e-5.

`data/dpo_of_trl.npz` was made once by scripts/dpo_of_trl.py with TRL 1.16 (`loss_type="sigmoid"`), on this file's
model, adapter and pairs. No value in them is random, so that no release of anything changes them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import lora
from befit.adapters.model import AdaptedModel
from befit.tasks import make_task
from befit.train.persample import sample_gradients
from tests.unit.models.tiny_models import word_tokenizer

DATA = Path(__file__).parent / "data" / "dpo_of_trl.npz"
BETA, RANK, ALPHA, TARGETS = 0.3, 2, 4.0, ("q_proj", "v_proj")
PAIRS = [
    {"prompt": "good film", "chosen": " very good", "rejected": " bad"},
    {"prompt": "book", "chosen": " a b", "rejected": " a b c d e"},
    {"prompt": "a b c d", "chosen": " e", "rejected": " very very bad film"},
    {"prompt": "bad book a", "chosen": " d c b", "rejected": " d d b"},
]


def backbone() -> LlamaForCausalLM:
    config: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=14, intermediate_size=24, **config, **special))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(waves(parameter.shape, index) if parameter.dim() > 1 else torch.ones_like(parameter))
    return model.eval()


def tokenizer() -> Any:
    return word_tokenizer(["<pad>", "<unk>", "<bos>", "<eos>"], pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def waves(shape: torch.Size, index: int) -> Tensor:
    """Numbers as scattered as random ones."""
    places = torch.arange(shape.numel(), dtype=torch.float64) * 12.9898 + index * 78.233
    return 0.6 * torch.sin(places).view(shape).float()


def adapter() -> dict[str, Tensor]:
    """By layer, projection and factor, in this order."""
    shapes = {"A": torch.Size((RANK, 16)), "B": torch.Size((16, RANK))}
    names = [f"{layer}.{target}.{factor}" for layer in (0, 1) for target in TARGETS for factor in shapes]
    return {name: waves(shapes[name[-1]], 100 + index) for index, name in enumerate(names)}


@pytest.fixture(scope="module")
def site() -> Any:
    model = AdaptedModel(backbone(), TARGETS, head=False)
    model.install(lora(RANK, ALPHA), 0)
    task: Any = make_task("preference", tokenizer(), dpo_beta=BETA)
    with model.active():
        examples = task.refer(model.backbone, task.prepare(PAIRS), 4, "cpu")
    keys = {name: "shared/block.0{}.{}/{}".format(*name.split(".")) for name in adapter()}
    model.load({keys[name]: value for name, value in adapter().items()})
    assert set(keys.values()) == set(model.dump(EVERYTHING))
    logits = lambda batch: task.logits(model.backbone, batch)  # noqa: E731
    return SimpleNamespace(model=model, task=task, logits=logits, examples=examples, keys=keys)


def test_losses_of_single_pairs_and_of_a_batch_are_those_of_trl(site: Any) -> None:
    known = np.load(DATA)
    with torch.no_grad(), site.model.active("shared"):
        batch = site.examples.batch(range(4))
        together = site.task.sample_losses(site.logits(batch), batch)
        single = [
            float(site.task.loss(site.logits(one), one)) for one in map(site.examples.batch, [[0], [1], [2], [3]])
        ]
        scores = site.task.evaluate(site.model.backbone, site.examples, 2, "cpu")
    np.testing.assert_allclose(together, known["losses"], atol=1e-5)
    np.testing.assert_allclose(single, known["losses"], atol=1e-5)
    assert float(site.task.terms(batch).sum()) == 4  # by which parts of a step add up
    assert scores == pytest.approx(
        {
            "preference_accuracy": float(known["accuracy"]),
            "reward_margin": float(known["margin"]),
            "loss": float(known["losses"].mean()),
        },
        abs=1e-5,
    )


def test_the_gradient_of_each_pair_is_that_of_trl(site: Any) -> None:
    """A pair is one sample of per-sample statistics, though it has two rows; their mean is the batch's gradient."""
    known = np.load(DATA)
    batch = site.examples.batch(range(4))
    each = sample_gradients(site, batch, "shared")
    with site.model.active("shared"), site.model.trainable(slot("shared")):
        site.model.zero_gradients()
        site.task.loss(site.logits(batch), batch).backward()
        whole = {key: leaf.grad.clone() for key, leaf in site.model.leaves(EVERYTHING).items()}
    for name, key in site.keys.items():
        np.testing.assert_allclose(each[key], known[name], atol=1e-5)
        np.testing.assert_allclose(whole[key], known[name].mean(0), atol=1e-5)
