"""`befit export` and `befit predict`: use what a run has trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from befit.cli.output import Json, messages, only_json, print_json, say, screen, show_table, warnings_to
from befit.core.errors import DataError
from befit.core.jsonfile import parse_json
from befit.report.table import Table

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/demo.")]
Client = Annotated[str, typer.Option("--client", metavar="ID", help="Client whose adapter is used.")]


def export(
    run: RunDir,
    client: Client,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write the adapter to.")],
    budget: Annotated[
        int | None, typer.Option("--budget", metavar="R", help="One of several budgets. Default: the deployed adapter.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one client's adapter as a standard PEFT checkpoint."""
    with only_json(as_json):
        from befit.runs.artifacts import export as export_adapter

        path = export_adapter(run, client, out, budget)
    if as_json:
        print_json({"run": str(run), "client": client, "path": str(path)})
    else:
        say(f"wrote {path}")


def predict(
    run: RunDir,
    client: Client,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="A text, an image file, a file of inputs (.txt or .jsonl), or - for lines of standard input.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Answer with one client's own model."""
    with only_json(as_json):
        read = [pair for argument in inputs for pair in read_inputs(argument)]
        values, places = [value for value, _ in read], [place for _, place in read]
        with warnings_to(messages()):
            from befit.runs.artifacts import predict as predict_inputs

            answers = predict_inputs(run, client, values, places)
    if as_json:
        inputs_of = zip(values, places, answers, strict=True)
        print_json([{"input": value, "place": place, **answer} for value, place, answer in inputs_of])
    else:
        rows = [(_input_text(value), *_answer_text(answer)) for value, answer in zip(values, answers, strict=True)]
        show_table(screen(), Table("", ["input", "answer", "sure"], rows), wrap=1)


def read_inputs(text: str) -> list[tuple[Any, str]]:
    """The inputs that an argument stands for, each with the place it is from, for messages.

    Lines of standard input or a file, records of a JSON Lines file, or the argument itself. Raises DataError where
    there is none.
    """
    if text == "-":
        lines = [(line.rstrip("\n"), f"line {number} of the input") for number, line in enumerate(sys.stdin, 1)]
        if not (kept := [line for line in lines if line[0].strip()]):
            raise DataError("standard input holds no inputs: give one a line")
        return kept
    path = Path(text)
    if path.suffix not in (".txt", ".jsonl"):
        return [(text, f"input {text[:40]!r}")]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the inputs in {path}: {error}") from error
    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not kept:
        raise DataError(f"{path} holds no inputs")
    if path.suffix == ".jsonl":
        return _records(path, kept)
    return [(line, f"{path}, line {number}") for number, line in kept]


def _records(path: Path, lines: Sequence[tuple[int, str]]) -> list[tuple[Any, str]]:
    places = [f"{path}, line {number}" for number, _ in lines]
    return [(parse_json(line, place, DataError), place) for place, (_, line) in zip(places, lines, strict=True)]


def _input_text(value: Any) -> str:
    text = str(value) if isinstance(value, str) else str(next(iter(value.values()), "")) if value else ""
    return text if len(text) <= 40 else f"{text[:39]}…"


def _answer_text(answer: dict[str, Any]) -> tuple[str, str]:
    label = answer.get("label", answer.get("text", answer))
    sure = answer.get("probabilities", {}).get(label) if isinstance(answer.get("probabilities"), dict) else None
    return str(label), "" if sure is None else f"{sure:.2f}"
