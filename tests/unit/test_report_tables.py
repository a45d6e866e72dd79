"""The numbers and sentences of a report, against values worked out by hand."""

import math

import pytest

from befit.report import tables
from befit.report.comparison import BEST, gain_over, gains_over, mean_gain, run_title, standard_error
from befit.report.headline import headline_sentences


def result_of(clients, *, metric="accuracy", method="potara", summary=None, **more):
    """A results.json whose clients are given as `{id: (score, examples, baselines, diagnostics)}`."""
    rows = {
        client: {metric: score, "examples": examples, "train_examples": 2 * examples, "bytes_up": 1_000_000,
                 "bytes_down": 2_500_000, "seconds": 1.5, "baselines": baselines, "diagnostics": diagnostics}
        for client, (score, examples, baselines, diagnostics) in clients.items()
    }  # fmt: skip
    labels = next(iter(rows.values()))["baselines"]
    summary = summary or {"mean": 0.9, "std": 0.05, "worst": {"client": "c1", "value": 0.85}, "bytes_up": 2_000_000,
                          "bytes_down": 5_000_000, "bytes_scoring": 300, "seconds": 3.0}  # fmt: skip
    baselines = {label: {"mean": 0.8, "std": 0.1, "worst": {"client": "c2", "value": 0.7}, "bytes_up": 0,
                         "bytes_down": 0, "seconds": 61.0} for label in labels}  # fmt: skip
    return {"method": method, "metric": metric, "clients": rows, "summary": summary, "baselines": baselines,
            "higher_is_better": True, **more}  # fmt: skip


TWO = {
    "c1": (0.85, 100, {"local": 0.80, "fedit": 0.90}, {"w": 0.704}),
    "c2": (0.95, 60, {"local": 0.70, "fedit": 0.75}, {"w": 0.25}),
}


def test_a_clients_row_holds_its_baselines_gains_error_and_weight():
    """c2: over the best 95 - 75 = 20, over Local 25 points; s.e. sqrt(p(1-p)/64) with p = (0.825*60 + 2)/64."""
    headers, rows = tables.client_table(result_of(TWO))
    assert headers == ["client", "test examples", "Local", "FedIT", "Potara", "gain over best", "gain over Local",
                       "± 1 s.e.", "w"]  # fmt: skip
    p = (0.825 * 60 + 2) / 64
    error = f"{100 * math.sqrt(p * (1 - p) / 64):.1f}"
    assert rows[0][:7] == ["c1", "100", "80.0%", "90.0%", "85.0%", "−5.0", "+5.0"]  # noqa: RUF001
    assert rows[1] == ["c2", "60", "70.0%", "75.0%", "95.0%", "+20.0", "+25.0", error, "0.25"]


def test_one_baseline_needs_no_column_for_the_best():
    headers, rows = tables.client_table(result_of({"c1": (0.85, 100, {"fedit": 0.80}, {})}))
    assert headers == ["client", "test examples", "FedIT", "Potara", "gain over FedIT", "± 1 s.e."]
    assert rows[0][4] == "+5.0"


def test_without_baselines_or_diagnostics_a_row_is_the_score_alone():
    headers, rows = tables.client_table(result_of({"c1": (0.5, 10, {}, {})}))
    assert (headers, rows) == (["client", "test examples", "Potara"], [["c1", "10", "50.0%"]])


def test_a_missing_score_is_a_dash_and_counts_in_no_mean():
    results = result_of({**TWO, "c3": (None, 50, {"local": 0.1, "fedit": 0.2}, {"w": None})})
    rows = tables.client_table(results)[1]
    assert rows[2] == ["c3", "50", "10.0%", "20.0%", "–", "–", "–", "–", "–"]  # noqa: RUF001
    assert set(gains_over(results, "local")) == {"c1", "c2"}
    assert "1 client of 3 ended without a score." in headline_sentences(results)


def test_the_summary_has_the_methods_mean_gain_over_every_baseline():
    """Over Local (5 + 25)/2 = 15 on 2 of 2; over FedIT (-5 + 20)/2 = 7.5 on 1 of 2."""
    headers, rows = tables.summary_table(result_of(TWO))
    by_name = {row[0]: dict(zip(headers, row, strict=True)) for row in rows}
    assert list(by_name) == ["Local", "FedIT", "Potara"]
    assert by_name["Local"]["Potara's gain"].startswith("+15.0 ± ")
    assert by_name["Local"]["clients ahead"] == "2 of 2"
    assert by_name["FedIT"]["Potara's gain"].startswith("+7.5 ± ")
    assert by_name["FedIT"]["clients ahead"] == "1 of 2"
    assert by_name["Potara"]["mean accuracy"] == "90.0%"
    assert by_name["Potara"]["worst client"] == "85.0% (c1)"
    assert by_name["Local"]["client time"] == "1 min 01 s"


def test_communication_is_in_all_and_per_client():
    rows = {row[0]: row[1:] for row in tables.communication_table(result_of(TWO))[1]}
    assert rows["Potara"] == ["2.00 MB", "5.00 MB", "1.00 MB", "2.50 MB", "300 B"]
    assert rows["Local"] == ["0 B", "0 B", "0 B", "0 B", "–"]  # noqa: RUF001


def test_stages_add_up_their_exchanges_and_keep_the_highest_memory():
    ledger = [
        {"stage": "federate", "round": round_, "client": "c1", "purpose": purpose, "bytes_up": up, "bytes_down": 10,
         "seconds": 0.5, "peak_memory_mib": memory}
        for round_, purpose, up, memory in
        ((1, "train", 1000, 300.0), (2, "train", 3000, 310.4), (2, "score", 5, 320.0))
    ]  # fmt: skip
    assert tables.stage_table(ledger)[1] == [
        ["federate", "train", "2", "4.00 kB", "20 B", "1.0 s", "310 MiB"],
        ["federate", "score", "1", "5 B", "10 B", "0.50 s", "320 MiB"],
    ]


def test_curves_of_different_rounds_share_one_table():
    curves = {
        "potara": [{"round": 5, "mean": 0.5}, {"round": 10, "mean": None}],
        "local": [{"round": 10, "mean": 0.25}],
    }
    headers, rows = tables.curve_table(result_of(TWO, curves=curves))
    assert headers == ["round", "Local", "Potara"]
    assert rows == [["5", "–", "50.0%"], ["10", "25.0%", "–"]]  # noqa: RUF001


def test_failures_name_client_stage_round_kind_and_whose_run():
    failure = {"client": "c\x1b[2J", "stage": "federate", "round": 7, "kind": "PayloadMismatch", "reason": "A is NaN"}
    headers, rows = tables.failure_table(result_of(TWO, failures=[failure, {**failure, "run": "fedit"}]))
    assert headers == ["client", "run", "stage", "round", "reason"]
    assert rows[0] == ["c\N{REPLACEMENT CHARACTER}[2J", "Potara", "federate", "7", "PayloadMismatch: A is NaN"]
    assert rows[1][1] == "FedIT"


def test_a_perfect_score_is_not_taken_for_certain():
    """50 of 50 against 49 of 50: one example more. Plain p(1-p)/n at p = 1 would be 0 and call it clear."""
    error = standard_error(1.0, 0.98, 50, "accuracy")
    assert error is not None and error > 0.02
    assert standard_error(1.0, 0.98, 50, "loss") is None
    assert standard_error(1.0, 0.98, 0, "accuracy") is None


def test_the_error_of_the_mean_shrinks_with_the_number_of_clients():
    """sqrt(4 e^2) / 4 = e / 2."""
    results = result_of({f"c{k}": (0.9, 80, {"local": 0.8}, {}) for k in range(4)})
    gains = gains_over(results, "local")
    assert gains["c0"].error is not None
    assert mean_gain(gains).error == pytest.approx(gains["c0"].error / 2)
    assert mean_gain(gains).value == pytest.approx(0.1)


def test_where_less_is_better_a_smaller_score_is_a_gain_and_the_best_baseline_is_the_smallest():
    results = result_of(
        {"c1": (1.0, 10, {"local": 3.0, "fedit": 1.5}, {})}, metric="perplexity", higher_is_better=False
    )
    gain = gain_over(results, results["clients"]["c1"], BEST)
    assert gain is not None and gain.value == 0.5 and gain.verdict == "gain"
    assert tables.client_table(results)[1][0] == ["c1", "10", "3", "1.5", "1", "+0.5", "+2", "–"]  # noqa: RUF001


def test_the_headline_counts_who_gained_and_names_the_worst():
    """Gains of 40, 40 and -1 points on 1000 examples: mean 26.3; the last is within one standard error (1.6)."""
    clients = {"a": (0.9, 1000, {"local": 0.5}, {}), "b": (0.9, 1000, {"local": 0.5}, {}),
               "c": (0.49, 1000, {"local": 0.50}, {})}  # fmt: skip
    first, second = headline_sentences(result_of(clients))
    assert first.startswith("2 of 3 clients gained from federating: mean gain over training alone +26.3 points (± ")
    assert first.endswith("worst: c, −1.0 points.")  # noqa: RUF001
    assert second == ("Beyond one standard error of their test sets, 2 gained and 0 lost; for the other 1 there is no "
                      "clear difference.")  # fmt: skip


def test_small_differences_are_called_no_clear_difference():
    clients = {f"c{k}": (0.9, 20, {"local": 0.85}, {}) for k in range(2)}
    first, second = headline_sentences(result_of(clients))
    assert first.startswith("No clear difference on average; 2 of 2 clients gained")
    assert "no clear difference for any of them" in second


def test_a_loss_is_said_first():
    clients = {f"c{k}": (0.5, 1000, {"local": 0.9, "fedit": 0.4}, {}) for k in range(3)}
    sentences = headline_sentences(result_of(clients))
    assert sentences[0].startswith("On average training alone was better; 0 of 3 clients gained")
    assert sentences[-1].startswith("Against FedIT: mean +10.0 points")


def test_a_run_without_baselines_claims_no_gain():
    first, second = headline_sentences(result_of({"c1": (0.85, 9, {}, {}), "c2": (0.95, 9, {}, {})}))
    assert first == "Potara, 2 clients: mean accuracy 90.0%; worst client c1 85.0%."
    assert second == "No baseline was run, so this says nothing of a gain from federating."


def test_local_itself_is_compared_with_the_best_baseline():
    results = result_of({"c1": (0.5, 900, {"fedit": 0.9}, {}), "c2": (0.5, 900, {"fedit": 0.9}, {})}, method="local")
    assert headline_sentences(results)[0].startswith(
        "On average FedIT was better; 0 of 2 clients did better with Local"
    )


def test_a_run_without_any_score_says_so():
    summary = {"mean": None, "std": None, "worst": None, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}
    results = result_of({"c1": (None, 0, {}, {})}, summary=summary)
    assert headline_sentences(results)[0].startswith("No client has a score")
    assert tables.summary_table(results)[1][0][:4] == ["Potara", "–", "–", "–"]  # noqa: RUF001


def test_runs_are_called_what_their_papers_call_them():
    assert [run_title(label) for label in ("fedit", "fedit-2", "mine", "fedit-x")] == [
        "FedIT",
        "FedIT 2",
        "mine",
        "fedit-x",
    ]
