"""Clients that took no part in training: what every method has for them, from the server's memory alone."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError, RunError
from befit.core.values import Failure, Payload, Score, Tick
from befit.protocol.check import check
from befit.protocol.federate import final_download
from befit.protocol.method import newcomer_stage, run_stages
from befit.protocol.registry import method_names
from befit.protocol.schedule import resolved_stages
from befit.protocol.site import Site
from befit.report.newcomers import newcomer_sentences, newcomer_summary_table, newcomer_table
from befit.runs.artifacts import predict
from befit.runs.exporting import export
from befit.runs.host import Host
from befit.runs.loading import load_federation
from befit.runs.local import LocalEngine
from befit.runs.newcomers import measure_newcomers
from befit.runs.runner import run
from tests.federation import Federation, Stop

from . import conftest as contract
from .conftest import ROUNDS, Once, built, by_pattern

BY_PATTERN = pytest.mark.parametrize("name", by_pattern(method_names(), "fedsa"), scope="module")

SETTINGS = contract.experiment(
    "potara", name="arrivals", benchmark={"name": "digits", "clients": 4, "alpha": 10.0}, baselines=["local", "ditto"]
)


def shown(table):
    return table.titles, table.texts


def arrivals(experiment: Experiment, count: int = 1) -> Host:
    """The digits of four clients, the last of which are newcomers."""
    federation = load_federation(experiment)
    held = federation.clients
    return Host(experiment, replace(federation, clients=held[:-count], newcomers=held[-count:]))


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return load_experiment(SETTINGS)


@pytest.fixture(scope="module")
def finished(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    done = run(experiment, out=tmp_path_factory.mktemp("arrivals") / "run", host=arrivals(experiment, 2))
    return done.path, done.results


@BY_PATTERN
def test_a_newcomer_gets_a_model_or_the_reason_why_not_and_leaves_nothing_behind(
    name: str, once: Once, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three clients train. Personal stages make what the download lacks, unless the federated ones do."""
    method, info = built(name), host.infos[2]
    outcome = once(name, clients=2)
    host.install(method)
    before = {key: value.clone() for key, value in outcome.server.arrays.items()}
    monkeypatch.setattr(host, "newcomers", (info,))
    found = measure_newcomers(host, method, name, outcome.server, resolved_stages(method, ROUNDS), tmp_path)
    row = found["clients"][info.id]
    assert (row["bytes_up"] > 0) == (newcomer_stage(method) is not None) and found["failures"] == []
    assert outcome.server.arrays.keys() == before.keys()
    assert all(torch.equal(outcome.server.arrays[key], value) for key, value in before.items())
    if row["reason"]:
        assert "never completed" in row["reason"] and row["accuracy"] is None and row["adapter"] is None
        assert not (tmp_path / "newcomers" / info.id / "adapter").exists()
    else:
        kept = tmp_path / row["adapter"]
        assert 0 <= row["accuracy"] <= 1
        assert (kept / ("config.json" if kept.name == "model" else "adapter_config.json")).is_file()
    assert row["unchanged"] == (name == "fedsa") and 0 <= row["backbone"] <= 1
    personal = [stage for stage in run_stages(method) if not stage.federated]
    if newcomer_stage(method) is not None:
        (sent,) = json.loads((tmp_path / "newcomers" / info.id / "outbound.json").read_text()).values()
        assert not row["reason"] and any(one["stage"] == "arrive" for one in sent)
    if not personal:
        assert row["download"] == row["accuracy"]


@BY_PATTERN
def test_a_client_that_never_took_part_gets_the_shared_model_or_a_clear_refusal(
    name: str, once: Once, host: Host
) -> None:
    """Two of three clients train. Where all that is deployed comes from the server the third is scored with it; where
    a slot of its own is missing, it must not pass as a trained client."""
    outcome = once(name, clients=2)
    method = built(name)
    host.install(method)
    stage, newcomer = run_stages(method)[-1], host.infos[2]
    engine = LocalEngine(method, host.infos, host.site, outcome.store)
    at = Tick(stage.name, ROUNDS, ROUNDS, 0)
    request = final_download(method, outcome.server, newcomer, at)
    (reply,) = list(engine.score({newcomer.id: request}, at, "test"))
    deployed = method.deploy(*_a_trained_client(outcome, request, host))
    # Said before a run, and what a base is judged by.
    one = method.layout.gate.fewer  # of two clients there is one cluster, whose adapter is used without a gate
    assert (deployed.slots, deployed.mixer) == ((("shared",), "sum") if one else (method.use.slots, method.use.mixer))
    if set(deployed.slots) <= {"shared", "base"}:
        assert isinstance(reply, Score) and reply.examples == len(host.examples(newcomer.id, "test"))
    else:
        assert isinstance(reply, Failure)
        assert reply.kind == "NotTrained" and "never completed" in reply.reason and newcomer.id in reply.reason
    assert outcome.store.load(newcomer.id) is None


def _a_trained_client(outcome: Federation, request: Payload, host: Host) -> tuple[Payload, Payload, Site]:
    info = host.infos[0]
    return outcome.store.load(info.id) or Payload(), request, host.site(info)


def test_those_that_train_for_themselves_end_as_if_they_had_been_clients(
    experiment: Experiment, tmp_path: Path
) -> None:
    """Local training is the same steps on the same data from the same start: bit by bit the adapter of a client."""
    only = load_experiment({**SETTINGS, "method": "local", "baselines": []})
    federation = load_federation(only)
    everybody = run(only, out=tmp_path / "all", host=Host(only, federation))
    new = run(only, out=tmp_path / "new", host=arrivals(only))
    last = federation.clients[-1].id
    assert new.results["newcomers"]["clients"][last]["accuracy"] == everybody.results["clients"][last]["accuracy"]
    ours, theirs = (
        (path / last / "adapter" / "adapter_model.safetensors").read_bytes()
        for path in (tmp_path / "new" / "newcomers", tmp_path / "all" / "clients")
    )
    assert ours == theirs


def test_a_shared_adapter_serves_a_newcomer_as_it_is(experiment: Experiment, tmp_path: Path) -> None:
    only = load_experiment({**SETTINGS, "method": "fedit", "baselines": []})
    done = run(only, out=tmp_path / "run", host=arrivals(only))
    (row,) = done.results["newcomers"]["clients"].values()
    (new,) = (tmp_path / "run" / "newcomers").iterdir()
    old = next(iter((tmp_path / "run" / "clients").iterdir()))
    first, second = ((one / "adapter" / "adapter_model.safetensors").read_bytes() for one in (new, old))
    assert first == second and row["download"] == row["accuracy"] and row["bytes_down"] > 0
    assert newcomer_sentences(done.results)[0].endswith("with FedIT, as downloaded.")


def test_a_method_that_shares_too_little_to_change_a_model_says_so(tmp_path: Path) -> None:
    """FedSA's A beside a B of zero: the backbone's own score, to the last digit of the loss."""
    only = load_experiment({**SETTINGS, "method": "fedsa", "baselines": []})
    results = run(only, out=tmp_path / "run", host=arrivals(only)).results
    (row,) = results["newcomers"]["clients"].values()
    assert row["unchanged"] and row["accuracy"] == row["backbone"] == row["download"]
    assert "what the backbone has without it" in newcomer_sentences(results)[0]


def test_clients_end_the_same_whether_newcomers_are_measured_or_not(
    experiment: Experiment, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    without = load_experiment({**SETTINGS, "baselines": [], "evaluate": {"newcomers": False}})
    done = run(without, out=tmp_path / "run", host=arrivals(without, 2))
    assert "newcomers" not in done.results and not (tmp_path / "run" / "newcomers").exists()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()
    assert (tmp_path / "run" / "outbound.json").read_bytes() == (finished[0] / "outbound.json").read_bytes()


def test_results_have_a_section_for_newcomers_against_the_baselines(finished: tuple[Path, dict[str, Any]]) -> None:
    section = finished[1]["newcomers"]
    assert set(section["clients"]).isdisjoint(finished[1]["clients"]) and len(section["clients"]) == 2
    for row in section["clients"].values():
        assert (
            row["baselines"]["ditto"] is None and row["gain_over_local"] == row["accuracy"] - row["baselines"]["local"]
        )
        assert row["download"] is None and 0 <= row["diagnostics"]["w"] <= 1
    assert section["baselines"]["ditto"]["scored"] == 0 and section["baselines"]["local"]["scored"] == 2
    values = [row["accuracy"] for row in section["clients"].values()]
    assert section["summary"]["mean"] == sum(values) / 2


def test_report_and_tables_show_newcomers_and_who_has_nothing_for_them(finished: tuple[Path, dict[str, Any]]) -> None:
    path, results = finished
    sentences = " ".join(newcomer_sentences(results))
    assert "its download alone makes no model" in sentences and "Ditto has nothing that they could use." in sentences
    headers, rows = shown(newcomer_table(results))
    assert headers[:2] == ["newcomer", "test examples"] and [row[0] for row in rows] == list(
        results["newcomers"]["clients"]
    )
    headers, rows = shown(newcomer_summary_table(results))
    assert [row[1] for row in rows] == ["2 of 2", "0 of 2", "2 of 2"] and headers[1] == "scored"
    assert "## Newcomers" in (path / "report.md").read_text()
    assert "<h2>Newcomers</h2>" in (path / "report.html").read_text()


def test_a_newcomers_adapter_can_be_exported_and_predicts(
    finished: tuple[Path, dict[str, Any]], experiment: Experiment, tmp_path: Path
) -> None:
    path, results = finished
    client, row = next(iter(results["newcomers"]["clients"].items()))
    assert (export(path, client, tmp_path / "adapter") / "adapter_model.safetensors").is_file()
    held = next(one for one in load_federation(experiment).clients if one.id == client)
    answers = predict(path, client, [{"image": one["image"]} for one in held.test])
    right = [answer["answer"] == str(one["label"]) for answer, one in zip(answers, held.test, strict=True)]
    assert sum(right) / len(right) == pytest.approx(row["accuracy"])


def test_a_newcomers_adapter_that_was_removed_is_made_again_by_a_resumed_run(tmp_path: Path) -> None:
    only = load_experiment({**SETTINGS, "baselines": []})
    first, again = (arrivals(only, 2) for _ in range(2))
    results = run(only, out=tmp_path / "run", host=first).results
    rows = results["newcomers"]["clients"]
    files = [tmp_path / "run" / row["adapter"] / "adapter_model.safetensors" for row in rows.values()]
    weights, written = [file.read_bytes() for file in files], [file.stat().st_mtime_ns for file in files]
    shutil.rmtree(files[0].parent)
    resumed = run(only, out=tmp_path / "run", resume=True, host=again).results
    timeless = {"seconds", "cpu_seconds"}
    for client, row in resumed["newcomers"]["clients"].items():
        assert {**row, **dict.fromkeys(timeless)} == {**rows[client], **dict.fromkeys(timeless)}
    assert [file.read_bytes() for file in files] == weights
    assert files[1].stat().st_mtime_ns == written[1]  # the other newcomer is not measured again


def test_a_newcomer_without_a_model_is_refused_with_the_methods_reason(tmp_path: Path) -> None:
    only = load_experiment({**SETTINGS, "method": "ditto", "baselines": []})
    done = run(only, out=tmp_path / "run", host=arrivals(only))
    (client,) = done.results["newcomers"]["clients"]
    with pytest.raises(RunError, match=f"newcomer {client} has no adapter: .*'personal'.*never completed"):
        export(tmp_path / "run", client, tmp_path / "adapter")
    assert "Ditto has nothing that they could use" in newcomer_sentences(done.results)[0]


def test_a_newcomer_without_training_examples_is_named_before_and_has_what_needs_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only = load_experiment({**SETTINGS, "baselines": ["fedit"]})
    host = arrivals(only, 2)
    first, *others = host.federation.newcomers
    bare = Host(only, replace(host.federation, newcomers=(replace(first, train=()), *others)))
    with caplog.at_level(logging.WARNING):
        run(only, out=tmp_path / "run", host=bare)
    said = f"method potara: newcomers with no training examples will have no model of it: {first.id}"
    assert said in caplog.messages and not [one for one in caplog.messages if "method fedit: newcomers" in one]
    with pytest.raises(RunError, match=f"newcomer {first.id} has no adapter: .* It has one by --method fedit$"):
        export(tmp_path / "run", first.id, tmp_path / "adapter")
    assert export(tmp_path / "run", first.id, tmp_path / "adapter", method="fedit").is_dir()
    cross_fitted = built("interpolation", w="cross-fitted")
    few = replace(bare.context.federation, newcomers=(replace(first, train=first.train[:2]), *others))
    (problem,) = check(cross_fitted, replace(bare.context, federation=few))
    assert "newcomers with fewer than 3 training examples" in str(problem)


def test_a_run_stopped_among_its_newcomers_goes_on_with_the_next_one(
    experiment: Experiment, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "newcomer" and event["run"] == "potara":
            raise Stop

    with pytest.raises(Stop):
        run(experiment, out=tmp_path / "run", host=arrivals(experiment, 2), observer=stop)
    (first,) = (tmp_path / "run" / "newcomers").iterdir()
    written = (first / "result.json").stat().st_mtime_ns
    done = run(experiment, out=tmp_path / "run", host=arrivals(experiment, 2), resume=True)
    assert (first / "result.json").stat().st_mtime_ns == written

    def lasting(results: dict[str, Any]) -> str:
        rows = {
            client: {**row, "seconds": 0, "cpu_seconds": 0} for client, row in results["newcomers"]["clients"].items()
        }
        return json.dumps(rows, sort_keys=True)

    assert lasting(done.results) == lasting(finished[1])
    for client in done.results["newcomers"]["clients"]:
        mine, theirs = (
            (path / "newcomers" / client / "deployment.safetensors").read_bytes()
            for path in (tmp_path / "run", finished[0])
        )
        assert mine == theirs


def test_a_newcomer_whose_records_were_mended_is_measured_again(experiment: Experiment, tmp_path: Path) -> None:
    alone = load_experiment({**SETTINGS, "baselines": []})
    federation = load_federation(alone)
    *clients, last = federation.clients
    broken = replace(federation, clients=tuple(clients), newcomers=(replace(last, train=()),))

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "newcomer":
            raise Stop

    with pytest.raises(Stop):
        run(alone, out=tmp_path / "run", host=Host(alone, broken), observer=stop)
    mended = replace(broken, newcomers=(last,))
    done = run(alone, out=tmp_path / "run", host=Host(alone, mended), resume=True)
    row = done.results["newcomers"]["clients"][last.id]
    assert row["accuracy"] is not None and not row["failures"]


def test_a_newcomer_with_nothing_to_train_on_is_scored_with_the_download(
    experiment: Experiment, tmp_path: Path
) -> None:
    """FedIT needs no data of a newcomer's own; Potara's local branch does, and its failure is listed."""
    both = load_experiment({**SETTINGS, "baselines": ["fedit"]})
    federation = load_federation(both)
    *clients, last = federation.clients
    host = Host(both, replace(federation, clients=tuple(clients), newcomers=(replace(last, train=()),)))
    results = run(both, out=tmp_path / "run", host=host).results
    row = results["newcomers"]["clients"][last.id]
    assert row["baselines"]["fedit"] is not None and row["accuracy"] is None
    assert row["reason"] == f"client {last.id} has no train examples"
    assert [one["client"] for one in results["failures"]] == [last.id]


def test_a_newcomer_that_cannot_be_scored_is_refused_before_anything_is_trained(experiment: Experiment) -> None:
    federation = load_federation(experiment)
    *clients, last = federation.clients
    spoilt = replace(federation, clients=tuple(clients), newcomers=(replace(last, test=()),))
    with pytest.raises(DataError, match=f"newcomer {last.id} has no test examples.*evaluate.newcomers: false"):
        Host(experiment, spoilt)
    Host(load_experiment({**SETTINGS, "evaluate": {"newcomers": False}}), spoilt)


def test_a_newcomer_of_a_family_without_clients_is_refused(experiment: Experiment) -> None:
    last = load_federation(experiment).clients[-1].id
    alone = load_experiment({**SETTINGS, "families": {"other": {"clients": [last], "model": {"id": "digits-vit"}}}})
    with pytest.raises(ConfigError, match=f"no client has the backbone of other.*newcomer {last}"):
        arrivals(alone)
