"""Rows that lie in one place, divided over clients: by a column, or at random for a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from befit.core.errors import DataError, listed, map_all
from befit.core.names import id_problems
from befit.core.schema import POSITIVE, at_least
from befit.data.files.readers import Row, few
from befit.data.files.records import is_missing, name_of
from befit.data.partition import Partition, dirichlet_class, generator, iid, shares_as

Rows = dict[str, list[Row]]


@dataclass(frozen=True)
class PartitionSettings:
    """How records that lie in one place are divided over clients: by a column, or at random over so many clients.

    by       the column that says whose a record is, such as hospital
    clients  how many clients to make up, for a simulation, drawn by federation.seed
    alpha    with clients: every class is dealt in shares drawn from Dirichlet(alpha), so that 0.1 makes clients very
             different and 100 alike; null: all alike
    """

    by: str | None = None
    clients: Annotated[int | None, at_least(2)] = None
    alpha: Annotated[float | None, POSITIVE] = None

    def problems(self, has_classes: bool) -> list[str]:
        """What of it cannot work together."""
        problems: list[str] = []
        if (self.by is None) == (self.clients is None):
            problems.append("data.partition: give by, the column that says whose a record is, or clients, a number")
        if self.alpha is not None and (self.clients is None or not has_classes):
            problems.append("data.partition.alpha: deals the classes of a task that has some to data.partition.clients")
        return problems


def divided(
    rows: Rows,
    partition: PartitionSettings,
    label: str,
    seed: int,
    newcomers: Collection[str],
    group: str | None = None,
) -> dict[str, Rows]:
    """Everybody's rows as each client's, in the order of the clients' names.

    label  the column of the class, for `alpha`
    group  the column of what stays together, such as a patient

    Raises DataError for a row of nobody and for clients without training records.
    """
    parts = (
        _by_column(rows, partition.by) if partition.by is not None else _at_random(rows, partition, label, seed, group)
    )
    if group is not None and partition.alpha is not None:
        raise DataError("data.partition.alpha: deals records by class, and data.columns.group keeps some together")
    problems = id_problems([*parts, *newcomers])
    problems += [f"newcomer {name}: there is a client of this name" for name in newcomers if name in parts]
    problems += [f"client {name}: has no training records" for name, splits in parts.items() if not splits["train"]]
    if problems:
        raise DataError(listed([f"data.partition: {problem}" for problem in problems]))
    return {name: parts[name] for name in sorted(parts)}


def _by_column(rows: Rows, column: str) -> dict[str, Rows]:
    def owner(row: Row) -> str:
        if column not in row.fields:
            raise DataError(f"{row.where}: there is no {column} (data.partition.by); the columns are {few(row.fields)}")
        return name_of(row, "client", column)

    by_client: dict[str, Rows] = {}
    for split, some in rows.items():
        for name, row in zip(map_all(owner, some), some, strict=True):
            by_client.setdefault(name, {"train": []}).setdefault(split, []).append(row)
    return by_client


def _of_groups(rows: Rows, group: str, count: int, seed: int) -> dict[str, Partition]:
    """Whole groups, such as patients, to one client each, who has them in every split; the largest first, each to the
    client that has the fewest records."""
    named = {split: [_group_of(row, group) for row in some] for split, some in rows.items()}
    sizes = Counter(name for some in named.values() for name in some)
    names = sorted(sizes)
    order = [names[at] for at in generator(seed, "files", "groups").permutation(len(names))]
    owner, held = dict[str, int](), [0] * count
    for name in sorted(order, key=lambda name: -sizes[name]):
        owner[name] = held.index(min(held))
        held[owner[name]] += sizes[name]
    owners = {split: np.array([owner[name] for name in some]) for split, some in named.items()}
    return {split: [np.flatnonzero(of == client) for client in range(count)] for split, of in owners.items()}


def _group_of(row: Row, column: str) -> str:
    """The name of a row's group; empty for those without, which `items_of` refuses or leaves out."""
    return "" if is_missing(row.values.get(column)) else name_of(row, "group", column)


def _at_random(rows: Rows, partition: PartitionSettings, label: str, seed: int, group: str | None) -> dict[str, Rows]:
    """Other splits are dealt as training is: each class in the same shares."""
    count, alpha, train = partition.clients or 0, partition.alpha, rows["train"]
    if len(train) < count:
        there = f"{len(train)} training record{'s' * (len(train) != 1)}"
        raise DataError(f"data.partition.clients: {there} cannot be dealt to {count} clients; give fewer clients")
    numbers: dict[str, int] = {}
    labels = {
        split: [numbers.setdefault(str(row.values.get(label)), len(numbers)) for row in some]
        for split, some in rows.items()
    }
    fewest = max(1, min(10, len(train) // (4 * count)))
    parts: dict[str, Partition]
    if group is not None:
        parts = _of_groups(rows, group, count, seed)
    elif alpha is None:
        parts = {split: iid(len(some), count, seed, "files", split) for split, some in rows.items()}
    else:
        training = labels.pop("train")
        parts = {"train": dirichlet_class(training, count, alpha, seed, "files", minimum=fewest)}
        parts |= {
            split: shares_as(training, parts["train"], some, generator(seed, "files", split))
            for split, some in labels.items()
        }
    width = len(str(count - 1))
    return {
        f"client-{at:0{max(2, width)}}": {split: [rows[split][i] for i in parts[split][at]] for split in rows}
        for at in range(count)
    }
