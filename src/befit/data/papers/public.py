"""The public split of FedMosaic's benchmarks: records that every party may see, from a file beside the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from befit.core.errors import DataError
from befit.core.schema import show
from befit.data.files.readers import Row, read_rows
from befit.data.papers.assemble import shuffled

_LOG = logging.getLogger(__name__)
PUBLIC = 5000  # how many, unless a benchmark is asked for others


def public_records(
    folder: Path,
    name: str,
    seed: int,
    benchmark: str,
    record: Callable[[Row], dict[str, Any]],
    images: bool,
    count: int = PUBLIC,
) -> tuple[dict[str, Any], ...]:
    """At most `count` records of the file `name` below `folder`, drawn by seed: a smaller draw is part of a larger one.

    record  makes a record of a row; its id is added here
    images  of its rows with an image, or of all where none has one; else of those without
    A row of which none can be made is left out, which is said. Raises DataError for a file that is outside of the
    folder or has no such rows.
    """
    path = folder / name
    if ".." in PurePosixPath(name).parts or Path(name).is_absolute() or not path.is_file():
        raise DataError(f"benchmark.public: there is no file {name} below {folder}")
    every = read_rows(path, ())
    rows = [row for row in every if bool(row.values.get("image")) == images] or (every if images else [])
    if not rows:
        raise DataError(
            f"benchmark.public: {f'{path} has no record' if images else f'every record of {path} has an image'}"
        )
    chosen: list[dict[str, Any]] = []
    problems: list[DataError] = []
    for row in shuffled(rows, seed, benchmark, "public"):
        if len(chosen) == count:
            break
        try:
            chosen.append({"id": f"public-{len(chosen):05d}", **record(row)})
        except DataError as error:
            problems.append(error)
    if not chosen:
        raise DataError(f"benchmark.public: no record of {path} can be used, first {problems[0]}")
    if problems:
        _LOG.warning("%s: %d public records are left out, first %s", benchmark, len(problems), problems[0])
    return tuple(chosen)


def public_texts(folder: Path, name: str, seed: int, benchmark: str) -> tuple[dict[str, Any], ...]:
    """Public causal-lm records: first question and answer of conversations without an image; none without a name."""
    if not name:
        return ()

    def as_record(row: Row) -> dict[str, Any]:
        instruction, output, _ = conversation_text(row)
        return {"instruction": instruction, "output": output}

    return public_records(folder, name, seed, benchmark, as_record, images=False)


def conversation_text(row: Row) -> tuple[str, str, bool]:
    """First question and answer of a row's conversation, and whether more follows. A number counts as its text."""
    said = row.values.get("conversations")
    turns: list[Any] = said if isinstance(said, list) else []
    first = [as_text(turn) for turn in turns[:2]]
    texts = [turn["value"].strip() for turn, sender in zip(first, ("human", "gpt"), strict=False) if _by(turn, sender)]
    if len(texts) < 2 or not all(texts):
        raise DataError(
            f"{row.where}: conversations must begin with a question and its answer, {{from: human, value: …}} and "
            f"{{from: gpt, value: …}}, got {show(said)}"
        )
    return texts[0], texts[1], len(turns) > 2


def _by(turn: Any, sender: str) -> bool:
    return isinstance(turn, dict) and turn.get("from") == sender and isinstance(turn.get("value"), str)


def as_text(turn: Any) -> Any:
    """A turn with a number in place of a text has it as text, as the authors' loader reads it."""
    number = isinstance(turn, dict) and isinstance(turn.get("value"), int | float)
    return {**turn, "value": str(turn["value"])} if number else turn
