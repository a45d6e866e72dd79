"""A site's own budget is final: what a server asks beyond it is refused before anything is trained."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from befit.adapters.keys import slot
from befit.adapters.state import fingerprint
from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import BefitError, ConfigError
from befit.core.storage import read_sealed
from befit.flower.agreement import agree
from befit.flower.budget import Account
from befit.flower.consent import promises
from befit.flower.doctor import examine
from befit.flower.frame import unpack
from befit.flower.policy import experiment_here, settings_of
from befit.flower.service import SiteService
from befit.flower.site_file import SiteBudget, SiteFile, load_site
from befit.protocol.accountant import Release, epsilon
from befit.protocol.settings import PrivacySettings
from befit.runs.loading import resolve_model
from befit.train.private import Private
from tests.processes import call
from tests.unit.flower.conftest import SMALL
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.test_consent import begin, request_of
from tests.unit.flower.test_failures import go, of_train

pytest.importorskip("dp_accounting")
Make = Callable[..., Experiment]
PRIVATE: dict[str, Any] = {"unit": "example", "delta": 1e-3, "noise_multiplier": 1.0}
ONE = Release(0.1, 1.0, 10)


def site_of(folder: Path, budget: float) -> SiteFile:
    return SiteFile("a", benchmarks=["digits"], privacy=SiteBudget(budget, 1e-3), state=str(folder))


def test_a_request_is_charged_once_until_it_is_answered_and_none_beyond_the_budget(tmp_path: Path) -> None:
    """The budget is for two trainings. The first was never answered, so it may be done again; the second has left, and
    a third is refused, of the same request and in another run too."""
    site, agreed = site_of(tmp_path, epsilon((replace(ONE, count=20),), 1e-3)), PrivacySettings(**PRIVATE)
    for request in ("1", "2", "1"):
        Account(site).charge("run", "fedit", request, [ONE], "round 1", agreed)
    with pytest.raises(ConfigError, match="round 3 would bring what this site's records have lost from"):
        Account(site).charge("other", "fedit", "3", [ONE], "round 3", agreed)
    Account(site).charge("run", "fedit", "2", [ONE], "round 2", agreed)
    Account(site).answered("run", "fedit", "2")
    with pytest.raises(ConfigError, match="round 2 would bring what this site's records have lost from"):
        Account(site).charge("run", "fedit", "2", [ONE], "round 2", agreed)
    with pytest.raises(ConfigError, match=r"privacy\.epsilon: this run .* at delta 0\.001"):
        Account(site).check("other", [ONE], "this run", planned=True)
    Account(site).check("run", [ONE, ONE], "this run", planned=True)  # a run that goes on is planned as a whole
    assert {run: [*requests] for run, requests in read_sealed(tmp_path / "privacy.json")["runs"].items()} == {
        "run": ["fedit 1", "fedit 2+1"]
    }


def test_a_round_that_is_asked_again_counts_against_what_the_run_may_spend(tmp_path: Path) -> None:
    """A site without a budget of its own holds a server to the run's: for two requests of each method."""
    site = SiteFile("a", benchmarks=["digits"], state=str(tmp_path))
    agreed = PrivacySettings("example", epsilon((replace(ONE, count=20),), 1e-3), 1e-3)
    for label, request in (("fedit", "1"), ("fedit", "2"), ("ditto", "3")):
        Account(site).charge("run", label, request, [ONE], "round 1", agreed)
    with pytest.raises(ConfigError, match=rf"privacy\.epsilon: round 1 .* fedit .* {agreed.epsilon:g}"):
        Account(site).charge("run", "fedit", "4", [ONE], "round 1", agreed)
    with pytest.raises(ConfigError, match=r"room for rounds that are trained again with a larger .*noise_multiplier"):
        Account(site).charge("run", "fedit", "4", [ONE], "round 1", agreed)
    for request in "123":  # as that says
        Account(site).charge("new", "fedit", request, [replace(ONE, noise=1.5)], "round 1", agreed)


def releases_of(site: Path | str) -> list[list[list[float]]]:
    """What a site's account has, by request, in the order in which it was released."""
    return [
        rows for requests in read_sealed(Path(site) / "privacy.json")["runs"].values() for rows in requests.values()
    ]


def test_two_requests_in_turns_are_charged_as_often_as_they_are_answered(tmp_path: Path, experiment: Make) -> None:
    """Only the last reply is kept. Every other answer is trained with noise of its own, and there are ten of them, also
    once the operator has removed the folder of the run."""
    state = tmp_path / "state"
    site = SiteFile("client-00", models={"digits-vit": "digits-vit"}, benchmarks=["digits"], state=str(state))
    private = experiment(model={"id": "digits-vit"}, privacy=PRIVATE)
    answer = begin(SiteService(site).answer, private)
    first, second = request_of(private), request_of(private, kept=None)
    replies = [answer(request) for request in (first, second, first, first, second)]
    assert replies[2] == replies[3]  # nobody is charged for a reply that was kept
    trained = [unpack(reply, "a reply")[1] for reply in replies]
    assert len({fingerprint(arrays) for arrays in trained}) == 4 and trained[0]
    charged = releases_of(state)
    assert len(charged) == 4
    (((rate, noise, steps),), *_) = charged
    told = [unpack(reply, "a reply")[0]["report"]["epsilon"] for reply in replies]
    assert told == [epsilon((Release(rate, noise, int(count * steps)),), 1e-3) for count in (1, 2, 3, 3, 4)]
    kinds = [unpack(answer(request), "a reply")[0]["kind"] for request in (*3 * [first, second], first)]
    assert kinds == ["update"] * 6 + ["failure"]
    assert len(releases_of(state)) == 10
    rmtree(state / "runs" / "r")
    begin(answer, private)(first)
    assert len(releases_of(state)) == 11


def test_rounds_of_one_message_are_charged_each(tmp_path: Path, experiment: Make) -> None:
    private = experiment(method="potara", model={"id": "digits-vit"}, privacy=PRIVATE)
    charged = []
    for span in (1, 2):
        state = tmp_path / f"state-{span}"
        site = SiteFile("client-00", models={"digits-vit": "digits-vit"}, benchmarks=["digits"], state=str(state))
        at = {"stage": "local", "round": 1, "rounds": 2, "seed": 0, "span": span}
        reply = begin(SiteService(site).answer, private)(request_of(private, at=at))
        assert unpack(reply, "a reply")[0]["kind"] == "update"
        ((release,),) = releases_of(state)
        charged.append(release)
    (rate, noise, steps), twice = charged
    assert twice == [rate, noise, 2 * steps]


def test_a_training_that_failed_is_charged_too_and_so_is_another_try(tmp_path: Path, experiment: Make) -> None:
    """That it failed has left, and another try has noise of its own. Of the ten requests of a round it is one."""
    state = tmp_path / "state"
    site = SiteFile("client-00", models={"digits-vit": "digits-vit"}, benchmarks=["digits"], state=str(state))
    private = experiment(model={"id": "digits-vit"}, privacy=PRIVATE, train={"max_steps": 2, "lr": 1e38})
    answer = begin(SiteService(site).answer, private)
    said = [unpack(answer(request_of(private)), "a reply")[0] for _ in range(12)]
    assert {one["error"] for one in said} <= {"NotFinite", "TrainingDiverged"}
    assert len(releases_of(state)) == 12


@pytest.mark.parametrize(
    ("privacy", "problem"),
    [({}, "privacy.unit: none, and the site"), ({**PRIVATE, "reproducible": True}, "it protects nobody")],
)
def test_a_site_with_a_budget_takes_part_in_private_runs_only(
    privacy: dict[str, Any], problem: str, tmp_path: Path, experiment: Make
) -> None:
    site = load_site(write_site(tmp_path, "client-00", "privacy: {epsilon: 8, delta: 1.0e-3}\n"))
    with pytest.raises(ConfigError, match=problem):
        experiment_here(settings_of(resolve_model(experiment(privacy=privacy))), {"name": "fedit"}, site)


def test_a_stage_without_noise_tells_no_numbers(tmp_path: Path, experiment: Make) -> None:
    """Potara merges after the last exchange, with records."""
    paths = [write_site(tmp_path / f"site-{number}", f"client-0{number}") for number in range(2)]
    done = go(LoopbackGrid(paths), experiment(method="potara", privacy=PRIVATE), tmp_path / "run")
    for rows in json.loads((done / "outbound.json").read_text()).values():
        assert {row["name"] for row in rows if row["stage"] == "merge report"} == set()
        assert {row["name"] for row in rows if row["stage"] == "local report"} == {"steps", "epsilon"}


@pytest.mark.parametrize("privacy", [PRIVATE, {}], ids=["private", "open"])
def test_whether_a_stage_without_noise_comes_to_anything_is_told_by_no_private_site(
    privacy: dict[str, Any], tmp_path: Path, experiment: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """At a rate at which it diverges. A server chooses the rate, and the model that the stage starts from."""
    site = SiteFile(
        "client-00", models={"digits-vit": "digits-vit"}, benchmarks=["digits"], state=str(tmp_path / "state")
    )
    method = {"name": "lora", "rank": 2, "epochs": 2, "base": {"name": "fedit", "rank": 2}}
    wanted = experiment(model={"id": "digits-vit"}, method=method, privacy=privacy, train={"max_steps": 2, "lr": 1e38})
    service = SiteService(site)
    begin(service.answer, wanted, label="lora")
    ((_, host),) = service.hosts._hosts.items()
    host.install(host.build(wanted.method))
    model = {key: value for key, value in host.model.dump(slot("shared")).items()}

    def said(do: str, stage: str, round_: int) -> dict[str, Any]:
        at = {"stage": stage, "round": round_, "rounds": round_, "seed": 0, "span": 1}
        sent = {} if stage == "budget" else model
        return unpack(service.answer(request_of(wanted, sent, do=do, label="lora", at=at)), "a reply")[0]

    exported, _, trained = (
        said(*asked, 1) for asked in (("export", "federate"), ("train", "base"), ("train", "budget"))
    )
    kinds = [exported["kind"], trained["kind"]]
    assert kinds == (["exported", "update"] if privacy else ["failure", "failure"])
    assert not [*Path(site.state).rglob("deployment.safetensors")]
    if privacy:
        assert "client-00 has no adapter of lora" in caplog.text
        assert said("train", "budget", 1)["report"] == {}


def test_sites_tell_what_they_spent_and_no_scores_and_refuse_a_run_that_costs_too_much(
    tmp_path: Path, experiment: Make
) -> None:
    """With a budget of less than two such runs, the second one does not begin."""

    def sites(budget: float) -> list[Path]:
        about = f"privacy: {{epsilon: {budget}, delta: 1.0e-3}}\n"
        return [write_site(tmp_path / f"site-{number}", f"client-0{number}", about) for number in range(2)]

    grid = LoopbackGrid(sites(8.0))
    done = go(grid, experiment(privacy=PRIVATE), tmp_path / "first")
    assert {kind for _, kind in grid.sent} == {"query", "train"}  # nobody is asked for what all would refuse
    report = (done / "report.md").read_text()
    assert "no scores were told" in report and "on Flower sites tell none in a private run" in report
    results = json.loads((done / "results.json").read_text())
    spent = results["privacy"]["spent"]
    assert spent.keys() == results["clients"].keys() and all(0 < each <= 8 for each in spent.values())
    assert all(row["accuracy"] is None for row in results["clients"].values()) and not results["failures"]
    for client, rows in json.loads((done / "outbound.json").read_text()).items():
        assert not any(row["name"] == "loss" or row["name"] == "accuracy" for row in rows)
        (told,) = (row for row in rows if row["name"] == "epsilon")
        assert told["value"] == spent[client] and told["count"] == 2
    before = read_sealed(tmp_path / "site-0" / "state" / "privacy.json")
    with pytest.raises(BefitError, match="is the site's budget"):
        go(LoopbackGrid(sites(1.1 * min(spent.values()))), experiment(privacy=PRIVATE), tmp_path / "second")
    assert read_sealed(tmp_path / "site-0" / "state" / "privacy.json") == before


def test_a_run_is_refused_at_its_start_by_what_all_its_rounds_cost(tmp_path: Path, experiment: Make) -> None:
    """With a budget for one round, which is what a first request would cost, a run of two does not begin."""
    private = experiment(model={"id": "digits-vit"}, privacy=PRIVATE)
    site = SiteFile("client-00", models={"digits-vit": "digits-vit"}, benchmarks=["digits"], state=str(tmp_path / "a"))
    told, _ = unpack(begin(SiteService(site).answer, private)(request_of(private)), "a reply")
    poor = replace(site, privacy=SiteBudget(1.01 * told["report"]["epsilon"], 1e-3), state=str(tmp_path / "b"))
    said, _ = unpack(SiteService(poor).answer(request_of(private, do="hello")), "a reply")
    assert said["kind"] == "failure" and "this run would bring what this site's records have lost" in said["reason"]
    begin(SiteService(poor).answer, replace(private, federation=replace(private.federation, rounds=1)))


def test_a_site_tells_no_score_in_a_private_run_whoever_asks(tmp_path: Path, experiment: Make) -> None:
    site = SiteFile("client-00", models={"digits-vit": "digits-vit"}, benchmarks=["digits"], state=str(tmp_path))
    private = experiment(model={"id": "digits-vit"}, privacy=PRIVATE)
    answer = begin(SiteService(site).answer, private)
    said, _ = unpack(answer(request_of(private, do="score")), "a reply")
    assert said["kind"] == "failure" and "none is told where privacy.unit is example" in said["reason"]


def test_earlier_runs_without_noise_are_named_beside_a_budget_that_does_not_count_them(tmp_path: Path) -> None:
    """Those on the site's own data: what a benchmark's records tell is public."""
    about = "client: a\ndata: data\nbenchmarks: [digits]\nlabel_names: [a, b]\n"
    (tmp_path / "site.yaml").write_text(about)
    runs = tmp_path / "state" / "runs"
    for name, settings in (
        ("open", {"privacy": {"unit": "none"}}),
        ("hidden", {"privacy": {"unit": "example"}}),
        ("public", {"privacy": {"unit": "none"}, "benchmark": {"name": "digits"}}),
    ):
        agree(runs / name, settings, {}, "")
    sentence = "Its budget does not count what it told in earlier runs that were not of privacy.unit example: open."
    assert sentence not in promises(load_site(tmp_path / "site.yaml"))
    (tmp_path / "site.yaml").write_text(f"{about}privacy: {{epsilon: 8, delta: 1.0e-5}}\n")
    assert sentence in promises(load_site(tmp_path / "site.yaml"))
    found = examine(tmp_path / "site.yaml", None, tmp_path / "ca.crt", tmp_path / "site.key")
    assert sentence in [one.found for one in found if one.what == "privacy"]


def sites_and_server(folder: Path, paths: list[Path], dies: int = 0) -> Path:
    """A run of two private rounds at two sites, which a kill ends in the so manyth step of training."""
    steps, backward = list[int](), Private.backward

    def dying(self: Private, *what: Any) -> Any:
        steps.append(1)
        if len(steps) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, *what)

    Private.backward = dying  # type: ignore[method-assign]  # of a process of its own, or counted no further
    experiment = load_experiment({**SMALL, "method": "fedit", "engine": {"kind": "flower"}, "privacy": PRIVATE})
    try:
        return go(LoopbackGrid(paths), experiment, folder / "run", resume=(folder / "run").exists())
    finally:
        Private.backward = backward  # type: ignore[method-assign]


def test_what_is_spent_survives_a_kill_in_the_middle_of_a_step_and_is_spent_once(tmp_path: Path) -> None:
    """The second site dies in the second round, after the charge and before the answer; both are asked again."""
    about = "privacy: {epsilon: 8, delta: 1.0e-3}\n"
    paths = [write_site(tmp_path / f"site-{number}", f"client-0{number}", about) for number in range(2)]
    killed = call(sites_and_server, tmp_path, paths, 2 * SMALL["train"]["max_steps"] + SMALL["train"]["max_steps"] + 1)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    states = [tmp_path / f"site-{number}" / "state" for number in range(2)]
    before = [releases_of(path) for path in states]
    assert [len(requests) for requests in before] == [2, 2]
    done = sites_and_server(tmp_path, paths)
    assert [releases_of(path) for path in states] == before
    spent = json.loads((done / "results.json").read_text())["privacy"]["spent"]
    for requests, each in zip(before, spent.values(), strict=True):
        rows = [row for releases in requests for row in releases]
        (rate, noise), count = rows[0][:2], sum(int(row[2]) for row in rows)
        assert each == pytest.approx(epsilon((Release(rate, noise, count),), 1e-3))


def test_what_left_and_was_not_read_is_told_beside_epsilon(tmp_path: Path, experiment: Make) -> None:
    """The second site's last reply is lost: it has spent three rounds, and told the server of two."""
    paths = [write_site(tmp_path / f"site-{number}", f"client-0{number}") for number in range(2)]
    grid = LoopbackGrid(paths)
    grid.tamper = lambda reply, node: None if node == 12 and of_train(reply, 3) else reply
    fast = {"kind": "flower", "deadline_s": 1.0, "wait_s": 0.05}
    done = go(grid, experiment(privacy=PRIVATE, engine=fast, federation={"rounds": 3}), tmp_path / "run")
    privacy = json.loads((done / "results.json").read_text())["privacy"]
    assert privacy["unread"] == ["client-01"] and privacy["spent"]["client-01"] < privacy["spent"]["client-00"]
    assert "client-01 may have spent more, in replies that left" in (done / "report.md").read_text()


def test_a_site_that_refuses_to_train_has_spent_nothing_that_was_not_read(tmp_path: Path, experiment: Make) -> None:
    about = "privacy: {epsilon: 0.01, delta: 1.0e-3}\n"
    paths = [write_site(tmp_path / f"site-{number}", f"client-0{number}", about * number) for number in range(2)]
    fast = {"kind": "flower", "deadline_s": 1.0, "wait_s": 0.05}
    federation = {"rounds": 2, "min_replies": 1}
    done = go(LoopbackGrid(paths), experiment(privacy=PRIVATE, engine=fast, federation=federation), tmp_path / "run")
    results = json.loads((done / "results.json").read_text())
    assert {row["client"] for row in results["failures"]} == {"client-01"} and "unread" not in results["privacy"]
