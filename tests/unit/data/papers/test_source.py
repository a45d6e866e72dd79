"""Where data of a paper may be, and what a person is told when it is not there."""

import re
from pathlib import Path

import pytest
from datasets import Dataset

from befit.config.load import load_experiment
from befit.config.overrides import with_seed
from befit.core.errors import ConfigError, DataError
from befit.data.files.readers import read_rows
from befit.data.papers.assemble import content_hash, digest, ordered
from befit.data.papers.source import Place, Source, read_split, split_files
from befit.data.registry import build, get, names
from tests.unit.data.papers.paper_data import write_lines

SOURCE = Source("someone/set", "MIT", config="plain", revision="abc123")


@pytest.mark.parametrize(
    "name", ["train.jsonl", "data/train.jsonl", "plain/train.jsonl", "data/plain/train.jsonl", "plain/train/0000.jsonl"]
)
def test_a_split_is_found_where_hubs_and_people_put_it(tmp_path, name):
    write_lines(tmp_path / name, [{"a": 1}])
    rows = read_split(Place("test", str(tmp_path)), SOURCE, "train", ("a",))
    assert [row.values["a"] for row in rows] == [1]


def test_a_datasets_directory_is_a_split(tmp_path):
    Dataset.from_list([{"a": 3}]).save_to_disk(str(tmp_path / "train"))
    assert read_split(Place("test", str(tmp_path)), SOURCE, "train", ("a",))[0].values["a"] == 3


def test_parts_are_read_in_order_and_a_missing_one_is_told(tmp_path):
    place = Place("test", str(tmp_path))
    for number in (1, 0):
        write_lines(tmp_path / f"train-0000{number}-of-00002.jsonl", [{"a": number}])
    assert [row.values["a"] for row in read_split(place, SOURCE, "train", ("a",))] == [0, 1]
    (tmp_path / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(DataError, match="has 1 of 2 parts of the train split"):
        split_files(place, SOURCE, "train")


def test_two_places_with_one_split_are_refused(tmp_path):
    for name in ("train.jsonl", "plain/train.jsonl"):
        write_lines(tmp_path / name, [{"a": 1}])
    with pytest.raises(DataError, match=r"exists 2 times: .*train\.jsonl, .*plain/train\.jsonl\. Keep one"):
        split_files(Place("test", str(tmp_path)), SOURCE, "train")
    write_lines(tmp_path / "both" / "train.jsonl", [{"a": 1}])
    write_lines(tmp_path / "both" / "train-00000-of-00001.jsonl", [{"a": 1}])
    with pytest.raises(DataError, match=r"train\.jsonl, train-00000-of-00001\.jsonl"):
        split_files(Place("test", str(tmp_path / "both")), SOURCE, "train")


def test_an_absent_split_says_what_was_looked_for_and_how_to_get_it(tmp_path):
    with pytest.raises(DataError) as caught:
        read_split(Place("test", str(tmp_path)), SOURCE, "train", ("a",))
    assert "looked for train.*, train-*-of-*" in str(caught.value)
    assert f"hf download someone/set --repo-type dataset --revision abc123 --local-dir {tmp_path}" in str(caught.value)


def test_an_absent_column_shows_those_that_are_there(tmp_path):
    write_lines(tmp_path / "train.jsonl", [{"a": 1}, {"b": 2}])
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: there is no a; found b"):
        read_split(Place("test", str(tmp_path)), SOURCE, "train", ("a",))


def papers():
    return [name for name in names() if get(name).build.__module__.startswith("befit.data.papers.")]


def test_every_benchmark_of_a_paper_is_there():
    assert set(papers()) >= {
        "cifar100-10",
        "cifar100-20",
        "commonsense-8",
        "commonsense-16",
        "flan-8",
        "sni-10",
        "xnli-600",
        "masakhanews-320",
        "fedaya-38",
        "fedaya-8",
        "fedscope-5",
        "fed-llm-large-52",
        "drake",
        "hflb",
    }


@pytest.mark.parametrize("name", papers())
def test_without_data_every_benchmark_says_what_to_get_and_where_to_put_it(name, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)benchmark\.root: .* reads data that befit does not ship.*[Gg]et"):
        build(name, None, {})
    with pytest.raises(DataError, match=r"(?s)nowhere.*[Gg]et"):
        build(name, None, {"root": str(tmp_path / "nowhere")})


def test_hub_and_root_together_and_unknown_revisions_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        build("cifar100-10", None, {"root": str(tmp_path), "hub": True, "revisions": {"uoft-cs/cifar10": "abc"}})
    assert len(caught.value.problems) == 2
    assert "does not load uoft-cs/cifar10. Did you mean: uoft-cs/cifar100?" in str(caught.value)


def test_a_hub_that_cannot_be_reached_names_the_download(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"(?s)revision aadb3af, split train\) cannot be loaded.*hf download uoft-cs"):
        build("cifar100-10", None, {"hub": True})


def test_the_order_of_rows_is_that_of_their_content(tmp_path):
    rows = [{"a": "x", "b": 1}, {"a": "y", "b": 2}, {"a": "z", "b": 3}]
    first, sha256 = ordered(read_rows(write_lines(tmp_path / "1.jsonl", rows), ()), ("a", "b"))
    again, same = ordered(read_rows(write_lines(tmp_path / "2.jsonl", rows[::-1]), ()), ("a", "b"))
    assert [row.values for row in first] == [row.values for row in again] and sha256 == same
    assert content_hash([digest({"a": "x"})]) != content_hash([digest({"a": "X"})])


def test_a_root_in_a_configuration_counts_from_its_folder(tmp_path):
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "run.yaml"
    path.write_text("{benchmark: {name: drake, root: ../data, scenario: mine.json}, method: fedit}\n")
    found = load_experiment(path).benchmark
    assert found is not None and found.arguments["root"] == str(tmp_path / "data")
    assert found.arguments["scenario"] == str(tmp_path / "configs" / "mine.json")
    assert load_experiment({"benchmark": "drake", "method": "fedit"}).benchmark.arguments["root"] == ""


def test_seeds_of_a_comparison_leave_the_papers_partitions_alone():
    kept, changed = ({"benchmark": {"name": name, "seed": 7}, "method": "fedit"} for name in ("xnli-600", "digits"))
    seeds = [with_seed(load_experiment(one), 52) for one in (kept, changed)]
    assert [one.federation.seed for one in seeds] == [52, 52]
    assert [one.benchmark.arguments["seed"] for one in seeds if one.benchmark] == [7, 52]
    assert not any(get(name).seeded for name in papers())


PAPERS = [name for name in names() if get(name).build.__module__.startswith("befit.data.papers.")]


@pytest.mark.parametrize("name", PAPERS)
def test_absent_data_is_named_with_the_key_the_place_and_how_to_get_it(name, tmp_path):
    """Without a root, with one that is not there, and with an empty one: every time all that is to be done."""
    (tmp_path / "empty").mkdir()
    for root in ("", tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises((ConfigError, DataError)) as caught:
            build(name, None, {"root": str(root)})
        said = str(caught.value)
        assert name in said and "benchmark.root" in said and "docs/benchmarks.md" in said
        ways = [line for line in said.splitlines() if line.strip().startswith("Get ")]
        assert ways and all(str(root or "DIR") in way for way in ways), said
        assert all("hf download" in way or "put it into" in way for way in ways)


def test_the_page_has_a_row_for_every_benchmark():
    page = (Path(__file__).parents[4] / "docs" / "benchmarks.md").read_text()
    table = page.split("## What to get")[1].split("## What is checked")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    shown = {first + rest for row in rows for first, rest in named(row)}
    assert shown == set(PAPERS)


def named(cell):
    """`cifar100-10`, `-20` are two names with one beginning."""
    first, *others = re.findall(r"`([^`]+)`", cell)
    return [(first, "")] + [(first.rpartition("-")[0], one) for one in others]
