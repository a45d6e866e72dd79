"""Where a data set of a paper is: on a hub, or below a directory in one of the forms in which people have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.core.errors import ConfigError, DataError, did_you_mean, map_all
from befit.core.schema import show
from befit.data.files.readers import SUFFIXES, Row, is_dataset, read_rows, read_table, suffix_of, table_rows

if TYPE_CHECKING:
    import datasets
    import pyarrow

WHERE = "docs/benchmarks.md has the files of every benchmark"


@dataclass(frozen=True)
class Source:
    """One data set.

    id        on the hub; for data that is on no hub, where its authors publish it
    licence   as far as it is known
    folder    below the root, for benchmarks of several data sets; empty is the root itself
    config    its name on the hub
    revision  commit or branch
    files     where files lie below the folder, with {split}; empty: as `datasets` names them
    on_hub    whether `datasets` can load the id
    needed    the only files that are read, of a large repository
    layout    what then lies in the folder, where the id does not say it
    """

    id: str
    licence: str
    folder: str = ""
    config: str = ""
    revision: str = "main"
    files: str = ""
    on_hub: bool = True
    needed: tuple[str, ...] = ()
    layout: str = ""


@dataclass(frozen=True)
class Place:
    """What the user says of where data is: the arguments of every benchmark of this package.

    root       directory of the files
    hub        load from the hub instead
    revisions  hub id to the commit that is wanted, where it is not the default
    """

    benchmark: str
    root: str = ""
    hub: bool = False
    revisions: Mapping[str, str] | None = None

    def folder(self, source: Source) -> Path:
        """The directory of a source. Raises ConfigError or DataError, saying what to get, where there is none."""
        if not self.root:
            self.check([source])
        folder = Path(self.root).expanduser() / source.folder
        if not folder.is_dir():
            raise DataError(self._absent([source]))
        return folder

    def _absent(self, sources: Sequence[Source]) -> str:
        """What to do where a root was given and has no such directories."""
        root = Path(self.root).expanduser()
        listed = ", ".join(dict.fromkeys(str(root / source.folder) for source in sources))
        steps = dict.fromkeys(how_to_get(source, root) for source in sources)
        counted = "a path counts from the configuration's folder"
        problem = f"{self.benchmark}: benchmark.root has no directory {listed} ({counted})"
        return "\n    ".join([problem, *steps, WHERE])

    def missing(self, path: Path | str, source: Source, why: str = "") -> DataError:
        """The error for a file that is not there."""
        problem = f"{self.benchmark}: benchmark.root has no {path}{f', {why}' if why else ''}"
        return DataError("\n    ".join([problem, how_to_get(source, Path(self.root).expanduser()), WHERE]))

    def revision(self, source: Source) -> str:
        return (self.revisions or {}).get(source.id, source.revision)

    def check(self, sources: Sequence[Source]) -> None:
        """Raise ConfigError for contradicting arguments, or for none with what to download."""
        on_hub = [source.id for source in sources if source.on_hub]
        if not self.hub and not self.root:
            known_ways = "benchmark.root: DIR" + (" or benchmark.hub: true" if len(on_hub) == len(sources) else "")
            steps = dict.fromkeys(how_to_get(source, Path("DIR")) for source in sources)
            raise ConfigError(
                [
                    "\n    ".join(
                        [
                            f"benchmark.root: {self.benchmark} reads data that befit does not ship; give {known_ways}",
                            *steps,
                            WHERE,
                        ]
                    )
                ],
                "the benchmark",
            )
        problems = []
        if self.hub and self.root:
            problems.append("benchmark.root: give root or hub: true, not both")
        if self.hub and len(on_hub) < len(sources):
            missing = next(source for source in sources if not source.on_hub)
            problems.append(
                f"benchmark.hub: {self.benchmark} is not on the hub. {how_to_get(missing, Path('DIR'))}, "
                "and give benchmark.root: DIR"
            )
        problems += [
            f"benchmark.revisions.{name}: {self.benchmark} does not load {name}.{did_you_mean(name, on_hub)}"
            for name in self.revisions or {}
            if name not in on_hub
        ]
        if problems:
            raise ConfigError(problems, "the benchmark")
        root = Path(self.root).expanduser()
        if absent := [source for source in sources if self.root and not (root / source.folder).is_dir()]:
            raise DataError(self._absent(absent))


def how_to_get(source: Source, root: Path) -> str:
    target = root / source.folder if source.folder else root
    there = f", so that it has {source.layout}" if source.layout else ""
    if not source.on_hub:
        return f"Get {source.id} and put it into {target}{there}"
    words = ["hf download", source.id, *source.needed, "--repo-type dataset", f"--revision {source.revision}"]
    return f"Get it with: {' '.join(words)} --local-dir {target}{there}"


def read_split(place: Place, source: Source, split: str, fields: Sequence[str]) -> list[Row]:
    """All rows of a split with at least these columns; class labels are numbers.

    Raises DataError that says what was looked for, or which columns were found instead.
    """
    if place.hub:
        dataset = load_from_hub(place, source, split)
        where = Path(f"{source.id}@{place.revision(source)}") / source.config / split
        rows = table_rows(dataset.with_format("arrow")[:], where, fields, names_of_labels=False)
    else:
        paths = split_files(place, source, split)
        rows = [row for path in paths for row in read_rows(path, fields, names_of_labels=False)]
    check_fields(rows, fields)
    return rows


def load_table(place: Place, source: Source, split: str, fields: Sequence[str]) -> pyarrow.Table:
    """A split that is too large to become rows, with at least these columns."""
    import pyarrow

    if place.hub:
        table: Any = load_from_hub(place, source, split).with_format("arrow")[:]
    else:
        table = pyarrow.concat_tables([read_table(path) for path in split_files(place, source, split)])
    if missing := [field for field in fields if field not in table.column_names]:
        raise DataError(
            f"{source.id}, {split}: there is no {', '.join(missing)}; found {', '.join(table.column_names)}"
        )
    return table.select(list(fields))


def load_from_hub(place: Place, source: Source, split: str) -> datasets.Dataset:
    """The split as `datasets` has it. Only the configured id and revision are tried."""
    import datasets

    revision = place.revision(source)
    files = {split: source.files.format(split=split)} if source.files else None
    try:
        dataset = datasets.load_dataset(
            source.id, None if files else source.config or None, data_files=files, revision=revision, split=split
        )
    except Exception as error:  # whatever a library and a network may raise: the way out is one
        way = f"{how_to_get(source, Path('DIR'))}, and give benchmark.root: DIR without hub"
        raise DataError(
            f"{source.id} (config {source.config or 'default'}, revision {revision}, split {split}) cannot "
            f"be loaded from the hub: {type(error).__name__}: {error}. {way}"
        ) from error
    assert isinstance(dataset, datasets.Dataset)
    return dataset


def split_files(place: Place, source: Source, split: str) -> list[Path]:
    """The files of a split in order, or the directory that `datasets` saved; in exactly one of the known places."""
    folder = place.folder(source)
    if source.files:
        candidates = [sorted(folder.glob(source.files.format(split=split)))]
        looked = str(folder / source.files.format(split=split))
    else:
        parents = [folder, folder / "data", folder / source.config, folder / "data" / source.config]
        parents = list(dict.fromkeys(parents))
        # Split directories as in converted branches of the hub: CONFIG/SPLIT/0000.parquet.
        candidates = [files_in(parent, split) for parent in parents]
        candidates += [numbered_files(parent / split) for parent in parents]
        saved = dict.fromkeys([folder / split, folder / source.config / split])
        candidates += [[directory] for directory in saved if is_dataset(directory)]
        listed = ", ".join(map(str, parents))
        looked = f"{split}.*, {split}-*-of-* or {split}/ ({', '.join(SUFFIXES)}, datasets) in {listed}"
    places = [files for files in candidates if files]
    if not places:
        raise place.missing(f"{split} split of {source.id}; looked for {looked}", source)
    if len(places) > 1:
        listed = ", ".join(str(files[0]) for files in places)
        raise DataError(
            f"{place.benchmark}: the {split} split of {source.id} exists {len(places)} times: {listed}. Keep one"
        )
    return places[0]


def files_in(folder: Path, split: str) -> list[Path]:
    """`SPLIT.parquet`, or all of `SPLIT-00000-of-00002.parquet`; one form alone."""
    if not folder.is_dir():
        return []
    whole = [path for suffix in SUFFIXES if (path := folder / f"{split}{suffix}").is_file()]
    parts = sorted(path for path in folder.glob(f"{split}-*-of-*") if suffix_of(path))
    if len(whole) + bool(parts) > 1:
        raise DataError(f"{folder} has the {split} split more than once: {', '.join(o.name for o in [*whole, *parts])}")
    if parts and len(parts) != (count := int(parts[0].name.split("-of-")[1].split("-")[0].split(".")[0])):
        raise DataError(f"{folder} has {len(parts)} of {count} parts of the {split} split")
    return whole or parts


def numbered_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if suffix_of(path)) if folder.is_dir() else []


def text_of(row: Row, field: str) -> str:
    """A field's text without white space around it. Raises DataError for none."""
    value = row.values[field]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{row.where}: {field} must be text, got {show(value)}")
    return value.strip()


def check_fields(rows: Sequence[Row], fields: Sequence[str]) -> None:
    """Raise DataError for rows without a column, showing what they have."""

    def check(row: Row) -> None:
        if missing := [field for field in fields if field not in row.fields]:
            raise DataError(
                f"{row.where}: there is no {', '.join(missing)}; found {', '.join(row.fields) or 'nothing'}"
            )

    map_all(check, rows)
