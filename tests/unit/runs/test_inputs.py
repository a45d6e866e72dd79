"""Inputs to predict from: what a file or folder holds, what is refused, and a run that answers them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from typer.testing import CliRunner

from befit.cli.adapter import _flat, _input_text
from befit.cli.main import app
from befit.core.errors import DataError, RunError
from befit.core.metrics import CLASS_METRICS
from befit.runs.artifacts import predict
from befit.runs.exporting import ExportForm, export, export_all
from befit.runs.inputs import read_inputs
from befit.runs.measuring import measure
from befit.runs.runner import Run
from tests.unit.runs.trained import ROWS, classifier

TEXT, COLUMNS = "text-classification", {"text": "review"}


def write_all(folder: Path) -> list[Path]:
    """The same records in every form."""
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "a.csv").write_text("stars,review\ngood,very good book\nbad,bad film\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
    (folder / "a.txt").write_text("very good book\n\nbad film\n", encoding="utf-8-sig")  # as Notepad may save it
    return [folder / f"a.{ending}" for ending in ("jsonl", "csv", "parquet", "txt")]


def test_every_form_of_a_file_gives_its_texts_with_their_places(tmp_path: Path) -> None:
    for path in write_all(tmp_path):
        read = read_inputs([path], TEXT, COLUMNS)
        assert [value if isinstance(value, str) else value["review"] for value, _ in read] == [
            "very good book",
            "bad film",
        ]
        assert all(str(path) in place for _, place in read)
    assert [place for _, place in read_inputs([tmp_path / "a.txt"], TEXT, {})] == [
        f"{tmp_path / 'a.txt'}, line 1",
        f"{tmp_path / 'a.txt'}, line 3",
    ]


@pytest.mark.parametrize("name", ["letter.docx", "table.xlsx", "noending", "digit.png"])
@pytest.mark.parametrize("task", [TEXT, "causal-lm", "vqa"])
def test_a_file_of_another_kind_is_never_a_text(tmp_path: Path, name: str, task: str) -> None:
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(DataError, match=f"{name} is not a file type that {task} reads"):
        read_inputs([tmp_path / name], task, {})
    with pytest.raises(DataError, match=r"is a file, and no text: give it as pathlib\.Path"):
        read_inputs([str(tmp_path / name)], task, {})


@pytest.mark.parametrize("content", [None, "", "{broken\n", '"a text alone"\n'])
def test_a_file_of_inputs_that_cannot_be_used_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "inputs.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"inputs\.jsonl"):
        read_inputs([tmp_path / "inputs.jsonl"], TEXT, {})


def test_a_picture_that_is_not_there_is_named_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"there is no file scan.png .looked from {tmp_path}."):
        read_inputs(["scan.png"], "image-classification", {})


def test_pictures_come_alone_by_the_folder_or_beside_their_records(tmp_path: Path) -> None:
    for name in ("b.png", "sub/a.png"):
        (tmp_path / "seen" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "seen" / name)
    paths = [str(tmp_path / "seen" / name) for name in ("b.png", "sub/a.png")]
    task = "image-classification"
    assert [value for value, _ in read_inputs([tmp_path / "seen"], task, {})] == paths
    assert read_inputs([Path(paths[0]), paths[1]], task, {}) == [(paths[0], paths[0]), (paths[1], "input 2")]
    (tmp_path / "seen" / "Thumbs.db").write_text("")
    assert [value for value, _ in read_inputs([tmp_path / "seen"], task, {})] == paths
    (tmp_path / "seen" / "rows.csv").write_text("photo,label\nb.png,3\n")
    ((record, _),) = read_inputs([tmp_path / "seen" / "rows.csv"], task, {"image": "photo"})
    assert record["photo"] == paths[0]
    with pytest.raises(DataError, match=r"rows\.csv is no picture"):
        read_inputs([tmp_path / "seen"], task, {})
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "none"))):
        read_inputs([tmp_path / "none"], task, {})
    (tmp_path / "q.jsonl").write_text('{"images": ["seen/b.png"], "question": "What?"}\n')
    ((record, _),) = read_inputs([tmp_path / "q.jsonl"], "vqa", {})
    assert record["images"] == paths[:1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return classifier(tmp_path_factory.mktemp("trained"))


def test_all_forms_are_answered_alike(trained: Run, tmp_path: Path) -> None:
    expected = predict(trained.path, "a", [row["review"] for row in ROWS])
    for path in write_all(tmp_path):
        assert predict(trained.path, "a", [path]) == expected


def test_an_input_without_a_value_is_refused_with_its_place(trained: Run, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("review\ngood\n \n")
    with pytest.raises(DataError, match=r"new\.csv, line 3: review is empty"):
        predict(trained.path, "a", [tmp_path / "new.csv"])


def test_what_a_conversation_asks_last_stands_for_it() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    assert _input_text({"messages": [*turns, {"role": "user", "content": "Where?"}]}) == "Where?"
    assert _input_text({"messages": turns[:1]}).startswith("[{'role'")


def test_a_conversation_is_json_in_a_table() -> None:
    row = {"place": "a, line 1", "input": {"messages": [{"role": "user", "content": "Wo?"}]}, "answer": "hier"}
    flat = _flat(row)
    assert list(flat) == ["place", "input messages", "answer"]
    assert json.loads(flat["input messages"]) == row["input"]["messages"]
    assert _flat({"place": "input 1", "input": "x", "answer": "y"}) == {"place": "input 1", "input": "x", "answer": "y"}


def test_a_folder_that_is_no_run_is_not_called_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory: it has no run\.json"):
        export_all(tmp_path, tmp_path / "out", ExportForm())
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"frist is not there; name one of those in .*runs: first$"):
        export_all(tmp_path / "runs" / "frist", tmp_path / "out", ExportForm())


def test_a_baseline_answers_by_its_own_adapter(trained: Run) -> None:
    texts = [row["review"] for row in ROWS]
    own, named, alone = (predict(trained.path, "b", texts, method) for method in (None, "fedit", "local"))
    assert own == named != alone
    folder = trained.path / "baselines" / "local" / "clients" / "b"
    with pytest.raises(RunError, match=r"trained no 'locl'; it has fedit, local\. Did you mean: local\?"):
        predict(trained.path, "b", texts, "locl")
    with pytest.raises(RunError, match=r"no run\.json; name the run .*, with --method local"):
        export(trained.path / "baselines" / "local", "b", folder)


def test_answers_are_written_as_lines_and_as_a_table(trained: Run, tmp_path: Path) -> None:
    given, lines, table = write_all(tmp_path)[1], tmp_path / "out.jsonl", tmp_path / "out.csv"

    def call(*words: str | Path) -> str:
        done = CliRunner().invoke(app, ["predict", str(trained.path), "--client", "a", *map(str, words)])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    printed = json.loads(call(given, "--json", "--out", lines))
    assert [json.loads(line) for line in lines.read_text().splitlines()] == printed
    assert printed[0]["input"]["review"] == "very good book" and printed[1]["place"] == f"{given}, line 3"
    assert "wrote 2 answers" in call(given, "--out", table)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["answer"] for row in rows] == [row["answer"] for row in printed]
    assert float(rows[0]["p(good)"]) == pytest.approx(printed[0]["probabilities"]["good"])
    refused = CliRunner().invoke(app, ["predict", str(trained.path), "--client", "a", "x", "--out", "x.xlsx"])
    assert refused.exit_code == 2 and "--out x.xlsx: " in refused.stderr
    (tmp_path / "asked.csv").write_text("review\ngood\n")
    asked, other = str(tmp_path / "asked.csv"), str(tmp_path / "." / "asked.csv")
    refused = CliRunner().invoke(app, ["predict", str(trained.path), "--client", "a", asked, "--out", other])
    assert refused.exit_code == 2 and "would be replaced by the answers" in refused.stderr
    assert Path(asked).read_text() == "review\ngood\n"
    missing = CliRunner().invoke(app, ["predict", str(trained.path), "--client", "a", "south.csv"])
    assert missing.exit_code == 2 and "there is no file south.csv" in missing.stderr


def test_columns_that_no_model_reads_stay_beside_the_answers(trained: Run, tmp_path: Path) -> None:
    """An id, by which an answer is found again; what was asked is what a terminal shows."""
    (tmp_path / "ids.csv").write_text("number;review;place\n0017;very good book;Ulm\n0018;bad film;\n")
    (tmp_path / "ids.jsonl").write_text('{"number": 17, "review": "very good book", "place": null}\n')

    def call(*words: str | Path) -> str:
        done = CliRunner().invoke(app, ["predict", str(trained.path), "--client", "a", *map(str, words)])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    assert "very good book" in call(tmp_path / "ids.csv") and "0017" not in call(tmp_path / "ids.csv")
    call(tmp_path / "ids.csv", "--out", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(row["input number"], row["input place"]) for row in rows] == [("0017", "Ulm"), ("0018", "")]
    (printed,) = json.loads(call(tmp_path / "ids.jsonl", "--json"))
    assert printed["input"] == {"review": "very good book", "number": 17, "place": None}


def test_a_file_with_answers_measures_a_clients_model(trained: Run, tmp_path: Path) -> None:
    """Its accuracy is that of what predict says of the same rows, one of which has the other label."""
    rows = [*ROWS, {"review": "bad film", "stars": "good"}]
    (tmp_path / "later.csv").write_text("review,stars\n" + "".join(f"{row['review']},{row['stars']}\n" for row in rows))
    said = predict(trained.path, "a", [row["review"] for row in rows])
    right = [answer["answer"] == row["stars"] for answer, row in zip(said, rows, strict=True)]
    found = measure(trained.path, "a", [tmp_path / "later.csv"])
    assert found["examples"] == 3 and found["majority"] == pytest.approx(2 / 3)
    assert found["scores"]["accuracy"] == pytest.approx(sum(right) / 3)
    assert list(found["scores"]) == [*CLASS_METRICS, "loss"]
    shown = CliRunner().invoke(app, ["eval", str(trained.path), "--client", "a", str(tmp_path / "later.csv")])
    assert shown.exit_code == 0 and "accuracy of the most frequent class" in shown.stdout and "66.7%" in shown.stdout
    for words, told in (([], "a FILE of records"), (["x.csv", "--limit", "2"], "--limit and --include")):
        refused = CliRunner().invoke(app, ["eval", str(trained.path), "--client", "a", *words])
        assert refused.exit_code == 2 and told in refused.stderr
    (tmp_path / "later.csv").write_text("review,stars\ngood,Good\n")
    with pytest.raises(DataError, match=r"^\S*later\.csv, line 2: label \"Good\" is good but for case"):
        measure(trained.path, "a", [tmp_path / "later.csv"])
    (tmp_path / "later.csv").write_text("review,stars\n,good\n")
    with pytest.raises(DataError, match=r"^\S*later\.csv, line 2: "):  # and not of a client of the file's name
        measure(trained.path, "a", [tmp_path / "later.csv"])


@pytest.mark.parametrize(
    "row", [{"messages": [{"role": "user", "content": "hello"}]}, {"prompt": "a", "completion": "b"}]
)
def test_tables_of_every_form_that_is_trained_on_are_read(row: dict[str, object], tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    ((value, _),) = read_inputs([tmp_path / "a.parquet"], "causal-lm", {})
    assert value == row


def test_one_text_is_no_list_of_inputs() -> None:
    with pytest.raises(DataError, match="'a cough'"):
        read_inputs("a cough", TEXT, {})
