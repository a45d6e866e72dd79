"""Every study that ships, once over a few records: on data of its own schema made here, and small models.

Tried are the cells whose benchmark or task no study before has, and a method that learns across families. Slow are the
first cell of every study and all kinds of cells: of those that differ in numbers alone the first is run, and a method
with its settings on one study of a task, but every method of a study on that study's loader. That all cells are in
order is what `befit check` says of each, in test_compare.py; every method is run in tests/contract. A study of a new
benchmark needs an entry in FIXTURES; without it this file fails.
"""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.data.registry import get
from befit.protocol.registry import build_method
from befit.studies.compare.cells import StudyCell
from befit.studies.compare.comparison import compare, make_plan
from befit.studies.compare.plan import Plan
from tests.unit.data.papers import paper_data
from tests.unit.models.tiny_models import save_bert, save_llama, save_vit

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path for path in (ROOT / "studies").rglob("*.yaml") if ".chosen" not in path.name)
SUFFIXES = ("html", "md", "tex", "csv", "json")


@dataclass(frozen=True)
class Fixture:
    """A benchmark's data and what runs on it here.

    write      puts its files, and models where there are none that ship, into a folder
    overrides  what makes the study small; {root} is that folder
    models     in place of a study's own: the model, and that of its family `small`; other families get the first
    """

    write: Callable[[Path], object]
    overrides: tuple[str, ...]
    models: tuple[str, str] | None = None


LLAMA = "model.id={root}/llama", "model.max_length=256"
LLAMAS, LLAVAS = ("skills-llama", "skills-llama-s"), ("digits-llava-l", "digits-llava-s")
SHORT = "model.max_length=128"
TALK = "benchmark.public=chatbotIT.json"
PICTURES = "benchmark.public=llava_ft/mixed.json"


def write_cifar(root: Path) -> None:
    for split, made in paper_data.cifar_images().items():
        paper_data.write_cifar(root, {split: made}, split)
    save_vit(root / "vit", channels=3)


def with_llama(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def written(root: Path) -> None:
        write(root)
        save_llama(root / "llama", max_position_embeddings=256)

    return written


def with_bert(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def written(root: Path) -> None:
        write(root)
        save_bert(root / "bert", "encoder")

    return written


def with_talk(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def written(root: Path) -> None:
        write(root)
        paper_data.write_public_texts(root)

    return written


def with_pictures(parts: list[paper_data.ClientTask]) -> Callable[[Path], None]:
    def written(root: Path) -> None:
        paper_data.write_parts(root, parts)
        paper_data.write_public_vqa(root)

    return written


CIFAR = Fixture(write_cifar, ("model.id={root}/vit", "benchmark.minimum_train=5", "benchmark.minimum_test=1"))
SMALL = ("benchmark.train=8", "benchmark.val=4", "benchmark.test=4", *LLAMA)
COMMONSENSE = Fixture(with_llama(paper_data.write_commonsense), SMALL)
BERT = "model.id={root}/bert", "model.max_length=16"
WITHOUT_WORDNET = "evaluate.metrics=[rougeL, meteor_exact_stem]", "evaluate.wins=[meteor_exact_stem]"
FIXTURES = {
    "cifar100-10": CIFAR,
    "cifar100-20": CIFAR,
    "commonsense-8": COMMONSENSE,
    "commonsense-16": COMMONSENSE,
    "flan-8": Fixture(with_llama(paper_data.write_flan), SMALL),
    "sni-10": Fixture(with_llama(paper_data.write_sni), SMALL),
    "xnli-600": Fixture(
        with_bert(paper_data.write_xnli), ("benchmark.clients=2", "benchmark.train=20", "benchmark.test=10", *BERT)
    ),
    "masakhanews-320": Fixture(with_bert(paper_data.write_news), ("benchmark.clients=2", *BERT)),
    "fedaya-38": Fixture(with_llama(paper_data.write_aya), (*LLAMA, *WITHOUT_WORDNET)),
    "fedaya-8": Fixture(
        with_talk(lambda root: paper_data.write_texts(root, paper_data.AYA_TOPICS)), (TALK, SHORT), LLAMAS
    ),
    "fedscope-5": Fixture(with_talk(paper_data.write_scope), ("benchmark.test=3", TALK, SHORT), LLAMAS),
    "fed-llm-large-52": Fixture(
        with_talk(lambda root: paper_data.write_texts(root, paper_data.LARGE_TASKS)), (TALK, SHORT), LLAMAS
    ),
    "drake": Fixture(with_pictures(paper_data.DRAKE_PARTS), (PICTURES, SHORT), LLAVAS),
    "hflb": Fixture(with_pictures(paper_data.HFLB_PARTS), (PICTURES, SHORT), LLAVAS),
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with a benchmark's files, written when it is first asked for."""
    written: dict[str, Path] = {}

    def root(benchmark: str) -> Path:
        if benchmark not in written:
            written[benchmark] = tmp_path_factory.mktemp(benchmark)
            FIXTURES[benchmark].write(written[benchmark])
        return written[benchmark]

    return root


def benchmark_of(plan: Plan) -> str:
    benchmark = plan.cells[0].experiment.benchmark
    assert benchmark is not None, f"{plan.name} names no benchmark"
    return benchmark.name


def of_a_paper(benchmark: str) -> bool:
    return get(benchmark).build.__module__.startswith("befit.data.papers.")


def small(plan: Plan, roots: Callable[[str], Path]) -> list[str]:
    """What makes a study run here: nothing but few records where its benchmark ships."""
    benchmark = benchmark_of(plan)
    pictures = get(benchmark).task == "vqa"  # whose clients have four tasks, with so many records of each
    if not of_a_paper(benchmark):
        return ["limit.records=1", "evaluate.max_new_tokens=2"] if pictures else []
    assert benchmark in FIXTURES, f"{plan.name}: write files of {benchmark} in FIXTURES, so that it is tried"
    root = roots(benchmark)
    own = [one.format(root=root) for one in FIXTURES[benchmark].overrides]
    few = f"limit.records={1 if pictures else 2}"
    return [
        few,
        f"benchmark.root={root}",
        "model.dtype=float32",
        "model.device=cpu",
        "method.rank=4",
        "evaluate.max_new_tokens=2",
        *own,
    ]


def skip_without_package(plan: Plan) -> None:
    kind, _, place = plan.cells[0].experiment.model.id.partition(":")
    package = place.partition("/")[0]
    if kind == "package" and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}: see the head of the study")


def with_models(plan: Plan, large: str, small: str) -> Plan:
    """The plan with models that ship in place of those of its cells."""

    def changed(cell: StudyCell) -> StudyCell:
        one = cell.experiment
        families = {
            name: replace(family, model=replace(family.model, id=small if name == "small" else large))
            for name, family in one.families.items()
        }
        common = one.common_model and replace(one.common_model, id=small, quantise="none")  # fewer bits want a GPU
        return replace(
            cell, experiment=replace(one, model=replace(one.model, id=large), families=families, common_model=common)
        )

    runs = tuple(replace(run, cells=tuple(map(changed, run.cells))) for run in plan.runs)
    return replace(plan, runs=runs)


def shape(value: Any) -> Any:
    """A setting with its numbers left out."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return value if value is None or isinstance(value, bool | str) else "a number"


def kinds(cell: StudyCell, every: bool) -> set[str]:
    """What a cell tries: its benchmark and its task. With `every`: a method with all its settings but numbers, on a
    task, and the method on the data of a loader.

    How many families there are counts where a method lets them learn from each other; any other serves each by itself.
    """
    experiment = cell.experiment
    assert experiment.benchmark is not None
    benchmark, name = get(experiment.benchmark.name), experiment.method["name"]
    families = len(experiment.families) if build_method(experiment.method).needs.mixed else 0
    if not every:
        mixed = {f"{name} of {families}"} if families else set()
        return {*mixed, f"benchmark {benchmark.name}", f"task {benchmark.task}"}
    settings = json.dumps([benchmark.task, families, shape(dict(experiment.method))], sort_keys=True)
    return {settings, f"{benchmark.build.__module__} {name}"}


def name_of(study: Path) -> str:
    return study.relative_to(ROOT / "studies").as_posix()


@cache
def whole(study: Path) -> Plan:
    return make_plan(study, trial=True)


@cache
def kinds_of(study: Path, every: bool) -> dict[str, set[str]]:
    """Of every run, by its label."""
    return {run.label: kinds(run.cells[0], every) for run in whole(study).runs}


@cache
def tried(every: bool) -> dict[Path, list[str]]:
    """Labels of the runs that each study tries: those of a kind that no study before it has; with `every` the first."""
    labels: dict[Path, list[str]] = {study: [] for study in STUDIES}
    seen: set[str] = set()
    for study in STUDIES:
        for label, of_run in kinds_of(study, every).items():
            if not of_run <= seen or (every and not labels[study]):
                labels[study].append(label)
            seen |= of_run
    return labels


def part(plan: Plan, labels: list[str]) -> Plan:
    """The plan with some of its runs alone, in its tables too."""
    tables = [
        replace(one, runs={place: label for place, label in one.runs.items() if label in labels}) for one in plan.tables
    ]
    reference = plan.reference if plan.reference in labels else labels[0]
    runs = tuple(run for run in plan.runs if run.label in labels)
    return replace(plan, runs=runs, tables=tuple(tables), reference=reference)


@pytest.mark.parametrize("study", STUDIES, ids=name_of)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["new", "every kind"])
def test_the_cells_of_a_study_run_and_have_scores(
    study: Path, every: bool, roots: Callable[[str], Path], tmp_path: Path
) -> None:
    if not tried(every)[study]:
        pytest.skip("the studies before it have tried its benchmark and task")
    skip_without_package(whole(study))
    overrides = small(whole(study), roots)
    if min(len(run.cells[0].experiment.families) for run in whole(study).runs if run.label in tried(every)[study]) > 1:
        overrides.append("limit.clients=1")  # of each family, of which there are three with that of `model`
    plan = part(make_plan(study, trial=True, overrides=overrides), tried(every)[study])
    fixture = FIXTURES.get(benchmark_of(plan))
    if fixture is not None and fixture.models is not None:
        plan = with_models(plan, *fixture.models)
    done = compare(plan, out=tmp_path)
    assert not done.failures, done.failures[0].traceback
    check(tmp_path, plan)


def test_the_command_tries_every_cell(tmp_path: Path) -> None:
    study = ROOT / "studies" / "offline" / "skills-rates-validation.yaml"
    command = ["compare", str(study), "limit.records=2", "--trial", "--quiet", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    check(tmp_path, make_plan(study, trial=True))


def check(path: Path, plan: Plan) -> None:
    """All five files; a score, and a file to use, for every client of every cell."""
    results = json.loads((path / "compare.json").read_text())
    assert not results["failures"]
    assert [one["label"] for one in results["runs"]] == [one.label for one in plan.runs]
    for run in results["runs"]:
        (cell,) = run["seeds"]
        folder = path / cell["folder"]
        assert len(cell["clients"]) >= 2 and None not in cell["clients"].values(), run["label"]
        for client in cell["clients"]:
            assert list((folder / "clients" / client).iterdir()), f"{run['label']}: nothing written for {client}"
        own = json.loads((folder / "results.json").read_text())
        assert own["clients"].keys() == cell["clients"].keys() and not own["failures"]
    for suffix in SUFFIXES:
        assert (path / f"compare.{suffix}").stat().st_size > 100, suffix
    with (path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(run["seeds"][0]["clients"]) for run in results["runs"])


@pytest.mark.parametrize("every", [False, True], ids=["fast", "slow"])
def test_every_kind_is_tried_and_every_fixture_is_a_papers(every: bool) -> None:
    there = {kind for study in STUDIES for of_run in kinds_of(study, every).values() for kind in of_run}
    assert there == {
        kind for study, labels in tried(every).items() for label in labels for kind in kinds_of(study, every)[label]
    }
    assert all(map(of_a_paper, FIXTURES))
