"""Claims of a study: contrasts, what shows and refutes them, and where they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import ConfigError
from befit.core.yamlfile import write_yaml
from befit.studies.compare.claims import Claim, verdicts
from befit.studies.compare.comparison import make_plan
from tests.unit.studies.compare.test_choice import STUDY

ALONE = {0: 0.70, 1: 0.74, 2: 0.72, 3: 0.71, 4: 0.73}
BETTER = {0: 0.75, 1: 0.78, 2: 0.78, 3: 0.75, 4: 0.79}  # by 5, 4, 6, 4 and 6 points
SCORES = {"mean": {"A": ALONE, "B": BETTER, "C": {seed: value - 0.002 - seed / 1e5 for seed, value in BETTER.items()}}}


def by_client(scores: Any) -> Any:
    """Each run's number as the score of one client."""
    return {
        of: {run: {seed: {"a": value} for seed, value in seeds.items()} for run, seeds in runs.items()}
        for of, runs in scores.items()
    }


def verdict(claim: Claim, scores: Any = SCORES) -> str:
    (found,) = verdicts({"one": claim}, by_client(scores))
    return found["verdict"]


def test_a_difference_is_shown_refuted_or_left_open_by_its_margin() -> None:
    for by, wanted in ((0.0, "shown"), (3.0, "shown"), (4.9, "undecided"), (8.0, "refuted")):
        assert verdict(Claim("B is better", better={"B": "A"}, by=by)) == wanted
    assert verdict(Claim("A is better", better={"A": "B"})) == "refuted"
    assert verdict(Claim("no worse by more than a point", better={"C": "B"}, by=-1.0)) == "shown"


def test_interval_and_p_are_those_of_a_t_test_over_seeds() -> None:
    (found,) = verdicts({"one": Claim("B", better={"B": "A"}, by=4.0)}, by_client(SCORES))
    (contrast,) = found["contrasts"]
    differences = [BETTER[seed] - ALONE[seed] for seed in ALONE]
    expected: Any = stats.ttest_1samp(differences, 0.04, alternative="greater")
    assert contrast["p_above"] == pytest.approx(float(expected.pvalue)) == found["p_shown"]
    interval = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    assert (contrast["low"], contrast["high"]) == pytest.approx((interval.low, interval.high))
    assert contrast["p_below"] == pytest.approx(1 - float(expected.pvalue))


def test_an_order_is_shown_by_all_of_its_steps_and_refuted_by_one() -> None:
    noisy = {seed: value + (0.02 if seed % 2 else -0.02) for seed, value in BETTER.items()}
    scores = {"mean": {**SCORES["mean"], "D": noisy}}
    assert verdict(Claim("", order=["B", "C", "A"]), scores) == "shown"
    assert verdict(Claim("", order=["D", "B", "A"]), scores) == "undecided"
    assert verdict(Claim("", order=["C", "B", "A"]), scores) == "refuted"


def test_a_crossing_is_a_contrast_of_differences() -> None:
    near, far = {"Merge": BETTER, "Alone": ALONE}, {"Merge far": ALONE, "Alone far": BETTER}
    scores = {"mean": {**near, **far}}
    crossing = Claim("", contrasts=[{"Merge": 1, "Alone": -1, "Merge far": -1, "Alone far": 1}])
    assert verdict(crossing, scores) == "shown"


def test_several_claims_are_held_to_more_and_missing_seeds_decide_nothing() -> None:
    """Six claims that one test would just show: Holm's correction leaves them open. One seed shows nothing."""
    weak = {0: 0.71, 1: 0.76, 2: 0.72, 3: 0.72, 4: 0.75}  # 1, 2, 0, 1 and 2 points
    claim = Claim("", better={"W": "A"})
    scores = {"mean": {"A": ALONE, "W": weak}}
    assert verdict(claim, scores) == "shown"
    assert {one["verdict"] for one in verdicts({str(n): claim for n in range(6)}, by_client(scores))} == {"undecided"}
    (alone,) = verdicts({"one": claim}, by_client({"mean": {"A": {0: 0.5}, "W": weak}}))
    assert alone["verdict"] == "undecided" and alone["contrasts"][0]["low"] is None
    (equal,) = verdicts({"one": claim}, by_client({"mean": {"A": ALONE, "W": ALONE}}))
    assert equal["verdict"] == "undecided"


def test_a_difference_that_is_the_same_in_every_seed_is_shown_by_enough_of_them() -> None:
    """There is no spread for a t test: n seeds on one side of the margin have a chance of 1/2 to the n."""
    claim = Claim("", better={"W": "A"}, by=1.0)
    for n, wanted in ((2, "undecided"), (5, "undecided"), (6, "shown")):
        few = {seed: 0.5 for seed in range(n)}
        assert verdict(claim, {"mean": {"A": few, "W": {seed: 0.55 for seed in few}}}) == wanted
    assert verdict(claim, {"mean": {"A": {seed: 0.5 for seed in range(6)}, "W": {seed: 0.5 for seed in range(6)}}}) == (
        "refuted"
    )


@pytest.mark.parametrize("of", ["mean", "worst"])
def test_a_run_gains_nothing_by_losing_the_client_that_it_serves_worst(of: Any) -> None:
    alone = {seed: {"a": 0.5, "b": 0.7 + seed / 100, "c": 0.8} for seed in range(5)}
    lost = {seed: {"a": None, "b": 0.68, "c": 0.79} for seed in range(5)}
    (found,) = verdicts({"one": Claim("", better={"Lost": "Alone"}, of=of)}, {"mean": {"Alone": alone, "Lost": lost}})
    (contrast,) = found["contrasts"]
    assert found["verdict"] == "refuted" and contrast["spread"] is not None
    assert contrast["spread"]["mean"] == pytest.approx(-0.04 if of == "worst" else -0.025)
    nobody = {"mean": {"Alone": alone, "Lost": {0: {"a": None, "b": None, "c": None}}}}
    (none,) = verdicts({"one": Claim("", better={"Lost": "Alone"}, of=of)}, nobody)
    assert none["contrasts"][0]["spread"] is None and none["verdict"] == "undecided"


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ({"better": {"FedIT": "Alone"}, "order": ["FedIT", "Alone"]}, "takes one of better, order and contrasts"),
        ({}, "takes one of better, order and contrasts"),
        ({"better": {"Fedit": "Alone"}}, "claims.one: there is no run 'Fedit'. Did you mean"),
        ({"order": ["FedIT"]}, "claims.one.order: must name at least two runs"),
        ({"contrasts": [{"FedIT": 1, "Alone": -0.5}]}, "weights must add up to zero"),
        ({"contrasts": [{"FedIT": 0, "Alone": 0}]}, "weights must add up to zero"),
        ({"better": {"FedIT": "FedIT"}}, "claims.one.better: names the same run twice, 'FedIT'"),
        ({"better": {"FedIT": "Twin"}}, "claims.one: FedIT and Twin are the same run, for their settings are equal"),
        ({"better": {"FedIT": "Alone"}, "of": "best"}, 'claims.one.of: "best" is not one of'),
        (
            {"better": {"FedIT": "Alone"}, "of": "others", "at": 4},
            "claims.one.at: others' examples are scored as deployed",
        ),
        ({"beter": {}}, "claims.one.beter: unknown key"),
    ],
)
def test_claims_that_cannot_be_tested_are_refused(claim: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        runs = {**STUDY["runs"], "Twin": "fedit"}
        make_plan({**STUDY, "runs": runs, "choose": None, "claims": {"one": {"says": "x", **claim}}})


def test_runs_that_the_command_makes_equal_differ_by_nothing() -> None:
    """The study's claim is about two runs; with this change they are one, and are no better than each other."""
    runs = {"Low": {"method": {"name": "fedit", "rank": 2}}, "High": {"method": {"name": "fedit", "rank": 4}}}
    study = {**STUDY, "runs": runs, "choose": None, "claims": {"one": {"says": "x", "better": {"High": "Low"}}}}
    assert make_plan(study).claims["one"].sums == [{"High": 1.0, "Low": -1.0}]
    plan = make_plan(study, overrides=["method.rank=2"])
    assert list(plan.claims["one"].sums) == [{"Low": 0.0}]
    assert verdict(Claim("", contrasts=[{"B": 0.0}])) == "undecided"


def test_verdicts_are_in_every_file_of_the_comparison(tmp_path: Path) -> None:
    claims = {"pays": {"says": "Averaging pays", "source": "a paper, Table 1", "better": {"FedIT": "Alone"}, "by": 1.0}}
    claims["at-2"] = {"says": "At rank 2 too", "better": {"FedIT": "Alone"}, "at": 2}
    small = {
        "base": {**STUDY["base"], "train": {"max_steps": 1}, "federation": {"rounds": 1}},
        "runs": {"Alone": {"method": {"name": "local", "rank": 2}}, "FedIT": {"method": {"name": "fedit", "rank": 2}}},
    }
    file = tmp_path / "study.yaml"
    file.write_text(write_yaml({**STUDY, **small, "choose": None, "claims": claims}))
    done = CliRunner().invoke(app, ["compare", str(file), "--quiet", "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    found, at_rank = results["claims"]
    assert at_rank["contrasts"][0]["spread"] == found["contrasts"][0]["spread"]
    assert (found["name"], found["by"], found["contrasts"][0]["spread"]["n"]) == ("pays", 1.0, 2)
    for name in ("compare.md", "compare.html", "compare.tex"):
        text = (tmp_path / "out" / name).read_text()
        assert "Averaging pays (a paper, Table 1)" in text and "FedIT - Alone" in text
    assert any(sentence.startswith("Of 2 claims: ") for sentence in results["sentences"])
