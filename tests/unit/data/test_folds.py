"""Cross-validation: which examples are held out in which fold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from befit.core.errors import ConfigError
from befit.data.federation import GROUP, ClientData, Federation
from befit.data.folds import Record, folded, folds_of, too_few_to_part, without_part
from befit.data.streams import by_task
from befit.runs.loading import load_federation


def federation(train: int, val: int) -> Federation:
    def records(start: int, count: int) -> list[dict[str, Any]]:
        return [{"text": str(start + at), "label": at % 3} for at in range(count)]

    client = ClientData("north", records(0, train), records(1000, val), records(2000, 5))
    return Federation("files", "1", "text-classification", (client, ClientData("bare", records(3000, 4))))


@pytest.mark.parametrize(("train", "val", "folds"), [(30, 15, 3), (44, 15, 3), (31, 3, 11), (14, 15, 1), (9, 9, 2)])
def test_every_fold_holds_out_others_of_the_same_size_and_classes(train: int, val: int, folds: int) -> None:
    whole = federation(train, val)
    assert folds_of(whole.clients[0], 1) == folds
    held_out: list[str] = []
    for fold in range(folds):
        client, bare = folded(whole, fold, seed=1).clients
        assert bare == whole.clients[1] and client.test == whole.clients[0].test
        assert len(client.val) == val and len(client.train) == train
        assert Counter(map(str, (*client.train, *client.val))) == Counter(
            map(str, (*whole.clients[0].train, *whole.clients[0].val))
        )
        classes = Counter(record["label"] for record in client.val)
        assert all(abs(classes[label] - val / 3) <= 1 for label in range(3))  # the share of each, to one
        held_out += [record["text"] for record in client.val]
    assert len(held_out) == len(set(held_out)) == folds * val
    assert folded(whole, 0, seed=1) is whole
    with pytest.raises(
        ConfigError, match=rf"evaluate.fold: {folds}, counted from 0; client north has {folds} folds?, by"
    ):
        folded(whole, folds, seed=1)


def test_a_seed_decides_the_folds() -> None:
    whole = federation(30, 10)
    assert folded(whole, 1, seed=1).clients == folded(whole, 1, seed=1).clients
    assert folded(whole, 1, seed=1).clients != folded(whole, 1, seed=2).clients


def test_tasks_keep_the_order_in_which_they_arrive() -> None:
    def records(tasks: str) -> list[dict[str, str]]:
        return [{"text": str(at), "task": task} for at, task in enumerate(tasks)]

    client = ClientData("north", records("aaaaaabbbbbb"), records("bbaa"))
    whole = Federation("files", "1", "causal-lm", (client,))
    (client,) = folded(whole, 2, seed=0).clients
    assert list(by_task(client.train)) == ["a", "b"] and Counter(one["task"] for one in client.val) == {"a": 2, "b": 2}


@pytest.mark.parametrize("image", [lambda at: f"{at}.png", lambda at: b"%d" % at, lambda at: np.full((2, 2), at)])
def test_records_that_share_an_image_are_held_out_together(image: Callable[[int], Any]) -> None:
    """Else a model would be measured on pictures that it has trained on. As paths, as bytes of a table, as arrays."""

    def records(start: int, count: int, images: int) -> list[dict[str, Any]]:
        return [{"text": f"{start} {at}", "images": [image(start + at % images)]} for at in range(count)]

    def pictures(of: Sequence[Record]) -> set[str]:
        return {str(record["images"]) for record in of}

    apart = ClientData("apart", records(0, 30, 30), records(100, 15, 15))
    shared = ClientData("shared", records(0, 30, 10), records(100, 15, 15))
    whole = Federation("files", "1", "vqa", (apart, shared))
    assert (folds_of(apart, 0), folds_of(shared, 0)) == (3, 3)
    held_out: set[str] = set()
    for fold in (0, 1, 2):
        client = folded(whole, fold, seed=0).clients[1]
        assert not pictures(client.train) & pictures(client.val)
        assert 8 <= len(client.val) <= 30 and len(client.train) + len(client.val) == 45
        assert not held_out & {record["text"] for record in client.val}
        held_out |= {record["text"] for record in client.val}
    with pytest.raises(ConfigError, match=r"shared has 3 folds, by .* of which those with one group or image stay"):
        folded(Federation("files", "1", "vqa", (shared,)), 3, seed=0)


def test_images_that_connect_all_records_leave_one_fold() -> None:
    chain = [{"text": f"{at}", "images": [f"{at}.png", f"{at + 1}.png"]} for at in range(30)]
    val = [{"text": f"v{at}", "images": [f"v{at}.png"]} for at in range(10)]
    assert folds_of(ClientData("north", chain, val), 0) == 1
    trained_on = [{"text": f"{at}", "images": [f"v{at % 10}.png"]} for at in range(30)]
    assert folds_of(ClientData("north", trained_on, val), 0) == 1  # would be of what goes to training


def test_a_column_called_source_is_no_picture() -> None:
    records = [{"text": f"{at}", "images": [f"{at}.png"], "source": "scanner"} for at in range(45)]
    assert folds_of(ClientData("north", records[:30], records[30:]), 0) == 3


def test_pictures_that_a_benchmark_has_altered_are_known_by_their_source() -> None:
    vqa = load_federation({"benchmark": {"name": "digits-vqa", "val": 15}, "method": "fedit"})
    assert {folds_of(client, 0) for client in vqa.clients} == {1}


def test_without_validation_examples_there_is_nothing_to_take_turns() -> None:
    with pytest.raises(ConfigError, match=r"evaluate.fold: 1, and no client has validation examples"):
        folded(federation(30, 0), 1, seed=0)


def test_groups_stay_together_and_protected_records_have_no_folds(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {at}", "label": at % 2, "patient": at // 2}) for at in range(20)]
    for site in "ab":
        (tmp_path / f"{site}.jsonl").write_text("\n".join(lines))
    data: dict[str, Any] = {"task": "text-classification", "clients": str(tmp_path), "val_fraction": 0.25}
    config: dict[str, Any] = {"data": data, "model": {"id": "names-bert-mlm"}, "method": "fedit"}

    def of_first(fold: int, columns: dict[str, str]) -> ClientData:
        whole = load_federation({**config, "evaluate": {"fold": fold}, "data": {**data, "columns": columns}})
        assert whole.manifest.get("fold", 0) == fold
        return whole.clients[0]

    assert of_first(0, {}).val != of_first(1, {}).val
    assert folds_of(of_first(0, {"group": "patient"}), 0) == 4
    held_out = [record["text"] for fold in range(4) for record in of_first(fold, {"group": "patient"}).val]
    assert len(set(held_out)) == len(held_out) == 16
    for fold in range(4):
        client = of_first(fold, {"group": "patient"})
        of_val, of_train = ({int(record["text"][5:]) // 2 for record in of} for of in (client.val, client.train))
        assert len(of_val) == 2 and not of_val & of_train
    with pytest.raises(ConfigError, match=r"evaluate.fold: a record changes which of the others"):
        load_federation(
            {**config, "evaluate": {"fold": 1}, "privacy": {"unit": "example", "epsilon": 8.0, "delta": 1e-5}}
        )


@pytest.mark.parametrize(("train", "of"), [(30, 3), (31, 3), (7, 7), (10, 4)])
def test_equal_parts_hold_out_everything_once_and_leave_validation_examples_aside(train: int, of: int) -> None:
    client = federation(train, 5).clients[0]
    parts = [without_part(client, number, of, seed=1) for number in range(1, of + 1)]
    held_out = [record["text"] for part in parts for record in part.val]
    assert sorted(held_out) == sorted(record["text"] for record in client.train)
    for part in parts:
        assert len(part.val) in (train // of, -(-train // of)) and len(part.train) == train - len(part.val)
        assert {record["text"] for record in part.train}.isdisjoint(record["text"] for record in part.val)
        assert part.test == client.test
        classes = Counter(record["label"] for record in part.val)
        assert max(classes.values()) - min(classes[label] for label in range(3)) <= 1
    assert parts[0] == without_part(client, 1, of, seed=1) != without_part(client, 1, of, seed=2)


def test_equal_parts_are_of_whole_groups() -> None:
    train = [{"text": str(at), "label": 0, GROUP: f"patient {at // 4 if at < 8 else at}"} for at in range(20)]
    client = ClientData("north", train=train, val=[{"text": "v", "label": 0, GROUP: "patient 0"}])
    groups = [{record[GROUP] for record in without_part(client, number, 5, seed=0).val} for number in range(1, 6)]
    assert sorted(group for part in groups for group in part) == sorted({record[GROUP] for record in train})
    assert [len(without_part(client, number, 5, seed=0).val) for number in range(1, 6)] == [4] * 5
    assert not too_few_to_part(client, 14)
    assert "in 14 groups, by group or image, too few for 15 parts" in too_few_to_part(client, 15)
    with pytest.raises(ConfigError, match="client north has 20 training examples in 14 groups"):
        without_part(client, 1, 15, seed=0)


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_groups_are_as_equal_as_groups_allow(seed: int) -> None:
    """One group of 6 and six of 1: a group that came last would make its part the largest by far."""
    train = [{"text": str(at), "label": 0, GROUP: "many" if at >= 6 else f"one {at}"} for at in range(12)]
    parts = [without_part(ClientData("north", train), number, 2, seed).val for number in (1, 2)]
    assert [len(part) for part in parts] == [6, 6]


def test_groups_of_validation_examples_are_no_parts_of_the_training_examples() -> None:
    train = [{"text": str(at), "label": 0, GROUP: f"patient {at // 4}"} for at in range(8)]
    val = [{"text": f"v{at}", "label": 0, GROUP: f"other {at}"} for at in range(4)]
    client = ClientData("north", train, val)
    assert not too_few_to_part(client, 2) and "in 2 groups" in too_few_to_part(client, 3)
