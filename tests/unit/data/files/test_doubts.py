"""What is allowed in a user's files and probably a mistake."""

from __future__ import annotations

from befit.data.files.doubts import divided_images, never_trained, of_one_class
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


def labelled(*labels: int) -> dict[str, list[Item]]:
    return {"train": [Item({"text": "a", "label": label}, "file", str(at)) for at, label in enumerate(labels)]}


def test_clients_that_train_on_one_class_are_doubted() -> None:
    names = ("cold", "flu")
    read = {"north": labelled(0, 1), "south": labelled(1, 1), "west": {**labelled(0), "test": labelled(1)["train"]}}
    (doubt,) = of_one_class(read, names)
    assert doubt.startswith("client south trains on one class only, 'flu' (and 1 more on one each): ")
    (doubt,) = of_one_class({"south": read["south"]}, names)
    assert doubt.startswith("client south trains on one class only, 'flu': ")
    assert of_one_class({"north": read["north"]}, names) == []
    assert of_one_class({"north": {"train": [Item({"text": "a"}, "file", "digest")]}}, ()) == []


def test_classes_that_are_only_tested_are_doubted() -> None:
    names = ("cold", "flu", "mumps", "rash")
    held_out = {"val": labelled(2)["train"], "test": labelled(0, 3)["train"]}
    (doubt,) = never_trained({"north": labelled(0, 1), "south": {**labelled(1), **held_out}}, names)
    assert doubt.startswith("no training record has the class 'mumps' or 1 more, which held-out records have")
    assert never_trained({"north": labelled(2, 3), "south": {**labelled(1, 0), **held_out}}, names) == []
    assert never_trained({"north": {"train": [Item({"text": "a"}, "file", "digest")]}}, ()) == []
