"""`digits-vqa`: its records, parts and streams (docs/digits-vqa.md), and the backbones that ship."""

import hashlib
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from befit.config.experiment import ModelSettings
from befit.core.errors import ConfigError
from befit.data import registry
from befit.data.offline.digits import load
from befit.data.offline.digits_vqa import BLOCKS, deal, digits_vqa, digits_vqa_hetero, pool_of, records_hash
from befit.data.offline.digits_vqa_tasks import (
    NAMES,
    NEWCOMER_TASKS,
    SMALL,
    STREAMS,
    STYLES,
    generated_records,
    make_record,
    noisy,
    task_records,
)
from befit.data.papers.scenarios import SMALL as drake_small
from befit.models import load_backbone
from befit.tasks import make_task
from befit.zoo import zoo_names, zoo_path

# Of who holds which image, and who asks what, with seed 0: another Python or NumPy must not change it.
PARTITION = "499e033b242eed4d9a127e97c1d9fb690230452a790b0c2b927428b72d27f2b8"
RECORDS = "fe45157fabd7c66e626c6622a78037c5fd7fa5cfbe2ecb10fcb6df07a2426278"
# Of the noise of one image, rounded to 3 digits.
NOISE = "0.157 0.0 0.065 0.157"
SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def federation():
    return digits_vqa()


@pytest.fixture(scope="module")
def digits():
    return load()


def everyone(federation):
    return (*federation.clients, *federation.newcomers)


def sources(records):
    return {index for record in records for index in record["source"]}


# Images


def test_public_training_and_test_images_are_disjoint_and_stay_in_their_blocks(federation):
    assert [len(block) for block in BLOCKS.values()] == [500, 650, 647]
    assert sources(federation.public) <= set(BLOCKS["public"])
    for client in everyone(federation):
        assert sources(client.train) <= set(BLOCKS["train"])
        assert sources(client.test) <= set(BLOCKS["test"])


def test_every_client_has_65_images_of_its_own_six_or_seven_of_each_digit(federation, digits):
    dealt = deal(digits[1], 0)
    assert sorted(index for part in dealt for index in part.tolist()) == list(BLOCKS["train"])
    for part, client in zip(dealt, federation.clients, strict=True):
        assert len(part) == 65 and set(Counter(digits[1][part].tolist()).values()) <= {5, 6, 7, 8}
        assert sources(client.train) <= set(part.tolist())


@pytest.mark.parametrize(("streams", "styles"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_with_few_streams_clients_have_them_in_turns_and_ask_about_images_of_their_own(federation, streams, styles):
    few = digits_vqa(streams=streams)
    tasks = [client.info["tasks"] for client in few.clients]
    assert len(set(tasks)) == streams and all(tasks[index] == tasks[index % streams] for index in range(10))
    assert len({client.info["style"] for client in few.clients}) == styles
    for client, same in zip(few.clients, federation.clients, strict=True):
        others = [other for other in few.clients if other.id != client.id]
        assert not sources(client.train) & set().union(*(sources(other.train) for other in others))
        assert (client.info["tasks"] == same.info["tasks"]) == (records_hash([client]) == records_hash([same]))


def test_as_many_streams_as_clients_is_the_same_federation(federation):
    assert records_hash(digits_vqa(streams=10).clients) == records_hash(federation.clients)


@pytest.mark.parametrize("streams", [0, 4])
def test_streams_that_cannot_be_are_refused(streams):
    with pytest.raises(ConfigError, match=rf"benchmark.streams: must be 1 to the number of clients, 3, got {streams}"):
        digits_vqa(clients=3, streams=streams)


def test_the_images_of_a_record_are_those_of_its_source_in_its_style(federation, digits):
    """Pixel by pixel for the styles that a line of NumPy gives; a record has one mark for each image."""
    images = digits[0]
    plain = {"plain": lambda x: x, "invert": lambda x: 1 - x, "rot": lambda x: x.T[::-1]}
    compared = 0
    for client in everyone(federation):
        for record in (*client.train, *client.test):
            style = record["task"].split("/")[1]
            assert record["conversation"][0]["content"].count("<image>") == len(record["images"])
            for image, index in zip(record["images"], record["source"], strict=True):
                assert image.shape == (8, 8) and image.dtype == np.float32
                assert 0 <= image.min() <= image.max() <= 1
                if style in plain:
                    assert np.array_equal(image, plain[style](images[index]))
                    compared += 1
    assert compared > 1000


def test_noise_is_that_of_the_record_and_the_place_and_of_a_quarter():
    """sigma .25 before clipping at 0 and 1: of a grey image a share of 2 (1 - Phi(2)) = .0455 is clipped."""
    grey = np.full((8, 8), 0.5, np.float32)
    assert " ".join(str(value) for value in noisy(np.zeros((8, 8), np.float32), "a")[0, :4].round(3)) == NOISE
    drawn = np.stack([noisy(grey, f"name-{n}") for n in range(200)])
    assert drawn.std() == pytest.approx(0.24, abs=0.01)
    assert np.isin(drawn, (0, 1)).mean() == pytest.approx(0.0455, abs=0.008)
    assert np.array_equal(noisy(grey, "x"), noisy(grey, "x")) and not np.array_equal(noisy(grey, "x"), noisy(grey, "y"))


def test_thick_and_blurred_images_are_maxima_and_means_of_three_by_three():
    """One bright pixel becomes nine, or nine of a ninth; at the border what lies outside repeats the edge."""
    dot = np.zeros((8, 8), np.float32)
    dot[3, 4] = 1
    assert STYLES["thick"](dot, "").sum() == 9 and STYLES["thick"](dot, "")[2:5, 3:6].min() == 1
    assert STYLES["blur"](dot, "")[2:5, 3:6] == pytest.approx(np.full((3, 3), 1 / 9))
    ones = np.ones((8, 8), np.float32)
    assert STYLES["blur"](ones, "") == pytest.approx(ones)
    assert {int(np.argwhere(STYLES["roll"](dot, str(n)))[0][1]) for n in range(9)} == {3, 5}


# Questions


def test_every_task_of_the_streams_is_held_by_two_or_three():
    assert (len(STREAMS), sum(map(len, STREAMS))) == (10, 40)
    held = Counter(task for stream in STREAMS for task in stream)
    assert len(held) == 16 and set(held.values()) <= {2, 3}
    assert all(len(set(stream)) == 4 for stream in STREAMS)
    assert not set(NEWCOMER_TASKS) & set(held)


def test_clients_and_newcomers_have_their_tasks_in_order_and_their_sizes(federation):
    assert [client.id for client in federation.clients] == [f"client-{index:02d}" for index in range(10)]
    assert [client.id for client in federation.newcomers] == [task.replace("/", ".") for task in NEWCOMER_TASKS]
    for client, stream in zip(federation.clients, STREAMS, strict=True):
        for split in ("train", "test"):
            assert [record["task"] for record in getattr(client, split)] == [task for task in stream for _ in range(60)]
        assert client.info["tasks"] == ", ".join(stream) and not client.val
        assert [one["task"] for one in federation.manifest["streams"][client.id]] == list(stream)
    assert [client.info["style"] for client in federation.clients] == [
        *["invert"] * 3,
        *["rot"] * 3,
        *["noise, plain"] * 4,
    ]
    sizes = [client.info["size"] for client in federation.clients]
    assert [index for index, size in enumerate(sizes) if size == "small"] == list(SMALL)


def gold(record, labels):
    """The answer, from the labels of the images and the text of the question."""
    seen, kind = [int(labels[index]) for index in record["source"]], record["task"].split("/")[0]
    asked = record["conversation"][0]["content"]
    return {
        "digit": lambda: str(seen[0]),
        "name": lambda: WORDS[seen[0]],
        "parity": lambda: "odd" if seen[0] in (1, 3, 5, 7, 9) else "even",
        "larger": lambda: "first" if seen[0] - seen[1] > 0 else "second",
        "same": lambda: "yes" if seen[0] == seen[1] else "no",
        "max": lambda: str(sorted(seen)[-1]),
        "count": lambda: str(seen.count(int(asked.split("are ")[1].rstrip("?")))),
        "sum": lambda: str(sum(seen)),
        "smallest": lambda: str(sorted(seen)[0]),
    }[kind]()


WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
IMAGES = {"digit": 1, "name": 1, "parity": 1, "larger": 2, "same": 2, "max": 3, "count": 4, "sum": 2, "smallest": 3}
CHOICES = {"parity": {"even", "odd"}, "larger": {"first", "second"}, "same": {"yes", "no"}}


def test_every_answer_is_right_and_every_record_passes_the_rules_of_its_kind(federation, digits):
    ids = Counter(record["id"] for client in everyone(federation) for s in SPLITS for record in getattr(client, s))
    assert set(ids.values()) == {1}
    for client in everyone(federation):
        for record in (*client.train, *client.test):
            question, (asked, told) = record["task"].split("/")[0], record["conversation"]
            assert (asked["role"], told["role"]) == ("user", "assistant")
            assert told["content"] == gold(record, digits[1])
            assert len(record["images"]) == IMAGES[question]
            assert (record["form"] == "choice") == (question in CHOICES)
            if question in CHOICES:
                assert set(record["choices"]) == CHOICES[question]
                assert asked["content"].endswith(f"Choice list:[{', '.join(record['choices'])}]")


def records_of(federation, question, split="test"):
    return [r for c in everyone(federation) for r in getattr(c, split) if r["task"].split("/")[0] == question]


def test_larger_is_never_equal_and_same_is_balanced_and_of_two_images(federation, digits):
    labels = digits[1]
    for record in records_of(federation, "larger"):
        assert labels[record["source"][0]] != labels[record["source"][1]]
    same = records_of(federation, "same")
    assert sum(record["conversation"][1]["content"] == "yes" for record in same) == len(same) / 2
    assert all(record["source"][0] != record["source"][1] for record in same)


def test_four_images_match_the_counted_digit_with_two_fifths(digits):
    """Mean of 2000 counts of four with p = .4 is 1.6; four standard errors sqrt(4 .4 .6 / 2000) are .09."""
    pool = pool_of(digits[1], BLOCKS["test"])
    made = task_records(digits[0], pool, "count/plain", 2000, "many", "seed")
    counts = [int(record["conversation"][1]["content"]) for record in made]
    assert np.mean(counts) == pytest.approx(1.6, abs=0.09) and set(counts) == {0, 1, 2, 3, 4}


def test_digits_are_asked_about_as_often_as_there_are_images(digits):
    """647 test images; 3000 draws of a name; every digit's share within four standard errors, .022."""
    pool = pool_of(digits[1], BLOCKS["test"])
    made = task_records(digits[0], pool, "name/plain", 3000, "many", "seed")
    drawn = Counter(record["conversation"][1]["content"] for record in made)
    for digit, name in enumerate(NAMES):
        assert drawn[name] / 3000 == pytest.approx(len(pool[digit]) / 647, abs=0.022)
    assert len(sources(made)) > 630  # of 647: each is left out with a chance of e^-4.6


def test_public_records_are_the_backbones_kind_and_others_than_those_it_saw(federation, digits):
    """Five questions, plain and rolled; inverted and turned only where the digit itself is asked for."""
    assert len(federation.public) == 2000
    found = {record["task"] for record in federation.public}
    questions = ("digit", "name", "parity", "larger", "same")
    expected = {f"{question}/{style}" for question in questions for style in ("plain", "roll")}
    assert found == expected | {"digit/invert", "digit/rot"}
    assert not found & {task for stream in STREAMS for task in stream}
    pool = pool_of(digits[1], BLOCKS["public"])
    seen = {(r["task"], *r["source"]) for r in islice(generated_records(digits[0], pool, "zoo"), 2000)}
    again = sum((r["task"], *r["source"]) in seen for r in federation.public if len(r["source"]) == 2)
    assert again < 20  # of 800 pairs out of 500 * 499


# Seeds and sizes


def test_the_same_seed_gives_the_same_questions_and_another_one_others(federation):
    partition = federation.manifest["partition"]
    assert (partition["sha256"], partition["records"]) == (PARTITION, RECORDS)
    other = digits_vqa(seed=1)
    assert other.manifest["partition"]["sha256"] != PARTITION
    assert other.manifest["partition"]["records"] != RECORDS
    assert sources(other.clients[0].train) != sources(federation.clients[0].train)


def test_the_manifest_can_be_written(federation):
    assert json.loads(json.dumps(federation.manifest))["counts"]["client-00"] == {"train": 240, "val": 0, "test": 240}


def test_validation_keeps_images_that_are_not_trained_on(federation, digits):
    """Twenty, two of each digit, so that there is something to call the same."""
    split = digits_vqa(val=15)
    for with_val, without in zip(split.clients, federation.clients, strict=True):
        assert len(with_val.val) == 60 and len(with_val.train) == 240
        assert not sources(with_val.val) & sources(with_val.train)
        assert [record["source"] for record in with_val.test] == [record["source"] for record in without.test]
    for record in records_of(split, "same", "val"):
        assert record["conversation"][1]["content"] == gold(record, digits[1])


def test_fewer_clients_are_the_first_ones_and_hold_what_they_held(federation):
    few = digits_vqa(clients=2, train=5, test=3)
    assert [client.id for client in few.clients] == ["client-00", "client-01"]
    assert [len(client.train) for client in few.clients] == [20, 20]
    assert few.clients[1].train[0]["source"] == federation.clients[1].train[0]["source"]
    assert len(few.newcomers) == 7


def test_impossible_sizes_are_told_all_at_once():
    with pytest.raises(ConfigError) as caught:
        digits_vqa(clients=11, train=0, val=-1, test=-2)
    assert [line.split(":")[0] for line in caught.value.problems] == [
        f"benchmark.{key}" for key in ("clients", "train", "val", "test")
    ]


def test_it_is_a_benchmark_by_name():
    entry = registry.get("digits-vqa")
    assert (entry.task, entry.default_model, entry.families) == ("vqa", "digits-llava-s", {})


def test_hetero_has_the_same_records_and_two_backbones(federation):
    entry = registry.get("digits-vqa-hetero")
    assert (entry.default_model, entry.families) == ("digits-llava-l", {"size=small": "digits-llava-s"})
    made = digits_vqa_hetero(clients=4, train=3, test=2)
    assert made.manifest == digits_vqa(clients=4, train=3, test=2).manifest
    assert [client.info for client in made.clients] == [client.info for client in federation.clients[:4]]


def test_sizes_are_those_of_drake_and_most_clients_have_one_of_the_other_size_that_writes_as_they_do(federation):
    """One small and two large in the first style, three large in the second, three small and one large in the third."""
    assert {*SMALL} == drake_small["drake"]["paper"]
    sizes = {}
    for client in federation.clients:
        sizes.setdefault(client.info["style"], []).append(client.info["size"])
    assert [(sizes[style].count("small"), len(sizes[style])) for style in sizes] == [(1, 3), (0, 3), (3, 4)]
    assert digits_vqa_hetero(clients=2, train=2, test=2).version == registry.get("digits-vqa-hetero").version == "2"


def test_a_record_does_not_depend_on_how_many_others_there_are(digits):
    pool = pool_of(digits[1], BLOCKS["test"])
    many = task_records(digits[0], pool, "max/noise", 9, "x", "s")
    alone = make_record(digits[0], pool, "max/noise", "x-max-noise-004", 4, "s")
    assert alone["source"] == many[4]["source"]
    assert all(np.array_equal(a, b) for a, b in zip(alone["images"], many[4]["images"], strict=True))


# The backbones

# Parameters, and accuracy on plain test images: at least five points below measured.
BACKBONES = {
    "digits-llava-s": (247_744, {"digit": 0.87, "name": 0.84, "parity": 0.91, "larger": 0.86, "same": 0.73}),
    "digits-llava-l": (647_968, {"digit": 0.85, "name": 0.82, "parity": 0.89, "larger": 0.83, "same": 0.78}),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_ship_as_safetensors_of_the_stated_size(name):
    folder = zoo_path(name)
    assert name in zoo_names() and folder is not None
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}
    weights = folder / "model.safetensors"
    assert weights.stat().st_size < 3_000_000
    with safe_open(weights, "np") as file:
        sizes = [int(np.prod(file.get_slice(key).get_shape())) for key in file.keys()]  # noqa: SIM118
    assert sum(sizes) == BACKBONES[name][0]
    assert all(path.stat().st_size < 10_000 for path in Path(folder).iterdir() if path.suffix != ".safetensors")


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_know_what_they_were_trained_on_and_not_the_clients_tasks(name, digits):
    """120 questions of each kind about test images; of what clients are asked, little is known."""
    backbone = load_backbone(ModelSettings(name), "vqa", (), 0)
    task = make_task("vqa", backbone.processor, max_new_tokens=8)
    pool = pool_of(digits[1], BLOCKS["test"])

    def score(asked, count):
        made = task.prepare(task_records(digits[0], pool, asked, count, "probe", "probe"))
        return task.evaluate(backbone.model, made, 120, "cpu")[task.metric]

    for question, least in BACKBONES[name][1].items():
        assert score(f"{question}/plain", 120) >= least
    assert max(score(asked, 60) for asked in ("name/invert", "max/plain")) < 0.3
    assert score("larger/invert", 60) < 0.65


def test_hashes_of_the_backbones_are_recorded():
    for name in BACKBONES:
        folder = zoo_path(name)
        pins = json.loads((folder.parent / "sha256.json").read_text())
        assert pins[name] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
