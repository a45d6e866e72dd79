"""DRAKE, HFLB, Fed-Aya, Fed-Scope and Fed-LLM-Large from files in FedMosaic's layout, made here."""

import json

import pytest

from befit.core.errors import ConfigError, DataError
from befit.core.storage import read_json
from befit.data.papers.scenarios import DRAKE, DRAKE_NEWCOMERS, HFLB, ClientTask
from befit.data.registry import build
from tests.unit.data.papers.paper_data import (
    AYA_TOPICS,
    DRAKE_PARTS,
    HFLB_PARTS,
    LARGE_TASKS,
    text_rows,
    vqa_rows,
    write_json,
    write_parts,
    write_public_texts,
    write_public_vqa,
    write_scope,
    write_texts,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vqa")
    write_parts(folder, [*DRAKE_PARTS, *HFLB_PARTS])
    return folder


def test_drake_has_40_different_tasks_and_seven_that_no_client_has():
    names = [part.name for one in DRAKE for part in one.parts]
    assert len(names) == len(set(names)) == 40 and len(DRAKE) == 10
    assert len(DRAKE_NEWCOMERS) == 7 and not {part.name for part in DRAKE_NEWCOMERS} & set(names)
    assert [part.name for one in DRAKE for part in one.parts if part.open] == ["iconqa-2", "iconqa-3"]
    assert len({part.name for one in HFLB for part in one.parts}) == 36 and len(HFLB) == 9


def test_a_client_of_drake_has_its_tasks_in_the_order_of_its_stream(root):
    found = build("drake", None, {"root": str(root)})
    first = found.clients[0]
    assert list(dict.fromkeys(record["task"] for record in first.train)) == [
        "Fashion200K-0",
        "MagicBrush-0",
        "VISION-0",
        "FashionIQ-0",
    ]
    assert (len(first.train), len(first.val), len(first.test)) == (24, 0, 8)
    record = first.train[0]
    assert record["form"] == "choice" and record["choices"] == ["red", "blue"] and "extra" not in record
    assert record["images"] == [str(root / "Fashion200K" / "images" / "x.png")]
    assert "Choice list:[red, blue]" in record["conversation"][0]["content"]  # the prompt stays as it is
    assert found.manifest["streams"]["client-00"][1] == {
        "task": "MagicBrush-0",
        "form": "choice",
        "metric": None,
        "train": 6,
        "val": 0,
        "test": 2,
    }
    assert [one.id for one in found.newcomers] == [part.name for part in DRAKE_NEWCOMERS]


def test_open_questions_of_drake_are_scored_by_pooled_f1(root):
    found = build("drake", None, {"root": str(root), "newcomers": False})
    opened = [record for one in found.clients for record in one.test if record["form"] == "open"]
    assert {(record["task"], record["metric"]) for record in opened} == {
        ("iconqa-2", "token_f1_pooled"),
        ("iconqa-3", "token_f1_pooled"),
    }
    assert not found.newcomers


@pytest.mark.parametrize(
    ("name", "model_map", "small"),
    [
        ("drake", "paper", {0, 6, 8, 9}),
        ("drake", "scenario", {0, 1, 8, 9}),
        ("hflb", "paper", {0, 1, 2}),
        ("hflb", "scenario", {0, 1, 5}),
    ],
)
def test_models_are_the_papers_or_the_scenarios(root, name, model_map, small):
    found = build(name, None, {"root": str(root), "model_map": model_map})
    assert {at for at, one in enumerate(found.clients) if one.info["size"] == "small"} == small


def test_a_scenario_of_ones_own_may_leave_times_empty(root, tmp_path):
    path = tmp_path / "scenario.json"
    datasets = [{"dataset": "dummy"}, {"dataset": "VSR", "subset_id": 0, "type": "multi-choice"}]
    write_json(path, [{"client_id": 0, "model_id": "hub/name", "datasets": datasets}])
    (one,) = build("drake", None, {"root": str(root), "scenario": str(path), "newcomers": False}).clients
    assert one.info == {"tasks": "VSR-0", "model": "hub/name"} and len(one.train) == 6


def test_paths_may_begin_with_the_name_of_the_authors_root(tmp_path):
    part = HFLB[3].parts[0]
    write_parts(tmp_path, [part], prefix="./dataset/")
    scenario = tmp_path / "scenario.json"
    write_json(scenario, [{"datasets": [{"dataset": part.dataset, "subset_id": part.subset, "type": "multi-choice"}]}])
    (one,) = build("hflb", None, {"root": str(tmp_path), "scenario": str(scenario)}).clients
    assert one.train[0]["images"] == [str(tmp_path / "Abstract" / "images" / "x.png")]


@pytest.mark.parametrize(
    ("listed", "answer", "choices"),
    [
        ("heat, light, heat, light and sound, none", "heat, light", ["heat", "light", "light and sound", "none"]),
        ("None, One, Two", "Four or more", ["None", "One", "Two"]),
        ("0, 1, 2", 2, None),
    ],
)
def test_a_list_without_the_answer_gets_it_and_an_answer_may_be_a_number(tmp_path, listed, answer, choices):
    """As in TQA, where a choice has a comma, in Co-Instruct's counts, and in sources whose answers are numbers."""
    part = HFLB[3].parts[0]
    write_parts(tmp_path, [part])
    rows = vqa_rows(part, 6)
    turns = [{"from": "human", "value": f"<image>Which? Choice list:[{listed}]."}, {"from": "gpt", "value": answer}]
    rows[2] |= {"conversations": turns}
    write_json(tmp_path / "Abstract" / "train" / "dataset-0.json", rows)
    scenario = tmp_path / "scenario.json"
    write_json(scenario, [{"datasets": [{"dataset": "Abstract", "subset_id": 0, "type": "multi-choice"}]}])
    record = build("hflb", None, {"root": str(tmp_path), "scenario": str(scenario)}).clients[0].train[2]
    assert record["conversation"][1]["content"] == str(answer)
    assert record["choices"] == (["0", "1", "2"] if choices is None else [*choices, answer])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": "../secret.png"}, r"image .* must be a path below the root"),
        ({"image": "Abstract/images/none.png"}, "is no file in"),
        (
            {"conversations": [{"from": "human", "value": "<image> Why?"}, {"from": "gpt", "value": "red"}]},
            "form is choice, and neither choices nor the first question",
        ),
        (
            {"conversations": [{"from": "human", "value": "Choice list:[red, blue]"}, {"from": "gpt", "value": "red"}]},
            "0 marks <image> for 1 images",
        ),
    ],
)
def test_records_that_contradict_themselves_are_refused_by_file_and_record(tmp_path, change, words):
    part = HFLB[3].parts[0]
    write_parts(tmp_path, [part])
    rows = vqa_rows(part, 6)
    rows[2] |= change
    write_json(tmp_path / "Abstract" / "train" / "dataset-0.json", rows)
    scenario = tmp_path / "scenario.json"
    write_json(scenario, [{"datasets": [{"dataset": "Abstract", "subset_id": 0, "type": "multi-choice"}]}])
    with pytest.raises(DataError, match=rf"dataset-0\.json, record 3: .*{words}"):
        build("hflb", None, {"root": str(tmp_path), "scenario": str(scenario)})


def test_a_dataset_that_was_not_unpacked_is_named(root, tmp_path):
    with pytest.raises(DataError, match=r"Fashion200K/train/dataset-0\.json, which Fashion200K\.tar has"):
        build("drake", None, {"root": str(tmp_path)})


def test_the_public_split_is_drawn_from_records_with_an_image(root):
    write_public_vqa(root)
    found = build("hflb", None, {"root": str(root), "public": "llava_ft/mixed.json"})
    assert len(found.public) == 4 and all(record["images"] for record in found.public)
    with pytest.raises(DataError, match=r"there is no file other\.json below"):
        build("hflb", None, {"root": str(root), "public": "other.json"})


def test_images_of_public_records_may_count_from_their_own_file(root):
    """As in LLaVA's llava_v1_5_mix665k.json, below a folder of its own."""
    write_public_vqa(root)
    rows = [{**row, "image": "images/x.png"} for row in vqa_rows(ClientTask("llava_ft", 0), 4)]
    write_json(root / "llava_ft" / "mix665k.json", rows)
    found = build("hflb", None, {"root": str(root), "public": "llava_ft/mix665k.json"})
    assert {path for record in found.public for path in record["images"]} == {str(root / "llava_ft/images/x.png")}


def test_a_smaller_draw_of_public_records_is_part_of_a_larger_one(root):
    write_public_vqa(root)

    def draw(count):
        return build("hflb", None, {"root": str(root), "public": "llava_ft/mixed.json", "public_count": count}).public

    assert len(draw(3)) == 3 and draw(3) == draw(10_000)[:3] and len(draw(10_000)) == 4


def test_a_file_of_texts_alone_may_be_the_public_split_beside_questions_about_images(root):
    """ChatbotIT on DRAKE (Table 27)."""
    write_public_texts(root)
    found = build("hflb", None, {"root": str(root), "public": "chatbotIT.json"}).public
    assert found and not any(record["images"] for record in found)
    assert all(len(record["conversation"]) >= 2 for record in found)


def test_validation_is_held_out_of_every_task(root):
    found = build("hflb", None, {"root": str(root), "val_fraction": 0.1})
    assert (len(found.clients[0].train), len(found.clients[0].val)) == (4, 20)  # at least five of the six of each task


def test_fed_aya_has_eight_clients_of_four_tasks(tmp_path, caplog):
    write_texts(tmp_path, AYA_TOPICS)
    rows = text_rows("long", 3)
    rows[0]["conversations"] *= 2
    write_json(tmp_path / "Fed-aya_topic" / "train" / "dataset-0.json", rows)
    found = build("fedaya-8", None, {"root": str(tmp_path)})
    assert len(found.clients) == 8 and {len(one.train) for one in found.clients} == {12}
    assert found.clients[7].train[0]["instruction"] == "train Fed-aya_topic-70 0?"
    assert found.clients[7].info["field"] == "health" and found.clients[7].info["size"] == "small"
    assert "1 conversations have more than one question" in caplog.text


def test_fed_llm_large_has_52_clients_of_different_tasks(tmp_path):
    assert len(LARGE_TASKS) == len(set(LARGE_TASKS)) == 104
    write_texts(tmp_path, LARGE_TASKS)
    found = build("fed-llm-large-52", None, {"root": str(tmp_path)})
    assert len(found.clients) == 52 and sum(one.info["size"] == "small" for one in found.clients) == 26
    assert found.clients[51].info == {"tasks": "FedchatbotIT-19, FedchatbotIT-39", "size": "large", "source": "chatbot"}


def test_texts_are_read_as_the_released_loader_reads_them(tmp_path, caplog):
    """Numbers as text, a mark of an image as any other word, and what follows the first answer not at all."""
    write_texts(tmp_path, AYA_TOPICS)
    (path, *_) = sorted((tmp_path / "Fed-aya_topic" / "train").glob("dataset-*.json"))
    turns = [{"from": "human", "value": "Write <image> in HTML"}, {"from": "gpt", "value": 7}]
    write_json(path, [{"id": 0, "conversations": [*turns, {"from": "human", "value": "And?"}]}, *read_json(path)[1:]])
    found = build("fedaya-8", None, {"root": str(tmp_path)})
    learnt = [(one["instruction"], one["output"]) for client in found.clients for one in client.train]
    assert ("Write <image> in HTML", "7") in learnt
    assert "1 conversations have more than one question" in caplog.text
    write_json(path, [{"id": 0, "conversations": turns[1:] + turns[:1]}])
    with pytest.raises(DataError, match="conversations must begin with a question and its answer"):
        build("fedaya-8", None, {"root": str(tmp_path)})


def test_public_texts_that_cannot_be_used_are_left_out_and_those_that_are_tested_counted(tmp_path, caplog):
    write_texts(tmp_path, AYA_TOPICS)
    (path, *_) = sorted((tmp_path / "Fed-aya_topic" / "test").glob("dataset-*.json"))
    tested = read_json(path)
    write_json(tmp_path / "public.json", [*tested, {"conversations": [{"from": "gpt", "value": "I begin."}]}])
    found = build("fedaya-8", None, {"root": str(tmp_path), "public": "public.json"})
    assert len(found.public) == len(tested) and found.manifest["test_records_in_public"] == len(tested)
    assert "1 public records are left out, first" in caplog.text and "are also among the public records" in caplog.text


def test_public_texts_are_those_without_an_image(tmp_path):
    write_texts(tmp_path, AYA_TOPICS)
    turns = [{"from": "human", "value": " What? "}, {"from": "gpt", "value": "That."}]
    write_json(
        tmp_path / "chatbotIT.json",
        [
            {"id": 0, "conversations": turns},
            {"id": 1, "image": "a.png", "conversations": turns},
            {"id": 2, "conversations": turns * 2},
        ],
    )
    found = build("fedaya-8", None, {"root": str(tmp_path), "public": "chatbotIT.json"})
    assert [dict(one) for one in found.public] == [
        {"id": f"public-{number:05d}", "instruction": "What?", "output": "That."} for number in range(2)
    ]
    assert not build("fedaya-8", None, {"root": str(tmp_path)}).public
    with pytest.raises(DataError, match=r"there is no file \.\./x\.json"):
        build("fedaya-8", None, {"root": str(tmp_path), "public": "../x.json"})


@pytest.fixture
def scope(tmp_path):
    write_scope(tmp_path)
    return tmp_path


def test_fed_scope_is_made_of_its_sources_with_a_test_of_its_own(scope):
    found = build("fedscope-5", None, {"root": str(scope), "test": 3})
    assert [one.info["size"] for one in found.clients] == ["large", "small", "small", "small", "large"]
    first = [record for record in found.clients[0].train if record["task"] == "gsm8k-0"]
    assert len(first) == 7 and "####" not in first[0]["output"] and "The answer is" in first[0]["output"]
    counts = {
        name: sum(record["task"] == name for record in found.clients[3].train)
        for name in ("java", "c+php", "c#", "c++")
    }
    assert counts == {"java": 7, "c+php": 17, "c#": 7, "c++": 7}
    for one in found.clients:
        assert len(one.test) == 12 and not {r["id"] for r in one.train} & {r["id"] for r in one.test}
    assert found.manifest["test_records_in_training"] == 0


def test_fed_scope_says_what_it_finds_where_a_language_is_missing(scope):
    path = scope / "rosetta" / "rosetta_alpaca.json"
    rows = [row for row in json.loads(path.read_text()) if row["input"] != "Go"]
    write_json(path, [*rows, {"instruction": "x", "input": "Golang", "output": "y"}])
    with pytest.raises(DataError, match="no records whose input is go; further languages found: COBOL, Golang"):
        build("fedscope-5", None, {"root": str(scope)})
    with pytest.raises(ConfigError, match="test: must be 1 or more, got 0"):
        build("fedscope-5", None, {"root": str(scope), "test": 0})
