"""Matplotlib figures as SVG that lives inside a page: the page's fonts and colours, no state, the same bytes each time.

Colours are drawn as *ink*: stand-ins that `inline_svg` replaces by CSS variables, so that one drawing suits light and
dark pages.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

TEXT, MUTED, GRID = "#010101", "#010102", "#010103"
_VARIABLES = {TEXT: "var(--text)", MUTED: "var(--muted)", GRID: "var(--line)"}
RUN_COLOURS = 7  # --run-0 is the method's, the others go to the baselines in turn

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "befit",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.family": ["sans-serif"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": TEXT,
    "text.color": TEXT,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "lines.linewidth": 1.8,
}


def run_ink(index: int) -> str:
    """The ink of run `index`, where 0 is the method."""
    return f"#0102{index if index < RUN_COLOURS else 1 + (index - 1) % (RUN_COLOURS - 1):02x}"


def draw(name: str, title: str, width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """Paint a figure and return it as an `<svg>` element.

    name           prefix of every id inside, unique on the page
    title          what the picture shows, for readers who do not see it
    width, height  in inches of 72 points; the element scales to the width of its parent
    paint          draws into an empty figure with constrained layout
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a reader's own matplotlibrc must not change the report
        matplotlib.rcParams.update(_STYLE)
        # The browser has glyphs that matplotlib's fonts lack; here they are only measured.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        warnings.filterwarnings("ignore", message=r".*Matplotlib currently does not support .* natively")
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return inline_svg(buffer.getvalue(), name, title)


def png(width: float, height: float, paint: Callable[[Figure], None]) -> bytes:
    """Paint a figure of so many inches and return it as a PNG file; `paint` must not use inks."""
    buffer = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
        paint(figure)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def inline_svg(document: str, name: str, title: str) -> str:
    """An SVG document as an element for a page: unique ids, inks as CSS variables, no prolog, metadata or fonts."""
    root = ET.fromstring(document)
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag.endswith("}metadata")]:
            parent.remove(child)
    for element in root.iter():
        _rewrite(element, name)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", title)
    ET.register_namespace("", _SVG[1:-1])
    return ET.tostring(root, encoding="unicode")


def _rewrite(element: ET.Element, name: str) -> None:
    link = element.attrib.pop(_LINK, None)
    if link is not None:
        element.set("href", link)
    for attribute, value in list(element.attrib.items()):
        if attribute == "id":
            value = f"{name}-{value}"
        elif attribute == "href":
            value = re.sub(r"^#", f"#{name}-", value)
        elif attribute == "style":
            value = re.sub(
                r"font: ([\d.]+px|bold [\d.]+px|[\d ]+[\d.]+px) [^;]*", r"font: \1 var(--sans)", _inked(value)
            )
        element.set(attribute, re.sub(r"url\(#", f"url(#{name}-", value))


def _inked(style: str) -> str:
    for ink, variable in _VARIABLES.items():
        style = style.replace(ink, variable)
    return re.sub(r"#0102([0-9a-f]{2})", lambda match: f"var(--run-{int(match[1], 16)})", style)
