"""A sketch of a client's data: the gradient of a frozen model's last layer for them (FedMosaic, eqs. 1 to 3).

All clients use one small frozen model, without any adapter, so that their gradients can be compared. The
layer, which the paper calls the last, is that of snumprlab/fedmosaic: the last block's output projection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from befit.adapters.layout import ModelShapes
from befit.adapters.model import last_projection
from befit.core.errors import DataError, ModelError, NotTrained, PayloadMismatch
from befit.core.schema import SHARE, check_fields
from befit.core.seeds import derive_seed
from befit.core.values import Payload, Scalar, TensorSpec, Tick
from befit.merge.trim import kept_count
from befit.protocol.context import Problem
from befit.protocol.site import Backbone, Site, shuffled_batches
from befit.tasks.base import to_device

SKETCH = "sketch/last/gradient"
FEW = 40  # records behind an upload in the paper's schedule: ten batches of four
ARRIVING = 20  # batches of a newcomer's data that its gradient is the mean of: 80 records of the paper's batches of 4


@dataclass(frozen=True)
class Sketch:
    """Which entries of the last layer's gradient G (d_out, d_in) travel: an array of the layout beside the slots.

    share  how much of it
    mask   "random" entries, the same for all clients and rounds, from the run's seed; or the first "rows"

    Entries have to be the same for everybody, since a cosine compares them: with masks of one's own it shrinks to about
    `share` times its value.
    """

    share: Annotated[float, SHARE] = 0.4
    mask: Literal["random", "rows"] = "random"

    def __post_init__(self) -> None:
        check_fields(self, "the sketch")

    def shape(self, last: tuple[int, int]) -> tuple[int, ...]:
        d_out, d_in = last
        if self.mask == "rows":
            return kept_count(self.share, d_out), d_in
        return (kept_count(self.share, d_out * d_in),)

    def specs(self, shapes: ModelShapes) -> dict[str, TensorSpec]:
        if not all(shapes.last):
            raise ModelError("the gradient of the last layer needs a model with transformer blocks of linear modules")
        return {SKETCH: TensorSpec(self.shape(shapes.last))}

    def take(self, gradient: Tensor, seed: int) -> Tensor:
        """The entries that travel, float32, of a whole gradient."""
        d_out, d_in = gradient.shape
        count = self.shape((d_out, d_in))[0]
        if self.mask == "rows":
            return gradient[:count].float()
        return gradient.flatten()[_entries(d_out * d_in, count, seed)].float()

    def identity(self, fingerprint: str, last: tuple[int, int], seed: int) -> str:
        """A hash of all that gradients need to have in common to be compared: the model's weights, and the entries.

        last  shape of the projection (d_out, d_in)
        """
        return _identity(fingerprint, last, self.share, self.mask, seed)


@lru_cache(maxsize=8)
def _identity(fingerprint: str, last: tuple[int, int], share: float, mask: Literal["random", "rows"], seed: int) -> str:
    count = Sketch(share, mask).shape(last)[0]
    digest = hashlib.sha256(f"{fingerprint} {last} {mask} {count}".encode())
    if mask == "random":  # the entries themselves: another release of PyTorch may draw others by the same seed
        digest.update(_entries(last[0] * last[1], count, seed).numpy().tobytes())
    return digest.hexdigest()[:16]


def agreement(scalars: Mapping[str, Scalar], sketch: Sketch | None, seed: int) -> dict[str, Scalar]:
    """That hash as the server knows it: `sketch`, from `smallest` (a fingerprint) and `last` (a shape) of its memory.

    Empty where nobody takes gradients.
    """
    if sketch is None or "smallest" not in scalars:
        return {}
    d_out, d_in = scalars["last"]  # type: ignore[misc]
    return {"sketch": sketch.identity(str(scalars["smallest"]), (d_out, d_in), seed)}  # type: ignore[arg-type]


def check_agreed(received: Payload, site: Site, sketch: Sketch, seed: int) -> None:
    """Raise PayloadMismatch where the server's clients compare gradients of another model, or other entries of them."""
    if "sketch" not in received.scalars or site.common is None:
        return
    small, theirs = site.common, str(received.scalars["sketch"])
    own = sketch.identity(small.fingerprint, small.model.shapes.last, seed)
    if own != theirs:
        raise PayloadMismatch(
            f"client {site.info.id} would take gradients {own}, and the server compares {theirs}: "
            f"the smallest backbone is {small.fingerprint[:16]} here; it, share, mask, seed "
            "and PyTorch's release have to be the same everywhere"
        )


@lru_cache(maxsize=2)
def _entries(size: int, count: int, seed: int) -> Tensor:
    """`count` of `size` places, in order."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "entries of the last layer's gradient"))
    return torch.randperm(size, generator=generator)[:count].sort().values


def few_records(batches: int, batch_size: int, smallest: int) -> list[Problem]:
    """A warning where fewer records stand behind an upload than in the paper's schedule.

    batches     whose gradients a round's upload is the mean of
    batch_size  records of each
    smallest    training records of the client that has fewest
    """
    if (behind := min(batches * batch_size, smallest)) >= FEW:
        return []
    text = (
        f"one upload is the mean gradient of {behind} records ({batches} x {batch_size}), and the server can tell what "
        "they are about by comparing it with gradients of its own; a smaller every, more steps or larger batches put "
        f"more records behind it, and {FEW} still name a task (docs/methods/rela.md, Traps)"
    )
    return [Problem("warning", "relevance.every", text)]


def one_gradient(steps: int, every: int) -> list[Problem]:
    """A warning where a round of so many steps takes a single gradient and could take more."""
    if not 1 < steps <= every:
        return []
    often = max(1, steps // 10)
    text = (
        f"a round has {steps} steps, so that it takes one gradient, of its first batch alone; set "
        f"relevance.every: {often} for {ceil(steps / often)}, where the paper takes 10 in 100 steps"
    )
    return [Problem("warning", "relevance.every", text)]


def last_gradient(small: Backbone, batch: dict[str, Tensor]) -> Tensor:
    """Gradient of the task's loss with respect to the weight of the last block's output projection (d_out, d_in).

    `G = sum_t g_t u_t^T` with u the projection's input and g the gradient of its output: exact, for every model, and
    backward only through what follows the last block. float32, on the CPU.
    """
    projection = last_projection(small.model.backbone)
    with small.model.training(False), small.model.active(), _watching(projection) as seen:
        loss = small.task.loss(small.task.logits(small.model.backbone, batch), batch)
        (g,) = torch.autograd.grad(loss, seen["output"])
    g, u = (value.reshape(-1, value.shape[-1]).float() for value in (g, seen["input"]))
    used = g.any(-1)  # tokens outside the loss, such as padding, have zero gradient
    return (g[used].T @ u[used]).cpu()


@contextmanager
def _watching(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Keep the module's input, and its output as a leaf that gets a gradient."""
    seen: dict[str, Tensor] = {}

    def keep(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if "output" in seen:
            raise ModelError("the last block's output projection ran twice in one forward pass")
        seen["input"], seen["output"] = inputs[0].detach(), output.detach().requires_grad_(True)
        return seen["output"]

    handle = module.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def mean_sketch(site: Site, at: Tick, sketch: Sketch, every: int, noise: float) -> Tensor:
    """Mean of `take(G) + noise * eps` over the round's batches 0, every, 2 every, … as the small model sees them.

    eps  standard normal, fresh for every batch, by a seed of client and round

    Deviation: the released code takes one example of a batch, at irregular steps; here it is the whole batch.
    """
    steps = enumerate(site.indices("train", site.budget.max_steps, at))
    return _mean(site, at, sketch, noise, (indices for step, indices in steps if step % every == 0))


def disturbed(gradient: Tensor, site: Site, at: Tick, noise: float) -> Tensor:
    """`gradient + noise * eps`, eps standard normal, fresh for every client and round."""
    if not noise:
        return gradient
    generator = torch.Generator().manual_seed(at.seed_for(site.info.id, "noise on uploads"))
    return gradient + noise * torch.randn(gradient.shape, generator=generator)


def newcomer_sketch(site: Site, at: Tick, sketch: Sketch, noise: float) -> Tensor:
    """The same mean over 20 batches of a client that takes no part in any round, of all its training data.

    Raises NotTrained where it has none.
    """
    who = site.info.id
    if not (count := len(site.examples("train"))):
        raise NotTrained(f"newcomer {who} has no training examples, so nothing says whose adapters are like its own")
    generator = torch.Generator().manual_seed(at.seed_for(who, "batches"))
    return _mean(site, at, sketch, noise, shuffled_batches(count, site.budget.batch_size, ARRIVING, generator))


def _mean(site: Site, at: Tick, sketch: Sketch, noise: float, batches: Iterable[Tensor]) -> Tensor:
    """Over these batches, which are places in the client's training data."""
    if site.common is None or site.common_examples is None:
        raise DataError(f"client {site.info.id} has no small common model to take gradients of")
    examples, device = site.common_examples("train"), site.common.model.device
    generator = torch.Generator().manual_seed(at.seed_for(site.info.id, "noise on gradients"))
    total, count = torch.zeros(()), 0
    for indices in batches:
        batch = to_device(examples.batch(indices), device)
        taken = sketch.take(last_gradient(site.common, batch), at.seed)
        total = total + taken + noise * torch.randn(taken.shape, generator=generator)
        count += 1
    return total / count
