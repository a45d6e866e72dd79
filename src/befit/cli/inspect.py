"""Commands that look and do not train: `befit check`, `methods`, `benchmarks` and `explain`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from befit.cli.compare import check_study
from befit.cli.output import (
    Imports,
    each_warning,
    load_imports,
    messages,
    only_json,
    print_json,
    print_table,
    print_warning,
    screen,
)
from befit.core.schema import REQUIRED, Parameter, plain, show, type_words

if TYPE_CHECKING:
    from rich.console import Console

    from befit.config.experiment import Experiment

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Experiment or study in YAML.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to it, such as train.lr=3e-4.")
    ] = None,
    data: Annotated[bool, typer.Option(help="Of a study: look at its data and models too.")] = True,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Resolve an experiment, name every mistake at once, and estimate bytes and memory. Reads no weights."""
    from befit.runs.estimate import check_everything
    from befit.studies.compare.study import is_study

    if is_study(config):
        check_study(config, overrides or (), imports or (), data, as_json)
        return
    with only_json(as_json):
        experiment = check_everything(config, overrides or (), imports or ())
        found = _checked(experiment)
    if as_json:
        print_json(found)
        return
    console = screen()
    console.print(f"{config}: no mistakes", style="green", markup=False)
    console.print()
    print_table(console, ("", ""), _check_rows(found), wrap=1)
    console.print()
    stages = [
        (one["run"], one["name"], str(one["rounds"]), "exchange" if one["uplink"] else "nothing leaves the client")
        for one in found["stages"]
    ]
    print_table(console, ("run", "stage", "rounds", "what travels"), stages, title="Stages")
    for warning in found["warnings"]:
        print_warning(messages(), warning)


def _checked(experiment: Experiment) -> dict[str, Any]:
    """What the check finds, with what reading the data and preparing it warned of among the warnings."""
    from befit.runs.runner import check as check_experiment

    logged: list[str] = []
    try:
        with each_warning(logged.append):
            found = check_experiment(experiment)
    except Exception:
        for warning in logged:  # beside a refusal they are no part of a result
            print_warning(messages(), warning)
        raise
    return {**found, "warnings": [*found["warnings"], *logged]}


def methods(imports: Imports = None, as_json: Json = False) -> None:
    """List the methods."""
    from befit.protocol.registry import get_method, method_names

    with only_json(as_json):
        load_imports(imports)
        entries = [get_method(name) for name in method_names()]
    if as_json:
        keys = ("name", "title", "year", "paper", "summary")
        print_json([{key: getattr(entry, key) for key in keys} for entry in entries])
        return
    rows = [(one.name, str(one.year or ""), f"{one.title}: {one.summary} {one.paper}".strip()) for one in entries]
    console = screen()
    print_table(console, ("name", "year", "what it does"), rows, wrap=2)
    console.print()
    console.print("befit explain NAME says more, with every argument.", style="dim")


def benchmarks(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them, with its arguments.")] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """List the benchmarks, or say what the arguments of one are."""
    from befit.data import registry

    with only_json(as_json):
        load_imports(imports)
        entries = [registry.get(one) for one in ([name] if name else registry.names())]
        arguments = {entry.name: _arguments(entry.build) for entry in entries}
    if as_json:
        keys = ("name", "version", "task", "default_model", "summary")
        print_json(
            [
                {**{key: getattr(entry, key) for key in keys}, "arguments": _plain(arguments[entry.name])}
                for entry in entries
            ]
        )
        return
    console = screen()
    if name is None:
        rows = [(one.name, one.task, one.summary) for one in entries]
        print_table(console, ("name", "task", "what it is"), rows, wrap=2)
        console.print()
        console.print("befit benchmarks NAME says more, with every argument.", style="dim")
        return
    (entry,) = entries
    console.print(f"{entry.name}, version {entry.version}", style="bold", markup=False)
    console.print()
    console.print(
        f"{entry.summary}. Task: {entry.task}; model, unless another is named: {entry.default_model}.", markup=False
    )
    if arguments[entry.name]:
        console.print()
        _print_arguments(console, arguments[entry.name], f"benchmark: {{name: {entry.name}, …}}")


def explain(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="A name that `befit methods` lists.")],
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Say what a method does, where it comes from, what its arguments are and what travels."""
    from befit.protocol.method import describe
    from befit.protocol.registry import get_method

    with only_json(as_json):
        load_imports(imports)
        entry = get_method(method)
        usual = entry.factory() if all(one.default is not REQUIRED for one in entry.parameters) else None
        travels, needs = (describe(usual), _needs(usual)) if usual is not None else ({}, [])
        mixed = usual is not None and usual.needs.mixed  # type: ignore[attr-defined]
    if as_json:
        keys = ("name", "title", "year", "paper", "docstring")
        described = {key: getattr(entry, key) for key in keys}
        print_json(
            {**described, "parameters": _plain(entry.parameters), "needs": needs, "mixed": mixed, "travels": travels}
        )
        return
    console = screen()
    source = ", ".join(str(part) for part in (entry.paper, entry.year) if part)
    console.print(f"{entry.title} ({entry.name})" + (f"  {source}" if source else ""), style="bold", markup=False)
    console.print()
    console.print(_prose(entry.docstring, entry.parameters), markup=False)
    console.print()
    if needs:
        console.print(f"Needs {', '.join(needs)}.", markup=False)
        console.print()
    if mixed:
        console.print("Clients with different backbones learn from each other.", markup=False)
        console.print()
    if entry.parameters:
        _print_arguments(console, entry.parameters, f"method: {{name: {entry.name}, …}}")
    if travels:
        console.print()
        rows = [(key, _travel_text(value)) for key, value in travels.items()]
        print_table(console, ("", ""), rows, title="What travels", wrap=1)


def _check_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    from befit.report.numbers import bytes_text

    rows = [
        ("method", found["method"]),
        ("baselines", ", ".join(found["baselines"]) or "none"),
        ("clients", f"{found['clients']:,}, {found['train_examples']:,} training examples in all"),
    ]
    for one in found["families"] or [found]:
        if found["families"]:
            rows.append((f"family {one['family']}", f"{one['clients']:,} clients, {one['train_examples']:,} examples"))
        rows += [
            ("model", f"{one['model']}, {one['backbone_parameters']:,} parameters, frozen"),
            ("trained per client", f"{one['trainable_parameters']:,} parameters at {one['adapted_modules']} modules"),
        ]
        for period, words in (("per_round", "a client's round"), ("total", "a client's run")):
            up, down = one[f"bytes_up_{period}"], one[f"bytes_down_{period}"]
            some = period == "total" and found["cohort"] is not None and found["cohort"] < found["clients"]
            text = f"{bytes_text(up)} up, {bytes_text(down)} down" + ", if it takes part in every round" * some
            rows.append((words, text))
    parts = ", ".join(f"{name} {mib:,.1f}" for name, mib in found["memory_parts_mib"].items())
    return [*rows, ("memory, estimated", f"{found['memory_mib']:,.1f} MiB ({parts}), and Python with its libraries")]


def _arguments(factory: Any) -> tuple[Parameter, ...]:
    from befit.core.schema import parameters_of

    return parameters_of(factory)


def _print_arguments(console: Console, parameters: tuple[Parameter, ...], title: str) -> None:
    rows = [(one.name, _default_text(one), _meaning(one)) for one in parameters]
    print_table(console, ("argument", "default", "meaning"), rows, title=title, wrap=(1, 2))


def _default_text(parameter: Parameter) -> str:
    if dataclasses.is_dataclass(parameter.default):  # which in full would leave no room for the meanings
        return "its defaults"
    return "required" if parameter.default is REQUIRED else show(plain(parameter.default))


def _meaning(parameter: Parameter) -> str:
    """The description, and the type where neither it nor the default shows it."""
    options = get_args(parameter.type) if get_origin(parameter.type) is Literal else ()
    told = parameter.default is not REQUIRED and type(parameter.default) is parameter.type
    if told or (options and all(str(one) in parameter.description for one in options)):
        return parameter.description
    return "; ".join(part for part in (parameter.description, type_words(parameter.type)) if part)


def _prose(doc: str, parameters: tuple[Parameter, ...]) -> str:
    """The docstring's paragraphs, each on one line, without the table of arguments, which is printed as a table."""
    names = {one.name for one in parameters}
    paragraphs = [part for part in doc.split("\n\n") if part.strip() and part.split()[0] not in names]
    return "\n\n".join(" ".join(part.split()) for part in paragraphs)


def _plain(parameters: tuple[Parameter, ...]) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "type": type_words(one.type),
            "required": one.default is REQUIRED,
            "default": None if one.default is REQUIRED else plain(one.default),
            "description": one.description,
        }
        for one in parameters
    ]


_DEMANDS = {
    "individual_updates": "individual updates",
    "public": "public records",
    "public_mixed": "public records where clients have different backbones",
    "server_model": "the backbones at the server",
}


def _needs(method: Any) -> list[str]:
    """What a method demands of a federation beyond the ordinary."""
    demands = plain(method.needs)
    words = [f"at least {demands['min_clients']} clients"] if demands["min_clients"] > 1 else []
    words += [f"{split} examples at every client" for split in demands["splits"] if split != "train"]
    words += [said for name, said in _DEMANDS.items() if demands[name]]
    return words


def _travel_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(_travel_text(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return str(value)
