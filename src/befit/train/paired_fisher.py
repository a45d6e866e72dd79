"""Diagonal Fisher information of two adapters on the same samples, and their correlation.

Notation of docs/methods/potara.md: `F` Fisher information, `v = 1/F` variance, `rho` correlation of the per-sample
gradients, `a, b, c` traces of the two covariances and of the cross-covariance.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from befit.core.errors import ConfigError, DataError
from befit.core.schema import POSITIVE, Mark, at_least, check_fields
from befit.core.values import Tick
from befit.train.persample import sample_gradients

if TYPE_CHECKING:
    from befit.protocol.site import Site

_LOG = logging.getLogger(__name__)
_DEFAULT_DELTA = {"relative": 1e-4, "absolute": 1e-8, "quantile": 0.05}
# What the gradients of one micro-batch may take.
_GRADIENT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Statistics:
    """Of which examples and labels the gradients are taken.

    samples          M, examples of the client, drawn without replacement; one with fewer gives all it has
    split            the split they are from: "train" or "val"
    fisher           gradients at the true labels, "empirical", or at labels drawn from each model, "sampled"
    token_reduction  loss of a text: mean over its answer tokens (as in training) or sum
    """

    samples: Annotated[int, Mark.DRAWN, POSITIVE] = 30
    split: Literal["train", "val"] = "train"
    fisher: Literal["empirical", "sampled"] = "empirical"
    token_reduction: Annotated[Literal["mean", "sum"], Mark.TOKENS] = "mean"

    def __post_init__(self) -> None:
        check_fields(self, "the statistics")


@dataclass(frozen=True)
class Damping:
    """What keeps `1/F` finite, the same for both models, since two values would bias the weight. Ours.

    kind       "relative": F + delta * mean of all F; "absolute": F + delta; "quantile": F at least the delta-quantile
               of the positive entries of both
    delta      null takes 1e-4 (relative), 1e-8 (absolute) or 0.05 (quantile)
    scope      the mean of "relative" over the client or over each tensor
    drop_dead  leave coordinates out that are exactly zero in both models over all samples
    """

    kind: Literal["relative", "absolute", "quantile"] = "relative"
    delta: Annotated[float | None, POSITIVE] = None
    scope: Literal["client", "tensor"] = "client"
    drop_dead: bool = True

    @property
    def size(self) -> float:
        return _DEFAULT_DELTA[self.kind] if self.delta is None else self.delta

    def with_delta(self, delta: float) -> Damping:
        return replace(self, delta=delta)

    def __post_init__(self) -> None:
        check_fields(self, "the damping")
        if self.kind == "quantile" and self.size > 1:
            raise ConfigError([f"delta: of quantile damping is a share, at most 1, got {self.delta}"], "the damping")


@dataclass(frozen=True)
class Correlation:
    """How the correlation of the two models' gradients is estimated.

    estimate  false sets it to zero
    centred   covariance around the means (Zou et al. 2026, eqs. 54 to 56); false takes the cosine of the gradients
    shrink    take `shrink / sqrt(M)` off every correlation, towards zero. Ours
    """

    estimate: bool = True
    centred: bool = True
    shrink: Annotated[float, at_least(0)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "the correlation")


class PairedFisher:
    """Running sums of two models' per-sample gradients over the same samples, in float64.

    `spans` says where each key (without its slot) lies in the flat vectors of length P.
    """

    def __init__(self, spans: Mapping[str, tuple[int, int]], device: torch.device | str = "cpu") -> None:
        self.spans = dict(spans)
        self.count = 0
        size = max((stop for _, stop in self.spans.values()), default=0)
        # rows: sum g_f, sum g_l, sum g_f^2, sum g_l^2, sum g_f g_l
        self.sums = torch.zeros(5, size, dtype=torch.float64, device=device)

    def add(self, fed: Tensor, local: Tensor) -> None:
        """Take in the gradients of some samples, (samples, P) each, in the same order."""
        self.count += len(fed)
        for both in zip(fed, local, strict=True):  # so that only two vectors are ever in float64
            pair = torch.stack(both).double()
            self.sums[:2] += pair
            self.sums[2:4].addcmul_(pair, pair)
            self.sums[4].addcmul_(*pair)
        # Squares of finite float32 numbers are finite in float64, so an infinite sum comes from an infinite gradient.
        if not torch.isfinite(self.sums[2:4].sum()):
            raise FloatingPointError("a per-sample gradient is not finite")

    @property
    def fisher(self) -> tuple[Tensor, Tensor]:
        """`F_j = 1/M sum_i g_ij^2` of the federated and the local model (eq. 19, empirical Fisher)."""
        return self.sums[2] / self.count, self.sums[3] / self.count

    def correlation(self, centred: bool = True) -> Tensor:
        """`rho_j = cov_j / sqrt(var_f,j var_l,j)` of the paired gradients (eq. 54-57); 0 where one does not vary."""
        mean_f, mean_l, square_f, square_l, cross = self.sums / self.count
        if centred:
            var_f, var_l = square_f - mean_f.square(), square_l - mean_l.square()
            covariance = cross - mean_f * mean_l
        else:
            var_f, var_l, covariance = square_f, square_l, cross
        # What is left of a difference of nearly equal numbers is rounding, not variance.
        varies = (var_f > 1e-12 * square_f).logical_and(var_l > 1e-12 * square_l)
        varies &= (var_f > 1e-30).logical_and(var_l > 1e-30)
        rho = covariance / torch.sqrt((var_f * var_l).clamp_min(1e-300))
        return torch.where(varies, rho, torch.zeros_like(rho))

    def rho(self, how: Correlation) -> Tensor:
        """The correlation that `variances` takes: soft-thresholded by `shrink / sqrt(count)`, or zero without."""
        if not how.estimate:
            return torch.zeros_like(self.sums[0])
        rho = self.correlation(how.centred)
        return rho.sign() * (rho.abs() - how.shrink / self.count**0.5).clamp_min(0) if how.shrink else rho

    def variances(
        self,
        damping: Damping,
        correlation: Correlation = Correlation(),
        rho: Tensor | None = None,
    ) -> Variances:
        """Damped variances and the cross-covariance `clip(rho sqrt(v_f v_l), 0, min(v_f, v_l))` (eq. 20, 58).

        rho  what `rho` gave for `correlation`, where it is known already: it does not depend on the damping
        """
        F_f, F_l = self.fisher
        alive = (F_f > 0).logical_or(F_l > 0) if damping.drop_dead else torch.ones_like(F_f, dtype=torch.bool)
        if damping.kind == "quantile":
            positive = torch.cat([F_f[F_f > 0], F_l[F_l > 0]])
            floor = _quantile(positive, damping.size) if len(positive) else F_f.new_ones(())
            damped = torch.stack([F_f < floor, F_l < floor])
            D_f, D_l = F_f.clamp_min(floor), F_l.clamp_min(floor)
        else:
            epsilon = self._epsilon(damping, (F_f + F_l) / 2)
            damped = torch.stack([F_f < epsilon, F_l < epsilon])
            D_f, D_l = F_f + epsilon, F_l + epsilon
        # A coordinate without gradient has no variance of its own either: out of all sums when dropped.
        v_f = torch.where(alive, 1 / D_f.clamp_min(1e-300), torch.zeros_like(F_f))
        v_l = torch.where(alive, 1 / D_l.clamp_min(1e-300), torch.zeros_like(F_l))
        rho = self.rho(correlation) if rho is None else rho
        raw = rho * v_f.sqrt() * v_l.sqrt()  # v_f * v_l may overflow where nothing is dropped
        ceiling = torch.minimum(v_f, v_l)
        living = int(alive.sum())
        kept = max(1, living)
        counts = {  # of what is dropped, raw and ceiling are zero
            "dead_share": 1 - living / len(alive) if len(alive) else 0.0,
            "damped_share": int(damped.logical_and(alive).sum()) / (2 * living) if living else 0.0,
            "rho_clipped_low": int((raw < 0).sum()) / kept,
            "rho_clipped_high": int((raw > ceiling).sum()) / kept,
        }
        return Variances(self.spans, v_f, v_l, torch.minimum(raw.clamp_min(0), ceiling), counts)

    def _epsilon(self, damping: Damping, mean_fisher: Tensor) -> Tensor:
        if damping.kind == "absolute":
            return torch.full_like(mean_fisher, damping.size)
        if damping.scope == "client":
            return torch.full_like(mean_fisher, damping.size * float(mean_fisher.mean()) if len(mean_fisher) else 0.0)
        epsilon = torch.empty_like(mean_fisher)
        for start, stop in self.spans.values():
            epsilon[start:stop] = damping.size * mean_fisher[start:stop].mean()
        return epsilon


def _quantile(values: Tensor, q: float) -> Tensor:
    """The largest entry with at most a share `q` of the others below it; torch.quantile stops at 2^24 entries."""
    return values.kthvalue(1 + int(q * (len(values) - 1))).values


@dataclass(frozen=True)
class Variances:
    """Diagonals of the two covariances and the cross-covariance, (P,) float64 each; zero where left out."""

    spans: Mapping[str, tuple[int, int]]
    fed: Tensor
    local: Tensor
    cross: Tensor
    counts: dict[str, float]

    def traces(self, keys: tuple[str, ...] | None = None) -> tuple[float, float, float]:
        """`a, b, c` over all coordinates, or over those of some keys."""
        spans = [(0, len(self.fed))] if keys is None else [self.spans[key] for key in keys]
        a, b, c = (sum(float(v[start:stop].sum()) for start, stop in spans) for v in (self.fed, self.local, self.cross))
        return a, b, c

    def coordinate_weights(self) -> dict[str, Tensor]:
        """`w_j = (v_l - c) / (v_f + v_l - 2c)` for every coordinate by itself, flat by key; 0.5 where it is flat."""
        curvature = self.fed + self.local - 2 * self.cross
        flat = curvature <= 1e-12 * (self.fed + self.local)
        weights = torch.where(flat, 0.5, (self.local - self.cross) / torch.where(flat, 1.0, curvature))
        return {key: weights[start:stop].cpu() for key, (start, stop) in self.spans.items()}


def group_traces(
    variances: Variances, granularity: Literal["factor", "layer", "tensor"]
) -> dict[tuple[str, ...], tuple[float, float, float]]:
    """Traces of the groups of keys that share a weight: all A and all B, each block, or each tensor."""
    groups: dict[str, list[str]] = {}
    for key in variances.spans:
        module, part = key.split("/")
        name = {"factor": part, "layer": _layer_of(module), "tensor": key}[granularity]
        groups.setdefault(name, []).append(key)
    return {tuple(keys): variances.traces(tuple(keys)) for keys in groups.values()}


def _layer_of(module: str) -> str:
    """A module's block: its name up to the block's number, or all of it outside of blocks.

    >>> _layer_of("block.03.q_proj"), _layer_of("text_model.encoder.layers.3.self_attn.q_proj")
    ('block.03', 'text_model.encoder.layers.3')
    """
    match = re.match(r".*?\.\d+(?=\.)", module)
    return match[0] if match else module


def estimate(
    site: Site,
    at: Tick,
    fed: str,
    local: str,
    how: Statistics,
    space: Literal["factors", "product"] = "factors",
) -> PairedFisher:
    """Per-sample gradients of two slots of the model, of A and B ("factors") or of their "product".

    Task heads are left out, as the paper counts LoRA entries only. "sampled" draws each model's labels from its own
    probabilities, with the same random numbers for both. Warns if the client has fewer examples. Raises
    FloatingPointError naming the client for a gradient that is not finite.
    """
    split, samples = how.split, how.samples
    examples = site.examples(split)
    if not len(examples):
        raise DataError(f"client {site.info.id} has no {split} examples for the statistics")
    if len(examples) < samples:
        _LOG.warning(
            "client %s has %d %s examples; the statistics use all of them instead of %d",
            site.info.id,
            len(examples),
            split,
            samples,
        )
    generator = torch.Generator().manual_seed(at.seed_for(site.info.id, "statistics"))
    chosen = torch.randperm(len(examples), generator=generator)[:samples]
    targets = site.model.adapted(fed).values()
    rank = site.model.layout.slot(fed).rank
    entries = sum(t.d_in * t.d_out if space == "product" else rank * (t.d_in + t.d_out) for t in targets)
    # Two models' gradients and a copy; and no more samples than in training, whose activations are known to fit.
    at_once = len(chosen) if site.model.is_small else site.budget.batch_size
    at_once = 1 if site.model.mixes_rows else at_once  # the images of a sample by itself are known to be its own
    step = max(1, min(at_once, _GRADIENT_BYTES // (16 * max(1, entries))))
    draws = [torch.Generator().manual_seed(at.seed_for(site.info.id, "labels")) for _ in (fed, local)]
    labels = draws if how.fisher == "sampled" else [None, None]
    moments: PairedFisher | None = None
    for start in range(0, len(chosen), step):
        batch = site.to_device(examples.batch(chosen[start : start + step]))
        pair = [
            _by_module(site, name, sample_gradients(site, batch, name, space, how.token_reduction, drawn))
            for name, drawn in zip((fed, local), labels, strict=True)
        ]
        if moments is None:
            moments = PairedFisher(_spans(pair[0]), site.model.device)
        try:
            moments.add(*(torch.cat([gradients[key] for key in moments.spans], dim=1) for gradients in pair))
        except FloatingPointError as error:
            raise FloatingPointError(f"client {site.info.id}: {error}") from error
    assert moments is not None
    return moments


def _by_module(site: Site, slot: str, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`module/factor` -> (samples, entries) of the slot's low-rank modules, in the order of their names."""
    adapted = site.model.adapted(slot)
    flat = {key.partition("/")[2]: value.flatten(1) for key, value in gradients.items()}
    return {key: flat[key] for key in sorted(flat) if key.partition("/")[0] in adapted}


def _spans(gradients: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    spans, end = {}, 0
    for key, value in gradients.items():
        spans[key] = (end, end + value.shape[1])
        end += value.shape[1]
    return spans
