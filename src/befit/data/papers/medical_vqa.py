"""`vqa-rad`, `slake` and `path-vqa`: questions about medical images, as their authors or a hub have them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from befit.core.errors import DataError
from befit.core.schema import at_least, show
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import Row, read_rows
from befit.data.papers.assemble import assemble, ordered, source_entry
from befit.data.papers.source import Place, Source, check_fields, read_split, text_of
from befit.data.papers.vqa import picture
from befit.data.partition import iid
from befit.data.registry import benchmark
from befit.tasks.vqa_records import vqa_record

MODEL = "llava-hf/llava-1.5-7b-hf"
RAD = Source(
    "the data of VQA-RAD (osf.io/89kps)",
    "CC0-1.0",
    on_hub=False,
    layout="VQA_RAD Dataset Public.json and VQA_RAD Image Folder",
)
SLAKE = Source(
    "SLAKE (hf download BoKelvin/SLAKE --repo-type dataset, and imgs.zip unpacked)",
    "CC-BY-4.0",
    on_hub=False,
    layout="train.json, validation.json or validate.json, test.json, and imgs",
)
PATH = Source("flaviagiammarino/path-vqa", "MIT")
YES_NO = (("yes", "no"), ("是", "否"))
_QUESTION = ("question", "answer")
_RAD = ("image_name", *_QUESTION, "phrase_type", "image_organ")
_SLAKE = ("img_name", *_QUESTION, "q_lang", "modality")


@benchmark(
    "vqa-rad",
    "1",
    summary="Questions about radiographs, a client for each organ (VQA-RAD); needs the data",
    default_model=MODEL,
    task="vqa",
    seeded=False,
)
def vqa_rad(root: str = "", seed: int = 42) -> Federation:
    """Three clients: questions about heads, chests and abdomens. Test questions are those that the authors call so
    (`phrase_type`); their images are in training too.

    root  directory with `VQA_RAD Dataset Public.json` and `VQA_RAD Image Folder`
    seed  for the manifest alone: nothing is drawn
    """
    place = Place("vqa-rad", root)
    place.check([RAD])
    folder = place.folder(RAD)
    rows, hashed = _ordered(_file(place, RAD, folder, "VQA_RAD Dataset Public.json"), _RAD)
    records: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        split = "test" if text_of(row, "phrase_type").startswith("test") else "train"
        image = picture(row.values["image_name"], folder / "VQA_RAD Image Folder", row.where)
        _records_of_split(records, text_of(row, "image_organ").lower(), split).append(_record(row, image))
    return assemble(
        "vqa-rad",
        _clients(records, "organ"),
        partition="natural",
        arguments={"seed": seed},
        sources=[source_entry(place, RAD, "train+test", len(rows), hashed)],
    )


@benchmark(
    "slake",
    "2",
    summary="Questions about radiographs in English or Chinese, a client for each modality (SLAKE); needs the data",
    default_model=MODEL,
    task="vqa",
    seeded=False,
)
def slake(root: str = "", language: Literal["en", "zh", "both"] = "en", seed: int = 42) -> Federation:
    """A client for each modality: CT, MRI and X-ray. Splits are the authors', in which no image is in two.

    root      directory with `train.json`, `validate.json` or `validation.json`, `test.json`, and the folder `imgs`
    language  of the questions (`q_lang`)
    seed      for the manifest alone: nothing is drawn
    """
    place = Place("slake", root)
    place.check([SLAKE])
    folder = place.folder(SLAKE)
    records: dict[str, dict[str, list[Any]]] = {}
    entries = []
    for split, names in (("train", ["train"]), ("val", ["validation", "validate"]), ("test", ["test"])):
        every = _file(place, SLAKE, folder, *(f"{name}.json" for name in names))
        check_fields(every, _SLAKE)
        rows, hashed = _ordered([row for row in every if language in (row.values["q_lang"], "both")], _SLAKE)
        entries.append(source_entry(place, SLAKE, split, len(rows), hashed))
        for row in rows:
            read = _record(row, picture(row.values["img_name"], folder / "imgs", row.where))
            _records_of_split(records, text_of(row, "modality").lower(), split).append(
                {**read, "language": row.values["q_lang"]}
            )
    return assemble(
        "slake",
        _clients(records, "modality"),
        partition="natural",
        arguments={"language": language, "seed": seed},
        sources=entries,
    )


@benchmark(
    "path-vqa",
    "1",
    summary="Questions about pictures of pathology, which clients share out image by image (PathVQA); needs the data",
    default_model=MODEL,
    task="vqa",
    seeded=False,
)
def path_vqa(
    root: str = "",
    hub: bool = False,
    clients: Annotated[int, at_least(1)] = 8,
    seed: int = 42,
    revisions: dict[str, str] | None = None,
) -> Federation:
    """Equal random parts of the images of each split, with all questions about each.

    root       directory with the Parquet files of flaviagiammarino/path-vqa; the authors' own are pickles, which befit
               does not open
    hub        load it from the hub instead
    clients    how many
    seed       of the partition
    revisions  hub id to the commit that is wanted
    """
    place = Place("path-vqa", root, hub, revisions)
    place.check([PATH])
    records: dict[str, dict[str, list[Any]]] = {}
    entries = []
    kept: dict[str, bytes] = {}  # an image stands in the row of each of its questions, and once in memory
    for name, split in (("train", "train"), ("validation", "val"), ("test", "test")):
        rows = read_split(place, PATH, name, ("image", *_QUESTION))
        named = [hashlib.sha256(_encoded(row)).hexdigest() for row in rows]
        order = sorted(range(len(rows)), key=lambda at: (named[at], *(str(rows[at].values[key]) for key in _QUESTION)))
        images = sorted(set(named))
        if len(images) < clients:
            raise DataError(f"path-vqa, {name}: {len(images)} images are too few for {clients} clients")
        parts = iid(len(images), clients, seed, "path-vqa", name)
        owner = {images[index]: number for number, part in enumerate(parts) for index in part}
        named_rows = [replace(row, values={**row.values, "image": name}) for row, name in zip(rows, named, strict=True)]
        _, hashed = ordered(named_rows, ("image", *_QUESTION))
        entries.append(source_entry(place, PATH, name, len(rows), hashed))
        for at in order:
            image = kept.setdefault(named[at], _encoded(rows[at]))
            _records_of_split(records, f"client-{owner[named[at]]:02d}", split).append(_record(rows[at], image))
    return assemble(
        "path-vqa",
        _clients(records),
        partition="iid",
        arguments={"clients": clients, "seed": seed},
        sources=entries,
    )


def _file(place: Place, source: Source, folder: Path, *names: str) -> list[Row]:
    """The rows of the first of these files that is there."""
    path = next((path for name in names if (path := folder / name).is_file()), None)
    if path is None:
        raise place.missing(folder / names[0], source)
    return read_rows(path, ())


def _ordered(rows: Sequence[Row], fields: Sequence[str]) -> tuple[list[Row], str]:
    check_fields(rows, fields)
    return ordered(rows, fields)


def _record(row: Row, image: str | bytes) -> dict[str, Any]:
    """A question about one image, a choice where the answer is yes or no and else open."""
    answer = row.values["answer"]
    if not isinstance(answer, str | int) or not str(answer).strip():
        raise DataError(f"{row.where}: answer must be text, got {show(answer)}")
    answer = str(answer).strip()
    choices = next((list(pair) for pair in YES_NO if answer.lower() in pair), None)
    values = {
        "images": [image],
        "messages": [
            {"role": "user", "content": f"<image>{text_of(row, 'question')}"},
            {"role": "assistant", "content": answer.lower() if choices else answer},
        ],
        **({"form": "choice", "choices": choices} if choices else {"form": "open"}),
    }
    return vqa_record(values, {}, lambda image: image, row.where)


def _encoded(row: Row) -> bytes:
    image = row.values["image"]
    data = image.get("bytes") if isinstance(image, Mapping) else image
    if not isinstance(data, bytes) or not data:
        raise DataError(f"{row.where}: image must be {{bytes, path}} with the picture, got {show(image)}")
    return data


def _records_of_split(records: dict[str, dict[str, list[Any]]], client: str, split: str) -> list[Any]:
    return records.setdefault(client, {"train": [], "val": [], "test": []})[split]


def _clients(records: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]], key: str = "") -> list[ClientData]:
    """By name, each record with an id of client, split and place."""
    members = []
    for client in sorted(records):
        splits = {
            split: tuple({"id": f"{client}-{split}-{number:05d}", **record} for number, record in enumerate(some))
            for split, some in records[client].items()
        }
        about = {key: client} if key else {}
        members.append(ClientData(client, splits["train"], splits["val"], splits["test"], about))
    if short := [client.id for client in members if not client.train]:
        raise DataError(f"client {short[0]} has no training records")
    return members
