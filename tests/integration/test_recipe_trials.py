"""Every recipe that ships, once over a few records: on data of its own schema made here, and small models.

A recipe of a new benchmark needs an entry in FIXTURES; without it this file fails, so that no recipe is forgotten.
"""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from befit.benchmarks.registry import get
from befit.cli.main import app
from befit.compare.comparison import make_plan
from befit.compare.plan import Plan
from tests.unit import paper_data
from tests.unit.tiny_models import save_bert, save_llama, save_vit

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
# Those of which another recipe has the same methods on the same data, and those that only choose settings: they take as
# long again, and are run by make test-slow.
SLOW = {
    "aggregation-guidance-validation.yaml", "fedmosaic/drake-static.yaml", "fedmosaic/fed-llm-large.yaml",
    "fedmosaic/hflb-dynamic.yaml", "fedp2eft/fedaya-38-mobile.yaml", "fedp2eft/masakhanews-320.yaml",
    "fedp2eft/xnli-600.yaml", "offline/aggregation-guidance-smoke.yaml", "offline/digits-vqa-dynamic.yaml",
    "offline/names-p2eft-fedl2p.yaml", "offline/names-p2eft-minilm.yaml", "offline/names-p2eft.yaml",
    "offline/potara-digits.yaml", "offline/rates-validation.yaml", "offline/skills-families.yaml",
    "offline/skills-rates-validation.yaml", "potara/cifar100-20.yaml", "potara/commonsense-16.yaml",
}  # fmt: skip
SUFFIXES = ("html", "md", "tex", "csv", "json")


@dataclass(frozen=True)
class Fixture:
    """A benchmark's data and what runs on it here.

    write      puts its files, and models where there are none that ship, into a folder
    overrides  what makes the recipe small; {root} is that folder
    """

    write: Callable[[Path], object]
    overrides: tuple[str, ...]


LLAMA = "model.id={root}/llama", "model.max_length=256"
TWO_LLAMAS = "model.id=skills-llama", "families.small.model.id=skills-llama-s", "model.max_length=128"
TWO_LLAVAS = "model.id=digits-llava-l", "families.small.model.id=digits-llava-s", "model.max_length=128"
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


def with_pictures(parts: list[paper_data.Part]) -> Callable[[Path], None]:
    def written(root: Path) -> None:
        paper_data.write_parts(root, parts)
        paper_data.write_public_vqa(root)

    return written


CIFAR = Fixture(write_cifar, ("model.id={root}/vit", "benchmark.minimum_train=5", "benchmark.minimum_test=1"))
SMALL = ("benchmark.train=8", "benchmark.val=4", "benchmark.test=4", *LLAMA)
COMMONSENSE = Fixture(with_llama(paper_data.write_commonsense), SMALL)
BERT = "model.id={root}/bert", "model.max_length=16"
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
    "fedaya-38": Fixture(with_llama(paper_data.write_aya), LLAMA),
    "fedaya-8": Fixture(
        with_talk(lambda root: paper_data.write_texts(root, paper_data.AYA_TOPICS)), (TALK, *TWO_LLAMAS)
    ),
    "fedscope-5": Fixture(with_talk(paper_data.write_scope), ("benchmark.test=3", TALK, *TWO_LLAMAS)),
    "fed-llm-large-52": Fixture(
        with_talk(lambda root: paper_data.write_texts(root, paper_data.LARGE_TASKS)), (TALK, *TWO_LLAMAS)
    ),
    "drake": Fixture(with_pictures(paper_data.DRAKE_PARTS), (PICTURES, *TWO_LLAVAS)),
    "hflb": Fixture(with_pictures(paper_data.HFLB_PARTS), (PICTURES, *TWO_LLAVAS)),
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


def small(recipe: Path, roots: Callable[[str], Path]) -> list[str]:
    """What makes a recipe run here: nothing but few records where its benchmark ships."""
    benchmark = make_plan(recipe).cells[0].experiment.benchmark
    assert benchmark is not None, f"{recipe} names no benchmark"
    few = ["limit.records=2"]
    if not get(benchmark.name).build.__module__.startswith("befit.benchmarks.papers."):
        return few
    assert benchmark.name in FIXTURES, f"{recipe}: write files of {benchmark.name} in FIXTURES, so that it is tried"
    root = roots(benchmark.name)
    own = [one.format(root=root) for one in FIXTURES[benchmark.name].overrides]
    return [*few, f"benchmark.root={root}", "model.dtype=float32", "model.device=cpu", "method.rank=4",
            "evaluate.max_new_tokens=2", *own]  # fmt: skip


def skip_without_package(recipe: Path) -> None:
    kind, _, place = make_plan(recipe).cells[0].experiment.model.id.partition(":")
    package = place.partition("/")[0]
    if kind == "package" and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}: see the head of the recipe")


def name_of(recipe: Path) -> str:
    return recipe.relative_to(ROOT / "recipes").as_posix()


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, id=name_of(one), marks=[pytest.mark.slow] * (name_of(one) in SLOW)) for one in RECIPES],
)
def test_every_cell_of_a_recipe_runs_and_has_a_score(
    recipe: Path, roots: Callable[[str], Path], tmp_path: Path
) -> None:
    skip_without_package(recipe)
    overrides = small(recipe, roots)
    command = ["compare", str(recipe), *overrides, "--trial", "--quiet", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    check(tmp_path, make_plan(recipe, trial=True, overrides=overrides))


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
        assert (path / f"compare.{suffix}").stat().st_size > 300, suffix
    with (path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(run["seeds"][0]["clients"]) for run in results["runs"])


def test_what_is_slow_or_has_a_fixture_is_there() -> None:
    assert not SLOW - {name_of(one) for one in RECIPES}
    assert all(get(name).build.__module__.startswith("befit.benchmarks.papers.") for name in FIXTURES)
