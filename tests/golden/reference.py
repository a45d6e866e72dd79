"""What methods are checked against: a tiny vision transformer with dense weights, `torch.optim`, and plain loops.

Shares no code with befit. An *adapter* is a mapping from `module/factor`, such as `block.00.q_proj/A`, to its array; a
*change* is a mapping from the name of one of the model's parameters to what is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from tests.tiny import tiny_model

Arrays = dict[str, Tensor]

MODEL: Any = tiny_model("vit").requires_grad_(False)
WEIGHTS: Arrays = dict(MODEL.named_parameters())
# The modules that carry adapters, in order, and where the model has them.
MODULES = {
    f"block.0{block}.{name}": f"vit.layers.{block}.attention.{name}"
    for block in (0, 1)
    for name in ("q_proj", "v_proj")
}
HEAD = ("classifier/weight", "classifier/bias")
STEPS, RATE, SCALE = 3, 2e-2, 2.0

adamw = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)
sgd = partial(torch.optim.SGD, lr=RATE)


def change(adapter: Mapping[str, Tensor], times: float | Tensor = 1.0, scale: float = SCALE) -> Arrays:
    """`times (scale B A)` for each module (Hu et al. 2021, eq. 3), and `times` the head's arrays."""
    changes = {
        f"{path}.weight": times * scale * adapter[f"{name}/B"] @ adapter[f"{name}/A"] for name, path in MODULES.items()
    }
    return changes | {key.replace("/", "."): times * adapter[key] for key in HEAD if key in adapter}


def plus(*changes: Mapping[str, Tensor]) -> Arrays:
    """The sum of changes, parameter by parameter."""
    total: Arrays = {}
    for one in changes:
        for name, value in one.items():
            total[name] = total[name] + value if name in total else value
    return total


def logits(pixels: Tensor, *changes: Mapping[str, Tensor], hidden: bool = False) -> Tensor:
    """(records, classes) of the model with changed weights; with `hidden`, the last hidden state of the class token."""
    weights = {name: WEIGHTS[name] + value for name, value in plus(*changes).items()}
    output = functional_call(MODEL, weights, (), {"pixel_values": pixels, "output_hidden_states": hidden})
    return output.hidden_states[-1][:, 0] if hidden else output.logits


def loss(data: tuple[Tensor, Tensor], *changes: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy of (pixels, labels)."""
    pixels, labels = data
    return F.cross_entropy(logits(pixels, *changes), labels)


def soft_loss(target: Tensor, rows: Tensor) -> Tensor:
    """Mean over records of `KL(target || softmax(rows))`, written out."""
    return (target * (target.log() - rows.log_softmax(-1))).sum(-1).mean()


class Learner:
    """Arrays and an optimiser of `torch.optim` that learns them."""

    def __init__(self, start: Mapping[str, Tensor], make: Callable[..., torch.optim.Optimizer] = adamw) -> None:
        self.arrays = {key: value.detach().clone().requires_grad_(True) for key, value in start.items()}
        self.optimiser = make(list(self.arrays.values()))

    def step(self, objective: Tensor) -> None:
        self.optimiser.zero_grad()
        objective.backward()
        self.optimiser.step()

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Other values for some arrays; the optimiser remembers what it did."""
        with torch.no_grad():
            for key, value in values.items():
                self.arrays[key].copy_(value)

    @property
    def now(self) -> Arrays:
        return {key: value.detach().clone() for key, value in self.arrays.items()}


def trained(
    start: Mapping[str, Tensor],
    objective: Callable[[Arrays], Tensor],
    make: Callable[..., torch.optim.Optimizer] = adamw,
    steps: int = STEPS,
) -> Arrays:
    """The arrays after some steps on an objective, by a new optimiser."""
    learner = Learner(start, make)
    for _ in range(steps):
        learner.step(objective(learner.arrays))
    return learner.now


def mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> Arrays:
    """Array by array, in float64; without weights every state counts the same."""
    weights = [1.0] * len(states) if weights is None else weights
    return {
        key: sum(w / sum(weights) * state[key].double() for w, state in zip(weights, states, strict=True)).float()  # type: ignore[union-attr]
        for key in states[0]
    }


def only(arrays: Mapping[str, Tensor], *ends: str) -> Arrays:
    """The arrays whose key ends so."""
    return {key: value for key, value in arrays.items() if key.endswith(ends)}


def assert_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-3, atol: float = 2e-5
) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def beside(data: Tensor, branch: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Logits where `branch(module, x)` is added to the output of every module and of the head, called `classifier`.

    For updates that depend on the input, which no dense weight is.
    """
    places = {**MODULES, "classifier": "classifier"}
    handles = [
        MODEL.get_submodule(path).register_forward_hook(lambda _, inputs, y, name=name: y + branch(name, inputs[0]))
        for name, path in places.items()
    ]
    try:
        return MODEL(pixel_values=data).logits
    finally:
        for handle in handles:
            handle.remove()


def apply(adapter: Mapping[str, Tensor], name: str, x: Tensor, scale: float = SCALE) -> Tensor:
    """`scale B A x` at a module, or `weight x + bias` at the head."""
    if name == "classifier":
        return F.linear(x, adapter["classifier/weight"], adapter["classifier/bias"])
    return scale * x @ adapter[f"{name}/A"].T @ adapter[f"{name}/B"].T
