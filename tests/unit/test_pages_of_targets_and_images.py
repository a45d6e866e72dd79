"""What docs/methods/README.md says of `adapter.targets`, and docs/images.md of pictures, is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from befit.adapters.model import find_modules
from befit.cost import find_architecture
from befit.tasks import images
from tests.files import load_files

DOCS = Path(__file__).parents[2] / "docs"
TARGETS = re.findall(r"^\| `([^`]+)`.* \| (\d+) \|$", (DOCS / "methods/README.md").read_text(encoding="utf-8"), re.M)
PICTURES = (DOCS / "images.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("targets", "modules"), TARGETS)
def test_targets_are_as_many_modules_of_mbert_as_the_page_says(targets: str, modules: str) -> None:
    backbone = find_architecture("mbert").skeleton(3)
    assert len(TARGETS) == 7
    assert len(find_modules(backbone, yaml.safe_load(targets))[0]) == int(modules)


def test_pictures_have_the_limits_that_two_pages_say() -> None:
    security = (DOCS / "security.md").read_text(encoding="utf-8")
    for number in (images._PIXELS, Image.MAX_IMAGE_PIXELS):
        assert f"{number:,} pixels" in PICTURES and f"{number:,}" in security
    assert f"more than {images._RATIO} pixels for each byte" in PICTURES
    assert f"at most {images._RATIO} pixels for each byte" in security
    assert f"in {len(images.FORMATS)} formats" in security
    assert images.KEPT == 2**30 and "up to 1 GiB" in PICTURES


def test_the_records_of_the_page_are_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PICTURES, re.DOTALL)
    data = yaml.safe_load(block)["data"]
    (line,) = re.findall(r"^    (\{.*\})$", PICTURES, re.MULTILINE)
    record = json.loads(line)
    path = tmp_path / "data" / "berlin.jsonl"
    (path.parent / record["photo"]).parent.mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(path.parent / record["photo"])
    lines = [record, {**record, "diagnosis": "malignant"}]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    found = load_files(
        {"berlin": path}, task=data["task"], columns=data["columns"], val_fraction=0.0, test_fraction=0.0
    )
    assert [one["image"] for one in found.clients[0].train] == [str(path.parent.resolve() / record["photo"])] * 2
