"""`drake` and `hflb`: questions about images, four tasks a client (FedMosaic, Tables 12 to 14)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from befit.core.errors import DataError, map_all
from befit.core.schema import at_least, between, show, variant
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import Row, read_rows
from befit.data.papers.assemble import assemble, content_hash, digest, shuffled, source_entry
from befit.data.papers.public import PUBLIC, as_text, public_records
from befit.data.papers.scenarios import DRAKE, DRAKE_NEWCOMERS, EMPTY, HFLB, SMALL, ClientTask, read_scenario
from befit.data.papers.source import Place, Source, check_fields
from befit.data.registry import benchmark
from befit.tasks.vqa_records import choice_list, listed_parts, vqa_record

LICENCE = "each source its own; some for research only"
LAYOUT = "DATASET/train/dataset-N.json, DATASET/test/dataset-N.json and DATASET's images"
SOURCES = {
    name.lower(): Source(
        f"the .tar files of SNUMPR/{name}, unpacked (hf download SNUMPR/{name} --repo-type dataset)",
        LICENCE,
        on_hub=False,
        layout=LAYOUT,
    )
    for name in ("DRAKE", "HFLB")
}
MODELS = {"size=small": "thkim0305/llama3.2_1B_vl", "size=large": "thkim0305/llama3.2_3B_vl"}


def streams_of_questions(
    root: str = "",
    model_map: Literal["paper", "scenario"] = "paper",
    scenario: str = "",
    newcomers: bool = True,
    public: str = "",
    public_count: Annotated[int, at_least(1)] = PUBLIC,
    val_fraction: Annotated[float, between(0, 1)] = 0.0,
    seed: int = 42,
    *,
    name: str,
) -> Federation:
    """Clients with a stream of four tasks each. `drake` has ten, and seven tasks as newcomers; `hflb` has nine.

    root          directory with the unpacked data: DATASET/train/dataset-N.json, DATASET/test/dataset-N.json and images
    model_map     which clients are of size small: those of the paper, or those of its scenario file, which differ
    scenario      a scenario file of your own instead of the paper's clients; then clients are told apart by `model`
    newcomers     load the seven tasks that no client has
    public        JSON file of records below the root: those with an image become the public split, or all where none
                  has one
    public_count  at most so many of them, drawn by seed
    val_fraction  share of each task's training records held out for validation; the paper has none
    seed          of what is held out and of the public split
    """
    place, source = Place(name, root), SOURCES[name]
    new_tasks = DRAKE_NEWCOMERS if newcomers else ()
    place.check([source])
    folder = place.folder(source)
    plans = read_scenario(Path(scenario).expanduser()) if scenario else {"drake": DRAKE, "hflb": HFLB}[name]
    entries: list[dict[str, Any]] = []

    def client(
        client_id: str, parts: Sequence[ClientTask], info: dict[str, str]
    ) -> tuple[ClientData, list[dict[str, Any]]]:
        splits: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "test": []}
        stream = []
        for part in parts:
            by_split = part_records(place, folder, part, val_fraction, seed, entries) if part.dataset != EMPTY else {}
            for split, records in by_split.items():
                splits[split] += records
            stream.append(
                {
                    "task": part.name,
                    "form": "open" if part.open else "choice",
                    "metric": part.metric,
                    **{split: len(by_split.get(split, ())) for split in splits},
                }
            )
        names = ", ".join(part.name for part in parts if part.dataset != EMPTY)
        train, val, test = (tuple(records) for records in splits.values())
        return ClientData(client_id, train, val, test, {"tasks": names, **info}), stream

    sizes = ["small" if number in SMALL[name][model_map] else "large" for number in range(len(plans))]
    members = [
        client(f"client-{number:02d}", plan.parts, {"model": plan.model} if scenario else {"size": sizes[number]})
        for number, plan in enumerate(plans)
    ]
    new = [client(part.name, (part,), {"size": "large"}) for part in new_tasks]

    def shown(row: Row) -> dict[str, Any]:
        values = {key: row.values.get(key) for key in ("image", "conversations")} | {"form": "open"}
        beside = row.path.parent  # from which LLaVA's own file counts
        return vqa_record(values, {}, lambda image: picture(image, folder, row.where, beside), row.where)

    shared = public_records(folder, public, seed, name, shown, images=True, count=public_count) if public else ()
    arguments = {
        "model_map": model_map,
        "scenario": bool(scenario),
        "newcomers": len(new),
        "public": public,
        "public_count": public_count,
        "val_fraction": val_fraction,
        "seed": seed,
    }
    return assemble(
        name,
        [member for member, _ in members],
        newcomers=[member for member, _ in new],
        partition="natural",
        arguments=arguments,
        sources=[{**entry, "id": source.id} for entry in entries],
        public=shared,
        notes={"streams": {member.id: stream for member, stream in (*members, *new)}},
    )


for _name, _summary, _fixed in (
    ("drake", "40 tasks about one and more images, ten clients, seven newcomers (FedMosaic); needs the data", {}),
    ("hflb", "36 tasks about images, nine clients (FedMosaic); needs the data", {"newcomers": False}),
):
    benchmark(
        _name,
        "2",
        summary=_summary,
        default_model="thkim0305/llama3.2_3B_vl",
        task="vqa",
        seeded=False,
        families=MODELS,
    )(variant(streams_of_questions, name=_name, **_fixed))


def part_records(
    place: Place, folder: Path, part: ClientTask, val_fraction: float, seed: int, entries: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """The records of a task by split; what was read is noted in `entries`."""
    splits: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "test"):
        path = folder / part.dataset / split / f"dataset-{part.subset}.json"
        if not path.is_file():
            raise place.missing(path, SOURCES[place.benchmark], f"which {part.dataset}.tar has")
        rows = read_rows(path, ())
        check_fields(rows, ("conversations",))
        splits[split] = map_all(lambda numbered: record(folder, part, *numbered), list(enumerate(rows)))
        hashed = content_hash(
            [digest([example["conversation"], image_names(example, folder)]) for example in splits[split]]
        )
        entries.append({**source_entry(place, SOURCES[place.benchmark], split, len(rows), hashed), "config": part.name})
    if val_fraction:
        order = shuffled(splits["train"], seed, place.benchmark, part.name)
        count = max(5, round(val_fraction * len(order)))
        if count >= len(order):
            raise DataError(f"{part.name}: {len(order)} training records are too few to hold out {count}")
        splits |= {"val": order[:count], "train": order[count:]}
    return splits


def record(folder: Path, part: ClientTask, number: int, row: Row) -> dict[str, Any]:
    """A row in the form of LLaVA as a record of the task; keys beside image and conversations are left out.

    The file's own ids are not used: they repeat between its subsets. Answers that are numbers become texts, as in the
    authors' code. A list of choices without the answer, such as one with a comma within a choice, gets it as a further
    one: there, the authors' code can never count the answer as right.
    """
    values = {key: row.values[key] for key in ("image", "conversations") if row.values.get(key) is not None}
    values |= {"task": part.name, "form": "open" if part.open else "choice", "metric": part.metric}
    if isinstance(turns := values.get("conversations"), list):
        values["conversations"] = [as_text(turn) for turn in turns]
        if not part.open and (more := _repaired(values["conversations"])):
            values["choices"] = more
    content = vqa_record(values, {}, lambda image: picture(image, folder, row.where), row.where)
    if part.open and content.get("metric") is None:
        raise DataError(f"{row.where}: {part.name} is open and has no metric")
    split = row.path.parent.name
    return {"id": f"{part.name}-{split}-{number:05d}", **content}


def _repaired(turns: list[Any]) -> list[str]:
    """The parts that the first question lists and its answer, where that is none of them; empty where all is well, or
    nothing is listed."""
    if len(turns) < 2 or not all(isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns[:2]):
        return []
    question, gold = (turn["value"] for turn in turns[:2])
    parts = listed_parts(question)
    if not parts or not gold.strip() or gold in (choice_list(question, gold) or ()):
        return []
    return list(dict.fromkeys([*filter(None, parts), gold]))


def picture(value: Any, folder: Path, where: str, beside: Path | None = None) -> str:
    """The path of an image below the root, or below `beside` where the root has none. The authors' paths may begin with
    `./` and with `dataset/`, the name of the root in their repository."""
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: image must be a relative path, got {show(value)}")
    parts = PurePosixPath(value).parts
    if parts[:1] == ("dataset",) and not (folder / "dataset").is_dir():
        parts = parts[1:]
    if PurePosixPath(value).is_absolute() or ".." in parts or "\\" in value:
        raise DataError(f"{where}: image {show(value)} must be a path below the root, without '..'")
    for start in (folder, beside):
        if start is not None and os.path.isfile(path := start.joinpath(*parts)):
            return str(path)
    raise DataError(f"{where}: image {show(value)} is no file in {folder}")


def image_names(record: dict[str, Any], folder: Path) -> list[str]:
    """A picture counts by its name and size, not its content: there are hundreds of thousands."""
    return [f"{Path(path).relative_to(folder).as_posix()}:{os.stat(path).st_size}" for path in record["images"]]
