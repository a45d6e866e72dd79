"""The plots of a comparison: every run with its spread, performance against communication, and every client."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from befit.report.drawing import Plot, axis_name, metric_name, scaled, slant
from befit.report.numbers import gain_text, is_share, plain
from befit.report.svg import MUTED, TEXT, draw, run_ink
from befit.studies.compare.results import Comparison
from befit.studies.compare.tables import clients_of

MANY_CLIENTS = 24  # beyond, their distribution is drawn instead of single cells
MANY_RUNS = 12  # beyond, spread is left to the plot of the means, or it would hide the points
FAR = 30.0  # ratio of the most to the least bytes from which their axis is logarithmic


def plots_of(results: Comparison) -> list[Plot]:
    """All plots that these results have something to show in."""
    scored = [run for run in results["runs"] if run["mean"]]
    if not scored:
        return []
    plots = [run_means(results, scored), over_communication(results, scored), client_gains(results, scored)]
    return [plot for plot in plots if plot is not None]


def run_means(results: Comparison, runs: Sequence[Mapping[str, Any]]) -> Plot:
    """One line for each run: its mean over seeds, a whisker of one SD, and every seed as a small dot."""
    names = [plain(run["label"]) for run in runs]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, run in enumerate(runs):
            seeds = scaled([cell["mean"] for cell in run["seeds"] if cell["mean"] is not None], results)
            (mean,) = scaled([run["mean"]["mean"]], results)
            (sd,) = scaled([run["mean"]["sd"] or 0.0], results)
            ink = run_ink(1 if run["label"] == results["reference"] else 0)
            axes.errorbar(
                [mean], [place], xerr=[sd] if sd else None, fmt="o", color=ink, markersize=6, capsize=3, elinewidth=1.4
            )
            axes.plot(seeds, [place + 0.24] * len(seeds), linestyle="none", marker="|", markersize=6, color=MUTED)
        for run in runs:
            if run["label"] == results["reference"]:
                axes.axvline(
                    scaled([run["mean"]["mean"]], results)[0], color=MUTED, linewidth=0.8, linestyle=(0, (3, 3))
                )
        _named_rows(axes, names)
        axes.set_xlabel(axis_name(results))

    title = f"{metric_name(results).capitalize()} of every run"
    note = (
        f"Mean over clients: every seed (strokes), their mean, and one standard deviation over seeds. Dashed: "
        f"{plain(results['reference'])}."
    )
    return Plot(title, draw("means", title, 12.0, 1.1 + 0.34 * len(runs), paint), note, wide=True)


def over_communication(results: Comparison, runs: Sequence[Mapping[str, Any]]) -> Plot | None:
    """The mean against the bytes sent up and down, with the course of training as a thin line; names at the side."""
    sent = {run["label"]: run["bytes_up"] + run["bytes_down"] for run in runs}
    sizes = sorted(size for size in sent.values() if size)
    if not sizes:
        return None
    far, few = sizes[-1] / sizes[0] > FAR, len(runs) <= MANY_RUNS

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        inks = {run["label"]: run_ink(index) for index, run in enumerate(_reference_second(results, runs))}
        points = []
        for run in runs:
            ink, label = inks[run["label"]], run["label"]
            (mean,) = scaled([run["mean"]["mean"]], results)
            (sd,) = scaled([run["mean"]["sd"] or 0.0], results)
            if not sent[label]:
                axes.axhline(mean, color=ink, linewidth=1.2, linestyle=(0, (4, 3)))
                points.append((mean, None, label))
                continue
            at = sent[label] / 1e6
            curve = [point for point in run["curve"] if point["bytes_up"] + point["bytes_down"]]
            if len(curve) > 1:
                spent = [(point["bytes_up"] + point["bytes_down"]) / 1e6 for point in curve]
                axes.plot(spent, scaled([point["mean"] for point in curve], results), color=ink, linewidth=1, alpha=0.4)
            axes.errorbar(
                [at],
                [mean],
                yerr=[sd] if sd and few else None,
                fmt="o",
                color=ink,
                markersize=6,
                capsize=2,
                elinewidth=1,
            )
            points.append((mean, at, label))
        if far:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")  # matplotlib's own labels are formulas
            axes.minorticks_off()
        else:
            axes.set_xlim(0, 1.04 * sizes[-1] / 1e6)
        axes.set_xlabel("MB up and down, all clients together (1 MB = 1e6 bytes)")
        axes.set_ylabel(axis_name(results))
        _named_points(axes, points, inks)

    height = max(4.2, 0.9 + 0.24 * len(runs))
    title = f"{metric_name(results).capitalize()} against communication"
    spread = " and one standard deviation" if few else ""
    note = f"Mean{spread} over seeds, against the bytes of training. Dashed: sends nothing."
    if any(len(run["curve"]) > 1 for run in runs):
        note += " Thin: the course of training."
    return Plot(title, draw("communication", title, 12.0, height, paint), note, wide=True)


def _reference_second(results: Comparison, runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs with the reference in second place, whose colour it has in the other plots."""
    others = [run for run in runs if run["label"] != results["reference"]]
    return [*others[:1], *(run for run in runs if run["label"] == results["reference"]), *others[1:]]


def _named_points(axes: Axes, points: Sequence[tuple[float, float | None, str]], inks: Mapping[str, str]) -> None:
    """Names to the right of the axes in the order of the points, apart from each other, each with a line to its own."""
    low, high = axes.get_ylim()
    step = (high - low) / max(12.0, len(points) + 1.0)
    at = low + step / 2
    places: list[float] = []
    for mean, _, _ in sorted(points, key=lambda point: point[0]):
        at = max(at, mean)
        places.append(at)
        at += step
    if (over := places[-1] - (high - step / 2)) > 0:  # push back down from the top, keeping the distances
        top = places[-1] - over
        for index in range(len(places) - 1, -1, -1):
            places[index] = min(places[index], top)
            top = places[index] - step
    right = axes.get_xlim()[1]
    for (mean, x, label), y in zip(sorted(points, key=lambda point: point[0]), places, strict=True):
        axes.annotate(
            plain(label),
            xy=(right if x is None else x, mean),
            xytext=(1.03, y),
            textcoords=axes.get_yaxis_transform(),
            fontsize=9,
            color=TEXT,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": inks[label],
                "linewidth": 0.7,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )
    axes.set_ylim(low, high)


def _gains(run: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """By client, the mean difference over the seeds in which both have a score on the same data."""
    others = {(seed["seed"], seed["data"]): seed["clients"] for seed in base["seeds"]}
    gains: dict[str, list[float]] = {}
    for seed in run["seeds"]:
        there = others.get((seed["seed"], seed["data"]), {})
        for client, score in seed["clients"].items():
            if score is not None and (other := there.get(client)) is not None:
                gains.setdefault(client, []).append(score - other)
    return {client: statistics.fmean(values) for client, values in gains.items()}


def client_gains(results: Comparison, runs: Sequence[Mapping[str, Any]]) -> Plot | None:
    """What every run adds at every client to the reference: cells, or distributions where clients are many."""
    base = next(run for run in results["runs"] if run["label"] == results["reference"])
    gains = {run["label"]: _gains(run, base) for run in runs if run["label"] != results["reference"]}
    gains = {label: by_client for label, by_client in gains.items() if by_client}
    if not gains:
        return None
    clients = [client for client in clients_of(results) if any(client in by_client for by_client in gains.values())]
    largest = max(abs(value) for by_client in gains.values() for value in by_client.values()) or 1.0
    names = [plain(label) for label in gains]

    def cells(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row, by_client in enumerate(gains.values()):
            for column, client in enumerate(clients):
                if client not in by_client:
                    continue
                value = by_client[client]
                axes.add_patch(
                    Rectangle(
                        (column - 0.48, row - 0.46),
                        0.96,
                        0.92,
                        linewidth=0,
                        facecolor=run_ink(0 if value > 0 else 2 if value < 0 else 1),
                        alpha=0.08 + 0.62 * abs(value) / largest,
                    )
                )
                axes.annotate(
                    gain_text(value, results["metric"]), (column, row), ha="center", va="center", fontsize=9, color=TEXT
                )
        axes.set_xlim(-0.5, len(clients) - 0.5)
        axes.set_xticks(range(len(clients)), [plain(client) for client in clients])
        if max(map(len, clients)) * len(clients) > 90:
            slant(axes, 30)
        axes.grid(False)
        _named_rows(axes, names)

    def distributions(figure: Figure) -> None:
        axes = figure.add_subplot()
        for row, by_client in enumerate(gains.values()):
            values = scaled(sorted(by_client.values()), results)
            low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
            axes.plot([values[0], values[-1]], [row, row], color=run_ink(0), linewidth=1)
            axes.plot([low, high], [row, row], color=run_ink(0), linewidth=6, alpha=0.5, solid_capstyle="butt")
            axes.plot([middle], [row], marker="o", color=run_ink(0), markersize=5)
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set_xlabel("gain (points)" if is_share(results["metric"]) else "gain")
        _named_rows(axes, names)

    reference = plain(results["reference"])
    title = f"Gain of every client over {reference}"
    few = len(clients) <= MANY_CLIENTS
    note = f"Mean over seeds of what a run adds to {reference} (blue) or takes away (orange)"
    note += ", in points." if is_share(results["metric"]) else "."
    if not few:
        note = f"Over clients: least and most, the middle half, and the median of the mean gain over {reference}."
    height = 1.0 + 0.34 * len(gains)
    return Plot(title, draw("clients", title, 12.0, height, cells if few else distributions), note, wide=True)


def _named_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows from the top, each with its name."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
