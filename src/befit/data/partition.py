"""How records become clients: functions of labels and a seed, the same on every machine with one NumPy.

A partition is a list of index arrays, one per client; every index is in exactly one of them. What each rule is and who
uses it: docs/benchmarks.md, Partitions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import DataError

Labels = Sequence[int] | NDArray[np.integer]
Partition = list[NDArray[np.int64]]
Rounding = Literal["remainder", "cumfloor"]
_ATTEMPTS = 1000


def generator(seed: int, federation: str, stage: str, attempt: int = 0) -> np.random.Generator:
    """The only source of randomness of a partition: no global state, a stream of its own for every purpose."""
    if seed < 0:
        raise DataError(f"a seed must be 0 or more, got {seed}")
    entropy = [seed, crc32(federation.encode()), crc32(stage.encode()), attempt]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def partition_hash(partition: Sequence[Sequence[int] | NDArray[np.integer]]) -> str:
    """SHA-256 of the index lists, as they are written in JSON."""
    plain = [[int(index) for index in indices] for indices in partition]
    return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()


def read_stored(path: Traversable, key: str) -> dict[str, Partition] | None:
    """The index lists by split that ship under `key` in a file of `stored_text`; None where there are none.

    They ship since NumPy may change what a seed draws. Raises DataError where a list differs from its hash.
    """
    entry = json.loads(path.read_text()).get(key)
    if entry is None:
        return None
    parts = {split: [np.array(part, dtype=np.int64) for part in lists] for split, lists in entry["indices"].items()}
    if splits_hash(parts) != entry["sha256"]:
        raise DataError(f"{path.name} does not match its hash: the installation is damaged")
    return parts


def stored_text(partitions: Mapping[str, Mapping[str, Partition]]) -> str:
    """The content of a file for `read_stored`: the index lists by key and split."""
    stored = {
        key: {
            "sha256": splits_hash(parts),
            "indices": {split: [part.tolist() for part in lists] for split, lists in parts.items()},
        }
        for key, parts in partitions.items()
    }
    return json.dumps(stored, separators=(",", ":")) + "\n"


def splits_hash(parts: Mapping[str, Partition]) -> str:
    """`partition_hash` of the clients' lists of every split, one split after the other."""
    return partition_hash([part for lists in parts.values() for part in lists])


def dirichlet_shares(classes: int, clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """(classes, clients): for each class the share of every client, `s_c ~ Dirichlet(alpha 1)`."""
    _check(clients, alpha)
    return rng.dirichlet(np.full(clients, alpha), size=classes)


def split_by_shares(
    labels: Labels, shares: NDArray[np.float64], rng: np.random.Generator, rounding: Rounding = "remainder"
) -> Partition:
    """Deal every class by its row of `shares`: whole counts, consecutive blocks of the shuffled class.

    rounding  remainder: the largest fractions are rounded up; cumfloor: floors of cumulative sums, as is common
              elsewhere, which gives what is left over to later clients
    """
    labels = np.asarray(labels)
    if rounding not in ("remainder", "cumfloor"):
        raise DataError(f"rounding {rounding!r} is not one of remainder, cumfloor")
    if len(labels) and labels.max() >= len(shares):
        raise DataError(f"class {labels.max()} has no share; there are shares of {len(shares)} classes")
    count = _largest_remainder if rounding == "remainder" else _cumulative_floor
    clients = shares.shape[1]
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(count(len(members), shares[label]))
        for client, block in enumerate(np.split(members, ends[:-1])):
            parts[client].append(block)
    return [np.sort(np.concatenate(blocks)).astype(np.int64) for blocks in parts]


def shares_as(
    dealt: Labels, parts: Sequence[NDArray[np.integer]], labels: Labels, rng: np.random.Generator
) -> Partition:
    """Deal other examples of the same classes as these are: of every class the clients' shares are what they are there.

    dealt, parts  labels of the examples that are dealt already, and which of them each client has
    """
    dealt = np.asarray(dealt)
    counts = np.stack([np.bincount(dealt[part], minlength=int(dealt.max()) + 1) for part in parts], axis=1)
    totals = counts.sum(1, keepdims=True)
    shares = np.where(totals > 0, counts / np.maximum(totals, 1), 1 / len(parts))
    return split_by_shares(labels, shares, rng)


def _largest_remainder(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers that add up to `total` and are nearest to `total * shares`; ties go to the lower index."""
    exact = total * shares
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def _cumulative_floor(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    ends = np.floor(np.cumsum(shares) * total).astype(np.int64)
    ends[-1] = total
    return np.diff(ends, prepend=0)


def dirichlet_class(
    labels: Labels,
    clients: int,
    alpha: float,
    seed: int,
    federation: str = "",
    minimum: int = 10,
) -> Partition:
    """Per class, shares of the clients are Dirichlet(alpha). Sizes vary; drawn again until all have `minimum`.

    For splits that share one draw, use `dirichlet_shares` and `split_by_shares` inside one `redraw_until`.
    """
    _check(clients, alpha)
    _check_size(len(labels), clients)
    classes = int(np.max(labels)) + 1

    def draw(rng: np.random.Generator) -> Partition:
        return split_by_shares(labels, dirichlet_shares(classes, clients, alpha, rng), rng)

    return redraw_until(draw, lambda parts: min(map(len, parts)), minimum, seed, federation, "train")


def lda_equal(
    labels: Labels,
    clients: int,
    alpha_per_class: float,
    seed: int,
    federation: str = "",
    stage: str = "train",
    mixtures: NDArray[np.float64] | None = None,
) -> Partition:
    """Equal sizes, client k draws classes from its own `q_k ~ Dirichlet(alpha 1)` until it is full.

    mixtures  (clients, classes) uses given q_k, for a test set of the same mix

    Exhausted classes are left out and the rest renormalised (with 1e-5 added), so late clients get leftovers.
    Hsu et al. 2019 scale a prior that adds up to 1, FedP2EFT does not: see docs/benchmarks.md, Partitions.
    """
    labels = np.asarray(labels)
    _check(clients, alpha_per_class)
    _check_size(len(labels), clients)
    classes = int(labels.max()) + 1 if mixtures is None else mixtures.shape[1]
    if labels.max() >= classes:
        raise DataError(f"class {labels.max()} of {federation} {stage} has no share in mixtures of {classes} classes")
    rng = generator(seed, federation, stage)
    if mixtures is None:
        mixtures = lda_mixtures(clients, classes, alpha_per_class, seed, federation)
    sizes = [len(labels) // clients + (client < len(labels) % clients) for client in range(clients)]
    pools = [list(rng.permutation(np.flatnonzero(labels == label))) for label in range(classes)]
    parts: Partition = []
    for client, size in enumerate(sizes):
        drawn = []
        for _ in range(size):
            open_ = np.array([bool(pool) for pool in pools])
            weights = (mixtures[client] + 1e-5) * open_
            label = int(rng.choice(classes, p=weights / weights.sum()))
            drawn.append(pools[label].pop())
        parts.append(np.sort(np.array(drawn, dtype=np.int64)))
    return parts


def lda_mixtures(clients: int, classes: int, alpha_per_class: float, seed: int, federation: str) -> NDArray[np.float64]:
    """(clients, classes): the class mixture of every client."""
    return generator(seed, federation, "mixtures").dirichlet(np.full(classes, alpha_per_class), size=clients)


def shards(
    labels: Labels, clients: int, per_client: int, seed: int, federation: str = "", stage: str = "train"
) -> Partition:
    """Sort by label, cut into `clients * per_client` equal shards, deal `per_client` to each."""
    labels = np.asarray(labels)
    _check_size(len(labels), clients * per_client)
    rng = generator(seed, federation, stage)
    shuffled = rng.permutation(len(labels))
    pieces = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], clients * per_client)
    dealt = rng.permutation(len(pieces)).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[piece] for piece in of_client])).astype(np.int64) for of_client in dealt]


def iid(count: int, clients: int, seed: int, federation: str = "", stage: str = "train") -> Partition:
    """Equal parts at random."""
    _check_size(count, clients)
    order = generator(seed, federation, stage).permutation(count)
    return [np.sort(part).astype(np.int64) for part in np.array_split(order, clients)]


def natural(groups: Sequence[str], minimum: int = 1) -> tuple[dict[str, NDArray[np.int64]], list[int]]:
    """One client per value of a column, in order of first appearance, and the indices of groups that are too small."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    parts = {group: np.array(indices, np.int64) for group, indices in members.items() if len(indices) >= minimum}
    return parts, sorted(index for group, indices in members.items() if group not in parts for index in indices)


def redraw_until(
    draw: Callable[[np.random.Generator], Partition],
    size: Callable[[Partition], int],
    minimum: int,
    seed: int,
    federation: str,
    stage: str,
) -> Partition:
    """Draw with attempt 0, 1, … until `size` of the result is at least `minimum`. Raises DataError after 1,000, and
    after one where no other can have that, for want of examples."""
    best = -1
    for attempt in range(_ATTEMPTS):
        parts = draw(generator(seed, federation, stage, attempt))
        smallest = size(parts)
        if smallest >= minimum:
            return parts
        best = max(best, smallest)
        if (examples := sum(map(len, parts))) < minimum * len(parts):
            raise DataError(
                f"the {examples} examples of {federation} are too few for {len(parts)} parts of {minimum}. Use fewer "
                "clients or a smaller minimum"
            )
    raise DataError(
        f"no partition of {federation} in {_ATTEMPTS} attempts gives every client {minimum} examples; the "
        f"best had {best}. Use a larger alpha, fewer clients or a smaller minimum"
    )


def _check(clients: int, alpha: float) -> None:
    if clients < 1:
        raise DataError(f"a federation needs at least one client, got {clients}")
    if not alpha > 0:
        raise DataError(f"alpha must be positive, got {alpha}")


def _check_size(count: int, parts: int) -> None:
    if parts < 1 or parts > count:
        raise DataError(f"{count} examples cannot be divided into {parts} parts")
