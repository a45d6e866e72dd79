"""`befit export` and `befit predict`: use what a run has trained."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from befit.cli.output import Json, messages, names_in, only_json, print_json, say, screen, show_table, warnings_to
from befit.core.errors import RunError
from befit.core.storage import atomic_write, check_folder
from befit.report.numbers import score_text
from befit.report.table import Table

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/demo.")]
Client = Annotated[str, typer.Option("--client", metavar="ID", help="Client whose adapter is used.")]
Method = Annotated[
    str | None,
    typer.Option("--method", metavar="M", help="A baseline of the run, such as local. Default: what is deployed."),
]


def export(
    run: RunDir,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write to; it must not hold anything else.")
    ],
    client: Annotated[
        str | None, typer.Option("--client", metavar="ID", help="Write this client's model to DIR.")
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="Write every client's model to DIR/ID.")] = False,
    method: Method = None,
    budget: Annotated[
        int | None, typer.Option("--budget", metavar="R", help="One of several budgets. Default: the deployed adapter.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME", help="Name the adapter gives its backbone: the name you serve."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=1, help="Cut every module's update to this rank at most.")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Merge the adapter into its backbone: a complete model.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write clients' models: PEFT adapters in the folders that servers expect, or merged with their backbone."""
    if everybody == (client is not None):
        raise RunError("say whose model is exported: --client ID or --all, and not both")
    with only_json(as_json), warnings_to(messages()):
        from befit.runs.exporting import ExportForm, as_plain, export_all, export_to, serving_command

        form = ExportForm(method, budget, base, rank, merged)
        done = export_to(run, {client: out}, form) if client is not None else export_all(run, out, form)
        command = serving_command(out if client is None else out.absolute().parent, done)
    if as_json:
        rows = [as_plain(exported) for exported in done]
        print_json({"run": str(run), **(rows[0] if client is not None else {"clients": rows}), "serve": command})
        return
    cuts = rank is not None
    score = done[0].metric.replace("_", " ") or "score"
    header = ["client", "rank", score, *["norm² left", f"{score} then"] * cuts]
    cells = [
        (
            exported.client,
            exported.rank,
            score_text(exported.score, exported.metric),
            *[f"{100 * exported.energy:.2f}%", score_text(exported.cut, exported.metric)] * cuts,
        )
        for exported in done
    ]
    show_table(screen(), Table("", header, cells))
    reasons: dict[str, list[str]] = {}
    for exported in done:
        for limit in exported.limits:
            reasons.setdefault(limit, []).append(exported.client)
    for limit, clients in reasons.items():
        say(f"{'all' if len(clients) == len(done) > 1 else ', '.join(clients)}: {limit}")
    say(f"wrote {out}")
    if command is not None:
        say(f"serve with\n  {command}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def push(
    run: RunDir,
    client: Client,
    repo: Annotated[str, typer.Option("--repo", metavar="OWNER/NAME", help="Repository of the Hugging Face hub.")],
    method: Method = None,
    base: Annotated[str | None, typer.Option("--base", metavar="NAME", help="The backbone's id on the hub.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", min=1, help="As for export.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="As for export.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a public repository. Default: a private one.")] = False,
    as_json: Json = False,
) -> None:
    """Send one client's model to the Hugging Face hub. Nothing else in befit uploads a model."""
    with only_json(as_json), warnings_to(messages()):
        from befit.runs.exporting import ExportForm
        from befit.runs.push import push as push_model

        address, files = push_model(run, client, repo, ExportForm(method, None, base, rank, merged), private=not public)
    if as_json:
        print_json({"run": str(run), "client": client, "address": address, "files": files, "private": not public})
    else:
        say(f"sent {', '.join(files)} to {address}")


def evaluate(
    run: RunDir,
    client: Client,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Records with their answers, in the form of training data."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="A,B", help="Instead of FILE: tasks of lm-evaluation-harness.")
    ] = None,
    method: Method = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="With --tasks: only N examples of each.")
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option("--include", metavar="DIR", help="With --tasks: folder with tasks of your own, as YAML."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure one client's model on a file of records, or a language model by lm-evaluation-harness."""
    if bool(files) == (tasks is not None):
        raise RunError("choose what to measure on: a FILE of records with their answers, or --tasks, and not both")
    if files and (limit is not None or include is not None):
        raise RunError("--limit and --include are for --tasks; a FILE is measured as a whole")
    if tasks is None:
        _measure(run, client, files or [], method, as_json)
        return
    with only_json(as_json), warnings_to(messages()):
        from befit.runs.harness import evaluate as evaluate_tasks

        scores = evaluate_tasks(run, client, names_in(tasks) or [], method, limit, include)
    if as_json:
        print_json({"run": str(run), "client": client, "tasks": scores})
        return
    rows = [
        (task, metric, _number(value), _number(metrics.get(f"{metric}_stderr")))
        for task, metrics in scores.items()
        for metric, value in metrics.items()
        if not metric.endswith("_stderr")
    ]
    show_table(screen(), Table("", ["task", "metric", "score", "s.e."], rows))


def _measure(run: Path, client: str, files: list[Path], method: str | None, as_json: bool) -> None:
    with only_json(as_json), warnings_to(messages()):
        from befit.runs.measuring import measure

        measured = measure(run, client, files, method)
    if as_json:
        print_json({"run": str(run), "client": client, **measured})
        return
    rows = [(metric, score_text(value, metric)) for metric, value in measured["scores"].items()]
    if (majority := measured["majority"]) is not None:
        rows.append(("accuracy of the most frequent class", score_text(majority, "accuracy")))
    rows = [(metric.replace("_", " "), value) for metric, value in rows]
    show_table(screen(), Table(f"{client}, {measured['examples']} examples", ["metric", "score"], rows))


def predict(
    run: RunDir,
    client: Client,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="A text, an image or folder of images, a file of records as for training (.csv, .parquet, .jsonl and "
            "the like), a .txt file, or - for lines of standard input.",
        ),
    ],
    method: Method = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the answers there: .jsonl or .csv.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer with one client's own model."""
    if out is not None and out.suffix not in (".jsonl", ".csv"):
        raise RunError(f"--out {out}: answers are written as .jsonl or .csv; name a file that ends so")
    if out is not None:
        check_folder(out.parent)
    with only_json(as_json), warnings_to(messages()):
        from befit.runs.artifacts import answers
        from befit.runs.inputs import named_file, placed_lines

        values: list[Any] = []
        for text in inputs:
            lines = placed_lines((line.rstrip("\n") for line in sys.stdin), "standard input") if text == "-" else ()
            values += [line for line, _ in lines] or [Path(text) if named_file(text) else text]
        if out is not None and any(isinstance(value, Path) and _is_same(value, out) for value in values):
            raise RunError(f"--out {out}: is what is asked about, and would be replaced by the answers; name another")
        said = answers(run, client, values, method)
    rows = [{"input": _shown(value), "place": place, **answer} for value, place, answer in said]
    if out is not None:
        _write(out, rows)
    if as_json:
        print_json(rows)
    elif out is None:
        cells = [(_input_text(row["input"]), *_answer_text(row)) for row in rows]
        width = 3 if any(sure for *_, sure in cells) else 2
        header = ["input", "answer", "sure"][:width]
        show_table(screen(), Table("", header, [cell[:width] for cell in cells]), wrap=1)
    else:
        say(f"wrote {len(rows)} answers to {out}")


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _shown(value: Any) -> Any:
    """An input as JSON can hold it: of an encoded picture its size."""
    if isinstance(value, dict):
        return {name: _shown(part) for name, part in value.items()}
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Answers as JSON Lines, or as a table: the place, the fields of the input, the answer, and p(CLASS) of each."""
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        file, flat = io.StringIO(), [_flat(row) for row in rows]
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        text = file.getvalue()
    atomic_write(path, text.encode())


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    query, answer = row["input"], {name: value for name, value in row.items() if name not in ("input", "probabilities")}
    fields = {f"input {name}": _cell(value) for name, value in query.items()} if isinstance(query, dict) else {}
    sure = {f"p({name})": value for name, value in row.get("probabilities", {}).items()}
    return {"place": answer.pop("place"), **(fields or {"input": query}), **answer, **sure}


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def _input_text(value: Any) -> str:
    """An input in a line: of a record its first field that says something, of a conversation what was asked last."""
    fields = value.values() if isinstance(value, dict) else [value]
    first = next((field for field in fields if field not in (None, "")), "")
    if isinstance(first, list):
        questions = [turn["content"] for turn in first if isinstance(turn, dict) and turn.get("role") == "user"]
        first = questions[-1] if questions else first
    text = str(first)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _answer_text(answer: dict[str, Any]) -> tuple[str, str]:
    label = answer.get("answer", answer)
    sure = answer.get("probabilities", {}).get(label)
    return str(label), "" if sure is None else f"{sure:.2f}"
