"""A run in a few plain sentences, the honest reading included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from befit.data.limit import limit_sentence
from befit.report.comparison import BEST, Gain, gains_over, main_rival, mean_gain, run_title
from befit.report.diagnostics import alarms
from befit.report.numbers import count_text, gain_text, is_share, listing, plain, score_of, score_text
from befit.report.results import RunResults, baseline_labels, failures_of, split_name, training_alone

FEW = 20  # test examples of a client, below which each of them is five points and more


def headline(results: RunResults) -> str:
    """All sentences of `headline_sentences` as one paragraph."""
    return " ".join(headline_sentences(results))


def headline_sentences(results: RunResults) -> list[str]:
    """What came out, first sentence first; before it, of a run on part of the whole, that its numbers mean nothing.

    The method is compared with training alone where that was a baseline, else with each client's best baseline. A mean
    whose 95 % interval over clients has zero in it is called no clear difference; below three clients nothing is
    claimed.
    """
    labels = baseline_labels(results)
    over = main_rival(results)
    gains = gains_over(results, over)
    rows = results["clients"]
    unscored = [client for client, row in rows.items() if score_of(row, results["metric"]) is None]
    if gains:
        sentences = [
            *_compared(results, gains, over),
            *_small(results, gains, over),
            *_others(results, [label for label in labels if label != over]),
        ]
    else:
        sentences = [_level(results), *_not_compared(labels, len(unscored) < len(rows))]
    if 0 < len(unscored) < len(rows):
        verb = "is" if len(unscored) == 1 else "are"
        sentences.append(
            f"{count_text(len(unscored), 'client')} of {len(rows)} ended without a score and {verb} in no mean."
        )
    sentences += alarms(results)
    sentences += _privacy(results.get("privacy") or {}, _was_scored(results))
    sentences += _choices(results)
    sentences += _best_rounds(results)
    sentences += _failures(results)
    limit = limit_sentence(results.get("limit") or {})
    return sentences if limit is None else [limit, *sentences]


def _was_scored(results: RunResults) -> bool:
    """Whether any client told a score, at the end or on the way, in any of the runs."""
    rows = results["clients"].values()
    told = any(score_of(row, results["metric"]) is not None for row in rows)
    return told or any(curve for curve in (results.get("curves") or {}).values())


def _failures(results: RunResults) -> list[str]:
    """How much went wrong: a score that is missing is no failure of what was made."""
    lost, unscored = (len(failures_of(results, scoring)) for scoring in (False, True))
    words = [
        *([f"{count_text(lost, 'failure')} on the way"] if lost else []),
        *([f"{count_text(unscored, 'score')} missing"] if unscored else []),
    ]
    return [f"{listing(words)}; each is listed in the report."] if words else []


def _privacy(privacy: Mapping[str, Any], scored: bool) -> list[str]:
    """What was protected, and how well."""
    if not privacy:
        return []
    if privacy["reproducible"]:
        return ["The noise was drawn from the seed of the run, so it can be taken away again: this is no protection."]
    spent = privacy["spent"]
    clients = listing([plain(client) for client in privacy.get("unread", ())])
    more = f"{clients} may have spent more, in replies that left and were not read here; a site's own account has all."
    unread = [more] if clients else []
    if not spent and unread:
        return unread
    if not spent:
        return ["Nothing that protects was spent: what left the clients was computed from no record."]
    what, where = "training example", "what this method's clients sent"
    if privacy["unit"] == "client":
        what, where = "client", "what the server made of this method's updates"
    return [
        f"Whether any single {what} took part is hidden up to epsilon {max(spent.values()):.3g} at delta "
        f"{privacy['delta']:g}, in {where}; "
        + ("scores were measured beside that, without noise." if scored else "no scores were told."),
        *unread,
    ]


def _compared(results: RunResults, gains: Mapping[str, Gain], over: str) -> list[str]:
    mean, count = mean_gain(gains), len(gains)
    ahead = sum(gain.value > 0 for gain in gains.values())
    rival = _rival(results, over)
    if count == 1:
        return [_one_client(results, *next(iter(gains.items())), rival)]
    least = min(gains, key=lambda client: (gains[client].value, client))
    unequal = max(gain.value for gain in gains.values()) - min(gain.value for gain in gains.values()) > 1e-12
    worst = f"; worst: {plain(least)}, {_points(results, gains[least].value)}" if unequal else ""
    details = f"mean gain over {rival} {_difference(results, mean)}{worst}."
    better = f"{ahead} of {count} clients did better with {run_title(results['method'])}"
    if mean.verdict == "unknown":
        return [
            f"{better}: {details}",
            f"{count_text(count, 'client')}: too few to say whether that is more than chance.",
        ]
    if mean.verdict == "loss":
        first = f"On average {rival} was better; {better}: {details}"
    elif mean.verdict == "unclear":
        first = f"No clear difference on average; {better}: {details}"
    elif over == training_alone(results):
        first = f"{ahead} of {count} clients gained from federating: {details}"
    else:
        first = f"{better}: {details}"
    return [first, *_clear_ones(gains)]


def _small(results: RunResults, gains: Mapping[str, Gain], over: str) -> list[str]:
    """Which clients' scores are of so few examples that one moves the mean, and the mean weighted by examples."""
    counts = {client: results["clients"][client].get("examples") or 0 for client in gains}
    few = {client: count for client, count in counts.items() if count < FEW}
    if not few or len(gains) < 2 or not any(counts.values()):
        return []
    least, split = min(few, key=lambda client: (few[client], client)), split_name(results)
    who = f"{plain(least)} has only {count_text(few[least], f'{split} example')}"
    if len(few) > 1:
        who = f"{len(few)} clients have fewer than {FEW} {split} examples (least: {plain(least)}, {few[least]})"
    mean = sum(gains[client].value * count for client, count in counts.items()) / sum(counts.values())
    rival = _rival(results, over)
    return [f"{who}: weighted by their number of examples the gain over {rival} is {_points(results, mean)}."]


def _clear_ones(gains: Mapping[str, Gain]) -> list[str]:
    """How many clients' differences are larger than their numbers of test examples explain."""
    if any(gain.error is None for gain in gains.values()):
        return []
    verdicts = [gain.verdict for gain in gains.values()]
    unclear, better, worse = (verdicts.count(verdict) for verdict in ("unclear", "gain", "loss"))
    if unclear == 0:
        return [
            f"Client by client, every difference is larger than two standard errors by its examples: {better} "
            f"gained, {worse} lost."
        ]
    if unclear == len(gains):
        return [
            "Client by client, no difference is larger than two standard errors by its examples: no clear "
            "difference for any of them."
        ]
    return [
        f"Client by client, beyond two standard errors by their examples, {better} gained and {worse} lost; "
        f"for the other {unclear} there is no clear difference."
    ]


def _others(results: RunResults, labels: list[str]) -> list[str]:
    """One sentence for each further baseline."""
    sentences = []
    for label in labels:
        gains = gains_over(results, label)
        if not gains:
            continue
        mean = mean_gain(gains)
        ahead = sum(gain.value > 0 for gain in gains.values())
        reading = ", no clear difference" if mean.verdict == "unclear" else ""
        what = f"mean {_difference(results, mean)}{reading}; {ahead} of {len(gains)} clients did better"
        if len(gains) == 1:
            what = f"{_difference(results, mean)}{reading}"
        sentences.append(f"Against {run_title(label)}: {what}.")
    return sentences


def _choices(results: RunResults) -> list[str]:
    """Who deploys what, where every client deploys what its own held-out data prefer."""
    chosen = Counter(label for row in results["clients"].values() if (label := row.get("deployed")))
    if not chosen:
        return []
    words = [f"{run_title(label)} at {count_text(count, 'client')}" for label, count in chosen.items()]
    return [f"Deployed, by held-out data: {listing(words)}."]


def _best_rounds(results: RunResults) -> list[str]:
    """Which rounds count, where that is decided on validation examples."""
    best = results.get("best_rounds")
    if not best:
        return []
    several = {row["run"] for row in best if sum(other["run"] == row["run"] for other in best) > 1}
    words = [
        f"{row['round']} of {row['of']} of {run_title(row['run'])}" + f" ({row['stage']})" * (row["run"] in several)
        for row in best
    ]
    return [f"Best round by validation examples: {listing(words)}."]


def _one_client(results: RunResults, client: str, gain: Gain, rival: str) -> str:
    return (
        f"{run_title(results['method'])} against {rival} for {plain(client)}: {_points(results, gain.value)}; one "
        "client is too few to say whether that is more than chance."
    )


def _level(results: RunResults) -> str:
    """Without a comparison: where the clients ended."""
    metric, rows = results["metric"], results["clients"]
    mean = score_of(results["summary"], "mean")
    if mean is None and (results.get("privacy") or {}).get("unit") == "example" and not results.get("failures"):
        return f"No client has a score ({metric.replace('_', ' ')}): on Flower sites tell none in a private run."
    if mean is None:
        return f"No client has a score ({metric.replace('_', ' ')}); see the failures, or the logs of the run."
    title, name = run_title(results["method"]), metric.replace("_", " ")
    worst = results["summary"].get("worst")
    if len(rows) == 1 or not worst:
        return f"{title}, {count_text(len(rows), 'client')}: {name} {score_text(mean, metric)}."
    return (
        f"{title}, {count_text(len(rows), 'client')}: mean {name} {score_text(mean, metric)}; worst client "
        f"{plain(worst['client'])} {score_text(worst['value'], metric)}."
    )


def _not_compared(labels: list[str], scored: bool) -> list[str]:
    if not scored:
        return []
    if labels:
        return ["No client has a score for both the method and a baseline, so nothing is said of a gain."]
    return ["No baseline was run, so this says nothing of a gain from federating."]


def _rival(results: RunResults, over: str) -> str:
    if over == training_alone(results):
        return "training alone"
    if over != BEST:
        return run_title(over)
    return f"the best of {listing([run_title(label) for label in baseline_labels(results)])} for each client"


def _difference(results: RunResults, gain: Gain) -> str:
    """A mean gain with its unit and standard error."""
    text = _points(results, gain.value)
    if gain.error is None:
        return text
    return f"{text} (standard error over clients {gain_text(gain.error, results['metric'], signed=False)})"


def _points(results: RunResults, value: float) -> str:
    return gain_text(value, results["metric"]) + (" points" if is_share(results["metric"]) else "")
