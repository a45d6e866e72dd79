"""The user's own questions about images: spellings, images, choices, and refusals that name the place."""

import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError
from befit.data.files.records import input_record
from befit.runs.inputs import read_inputs
from befit.tasks.vqa_records import choice_list
from tests.files import load_files

NONE = {"val_fraction": 0.0, "test_fraction": 0.0}


def png(grey=7):
    made = io.BytesIO()
    Image.new("L", (4, 4), grey).save(made, "PNG")
    return made.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("1.png", "2.png"):
        (tmp_path / "photos" / name).write_bytes(png())
    return tmp_path


def write(folder, *rows, name="a.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def read(path, **settings):
    (client,) = load_files({"a": path}, task="vqa", **{**NONE, **settings}).clients
    return client.train


def llava(question, answer, **more):
    talk = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": talk, **more}


def test_every_spelling_gives_the_same_record(folder):
    """LLaVA's, chat messages and ours; a path by itself, or a list of them."""
    chat = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "a"}]
    rows = [
        llava("<image>What?", "a", image="photos/1.png"),
        {"messages": chat, "images": ["photos/1.png"]},
        {"conversation": chat, "image": ["photos/1.png"]},
        {"question": "What?", "answer": "a", "image": "photos/1.png"},
        {"question": "<image>What?", "answer": "a", "images": ["photos/1.png"]},
    ]
    found = read(write(folder, *rows))
    assert found[0]["conversation"] == chat and found[0]["form"] == "open"
    assert found[0]["images"] == [str(folder / "photos" / "1.png")]
    assert all({**record, "id": ""} == {**found[0], "id": ""} for record in found[1:])


def test_parquet_holds_images_as_bytes(folder):
    rows = [
        llava(
            "<image><image>Same? Choice list:[yes, no]",
            "no",
            images=[{"bytes": png(1), "path": None}, {"bytes": png(2), "path": None}],
        )
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    (record,) = read(folder / "a.parquet")
    assert record["images"] == [png(1), png(2)] and record["choices"] == ["yes", "no"]


def test_text_alone_needs_no_image_and_what_else_a_row_says_is_kept(folder):
    row = llava("How many?", "two", task="count", metric="F1", source="web")
    (record,) = read(write(folder, row))
    talk = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "two"}]
    assert {key: record[key] for key in record if key != "id"} == {
        "images": [],
        "conversation": talk,
        "form": "open",
        "metric": "token_f1_pooled",
        "task": "count",
    }


def test_columns_may_have_other_names_and_must_be_there(folder):
    path = write(folder, {"pictures": "photos/1.png", "talk": llava("<image> a", "b")["conversations"], "nr": 5})
    columns = {"image": "pictures", "conversations": "talk", "id": "nr"}
    (record,) = read(path, columns=columns)
    assert record["id"] == "5" and len(record["images"]) == 1
    with pytest.raises(DataError, match=r"chatter; .* pictures, talk, nr"):
        read(path, columns={**columns, "conversations": "chatter"})
    with pytest.raises(ConfigError, match=r"data\.columns\.picture: vqa .* id, group, images"):
        read(path, columns={"picture": "pictures"})


@pytest.mark.parametrize(
    ("question", "gold", "expected"),
    [
        ("Is it? Choice list:[True, False].", "True", ("True", "False")),
        ("Is it? Choice lists: [a, b, c]", "b", ("a", "b", "c")),
        ("Choice List: [red, dark blue] Which?", "red", ("red", "dark blue")),
        ("Which one?\n[cat, dog]\nAnswer.", "dog", ("cat", "dog")),
        ("Which? A. a cat\nB. a dog\nC. none", "a dog", ("a cat", "a dog", "none")),
        ("Which?\nA. a cat\nB. a dog", "B", ("A", "B")),
        ("Which?\nred | green | blue", "green", ("red", "green", "blue")),
        ("Which?\nred | green | blue", "C", ("A", "B", "C")),
        ("See [1] for | it.", "it", None),
        ("Which?\nB. a dog\nC. none", "B", None),
        ("Choice list:[a, a]", "a", None),
        ("Is the lesion of [1] benign? Choice list:[yes, no] (see [1])", "no", ("yes", "no")),
        ("Choice list:[of [1], of [2]]", "of [1]", ("of [1]", "of [2]")),
        ("U.S.A. is where?\nA. north\nB. south", "north", ("north", "south")),
        ("U. of B.\nWhich?\nB. a dog\nC. none", "B", None),
        # As the scripts of COCOQA and AQUA, GQA and Abstract write a list of Python.
        ("Which? \n Choice list:['red', \"it's blue\"] \n Your answer is:", "it's blue", ("red", "it's blue")),
        ("<image>\n Question: q\n Choice lists: ['yes', 'no'].\n Your answer is:", "no", ("yes", "no")),
        ("Choice list:[['red', 'dark, blue']].\n Your answer is:", "dark, blue", ("red", "dark, blue")),
        # COMICS_Dialogue and WCVQA, and options that are pictures.
        ("Choice list:[A: HELLO| B: BYE, NOW| C: WHO]. Answer with the letter", "C", ("A", "B", "C")),
        ("What is it?\n1. rice\n2. soup\n3. roll\n\nPrint a single answer id (1,2,3).", "3", ("1", "2", "3")),
        ("What is it?\n1. rice\n2. soup", "soup", ("rice", "soup")),
        ("Which?\nA. <image>\nB. <image>\nC. <image>", "C", ("A", "B", "C")),
        ("How many of these?\n[cat, dog, bird]", "3", ("cat", "dog", "bird")),
        ("Choice list:[Image A: a cat, Image B: a dog]", "Image B", ("Image A", "Image B")),
        ("Choice list:[Image 1: a cat, Image 2: a dog]", "Image 1: a cat", ("Image 1: a cat", "Image 2: a dog")),
        ("Which is red? Image A: <image>, Image B: <image>", "Image B", ("Image A", "Image B")),
        ("Image A: <image>. What is it?", "Image A", None),
        ("What is it? Print only the answer with a single answer id (1,2,3,4,5).", "4", ("1", "2", "3", "4", "5")),
    ],
)
def test_the_answers_that_a_question_lists_are_found_in_every_spelling(question, gold, expected):
    assert choice_list(question, gold) == expected


def test_a_list_in_a_question_makes_choices_only_where_the_answer_is_among_them(folder):
    rows = [
        llava("Which? Choice list:[a, b]", "b"),
        llava("Describe [a, b].\n[a, b]", "a long text"),
        llava("Which?", "x", choices=["x", "y"]),
        llava("Choice list:[a, b]", "a", form="open"),
    ]
    found = read(write(folder, *rows))
    assert [(record["form"], record.get("choices")) for record in found] == [
        ("choice", ["a", "b"]),
        ("open", None),
        ("choice", ["x", "y"]),
        ("open", None),
    ]
    assert found[0]["conversation"][0]["content"] == "Which? Choice list:[a, b]"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (llava("<image>a", "b"), "has 1 marks <image> for 0 images"),
        (llava("<image>a", "b", image=["photos/1.png", "photos/2.png"]), "has 1 marks <image> for 2 images"),
        (llava("<image>a", "b", image="photos/3.png"), "photos/3.png. is no file in"),
        (llava("<image>a", "b", image="../1.png"), "without '..'"),
        (llava("<image>a", "b", image="/etc/hosts"), "must be a path below"),
        (llava("<image>a", "b", image=7), "must be a relative path"),
        (llava("a", "b", image=[], images=[]), "images or image or none; it has conversations, images, image"),
        ({"image": "photos/1.png"}, "needs one of conversation, conversations, messages and question"),
        ({"conversations": "a"}, "must be a list of turns, got .a"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "turn 1 of conversations is the assistant's"),
        ({"conversations": [{"from": "human", "value": "a"}] * 2}, "turn 2 of conversations is the user's"),
        ({"conversations": [{"from": "system", "value": "a"}]}, "got .*system"),
        ({"conversations": [{"from": "human", "value": " "}]}, "a turn must be"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "the last turn is a question without an answer"),
        (llava("a", "b", form="multi"), "form must be choice or open, got .multi"),
        (llava("a", "b", form="choice"), "form is choice, and neither choices nor the first question"),
        (llava("a", "b", choices=["c", "d"]), "the answer 'b' is not among its choices"),
        (llava("a", "b", choices="c"), "choices must be a list of texts, got .c"),
        (llava("a", "b", task=3), "task must be text, got 3"),
    ],
)
def test_a_mistake_names_client_file_line_and_value(folder, row, message):
    path = write(folder, llava("a", "b"), row)
    with pytest.raises(DataError, match=f"client a: .*a.jsonl, line 2: .*{message}"):
        read(path)


def test_several_mistakes_are_told_at_once(folder):
    path = write(folder, *[llava("<image>a", "b")] * 3)
    with pytest.raises(DataError) as caught:
        read(path)
    assert "(3 records: line 1, 2, 3)" in str(caught.value)


def test_held_out_records_are_of_every_task(folder):
    rows = [llava(f"question {n}", "b", task=task) for task in ("x", "y") for n in range(10)]
    (client,) = load_files({"a": write(folder, *rows)}, task="vqa").clients
    assert [len(client.train), len(client.val), len(client.test)] == [14, 2, 4]
    assert sorted(record["task"] for record in client.test) == ["x", "x", "y", "y"]


def test_a_picture_counts_by_its_bytes_and_the_fingerprint_shows_another(folder):
    (folder / "photos" / "2.png").write_bytes((folder / "photos" / "1.png").read_bytes() + b"\0")
    first = load_files({"a": write(folder, llava("<image>a", "b", image="photos/1.png"))}, task="vqa", **NONE)
    other = load_files({"a": write(folder, llava("<image>a", "b", image="photos/2.png"))}, task="vqa", **NONE)
    assert first.manifest["partition"]["sha256"] != other.manifest["partition"]["sha256"]
    assert (first.task, first.label_names) == ("vqa", ())


def test_labels_mean_nothing(folder):
    with pytest.raises(ConfigError, match=r"data\.label_names: vqa has no classes"):
        load_files({"a": write(folder, llava("a", "b"))}, task="vqa", label_names=["a", "b"])


def test_a_question_without_an_answer_is_refused_and_so_is_one_beside_a_conversation(folder):
    with pytest.raises(DataError, match="the last turn is a question without an answer"):
        read(write(folder, {"question": "What?", "image": "photos/1.png"}))
    with pytest.raises(DataError, match='question and answer must be texts, got "What\\?" and 3'):
        read(write(folder, {"question": "What?", "answer": 3}))
    with pytest.raises(
        DataError, match=r"messages and question \(with answer\), and images .* it has messages, question"
    ):
        read(write(folder, {"question": "a", "messages": [{"role": "user", "content": "a"}]}))


def test_a_picture_alone_is_no_question(folder):
    with pytest.raises(DataError, match=r"1.png is not a file type that vqa reads: .txt, .jsonl"):
        read_inputs([folder / "photos" / "1.png"], "vqa", {})


def test_inputs_to_predict_from_have_the_same_spellings():
    talk = llava("<image>a", "b")["conversations"]
    expected = {"images": ["x.png"], "conversation": [{"role": "user", "content": "<image>a"}]}
    assert input_record({"image": "x.png", "conversations": talk[:1]}, "vqa", {}, "here") == expected
    assert input_record({"p": "x.png", "conversations": talk[:1]}, "vqa", {"image": "p"}, "here") == expected
    assert input_record({"image": "x.png", "question": "a"}, "vqa", {}, "here")["images"] == ["x.png"]
    asked = input_record({"p": "x.png", "Frage": "a", "n": 3}, "vqa", {"image": "p", "question": "Frage"}, "here")
    assert (asked["question"], asked["images"], asked["n"]) == ("a", ["x.png"], 3)
    assert input_record("a", "vqa", {}, "here") == "a"
    with pytest.raises(DataError, match="here: must be a text, or an object with question or conversation"):
        input_record(5, "vqa", {}, "here")


@pytest.mark.parametrize("metrics", [["vqa_score", "token_f1_pooled"], ["choice_per_token"], ["rougeL"]])
def test_metrics_of_questions_about_images_are_known_for_them_and_their_own_for_nothing_else(metrics):
    given = {"benchmark": {"name": "digits-vqa"}, "method": "fedit", "evaluate": {"metrics": metrics}}
    assert load_experiment(given).evaluate.metrics == metrics
    if metrics[0] == "vqa_score":
        with pytest.raises(ConfigError, match=r"evaluate\.metrics: 'vqa_score' is not one of"):
            load_experiment({**given, "benchmark": {"name": "skills"}})
