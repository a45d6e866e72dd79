"""Part of a federation: who and what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from befit.benchmarks.base import ClientData, Federation
from befit.claim import deciding
from befit.compare.comparison import make_plan
from befit.config import LimitSettings, load_experiment
from befit.errors import ConfigError
from befit.federate import resolved_stages
from befit.host import load_federation
from befit.limit import TRIAL, limited
from befit.registry import build_method
from befit.runner import schedule_of

ROOT = Path(__file__).parents[2]


def records(name: str, tasks: str) -> tuple[dict[str, Any], ...]:
    return tuple({"id": f"{name}-{place}", "task": task} for place, task in enumerate(tasks))


def federation() -> Federation:
    clients = tuple(ClientData(name, records(name, "aabab"), (), records(name, "bb")) for name in "stuvw")
    new = tuple(ClientData(name, records(name, "a")) for name in "xyz")
    return Federation("f", "1", "causal-lm", clients, (), new, records("public", "ccdd"), {"sha256": "0"})


FAMILIES = {"s": "large", "t": "large", "u": "large", "v": "small", "w": "small", "x": "small", "y": "large",
            "z": "small"}  # fmt: skip


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
    assert [one.id for one in found.clients] == ["client-00", "client-01", "client-03", "client-04"]  # two of each size
    assert {len(one.train) for one in found.clients} == {4 * 3}
    with pytest.raises(ConfigError, match=r"limit\.records: must be positive"):
        load_experiment(config, ["limit.records=0"])


def test_a_trial_runs_every_cell_once_and_beats_the_recipe_but_not_the_user() -> None:
    recipe = ROOT / "recipes" / "offline" / "digits.yaml"
    whole = make_plan(recipe)
    trial = make_plan(recipe, trial=True, overrides=["train.max_steps=3"])
    assert [run.label for run in trial.runs] == [run.label for run in whole.runs]
    assert trial.seeds == (0,) and len(trial.cells) == len(whole.runs) and trial.name == f"{whole.name}-trial"
    first = trial.cells[0].experiment
    assert (first.federation.rounds, first.train.max_steps, first.limit) == (1, 3, LimitSettings(2, 4, 1))
    assert len({cell.key for cell in (*trial.cells, *whole.cells)}) == len(trial.cells) + len(whole.cells)
    assert all("=" in change for change in TRIAL) and replace(first, limit=LimitSettings()) != whole.cells[0].experiment


def test_a_trial_has_one_round_of_each_stage_whatever_the_method_says() -> None:
    method = {"name": "potara", "rank": 2, "rounds_local": 40, "rounds_fedit": 50}
    config = {"benchmark": {"name": "digits", "clients": 2}, "method": method, "baselines": []}
    experiment = load_experiment(config, TRIAL)
    schedule = schedule_of(experiment)
    built = build_method(experiment.method)
    assert {stage.rounds for stage in resolved_stages(built, schedule.rounds)} >= {40, 50}
    assert {stage.rounds for stage in resolved_stages(built, schedule.rounds, schedule.most_rounds)} <= {0, 1}


def test_a_limit_of_rounds_that_is_not_set_is_no_other_run() -> None:
    without = {"limit": {"clients": None, "records": 2}}
    assert deciding({"limit": {**without["limit"], "rounds": None}}) == without
    assert deciding({"limit": {**without["limit"], "rounds": 1}}) != without
