"""Shamir's secret sharing of 32 bytes (Shamir 1979), over the integers modulo a prime above 2^256."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
SHARE = 33  # bytes


def share(secret: bytes, places: Sequence[int], threshold: int) -> dict[int, bytes]:
    """A share for each place, which is a positive number: any `threshold` of them give the secret, fewer say nothing.

    The secret is the value at 0 of a polynomial of degree `threshold - 1` whose other coefficients are random.
    """
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares: dict[int, bytes] = {}
    for place in places:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares[place] = value.to_bytes(SHARE, "big")
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret from as many shares as the threshold. Wrong or too few shares give other bytes, or OverflowError."""
    places = tuple(sorted(shares))
    values = (int.from_bytes(shares[place], "big") for place in places)
    total = sum(factor * value for factor, value in zip(_at_zero(places), values, strict=True))
    return (total % PRIME).to_bytes(32, "big")


@lru_cache(maxsize=1024)
def _at_zero(places: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's coefficients for the value at 0. Remembered: the same sites mostly hold shares of many."""
    factors: list[int] = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
