"""`befit cost`: parameters and bytes of methods on an architecture, before there is any data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from befit.cli.output import make_table, only_json, print_json, screen
from befit.errors import ConfigError

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def cost(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|PATH", help="A built-in architecture, or a config.json.")
    ] = "",
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help="One or more times; all methods without.")
    ] = None,
    targets: Annotated[
        str, typer.Option("--targets", metavar="NAME,NAME,...", help="Linear modules with adapters; auto, or all.")
    ] = "auto",
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of every method's adapters.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds of stages that do not say their own.")] = 10,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[METHOD.]KEY=VALUE", help="An argument of one method, or of all that have it."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="Type of arrays on the wire.")
    ] = "float32",
    clients: Annotated[int | None, typer.Option("--clients", help="Totals over so many clients too.")] = None,
    labels: Annotated[
        int | None, typer.Option("--labels", help="Classes of a classifier, whose task head is then counted.")
    ] = None,
    head: Annotated[
        bool | None, typer.Option("--head/--no-head", help="Train and share the task head; with --labels it is.")
    ] = None,
    task: Annotated[
        Literal["text-classification", "image-classification", "causal-lm"] | None,
        typer.Option("--task", help="What the model is used for, where its configuration says otherwise."),
    ] = None,
    models: Annotated[bool, typer.Option("--models", help="List the built-in architectures, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
) -> None:
    """Count what methods train and send on a model, from its shapes: no weights, no data, no network.

    Bytes are those of one client's arrays. --json prints an object for one --method, and a list for several or none.
    """
    if models:
        _list_models(as_json)
        return
    if problems := _problems(model, rounds, clients, labels, head):
        raise ConfigError(problems, "the command")
    with only_json(as_json):
        from befit.cost.architecture import find_architecture
        from befit.cost.arguments import chosen_methods
        from befit.cost.compare import compare
        from befit.registry import method_names

        every = [f"rank={rank}"] if rank is not None else []
        chosen = chosen_methods(method or method_names(), [*every, *(assignments or ())])
        architecture = find_architecture(model, task)
        if architecture.task == "causal-lm" and (labels is not None or head):
            raise ConfigError(["--labels: causal-lm has no task head; --task text-classification has one"],
                              "the command")  # fmt: skip
        found = compare(
            architecture, {name: made for name, (_, made) in chosen.items()}, _targets(targets),
            rounds=rounds, dtype=dtype, labels=labels, head=head is not False, clients=clients,
        )  # fmt: skip
        rows = [{**row, "arguments": _arguments(chosen[row["method"]][0])} for row in found]
    if as_json:
        print_json(rows[0] if method and len(method) == 1 else rows)
    else:
        _show(rows, architecture.source)


def _problems(model: str, rounds: int, clients: int | None, labels: int | None, head: bool | None) -> list[str]:
    problems = [] if model else ["--model: is required; --models lists those that are built in"]
    counts = {"--rounds": rounds, "--clients": clients, "--labels": labels}
    problems += [f"{option}: must be 1 or more, got {value}" for option, value in counts.items()
                 if value is not None and value < 1]  # fmt: skip
    if head and labels is None:
        problems.append("--head: needs --labels, the number of classes")
    return problems


def _targets(text: str) -> list[str] | str:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError([f"--targets: must be names with commas between, such as q_proj,v_proj, got {text!r}"],
                          "the command")  # fmt: skip
    return text if text in ("auto", "all") else names


def _arguments(block: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != "name"}


def _list_models(as_json: bool) -> None:
    from befit.cost.architecture import builtin_architectures

    known = builtin_architectures()
    if as_json:
        print_json([{"name": name, **entry} for name, entry in known.items()])
        return
    rows = [(name, entry["task"], ", ".join(entry["hub"])) for name, entry in known.items()]
    screen().print(make_table(("name", "task", "checkpoints of these shapes"), rows, wrap=2))


def _show(rows: Sequence[dict[str, Any]], source: str) -> None:
    first, console = rows[0], screen()
    console.print(f"{first['model']}: {first['backbone_parameters']:,} parameters, frozen; adapters at "
                  f"{first['adapted_modules']} modules ({source})", markup=False, soft_wrap=True)  # fmt: skip
    console.print()
    headers, columns = _columns(rows)
    console.print(make_table(headers, list(zip(*columns, strict=True))))
    console.print()
    width = first["bytes_per_value"]
    text = f"Bytes of one client, {first['dtype']} ({width} a value); {first['rounds']} rounds, or the method's own."
    console.print(text, style="dim", markup=False, soft_wrap=True)


def _columns(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headers and columns; those that say the same for every method, or nothing, are left out."""
    table: dict[str, list[str]] = {"method": [row["method"] for row in rows]}
    for part in ("A", "B", "head"):
        if part != "head" or any(row["parameters"]["head"] for row in rows):
            table[part] = [f"{row['parameters'][part]:,}" for row in rows]
    table["trained"] = [f"{row['trained_parameters']:,}" for row in rows]
    for header, key in (("up a round", "upload_bytes_per_round"), ("down a round", "download_bytes_per_round"),
                        ("up in all", "upload_bytes_total"), ("down in all", "download_bytes_total")):  # fmt: skip
        _add_bytes(table, header, [row[key] for row in rows])
    if any(row["head_bytes"]["upload_bytes_total"] for row in rows):
        _add_bytes(table, "of it head, up", [row["head_bytes"]["upload_bytes_total"] for row in rows])
    if "upload_saving" in rows[0]:
        shares = [row["upload_saving"] for row in rows]
        table[f"saved against {rows[0]['method']}"] = ["-" if one is None else f"{one:.1%}" for one in shares]
    if "clients" in rows[0]:
        for way in ("up", "down"):
            values = [row[f"{way}load_bytes_all_clients"] for row in rows]
            _add_bytes(table, f"{way}, {rows[0]['clients']} clients", values)
    return list(table), list(table.values())


def _add_bytes(table: dict[str, list[str]], header: str, values: Sequence[int]) -> None:
    """A column in the largest unit in which no value but zero is below one, so that numbers compare at sight."""
    least = min((value for value in values if value), default=0)
    unit, size = next(((unit, size) for unit, size in UNITS if least >= size), ("B", 1.0))
    table[f"{header} {unit}"] = [f"{value / size:,.0f}" if size == 1 else f"{value / size:,.1f}" for value in values]
