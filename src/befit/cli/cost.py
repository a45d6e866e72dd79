"""`befit cost`: parameters and bytes of methods on an architecture, before there is any data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from befit.cli.output import Imports, Json, load_imports, only_json, print_json, say, screen, show_table
from befit.core.errors import ConfigError
from befit.core.schema import show
from befit.core.text import size_text
from befit.protocol.registry import ALONE
from befit.report.numbers import MINUS, listing
from befit.report.table import BYTES, Cell, Table, decimals


def cost(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|PATH", help="A built-in architecture, or a model's config.json.")
    ] = "",
    method: Annotated[list[str] | None, typer.Option("--method", metavar="NAME", help="A method; repeatable.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every method, the most expensive first.")] = False,
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
        Literal["float32", "bfloat16", "float16", "int8"], typer.Option("--dtype", help="Type of arrays on the wire.")
    ] = "float32",
    top_k: Annotated[
        float | None, typer.Option("--top-k", help="Share of an update's entries that a client sends, as wire.top_k.")
    ] = None,
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

    Shows the requested methods beside training alone, the usual method, and the one that uploads least in a round.
    Bytes are those of one client's arrays. --json prints an object for one --method, else a list of those asked
    for, or of all.
    """
    if models:
        _list_models(as_json)
        return
    with only_json(as_json):
        load_imports(imports)
        from befit.cost.architecture import find_architecture
        from befit.cost.compare import compare, with_savings
        from befit.protocol.registry import standard_method
        from befit.protocol.settings import SENT, WireSettings
        from befit.tasks import get_task

        problems = _problems(model, rounds, clients, labels, head, targets)
        if top_k is not None and not SENT.holds(top_k):
            problems.append(f"--top-k: {SENT.text}, got {top_k:g}")
        all_assignments = [*([] if rank is None else [f"rank={rank}"]), *(assignments or ())]
        chosen, mistakes = _chosen(method, all_assignments)
        if problems := [*problems, *mistakes]:
            raise ConfigError(problems, "the command")
        if task is not None:
            get_task(task, "--task")
        architecture = find_architecture(model, task)
        if labels is not None and not get_task(architecture.task).has_classes:
            raise ConfigError(
                [f"--labels: {architecture.task} has no task head; --task text-classification has one"], "the command"
            )
        asked = list(chosen) if method else []
        if not as_json:
            chosen |= _others(chosen, all_assignments, clients)
        rows = compare(
            architecture,
            {name: built for name, (_, built) in chosen.items()},
            _targets(targets),
            rounds=rounds,
            wire=WireSettings(dtype, top_k),
            labels=labels,
            head=head is not False,
            clients=clients,
            smallest=None if smallest is None else find_architecture(smallest, task),
            asked=asked,
        )
        if not asked or everything:
            rows.sort(key=lambda row: -row["upload_bytes_total"])
    if as_json:
        rows = with_savings(rows, standard_method())
        rows = [{**row, "arguments": _arguments(chosen[row["method"]][0])} for row in rows]
        print_json(rows[0] if len(asked) == 1 else rows)
    else:
        _show(rows if everything else _short(rows, asked, standard_method()), asked, standard_method())


def _others(chosen: Mapping[str, Any], assignments: Sequence[str], clients: int | None) -> dict[str, Any]:
    """The methods that were not asked for, with those arguments for all that they have too; without any that cannot be
    had so."""
    from befit.protocol.registry import get_method, method_names

    others: dict[str, Any] = {}
    for name in method_names():
        names = {parameter.name for parameter in get_method(name).parameters}
        applicable = [text for text in assignments if text.partition("=")[0].split(".")[0] in names]
        if name not in chosen:
            others |= _chosen([name], applicable)[0]
    return {name: other for name, other in others.items() if clients is None or clients >= other[1].needs.min_clients}


def _short(rows: Sequence[dict[str, Any]], asked: Sequence[str], usual: str) -> list[dict[str, Any]]:
    """The rows that were asked for, then training alone, the usual method, and the one that uploads least in a round of
    those that upload anything."""
    sent = {row["method"]: row["upload_bytes_per_round"] for row in rows if row["upload_bytes_per_round"]}
    cheapest = [min(sent, key=lambda name: sent[name])] * bool(sent)
    by_name = {row["method"]: row for row in rows}
    return [by_name[name] for name in dict.fromkeys([*asked, ALONE, usual, *cheapest]) if name in by_name]


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

    architectures = builtin_architectures()
    if as_json:
        print_json([{"name": name, **entry} for name, entry in architectures.items()])
        return
    rows = [(name, entry["task"], ", ".join(entry["hub"])) for name, entry in architectures.items()]
    show_table(screen(), Table("", ["name", "task", "checkpoints of these shapes"], rows), wrap=2)


def _show(rows: Sequence[dict[str, Any]], asked: Sequence[str], usual: str) -> None:
    """The rows side by side, then what was asked for in detail."""
    first, console = rows[0], screen()
    frozen = f"{first['backbone_parameters']:,} parameters, frozen"
    say(f"{first['model']}: {frozen}; adapters at {first['adapted_modules']} modules")
    about = [row for row in rows if row["method"] in asked]
    sizes = [row["parameters"] for row in about or rows]
    same = all(size == sizes[0] for size in sizes)
    parts = [part for part in ("A", "B", "head") if any(size[part] for size in sizes)]
    if same:
        say(f"one adapter: {', '.join(f'{part} {sizes[0][part]:,}' for part in parts)}")
    slots = [*about[0]["slots"].items()][1:] if len(about) == 1 else []
    if beside := {name: size["total"] for name, size in slots if size["total"] and not size["A"]}:
        say(f"beside it: {', '.join(f'{name} {total:,}' for name, total in beside.items())}")
    say("")
    _print_columns(_columns(rows, usual))
    if len(details := _details(about)) > 1:
        _print_columns(details, "Beside adapters")
    if about and not same:
        columns = {part: [f"{size[part]:,}" for size in sizes] for part in parts}
        _print_columns({"method": _names(about), **columns}, "One adapter")
    if "clients" in first:
        columns = {f"{way}load in all": _bytes(rows, f"{way}load_bytes_all_clients") for way in ("up", "down")}
        _print_columns({"method": _names(rows), **columns}, f"{first['clients']:,} clients together")
    if len(about) == 1:
        stages = about[0]["stages"]
        columns = {"stage": [stage["name"] for stage in stages], "rounds": [f"{stage['rounds']:,}" for stage in stages]}
        columns |= {f"{way}load / round": _bytes(stages, f"{way}load_bytes_per_round") for way in ("up", "down")}
        _print_columns(columns, "Stages")
    from befit.protocol.registry import method_names

    form = first["dtype"] + ("" if first["top_k"] is None else f", the largest {first['top_k']:g} of each update")
    text = (
        f"Arrays of one client in {form}. Compute (products of parameters and tokens of a training step) and "
        "memory (parameters) are relative to plain fine-tuning of one adapter."
    )
    if any(row["public_records"] for row in about):
        text += (
            " Public: the most that a round computes on public records at each client and at the server, in records of "
            "plain fine-tuning with the same length; once: at the server for this model, before the first round."
        )
    text += _earlier(rows) + _growth(rows)
    refused = [f"{row['method']} is refused by a run: {reason}." for row in rows for reason in row["refused"]]
    further = ["--all shows every method."] * (len(rows) < len(method_names()))
    notes = [*_rounds_note(rows, usual), text, *refused, *further]
    console.print(" ".join(notes), style="dim", markup=False)


def _earlier(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which methods upload in further stages too: bytes per round are those of the last federated one."""
    names = [
        row["method"]
        for row in rows
        if row["upload_bytes_total"] >= max(1, _rounds(row)) * (row["upload_bytes_per_round"] + 1)
    ]
    return f" For {listing(names)}, up in all counts earlier stages too." if names else ""


def _growth(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whose downloads depend on how many clients reply in a round."""
    growing = [row["method"] for row in rows if row["download_bytes_per_reply"]]
    if not growing:
        return ""
    number = f"all {clients:,} clients" if (clients := rows[0].get("clients")) else "one client (see --clients)"
    return f" Downloads of {listing(growing)} grow with the clients that reply in a round, here {number}."


def _rounds_note(rows: Sequence[dict[str, Any]], usual: str) -> list[str]:
    """In how many rounds the methods exchange anything; where that differs, which of them in how many."""
    by_rounds: dict[int, list[str]] = {}
    for row in rows:
        if (rounds := _rounds(row)) and row["upload_bytes_total"]:
            by_rounds.setdefault(rounds, []).append(row["method"])
    if len(by_rounds) < 2:
        return [f"{rounds:,} rounds." for rounds in by_rounds]
    (most, _), *others = sorted(by_rounds.items(), key=lambda item: -len(item[1]))
    listed = "; ".join(f"{listing(names)}: {rounds:,}" for rounds, names in others)
    rounds = f"Not all in the same number of rounds ({listed}; others: {most:,})"
    return [f"{rounds}: uploads against {usual} are by the round."]


def _rounds(row: Mapping[str, Any]) -> int:
    """How many rounds the last federated stage has: bytes per round are those of that stage."""
    return next((stage["rounds"] for stage in reversed(row["stages"]) if stage["federated"]), 0)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["method"] for row in rows]


def _bytes(rows: Sequence[Mapping[str, Any]], key: str) -> list[Cell]:
    return [Cell(row[key], BYTES) for row in rows]


def _print_columns(table: Mapping[str, Sequence[Cell | str]], title: str = "") -> None:
    show_table(screen(), Table(title, list(table), list(zip(*table.values(), strict=True))))
    say("")


def _columns(rows: Sequence[dict[str, Any]], usual: str) -> dict[str, Sequence[Cell | str]]:
    """Cells by header, of what every method has."""
    table: dict[str, Sequence[Cell | str]] = {"method": _names(rows)}
    table["trained"] = [size_text(row["trained_parameters"]) for row in rows]
    table |= {f"{way} / round": _bytes(rows, f"{way}load_bytes_per_round") for way in ("up", "down")}
    table["up in all"] = _bytes(rows, "upload_bytes_total")
    base = next((row for row in rows if row["method"] == usual), rows[0])
    if len(rows) > 1 and base["upload_bytes_total"]:
        table[f"up against {base['method']}"] = [_against(row, base) for row in rows]
    return table | {key: [Cell(row[key], decimals(2)) for row in rows] for key in ("compute", "memory")}


def _details(rows: Sequence[dict[str, Any]]) -> dict[str, Sequence[Cell | str]]:
    """Cells by header, of what few methods have; columns that are empty are left out."""
    table: dict[str, Sequence[Cell | str]] = {"method": _names(rows)}
    if any(row["upload_bytes_beside_adapters"] for row in rows):
        table["non-adapter upload / round"] = _bytes(rows, "upload_bytes_beside_adapters")
    if any(row["public_records"] for row in rows):
        for header, parts in (("client", ("client",)), ("server", ("server", "each")), ("once", ("opening",))):
            table[f"public, {header}"] = [_public(row, parts) for row in rows]
    if any(row["head_bytes"]["upload_bytes_total"] for row in rows):
        table["head upload"] = [Cell(row["head_bytes"]["upload_bytes_total"], BYTES) for row in rows]
    return table


def _against(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """How much a method uploads in a round, on the mean, beside the `base`: a share less, or times as much."""
    if not row["upload_bytes_total"]:
        return "nothing"
    uploads, base_uploads = (entry["upload_bytes_total"] / _rounds(entry) for entry in (row, base))
    if uploads == base_uploads:
        return "same"
    ratio = uploads / base_uploads
    return f"{MINUS}{1 - ratio:.1%}" if ratio < 1 else f"x {ratio:,.{0 if ratio >= 100 else 1}f}"


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
