"""`befit merge`: one PEFT adapter from several, without any federation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from befit.cli.output import Json, messages, only_json, print_json, print_warning, say, screen, show_table, warnings_to
from befit.core.errors import ConfigError
from befit.core.text import first_of
from befit.report.numbers import count_text
from befit.report.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from befit.merge.files import MergedModule, Report
    from befit.merge.merge import Merge

SHOWN_MODULES = 16  # more are summed up by their name within a block

Rule = Literal["mean", "task-arithmetic", "ties", "dare", "dare-ties", "iso-c", "magnitude"]


def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="PEFT LoRA adapters of one base model.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write the merged adapter to.")],
    rule: Annotated[Rule, typer.Option("--rule", help="How updates are merged.")] = "mean",
    space: Annotated[
        Literal["factors", "knots", "delta"],
        typer.Option("--space", help="Merge A and B separately, the updates in one basis, or the updates themselves."),
    ] = "knots",
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="W,W,...", help="One for each adapter. Default: all equal.")
    ] = None,
    density: Annotated[
        float | None, typer.Option("--density", help="Share of entries that TIES and DARE keep. Default: 0.2.")
    ] = None,
    trim_scope: Annotated[
        Literal["tensor", "global"], typer.Option("--trim-scope", help="Trim each tensor or the whole adapter.")
    ] = "tensor",
    scale: Annotated[float, typer.Option("--scale", help="Multiply the merged update.")] = 1.0,
    rank: Annotated[
        str | None, typer.Option("--rank", metavar="N|full", help="Rank of the result. Default: the largest rank.")
    ] = None,
    further: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OPTION=VALUE",
            help="Any other option of method.merge: split=B, iso_mean=full, knots_input=v, sign=frequency, …",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of DARE.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="Type of the result. Default: the first adapter's."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME", help="The base model, if the adapters give it different names."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing adapter.")] = False,
    as_json: Json = False,
) -> None:
    """Merge LoRA adapters into one that PEFT loads: averages, TIES, DARE, Iso-C, in KnOTS or on the factors.

    Alphas may differ, and ranks too except with --space factors. Updates stay low-rank, so large models take seconds
    and little memory; only TIES, DARE and magnitude pruning in --space delta form dense updates.
    """
    with only_json(as_json):
        import torch

        from befit.merge.files import merge_checkpoints

        named = {"rule": rule, "space": space, "density": density, "trim_scope": trim_scope, "scale": scale}
        how = _how({**named, "rank": _rank(rank)}, further or ())
        torch_type = None if dtype is None else getattr(torch, dtype)
        with _progress(quiet=as_json) as (console, tell), warnings_to(console):
            report = merge_checkpoints(
                folders,
                out,
                how,
                weights=_weights(weights),
                full=rank == "full",
                dtype=torch_type,
                seed=seed,
                base=base,
                force=force,
                tell=tell,
            )
    if as_json:
        print_json(_as_json(report))
    else:
        _show(report)


def _how(named: dict[str, Any], further: Sequence[str]) -> Merge:
    """The merge that the command line asks for; `further` are options without a flag of their own."""
    from befit.config.overrides import apply_overrides
    from befit.core.schema import check_values, parameters_of
    from befit.merge.merge import Merge

    flags = {name: f"--{name.replace('_', '-')}" for name in (*named, "weights")}
    problems = [
        f"--set {name}: this is what {flags[name]} says; give that alone"
        for name in (option.partition("=")[0] for option in further)
        if name in flags
    ] + apply_overrides(others := dict[str, Any](), further)
    if problems:
        raise ConfigError(problems, "the command")
    parameters = [parameter for parameter in parameters_of(Merge) if parameter.name != "weights"]  # --weights: numbers
    of_flags, of_set = ([one for one in parameters if (one.name in named) == flag] for flag in (True, False))
    found, mistakes = check_values(of_flags, named, "--", "befit merge")
    more, further_mistakes = check_values(of_set, others, "--set ", "befit merge")
    if mistakes := [*mistakes, *further_mistakes]:
        raise ConfigError(mistakes, "the command")
    return Merge(**found, **more)


def _rank(text: str | None) -> int | None:
    if text is None or text == "full":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([f"--rank: must be a whole number from 1 on, or full, got {text!r}"], "the command")
    return int(text)


def _weights(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        problem = f"--weights: must be numbers with commas between, such as 2,1,1, got {text!r}"
        raise ConfigError([problem], "the command") from None


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Console, Callable[[int, int], None]]]:
    """A bar on standard error if that is a terminal: its console, and a function to report progress to."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = messages()
    columns = (TextColumn("merging"), BarColumn(), MofNCompleteColumn(), TextColumn("modules"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("merging", total=None)
        yield bar.console, lambda done, total: bar.update(task, completed=done, total=total)


def _as_json(report: Report) -> dict[str, Any]:
    return {
        **vars(report),
        "merge": {key: value for key, value in vars(report.merge).items() if key != "weights"},
        "modules": [vars(module) for module in report.modules],
    }


def _show(report: Report) -> None:
    groups = _groups(report.modules)
    where = _common([*groups])
    headers = [f"module of {where}" if where else "module", "count", "rank", "energy kept", "norm", "norms of inputs"]
    rows: list[list[str]] = []
    for name, modules in groups.items():
        norms = [norm for module in modules for norm in module.norms]
        spans = [
            _span([module.energy for module in modules], ".1%"),
            _span([module.norm for module in modules], ".3g"),
            _span(norms, ".3g"),
        ]
        ranks, seconds = _span([module.rank for module in modules]), f"{sum(module.seconds for module in modules):.2f}"
        rows.append([name.removeprefix(f"{where}."), str(len(modules)), ranks, *spans, seconds])
    show_table(screen(), Table("", [*headers, "seconds"], rows))
    if report.averaged:
        say(f"averaged as they are: {first_of(report.averaged, 3)}")
    if filled := [module.name for module in report.modules if module.filled]:
        have = f"{count_text(len(filled), 'module')} {'has' if len(filled) == 1 else 'have'}"
        text = f"{have} a smaller update than the rank; what is left is zero in B"
        print_warning(messages(), f"{text} ({first_of(filled, 3)})")
    how, inputs = report.merge, count_text(len(report.inputs), "adapter")
    line = f"{how.rule} of {inputs} in {how.space}, {report.dtype}, {report.seconds:.1f} s"
    say(f"{line}\nwrote {report.out}")


def _groups(modules: Sequence[MergedModule]) -> dict[str, list[MergedModule]]:
    """Modules by name; many modules are grouped by name with a star in place of numbers."""
    if len(modules) <= SHOWN_MODULES:
        return {module.name: [module] for module in modules}
    groups: dict[str, list[MergedModule]] = {}
    for module in modules:
        name = ".".join("*" if part.isdecimal() else part for part in module.name.split("."))
        groups.setdefault(name, []).append(module)
    return groups


def _common(names: Sequence[str]) -> str:
    """The leading parts that all names share, without the last part of any.

    >>> _common(["model.layers.0.q_proj", "model.layers.1.q_proj"])
    'model.layers'
    """
    shared: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _span(values: Sequence[float], form: str = "d") -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least}\N{EN DASH}{most}"
