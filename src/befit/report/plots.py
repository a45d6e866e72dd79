"""The plots of a run: scores over rounds and bytes, clients against baselines, mixing weights."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from befit.report.comparison import baseline_labels, gains_over, run_title
from befit.report.numbers import gain_text, is_share, plain, score_of, score_text
from befit.report.record import RunRecord
from befit.report.svg import MUTED, TEXT, draw, run_ink

__all__ = ["MANY", "Plot", "plots_of"]

MANY = 40  # clients from which on plots show distributions instead of single clients
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1.5, 2)))


@dataclass(frozen=True)
class Plot:
    """One picture: `wide` ones want the full width of the page."""

    title: str
    svg: str
    note: str
    wide: bool = False


def plots_of(record: RunRecord) -> list[Plot]:
    """All plots for which the run has numbers."""
    results = record.results
    many = len(results["clients"]) > MANY
    candidates = (
        _over_rounds(record),
        _over_bytes(record),
        _client_distributions(results) if many else _client_bars(results),
        _weight_distribution(results) if many else _weight_bars(results),
    )
    return [plot for plot in candidates if plot is not None]


def _over_rounds(record: RunRecord) -> Plot | None:
    results, curves = record.results, _curves(record)
    if not any(curves.values()):
        return None
    bands = _bands(record, curves)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for index, (label, points) in reversed(list(enumerate(curves.items()))):
            rounds = [point["round"] for point in points]
            if label in bands:
                at, low, high = zip(*bands[label], strict=True)
                axes.fill_between(at, _scaled(low, results), _scaled(high, results), color=run_ink(index), alpha=0.13,
                                  linewidth=0)  # fmt: skip
            axes.plot(rounds, _scaled([point["mean"] for point in points], results), **_line(index),
                      label=run_title(label), marker="o", markevery=[-1], markersize=5)  # fmt: skip
        axes.set_xlabel("round")
        _finish(figure, axes, results, len(curves))

    name = _metric_name(results)
    spread = "from the lowest to the highest client"
    if len(results["clients"]) > MANY:
        spread = "over the middle half of the clients"
    note = f"Mean over clients; the band goes {spread}. " if bands else "Mean over clients. "
    title = f"{name.capitalize()} over rounds"
    return Plot(title, draw("rounds", title, 6.4, 3.9, paint), note + "The last point is the model that is deployed.")


def _over_bytes(record: RunRecord) -> Plot | None:
    results, curves = record.results, _curves(record)
    sent = {label: [(point.get("bytes_up") or 0) + (point.get("bytes_down") or 0) for point in points]
            for label, points in curves.items() if points}  # fmt: skip
    if not any(map(any, sent.values())):
        return None
    silent = [label for label, sizes in sent.items() if not any(sizes)]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for index, (label, points) in reversed(list(enumerate(curves.items()))):
            if not points:
                continue
            means = _scaled([point["mean"] for point in points], results)
            if label in silent:
                axes.axhline(means[-1], **_line(index), label=f"{run_title(label)} (sends nothing)")
            else:
                axes.plot([size / 1e6 for size in sent[label]], means, **_line(index), label=run_title(label),
                          marker="o", markevery=[-1], markersize=5)  # fmt: skip
        axes.set_xlim(left=0)
        axes.set_xlabel("MB up and down, all clients together (1 MB = 1e6 bytes)")
        _finish(figure, axes, results, len(curves))

    title = f"{_metric_name(results).capitalize()} over communication"
    note = "Mean over clients, against the bytes of training sent until then; scoring is not counted."
    if silent:
        note += " A run that sends nothing is drawn at its last score."
    return Plot(title, draw("bytes", title, 6.4, 3.9, paint), note)


def _client_bars(results: Mapping[str, Any]) -> Plot | None:
    """Above: every run's score per client; below: the gain over each baseline, with one standard error in grey."""
    metric, labels, clients = results["metric"], baseline_labels(results), list(results["clients"])
    scores = {label: [score_of(row.get("baselines") or {}, label) for row in results["clients"].values()]
              for label in labels}  # fmt: skip
    scores[results["method"]] = [score_of(row, metric) for row in results["clients"].values()]
    if all(score is None for values in scores.values() for score in values):
        return None
    gains = {label: gains_over(results, label) for label in labels}
    gains = {label: known for label, known in gains.items() if known}
    places = np.arange(len(clients))
    width = 0.8 / len(scores)

    def paint(figure: Figure) -> None:
        top, *below = figure.subplots(2 if gains else 1, 1, sharex=True, squeeze=False,
                                      height_ratios=[3, 2] if gains else [1])[:, 0]  # fmt: skip
        for slot, (label, values) in enumerate(scores.items()):
            index = (slot + 1) % len(scores)  # the method is drawn last and has ink 0
            heights = _scaled([math.nan if value is None else value for value in values], results)
            top.bar(places + (slot - (len(scores) - 1) / 2) * width, heights, width * 0.92, color=run_ink(index),
                    label=run_title(label))  # fmt: skip
        for place, row in zip(places, results["clients"].values(), strict=True):
            known = [score for score in (score_of(row, metric),) if score is not None]
            for score in known if len(clients) <= 16 else []:
                top.annotate(score_text(score, metric).rstrip("%"),
                             (place + (len(scores) - 1) / 2 * width, _scaled([score], results)[0]), (0, 2),
                             textcoords="offset points", ha="center", fontsize=8, color=TEXT)  # fmt: skip
        top.set_ylabel(_axis_name(results))
        _legend(figure, top, len(scores))
        for axes in below:
            _paint_gains(axes, results, gains, clients)
        axes = below[-1] if below else top
        axes.set_xticks(places, [_short(client) for client in clients])
        if len(clients) > 10 or max(map(len, clients)) > 10:
            axes.tick_params(axis="x", labelrotation=60, labelsize=9)
            for text in axes.get_xticklabels():
                text.set_horizontalalignment("right")
                text.set_rotation_mode("anchor")
        for axes in (top, *below):
            axes.set_xlim(-0.6, len(clients) - 0.4)

    title = f"{_metric_name(results).capitalize()} of every client"
    note = ""
    if gains:
        note = f"Below: what {run_title(results['method'])} adds to or takes from each baseline."
        if is_share(metric):
            note += " Grey: one standard error of the client's test set; a bar inside it is no clear difference."
    return Plot(title, draw("clients", title, 12.0, 5.6 if gains else 3.6, paint), note, wide=True)


def _paint_gains(
    axes: Axes, results: Mapping[str, Any], gains: Mapping[str, Mapping[str, Any]], clients: Sequence[str]
) -> None:
    width = 0.8 / len(gains)
    factor = 100 if is_share(results["metric"]) else 1
    for slot, (label, known) in enumerate(gains.items()):
        for place, client in enumerate(clients):
            if client not in known:
                continue
            gain = known[client]
            at = place + (slot - (len(gains) - 1) / 2) * width
            if gain.error is not None:
                axes.bar(
                    at, 2 * factor * gain.error, width * 0.92, bottom=-factor * gain.error, color=MUTED, alpha=0.18
                )
            axes.bar(at, factor * gain.value, width * 0.6, color=run_ink(slot + 1),
                     label=f"over {run_title(label)}" if client == next(iter(known)) else None)  # fmt: skip
            if len(clients) * len(gains) <= 24:
                axes.annotate(gain_text(gain.value, results["metric"]), (at, factor * max(gain.value, 0)), (0, 2),
                              textcoords="offset points", ha="center", fontsize=8, color=TEXT)  # fmt: skip
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.margins(y=0.15)
    axes.set_ylabel(f"gain ({'points' if factor == 100 else results['metric'].replace('_', ' ')})")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, fontsize=9, borderaxespad=0, handlelength=1.2)


def _client_distributions(results: Mapping[str, Any]) -> Plot | None:
    """Left: how many clients reached which score; right: the same for the gains."""
    metric, labels = results["metric"], baseline_labels(results)
    rows = list(results["clients"].values())
    scores = {results["method"]: _known(score_of(row, metric) for row in rows)}
    scores |= {label: _known(score_of(row.get("baselines") or {}, label) for row in rows) for label in labels}
    gains = {label: [gain.value for gain in gains_over(results, label).values()] for label in labels}
    if not any(scores.values()):
        return None

    def paint(figure: Figure) -> None:
        left, *right = figure.subplots(1, 2 if any(gains.values()) else 1, squeeze=False)[0]
        _share_reaching(left, results, scores, run_title, 0)
        left.set_xlabel(_axis_name(results))
        left.set_ylabel("clients with at most this (%)")
        _legend(figure, left, len(scores))
        for axes in right:
            _share_reaching(axes, results, gains, lambda label: f"over {run_title(label)}", 1)
            axes.axvline(0, color=MUTED, linewidth=0.8)
            axes.set_xlabel("gain (points)" if is_share(metric) else "gain")
            axes.legend(loc="upper left", fontsize=9)

    title = f"{_metric_name(results).capitalize()} over all clients"
    note = "Cumulative distributions: a line further to the right is better."
    if not results.get("higher_is_better", True):
        note = "Cumulative distributions: scores are better to the left, gains to the right."
    return Plot(title, draw("clients", title, 12.0, 4.2, paint), note, wide=True)


def _share_reaching(
    axes: Axes, results: Mapping[str, Any], values: Mapping[str, Sequence[float]], name: Any, first: int
) -> None:
    for index, (label, known) in enumerate(values.items()):
        if known:
            ordered = sorted(_scaled(known, results))
            shares = [100 * (place + 1) / len(ordered) for place in range(len(ordered))]
            axes.step([ordered[0], *ordered], [0, *shares], where="post", **_line(index + first), label=name(label))
    axes.set_ylim(0, 100)


def _weight_bars(results: Mapping[str, Any]) -> Plot | None:
    weights = _weights(results)
    if not weights:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        places = range(len(weights))
        axes.bar(places, list(weights.values()), 0.7, color=run_ink(0))
        if len(weights) <= 20:
            for place, weight in zip(places, weights.values(), strict=True):
                axes.annotate(f"{weight:.2f}", (place, weight), (0, 2), textcoords="offset points", ha="center",
                              fontsize=9)  # fmt: skip
        axes.axhline(0.5, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)))
        axes.set_xticks(places, [_short(client) for client in weights])
        if len(weights) > 5:
            axes.tick_params(axis="x", labelrotation=60, labelsize=9)
            for text in axes.get_xticklabels():
                text.set_horizontalalignment("right")
                text.set_rotation_mode("anchor")
        axes.set_ylim(0, 1.08)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_ylabel("w")

    return Plot("Mixing weights", draw("weights", "Mixing weight of every client", 6.4, 3.6, paint), _WEIGHT_NOTE)


def _weight_distribution(results: Mapping[str, Any]) -> Plot | None:
    weights = _weights(results)
    if not weights:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.hist(list(weights.values()), bins=[step / 20 for step in range(21)], color=run_ink(0), rwidth=0.9)
        axes.set_xlim(0, 1)
        axes.set_xlabel("w")
        axes.set_ylabel("clients")

    title = "Distribution of the mixing weights"
    return Plot("Mixing weights", draw("weights", title, 6.4, 3.6, paint), _WEIGHT_NOTE)


_WEIGHT_NOTE = (
    "w is the weight of the federated adapter in a client's merged model: 1 is the federated adapter alone, 0 the "
    "client's own alone."
)


def _weights(results: Mapping[str, Any]) -> dict[str, float]:
    found = {client: score_of(row.get("diagnostics") or {}, "w") for client, row in results["clients"].items()}
    return {client: weight for client, weight in found.items() if weight is not None}


def _curves(record: RunRecord) -> dict[str, list[Mapping[str, Any]]]:
    """The method's curve first, then the baselines', each without rounds that have no mean."""
    curves = record.results.get("curves") or {}
    labels = [label for label in [record.results["method"], *baseline_labels(record.results)] if label in curves]
    labels += [label for label in curves if label not in labels]
    return {label: [p for p in curves[label] if score_of(p, "mean") is not None] for label in labels}


def _bands(
    record: RunRecord, curves: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, list[tuple[int, float, float]]]:
    """Per run: (round, low, high). Lowest and highest client, or with many clients their quartiles.

    Quartiles are taken from the scores in metrics.jsonl; a curve's point belongs to the scores with the same mean, so
    that the score after a merge is found though it has another stage and round.
    """
    if len(record.results["clients"]) == 1:
        return {}
    if len(record.results["clients"]) <= MANY:
        bands = {label: [(p["round"], score_of(p, "min"), score_of(p, "max")) for p in points]
                 for label, points in curves.items()}  # fmt: skip
    else:
        bands = {label: _quartiles(record, label, points) for label, points in curves.items()}
    known = {
        label: [(at, low, high) for at, low, high in band if low is not None and high is not None]
        for label, band in bands.items()
    }
    return {label: band for label, band in known.items() if len(band) > 1}


def _quartiles(
    record: RunRecord, label: str, points: Sequence[Mapping[str, Any]]
) -> list[tuple[int, float | None, float | None]]:
    metric = record.results["metric"]
    scores: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in record.scores.get(label, []):
        value = score_of(line, "value")
        if line["metric"] == metric and value is not None:
            scores[line["stage"], line["round"]].append(value)
    by_mean = {round(statistics.fmean(values), 9): values for values in scores.values() if len(values) > 1}
    band: list[tuple[int, float | None, float | None]] = []
    for point in points:
        values = by_mean.get(round(point["mean"], 9))
        low, _, high = statistics.quantiles(values, method="inclusive") if values else (None, None, None)
        band.append((point["round"], low, high))
    return band


def _finish(figure: Figure, axes: Axes, results: Mapping[str, Any], runs: int) -> None:
    axes.set_ylabel(_axis_name(results))
    _legend(figure, axes, runs)


def _legend(figure: Figure, axes: Axes, runs: int) -> None:
    """Above the axes, the method first; none for a single run."""
    if runs > 1:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=9, handlelength=2.4)


def _line(index: int) -> dict[str, Any]:
    return {
        "color": run_ink(index),
        "linestyle": _DASHES[index % len(_DASHES)],
        "linewidth": 2.2 if index == 0 else 1.7,
    }


def _scaled(values: Iterable[float], results: Mapping[str, Any]) -> list[float]:
    """Shares in percent, as on the axes."""
    return [100 * value if is_share(results["metric"]) else value for value in values]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _metric_name(results: Mapping[str, Any]) -> str:
    return plain(results["metric"]).replace("_", " ")


def _axis_name(results: Mapping[str, Any]) -> str:
    return _metric_name(results) + (" (%)" if is_share(results["metric"]) else "")


def _short(client: str) -> str:
    """A client's name as a tick label."""
    text = plain(client)
    return text if len(text) <= 14 else f"{text[:6]}…{text[-6:]}"
