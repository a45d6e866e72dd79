"""`befit cost`: parameters and bytes of methods on an architecture, before there is any data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from befit.cli.output import Imports, Json, load_imports, only_json, print_json, say, screen, show_table
from befit.core.errors import ConfigError
from befit.core.schema import show
from befit.report.table import Table

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def cost(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|PATH", help="A built-in architecture, or a model's config.json.")
    ] = "",
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help="A method; repeatable. Default: all.")
    ] = None,
    targets: Annotated[
        str,
        typer.Option(
            "--targets", metavar="NAME,NAME,...", help="Linear modules that get adapters; auto, all or all-linear."
        ),
    ] = "auto",
    rank: Annotated[int | None, typer.Option("--rank", help="Rank of every method's adapters.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds of stages without a number of their own.")] = 10,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[METHOD.]KEY=VALUE", help="An argument of one method, or of all that have it."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="Type of arrays on the wire.")
    ] = "float32",
    clients: Annotated[int | None, typer.Option("--clients", help="Clients, for totals over all of them.")] = None,
    labels: Annotated[
        int | None, typer.Option("--labels", help="Number of classes; the task head is then counted.")
    ] = None,
    head: Annotated[
        bool | None, typer.Option("--head/--no-head", help="Train and share the task head. Default: yes with --labels.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Task of the model. Default: the one in its configuration.")
    ] = None,
    smallest: Annotated[
        str | None,
        typer.Option("--smallest", metavar="NAME|PATH", help="The federation's smallest model, if it is not --model."),
    ] = None,
    models: Annotated[bool, typer.Option("--models", help="List the built-in architectures and stop.")] = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Count what methods train and send on a model, from its shapes: no weights, no data, no network.

    Bytes are those of one client's arrays. --json prints an object for one --method, and a list otherwise.
    """
    if models:
        _list_models(as_json)
        return
    with only_json(as_json):
        load_imports(imports)
        from befit.cost.architecture import find_architecture
        from befit.cost.compare import compare, with_savings
        from befit.protocol.registry import standard_method
        from befit.tasks import get_task

        problems = _problems(model, rounds, clients, labels, head, targets)
        every = [f"rank={rank}"] if rank is not None else []
        chosen, mistakes = _chosen(method, [*every, *(assignments or ())])
        if problems := [*problems, *mistakes]:
            raise ConfigError(problems, "the command")
        if task is not None:
            get_task(task, "--task")
        architecture = find_architecture(model, task)
        if labels is not None and not get_task(architecture.task).has_classes:
            raise ConfigError(
                [f"--labels: {architecture.task} has no task head; --task text-classification has one"], "the command"
            )
        rows = compare(
            architecture,
            {name: built for name, (_, built) in chosen.items()},
            _targets(targets),
            rounds=rounds,
            dtype=dtype,
            labels=labels,
            head=head is not False,
            clients=clients,
            smallest=None if smallest is None else find_architecture(smallest, task),
        )
        if not method:
            rows.sort(key=lambda row: -row["upload_bytes_total"])
        rows = [
            {**row, "arguments": _arguments(chosen[row["method"]][0])} for row in with_savings(rows, standard_method())
        ]
    if as_json:
        print_json(rows[0] if method and len(method) == 1 else rows)
    else:
        _show(rows)


def _chosen(names: Sequence[str] | None, assignments: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The methods by name, and the problems with them."""
    from befit.cost.arguments import chosen_methods
    from befit.protocol.registry import method_names

    try:
        return chosen_methods(names or method_names(), assignments), ()
    except ConfigError as error:
        return {}, error.problems


def _problems(
    model: str, rounds: int, clients: int | None, labels: int | None, head: bool | None, targets: str
) -> list[str]:
    problems = [] if model else ["--model: is required; --models lists those that are built in"]
    counts = {"--rounds": rounds, "--clients": clients, "--labels": labels}
    problems += [
        f"{option}: must be 1 or more, got {value}"
        for option, value in counts.items()
        if value is not None and value < 1
    ]
    if head and labels is None:
        problems.append("--head: needs --labels, the number of classes")
    if not all(name.strip() for name in targets.split(",")):
        problems.append(f"--targets: must be names with commas between, such as q_proj,v_proj, got {show(targets)}")
    return problems


def _targets(text: str) -> list[str] | str:
    return text if text in ("auto", "all", "all-linear") else [name.strip() for name in text.split(",")]


def _arguments(block: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != "name"}


def _list_models(as_json: bool) -> None:
    from befit.cost.architecture import builtin_architectures

    known = builtin_architectures()
    if as_json:
        print_json([{"name": name, **entry} for name, entry in known.items()])
        return
    rows = [(name, entry["task"], ", ".join(entry["hub"])) for name, entry in known.items()]
    show_table(screen(), Table("", ["name", "task", "checkpoints of these shapes"], rows), wrap=2)


def _show(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    frozen = f"{first['backbone_parameters']:,} parameters, frozen"
    say(f"{first['model']}: {frozen}; adapters at {first['adapted_modules']} modules")
    sizes = [row["parameters"] for row in rows]
    same = all(size == sizes[0] for size in sizes)
    parts = [part for part in ("A", "B", "head") if any(size[part] for size in sizes)]
    if same:
        say(f"one adapter: {', '.join(f'{part} {sizes[0][part]:,}' for part in parts)}")
    beside = {name: size["total"] for name, size in [*first["slots"].items()][1:] if size["total"] and not size["A"]}
    if len(rows) == 1 and beside:
        say(f"beside it: {', '.join(f'{name} {total:,}' for name, total in beside.items())}")
    say("")
    _print_columns(_columns(rows))
    if not same:
        names = [row["method"] for row in rows]
        _print_columns(
            {"method": names, **{part: [f"{size[part]:,}" for size in sizes] for part in parts}}, "One adapter"
        )
    if "clients" in first:
        together = {"method": [row["method"] for row in rows]}
        for way in ("up", "down"):
            _add_bytes(together, f"{way}load in all", [row[f"{way}load_bytes_all_clients"] for row in rows])
        _print_columns(together, f"{first['clients']:,} clients together")
    if len(rows) == 1:
        stages = {
            "stage": [stage["name"] for stage in first["stages"]],
            "rounds": [f"{stage['rounds']:,}" for stage in first["stages"]],
        }
        for way in ("up", "down"):
            _add_bytes(stages, f"{way}load / round", [stage[f"{way}load_bytes_per_round"] for stage in first["stages"]])
        _print_columns(stages, "Stages")
    text = (
        f"Arrays of one client in {first['dtype']}; {first['rounds']:,} rounds where a method has no number of its own."
        " Compute (products of parameters and tokens of a training step) and memory (parameters) are relative to plain "
        "fine-tuning of one adapter."
    )
    if any(row["public_records"] for row in rows):
        text += (
            " Public: the most that a round computes on public records at each client and at the server, in records of "
            "plain fine-tuning with the same length; once: at the server for this model, before the first round."
        )
    say(text, "dim")


def _print_columns(table: dict[str, list[str]], title: str = "") -> None:
    show_table(screen(), Table(title, list(table), list(zip(*table.values(), strict=True))))
    say("")


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Cells by header; empty columns are left out."""
    table: dict[str, list[str]] = {"method": [row["method"] for row in rows]}
    table["trained"] = [f"{row['trained_parameters']:,}" for row in rows]
    up, down = ([row[f"{way}load_bytes_per_round"] for row in rows] for way in ("up", "down"))
    _add_bytes(table, "up and down / round" if up == down else "upload / round", up)
    if up != down:
        _add_bytes(table, "download / round", down)
    for way in ("up", "down"):
        _add_bytes(table, f"{way}load in all", [row[f"{way}load_bytes_total"] for row in rows])
    table["compute"] = ["-" if row["compute"] is None else f"{row['compute']:.3f}" for row in rows]
    table["memory"] = [f"{row['memory']:.3f}" for row in rows]
    if any(row["upload_bytes_beside_adapters"] for row in rows):
        _add_bytes(table, "non-adapter upload / round", [row["upload_bytes_beside_adapters"] for row in rows])
    if any(row["public_records"] for row in rows):
        for header, parts in (("client", ("client",)), ("server", ("server", "each")), ("once", ("opening",))):
            table[f"public, {header}"] = [_public(row, parts) for row in rows]
    if any(row["head_bytes"]["upload_bytes_total"] for row in rows):
        _add_bytes(table, "head upload", [row["head_bytes"]["upload_bytes_total"] for row in rows])
    if "upload_saving" in rows[0]:
        shares = [row["upload_saving"] for row in rows]
        table[f"saved against {rows[0]['saved_against']}"] = [_saving(share) for share in shares]
    return table


def _saving(share: float | None) -> str:
    """A share saved; where a method sends more, how many times as much, which a negative share would hide."""
    if share is None:
        return "-"
    return f"{share:.1%}" if share >= 0 else f"sends {1 - share:,.1f} x"


def _public(row: dict[str, Any], parts: Sequence[str]) -> str:
    """A round's work on public records; what the server does for each client with their number, where it is known."""
    records = row["public_records"]
    if not records or not any(records.get(part) for part in parts):
        return "-"
    if "each" not in parts:
        return f"{records[parts[0]]:,.0f}"
    if "clients" in row:
        return f"{records['server'] + row['clients'] * records['each']:,.0f}"
    return f"{records['server']:,.0f}" + (f" + {records['each']:,.0f} a client" if records["each"] else "")


def _add_bytes(table: dict[str, list[str]], header: str, values: Sequence[int]) -> None:
    """A column in the largest unit in which no value but zero is below one, so that numbers compare at sight."""
    least = min((value for value in values if value), default=0)
    unit, size = next(((unit, size) for unit, size in UNITS if least >= size), ("B", 1.0))
    table[f"{header} ({unit})"] = [f"{value / size:,.0f}" if size == 1 else f"{value / size:,.1f}" for value in values]
