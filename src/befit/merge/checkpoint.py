"""PEFT LoRA checkpoints as they lie on a disk: what is in them, whether they may be merged, one module at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from befit.adapters.lowrank import Pair
from befit.core.errors import BefitError, ConfigError, PayloadMismatch, brief
from befit.core.jsonfile import parse_json
from befit.core.storage import read_bytes
from befit.merge.patterns import Patterns

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_BYTES = 2**22  # of a configuration: as much as a name for each of 50,000 modules
_MOST_PROBLEMS = 20  # of one file, in a message
_FLOATS = ("F64", "F32", "F16", "BF16")
_TYPES = (*_FLOATS, "I64", "I32", "I16", "I8", "U8", "BOOL")
_FACTOR = re.compile(r"base_model\.model\.(?P<module>[^\x00-\x20]+)\.lora_(?P<side>[AB])\.weight")
# Fields of PEFT's LoRA configuration that do not change what B A means, or that are read here.
_NAMES = """
alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout
lora_ga_config megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision
runtime_config target_modules task_type use_rslora
"""
_UNDERSTOOD = frozenset(_NAMES.split())
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
# Must agree, since the same factors would mean something else.
_SAME = ("base_model_name_or_path", "revision", "task_type", "fan_in_fan_out")


@dataclass(frozen=True)
class Module:
    """One adapted module of a checkpoint: `scale B A` with B (d_out, rank) and A (rank, d_in)."""

    rank: int
    scale: float
    d_in: int
    d_out: int


@dataclass(frozen=True)
class AdapterCheckpoint:
    """An open checkpoint. Arrays are mapped from the file and read when asked for.

    modules  by the module's path in the base model, sorted
    dense    names and shapes of the arrays that are no factors: what `modules_to_save` holds
    """

    folder: Path
    config: Mapping[str, Any]
    modules: Mapping[str, Module]
    dense: Mapping[str, tuple[int, ...]]
    file: Any

    def pair(self, module: str, dtype: torch.dtype) -> Pair:
        """(B, A) of one module. Raises PayloadMismatch for numbers that are not finite."""
        names = [f"base_model.model.{module}.lora_{side}.weight" for side in ("B", "A")]
        B, A = (self.read(name).to(dtype) for name in names)
        return B, A

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """An array, or some of its rows. Raises PayloadMismatch for numbers that are not finite."""
        tensor = self.file.get_tensor(name) if rows is None else self.file.get_slice(name)[rows]
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PayloadMismatch(f"{self.folder / WEIGHTS}: {name} holds numbers that are not finite")
        return tensor

    @property
    def factor_type(self) -> torch.dtype:
        """The type of the first factor."""
        return self.file.get_slice(f"base_model.model.{next(iter(self.modules))}.lora_A.weight")[:0].dtype


def open_checkpoints(folders: Sequence[Path], base: str | None = None) -> list[AdapterCheckpoint]:
    """All checkpoints, opened. Raises ConfigError with every reason why they cannot be read or merged.

    base  the base model that all are for, where their configurations call it differently; None demands one name
    """
    opened: list[AdapterCheckpoint] = []
    problems: list[str] = []
    for folder in folders:
        try:
            opened.append(open_checkpoint(folder))
        except ConfigError as error:
            problems += error.problems
        except BefitError as error:
            problems.append(str(error))
    for other in opened[1:]:
        problems += check_mergeable(opened[0], other, base is None)
    if problems:
        raise ConfigError(problems, "the adapters to merge")
    return opened


def open_checkpoint(folder: Path) -> AdapterCheckpoint:
    """One checkpoint, opened. Raises ConfigError with every problem, each naming the file and the field."""
    if not folder.is_dir():
        raise ConfigError([f"{folder}: no such folder; an adapter is a folder with {CONFIG} and {WEIGHTS}"])
    if not (folder / CONFIG).is_file():
        raise ConfigError([f"{folder}: holds no {CONFIG}, so it is no PEFT adapter"])
    size = (folder / CONFIG).stat().st_size
    if size > _MOST_BYTES:
        raise ConfigError([f"{folder / CONFIG}: has {size} bytes, more than a configuration has: save it again"])
    config = parse_json(read_bytes(folder / CONFIG), str(folder / CONFIG), PayloadMismatch)
    if not isinstance(config, dict):
        raise ConfigError([f"{folder / CONFIG}: must hold a mapping, not {type(config).__name__}"])
    if problems := [f"{folder / CONFIG}: {problem}" for problem in _unsupported(config)]:
        raise ConfigError(problems)
    path = folder / WEIGHTS
    if not path.is_file():
        others = {
            "adapter_model.bin": "a pickle, which befit does not open: save it again with safetensors",
            f"{WEIGHTS}.index.json": "the list of several files: save it again as one, with a larger max_shard_size",
        }
        there = [f" It has {name}, {what}." for name, what in others.items() if (folder / name).exists()]
        raise ConfigError([f"{folder}: holds no {WEIGHTS}.{''.join(there)}"])
    try:
        file: Any = safe_open(path, framework="pt")
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
        types = {name: part.get_dtype() for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError([f"{path}: damaged or no safetensors file: {brief(error)}; save it again"]) from error
    problems = _untyped(types)
    if not problems:
        modules, dense, problems = _contents(config, shapes)
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise ConfigError([f"{path}: {problem}" for problem in (*problems[:_MOST_PROBLEMS], *more)])
    return AdapterCheckpoint(folder, config, modules, dense, file)


def check_mergeable(first: AdapterCheckpoint, other: AdapterCheckpoint, same_base: bool) -> list[str]:
    """Every reason why two checkpoints cannot be merged. Ranks and scales may differ."""
    problems: list[str] = []
    for field in _SAME:
        mine, its = first.config.get(field), other.config.get(field)
        if (mine or None) != (its or None) and (same_base or field not in ("base_model_name_or_path", "revision")):
            hint = "; --base NAME says that both mean the same model" if field == "base_model_name_or_path" else ""
            problems.append(
                f"{other.folder / CONFIG}: {field} is {brief(repr(its))}, {first.folder} has {brief(repr(mine))}{hint}"
            )
    sides = [
        (first.modules.keys() - other.modules.keys(), other, first, "targets"),
        (other.modules.keys() - first.modules.keys(), first, other, "targets"),
        (first.dense.keys() - other.dense.keys(), other, first, "modules_to_save"),
        (other.dense.keys() - first.dense.keys(), first, other, "modules_to_save"),
    ]
    for missing, lacks, has, what in sides:
        if missing:
            problems.append(
                f"{lacks.folder / WEIGHTS}: has no {min(missing)}, which is in {has.folder}: the {what} "
                f"differ in {len(missing)} {'place' if len(missing) == 1 else 'places'}"
            )
    widths = [
        (name, (module.d_out, module.d_in), (other.modules[name].d_out, other.modules[name].d_in))
        for name, module in first.modules.items()
        if name in other.modules
    ]
    shapes = [(name, shape, other.dense[name]) for name, shape in first.dense.items() if name in other.dense]
    for name, mine, its in (*widths, *shapes):
        if mine != its:
            problems.append(f"{other.folder / WEIGHTS}: {name} is for a weight of {its}, {first.folder} has {mine}")
            break  # the first says what is wrong; a different model differs everywhere
    return problems


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    """Fields that make an adapter something else than `scale B A` beside a frozen weight."""
    problems: list[str] = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {brief(repr(config.get('peft_type')))}, befit reads 'LORA' alone")
        return problems
    for field in sorted(config.keys() - _UNDERSTOOD):
        if config[field]:
            problems.append(f"{field} is {brief(repr(config[field]))}, which befit does not read")
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {brief(repr(config['bias']))}: befit reads no trained biases, only 'none'")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        problems.append(
            f"init_lora_weights is {brief(repr(start))}, which changes the base model: convert the adapter to a plain "
            "LoRA first (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        problems.append(f"r must be a whole number from 1 on, got {brief(repr(rank))}")
    if not _is_positive(alpha):
        problems.append(f"lora_alpha must be positive, got {brief(repr(alpha))}")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            problems.append(f"{field} must map names to positive numbers, got {brief(repr(pattern))}")
            continue
        try:
            Patterns(pattern)
        except ValueError as error:
            problems.append(f"{field}: {error}")
    return problems


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _untyped(types: Mapping[str, str]) -> list[str]:
    return [
        f"{name} is of type {kind}; convert it to {', '.join(wanted)}"
        for name, kind in types.items()
        if kind not in (wanted := _FLOATS if "lora_" in name else _TYPES)
    ]


def _contents(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Module], dict[str, tuple[int, ...]], list[str]]:
    """Modules and dense arrays from names and shapes in a file, and every problem found."""
    factors: dict[str, dict[str, tuple[int, ...]]] = {}
    dense: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    for name, shape in shapes.items():
        if match := _FACTOR.fullmatch(name):
            factors.setdefault(match["module"], {})[match["side"]] = shape
        elif "lora_" in name:
            problems.append(f"{name} is no factor of a linear module, which is all that befit reads")
        else:
            dense[name] = shape
    modules: dict[str, Module] = {}
    ranks, alphas = (Patterns(config.get(field) or {}) for field in ("rank_pattern", "alpha_pattern"))
    try:
        ranks.check_work(factors)
        alphas.check_work(factors)
    except ValueError as error:
        return {}, {}, [*problems, f"{CONFIG}: {error}"]
    for name, sides in sorted(factors.items()):
        rank, alpha = ranks.value(name, config["r"]), alphas.value(name, config["lora_alpha"])
        problem, module = _module(name, sides, rank, alpha, bool(config.get("use_rslora")))
        problems += problem
        if module:
            modules[name] = module
    if not factors and not problems:
        problems.append("holds no LoRA factors")
    return modules, dict(sorted(dense.items())), problems


def _module(
    name: str, sides: Mapping[str, tuple[int, ...]], rank: int, alpha: float, rslora: bool
) -> tuple[list[str], Module | None]:
    if missing := {"A", "B"} - sides.keys():
        return [f"{name} has no lora_{min(missing)}"], None
    A, B = sides["A"], sides["B"]
    if len(A) != 2 or len(B) != 2 or A[0] != B[1] or 0 in (*A, *B):
        return [f"{name} has lora_A {A} and lora_B {B}; only matrices that multiply are an update"], None
    if rank != A[0]:
        return [f"{name} has rank {A[0]}, {CONFIG} says {rank}"], None
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    return [], Module(A[0], scale, A[1], B[0])
