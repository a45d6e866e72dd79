"""How alike the layers of two models are, as a heat map: a picture, a page with everything inside, or a table."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from importlib.resources import files

import matplotlib
from matplotlib.figure import Figure

from befit.report.numbers import plain
from befit.report.svg import draw
from befit.studies.cka import LayerCka

__all__ = ["cka_csv", "cka_page", "cka_png", "layer_names"]

TICKS = 16  # at most so many layers are named on an axis


def layer_names(count: int) -> list[str]:
    """Of a model's hidden states.

    >>> layer_names(3)
    ['embedding', 'block 0', 'block 1']
    """
    return ["embedding", *(f"block {number}" for number in range(count - 1))]


def cka_csv(found: LayerCka) -> str:
    """A row for each layer of the first model, a column for each of the second."""
    rows, columns = map(layer_names, found.values.shape)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["layer", *columns])
    table.writerows([name, *map(repr, row)] for name, row in zip(rows, found.values.tolist(), strict=True))
    return text.getvalue()


def cka_png(found: LayerCka, blocks: int) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(figsize=size_of(found), layout="constrained", dpi=150)
        paint(figure, found, blocks)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def cka_page(found: LayerCka, blocks: int) -> str:
    """HTML with the map and, where there are blocks, what PQ-LoRA would match."""
    style = files("befit.report").joinpath("templates/report.css").read_text(encoding="utf-8")
    title = html.escape(plain(f"Layers of {found.models[0]} and {found.models[1]}"))
    picture = draw(
        "map-cka", "linear CKA of all pairs of layers", *size_of(found), lambda figure: paint(figure, found, blocks)
    )
    facts = f"Linear centred kernel alignment of hidden states at {found.tokens} tokens of {found.records} records."
    table = _placement(found, blocks) if blocks else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"</head><body><main><h1>{title}</h1><p>{facts}</p><figure>{picture}</figure>{table}</main></body></html>"
        "\n"
    )


def _placement(found: LayerCka, blocks: int) -> str:
    heads = ("k", *map(plain, found.models), "CKA", "most alike", "CKA")
    rows = "".join(
        f"<tr><td>{k}</td><td>{row['first']}</td><td>{row['second']}</td><td>{row['cka']:.3f}</td>"
        f"<td>{row['nearest']}</td><td>{row['nearest_cka']:.3f}</td></tr>"
        for k, row in enumerate(found.placed(blocks))
    )
    names = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return f"<h2>PQ-LoRA in {blocks} blocks</h2><table><tr>{names}</tr>{rows}</table>"


def size_of(found: LayerCka) -> tuple[float, float]:
    """Width and height in inches."""
    rows, columns = found.values.shape
    return min(9.0, max(4.5, 2.5 + 0.18 * columns)), min(9.0, max(3.5, 1.5 + 0.18 * rows))


def paint(figure: Figure, found: LayerCka, blocks: int) -> None:
    """Rows are layers of the first model, from the bottom up; rings mark the blocks that PQ-LoRA matches."""
    axes = figure.add_subplot()
    image = axes.imshow(
        found.values.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower", interpolation="nearest"
    )
    axes.grid(False)
    for axis, set_ticks, side in ((axes.xaxis, axes.set_xticks, 1), (axes.yaxis, axes.set_yticks, 0)):
        name, places = found.models[side], _ticks(found.values.shape[side])
        set_ticks(places, ["emb." if place == 0 else str(place - 1) for place in places], fontsize=8)
        axis.set_label_text(f"block of {plain(name)}")
    for row in found.placed(blocks) if blocks else ():
        axes.plot(row["second"] + 1, row["first"] + 1, "o", mfc="none", mec="white", ms=8)
    figure.colorbar(image, ax=axes, label="CKA", shrink=0.8)


def _ticks(count: int) -> Sequence[int]:
    return range(0, count, -(-count // TICKS))
