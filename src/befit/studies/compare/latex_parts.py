"""The parts that LaTeX tables are made of: escaped lines, numbers with their spread, and the table around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from befit.report.numbers import NOTHING, is_share, plain, score_text
from befit.studies.compare.summary import limit_of

__all__ = ["escape_latex", "latex_line", "latex_spread", "latex_table", "seeds_text", "unit_text"]

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\N{EN DASH}": "--",
    "\N{MINUS SIGN}": "$-$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "<": "$<$",
    ">": "$>$",
}


def escape_latex(text: str) -> str:
    """
    >>> print(escape_latex("A & B_1: 50% · x"))
    A \\& B\\_1: 50\\% $\\cdot$ x
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in plain(text))


def latex_table(columns: str, headers: Sequence[str], body: Sequence[str], caption: str, name: str) -> str:
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *headers,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{_capped(caption)}.}}",
            rf"\label{{tab:{name}}}",
            r"\end{table}",
        ]
    )


def _capped(caption: str) -> str:
    return caption.rstrip(".")


def latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def unit_text(results: Mapping[str, Any]) -> str:
    name = escape_latex(results["metric"].replace("_", " "))
    return name[:1].upper() + name[1:] + (r" (\%)" if is_share(results["metric"]) else "")


def seeds_text(results: Mapping[str, Any]) -> str:
    count = len(results["seeds"])
    part = ", of a trial on part of the whole that means nothing" if limit_of(results) else ""
    return (rf"mean $\pm$ SD over {count} seeds" if count > 1 else "one seed") + part


def latex_spread(value: Mapping[str, Any] | None, metric: str, bold: bool) -> str:
    """A mean with its SD, shares in percent without the sign."""
    if value is None:
        return "--"
    mean = score_text(value["mean"], metric).rstrip("%").replace(NOTHING, "--")
    text = rf"\textbf{{{mean}}}" if bold else mean
    if value["sd"] is None:
        return text
    sd = f"{100 * value['sd']:.1f}" if is_share(metric) else f"{value['sd']:.2g}"
    return rf"{text} $\pm$ {sd}"
