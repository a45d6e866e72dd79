"""What a figure of an ablation shows, as plain values; `befit.report.ablation_plots` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """A curve, with a band from `low` to `high` where there is one. A `thin` one is one of many, without a name."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    ink: int = 0
    thin: bool = False
    marker: bool = True


@dataclass(frozen=True)
class Point:
    """A marked place; with `drop`, a line down to the axis."""

    label: str
    x: float
    y: float
    ink: int = 0
    shape: str = "o"
    drop: bool = False


@dataclass(frozen=True)
class Bars:
    """One bar for each group; NaN where there is none. `errors` are half the length of a whisker."""

    label: str
    heights: Sequence[float]
    errors: Sequence[float] = ()
    ink: int = 0


@dataclass(frozen=True)
class Panel:
    """One pair of axes: curves and points, or bars over `groups`.

    score  y is the metric: shares are drawn in percent, the axis has its name
    fits   y begins near the lowest bar, not at zero
    """

    title: str = ""
    lines: Sequence[Line] = ()
    points: Sequence[Point] = ()
    bars: Sequence[Bars] = ()
    groups: Sequence[str] = ()
    x: str = ""
    y: str = ""
    score: bool = False
    fits: bool = False
    log: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Figure:
    """Panels in rows of `columns`, with one legend."""

    title: str
    note: str
    panels: Sequence[Panel] = field(default_factory=tuple)
    columns: int = 1
    height: float = 3.6
    share_y: bool = False
