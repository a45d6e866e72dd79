"""How alike the layers of two models are, as a heat map: a picture, a page with everything inside, or a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from befit.report.numbers import plain
from befit.report.page import small_page
from befit.report.svg import draw, png
from befit.report.table import Cell, Table, csv_text, decimals, html
from befit.studies.cka import LayerCka

TICKS = 16  # at most so many layers are named on an axis


def layer_names(count: int) -> list[str]:
    """Of a model's hidden states.

    >>> layer_names(3)
    ['embedding', 'block 0', 'block 1']
    """
    return ["embedding", *(f"block {number}" for number in range(count - 1))]


def cka_csv(cka: LayerCka) -> str:
    """A row for each layer of the first model, a column for each of the second."""
    rows, columns = map(layer_names, cka.values.shape)
    values = zip(rows, cka.values.tolist(), strict=True)
    return csv_text([{"layer": name, **dict(zip(columns, row, strict=True))} for name, row in values])


def cka_png(cka: LayerCka, blocks: int) -> bytes:
    """The map of all pairs of layers with the matched blocks marked, as a picture."""
    return png(*size_of(cka), partial(paint, cka=cka, blocks=blocks))


def cka_page(cka: LayerCka, blocks: int) -> str:
    """HTML with the map and, where there are blocks, those that PQ-LoRA would match."""
    picture = draw(
        "map-cka", "linear CKA of all pairs of layers", *size_of(cka), partial(paint, cka=cka, blocks=blocks)
    )
    facts = f"Linear centred kernel alignment of hidden states at {cka.tokens} tokens of {cka.records} records."
    table = matched_blocks(cka, blocks, cka.models)
    heading = f"<h2>{table.title}</h2>{html(table)}" if table else ""
    title = f"Layers of {cka.models[0]} and {cka.models[1]}"
    return small_page(title, f"<p>{facts}</p><figure>{picture}</figure>{heading}")


def matched_blocks(cka: LayerCka, blocks: int, names: tuple[str, str]) -> Table:
    """The pairs of blocks that PQ-LoRA in so many blocks matches, and the most alike block for each of the first."""
    unit = decimals(3)
    rows = [
        [k, row["first"], row["second"], Cell(row["cka"], unit), row["nearest"], Cell(row["nearest_cka"], unit)]
        for k, row in enumerate(cka.placed(blocks) if blocks else [])
    ]
    headers = ["k", *(f"block of {name}" for name in names), "CKA", f"most alike in {names[1]}", "CKA there"]
    return Table(f"Matched by PQ-LoRA in {blocks} blocks", headers, rows)


def size_of(cka: LayerCka) -> tuple[float, float]:
    """Width and height in inches."""
    rows, columns = cka.values.shape
    return min(9.0, max(4.5, 2.5 + 0.18 * columns)), min(9.0, max(3.5, 1.5 + 0.18 * rows))


def paint(figure: Figure, cka: LayerCka, blocks: int) -> None:
    """Rows are layers of the first model, from the bottom up; rings mark the blocks that PQ-LoRA matches."""
    axes = figure.add_subplot()
    image = axes.imshow(
        cka.values.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower", interpolation="nearest"
    )
    axes.grid(False)
    for axis, set_ticks, side in ((axes.xaxis, axes.set_xticks, 1), (axes.yaxis, axes.set_yticks, 0)):
        name, places = cka.models[side], _ticks(cka.values.shape[side])
        set_ticks(places, ["emb." if place == 0 else str(place - 1) for place in places], fontsize=8)
        axis.set_label_text(f"block of {plain(name)}")
    for row in cka.placed(blocks) if blocks else ():
        axes.plot(row["second"] + 1, row["first"] + 1, "o", mfc="none", mec="white", ms=8)
    figure.colorbar(image, ax=axes, label="CKA", shrink=0.8)


def _ticks(count: int) -> Sequence[int]:
    return range(0, count, -(-count // TICKS))
