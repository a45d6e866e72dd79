"""In which coordinates adapters are merged (docs/methods/guidance.md, Merging).

factors  A and B each on its own: cheap, but the product of means is not the mean of products
knots    the updates of all clients in one shared left basis
delta    the updates themselves; rules that are not linear form them densely, which only small modules can afford

Modules come as a function that starts a pass over them, one module in memory at a time: a rule that looks at whole
adapters takes several passes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from befit.adapters.lowrank import Pair, product_norm, stack
from befit.core.errors import PayloadMismatch
from befit.merge.knots import SharedBasis, shared_basis
from befit.merge.rules import ClientTensors, Elementwise, Isotropic, Rule, apply_elementwise, isotropic, weighted_sum
from befit.merge.update import DenseUpdate, Flattened, FlattenedDirections, InBasis, LowRankUpdate, Product


@dataclass(frozen=True)
class ModuleUpdates:
    """The updates `scales[k] B_k A_k` of K clients to one module. Ranks may differ where the space allows it."""

    name: str
    pairs: Sequence[Pair]
    scales: Sequence[float]

    @property
    def shape(self) -> tuple[int, int]:
        B, A = self.pairs[0]
        return len(B), A.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the factors, which is what decides how much of their products is rounding."""
        return self.pairs[0][1].dtype


Modules = Callable[[], Iterable[ModuleUpdates]]
Draw = Callable[[int, str], torch.Generator]


def merge_factors(
    modules: Modules, rule: Rule, weights: Sequence[float], draw: Draw, alpha: float = 1.0
) -> Iterator[tuple[ModuleUpdates, Pair]]:
    """`A_G = M({A_k})`, `B_G = alpha M({B_k})`, at the scale of the first client.

    alpha is on B alone, so that it scales the product once. Raises PayloadMismatch where ranks differ.
    """

    def entries() -> Iterator[ClientTensors]:
        for module in modules():
            check_ranks(module)
            ratios = [scale / module.scales[0] for scale in module.scales]
            Bs = [B if r == 1 else r * B for r, (B, _) in zip(ratios, module.pairs, strict=True)]
            yield ClientTensors(f"{module.name}/A", [A for _, A in module.pairs], module)
            yield ClientTensors(f"{module.name}/B", Bs, module)

    A = torch.empty(0)
    for entry, value in merge_tensors(entries, rule, weights, draw):
        if entry.name.endswith("/A"):
            A = value
        else:
            yield entry.context, (value if alpha == 1 else alpha * value, A)


def merge_tensors(
    entries: Callable[[], Iterable[ClientTensors]], rule: Rule, weights: Sequence[float], draw: Draw
) -> Iterator[tuple[ClientTensors, Tensor]]:
    """Any rule on tensors as they are, one by one."""
    if isinstance(rule, Elementwise):
        yield from apply_elementwise(rule, entries, weights, draw)
        return
    shares = Elementwise().shares(weights)
    for entry in entries():
        yield entry, isotropic(weighted_sum(entry.parts, shares), rule)


@contextmanager
def naming(modules: Modules, owners: Sequence[str]) -> Generator[Modules]:
    """Passes over the same modules; a decomposition that fails meanwhile becomes a PayloadMismatch.

    owners  one for each update of a module, clients or files: the error names whose update is the largest
    """
    last: list[ModuleUpdates] = []

    def followed() -> Iterator[ModuleUpdates]:
        for module in modules():
            last[:] = [module]
            yield module

    try:
        yield followed
    except torch.linalg.LinAlgError as error:
        [module] = last
        sizes = [abs(s) * product_norm(pair) for s, pair in zip(module.scales, module.pairs, strict=True)]
        largest, owner = max(zip(sizes, owners, strict=True))
        raise PayloadMismatch(
            f"{owner}: {module.name} has weights or an alpha too large to multiply, an update of norm {largest:.3g}, "
            "the largest of all; leave it out"
        ) from error


def check_ranks(module: ModuleUpdates) -> None:
    ranks = [len(A) for _, A in module.pairs]
    if len(set(ranks)) > 1:
        raise PayloadMismatch(
            f"{module.name}: ranks {', '.join(map(str, ranks))} differ, and factors of different "
            "rank have no mean; use the space knots or delta"
        )


def _finite(modules: Modules) -> Modules:
    """The same modules. Raises PayloadMismatch at the first with a number that is not finite."""

    def checked() -> Iterator[ModuleUpdates]:
        for module in modules():
            for number, pair in enumerate(module.pairs):
                if not all(bool(factor.isfinite().all()) for factor in pair):
                    raise PayloadMismatch(
                        f"{module.name}: update {number} has numbers that are not finite; leave it out"
                    )
            yield module

    return checked


@dataclass(frozen=True)
class Knots:
    """A shared left basis (KnOTS, Stoica et al. 2025).

    merged     "sigma_v" merges `Sigma V_k^T`, as the public code; "v" merges `V_k^T` and multiplies by Sigma
               afterwards, as the paper prints it. Linear rules and sign election do not tell them apart, trimming and
               Iso-C do
    tolerance  singular values below it, relative to the largest, are dropped, and coordinates that are zero but for
               rounding; None decides by the type of the factors
    dtype      in which bases are computed
    """

    merged: Literal["sigma_v", "v"] = "sigma_v"
    tolerance: float | None = None
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Delta:
    """The updates themselves. Linear rules and Iso-C stay in low-rank form; others form (d_out, d_in) arrays."""

    dtype: torch.dtype = torch.float64


def merge_updates(
    modules: Modules, space: Knots | Delta, rule: Rule, weights: Sequence[float], draw: Draw, alpha: float = 1.0
) -> Iterator[tuple[ModuleUpdates, LowRankUpdate]]:
    """`dW_G = alpha M({dW_k})` of every module, not yet cut down to an adapter.

    In a shared basis, a linear rule is the average of products, for which no basis is needed, and Iso-C of
    `Sigma V_k^T` is Iso-C of that average.
    """
    modules = _finite(modules)
    if isinstance(rule, Isotropic) and isinstance(space, Knots) and space.merged == "v":
        yield from _isotropic_directions(modules, space, rule, weights, alpha)
    elif isinstance(rule, Isotropic):
        shares = Elementwise().shares(weights)
        for module in modules():
            update = _sum(module, shares, space.dtype)
            yield module, Flattened(update, rule.of(module.dtype), module.shape, alpha)
    elif rule.linear:
        shares = [alpha * share for share in rule.shares(weights)]
        for module in modules():
            yield module, _sum(module, shares, space.dtype)
    elif isinstance(space, Knots):
        yield from _in_basis(modules, space, rule, weights, draw, alpha)
    else:
        yield from _dense(modules, space, rule, weights, draw, alpha)


def _sum(module: ModuleUpdates, shares: Sequence[float], dtype: torch.dtype) -> Product:
    """`sum_k p_k s_k B_k A_k`, side by side."""
    B, A = stack(module.pairs, [share * scale for share, scale in zip(shares, module.scales, strict=True)])
    return Product(B, A, dtype)


def _in_basis(
    modules: Modules, space: Knots, rule: Elementwise, weights: Sequence[float], draw: Draw, alpha: float
) -> Iterator[tuple[ModuleUpdates, LowRankUpdate]]:
    def entries() -> Iterator[ClientTensors]:
        for module in modules():
            basis = shared_basis(module.pairs, module.scales, space.tolerance, space.dtype)
            view = basis.coordinates if space.merged == "sigma_v" else basis.directions
            yield ClientTensors(
                module.name, [view(k).to(module.dtype) for k in range(len(module.pairs))], (module, basis)
            )

    for entry, value in apply_elementwise(rule, entries, weights, draw):
        module, basis = entry.context
        yield module, _leave(module, basis, value, alpha, space)


def _isotropic_directions(
    modules: Modules, space: Knots, rule: Isotropic, weights: Sequence[float], alpha: float
) -> Iterator[tuple[ModuleUpdates, LowRankUpdate]]:
    shares = Elementwise().shares(weights)
    for module in modules():
        basis = shared_basis(module.pairs, module.scales, space.tolerance, space.dtype)
        mean = weighted_sum([basis.directions(k) for k in range(len(module.pairs))], shares)
        flat = FlattenedDirections(basis, mean, rule.of(module.dtype), alpha)
        yield module, flat if basis.rank else _nothing(module, space)


def _leave(module: ModuleUpdates, basis: SharedBasis, value: Tensor, alpha: float, space: Knots) -> LowRankUpdate:
    if not basis.rank:
        return _nothing(module, space)
    if space.merged == "v":
        value = basis.sigma[:, None].to(value.dtype) * value
    return InBasis(basis, alpha * value)


def _nothing(module: ModuleUpdates, space: Knots) -> LowRankUpdate:
    """An update of zero, where no client has changed anything."""
    B, A = module.pairs[0]
    return Product(torch.zeros_like(B[:, :1]), torch.zeros_like(A[:1]), space.dtype)


def _dense(
    modules: Modules, space: Delta, rule: Elementwise, weights: Sequence[float], draw: Draw, alpha: float
) -> Iterator[tuple[ModuleUpdates, LowRankUpdate]]:
    def entries() -> Iterator[ClientTensors]:
        for module in modules():
            parts = [scale * B @ A for scale, (B, A) in zip(module.scales, module.pairs, strict=True)]
            yield ClientTensors(module.name, parts, module)

    for entry, value in apply_elementwise(rule, entries, weights, draw):
        yield entry.context, DenseUpdate(alpha * value, space.dtype)
