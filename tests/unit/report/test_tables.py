"""The numbers and sentences of a report, against values worked out by hand."""

import math
import random
import statistics

import pytest

from befit.core.schema import plain
from befit.methods.parts.recipe.branches import RANGE, WEIGHT
from befit.report import tables
from befit.report.comparison import (
    BEST,
    Gain,
    compact,
    difference_error,
    gain_over,
    gains_over,
    mean_gain,
    paired_error,
    run_title,
)
from befit.report.diagnostics import alarms, client_means, on_others
from befit.report.headline import headline, headline_sentences
from befit.report.words import client_notes


def shown(table):
    return table.titles, table.texts


def result_of(clients, *, metric="accuracy", method="potara", summary=None, diagnostics=None, **more):
    """A results.json whose clients are given as `{id: (score, examples, baselines, diagnostics)}`."""
    rows = {
        client: {
            metric: score,
            "examples": examples,
            "train_examples": 2 * examples,
            "bytes_up": 1_000_000,
            "bytes_down": 2_500_000,
            "seconds": 1.5,
            "cpu_seconds": 1.5,
            "baselines": baselines,
            "diagnostics": diagnostics,
        }
        for client, (score, examples, baselines, diagnostics) in clients.items()
    }
    labels = next(iter(rows.values()))["baselines"]
    summary = summary or {
        "mean": 0.9,
        "std": 0.05,
        "worst": {"client": "c1", "value": 0.85},
        "bytes_up": 2_000_000,
        "bytes_down": 5_000_000,
        "bytes_scoring": 300,
        "seconds": 3.0,
        "cpu_seconds": 3.0,
    }
    baselines = {
        label: {
            "mean": 0.8,
            "std": 0.1,
            "worst": {"client": "c2", "value": 0.7},
            "bytes_up": 0,
            "bytes_down": 0,
            "seconds": 90.0,
            "cpu_seconds": 61.0,
        }
        for label in labels
    }
    return {
        "method": method,
        "metric": metric,
        "clients": rows,
        "summary": summary,
        "baselines": baselines,
        "higher_is_better": True,
        "diagnostics": plain([WEIGHT] if diagnostics is None else diagnostics),
        **more,
    }


TWO = {
    "c1": (0.85, 100, {"local": 0.80, "fedit": 0.90}, {"w": 0.704}),
    "c2": (0.95, 60, {"local": 0.70, "fedit": 0.75}, {"w": 0.25}),
}


def test_a_clients_row_holds_its_baselines_gains_error_and_weight():
    """c2: over the best 95 - 75 = 20, over Local 25 points; s.e. sqrt(2p(1-p)/64) with p = (0.825*60 + 2)/64."""
    headers, rows = shown(tables.client_table(result_of(TWO)))
    assert headers == [
        "client",
        "test examples",
        "Local",
        "FedIT",
        "Potara",
        "gain over best",
        "gain over Local",
        "± s.e. of a difference",
        "w",
    ]
    p = (0.825 * 60 + 2) / 64
    error = f"{100 * math.sqrt(2 * p * (1 - p) / 64):.1f}"
    assert rows[0][:7] == ["c1", "100", "80.0%", "90.0%", "85.0%", "−5.0", "+5.0"]
    assert rows[1] == ["c2", "60", "70.0%", "75.0%", "95.0%", "+20.0", "+25.0", error, "0.25"]


def test_one_baseline_needs_no_column_for_the_best():
    headers, rows = shown(tables.client_table(result_of({"c1": (0.85, 100, {"fedit": 0.80}, {})})))
    assert headers == ["client", "test examples", "FedIT", "Potara", "gain over FedIT", "± s.e. of a difference"]
    assert rows[0][4] == "+5.0"


def test_scores_on_validation_examples_are_said_to_be_that():
    results = {**result_of({"c1": (0.5, 10, {}, {})}), "split": "val"}
    assert shown(tables.client_table(results))[0] == ["client", "validation examples", "Potara"]


def test_without_baselines_or_diagnostics_a_row_is_the_score_alone():
    headers, rows = shown(tables.client_table(result_of({"c1": (0.5, 10, {}, {})})))
    assert (headers, rows) == (["client", "test examples", "Potara"], [["c1", "10", "50.0%"]])


def test_a_missing_score_is_a_dash_and_counts_in_no_mean():
    results = result_of({**TWO, "c3": (None, 50, {"local": 0.1, "fedit": 0.2}, {"w": None})})
    rows = tables.client_table(results).texts
    assert rows[2] == ["c3", "50", "10.0%", "20.0%", "–", "–", "–", "–", "–"]
    assert set(gains_over(results, "local")) == {"c1", "c2"}
    results["clients"]["c2"]["baselines"] = {"local": None, "fedit": None}
    assert set(gains_over(results, BEST)) == {"c1"}  # c2 has nothing to be better than
    assert "1 client of 3 ended without a score and is in no mean." in headline_sentences(results)


def test_the_summary_has_the_methods_mean_gain_over_every_baseline():
    """Over Local (5 + 25)/2 = 15 on 2 of 2; over FedIT (-5 + 20)/2 = 7.5 on 1 of 2; two clients have no s.e."""
    headers, rows = shown(tables.summary_table(result_of(TWO)))
    by_name = {row[0]: dict(zip(headers, row, strict=True)) for row in rows}
    assert list(by_name) == ["Local", "FedIT", "Potara"]
    assert by_name["Local"]["Potara's gain ± s.e."] == "+15.0"
    assert by_name["Local"]["clients ahead"] == "2 of 2"
    assert by_name["FedIT"]["Potara's gain ± s.e."] == "+7.5"
    assert by_name["FedIT"]["clients ahead"] == "1 of 2"
    assert by_name["Potara"]["mean accuracy"] == "90.0%"
    assert by_name["Potara"]["worst client"] == "85.0% (c1)"
    assert by_name["Local"]["processor time"] == "1 min 01 s"


def test_a_tie_is_not_ahead_and_the_mean_over_all_examples_stands_where_their_numbers_differ():
    results = result_of({"c1": (0.8, 100, {"local": 0.8}, {}), "c2": (0.9, 60, {"local": 0.7}, {})})
    results["summary"]["weighted_mean"], results["baselines"]["local"]["weighted_mean"] = 0.8375, 0.7625
    headers, rows = shown(tables.summary_table(results))
    by_name = {row[0]: dict(zip(headers, row, strict=True)) for row in rows}
    assert by_name["Local"]["clients ahead"] == "1 of 2"
    assert [row[tables.BY_EXAMPLES] for row in by_name.values()] == ["76.2%", "83.8%"]
    for row in results["clients"].values():
        row["examples"] = 80
    assert tables.BY_EXAMPLES not in tables.summary_table(results).titles


def test_communication_is_in_all_and_per_client():
    rows = {row[0]: row[1:] for row in tables.communication_table(result_of(TWO)).texts}
    assert rows["Potara"] == ["2.00 MB", "5.00 MB", "1.00 MB", "2.50 MB", "300 B"]
    assert rows["Local"] == ["0 B", "0 B", "0 B", "0 B", "–"]


def test_stages_add_up_their_exchanges_and_keep_the_highest_memory():
    ledger = [
        {
            "stage": "federate",
            "round": round_,
            "client": "c1",
            "purpose": purpose,
            "bytes_up": up,
            "bytes_down": 10,
            "seconds": 0.5,
            "cpu_seconds": 0.25,
            "peak_memory_mib": memory,
        }
        for round_, purpose, up, memory in (
            (1, "train", 1000, 300.0),
            (2, "train", 3000, 310.4),
            (2, "score", 5, 320.0),
            (2, "failed", 7, 0.0),
        )
    ]
    assert tables.stage_table(ledger).texts == [
        ["federate", "train", "2", "4.00 kB", "20 B", "1.0 s", "0.50 s", "310 MiB"],
        ["federate", "score", "1", "5 B", "10 B", "0.50 s", "0.25 s", "320 MiB"],
        ["federate", "failed", "1", "7 B", "10 B", "0.50 s", "0.25 s", "0 MiB"],
    ]


def test_curves_of_different_rounds_share_one_table():
    curves = {
        "potara": [{"round": 5, "mean": 0.5}, {"round": 10, "mean": None}],
        "local": [{"round": 10, "mean": 0.25}],
    }
    headers, rows = shown(tables.curve_table(result_of(TWO, curves=curves)))
    assert headers == ["round", "Local", "Potara"]
    assert rows == [["5", "–", "50.0%"], ["10", "25.0%", "–"]]


def test_failures_name_client_stage_round_kind_and_whose_run():
    failure = {"client": "c\x1b[2J", "stage": "federate", "round": 7, "kind": "PayloadMismatch", "reason": "A is NaN"}
    headers, rows = shown(tables.failure_table(result_of(TWO, failures=[failure, {**failure, "run": "fedit"}])))
    assert headers == ["client", "run", "stage", "round", "reason"]
    assert rows[0] == ["c\N{REPLACEMENT CHARACTER}[2J", "Potara", "federate", "7", "PayloadMismatch: A is NaN"]
    assert rows[1][1] == "FedIT"


def test_a_perfect_score_is_not_taken_for_certain():
    """50 of 50 against 49 of 50: one example more. Plain p(1-p)/n at p = 1 would be 0 and call it clear."""
    error = difference_error(1.0, 0.98, 50, "accuracy")
    p = (49.5 + 2) / 54
    assert error == pytest.approx(math.sqrt(p * (1 - p) / 54 + p * (1 - p) / 54))
    assert error is not None and error > 0.02
    assert difference_error(1.0, 0.98, 0, "accuracy") is None


def test_a_difference_is_paired_by_example_where_both_models_were_measured_one_by_one():
    """90 of 100 against 80 of 100: 11 examples that only one has, 1 that only the other has. Taken for independent, the
    difference is within two standard errors; paired it is far outside."""
    mine, theirs = "1" * 90 + "0" * 10, "0" * 11 + "1" * 79 + "1" + "0" * 9
    error = paired_error(mine, theirs)
    assert error == pytest.approx(math.sqrt(12 + 1 - 10**2 / 102) / 102)
    results = result_of({"c1": (0.90, 100, {"local": 0.80}, {})})
    assert gains_over(results, "local")["c1"].verdict == "unclear"
    results["clients"]["c1"]["errors"] = {"local": error}
    gain = gains_over(results, "local")["c1"]
    assert gain.error == error and gain.verdict == "gain"
    assert paired_error(mine, mine) > 0  # models that agree are not taken for certain
    assert "paired by example" in " ".join(client_notes(results))


def test_a_gain_over_the_best_baseline_has_the_paired_error_of_that_baseline():
    results = result_of({"c1": (0.90, 100, {"local": 0.80, "fedit": 0.85}, {})})
    results["clients"]["c1"]["errors"] = {"local": 0.01, "fedit": 0.03}
    gain = gains_over(results, BEST)["c1"]
    assert gain.value == pytest.approx(0.05) and gain.error == 0.03


def test_scores_of_single_examples_are_kept_to_six_decimals():
    assert compact([1 / 3, 1.0]) == [0.333333, 1.0]


def test_scores_of_different_numbers_of_examples_are_no_pairs():
    with pytest.raises(ValueError, match="shorter"):
        paired_error("110", "11")


@pytest.mark.parametrize(("examples", "flips", "clear"), [(1, 1, False), (2, 2, False), (3, 2, False), (10, 6, True)])
def test_a_difference_at_a_client_with_few_examples_is_hardly_ever_clear(examples: int, flips: int, clear: bool):
    """Of two equal models that differ on one example in five, one in five clients with one example would be."""
    mine, theirs = "1" * examples, "0" * flips + "1" * (examples - flips)
    row = {"accuracy": 1.0, "examples": examples, "baselines": {"local": 1 - flips / examples}}
    for paired in ({"errors": {"local": paired_error(mine, theirs)}}, {}):
        gain = gain_over({"metric": "accuracy"}, {**row, **paired}, "local")
        assert (gain.verdict == "gain") == clear


def test_the_paired_error_is_the_spread_that_other_test_examples_would_give():
    generator = random.Random(0)
    draws = []
    for _ in range(3000):
        pairs = [generator.choices([(1, 1), (1, 0), (0, 1), (0, 0)], [70, 12, 6, 12])[0] for _ in range(80)]
        mine, theirs = ("".join(str(pair[side]) for pair in pairs) for side in (0, 1))
        draws.append((sum(map(int, mine)) / 80 - sum(map(int, theirs)) / 80, paired_error(mine, theirs)))
    spread = statistics.stdev(difference for difference, _ in draws)
    assert statistics.fmean(error for _, error in draws) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("metric", ["token_accuracy", "rougeL", "f1", "loss", "perplexity"])
def test_what_is_no_share_of_test_examples_has_no_binomial_error(metric):
    results = result_of({"c1": (0.85, 100, {"local": 0.80}, {})}, metric=metric)
    headers, rows = shown(tables.client_table(results))
    assert headers == ["client", "test examples", "Local", "Potara", "gain over Local"]
    assert len(rows[0]) == 5
    assert gains_over(results, "local")["c1"].verdict == "unknown"


def test_the_error_of_the_mean_is_the_spread_of_the_paired_gains():
    """Gains 1, 2, 3, 6 points: mean 3, sd sqrt((4 + 1 + 0 + 9)/3), s.e. sqrt(14/3)/2 = 1.08, whatever the test sets. Of
    four clients a mean is clear from 3.18 standard errors on (Student's t, three degrees of freedom): 3.44."""
    gains = (0.01, 0.02, 0.03, 0.06)
    for examples in (20, 20_000):
        results = result_of(
            {f"c{k}": (0.5 + k / 10 + gain, examples, {"local": 0.5 + k / 10}, {}) for k, gain in enumerate(gains)}
        )
        mean = mean_gain(gains_over(results, "local"))
        assert mean.value == pytest.approx(0.03)
        assert mean.error == pytest.approx(math.sqrt(14 / 3) / 2 / 100)
        assert mean.verdict == "unclear" and mean.beyond == pytest.approx(3.182, abs=1e-3)
        assert Gain(0.035, mean.error, mean.beyond).verdict == "gain"
        assert tables.summary_table(results).texts[0][4] == "+3.0 ± 1.1"


def test_equal_gains_are_as_clear_as_their_examples_make_them():
    """One example of 20 at each of three clients, and 1 of 20 in 4,000: no spread over clients, so that of examples."""
    for examples, verdict in ((20, "unclear"), (4000, "gain")):
        clients = {f"c{k}": (0.8, examples, {"local": 0.75}, {}) for k in range(3)}
        mean = mean_gain(gains_over(result_of(clients), "local"))
        alone = difference_error(0.8, 0.75, examples, "accuracy")
        assert alone is not None and mean.error == pytest.approx(alone / math.sqrt(3)) and mean.verdict == verdict


def test_gains_that_only_rounding_tells_apart_are_equal():
    """One example of 20 at each client, as 0.85 - 0.80 and the like: a spread of 1e-17 would make that certain."""
    clients = {
        client: (base + 0.05, 20, {"local": base}, {}) for client, base in zip("abc", (0.8, 0.7, 0.4), strict=True)
    }
    gains = gains_over(result_of(clients), "local")
    assert len({gain.value for gain in gains.values()}) > 1
    assert mean_gain(gains).verdict == "unclear" and mean_gain(gains).error > 0.05


def test_equal_gains_of_unknown_errors_say_nothing():
    clients = {client: (0.8, 20, {"local": 0.75}, {}) for client in "abc"}
    mean = mean_gain(gains_over(result_of(clients, metric="rougeL"), "local"))
    assert mean.value == pytest.approx(0.05) and mean.error is None and mean.verdict == "unknown"


def test_only_what_is_beyond_two_standard_errors_is_a_gain_or_a_loss():
    verdicts = [Gain(value, 0.1).verdict for value in (0.21, 0.2, 0.15, 0.0, -0.19, -0.21)]
    assert verdicts == ["gain", "unclear", "unclear", "unclear", "unclear", "loss"]


def test_a_metric_without_a_binomial_error_still_gets_its_standard_error_over_clients():
    clients = {f"c{k}": (0.5 + gain, 100, {"local": 0.5}, {}) for k, gain in enumerate((0.1, 0.11, 0.12))}
    sentences = headline_sentences(result_of(clients, metric="token_accuracy"))
    assert sentences == [
        "3 of 3 clients gained from federating: mean gain over training alone +11.0 points (standard "
        "error over clients 0.6); worst: c0, +10.0 points."
    ]


def test_the_headline_counts_who_gained_and_names_the_worst():
    """Gains of 40, 40, 40, 40 and -4 points: mean 31.2, s.e. 8.8. The last is within 2 s.e. of its difference (2.2)."""
    clients = {client: (0.9, 1000, {"local": 0.5}, {}) for client in "abce"} | {"d": (0.46, 1000, {"local": 0.50}, {})}
    first, second = headline_sentences(result_of(clients))
    assert first == (
        "4 of 5 clients gained from federating: mean gain over training alone +31.2 points (standard "
        "error over clients 8.8); worst: d, −4.0 points."
    )
    assert second == (
        "Client by client, beyond two standard errors by their examples, 4 gained and 0 lost; for "
        "the other 1 there is no clear difference."
    )


def test_where_every_difference_is_clear_the_headline_says_how_many_gained_and_lost():
    """40 points on 1000 examples; and nothing client by client where one of the differences has no error."""
    clients = {client: (0.9, 1000, {"local": 0.5}, {}) for client in "abc"} | {"d": (0.5, 1000, {"local": 0.9}, {})}
    assert headline_sentences(result_of(clients))[1] == (
        "Client by client, every difference is larger than two standard errors by its examples: 3 gained, 1 lost."
    )
    clients["d"] = (0.5, 0, {"local": 0.9}, {})
    assert "Client by client" not in headline(result_of(clients))


def test_a_further_baseline_is_compared_with_in_a_sentence_that_says_how_clear_it_is():
    """Gains over FedIT of 0, 1 and 5 points, as among small differences; one client has no mean."""
    clients = {f"c{k}": (0.9, 1000, {"local": 0.5, "fedit": 0.9 - g}, {}) for k, g in enumerate((0, 0.01, 0.05))}
    assert headline_sentences(result_of(clients))[-1] == (
        "Against FedIT: mean +2.0 points (standard error over clients 1.5), no clear difference; "
        "2 of 3 clients did better."
    )
    assert headline_sentences(result_of({"c2": clients["c2"]}))[-1] == "Against FedIT: +5.0 points."


def test_small_differences_are_called_no_clear_difference():
    """Gains of 0, 1 and 5 points: mean 2, s.e. 1.53, so between one and two standard errors, on either side."""
    for sign, ahead in ((1, 2), (-1, 0)):
        clients = {f"c{k}": (0.8 + sign * gain, 20, {"local": 0.8}, {}) for k, gain in enumerate((0, 0.01, 0.05))}
        first, second = headline_sentences(result_of(clients))
        assert first.startswith(f"No clear difference on average; {ahead} of 3 clients did better with Potara: mean ")
        assert "no clear difference for any of them" in second


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_clients_make_no_claim(count):
    """Gains of 40 points on 1000 examples, as clear as can be for each client."""
    text = headline(result_of({f"c{k}": (0.9, 1000, {"local": 0.5}, {}) for k in range(count)}))
    assert "too few to say whether that is more than chance" in text and "+40.0 points" in text
    assert "gained" not in text and "better than" not in text and "standard error" not in text


def test_several_clients_of_few_examples_are_counted_and_the_smallest_is_named():
    """From 20 examples on a client is not small; over all 44 examples (19 * 40 + 5 * 20 + 20 * 10) / 44 = 24.1."""
    clients = {
        "a": (0.9, 19, {"local": 0.5}, {}),
        "b": (0.7, 5, {"local": 0.5}, {}),
        "c": (0.5, 20, {"local": 0.4}, {}),
    }
    assert (
        "2 clients have fewer than 20 test examples (least: b, 5): weighted by their number of examples the gain "
        "over training alone is +24.1 points."
    ) in headline_sentences(result_of(clients))


@pytest.mark.parametrize("examples", [{"c1": 5}, {"c1": 0, "c2": 0, "c3": 0}])
def test_one_client_or_unknown_numbers_of_examples_have_no_other_mean(examples):
    """Of one client it is the same mean, and of nothing there is none."""
    clients = {client: (0.9, count, {"local": 0.5}, {}) for client, count in examples.items()}
    text = headline(result_of(clients))
    assert "+40.0 points" in text and "weighted by" not in text


SPENT = {"reproducible": False, "unit": "example", "delta": 1e-5, "spent": {"c1": 1.5, "c2": 3.25}}


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (
            {},
            "Whether any single training example took part is hidden up to epsilon 3.25 at delta 1e-05, in what this "
            "method's clients sent; scores were measured beside that, without noise.",
        ),
        (
            {"unit": "client"},
            "Whether any single client took part is hidden up to epsilon 3.25 at delta 1e-05, in what the server made "
            "of this method's updates; scores were measured beside that, without noise.",
        ),
        ({"spent": {}}, "Nothing that protects was spent: what left the clients was computed from no record."),
        (
            {"spent": {}, "unread": ["c3"]},
            "c3 may have spent more, in replies that left and were not read here; a site's own account has all.",
        ),
        (
            {"reproducible": True},
            "The noise was drawn from the seed of the run, so it can be taken away again: this is no protection.",
        ),
    ],
    ids=["examples", "clients", "nothing", "unread", "reproducible"],
)
def test_what_protected_the_records_is_said_by_the_client_that_spent_most(privacy, said):
    told = headline_sentences(result_of(TWO, privacy={**SPENT, **privacy}))
    assert [line for line in told if any(word in line for word in ("epsilon", "spent", "protection"))] == [said]


@pytest.mark.parametrize(("curves", "end"), [({}, "no scores were told."), ({"potara": [{"round": 1}]}, "noise.")])
def test_a_private_run_says_whether_scores_left_the_clients(curves, end):
    """At the end, or on the way to it."""
    unscored = {client: (None, 0, {}, {}) for client in ("c1", "c2")}
    told = headline_sentences(result_of(unscored, privacy=SPENT, curves=curves))
    assert next(line for line in told if "epsilon" in line).endswith(end)
    assert not [line for line in told if "ended without a score" in line]  # which is said of some of several clients


def test_with_one_baseline_the_headline_says_it_once():
    clients = {f"c{k}": (0.9, 1000, {"fedit": 0.5 + k / 100}, {}) for k in range(3)}
    text = headline(result_of(clients))
    assert text.startswith("3 of 3 clients did better with Potara: mean gain over FedIT +39.0 points")
    assert text.count("FedIT") == 1 and text.count("39.0") == 1


def test_a_loss_is_said_first():
    clients = {f"c{k}": (0.5, 1000, {"local": 0.9, "fedit": 0.4}, {}) for k in range(3)}
    sentences = headline_sentences(result_of(clients))
    assert sentences[0].startswith("On average training alone was better; 0 of 3 clients did better with Potara: ")
    assert sentences[-1].startswith("Against FedIT: mean +10.0 points")


def test_a_run_without_baselines_claims_no_gain():
    first, second = headline_sentences(result_of({"c1": (0.85, 9, {}, {}), "c2": (0.95, 9, {}, {})}))
    assert first == "Potara, 2 clients: mean accuracy 90.0%; worst client c1 85.0%."
    assert second == "No baseline was run, so this says nothing of a gain from federating."


def test_local_itself_is_compared_with_the_best_baseline():
    results = result_of(
        {
            "c1": (0.5, 900, {"fedit": 0.9}, {}),
            "c2": (0.5, 900, {"fedit": 0.9}, {}),
            "c3": (0.5, 900, {"fedit": 0.8}, {}),
        },
        method="local",
    )
    assert headline_sentences(results)[0].startswith(
        "On average FedIT was better; 0 of 3 clients did better with Local"
    )


def test_weights_of_groups_are_shown_as_their_range_and_not_as_the_weight_of_the_head():
    clients = {"c1": (0.8, 10, {}, {"w": 0.5, "w_min": 0.104, "w_max": 0.95}), "c2": (0.8, 10, {}, {})}
    headers, rows = shown(tables.client_table(result_of(clients, diagnostics=[RANGE])))
    assert headers[-1] == "w_min–w_max"
    assert [row[-1] for row in rows] == ["0.10–0.95", "–"]


def test_a_warning_counts_the_clients_at_its_limit_or_below_it_among_those_that_say():
    alarm = {"kind": "alarm", "keys": ["w"], "text": "Nothing is received by {clients}.", "title": "", "limit": 0.1}
    numbers = {"a": {"w": 0.1}, "b": {"w": 0.2}, "c": {}, "d": {"w": None}}
    results = result_of({client: (0.8, 10, {}, told) for client, told in numbers.items()}, diagnostics=[alarm])
    assert alarms(results) == ["Nothing is received by 1 of 2 clients."]
    assert client_means(results) == {"w": pytest.approx(0.15)}
    results["clients"]["a"]["diagnostics"] = {"w": 0.11}
    assert alarms(results) == []


def test_a_model_on_other_clients_examples_stands_beside_it_on_its_own():
    results = result_of(TWO)
    results["clients"]["c1"]["on_others"] = {"c2": 0.4}
    assert on_others(results) == {"c1": {"c1": 0.85, "c2": 0.4}}


def test_updates_are_shown_only_where_clients_differ():
    results = result_of(TWO)
    for updates, differ in (((3, 3), False), ((3, 0), True)):
        for row, count in zip(results["clients"].values(), updates, strict=True):
            row["updates"] = count
        headers, rows = shown(tables.client_table(results))
        assert ("updates" in headers) == differ
        if differ:
            assert [row[headers.index("updates")] for row in rows] == ["3", "0"]


def test_the_summary_says_how_many_clients_have_a_score_where_any_has_none():
    assert "clients scored" not in tables.summary_table(result_of(TWO)).titles
    headers, rows = shown(tables.summary_table(result_of({**TWO, "c3": (None, 0, {"local": 0.1, "fedit": None}, {})})))
    assert headers[1] == "clients scored"
    assert [row[1] for row in rows] == ["3 of 3", "2 of 3", "2 of 3"]


def test_a_client_that_was_not_scored_has_no_number_of_test_examples():
    assert tables.client_table(result_of({"c1": (None, 0, {}, {})})).texts == [["c1", "–", "–"]]


def test_a_failure_of_the_export_belongs_to_no_round():
    failure = {"client": "c1", "stage": "export", "round": 0, "kind": "ModelError", "reason": "A is NaN"}
    assert tables.failure_table(result_of(TWO, failures=[failure])).texts == [
        ["c1", "export", "–", "ModelError: A is NaN"]
    ]


def test_a_run_without_any_score_says_so():
    summary = {
        "mean": None,
        "std": None,
        "worst": None,
        "bytes_up": 0,
        "bytes_down": 0,
        "seconds": 0.0,
        "cpu_seconds": 0.0,
    }
    results = result_of({"c1": (None, 0, {}, {})}, summary=summary)
    assert headline_sentences(results)[0].startswith("No client has a score")
    assert tables.summary_table(results).texts[0][:5] == ["Potara", "0 of 1", "–", "–", "–"]


def test_runs_are_called_what_their_papers_call_them():
    assert [
        run_title(label) for label in ("fedit", "fedit-2", "lora-rank-4-epochs-1", "lora-rank-low-x", "mine", "fedit-x")
    ] == ["FedIT", "FedIT 2", "LoRA r=4 epochs=1", "lora-rank-low-x", "mine", "fedit-x"]


def test_costs_of_a_step_stand_beside_each_other_and_families_only_where_there_are_several():
    local, potara = ({"compute": 1.0, "memory": 1.0}, {"compute": 2.015, "memory": 1.25})
    costs = {"potara": {"model": potara}, "local": {"model": local}}
    assert shown(tables.cost_table(result_of(TWO, costs=costs))) == (
        ["", "compute of a step", "memory"],
        [["Local", "1.00", "1.00"], ["Potara", "2.02", "1.25"]],
    )
    costs["potara"]["large"] = {"compute": 3.0, "memory": None}
    headers, rows = shown(tables.cost_table(result_of(TWO, costs=costs)))
    assert headers[1] == "family" and rows[-1] == ["Potara", "large", "3.00", "–"]
    for nothing in ({}, {"potara": {}, "local": {}}, {"potara": {"model": {**potara, "compute": None}}}):
        assert tables.cost_table(result_of(TWO, costs=nothing)).texts == []
