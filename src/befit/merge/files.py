"""Merge PEFT LoRA checkpoints on a disk into one, module by module: neither a model nor all adapters are in memory."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from befit.adapters.lowrank import product_norm
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.seeds import derive_seed
from befit.core.storage import write_json
from befit.core.text import with_unit
from befit.core.values import dtype_name
from befit.merge.checkpoint import CONFIG, WEIGHTS, AdapterCheckpoint, open_checkpoints
from befit.merge.merge import Merge
from befit.merge.rules import Elementwise, Isotropic
from befit.merge.spaces import Modules, ModuleUpdates, merge_factors, merge_updates, naming
from befit.merge.update import FinishedModule, LowRankUpdate, finish
from befit.merge.writing import SafetensorsFile, check_target, new_folder

_LOG = logging.getLogger(__name__)
_WIDE = 1024  # from this width on a dense decomposition takes seconds
_RESULTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS = 1 << 24  # numbers of a dense array that are read at once
Tell = Callable[[int, int], None]
Merged = tuple[ModuleUpdates, tuple[float, ...], FinishedModule]


@dataclass(frozen=True)
class MergedModule:
    """What became of one module.

    energy   share of the merged update's squared singular values that are in the result; 1 where nothing was cut
    norm     Frobenius norm of the merged update before it was cut
    norms    of the updates that went in
    filled   ranks that the merged update did not need: zero in B, random in A
    seconds  for reading, merging and writing
    """

    name: str
    rank: int
    scale: float
    energy: float
    norm: float
    norms: tuple[float, ...]
    filled: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """What a merge did: its modules in order, the arrays that were averaged as they are, and its duration."""

    out: str
    inputs: tuple[str, ...]
    weights: tuple[float, ...]
    merge: Merge
    modules: tuple[MergedModule, ...]
    averaged: tuple[str, ...]
    dtype: str
    seconds: float


def merge_checkpoints(
    folders: Sequence[Path | str],
    out: Path | str,
    how: Merge,
    *,
    weights: Sequence[float] | None = None,
    full: bool = False,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    base: str | None = None,
    force: bool = False,
    tell: Tell = lambda done, total: None,
) -> Report:
    """One PEFT adapter from several. Their ranks may differ in the spaces knots and delta, their scales everywhere.

    weights  one per folder; None counts all the same. Means divide by their sum, the sums of Task Arithmetic and
             magnitude pruning take them as they are, and negative ones too
    full     keep the whole merged update, whatever its rank, instead of `how.rank`
    dtype    of the result, of 64, 32 or 16 bits; None takes that of the first adapter
    seed     for DARE, and for rows that fill a rank up
    base     name of the base model, where the configurations call one model by several names
    force    replace an adapter that is in `out`
    tell     called with modules read and to read

    `modules_to_save` and other arrays that are no factors are averaged with the weights. The result keeps the scale of
    the first adapter. Raises ConfigError with every reason why the adapters cannot be merged, PayloadMismatch for
    numbers that are not finite, RunError where `out` cannot be written, and then leaves it as it was.
    """
    began, out, folders = time.perf_counter(), Path(out), [Path(folder) for folder in folders]
    rule = _check_how(how, full, folders, dtype)
    check_target(out, folders, force, CONFIG)
    weighting = _check_weights(weights, len(folders), rule, how.space)
    opened = open_checkpoints(folders, base)
    first = opened[0]
    if how.space == "factors":
        _check_equal_ranks(opened)
    if first.dense and min(weighting) < 0:
        raise ConfigError(
            [
                f"weights: {len(first.dense)} arrays of modules_to_save are averaged, which cannot be done "
                f"with the negative weights {weighting}"
            ],
            "the merge",
        )
    _warn_of_dense(how, opened)
    merging = _Merging(opened, how, weighting, full, dtype or first.factor_type, seed)
    settings = {
        "merged_from": [str(folder) for folder in folders],
        "weights": weighting,
        "seed": seed,
        "full_rank": full,
        **{key: value for key, value in vars(how).items() if key != "weights"},
    }
    with new_folder(out) as folder:
        modules = merging.write(folder / WEIGHTS, tell)
        write_json(folder / CONFIG, _config(first, modules, base))
        (folder / "README.md").write_text(_card(first, base, settings), encoding="utf-8")
    return Report(
        str(out),
        tuple(map(str, folders)),
        tuple(weighting),
        how,
        tuple(modules),
        tuple(first.dense),
        dtype_name(merging.dtype),
        time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Merging:
    """What is merged, and how; see `merge_checkpoints`."""

    opened: Sequence[AdapterCheckpoint]
    how: Merge
    weights: Sequence[float]
    full: bool
    dtype: torch.dtype
    seed: int

    def write(self, path: Path, tell: Tell) -> list[MergedModule]:
        """Write the merged weights, module by module, and say what became of each."""
        first, source = self.opened[0], _Source(self.opened, tell, self.how)
        names = [f"base_model.model.{module}.lora_{side}.weight" for module in first.modules for side in ("A", "B")]
        folders = [str(checkpoint.folder) for checkpoint in self.opened]
        modules: list[MergedModule] = []
        with SafetensorsFile(path, [*names, *first.dense]) as file, naming(source, folders) as followed:
            for module, norms, merged in self._merged(followed):
                for side, value in (("A", merged.A), ("B", merged.B)):
                    name = f"base_model.model.{module.name}.lora_{side}.weight"
                    file.append(name, _cast(value, self.dtype, module.name))
                modules.append(
                    MergedModule(
                        module.name,
                        len(merged.A),
                        first.modules[module.name].scale,
                        merged.energy,
                        merged.norm,
                        norms,
                        merged.filled,
                        source.lap(),
                    )
                )
            for name in first.dense:
                _average(name, self.opened, self.weights, file)
        return modules

    def _merged(self, modules: Modules) -> Iterator[Merged]:
        """Every module's merged factors, at the scale of the first checkpoint."""
        first, how = self.opened[0], self.how
        if how.space == "factors":
            for module, (B, A) in merge_factors(modules, how.rule_value, self.weights, self._draw, how.scale):
                norm = first.modules[module.name].scale * product_norm((B, A))
                yield module, _norms(module), FinishedModule(B, A, 1.0, norm)
            return
        updates = merge_updates(modules, how.coordinates, how.rule_value, self.weights, self._draw, how.scale)
        for module, update in updates:
            scale = first.modules[module.name].scale
            if self.full:
                yield module, _norms(module), _whole(update, scale)
            else:
                rank = how.rank or max(len(A) for _, A in module.pairs)
                fill = torch.Generator().manual_seed(derive_seed(self.seed, "fill", module.name))
                rounding = how.rounding(first.factor_type)
                yield module, _norms(module), finish(update, rank, scale, fill, split=how.split, tolerance=rounding)

    def _draw(self, place: int, name: str) -> torch.Generator:
        # By place in the list: the same folder twice is two adapters, and a moved folder is the same one.
        return torch.Generator().manual_seed(derive_seed(self.seed, place, name))


class _Source:
    """Passes over the modules of all checkpoints, with the time since the module before was written."""

    def __init__(self, opened: Sequence[AdapterCheckpoint], tell: Tell, how: Merge) -> None:
        wide = any(checkpoint.factor_type == torch.float64 for checkpoint in opened)
        self._dtype = torch.float64 if wide else torch.float32
        self._opened, self._tell, self._done = opened, tell, 0
        self._total = len(opened[0].modules) * how.rule_value.passes(self._dtype)
        self._since = time.perf_counter()

    def __call__(self) -> Iterator[ModuleUpdates]:
        for name in self._opened[0].modules:
            pairs = [checkpoint.pair(name, self._dtype) for checkpoint in self._opened]
            yield ModuleUpdates(name, pairs, [checkpoint.modules[name].scale for checkpoint in self._opened])
            self._done += 1
            self._tell(self._done, self._total)

    def lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before


def _whole(update: LowRankUpdate, scale: float) -> FinishedModule:
    """All of an update, at the scale of an adapter; its square root goes to both factors."""
    B, A = update.pair()
    if not len(A):
        B, A = B.new_zeros(len(B), 1), A.new_zeros(1, A.shape[1])
    return FinishedModule(B / math.sqrt(scale), A / math.sqrt(scale), 1.0, product_norm((B, A)))


def _norms(module: ModuleUpdates) -> tuple[float, ...]:
    return tuple(scale * product_norm(pair) for pair, scale in zip(module.pairs, module.scales, strict=True))


def _average(name: str, opened: Sequence[AdapterCheckpoint], weights: Sequence[float], file: SafetensorsFile) -> None:
    """The weighted mean of an array that is no factor, some rows at a time; whole numbers must agree."""
    shape = opened[0].dense[name]
    step = max(1, _ROWS // max(1, math.prod(shape[1:]))) if shape else 1
    slices = [slice(a, a + step) for a in range(0, shape[0], step)] if shape else [None]
    shares = Elementwise().shares(weights)
    for number, rows in enumerate(slices or [slice(0, 0)]):
        parts = [checkpoint.read(name, rows) for checkpoint in opened]
        value = parts[0]
        if value.is_floating_point():
            total = torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
            for part, share in zip(parts, shares, strict=True):
                total.add_(part.to(total.dtype), alpha=share)
            value = _cast(total, value.dtype, name)
        elif not all(torch.equal(value, part) for part in parts):
            raise PayloadMismatch(f"{name} holds whole numbers that differ between the adapters and have no mean")
        if number:
            file.more(name, value)
        else:
            file.append(name, value, shape)


def _cast(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    value = value.to(dtype)
    if not bool(torch.isfinite(value).all()):
        raise PayloadMismatch(f"the merged {name} does not fit into {dtype_name(dtype)}; use float32")
    return value


def _warn_of_dense(how: Merge, opened: Sequence[AdapterCheckpoint]) -> None:
    """Say what a merge of dense updates will take where that is much."""
    rule = how.rule_value
    if how.space != "delta" or isinstance(rule, Isotropic) or rule.linear:
        return
    widest = max(opened[0].modules.values(), key=lambda module: module.d_out * module.d_in)
    if min(widest.d_out, widest.d_in) >= _WIDE:
        size = 4 * (len(opened) + 4) * widest.d_out * widest.d_in
        _LOG.warning(
            "%s in the space delta forms updates of %d x %d, about %s at once, and decomposes one for each of %d "
            "modules; the space knots forms none",
            how.rule,
            widest.d_out,
            widest.d_in,
            with_unit(size, "B"),
            len(opened[0].modules),
        )


def _check_how(how: Merge, full: bool, folders: Sequence[Path], dtype: torch.dtype | None) -> Any:
    problems: list[str] = []
    if dtype is not None and dtype not in _RESULTS:
        problems.append(f"dtype: must be one of {', '.join(map(str, _RESULTS))}, got {dtype!r}")
    if how.weights != "examples":
        problems.append("weights: an adapter does not say how many examples it has seen; give a number for each")
    if how.delta_reference != "none":
        problems.append("delta_reference: an adapter does not hold the factors that it started from")
    if full and how.space == "factors":
        problems.append("rank: the space factors keeps the rank of its adapters; use knots or delta")
    if full and how.split != "even":
        problems.append("split: the whole update is not decomposed, so that there are no singular values to split")
    if full and how.rank is not None:
        problems.append(f"rank: must be {how.rank} or full, not both")
    if not folders:
        problems.append("no adapters to merge")
    if problems:
        raise ConfigError(problems, "the merge")
    return how.rule_value


def _check_weights(weights: Sequence[float] | None, count: int, rule: Any, space: str) -> list[float]:
    weighting = [1.0] * count if weights is None else [float(weight) for weight in weights]
    signed = isinstance(rule, Elementwise) and rule.combine == "sum" and rule.elect == "none"
    problem = ""
    if len(weighting) != count:
        problem = f"must be one for each of the {count} adapters, got {len(weighting)}"
    elif not math.isfinite(sum(map(abs, weighting))) or not any(weighting):
        problem = f"must be finite, with a finite sum, and not all zero, got {weighting}"
    elif not signed and min(weighting) < 0:
        problem = f"must not be negative for a mean, got {weighting}; task-arithmetic can subtract"
    elif space == "factors" and min(weighting) < 0:
        problem = (
            f"lose their sign in the space factors, where they act on A and on B, got {weighting}; use --space knots"
        )
    if problem:
        raise ConfigError([f"weights: {problem}"], "the merge")
    return weighting


def _check_equal_ranks(opened: Sequence[AdapterCheckpoint]) -> None:
    problems: list[str] = []
    for other in opened[1:]:
        different = [name for name, module in opened[0].modules.items() if other.modules[name].rank != module.rank]
        if different:
            mine, its = opened[0].modules[different[0]].rank, other.modules[different[0]].rank
            problems.append(
                f"{other.folder}: {different[0]} has rank {its}, {opened[0].folder} has {mine}; factors of "
                "different rank have no mean: use --space knots or delta"
            )
    if problems:
        raise ConfigError(problems, "the adapters to merge")


def _config(first: AdapterCheckpoint, modules: Sequence[MergedModule], base: str | None) -> dict[str, Any]:
    """The first adapter's configuration with the ranks of the result, and alphas that give its scales."""
    root = bool(first.config.get("use_rslora"))
    ranks = {module.name: module.rank for module in modules}
    roots = {name: math.sqrt(rank) if root else rank for name, rank in ranks.items()}
    alphas = {module.name: _plain(module.scale * roots[module.name]) for module in modules}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        **first.config,
        "base_model_name_or_path": base or first.config.get("base_model_name_or_path"),
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_pattern(name): value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {_pattern(name): value for name, value in alphas.items() if value != alpha},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _pattern(name: str) -> str:
    """A pattern that PEFT matches with this module alone."""
    return "^" + re.escape(name)


def _plain(value: float) -> int | float:
    near = round(value)
    return near if math.isclose(value, near, rel_tol=1e-12) else value


def _card(first: AdapterCheckpoint, base: str | None, settings: dict[str, Any]) -> str:
    import json

    name = base or first.config.get("base_model_name_or_path")
    model = f"base_model: {json.dumps(name)}\n" if name else ""
    return (
        f"---\nlibrary_name: peft\n{model}tags:\n- lora\n- merge\n- befit\n---\n\n"
        f"# Merged LoRA adapter\n\nWritten by `befit merge`:\n\n```json\n{json.dumps(settings, indent=2)}\n```\n"
    )
