"""Tables and sentences on newcomers: those of clients, with scores as downloaded beside the final ones."""

from __future__ import annotations

from befit.report.comparison import gains_over, main_rival, mean_gain, run_title
from befit.report.numbers import count_text, gain_text, is_share, plain, score_of, score_text
from befit.report.results import RunResults, baseline_labels, newcomers_of, runs_of, training_alone
from befit.report.table import Cell, Table, deviation, score
from befit.report.tables import client_table, gain_cells

NEWCOMER_NOTE = (
    "Newcomers took part in no round. “As downloaded” is the model that the method makes of the server's last download "
    "alone; after that a newcomer runs the method's personal stages on its own training examples, as any client does. "
    "What a method has a newcomer send before its download counts as its bytes up, and is for its own download alone. "
    "Bytes of newcomers are in no total of the clients."
)


def newcomer_table(results: RunResults) -> Table:
    """`client_table` of the newcomers; "as downloaded" is left out where no download is a model, or all end with it."""
    view = newcomers_of(results)
    if view is None:
        return Table("Newcomers", [], [])
    downloads = any(row.get("download") is not None for row in view["clients"].values())
    return client_table(view, "newcomer", download=downloads and _downloads_differ(view))


def newcomer_summary_table(results: RunResults) -> Table:
    """Every run's mean over newcomers, and the backbone's: as downloaded, at the end, the method's gain over others."""
    view = newcomers_of(results)
    if view is None:
        return Table("Newcomers in summary", [], [])
    metric, method, total = view["metric"], view["method"], len(view["clients"])
    runs, compared = runs_of(view), bool(baseline_labels(view))
    partly = any(summary.get("scored") != total for _, summary in runs)
    headers = ["", *["scored"] * partly, "backbone", "as downloaded", f"mean {metric.replace('_', ' ')}", "std"]
    headers += ["worst newcomer"] + [f"{run_title(method)}'s gain ± s.e.", "ahead"] * compared
    rows = []
    for label, summary in runs:
        gains = gains_over(view, label) if summary is not view["summary"] else {}
        means = [summary.get("backbone") or {}, summary.get("download") or {}, summary]
        rows.append(
            [
                run_title(label),
                *[f"{summary.get('scored', 0)} of {total}"] * partly,
                *(Cell(score_of(values, "mean"), score(metric)) for values in means),
                Cell(score_of(summary, "std"), deviation(metric)),
                Cell(score_of(summary.get("worst") or {}, "value"), score(metric)),
                *gain_cells(gains, metric) * compared,
            ]
        )
    return Table("Newcomers in summary", headers, rows, last=True)


def newcomer_sentences(results: RunResults) -> list[str]:
    """The results of newcomers in sentences, also where a method has no model for them."""
    view = newcomers_of(results)
    if view is None:
        return []
    metric, title, rows = view["metric"], run_title(view["method"]), view["clients"]
    number, mean = count_text(len(rows), "newcomer"), score_of(view["summary"], "mean")
    without = [reason for row in rows.values() if (reason := row.get("reason"))]
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
    for label, summary in runs_of(view)[:-1]:
        if summary.get("scored") == 0:
            sentences.append(f"{run_title(label)} has nothing that they could use.")
    if without:
        sentences.append(f"{count_text(len(without), 'newcomer')} of {len(rows)} got no model: {_first(without)}")
    return sentences


def _gain(view: RunResults) -> list[str]:
    over = main_rival(view)
    gains = gains_over(view, over)
    if not gains:
        return []
    mean, metric = mean_gain(gains), view["metric"]
    ahead = sum(gain.value > 0 for gain in gains.values())
    rival = (
        "training alone" if over == training_alone(view) else run_title(over) if over else "each one's best baseline"
    )
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


def _downloads_differ(view: RunResults) -> bool:
    return any(score_of(row, "download") != score_of(row, view["metric"]) for row in view["clients"].values())


def _first(reasons: list[str]) -> str:
    return plain(reasons[0]).rstrip(".") + "." if reasons else "no reason was given."
