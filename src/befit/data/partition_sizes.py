"""Partitioners that decide how much a client holds: balanced Dirichlet, quantity skew and classes per client.

Balanced Dirichlet, `quantity` and classes per client of docs/benchmarks.md, Partitions. None of the four papers uses
the first; it is what other libraries call a Dirichlet partition.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import DataError
from befit.data.partition import Labels, Partition, generator, redraw_until


def dirichlet_balanced(
    labels: Labels, clients: int, alpha: float, seed: int, federation: str = "", stage: str = "train", minimum: int = 10
) -> Partition:
    """As `dirichlet_class`, class by class, but a client that holds n / K examples already gets none of the next class.

    Its share is 0 and the others' are renormalised, so no client exceeds n / K by more than one class. Drawn again
    until all have `minimum`. (Yurochkin et al. 2019.)
    """
    labels = np.asarray(labels)
    _check(len(labels), clients)
    if not alpha > 0:
        raise DataError(f"alpha must be positive, got {alpha}")

    def draw(rng: np.random.Generator) -> Partition:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(clients, alpha))
            shares *= [len(part) < len(labels) / clients for part in parts]
            if not shares.sum() > 0:  # with a tiny alpha all of a class may go to clients that are full
                shares = np.array([float(len(part) < len(labels) / clients) for part in parts])
            ends = np.floor(np.cumsum(shares / shares.sum()) * len(members)).astype(np.int64)
            # What rounding leaves over goes to the last client with room, never to one that is full.
            ends[np.flatnonzero(shares)[-1] :] = len(members)
            for client, block in enumerate(np.split(members, ends[:-1])):
                parts[client] += block.tolist()
        return [np.sort(np.array(part, dtype=np.int64)) for part in parts]

    return redraw_until(draw, lambda parts: min(map(len, parts)), minimum, seed, federation, stage)


def quantity(count: int, clients: int, beta: float, minimum: int, seed: int, federation: str = "") -> NDArray[np.int64]:
    """(clients,) sizes `minimum + Multinomial(count - clients * minimum, Dirichlet(beta 1))`, with the sum `count`.

    For shuffled records.
    """
    _check(count, clients)
    if not beta > 0:
        raise DataError(f"beta must be positive, got {beta}")
    if minimum < 0 or clients * minimum > count:
        raise DataError(f"{count} examples are too few for {clients} clients with {minimum} each")
    rng = generator(seed, federation, "sizes")
    shares = rng.dirichlet(np.full(clients, beta))
    return minimum + rng.multinomial(count - clients * minimum, shares).astype(np.int64)


def classes_per_client(
    labels: Labels, clients: int, classes: int, seed: int, federation: str = "", stage: str = "train"
) -> Partition:
    """Every client has examples of `classes` classes; a class is divided equally among those that have it.

    Classes are dealt in turns of all of them in random order, so each is held by as many clients as any other or one
    more. Raises DataError where no client would have a class, or a class has fewer examples than clients that share it.
    """
    labels = np.asarray(labels)
    _check(len(labels), clients)
    present = np.unique(labels)
    if not 1 <= classes <= len(present):
        raise DataError(f"a client can have 1 to {len(present)} classes, not {classes}")
    if clients * classes < len(present):
        raise DataError(f"{clients} clients with {classes} classes each leave some of {len(present)} classes to nobody")
    rng = generator(seed, federation, stage)
    holders: dict[int, list[int]] = {int(label): [] for label in present}
    for client in range(clients):
        # Those that fewest hold come first; among equals chance decides.
        order = sorted(rng.permutation(present).tolist(), key=lambda label: len(holders[label]))
        for label in order[:classes]:
            holders[label].append(client)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label, who in holders.items():
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < len(who):
            raise DataError(f"class {label} has {len(members)} examples for {len(who)} clients")
        for client, block in zip(who, np.array_split(members, len(who)), strict=True):
            parts[client] += block.tolist()
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def _check(count: int, clients: int) -> None:
    if clients < 1:
        raise DataError(f"a federation needs at least one client, got {clients}")
    if clients > count:
        raise DataError(f"{count} examples cannot be divided into {clients} parts")
