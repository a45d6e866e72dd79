"""Labels by client as a heat map: a picture, or a page with everything inside."""

from __future__ import annotations

from functools import partial
from html import escape

import numpy as np
from matplotlib.figure import Figure

from befit.data.record_counts import RecordCounts
from befit.report.numbers import plain
from befit.report.page import small_page
from befit.report.svg import draw, png

NAMED = 60  # rows or columns that still have room for their names
MARKED = 12  # columns in which a cell still has room for its number


def partition_page(seen: RecordCounts) -> str:
    """HTML: what was divided and how, and one map each of clients and newcomers."""
    rule = seen.partition
    facts = [f"{len(seen.clients)} clients, {len(seen.newcomers)} newcomers, {len(seen.names)} kinds of {seen.kind}"]
    if rule:
        facts.append(f"divided by {rule.get('name')}, seed {rule.get('seed')}, SHA-256 {rule.get('sha256')}")
    parts = [f"<p>{escape(plain(fact))}</p>" for fact in facts]
    for name, count in (("clients", len(seen.clients)), ("newcomers", len(seen.newcomers))):
        if count:
            width, height = size_of(seen, count)
            shown = f"share of each {seen.kind} in the training data of the {name}"
            picture = draw(f"map-{name}", shown, width, height, partial(paint, seen=seen, which=name))
            parts.append(f"<h2>{name.capitalize()}</h2><figure>{picture}</figure>")
    return small_page(f"{seen.federation} {seen.version}", *parts)


def partition_png(seen: RecordCounts) -> bytes:
    """The map of the clients as a picture."""
    return png(*size_of(seen, len(seen.clients)), partial(paint, seen=seen, which="clients"))


def size_of(seen: RecordCounts, clients: int) -> tuple[float, float]:
    """Width and height in inches: rows and columns that are named get room for a line of text."""
    width = min(10.0, max(4.5, 2.5 + 0.45 * len(seen.names)))
    return width, min(16.0, max(2.5, 1.3 + 0.24 * min(clients, NAMED)))


def paint(figure: Figure, seen: RecordCounts, which: str) -> None:
    """Rows are clients, columns kinds; a cell is the share of the client's training (or, without any, test) records."""
    holdings = seen.clients if which == "clients" else seen.newcomers
    shares = np.zeros((len(holdings), len(seen.names)))
    for row, client in enumerate(holdings):
        split = "train" if client.sizes["train"] else "test"
        for column, name in enumerate(seen.names):
            shares[row, column] = client.counts[split].get(name, 0) / max(1, client.sizes[split])
    axes = figure.add_subplot()
    image = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.grid(False)
    axes.set_xlabel(plain(seen.kind))
    if len(seen.names) <= NAMED:
        axes.set_xticks(
            range(len(seen.names)),
            [plain(name) for name in seen.names],
            fontsize=8,
            rotation=90 if max(map(len, seen.names)) > 3 else 0,
        )
    else:
        axes.set_xticks([])
        axes.set_xlabel(f"{len(seen.names)} kinds of {plain(seen.kind)}")
    if len(holdings) <= NAMED:
        rows = [f"{plain(client.client)} ({client.sizes['train']})" for client in holdings]
        axes.set_yticks(range(len(holdings)), rows, fontsize=8)
    else:
        axes.set_ylabel(f"{len(holdings)} {which}")
    if len(seen.names) <= MARKED and len(holdings) <= NAMED:
        for (row, column), share in np.ndenumerate(shares):
            if share:
                axes.text(
                    column,
                    row,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if share > 0.55 else "#123",
                )
    figure.colorbar(image, ax=axes, label="share of the client's training data", shrink=0.8)
