"""What a comparison says of every metric beside its headline: made-up cells with numbers worked out by hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest

from befit.core.metrics import Measure
from befit.report.numbers import NOTHING
from befit.report.table import csv_text
from befit.runs.groups import winner
from befit.studies.compare.collect import FinishedRun, Scores
from befit.studies.compare.comparison import make_plan
from befit.studies.compare.summary import summarise
from befit.studies.compare.tables import all_tables
from befit.studies.compare.wins_tables import win_rows
from befit.studies.compare.write import client_rows, render_latex, render_markdown, render_page

METRICS = ["rougeL", "rouge1", "exact_match"]
# Two clients in Arabic with 10 and 30 examples, two in Bulgarian with 20 each.
CLIENTS = {"ar-0": ("ar", 10), "ar-1": ("ar", 30), "bg-0": ("bg", 20), "bg-1": ("bg", 20)}
Values = Mapping[str, list[float | None]]  # by metric, one for each client; None where its row has none
A: list[Values] = [
    {"rougeL": [0.5] * 4, "rouge1": [0.2, 0.6, 0.3, 0.5], "exact_match": [0.1] * 4},
    {"rougeL": [0.5] * 4, "rouge1": [0.4, 0.8, 0.3, 0.5], "exact_match": [0.1] * 4},
]
B: list[Values] = [
    {"rougeL": [0.4, 0.4, 0.6, 0.6], "rouge1": [0.9, 0.5, 0.2, 0.6], "exact_match": [0.3, 0.3, 0.2, 0.2]},
    {"rougeL": [0.4, 0.4, 0.6, 0.6], "rouge1": [1.0, 0.7, 0.2, 0.6], "exact_match": [0.3, 0.3, 0.2, 0.2]},
]


def latex_of(results: dict[str, Any]) -> str:
    return render_latex(results, all_tables(results))


def cell(seed: int, values: Values, headline: str, newcomers: Values | None = None) -> Scores:
    def rows(of: Values) -> dict[str, dict[str, Any]]:
        return {
            client: {
                "examples": size,
                "info": {"language": language},
                **{name: numbers[index] for name, numbers in of.items() if numbers[index] is not None},
            }
            for index, (client, (language, size)) in enumerate(CLIENTS.items())
        }

    sizes = {client: size for client, (_, size) in CLIENTS.items()}
    scores = dict(zip(CLIENTS, values[headline], strict=True))
    return Scores(
        seed,
        f"runs/x-s{seed}",
        headline,
        "test",
        scores,
        sizes,
        0,
        0,
        1.0,
        1.0,
        f"data {seed}",
        rows=rows(values),
        newcomers=rows(newcomers) if newcomers else {},
    )


def made(
    a: list[Values] = A, b: list[Values] = B, newcomers: Values | None = None, methods: Any = None, **evaluate: Any
) -> dict[str, Any]:
    base = {"benchmark": {"name": "skills"}, "evaluate": {"metrics": METRICS, **evaluate}}
    runs = {"A": {"method": {"name": "lora", "rank": 2}}, "B_1": {"method": {"name": "adalora", "rank": 2}}}
    plan = make_plan({"study": {"title": "Metrics"}, "base": base, "seeds": [0, 1], "runs": methods or runs})
    headline = (evaluate.get("metrics") or METRICS)[0]
    cells = [tuple(cell(seed, one, headline, newcomers) for seed, one in enumerate(values)) for values in (a, b)]
    return summarise(plan, [FinishedRun(run, cells[index % 2]) for index, run in enumerate(plan.runs)], [])


def table_of(results: Mapping[str, Any], title: str) -> tuple[list[str], list[list[str]]]:
    headers, rows = next((one.titles, one.texts) for one in all_tables(results) if one.title == title)
    return list(headers), [list(row) for row in rows]


def test_a_further_metric_is_the_mean_over_clients_of_each_seed_and_its_spread_over_seeds() -> None:
    """rouge1 of A: (.2 + .6 + .3 + .5) / 4 = .4 and (.4 + .8 + .3 + .5) / 4 = .5, so .45 with SD .1 / sqrt 2."""
    results = made()
    (one,) = results["other_metrics"]
    assert (one["pool"], one["metrics"]) == ("clients", ["rouge1", "exact_match"])
    run = one["runs"]["A"]
    assert run["scores"]["rouge1"] == {"mean": pytest.approx(0.45), "sd": pytest.approx(0.1 / 2**0.5), "n": 2}
    assert [seed["mean"]["rouge1"] for seed in run["seeds"]] == pytest.approx([0.4, 0.5])
    assert run["seeds"][1]["clients"]["ar-1"] == {"rouge1": 0.8, "exact_match": 0.1}
    assert table_of(results, "Other metrics") == (
        ["run", "rouge1", "exact_match"],
        [["A", "45.0% ± 7.1", "10.0% ± 0.0"], ["B_1", "58.8% ± 5.3", "25.0% ± 0.0"]],
    )
    tables = all_tables(results)
    assert not any("without a metric" in table.note or "lower is better" in table.note for table in tables)
    assert "## Other metrics" in render_markdown(results, tables)
    assert "<h2>Other metrics</h2>" in render_page(results, tables)
    assert r"run & rouge1 & exact\_match \\" in latex_of(results)
    assert r"B\_1 & 58.8 $\pm$ 5.3 & 25.0 $\pm$ 0.0 \\" in latex_of(results)


def test_clients_without_a_score_are_left_out_and_a_run_without_any_has_none() -> None:
    """rouge1 of A: (.6 + .3 + .9) / 3 = .6 in the only seed that has it."""
    some: list[Values] = [
        {"rougeL": [0.5] * 4, "rouge1": [None, 0.6, 0.3, 0.9]},
        {"rougeL": [0.5] * 4, "rouge1": [None, float("nan"), None, None]},
    ]
    none: list[Values] = [{"rougeL": [0.5] * 4}] * 2
    results = made(some, none)
    (one,) = results["other_metrics"]
    assert one["metrics"] == ["rouge1"]  # exact_match was asked for, and nobody has it
    assert one["runs"]["A"]["scores"]["rouge1"] == {"mean": pytest.approx(0.6), "sd": None, "n": 1}
    assert one["runs"]["B_1"]["scores"] == {"rouge1": None}
    assert table_of(results, "Other metrics")[1] == [["A", "60.0%"], ["B_1", NOTHING]]
    notes = {table.title: table.note for table in all_tables(results)}
    lacking = "Clients without a metric are left out of its mean: rouge1, 8 of 8 over 2 seeds with B_1."
    assert notes["Other metrics"].endswith(lacking)
    json.dumps(results, allow_nan=False)


def test_newcomers_have_a_table_of_their_own() -> None:
    newcomers: Values = {"rougeL": [0.5] * 4, "rouge1": [0.1, 0.2, 0.3, 0.4]}
    results = made(newcomers=newcomers)
    assert [(one["pool"], one["metrics"]) for one in results["other_metrics"]] == [
        ("clients", ["rouge1", "exact_match"]),
        ("newcomers", ["rouge1"]),
    ]
    assert table_of(results, "Other metrics, newcomers")[1] == [["A", "25.0% ± 0.0"], ["B_1", "25.0% ± 0.0"]]
    assert table_of(results, "Other metrics")[1][0][1] == "45.0% ± 7.1"
    assert r"\label{tab:other-metrics-newcomers}" in latex_of(results)
    assert client_rows(results)[0]["rouge1"] == 0.2 and client_rows(results)[0]["exact_match"] == 0.1


def test_answers_that_name_no_choice_are_told_though_nobody_asked() -> None:
    values: list[Values] = [{"choice_parse": [0.5] * 4, "unparsable": [0.1, 0.2, 0.3, 0.2]}] * 2
    results = made(values, values, metrics=["choice_parse"])
    assert table_of(results, "Other metrics") == (["run", "unparsable"], [["A", "20.0% ± 0.0"], ["B_1", "20.0% ± 0.0"]])
    note = next(one.note for one in all_tables(results) if one.title == "Other metrics")
    assert "answers that name none of the choices; lower is better" in note
    assert "lower is better" not in next(one.note for one in all_tables(made()) if one.title == "Other metrics")


def test_compare_csv_has_the_other_metrics_after_what_it_had() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(client_rows(made())))))
    assert list(rows[0]) == ["run", "method", "seed", "client", "rougeL", "examples", "folder", "rouge1", "exact_match"]
    found = {(row["run"], row["seed"], row["client"]): (row["rougeL"], row["rouge1"]) for row in rows}
    assert found["A", "1", "ar-1"] == ("0.5", "0.8") and found["B_1", "0", "ar-0"] == ("0.4", "0.9")


def test_a_groups_score_in_a_further_metric_is_over_its_examples_and_who_is_ahead_is_by_it_alone() -> None:
    """Arabic, rouge1 of A: (10 x .2 + 30 x .6) / 40 = .5 and .7; of B (9 + 15) / 40 = .6 and .775.
    Bulgarian: .4 and .4 for both, a tie. B has both languages by two of three metrics, Arabic without the headline and
    Bulgarian without rouge1."""
    results = made()
    (one,) = results["wins"]
    at = one["at"][""]
    assert at["groups"]["ar"]["scores"]["A"]["mean"] == 0.5 and at["wins"] == {"A": 0, "B_1": 2}
    assert list(at["other_metrics"]) == ["rouge1", "exact_match"]
    rouge = at["other_metrics"]["rouge1"]
    assert rouge["groups"]["ar"]["scores"]["A"]["mean"] == pytest.approx(0.6)
    assert rouge["groups"]["ar"]["scores"]["B_1"]["mean"] == pytest.approx(0.6875)
    assert rouge["groups"]["ar"]["scores"]["A"]["population_sd"] == pytest.approx(0.1)
    assert rouge["groups"]["ar"]["best"] == "B_1" and rouge["groups"]["bg"]["tied"] == ["A", "B_1"]
    assert rouge["mean"]["A"]["mean"] == pytest.approx(0.5)
    assert rouge["wins"] == {"A": 0, "B_1": 1} and rouge["nobody"] == 1
    assert table_of(results, "Scores by language")[0] == ["language", "test examples", "A", "B_1", "best"]
    headers, rows = table_of(results, "Scores by language, rouge1")
    assert headers == ["language", "test examples", "A", "B_1", "ahead"]
    assert rows == [
        ["ar", "40", "60.0% ± 14.1", "68.8% ± 12.4", "B_1"],
        ["bg", "40", "40.0% ± 0.0", "40.0% ± 0.0", "tie of 2"],
        ["mean", "", "50.0% ± 7.1", "54.4% ± 6.2", ""],
        ["ahead", "", "0", "1", ""],
    ]
    latex = latex_of(results)
    assert r"ar & 40 & 60.0 $\pm$ 14.1 & \textbf{68.8} $\pm$ 12.4 & B\_1 \\" in latex
    assert r"ahead &  & 0 & 1 &  \\" in latex and r"language & test examples & A (\%) & B\_1 (\%) & ahead" in latex
    assert r"\label{tab:scores-by-language}" in latex and r"\label{tab:scores-by-language-exact-match}" in latex


def counted_again(scores: Mapping[str, Mapping[str, Mapping[str, float]]], metrics: list[str]) -> dict[str, str | None]:
    """Who has each group by its means (group, run, metric), equal where twelve decimals are."""
    return {
        group: winner({run: {name: round(of[name], 12) for name in metrics} for run, of in runs.items()}, metrics)
        for group, runs in scores.items()
    }


@pytest.mark.parametrize("wins", [None, ["rouge1"], ["exact_match", "rouge1"]])
@pytest.mark.parametrize("by", ["clients", "examples"])
def test_a_count_of_wins_follows_from_what_is_written(wins: list[str] | None, by: str) -> None:
    """From compare-wins.csv and from compare.json: by all three, by one that is not the headline, and by two."""
    evaluate: dict[str, Any] = {"wins": wins}
    a, b = A, B
    if by == "examples":  # every client's examples are all of one topic, so that the groups are those of languages
        evaluate["by"] = "topic"
        a, b = ([{**one, **by_topic(one)} for one in values] for values in (A, B))
    results = made(a, b, **evaluate)
    one = next(one for one in results["wins"] if one["of"] == by)
    at = one["at"][""]
    counted = wins or METRICS
    assert one["metrics"] == counted and list(at["other_metrics"]) == [name for name in counted if name != "rougeL"]

    written: dict[str, Any] = {}
    claimed: dict[str, str | None] = dict.fromkeys(at["groups"])
    for row in csv.DictReader(io.StringIO(csv_text(win_rows(results)))):
        if row["by"] == one["by"]:
            written.setdefault(row["group"], {}).setdefault(row["method"], {})[row["metric"]] = float(row["mean"])
            if row["best"] == "True":
                claimed[row["group"]] = row["method"]
    assert all(
        list(of) == list(dict.fromkeys(["rougeL", *counted])) for runs in written.values() for of in runs.values()
    )
    again = counted_again(written, counted)
    assert again == claimed == {name: group["best"] for name, group in at["groups"].items()}
    assert at["wins"] == {run: sum(best == run for best in again.values()) for run in ("A", "B_1")}
    assert at["wins"] == {"A": 0, "B_1": 2 if wins is None else 1}  # rouge1 is a tie in Bulgarian

    scored = {"rougeL": at, **at["other_metrics"]}
    in_json = {
        group: {
            run: {name: scored[name]["groups"][group]["scores"][run]["mean"] for name in counted}
            for run in ("A", "B_1")
        }
        for group in at["groups"]
    }
    assert counted_again(in_json, counted) == again


def test_the_headlines_numbers_of_groups_stay_whatever_counts() -> None:
    """Arabic: .5 and .4; mean over languages .5 and .5."""
    for wins in (None, ["rouge1"], ["exact_match", "rouge1"]):
        at = made(wins=wins)["wins"][0]["at"][""]
        assert {run: score["mean"] for run, score in at["groups"]["ar"]["scores"].items()} == {"A": 0.5, "B_1": 0.4}
        assert {run: score["mean"] for run, score in at["mean"].items()} == {"A": 0.5, "B_1": 0.5}


def by_topic(values: Values) -> dict[str, list[float | None]]:
    """The same scores as those of the examples of a topic that is the client's language."""
    topics = [language for language, _ in CLIENTS.values()]
    sizes = [float(size) for _, size in CLIENTS.values()]
    return {
        key: found
        for topic in dict.fromkeys(topics)
        for key, numbers in {
            str(Measure("examples", where=topic)): sizes,
            **{f"{name} of {topic}": of for name, of in values.items()},
        }.items()
        if (found := [number if one == topic else None for one, number in zip(topics, numbers, strict=True)])
    }


def test_many_methods_in_few_groups_are_rows_in_every_metric() -> None:
    methods = {f"M{index}": {"method": {"name": "local"}, "set": {"train.lr": 0.1 + index}} for index in range(9)}
    plain: list[Values] = [{**one, "rouge1": [0.0] * 4} for one in A]
    headers, rows = table_of(made(plain, A, methods=methods), "Scores by language, rouge1")
    assert headers == ["method", "ar", "bg", "mean", "ahead"]
    assert rows[1] == ["M1", "60.0% ± 14.1", "40.0% ± 0.0", "50.0% ± 7.1", "0"]
    assert rows[-1] == ["ahead", "tie of 4", "tie of 4", "", ""]


def test_a_comparison_by_another_metric_than_the_headline_says_so() -> None:
    def note(**evaluate: Any) -> str:
        return next(one.note for one in all_tables(made(**evaluate)) if one.title == "Wins by language")

    assert note(wins=["rouge1"]).endswith(" Ahead in rouge1.")
    assert note(wins=["rougeL", "rouge1"]).endswith(" Ahead in more than half of rougeL and rouge1.")
    assert "Ahead in" not in note(wins=["rougeL"])


def test_one_metric_leaves_a_comparison_as_it_was() -> None:
    """No table, no number and no column of anything else but the name of the metric in compare-wins.csv."""
    single: list[list[Values]] = [
        [{"rougeL": one["rougeL"], "token_accuracy": [0.5] * 4} for one in of] for of in (A, B)
    ]
    results = made(*single, metrics=["rougeL"])
    assert results["other_metrics"] == []
    (one,) = results["wins"]
    assert list(one["at"][""]) == ["seeds", "left_out", "runs", "groups", "mean", "wins", "nobody"]
    assert list(client_rows(results)[0]) == ["run", "method", "seed", "client", "rougeL", "examples", "folder"]
    assert [one.title for one in all_tables(results)] == [
        "Wins by language",
        "All runs",
        "Differences from A",
        "Cost",
        "Scores by language",
        "Clients",
    ]
    assert latex_of(results).count(r"\begin{table}") == 6
    rows = win_rows(results)
    assert len(rows) == 4 and {row["metric"] for row in rows} == {"rougeL"}
    assert list(rows[0]) == [
        "pool",
        "setup",
        "by",
        "group",
        "budget",
        "method",
        "run",
        "mean",
        "sd",
        "population_sd",
        "n",
        "best",
        "tied",
        "clients",
        "examples",
        "metric",
    ]
