"""Hypergradients of learning rates against dense linear algebra, autograd through the last step, and differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from befit.adapters.keys import slot
from befit.train.hypergrad import inverse_hessian_product, rate_hypergradient, twice_differentiable
from tests.tiny import make_site, random_state

SIZES = (3, 4)  # two tensors, o = 0 and 1


class Quadratic:
    """L_T = w^T H w / 2 - b^T w and L_V = |w - c|^2 / 2 with eigenvalues of H from 0.5 to 3; float64."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(7, 7, generator=draw, dtype=torch.float64))[0]
        self.H = basis @ torch.diag(torch.linspace(0.5, 3, 7, dtype=torch.float64)) @ basis.T
        self.b, self.c, self.before, self.u = (torch.randn(7, generator=draw, dtype=torch.float64) for _ in range(4))
        self.rates = torch.tensor([0.1, 0.3], dtype=torch.float64)

    def after(self, rates: Tensor) -> Tensor:
        return self.before - rates.repeat_interleave(torch.tensor(SIZES)) * self.u

    def train(self, w: Tensor) -> Tensor:
        return w @ self.H @ w / 2 - self.b @ w

    def val(self, w: Tensor) -> Tensor:
        return (w - self.c).square().sum() / 2

    def hypergradient(self, terms: int, psi: float) -> Tensor:
        over = [piece.detach().requires_grad_(True) for piece in self.after(self.rates).split(SIZES)]
        w = torch.cat(over)
        return rate_hypergradient(self.train(w), self.val(w), over, self.u.split(SIZES), terms, psi)


def powers(H: Tensor, v: Tensor, terms: int, psi: float) -> Tensor:
    """`sum_{j=0}^{terms} (I - psi H)^j v` by matrix powers."""
    step = torch.eye(len(v), dtype=v.dtype) - psi * H
    return sum((torch.linalg.matrix_power(step, j) @ v for j in range(terms + 1)), torch.zeros_like(v))


@pytest.mark.parametrize("terms", [0, 1, 3, 8])
def test_the_series_is_its_closed_form_and_tends_to_the_inverse(terms: int) -> None:
    toy = Quadratic()
    w = toy.before.clone().requires_grad_(True)
    gradient = torch.autograd.grad(toy.train(w), [w], create_graph=True)
    found = inverse_hessian_product(gradient, [w], [toy.c], terms, 0.1)[0]
    assert torch.allclose(found, powers(toy.H, toy.c, terms, 0.1), rtol=1e-10)
    many = 0.3 * inverse_hessian_product(gradient, [w], [toy.c], 300, 0.3)[0]
    assert torch.allclose(many, torch.linalg.solve(toy.H, toy.c), rtol=1e-8)


@pytest.mark.parametrize("terms", [0, 3])
def test_a_hypergradient_is_what_autograd_gives_through_the_last_step(terms: int) -> None:
    """The formula of docs/methods/fedl2p.md, written out: d <g_T(w(rates)), p> / d rates with p held fixed."""
    toy = Quadratic(1)
    rates = toy.rates.clone().requires_grad_(True)
    w = toy.after(rates)
    gradient = toy.H @ w - toy.b
    p = powers(toy.H, (w - toy.c).detach(), terms, 0.1)
    (expected,) = torch.autograd.grad(gradient @ p, rates)
    assert torch.allclose(toy.hypergradient(terms, 0.1), expected, rtol=1e-10)


def test_with_the_exact_inverse_it_is_the_derivative_of_the_validation_loss() -> None:
    """psi times it, against central differences of L_V(w(rates))."""
    toy, step = Quadratic(2), 1e-5
    differences = torch.stack(
        [
            (toy.val(toy.after(toy.rates + step * one)) - toy.val(toy.after(toy.rates - step * one))) / (2 * step)
            for one in torch.eye(2, dtype=torch.float64)
        ]
    )
    assert torch.allclose(0.3 * toy.hypergradient(300, 0.3), differences, rtol=1e-6)


def tiny(kind: str = "vit"):
    """A tiny transformer with rank 2 at random values, the loss of one of its examples, and a direction."""
    site = make_site(kind)
    site.model.load(random_state(site.model))
    own = slot("shared")
    over = list(site.model.leaves(own).values())

    def loss(split: str, index: int) -> Tensor:
        return site.loss(site.examples(split).batch(torch.tensor([index])))

    draw = torch.Generator().manual_seed(3)
    return site, own, over, loss, [torch.randn(one.shape, generator=draw) for one in over]


def test_on_a_transformer_it_is_that_of_the_dense_hessian() -> None:
    """H row by row, the series by matrix powers, for every tensor of the adapter and the head."""
    site, own, over, loss, u = tiny()
    with site.model.active("shared"), site.model.trainable(own), twice_differentiable():
        gradients = torch.autograd.grad(loss("train", 1), over, create_graph=True)
        flat = torch.cat([one.flatten() for one in gradients])
        rows = [torch.autograd.grad(entry, over, retain_graph=True, materialize_grads=True) for entry in flat]
        H = torch.stack([torch.cat([one.flatten() for one in row]) for row in rows]).double()
        v = torch.cat([one.flatten() for one in torch.autograd.grad(loss("val", 2), over)]).double()
        found = rate_hypergradient(loss("train", 1), loss("val", 2), over, u, 3, 0.1)
    curved = (H @ powers(H, v, 3, 0.1)).split([one.numel() for one in over])
    expected = -torch.stack([(h * d.flatten().double()).sum() for h, d in zip(curved, u, strict=True)])
    assert torch.allclose(found.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert len(found) == len(over) and bool((found != 0).all())


def test_on_a_transformer_it_is_the_difference_quotient_of_the_training_gradient_along_p() -> None:
    site, own, over, loss, u = tiny()
    with site.model.active("shared"), site.model.trainable(own), twice_differentiable():
        gradients = torch.autograd.grad(loss("train", 1), over, create_graph=True)
        outer = torch.autograd.grad(loss("val", 2), over)
        p = inverse_hessian_product(gradients, over, outer, 3, 0.1)
        found = rate_hypergradient(loss("train", 1), loss("val", 2), over, u, 3, 0.1)

        def along_p(index: int, rate: float) -> float:
            with torch.no_grad():
                over[index].sub_(rate * u[index])
            gradient = torch.autograd.grad(loss("train", 1), over)
            with torch.no_grad():
                over[index].add_(rate * u[index])
            return float(sum((g.double() * one.double()).sum() for g, one in zip(gradient, p, strict=True)))

        for index in (0, len(over) // 2, len(over) - 1):
            slope = (along_p(index, 2e-3) - along_p(index, -2e-3)) / 4e-3
            assert float(found[index]) == pytest.approx(slope, rel=3e-2, abs=2e-3 * float(found.abs().max()))


def test_fused_attention_has_a_hypergradient_and_the_same() -> None:
    def computed(implementation: str, around: Callable[[], object]) -> Tensor:
        site, own, over, loss, u = tiny("llama")
        site.model.backbone.set_attn_implementation(implementation)  # type: ignore[operator]
        with site.model.active("shared"), site.model.trainable(own), around():  # type: ignore[attr-defined]
            return rate_hypergradient(loss("train", 1), loss("val", 2), over, u, 3, 0.1)

    plain, fused = (computed(name, twice_differentiable) for name in ("eager", "sdpa"))
    assert torch.allclose(plain, fused, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


def test_a_tensor_that_a_loss_does_not_see_has_the_hypergradient_zero() -> None:
    w, other = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    found = rate_hypergradient(w.pow(4).sum(), w.pow(2).sum(), [w, other], [w.detach(), other.detach()], 2, 0.1)
    assert float(found[1]) == 0 and float(found[0]) != 0
