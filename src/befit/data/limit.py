"""A run with few clients and few records, to see that everything works before the full run starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeVar

from befit.core.schema import POSITIVE
from befit.data.federation import SPLITS, ClientData, Federation
from befit.data.streams import by_task

# What `--trial` changes: every stage has one round of one step.
TRIAL = (
    "federation.rounds=1",
    "federation.cohort=null",
    "federation.min_replies=0.5",
    "train.max_steps=1",
    "train.epochs=null",
    "limit.clients=2",
    "limit.records=4",
    "limit.rounds=1",
    "evaluate.max_new_tokens=8",
    "report.plots=false",
)
_LOG = logging.getLogger(__name__)
Record = TypeVar("Record", bound=Mapping[str, Any])


@dataclass(frozen=True)
class LimitSettings:
    """Less data and fewer rounds, to see that everything works. Null sets no limit.

    clients  the first clients of each family, and as many newcomers
    records  the first records of each task, in each split of a client and among the public ones
    rounds   the most of any stage, also where the method sets the number of rounds
    """

    clients: Annotated[int | None, POSITIVE] = None
    records: Annotated[int | None, POSITIVE] = None
    rounds: Annotated[int | None, POSITIVE] = None


def trial_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of a trial, followed by the user's own; the user's number of rounds is kept.

    >>> trial_overrides(["federation.rounds=3"])[7:]
    ['limit.rounds=3', 'evaluate.max_new_tokens=8', 'report.plots=false', 'federation.rounds=3']
    """
    changes: dict[str, str] = {}
    for change in TRIAL:
        key, _, changes[key] = change.partition("=")
    for change in overrides:
        key, _, value = change.partition("=")
        if key == "federation.rounds":  # otherwise the limit of one round would silently win
            changes["limit.rounds"] = value
    return [*(f"{key}={value}" for key, value in changes.items()), *overrides]


def limit_sentence(limit: Mapping[str, Any]) -> str | None:
    """A sentence about a limit and what results under it mean; None where there is no limit.

    >>> limit_sentence({"clients": 2, "records": None, "rounds": 1})
    'Limited to 2 clients of each family and 1 round of each stage: such numbers only show that it runs.'
    """
    nouns = {"clients": "client", "records": "record", "rounds": "round"}
    of = {"clients": "family", "records": "task", "rounds": "stage"}
    parts = [
        f"{count} {noun}{'s' * (count != 1)} of each {of[key]}"
        for key, noun in nouns.items()
        if (count := limit.get(key)) is not None
    ]
    if not parts:
        return None
    *most, last = parts
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"Limited to {listed}: such numbers only show that it runs."


def limited(federation: Federation, limit: LimitSettings, families: Mapping[str, str]) -> Federation:
    """The federation cut to `limit`; the manifest says so, since its hash is of the whole.

    families  name of every client's and newcomer's family, of each of which the first clients are kept
    """
    if (sentence := limit_sentence(asdict(limit))) is not None:
        _LOG.warning("%s", sentence)
    if limit.clients is None and limit.records is None:
        return federation

    def cut(clients: Sequence[ClientData]) -> tuple[ClientData, ...]:
        return tuple(_cut_client(client, limit.records) for client in _first_clients(clients, limit.clients, families))

    return replace(
        federation,
        clients=cut(federation.clients),
        newcomers=cut(federation.newcomers),
        public=first_of_each_task(federation.public, limit.records),
        manifest={**federation.manifest, "limit": {"clients": limit.clients, "records": limit.records}},
    )


def _first_clients(clients: Sequence[ClientData], most: int | None, families: Mapping[str, str]) -> list[ClientData]:
    kept: list[ClientData] = []
    counts: dict[str, int] = {}
    for client in clients:
        family = families[client.id]
        counts[family] = counts.get(family, 0) + 1
        if most is None or counts[family] <= most:
            kept.append(client)
    return kept


def _cut_client(client: ClientData, most: int | None) -> ClientData:
    return replace(client, **{split: first_of_each_task(getattr(client, split), most) for split in SPLITS})


def first_of_each_task(records: Sequence[Record], most: int | None) -> Sequence[Record]:
    """The first of each task, in their order."""
    if most is None:
        return records
    positions = sorted(place for places in by_task(records).values() for place in places[:most])
    return tuple(records[place] for place in positions)
