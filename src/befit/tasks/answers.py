"""The answer tokens of a batch of texts: where they are, and a language model's logits for them alone.

The places are found before a batch goes to a device, so that nothing has to be read back from there; and the output
embedding sees these tokens alone, so that no logits of prompts or padding are ever made.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from befit.adapters.layer import SlotLinear
from befit.core.values import IGNORED

ANSWERS = "answers"


def answer_places(labels: Tensor) -> Tensor:
    """(answer tokens,) int64: the places in a flattened batch whose logits predict a label.

    labels  (batch, tokens), -100 where nothing is learnt; the logits at position t predict the label at t + 1

    >>> import torch
    >>> answer_places(torch.tensor([[-100, -100, 7], [-100, 8, 9]])).tolist()  # the second row begins at 3
    [1, 3, 4]
    """
    learnt = labels != IGNORED
    learnt[:, 0] = False  # nothing predicts it
    return learnt.flatten().nonzero()[:, 0] - 1


def answer_logits(model: nn.Module, places: Tensor, **inputs: Any) -> Tensor:
    """(answer tokens, vocabulary) of one forward pass over `inputs`, at these places of the flattened batch.

    The states are chosen in front of the output embedding. Behind it they are where a model has none that it calls, and
    where it carries adapters, which may tell the samples apart.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    chosen = False

    def choose(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal chosen
        chosen = True
        return (_at(args[0], places, inputs["input_ids"].numel()),)

    if not isinstance(head, nn.Module) or isinstance(head, SlotLinear):
        logits = model(**inputs).logits
    else:
        hook = head.register_forward_pre_hook(choose)
        try:
            logits = model(**inputs).logits
        finally:
            hook.remove()
    return (logits if chosen else _at(logits, places, inputs["input_ids"].numel()))[0]


_CAUSAL: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def is_causal(model: nn.Module) -> bool:
    """Whether every attention layer of the text part says that a token sees none after it."""
    if model not in _CAUSAL:
        text = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
        _CAUSAL[model] = {getattr(module, "is_causal", None) for module in text.modules()} - {None} == {True}
    return _CAUSAL[model]


def _at(values: Tensor, places: Tensor, tokens: int) -> Tensor:
    """(copies, places, width) of (copies x batch, tokens of each, width): a mixer may put a batch in several times."""
    return values.reshape(-1, tokens, values.shape[-1]).index_select(1, places)
