"""Gradients of every sample on its own, from one backward pass over the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from befit.adapters.layer import Branch
from befit.core.errors import ModelError

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.site import Site
    from befit.tasks.base import Batch


def sample_gradients(
    site: Site,
    batch: Batch,
    slot: str,
    space: Literal["factors", "product"] = "factors",
    reduction: Literal["mean", "sum"] = "mean",
    labels: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Gradient of each sample's loss in the arrays of one slot, with that slot alone active and dropout off.

    labels  draws the labels from the model's own probabilities, for the Fisher information proper; None takes the
            true labels

    ->  slot/module/factor: (samples, *shape of the factor), float32, for "factors";
        slot/module/delta: (samples, d_out, d_in), the gradient in delta = scale * B A, for "product"

    Samples do not interact in the models we adapt, so slice m of the gradient of the summed loss at a layer's output
    belongs to sample m: `G_B[m] = sum_t g[m,t] (A x[m,t])^T`, `G_A[m] = sum_t (B^T g[m,t]) x[m,t]^T`.
    Gradient checkpointing does not matter: it belongs to training mode, and a model that recomputes in any mode runs
    its hooks once all the same. A module that no sample reaches, as a projector without images, has gradients of zero.
    Raises ModelError for several samples of a model that mixes their rows, for a layer whose input does not lead with
    the samples, and for one that runs without gradients, where no backward pass arrives.
    """
    rows = len(next(iter(batch.values())))
    samples = rows // site.task.rows_each
    if samples > 1 and (reason := site.model.mixes_rows):
        raise ModelError(f"{reason}; per-sample gradients are taken of one sample at a time there, got {samples}")
    gradients: dict[str, Tensor] = {}

    def record(name: str, branch: Branch, inputs: Tensor, grad: Tensor) -> None:
        if samples > 1 and inputs.shape[0] != rows:
            raise ModelError(
                f"{name} sees an input of shape {tuple(inputs.shape)} for {rows} rows of a batch; per-sample "
                "gradients need these in the first dimension"
            )
        x = inputs.float().reshape(samples, -1, inputs.shape[-1])
        g = grad.detach().float().reshape(samples, -1, grad.shape[-1])
        parts = branch.gradients(x, g) if space == "factors" else {"delta": g.transpose(1, 2) @ x / branch.scale}
        for factor, value in parts.items():
            key = f"{name}/{factor}"  # a module that runs more than once per forward pass adds up
            gradients[key] = gradients[key] + value if key in gradients else value

    model = site.model
    with model.training(False), model.active(slot), model.recording(record), _without_gradients(model) as unseen:
        logits = site.logits(batch)
        if labels is not None:
            batch = site.task.draw_labels(logits, batch, labels)
        losses = site.task.sample_losses(logits, batch, reduction)
        if losses.requires_grad:  # false where no adapted layer left a trace in the loss
            losses.sum().backward()
    reached = {key.split("/")[1] for key in gradients}
    unseen -= reached
    if unseen:
        raise ModelError(
            f"no gradient reaches {len(unseen)} adapted modules, first {min(unseen)!r}: "
            "the model runs them without gradients, as re-entrant checkpointing does; switch that off, "
            "or make it non-reentrant, for per-sample gradients"
        )
    shapes = {**model.shapes.targets, **model.shapes.heads}
    for name in model.layers.keys() - reached:
        if slot in model.layers[name].branches:
            x, g = (torch.zeros(rows, 1, size, device=model.device) for size in (shapes[name].d_in, shapes[name].d_out))
            record(f"{slot}/{name}", model.layers[name].branches[slot], x, g)
    return {key: value.detach() for key, value in gradients.items()}


@contextmanager
def _without_gradients(model: AdaptedModel) -> Iterator[set[str]]:
    """Collect the names of adapted modules that run while gradients are off: their hooks may never be called."""
    unseen: set[str] = set()

    def note(layer: torch.nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled():
            unseen.add(str(layer.name))

    handles = [layer.register_forward_hook(note) for layer in model.layers.values()]
    try:
        yield unseen
    finally:
        for handle in handles:
            handle.remove()
