"""Mixing weights as the methods report them: one number per client, or the range over groups of arrays."""

from __future__ import annotations

from befit.report.numbers import NOTHING, score_of
from befit.report.results import ClientRow, RunResults

__all__ = ["by_group", "weight_header", "weight_note", "weight_of", "weight_text", "weights_of"]

_MEANING = (
    "w is the weight of the federated adapter in a client's merged model: 1 is the federated adapter alone, 0 the "
    "client's own alone."
)
_GROUPS = (
    " Every group of arrays has its own weight here: shown is the range over the groups, from w_min to w_max. The one "
    "w among the diagnostics is used for the task head only."
)


def by_group(results: RunResults) -> bool:
    """Whether the groups of a client (layers, tensors, ...) have weights of their own, reported as w_min and w_max."""
    return any("w_min" in (row.get("diagnostics") or {}) for row in results["clients"].values())


def weight_of(row: ClientRow, grouped: bool) -> tuple[float, float] | None:
    """Least and largest weight that went into one client's merge, the same where there is one; None if not known."""
    diagnostics = row.get("diagnostics") or {}
    least, most = (score_of(diagnostics, name) for name in (("w_min", "w_max") if grouped else ("w", "w")))
    return None if least is None or most is None else (least, most)


def weights_of(results: RunResults) -> dict[str, tuple[float, float]]:
    """`weight_of` every client that has any."""
    grouped = by_group(results)
    weights = {client: weight_of(row, grouped) for client, row in results["clients"].items()}
    return {client: weight for client, weight in weights.items() if weight is not None}


def weight_header(results: RunResults) -> str:
    return f"w_min{NOTHING}w_max" if by_group(results) else "w"


def weight_text(weight: tuple[float, float] | None, grouped: bool) -> str:
    """
    >>> weight_text((0.704, 0.704), False), weight_text((0.1, 0.95), True), weight_text(None, True)
    ('0.70', '0.10–0.95', '–')
    """
    if weight is None:
        return NOTHING
    return f"{weight[0]:.2f}{NOTHING}{weight[1]:.2f}" if grouped else f"{weight[0]:.2f}"


def weight_note(results: RunResults) -> str:
    """What the plot and the column of weights show."""
    return _MEANING + (_GROUPS if by_group(results) else "")
