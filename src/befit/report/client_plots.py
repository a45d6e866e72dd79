"""Every client against its baselines, and its shares, such as mixing weights; distributions where clients are many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from befit.report.comparison import Gain, gains_over, is_paired, run_title, scores_by_run
from befit.report.diagnostics import Values, share_header, share_text
from befit.report.drawing import Plot, axis_name, legend, metric_name, run_line, scaled, short_name, slant
from befit.report.numbers import counts_examples, gain_text, is_share, score_of, score_text
from befit.report.results import RunResults, Shown, baseline_labels
from befit.report.svg import MUTED, TEXT, draw, run_ink


def client_bars(results: RunResults) -> Plot | None:
    """Above: every run's score per client; below: the gain over each baseline, with two standard errors in grey."""
    metric, labels, clients = results["metric"], baseline_labels(results), list(results["clients"])
    scores = scores_by_run(results)
    if all(score is None for values in scores.values() for score in values):
        return None
    gains = {label: gains_over(results, label) for label in labels}
    gains = {label: by_client for label, by_client in gains.items() if by_client}
    places = np.arange(len(clients))
    width = 0.8 / len(scores)

    def paint(figure: Figure) -> None:
        top, *below = figure.subplots(
            2 if gains else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2] if gains else [1]
        )[:, 0]
        for slot, (label, values) in enumerate(scores.items()):
            index = (slot + 1) % len(scores)  # the method is drawn last and has ink 0
            heights = scaled([math.nan if value is None else value for value in values], results)
            top.bar(
                places + (slot - (len(scores) - 1) / 2) * width,
                heights,
                width * 0.92,
                color=run_ink(index),
                label=run_title(label),
            )
        for place, row in zip(places, results["clients"].values(), strict=True):
            shown = [score for score in (score_of(row, metric),) if score is not None]
            for score in shown if len(clients) <= 16 else []:
                top.annotate(
                    score_text(score, metric).rstrip("%"),
                    (place + (len(scores) - 1) / 2 * width, scaled([score], results)[0]),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=TEXT,
                )
        top.set_ylabel(axis_name(results))
        legend(figure, top, len(scores))
        for axes in below:
            _paint_gains(axes, results, gains, clients)
        _name_clients(below[-1] if below else top, clients)

    title = f"{metric_name(results).capitalize()} of every client"
    note = ""
    if gains:
        note = f"Below: what {run_title(results['method'])} adds to or takes from each baseline."
        if is_paired(results) or counts_examples(metric):
            of = (
                "paired by the client's examples"
                if is_paired(results)
                else "of two independent shares of a client's examples"
            )
            note += (
                f" Grey: two standard errors of a difference, {of}, and more where these are few; a bar inside it is "
                "no clear difference."
            )
    return Plot(title, draw("clients", title, 12.0, 5.6 if gains else 3.6, paint), note, wide=True)


def _paint_gains(
    axes: Axes, results: RunResults, gains: Mapping[str, Mapping[str, Gain]], clients: Sequence[str]
) -> None:
    width = 0.8 / len(gains)
    factor = 100 if is_share(results["metric"]) else 1
    for slot, (label, by_client) in enumerate(gains.items()):
        for place, client in enumerate(clients):
            if client not in by_client:
                continue
            gain = by_client[client]
            at = place + (slot - (len(gains) - 1) / 2) * width
            if gain.error is not None:
                reach = gain.beyond * factor * gain.error
                axes.bar(at, 2 * reach, width * 0.92, bottom=-reach, color=MUTED, alpha=0.18)
            axes.bar(
                at,
                factor * gain.value,
                width * 0.6,
                color=run_ink(slot + 1),
                label=f"over {run_title(label)}" if client == next(iter(by_client)) else None,
            )
            if len(clients) * len(gains) <= 24:
                below = gain.value < 0
                text, tip = gain_text(gain.value, results["metric"]), (at, factor * gain.value)
                axes.annotate(
                    text,
                    tip,
                    (0, -2 if below else 2),
                    textcoords="offset points",
                    ha="center",
                    va="top" if below else "bottom",
                    fontsize=8,
                    color=TEXT,
                )
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.use_sticky_edges = False  # bars would take the margin below them
    axes.margins(y=0.15)
    axes.set_ylabel(f"gain ({'points' if factor == 100 else results['metric'].replace('_', ' ')})")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, fontsize=9, borderaxespad=0, handlelength=1.2)


def client_distributions(results: RunResults) -> Plot | None:
    """Left: how many clients reached which score; right: the same for the gains."""
    metric, labels = results["metric"], baseline_labels(results)
    scores = scores_by_run(results)
    gains = {label: [gain.value for gain in gains_over(results, label).values()] for label in labels}
    if not any(map(known_only, scores.values())):
        return None

    def paint(figure: Figure) -> None:
        left, *right = figure.subplots(1, 2 if any(gains.values()) else 1, squeeze=False)[0]
        for slot, (label, values) in enumerate(scores.items()):
            # the method comes last and has ink 0
            _cumulative(left, scaled(known_only(values), results), (slot + 1) % len(scores), run_title(label))
        left.set_xlabel(axis_name(results))
        left.set_ylabel("clients with at most this (%)")
        legend(figure, left, len(scores))
        for axes in right:
            for slot, (label, values) in enumerate(gains.items()):
                _cumulative(axes, scaled(values, results), slot + 1, f"over {run_title(label)}")
            axes.axvline(0, color=MUTED, linewidth=0.8)
            axes.set_xlabel("gain (points)" if is_share(metric) else "gain")
            axes.legend(loc="upper left", fontsize=9)

    title = f"{metric_name(results).capitalize()} over all clients"
    note = "Cumulative distributions: a line further to the right is better."
    return Plot(title, draw("clients", title, 12.0, 4.2, paint), note, wide=True)


def _cumulative(axes: Axes, values: Sequence[float], ink: int, label: str) -> None:
    if values:
        ordered = sorted(values)
        shares = [100 * (place + 1) / len(ordered) for place in range(len(ordered))]
        axes.step([ordered[0], *ordered], [0, *shares], where="post", **run_line(ink), label=label)
    axes.set_ylim(0, 100)


def share_bars(shown: Shown, values: Values) -> Plot:
    """One bar per client up to its number, or from its least to its largest."""
    ranges = len(shown["keys"]) > 1

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        places, few = range(len(values)), len(values) <= (14 if ranges else 30)
        for place, (least, most) in zip(places, values.values(), strict=True):
            bottom = least if ranges else 0.0
            axes.bar(place, max(most - bottom, 0.004 * ranges), 0.6, bottom=bottom, color=run_ink(0))
            if few:
                axes.annotate(
                    share_text((least, most), shown),
                    (place, most),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9,
                )
        axes.axhline(0.5, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)))
        _name_clients(axes, list(values))
        axes.set_ylim(0, 1.08)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_ylabel(share_header(shown))

    title = f"{shown['title']} of every client{', least to largest' * ranges}"
    return Plot(shown["title"], draw(shown["keys"][0], title, 12.0, 3.0, paint), shown["text"], wide=True)


def share_distribution(shown: Shown, values: Values) -> Plot:
    """How many clients have which number; of ranges, every client's, in order of its middle."""
    ranges = len(shown["keys"]) > 1

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        if not ranges:
            axes.hist(
                [least for least, _ in values.values()],
                bins=[step / 20 for step in range(21)],
                color=run_ink(0),
                rwidth=0.9,
            )
            axes.set_xlim(0, 1)
            axes.set_xlabel(share_header(shown))
            axes.set_ylabel("clients")
            return
        pairs = sorted(values.values(), key=sum)
        axes.vlines(range(len(pairs)), *zip(*pairs, strict=True), color=run_ink(0), linewidth=1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("clients, in order of the middle of their range")
        axes.set_ylabel(share_header(shown))

    title = f"{shown['title']}: {'ranges of all clients' if ranges else 'distribution over clients'}"
    return Plot(shown["title"], draw(shown["keys"][0], title, 12.0, 3.0, paint), shown["text"], wide=True)


def _name_clients(axes: Axes, clients: Sequence[str]) -> None:
    """One tick for each client; slanted where level names would run into each other."""
    axes.set_xticks(range(len(clients)), [short_name(client) for client in clients])
    room = max(0.6, (6 - len(clients)) / 2)  # few clients get no broader bars than six would
    axes.set_xlim(-room, len(clients) - 1 + room)
    if len(clients) * max(map(len, map(short_name, clients))) > 120:
        slant(axes, 60)


def known_only(values: Iterable[float | None]) -> list[float]:
    """The values of clients that have one."""
    return [value for value in values if value is not None]
