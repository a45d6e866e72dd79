"""VQA-RAD, SLAKE and PathVQA from files with their authors' columns, made here."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from befit.core.errors import DataError
from befit.data.registry import build

RAD = {"phrase_type": "freeform", "image_organ": "HEAD", "image_name": "a.png", "answer_type": "CLOSED "}


def picture(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2), (shade, 0, 0)).save(path)
    return path


def asked(record: Any) -> tuple[str, str]:
    return tuple(turn["content"] for turn in record["conversation"])  # type: ignore[return-value]


def write_rad(folder: Path, **changes: Any) -> dict[str, Any]:
    picture(folder / "VQA_RAD Image Folder" / "a.png")
    rows = [
        {**RAD, "question": "Is there a mass? ", "answer": "Yes"},
        {**RAD, "question": "How many?", "answer": 2, "phrase_type": "para"},
        {**RAD, "question": "Which side?", "answer": "left", "phrase_type": "test_freeform"},
        {**RAD, "question": "Is it large?", "answer": "no", "image_organ": "ABD", **changes},
    ]
    (folder / "VQA_RAD Dataset Public.json").write_text(json.dumps(rows))
    return {"root": str(folder)}


def test_rad_has_a_client_for_each_organ_and_the_authors_test_questions(tmp_path: Path) -> None:
    found = build("vqa-rad", None, write_rad(tmp_path))
    assert {client.id: client.sizes for client in found.clients} == {
        "abd": {"train": 1, "val": 0, "test": 0},
        "head": {"train": 2, "val": 0, "test": 1},
    }
    (closed,) = found.clients[0].train
    assert asked(closed) == ("<image>Is it large?", "no") and closed["choices"] == ["yes", "no"]
    head = {asked(record): record["form"] for record in found.clients[1].train}
    assert head == {("<image>Is there a mass?", "yes"): "choice", ("<image>How many?", "2"): "open"}
    assert closed["images"] == [str(tmp_path / "VQA_RAD Image Folder" / "a.png")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": ["a"]}, "record 4: answer must be text"),
        ({"image_name": "../a.png"}, "must be a path below the root"),
        ({"image_name": "b.png"}, "is no file in"),
    ],
)
def test_what_is_wrong_with_a_row_of_rad_names_it(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        build("vqa-rad", None, write_rad(tmp_path, **change))


def test_slake_has_a_client_for_each_modality_in_one_language_or_both(tmp_path: Path) -> None:
    row = {"img_name": "xmlab1/source.jpg", "q_lang": "en", "modality": "MRI", "qid": 1, "triple": ["vhead", "_", "_"]}
    picture(tmp_path / "imgs" / "xmlab1" / "source.jpg")
    for name in ("train", "validate", "test"):
        rows = [
            {**row, "question": "What is it?", "answer": f"Liver {name}"},
            {**row, "question": "这是什么?", "answer": "肝", "q_lang": "zh"},
            {**row, "question": "Is it whole?", "answer": "No", "modality": "CT"},
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    found = build("slake", None, {"root": str(tmp_path)})
    assert {client.id: client.sizes for client in found.clients} == {
        "ct": {"train": 1, "val": 1, "test": 1},
        "mri": {"train": 1, "val": 1, "test": 1},
    }
    assert asked(found.clients[1].val[0]) == ("<image>What is it?", "Liver validate")
    both = build("slake", None, {"root": str(tmp_path), "language": "both"})
    assert [record["language"] for record in both.clients[1].test] in (["en", "zh"], ["zh", "en"])


def test_the_images_of_path_are_shared_out_with_all_their_questions(tmp_path: Path) -> None:
    def encoded(shade: int) -> dict[str, Any]:
        data = io.BytesIO()
        Image.new("RGB", (2, 2), (shade, 0, 0)).save(data, "png")
        return {"bytes": data.getvalue(), "path": None}

    (tmp_path / "data").mkdir()
    for place, name in enumerate(("train", "validation", "test")):
        rows = [
            {"image": encoded(10 * place + image), "question": f"What is {question}?", "answer": "a cell"}
            for image in range(4)
            for question in range(3)
        ]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    found = build("path-vqa", None, {"root": str(tmp_path), "clients": 2})
    assert [client.sizes for client in found.clients] == [{"train": 6, "val": 6, "test": 6}] * 2
    for split in ("train", "val", "test"):
        images = [{record["images"][0] for record in getattr(client, split)} for client in found.clients]
        assert [len(each) for each in images] == [2, 2] and not images[0] & images[1]
    assert len({id(record["images"][0]) for record in found.clients[0].train}) == 2  # one copy of each in memory
    with pytest.raises(DataError, match="train: 4 images are too few for 5 clients"):
        build("path-vqa", None, {"root": str(tmp_path), "clients": 5})
