"""Greedy decoding of many prompts together: what is read, dropped and judged on the way changes no answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

from befit.protocol.registry import build_method
from befit.tasks import base
from befit.tasks.base import inference
from befit.tasks.causal_lm import CausalLM
from befit.tasks.generation import Following, greedy
from tests.tiny import make_site, random_state, tiny_model, tiny_task

STOP = (3, 7, 11, 19, 23)  # of 32 tokens, so that answers have many lengths
NEW = 7


def drawn(count: int, longest: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(2, 32, (length,), generator=draw).tolist() for length in lengths]


PROMPTS = drawn(24, 9, 0)
AFTER = drawn(24, 5, 1)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few prompts to a reading batch, so that these tests have many."""
    monkeypatch.setattr(base, "TOKENS", 40)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """(rows, tokens) of every forward pass."""
    shapes: list[tuple[int, int]] = []
    handle = model.register_forward_pre_hook(
        lambda _model, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        handle.remove()


def answers(model: nn.Module, prompts: Sequence[Sequence[int]] = PROMPTS, **settings) -> list[list[int]]:
    with inference(model):
        return greedy(model, prompts, STOP, 0, NEW, 16, "cpu", **settings)


def of_transformers(model: nn.Module, prompt: Sequence[int]) -> list[int]:
    """`generate` on one prompt by itself, without the token that ended it."""
    tokens = torch.tensor([prompt])
    most = min(NEW, 16 - len(prompt))
    config = GenerationConfig(
        do_sample=False, max_new_tokens=most, pad_token_id=0, bos_token_id=1, eos_token_id=list(STOP)
    )
    said = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)  # pyright: ignore
    found = said[0, len(prompt) :].tolist()
    return found[:-1] if found[-1] in STOP else found


def sliding() -> nn.Module:
    """A model that sees no farther back than three tokens: its cache is not one of keys and values of all tokens."""
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=32,
        sliding_window=3,
        initializer_range=0.3,
    )
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding"])
def test_answers_are_those_of_transformers_to_each_prompt_by_itself(kind: str) -> None:
    model = sliding() if kind == "sliding" else tiny_model(kind)
    expected = [of_transformers(model, prompt) for prompt in PROMPTS]
    assert len({len(answer) for answer in expected}) > 4 and max(map(len, expected)) == NEW
    for size in (24, 10, 1):
        assert answers(model, batch_size=size) == expected
    assert answers(model, following=Following(AFTER, lambda places, logits: None)) == expected


def test_prompts_are_read_by_length_and_those_that_are_answered_leave() -> None:
    model = tiny_model("llama")
    with watched(model) as shapes:
        found = answers(model)
    reading = list(takewhile(lambda shape: shape[1] > 1, shapes))
    assert sum(rows for rows, _ in reading) == 24 and len(reading) > 3
    assert all(rows * width <= 40 for rows, width in reading)
    assert [width for _, width in reading] == sorted((width for _, width in reading), reverse=True)
    # Then all are answered together: a pass for each further token of the longest answer, and none after it.
    rows = [rows for rows, _ in shapes[len(reading) :]]
    assert len(rows) == max(map(len, found)) - 1
    left = [sum(len(answer) >= given for answer in found) for given in range(1, NEW)]
    assert all(running <= there <= running / 0.75 + 1 for running, there in zip(left, rows, strict=True))
    assert rows[-1] < 12


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_what_follows_is_judged_as_in_a_pass_of_its_own(kind: str) -> None:
    """The logits of prompt and answer read alone, from the prompt's last token on."""
    model = sliding() if kind == "sliding" else tiny_model(kind)
    seen: dict[int, Tensor] = {}

    def judge(places: list[int], logits: Tensor) -> None:
        seen.update({place: logits[row, : len(AFTER[place]) + 1] for row, place in enumerate(places)})

    answers(model, following=Following(AFTER, judge))
    assert sorted(seen) == list(range(24))
    for place, (prompt, after) in enumerate(zip(PROMPTS, AFTER, strict=True)):
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([[*prompt, *after]])).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(seen[place], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "block",
    [{"name": "fedsim"}, {"name": "feddpa", "instances": 3}, {"name": "fedalt"}],
    ids=lambda block: block["name"],
)
def test_mixers_keep_every_prompt_s_own_numbers_when_others_leave(block: dict[str, object]) -> None:
    """Copies side by side (FedSim), weights by input (FedDPA) and gates (FedALT): each prompt by itself."""
    method = build_method({**block, "rank": 2})
    site = make_site("llama", method.layout)
    site.model.load(random_state(site.model))
    use = method.use  # pyright: ignore[reportAttributeAccessIssue]
    with site.model.active(*use.slots, mixer=use.mixer):
        alone = [answers(site.model.backbone, [prompt])[0] for prompt in PROMPTS]
        together = answers(site.model.backbone, following=Following(AFTER, lambda places, logits: None))
    assert together == alone
    with site.model.active(use.slots[0]):
        assert answers(site.model.backbone) != alone
    assert len({len(answer) for answer in alone}) > 3


def test_loss_and_answers_take_one_pass_over_the_prompts() -> None:
    """And come to what each comes to by itself."""
    model, plain = tiny_model("llama"), tiny_task("llama")
    assert isinstance(plain, CausalLM)
    records = [{"instruction": " ".join(f"w{token}" for token in prompt), "output": "w5 w6"} for prompt in PROMPTS]
    settings = {"prompt": "{instruction}", "max_new_tokens": 4}
    both = CausalLM(plain.tokenizer, metrics=["token_f1"], **settings)  # pyright: ignore[reportArgumentType]
    told = CausalLM(plain.tokenizer, **settings)  # pyright: ignore[reportArgumentType]
    with watched(model) as shapes:
        found = both.evaluate(model, both.prepare(records), 24, "cpu")
    assert sum(rows for rows, width in shapes if width > 1) == 24
    examples = told.prepare(records)
    loss = told.evaluate(model, examples, 24, "cpu")
    assert found["loss"] == pytest.approx(loss["loss"], rel=1e-6) and loss["token_accuracy"] == found["token_accuracy"]
    assert found["token_f1"] == both.headline(model, both.prepare(records), 24, "cpu")
