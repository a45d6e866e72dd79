"""The round that is best on validation examples: what a run reports that goes back to it, and what it goes on from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import slot_of
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.values import State
from befit.protocol.store import read_payload
from befit.report.headline import headline
from befit.runs.artifacts import read_deployment
from befit.runs.clients import check_clients
from befit.runs.host import Host
from befit.runs.journal import kept_path
from befit.runs.loading import load_federation
from befit.runs.runner import Run, run
from tests.backbones import short_vit

# FedDPA: clients train an adapter of their own in every round of a federation, and a stage of their own comes after it.
CONFIG: dict[str, Any] = {
    "name": "best",
    "benchmark": {"name": "digits", "clients": 12},
    "model": {"id": short_vit()},
    "limit": {"clients": 3},
    "method": {"name": "feddpa", "rank": 2},
    "baselines": [],
    "train": {"max_steps": 3, "lr": 0.04},  # so fast that scores go up and down
    "evaluate": {"every": 1},
    "checkpoint": {"every_s": 0},
    "report": {"plots": False},
}
ROUNDS = 5
SPENT = ("updates", "bytes_up", "bytes_down", "bytes_scoring", "seconds", "cpu_seconds", "adapter")
Go = Callable[..., Run]


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Go:
    hosts: dict[str, Host] = {}

    def one(rounds: int, patience: int | None = None, out: Path | None = None, **more: Any) -> Run:
        changes = {key: value for key, value in more.items() if key not in ("observer", "resume")}
        federation = {"rounds": rounds, "patience": patience, **changes.pop("federation", {})}
        experiment = load_experiment({**CONFIG, "federation": federation, **changes})
        about = changes.get("evaluate"), changes.get("stream"), federation.get("cohort")
        host = hosts.setdefault(json.dumps(about), Host(experiment))
        options = {key: value for key, value in more.items() if key in ("observer", "resume")}
        return run(experiment, out=out or tmp_path_factory.mktemp("runs") / "run", quiet=True, host=host, **options)

    return one


@pytest.fixture(scope="module")
def full(go: Go) -> Run:
    """A run whose best round is not its last one."""
    return go(ROUNDS, 100)


@pytest.fixture(scope="module")
def shorter(go: Go, full: Run) -> Run:
    """A run of as many rounds as the best one of `full` is, which looks for no best round."""
    return go(full.results["best_rounds"][0]["round"])


def lines(done: Run, *kinds: str) -> list[dict[str, Any]]:
    every = map(json.loads, (done.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if line["kind"] in kinds]


def means(done: Run) -> dict[int, float]:
    """Mean over clients of their validation scores, by round."""
    found: dict[int, list[float]] = {}
    for line in lines(done, "validation"):
        found.setdefault(line["round"], []).append(line["value"])
    return {round_: sum(values) / len(values) for round_, values in found.items()}


def adapters(done: Run) -> dict[str, bytes]:
    files = (*done.path.rglob("adapter_model.safetensors"), *done.path.rglob("deployment.safetensors"))
    assert len(files) >= 6
    return {str(file.relative_to(done.path)): file.read_bytes() for file in files}


def weights_of(done: Run, client: str) -> State:
    """What a client deploys, by name without its slot."""
    deployed = read_deployment(done.path / "clients" / client)
    return {key.partition("/")[2]: value for key, value in deployed.arrays.items() if slot_of(key) in deployed.slots}


def reported(done: Run) -> Any:
    rows = {
        client: {key: value for key, value in row.items() if key not in SPENT}
        for client, row in done.results["clients"].items()
    }
    return rows, done.results["summary"]["mean"], done.results["curves"]


def test_a_run_reports_and_exports_what_a_run_of_as_many_rounds_as_its_best_does(full: Run, shorter: Run) -> None:
    found = means(full)
    best = max(found, key=lambda round_: (found[round_], -round_))
    assert len(found) == ROUNDS and best < ROUNDS - 1  # so that its files are not those of the last two checkpoints
    expected = {"stage": "federate", "round": best, "of": ROUNDS, "validation": found[best], "run": "feddpa"}
    assert full.results["best_rounds"] == [expected]
    assert f"Best round by validation examples: {best} of {ROUNDS} of FedDPA." in headline(full.results)
    assert "best_rounds" not in shorter.results
    assert adapters(full) == adapters(shorter) and reported(full) == reported(shorter)
    assert full.results["summary"]["bytes_up"] == shorter.results["summary"]["bytes_up"] / best * ROUNDS


def test_the_last_score_of_a_run_that_went_back_is_one_of_a_run_that_is_over(go: Go) -> None:
    """Of a method that has no stage after its federated one: example by example, and on other clients' examples."""
    more: dict[str, Any] = {"method": {"name": "fedit", "rank": 4}, "evaluate": {"every": 1, "others": "end"}}
    patient = go(ROUNDS, 100, **more)
    best = patient.results["best_rounds"][0]["round"]
    assert best < ROUNDS
    shorter = go(best, **more)
    assert reported(patient) == reported(shorter)
    last = [[line for line in lines(done, "each", "others") if line["round"] == best] for done in (patient, shorter)]
    assert last[0] == last[1] and len(last[0]) == 6
    assert ROUNDS not in {line["round"] for line in lines(patient, "score")}  # of models that nobody uses


def test_a_run_whose_last_round_is_its_best_reports_what_it_would_have_without_looking(
    go: Go, full: Run, shorter: Run
) -> None:
    (best,) = full.results["best_rounds"]
    patient = go(best["round"], 100)
    assert patient.results["best_rounds"][0]["round"] == best["round"]
    assert adapters(patient) == adapters(shorter) and reported(patient) == reported(shorter)
    assert lines(patient, "train", "diagnostic") == lines(shorter, "train", "diagnostic")


@pytest.mark.parametrize(
    "also",
    [
        pytest.param({"wire": {"dtype": "int8", "top_k": 0.1}}, id="small messages"),
        pytest.param({"federation": {"secure_sums": {"clip": 10.0}}}, id="secure sums", marks=pytest.mark.slow),
    ],
)
def test_with_small_messages_and_secure_sums_the_best_round_is_that_of_a_shorter_run_too(
    go: Go, also: dict[str, Any]
) -> None:
    """What clients owe on the wire goes back with all else that they keep."""
    long = go(ROUNDS, 100, **also)
    best = long.results["best_rounds"][0]["round"]
    assert best < ROUNDS
    plain = go(best, **also)
    assert adapters(long) == adapters(plain) and reported(long) == reported(plain)


@pytest.mark.slow
def test_with_a_stream_the_best_round_is_one_of_the_whole_run(go: Go) -> None:
    """A shorter run has another stream, so the scores are those of a run of as many rounds, at that round."""
    patient, whole = (go(ROUNDS, patience, stream={"kind": "static"}) for patience in (100, None))
    best = patient.results["best_rounds"][0]["round"]
    assert best < ROUNDS and lines(patient, "train") == lines(whole, "train")

    def scores(done: Run) -> list[dict[str, Any]]:
        return [line for line in lines(done, "score") if line["round"] == best]

    assert scores(patient)[-3:] == scores(whole)[-3:]


def test_a_cross_fitted_run_goes_back_to_the_best_round_of_the_federation_of_everything(go: Go) -> None:
    """Its folds are whole, so its weights are as without patience. Of the round that is best, FedIT's adapter is kept
    in `kept/federate/`."""
    cross_fitted: dict[str, Any] = {"method": {"name": "interpolation", "rank": 2, "w": "cross-fitted"}}
    cross_fitted["checkpoint"] = {"keep": [*range(1, ROUNDS + 1)]}
    patient, whole = (go(ROUNDS, patience, **cross_fitted) for patience in (100, None))
    (best,) = (found["round"] for found in patient.results["best_rounds"])
    assert best < ROUNDS and {found["stage"] for found in patient.results["best_rounds"]} == {"federate"}
    assert lines(patient, "train") == lines(whole, "train")
    weights = {client: row["diagnostics"]["w"] for client, row in patient.results["clients"].items()}
    assert weights == {client: row["diagnostics"]["w"] for client, row in whole.results["clients"].items()}
    fedit, local = (
        go(rounds, method={"name": name, "rank": 2}) for name, rounds in (("fedit", best), ("local", ROUNDS))
    )
    federated = read_payload(kept_path(whole.path, "federate", best)).arrays
    for client, w in weights.items():
        ends, shared, alone = (weights_of(done, client) for done in (patient, fedit, local))
        assert all(federated[f"shared/{name}"].equal(value) for name, value in shared.items())
        for name, value in ends.items():
            torch.testing.assert_close(value, w * shared[name] + (1 - w) * alone[name], rtol=1e-5, atol=1e-7)


def test_a_round_after_which_clients_have_no_model_yet_is_not_the_best(go: Go) -> None:
    """After the first of two clients a round, whose mean is the highest, the third has none."""
    done = go(ROUNDS, 100, federation={"cohort": 2})
    found, best = means(done), done.results["best_rounds"][0]["round"]
    measured = Counter(line["round"] for line in lines(done, "validation"))
    assert max(found, key=lambda round_: found[round_]) == 1 and measured[1] == 2
    assert best == max((round_ for round_ in found if measured[round_] == 3), key=lambda round_: found[round_]) > 1


def test_patience_ends_a_stage_and_leaves_out_rounds_only(go: Go, full: Run) -> None:
    """The same measurements as without, until one in a row was no better."""
    found, patient = means(full), means(stopped := go(ROUNDS, 1))
    drop = next(round_ for round_ in range(2, ROUNDS + 1) if found[round_] <= max(found[n] for n in range(1, round_)))
    assert patient == {round_: found[round_] for round_ in range(1, drop + 1)}
    assert stopped.results["best_rounds"][0]["round"] == drop - 1
    assert {line["round"] for line in lines(stopped, "train") if line["stage"] == "federate"} == {*range(1, drop + 1)}


@pytest.mark.parametrize(
    ("store", "ends"),
    [
        ("memory", {"kind": "client", "round": ROUNDS}),
        ("disk", {"kind": "best"}),
        ("memory", {"kind": "client", "stage": "remember"}),
    ],
)
def test_a_crash_on_the_way_there_or_after_it_changes_nothing(
    go: Go, full: Run, ends: dict[str, Any], store: str, tmp_path: Path
) -> None:
    def crash(event: dict[str, Any]) -> None:
        if ends.items() <= event.items():
            raise KeyboardInterrupt

    config: dict[str, Any] = {"engine": {"store": store}, "checkpoint": {"every_s": 1000 if store == "memory" else 0}}
    with pytest.raises(KeyboardInterrupt):
        go(ROUNDS, 100, tmp_path / "run", observer=crash, **config)
    done = go(ROUNDS, 100, tmp_path / "run", resume=True, **config)
    assert adapters(done) == adapters(full) and reported(done) == reported(full)
    assert (done.path / "metrics.jsonl").read_bytes() == (full.path / "metrics.jsonl").read_bytes()


def test_scores_on_validation_examples_are_not_taken_twice(go: Go) -> None:
    done = go(2, 100, evaluate={"every": 1, "split": "val"})
    assert not lines(done, "validation") and done.results["best_rounds"]


def test_what_lacks_a_measurement_to_go_by_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"federation.patience: counts measurements.* evaluate.every: 1"):
        load_experiment({**CONFIG, "federation": {"patience": 2}, "evaluate": {"every": 0}})
    experiment = load_experiment({**CONFIG, "federation": {"patience": 2}})
    federation = load_federation(experiment)
    bare = tuple(replace(client, val=()) for client in federation.clients)
    with pytest.raises(ConfigError, match=r"federation.patience .* 3 of 3 clients have none, first client-00"):
        check_clients(replace(federation, clients=bare), experiment)
