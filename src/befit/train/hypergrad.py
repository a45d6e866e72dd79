"""Gradients of a validation loss with respect to the learning rates that training took its last step with.

By the implicit function theorem, with a Neumann series in place of the inverse Hessian (Lorraine et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by plain matrix products: its fused kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _hessian_product(gradients: Sequence[Tensor], over: Sequence[Tensor], vector: Sequence[Tensor]) -> list[Tensor]:
    """`H v` from gradients that still have their graph; a parameter that the loss does not see has rows of zeros."""
    pairs = [(gradient, v) for gradient, v in zip(gradients, vector, strict=True) if gradient.requires_grad]
    outputs, weights = [gradient for gradient, _ in pairs], [v for _, v in pairs]
    return list(torch.autograd.grad(outputs, over, weights, retain_graph=True, materialize_grads=True))


def inverse_hessian_product(
    gradients: Sequence[Tensor], over: Sequence[Tensor], vector: Sequence[Tensor], terms: int, psi: float
) -> list[Tensor]:
    """`p = sum_{j=0}^{terms} (I - psi H)^j v`, which tends to `(psi H)^-1 v` (Lorraine et al. 2020, algorithm 3).

    gradients  of a loss with respect to `over`, with their graph
    psi        has to be below 2 / the largest eigenvalue of H for the series to converge
    """
    term, total = list(vector), list(vector)
    for _ in range(terms):
        curved = _hessian_product(gradients, over, term)
        term = [v - psi * h for v, h in zip(term, curved, strict=True)]
        total = [p + v for p, v in zip(total, term, strict=True)]
    return total


def rate_hypergradient(
    train_loss: Tensor, val_loss: Tensor, over: Sequence[Tensor], direction: Sequence[Tensor], terms: int, psi: float
) -> Tensor:
    """(O,), for each of the O tensors `-<(H p)_o, u_o>`: `d <g_T, p> / d rate_o` where `omega_o = before - rate_o u_o`.

    over       the tensors after their last step; both losses are functions of them
    direction  u, which the last step went against: Adam's, or the gradient
    With all terms of the series `psi H p` is the gradient of the validation loss, and the result its derivative by the
    rates, divided by psi: going against it lowers the validation loss (docs/methods/fedl2p.md).
    """
    over = list(over)
    gradients = torch.autograd.grad(train_loss, over, create_graph=True, materialize_grads=True)
    outer = torch.autograd.grad(val_loss, over, materialize_grads=True)
    p = inverse_hessian_product(gradients, over, outer, terms, psi)
    curved = _hessian_product(gradients, over, p)
    return -torch.stack([(h * u).sum() for h, u in zip(curved, direction, strict=True)])
