"""Gradients of every sample on its own, from one backward pass over the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from befit.adapters.layer import Branch
from befit.errors import ModelError

if TYPE_CHECKING:
    from befit.site import Site
    from befit.tasks.base import Batch

__all__ = ["sample_gradients"]


def sample_gradients(
    site: Site,
    batch: Batch,
    slot: str,
    space: Literal["factors", "product"] = "factors",
    reduction: Literal["mean", "sum"] = "mean",
) -> dict[str, Tensor]:
    """Gradient of each sample's loss in the arrays of one slot, with that slot alone active and dropout off.

    ->  slot/module/factor: (samples, *shape of the factor), float32, for "factors";
        slot/module/delta: (samples, d_out, d_in), the gradient in delta = scale * B A, for "product"

    Samples do not interact in the models we adapt, so slice m of the gradient of the summed loss at a layer's output
    belongs to sample m: `G_B[m] = sum_t g[m,t] (A x[m,t])^T`, `G_A[m] = sum_t (B^T g[m,t]) x[m,t]^T`
    (Potara specification, section 3.5). Raises ModelError for a layer whose input does not lead with the samples.
    """
    samples = len(next(iter(batch.values())))
    gradients: dict[str, Tensor] = {}

    def record(name: str, branch: Branch, inputs: Tensor, grad: Tensor) -> None:
        if inputs.shape[0] != samples:
            raise ModelError(f"{name} sees an input of shape {tuple(inputs.shape)} for {samples} samples; per-sample "
                             "gradients need the samples in the first dimension")  # fmt: skip
        x = inputs.reshape(samples, -1, inputs.shape[-1])
        g = grad.detach().float().reshape(samples, -1, grad.shape[-1])
        found = branch.gradients(x, g) if space == "factors" else {"delta": g.transpose(1, 2) @ x / branch.scale}
        for factor, value in found.items():
            key = f"{name}/{factor}"  # a module that runs more than once per forward pass adds up
            gradients[key] = gradients[key] + value if key in gradients else value

    model = site.model
    with (
        model.training(False),
        model.active(slot),
        model.recording(record),
    ):
        losses = site.task.sample_losses(site.logits(batch), batch, reduction)
        losses.sum().backward()
    return {key: value.detach() for key, value in gradients.items()}
