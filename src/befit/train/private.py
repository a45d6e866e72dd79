"""Gradients that protect single examples: clipped one by one, added up, and made noisy (DP-SGD, Abadi et al. 2016,
Algorithm 1), on batches that every example joins by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from befit.adapters.core import CoreBranch
from befit.adapters.keys import join
from befit.adapters.layer import Branch, DenseBranch, LoraBranch
from befit.core.errors import ModelError
from befit.protocol.mechanism import Mechanism
from befit.train.passes import Pass, objective
from befit.train.request import OfOneClient, Request
from befit.train.rows import TOKENS, WORTH, cut
from befit.train.terms import Laned

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.tasks.base import Examples

_BY_HOOKS = (
    LoraBranch,
    DenseBranch,
    CoreBranch,
)  # forms whose gradients by example are those of training, straight through


class Private(OfOneClient):
    """One client's gradients: of every pass, `(sum of clipped + noise) / expected batch`.

    An example's gradient is that of its own loss, the mean over its tokens, and of the terms that depend on it, over
    everything the pass trains; it is clipped as one vector. Terms that depend on weights alone are added after the
    noise. The gradients come from one backward pass over the examples where that is known to be exact, and else from
    one for each of them.
    """

    def __init__(self, request: Request, mechanism: Mechanism) -> None:
        if request.model.mixes_examples:
            raise ModelError("the backbone mixes the examples of a batch, so no single one can be protected")
        super().__init__(request)
        self._mechanism, self._site = mechanism, request.site
        mechanism.take(len(request.passes), request.steps, request.in_sequence, request.split)
        self._of_weights, self._of_batch = [], []
        for current in request.passes:
            apart = [isinstance(term, Laned) and term.of_weights for term in current.terms]
            guides = [(term.bind(request.site), alone) for term, alone in zip(current.terms, apart, strict=True)]
            self._of_weights.append([guide for guide, alone in guides if alone])
            self._of_batch.append([guide for guide, alone in guides if not alone])
        self._hooked = [self._is_hooked(current) for current in request.passes]

    def batches(self) -> Iterator[list[Tensor]]:
        """Places of each step's examples, in parts that go through the model together; none at all is a batch too.

        No sum is over a batch's loss, so texts can come by length: most of their padding is saved.
        """
        budget, device = self._site.budget, self._request.model.device.type
        lengths = getattr(self._mechanism.examples(self._request.split), "lengths", None)
        for places in self._mechanism.batches(self._request.steps):
            parts = [places] if len(places) else []
            if lengths is not None and parts:
                buckets = cut(lengths[places].tolist(), TOKENS[device], WORTH[device])
                parts = [places[bucket] for bucket in buckets]
            yield [few for part in parts for few in part.split(budget.micro_batch or budget.batch_size)]

    def take(self, step: Callable[[int, list[Tensor]], Tensor], index: int, batch: list[Tensor]) -> Tensor:
        return step(index, batch)

    def backward(self, index: int, batch: list[Tensor]) -> Tensor:
        current, model = self._request.passes[index], self._request.model
        examples = self._mechanism.examples(self._request.split)
        leaves = model.leaves(current.reached)
        sums = {key: torch.zeros_like(leaf) for key, leaf in leaves.items()}
        gradients = self._by_hooks if self._hooked[index] else self._one_by_one
        for places in batch:
            for of_example in gradients(index, examples, places, leaves):
                add_clipped(sums, of_example, self._mechanism.clip)
        noise = self._mechanism.chance.normal(sum(value.numel() for value in sums.values()))
        scale, start, used = self._mechanism.noise * self._mechanism.clip, 0, _ranks_in_use(model)
        for key, value in sums.items():
            drawn = noise[start : start + value.numel()].view(value.shape)
            value.add_(drawn.to(value.device), alpha=scale).div_(self._mechanism.size)
            if key in used:
                value.mul_(used[key])
            start += value.numel()
        model.zero_gradients()
        if guides := self._of_weights[index]:
            nothing = torch.zeros((), device=model.device)
            strength = self._request.strengths[index]
            terms = objective(nothing, guides, strength, {}, nothing)
            if terms.requires_grad:
                terms.backward()
        for key, value in sums.items():
            gradient = leaves[key].grad
            assert gradient is not None
            gradient.add_(value)
        return torch.zeros((), device=model.device)

    def _is_hooked(self, current: Pass) -> bool:
        """Whether everything that is trained is in branches whose gradients by example are known, and nothing else of
        the objective depends on them."""
        model = self._request.model
        kinds = {
            f"{slot}/{name}": type(branch)
            for name, layer in model.layers.items()
            for slot, branch in layer.branches.items()
            if slot in current.active
        }
        wanted = {key.rpartition("/")[0] for key in model.leaves(current.reached)}
        alone = all(isinstance(term, Laned) and term.of_weights for term in current.terms)
        return (
            alone
            and not model.recomputes
            and not model.mixes_rows
            and all(kinds.get(place) in _BY_HOOKS for place in wanted)
        )

    def _by_hooks(
        self, index: int, examples: Examples, places: Tensor, leaves: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """(examples, *shape) of every leaf, from one backward pass: see `befit.train.persample`."""
        site, count = self._site, len(places)
        rows = count * site.task.rows_each
        part, wanted = site.to_device(examples.batch(places)), {key.rpartition("/")[0] for key in leaves}
        gradients: dict[str, Tensor] = {}
        apart = True

        def record(name: str, branch: Branch, inputs: Tensor, grad: Tensor) -> None:
            nonlocal apart
            apart = apart and inputs.shape[0] == rows
            if not apart or name not in wanted:
                return
            x = inputs.float().reshape(count, -1, inputs.shape[-1])
            g = grad.detach().float().reshape(count, -1, grad.shape[-1])
            for factor, value in branch.gradients(x, g).items():
                key = f"{name}/{factor}"
                gradients[key] = gradients[key] + value if key in gradients else value

        for leaf in leaves.values():  # their own gradients, of all examples together, are not needed
            leaf.requires_grad_(False)
        try:
            with self._request.model.recording(record):
                loss = site.task.sample_losses(site.logits(part), part, "mean").sum()
                if loss.requires_grad:
                    objective(loss, [], self._request.strengths[index], part, loss).backward()
        finally:
            for leaf in leaves.values():
                leaf.requires_grad_(True)
        if apart and gradients.keys() >= leaves.keys():
            yield {key: gradients[key].detach() for key in leaves}
        else:
            yield from self._one_by_one(index, examples, places, leaves)

    def _one_by_one(
        self, index: int, examples: Examples, places: Tensor, leaves: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """(1, *shape) of every leaf, example by example."""
        model, site, guides = self._request.model, self._site, self._of_batch[index]
        for place in places.split(1):
            part = site.to_device(examples.batch(place))
            model.zero_gradients()
            logits = site.logits(part)
            loss = site.task.sample_losses(logits, part, "mean").sum()
            objective(loss, guides, self._request.strengths[index], part, logits).backward()
            yield {key: leaf.grad[None].clone() for key, leaf in leaves.items() if leaf.grad is not None}


def _ranks_in_use(model: AdaptedModel) -> dict[str, Tensor]:
    """1 for every rank of the low-rank arrays and 0 for those that are zero in A and in B, in a shape to multiply with.

    Such a rank has no gradient whatever the records are, and noise would give a client ranks that it does not have
    (`befit.methods.parts.recipe.ranked`). The arrays are no secret here: earlier steps have noise.
    """
    used: dict[str, Tensor] = {}
    for name, layer in model.layers.items():
        for slot, branch in layer.branches.items():
            if isinstance(branch, LoraBranch):
                ranks = (branch.A != 0).any(1) | (branch.B != 0).any(0)
                used |= {join(slot, name, "A"): ranks[:, None], join(slot, name, "B"): ranks}
    return used


def add_clipped(sums: dict[str, Tensor], gradients: dict[str, Tensor], clip: float) -> None:
    """Add `sum_m min(1, clip / ||g_m||) g_m` in place, g_m (examples, …) over all keys; one that is not finite adds
    nothing.

    Norms are float64: in float32 the squares of entries of 1e-24 are 0, and a gradient of them would not be clipped.
    """
    norms = torch.stack(
        [torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64) for value in gradients.values()]
    ).norm(dim=0)
    finite = norms.isfinite()
    factors = torch.where(finite, (clip / norms).clamp(max=1.0), torch.zeros_like(norms))
    for key, value in gradients.items():
        value = value if bool(finite.all()) else value.nan_to_num(0.0, 0.0, 0.0)
        sums[key] += torch.tensordot(factors.to(value.dtype), value, dims=1)
