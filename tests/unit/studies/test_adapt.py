"""`befit adapt` out of finished runs, and `befit select`: real runs of a step or two."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from befit.adapters.keys import select, slot
from befit.cli.main import app
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError, RunError
from befit.core.values import Tick
from befit.protocol.federate import final_download
from befit.runs.artifacts import read_deployment
from befit.runs.directory import last_checkpoint
from befit.runs.host import Host
from befit.runs.loading import load_federation
from befit.runs.newcomers import arrive, newcomer_engine
from befit.runs.outbound import Outbound
from befit.runs.runner import run
from befit.studies.adapt import adapt, fast_adaptation, mean_start, summary
from tests.unit.models.tiny_models import save_speller, save_vit

TEXT: dict[str, Any] = {
    "name": "adapted",
    "benchmark": {"name": "skills", "clients": 2, "train": 8, "val": 1, "test": 4},
    "model": {"id": "skills-llama-s", "max_length": 64},
    "adapter": {"targets": ["q_proj"]},
    "method": {"name": "rela", "rank": 2, "relevance": {"every": 1}},
    "baselines": [{"name": "ditto", "rank": 2}],
    "train": {"max_steps": 1, "batch_size": 2, "lr": 1e-2},
    "federation": {"rounds": 1},
    "evaluate": {"metrics": ["token_accuracy"], "newcomers": False},
    "report": {"plots": False},
}
WHO = "count.upper"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(TEXT, out=tmp_path_factory.mktemp("adapt") / "run").path


def test_newcomers_of_a_private_run_train_without_noise(tmp_path: Path) -> None:
    """Nothing of them is sent: their curves are those without privacy, from what the private server has."""
    pytest.importorskip("dp_accounting")
    private = {"unit": "example", "delta": 1e-3, "noise_multiplier": 1.0, "accountant": "rdp"}
    values = {**TEXT, "method": {"name": "fedit", "rank": 2}, "baselines": [], "privacy": private}
    done = run(values, out=tmp_path / "run").path
    how: dict[str, Any] = {"starts": ["random", "server"], "steps": 2, "every": 1, "newcomers": [WHO], "quiet": True}
    found = adapt([done], **how)
    assert [one.curve is not None and one.curve.metrics[0] != one.curve.metrics[-1] for one in found] == [True, True]
    assert found == adapt([done], **how, overrides=["privacy=null"])


def test_curves_begin_with_a_fresh_adapter_the_clients_mean_and_the_servers_mixture(finished: Path) -> None:
    """The same curves as of `fast_adaptation` from starts made by hand, with the run's own rate and batches."""
    found = adapt([finished], steps=2, every=1, methods=["rela"], newcomers=[WHO])
    host = Host(load_experiment({**TEXT, "evaluate": {"metrics": ["token_accuracy"]}}))
    method = host.build(TEXT["method"])
    site = host.install(method)
    info = next(one for one in host.newcomers if one.id == WHO)
    clients = [read_deployment(finished / "clients" / one.id) for one in host.infos]
    assert clients[0].slots == ("personal", "shared") and clients[0].mixer == "gate"
    mean = mean_start([select(one.arrays, slot("personal")) for one in clients])
    row = {"bytes_up": 0, "bytes_down": 0, "seconds": 0.0, "cpu_seconds": 0.0}
    engine = newcomer_engine(host, method, info)
    server = arrive(engine, host, method, last_checkpoint(finished).server, info, row, Outbound())
    given = final_download(method, server, info, Tick("federate", 1, 1, 0)).arrays  # type: ignore[arg-type]
    mixture = {key.replace("shared", "personal"): value for key, value in given.items()}
    assert row["bytes_up"] > 0 and site is not None
    assert mixture.keys() == mean.keys()
    for one, start in zip(found, ({}, mean, mixture), strict=True):
        expected = fast_adaptation(host.site(info), start, steps=2, every=1, trainable=method.trainable())
        assert one.curve is not None and one.curve.metrics == expected.metrics, one.start
    assert len({json.dumps(one.curve.metrics) for one in found if one.curve}) == 3
    (random, *_) = summary(found)
    assert random["mean"] == pytest.approx(sum(random["scores"].values()) / 3) and random["newcomers"] == 1


def test_the_command_writes_curves_and_says_what_a_method_has_not(finished: Path, tmp_path: Path) -> None:
    """Ditto's server has no adapter of one's own; the clients' mean is there."""
    command = [
        "adapt",
        str(finished),
        "train.lr=0.1",
        "--methods",
        "ditto",
        "--steps",
        "1",
        "--every",
        "1",
        "--newcomers",
        WHO,
        "--starts",
        "mean,server",
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "run ditto adapt 2/2 · clients 1/2" in done.stderr  # its progress: one curve, and one start without any
    assert "server: none for count.upper" in done.output and "the server sends no model" in done.output
    told = json.loads((tmp_path / "out" / "adapt.json").read_text())
    assert [(one["start"], "reason" in one) for one in told["curves"]] == [("mean", False), ("server", True)]
    with (tmp_path / "out" / "adapt.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == told["metric"]]
    assert [row["step"] for row in rows] == ["0", "1"]
    assert float(rows[0]["value"]) == told["summary"][0]["scores"]["0"]
    page = (tmp_path / "out" / "adapt.html").read_text()
    assert "<svg" in page and "the mean of the clients" in page
    assert (tmp_path / "out" / "adapt.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_adapted_is_refused_by_name(finished: Path, tmp_path: Path) -> None:
    for changes, said in (
        ({"starts": ["meen"]}, r"starts: meen is none of.*Did you mean: mean"),
        ({"starts": []}, "starts: must name at least one"),
        ({"methods": []}, "methods: must name at least one"),
        ({"steps": 5, "every": 2}, r"steps: must be .* \(--steps and --every\), got 5 and 2"),
        ({"overrides": ["method=ditto"]}, "method: stays as the run had it"),
        ({"overrides": ["train.lr=1", "train.epochs=2"]}, "train.epochs: stays as the run had it"),
        ({"methods": ["fedit"]}, "methods: .* has no fedit; it has rela, ditto"),
        ({"newcomers": ["count"]}, "newcomers: count is none of double.drop-first, count.upper"),
    ):
        with pytest.raises(ConfigError, match=said):
            adapt([finished], **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"runs: .* is named twice"):
        adapt([finished, finished / "."])
    with pytest.raises(RunError, match=rf"{re.escape(str(tmp_path))} .* run\.json"):
        adapt([tmp_path])
    with pytest.raises(DataError, match="skills-10 has no newcomers to adapt"):
        adapt([finished], overrides=["benchmark={name: skills-10, train: 8, val: 1, test: 4}"])


def test_the_larger_model_goes_to_whom_it_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, gains and families agree with the two runs, which are used when the command comes again."""
    save_vit(tmp_path / "narrow", labels=10)
    config = {
        "name": "two",
        "benchmark": {"name": "digits", "clients": 3},
        "method": {"name": "potara", "rank": 2},
        "baselines": ["local"],
        "model": {"id": "digits-vit"},
        "federation": {"rounds": 1, "deploy": "best"},
        "families": {"few": {"clients": ["client-00"], "model": {"id": str(tmp_path / "narrow")}}},
        "train": {"max_steps": 1},
        "limit": {"records": 2},
    }
    file = tmp_path / "two.yaml"
    file.write_text(json.dumps(config))
    command = ["select", str(file), "--out", str(tmp_path / "out"), "--threshold", "-1000", "--json", "--quiet"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [Path(found["models"][which]).name for which in ("small", "large")] == ["narrow", "digits-vit"]
    assert {row["model"] for row in found["clients"].values()} == {"large"}
    for which in ("small", "large"):
        results = json.loads((tmp_path / "out" / which / "results.json").read_text())
        assert results["method"] == "local" and results["model"] == found["models"][which]
        for client, row in results["clients"].items():
            assert found["clients"][client][which] == pytest.approx(100 * row["accuracy"])
    for row in found["clients"].values():
        assert row["gain"] == pytest.approx(row["large"] - row["small"])
    written = (tmp_path / "out" / "large" / "results.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, [*command[:4], "--threshold", "1000", "--quiet"])
    assert again.exit_code == 0 and "All clients get the small one" in again.output
    assert (tmp_path / "out" / "large" / "results.json").stat().st_mtime_ns == written
    monkeypatch.chdir(tmp_path)  # where a relative folder counts from
    named = CliRunner().invoke(app, [*command, "--models", "narrow,digits-vit"])
    assert named.exit_code == 0, named.output
    assert json.loads(named.stdout)["models"] == found["models"]
    several = CliRunner().invoke(app, [*command, "--seeds", "0,1"])
    assert several.exit_code == 0, several.output
    both = json.loads(several.stdout)["clients"]
    runs = {path.name: json.loads((path / "results.json").read_text()) for path in (tmp_path / "out").glob("*-s?")}
    assert sorted(runs) == ["large-s0", "large-s1", "small-s0", "small-s1"]
    partitions = {json.dumps(one["partition"]) for one in runs.values()}
    assert len(partitions) == 1, "the choice is for the data that each client has"
    for client, row in both.items():
        accuracy = {name: 100 * one["clients"][client]["accuracy"] for name, one in runs.items()}
        assert row["gains"] == pytest.approx(
            [accuracy[f"large-s{seed}"] - accuracy[f"small-s{seed}"] for seed in (0, 1)]
        )
        assert row["large"] == pytest.approx((accuracy["large-s0"] + accuracy["large-s1"]) / 2)
        assert row["gain"] == pytest.approx(sum(row["gains"]) / 2)
    assert json.loads(several.stdout)["limit"].startswith("Limited to 2 records")
    refused = CliRunner().invoke(app, ["select", str(file), "--out", str(file / "below"), "--quiet"])
    assert refused.exit_code == 2 and f"{file} exists already and is not a folder" in " ".join(refused.output.split())
    refused = CliRunner().invoke(app, [*command, "--threshold", "nan"])
    assert refused.exit_code == 2 and "--threshold: must be a number" in refused.output
    refused = CliRunner().invoke(app, [*command, "--seeds", "1,1"])
    assert refused.exit_code == 2 and "got [1, 1]" in refused.output
    refused = CliRunner().invoke(app, [*command, "--models", "digits-vit,digits-vit"])
    assert refused.exit_code == 2 and "digits-vit twice" in refused.output
    refused = CliRunner().invoke(app, [*command, "--models", "digits-vit,"])
    assert refused.exit_code == 2 and "name two, as A,B, got digits-vit" in refused.output
    with pytest.raises(ConfigError, match=r"models: the configuration has 1"):
        from befit.studies.select import choose_models

        choose_models(replace(load_experiment(file), families={}), out=tmp_path / "none")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """FedMosaic with two clients of either of two backbones, whose larger one also the newcomer has."""
    folder = tmp_path_factory.mktemp("mixed")
    small = save_speller(folder / "small", 0)
    large = save_speller(folder / "large", 12, hidden_size=24, num_hidden_layers=4)
    config = {
        **TEXT,
        "benchmark": {"name": "skills", "clients": 4, "train": 8, "val": 1, "test": 4},
        "baselines": [],
        "model": {"id": str(large), "max_length": 96},
        "families": {
            "few": {"clients": ["reverse.upper", "star-vowels.reverse"], "model": {"id": str(small), "max_length": 96}}
        },
        "method": {"name": "fedmosaic", "rank": 2, "blocks": 2, "relevance": {"every": 1}, "align": {"samples": 8}},
        "train": {"max_steps": 3, "batch_size": 2, "lr": 0.3},
        "report": {"plots": False},
    }
    experiment = load_experiment(config)
    whole = load_federation(experiment)
    host = Host(experiment, replace(whole, public=whole.public[:60]))  # aligning needs no more of them
    return run(experiment, out=folder / "run", host=host).path, config


def test_with_two_backbones_the_mean_is_of_those_with_the_newcomers_and_the_basis_the_federations(
    mixed: tuple[Path, dict[str, Any]],
) -> None:
    """The mean of one client alone, or a fresh basis beside that of both, would have another curve."""
    path, config = mixed
    host = Host(load_experiment({**config, "evaluate": {"metrics": ["token_accuracy"]}}))
    method = host.build(config["method"])
    host.install(method)
    info = next(one for one in host.newcomers if one.id == WHO)
    peers = [one.id for one in host.infos if one.backbone == info.backbone]
    assert peers == ["drop-first.reverse", "upper.swap-ends"]
    means = {}
    for name, clients in (("peers", peers), ("one", peers[:1])):
        own = [select(read_deployment(path / "clients" / client).arrays, slot("personal")) for client in clients]
        means[name] = {key: sum(state[key] for state in own) / len(own) for key in own[0]}
    basis = last_checkpoint(path).server.part("bases", info.backbone).arrays
    assert len(basis) == 4
    chosen = method.trainable() & slot("personal")
    curves = {}
    for name, begin in (
        ("mean", {**basis, **means["peers"]}),
        ("random", basis),
        ("one", {**basis, **means["one"]}),
        ("fresh basis", means["peers"]),
    ):
        curves[name] = fast_adaptation(host.site(info), begin, steps=1, every=1, trainable=chosen).metrics
    assert len({json.dumps(curve) for curve in curves.values()}) == 4
    found = adapt([path], steps=1, every=1, newcomers=[WHO], starts=["mean", "random"])
    for one in found:
        assert one.curve is not None and one.curve.metrics == curves[one.start], one.start
