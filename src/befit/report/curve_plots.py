"""Scores over rounds and over the bytes that were sent."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from befit.report.comparison import run_title
from befit.report.drawing import MANY, Plot, axis_name, legend, metric_name, run_line, scaled
from befit.report.numbers import score_of
from befit.report.record import RunRecord
from befit.report.results import baseline_labels
from befit.report.svg import draw, run_ink


def over_rounds(record: RunRecord) -> Plot | None:
    results, curves = record.results, _curves(record)
    if not is_curve(curves):
        return None
    bands = _bands(record, curves)

    last = max(point["round"] for points in curves.values() for point in points)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for index, (label, points) in drawing_order(curves):
            rounds = [point["round"] for point in points]
            if label in bands:
                _spread(axes, bands[label], index, last, results)
            axes.plot(
                rounds,
                scaled([point["mean"] for point in points], results),
                **run_line(index),
                label=run_title(label),
                marker="o",
                markevery=[-1],
                markersize=5,
            )
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylabel(axis_name(results))
        legend(figure, axes, len(curves))

    name = metric_name(results)
    spread = "from the lowest to the highest client"
    if len(results["clients"]) > MANY:
        spread = "over the middle half of the clients"
    drawn = "the band goes" if set(bands) <= {next(iter(curves))} else "the band, and each bar at the end, goes"
    note = f"Mean over clients; {drawn} {spread}. " if bands else "Mean over clients. "
    title = f"{name.capitalize()} over rounds"
    return Plot(title, draw("rounds", title, 6.4, 3.9, paint), note + "The last point is the model that is deployed.")


def _spread(
    axes: Axes, band: Sequence[tuple[int, float, float]], index: int, last: int, results: Mapping[str, Any]
) -> None:
    """The method's as a band; those of the others, which would hide it and each other, bars beside the last round."""
    at, low, high = zip(*band, strict=True)
    lower, upper = scaled(low, results), scaled(high, results)
    if index == 0:
        axes.fill_between(at, lower, upper, color=run_ink(index), alpha=0.13, linewidth=0)
        return
    (middle,) = axes.plot(
        [last * (1 + 0.02 * index)] * 2,
        [lower[-1], upper[-1]],
        color=run_ink(index),
        linewidth=1.7,
        marker="_",
        markersize=6,
    )
    middle.set_gid(f"spread-{index}")


def over_bytes(record: RunRecord) -> Plot | None:
    results, curves = record.results, _curves(record)
    sent = {
        label: [(point.get("bytes_up") or 0) + (point.get("bytes_down") or 0) for point in points]
        for label, points in curves.items()
        if points
    }
    if not any(map(any, sent.values())):
        return None
    silent = [label for label, sizes in sent.items() if not any(sizes)]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for index, (label, points) in drawing_order(curves):
            if not points:
                continue
            means = scaled([point["mean"] for point in points], results)
            if label in silent:
                axes.axhline(means[-1], **run_line(index), label=f"{run_title(label)} (sends nothing)")
            else:
                axes.plot(
                    [size / 1e6 for size in sent[label]],
                    means,
                    **run_line(index),
                    label=run_title(label),
                    marker="o",
                    markevery=[-1],
                    markersize=5,
                )
        axes.set_xlim(0, 1.04 * max(map(max, sent.values())) / 1e6)  # with room for the marker of the last point
        axes.set_xlabel("MB up and down, all clients together (1 MB = 1e6 bytes)")
        axes.set_ylabel(axis_name(results))
        legend(figure, axes, len(curves))

    title = f"{metric_name(results).capitalize()} over communication"
    note = "Mean over clients, against the bytes of training sent until then, without scoring and failed exchanges."
    if silent:
        note += " A run that sends nothing is drawn at its last score."
    if not is_curve(curves):
        note += " Scores were taken once; with evaluate.every: 1 every round has one."
    return Plot(title, draw("bytes", title, 6.4, 3.9, paint), note)


def _curves(record: RunRecord) -> dict[str, list[Mapping[str, Any]]]:
    """The method's curve first, then the baselines', each without rounds that have no mean."""
    curves = record.results.get("curves") or {}
    labels = [label for label in [record.results["method"], *baseline_labels(record.results)] if label in curves]
    labels += [label for label in curves if label not in labels]
    return {label: [p for p in curves[label] if score_of(p, "mean") is not None] for label in labels}


def is_curve(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Whether any run was scored more than once."""
    return any(len(points) > 1 for points in curves.values())


def drawing_order(
    curves: Mapping[str, list[Mapping[str, Any]]],
) -> list[tuple[int, tuple[str, list[Mapping[str, Any]]]]]:
    """Numbered runs, the method (number 0) at the end: above the others, and last in the legend as in the tables."""
    first, *others = enumerate(curves.items())
    return [*others, first]


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
        bands = {
            label: [(p["round"], score_of(p, "min"), score_of(p, "max")) for p in points]
            for label, points in curves.items()
        }
    else:
        bands = {label: _quartiles(record, label, points) for label, points in curves.items()}
    complete = {
        label: [(at, low, high) for at, low, high in band if low is not None and high is not None]
        for label, band in bands.items()
    }
    return {label: band for label, band in complete.items() if len(band) > 1}


def _quartiles(
    record: RunRecord, label: str, points: Sequence[Mapping[str, Any]]
) -> list[tuple[int, float | None, float | None]]:
    metric = record.results["metric"]
    scores: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for line in record.scores.get(label, []):
        value = score_of(line, "value")
        if line["metric"] == metric and value is not None:
            scores[line["stage"], line["round"]][line["client"]] = value
    lists = [list(values.values()) for values in scores.values()]
    by_mean = {round(statistics.fmean(values), 9): values for values in lists if len(values) > 1}
    band: list[tuple[int, float | None, float | None]] = []
    for point in points:
        values = by_mean.get(round(point["mean"], 9))
        low, _, high = statistics.quantiles(values, method="inclusive") if values else (None, None, None)
        band.append((point["round"], low, high))
    return band
