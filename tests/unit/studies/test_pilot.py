"""`befit plan`: what a pilot says, where it cannot tell, and how often it is right where the truth is known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import ConfigError, RunError
from befit.report.comparison import paired_error
from befit.studies.effects import together
from befit.studies.pilot import NOT, PAYS, UNSURE, _fitting, conclude, over_folds, pilot, sentences, with_weights_chosen
from tests.backbones import short_vit


def results(**right: list[str]) -> dict[str, Any]:
    """What method.json of every run holds, from its single scores by site."""

    def one(each: list[str]) -> dict[str, Any]:
        clients = {
            f"site-{index}": {
                "each": text,
                "accuracy": sum(map(int, text)) / len(text),
                "examples": len(text),
                "train_examples": 30,
            }
            for index, text in enumerate(each)
        }
        mean = sum(row["accuracy"] for row in clients.values()) / len(clients)
        curve = [
            {"round": number, "mean": mean - fall, "bytes_up": 1000 * number, "bytes_down": 2000 * number}
            for number, fall in ((1, 0.2), (2, 0.005), (3, 0.0))
        ]
        return {"clients": clients, "summary": {"mean": mean}, "curve": curve}

    return {label: one(each) for label, each in right.items()}


def test_sites_that_agree_are_more_certain_together_and_sites_that_differ_stay_by_themselves() -> None:
    alike, each = together([0.1] * 6, [0.1] * 6)
    assert alike.value == pytest.approx(0.1) and alike.half == pytest.approx(1.96 * 0.1 / math.sqrt(6), rel=1e-3)
    assert all(site.half < 0.15 and site.probability > 0.95 for site in each)
    mean, each = together([0.4, -0.4, 0.4, -0.4], [0.05] * 4)
    assert mean.value == pytest.approx(0) and mean.probability == pytest.approx(0.5)
    assert mean.half == pytest.approx(1.96 * 0.05 / math.sqrt(4), rel=1e-3)  # of these sites, however much they differ
    assert [site.value for site in each] == pytest.approx([0.4, -0.4, 0.4, -0.4], abs=0.03)
    single, (itself,) = together([0.2], [0.1])
    assert itself.value == pytest.approx(0.2) == single.value and itself.half == pytest.approx(0.196, abs=1e-3)


@pytest.mark.parametrize(("draws", "least"), [(60, 0.88), pytest.param(400, 0.93, marks=pytest.mark.slow)])
def test_intervals_hold_the_truth_as_often_as_they_say(draws: int, least: float) -> None:
    """Ten sites whose true gains are around 0.03 with a spread of 0.06, each measured with an error of 0.1."""
    generator = random.Random(1)
    means = sites = 0
    for _ in range(draws):
        truth = [generator.gauss(0.03, 0.06) for _ in range(10)]
        measured = [value + generator.gauss(0, 0.1) for value in truth]
        mean, each = together(measured, [0.1] * 10)
        means += abs(mean.value - math.fsum(truth) / 10) <= mean.half
        sites += sum(abs(site.value - value) <= site.half for site, value in zip(each, truth, strict=True))
    assert least <= means / draws <= 0.99
    assert least <= sites / draws / 10 <= 0.97


def test_what_sites_say_together_is_an_integral_over_the_mean_and_the_spread() -> None:
    """On a fine grid of both, with the priors that are told: the surest of three sites is far from the others."""
    differences, errors = np.array([0.3, 0.0, -0.1]), np.array([0.05, 0.1, 0.2])
    mu, tau = np.linspace(-1, 1, 801)[:, None, None], np.linspace(1e-6, 0.6, 301)[:, None]
    variances = errors**2 + tau**2
    logs = -0.5 * ((differences - mu) ** 2 / variances + np.log(variances)).sum(-1) - 0.5 * (tau[:, 0] / 0.1) ** 2
    weights = np.exp(logs) / np.exp(logs).sum()

    def law(values: np.ndarray, spread: np.ndarray) -> list[float]:
        """Of normal distributions, one for each mu and tau: mean, 1.96 standard deviations, probability above zero."""
        mean = (weights * values).sum()
        half = 1.96 * np.sqrt((weights * (spread + (values - mean) ** 2)).sum())
        return [mean, half, (weights * stats.norm.cdf(values / np.sqrt(spread))).sum()]

    values, spread = (differences * tau**2 + mu * errors**2) / variances, errors**2 * tau**2 / variances
    mean, sites = together([*differences], [*errors])
    assert [mean.value, mean.half, mean.probability] == pytest.approx(
        law(values.mean(-1), spread.sum(-1) / 9), rel=1e-2
    )
    for k, site in enumerate(sites):
        found = [site.value, site.half, site.probability]
        assert found == pytest.approx(law(values[..., k], spread[:, k]), rel=1e-2)


def test_more_methods_have_to_be_surer_and_errors_are_paired_by_example() -> None:
    alone, fed = "1" * 14 + "0" * 16, "0" * 2 + "1" * 18 + "0" * 10
    plan = conclude(results(local=[alone] * 4, fedit=[fed] * 4, feddpa=[alone] * 4), "accuracy")
    assert plan["sure"] == pytest.approx(0.95)
    measured = plan["methods"]["fedit"]["measured"]
    assert list(measured) == ["site-0", "site-1", "site-2", "site-3"]
    for difference, error in measured.values():
        assert (difference, error) == (pytest.approx(4 / 30), pytest.approx(paired_error(fed, alone)))


def test_it_says_pays_does_not_pay_or_that_it_cannot_tell() -> None:
    better, worse = ["1" * 24 + "0" * 6] * 5, ["1" * 14 + "0" * 16] * 5
    plan = conclude(results(local=worse, fedit=better, feddpa=worse), "accuracy")
    assert (plan["proposed"], plan["answer"]) == ("fedit", PAYS)
    assert {row["answer"] for row in plan["sites"].values()} == {PAYS}
    assert plan["methods"]["fedit"]["gain"] == pytest.approx(1 / 3)
    assert plan["methods"]["fedit"]["rounds"] == 2  # within a point of the best
    assert plan["methods"]["fedit"]["bytes_up_per_site"] == 2000 / 5
    plan = conclude(results(local=better, fedit=worse, feddpa=worse), "accuracy")
    assert plan["answer"] == NOT and {row["answer"] for row in plan["sites"].values()} == {NOT}
    little = ["1" * 14 + "0" * 16, "1" * 15 + "0" * 15, "1" * 13 + "0" * 17] * 2
    plan = conclude(results(local=["1" * 14 + "0" * 16] * 6, fedit=little, feddpa=little), "accuracy")
    assert plan["answer"] == UNSURE and {row["answer"] for row in plan["sites"].values()} == {UNSURE}
    plan |= {"metric": "accuracy", "limit": None, "rounds": 3, "of_rounds": 9, "folds": 1}
    assert "cannot tell whether" in sentences(plan)[0]
    assert sentences(plan)[1] == "Of 6 sites: the pilot cannot tell for 6."


def test_a_smaller_gain_that_is_sure_is_proposed_before_a_larger_one_that_is_not() -> None:
    """Of forty examples a site, one method repairs three and breaks none; the other repairs 16 and breaks 13 or 12."""
    alone, sure = "1" * 20 + "0" * 20, "1" * 23 + "0" * 17
    unsure = ["0" * 13 + "1" * (23 + more) + "0" * (4 - more) for more in (1, 1, 0, 0, 0, 0)]
    plan = conclude(results(local=[alone] * 6, feddpa=unsure, interpolation=[sure] * 6), "accuracy")
    gains = {label: method["gain"] for label, method in plan["methods"].items()}
    assert gains["feddpa"] > gains["interpolation"] and plan["methods"]["feddpa"]["answer"] == "cannot tell"
    assert (plan["proposed"], plan["answer"]) == ("interpolation", "pays")


@pytest.mark.parametrize(
    ("before_last", "told"),
    [
        (0.005, "FedIT was near its best after 2 rounds, for which a site sends and receives 1.00 kB."),
        (0.05, "FedIT was still rising after 3 rounds, for which a site sends and receives 1.50 kB: take more."),
    ],
)
def test_it_says_how_many_rounds_are_enough_or_that_none_were(before_last: float, told: str) -> None:
    found = results(local=["1" * 30] * 6, fedit=["1" * 30] * 6)
    for of_run in found.values():
        of_run["curve"][1]["mean"] = of_run["summary"]["mean"] - before_last
    plan = conclude(found, "accuracy") | {"metric": "accuracy", "limit": None, "rounds": 3, "of_rounds": 9, "folds": 1}
    assert told in sentences(plan)


def test_the_weight_of_a_merge_is_chosen_by_examples_that_do_not_score_it() -> None:
    """Even places are right with the weights up to 0.25, odd ones with one half: each half takes the other's weight."""
    even, odd = "10" * 10, "01" * 10
    labels = {"interpolation": [odd], "interpolation-w-0.25": [even], "interpolation-w-0.75": ["0" * 20]}
    runs = results(local=[even], fedit=["0" * 20], feddpa=["1" * 20], **labels)
    merged = with_weights_chosen(runs, "accuracy")
    assert list(merged) == ["local", "fedit", "feddpa", "interpolation"]
    assert merged["interpolation"]["clients"]["site-0"]["each"] == [0.0] * 20
    assert merged["interpolation"]["summary"] == {"mean": 0.0}
    alike = results(local=["1" * 9 + "0"], fedit=["0" * 10], feddpa=["0" * 10], **{key: ["0" * 10] for key in labels})
    row = with_weights_chosen(alike, "accuracy")["interpolation"]["clients"]["site-0"]
    assert row["each"] == [1.0] * 9 + [0.0] and row["accuracy"] == 0.9


def test_every_fold_has_a_third_of_the_rounds_before_there_are_more() -> None:
    def fits(folds: int) -> int:
        return 30 // folds - 1

    assert _fitting(12, 5, True, fits) == (5, 5)
    assert _fitting(24, 5, True, fits) == (9, 3)  # of four each would have six
    assert _fitting(24, 5, False, fits) == (5, 5)
    assert _fitting(240, 5, True, fits) == (29, 1)
    assert _fitting(3, 2, True, fits) == (3, 2)


def test_folds_are_joined_example_by_example() -> None:
    first, second = results(local=["1100", "1111"]), results(local=["0000", "1110"])
    joined = over_folds([first, second], "accuracy")["local"]
    assert joined["clients"]["site-0"] | {
        "each": "".join(f"{one:g}" for one in joined["clients"]["site-0"]["each"])
    } == {
        "each": "11000000",
        "accuracy": 0.25,
        "examples": 8,
        "train_examples": 30,
    }
    assert joined["summary"] == {"mean": (0.25 + 7 / 8) / 2} and joined["curve"][-1]["mean"] == (0.75 + 0.375) / 2


def test_with_folds_every_example_of_a_site_is_held_out_once(tmp_path: Path) -> None:
    config = {
        "benchmark": {"name": "scanners", "clients": 3},
        "model": {"id": str(short_vit())},
        "method": {"name": "fedit", "rank": 2},
        "train": {"max_steps": 2, "lr": 1e-2},
        "federation": {"rounds": 9, "patience": 1},  # of which a pilot knows nothing
        "evaluate": {"every": 1},
    }
    plan = pilot(config, tmp_path / "plan", rounds=1)
    assert plan["folds"] == 3 and {row["held_out"] for row in plan["sites"].values()} == {45}
    assert "This rests on 135 examples of 3 sites, held out in 3 folds of 1 round" in plan["sentences"][-1]
    files = [tmp_path / "plan" / name / "results.json" for name in ("pilot", "pilot-2", "pilot-3")]
    held_out = {tuple(row["each"] for row in json.loads(file.read_text())["clients"].values()) for file in files}
    assert len(held_out) == 3
    with pytest.raises(ConfigError, match=r"--folds: .* holds a pilot of 3 folds"):
        pilot(config, tmp_path / "plan", rounds=1, folds=2)
    with pytest.raises(
        ConfigError,
        match=r"--folds: 4 are more than the data give: client \S+ has 3 folds, by its 30 training and 15 validation",
    ):
        pilot(config, tmp_path / "other", rounds=1, folds=4)


def test_one_example_a_site_never_decides_anything() -> None:
    plan = conclude(results(local=["0"] * 3, fedit=["1"] * 3, feddpa=["1"] * 3), "accuracy")
    assert plan["answer"] == UNSURE and {row["answer"] for row in plan["sites"].values()} == {UNSURE}


def test_the_command_shows_a_plan_in_eighty_columns_and_goes_on_from_what_is_there(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"benchmark: {{name: scanners, clients: 3, val: 40}}\nmodel: {{id: {short_vit()}}}\n"
        "method: {name: fedit, rank: 2}\ntrain: {max_steps: 2, lr: 1e-2}\nfederation: {rounds: 9}\n"
    )
    command = ["plan", str(config), "--out", str(tmp_path / "plan"), "--quiet", "--minutes", "0.01"]
    first = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert first.exit_code == 0, first.output
    assert max(map(len, first.output.splitlines()[:20])) <= 80 and "P(gain)" in first.output
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["split"] == "val" and 2 <= plan["rounds"] <= 9 and len(plan["sites"]) == 3
    assert {row["held_out"] for row in plan["sites"].values()} == {40}
    assert set(plan["methods"]) == {"fedit", "interpolation", "feddpa"}
    other = CliRunner().invoke(app, [*command, "--rounds", str(1 + plan["rounds"] % 9)])
    assert other.exit_code == 2 and f"holds a pilot of {plan['rounds']} rounds" in other.output
    size = tmp_path / "plan" / "size.json"
    whole = size.read_text()
    size.write_text(whole[:5])
    cut = CliRunner().invoke(app, command)
    assert cut.exit_code == 2 and "size.json" in cut.output
    size.write_text(whole)
    again = CliRunner().invoke(app, [*command, "--json", "--minutes", "5"])  # its rounds were decided when it began
    now = json.loads(again.stdout)
    assert f"holds a pilot of {plan['rounds']} rounds, which --minutes 5 does not change" in again.stderr
    assert {**now, "seconds": 0, "path": 0} == {**plan, "seconds": 0, "path": 0}


def test_what_a_pilot_cannot_do_is_said_first(tmp_path: Path) -> None:
    config = {"benchmark": "names-small", "model": {"id": "names-bert-mlm"}, "method": "fedit"}
    with pytest.raises(ConfigError, match=r"val_fraction=0\.2 holds a fifth"):
        pilot(config, tmp_path / "plan")
    with pytest.raises(ConfigError, match=r"--rounds: must be positive, got 0"):
        pilot(config, tmp_path / "plan", rounds=0)
    with pytest.raises(ConfigError, match=r"--rounds: 40 are more than the run itself has, federation.rounds: 6"):
        pilot({**config, "federation": {"rounds": 6}}, tmp_path / "plan", rounds=40)
    private = {**config, "privacy": {"unit": "example", "epsilon": 8.0, "delta": 1e-5}}
    with pytest.raises(ConfigError, match=r"plan without it \(privacy=null\)"):
        pilot(private, tmp_path / "plan")
    with pytest.raises(ConfigError, match="a fifth"):  # which comes after it: so that is a way round
        pilot(private, tmp_path / "plan", ["privacy=null"])


@pytest.mark.parametrize("federation", [{"cohort": 1}, {"asynchronous": {"buffer": 1}}])
def test_a_pilot_asks_every_site_whatever_the_cohort(tmp_path: Path, federation: dict[str, Any]) -> None:
    """A site that sits out the only round has no personal adapter, and nothing to compare."""
    config = {
        "benchmark": {"name": "scanners", "clients": 3},
        "model": {"id": str(short_vit())},
        "method": {"name": "fedit", "rank": 2},
        "train": {"max_steps": 1},
        "federation": {"rounds": 3, **federation},
    }
    plan = pilot(config, tmp_path / "plan", rounds=1, folds=1)
    assert all(row["held_out"] == 15 for row in plan["sites"].values()) and len(plan["sites"]) == 3


def test_a_pilot_of_records_that_changed_since_is_refused_and_classes_are_scored_by_accuracy(tmp_path: Path) -> None:
    def write(count: int) -> None:
        for site in "ab":
            lines = [
                json.dumps({"text": f"{site} {at} {['bad', 'good'][at % 2]}", "label": at % 2}) for at in range(count)
            ]
            (tmp_path / "data" / f"{site}.jsonl").write_text("\n".join(lines))

    (tmp_path / "data").mkdir()
    write(24)
    config = {
        "data": {"task": "text-classification", "clients": str(tmp_path / "data"), "val_fraction": 0.3},
        "model": {"id": "names-bert-mlm", "max_length": 16},
        "method": {"name": "fedit", "rank": 2},
        "train": {"max_steps": 1},
        "evaluate": {"metrics": ["balanced_accuracy", "accuracy"]},
    }
    first = pilot(config, tmp_path / "plan", rounds=1)
    assert first["metric"] == "accuracy" and first["answer"] == UNSURE
    write(40)
    with pytest.raises(RunError, match=r"started with other data, .*data changed since"):
        pilot(config, tmp_path / "plan", rounds=1)
