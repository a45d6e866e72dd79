"""Files in the schema of the papers' data sets, made by the tests that read them: small, and with the awkward rows."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image

from befit.data.papers import flan, masakhanews, xnli
from befit.data.papers.commonsense_tasks import TASKS
from befit.data.papers.large import large_tasks
from befit.data.papers.scenarios import DRAKE, DRAKE_NEWCOMERS, HFLB, ClientTask


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


# CIFAR-100


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def cifar_images(train=8, test=2):
    """All 100 classes, with so many training and test images each: {split: (images, labels)}."""
    rng = np.random.default_rng(0)
    return {
        split: (rng.integers(0, 256, (100 * each, 32, 32, 3), dtype=np.uint8), np.repeat(np.arange(100), each))
        for split, each in (("train", train), ("test", test))
    }


def write_cifar(folder, cifar, split, order=None):
    pixels, labels = cifar[split]
    order = np.arange(len(labels)) if order is None else order
    rows = [
        {"img": {"bytes": png(pixels[i]), "path": None}, "fine_label": int(labels[i]), "coarse_label": 0} for i in order
    ]
    write_parquet(folder / "cifar100" / f"{split}-00000-of-00001.parquet", rows)


# XNLI and MasakhaNEWS


def xnli_rows(count, offset=0):
    """Rows as the converted repository has them: premise {language: text}, hypothesis two lists."""
    languages = list(xnli.LANGUAGES)
    return [
        {
            "premise": {language: f"{language} premise {number + offset}" for language in languages},
            "hypothesis": {
                "language": languages,
                "translation": [f"{language} hypothesis {number + offset}" for language in languages],
            },
            "label": number % 3,
        }
        for number in range(count)
    ]


def write_xnli(folder, train=60, test=30):
    write_parquet(folder / "all_languages" / "train-00000-of-00001.parquet", xnli_rows(train))
    write_parquet(folder / "all_languages" / "test-00000-of-00001.parquet", xnli_rows(test, offset=10_000))


def write_news(folder, times=1):
    """16 languages in four of the forms in which people may have them; `yor` has no technology, as Lingala really.

    times  as many rows as the smallest that a test can do with
    """
    features = Features({"label": ClassLabel(names=list(masakhanews.LABELS)), "headline_text": Value("string")})
    for position, language in enumerate(masakhanews.LANGUAGES):
        for split, count in (("train", 24 + 2 * position), ("validation", 6), ("test", 12)):
            classes = 6 if language == "yor" else 7
            rows = [
                {"label": number % classes, "headline_text": f"{language} {split} {number}"}
                for number in range(times * count)
            ]
            if language == "amh":
                (folder / language).mkdir(exist_ok=True)
                Dataset.from_list(rows, features=features).save_to_disk(str(folder / language / split))
            elif language == "lug":
                write_authors_news(folder / "data" / language, split, rows)
            elif language == "eng":
                write_parquet(folder / language / f"{split}.parquet", rows)
            else:
                write_parquet(folder / language / split / "0000.parquet", rows)


def write_authors_news(folder, split, rows):
    """As in the repository masakhane-io/masakhane-news: dev.tsv, categories by name, line ends inside of quotes."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["category\theadline\ttext\turl"]
    for row in rows:
        first, *rest = row["headline_text"].split(" ", 1)
        lines.append(f'{masakhanews.LABELS[row["label"]]}\t"{first} \n   "\t{" ".join(rest)}\t')
    (folder / f"{'dev' if split == 'validation' else split}.tsv").write_text("\n".join(lines) + "\n")


# Commonsense, FLAN, Super-NaturalInstructions


def commonsense_row(task, number):
    """One row with the columns of the data set on the hub; the right answer is always the second."""
    letters, digits = ["A", "B", "C"], ["1", "2", "3"]
    if task in ("arc_challenge", "arc_easy"):
        labels = digits if number % 2 else letters  # the awkward ones among ARC's
        return {
            "id": f"{number}",
            "question": f"{task} question {number}?",
            "answerKey": labels[1],
            "choices": {"text": ["one", "two", "three"], "label": labels},
        }
    if task == "openbookqa":
        return {
            "id": f"{number}",
            "question_stem": f"stem {number}",
            "answerKey": "B",
            "choices": {"text": ["one", "two", "three", "four"], "label": ["A", "B", "C", "D"]},
        }
    return {
        "boolq": {"question": f"is it {number}", "answer": False, "passage": f"passage {number}"},
        "hellaswag": {
            "ind": number,
            "activity_label": "Sailing",
            "ctx_a": "a",
            "ctx_b": "b",
            "ctx": f"start {number}",
            "endings": ["w", "x", "y", "z"],
            "label": "1",
        },
        "piqa": {"goal": f"goal {number}", "sol1": "this", "sol2": "that", "label": 1},
        "social_i_qa": {
            "context": f"context {number}.",
            "question": "why?",
            "answerA": "a",
            "answerB": "b",
            "answerC": "c",
            "label": "2",
        },
        "winogrande": {"sentence": f"the _ is {number}", "option1": "cup", "option2": "box", "answer": "2"},
    }[task]


def write_commonsense(folder):
    """30 training and 12 test rows of each data set, of which ARC-Easy has one in both."""
    converted = {"piqa": "plain_text", "social_i_qa": "default"}  # branches made by the hub: Parquet
    for task in TASKS:
        for split, count, first in (("train", 30, 0), (task.test, 12, 1000)):
            rows = [commonsense_row(task.name, first + number) for number in range(count)]
            if task.name == "arc_easy":
                rows[0] = {**rows[0], "question": "the same in both"}  # is in the test, and so in nobody's training
            where = folder / task.source.folder
            if task.name in converted:
                write_parquet(where / converted[task.name] / split / "0000.parquet", rows)
            else:
                write_lines(where / task.source.config / f"{split}.jsonl", rows)


def flan_rows(task, questions):
    """Every question in two templates, with a passage of its own that is longer than a run."""
    rows = []
    for number in range(questions):
        passage = " ".join(f"{task}{number}word{at}" for at in range(10))
        for template in ("Here is a text: {}\nWhat follows?", "{}\n\nSo what do you say?"):
            rows.append({"inputs": template.format(passage), "targets": ["yes", "no"][number % 2], "task": task})
    return rows


def write_flan(folder):
    for task in flan.TASKS.values():
        questions = 16 if task == "arc_challenge" else 30
        write_lines(folder / "train" / f"{task}_10templates_train.jsonl", flan_rows(task, questions))


def sni_task(count, languages=("English",), references=1):
    return {
        "Definition": ["Say what it is."],
        "Input_language": list(languages),
        "Output_language": ["English"],
        "Categories": ["Naming"],
        "Positive Examples": [],
        "Instances": [
            {"id": f"i{number}", "input": f"input {number}", "output": [f"output {number}", "or this"][:references]}
            for number in range(count)
        ],
    }


def write_sni(folder):
    """Thirteen tasks: 1 to 10 English with 30 instances, 11 French with more, 12 excluded with more, 13 the largest."""
    for number in range(1, 11):
        write_json(folder / "tasks" / f"task{number:03d}_one.json", sni_task(30, references=2))
    write_json(folder / "tasks" / "task011_french.json", sni_task(50, ("French",)))
    write_json(folder / "tasks" / "task012_excluded.json", sni_task(50))
    write_json(folder / "tasks" / "task013_large.json", sni_task(40))
    excluded = folder / "splits" / "default" / "excluded_tasks.txt"
    excluded.parent.mkdir(parents=True)
    excluded.write_text("task012_excluded\n")


# Fed-Aya, and FedMosaic's text clients


def aya_clients(count=20):
    languages = ["English", "fr", "Standard_Arabic", "zho"]
    return {
        f"user{client}": [
            {
                "instruction": f"prompt {client} {number}",
                "response": f"answer {number}",
                "language": languages[number % 4],
            }
            for number in range(count)
        ]
        + [{"instruction": "x", "response": "y", "language": "Yoruba"}]
        for client in range(38)
    }


def write_aya(folder):
    write_json(folder / "aya_38c_25k.json", aya_clients())


AYA_TOPICS = [f"Fed-aya_topic-{10 * client + task}" for client in range(8) for task in range(4)]
LARGE_TASKS = [part.name for client in range(52) for part in large_tasks(client)]


def text_rows(name, count):
    turns = lambda number: [{"from": "human", "value": f"{name} {number}?"}, {"from": "gpt", "value": f"a {number}"}]  # noqa: E731
    return [{"id": number, "conversations": turns(number)} for number in range(count)]


def write_texts(root, names):
    """Three training conversations and one to test, of each task DATASET-SUBSET."""
    for name in names:
        dataset, _, subset = name.rpartition("-")
        for split, count in (("train", 3), ("test", 1)):
            write_json(root / dataset / split / f"dataset-{subset}.json", text_rows(f"{split} {name}", count))


def write_public_texts(folder, count=4):
    """Conversations of more tokens than an alignment at rank 4 needs of two of them."""
    write_json(folder / "chatbotIT.json", text_rows("what all of us may see, and say, number", count))


def write_scope(folder):
    write_lines(
        folder / "gsm8k" / "main" / "train.jsonl",
        [{"question": f"how many {number}", "answer": f"count <<1+1=2>>\n#### {number}"} for number in range(40)],
    )
    categories = (
        "classification",
        "closed_qa",
        "general_qa",
        "open_qa",
        "information_extraction",
        "creative_writing",
        "brainstorming",
        "summarization",
    )
    write_lines(
        folder / "databricks-dolly-15k" / "databricks-dolly-15k.jsonl",
        [
            {
                "instruction": f"{name} {number}",
                "context": "about" if number % 2 else "",
                "response": "r",
                "category": name,
            }
            for name in categories
            for number in range(10)
        ],
    )
    languages = ("Java", "C", "PHP", "C#", "C++", "Python", "Go", "Pascal", "Scala", "COBOL")
    write_json(
        folder / "rosetta" / "rosetta_alpaca.json",
        [
            {"instruction": f"write {number}", "input": language, "output": f"code {language}"}
            for language in languages
            for number in range(10)
        ],
    )


# DRAKE and HFLB

DRAKE_PARTS: list[ClientTask] = [part for one in DRAKE for part in one.parts] + list(DRAKE_NEWCOMERS)
HFLB_PARTS: list[ClientTask] = [part for one in HFLB for part in one.parts]


# How the authors' scripts write the choices of a question, and an answer; most write the last.
ASKED = {
    "Abstract": ("Choice list:[['red', 'blue']].\n Your answer is:", "red"),
    "AQUA": ("Answer the question using the choices from the choice list.\nChoice list:['red', 'blue'].", "red"),
    "COCOQA": (" \n Choice list:['red', 'blue'] \n Your answer is:", "red"),
    "COMICS_Dialogue": ("Choice list:[A: red| B: blue, or so| C: green]. Answer with the option's letter.", "A"),
    "GQA": ("\n Choice lists: ['red', 'blue'].\n Your answer is:", "red"),
    "WCVQA": ("\n1. red\n2. blue\n3. green\n\nPrint only the answer with a single answer id (1,2,3).", "1"),
}
USUAL = ("Choice list:[red, blue]. Answer with one of them.", "red")


def vqa_rows(part, count, prefix=""):
    picture = f"{prefix}{part.dataset}/images/x.png"
    listed, answer = ("", "red") if part.open else ASKED.get(part.dataset, USUAL)
    question = f"<image>\nWhich? {listed}"
    return [
        {
            "id": number,
            "image": [picture] if number % 2 else picture,
            "extra": {"left": "out"},
            "conversations": [{"from": "human", "value": f"{number} {question}"}, {"from": "gpt", "value": answer}],
        }
        for number in range(count)
    ]


def write_parts(root, parts, prefix=""):
    for part in parts:
        (root / part.dataset / "images").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(root / part.dataset / "images" / "x.png")
        for split, count in (("train", 6), ("test", 2)):
            write_json(root / part.dataset / split / f"dataset-{part.subset}.json", vqa_rows(part, count, prefix))


def write_public_vqa(root):
    """Four records with an image, and one without."""
    part = ClientTask("llava_ft", 0)
    write_parts(root, [part])
    text = {"id": "t", "conversations": [{"from": "human", "value": "Text?"}, {"from": "gpt", "value": "Yes."}]}
    write_json(root / "llava_ft" / "mixed.json", [*vqa_rows(part, 4), text])
