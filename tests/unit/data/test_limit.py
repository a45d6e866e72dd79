"""Part of a federation: who and what is kept."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import to_dict
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, RunError
from befit.data.federation import ClientData, Federation
from befit.data.limit import TRIAL, LimitSettings, limit_sentence, limited, trial_overrides
from befit.protocol.registry import build_method
from befit.protocol.schedule import resolved_stages
from befit.report.headline import headline_sentences
from befit.runs.clients import family_settings
from befit.runs.engines import schedule_of
from befit.runs.loading import load_federation
from befit.runs.provenance import result_affecting
from befit.studies.compare.comparison import compare, make_plan

ROOT = Path(__file__).parents[3]


def records(name: str, tasks: str) -> tuple[dict[str, Any], ...]:
    return tuple({"id": f"{name}-{place}", "task": task} for place, task in enumerate(tasks))


def federation() -> Federation:
    clients = tuple(ClientData(name, records(name, "aabab"), (), records(name, "bb")) for name in "stuvw")
    new = tuple(ClientData(name, records(name, "a")) for name in "xyz")
    return Federation("f", "1", "causal-lm", clients, (), new, records("public", "ccdd"), {"sha256": "0"})


FAMILIES = {
    "s": "large",
    "t": "large",
    "u": "large",
    "v": "small",
    "w": "small",
    "x": "small",
    "y": "large",
    "z": "small",
}


def test_the_first_clients_of_each_family_are_kept_and_newcomers_counted_apart() -> None:
    found = limited(federation(), LimitSettings(clients=1), FAMILIES)
    assert [one.id for one in found.clients] == ["s", "v"]
    assert [one.id for one in found.newcomers] == ["x", "y"]
    assert found.clients[0].train == federation().clients[0].train and found.public == federation().public


def test_the_first_records_of_each_task_are_kept_in_their_order() -> None:
    found = limited(federation(), LimitSettings(records=1), FAMILIES)
    assert len(found.clients) == 5
    assert [one["id"] for one in found.clients[0].train] == ["s-0", "s-2"]  # the first a, the first b
    assert [one["id"] for one in found.clients[0].test] == ["s-0"]
    assert [one["id"] for one in found.public] == ["public-0", "public-2"]
    assert found.manifest == {"sha256": "0", "limit": {"clients": None, "records": 1}}


def test_without_a_limit_nothing_changes() -> None:
    whole = federation()
    assert limited(whole, LimitSettings(), FAMILIES) is whole


def test_it_is_part_of_the_configuration() -> None:
    config = ROOT / "configs" / "digits-vqa-hetero.yaml"
    found = load_federation(load_experiment(config, ["limit.clients=2", "limit.records=3"]))
    assert [one.id for one in found.clients] == ["client-00", "client-01", "client-02", "client-06"]  # two of each size
    assert {len(one.train) for one in found.clients} == {4 * 3}
    with pytest.raises(ConfigError, match=r"limit\.records: must be positive"):
        load_experiment(config, ["limit.records=0"])


def test_a_trial_runs_every_cell_once_and_beats_the_study_but_not_the_user() -> None:
    study = ROOT / "studies" / "offline" / "digits.yaml"
    whole = make_plan(study)
    trial = make_plan(study, trial=True, overrides=["train.max_steps=3"])
    assert [run.label for run in trial.runs] == [run.label for run in whole.runs]
    assert trial.seeds == (0,) and len(trial.cells) == len(whole.runs) and trial.name == f"{whole.name}-trial"
    first = trial.cells[0].experiment
    assert (first.federation.rounds, first.train.max_steps, first.limit) == (1, 3, LimitSettings(2, 4, 1))
    drawn = make_plan(study, overrides=["report.plots=true"])
    assert drawn.cells[0].key == whole.cells[0].key
    assert drawn.cells[0].experiment.report.plots and not whole.cells[0].experiment.report.plots
    assert len({cell.key for cell in (*trial.cells, *whole.cells)}) == len(trial.cells) + len(whole.cells)
    assert all("=" in change for change in TRIAL) and replace(first, limit=LimitSettings()) != whole.cells[0].experiment


def test_a_familys_pattern_may_fit_nobody_who_is_left() -> None:
    """`upper.*` is one client of four with the small model, and the fourth is not among the first two."""
    config = ROOT / "configs" / "skills-families.yaml"
    found = load_federation(load_experiment(config, TRIAL))
    known = {one.id: one.info for one in found.clients}
    assert "upper.swap-ends" not in known
    families = family_settings(load_experiment(config), known, whole=False)
    assert sorted(families.values()) == ["model", "model", "small", "small"]
    with pytest.raises(ConfigError, match=r"families\.small\.clients: upper\.\* is no client"):
        family_settings(load_experiment(config), known)


def test_a_trial_has_one_round_of_each_stage_whatever_the_method_says() -> None:
    method = {"name": "potara", "rank": 2, "rounds_local": 40, "rounds_fedit": 50}
    config = {"benchmark": {"name": "digits", "clients": 2}, "method": method, "baselines": []}
    experiment = load_experiment(config, TRIAL)
    schedule = schedule_of(experiment)
    built = build_method(experiment.method)
    assert {stage.rounds for stage in resolved_stages(built, schedule.rounds)} >= {40, 50}
    assert {stage.rounds for stage in resolved_stages(built, schedule.rounds, schedule.most_rounds)} <= {0, 1}


def test_settings_that_change_the_numbers_make_another_run_and_others_do_not() -> None:
    values = {
        "method": "fedit",
        "benchmark": "skills",
        "evaluate": {"metrics": ["rougeL"]},
        "families": {"few": {"clients": ["*"], "model": {"id": "x"}}},
    }
    first = load_experiment(values)

    def same(change: str) -> bool:
        return result_affecting(to_dict(load_experiment(first, [change]))) == result_affecting(to_dict(first))

    changed = ("model.long_prompts=drop", "families.few.model.long_prompts=drop", "evaluate.wins=[rougeL]")
    assert not any(map(same, (*changed, "limit.rounds=1")))
    assert all(map(same, ("limit.rounds=null", "name=other", "checkpoint.every_s=3", "report.plots=false")))


def test_rounds_alone_are_a_limit_that_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    whole = federation()
    assert limited(whole, LimitSettings(rounds=2), FAMILIES) is whole
    assert caplog.messages == ["Limited to 2 rounds of each stage: such numbers only show that it runs."]
    assert limit_sentence(asdict(LimitSettings())) is None


def test_the_rounds_of_the_person_beat_those_of_a_trial() -> None:
    config = ROOT / "configs" / "digits-vqa-hetero.yaml"
    mine = load_experiment(config, trial_overrides(["federation.rounds=3"]))
    assert (mine.federation.rounds, mine.limit.rounds) == (3, 3)
    limited_to_two = load_experiment(config, trial_overrides(["federation.rounds=3", "limit.rounds=2"]))
    assert (limited_to_two.federation.rounds, limited_to_two.limit.rounds) == (3, 2)


def test_a_trial_of_several_seeds_says_that_it_runs_one(caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(ROOT / "studies" / "offline" / "digits.yaml", trial=True, seeds=[4, 5])
    assert plan.seeds == (4,) and caplog.messages == ["a trial runs one seed: 4 alone, of --seeds 4,5"]


def test_a_trial_does_not_replace_the_tables_of_a_whole_comparison(tmp_path: Path) -> None:
    study = ROOT / "studies" / "offline" / "digits.yaml"
    held = {"runs": [{"config": {"limit": {"clients": None, "records": None, "rounds": None}}}]}
    (tmp_path / "compare.json").write_text(json.dumps(held))
    with pytest.raises(RunError, match=rf"{re.escape(str(tmp_path))} holds a comparison"):
        compare(make_plan(study, trial=True), out=tmp_path)
    assert json.loads((tmp_path / "compare.json").read_text()) == held and not (tmp_path / "runs").exists()


def test_a_limited_run_says_first_that_its_numbers_mean_nothing() -> None:
    results = {
        "method": "fedit",
        "metric": "accuracy",
        "clients": {"a": {"accuracy": 0.5, "examples": 4}},
        "summary": {"mean": 0.5},
    }
    whole = headline_sentences(results)
    said = headline_sentences({**results, "limit": {"clients": 2, "records": 4, "rounds": 1}})
    assert said == [
        "Limited to 2 clients of each family, 4 records of each task and 1 round of each stage: such "
        "numbers only show that it runs.",
        *whole,
    ]
