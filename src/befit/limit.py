"""A few clients with a few records: to see that everything runs before the whole of it does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from befit.benchmarks.base import ClientData, Federation
from befit.benchmarks.streams import by_task
from befit.config import LimitSettings

__all__ = ["TRIAL", "limited"]

# What `--trial` changes: one round of one step, whatever a cell costs otherwise.
TRIAL = ("federation.rounds=1", "federation.cohort=null", "train.max_steps=1", "limit.clients=2", "limit.records=4",
         "limit.rounds=1",          "evaluate.max_new_tokens=8")  # fmt: skip
logger = logging.getLogger(__name__)
Record = TypeVar("Record", bound=Mapping[str, Any])


def limited(federation: Federation, limit: LimitSettings, families: Mapping[str, str]) -> Federation:
    """The federation cut to `limit`; the manifest says so, since its hash is of the whole.

    families  name of every client's and newcomer's family, of each of which the first clients are kept
    """
    if limit.clients is None and limit.records is None:
        return federation
    cut = {"clients": limit.clients, "records": limit.records}
    logger.warning("limit: %s clients of each family and %s records of each task; such numbers only show that it runs",
                   limit.clients or "all", limit.records or "all")  # fmt: skip
    return replace(
        federation,
        clients=tuple(_shorter(one, limit.records) for one in _first(federation.clients, limit.clients, families)),
        newcomers=tuple(_shorter(one, limit.records) for one in _first(federation.newcomers, limit.clients, families)),
        public=_some(federation.public, limit.records),
        manifest={**federation.manifest, "limit": cut},
    )


def _first(clients: Sequence[ClientData], most: int | None, families: Mapping[str, str]) -> list[ClientData]:
    kept: list[ClientData] = []
    counts: dict[str, int] = {}
    for client in clients:
        family = families[client.id]
        counts[family] = counts.get(family, 0) + 1
        if most is None or counts[family] <= most:
            kept.append(client)
    return kept


def _shorter(client: ClientData, most: int | None) -> ClientData:
    return replace(client, train=_some(client.train, most), val=_some(client.val, most), test=_some(client.test, most))


def _some(records: Sequence[Record], most: int | None) -> Sequence[Record]:
    """The first of each task, in their order."""
    if most is None:
        return records
    positions = sorted(place for places in by_task(records).values() for place in places[:most])
    return tuple(records[place] for place in positions)
