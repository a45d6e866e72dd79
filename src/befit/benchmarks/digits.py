"""`digits`: ten clients with label-skewed parts of scikit-learn's handwritten digits (benchmark specification, 5.1)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from befit.benchmarks.base import ClientData, Federation
from befit.benchmarks.partition import (
    Partition,
    dirichlet_shares,
    generator,
    partition_hash,
    redraw_until,
    shards,
    split_by_shares,
)
from befit.benchmarks.registry import benchmark
from befit.errors import DataError

__all__ = ["digits", "private_partition", "public_digits"]

PUBLIC = 500  # file indices 0-499 train the backbone; the file roughly follows writers
SIZES = {"train": 500, "val": 150, "test": 647}


@benchmark(
    "digits",
    "1",
    summary="Handwritten digits, 8 x 8, ten clients with skewed labels; real data, ships with befit",
    default_model="digits-vit",
    task="image-classification",
)
def digits(
    clients: int = 10, alpha: float = 0.5, partition: Literal["dirichlet", "shards"] = "dirichlet", seed: int = 0
) -> Federation:
    """Real digits of other writers than those the backbone was trained on, as far as the file's order tells.

    The public part is always the first 500 images, on which `digits-vit` was trained: with another public part its
    clients would hold images that their backbone has seen.

    clients    number of clients
    alpha      of the Dirichlet distribution of each class over clients; small is skewed
    partition  dirichlet, or shards: two blocks of the sorted labels for each client
    seed       of the split into train, val and test, and of the partition

    Every client has at least 20 training and 20 test images (10 with more than 12 clients), or there is an error.
    """
    images, labels = load()
    parts = shipped(clients, alpha, seed) if partition == "dirichlet" else None
    source = "shipped"
    if parts is None:
        parts, source = private_partition(labels, clients, alpha, partition, seed), "generated"
    held: list[ClientData] = []
    for index in range(clients):
        train, val, test = (records(images, labels, parts[split][index]) for split in SIZES)
        held.append(ClientData(f"client-{index:02d}", train, val, test))
    arguments = {"clients": clients, "alpha": alpha, "partition": partition, "seed": seed}
    manifest = {
        "sources": [{"id": "sklearn.datasets.load_digits", "rows": len(labels), "licence": "CC BY 4.0 (UCI)"}],
        "partition": {"name": partition, "args": arguments, "seed": seed, "indices": source,
                      "sha256": partition_hash([part for split in SIZES for part in parts[split]])},
        "counts": {client.id: {split: len(getattr(client, split)) for split in SIZES} for client in held},
    }  # fmt: skip
    return Federation(
        "digits",
        "1",
        "image-classification",
        tuple(held),
        label_names=tuple(map(str, range(10))),
        public=records(images, labels, np.arange(PUBLIC)),
        manifest=manifest,
    )


def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All images (1797, 8, 8) in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return (found.images / 16).astype(np.float32), found.target.astype(np.int64)


def public_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The part that the backbone is trained on, which no client holds."""
    images, labels = load()
    return images[:PUBLIC], labels[:PUBLIC]


def records(
    images: NDArray[np.float32], labels: NDArray[np.int64], indices: NDArray[np.int64]
) -> tuple[dict[str, Any], ...]:
    return tuple({"id": f"digit-{i:04d}", "image": images[i], "label": int(labels[i])} for i in indices)


def private_partition(
    labels: NDArray[np.int64], clients: int, alpha: float, partition: str, seed: int
) -> dict[str, Partition]:
    """Indices of every client in train, val and test. With Dirichlet, one draw of shares serves all three."""
    order = PUBLIC + generator(seed, "digits", "split").permutation(len(labels) - PUBLIC)
    ends = np.cumsum(list(SIZES.values()))[:-1]
    pools = dict(zip(SIZES, np.split(order, ends), strict=True))
    minimum = 20 if clients <= 12 else 10
    if partition == "shards":
        made = {split: shards(labels[pool], clients, 2, seed, "digits", split) for split, pool in pools.items()}
        return {split: [pools[split][part] for part in parts] for split, parts in made.items()}

    drawn: dict[str, Partition] = {}

    def draw(rng: np.random.Generator) -> Partition:
        shares = dirichlet_shares(10, clients, alpha, rng)
        for split, pool in pools.items():
            drawn[split] = [pool[part] for part in split_by_shares(labels[pool], shares, rng)]
        return [*drawn["train"], *drawn["test"]]

    redraw_until(draw, lambda parts: min(map(len, parts)), minimum, seed, "digits", "shares")
    return drawn


def shipped(clients: int, alpha: float, seed: int) -> dict[str, Partition] | None:
    """The index lists that ship with the package, since NumPy may change what a seed draws; None for others."""
    stored = json.loads(files("befit.benchmarks").joinpath("digits_partitions.json").read_text())
    entry = stored.get(f"clients={clients},alpha={float(alpha)},seed={seed}")
    if entry is None:
        return None
    parts = {split: [np.array(part, dtype=np.int64) for part in entry["indices"][split]] for split in SIZES}
    if partition_hash([part for split in SIZES for part in parts[split]]) != entry["sha256"]:
        raise DataError("digits_partitions.json does not match its hash: the installation is damaged")
    return parts


def write_shipped() -> str:
    """The content of digits_partitions.json, drawn anew (a maintainer's command)."""
    _, labels = load()
    wanted = [(10, 0.5, seed) for seed in range(5)] + [(20, 0.5, 0), (3, 10.0, 0)]
    stored = {}
    for clients, alpha, seed in wanted:
        parts = private_partition(labels, clients, alpha, "dirichlet", seed)
        indices = {split: [[int(i) for i in part] for part in parts[split]] for split in SIZES}
        digest = partition_hash([part for split in SIZES for part in parts[split]])
        stored[f"clients={clients},alpha={alpha},seed={seed}"] = {"sha256": digest, "indices": indices}
    return json.dumps(stored, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    from befit.storage import atomic_write

    atomic_write(Path(__file__).with_name("digits_partitions.json"), write_shipped().encode())
