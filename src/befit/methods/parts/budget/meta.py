"""Learning which learning rates suit a client's data: training at given rates, and a round that improves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import slot
from befit.core.errors import TrainingDiverged
from befit.core.seeds import derive_seed
from befit.core.values import State, Tick
from befit.methods.parts.budget.rates import ETA, rate_multiples
from befit.protocol.site import Site, shuffled_batches
from befit.tasks.base import Batch, Examples
from befit.train.hypergrad import rate_hypergradient, twice_differentiable


@dataclass(frozen=True)
class Part:
    """Some of a client's examples, by their place."""

    examples: Examples
    places: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        return self.examples.batch(self.places[torch.as_tensor(indices, dtype=torch.long)])


def in_two(site: Site, share: float, seed: int) -> Site:
    """The site with `share` of its training examples as "val" and the rest as "train"; the same in every round.

    Each side has at least one; the only example of a client that has no more is on both.
    """
    examples = site.examples("train")
    generator = torch.Generator().manual_seed(derive_seed(seed, site.info.id, "held out"))
    places = torch.randperm(len(examples), generator=generator)
    size = min(max(1, round(share * len(examples))), max(1, len(examples) - 1))
    parts = {
        "val": Part(examples, places[:size]),
        "train": Part(examples, places[size:] if len(places) > 1 else places),
    }
    return replace(site, examples=parts.__getitem__)


def rated_optimiser(site: Site) -> torch.optim.AdamW:
    """AdamW with every tensor of our slot in a group of its own, without weight decay; rates are set step by step."""
    groups = [{"params": [leaf]} for leaf in site.model.leaves(slot(BUDGETED)).values()]
    return torch.optim.AdamW(groups, lr=0.0, betas=site.budget.betas, weight_decay=0.0, fused=True)


def train_at(
    site: Site,
    optimiser: torch.optim.Optimizer,
    multiples: Tensor,
    batches: Iterable[Batch],
    rate: Callable[[int], float],
    base: tuple[str, ...],
) -> float:
    """One step per batch, tensor o at `rate(step) * multiples[o]`; returns the mean loss. Raises TrainingDiverged."""
    model, losses = site.model, [torch.zeros((), device=site.model.device)]
    budgeted = slot(BUDGETED)
    factors = multiples.detach().tolist()
    with model.training(True):
        for step, batch in enumerate(batches):
            with model.active(*base, BUDGETED), model.trainable(budgeted):
                loss = site.loss(batch)
                model.zero_gradients()
                loss.backward()
            if site.budget.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(budgeted), site.budget.grad_clip)
            now = rate(step)
            for group, factor in zip(optimiser.param_groups, factors, strict=True):
                group["lr"] = now * factor
            optimiser.step()
            losses.append(loss.detach())
    mean = float(torch.stack(losses).sum()) / max(1, len(losses) - 1)
    if not math.isfinite(mean):
        raise TrainingDiverged(
            f"the loss became {mean} within {len(losses) - 1} steps at learning rates up to "
            f"{rate(0) * max(factors):g}; try a smaller train.lr"
        )
    return mean


def directions(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    """`u = m / (sqrt(v) + eps)` of AdamW's last step, with both averages corrected for their start at zero."""
    directions = []
    for group in optimiser.param_groups:
        state, (beta1, beta2) = optimiser.state[group["params"][0]], group["betas"]
        steps = float(state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt()
        directions.append(state["exp_avg"] / (1 - beta1**steps) / (root + group["eps"]))
    return directions


@dataclass(frozen=True)
class MetaStep:
    """How a client's round improves the network.

    outer     times that the client trains from the start and then takes a step
    draws     pairs of one training and one validation example whose hypergradients are added up in a step
    terms     of the Neumann series, after the first
    psi       its step
    lr_net    Adam's rate for the network
    lr_eta    and for eta, in units of train.lr
    released  the sign, the scale of the losses and the clipping of the released code
    """

    outer: int = 3
    draws: int = 16
    terms: int = 3
    psi: float = 0.1
    lr_net: float = 1e-4
    lr_eta: float = 1e-2
    released: bool = False


def improve(
    site: Site,
    at: Tick,
    theta: Mapping[str, Tensor],
    features: Tensor,
    how: MetaStep,
    steps: int,
    base: tuple[str, ...],
) -> tuple[State, float]:
    """A client's round: `outer` times train our slot from where the model has it, and step against the hypergradient.

    site   one that `in_two` made
    theta  network and eta, which are not written to
    ->     the new ones, and the mean validation loss after training; the model is left at its start
    """
    trained = {key: value.detach().clone().requires_grad_(True) for key, value in theta.items()}
    network = [value for key, value in trained.items() if key != ETA]
    meta = torch.optim.Adam(
        [{"params": network, "lr": how.lr_net}, {"params": [trained[ETA]], "lr": how.lr_eta}], foreach=False
    )
    generator = torch.Generator().manual_seed(at.seed_for(site.info.id, "meta"))
    start, losses = site.model.dump(slot(BUDGETED)), []
    size, count = site.budget.batch_size, len(site.examples("train"))
    for _ in range(how.outer):
        site.model.load(start)
        multiples = rate_multiples(trained, features)
        optimiser = rated_optimiser(site)
        order = shuffled_batches(count, size, steps, generator)
        batches = (site.to_device(site.examples("train").batch(rows)) for rows in order)
        train_at(site, optimiser, multiples, batches, lambda step: site.budget.lr, base)
        by_rate, loss = _hypergradient(site, directions(optimiser), how, base, generator)
        losses.append(loss)
        meta.zero_grad()
        multiples.backward(site.budget.lr * by_rate.to(multiples.device))
        _limit(network, trained[ETA], site.budget.lr, how.released)
        meta.step()
    site.model.load(start)
    return {key: value.detach() for key, value in trained.items()}, sum(losses) / len(losses)


def _hypergradient(
    site: Site, direction: list[Tensor], how: MetaStep, base: tuple[str, ...], generator: torch.Generator
) -> tuple[Tensor, float]:
    """By rate, (O,), summed over the draws of single examples; and their mean validation loss."""
    model = site.model
    total, losses = torch.zeros(len(direction), device=model.device), 0.0
    scale = 1 / how.draws if how.released else 1.0
    # Without dropout: the products with the Hessian have to be of the function whose gradient they curve.
    with model.training(False), model.active(*base, BUDGETED), model.trainable(slot(BUDGETED)), twice_differentiable():
        over = list(model.leaves(slot(BUDGETED)).values())
        for _ in range(how.draws):
            pair = [
                site.loss(site.to_device(examples.batch(torch.randint(len(examples), (1,), generator=generator))))
                for examples in (site.examples("train"), site.examples("val"))
            ]
            total += rate_hypergradient(pair[0] * scale, pair[1] * scale, over, direction, how.terms, how.psi)
            losses += float(pair[1].detach())
    return -total if how.released else total, losses / how.draws


def _limit(network: list[Tensor], eta: Tensor, lr: float, released: bool) -> None:
    """Every entry to [-1, 1], or the norms to 1; eta's as if it were not in units of train.lr."""
    assert eta.grad is not None
    eta.grad /= lr
    if released:
        for group in (network, [eta]):
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        return
    for value in (*network, eta):
        assert value.grad is not None
        value.grad.clamp_(-1, 1)
