"""The public split of FedMosaic's benchmarks: records that every party may see, from a file beside the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from befit.core.errors import DataError, map_all
from befit.data.files.readers import Row, read_rows
from befit.data.papers.assemble import shuffled
from befit.tasks.vqa_records import vqa_record

PUBLIC = 5000


def public_records(
    folder: Path, name: str, seed: int, benchmark: str, record: Callable[[Row], dict[str, Any]], images: bool
) -> tuple[dict[str, Any], ...]:
    """At most 5,000 records of the file `name` below `folder`, drawn by seed, of its rows with images or of the others.

    record  makes a record of a row; its id is added here
    Raises DataError for a file that is outside of the folder or has no such rows.
    """
    path = folder / name
    if ".." in PurePosixPath(name).parts or Path(name).is_absolute() or not path.is_file():
        raise DataError(f"benchmark.public: there is no file {name} below {folder}")
    rows = [row for row in read_rows(path, ()) if bool(row.values.get("image")) == images]
    if not rows:
        raise DataError(f"benchmark.public: {'no' if images else 'every'} record of {path} has an image")
    chosen = shuffled(rows, seed, benchmark, "public")[:PUBLIC]
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
