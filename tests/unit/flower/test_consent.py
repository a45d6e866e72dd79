"""What a site agrees to: the server never points it at a path, a model, data or code of the server's choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.values import Payload, State
from befit.flower.at_sites import hello
from befit.flower.engine import Lost, ask, checked
from befit.flower.frame import unpack
from befit.flower.policy import experiment_here, settings_of
from befit.flower.service import SiteService
from befit.flower.site_file import SiteFile, load_site
from befit.flower.site_state import SiteMemory, Stamp
from tests.unit.flower.loopback import write_site

Make = Callable[..., Experiment]
SITE = SiteFile("client-00", models={"digits-vit": "digits-vit"}, benchmarks=["digits"], device="cpu")


def test_settings_hold_no_place_of_the_server(experiment: Make) -> None:
    """No device, no clients, no engine, no baselines: only what decides the numbers."""
    settings = settings_of(experiment(model={"id": "digits-vit", "device": "cpu"}))
    assert settings.keys() == {
        "model",
        "benchmark",
        "adapter",
        "train",
        "stream",
        "limit",
        "evaluate",
        "wire",
        "privacy",
        "federation",
    }
    assert "device" not in settings["model"]
    usual = {"deploy": "method", "deploy_margin": 0.0, "secure_sums": None}
    assert settings["federation"] == {"rounds": 2, "seed": 0, **usual}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": {"id": "/etc"}}, "model.id: /etc is not among the site's models: digits-vit"),
        ({"model": {"id": "evil/repository"}}, "model.id: evil/repository is not among"),
        ({"model": {"device": "cuda"}}, "model.device: is for the site to say"),
        ({"benchmark": {"name": "names"}}, "benchmark.name: names is not among the site's benchmarks: digits"),
        ({"engine": {"workers": 9}}, "engine: the server may not set it"),
        ({"data": {"clients": "/home"}}, "data.clients: is for the site to say"),
    ],
)
def test_a_site_refuses_what_it_has_not_allowed(change: dict[str, Any], reason: str, experiment: Make) -> None:
    settings = settings_of(experiment(model={"id": "digits-vit"}))
    for block, values in change.items():
        settings[block] = {**settings.get(block, {}), **values}
    with pytest.raises(ConfigError) as refused:
        experiment_here(settings, {"name": "fedit"}, SITE)
    assert any(problem.startswith(reason) for problem in refused.value.problems)


def test_a_site_may_limit_the_methods(experiment: Make) -> None:
    only = SiteFile(**{**vars(SITE), "methods": ["fedsa"]})
    with pytest.raises(ConfigError, match=r"method\.name: fedit is not among the site's methods: fedsa"):
        experiment_here(settings_of(experiment(model={"id": "digits-vit"})), {"name": "fedit"}, only)


def test_a_baseline_that_a_site_does_not_run_is_refused_at_the_start(experiment: Make, tmp_path: Path) -> None:
    service = SiteService(SiteFile(**{**vars(SITE), "methods": ["fedsa"], "state": str(tmp_path)}))
    with pytest.raises(Lost, match=r"method\.name: local is not among the site's methods: fedsa"):
        both = experiment("fedsa", baselines=["local"], model={"id": "digits-vit"})
        checked(service.answer(hello(both, "trial")), {}, "hello")


def test_a_site_runs_on_its_own_model_data_columns_and_device(tmp_path: Path) -> None:
    settings = {
        "model": {"id": "agreed-name", "revision": "main"},
        "data": {"task": "causal-lm", "columns": {"output": "answer", "instruction": "question"}},
        "train": {"max_steps": 3},
        "federation": {"rounds": 1, "seed": 5},
    }
    site = SiteFile(
        "a",
        "/mine/data",
        columns={"output": "reply", "instruction": "question"},
        models={"agreed-name": "/mine/model"},
        device="cuda:1",
        threads=2,
    )
    mine = experiment_here(settings, {"name": "fedit"}, site)
    assert mine.data is not None
    assert (mine.model.id, mine.model.revision, mine.model.device) == ("/mine/model", None, "cuda:1")
    assert (mine.data.clients, mine.data.columns) == (
        {"a": "/mine/data"},
        {"output": "reply", "instruction": "question"},
    )
    assert (mine.train.max_steps, mine.federation.seed, mine.engine.threads) == (3, 5, 2)


def test_a_site_file_names_every_mistake(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("client: 'a '\nmodel: {x: y}\ndevice: tpu\n")
    with pytest.raises(ConfigError) as refused:
        load_site(path)
    text = str(refused.value)
    assert all(
        part in text for part in ("client: must be a printable name", "model: unknown key", "models", "device: must")
    )


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ("{min_sites: 2}", r"limits\.min_sites: must be 3 or more"),
        ("{min_batch: 64, max_batch: 32}", "min_batch: 64 is more than max_batch, which is 32"),
    ],
)
def test_limits_that_protect_nobody_or_allow_nothing_are_refused(limits: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_site(write_site(tmp_path, "a", f"limits: {limits}\n"))


def test_paths_of_a_site_file_count_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm" / "config.json").write_text("{}")
    path = tmp_path / "site.yaml"
    path.write_text("client: a\ndata: train.jsonl\nmodels: {one: llm, two: some/hub-id}\n")
    site = load_site(path)
    assert site.data == str(tmp_path / "train.jsonl")
    assert site.models == {"one": str(tmp_path / "llm"), "two": "some/hub-id"}
    assert site.state == str(tmp_path / "state")


def begin(answer: Callable[[bytes], bytes], experiment: Experiment, **changes: Any) -> Callable[[bytes], bytes]:
    """Begin the run of `request_of` at a site; returns what answers there."""
    said, _ = unpack(answer(request_of(experiment, do="hello", **changes)), "a reply")
    assert said["kind"] == "hello", said
    return answer


def request_of(experiment: Experiment, arrays: State | None = None, **changes: Any) -> bytes:
    header = {
        "run": "r",
        "label": "fedit",
        "settings": settings_of(experiment),
        "method": experiment.method,
        "methods": {changes.get("label", "fedit"): experiment.method},
        "client": "client-00",
        "at": {"stage": "federate", "round": 1, "rounds": 2, "seed": 0, "span": 1},
        "scalars": {},
        "split": "test",
    }
    do = changes.pop("do", "train")
    return ask(do, {**header, **changes}, arrays or {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "../../elsewhere"}, "run name '../../elsewhere'"),
        ({"label": ".."}, "label name '..'"),
        ({"client": "client-01"}, "the request is for client client-01, and this site is client-00"),
        ({"do": "delete"}, "asks for 'delete'"),
        ({"protocol": 99}, "protocol 99"),
    ],
)
def test_a_malformed_request_is_refused_and_says_why(
    changes: dict[str, Any], reason: str, experiment: Make, tmp_path: Path
) -> None:
    service = SiteService(SiteFile(**{**vars(SITE), "state": str(tmp_path / "state")}))
    header, arrays = unpack(service.answer(request_of(experiment(model={"id": "digits-vit"}), **changes)), "a reply")
    assert header["kind"] == "failure" and reason in header["reason"] and not arrays
    assert not list(tmp_path.rglob("stamp.json"))


def test_the_text_of_an_error_stays_at_the_site_unless_its_file_says_otherwise(
    experiment: Make, tmp_path: Path
) -> None:
    """A file that is missing: the message names its path, which is no business of the server's."""
    settings = {
        "model": {"id": "digits-vit"},
        "data": {"task": "image-classification", "label_names": ["a", "b"]},
        "federation": {"rounds": 1, "seed": 0},
    }
    told = {}
    for errors in ("kind", "text"):
        site = SiteFile(
            "client-00",
            "/no/such/file.csv",
            models={"digits-vit": "digits-vit"},
            errors=errors,
            state=str(tmp_path / errors),
        )
        request = request_of(experiment(model={"id": "digits-vit"}), settings=settings, do="hello")
        with pytest.raises(Lost) as lost:
            checked(SiteService(site).answer(request), {}, "hello")
        told[errors] = lost.value.reason
    assert "/no/such/file" not in told["kind"]
    assert "/no/such/file" in told["text"]


def test_everything_in_a_reply_is_listed_at_the_site_before_it_leaves(experiment: Make, tmp_path: Path) -> None:
    service = SiteService(SiteFile(**{**vars(SITE), "state": str(tmp_path)}))
    header, _ = unpack(service.answer(request_of(experiment(model={"id": "digits-vit"}), do="hello")), "a reply")
    rows = json.loads((tmp_path / "runs" / "r" / "outbound.json").read_text())["client-00"]
    assert {row["name"] for row in rows} == {"client", "backbone", "examples", "data", "version"}
    assert {row["name"] for row in rows} <= header.keys()


def memory_with_round(folder: Path, first: int, last: int, request: str) -> SiteMemory:
    memory = SiteMemory(folder)
    memory.save("a", Payload(scalars={"round": last}))
    memory.keep(Stamp(0, first, last, request), f"reply {request}".encode())
    return SiteMemory(folder)


def test_a_memory_answers_the_last_request_again_redoes_its_rounds_and_refuses_older_ones(tmp_path: Path) -> None:
    memory_with_round(tmp_path, 1, 1, "one")
    memory = memory_with_round(tmp_path, 2, 2, "two")
    assert memory.answered(Stamp(0, 2, 2, "two")) == b"reply two"
    assert memory.answered(Stamp(0, 3, 3, "three")) is None
    held = memory.load("a")
    assert held is not None and held.scalars == {"round": 2}
    assert memory.answered(Stamp(0, 2, 2, "another")) is None
    held = memory.load("a")
    assert held is not None and held.scalars == {"round": 1}
    with pytest.raises(PayloadMismatch, match="round 1 of stage 1 is over here"):
        memory.answered(Stamp(0, 1, 1, "one"))


def test_a_redone_round_may_be_redone_again_and_only_named_files_stay(tmp_path: Path) -> None:
    memory_with_round(tmp_path, 1, 1, "one")
    memory = memory_with_round(tmp_path, 2, 2, "two")
    for request in ("three", "four"):
        assert memory.answered(Stamp(0, 2, 2, request)) is None
        held = memory.load("a")
        assert held is not None and held.scalars == {"round": 1}
        memory.save("a", Payload(scalars={"round": 2}))
        memory.keep(Stamp(0, 2, 2, request), b"")
    names = json.loads((tmp_path / "stamp.json").read_text())["files"]
    assert {path.name for path in tmp_path.iterdir()} == {"stamp.json", *names.values()}
