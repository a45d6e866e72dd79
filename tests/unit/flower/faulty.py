"""Flower's Grid without a network, on which sites drop out at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.unit.flower.test_simulation import SimulatedGrid

__all__ = ["FaultyGrid"]


class FaultyGrid(SimulatedGrid):
    """Sites of which a share is away in a round, or replies when nobody waits any more; drawn anew every round.

    fault  away, late or none
    """

    def __init__(self, config: Path, out: Path, sites: int, fault: str, seed: int, share: float = 0.3) -> None:
        super().__init__(config, out, sites)
        self._fault, self._random, self._share = fault, random.Random(seed), share
        self._late: set[int] = set()
        self.tamper = lambda reply, node: None if node in self._late else reply

    def draw(self, event: dict[str, Any]) -> None:
        """Who is away in the next round; at the end, when all are measured, nobody."""
        over = event["kind"] == "round" and event["round"] == event["rounds"]
        if event["kind"] not in ("run_started", "round") or self._fault == "none":
            return
        hit = set() if over else {node for node in self.sites if self._random.random() < self._share}
        hit = set() if hit == set(self.sites) else hit
        self.online = set(self.sites) - hit if self._fault == "away" else set(self.sites)
        self._late = hit if self._fault == "late" else set()
