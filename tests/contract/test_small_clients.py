"""Clients with hardly any data, and federations that cannot work."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError, RunError
from befit.core.storage import read_sealed, write_sealed
from befit.data.federation import Federation
from befit.protocol.registry import method_names
from befit.runs.host import Host
from befit.runs.loading import load_federation
from befit.runs.runner import locked_for, run

from . import conftest as contract
from .conftest import LITTLE, by_pattern


@pytest.fixture(scope="module")
def source() -> Federation:
    return load_federation(experiment("fedit"))


def experiment(method: str, **federation: object) -> Experiment:
    little = {"name": method, **LITTLE.get(method, {})}
    return load_experiment(contract.experiment(little, federation={"rounds": 2, **federation}))


def cut(source: Federation, **sizes: tuple[int, int]) -> Federation:
    """The federation with the first client's splits cut to (train, test) examples."""
    first, *others = source.clients
    train, test = sizes["first"]
    return replace(source, clients=(replace(first, train=first.train[:train], test=first.test[:test]), *others))


@pytest.mark.parametrize("method", by_pattern(method_names(), "potara"))
def test_a_client_with_one_example_takes_part_and_gets_its_adapter(
    method: str, source: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        done = run(
            (settings := experiment(method)), out=tmp_path / "run", host=Host(settings, cut(source, first=(1, 1)))
        )
    row = done.results["clients"]["client-00"]
    assert row["train_examples"] == 1 and row["examples"] == 1
    assert row["accuracy"] in (0.0, 1.0)
    assert done.results["failures"] == []
    name = "adapter_model.safetensors" if row["adapter"].endswith("/adapter") else "model.safetensors"
    assert (done.path / row["adapter"] / name).exists()
    if "samples" in row["diagnostics"]:  # a weight that rests on statistics
        assert row["diagnostics"]["samples"] == 1
        assert row["diagnostics"].get("trace_shared", 0.0) == 0  # M = 1: no correlation
        assert "client-00 has 1 train examples" in caplog.text


def test_an_empty_client_is_named_before_anything_is_trained(source: Federation) -> None:
    with pytest.raises(DataError, match="client client-00 has no training examples"):
        Host(experiment("fedit"), cut(source, first=(0, 5)))
    with pytest.raises(DataError, match=r"client client-00 has no test examples .*data\.test_fraction"):
        Host(experiment("fedit"), cut(source, first=(5, 0)))


def test_a_cohort_larger_than_the_federation_is_refused(source: Federation) -> None:
    with pytest.raises(ConfigError, match=r"federation\.cohort: 4 is more than there are clients, 3"):
        Host(experiment("fedit", cohort=4), source)


def test_a_method_that_needs_company_says_so_when_alone(source: Federation, tmp_path: Path) -> None:
    settings = experiment("fedalt")
    alone = replace(source, clients=source.clients[:1])
    with pytest.raises(ConfigError, match="fedalt: needs at least 2 clients, there are 1"):
        run(settings, out=tmp_path / "run", host=Host(settings, alone))


def test_resuming_on_other_data_is_refused_and_leaves_the_run_as_it_was(source: Federation, tmp_path: Path) -> None:
    settings = experiment("fedit")
    done = run(settings, out=tmp_path / "run", host=Host(settings, source))
    (done.path / "report.html").unlink()  # as if it had been interrupted at the very end
    before = (done.path / "run.json").read_bytes()
    other = replace(source, manifest={**source.manifest, "partition": {"sha256": "another"}})
    with pytest.raises(RunError, match="data changed"):
        run(settings, out=tmp_path / "run", resume=True, host=Host(settings, other))
    assert (done.path / "run.json").read_bytes() == before
    again = run(settings, out=tmp_path / "run", resume=True, host=Host(settings, source))
    assert again.results == done.results


def test_resuming_on_another_backbone_of_one_client_is_refused(source: Federation, tmp_path: Path) -> None:
    settings = experiment("fedit")
    done = run(settings, out=tmp_path / "run", host=Host(settings, source))
    (done.path / "report.html").unlink()
    basis = read_sealed(done.path / "run.json")
    basis["backbones"][basis["clients"][-1]] = "0" * 64  # as of a family of its own, whose model is another now
    write_sealed(done.path / "run.json", basis)
    with pytest.raises(RunError, match="other data, weights, plugins or device: backbones changed"):
        run(settings, out=tmp_path / "run", resume=True, host=Host(settings, source))


def test_a_resumed_run_counts_on_from_what_was_sent_before(source: Federation, tmp_path: Path) -> None:
    settings = replace(experiment("fedit"), checkpoint=replace(experiment("fedit").checkpoint, every_s=0))
    sent: list[tuple[str, int]] = []

    def watch(event: dict[str, Any]) -> None:
        if "bytes_up" in event:
            sent.append((event["kind"], event["bytes_up"]))
        if event["kind"] == "client" and event["round"] == 2 and ("round", 0) not in sent:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, out=tmp_path / "run", host=Host(settings, source), observer=watch)
    (_, nothing), (_, first) = sent
    assert nothing == 0 < first
    sent.append(("round", 0))  # from here on it is not interrupted
    run(settings, out=tmp_path / "run", resume=True, host=Host(settings, source), observer=watch)
    assert sent[3] == ("run_started", first) and sent[4][1] == 2 * first


def test_resuming_with_another_configuration_names_what_differs(source: Federation, tmp_path: Path) -> None:
    settings = experiment("fedit")
    run(settings, out=tmp_path / "run", host=Host(settings, source))
    changed = replace(settings, train=replace(settings.train, lr=0.5))
    differs = r"configuration: train\.lr was \S+ and is 0\.5"
    with pytest.raises(RunError, match=differs):
        run(changed, out=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="already holds a run; resume it with --resume"):
        run(settings, out=tmp_path / "run")
    with (
        pytest.raises(RunError, match=r"configuration: train\.lr was \S+ and is 0\.5"),
        locked_for(tmp_path / "run", changed, resume=True),
    ):
        pass  # as where the other run began and ended while this one read its model


def test_a_limit_of_rounds_counts_for_personal_stages_that_are_played_for_a_score(tmp_path: Path) -> None:
    """After the last federated round each client would have the model that it has after its own two rounds."""
    block = {"name": "feddpa", "variant": "F", "rounds_local": 9, "rank": 2}
    limit = {"records": 24, "rounds": 2}
    settings = load_experiment(contract.experiment(block, limit=limit, evaluate={"every": 1}))
    run(settings, out=tmp_path / "run")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        if line["kind"] == "score" and line["metric"] == "loss":
            losses.setdefault((line["stage"], line["round"]), []).append(line["value"])
    assert losses["federate", 2] == losses["local", 2] != losses["local", 1]


def test_potaras_branches_are_local_and_fedit_bit_for_bit(source: Federation, tmp_path: Path) -> None:
    """Same seed, same stages, same batches: what Potara merges is what the two methods alone would give."""
    settings = replace(experiment("potara"), baselines=[{"name": "local"}, {"name": "fedit"}])
    done = run(load_experiment(settings), out=tmp_path / "run")
    from befit.adapters.state import interpolate, rename
    from befit.core.wire import from_bytes

    def arrays(folder: Path, client: str) -> dict[str, object]:
        found, _ = from_bytes((folder / "clients" / client / "deployment.safetensors").read_bytes())
        return rename(found, "one")  # type: ignore[return-value]

    for client, row in done.results["clients"].items():
        fedit, local, merged = (
            arrays(path, client) for path in (done.path / "baselines/fedit", done.path / "baselines/local", done.path)
        )
        expected = interpolate(fedit, local, row["diagnostics"]["w"])  # type: ignore[arg-type]
        assert merged.keys() == expected.keys()
        assert all((merged[key] == expected[key]).all() for key in expected)  # type: ignore[attr-defined]


def test_statistics_on_a_split_that_a_client_lacks_are_refused_before_training(
    source: Federation, tmp_path: Path
) -> None:
    settings = replace(experiment("potara"), method={"name": "potara", "statistics": {"split": "val"}})
    first, *others = source.clients
    without = replace(source, clients=(replace(first, val=()), *others))
    with pytest.raises(ConfigError, match=r"potara: needs val .* has none \(val_fraction, of data"):
        run(settings, out=tmp_path / "run", host=Host(settings, without))


def test_more_replies_than_clients_cannot_be_demanded(source: Federation) -> None:
    with pytest.raises(ConfigError, match=r"federation\.min_replies: 5 is more than there are clients, 3"):
        Host(experiment("fedit", min_replies=5), source)
