"""Wins by group, method and budget over seeds: made-up cells whose every number can be worked out by hand."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from befit.core.errors import ConfigError
from befit.report.numbers import NOTHING
from befit.report.table import csv_text
from befit.studies.compare.collect import FinishedRun, Scores
from befit.studies.compare.comparison import make_plan
from befit.studies.compare.plan import Plan
from befit.studies.compare.series import setups_of
from befit.studies.compare.summary import summarise
from befit.studies.compare.tables import all_tables
from befit.studies.compare.wins import wins_of
from befit.studies.compare.wins_tables import win_rows
from befit.studies.compare.write import render_latex, render_markdown, render_page

BASED_LABEL = "Several on FedIT, r 2 and more"
BASED = {"name": "fedp2eft", "rank": 2, "budgets": [4], "base": {"name": "fedit", "rank": 8}}
STUDY: dict[str, Any] = {
    "study": {"title": "Budgets"},
    "base": {"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}},
    "seeds": [0, 1],
    "runs": {
        "Plain, r 2": {"method": {"name": "lora", "rank": 2}},
        "Plain, r 4": {"method": {"name": "lora", "rank": 4}},
        "Several, r 2 and more": {"method": {"name": "fedp2eft", "rank": 2, "budgets": [4]}},
        "Plain on FedIT, r 2": {"method": {"name": "lora", "rank": 2, "base": {"name": "fedit", "rank": 8}}},
        "Several on FedIT, r 2 and more": {"method": BASED},
    },
}
# Two clients in Arabic with 10 and 30 examples, one in Bulgarian.
CLIENTS = {"ar-0": ("ar", 10), "ar-1": ("ar", 30), "bg-0": ("bg", 20)}


def latex_of(results: dict[str, Any]) -> str:
    return render_latex(results, all_tables(results))


def rows(values: Mapping[str, list[float | None]]) -> dict[str, dict[str, Any]]:
    """A row for each client, from its values by metric."""
    return {
        client: {
            "examples": examples,
            "info": {"language": language},
            **{metric: of[index] for metric, of in values.items()},
        }
        for index, (client, (language, examples)) in enumerate(CLIENTS.items())
    }


def cell(seed: int, values: Mapping[str, list[float | None]], newcomers: Any = None) -> Scores:
    made = rows(values)
    headline = {client: row["accuracy"] for client, row in made.items()}
    sizes = {client: row["examples"] for client, row in made.items()}
    return Scores(
        seed,
        f"runs/x-s{seed}",
        "accuracy",
        "test",
        headline,
        sizes,
        0,
        0,
        1.0,
        1.0,
        f"data {seed}",
        rows=made,
        newcomers=rows(newcomers) if newcomers else {},
    )


def one_budget(*seeds: list[float | None]) -> list[Scores]:
    return [cell(seed, {"accuracy": values}) for seed, values in enumerate(seeds)]


def two_budgets(*seeds: tuple[list[float | None], list[float | None]]) -> list[Scores]:
    return [
        cell(
            seed,
            {"accuracy": two, "accuracy r2": two, "accuracy r4": four},
            {"accuracy": two, "accuracy r2": two, "accuracy r4": four},
        )
        for seed, (two, four) in enumerate(seeds)
    ]


CELLS = {
    "Plain, r 2": one_budget([0.2, 0.6, 0.5], [0.2, 0.6, 0.6]),  # ar 0.5 and 0.5, bg 0.5 and 0.6
    "Plain, r 4": one_budget([0.8, 0.8, 0.4], [0.6, 0.6, 0.4]),  # ar 0.8 and 0.6
    "Several, r 2 and more": two_budgets(([0.6, 0.2, 0.6], [0.7, 0.7, 0.4]), ([0.6, 0.2, 0.5], [0.6, 0.6, 0.3])),
    "Plain on FedIT, r 2": one_budget([0.9, 0.9, 0.9], [0.9, 0.9, 0.9]),
    "Several on FedIT, r 2 and more": two_budgets(
        ([1.0, 1.0, 0.9], [1.0, 1.0, 1.0]), ([1.0, 1.0, 0.9], [1.0, 1.0, 1.0])
    ),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(STUDY)


def made(plan: Plan, **change: list[Scores]) -> dict[str, Any]:
    cells = {**CELLS, **change}
    return summarise(plan, [FinishedRun(run, tuple(cells[run.label])) for run in plan.runs], [])


def clients_without_base(results: Mapping[str, Any]) -> dict[str, Any]:
    return next(one for one in results["wins"] if one["pool"] == "clients" and one["setup"] == "without a base")


def test_a_groups_score_is_over_examples_and_the_best_is_of_the_means_over_seeds(plan: Plan) -> None:
    """Arabic at r 2: (10 x .2 + 30 x .6) / 40 = .5 against (10 x .6 + 30 x .2) / 40 = .3."""
    one = clients_without_base(made(plan))
    assert (one["by"], one["budgets"], one["methods"]) == ("language", ["r2", "r4"], ["Plain", "Several"])
    arabic = one["at"]["r2"]["groups"]["ar"]
    assert (arabic["clients"], arabic["examples"], arabic["best"]) == (2, 40, "Plain")
    assert arabic["scores"]["Plain"]["mean"] == pytest.approx(0.5)
    assert arabic["scores"]["Several"]["mean"] == pytest.approx(0.3)
    four = one["at"]["r4"]["groups"]["ar"]["scores"]["Plain"]
    assert four["mean"] == pytest.approx(0.7)
    assert four["sd"] == pytest.approx(0.02**0.5) and four["population_sd"] == pytest.approx(0.1)
    assert four["n"] == 2 and one["at"]["r4"]["groups"]["ar"]["best"] == "Plain"
    assert one["at"]["r2"]["mean"]["Plain"]["mean"] == pytest.approx((0.5 + 0.55) / 2)


def test_a_tie_over_seeds_is_nobodys_also_where_the_seeds_differ(plan: Plan) -> None:
    """Bulgarian at r 2: .5 and .6 against .6 and .5."""
    two = clients_without_base(made(plan))["at"]["r2"]
    assert two["groups"]["bg"]["best"] is None and two["groups"]["bg"]["tied"] == ["Plain", "Several"]
    assert two["wins"] == {"Plain": 1, "Several": 0} and two["nobody"] == 1


def test_a_run_is_compared_at_every_budget_that_it_measured(plan: Plan) -> None:
    """Its own rank is 2; at 4 it has .4 and .3 in Bulgarian, and Plain .4 and .4."""
    four = clients_without_base(made(plan))["at"]["r4"]
    assert four["groups"]["bg"]["scores"]["Several"]["mean"] == pytest.approx(0.35)
    assert four["runs"] == {"Plain": "Plain, r 4", "Several": "Several, r 2 and more"}


def test_runs_on_another_base_are_another_setup(plan: Plan) -> None:
    results = made(plan)
    setups = {(one["pool"], one["setup"]): one for one in results["wins"]}
    assert list(setups) == [("clients", "without a base"), ("clients", "on FedIT")]  # nobody to beat among newcomers
    on = setups["clients", "on FedIT"]
    assert on["methods"] == ["Plain on FedIT", "Several on FedIT"] and on["at"]["r2"]["wins"]["Several on FedIT"] == 1
    assert on["at"]["r4"]["wins"] == {"Several on FedIT": None} and on["at"]["r4"]["nobody"] == 0
    budgets = {
        (one["pool"], row["setup"], row["method"]): row["scores"] for one in results["budgets"] for row in one["rows"]
    }
    assert budgets["newcomers", "on FedIT", "Several on FedIT"]["r4"]["mean"] == pytest.approx(1.0)
    assert set(budgets["clients", "on FedIT", "Plain on FedIT"]) == {"r2"}


def test_bases_of_one_name_are_apart_only_where_a_method_has_several() -> None:
    """The second has twice the rate and half of it in its base, so one base; the third is the first at another rate."""

    def setups(**more: Any) -> list[tuple[str, list[str]]]:
        base = {"name": "fedavg", "lr_scale": 0.1}
        runs = {
            "A": {"method": {"name": "lora", "rank": 2, "base": base}},
            "B": {
                "method": {"name": "adalora", "rank": 2, "base": {**base, "lr_scale": 0.05}},
                "set": {"train.lr": 0.002},
            },
            **more,
        }
        plan = make_plan({**STUDY, "runs": runs})
        found, _ = setups_of([FinishedRun(run, tuple(one_budget([0.5, 0.5, 0.5]))) for run in plan.runs])
        return [(one.title, [series.label for series in one.series]) for one in found]

    assert setups() == [("", ["A", "B"])]
    other = {"method": {"name": "lora", "rank": 2, "base": {"name": "fedavg", "lr_scale": 0.3}}}
    assert setups(C=other) == [
        ("on FedAvg, all weights, base.lr_scale=0.1", ["A"]),
        ("on FedAvg, all weights, base.lr_scale=0.05", ["B"]),
        ("on FedAvg, all weights, base.lr_scale=0.3", ["C"]),
    ]


def test_generated_text_takes_two_of_three_metrics_at_a_budget_too() -> None:
    """At r 4 the second is behind in the headline, and ahead in two of three metrics."""
    base = {"benchmark": {"name": "skills"}, "evaluate": {"metrics": ["rougeL", "rouge1", "exact_match"]}}
    runs = {"A, r 4": {"method": {"name": "lora", "rank": 4}}, "B": {"method": {"name": "fedp2eft", "rank": 2}}}
    plan = make_plan({**STUDY, "base": base, "runs": runs, "seeds": [0]})
    alike = {name: [0.5] * 3 for name in ("accuracy", "rougeL", "rouge1", "exact_match")}
    more = {"rougeL r4": [0.4] * 3, "rouge1 r4": [0.6] * 3, "exact_match r4": [0.6] * 3}
    cells = [replace(cell(0, {**alike, **own}), metric="rougeL") for own in ({}, more)]
    (one,) = wins_of([FinishedRun(run, (found,)) for run, found in zip(plan.runs, cells, strict=True)])
    assert one["at"]["r4"]["groups"]["ar"]["best"] == "B" and len(one["metrics"]) == 3
    others = {
        name: {run: score["mean"] for run, score in found["groups"]["ar"]["scores"].items()}
        for name, found in one["at"]["r4"]["other_metrics"].items()
    }
    at_four = {"A": pytest.approx(0.5), "B": pytest.approx(0.6)}
    assert others == {"rouge1": at_four, "exact_match": at_four}


def test_only_the_metrics_that_count_decide_a_win() -> None:
    """B is ahead in two of the three that count, and in two of all four."""
    measured = ["rougeL", "rouge1", "rougeL_unicode", "exact_match"]
    counted = ["exact_match", "rouge1", "rougeL"]
    runs = {"A": {"method": {"name": "lora", "rank": 2}}, "B": {"method": {"name": "adalora", "rank": 2}}}
    a, b = (
        {"accuracy": [0.5] * 3, **{name: [value] * 3 for name, value in zip(measured, of, strict=True)}}
        for of in ((0.5, 0.5, 0.5, 0.5), (0.4, 0.6, 0.4, 0.6))
    )
    for wins, best in ((counted, "B"), (None, None)):
        base = {"benchmark": {"name": "skills"}, "evaluate": {"metrics": measured, "wins": wins}}
        plan = make_plan({**STUDY, "base": base, "runs": runs, "seeds": [0]})
        cells = [replace(cell(0, one), metric="rougeL") for one in (a, b)]
        results = summarise(plan, [FinishedRun(run, (one,)) for run, one in zip(plan.runs, cells, strict=True)], [])
        (one,) = results["wins"]
        assert one["at"][""]["groups"]["ar"]["best"] == best and one["metrics"] == (wins or measured)
    both = {"A": {**runs["A"], "set": {"evaluate.wins": ["rougeL"]}}, "B": runs["B"]}
    with pytest.raises(ConfigError, match=r"evaluate\.wins: must be the same for all runs"):
        make_plan({**STUDY, "base": base, "runs": both, "seeds": [0]})


def test_newcomers_are_counted_apart(plan: Plan) -> None:
    newcomers = {"accuracy": [0.0, 0.0, 0.9]}
    plain = [cell(seed, {"accuracy": [0.2, 0.6, 0.5]}, newcomers) for seed in (0, 1)]
    one = next(one for one in made(plan, **{"Plain, r 2": plain})["wins"] if one["pool"] == "newcomers")
    assert one["at"]["r2"]["wins"] == {"Plain": 1, "Several": 1} and one["at"]["r2"]["groups"]["bg"]["best"] == "Plain"


def test_only_seeds_that_all_methods_of_a_row_have_count(plan: Plan) -> None:
    one = clients_without_base(made(plan, **{"Plain, r 2": CELLS["Plain, r 2"][1:]}))
    two = one["at"]["r2"]
    assert two["seeds"] == [1] and two["groups"]["bg"]["best"] == "Plain"  # 0.6 against 0.5
    assert two["groups"]["bg"]["scores"]["Several"]["n"] == 1


def test_a_group_that_some_seed_has_nobody_in_is_left_out_and_named(plan: Plan) -> None:
    first, second = CELLS["Plain, r 2"]
    without = replace(second, rows={client: row for client, row in second.rows.items() if client != "bg-0"})
    results = made(plan, **{"Plain, r 2": [first, without]})
    two = clients_without_base(results)["at"]["r2"]
    assert two["left_out"] == ["bg"] and list(two["groups"]) == ["ar"]
    counts = next(one for one in all_tables(results) if one.title == "Wins by language")
    assert counts.note.endswith("Left out, since not every seed has them: bg.")


def test_a_client_without_a_score_leaves_its_group_unmeasured(plan: Plan) -> None:
    missing = one_budget([None, 0.6, 0.5], [0.2, 0.6, 0.6])
    two = clients_without_base(made(plan, **{"Plain, r 2": missing}))["at"]["r2"]
    assert two["groups"]["ar"]["scores"]["Plain"] is None and two["groups"]["ar"]["best"] is None
    assert two["mean"]["Plain"] is None and two["nobody"] == 1  # Bulgarian is the tie
    assert two["wins"] == {"Plain": 0, "Several": 0}


def test_a_method_that_was_not_measured_has_lost_nothing(plan: Plan) -> None:
    results = made(plan, **{"Plain, r 4": one_budget([None, None, None], [None, None, None])})
    assert clients_without_base(results)["at"]["r4"]["wins"] == {"Plain": None, "Several": None}
    counts = next(one.texts for one in all_tables(results) if one.title == "Wins by language")
    assert counts[0] == ["Plain", "without a base", "1", NOTHING, "1"]
    assert r"Plain & without a base & 1 & -- & 1 \\" in latex_of(results)


def test_without_budgets_every_run_is_a_method() -> None:
    runs = {"A": {"method": {"name": "local"}}, "B, r 4": {"method": {"name": "fedit", "rank": 4}}}
    plan = make_plan({**STUDY, "runs": runs})
    cells = {"A": one_budget([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]), "B, r 4": one_budget([0.6, 0.6, 0.4], [0.6, 0.6, 0.4])}
    results = summarise(plan, [FinishedRun(run, tuple(cells[run.label])) for run in plan.runs], [])
    (one,) = results["wins"]
    assert one["setup"] == "" and one["at"][""]["wins"] == {"A": 1, "B, r 4": 1} and results["budgets"] == []
    (counts,) = [one for one in all_tables(results) if not one.detail and one.title.startswith("Wins")]
    assert (counts.titles, counts.texts) == (["method", "wins"], [["A", "1"], ["B, r 4", "1"], ["nobody", "0"]])


def test_files_show_counts_first_and_every_group_below(plan: Plan) -> None:
    results = made(plan)
    titles = [one.title for one in all_tables(results)]
    assert titles[:3] == ["Budgets", "Budgets, newcomers", "Wins by language"]
    assert titles[-3:] == ["Scores by language, without a base", "Scores by language, on FedIT", "Clients"]
    assert [one.title for one in all_tables(results) if not one.detail] == titles[:-3]
    wins = next((one.titles, one.texts) for one in all_tables(results) if one.title == "Wins by language")
    assert wins[0] == ["method", "setup", "r 2", "r 4", "all"]
    assert wins[1][:3] == [
        ["Plain", "without a base", "1", "2", "3"],
        ["Several", "without a base", "0", "0", "0"],
        ["nobody", "without a base", "1", "0", "1"],
    ]
    groups = next(
        (one.titles, one.texts) for one in all_tables(results) if one.title == "Scores by language, without a base"
    )
    assert groups[1][0] == ["r 2", "ar", "40", "50.0% ± 0.0", "30.0% ± 0.0", "Plain"]
    assert groups[1][1][-1] == "tie of 2" and groups[1][2][:2] == ["r 2", "mean"]
    page, text = render_page(results, all_tables(results)), render_markdown(results, all_tables(results))
    assert "Wins by language" in page and "## Scores by language, on FedIT" in text
    latex = latex_of(results)
    assert (
        r"r 2 & ar & 40 & \textbf{50.0} $\pm$ 0.0 & 30.0 $\pm$ 0.0 & Plain \\" in latex
        and r"bg & 20 & 55.0 $\pm$ 7.1" in latex
    )
    assert r"Several on FedIT & on FedIT & 1 & -- & 1 \\" in latex
    for columns, body in re.findall(r"\\begin\{tabular\}\{(.*?)\}(.*?)\\end\{tabular\}", latex, re.DOTALL):
        for line in (line for line in body.splitlines() if line.endswith(r"\\")):
            spans = sum(int(one) - 1 for one in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(re.findall(r"(?<!\\)&", line)) + spans == len(columns) - 1, line
    assert "compare-wins.csv" in page
    table = list(csv.DictReader(io.StringIO(csv_text(win_rows(results)))))
    assert len(table) == 2 * (2 + 2) + 2 * (2 + 1)  # groups x methods at r 2 and r 4, in both setups
    best = {(one["group"], one["best"]) for one in table if (one["run"], one["budget"]) == (BASED_LABEL, "r2")}
    assert best == {("ar", "True"), ("bg", "False")}


def test_many_methods_in_few_groups_are_rows() -> None:
    runs = {f"M{index}": {"method": {"name": "local"}, "set": {"train.lr": 0.1 + index}} for index in range(9)}
    plan = make_plan({**STUDY, "runs": runs})
    found = [
        FinishedRun(run, (cell(0, {"accuracy": [0.1 * index] * 3}), cell(1, {"accuracy": [0.1 * index] * 3})))
        for index, run in enumerate(plan.runs)
    ]
    table = next(
        (one.titles, one.texts) for one in all_tables(summarise(plan, found, [])) if one.title == "Scores by language"
    )
    assert table[0] == ["method", "ar", "bg", "mean", "wins"] and table[1][-1] == ["best", "M8", "M8", "", ""]
    assert table[1][8] == ["M8", "80.0% ± 0.0", "80.0% ± 0.0", "80.0% ± 0.0", "2"]
