"""What is refused before anything is trained, and what an ablation leaves behind."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.config.experiment import to_yaml
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.yamlfile import write_yaml
from befit.report.table import csv_text
from befit.studies.ablations.measure import FinishedAblation, ablate, choose
from befit.studies.ablations.seed import federated_rounds
from tests.unit.studies.ablations.conftest import CONFIG

runner = CliRunner()


def call(*words: object) -> Any:
    return runner.invoke(app, [str(one) for one in words])


@pytest.mark.parametrize(
    ("name", "change", "options", "seeds", "message"),
    [
        ("potara-damping", {"method": "ditto"}, {}, None, "method.name: potara-damping needs a configuration of po"),
        ("potara-rounds", {}, {"rounds": [2, 9]}, None, "ablation.rounds: 9 are beyond the 3 rounds"),
        ("potara-rounds", {}, {"rounds": [0]}, None, "ablation.rounds: must be whole numbers from 1 on"),
        ("potara-damping", {}, {"deltas": [0.0]}, None, "ablation.deltas: must be positive"),
        ("potara-weight-sweep", {}, {"step": 0.3}, None, "ablation.step: must divide 1"),
        ("potara-weight-sweep", {}, {"rounds": [2, 9]}, None, "ablation.rounds: 9 are beyond the 3 rounds"),
        ("potara-weight-sweep", {}, {"rounds": []}, None, "ablation.rounds: must be whole numbers from 1 on"),
        ("potara-damping", {}, {}, [1, 1], "--seeds: must be different whole numbers"),
        ("potara-damping", {}, {}, [-1], "--seeds: must be different whole numbers from 0"),
        ("potara-damping", {"evaluate": {"split": "val"}}, {}, None, "evaluate.split: ablations score on test"),
        (
            "potara-granularity",
            {"method": {**CONFIG["method"], "estimate_space": "product"}},
            {},
            None,
            "'coordinate, on', and there method.granularity",
        ),
        (
            "potara-merge-space",
            {"method": {**CONFIG["method"], "granularity": "tensor"}},
            {},
            None,
            "'product', and there",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(
    name: str, change: dict[str, Any], options: dict[str, Any], seeds: list[int] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ablate(name, {**CONFIG, **change}, options=options, seeds=seeds, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_mistakes_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ablate(
            "potara-rounds", {**CONFIG, "evaluate": {"split": "val"}}, options={"rounds": [7]}, seeds=[], out=tmp_path
        )
    assert len(caught.value.problems) == 3


def test_the_grid_search_needs_validation_examples_and_the_sweep_goes_without(tmp_path: Path) -> None:
    from tests.unit.models.tiny_models import save_bert

    model = save_bert(tmp_path / "model")
    for name in ("a", "b"):
        for split in ("train", "test"):
            lines = [
                json.dumps({"text": f"{split} {name} {word}", "label": i % 2}) for i, word in enumerate("abcdefgh")
            ]
            (tmp_path / f"{name}-{split}.jsonl").write_text("\n".join(lines))
    clients = {name: {split: f"{tmp_path}/{name}-{split}.jsonl" for split in ("train", "test")} for name in ("a", "b")}
    config = {
        "name": "files",
        "model": {"id": str(model)},
        "data": {"task": "text-classification", "clients": clients, "val_fraction": 0.0},
        "method": {"name": "potara", "rank": 2, "rounds_local": 1, "statistics": {"samples": 4}},
        "train": {"max_steps": 1, "batch_size": 4},
        "federation": {"rounds": 1},
    }
    with pytest.raises(ConfigError, match=r"val examples .*; a has none"):
        ablate("potara-grid-search", config, out=tmp_path / "out")
    done = ablate("potara-weight-sweep", config, out=tmp_path / "out", options={"step": 1.0})
    assert all(row["validation"] is None for row in done.results["rows"])
    assert "2 clients have no validation examples" in done.findings.tables[0].note
    page = (done.path / "ablation.html").read_text()
    assert ">test</text>" in page and ">validation</text>" not in page


def test_the_files_hold_every_row_and_the_page_needs_nothing_else(sweep: FinishedAblation) -> None:
    rows = list(csv.DictReader((sweep.path / "ablation.csv").read_text().splitlines()))
    assert [float(row["score"]) for row in rows] == [row["score"] for row in sweep.results["rows"]]
    page = (sweep.path / "ablation.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.count("<svg") == 3
    assert "mathdefault" not in page and "<script" not in page and "http-equiv" in page
    assert not re.search(r'(src|href)="(?!#)', page)
    text = (sweep.path / "ablation.md").read_text()
    for title in ("# Weight sweep", "## Mean over clients", "oracle, picked on test"):
        assert title in text


def test_logarithmic_axes_have_plain_labels(root: Path, sweep: FinishedAblation) -> None:
    done = ablate("potara-damping", CONFIG, out=root, options={"deltas": [1e-6, 0.01]})
    page = (done.path / "ablation.html").read_text()
    assert ">1e-6</text>" in page and ">0.01</text>" in page and "mathdefault" not in page


def test_names_that_a_spreadsheet_would_run_are_text() -> None:
    assert csv_text([{"client": "=1+1", "w": -0.5, "x": None}, {"client": "b", "y": True}]) == (
        "client,w,x,y\n'=1+1,-0.5,,\nb,,,True\n"
    )


def test_the_command_prints_json_alone_and_writes_where_it_is_told(
    sweep: FinishedAblation, root: Path, tmp_path: Path
) -> None:
    config = tmp_path / "short.yaml"
    config.write_text(to_yaml(load_experiment(CONFIG)))
    done = call(
        "ablate",
        "potara-weight-sweep",
        config,
        "ablation.step=1",
        "method.statistics.samples=5",
        "--out",
        root,
        "--json",
    )
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["path"] == str(root / "potara-weight-sweep")
    assert len(printed["results"]["rows"]) == 9  # three clients: two ends and the computed weight
    assert (
        printed["results"]["options"] == {"step": 1, "rounds": None}
        and printed["results"]["config"]["method"]["statistics"]["samples"] == 5
    )
    shown = call("ablate", "potara-weight-sweep", config, "ablation.step=0.5", "--out", root, "-q").stdout
    assert "closed form" in shown and "oracle" in shown and str(root / "potara-weight-sweep") in shown


STUDY = {
    "study": {"title": "A study"},
    "base": {key: CONFIG[key] for key in ("model", "benchmark", "limit", "train", "federation")}
    | {"method": {"name": "fedit", "rank": 2}},
    "seeds": [0],
    "runs": {
        "Local": "local",
        "Merged": {"method": CONFIG["method"]},
        "Merged, guarded": {"method": {**CONFIG["method"], "guard": "validation"}},
    },
}


def test_a_study_stands_for_its_first_run_of_the_method_and_for_its_seeds(
    sweep: FinishedAblation, tmp_path: Path
) -> None:
    study = tmp_path / "three.yaml"
    study.write_text(write_yaml(STUDY))
    words = ("ablate", "potara-weight-sweep", study, "ablation.step=0.5", "--out", tmp_path / "out", "--json", "-q")
    done = call(*words)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["results"]
    assert (found["name"], found["run"], found["seeds"]) == ("three", "Merged", [0])
    assert found["rows"] == sweep.results["rows"], "the configuration that the run stands for"
    assert "run of the study: Merged" in (tmp_path / "out" / "potara-weight-sweep" / "ablation.md").read_text()
    more = call(*words, "--seeds", "1", "method.statistics.samples=5", "limit.rounds=1")
    config = json.loads(more.stdout)["results"]["config"]
    assert (config["federation"]["seed"], config["method"]["statistics"]["samples"]) == (0, 5)
    assert {row["seed"] for row in json.loads(more.stdout)["results"]["rows"]} == {1}


def test_a_study_without_the_method_or_with_several_settings_of_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs: potara-rounds .* potara, .* local"):
        choose("potara-rounds", {**STUDY, "runs": {"Local": "local"}})
    paper = Path(__file__).parents[4] / "studies" / "potara" / "cifar100-alpha.yaml"
    with pytest.raises(ConfigError, match=r"Potara · 0.1, Potara · 0.5, Potara · 1.0 are of potara, with different"):
        choose("potara-rounds", paper)
    chosen = choose("potara-rounds", paper, ["benchmark.alpha=0.5"])
    assert chosen.experiment.benchmark is not None and chosen.experiment.benchmark.arguments["alpha"] == 0.5


def test_a_trial_is_one_seed_and_round_of_part_of_the_data_and_says_so(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(write_yaml({**STUDY, "seeds": [3, 4]}))
    done = call("ablate", "potara-damping", study, "--trial", "--out", tmp_path / "out", "--json", "--quiet")
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert results["seeds"] == [3] and results["name"].endswith("-trial")
    assert {row["client"] for row in results["rows"]} == {"client-00", "client-01"}
    assert results["findings"]["sentences"][0].startswith("Limited to 2 clients of each family, 4 records")
    refused = call("ablate", "potara-damping", study, "--trial", "--seeds", "1,2")
    assert "--seeds: a trial runs one seed" in refused.stderr


@pytest.mark.parametrize(("study", "rounds"), [("cifar100-10", 400), ("commonsense-8", 50), ("flan-8", 300)])
def test_the_papers_figures_are_drawn_from_the_papers_settings(study: str, rounds: int) -> None:
    """Zou et al. 2026, Figures 2 to 4: the first run of Potara in each study is the one of its main table."""
    chosen = choose("potara-rounds", Path(__file__).parents[4] / "studies" / "potara" / f"{study}.yaml")
    assert (chosen.run, chosen.seeds, chosen.experiment.method["guard"]) == ("Potara", (42, 52, 62), "none")
    assert federated_rounds(chosen.experiment) == rounds


def test_without_arguments_all_are_listed_and_without_a_configuration_one_is_explained() -> None:
    listed = call("ablate").stdout
    entries = json.loads(call("ablate", "--json").stdout)
    assert len(entries) == 8 and all(re.search(rf"^{entry['name']} +\S", listed, re.M) for entry in entries)
    explained = call("ablate", "potara-samples").stdout
    assert "ablation.draws" in explained and "how often they are drawn" in explained
    assert json.loads(call("ablate", "potara-samples", "--json").stdout)["options"]["draws"]["default"] == 10


def test_mistakes_on_the_command_line_end_with_code_2(tmp_path: Path) -> None:
    config = tmp_path / "short.yaml"
    config.write_text(to_yaml(load_experiment(CONFIG)))
    for words, message in (
        (("potara-dampin",), "Did you mean: potara-damping?"),
        (("potara-damping", tmp_path / "none.yaml"), "there is no file"),
        (("potara-damping", config, "--seeds", "0,x"), "--seeds: must be whole numbers"),
        (("potara-damping", config, "ablation.delta=1"), "ablation.delta: unknown key"),
        (("potara-damping", config, "method.rnk=1"), "Did you mean: rank?"),
    ):
        done = call("ablate", *words, "--out", tmp_path / "out")
        assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_what_tells_a_study_from_a_configuration_loads_no_scipy() -> None:
    """`befit run` reads it. What help loads is for test_cli.py."""
    code = "import sys, befit.studies.compare.study\nassert 'scipy' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
