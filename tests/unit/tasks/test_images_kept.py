"""Images are read when a batch needs them, and only as many are kept as fit."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from befit.config.load import load_experiment
from befit.core.errors import DataError
from befit.runs.estimate import estimate, images_mib
from befit.runs.host import Host
from befit.runs.runner import run
from befit.tasks import image_classification, images, make_task
from befit.tasks.images import KEPT, Cache, ImagePreprocessor, read_image
from tests.unit.tasks.test_vqa import save_llava

SIDE = 32
EACH = 4 * 3 * SIDE * SIDE


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Room for four images."""
    cache = Cache(4 * EACH)
    monkeypatch.setattr(images, "CACHE", cache)
    return cache


def pictures(folder: Path, count: int) -> list[dict[str, Any]]:
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return [{"image": str(folder / f"{number}.png"), "label": number % 2} for number in range(count)]


def tensors(thing: Any, seen: set[int]) -> int:
    """Bytes of all tensors of floats and arrays that can be reached from a thing."""
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type(None))):
        return 0
    seen.add(id(thing))
    if isinstance(thing, (Tensor, np.ndarray)):
        return thing.nbytes if "float" in str(thing.dtype) else 0
    inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    return sum(tensors(each, seen) for each in (*inside, *getattr(thing, "__dict__", {}).values()))


def test_a_prepared_split_holds_no_pixels_and_a_batch_has_them(tmp_path: Path, kept: Cache) -> None:
    records = pictures(tmp_path, 12)
    preprocessor = ImagePreprocessor(3, SIDE, SIDE)
    made = make_task("image-classification", preprocessor, ("a", "b")).prepare(records)
    assert len(made) == 12 and not kept.held and not tensors(made, set())
    rows = [11, 0, 5, 5]
    batch = made.batch(rows)
    wanted = torch.stack([preprocessor(records[row]["image"]) for row in rows])
    assert torch.equal(batch["pixel_values"], wanted) and batch["labels"].tolist() == [1, 0, 1, 1]


def test_conversations_hold_no_pixels_either(tmp_path: Path, kept: Cache) -> None:
    from tests.unit.tasks.test_vqa import Settings, load_backbone

    processor = load_backbone(Settings(str(save_llava(tmp_path / "llava", channels=3))), "vqa", (), 0).processor
    turns = [{"role": "user", "content": "<image><image> what ?"}, {"role": "assistant", "content": "a"}]
    paths = [record["image"] for record in pictures(tmp_path, 6)]
    records = [{"images": paths[start : start + 2], "conversation": turns} for start in (0, 2, 4)]
    made: Any = make_task("vqa", processor).prepare(records)
    assert not kept.held and not tensors(made.images, set()) and not tensors(made.prompts, set())
    pixels = made.batch([2, 0])["pixel_values"]
    again = made.batch([0])["pixel_values"]
    assert pixels.shape == (4, 3, 4, 4) and torch.equal(pixels[2:], again) and pixels.any()


def test_what_was_used_last_is_kept_within_the_limit(tmp_path: Path, kept: Cache, monkeypatch: Any) -> None:
    records, read = pictures(tmp_path, 6), []
    opened = images.read_image
    monkeypatch.setattr(
        images, "read_image", lambda image, where: read.append(Path(image).stem) or opened(image, where)
    )
    made = make_task("image-classification", ImagePreprocessor(3, SIDE, SIDE), ("a", "b")).prepare(records)
    for row, again in ((0, True), (1, True), (2, True), (3, True), (0, False), (4, True), (0, False), (1, True)):
        made.batch([row])
        assert read == [str(row)] * again, row
        read.clear()
        assert kept.held <= kept.limit and len(kept) <= 4
    assert kept.held == 4 * EACH
    wide = ImagePreprocessor(3, 4 * SIDE, SIDE * 4)  # one of these is more than all that may be kept
    assert kept.get(wide, records[0]["image"], "it").shape == (3, 128, 128) and kept.held == 4 * EACH


def test_models_with_the_same_preprocessing_share_what_was_read(tmp_path: Path, kept: Cache) -> None:
    (record,) = pictures(tmp_path, 1)
    same = [make_task("image-classification", ImagePreprocessor(3, SIDE, SIDE), names) for names in ("ab", "cd")]
    for task in same:
        task.prepare([record]).batch([0])
    assert len(kept) == 1
    make_task("image-classification", ImagePreprocessor(3, SIDE, SIDE, square=True), "ab").prepare([record]).batch([0])
    assert len(kept) == 2


def test_a_file_that_has_changed_is_read_again(tmp_path: Path, kept: Cache) -> None:
    (record,) = pictures(tmp_path, 1)
    preprocessor = ImagePreprocessor(3, SIDE, SIDE)
    before = preprocessor.stack([record["image"]], ["it"])
    Image.new("RGB", (50, 50), (255, 0, 0)).save(record["image"])
    assert not torch.equal(preprocessor.stack([record["image"]], ["it"]), before)


def half(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(file, kind)
    return file.getvalue()[: len(file.getvalue()) // 2]


@pytest.mark.parametrize("image", [b"no picture", "none.png", "none.npy", np.ones((4, 4, 7), np.uint8), {"path": None}])
def test_what_a_head_shows_is_refused_before_anything_is_trained(image: Any, kept: Cache) -> None:
    task = make_task("image-classification", ImagePreprocessor(3, SIDE, SIDE), ("a", "b"))
    with pytest.raises(DataError, match=r"record 'odd' \(position 0\): "):
        task.prepare([{"id": "odd", "image": image, "label": 0}])


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_what_only_its_end_shows_is_refused_by_name_early_in_small_splits_else_when_it_is_read(
    kind: str, kept: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task("image-classification", ImagePreprocessor(3, SIDE, SIDE), ("a", "b"))
    records = [{"id": "odd", "image": half(kind), "label": 0}]
    with pytest.raises(DataError, match=r"record 'odd' \(position 0\): cannot read the encoded image"):
        task.prepare(records)
    monkeypatch.setattr(image_classification, "WHOLE", 0)
    made = task.prepare(records)
    with pytest.raises(DataError, match=r"record 'odd' \(position 0\): cannot read the encoded image"):
        made.batch([0])
    assert not kept.held


SETTINGS = {
    "name": "kept",
    "benchmark": {"name": "digits", "clients": 3},
    "model": {"id": "digits-vit"},
    "method": "fedit",
    "baselines": [],
    "train": {"max_steps": 2, "batch_size": 4},
    "federation": {"rounds": 2},
    "report": {"plots": False},
}


def test_a_run_has_the_same_numbers_however_little_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is interrupted after the first round and goes on in a process that has read nothing yet."""

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    settings = load_experiment({**SETTINGS, "limit": {"records": 20}})
    said = []
    for name, limit in (("all", KEPT), ("three", 3 * 4 * 64), ("none", 0)):
        monkeypatch.setattr(images, "CACHE", Cache(limit))
        if name == "three":
            with pytest.raises(KeyboardInterrupt):
                run(settings, out=tmp_path / name, observer=interrupt)
            monkeypatch.setattr(images, "CACHE", Cache(limit))
        run(settings, out=tmp_path / name, resume=name == "three")
        said.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert len(said[0].splitlines()) > 8 and said[1] == said[0] and said[2] == said[0]


def test_the_check_counts_stored_images_and_those_that_are_kept() -> None:
    """1,797 digits of 8 x 8 floats, 256 bytes each, as stored and as tensors; the 500 public ones are among them."""
    found = estimate(load_experiment({**SETTINGS, "benchmark": {"name": "digits", "clients": 10}}))
    host = Host(load_experiment({**SETTINGS, "benchmark": {"name": "digits", "clients": 10}}))
    count = len(host.federation.public) + sum(sum(client.sizes.values()) for client in host.federation.clients)
    assert found["memory_parts_mib"]["images"] == pytest.approx(2 * 256 * count / 2**20)
    assert found["memory_mib"] == pytest.approx(sum(found["memory_parts_mib"].values()))
    large = ImagePreprocessor(3, 336, 336)  # as CLIP's: more than may be kept
    assert images_mib(host.federation, [large]) == pytest.approx(256 * count / 2**20 + 1024)
    texts = estimate(load_experiment({**SETTINGS, "benchmark": {"name": "skills"}, "model": {"id": "skills-llama"}}))
    assert "images" not in texts["memory_parts_mib"]


def test_paths_take_no_memory_and_each_counts_once() -> None:
    class One:
        clients, newcomers = (), ()
        public = tuple({"images": [random.choice("abc"), "d"]} for _ in range(50))

    assert images_mib(One(), [ImagePreprocessor(1, 16, 16)]) == pytest.approx(4 * 1024 / 2**20)  # type: ignore[arg-type]


def test_greyscale_of_more_than_8_bits_is_read_whole_or_refused(tmp_path: Path) -> None:
    ramp = np.linspace(0, 1, 16).reshape(4, 4)
    (tmp_path / "a.pgm").write_bytes(b"P5\n4 4\n65535\n" + (ramp * 65535).astype(">u2").tobytes())
    (tmp_path / "b.pgm").write_bytes(b"P5\n4 4\n4095\n" + (ramp * 4095).astype(">u2").tobytes())
    Image.fromarray(ramp.astype(np.float32)).save(tmp_path / "c.tiff")
    for name in ("a.pgm", "b.pgm", "c.tiff"):
        np.testing.assert_allclose(read_image(tmp_path / name), ramp, atol=3e-4)
    Image.fromarray((ramp * 1000).astype(np.int32)).save(tmp_path / "d.tiff")
    with pytest.raises(DataError, match=r"^the image: greyscale of 32-bit integers has no known largest value"):
        read_image(tmp_path / "d.tiff")
    Image.fromarray((ramp * 255).astype(np.float32)).save(tmp_path / "e.tiff")
    ImagePreprocessor(1, 4, 4).check(tmp_path / "c.tiff")
    with pytest.raises(
        DataError, match=r"floats must lie in \[0, 1\], got 0 to 255"
    ):  # and not once training has begun
        ImagePreprocessor(1, 4, 4).check(tmp_path / "e.tiff")
