"""From scores to tables: made-up cells whose every number can be worked out by hand."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from befit.report.numbers import MINUS, NOTHING
from befit.report.table import csv_text, escape_latex
from befit.studies.compare.collect import FinishedRun, Scores
from befit.studies.compare.comparison import make_plan
from befit.studies.compare.execute import CellFailure
from befit.studies.compare.plan import Plan
from befit.studies.compare.plots import _gains, plots_of
from befit.studies.compare.summary import sentences, summarise, verdict
from befit.studies.compare.tables import (
    all_tables,
    beside_tables,
    client_table,
    cost_table,
    difference_table,
    grid_table,
    summary_table,
)
from befit.studies.compare.write import client_rows, render_latex, render_markdown, render_page

STUDY: dict[str, Any] = {
    "study": {"title": "A <b> & B", "paper": "arXiv:1", "table": "Table 9", "note": "Other data."},
    "base": {"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}},
    "seeds": [0, 1],
    "runs": {"Alone": {"method": "local", "paper": 60.0}, "Fed_IT": "fedit"},
    "grids": {
        "g": {
            "title": "Grid",
            "axes": {"method": {"Ditto": {"method": "ditto"}}, "lr": {"low": {}, "high": {"train.lr": 0.1}}},
            "exclude": [{"when": {"lr": "high"}, "because": "it diverges"}],
            "paper": {"Ditto": {"low": 61.5}},
        }
    },
}


def latex_of(results: dict[str, Any]) -> str:
    return render_latex(results, all_tables(results))


def scores(seed: int, values: list[float | None], sent: int = 0, **change: Any) -> Scores:
    clients = {f"c{index}": value for index, value in enumerate(values)}
    curve = [{"round": 1, "mean": 0.5, "bytes_up": 1, "bytes_down": 1}]
    made = Scores(
        seed,
        f"runs/x-s{seed}",
        "accuracy",
        "test",
        clients,
        dict.fromkeys(clients, 10),
        sent,
        2 * sent,
        60.0,
        25.0,
        f"data {seed}",
        curve,
        cpu_seconds=50.0,
        server_cpu_seconds=2.0,
    )
    return replace(made, **change)


@pytest.fixture
def plan() -> Plan:
    return make_plan(STUDY)


def finished(plan: Plan, change: dict[str, list[Scores]] | None = None) -> list[FinishedRun]:
    cells = {
        "Alone": [scores(0, [0.5, 0.6, 0.7]), scores(1, [0.6, 0.7, 0.8])],
        "Fed_IT": [scores(0, [0.6, 0.6, 0.9], 500_000), scores(1, [0.7, 0.6, 0.8], 1_500_000)],
        "Ditto · low": [scores(0, [0.5, 0.6, 0.4], 10), scores(1, [0.5, 0.7, 0.3], 10)],
        **(change or {}),
    }
    return [FinishedRun(run, tuple(cells[run.label])) for run in plan.runs]


def made(plan: Plan, change: dict[str, list[Scores]] | None = None) -> dict[str, Any]:
    return summarise(plan, finished(plan, change), [])


def by_label(results: dict[str, Any]) -> dict[str, Any]:
    return {run["label"]: run for run in results["runs"]}


def test_means_and_worst_clients_are_of_seeds_first(plan: Plan) -> None:
    """Seed means 0.7 and 0.7, worst clients 0.6 and 0.6; Alone 0.6 and 0.7, worst 0.5 and 0.6, SD 0.0707."""
    runs = by_label(made(plan))
    assert runs["Fed_IT"]["mean"]["mean"] == pytest.approx(0.7)
    assert runs["Fed_IT"]["mean"]["sd"] == pytest.approx(0.0, abs=1e-12)
    assert runs["Alone"]["worst"]["mean"] == pytest.approx(0.55)
    assert runs["Alone"]["mean"]["sd"] == pytest.approx(0.005**0.5)
    assert runs["Fed_IT"]["bytes_up"] == 1_000_000
    assert runs["Fed_IT"]["clients"]["c0"]["mean"] == pytest.approx(0.65)


def test_wins_are_counted_over_clients_of_all_seeds(plan: Plan) -> None:
    """Fed_IT minus Alone: +.1, 0, +.2 and +.1, -.1, 0."""
    signed = by_label(made(plan))["Fed_IT"]["against"]["signed"]
    assert (signed["better"], signed["ties"], signed["worse"], signed["n"]) == (3, 2, 1, 6)
    assert signed["p"] is None  # four that differ are too few


def test_both_families_of_tests_are_corrected_over_their_runs(plan: Plan) -> None:
    for run in made(plan)["runs"][1:]:
        t = run["against"]["t"]
        assert t["p_holm"] >= t["p"]
    p = sorted(run["against"]["t"]["p"] for run in made(plan)["runs"][1:])
    corrected = sorted(run["against"]["t"]["p_holm"] for run in made(plan)["runs"][1:])
    assert corrected == pytest.approx([min(1, 2 * p[0]), max(2 * p[0], p[1])])


def test_different_data_are_not_paired(plan: Plan) -> None:
    results = made(plan, {"Fed_IT": [scores(0, [0.6, 0.6, 0.9]), scores(1, [0.7, 0.6, 0.8], data="other")]})
    assert by_label(results)["Fed_IT"]["against"] is None
    row = next(row for row in difference_table(results).texts if row[0] == "Fed_IT")
    assert row[-1] == "not the same clients and data"


def test_clients_and_seeds_without_a_score_are_left_out_of_pairs_only(plan: Plan) -> None:
    results = made(plan, {"Fed_IT": [scores(0, [0.6, None, 0.9])]})
    fedit = by_label(results)["Fed_IT"]
    assert fedit["mean"] == {"mean": pytest.approx(0.75), "sd": None, "n": 1}
    assert fedit["against"]["t"]["mean"] == pytest.approx(0.15)
    assert fedit["against"]["signed"]["n"] == 2


def test_verdicts_follow_the_corrected_test_over_seeds() -> None:
    def against(**change: Any) -> dict[str, Any]:
        return {"t": {"n": 3, "mean": 0.1, "p_holm": 0.01, **change}}

    assert verdict(against(), 0.05) == "better"
    assert verdict(against(mean=-0.1), 0.05) == "worse"
    assert verdict(against(p_holm=0.06), 0.05) == "no difference shown"
    assert verdict(against(n=1, p_holm=None), 0.05) == "one seed"
    assert verdict(against(p_holm=None), 0.05) == "the same difference in every seed"
    assert verdict(None, 0.05) == "not the same clients and data"


def test_each_look_at_more_seeds_halves_the_level() -> None:
    """A mean difference of 2.8 points and a standard error of 1: p = 0.021 over ten seeds, after Holm's correction."""
    study = {**STUDY, "runs": {"Alone": "local", "Fed_IT": "fedit"}, "grids": {}, "seeds": [*range(10)]}
    claims = {"pays": {"says": "Federating pays", "better": {"Fed_IT": "Alone"}}}
    noise = [0.01 * (-1) ** seed * math.sqrt(9) for seed in range(10)]
    means = {"Alone": [0.5] * 10, "Fed_IT": [0.528 + more for more in noise]}
    cells = {
        label: [
            scores(seed, [mean] * 3, rows={f"c{index}": {"accuracy": mean} for index in range(3)})
            for seed, mean in enumerate(of_run)
        ]
        for label, of_run in means.items()
    }

    def of(looks: int) -> dict[str, Any]:
        plan = make_plan({**study, "study": {**STUDY["study"], "looks": looks}, "claims": claims})
        return summarise(plan, [FinishedRun(run, tuple(cells[run.label])) for run in plan.runs], [])

    second, third = of(2), of(3)
    assert second["level"] == 0.025
    assert by_label(second)["Fed_IT"]["against"]["t"]["p"] == pytest.approx(0.021, abs=5e-4)
    assert "Better than Alone: Fed_IT (p < 0.025 over seeds" in " ".join(second["sentences"])
    assert bold(second) == ["Fed_IT"] and second["claims"][0]["verdict"] == "shown"
    assert "No difference from Alone is shown for 1 run." in third["sentences"]
    assert bold(third) == [] and third["claims"][0]["verdict"] == "undecided"
    assert "p < 0.0125" in summary_table(third).note


def test_the_sentences_say_how_little_two_seeds_show(plan: Plan) -> None:
    text = " ".join(made(plan)["sentences"])
    assert "Highest mean accuracy: Fed_IT, 70.0% ± 0.0 over 2 seeds." in text
    assert "2 seeds are few: a mean difference has to be 9.0 times its own standard deviation" in text
    one = make_plan(STUDY, seeds=[0])
    single = summarise(one, [replace(run, cells=run.cells[:1]) for run in finished(plan)], [])
    assert "With one seed there is no spread" in " ".join(single["sentences"])
    assert "3 pairs of clients and seeds are too few for a signed-rank test (6 at least)." in single["sentences"]


def test_a_tie_at_the_top_names_no_winner_and_a_limit_comes_first(plan: Plan) -> None:
    equal = [scores(0, [0.6, 0.6, 0.9]), scores(1, [0.6, 0.6, 0.9])]
    results = made(plan, {"Fed_IT": equal, "Alone": equal})
    assert results["sentences"][0] == "Highest mean accuracy, a tie of 2 runs (Alone and Fed_IT): 70.0% over 2 seeds."
    results["runs"][1]["config"]["limit"]["rounds"] = 1
    assert sentences(results)[0] == "Limited to 1 round of each stage: such numbers only show that it runs."
    assert "% Limited to 1 round" in latex_of(results) and "it means nothing" in latex_of(results)


def test_a_reference_without_results_is_said_to_have_none(plan: Plan) -> None:
    results = summarise(plan, finished(plan, {"Alone": []}), [CellFailure("Alone", 0, "Boom: x", "trace")])
    assert {row[-1] for row in difference_table(results).texts} == {"Alone has no results"}
    assert "Without results, and missing here: 1 cell." in results["sentences"]
    assert "Not tested against Alone: Fed_IT and Ditto · low (Alone has no results)." in results["sentences"]
    page = render_page(results, all_tables(results))
    assert "Boom: x" in page and "trace" not in page


def test_tables_write_numbers_the_same_everywhere(plan: Plan) -> None:
    results = made(plan)
    summary = summary_table(results)
    assert summary.column("paper") == ["60.00", NOTHING, "61.50"]
    assert " Paper: arXiv:1, Table 9. Other data." in summary.note
    bare = summary_table({**results, "paper": "", "table": ""}).note
    assert "Paper:" not in bare and bare.endswith(" Other data.")
    assert summary.texts[1][1:4] == ["70.0% ± 0.0", "60.0% ± 0.0", "3/2/1"]
    partly = made(plan, {"Fed_IT": [scores(0, [0.6, 0.6, 0.9])]})
    assert summary_table(partly).column("seeds") == ["2", "1", "2"]
    row = next(row for row in difference_table(results).texts if row[0] == "Fed_IT")
    assert row[1] == "+5.0 ± 63.5"  # differences +.1 and 0: half of the interval is 12.706 * 0.05
    assert cost_table(results).texts[1] == ["Fed_IT", "25", "1.00 MB", "2.00 MB", "50.0 s", "2.0 s"]
    grid = grid_table(results, results["tables"][0])
    assert grid.titles == ["method", "low", "high"]
    assert grid.texts == [["Ditto", "50.0% ± 0.0 [61.50]", NOTHING]]
    assert "In brackets: the paper's numbers (arXiv:1, Table 9). Other data." in grid.note
    assert grid.note.endswith("Left out: Ditto / high: it diverges.")


def test_few_clients_of_many_runs_are_columns(plan: Plan) -> None:
    results = made(plan)
    assert client_table(results).titles == ["client", "Alone", "Fed_IT", "Ditto · low"]
    many = {**results, "runs": results["runs"] * 3}
    assert client_table(many).titles == ["run", "c0", "c1", "c2"]


def test_markdown_and_html_escape_what_comes_from_outside(plan: Plan) -> None:
    results = made(plan)
    markdown = render_markdown(results, all_tables(results))
    assert "# A &lt;b&gt; &amp; B" in markdown and "Fed\\_IT" in markdown
    page = render_page(results, all_tables(results))
    assert "A &lt;b&gt; &amp; B" in page and "<b>" not in page
    assert not re.search(r"(src|href)=[\"']?(http|//)", page) and "<script" not in page


def test_plots_show_every_run_and_every_client(plan: Plan) -> None:
    plots = plots_of(made(plan))
    assert [plot.title for plot in plots] == [
        "Accuracy of every run",
        "Accuracy against communication",
        "Gain of every client over Alone",
    ]
    for plot in plots[:2]:
        assert all(label in plot.svg for label in ("Alone", "Fed_IT", "Ditto · low"))
    # Fed_IT minus Alone at c0: +.1 and +.1, at c1: 0 and -.1, at c2: +.2 and 0
    assert "+10.0" in plots[2].svg and f"{MINUS}5.0" in plots[2].svg and "c2" in plots[2].svg


def test_many_clients_are_drawn_as_distributions(plan: Plan) -> None:
    values: list[float | None] = [0.5 + index / 100 for index in range(30)]
    higher: list[float | None] = [0.6 + index / 200 for index in range(30)]
    change = {
        label: [scores(0, one), scores(1, one)]
        for label, one in {"Alone": values, "Fed_IT": higher, "Ditto · low": values}.items()
    }
    assert "the middle half" in plots_of(made(plan, change))[-1].note


# By 29.5 and 39.5 points, with an SD of 0.7 over two seeds: t = 59 and 79, p = 0.011 and 0.008.
LEAD = {
    "Alone": [scores(0, [0.6, 0.6, 0.6]), scores(1, [0.62, 0.62, 0.62])],
    "Fed_IT": [scores(0, [0.9, 0.9, 0.9], 10), scores(1, [0.91, 0.91, 0.91], 10)],
    "Ditto · low": [scores(0, [0.5, 0.5, 0.5], 10), scores(1, [0.52, 0.52, 0.52], 10)],
}


def bold(results: dict[str, Any]) -> list[str]:
    table = summary_table(results)
    return [row[0] for index, row in enumerate(table.texts) if table.is_bold(index, 1)]


def test_bold_is_only_what_is_shown_to_be_above_every_other_run(plan: Plan) -> None:
    assert bold(made(plan, LEAD)) == ["Fed_IT"]
    assert bold(made(plan)) == []  # highest, and 5 +- 64 points above the next
    near = {**LEAD, "Ditto · low": [scores(0, [0.89, 0.89, 0.89], 10), scores(1, [0.92, 0.92, 0.92], 10)]}
    assert bold(made(plan, near)) == []  # above one of two
    elsewhere = {**LEAD, "Alone": [replace(cell, data="other") for cell in LEAD["Alone"]]}
    assert bold(made(plan, elsewhere)) == []  # nothing pairs
    assert bold(made(plan, {label: cells[:1] for label, cells in LEAD.items()})) == []


def test_who_loses_the_client_that_it_serves_worst_is_not_shown_to_be_best(plan: Plan) -> None:
    """Fed_IT is 5 points below at each client that it has a score for, and its mean is over those alone."""
    alone = [scores(seed, [0.8 + more, 0.8 + more, 0.4]) for seed, more in enumerate((0.0, 0.01, 0.02, 0.005))]
    worse = [scores(seed, [0.75 + more, 0.75, None]) for seed, more in enumerate((0.0, 0.011, 0.019, 0.005))]
    results = made(plan, {"Alone": alone, "Fed_IT": worse, "Ditto · low": [scores(s, [0.1] * 3) for s in range(4)]})
    assert verdict(by_label(results)["Fed_IT"]["against"], 0.05) == "worse" and bold(results) == []


def test_bytes_far_apart_have_numbers_on_their_axis(plan: Plan) -> None:
    """From 30 bytes to three million: in plain digits, since the page draws no formulas."""
    drawn = plots_of(made(plan))[1].svg
    assert all(f">{tick}<" in drawn for tick in ("0.001", "0.1", "1")) and "mathdefault" not in drawn


def test_nothing_sent_or_nothing_scored_leaves_a_plot_out(plan: Plan) -> None:
    silent = {label: [scores(0, [0.5, 0.6, 0.7])] for label in ("Alone", "Fed_IT", "Ditto · low")}
    assert len(plots_of(made(plan, silent))) == 2
    empty = {label: [scores(0, [None, None, None])] for label in silent}
    results = made(plan, empty)
    assert plots_of(results) == [] and results["sentences"] == ["No run has a score."]


def test_latex_is_balanced_escaped_and_bold_only_at_the_best(plan: Plan) -> None:
    text = latex_of(made(plan))
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 5
    assert r"Fed\_IT & 70.0 $\pm$ 0.0 & 60.0" in text and r"\textbf" not in text
    assert r"Ditto & 50.0 $\pm$ 0.0 [61.50] & -- \\" in text
    assert r"Fed\_IT & \textbf{90.5} $\pm$ 0.7" in latex_of(made(plan, LEAD))
    for block in re.findall(r"\\begin\{tabular\}\{(.*?)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        columns, body = block
        for line in body.splitlines():
            if line.endswith(r"\\"):
                spans = [int(one) - 1 for one in re.findall(r"\\multicolumn\{(\d+)\}", line)]
                assert len(re.findall(r"(?<!\\)&", line)) + sum(spans) == len(columns) - 1, line
    assert escape_latex("50% & {x}_1~^\\") == r"50\% \& \{x\}\_1\textasciitilde{}\textasciicircum{}\textbackslash{}"


def test_outer_labels_of_columns_span_their_columns_in_latex(plan: Plan) -> None:
    axes = {"a": {"r": {}}, "b": {"p": {}, "q": {"train.lr": 0.2}}, "c": {"x": {}, "y": {"train.batch_size": 3}}}
    grids = {"g": {"axes": axes, "method": "fedit", "rows": ["a"], "columns": ["b", "c"]}}
    plan = make_plan({**STUDY, "runs": {}, "grids": grids})
    runs = [FinishedRun(run, (scores(0, [0.5]),)) for run in plan.runs]
    text = latex_of(summarise(plan, runs, []))
    assert " & \\multicolumn{2}{c}{p} & \\multicolumn{2}{c}{q} \\\\\n\\cmidrule(lr){2-3} \\cmidrule(lr){4-5}" in text
    assert r"a & x & y & x & y \\" in text


def test_the_csv_has_a_row_for_every_client_of_every_cell(plan: Plan) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(client_rows(made(plan))))))
    assert len(rows) == 3 * 2 * 3
    assert rows[5] == {
        "run": "Alone",
        "method": "local",
        "seed": "1",
        "client": "c2",
        "accuracy": "0.8",
        "examples": "10",
        "folder": "runs/x-s1",
    }


def test_the_csv_has_what_a_client_had_over_time_where_runs_were_scored_more_than_once(plan: Plan) -> None:
    often = scores(0, [0.5, 0.6, 0.7], auc={"c0": 0.4, "c1": 0.6, "c2": 0.3})
    rows = client_rows(made(plan, {"Alone": [often, scores(1, [0.6, 0.7, 0.8])]}))
    assert [row["accuracy_auc"] for row in rows[:4]] == [0.4, 0.6, 0.3, None]
    assert list(rows[0])[4:6] == ["accuracy", "accuracy_auc"]
    once = scores(0, [0.5, 0.6, 0.7], auc={"c0": 0.5, "c1": 0.6, "c2": 0.7})
    assert "accuracy_auc" not in client_rows(made(plan, {"Alone": [once]}))[0]


BESIDE = {
    "Alone": [
        {"others_last": 0.25, "self_auc": 0.5, "newcomers": 0.5},
        {"others_last": 0.35, "self_auc": 0.6, "newcomers": 0.5},
    ],
    "Fed_IT": [{"others_last": 0.5, "self_auc": 0.6}, {"others_last": 0.7, "self_auc": 0.8}],
}


def with_beside(plan: Plan, **change: Any) -> dict[str, Any]:
    cells = {run.run.label: list(run.cells) for run in finished(plan)}
    for label, values in BESIDE.items():
        cells[label] = [replace(cell, beside=one) for cell, one in zip(cells[label], values, strict=True)]
    cells["Fed_IT"][1] = replace(cells["Fed_IT"][1], **change)
    return made(plan, cells)


def test_scores_on_others_examples_are_paired_with_the_reference(plan: Plan) -> None:
    """Fed_IT minus Alone on others: .25 and .35, mean .3; a run that was not measured there has no difference."""
    results = with_beside(plan)
    title, (headers, rows), note = next(
        (one.title, (one.titles, one.texts), one.note) for one in beside_tables(results)
    )
    assert title == "Own and other clients' examples" and "Holm" in note
    assert headers == ["run", "own, over time", "others, last", "others, last: minus Alone ± 95%", "p (t, seeds)"]
    t = by_label(results)["Fed_IT"]["beside_against"]["others_last"]
    assert t["mean"] == pytest.approx(0.3) and t["p_holm"] == t["p"] == pytest.approx(0.1051, abs=1e-4)
    assert rows[0] == ["Alone", "55.0% ± 7.1", "30.0% ± 7.1", NOTHING, NOTHING]
    assert rows[1][:3] == ["Fed_IT", "70.0% ± 14.1", "60.0% ± 14.1"] and rows[1][3].startswith("+30.0 ± 63.5")
    assert rows[2] == ["Ditto · low", *[NOTHING] * 4]
    assert r"others, last" in latex_of(results)


def test_scores_beside_of_other_data_are_not_paired(plan: Plan) -> None:
    assert by_label(with_beside(plan, data="other"))["Fed_IT"]["beside_against"] == {}


def test_newcomers_have_their_own_table_and_runs_without_them_a_dash(plan: Plan) -> None:
    newcomers = beside_tables(with_beside(plan))[1]
    assert newcomers.title == "Newcomers"
    assert [row[1] for row in newcomers.texts] == ["50.0% ± 0.0", NOTHING, NOTHING]
    assert beside_tables(made(plan)) == []


def test_newcomers_are_compared_over_those_that_both_runs_have(plan: Plan) -> None:
    """The mean of Fed_IT's is higher only because it has no model for the newcomer with the lowest score."""

    def arrived(cell: Scores, values: dict[str, float | None]) -> Scores:
        known = [value for value in values.values() if value is not None]
        rows = {name: {"accuracy": value} for name, value in values.items()}
        return replace(cell, newcomers=rows, beside={"newcomers": sum(known) / len(known)})

    cells = {run.run.label: list(run.cells) for run in finished(plan)}
    for seed, more in enumerate((0.0, 0.02)):
        cells["Alone"][seed] = arrived(cells["Alone"][seed], {"n": 0.8, "m": 0.4})
        cells["Fed_IT"][seed] = arrived(cells["Fed_IT"][seed], {"n": 0.75 - more, "m": None})
    test = by_label(made(plan, cells))["Fed_IT"]["beside_against"]["newcomers"]
    assert test["mean"] == pytest.approx(-0.06) and test["n"] == 2


def test_others_over_time_are_left_out_where_they_were_measured_once(plan: Plan) -> None:
    def headers(later: float) -> list[str]:
        values = [{"others_last": 0.5, "others_auc": 0.5}, {"others_last": 0.5, "others_auc": later}]
        cells = {"Alone": [scores(seed, [0.5], beside=one) for seed, one in enumerate(values)]}
        return beside_tables(made(plan, cells))[0].titles

    assert "others, over time" not in headers(0.5)
    assert "others, over time" in headers(0.7)


def test_clients_that_ended_without_a_score_are_told_of(plan: Plan) -> None:
    results = made(plan, {"Fed_IT": [scores(0, [0.6, None, 0.9]), scores(1, [0.6, 0.7, 0.9])]})
    sentence = "1 of 6 clients over 2 seeds ended without a score, and no mean has them."
    assert f"Fed_IT: {sentence}" in results["sentences"]
    assert not made(plan)["runs"][0]["remarks"]


def test_what_a_runs_own_report_warns_of_is_told_in_every_form_of_a_comparison(plan: Plan) -> None:
    """The number of clients over all seeds, in the sentences; numbers that the method names, as means over seeds."""
    text = "The scales are the same for {clients}, which says nothing."
    tied = [
        scores(seed, [0.6, 0.6, 0.9], alarms={text: (few, 3)}, diagnostics={"scale_mean": mean, "scale_spread": 0.0})
        for seed, few, mean in ((0, 3, 0.141), (1, 2, 0.2))
    ]
    results = made(plan, {"Fed_IT": tied})
    sentence = "The scales are the same for 5 of 6 clients over 2 seeds, which says nothing."
    by_label = {run["label"]: run for run in results["runs"]}
    assert by_label["Fed_IT"]["remarks"] == [sentence] and by_label["Alone"]["remarks"] == []
    assert by_label["Fed_IT"]["diagnostics"]["scale_mean"]["mean"] == pytest.approx(0.1705)
    assert f"Fed_IT: {sentence}" in results["sentences"]
    (table,) = [table for table in all_tables(results) if table.title == "Diagnostics"]
    assert not table.detail and table.headers == ["run", "scale_mean", "scale_spread"]
    assert [[str(cell) for cell in row] for row in table.rows] == [["Fed_IT !", "0.1705", "0"]]
    for form in (render_markdown(results, all_tables(results)), render_page(results, all_tables(results))):
        assert sentence in form and "Diagnostics" in form
    assert not [table for table in all_tables(made(plan)) if table.title == "Diagnostics"]


def test_a_run_that_was_stopped_while_it_looked_good_is_not_called_the_best(plan: Plan) -> None:
    """Two easy seeds of one run beside five of another, which is above it in both."""
    alone = [scores(seed, [value] * 3) for seed, value in enumerate((0.70, 0.801, 0.60, 0.55, 0.58))]
    stopped = [scores(seed, [value] * 3) for seed, value in enumerate((0.69, 0.79))]
    results = made(plan, {"Alone": alone, "Fed_IT": stopped, "Ditto · low": stopped})
    assert results["sentences"][0].startswith("Highest mean accuracy: Alone, 75.0%")
    assert "over 2 seeds that all runs have" in results["sentences"][0]
    (line,) = [line for line in latex_of(results).splitlines() if line.startswith(r"Fed\_IT")][:1]
    assert "textbf" not in line
    runs = by_label(results)
    assert _gains(runs["Fed_IT"], runs["Alone"]) == pytest.approx(dict.fromkeys(("c0", "c1", "c2"), -0.0105))


def test_what_few_seeds_in_common_show_is_said_of_those_alone(plan: Plan) -> None:
    alone = [scores(seed, [value] * 3) for seed, value in enumerate((0.70, 0.801, 0.60))]
    once = [scores(1, [0.79] * 3)]
    results = made(plan, {"Alone": alone, "Fed_IT": once, "Ditto · low": [scores(s, [0.5] * 3) for s in range(3)]})
    said = results["sentences"]
    assert said[0] == "Highest mean accuracy: Alone, 80.1% over 1 seed that all runs have."
    assert "Fed_IT: one seed, of which nothing follows." in said
    assert not any(sentence.startswith("With one seed") for sentence in said)
    assert any(sentence.startswith("3 seeds are few") for sentence in said)
    assert "over up to 3 seeds" in summary_table(results).note
    apart = made(plan, {"Alone": alone[:1], "Fed_IT": once, "Ditto · low": once})
    assert "Not tested against Alone: Fed_IT and Ditto · low (no seed in common)." in apart["sentences"]
    assert apart["sentences"][0] == "The runs have no seed in common, so their means are not compared."
    assert summary_table(apart).note.startswith("Accuracy, one seed.")


def test_runs_that_no_test_speaks_of_are_named(plan: Plan) -> None:
    alone, above = ([scores(seed, [value] * 3) for seed in range(3)] for value in (0.5, 0.6))
    said = made(plan, {"Alone": alone, "Fed_IT": above, "Ditto · low": alone})["sentences"]
    assert "Not tested against Alone: Fed_IT (the same difference in every seed)." in said


def test_examples_that_are_the_same_in_all_seeds_count_once(plan: Plan) -> None:
    """Five seeds of one test set with the same answers know no more of it than one does."""
    rows = [{f"c{client}": {"each": each} for client in range(3)} for each in ("1111011110", "1101011010")]

    def of(run: int, seeds: int, same: bool) -> list[Scores]:
        value = (0.8, 0.6)[run]
        return [
            scores(seed, [value] * 3, rows=rows[run], data="all" if same else f"data {seed}") for seed in range(seeds)
        ]

    def half(seeds: int, same: bool) -> float:
        change = {"Alone": of(1, seeds, same), "Fed_IT": of(0, seeds, same), "Ditto · low": of(1, seeds, same)}
        return by_label(made(plan, change))["Fed_IT"]["against"]["examples"]["half"]

    assert half(5, True) == pytest.approx(half(1, True)) == pytest.approx(half(1, False))
    assert half(5, False) == pytest.approx(half(1, False) / 5**0.5)
