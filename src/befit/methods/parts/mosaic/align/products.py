"""Sums over a stream of rows from which products of centred matrices follow, without the matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

__all__ = ["CentredProducts"]


class CentredProducts:
    """`Xc^T Yc` of chosen pairs of named matrices X (n, d_x) and Y (n, d_y), from their rows, batch by batch.

    pairs  names (x, y); a name with itself gives its own `Xc^T Xc`

    Holds d_x d_y float64 numbers for every pair and no rows. Rows count from their first batch's mean, so that a
    common offset, which hidden states of language models have, costs no digits.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self._names = sorted({name for pair in pairs for name in pair})
        self._origin: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._products: dict[tuple[str, str], Tensor] = {}
        self.count = 0

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """One batch: for every name the same number of rows, at least one."""
        moved = {name: rows[name].double() for name in self._names}
        if not self._origin:
            self._origin = {name: X.mean(0) for name, X in moved.items()}
        moved = {name: X - self._origin[name] for name, X in moved.items()}
        self.count += len(next(iter(moved.values())))
        for name, X in moved.items():
            total = X.sum(0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for x, y in self._pairs:
            if (x, y) in self._products:
                self._products[x, y].addmm_(moved[x].T, moved[y])
            else:
                self._products[x, y] = moved[x].T @ moved[y]

    def norm(self, x: str, y: str) -> float:
        """`||Xc^T Yc||_F` over all rows so far."""
        product = self._products[x, y].addr(self._sums[x], self._sums[y], alpha=-1 / self.count)
        return float(product.norm())
