"""What newcomers got: the same tables as for clients, with what they had as downloaded beside what they ended with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from befit.report.comparison import BEST, baseline_labels, gains_over, mean_gain, run_title
from befit.report.numbers import NOTHING, count_text, gain_text, is_share, plain, score_of, score_text
from befit.report.tables import Table, client_table

__all__ = ["NEWCOMER_NOTE", "newcomer_sentences", "newcomer_summary_table", "newcomer_table", "newcomers_of"]

NEWCOMER_NOTE = (
    "Newcomers took part in no round. “As downloaded” is the model that the method makes of the server's last download "
    "alone; after that a newcomer runs the method's personal stages on its own training examples, as any client does. "
    "What a method has a newcomer send before its download counts as its bytes up, and is for its own download alone. "
    "Bytes of newcomers are in no total of the clients."
)


def newcomers_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results as if the newcomers were the clients; empty where there are none."""
    found = results.get("newcomers") or {}
    if not found.get("clients"):
        return {}
    return {**results, "baselines": {}, "failures": [], "curves": {}, "groups": {}, **found}


def newcomer_table(results: Mapping[str, Any]) -> Table:
    """`client_table` of the newcomers; "as downloaded" is left out where no download is a model, or all end with it."""
    view = newcomers_of(results)
    if not view:
        return [], []
    headers, rows = client_table(view)
    if _downloads_differ(view) and any(row["download"] is not None for row in view["clients"].values()):
        at, metric = headers.index(run_title(view["method"])), view["metric"]
        headers.insert(at, "as downloaded")
        for row, one in zip(rows, view["clients"].values(), strict=True):
            row.insert(at, score_text(score_of(one, "download"), metric))
    return _renamed(headers), rows


def newcomer_summary_table(results: Mapping[str, Any]) -> Table:
    """Every run's mean over newcomers, and the backbone's: as downloaded, at the end, the method's gain over others."""
    view = newcomers_of(results)
    if not view:
        return [], []
    metric, title, labels = view["metric"], run_title(view["method"]), baseline_labels(view)
    runs = [*((label, view["baselines"].get(label) or {}) for label in labels), (None, view["summary"])]
    partly = any(one.get("scored") != len(view["clients"]) for _, one in runs)
    headers = [
        "",
        *["scored"] * partly,
        "backbone",
        "as downloaded",
        f"mean {metric.replace('_', ' ')}",
        "std",
        "worst newcomer",
    ]
    headers += [f"{title}'s gain ± s.e.", "ahead"] * bool(labels)
    rows = []
    for label, one in runs:
        gains = gains_over(view, label) if label is not None else {}
        worst, mean = one.get("worst") or {}, mean_gain(gains) if gains else None
        error = f" ± {gain_text(mean.error, metric, signed=False)}" if mean and mean.error is not None else ""
        ahead = sum(gain.value > 0 for gain in gains.values())
        rows.append(
            [
                title if label is None else run_title(label),
                *[f"{one.get('scored', 0)} of {len(view['clients'])}"] * partly,
                *(score_text(score_of(one.get(name) or {}, "mean"), metric) for name in ("backbone", "download")),
                score_text(score_of(one, "mean"), metric),
                gain_text(score_of(one, "std"), metric, signed=False),
                score_text(score_of(worst, "value"), metric),
                *[gain_text(mean.value, metric) + error if mean else NOTHING] * bool(labels),
                *[f"{ahead} of {len(gains)}" if gains else NOTHING] * bool(labels),
            ]
        )
    return headers, rows


def newcomer_sentences(results: Mapping[str, Any]) -> list[str]:
    """What came out for newcomers, a method that has nothing for them included."""
    view = newcomers_of(results)
    if not view:
        return []
    metric, title, rows = view["metric"], run_title(view["method"]), view["clients"]
    number, mean = count_text(len(rows), "newcomer"), score_of(view["summary"], "mean")
    without = [row["reason"] for row in rows.values() if row.get("reason")]
    if mean is None:
        return [f"{number}, with no part in any round: {title} has nothing that they could use: {_first(without)}"]
    level = f"{number}, with no part in any round: mean {metric.replace('_', ' ')} {score_text(mean, metric)}"
    before = score_of(view["summary"].get("download") or {}, "mean")
    if before is None:
        level += f" with {title}, after its personal stages; its download alone makes no model"
    elif _downloads_differ(view):
        level += f" with {title}, {score_text(before, metric)} as downloaded"
    else:
        level += f" with {title}, as downloaded"
    if all(row.get("unchanged") for row in rows.values()):
        level += ", which is what the backbone has without it: nothing that it shares changes a model by itself"
    sentences = [level + ".", *_gain(view)]
    for label in baseline_labels(view):
        if (view["baselines"].get(label) or {}).get("scored") == 0:
            sentences.append(f"{run_title(label)} has nothing that they could use.")
    if without:
        sentences.append(f"{count_text(len(without), 'newcomer')} of {len(rows)} got no model: {_first(without)}")
    return sentences


def _gain(view: Mapping[str, Any]) -> list[str]:
    labels = baseline_labels(view)
    over = "local" if "local" in labels else labels[0] if len(labels) == 1 else BEST
    gains = gains_over(view, over) if labels else {}
    if not gains:
        return []
    mean, metric = mean_gain(gains), view["metric"]
    ahead = sum(gain.value > 0 for gain in gains.values())
    rival = "training alone" if over == "local" else run_title(over) if over else "each one's best baseline"
    error = (
        f" (standard error over newcomers {gain_text(mean.error, metric, signed=False)})"
        if mean.error is not None
        else ""
    )
    reading = {"unclear": ", no clear difference", "unknown": ", too few to say whether that is more than chance"}
    return [
        f"Over {rival}: {gain_text(mean.value, metric)}{' points' * is_share(metric)}{error}"
        f"{reading.get(mean.verdict, '')}; {ahead} of {len(gains)} did better."
    ]


def _downloads_differ(view: Mapping[str, Any]) -> bool:
    return any(score_of(row, "download") != score_of(row, view["metric"]) for row in view["clients"].values())


def _first(reasons: list[str]) -> str:
    return plain(reasons[0]).rstrip(".") + "." if reasons else "no reason was given."


def _renamed(headers: list[str]) -> list[str]:
    return [header.replace("client", "newcomer") for header in headers]
