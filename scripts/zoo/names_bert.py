"""Trains the backbones of the `names` benchmark: `python -m scripts.zoo.names_bert` rebuilds both.

`names-bert-mlm` has learned to fill in masked bytes of the public languages' names. `names-bert-fl` is what standard
federated learning makes of it: federated averaging of all its weights over the seen clients, so that it knows the task
and there is something left to personalise. Newcomers' names and test names are seen by neither.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from befit.adapters.state import weighted_mean
from befit.core.seeds import derive_seed
from befit.core.storage import write_json
from befit.core.values import State
from befit.data.federation import ClientData, Federation
from befit.data.offline.names import names
from befit.models.backbone import quiet
from befit.protocol.site import shuffled_batches
from befit.tasks import make_task
from befit.tasks.base import Examples
from befit.zoo import FOLDER

__all__ = ["byte_tokenizer", "federated", "masked", "masked_language_model", "new_model"]

logger = logging.getLogger(__name__)

POSITIONS, SEED = 64, 0
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
MLM = {"steps": 1200, "batch_size": 64, "rate": 1e-3, "masked": 0.15}
# Rounds until the mean accuracy of the seen clients is about one half, so that personal adapters have room above it. A
# tenth of the clients a round, as in FedP2EFT, stays at 0.43: with labels this skewed few clients pull the mean about.
FEDERATED = {"rounds": 9, "cohort": 20, "epochs": 1, "batch_size": 32, "rate": 1e-3}


def byte_tokenizer() -> Any:
    """260 tokens: pad, cls, sep, mask, and the 256 bytes of UTF-8. No text is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: Any) -> Any:
    """A BERT with three layers of width 128 over bytes, with the head for masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    return BertForMaskedLM(config)


def masked(tokens: Tensor, mask: int, size: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and labels of masked language modelling (Devlin et al. 2019, section 3.1).

    tokens  (batch, length) ids; those below the number of special tokens are never chosen
    ->      (batch, length) ids, of the chosen 80 % masked, 10 % another byte and 10 % as they were; and the true ids,
            -100 where nothing was chosen
    """
    chosen = (torch.rand(tokens.shape, generator=generator) < share) & (tokens >= len(SPECIALS))
    how = torch.rand(tokens.shape, generator=generator)
    other = torch.randint(len(SPECIALS), size, tokens.shape, generator=generator)
    inputs = torch.where(chosen & (how < 0.8), torch.tensor(mask), tokens)
    inputs = torch.where(chosen & (how >= 0.9), other, inputs)
    return inputs, torch.where(chosen, tokens, -100)


def masked_language_model(federation: Federation, tokenizer: Any) -> Any:
    """The encoder after pre-training on the public languages; AdamW with a rate that falls to zero along a line."""
    model = new_model(tokenizer)
    examples = make_task("text-classification", tokenizer, federation.label_names, max_length=POSITIONS).prepare(
        federation.public
    )
    generator = torch.Generator().manual_seed(SEED)
    optimiser = torch.optim.AdamW(model.parameters(), lr=MLM["rate"])
    falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, MLM["steps"])
    model.train()
    batches = shuffled_batches(len(examples), MLM["batch_size"], MLM["steps"], generator)
    for step, indices in enumerate(batches):
        batch = examples.batch(indices)
        inputs, labels = masked(batch["input_ids"], tokenizer.mask_token_id, len(tokenizer), MLM["masked"], generator)
        loss = model(input_ids=inputs, attention_mask=batch["attention_mask"], labels=labels).loss
        descend(loss, optimiser)
        falling.step()
        if step % 100 == 0:
            logger.info("masked bytes, step %d: loss %.3f", step, loss.item())
    return model.eval()


def federated(federation: Federation, tokenizer: Any, pretrained: Path) -> Any:
    """Federated averaging (McMahan et al. 2017) of all weights over the seen clients, a third of them a round."""
    from transformers import BertForSequenceClassification

    task = make_task("text-classification", tokenizer, federation.label_names, max_length=POSITIONS)
    named = dict(enumerate(federation.label_names))
    torch.manual_seed(SEED)  # of the pooler and the head, which are new
    with quiet():
        model = BertForSequenceClassification.from_pretrained(
            pretrained, id2label=named, label2id={name: index for index, name in named.items()}
        )
    held = {client.id: task.prepare(client.train) for client in federation.clients}
    for number in range(1, FEDERATED["rounds"] + 1):
        generator = torch.Generator().manual_seed(derive_seed(SEED, "cohort", number))
        chosen = torch.randperm(len(held), generator=generator)[: FEDERATED["cohort"]].tolist()
        cohort: list[ClientData] = [federation.clients[index] for index in sorted(chosen)]
        start: State = {key: value.clone() for key, value in model.state_dict().items()}
        updates: list[State] = []
        for client in cohort:
            model.load_state_dict(start)
            train_locally(model, task, held[client.id], derive_seed(SEED, number, client.id))
            updates.append({key: value.clone() for key, value in model.state_dict().items()})
        model.load_state_dict(weighted_mean(updates, [len(client.train) for client in cohort]))
        if number % 3 == 0:
            scores = [
                task.evaluate(model, task.prepare(client.test), 256, "cpu")["accuracy"] for client in federation.clients
            ]
            logger.info("federated averaging, round %d: mean accuracy %.3f", number, sum(scores) / len(scores))
    return model.eval()


def train_locally(model: nn.Module, task: Any, examples: Examples, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = FEDERATED["batch_size"]
    steps = FEDERATED["epochs"] * -(-len(examples) // size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=FEDERATED["rate"], weight_decay=0.0)
    torch.manual_seed(seed)  # of dropout
    model.train()
    for indices in shuffled_batches(len(examples), size, steps, generator):
        batch = examples.batch(indices)
        descend(task.loss(task.logits(model, batch), batch), optimiser)


def descend(loss: Tensor, optimiser: torch.optim.Optimizer) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # the number of threads decides the order of sums, and so the last bits of the weights
    federation, tokenizer = names(), byte_tokenizer()
    here = FOLDER
    wanted = sys.argv[1:] or ["names-bert-mlm", "names-bert-fl"]
    if "names-bert-mlm" in wanted:
        ship("names-bert-mlm", masked_language_model(federation, tokenizer))
    if "names-bert-fl" in wanted:
        ship("names-bert-fl", federated(federation, tokenizer, here / "names-bert-mlm"))


def ship(name: str, model: Any) -> None:
    """Write a model and the tokenizer into the zoo, and its hash into sha256.json."""
    here = FOLDER
    model.save_pretrained(here / name)
    byte_tokenizer().save_pretrained(here / name)  # anew: one that was used remembers how it was asked to cut
    pins = json.loads((here / "sha256.json").read_text())
    pins[name] = hashlib.sha256((here / name / "model.safetensors").read_bytes()).hexdigest()
    write_json(here / "sha256.json", dict(sorted(pins.items())))


if __name__ == "__main__":
    main()
