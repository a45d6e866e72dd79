"""How many clients of one process train as one: as the configuration says, or what the first rounds show."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Literal

from befit.adapters.model import AdaptedModel
from befit.core.values import Failure, Tick, Update
from befit.train.fleet import forget_most, most_at_once

MOST = {"cpu": 16, "cuda": 64}  # clients of a fleet that is chosen by measuring; more pays with tiny batches alone
SMALL = 50_000_000  # parameters of a backbone from which on no fleet is tried on a CPU: twice the largest measured
TRIALS = 4  # rounds of a stage that are compared, two of each kind; the one before them warms up
GAIN = 0.9  # of the time of one by one, below which a fleet is worth its rounding
_MEMORY = "memory"  # beside the stages
_LOG = logging.getLogger(__name__)


def largest(wanted: int | Literal["auto"], clients: int, device: str, parameters: int) -> int:
    """How many of so many clients there can be in a fleet, on a backbone of so many parameters."""
    if isinstance(wanted, int):
        return min(clients, wanted)
    return 1 if _is_never_faster(device, parameters) else min(clients, MOST[device])


def _is_never_faster(device: str, parameters: int) -> bool:
    return device == "cpu" and parameters >= SMALL


class Fleets:
    """The size of fleets, by stage.

    wanted  `engine.fleet`
    model   the first client's
    known   of each stage with `auto`: the rounds measured, seconds and clients of either kind, and the size once it is
            chosen; and how many can be at once, where more were too many. A part of a run's checkpoint, so that a
            resumed run goes on with the same sizes, on which roundings depend
    told    called with an event when a size is chosen, or is too large
    """

    def __init__(self, wanted: int | Literal["auto"], model: AdaptedModel, known: MutableMapping[str, Any]) -> None:
        self._wanted, self._known = wanted, known
        self._device, self._model = model.device.type, model
        self.told: Callable[[dict[str, Any]], None] = lambda event: None
        forget_most()

    def size(self, at: Tick) -> int:
        """How many clients at once now: a round of each kind in turn, until it is known which is faster."""
        return self._most(self._wished(at))

    def hold(self, at: Tick, most: int | None) -> None:
        """Have no more than `most` clients at once from the next round on, where there is such a limit."""
        if most is None or most >= self._most(most + 1):
            return
        self._known[_MEMORY] = {"most": most}
        self._tell(at, most, "more cannot train as one")

    def _wished(self, at: Tick) -> int:
        if isinstance(self._wanted, int):
            return self._wanted
        row = self._row(at)
        if "size" in row:
            return row["size"]
        if _is_never_faster(self._device, count := self._model.parameters_of_backbone):
            return self._choose(at, 1, f"its backbone has {count / 1e6:.1f} M parameters")
        return 1 if row["rounds"] % 2 else MOST[self._device]

    def watched(self, at: Tick, replies: Iterator[Update | Failure]) -> Iterator[Update | Failure]:
        """The replies of one round, whose time counts where it is not known yet what is faster."""
        if self._wanted != "auto" or "size" in self._row(at):
            yield from replies
            self.hold(at, most_at_once())
            return
        clients, seconds = 0, 0.0
        for reply in replies:
            clients += 1
            # On a CPU what else runs beside must not decide; a GPU's work is no processor's time.
            seconds += reply.cost.seconds if self._device == "cuda" else reply.cost.cpu_seconds
            yield reply
        self.hold(at, most_at_once())
        if clients > 1:  # of asynchronous rounds some are of one client, which tells nothing of fleets
            self._note(at, clients, seconds)

    def _most(self, wished: int) -> int:
        """As many clients at once as are wished for, or as there can be."""
        return min(wished, self._known.get(_MEMORY, {}).get("most", wished))

    def chosen(self) -> dict[str, int]:
        """By stage, the size that was chosen; nothing where none had to be."""
        return {stage: row["size"] for stage, row in self._known.items() if "size" in row}

    def _row(self, at: Tick) -> dict[str, Any]:
        return self._known.setdefault(at.stage, {"rounds": 0, "alone": [0.0, 0], "fleet": [0.0, 0]})

    def _note(self, at: Tick, clients: int, seconds: float) -> None:
        row, most = self._row(at), self._most(MOST[self._device])
        if most == 1:  # which has been told
            row["size"] = 1
            return
        if row["rounds"]:  # the first one warms up
            kind = row["alone" if row["rounds"] % 2 else "fleet"]
            kind[0] += seconds
            kind[1] += clients
        row["rounds"] += 1
        if row["rounds"] <= TRIALS:
            return
        alone, fleet = (row[kind][0] / max(1, row[kind][1]) for kind in ("alone", "fleet"))
        faster = fleet < GAIN * alone
        self._choose(at, most if faster else 1, f"{fleet:.3g} s a client in a fleet, {alone:.3g} s one by one")

    def _choose(self, at: Tick, size: int, why: str) -> int:
        self._row(at)["size"] = size
        self._tell(at, size, why)
        return size

    def _tell(self, at: Tick, size: int, why: str) -> None:
        words = "one by one" if size == 1 else f"up to {size} clients at once"
        _LOG.info("stage %s trains %s: %s", at.stage, words, why)
        self.told({"kind": "fleet", "stage": at.stage, "round": at.last, "size": size, "reason": why})
