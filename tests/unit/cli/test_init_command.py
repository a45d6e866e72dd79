"""`befit init`: what it makes of a folder, and that `befit check` takes what it writes."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from typer.testing import CliRunner

from befit.cli.main import app
from befit.config.load import load_experiment
from befit.core.errors import DataError
from befit.core.yamlfile import read_yaml
from befit.data.files.survey import survey
from befit.runs.loading import load_federation
from befit.runs.runner import check


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def notes(count: int, text: str, label: str, **more: Any) -> list[dict[str, Any]]:
    return [{text: f"the patient number {i} has it", label: ("flu", "cold")[i % 2], **more} for i in range(count)]


def table(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def sites_with_headers_of_their_own(folder: Path) -> None:
    table(folder / "Köln, Haus 3.csv", notes(30, "befund", "klasse_label", sex="m"))
    table(folder / "lyon.csv", [{**row, "patient_id": i // 2} for i, row in enumerate(notes(40, "note", "diagnosis"))])
    (folder / "codes.xlsx").write_bytes(b"x")


def one_table(folder: Path) -> None:
    rows = [{**row, "hospital": f"h{i % 3}"} for i, row in enumerate(notes(90, "report", "category"))]
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "all.parquet")


def folders_of_pictures(folder: Path) -> None:
    for place in ("left/cat", "left/dog", "right/train/cat", "right/train/dog", "right/test/cat"):
        for number in range(10):
            (folder / place).mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), number).save(folder / place / f"{number}.png")


def questions(folder: Path) -> None:
    folder.mkdir()
    for client in ("a", "no"):
        rows = [{"question": f"what is {client}{i}?", "answer": f"{i}", "topic": "x"} for i in range(20)]
        (folder / f"{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def preferences(folder: Path) -> None:
    folder.mkdir()
    for client in ("a", "b"):
        rows = [{"prompt": f"{client}{i}?", "chosen": "yes", "rejected": "no", "score": i} for i in range(20)]
        (folder / f"{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def preferences_of_a_question(folder: Path) -> None:
    """As Intel/orca_dpo_pairs has them; both answers begin alike, and that is not what was asked."""
    folder.mkdir()
    for client in ("a", "b"):
        rows = [
            {
                "system": "",
                "question": f"{client}{i}?",
                "chosen": f"The answer is {i}.",
                "rejected": "The answer is no.",
            }
            for i in range(20)
        ]
        (folder / f"{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pairs_of_texts(folder: Path) -> None:
    rows = notes(30, "premise", "label")
    table(folder / "a.csv", [{**row, "hypothesis": f"so: {i}"} for i, row in enumerate(rows)])
    table(folder / "b.csv", [{**row, "hypothesis": f"thus: {i}"} for i, row in enumerate(rows)])


def gaps_and_repeats(folder: Path) -> None:
    rows = notes(30, "text", "label")
    table(folder / "a.csv", [*rows, rows[0], {"text": "no label", "label": ""}])
    table(folder / "b.csv", [{**row, "text": f"b: {row['text']}"} for row in rows])


def pictures_with_questions(folder: Path) -> None:
    """As LLaVA's data has them; one conversation is without a picture, and one picture is asked about twice."""
    for client in ("a", "b"):
        (folder / client).mkdir(parents=True)
        for at in range(20):
            Image.new("L", (8, 8), 10 * at).save(folder / client / f"{at}.png")
        rows = [asked(f"{at % 2}", image=f"{client}/{at}.png", task="parity") for at in range(20)]
        rows += [asked("none"), asked("1", image=f"{client}/0.png")]
        (folder / f"{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def asked(answer: str, **others: Any) -> dict[str, Any]:
    question = "<image>\nodd?" if "image" in others else "odd?"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **others}


@pytest.mark.parametrize(
    ("make", "task", "columns", "expected"),
    [
        (pictures_with_questions, "vqa", None, {"a": "data/a.jsonl", "b": "data/b.jsonl"}),
        (
            sites_with_headers_of_their_own,
            "text-classification",
            None,
            {
                "Köln, Haus 3": {
                    "train": "data/Köln, Haus 3.csv",
                    "columns": {"text": "befund", "label": "klasse_label"},
                },
                "lyon": {
                    "train": "data/lyon.csv",
                    "columns": {"group": "patient_id", "text": "note", "label": "diagnosis"},
                },
            },
        ),
        (one_table, "text-classification", {"text": "report", "label": "category"}, "data/all.parquet"),
        (folders_of_pictures, "image-classification", None, {"left": "data/left", "right": "data/right"}),
        (
            questions,
            "causal-lm",
            {"instruction": "question", "output": "answer"},
            {"a": "data/a.jsonl", "no": "data/no.jsonl"},
        ),
        (preferences, "preference", None, {"a": "data/a.jsonl", "b": "data/b.jsonl"}),
        (
            preferences_of_a_question,
            "preference",
            {"prompt": "question"},
            {"a": "data/a.jsonl", "b": "data/b.jsonl"},
        ),
        (
            pairs_of_texts,
            "text-classification",
            {"text": "premise", "text_pair": "hypothesis"},
            {"a": "data/a.csv", "b": "data/b.csv"},
        ),
        (gaps_and_repeats, "text-classification", None, {"a": "data/a.csv", "b": "data/b.csv"}),
    ],
)
def test_what_it_writes_is_what_check_takes(tmp_path: Path, make: Any, task: str, columns: Any, expected: Any) -> None:
    make(tmp_path / "data")
    out = tmp_path / "mine.yaml"
    done = call("init", tmp_path / "data", "--out", out)
    assert done.exit_code == 0, done.stderr
    data = read_yaml(out)["data"]
    assert (data["task"], data.get("columns"), data["clients"]) == (task, columns, expected)
    assert (data.get("partition") is not None) == (make is one_table)
    assert data.get("missing") == ("drop" if make is gaps_and_repeats else None)
    assert "drop_duplicates" not in data  # which may be data, so that it is for the user to say
    assert ("# drop_duplicates: true # here" in out.read_text()) == (make is gaps_and_repeats)
    assert check(out)["clients"] == (3 if make is one_table else 2)
    assert load_experiment(out).name == "mine"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"entry": "seen today with {i} of them", "comment": "ok"}, "entry"),  # the name of the other is on our list
        ({"entry": "seen today with {i} of them", "place": "/home/someone/a/very/long/path/to/{i}/file"}, "entry"),
        ({"text": "case {i} is well", "entry": "a much longer free text, that of {i} others"}, "text"),
        ({"comment": "{i}-x", "source": "record-{i}-of-many"}, "comment"),  # no free text, so by its name
    ],
)
def test_the_text_beside_a_label_is_the_longest_free_text(tmp_path: Path, columns: Any, expected: str) -> None:
    for client in ("a", "b"):
        rows = [
            {**{name: text.format(i=i) for name, text in columns.items()}, "label": ("flu", "cold")[i % 2]}
            for i in range(20)
        ]
        table(tmp_path / f"{client}.csv", rows)
    found = survey(tmp_path)
    assert found.task == "text-classification"
    assert {fields.get("text", "text") for fields in found.columns.values()} == {expected}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("prompt", "completion"), {}),
        (("prompt", "response"), {"completion": "response"}),
        (("Prompt", "Answer"), {"prompt": "Prompt", "completion": "Answer"}),
        (("input", "output"), {"instruction": "input"}),
        (("prompt", "context", "answer"), {"instruction": "prompt", "input": "context", "output": "answer"}),
    ],
)
def test_what_is_asked_and_answered_is_found_by_its_usual_names(tmp_path: Path, names: Any, expected: Any) -> None:
    (tmp_path / "data").mkdir()
    for client in ("a", "b"):
        rows = [{name: f"{name} {i} of {client}, in some words" for name in names} for i in range(12)]
        table(tmp_path / "data" / f"{client}.csv", rows)
    assert call("init", tmp_path / "data", "--out", tmp_path / "my.yaml").exit_code == 0
    data = read_yaml(tmp_path / "my.yaml")["data"]
    assert (data["task"], data.get("columns", {})) == ("causal-lm", expected)
    assert check(tmp_path / "my.yaml")["clients"] == 2


@pytest.mark.parametrize(("column", "expected"), [("messages", None), ("dialogue", {"messages": "dialogue"})])
def test_chat_keeps_its_columns(tmp_path: Path, column: str, expected: Any) -> None:
    for client in ("a", "b"):
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": client}]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{client}.jsonl").write_text((json.dumps({column: said}) + "\n") * 9)
    assert call("init", tmp_path / "data", "--out", tmp_path / "my.yaml", "--model", "owner/chat").exit_code == 0
    values = read_yaml(tmp_path / "my.yaml")
    assert values["data"]["task"] == "causal-lm" and values["data"].get("columns") == expected
    assert values["model"] == {"id": "owner/chat", "max_length": 512}


def test_texts_are_no_longer_than_a_model_in_a_folder_has_positions_for(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for client in ("a", "b"):
        table(tmp_path / "data" / f"{client}.csv", notes(20, "text", "label"))
    (tmp_path / "mine").mkdir()
    for config, expected in (({"max_position_embeddings": 40}, 40), ({"text_config": {}}, 128), ([], 128)):
        (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
        done = call("init", tmp_path / "data", "--out", tmp_path / "my.yaml", "--model", tmp_path / "mine", "--force")
        assert done.exit_code == 0
        assert read_yaml(tmp_path / "my.yaml")["model"] == {"id": "./mine", "max_length": expected}


def test_classes_that_differ_by_case_are_told_when_the_file_is_written(tmp_path: Path) -> None:
    rows = notes(20, "text", "label")
    table(tmp_path / "data" / "a.csv", rows)
    table(tmp_path / "data" / "b.csv", [{**row, "label": row["label"].upper()} for row in rows])
    done = call("init", tmp_path / "data", "--out", tmp_path / "my.yaml")
    assert done.exit_code == 0 and "warning: the classes 'FLU' and 'flu' differ by case or blanks only" in done.stderr
    assert "# the classes 'FLU' and 'flu' differ" in (tmp_path / "my.yaml").read_text()


def test_a_file_is_written_over_only_by_force(tmp_path: Path) -> None:
    gaps_and_repeats(tmp_path / "data")
    out = tmp_path / "my.yaml"
    out.write_text("mine")
    done = call("init", tmp_path / "data", "--out", out)
    assert done.exit_code == 2 and "--force" in done.stderr and out.read_text() == "mine"
    assert call("init", tmp_path / "data", "--out", out, "--force").exit_code == 0 and "data:" in out.read_text()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.pdf": "", "b.pdf": "", "c.xlsx": ""}, "has 2 .pdf, 1 .xlsx; befit init expects a file"),
        ({}, "has nothing; befit init expects"),
        ({"1.png": "", "2.png": ""}, "has 2 .png (pictures without classes); befit init"),
        ({"a.csv": "n\n1\n2\n", "b.csv": "n\n1\n2\n"}, "no column looks like a text"),
    ],
)
def test_a_folder_that_it_does_not_understand_is_described(tmp_path: Path, files: Any, expected: str) -> None:
    (tmp_path / "data").mkdir()
    for name, text in files.items():
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text(text)
    done = call("init", tmp_path / "data", "--out", tmp_path / "my.yaml")
    assert done.exit_code == 2 and expected in done.stderr and not (tmp_path / "my.yaml").exists()


def test_one_table_without_clients_is_divided_for_a_simulation(tmp_path: Path) -> None:
    """Numbers that have become fractions where a value lacks, and yes or no, are classes as well."""
    rows = [{"text": f"some words {i}", "label": float(i % 3)} for i in range(80)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([*rows, {"text": "x", "label": None}]), tmp_path / "a.parquet"
    )
    out = tmp_path / "my.yaml"
    done = call("init", tmp_path / "a.parquet", "--out", out)
    assert done.exit_code == 0
    said = "4 clients (simulated: records are dealt out at random), 80 records, text-classification"
    assert said in " ".join(done.stdout.split())
    data = read_yaml(out)["data"]
    assert (data["partition"], data["label_names"], data["missing"]) == ({"clients": 4}, ["0", "1", "2"], "drop")
    federation = load_federation(load_experiment(out))
    assert sum(len(client.train) + len(client.val) + len(client.test) for client in federation.clients) == 80


@pytest.mark.parametrize(
    ("column", "partition", "told"),
    [
        ("Shop", {"by": "Shop"}, "# the column that says whose a record is"),
        ("Filiale", {"by": "Filiale"}, "# the column that says whose a record is"),
        ("Laden", {"clients": 4}, "# where one does, partition: {by: Laden}. "),
    ],
)
def test_a_column_that_may_be_the_client_is_taken_by_its_name_and_told_by_its_values(
    tmp_path: Path, column: str, partition: Any, told: str
) -> None:
    rows = [{**row, column: f"s{i % 4}", "ticket": f"t{i}"} for i, row in enumerate(notes(80, "message", "category"))]
    table(tmp_path / "all.csv", rows)
    out = tmp_path / "my.yaml"
    done = call("init", tmp_path / "all.csv", "--out", out)
    assert done.exit_code == 0
    guessed = " ".join(done.stderr.split()).count("no column's name says whose a record is; where one does: partition:")
    assert guessed == ("clients" in partition)
    assert read_yaml(out)["data"]["partition"] == partition and told in out.read_text()
    assert len(load_federation(load_experiment(out)).clients) == 4


def test_a_client_with_one_class_is_judged_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for client, labels in (("a", ["yes", "yes"]), ("b", ["yes", "no"])):
        lines = [f"some {client} words {i},{labels[i % 2]}" for i in range(20)]
        (tmp_path / "data" / f"{client}.csv").write_text("\n".join(["text,label", *lines]))
    done = call("init", tmp_path / "data", "--out", tmp_path / "my.yaml")
    assert "text-classification" in done.stdout and read_yaml(tmp_path / "my.yaml")["data"]["label_names"] == [
        "no",
        "yes",
    ]


def test_labels_of_a_site_whose_text_is_not_found_are_no_repeats(tmp_path: Path) -> None:
    for client, text in (("a", "text"), ("b", "text"), ("c", "txet")):
        table(tmp_path / "data" / f"{client}.csv", [{text: f"{i}.5", "label": "xyz"[i % 3]} for i in range(30)])
    assert call("init", tmp_path / "data", "--out", tmp_path / "my.yaml").exit_code == 0
    written = read_yaml(tmp_path / "my.yaml")["data"]
    assert "columns" not in written and "drop_duplicates" not in (tmp_path / "my.yaml").read_text()
    with pytest.raises(DataError, match=r"c: .*has no column 'text'|client c"):
        check(load_experiment(tmp_path / "my.yaml"))


def test_conversations_in_any_script_pass_the_check_with_the_model_that_ships(tmp_path: Path) -> None:
    for client in ("Köln", "東京"):
        asked = [{"role": "user", "content": f"Größe, {client}?"}]
        rows = [{"messages": [*asked, {"role": "assistant", "content": f"{at} m – 大"}]} for at in range(20)]
        path = tmp_path / "data" / f"{client}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert call("init", tmp_path / "data", "--out", tmp_path / "my.yaml").exit_code == 0
    assert check(tmp_path / "my.yaml")["clients"] == 2


def test_two_files_of_one_client_are_named_and_none_is_left_out_in_silence(tmp_path: Path) -> None:
    for name in ("north.csv", "south.csv"):
        table(tmp_path / name, notes(20, "text", "label"))
    (tmp_path / "north.jsonl").write_text("\n".join(map(json.dumps, notes(20, "text", "label"))))
    with pytest.raises(DataError, match=r"has north\.csv and north\.jsonl, so there would be two clients north"):
        survey(tmp_path)


def test_a_blank_label_is_no_class_and_a_group_with_gaps_is_taken(tmp_path: Path) -> None:
    """As Parquet has whole numbers where some are missing: with a fraction."""
    for site in ("north", "south"):
        rows = [{**row, "patient_id": float(at // 4)} for at, row in enumerate(notes(40, "text", "label"))]
        rows[3]["label"], rows[5]["patient_id"] = "  ", None
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{site}.parquet")
    assert "  " not in survey(tmp_path).labels
    config = tmp_path / "out.yaml"
    done = call("init", tmp_path, "--out", config)
    assert done.exit_code == 0, done.output
    values = read_yaml(config)
    assert "  " not in (values["data"].get("label_names") or ()) and "patient_id" in str(values["data"]["columns"])
    assert check(load_experiment(config))["clients"] == 2


def test_a_group_that_one_client_lacks_is_asked_of_the_others_alone(tmp_path: Path) -> None:
    for site in ("north", "south", "west"):
        rows = [
            {**row, **({} if site == "west" else {"patient": f"p{at // 4}"})}
            for at, row in enumerate(notes(40, "text", "label"))
        ]
        (tmp_path / f"{site}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = tmp_path / "out.yaml"
    done = call("init", tmp_path, "--out", config)
    assert done.exit_code == 0, done.output
    clients = read_yaml(config)["data"]["clients"]
    assert "columns" not in clients["west"] and clients["north"]["columns"]["group"] == "patient"
    assert check(load_experiment(config))["clients"] == 3


def test_a_client_that_check_would_refuse_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    rows = "\n".join(map(json.dumps, notes(20, "text", "label")))
    for name in ("north", "a\u202e"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    done = call("init", tmp_path, "--out", tmp_path / "out.yaml")
    assert done.exit_code == 2 and "is no client's id" in done.stderr and "Rename" in done.stderr
    (tmp_path / "a\u202e.jsonl").unlink()
    (tmp_path / "south" / "test").mkdir(parents=True)
    for place in ("south/train.jsonl", "south/test/0000.jsonl"):
        (tmp_path / place).write_text(rows)
    done = call("init", tmp_path, "--out", tmp_path / "out.yaml")
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and "is named like a split and cannot be read as one" in told
    assert not (tmp_path / "out.yaml").exists()


def test_questions_about_pictures_are_recognised_also_in_german(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    made = io.BytesIO()
    Image.new("L", (4, 4), 9).save(made, "PNG")
    for client, names in (("nord", ("bild", "Frage", "Antwort")), ("south", ("image", "question", "answer"))):
        (tmp_path / "data" / f"{client}.png").write_bytes(made.getvalue())
        row = dict(zip(names, (f"{client}.png", "Wie viele?", "drei"), strict=True))
        lines = [json.dumps({**row, "id": number}) for number in range(20)]
        (tmp_path / "data" / f"{client}.jsonl").write_text("\n".join(lines))
    done = call("init", tmp_path / "data", "--out", tmp_path / "my.yaml")
    assert done.exit_code == 0 and "2 clients, 40 records, vqa" in done.stdout and "left out" not in done.stderr
    federation = load_federation(load_experiment(tmp_path / "my.yaml"))
    assert [client.id for client in federation.clients] == ["nord", "south"]
    for client in federation.clients:
        (first, *_) = client.train
        assert [turn["content"] for turn in first["conversation"]] == ["<image>Wie viele?", "drei"]
