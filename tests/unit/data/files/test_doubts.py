"""What is allowed in a user's files and probably a mistake."""

from __future__ import annotations

from befit.data.files.doubts import divided_images
from befit.data.files.records import Item


def asked(*images: str) -> list[Item]:
    return [Item({"images": [image]}, "file", f"digest {at} {image}") for at, image in enumerate(images)]


def test_questions_about_one_image_in_two_splits_are_doubted() -> None:
    apart = {"train": asked("a", "b", "b"), "test": asked("c")}
    shared = {"train": asked("a", "b", "d"), "val": asked("a"), "test": asked("a", "b", "c")}
    assert divided_images({"north": apart}) == []
    (doubt,) = divided_images({"north": apart, "south": shared})
    assert doubt.startswith("2 images have questions both in training and in val or test of their client (most: 2 of ")
    assert "client south" in doubt and "data.columns.group" in doubt
    assert divided_images({"north": {"train": [Item({"text": "a"}, "file", "digest")]}}) == []
