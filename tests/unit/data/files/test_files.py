"""The user's own files: real ones in a temporary folder, read into federations or refused with the place named."""

import gzip
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError
from befit.data.federation import ClientData, Federation
from befit.data.files.client_files import client_sources
from befit.data.files.load import held_out
from befit.data.files.readers import read_rows
from befit.data.files.records import input_record
from befit.runs.artifacts import predict
from befit.runs.loading import load_federation
from befit.runs.runner import check, run
from befit.tasks.images import read_image
from tests.files import load_files
from tests.unit.models.tiny_models import save_bert

TEXT = "text-classification"
NONE: dict[str, Any] = {"val_fraction": 0.0, "test_fraction": 0.0}


def reviews(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Distinct texts; every third is bad."""
    return [{"text": f"film {start + i}", "label": "bad" if i % 3 == 0 else "good"} for i in range(count)]


def jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def picture(path: Path, grey: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), grey).save(path)
    return path


def texts(records: Iterable[Mapping[str, Any]]) -> list[str]:
    return [record["text"] for record in records]


def only(federation: Federation) -> ClientData:
    (client,) = federation.clients
    return client


# What may be read


def test_every_kind_of_file_gives_the_same_records(tmp_path: Path) -> None:
    rows = reviews(6)
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(jsonl(tmp_path / "lines.jsonl", rows).read_bytes()))
    for name, mark in (("table.csv.gz", ","), ("table.TSV.GZ", "\t")):
        lines = [mark.join(map(str, values)) for values in (rows[0], *(row.values() for row in rows))]
        (tmp_path / name).write_bytes(gzip.compress("\n".join(lines).encode()))
    parquet(tmp_path / "table.parquet", rows)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    names = ["lines.jsonl", "lines.jsonl.gz", "list.json", "table.csv.gz", "table.TSV.GZ", "table.parquet", "saved"]
    found = [only(load_files({"a": tmp_path / name}, task=TEXT, **NONE)).train for name in names]
    assert texts(found[0]) == [f"film {i}" for i in range(6)]
    assert [record["label"] for record in found[0]] == [0, 1, 1, 0, 1, 1]
    assert all(records == found[0] for records in found[1:])


def test_a_saved_dataset_that_was_filtered_and_shuffled_keeps_its_own_rows(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(reviews(9)).select([7, 3, 5])
    made.save_to_disk(tmp_path / "saved")
    assert texts(only(load_files({"a": tmp_path / "saved"}, task=TEXT, **NONE)).train) == ["film 7", "film 3", "film 5"]


def test_the_splits_of_a_saved_dataset_dict_are_the_client_s(tmp_path: Path) -> None:
    parts = {"train": reviews(4), "validation": reviews(2, 10), "test": reviews(3, 20)}
    made = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in parts.items()})
    made.save_to_disk(tmp_path / "saved")
    client = only(load_files({"a": tmp_path / "saved"}, task=TEXT))
    assert [texts(split) for split in (client.train, client.val, client.test)] == [texts(r) for r in parts.values()]


def test_a_folder_of_clients_may_hold_folders_and_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "lyon" / "train.jsonl", reviews(5))
    parquet(tmp_path / "lyon" / "test.parquet", reviews(2, 10))
    datasets.Dataset.from_list(reviews(2, 20)).save_to_disk(tmp_path / "lyon" / "val")
    jsonl(tmp_path / "berlin.v2.jsonl", reviews(10, 30))
    datasets.Dataset.from_list(reviews(10, 50)).save_to_disk(tmp_path / "rome")
    (tmp_path / "README.md").write_text("notes")
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    found = load_files(tmp_path, task=TEXT)
    assert [client.id for client in found.clients] == ["berlin.v2", "lyon", "rome"]
    assert found.manifest["counts"] == {
        "berlin.v2": {"train": 7, "val": 1, "test": 2},
        "lyon": {"train": 5, "val": 2, "test": 2},
        "rome": {"train": 7, "val": 1, "test": 2},
    }
    assert found.manifest["partition"]["held_out"] == {
        "berlin.v2": ["test", "val"],
        "lyon": [],
        "rome": ["test", "val"],
    }


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    for part in (1, 0):
        parquet(tmp_path / "a" / f"train-0000{part}-of-00002.parquet", reviews(3, 10 * part))
    trained = only(load_files(tmp_path, task=TEXT, **NONE)).train
    assert texts(trained) == ["film 0", "film 1", "film 2", "film 10", "film 11", "film 12"]


def test_a_line_may_hold_a_line_separator_and_the_file_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "one\u2028two", "label": "x"}', "", '{"text": "three", "label": "y"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert texts(only(load_files({"a": path}, task=TEXT, **NONE)).train) == ["one\u2028two", "three"]


def test_columns_are_named_by_the_user_and_others_left_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"review": f"r{i}", "stars": i, "text": 7, "more": []} for i in (1, 2)])
    found = load_files({"a": path}, task=TEXT, columns={"text": "review", "label": "stars"}, **NONE)
    assert [set(record) for record in only(found).train] == [{"id", "text", "label"}] * 2
    assert texts(only(found).train) == ["r1", "r2"]


def test_instructions_need_no_labels_and_a_missing_input_is_empty(tmp_path: Path) -> None:
    rows = [{"instruction": "add", "input": "1 2", "output": "3"}, {"instruction": "greet", "output": "hi"}]
    found = load_files({"a": parquet(tmp_path / "a.parquet", rows)}, task="causal-lm", **NONE)
    assert found.label_names == ()
    assert [record["input"] for record in only(found).train] == ["1 2", ""]


TURNS = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_conversations_are_found_by_name(tmp_path: Path, write: Callable[..., Path]) -> None:
    """`messages`, or ShareGPT's `conversations`; or any other column that is named."""
    shared = [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "2"}]
    expected = {"messages": TURNS, "output": "2"}
    for column, turns, columns in (
        ("messages", TURNS, {}),
        ("conversations", shared, {}),
        ("dialogue", TURNS, {"messages": "dialogue"}),
    ):
        path = write(tmp_path / f"{column}.{'parquet' if write is parquet else 'jsonl'}", [{column: turns, "n": 1}])
        federation = load_files({"a": path}, task="causal-lm", columns=columns, val_fraction=0, test_fraction=0)
        (record,) = only(federation).train
        assert {key: value for key, value in record.items() if key != "id"} == expected


def test_prompts_and_texts_are_found_by_name_unless_there_are_instructions(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "completion": "2"},
        {"text": "one and one"},
        {"instruction": "add", "output": "2", "text": "add 2", "prompt": "x", "completion": "y"},
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    federation = load_files({"a": path}, task="causal-lm", val_fraction=0, test_fraction=0)
    found = [{key: value for key, value in record.items() if key != "id"} for record in only(federation).train]
    assert found == [
        {"prompt": "1+1=", "output": "2"},
        {"text": "one and one", "output": ""},
        {"instruction": "add", "output": "2"},
    ]
    path = jsonl(tmp_path / "b.jsonl", rows[1:])
    named = load_files({"a": path}, task="causal-lm", columns={"text": "text"}, val_fraction=0, test_fraction=0)
    assert [record.get("text") for record in only(named).train] == ["one and one", "add 2"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": TURNS[:1]}, "the last of messages must be the assistant's"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "each of messages must be"),
        ({"messages": [*TURNS, {"role": "system", "content": "x"}]}, "a system's message must be the first"),
        ({"messages": TURNS[1:]}, "messages has no message of the user"),
        ({"messages": "two?"}, "messages must be a list of messages"),
        ({"prompt": TURNS, "completion": "2"}, "prompt must be a text.*write conversations as messages"),
        ({"text": ""}, "text must be a text that is not empty"),
        ({"question": "two?"}, "there is no instruction.*or give messages, prompt and completion, or text"),
    ],
)
def test_a_conversation_that_cannot_be_learnt_is_named_with_its_line(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": TURNS, "text": "x"}, row])
    with pytest.raises(DataError, match=rf"a\.jsonl.*2.*{told}"):
        load_files({"a": path}, task="causal-lm")


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_choices_are_read_where_columns_name_them_and_nowhere_else(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Many data sets have a column `choices` that is no list of texts."""
    rows = [{"instruction": "pick", "output": "b", "options": ["a", "b"], "choices": {"text": 1}}] * 2
    path = write(tmp_path / ("a.jsonl" if write is jsonl else "a.parquet"), rows)
    plain = load_files({"a": path}, task="causal-lm", **NONE)
    assert set(only(plain).train[0]) == {"id", "instruction", "output"}
    found = load_files({"a": path}, task="causal-lm", columns={"choices": "options"}, **NONE)
    assert [record["choices"] for record in only(found).train] == [["a", "b"]] * 2
    with pytest.raises(DataError, match=r"choices must be a list of texts, got \{"):
        load_files({"a": path}, task="causal-lm", columns={"choices": "choices"}, **NONE)


def test_pairs_of_texts_are_kept(tmp_path: Path) -> None:
    rows = [{"text": "a", "text_pair": "b", "label": 0}, {"text": "c", "text_pair": "d", "label": 1}]
    found = load_files({"a": jsonl(tmp_path / "a.jsonl", rows)}, task=TEXT, **NONE)
    assert [record["text_pair"] for record in only(found).train] == ["b", "d"]


# Labels


def test_classes_are_the_sorted_labels_of_all_clients_before_anything_is_held_out(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": f"t{i}", "label": 10} for i in range(4)])
    jsonl(tmp_path / "b.jsonl", [{"text": f"t{i}", "label": label} for i, label in enumerate([9, 2, 9, 2, 2])])
    found = load_files(tmp_path, task=TEXT)
    assert found.label_names == ("2", "9", "10")
    assert {record["label"] for record in found.clients[0].train} == {2}


@pytest.mark.parametrize(
    ("label_names", "labels", "expected"),
    [
        (["neg", "pos"], ["pos", "neg"], [1, 0]),
        (["neg", "pos"], [1, 0], [1, 0]),
        (["1", "2", "3"], [1, 3], [0, 2]),  # stars: a number that is a name is not taken for an index
        (["zero", "7"], [7], [1]),
    ],
)
def test_given_names_say_what_a_label_means(
    tmp_path: Path, label_names: list[str], labels: list[Any], expected: list[int]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)])
    found = load_files({"a": path}, task=TEXT, label_names=label_names, **NONE)
    assert [record["label"] for record in only(found).train] == expected
    assert found.label_names == tuple(label_names)


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_class_labels_of_datasets_mean_their_names_whatever_their_order(tmp_path: Path, kind: str) -> None:
    for client, names in {"a": ["neg", "pos"], "b": ["pos", "neg"]}.items():
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        made = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, 1]}, features=features)
        if kind == "saved":
            made.save_to_disk(tmp_path / client)
        else:
            made.to_parquet(tmp_path / f"{client}.parquet")
    found = load_files(tmp_path, task=TEXT, **NONE)
    assert found.label_names == ("neg", "pos")
    assert [[record["label"] for record in client.train] for client in found.clients] == [[0, 1], [1, 0]]


def test_a_class_label_that_datasets_lacks_is_a_gap(tmp_path: Path) -> None:
    """-1, as SNLI has it where its readers did not agree."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": [f"t{at}" for at in range(7)], "label": [0, 1, 0, 1, -1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    found = load_files({"a": tmp_path / "a.parquet"}, task=TEXT, **{**NONE, "missing": "drop"})
    assert [record["label"] for record in only(found).train] == [0, 1, 0, 1, 0, 1]
    with pytest.raises(DataError, match="row 5: label"):
        load_files({"a": tmp_path / "a.parquet"}, task=TEXT, **NONE)


# Images


def test_image_paths_count_from_the_client_s_file(tmp_path: Path) -> None:
    for client, grey in (("a", 0), ("b", 255)):
        picture(tmp_path / client / "images" / "one.png", grey)
        jsonl(tmp_path / client / "train.jsonl", [{"image": "images/one.png", "label": label} for label in (0, 1)])
    found = load_files(tmp_path, task="image-classification", **NONE)
    pixels = [read_image(client.train[0]["image"]) for client in found.clients]
    assert [float(one.mean()) for one in pixels] == [0.0, 1.0]
    assert found.clients[0].train[0]["image"] == str((tmp_path / "a/images/one.png").resolve())


def test_encoded_images_come_from_parquet_structs_and_saved_datasets(tmp_path: Path) -> None:
    data = picture(tmp_path / "one.png", 255).read_bytes()
    rows = [{"image": {"bytes": data, "path": "/elsewhere/one.png"}, "label": label} for label in (0, 1)]
    parquet(tmp_path / "a.parquet", rows)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict({"image": [str(tmp_path / "one.png")] * 2, "label": [0, 1]}, features=features)
    made.save_to_disk(tmp_path / "b")
    sources = {"a": tmp_path / "a.parquet", "b": tmp_path / "b"}
    found = load_files(sources, task="image-classification", **NONE)
    for client in found.clients:
        assert np.array_equal(read_image(client.train[0]["image"]), np.ones((4, 4), np.float32))


def test_a_struct_without_bytes_names_a_file(tmp_path: Path) -> None:
    picture(tmp_path / "one.png", 255)
    rows = [{"image": {"bytes": None, "path": "one.png"}, "label": label} for label in (0, 1)]
    found = load_files({"a": parquet(tmp_path / "a.parquet", rows)}, task="image-classification", **NONE)
    assert read_image(only(found).train[1]["image"]).mean() == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("../one.png", "'..'"),
        ("a/../../one.png", "'..'"),
        ("a\\..\\..\\one.png", "'..'"),
        ("/etc/hostname", "must be a path below"),
        ("two.png", "is no file in"),
        ("iVBORw0KGgo" * 1000, "is no file in"),
        ("", "must be a relative path"),
        (None, "got null"),
        ([[0, 1]], "must be a relative path"),
        ({"bytes": None, "path": "../one.png"}, "'..'"),
    ],
)
def test_an_image_outside_the_folder_or_missing_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    picture(tmp_path / "one.png", 0)
    picture(tmp_path / "in" / "good.png", 0)
    path = jsonl(tmp_path / "in" / "a.jsonl", [{"image": "good.png", "label": 0}, {"image": value, "label": 1}])
    with pytest.raises(DataError) as caught:
        load_files({"a": path}, task="image-classification", **NONE)
    assert str(caught.value).startswith(f"client a: {path}, line 2: image ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


# What is held out


def test_every_record_is_in_exactly_one_split_and_order_is_kept(tmp_path: Path) -> None:
    client = only(load_files({"a": jsonl(tmp_path / "a.jsonl", reviews(50))}, task=TEXT))
    assert [len(split) for split in (client.train, client.val, client.test)] == [36, 4, 10]  # 50 * 0.2, then 40 * 0.1
    numbers = [[int(text.split()[1]) for text in texts(split)] for split in (client.train, client.val, client.test)]
    assert all(split == sorted(split) for split in numbers)
    assert sorted(chain(*numbers)) == list(range(50))


def test_each_class_gives_its_share(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": "rare" if i % 10 == 0 else "common"} for i in range(100)]
    client = only(load_files({"a": jsonl(tmp_path / "a.jsonl", rows)}, task=TEXT, val_fraction=0.25))
    counts = [Counter(record["label"] for record in split) for split in (client.test, client.val, client.train)]
    assert counts == [{0: 18, 1: 2}, {0: 18, 1: 2}, {0: 54, 1: 6}]


def test_the_last_record_of_a_class_stays_in_training_while_it_can() -> None:
    for seed in range(20):
        out = held_out("abbbb", 3, np.random.default_rng(seed))  # shares 0.6 and 2.4: the remainder alone says a
        assert len(out) == 3 and 0 not in out
    assert len(held_out("abcd", 3, np.random.default_rng(0))) == 3


def test_what_is_held_out_depends_on_seed_and_client_only(tmp_path: Path) -> None:
    for name in "abc":
        jsonl(tmp_path / f"{name}.jsonl", reviews(40))
    files = {name: tmp_path / f"{name}.jsonl" for name in "abc"}
    whole = {client.id: client for client in load_files(files, task=TEXT).clients}
    alone = only(load_files({"b": files["b"]}, task=TEXT))
    assert alone == whole["b"]
    assert texts(whole["a"].test) != texts(whole["b"].test)
    assert texts(only(load_files({"b": files["b"]}, task=TEXT, seed=1)).test) != texts(alone.test)


def test_a_given_test_file_is_left_whole_and_nothing_more_is_held_out_for_it(tmp_path: Path) -> None:
    files = {"train": jsonl(tmp_path / "x.jsonl", reviews(20)), "test": jsonl(tmp_path / "y.jsonl", reviews(3, 50))}
    client = only(load_files({"a": files}, task=TEXT))
    assert [len(split) for split in (client.train, client.val, client.test)] == [18, 2, 3]


def test_a_client_that_is_too_small_to_share_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": 0}, {"text": "y", "label": 1}])
    with pytest.raises(DataError, match=r"client a: too few training records, 1, to hold 1 out for val"):
        load_files({"a": path}, task=TEXT)


def test_all_clients_that_are_too_small_are_told_at_once(tmp_path: Path) -> None:
    sizes = {"a": 2, "b": 20, "c": 2, "d": 1}
    files = {client: jsonl(tmp_path / f"{client}.jsonl", reviews(size)) for client, size in sizes.items()}
    with pytest.raises(DataError, match="too few training records") as error:
        load_files(files, task=TEXT)
    assert all(re.search(rf"\b{client}\b", str(error.value)) for client in "acd") and "client b" not in str(error.value)


def test_test_records_that_are_also_trained_on_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"train": jsonl(tmp_path / "x.jsonl", reviews(20)), "test": jsonl(tmp_path / "y.jsonl", reviews(3))}
    with caplog.at_level(logging.WARNING):
        load_files({"a": files}, task=TEXT)
    assert "3 test records are also in their client's training data (most: 3 of client a)" in caplog.text


def test_the_fingerprint_follows_content_and_not_the_folder(tmp_path: Path) -> None:
    def fingerprint(folder: str, rows: list[dict[str, Any]]) -> str:
        found = load_files({"a": jsonl(tmp_path / folder / "a.jsonl", rows)}, task=TEXT)
        json.dumps(found.manifest)
        return found.manifest["partition"]["sha256"]

    rows = reviews(10)
    first = fingerprint("one", rows)
    assert len(first) == 64 and fingerprint("two", rows) == first
    assert fingerprint("three", [*rows[:-1], {**rows[-1], "text": "other"}]) != first
    assert fingerprint("four", [*rows[:-1], {**rows[-1], "label": "good"}]) != first


def test_the_fingerprint_follows_content_under_the_same_ids(tmp_path: Path) -> None:
    found = []
    for version in ("old", "new"):
        rows = [{"key": f"{i} \ud83d", "text": f"{version} {i}", "label": i % 2} for i in range(10)]
        path = jsonl(tmp_path / "a.jsonl", rows)
        found.append(load_files({"a": path}, task=TEXT, columns={"id": "key"}).manifest["partition"]["sha256"])
    assert found[0] != found[1]


def test_repeated_records_get_ids_of_their_own(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": 0}] * 3 + [{"text": "y", "label": 1}])
    ids = [record["id"] for record in only(load_files({"a": path}, task=TEXT, **NONE)).train]
    assert ids[1:3] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert len(set(ids)) == 4


def test_ids_of_the_file_are_used_when_they_are_named_and_must_differ(tmp_path: Path) -> None:
    rows = [{"text": "x", "label": 0, "key": 7}, {"text": "y", "label": 1, "key": "8"}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert [r["id"] for r in only(load_files({"a": path}, task=TEXT, columns={"id": "key"}, **NONE)).train] == [
        "7",
        "8",
    ]
    jsonl(path, [*rows, {"text": "z", "label": 0, "key": "7"}])
    with pytest.raises(DataError, match=r"line 3: id '7' was already given to .*a\.jsonl, line 1"):
        load_files({"a": path}, task=TEXT, columns={"id": "key"}, **NONE)


# Mistakes, each with the place it is in


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x", "label": ', "line 2: is not JSON (Expecting value at column 24)"),
        ('["x", 0]', "line 2: must be an object with named fields, not a list"),
        ('{"text": "x"}', "line 2: there is no label; the columns are text. Say which with data.columns.label"),
        ('{"text": 3, "label": 0}', "line 2: text must be text, got 3"),
        ('{"text": null, "label": 0}', "line 2: text must be text, got null"),
        ('{"text": "x", "label": [1]}', "line 2: label must be a class's name or whole number, got [1]"),
        ('{"text": "x", "label": 0.5}', "line 2: label must be a class's name or whole number, got 0.5"),
        ('{"text": "x", "label": null}', "got null"),
        ('{"text": "x", "label": ""}', 'got ""'),
        ('{"text": "x", "label": "good"}', 'labels are numbers and names: "good" in'),
        ('{"text": "x", "label": 0, "text_pair": "y"}', "line 1: text_pair must be text, as in the other records"),
        ('{"text": "\\ud83d", "label": 0}', "line 2: holds \\ud83d, half of a surrogate pair"),
        ("[" * 100_000, "line 2: is "),
        ('{"text": "x", "label": 0, "label": 1}', 'line 2: has "label" twice in one object; remove one of them'),
        ('{"text": "x", "label": 0, "of": [{"a": 1, "\\u0061": 1}]}', 'line 2: has "a" twice in one object'),
    ],
)
def test_a_bad_line_is_named_with_file_line_field_and_value(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "w", "label": 1}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        load_files({"a": path}, task=TEXT, **NONE)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_only_a_line_with_too_many_values_may_lack_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nx")
    with pytest.raises(DataError, match=r"line 2: the first line names 2 columns, and this one has 1$"):
        load_files({"a": tmp_path / "a.csv"}, task=TEXT)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl has no records"),
        ("a.jsonl", b"\n\n", "a.jsonl has no records"),
        ("a.json", b"", "a.json has no records"),
        ("a.json", b"[]", "a.json has no records"),
        ("a.json", b'{"text": "x"}', "must hold a list of objects, not an object"),
        ("a.json", b'{"text": "x", "label": 0}\n{"text": "y", "label": 1}', "is JSON Lines, and ends in .jsonl"),
        (
            "a.json",
            b'\n[ {"text": "x]", "label": 0} ,\n {"text": "y", "text": "z", "label": 1}]',
            'a.json, record 2: has "text" twice in one object; remove one of them',
        ),
        ("a.json", b'{"text": "x", "text": "x"}', 'a.json: has "text" twice in one object'),
        ("a.json", b'[{"text": "x", "label": 0}, 3]', "a.json, record 2: must be an object"),
        ("a.jsonl", b'{"text": "\xe9", "label": 0}', "a.jsonl, line 1: is not UTF-8 text"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read as Parquet"),
        ("a.xlsx", b"PK", "a.xlsx is not a file type that befit reads"),
        (
            "a.csv",
            b"text,label\nx,0,1",
            "a.csv, line 2: the first line names 2 columns, and this one has 3; a value with ',' in it has to be",
        ),
        (
            "a.csv",
            b'label,text\nflu,"two\nlines"\n\ncold,"5 days of fever\nflu,cough\n',
            "a.csv, line 5: cannot be read as CSV: a quote that opens a value has to close it",
        ),
        (
            "a.csv",
            b'label,text\ncold,"5 days\nflu,cough\nflu,"3 weeks\n',
            "a.csv, line 2: cannot be read as CSV: a quote",
        ),
        ("a.csv", b"text,label\n\xff,0", "a.csv, line 2: byte 0xff is not UTF-8; save it as UTF-8"),
        ("a.csv", b"text,text\nx,0", "a.csv has two columns of one name"),
        ("a.tsv", b"text\tlabel\n", "a.tsv has no records"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_files({"a": tmp_path / name}, task=TEXT)
    assert str(caught.value).startswith("client a: ") and message in str(caught.value)


def test_a_damaged_dataset_directory_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list(reviews(3)).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"client a: .*saved cannot be read as a datasets directory"):
        load_files({"a": tmp_path / "saved"}, task=TEXT)


def test_an_empty_table_is_named(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(reviews(3)).select([])
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "a.parquet")
    for name in ("saved", "a.parquet"):
        with pytest.raises(DataError, match=f"client a: .*{name} has no records"):
            load_files({"a": tmp_path / name}, task=TEXT)


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", reviews(300))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"client a: .*a\.parquet cannot be read as Parquet"):
        load_files({"a": path}, task=TEXT)


def test_a_column_that_is_missing_is_suggested(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [{"review": "x", "stars": 1, "notes": ""}])
    with pytest.raises(DataError) as caught:
        load_files({"a": path}, task=TEXT, columns={"text": "reviews", "label": "stars"})
    expected = (
        f"client a: {path}, row 1: there is no reviews; the columns are review, stars, notes. Did you mean: review?"
    )
    assert str(caught.value) == expected


def test_a_label_that_no_client_trains_on_is_refused_with_its_line(tmp_path: Path) -> None:
    test = jsonl(tmp_path / "test.jsonl", [*reviews(2), {"text": "x", "label": "god"}])
    files = {"train": jsonl(tmp_path / "train.jsonl", reviews(9)), "test": test}
    with pytest.raises(DataError) as caught:
        load_files({"a": files}, task=TEXT)
    assert str(caught.value) == (
        f'client a: {test}, line 3: label "god" is no client\'s in training, which has bad, good. Did you mean: good? '
        "If it is a class, list all in data.label_names"
    )


def test_a_label_outside_the_given_names_is_refused_with_its_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": 0}, {"text": "y", "label": 2}])
    with pytest.raises(DataError, match=r"client a: .*line 2: label 2 is not one of neg, pos"):
        load_files({"a": path}, task=TEXT, label_names=["neg", "pos"])


def test_a_single_class_is_no_classification(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"two classes.* same$"):
        load_files({"a": jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": "same"}] * 9)}, task=TEXT)


@pytest.mark.parametrize("label", ["a\u202eb", "line\nbreak", "x" * 1001])
def test_a_collected_class_is_held_to_what_a_listed_one_is(tmp_path: Path, label: str) -> None:
    rows = [{"text": f"text {i}", "label": ("plain", label)[i % 2]} for i in range(20)]
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: label .* is no name of a class"):
        load_files({"a": jsonl(tmp_path / "a.jsonl", rows)}, task=TEXT)


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("a", "b", "c")}
    jsonl(paths["b"], reviews(9))
    with pytest.raises(DataError) as caught:
        load_files(paths, task=TEXT)
    assert str(caught.value) == "; ".join(f"client {name}: there is no file {paths[name]}" for name in ("a", "c"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/test.jsonl"], "client a: {root}/a has no train"),
        (["a/train.jsonl", "a/dev.jsonl"], "client a: {root}/a/dev.jsonl is not a split"),
        (["a/train.jsonl", "a/test.doc"], "client a: {root}/a/test.doc is not a file type"),
        (["a/train.jsonl", "a/train.json"], "client a: {root}/a must have 1 of train, and has 2"),
        (["a/train.jsonl", "a/val.jsonl", "a/validation.jsonl"], "client a: {root}/a must have 1 of val, and has 2"),
        (["a/train-00000-of-00002.jsonl"], "client a: {root}/a must have 2 of train, and has 1"),
        (["a.jsonl", "a.json"], "two clients a: a.json and a.jsonl"),
        (["a.jsonl", "a/train.jsonl"], "two clients a:"),
        (["a.jsonl", "b.doc"], "{root}/b.doc is no client"),
        (["train.jsonl", "test.jsonl"], "{root}/test.jsonl is a split"),
        (["a\tb.jsonl"], "'a\\tb' is no client's id: it must be a printable name"),
        (["Ana.jsonl", "ana.jsonl"], "'Ana' and 'ana' are the same name but for case"),
        ([], "{root} has no clients"),
    ],
)
def test_a_folder_that_could_be_misread_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        jsonl(tmp_path / name, reviews(9))
    with pytest.raises(DataError) as caught:
        load_files(tmp_path, task=TEXT)
    assert message.format(root=tmp_path) in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "clients"))):
        load_files(tmp_path / "clients", task=TEXT)


def test_a_file_in_two_splits_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", reviews(9))
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(DataError, match=r"client a: .* is both train and test"):
        load_files({"a": {"train": path, "test": tmp_path / "link.jsonl"}}, task=TEXT)


def test_a_split_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", reviews(9))
    with pytest.raises(DataError, match=r"client a: 'trian' is not a split.*Did you mean: train\?"):
        load_files({"a": {"trian": path}}, task=TEXT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"txt": "review"}}, r"data\.columns\.txt: .*Did you mean: text\?"),
        ({"columns": {"instruction": "x"}}, r"data\.columns\.instruction: text-classification has no such field"),
        ({"task": "text-clasification"}, r"data\.task: .*Did you mean: text-classification\?"),
        ({"task": "causal-lm", "label_names": ["a", "b"]}, r"data\.label_names: causal-lm has no classes"),
        ({"label_names": ["good", "bad", "good"]}, r"data\.label_names: names a class twice"),
    ],
)
def test_settings_that_cannot_work_are_configuration_errors(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = jsonl(tmp_path / "a.jsonl", reviews(9))
    with pytest.raises(ConfigError, match=message):
        load_files({"a": path}, **{"task": TEXT, **settings})


def test_all_bad_lines_of_all_clients_are_named_up_to_five_a_client(tmp_path: Path) -> None:
    """One pass over the files is enough to correct them; a wholly wrong one does not fill the screen."""
    a = jsonl(tmp_path / "a.jsonl", [*reviews(1), {"text": 1, "label": "x"}, {"label": "x"}, *reviews(2)])
    b = jsonl(tmp_path / "b.jsonl", [{"review": "x"}] * 9)
    with pytest.raises(DataError) as caught:
        load_files(tmp_path, task=TEXT)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0].startswith(f"client a: {a}, line 2: text must be text")
    assert lines[1].startswith(f"{a}, line 3: there is no text")
    assert lines[2].startswith(f"client b: {b}, line 1: there is no text")
    assert lines[2].endswith("(9 records: line 1, 2, 3, 4, 5 and 4 more)") and len(lines) == 3


def test_bad_lines_that_differ_are_told_apart_up_to_five(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": number, "label": "x"} for number in range(7)])
    with pytest.raises(DataError) as caught:
        load_files({"a": path}, task=TEXT)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert [line.split(": text")[0].split(", ")[-1] for line in lines[:5]] == [
        f"line {number}" for number in range(1, 6)
    ]
    assert lines[5:] == ["and 2 more"]


def test_all_broken_lines_and_unknown_labels_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n[]\n" + json.dumps({"text": "x", "label": "y"}) + "\n")
    with pytest.raises(DataError, match=r"line 1: is not JSON[^\n]*\n[^\n]*line 2: must be an object"):
        load_files({"a": path}, task=TEXT)
    jsonl(path, [{"text": "x", "label": "god"}, *reviews(6), {"text": "y", "label": "bda"}])
    with pytest.raises(DataError, match=r'line 1: label "god"[^\n]*\n[^\n]*line 8: label "bda"'):
        load_files({"a": path}, task=TEXT, label_names=["bad", "good"])


# Records to predict from


def test_a_record_to_predict_from_has_the_user_s_names_or_befit_s_own() -> None:
    columns = {"text": "review", "label": "stars"}
    for given in ({"review": "nice", "stars": 5, "id": 1}, {"text": "nice"}):
        assert input_record(given, TEXT, columns, "here") == {"text": "nice"}
    assert input_record({"review": "a", "text_pair": "b"}, TEXT, columns, "here") == {"text": "a", "text_pair": "b"}
    assert input_record({"q": "sum", "input": "1"}, "causal-lm", {"instruction": "q"}, "here") == {
        "instruction": "sum",
        "input": "1",
    }
    assert input_record("nice", TEXT, columns, "here") == "nice"
    assert input_record({"bytes": b"x", "path": None}, "image-classification", {}, "here")["bytes"] == b"x"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"reviews": "nice"},
            "f, line 2: there is no review (data.columns.text); the record has reviews. Did you mean: reviews?",
        ),
        ({}, "f, line 2: there is no review (data.columns.text); the record has nothing"),
        (7, "f, line 2: must be a text or an object with review, got 7"),
    ],
)
def test_a_record_without_its_field_says_what_it_has_and_where(value: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        input_record(value, TEXT, {"text": "review"}, "f, line 2")
    assert str(caught.value) == message


def test_an_empty_instruction_or_output_is_refused(tmp_path: Path) -> None:
    for field in ("instruction", "output"):
        row = {"instruction": "x", "output": "y", field: " "}
        with pytest.raises(DataError, match=f"line 1: {field} is empty"):
            load_files({"a": jsonl(tmp_path / "a.jsonl", [row])}, task="causal-lm")


# Through a configuration


def test_three_clients_files_are_checked_and_run_from_a_configuration(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert", labels=("bad", "good"))
    words = {"bad": "bad film", "good": "very good book"}
    for number, name in enumerate(("a", "b", "c")):
        labels = ["bad", "good"] * 10
        rows = [
            {"review": f"{words[label]} {'abcde'[(i + number) % 5]}", "stars": label} for i, label in enumerate(labels)
        ]
        jsonl(tmp_path / "data" / f"{name}.jsonl", rows)
    jsonl(tmp_path / "data" / "c-test.jsonl", rows[:4])
    config = tmp_path / "mine.yaml"
    config.write_text(
        "model: {id: ./bert}\n"
        "data:\n"
        "  task: text-classification\n"
        "  columns: {text: review, label: stars}\n"
        "  clients: {a: data/a.jsonl, b: data/b.jsonl, c: {train: data/c.jsonl, test: data/c-test.jsonl}}\n"
        "method: {name: fedit, rank: 2}\nbaselines: []\n"
        "train: {max_steps: 2, batch_size: 4}\nfederation: {rounds: 1}\n"
    )
    found = check(load_experiment(config))
    assert (found["clients"], found["train_examples"]) == (3, 14 + 14 + 18)
    done = run(load_experiment(config), out=tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "run.json").read_text())
    assert stored["label_names"] == ["bad", "good"] and stored["clients"] == ["a", "b", "c"]
    assert set(done.results["clients"]) == {"a", "b", "c"}
    named, plain = predict(tmp_path / "out", "a", [{"review": "very good book"}, "very good book"])
    assert named == plain and named["answer"] in ("bad", "good")
    with pytest.raises(DataError, match=r"input 2: there is no review .* has text_pair"):
        predict(tmp_path / "out", "a", ["good", {"text_pair": "x"}])
    with pytest.raises(DataError, match="no inputs"):
        predict(tmp_path / "out", "a", [])


def test_the_example_configuration_fits_files_beside_it(tmp_path: Path) -> None:
    example = Path(__file__).parents[4] / "configs" / "files-example.yaml"
    (tmp_path / "mine.yaml").write_text(example.read_text())
    rows = [{"review": f"r{i}", "stars": i % 5 + 1} for i in range(40)]
    for name in ("berlin", "lyon-train", "lyon-test"):
        jsonl(tmp_path / "data" / f"{name}.jsonl", rows)
    found = load_federation(load_experiment(tmp_path / "mine.yaml"))
    assert found.label_names == ("1", "2", "3", "4", "5")
    assert found.manifest["counts"]["berlin"] == {"train": 29, "val": 3, "test": 8}
    assert found.manifest["counts"]["lyon"] == {"train": 36, "val": 4, "test": 40}


def test_newcomers_are_read_as_clients_are_and_take_no_part(tmp_path: Path) -> None:
    for index, client in enumerate(("a", "b")):
        jsonl(tmp_path / "clients" / f"{client}.jsonl", reviews(20, start=100 * index))
    new = {
        "c": jsonl(tmp_path / "c.jsonl", reviews(20, start=300)),
        "d": {"test": jsonl(tmp_path / "d.jsonl", reviews(6, start=400))},
    }
    alone = load_files(tmp_path / "clients", task=TEXT)
    federation = load_files(tmp_path / "clients", task=TEXT, newcomers=new)
    assert federation.clients == alone.clients and federation.label_names == ("bad", "good")
    c, d = federation.newcomers
    assert (c.id, len(c.train), len(c.val), len(c.test)) == ("c", 14, 2, 4)
    assert (d.id, len(d.train), len(d.val), texts(d.test)) == ("d", 0, 0, [f"film {400 + i}" for i in range(6)])
    assert federation.manifest["counts"]["d"] == {"train": 0, "val": 0, "test": 6}
    now, before = federation.manifest["partition"], alone.manifest["partition"]
    assert now["sha256"] != before["sha256"] and now["clients_sha256"] == before["clients_sha256"]


def test_public_records_are_read_as_the_clients_are_and_belong_to_nobody(tmp_path: Path) -> None:
    for index, client in enumerate(("a", "b")):
        jsonl(tmp_path / "clients" / f"{client}.jsonl", reviews(20, start=100 * index))
    public = jsonl(tmp_path / "public.jsonl", reviews(9, start=300))
    alone = load_files(tmp_path / "clients", task=TEXT)
    federation = load_files(tmp_path / "clients", task=TEXT, public=public)
    assert federation.clients == alone.clients and not alone.public
    assert texts(federation.public) == [f"film {300 + i}" for i in range(9)]
    assert {record["label"] for record in federation.public} == {0, 1}, "as numbers of the clients' classes"
    assert federation.manifest["sources"][-1] == {"id": "public records", "split": "all", "file": "public.jsonl"}
    other = load_files(tmp_path / "clients", task=TEXT, public=jsonl(tmp_path / "other.jsonl", reviews(8, start=300)))
    hashes = {one.manifest["partition"]["sha256"] for one in (alone, federation, other)}
    assert len(hashes) == 3


def test_public_records_that_clients_are_tested_on_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jsonl(tmp_path / "clients" / "a.jsonl", reviews(20))
    load_files(tmp_path / "clients", task=TEXT, public=jsonl(tmp_path / "apart.jsonl", reviews(9, start=300)))
    assert "public" not in caplog.text
    load_files(tmp_path / "clients", task=TEXT, public=jsonl(tmp_path / "copy.jsonl", reviews(20)))
    assert "4 of 4 test records are among the public ones" in caplog.text


def test_public_records_that_are_a_clients_or_of_no_known_class_are_refused(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "clients" / "a.jsonl", reviews(20))
    with pytest.raises(DataError, match=r"data\.public: .*a\.jsonl is client a's"):
        load_files(tmp_path / "clients", task=TEXT, public=first)
    with pytest.raises(DataError, match=r"data\.public: there is no .*nowhere\.jsonl"):
        load_files(tmp_path / "clients", task=TEXT, public=tmp_path / "nowhere.jsonl")
    strange = jsonl(tmp_path / "new.jsonl", [*reviews(3), {"text": "film", "label": "middling"}])
    with pytest.raises(DataError, match=r"public records: .*middling"):
        load_files(tmp_path / "clients", task=TEXT, public=strange)


def test_own_files_with_public_records_serve_methods_that_need_any(tmp_path: Path) -> None:
    for index, client in enumerate(("a", "b")):
        jsonl(tmp_path / "clients" / f"{client}.jsonl", reviews(20, start=100 * index))
    jsonl(tmp_path / "public.jsonl", reviews(12, start=300))
    mine = {
        "method": {"name": "takfl", "rank": 2},
        "baselines": [],
        "model": {"id": "names-bert-fl", "max_length": 32},
        "data": {"clients": "clients", "task": TEXT, "public": "public.jsonl"},
        "train": {"max_steps": 1},
        "federation": {"rounds": 1},
        "report": {"plots": False},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(mine))
    done = run(tmp_path / "mine.yaml", out=tmp_path / "run")
    assert done.results["summary"]["scored"] == 2
    with pytest.raises(ConfigError, match="method takfl: needs public records, and files has none"):
        run(load_experiment(tmp_path / "mine.yaml", ["data.public=null"]), out=tmp_path / "without")


def test_a_newcomer_that_is_a_client_or_has_a_new_class_is_refused_by_name(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "clients" / "a.jsonl", reviews(20))
    with pytest.raises(DataError, match="newcomer a: there is a client of this name"):
        load_files(tmp_path / "clients", task=TEXT, newcomers={"a": jsonl(tmp_path / "a.jsonl", reviews(20))})
    with pytest.raises(DataError, match=r"newcomer b: .*a\.jsonl is client a's"):
        load_files(tmp_path / "clients", task=TEXT, newcomers={"b": first})
    strange = jsonl(tmp_path / "new.jsonl", [*reviews(19), {"text": "film", "label": "middling"}])
    with pytest.raises(DataError, match=r"client b: .*middling"):
        load_files(tmp_path / "clients", task=TEXT, newcomers={"b": strange})
    with pytest.raises(DataError, match=r"client b: the mapping has no train.*found nothing"):
        load_files(tmp_path / "clients", task=TEXT, newcomers={"b": {}})


def test_newcomers_of_a_configuration_count_from_its_folder_and_their_ids_are_checked(tmp_path: Path) -> None:
    for client in ("a", "b"):
        jsonl(tmp_path / "clients" / f"{client}.jsonl", reviews(20))
    jsonl(tmp_path / "new" / "c" / "test.jsonl", reviews(4, start=50))
    config = tmp_path / "run.yaml"
    text = f"model: {{id: m}}\nmethod: local\ndata: {{clients: clients, newcomers: new, task: {TEXT}}}\n"
    config.write_text(text)
    experiment = load_experiment(config)
    assert [one.id for one in load_federation(experiment).newcomers] == ["c"]
    config.write_text(text.replace("newcomers: new", "newcomers: {'c ': new}"))
    with pytest.raises(ConfigError, match=r"data\.newcomers: 'c ' is no client's id"):
        load_experiment(config)


def test_semicolons_of_a_spreadsheet_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfnote;label\r\n"a; b, c";1,5\r\n')
    assert [row.values for row in read_rows(tmp_path / "a.csv", None)] == [{"note": "a; b, c", "label": "1,5"}]
    (tmp_path / "b.csv").write_text('"text";"label, coarse"\n"a, b";x\n')
    assert [row.values for row in read_rows(tmp_path / "b.csv", None)] == [{"text": "a, b", "label, coarse": "x"}]
    (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbfsep=;\r\ntext;label\r\na, b;x\r\nc;y;z\r\n")
    with pytest.raises(DataError, match=r"c\.csv, line 4: the first line names 2 columns, and this one has 3"):
        read_rows(tmp_path / "c.csv", None)
    (tmp_path / "c.csv").write_bytes(b"sep=,\ntext;a,label\nb;c,x\n")
    assert [row.values for row in read_rows(tmp_path / "c.csv", None)] == [{"text;a": "b;c", "label": "x"}]


@pytest.mark.parametrize(("mark", "name"), [("\t", "tabs"), ("|", r"'\|'")])
def test_other_marks_between_the_names_of_csv_are_told(tmp_path: Path, mark: str, name: str) -> None:
    (tmp_path / "a.csv").write_text(f"text{mark}label\nhello, you{mark}1\n")
    with pytest.raises(DataError, match=rf"a\.csv, line 1: its names are separated by {name}; commas or semicolons"):
        read_rows(tmp_path / "a.csv", None)


def test_a_quote_within_a_value_of_csv_is_itself_and_long_values_are_read(tmp_path):
    long = "x" * 200_000  # beyond what Python's csv takes unless told
    (tmp_path / "a.csv").write_bytes(b'text,label\r\n5" nail,0\r\n\r\n"a\r\nb",1\r\n' + f"{long},1".encode())
    rows = read_rows(tmp_path / "a.csv", None)
    assert [row.values["text"] for row in rows] == ['5" nail', "a\r\nb", long]
    assert [row.place for row in rows] == ["line 2", "line 4", "line 6"]


def test_values_of_csv_are_text_as_it_stands_there_also_what_looks_like_a_number_or_nothing(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfnote,label\n"a, ""b""\nc",01\nNA,\n')
    (tmp_path / "a.tsv").write_text("note\tlabel\na, b\t1e5\n")
    rows = [row.values for row in read_rows(tmp_path / "a.csv", ["note", "label"])]
    assert rows == [{"note": 'a, "b"\nc', "label": "01"}, {"note": "NA", "label": ""}]
    assert read_rows(tmp_path / "a.tsv", ["note", "label"])[0].values == {"note": "a, b", "label": "1e5"}
    assert [row.values for row in read_rows(tmp_path / "a.csv", ["label"])] == [{"label": "01"}, {"label": ""}]


def test_one_mistake_of_all_clients_is_told_once_with_paths_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for client in ("north", "south", "west"):
        jsonl(tmp_path / "data" / f"{client}.jsonl", [{"note": "x", "label": "a"}] * 3)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as told:
        load_files(tmp_path / "data", task="text-classification", columns={"text": "report"})
    assert str(told.value) == (
        "client north: data/north.jsonl, line 1: there is no report; the columns are note, label. "
        "(3 records: line 1, 2, 3) (3 clients: north, south, west)"
    )


@pytest.mark.parametrize("value", ["", "   ", {"text": ""}])
def test_an_input_without_text_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"input 1: .*is empty, so there is nothing to answer"):
        input_record(value, TEXT, {}, "input 1")


@pytest.mark.parametrize("name", ["test", "val", "validation", "train"])
def test_a_folder_named_like_a_split_that_is_none_is_not_passed_over(name, tmp_path):
    """Or the split would be drawn from the others, and nobody would look at what is in it."""
    folder = tmp_path / "a"
    (folder / name).mkdir(parents=True)
    rows = "".join(json.dumps({"text": f"{n}", "label": n % 2}) + "\n" for n in range(20))
    (folder / name / "0000.jsonl").write_text(rows)
    (folder / ("test.jsonl" if name == "train" else "train.jsonl")).write_text(rows)
    with pytest.raises(DataError, match=rf"{re.escape(str(folder / name))} is named like a split"):
        client_sources({"a": folder})
    (folder / f"{'val' if name == 'validation' else name}.jsonl").write_text(rows)
    assert client_sources({"a": folder})  # it then holds what the file names, such as pictures


def test_a_tab_separated_file_without_quoting_is_refused_where_it_would_lose_records(tmp_path: Path) -> None:
    """As GLUE's are written, where a sentence may begin with a quote that another ends."""
    path = tmp_path / "a.tsv"
    path.write_text('text\tlabel\n"a fine film\t1\nit is dull\t0\nslow and dull"\t0\n')
    with pytest.raises(DataError, match=r"line 2: a value in quotes holds tabs and line ends"):
        load_files({"a": path}, task=TEXT, **NONE)
    path.write_text('text\tlabel\n"two\nlines"\t1\n"one ""word"""\t0\n')
    found = load_files({"a": path}, task=TEXT, **NONE)
    assert texts(only(found).train) == ["two\nlines", 'one "word"']


def test_a_table_without_a_line_of_names_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0,a fine film\n1,a dull one\n")
    with pytest.raises(DataError, match=r"there is no text; .*Is there no line with the columns' names\?"):
        load_files({"a": tmp_path / "a.csv"}, task=TEXT, **NONE)
