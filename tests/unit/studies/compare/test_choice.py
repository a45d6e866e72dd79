"""Settings that are chosen on validation examples and kept: what is tried, who wins, and when the file is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import ConfigError, TrainingDiverged
from befit.core.yamlfile import read_yaml, write_yaml
from befit.protocol.registry import METHODS
from befit.studies.compare import execute
from befit.studies.compare.choice import equal_steps, frozen, pick, stopped, write_choice
from befit.studies.compare.comparison import choose, make_choice, make_plan
from befit.studies.compare.plan import plan_choice
from befit.studies.compare.study import read_study
from tests.backbones import short_vit

STUDY: dict[str, Any] = {
    "study": {"title": "T"},
    "base": {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "method": {"name": "fedit", "rank": 2},
        "train": {"max_steps": 6},
        "federation": {"rounds": 4},
    },
    "seeds": [3, 5],
    "choose": {"seeds": [100, 101], "axes": {"train.lr": [1e-3, 1e-1]}},
    "runs": {
        "Alone": {"method": {"name": "local", "rank": 2}},
        "FedIT": "fedit",
        "Ditto": {"method": {"name": "ditto", "rank": 2}},
        "Merged": {"method": {"name": "interpolation", "rank": 2}},
    },
}


# What is really run, on a smaller backbone and fewer records.
QUICK: dict[str, Any] = {**STUDY["base"], "model": {"id": short_vit()}, "limit": {"records": 40}}


def written(path: Path, **change: Any) -> Path:
    file = path / "study.yaml"
    file.write_text(write_yaml({**STUDY, **change}))
    return file


def problems(path: Path, **change: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_study(written(path, **change))
    return "; ".join(caught.value.problems)


def means(candidates: Any, best: dict[str, int]) -> dict[str, Any]:
    """Scores in which the combination of that number wins for each run."""
    return {
        name: {"mean": 0.9 if best.get(label, 0) == number else 0.5, "sd": 0.1, "n": 2}
        for (label, number), name in candidates.labels.items()
    }


def test_every_run_tries_every_value_on_validation_examples_of_other_seeds(tmp_path: Path) -> None:
    asked = {"evaluate": {"others": "end", "newcomers": True}}  # which say nothing of a choice
    plan, _ = plan_choice(read_study(written(tmp_path, base={**STUDY["base"], **asked})))
    assert {(cell.experiment.evaluate.others, cell.experiment.evaluate.newcomers) for cell in plan.cells} == {
        ("never", False)
    }
    assert [run.label for run in plan.runs[:3]] == ["Alone \u00b7 0.001", "Alone \u00b7 0.1", "FedIT \u00b7 0.001"]
    assert len(plan.runs) == 8 and plan.seeds == (100, 101)
    assert {cell.experiment.evaluate.split for cell in plan.cells} == {"val"}
    assert [cell.experiment.train.lr for cell in plan.cells[:2]] == [1e-3, 1e-1]


def test_steps_make_the_computation_of_all_runs_equal_unless_the_study_says_otherwise(tmp_path: Path) -> None:
    """Ditto takes two steps on a batch, a merge trains two branches: half the steps each."""
    plan, candidates = plan_choice(read_study(written(tmp_path)))
    assert candidates.steps == {"Alone": 6, "FedIT": 6, "Ditto": 3, "Merged": 3}
    assert {run.label: run.cells[0].experiment.train.max_steps for run in plan.runs}["Ditto \u00b7 0.1"] == 3
    as_written = {"choose": {**STUDY["choose"], "compute": "as-written"}}
    plan, candidates = plan_choice(read_study(written(tmp_path, **as_written)))
    assert candidates.steps == {} and {cell.experiment.train.max_steps for cell in plan.cells} == {6}


def test_gradients_of_the_smallest_model_cost_what_they_do() -> None:
    """Two adapters beside each other, and the small model's gradients at every second step of the large one's."""
    base: dict[str, Any] = {"benchmark": {"name": "digits-vqa-hetero", "test": 4}, "adapter": {"targets": ["all"]}}
    block = {"name": "fedmosaic", "blocks": 1, "relevance": {"every": 2}}
    plan = make_plan({"study": {"title": "T"}, "base": base, "runs": {"FedMosaic": {"method": block}}})
    experiment = plan.cells[0].experiment
    assert equal_steps(experiment, experiment.federation.rounds, 12) == 10


def test_equal_steps_count_the_rounds_that_a_method_has_for_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = {"Alone": {"method": {"name": "local", "rank": 2, "rounds": 2}}}
    _, candidates = plan_choice(read_study(written(tmp_path, runs=runs)))
    assert candidates.steps == {"Alone": 12}
    limited = {**STUDY["base"], "limit": {"rounds": 1}}  # as many of either then
    assert plan_choice(read_study(written(tmp_path, runs=runs, base=limited)))[1].steps == {"Alone": 6}
    silent = make_plan({**STUDY, "choose": None}).cells[0].experiment
    assert equal_steps(silent, 4, 1) == 1  # never none
    assert "train.max_steps" not in caplog.text


def test_steps_that_miss_equal_compute_by_more_than_a_twentieth_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ditto has half the steps of FedIT: two and a half are two, a fifth less."""
    plan_choice(read_study(written(tmp_path, base={**STUDY["base"], "train": {"max_steps": 5}})))
    assert "Ditto: equal compute is 2.50 steps a round, so its 2 compute -20 %" in caplog.text
    assert "FedIT" not in caplog.text


def test_methods_that_do_not_say_what_a_step_computes_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "silent.py"
    file.write_text(
        "import befit\n"
        "class Silent(befit.Method):\n"
        "    use = befit.Use(('shared',))\n"
        "    def __init__(self, rank: int = 2):\n"
        "        self.layout = befit.lora(rank, 4.0)\n"
        "    def plan(self):\n"
        "        return [befit.Stage('alone', Alone(), rounds=1)]\n"
        "    def server_init(self, site):\n"
        "        return befit.Payload()\n"
        "    def deploy(self, client, received, site):\n"
        "        return self.use.deployment(site)\n"
        "class Alone(befit.Personal):\n"
        "    def client_update(self, client, received, site, at):\n"
        "        return client, befit.Payload()\n"
        "class Says(Silent):\n"
        "    def work(self):\n"
        "        return (befit.Work(('shared',), befit.slot('shared')),)\n"
        "for name, kind in {'silent_a': Silent, 'silent_b': type('B', (Silent,), {}), 'says': Says}.items():\n"
        "    befit.register(name, title=name)(kind)\n"
    )
    runs = {"Alone": "local", "A": "silent_a", "B": "silent_b", "Says": "says"}
    study = written(tmp_path, plugins=["silent.py"], runs=runs)
    try:
        with pytest.raises(ConfigError) as told:
            plan_choice(read_study(study))
        (problem,) = told.value.problems
        assert (
            "silent_a, silent_b" in problem and "Method.work" in problem and "says" not in problem.split(" computes")[0]
        )
    finally:
        for name in ("silent_a", "silent_b", "says"):
            METHODS.pop(name, None)


def test_a_wrong_reference_is_told_before_anything_is_chosen(tmp_path: Path) -> None:
    study = written(tmp_path, study={"title": "T", "reference": "Alon"})
    with pytest.raises(ConfigError, match=r"reference: there is no run 'Alon'\. Did you mean: Alone\?"):
        make_choice(study)
    assert CliRunner().invoke(app, ["check", str(study)]).exit_code == 2


def test_a_value_that_is_tried_twice_is_one_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        make_choice(written(tmp_path, choose={"seeds": [100], "axes": {"train.lr": [1e-3, 1e-3]}}))
    assert told.value.problems == ("choose.axes.train.lr: names 0.001 twice",)


def test_a_chosen_file_that_a_changed_plugin_made_old_says_so(tmp_path: Path) -> None:
    plugin = tmp_path / "nothing.py"
    plugin.write_text("import befit\n")
    study = read_study(written(tmp_path, plugins=["nothing.py"], choose={**STUDY["choose"], "compute": "as-written"}))
    _, candidates = plan_choice(study)
    means = {label: {"mean": 0.5} for label in candidates.labels.values()}
    write_choice(study, candidates, means, pick(study, candidates, means))
    assert frozen(study) is not None
    plugin.write_text("import befit  # and a comment\n")
    with pytest.raises(ConfigError, match="other settings of this study, or to a plugin of it that has changed"):
        frozen(study)


def test_the_best_value_wins_for_each_run_or_for_a_family_together(tmp_path: Path) -> None:
    study = read_study(written(tmp_path))
    _, candidates = plan_choice(study)
    chosen = pick(study, candidates, means(candidates, {"FedIT": 1}))
    assert chosen["FedIT"] == {"train.max_steps": 6, "train.lr": 0.1}
    assert chosen["Ditto"] == {"train.max_steps": 3, "train.lr": 0.001}
    equal = pick(study, candidates, {name: {"mean": 0.5} for name in candidates.labels.values()})
    assert equal["FedIT"]["train.lr"] == 0.001  # of equals the first
    families = {"choose": {**STUDY["choose"], "families": {"averaged": ["FedIT", "Ditto", "Merged"]}}}
    study = read_study(written(tmp_path, **families))
    _, candidates = plan_choice(study)
    chosen = pick(study, candidates, means(candidates, {"FedIT": 1, "Merged": 1}))
    assert {label: one["train.lr"] for label, one in chosen.items()} == {
        "Alone": 0.001, "FedIT": 0.1, "Ditto": 0.1, "Merged": 0.1
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"choose: .* has no score"):
        pick(study, candidates, {})


FOUR = {"seeds": [100, 101, 102, 103], "axes": {"train.lr": [1e-3, 1e-2, 1e-1]}}


def by_seed(candidates: Any, of: dict[int, list[float]]) -> dict[str, dict[int, float]]:
    """The same scores by number of the combination for every run, of as many seeds as there are."""
    return {name: dict(zip(FOUR["seeds"], of[number], strict=False)) for (_, number), name in candidates.labels.items()}


def test_a_candidate_is_stopped_once_its_paired_interval_is_below_zero(tmp_path: Path) -> None:
    """Differences 0.10 and 0.11 from the best: 0.105 +- 12.7 * 0.005 is below zero; 0.10 and 0.20 are not yet."""
    study = read_study(written(tmp_path, choose=FOUR))
    _, candidates = plan_choice(study)
    first = by_seed(candidates, {0: [0.70], 1: [0.80], 2: [0.10]})
    assert stopped(study, candidates, first) == {}  # one seed has no spread
    two = by_seed(candidates, {0: [0.70, 0.69], 1: [0.80, 0.80], 2: [0.70, 0.60]})
    names = {number: {candidates.labels[label, number] for label in study.runs} for number in range(3)}
    assert stopped(study, candidates, two) == dict.fromkeys(names[0], 2)
    three = by_seed(candidates, {0: [0.70, 0.69], 1: [0.80, 0.80, 0.80], 2: [0.70, 0.60, 0.65]})
    later = stopped(study, candidates, three)
    assert later == {**dict.fromkeys(names[0], 2), **dict.fromkeys(names[2], 3)}
    whole = by_seed(candidates, {0: [0.70, 0.69], 1: [0.80] * 4, 2: [0.70, 0.60, 0.65]})
    assert stopped(study, candidates, whole) == later
    means = {name: {"mean": 0.99 if name in names[0] else 0.5} for name in candidates.labels.values()}
    assert pick(study, candidates, means, later)["FedIT"]["train.lr"] == 1e-2  # what was stopped has lost


def test_a_family_is_stopped_by_its_mean_and_a_run_with_two_labels_where_both_are_out(tmp_path: Path) -> None:
    families = {**FOUR, "families": {"both": ["FedIT", "Ditto"]}}
    runs = {**STUDY["runs"], "Again": "fedit"}
    study = read_study(written(tmp_path, choose=families, runs=runs))
    _, candidates = plan_choice(study)
    scores = {name: {100: 0.5, 101: 0.5} for name in candidates.labels.values()}
    fedit, ditto = (candidates.labels[label, 0] for label in ("FedIT", "Ditto"))
    scores[fedit], scores[ditto] = {100: 0.40, 101: 0.30}, {100: 0.60, 101: 0.71}
    assert stopped(study, candidates, scores) == {}  # their mean is as good as the others'
    scores[ditto] = {100: 0.30, 101: 0.41}
    assert stopped(study, candidates, scores) == {ditto: 2}  # for Again, which is FedIT, it is not shown
    scores[fedit], scores[ditto] = {100: 0.40, 101: 0.39}, {100: 0.30, 101: 0.32}
    assert stopped(study, candidates, scores) == {fedit: 2, ditto: 2}


class Stop(BaseException):
    """Ends a comparison in the middle, as a crash does."""


def test_stopping_early_spares_runs_and_goes_on_to_the_same_choice(tmp_path: Path) -> None:
    small = {
        "base": {**STUDY["base"], "train": {"max_steps": 5}, "federation": {"rounds": 1}},
        "runs": {"FedIT": "fedit"},
        "choose": {"seeds": [100, 101, 102], "axes": {"train.lr": [1e-3, 1e-2]}},
        "seeds": [3],
    }
    file, events = written(tmp_path, **small), list[str]()
    whole = choose(file, out=tmp_path / "a", early_stop=True, observer=lambda event: events.append(event["kind"]))
    assert whole.path is not None and whole.stopped and set(whole.stopped.values()) == {2}
    assert events.count("cell_spared") == len(whole.stopped) == 6 - events.count("cell_finished")
    kept, page = whole.path.read_bytes(), (tmp_path / "a" / "compare.md").read_text()
    assert "paired by seed, lay below zero" in page
    assert all(f"{label} after 2" in page.replace("\\", "") for label in whole.stopped)

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "cell_started" and event["cell"] == 3:
            raise Stop

    with pytest.raises(Stop):
        choose(file, out=tmp_path / "b", early_stop=True, observer=stop)
    again = choose(file, out=tmp_path / "b", early_stop=True)
    assert again.path is not None and again.path.read_bytes() == kept
    assert again.stopped == whole.stopped
    refused = CliRunner().invoke(app, ["compare", str(file), "--early-stop"])
    assert refused.exit_code == 2 and "--early-stop: belongs to --choose" in refused.stderr


def test_runs_that_have_nothing_to_choose_are_not_run(tmp_path: Path) -> None:
    few = {"seeds": [100], "runs": {"FedIT": {"train.lr": [1e-3, 1e-2]}}}
    choice = make_choice(written(tmp_path, choose=few))
    assert {run.label for run in choice.plan.runs} == {"FedIT · 0.001", "FedIT · 0.01"}
    means = {run.label: {"mean": 0.5} for run in choice.plan.runs}
    chosen = pick(choice.study, choice.candidates, means)
    assert chosen["FedIT"]["train.lr"] == 1e-3
    assert all(one == {"train.max_steps": one["train.max_steps"]} for label, one in chosen.items() if label != "FedIT")
    equal = make_choice(
        written(tmp_path, choose={"seeds": [100]})
    )  # steps alone: all are run, so that there is a score
    assert {run.label for run in equal.plan.runs} == set(equal.study.runs)


def test_what_diverges_is_not_chosen(tmp_path: Path) -> None:
    small = {
        "base": {**QUICK, "train": {"max_steps": 2}, "federation": {"rounds": 1}},
        "runs": {"Alone": {"method": {"name": "local", "rank": 2}}},
        "seeds": [3],
    }
    rates = {"seeds": [100], "axes": {"train.lr": [1e30, 1e-2]}}
    file = written(tmp_path, **small, choose=rates)
    done = CliRunner().invoke(app, ["compare", str(file), "--choose", "--out", str(tmp_path / "choice")])
    assert done.exit_code == 0, done.stderr
    assert "seed 100: training diverged" in done.stderr
    kept = read_yaml(tmp_path / "study.chosen.yaml")
    assert kept["settings"]["Alone"]["train.lr"] == 1e-2
    assert [one.get("diverged") for one in kept["scores"]["Alone"]] == [True, None]
    file = written(tmp_path, **small, choose={**rates, "axes": {"train.lr": [1e30, 1e29]}})
    with pytest.raises(ConfigError, match=r"choose: training diverges .* Alone"):
        choose(file, out=tmp_path / "none")


def test_a_study_is_compared_with_what_was_chosen_and_only_with_that(tmp_path: Path) -> None:
    """From the command line: refused before, chosen, compared, and refused again once the study has changed."""
    small = {
        "base": {**QUICK, "train": {"max_steps": 1}, "federation": {"rounds": 1}},
        "runs": {"Alone": {"method": {"name": "local", "rank": 2}}, "FedIT": "fedit"},
        "choose": {"seeds": [100], "axes": {"train.lr": [1e-9, 1e-2]}},
        "seeds": [3],
    }
    file = written(tmp_path, **small)
    run = CliRunner()
    told = run.invoke(app, ["compare", str(file), "--quiet"])
    assert told.exit_code and f"run befit compare {file} --choose" in told.stderr.replace("\n  ", " ")
    assert run.invoke(app, ["check", str(file), "--no-data"]).exit_code == 0
    done = run.invoke(app, ["compare", str(file), "--choose", "--quiet", "--json", "--out", str(tmp_path / "choice")])
    assert done.exit_code == 0, done.stderr
    kept = tmp_path / "study.chosen.yaml"
    assert json.loads(done.stdout)["path"] == str(kept)
    values = read_yaml(kept)
    assert values["seeds"] == [100] and set(values["settings"]) == {"Alone", "FedIT"}
    by_rate = {one["train.lr"]: one["mean"] for one in values["scores"]["Alone"]}
    best = values["settings"]["Alone"]["train.lr"]
    assert by_rate[best] == max(by_rate.values())
    done = run.invoke(app, ["compare", str(file), "--quiet", "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert results["chosen"]["sha256"] == hashlib.sha256(kept.read_bytes()).hexdigest()
    assert all(one["config"]["train"]["lr"] == values["settings"][one["label"]]["train.lr"] for one in results["runs"])
    assert any("study.chosen.yaml" in sentence for sentence in results["sentences"])
    content = kept.read_text()
    for broken, reason in (
        ("", "belongs to other settings"),
        ("- a", "belongs to other settings"),
        (content.split("settings:")[0], "belongs to other settings"),
        (content.replace(f"train.lr: {best:g}", "train.lr: 0.5"), "has settings for Alone that the study does not try"),
    ):
        kept.write_text(broken)
        with pytest.raises(ConfigError, match=reason):
            frozen(read_study(file))
    kept.write_text(content)
    assert results["chosen"]["changed"] == []
    file = written(tmp_path, **{**small, "base": {**small["base"], "train": {"max_steps": 2}}})
    with pytest.raises(ConfigError, match=r"study\.chosen\.yaml belongs to other settings"):
        frozen(read_study(file))
    assert make_plan(file, trial=True).chosen is None  # a trial says nothing, so it needs nothing chosen


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seeds": [3, 100]}, "choose.seeds: 100 is among the seeds that are reported"),
        ({"choose": {"seeds": []}}, "choose.seeds: must be different whole numbers"),
        ({"choose": {"seeds": [100], "axes": {"train.lr": []}}}, "choose.axes.train.lr: must have at least one value"),
        ({"choose": {"seeds": [100], "axes": {"train.max_steps": [1]}}}, "choose.axes: train.max_steps is what"),
        ({"choose": {"seeds": [100], "axes": {"federation.seed": [1, 2]}}}, "federation.seed: is what a run is or is"),
        ({"claims": {"a": {"says": "x", "order": ["FedIT"]}}}, "claims.a.order: must name at least two runs"),
        ({"choose": {"seeds": [100], "runs": {"Fedit": {}}}}, "choose.runs: there is no run 'Fedit'"),
        ({"choose": {"seeds": [100], "families": {"a": ["Ditto"], "b": ["Ditto"]}}}, "'Ditto' is named twice"),
        (
            {"choose": {"seeds": [100], "families": {"a": ["Ditto", "FedIT"]}, "runs": {"FedIT": {"train.lr": [1]}}}},
            "choose.families.a: its runs try different values",
        ),
        ({"grids": {"g": {"axes": {"train.lr": [1]}}}}, "choose: chooses for runs by name"),
    ],
)
def test_what_cannot_be_chosen_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    assert told in problems(tmp_path, **change)


def test_seeds_that_settings_were_chosen_by_are_not_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="settings are chosen by seed 101"):
        make_plan(written(tmp_path), seeds=[101], trial=True)
    with pytest.raises(ConfigError, match=r"choose: .* docs/protocol\.md"):
        make_choice({**STUDY, "choose": None})
    with pytest.raises(ConfigError, match=r"choose: .* beside the study's file"):
        make_plan(STUDY)
    with pytest.raises(ConfigError, match=r"choose: .* beside the study's file"):  # before any candidate runs
        make_choice(STUDY)


def test_a_winner_that_diverges_later_gives_its_place_back_to_what_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The better rate of the first two seeds diverges in the third: the other one gets that seed, and is chosen."""
    small = {
        "base": {**STUDY["base"], "train": {"max_steps": 5}, "federation": {"rounds": 1}},
        "runs": {"FedIT": "fedit"},
        "choose": {"seeds": [100, 101, 102], "axes": {"train.lr": [1e-3, 1e-2]}},
        "seeds": [3],
    }
    real = execute.Runner.__call__

    def diverging(runner: Any, cell: Any, *others: Any) -> float | None:
        if cell.seed == 102 and cell.experiment.train.lr == 1e-2:
            raise TrainingDiverged("loss is nan")
        return real(runner, cell, *others)

    monkeypatch.setattr(execute.Runner, "__call__", diverging)
    done = choose(written(tmp_path, **small), out=tmp_path / "a", early_stop=True)
    assert not done.stopped and done.settings["FedIT"]["train.lr"] == 1e-3
    (run,) = [run for run in done.compared.results["runs"] if run["label"].endswith("0.001")]
    assert [seed["seed"] for seed in run["seeds"]] == [100, 101, 102]
