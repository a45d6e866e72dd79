"""Commonsense, FLAN, Super-NaturalInstructions and Fed-Aya from files of their own schema, made here."""

import json
import shutil

import pytest

from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError
from befit.data.papers import commonsense as commonsense_benchmark
from befit.data.papers import fedaya
from befit.data.papers import sni as sni_benchmark
from befit.data.papers.commonsense_tasks import TASKS
from befit.data.papers.fedaya import NEWCOMERS, usable_records
from befit.data.papers.flan import TASKS as TASKS_OF_FLAN
from befit.data.papers.flan import groups
from befit.data.papers.llm_adapters import FOLDERS
from befit.data.papers.scenarios import read_scenario
from befit.data.papers.sni import answered
from befit.data.registry import build
from befit.models import load_backbone
from befit.runs.runner import run
from befit.tasks import make_task
from tests.unit.data.papers.paper_data import (
    aya_clients,
    sni_task,
    write_aya,
    write_commonsense,
    write_flan,
    write_json,
    write_lines,
    write_sni,
)
from tests.unit.models.tiny_models import save_llama


@pytest.fixture(scope="module")
def commonsense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commonsense")
    write_commonsense(folder)
    return folder


SIZES = {"train": 10, "val": 5, "test": 12}


def test_eight_tasks_are_eight_clients_with_options_by_name(commonsense):
    found = build("commonsense-8", None, {"root": str(commonsense), **SIZES})
    clients = {one.id: one for one in found.clients}
    assert list(clients) == [task.name for task in TASKS]
    assert {(len(one.train), len(one.val), len(one.test)) for one in found.clients} == {(10, 5, 12)}
    allowed = dict.fromkeys(clients, "answer2")
    allowed |= {"boolq": "false", "hellaswag": "ending2", "piqa": "solution2", "winogrande": "option2"}
    for name, one in clients.items():
        for record in (*one.train, *one.test):
            assert record["output"] == f"the correct answer is {allowed[name]}", name
            assert record["choices"].index(record["output"]) == 1
    assert (
        clients["winogrande"]
        .train[0]["instruction"]
        .endswith("option1: cup\noption2: box\n\nAnswer format: option1/option2")
    )


@pytest.fixture
def adapters(tmp_path):
    """What LLM-Adapters has of every data set: 30 training and 12 test questions, one of ARC-Easy in both."""
    for task in TASKS:
        names = task.names(3) if task.option else ["true", "false"]
        folder = tmp_path / "dataset" / FOLDERS.get(task.name, task.name)
        for split, count, first in (("train", 30, 0), ("test", 12, 1000)):
            rows = []
            for number in range(first, first + count):
                text = (
                    "the same in both" if task.name == "arc_easy" and number in (0, 1000) else f"{task.name} {number}"
                )
                rows.append(
                    {
                        "instruction": f"Please choose: {text}\n\nAnswer format: {'/'.join(names)}",
                        "input": "",
                        "output": f"the correct answer is {names[1]}",
                        "answer": names[1],
                    }
                )
            write_json(folder / f"{split}.json", rows)
    return tmp_path


@pytest.mark.parametrize("answers", ["sentence", "name"])
def test_questions_are_read_as_llm_adapters_words_them(adapters, answers):
    given = {**SIZES, "root": str(adapters), "files": "llm-adapters", "answers": answers}
    found = build("commonsense-8", None, given)
    assert [one.id for one in found.clients] == [task.name for task in TASKS]
    for task, one in zip(TASKS, found.clients, strict=True):
        names = task.names(3) if task.option else ["true", "false"]
        assert (len(one.train), len(one.test)) == (SIZES["train"], SIZES["test"])
        for record in (*one.train, *one.test):
            assert record["instruction"].startswith("Please choose: ") and record["choice_names"] == names
            expected = names if answers == "name" else [f"the correct answer is {name}" for name in names]
            assert record["choices"] == expected and record["output"] == expected[1]
    assert found.manifest["training_records_dropped_for_the_test"]["arc_easy"] in (0, 1)
    assert found.manifest["partition"]["args"]["files"] == "llm-adapters"
    assert {entry["id"] for entry in found.manifest["sources"]} == {"the repository AGI-Edgerunners/LLM-Adapters"}
    sixteen = build("commonsense-16", None, {**given, "train": 10})
    assert len(sixteen.clients) == 16


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"instruction": "Which?"},
            'instruction must end in a line such as "Answer format: answer1/answer2", got "Which',
        ),
        ({"answer": "answer9"}, 'answer must be one of answer1, answer2, answer3, .* got "answer9"'),
        ({"output": "answer2"}, 'and output "the correct answer is answer1" and so on; got "answer2" and "answer2"'),
    ],
)
def test_what_is_not_as_llm_adapters_has_it_is_named(adapters, change, told):
    path = adapters / "dataset" / "ARC-Challenge" / "train.json"
    rows = json.loads(path.read_text())
    write_json(path, [{**rows[0], **change}, *rows[1:]])
    with pytest.raises(DataError, match=f"train.json, .*{told}"):
        build("commonsense-8", None, {**SIZES, "root": str(adapters), "files": "llm-adapters"})
    path.unlink()
    with pytest.raises(DataError, match=r"Get the repository AGI-Edgerunners/LLM-Adapters and put it into"):
        build("commonsense-8", None, {**SIZES, "root": str(adapters), "files": "llm-adapters"})
    for wrong in ({"hub": True, "root": ""}, {"with_passage": True}):
        with pytest.raises(ConfigError, match=r"files: llm-adapters is on no hub, and has BoolQ without its passages"):
            build("commonsense-8", None, {**SIZES, "root": str(adapters), "files": "llm-adapters", **wrong})


@pytest.mark.parametrize("answers", ["sentence", "name"])
@pytest.mark.parametrize("said", ["{}", "{}: because", "The answer is {}.", "THE CORRECT ANSWER IS: {}"])
def test_a_name_alone_is_an_answer_however_it_is_put(commonsense, answers, said, tmp_path):
    """The first of the allowed names in what was generated."""
    save_llama(tmp_path)
    federation = build("commonsense-8", None, {"root": str(commonsense), **SIZES, "answers": answers})
    model = load_experiment({"model": {"id": str(tmp_path)}, "benchmark": "commonsense-8", "method": "local"}).model
    tokenizer = load_backbone(model, "causal-lm", (), 0).processor
    tokenizer.model_max_length = 4096
    task = make_task("causal-lm", tokenizer, max_length=4096, metrics=["choice_parse"])
    for task_of, client in zip(TASKS, federation.clients, strict=True):
        examples = task.prepare(client.test)
        right = [record["choices"].index(record["output"]) for record in client.test]
        names = [task_of.names(len(record["choices"])) for record in client.test]
        given = [said.format(named[at]) for named, at in zip(names, right, strict=True)]
        assert task.compared(given, examples, range(len(given))) == {"choice_parse": 1.0, "unparsable": 0.0}
        other = [said.format(named[at - 1]) for named, at in zip(names, right, strict=True)]
        assert task.compared(other, examples, range(len(other))) == {"choice_parse": 0.0, "unparsable": 0.0}
        silent = ["the correct answer is"] * len(given)
        assert task.compared(silent, examples, range(len(silent))) == {"choice_parse": 0.0, "unparsable": 1.0}


def test_context_comes_before_the_question_and_boolqs_passage_only_where_wanted(commonsense):
    for with_passage in (False, True):
        found = build("commonsense-8", None, {"root": str(commonsense), **SIZES, "with_passage": with_passage})
        clients = {one.id: one for one in found.clients}
        assert ("passage" in clients["boolq"].train[0]["instruction"]) is with_passage
        text = clients["social_i_qa"].train[0]["instruction"]
        assert text.index("context") < text.index("why?") < text.index("answer1: a")


def test_a_start_of_hellaswag_follows_what_it_is_about(commonsense):
    found = build("commonsense-8", None, {"root": str(commonsense), **SIZES})
    (one,) = (one for one in found.clients if one.id == "hellaswag")
    for record in (*one.train, *one.val, *one.test):
        assert record["instruction"].split("\n")[2].startswith("Sailing: start ")


def test_no_question_of_the_test_is_trained_on(commonsense):
    found = build("commonsense-8", None, {"root": str(commonsense), **SIZES, "train": 24})
    assert found.manifest["training_records_dropped_for_the_test"]["arc_easy"] == 1
    assert found.manifest["test_records_in_training"] == 0


def test_sixteen_clients_share_a_test_and_no_training_record(commonsense, caplog):
    found = build("commonsense-16", None, {"root": str(commonsense), **SIZES})
    assert [one.id for one in found.clients][:3] == ["arc_challenge-1", "arc_challenge-2", "arc_easy-1"]
    for first, second in zip(found.clients[::2], found.clients[1::2], strict=True):
        ids = [{record["id"] for record in (*one.train, *one.val)} for one in (first, second)]
        assert not ids[0] & ids[1] and first.test == second.test and len(ids[0]) == 15
    # 30 records are too few for two clients with 20 and 5: each gets half of what is there, divided as 20 to 5.
    halved = build("commonsense-16", None, {"root": str(commonsense), **SIZES, "train": 20})
    sizes = {one.id: (len(one.train), len(one.val)) for one in halved.clients}
    assert sizes["boolq-1"] == sizes["boolq-2"] == (12, 3) and sizes["arc_easy-1"] == (11, 4)
    assert "with 20 and 5 to validate on; they train on 12 each, and validate on 3" in caplog.text


def test_arc_challenge_has_examples_to_validate_on_at_both_of_its_clients():
    dealt = commonsense_benchmark.dealt("arc_challenge", [{"id": number} for number in range(1119)], 2, 1000, 100)
    assert [(len(train), len(val)) for train, val in dealt] == [(508, 52), (508, 51)]


def test_a_question_that_comes_twice_is_learnt_once(commonsense, tmp_path):
    shutil.copytree(commonsense, tmp_path / "data")
    (path,) = (tmp_path / "data" / "openbookqa").rglob("train.jsonl")
    path.write_text(path.read_text() * 2)
    found = build("commonsense-16", None, {"root": str(tmp_path / "data"), **SIZES})
    plain = build("commonsense-16", None, {"root": str(commonsense), **SIZES})
    assert [len(one.train) for one in found.clients] == [len(one.train) for one in plain.clients]
    first, second = (one for one in found.clients if one.info["task"] == "openbookqa")
    asked = [{record["instruction"] for record in (*one.train, *one.val)} for one in (first, second)]
    assert not asked[0] & asked[1] and len(asked[0]) == len(first.train) + len(first.val)


def test_answers_may_be_names_alone(commonsense):
    found = build("commonsense-8", None, {"root": str(commonsense), **SIZES, "answers": "name"})
    assert found.clients[0].train[0]["output"] == "answer2"


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        ("hellaswag", {"label": ""}, 'label must be one of "0", "1", "2", "3", got ""'),
        ("winogrande", {"answer": ""}, 'answer must be one of "1", "2", got ""'),
        ("winogrande", {"sentence": "no gap"}, "sentence must have a gap _"),
        ("boolq", {"answer": 1}, "answer must be one of true, false, got 1"),
        ("openbookqa", {"answerKey": "E"}, 'answerKey must be one of "A", "B", "C", "D", got "E"'),
        ("arc_easy", {"choices": ["a", "b"]}, "choices must be {text: .*}, got"),
    ],
)
def test_rows_without_a_usable_answer_are_refused_by_line(commonsense, tmp_path, task, change, words):
    shutil.copytree(commonsense, tmp_path / "data")
    entry = next(one for one in TASKS if one.name == task)
    path = tmp_path / "data" / entry.source.folder / entry.source.config / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3] |= change
    write_lines(path, rows)
    with pytest.raises(DataError, match=rf"train\.jsonl, line 4: {words}"):
        build("commonsense-8", None, {"root": str(tmp_path / "data"), **SIZES})


@pytest.fixture(scope="module")
def flan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flan")
    write_flan(folder)
    return folder


def questions_of(records):
    return {next(word for word in record["instruction"].split() if word.endswith("word0")) for record in records}


def test_a_question_of_flan_is_on_one_side_of_the_split_in_all_its_templates(flan):
    found = build("flan-8", None, {"root": str(flan), "train": 20, "val": 4, "test": 10})
    assert [one.id for one in found.clients][5] == "mnli"
    for one in found.clients:
        sides = [questions_of(getattr(one, split)) for split in ("train", "val", "test")]
        assert not sides[0] & sides[1] and not sides[0] & sides[2] and not sides[1] & sides[2]
        assert len(one.test) == len(sides[2]) == 10  # one template of a question is enough to test on it
    assert found.manifest["grouping"]["mnli"] == {"records": 60, "questions": 30}


def test_a_task_with_too_few_questions_fills_its_test_first_or_is_refused(flan):
    sizes = {"train": 20, "val": 0, "test": 10}
    clients = {one.id: one for one in build("flan-8", None, {"root": str(flan), **sizes}).clients}
    assert (len(clients["arc_challenge"].train), len(clients["arc_challenge"].test)) == (12, 10)
    assert len(clients["mnli"].train) == 20
    with pytest.raises(DataError, match="arc_challenge: 16 groups of questions in 32 records give 10 to test"):
        build("flan-8", None, {"root": str(flan), **sizes, "on_shortage": "fail"})


def test_a_client_of_flan_has_2000_training_100_validation_and_300_test_records_by_default(tmp_path):
    """Different texts that are shorter than a run are different questions, of which one is left over here."""
    for task in TASKS_OF_FLAN.values():
        rows = [{"inputs": f"{task} {number}", "targets": "yes", "task": task} for number in range(2401)]
        write_lines(tmp_path / "train" / f"{task}_10templates_train.jsonl", rows)
    found = build("flan-8", None, {"root": str(tmp_path)})
    assert {(len(one.train), len(one.val), len(one.test)) for one in found.clients} == {(2000, 100, 300)}


def test_a_short_question_is_one_in_all_its_templates():
    """Its own words are the same in both, and no run of eight is; templates' words join nobody."""
    templates = ("Review: {} Is this sentence negative or positive?", "{} How would the mood of this be perceived?")
    pairs = [(template.format(f"word{n} of film{n}"), "good") for n in range(30) for template in templates]
    assert groups(pairs) == [[2 * n, 2 * n + 1] for n in range(30)]


def test_words_of_a_template_join_no_questions():
    """Thirty different questions with one ending of eleven words stay thirty: the run is in more than 20 of them."""
    ending = "so now answer this question as well as you ever can"
    assert len(groups([(f"question {number} {ending}", "yes") for number in range(30)])) == 30


def feddpa_files(folder, tasks):
    for index, task in enumerate(tasks):
        rows = [
            {"instruction": f"{task} {number}", "output": "x", "task": task, "category": "c"} for number in range(20)
        ]
        write_json(folder / f"local_training_{index}.json", rows)
    write_lines(
        folder / "flan_test.jsonl",
        [
            {"instruction": f"{task} test {number}", "output": "x", "task": task, "category": "c"}
            for task in tasks
            for number in range(3)
        ],
    )


def test_feddpas_sets_are_told_apart_by_their_tasks(tmp_path):
    from befit.data.papers.flan import FEDDPA_TASKS

    feddpa_files(tmp_path, FEDDPA_TASKS["2"])
    found = build("flan-feddpa-2", None, {"root": str(tmp_path)})
    assert [one.id for one in found.clients] == list(FEDDPA_TASKS["2"])
    assert {(len(one.train), len(one.val), len(one.test)) for one in found.clients} == {(15, 5, 3)}
    (tmp_path / "8").mkdir()  # as in the clone
    for path in tmp_path.glob("local_training_*"):
        path.rename(tmp_path / "8" / path.name)
    again = build("flan-feddpa-2", None, {"root": str(tmp_path)})
    assert [one.train for one in again.clients] == [one.train for one in found.clients]
    with pytest.raises(DataError, match=r"has the tasks arc_easy, bool_q, .*; set 1 has definite_pronoun_resolution"):
        build("flan-feddpa-1", None, {"root": str(tmp_path)})


@pytest.fixture(scope="module")
def sni(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sni")
    write_sni(folder)
    return folder


SNI = {"train": 20, "val": 4, "test": 6}


def test_the_rule_takes_the_ten_largest_english_tasks_that_are_not_excluded(sni):
    found = build("sni-10", None, {"root": str(sni), **SNI})
    assert [one.id for one in found.clients] == ["task013_large", *(f"task{number:03d}_one" for number in range(1, 10))]
    assert found.manifest["tasks"]["task013_large"] == 40


def test_instances_without_an_answer_are_left_out(caplog):
    answers = [["a", " "], [""], [], "b"]
    found = answered([sni_benchmark.record("Do it.", "x", outputs, "file") for outputs in answers], "file")
    assert [one["references"] for one in found] == [["a"], ["b"]]
    assert "file: 2 instances without an answer are left out" in caplog.text


def test_all_references_count_and_the_first_is_learnt(sni):
    found = build("sni-10", None, {"root": str(sni), "tasks": ["task002_one"], **SNI})
    (one,) = found.clients
    assert (len(one.train), len(one.val), len(one.test)) == (20, 4, 6)
    record = one.test[0]
    number = record["output"].split()[1]
    assert record["references"] == [f"output {number}", "or this"]
    assert record["instruction"] == f"Say what it is.\n\nInput: input {number}\n\nOutput:"


def test_a_client_of_sni_has_500_training_50_validation_and_50_test_records_by_default(tmp_path):
    write_json(tmp_path / "tasks" / "task001_one.json", sni_task(601))
    (one,) = build("sni-10", None, {"root": str(tmp_path), "tasks": ["task001_one"]}).clients
    assert (len(one.train), len(one.val), len(one.test)) == (500, 50, 50)


def test_an_input_that_comes_twice_is_used_once(sni, tmp_path):
    task = sni_task(20)
    task["Instances"] += [{**one, "input": one["input"].upper()} for one in task["Instances"]]
    write_json(tmp_path / "tasks" / "task001_twice.json", task)
    arguments = {"root": str(tmp_path), "tasks": ["task001_twice"], "val": 0, "test": 5}
    (one,) = build("sni-10", None, {**arguments, "train": 15}).clients
    texts = {record["instruction"].casefold() for record in (*one.train, *one.test)}
    assert len(texts) == 20
    with pytest.raises(DataError, match="task001_twice: 20 different inputs are too few for 21"):
        build("sni-10", None, {**arguments, "train": 16})


def test_what_sni_needs_is_asked_for(sni, tmp_path):
    with pytest.raises(ConfigError, match="tasks: has to be given with hub"):
        build("sni-10", None, {"hub": True})
    write_json(tmp_path / "tasks" / "task001_x.json", {"Definition": ["x"], "instances": []})
    with pytest.raises(DataError, match=r"excluded_tasks\.txt, which says what tasks are left out"):
        build("sni-10", None, {"root": str(tmp_path)})
    with pytest.raises(DataError, match=r"task001_x\.json: a task must have .*; found Definition, instances, without"):
        build("sni-10", None, {"root": str(tmp_path), "tasks": ["task001_x"]})


def test_aya_keeps_eight_languages_and_its_newcomers_by_position(tmp_path):
    write_aya(tmp_path)
    found = build("fedaya-38", None, {"root": str(tmp_path)})
    assert [one.id for one in found.newcomers] == [f"client-{number:02d}" for number in NEWCOMERS]
    assert len(found.clients) == 30 and found.clients[0].info["key"] == "user0"
    for one in (*found.clients, *found.newcomers):
        assert (len(one.train), len(one.test)) == (16, 4)  # 80 % of the 20 that are left
        assert {record["language"] for record in (*one.train, *one.test)} == {"en", "fr", "ar", "zh"}
    assert found.manifest["sources"][0]["other_languages"]["user3"] == 1


def test_aya_that_is_not_as_expected_is_refused(tmp_path):
    path = tmp_path / "aya_38c_25k.json"
    clients = aya_clients()
    write_json(path, {key: clients[key] for key in list(clients)[:37]})
    with pytest.raises(
        DataError, match="must be an object of 38 clients with a list of records each; found 37 entries"
    ):
        build("fedaya-38", None, {"root": str(tmp_path)})
    write_json(path, {**clients, "user5": [{"instruction": "x", "response": "y", "language": "Yoruba"}]})
    with pytest.raises(DataError, match=r"client user5: none of its 1 records is of ar, en, .*languages are Yoruba"):
        build("fedaya-38", None, {"root": str(tmp_path)})
    write_json(path, {**clients, "user5": [{"prompt": "x", "response": "y", "language": "en"}]})
    with pytest.raises(
        DataError, match="must have instruction, response and language; found prompt, response, language"
    ):
        build("fedaya-38", None, {"root": str(tmp_path)})


def test_users_of_the_hubs_aya_are_the_largest_ones(tmp_path):
    rows = [
        {"inputs": f"p {user} {number}", "targets": "t", "language": "English", "user_id": f"u{user}"}
        for user in range(4)
        for number in range(5 * user)
    ] + [{"inputs": f"{number}", "targets": "t", "language": "Yoruba", "user_id": "u9"} for number in range(40)]
    rows += [{**rows[0], "user_id": "u7"}] * 20  # one prompt, twenty times
    write_lines(tmp_path / "data" / "train.jsonl", rows)
    found = build("aya-users", None, {"root": str(tmp_path), "clients": 2, "minimum": 10})
    assert [one.info["user"] for one in found.clients] == ["u3", "u2"]
    assert [len(one.train) + len(one.test) for one in found.clients] == [15, 10]


def test_a_part_of_a_record_is_tested_as_a_whole_one():
    """As `train_test_split` of `datasets` counts, which FedP2EFT's released code calls."""
    records = [{"instruction": str(number), "output": "o", "language": "en"} for number in range(91)]
    one = fedaya.client("client-00", records, 0.2, 42, "fedaya-38", {})
    assert (len(one.train), len(one.test)) == (72, 19)


def test_what_a_record_of_another_language_holds_does_not_matter():
    rows = [{"instruction": "Hi", "response": "Yes", "language": "English"}]
    assert usable_records([*rows, {"instruction": "", "response": None, "language": "de"}], "x")[1] == 1
    with pytest.raises(DataError, match="record 2: response must be text"):
        usable_records([*rows, {"instruction": "x", "response": " ", "language": "fr"}], "x")


def test_a_scenario_file_names_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "scenario.json"
    write_json(path, [{"datasets": [{"dataset": "VSR", "subset_id": 1, "type": "open-ended"}]}])
    with pytest.raises(DataError, match="client 0, VSR: metric must be F1 or RougeL"):
        read_scenario(path)


def test_a_run_on_aya_leaves_long_prompts_out_and_counts_wins_by_what_the_study_names(tmp_path):
    save_llama(tmp_path / "llama", max_position_embeddings=256)
    spoken = {
        key: [{**row, "language": ("en", "fr")[number % 2]} for row in rows]
        for number, (key, rows) in enumerate(aya_clients().items())
    }
    write_json(tmp_path / "aya_38c_25k.json", spoken)
    measured, counted = ["rougeL", "rouge1", "rougeL_unicode", "meteor_exact_stem"], ["rougeL", "rouge1"]
    values = {
        "benchmark": {"name": "fedaya-38", "root": str(tmp_path)},
        "method": "fedit",
        "baselines": ["local"],
        "model": {"id": str(tmp_path / "llama"), "max_length": 256, "long_prompts": "drop"},
        "limit": {"clients": 3, "records": 2, "rounds": 1},
        "train": {"max_steps": 1},
        "report": {"plots": False},
        "evaluate": {"metrics": measured, "wins": counted, "max_new_tokens": 1, "newcomers": False},
    }
    results = run(load_experiment(values), out=tmp_path / "run").results
    assert results["left_out"] == {"records": 0, "of": 6, "clients": {}}
    found = results["groups"]["language"]
    assert found["metrics"] == counted and measured == [*next(iter(found["groups"].values()))["scores"]["local"]]
