"""What a comparison keeps of its finished cells in one file: another counts them without their run directories."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from befit.core.errors import ConfigError, Damaged
from befit.core.storage import atomic_write, log_line, parse_lines, read_bytes
from befit.studies.compare.collect import FinishedRun, Scores

FILE = "cells.jsonl"


@dataclass(frozen=True)
class KeptCell:
    """A finished cell: its key, what its run was called, and its numbers."""

    key: str
    label: str
    scores: Scores


def read_kept(files: Sequence[Path | str]) -> dict[str, KeptCell]:
    """The cells of files that comparisons wrote, by key; of a cell that several files have, the last one's.

    Files may be compressed (`.gz`). Raises ConfigError for a file that cannot be read as one, Damaged for one that is
    not as it was written.
    """
    from pydantic import TypeAdapter, ValidationError

    kept, form = dict[str, KeptCell](), TypeAdapter(KeptCell)
    for path in map(Path, files):
        for number, line in enumerate(_lines(path), start=1):
            try:
                cell = form.validate_python(line)
            except ValidationError as error:
                where = ".".join(map(str, error.errors()[0]["loc"]))
                problem = f"--cells: {path}, line {number}, is no cell of a comparison: {where} is missing or wrong"
                raise ConfigError([problem], "the command") from error
            kept[cell.key] = cell
    return kept


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(
            [f"--cells: there is no file {path}; befit compare leaves {FILE} in its directory"], "the command"
        )
    data = read_bytes(path)
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise Damaged(f"{path} is damaged: {error}") from error
    return parse_lines(data, path)


def write_kept(out: Path, runs: Sequence[FinishedRun], earlier: Mapping[str, KeptCell]) -> None:
    """Write the cells of these runs, and those that the directory's file had earlier.

    They are in order of labels and seeds, so that equal cells are equal files.
    """
    cells = dict(earlier)
    for finished in runs:
        keys = {cell.seed: cell.key for cell in finished.run.cells}
        for scores in finished.cells:
            key = keys[scores.seed]
            cells[key] = KeptCell(key, finished.run.label, replace(scores, folder=""))
    ordered = sorted(cells.values(), key=lambda cell: (cell.label, cell.scores.seed, cell.key))
    atomic_write(out / FILE, (log_line(asdict(cell)) for cell in ordered))
