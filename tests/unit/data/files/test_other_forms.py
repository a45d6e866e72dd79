"""Data as sites have it: other headers, one table for all, folders of classes, patients, repeats and gaps."""

import csv
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from befit.config.experiment import to_dict
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError
from befit.core.text import PROGRESS
from befit.data.federation import GROUP, Federation
from befit.data.files.divide import PartitionSettings
from befit.data.files.load import held_out_groups
from befit.data.files.readers import read_rows
from befit.runs.loading import columns_of, load_federation
from befit.runs.provenance import result_affecting
from tests.files import load_files

TEXT = "text-classification"
NONE: dict[str, Any] = {"val_fraction": 0.0, "test_fraction": 0.0}


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def notes(count: int, text: str = "text", label: str = "label", start: int = 0) -> list[dict[str, Any]]:
    return [{text: f"note {start + i}", label: ("flu", "cold")[i % 2]} for i in range(count)]


def classes(folder: Path, **counts: int) -> Path:
    for name, count in counts.items():
        for number in range(count):
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), number).save(folder / name / f"{number}.png")
    return folder


# Columns of a client


def test_every_client_may_have_headers_of_its_own(tmp_path: Path) -> None:
    clients = {
        "a": table(tmp_path / "a.csv", notes(10, "note", "dx")),
        "b": {"train": table(tmp_path / "b.csv", notes(10, "befund", "dx")), "columns": {"text": "befund"}},
        "c": {
            "train": table(tmp_path / "c.csv", notes(10)),
            "test": table(tmp_path / "c-test.csv", notes(4, start=50)),
            "columns": {"text": "text", "label": "label"},
        },
    }
    found = load_files(clients, task=TEXT, columns={"text": "note", "label": "dx"})
    assert [client.sizes for client in found.clients] == [{"train": 7, "val": 1, "test": 2}] * 2 + [
        {"train": 9, "val": 1, "test": 4}
    ]
    plain = load_files({"b": table(tmp_path / "p.csv", notes(10))}, task=TEXT)
    assert found.clients[1] == plain.clients[0]  # headers change no number


def test_the_configuration_keeps_them_and_predict_finds_them(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", notes(10, "note", "dx"))
    table(tmp_path / "b.csv", notes(10, "befund", "dx"))
    values = {
        "method": "fedit",
        "model": {"id": "names-bert-fl"},
        "data": {
            "task": TEXT,
            "columns": {"text": "note", "label": "dx"},
            "clients": {
                "a": str(tmp_path / "a.csv"),
                "b": {"train": str(tmp_path / "b.csv"), "columns": {"text": "befund"}},
            },
        },
    }
    experiment = load_experiment(values)
    assert load_experiment(to_dict(experiment)) == experiment
    assert [len(client.train) for client in load_federation(experiment).clients] == [7, 7]
    assert columns_of(experiment, "a") == {"text": "note", "label": "dx"}
    assert columns_of(experiment, "b") == {"text": "befund", "label": "dx"}


def test_simulated_sites_have_the_columns_of_their_clients(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from befit.flower.simulation import sites_of

    data = {
        "task": TEXT,
        "label_names": ["cold", "flu"],
        "columns": {"text": "note"},
        "clients": {"a": str(tmp_path / "a"), "b": {"train": str(tmp_path / "b.csv"), "columns": {"label": "dx"}}},
    }
    experiment = load_experiment({"method": "fedit", "model": {"id": "names-bert-fl"}, "data": data})
    found = [(site.data, dict(site.columns)) for site in sites_of(experiment, tmp_path / "out")]
    assert found == [
        (str(tmp_path / "a"), {"text": "note"}),
        ({"train": str(tmp_path / "b.csv")}, {"text": "note", "label": "dx"}),
    ]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"train": "a.csv", "colums": {}}, "data.clients.a.colums: unknown key for a client. Did you mean: columns?"),
        ({"train": "a.csv", "columns": {"text": 3}}, "data.clients.a.columns.text: "),
        ({"train": 3}, "data.clients.a.train: must be text or null, got 3"),
        (["a.csv"], "data.clients.a: must be a path or a mapping with train, val, test or columns"),
    ],
)
def test_a_wrong_key_of_a_client_is_named(entry: Any, expected: str) -> None:
    values = {"method": "fedit", "model": {"id": "x"}, "data": {"task": TEXT, "clients": {"a": entry}}}
    with pytest.raises(ConfigError) as caught:
        load_experiment(values)
    (problem,) = caught.value.problems
    assert problem.startswith(expected)


def test_a_field_that_the_task_lacks_is_refused_for_one_client_too(tmp_path: Path) -> None:
    entry = {"train": table(tmp_path / "a.csv", notes(9)), "columns": {"texte": "text"}}
    with pytest.raises(ConfigError, match=r"texte: text-classification has no such field"):
        load_files({"a": entry}, task=TEXT)


# One table for all


def test_one_table_is_divided_by_a_column(tmp_path: Path) -> None:
    rows = [{**row, "site": site} for site, start in (("south", 0), ("north", 100)) for row in notes(20, start=start)]
    pooled = load_files(table(tmp_path / "all.csv", rows), task=TEXT, partition=PartitionSettings("site"))
    folder = tmp_path / "apart"
    for site, start in (("south", 0), ("north", 100)):
        table(folder / f"{site}.csv", notes(20, start=start))
    apart = load_files(folder, task=TEXT)
    assert [client.id for client in pooled.clients] == ["north", "south"]
    assert pooled.clients == apart.clients  # the same records, the same splits
    assert pooled.manifest["partition"]["sha256"] == apart.manifest["partition"]["sha256"]
    assert pooled.manifest["partition"]["args"]["by"] == "site"


def test_a_pooled_folder_has_splits_and_each_client_its_part(tmp_path: Path) -> None:
    for split, count in (("train", 20), ("test", 4)):
        table(tmp_path / f"{split}.csv", [{**row, "site": f"s{i % 2}"} for i, row in enumerate(notes(count))])
    found = load_files(tmp_path, task=TEXT, partition=PartitionSettings("site"), label_names=["cold", "flu"])
    assert [(client.id, client.sizes) for client in found.clients] == [
        (name, {"train": 9, "val": 1, "test": 2}) for name in ("s0", "s1")
    ]


@pytest.mark.parametrize(
    ("rows", "column", "expected"),
    [
        ([{"text": "x", "label": "a", "site": "s"}], "hospital", "there is no hospital (data.partition.by)"),
        ([{"text": "x", "label": "a", "site": ""}], "site", "to serve as client"),
        ([{"text": f"x{s}", "label": "a", "site": s} for s in ("s", "S")], "site", "are the same name but for case"),
    ],
)
def test_a_row_of_nobody_is_refused(tmp_path: Path, rows: Any, column: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        load_files(table(tmp_path / "all.csv", rows), task=TEXT, partition=PartitionSettings(column))
    assert expected in str(caught.value)


def test_a_partition_of_files_that_are_apart_is_refused() -> None:
    data = {"task": TEXT, "clients": {"a": "a.csv"}, "partition": {"by": "site"}}
    with pytest.raises(ConfigError, match=r"data\.partition: divides one file or folder"):
        load_experiment({"method": "fedit", "model": {"id": "x"}, "data": data})


def test_one_table_is_divided_at_random_for_a_simulation(tmp_path: Path) -> None:
    """Every record is one client's; alike ones without alpha, and with a small one each with few classes."""
    rows = [{"text": f"x{i}", "label": "abcd"[i % 4]} for i in range(120)]
    folder = tmp_path / "d"
    for split in ("train", "test"):
        table(folder / f"{split}.csv", [{**row, "text": f"{split} {row['text']}"} for row in rows])
    plain, skewed, other = (
        load_files(folder, task=TEXT, partition=PartitionSettings(clients=3, alpha=alpha), seed=seed)
        for alpha, seed in ((None, 0), (0.1, 0), (0.1, 1))
    )
    assert [client.id for client in plain.clients] == ["client-00", "client-01", "client-02"]
    assert [client.sizes for client in plain.clients] == [{"train": 36, "val": 4, "test": 40}] * 3

    def shares(federation: Federation, split: str) -> list[list[int]]:
        counted = [Counter(record["label"] for record in getattr(one, split)) for one in federation.clients]
        return [[counts[label] for label in range(4)] for counts in counted]

    for split in ("train", "test"):
        assert sum(map(sum, shares(skewed, split))) == {"train": 108, "test": 120}[split]
    assert max(max(counts) / sum(counts) for counts in shares(skewed, "test")) > 0.6
    assert shares(skewed, "train") != shares(other, "train")
    assert skewed.manifest["partition"]["args"] == {
        "val_fraction": 0.1,
        "test_fraction": 0.2,
        "clients": 3,
        "alpha": 0.1,
    }


@pytest.mark.parametrize(
    ("partition", "task", "message"),
    [
        ({}, TEXT, "data.partition: give by, the column"),
        ({"by": "site", "clients": 3}, TEXT, "data.partition: give by, the column"),
        ({"clients": 1}, TEXT, "data.partition.clients: "),
        ({"by": "site", "alpha": 1}, TEXT, "data.partition.alpha: deals the classes"),
        ({"clients": 3, "alpha": 1}, "causal-lm", "data.partition.alpha: deals the classes"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(partition: dict[str, Any], task: str, message: str) -> None:
    data = {"task": task, "clients": "all.csv", "partition": partition}
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_experiment({"method": "fedit", "model": {"id": "x"}, "data": data})


def test_a_partition_by_a_column_keeps_the_hash_of_its_settings() -> None:
    """Runs from before there were other partitions are still the same runs."""
    data = {"task": TEXT, "clients": "all.csv", "partition": {"by": "site"}}
    values = to_dict(load_experiment({"method": "fedit", "model": {"id": "x"}, "data": data}))
    assert result_affecting(values)["data"]["partition"] == {"by": "site"}


# Folders of classes


def test_folders_of_pictures_are_classes(tmp_path: Path) -> None:
    classes(tmp_path / "north", cat=6, dog=4)
    classes(tmp_path / "south" / "train", cat=3, dog=3)
    classes(tmp_path / "south" / "test", dog=2)
    (tmp_path / "north" / "cat" / "notes.txt").write_text("who took them")
    (tmp_path / "north" / "empty").mkdir()
    found = load_files(tmp_path, task="image-classification")
    north, south = found.clients
    assert found.label_names == ("cat", "dog")
    assert [north.sizes, south.sizes] == [{"train": 7, "val": 1, "test": 2}, {"train": 5, "val": 1, "test": 2}]
    assert all(Path(record["image"]).is_file() for record in north.train)
    assert Counter(record["label"] for part in (north.train, north.val, north.test) for record in part) == {0: 6, 1: 4}
    assert [record["label"] for record in south.test] == [1, 1]


def test_the_same_pictures_in_train_and_test_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "test"):
        classes(tmp_path / "a" / split, cat=3, dog=3)
    with caplog.at_level(logging.WARNING):
        load_files(tmp_path, task="image-classification", val_fraction=0)
    assert "6 test records are also in their client's training data" in caplog.text


def test_a_file_that_is_no_picture_is_refused_there(tmp_path: Path) -> None:
    (classes(tmp_path / "a", cat=1, dog=1) / "cat" / "scan.dcm").write_bytes(b"x")
    with pytest.raises(DataError, match=r"scan\.dcm is no picture that is read here"):
        load_files(tmp_path, task="image-classification")


def test_a_folder_among_the_pictures_of_a_class_is_refused_as_that(tmp_path: Path) -> None:
    classes(classes(tmp_path / "a", cat=1, dog=1) / "cat", series=1)
    with pytest.raises(DataError, match=r"cat/series is a folder; pictures have to lie in the folder of their class"):
        load_files(tmp_path, task="image-classification")


def test_pictures_beside_records_are_no_classes(tmp_path: Path) -> None:
    classes(tmp_path / "a", images=2)
    (tmp_path / "a" / "train.jsonl").write_text(
        '{"image": "images/0.png", "label": 0}\n{"image": "images/1.png", "label": 1}'
    )
    found = load_files(tmp_path, task="image-classification", **NONE)
    assert found.label_names == ("0", "1")


# Groups, repeats and gaps


def test_no_group_is_in_two_splits(tmp_path: Path) -> None:
    rows = [{**row, "patient": f"p{i // 3}"} for i, row in enumerate(notes(60))]
    path = table(tmp_path / "a.csv", rows)
    who = {row["text"]: row["patient"] for row in rows}
    (client,) = load_files({"a": path}, task=TEXT, columns={"group": "patient"}).clients
    parts = [{who[record["text"]] for record in part} for part in (client.train, client.val, client.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20
    assert client.sizes == {"train": 42, "val": 6, "test": 12}
    (plain,) = load_files({"a": path}, task=TEXT).clients  # which tears patients apart
    assert {who[record["text"]] for record in plain.train} & {who[record["text"]] for record in plain.test}


@pytest.mark.parametrize("columns", [{}, {"group": "patient"}])
def test_what_is_held_out_one_by_one_does_not_depend_on_other_records(columns: dict[str, str], tmp_path: Path) -> None:
    rows = [{**row, "patient": f"p{i // 3}"} for i, row in enumerate(notes(300))]

    def splits(rows: list[dict[str, Any]], one_by_one: bool) -> list[set[str]]:
        file = table(tmp_path / "a.csv", rows)
        (client,) = load_files({"a": file}, task=TEXT, columns=columns, one_by_one=one_by_one).clients
        return [{record["text"] for record in split} for split in (client.train, client.val, client.test)]

    whole = splits(rows, True)
    assert 30 < len(whole[2]) < 90 and 10 < len(whole[1]) < 50 and sum(map(len, whole)) == 300
    without = splits(rows[1:], True)
    assert sum(len(one ^ other) for one, other in zip(whole, without, strict=True)) == 1
    other_label = [{**rows[0], "label": rows[1]["label"]}, *rows[1:]]
    changed = splits(other_label, True)
    assert all(one ^ other <= {rows[0]["text"]} for one, other in zip(whole, changed, strict=True))
    kept, cut = splits(rows, False), splits(rows[1:], False)
    assert (
        columns or sum(len(one ^ other) for one, other in zip(kept, cut, strict=True)) > 10
    )  # what the test would miss


def test_a_record_with_a_field_that_others_lack_leaves_them_where_they_are(tmp_path: Path) -> None:
    rows = [{"instruction": f"copy {number}", "output": str(number)} for number in range(200)]

    def trained(rows: list[dict[str, Any]]) -> set[str]:
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (client,) = load_files({"a": tmp_path / "a.jsonl"}, task="causal-lm", one_by_one=True).clients
        return {record["instruction"] for record in client.train}

    more = [*rows, {"instruction": "add", "input": "1 and 2", "output": "3"}]
    assert trained(rows) ^ trained(more) <= {"add"}


def test_a_group_in_two_files_is_refused_and_one_group_cannot_be_divided(tmp_path: Path) -> None:
    for split, start in (("train", 0), ("test", 50)):
        table(tmp_path / "a" / f"{split}.csv", [{**row, "patient": "p1"} for row in notes(6, start=start)])
    with pytest.raises(DataError, match=r"client a: patient p1 has records in train and in test"):
        load_files(tmp_path, task=TEXT, columns={"group": "patient"})
    with pytest.raises(DataError, match=r"client a: all its 6 .*data\.columns\.group"):
        load_files({"a": tmp_path / "a" / "train.csv"}, task=TEXT, columns={"group": "patient"})


def test_groups_are_held_out_whole_and_at_least_one() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        out = held_out_groups("aaabbbccc", 4, rng)
        assert out in ([0, 1, 2], [3, 4, 5], [6, 7, 8])
        assert held_out_groups("aaaabb", 1, rng) == [4, 5]  # each alone is too much: the smallest
        patients = "a" * 12 + "b" * 11 + "c" * 12 + "d" * 11 + "e" * 12 + "f" * 3 + "g" * 2
        assert 10 <= len(held_out_groups(patients, 13, rng)) <= 17  # also where a small group is drawn first
        assert len(held_out_groups("ab", 2, rng)) == 1  # one is left to train on


def test_blanks_around_a_group_and_fractions_of_whole_numbers_do_not_divide_it(tmp_path: Path) -> None:
    rows = [{**row, "patient": f"p{index // 4}" + " " * (index % 2)} for index, row in enumerate(notes(24))]
    table(tmp_path / "a.csv", rows)
    (client,) = load_files({"a": tmp_path / "a.csv"}, task=TEXT, columns={"group": "patient"}).clients
    who = {row["text"]: row["patient"].strip() for row in rows}
    held = {who[record["text"]] for record in (*client.test, *client.val)}
    assert held and not held & {who[record["text"]] for record in client.train}
    numbered = [{**row, "patient": None if index == 5 else float(index // 4)} for index, row in enumerate(notes(24))]
    (tmp_path / "b.json").write_text(json.dumps(numbered))
    with pytest.raises(DataError, match="patient must be text or a whole number to serve as group, got null"):
        load_files({"b": tmp_path / "b.json"}, task=TEXT, columns={"group": "patient"})
    (client,) = load_files({"b": tmp_path / "b.json"}, task=TEXT, columns={"group": "patient"}, missing="drop").clients
    assert len(client.train) + len(client.val) + len(client.test) == 23


def test_a_client_without_any_whole_record_is_refused_and_not_left_empty(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", notes(12))
    table(tmp_path / "b.csv", [{**row, "label": " "} for row in notes(12)])
    with pytest.raises(DataError, match="client b: all its 12 records lack a value, so missing: drop leaves none"):
        load_files(tmp_path, task=TEXT, missing="drop")


def test_a_split_has_a_hash_of_its_own(tmp_path: Path) -> None:
    table(tmp_path / "a" / "train.csv", notes(30))
    table(tmp_path / "a" / "test.csv", notes(8, start=50))
    first, second = (load_files(tmp_path, task=TEXT, seed=seed).manifest["partition"] for seed in (0, 1))
    assert first["sha256"] != second["sha256"]  # other validation examples
    assert first["split_sha256"]["test"] == second["split_sha256"]["test"]
    assert first["split_sha256"]["val"] != second["split_sha256"]["val"]


def test_a_repeat_stays_where_it_is_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = notes(8)
    table(tmp_path / "a" / "train.csv", [*rows, rows[0], rows[1]])
    table(tmp_path / "a" / "test.csv", [rows[2], rows[2], *notes(2, start=90)])
    with caplog.at_level(logging.WARNING):
        (client,) = load_files(tmp_path, task=TEXT, drop_duplicates=True, val_fraction=0).clients
    assert "client a: 4 of 14 records repeat another of it and are left out" in caplog.text
    assert [record["text"] for record in client.test] == ["note 2", "note 90", "note 91"]
    assert [record["text"] for record in client.train] == [f"note {i}" for i in (0, 1, 3, 4, 5, 6, 7)]


def test_the_same_words_about_two_patients_are_two_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"text": "nothing found", "label": "well" if patient < "d" else "ill", "patient": patient}
        for patient in "abcdeeffff"
    ]
    table(tmp_path / "a.csv", rows)
    with caplog.at_level(logging.WARNING):
        how: dict[str, Any] = {"drop_duplicates": True, "val_fraction": 0, "test_fraction": 0.34}
        (client,) = load_files({"a": tmp_path / "a.csv"}, task=TEXT, columns={"group": "patient"}, **how).clients
    assert "client a: 4 of 10 records repeat another of it and are left out" in caplog.text
    assert "also in their client's training data" not in caplog.text
    assert sorted(record[GROUP] for record in (*client.train, *client.test)) == list("abcdef") and client.test


def test_records_with_gaps_are_refused_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*notes(10), {"text": "no label", "label": ""}, {"text": " ", "label": "flu"}]
    path = table(tmp_path / "a.csv", rows)
    with pytest.raises(DataError, match="label must be a class's name"):
        load_files({"a": path}, task=TEXT)
    with caplog.at_level(logging.WARNING):
        (client,) = load_files({"a": path}, task=TEXT, missing="drop", **NONE).clients
    assert [record["text"] for record in client.train] == [f"note {i}" for i in range(10)]
    assert "client a: 2 of 12 records lack a value and are left out" in caplog.text
    with pytest.raises(DataError, match=r"no label; .* text"):  # a wrong header is no gap
        load_files({"a": table(tmp_path / "b.csv", [{"text": "x"}])}, task=TEXT, missing="drop")


def test_the_reading_of_a_large_file_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "a.csv", notes(40))
    with caplog.at_level(logging.INFO, PROGRESS):
        load_files({"a": path}, task=TEXT)
        assert caplog.text == ""
        monkeypatch.setattr("befit.data.files.load._LARGE", 100)
        load_files({"a": path}, task=TEXT)
    assert "reading a, 542 B" in caplog.text


# What is probably a mistake


def warnings_of(caplog: pytest.LogCaptureFixture, clients: Any, **settings: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_files(clients, task=TEXT, **settings)
    return caplog.text


def test_labels_that_differ_by_case_or_blanks_are_doubted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": f"t{i}", "label": label} for i, label in enumerate(["flu", "Flu ", "cold"] * 9)]
    said = warnings_of(caplog, {"a": table(tmp_path / "a.csv", rows)})
    assert "the classes 'Flu ' and 'flu' differ by case or blanks only; if they are one, write them alike" in said
    with pytest.raises(DataError, match=r'label "Flu " is flu but for case or blanks: write it so in the file \(9 rec'):
        load_files({"a": tmp_path / "a.csv"}, task=TEXT, label_names=["cold", "flu"])
    assert "differ" not in warnings_of(caplog, {"a": table(tmp_path / "b.csv", notes(20))})


def test_labels_that_look_the_same_in_two_forms_of_unicode_are_doubted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where one site's files come from a Mac: shown by their code points, since both look the same."""
    whole, apart = "gr\u00fcn", "gru\u0308n"
    for name, green in (("a", whole), ("b", apart)):
        rows = [{"text": f"{name}{i}", "label": label} for i, label in enumerate([green, "rot"] * 9)]
        table(tmp_path / f"{name}.csv", rows)
    said = warnings_of(caplog, {"a": tmp_path / "a.csv", "b": tmp_path / "b.csv"})
    assert r"the classes 'gru\u0308n' and 'gr\xfcn' differ by how letters are encoded in Unicode only" in said
    refused = r"b\.csv, line 2: label .* is gr\u00fcn but for how its letters .*: 'gru\\u0308n' here, there 'gr\\xfcn'"
    with pytest.raises(DataError, match=refused):
        load_files({"b": tmp_path / "b.csv"}, task=TEXT, label_names=[whole, "rot"])


def test_the_same_file_at_two_clients_is_doubted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, copy = table(tmp_path / "a.csv", notes(40)), table(tmp_path / "copy.csv", notes(40))
    few, other = table(tmp_path / "few.csv", notes(60)), table(tmp_path / "c.csv", notes(60, start=58))  # 2 of 60
    for clients in ({"a": one, "b": one}, {"a": one, "b": copy}):
        assert "clients a and b have 40 records in common" in warnings_of(caplog, clients)
    assert "in common" not in warnings_of(caplog, {"a": few, "c": other})


def test_clients_pictures_are_the_same_where_their_bytes_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for client, seed in (("a", 0), ("b", 1)):
        for name in ("cat", "dog"):
            (tmp_path / client / name).mkdir(parents=True)
            for number in range(5):
                pixels = np.random.default_rng([seed, number]).random((4, 4))
                np.save(tmp_path / client / name / f"{number}.npy", pixels)
    two, one = {"a": tmp_path / "a", "b": tmp_path / "b"}, {"a": tmp_path / "a", "b": tmp_path / "a"}
    for clients, expected in ((two, False), (one, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_files(clients, task="image-classification")
        assert ("10 records in common" in caplog.text) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("text,label\nü,a\nx,b\nß,c\n".encode("latin-1"), "line 2: byte 0xfc is not UTF-8; save it as UTF-8"),
        ("text,label\nx,a\ny,b\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
    ],
)
def test_another_encoding_is_named(tmp_path: Path, data: bytes, expected: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(DataError, match=expected):
        read_rows(tmp_path / "a.csv", ["text", "label"])


# Repeats, gaps and groups


def test_pictures_are_repeats_where_their_bytes_are_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever their names: numbering begins anew in every split, and files of arrays are all of one size."""
    for split, first in (("train", 0), ("test", 100)):
        for name in ("x", "y"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(5):
                value = 7 if (split, name, number) in (("train", "x", 0), ("test", "x", 1)) else first + number
                np.save(
                    tmp_path / split / name / f"{number}.npy", np.full((4, 4), value + (name == "y") * 50, np.uint8)
                )
    clients = {"a": {"train": tmp_path / "train", "test": tmp_path / "test"}}
    plain = load_files(clients, task="image-classification", **{**NONE, "drop_duplicates": True})
    assert plain.clients[0].sizes == {"train": 9, "val": 0, "test": 10}
    assert "1 of 20 records repeat another" in caplog.text
    caplog.clear()
    load_files(clients, task="image-classification", **NONE)
    assert "1 test records are also in their client's training data" in caplog.text


def test_another_picture_under_the_same_name_is_other_data(tmp_path: Path) -> None:
    """A file that is overwritten keeps its name, and an array's also its size."""
    for number in range(20):
        path = tmp_path / "a" / ("cat", "dog")[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full((4, 4), number, np.uint8))
    before, again = (load_files(tmp_path, task="image-classification").manifest["partition"] for _ in range(2))
    assert again == before
    np.save(tmp_path / "a" / "cat" / "4.npy", np.full((4, 4), 200, np.uint8))
    after = load_files(tmp_path, task="image-classification").manifest["partition"]
    assert after["sha256"] != before["sha256"]


def test_a_patient_is_dealt_to_one_client(tmp_path: Path) -> None:
    rows = [{**row, "patient": f"p{number // 4}"} for number, row in enumerate(notes(60))]
    file = table(tmp_path / "all.csv", rows)
    dealt = load_files(
        file,
        task=TEXT,
        partition=PartitionSettings(clients=3),
        columns={"group": "patient"},
        val_fraction=0.0,
        test_fraction=0.2,
    )
    owners: dict[str, set[str]] = {}
    patient = {row["text"]: row["patient"] for row in rows}
    for client in dealt.clients:
        for record in (*client.train, *client.test):
            owners.setdefault(patient[record["text"]], set()).add(client.id)
    assert len(owners) == 15 and all(len(ids) == 1 for ids in owners.values())
    sizes = [sum(client.sizes.values()) for client in dealt.clients]
    assert sum(sizes) == 60 and max(sizes) - min(sizes) <= 4
    with pytest.raises(DataError, match=r"data\.partition\.alpha: .*data\.columns\.group"):
        load_files(file, task=TEXT, partition=PartitionSettings(clients=3, alpha=1.0), columns={"group": "patient"})


ANSWERS = {"prompt": "p", "chosen": "a", "rejected": "b"}


def turns(asked: str, answered: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("causal-lm", [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]),
        ("causal-lm", [{"text": "a b"}, {"text": ""}]),
        ("causal-lm", [{"messages": turns("q", "a")}, {"messages": turns("q", " ")}]),
        ("causal-lm", [{"messages": turns("q", "a")}, {"messages": []}]),
        (
            "preference",
            [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": None, "chosen": "c", "rejected": "d"}],
        ),
    ],
)
def test_gaps_in_other_forms_are_refused_or_left_out(task: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, [rows[0], rows[1], *[{**rows[0]} for _ in range(4)]])))
    with pytest.raises(DataError, match="line 2"):
        load_files({"a": file}, task=task, **NONE)
    assert load_files({"a": file}, task=task, **{**NONE, "missing": "drop"}).clients[0].sizes["train"] == 5


def test_a_blank_text_or_class_is_refused_by_its_line(tmp_path: Path) -> None:
    for row, column in (({"text": "  ", "label": "flu"}, "text"), ({"text": "cough", "label": " "}, "label")):
        file = table(tmp_path / f"{column}.csv", [*notes(8), row])
        with pytest.raises(DataError, match=rf"line 10: {column}"):
            load_files({"a": file}, task=TEXT, **NONE)


def test_numbers_of_classes_are_numbers_in_a_csv_file_too(tmp_path: Path) -> None:
    rows = [{"text": f"note {n}", "label": n % 2} for n in range(8)]
    named = load_files({"a": table(tmp_path / "a.csv", rows)}, task=TEXT, label_names=["benign", "malignant"], **NONE)
    assert [record["label"] for record in named.clients[0].train] == [0, 1] * 4


def test_classes_that_differ_by_how_a_number_is_written_are_doubted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [{"text": f"note {n}", "label": n % 2} for n in range(8)]
    gaps = [{"text": f"text {n}", "label": f"{n % 2}.0"} for n in range(8)]
    load_files({"a": table(tmp_path / "a.csv", whole), "b": table(tmp_path / "b.csv", gaps)}, task=TEXT, **NONE)
    assert "'0' and '0.0' differ by how a number is written only" in caplog.text


def test_a_column_in_another_form_of_unicode_is_told_apart(tmp_path: Path) -> None:
    whole, apart = "pr\u00fcfung", "pru\u0308fung"
    table(tmp_path / "a.csv", [{apart: f"note {i}", "label": "gb"[i % 2]} for i in range(18)])
    with pytest.raises(DataError, match="but for how its letters are encoded in Unicode") as caught:
        load_files({"a": tmp_path / "a.csv"}, task=TEXT, columns={"text": whole, "label": "label"})
    assert r"'pr\xfcfung' here, there 'pru\u0308fung'. Write it so in data.columns.text" in str(caught.value)


def test_a_second_text_is_there_in_all_splits_or_in_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Or a model would learn from pairs and be measured on first texts."""
    folder = tmp_path / "a"
    folder.mkdir()
    rows = [{"text": f"one {n}", "text_pair": f"two {n}", "label": n % 2} for n in range(12)]

    def write(split: str, rows: list[dict[str, Any]]) -> None:
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    write("train", rows)
    write("test", [{key: value for key, value in row.items() if key != "text_pair"} for row in rows])
    with pytest.raises(DataError, match=r"test\.jsonl, line 1: .*text_pair"):
        load_files({"a": folder}, task=TEXT)
    gap = [{**row, "text_pair": None} if n == 3 else row for n, row in enumerate(rows)]
    write("train", gap)
    write("test", rows)
    with pytest.raises(DataError, match="line 4: text_pair must be text"):
        load_files({"a": folder}, task=TEXT)
    (client,) = load_files({"a": folder}, task=TEXT, missing="drop", val_fraction=0.0).clients
    assert len(client.train) == 11 and len(client.test) == 12
    assert "1 of 24 records lack a value and are left out" in caplog.text


def test_rows_that_name_no_client_are_left_out_where_gaps_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": f"t {n}", "label": n % 2, "site": ["a", "b", " ", None][n % 4]} for n in range(80)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    divided = {"partition": PartitionSettings(by="site")}
    with pytest.raises(DataError, match="site must be text or a whole number to serve as client"):
        load_files(str(tmp_path / "all.jsonl"), task=TEXT, **divided)
    federation = load_files(str(tmp_path / "all.jsonl"), task=TEXT, missing="drop", **divided)
    assert [client.id for client in federation.clients] == ["a", "b"]
    assert sum(len(split) for client in federation.clients for split in (client.train, client.val, client.test)) == 40
    assert "40 of 80 records name no client in site and are left out" in caplog.text


def test_fewer_records_than_clients_are_told_by_the_key(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text(json.dumps({"text": "only", "label": 0}))
    told = r"data\.partition\.clients: 1 training record cannot be dealt to 2 clients"
    with pytest.raises(DataError, match=told):
        load_files(str(tmp_path / "all.jsonl"), task=TEXT, partition=PartitionSettings(clients=2))
