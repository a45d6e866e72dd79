"""The terminal: the one place through which everything for people goes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from befit.core.text import visible


class Screen(Console):
    """A console on which no text can act: names, labels and errors from files are shown with their control characters
    as escapes, while styles and progress work as ever."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
