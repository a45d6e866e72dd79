"""Commands that inspect and train nothing: `befit check`, `methods`, `benchmarks`, `explain` and `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from befit.cli.compare import check_study
from befit.cli.output import (
    Imports,
    Json,
    Overrides,
    each_warning,
    load_imports,
    messages,
    only_json,
    print_json,
    print_warning,
    progress_to,
    remember_config,
    say,
    screen,
    show_table,
)
from befit.core.errors import ConfigError, did_you_mean
from befit.core.schema import REQUIRED, Parameter, parameters_of, plain, type_words
from befit.core.text import first_of
from befit.report.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from befit.config.experiment import Experiment
    from befit.config.reference import Block


def check(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", callback=remember_config, help="Configuration or study in YAML.")
    ],
    overrides: Overrides = None,
    data: Annotated[bool, typer.Option(help="For a study: check its data and models too.")] = True,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Check a configuration or study, report all mistakes at once, and estimate bytes and memory. Reads no weights."""
    from befit.config.load import load_experiment
    from befit.studies.compare.study import is_study

    if is_study(config):
        check_study(config, overrides or (), imports or (), data, as_json)
        return
    if not data:
        problem = "--no-data: is for a study; of a configuration the data is checked, and records are counted"
        raise ConfigError([problem], "the command")
    with only_json(as_json):
        experiment = load_experiment(config, overrides or (), imports or ())
        result = _checked(experiment)
    if as_json:
        print_json(result)
        return
    console = screen()
    console.print(f"{config}: no mistakes", style="green", markup=False)
    console.print()
    show_table(console, Table("", ["", ""], _check_rows(result)), wrap=1)
    console.print()
    _show_data(console, result["data"])
    stages = [
        [stage["run"], stage["name"], stage["rounds"], "exchange" if stage["uplink"] else "nothing leaves the client"]
        for stage in result["stages"]
    ]
    show_table(console, Table("Stages", ["run", "stage", "rounds", "what travels"], stages))
    for warning in result["warnings"]:
        print_warning(messages(), warning)


def _checked(experiment: Experiment) -> dict[str, Any]:
    """The result of the check; its warnings include those of reading and preparing the data."""
    from befit.runs.runner import check as check_experiment

    logged: list[str] = []
    try:
        with each_warning(logged.append), progress_to(messages()):
            result = check_experiment(experiment)
    except Exception:
        for warning in logged:  # a refusal has no result that could list them
            print_warning(messages(), warning)
        raise
    return {**result, "warnings": [*result["warnings"], *logged]}


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
    rows = [
        [entry.name, str(entry.year or ""), f"{entry.title}: {entry.summary} {entry.paper}".strip()]
        for entry in entries
    ]
    console = screen()
    show_table(console, Table("", ["name", "year", "what it does"], rows), wrap=2)
    console.print("\nbefit explain NAME says more, with every argument.", style="dim")


def benchmarks(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A benchmark; its arguments are listed.")] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """List the benchmarks, or the arguments of one."""
    from befit.data import registry

    with only_json(as_json):
        load_imports(imports)
        entries = [registry.get(benchmark) for benchmark in (registry.names() if name is None else [name])]
        arguments = {entry.name: parameters_of(entry.build) for entry in entries}
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
        rows = [(entry.name, entry.task, entry.summary) for entry in entries]
        show_table(console, Table("", ["name", "task", "what it is"], rows), wrap=2)
        console.print("\nbefit benchmarks NAME says more, with every argument.", style="dim")
        return
    (entry,) = entries
    console.print(f"{entry.name}, version {entry.version}", style="bold", markup=False)
    console.print()
    summary = entry.summary if entry.summary[-1:] in ".?!" else f"{entry.summary}."
    console.print(
        f"{summary} Task: {entry.task}; model, unless another is named: {entry.default_model}.",
        markup=False,
    )
    if arguments[entry.name]:
        console.print()
        _print_arguments(console, arguments[entry.name], f"benchmark: {{name: {entry.name}, …}}")


def schema(
    study: Annotated[bool, typer.Option("--study", help="The schema of a study.")] = False, imports: Imports = None
) -> None:
    """Print the JSON Schema of a configuration, with which editors complete and check its keys."""
    from befit.config.reference import json_schema
    from befit.studies.compare.study import StudyFile

    load_imports(imports)
    print_json(json_schema(StudyFile) if study else json_schema())


def explain(
    what: Annotated[
        str, typer.Argument(metavar="METHOD|KEY", help="A method, or a key of the configuration such as train.lr.")
    ],
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Explain a method (what it does, its source, its arguments, what travels), or a key of the configuration."""
    from befit.config.reference import find, unknown
    from befit.protocol.describe import describe
    from befit.protocol.registry import get_method, method_names

    with only_json(as_json):
        load_imports(imports)
        setting = None if what in method_names() else find(what)
        name, _, argument = what.partition(".")
        if setting is None and argument and name in method_names():
            raise ConfigError([f"{what}: arguments of a method are explained by befit explain {name}"], "the command")
        if setting is None and what not in method_names() and ("." in what or "; write" in str(unknown(what))):
            raise unknown(what)
        if setting is None and what not in method_names():
            hint = did_you_mean(what, method_names()) or " befit methods lists methods, docs/configuration.md keys"
            raise ConfigError([f"{what!r} is neither a method nor a key of the configuration.{hint}"], "the command")
    if setting is not None:
        _explain_key(what, setting, as_json)
        return
    with only_json(as_json):
        entry = get_method(what)
        usual = entry.factory() if all(parameter.default is not REQUIRED for parameter in entry.parameters) else None
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
        rows = [["" if place else key, line] for key, value in travels.items() for place, line in _travel_lines(value)]
        show_table(console, Table("What travels", ["", ""], rows), wrap=1)


def _explain_key(path: str, setting: Block | Parameter, as_json: bool) -> None:
    """A block with its keys and an example, or one key."""
    from befit.config.reference import EXAMPLES, Block, default_text, kind_text

    keys = setting.keys if isinstance(setting, Block) else (setting,)
    if as_json:
        print_json({"key": path, "about": setting.about if isinstance(setting, Block) else "", "keys": _plain(keys)})
        return
    console = screen()
    console.print(path, style="bold", markup=False)
    console.print()
    if isinstance(setting, Block):
        console.print(setting.about, markup=False)
        console.print()
        _print_arguments(console, keys, "", "key")
        if example := EXAMPLES.get(path):
            console.print("\nFor example", style="bold")
            say(example)
        return
    console.print(setting.description, markup=False)
    console.print()
    rows = [("default", default_text(setting)), ("values", kind_text(setting))]
    show_table(console, Table("", ["", ""], rows), wrap=1)


SHOWN_CLIENTS = 12
SHOWN_KINDS = 8


def _show_data(console: Console, data: Mapping[str, Any]) -> None:
    """Every client's records by split, and its training records by class, the most frequent first."""
    kind = data["kind"]
    rows = []
    for client in [*data["clients"], *data["newcomers"]][:SHOWN_CLIENTS]:
        counts = sorted(client["counts"]["train"].items(), key=lambda entry: (-entry[1], entry[0]))
        words = first_of((f"{name}: {count:,}" for name, count in counts), SHOWN_KINDS)
        sizes = [client[split] for split in ("train", "val", "test")]
        rows.append([client["client"], *sizes, *[words] * (kind != "records")])
    headers = ["client", "train", "val", "test", *[f"{kind} in train"] * (kind != "records")]
    show_table(console, Table("Data", headers, rows), wrap=4)
    if (more := len(data["clients"]) + len(data["newcomers"]) - len(rows)) > 0:
        say(f"and {more} more; befit partition shows all", "dim", console)
    console.print()


def _check_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    from befit.report.numbers import bytes_text

    rows = [
        ("method", result["method"]),
        ("baselines", ", ".join(result["baselines"]) or "none"),
        ("clients", f"{result['clients']:,}, {result['train_examples']:,} training examples in all"),
    ]
    for family in result["families"] or [result]:
        if result["families"]:
            size = f"{family['clients']:,} clients, {family['train_examples']:,} examples"
            rows.append((f"family {family['family']}", size))
        trained = f"{family['trainable_parameters']:,} parameters at {family['adapted_modules']} modules"
        rows.append(("model", f"{family['model']}, {family['backbone_parameters']:,} parameters, frozen"))
        rows.append(("trained per client", trained))
        for period, words in (("per_round", "a client's round"), ("total", "a client's run")):
            up, down = family[f"bytes_up_{period}"], family[f"bytes_down_{period}"]
            some = period == "total" and result["cohort"] is not None and result["cohort"] < result["clients"]
            text = f"{bytes_text(up)} up, {bytes_text(down)} down" + ", if it takes part in every round" * some
            rows.append((words, text))
    parts = ", ".join(f"{name} {mib:,.1f}" for name, mib in result["memory_parts_mib"].items())
    rows.append(("memory, estimated", f"{result['memory_mib']:,.1f} MiB ({parts}), and Python with its libraries"))
    opening = f"{result['opening_mib']:,.1f} MiB beside the backbones, at the server"
    rows += [(f"privacy of {label}", text) for label, text in result["privacy"].items()]
    return [*rows, *[("before the first round", opening)] * bool(result["opening_mib"])]


def _print_arguments(console: Console, parameters: tuple[Parameter, ...], title: str, called: str = "argument") -> None:
    from befit.config.reference import default_text

    rows = [(parameter.name, default_text(parameter), _meaning(parameter)) for parameter in parameters]
    show_table(console, Table(title, [called, "default", "meaning"], rows), wrap=(1, 2))


def _meaning(parameter: Parameter) -> str:
    """The description, and the type where neither it nor the default shows it."""
    options = get_args(parameter.type) if get_origin(parameter.type) is Literal else ()
    type_is_shown = parameter.default is not REQUIRED and type(parameter.default) is parameter.type
    if type_is_shown or (options and all(str(option) in parameter.description for option in options)):
        return parameter.description
    return "; ".join(part for part in (parameter.description, type_words(parameter.type)) if part)


def _prose(doc: str, parameters: tuple[Parameter, ...]) -> str:
    """The docstring's paragraphs, each on one line, without the table of arguments, which is printed as a table."""
    names = {parameter.name for parameter in parameters}
    paragraphs = [part for part in doc.split("\n\n") if part.strip() and part.split()[0] not in names]
    return "\n\n".join(" ".join(part.split()) for part in paragraphs)


def _plain(parameters: tuple[Parameter, ...]) -> list[dict[str, Any]]:
    return [
        {
            "name": parameter.name,
            "type": type_words(parameter.type),
            "required": parameter.default is REQUIRED,
            "default": None if parameter.default is REQUIRED else plain(parameter.default),
            "description": parameter.description,
        }
        for parameter in parameters
    ]


_DEMANDS = {
    "individual_updates": "individual updates",
    "public": "public records",
    "public_at_clients": "the same public records at every client",
    "public_mixed": "public records where clients have different backbones",
    "server_model": "the backbones at the server",
    "common_model": "the smallest backbone at every client",
}


def _needs(method: Any) -> list[str]:
    """What a method needs beyond clients with training examples."""
    demands = plain(method.needs)
    words = [f"at least {demands['min_clients']} clients"] if demands["min_clients"] > 1 else []
    words += [f"{split} examples at every client" for split in demands["splits"] if split != "train"]
    words += [phrase for name, phrase in _DEMANDS.items() if demands[name]]
    return words


def _travel_lines(value: Any) -> list[tuple[int, str]]:
    """Numbered lines, one for each entry of a list."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    texts = (
        ", ".join(f"{k} {v}" for k, v in item.items()) if isinstance(item, dict) else str(item) for item in entries
    )
    return list(enumerate(texts))
