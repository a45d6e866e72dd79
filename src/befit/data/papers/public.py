"""The public split of FedMosaic's benchmarks: records that every party may see, from a file beside the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from befit.core.errors import DataError, map_all
from befit.data.files.readers import Row, read_rows
from befit.data.papers.assemble import shuffled
from befit.tasks.vqa_records import vqa_record

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
    Raises DataError for a file that is outside of the folder or has no such rows.
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
    chosen = shuffled(rows, seed, benchmark, "public")[:count]
    return tuple({"id": f"public-{number:05d}", **content} for number, content in enumerate(map_all(record, chosen)))


def public_texts(folder: Path, name: str, seed: int, benchmark: str) -> tuple[dict[str, Any], ...]:
    """Public causal-lm records: first question and answer of conversations without an image; none without a name."""
    if not name:
        return ()

    def as_record(row: Row) -> dict[str, Any]:
        instruction, output, _ = conversation_text(row)
        return {"instruction": instruction, "output": output}

    return public_records(folder, name, seed, benchmark, as_record, images=False)


def conversation_text(row: Row) -> tuple[str, str, bool]:
    """First question and answer of a row's conversation, and whether more follow."""
    values = {"conversations": row.values.get("conversations"), "form": "open"}
    turns = vqa_record(values, {}, lambda image: image, row.where)["conversation"]
    return turns[0]["content"].strip(), turns[1]["content"].strip(), len(turns) > 2
