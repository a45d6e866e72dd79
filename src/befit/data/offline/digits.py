"""`digits`: ten clients with label-skewed parts of scikit-learn's handwritten digits."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import DataError
from befit.data.federation import ClientData, Federation
from befit.data.partition import (
    Partition,
    dirichlet_shares,
    generator,
    iid,
    read_stored,
    redraw_until,
    shards,
    shares_as,
    split_by_shares,
    splits_hash,
    stored_text,
)
from befit.data.partition_sizes import classes_per_client, dirichlet_balanced, quantity
from befit.data.registry import benchmark

PUBLIC = 500  # file indices 0-499 train the backbone; the file roughly follows writers
SIZES = {"train": 500, "val": 150, "test": 647}
SOURCE = {"id": "sklearn.datasets.load_digits", "rows": 1797, "licence": "CC BY 4.0 (UCI)"}


Division = Literal["dirichlet", "balanced", "quantity", "iid", "classes", "shards"]


@benchmark(
    "digits",
    "1",
    summary="Handwritten digits, 8 x 8, ten clients with skewed labels; real data, ships with befit",
    default_model="digits-vit",
    task="image-classification",
)
def digits(
    clients: int = 10, alpha: float = 0.5, partition: Division = "dirichlet", classes: int = 2, seed: int = 0
) -> Federation:
    """Real digits of other writers than those the backbone was trained on, as far as the file's order tells.

    The public part is always the first 500 images, on which `digits-vit` was trained: with another public part its
    clients would hold images that their backbone has seen.

    clients    number of clients
    alpha      of the Dirichlet distribution of each class over clients, or of sizes; small is skewed
    partition  dirichlet; balanced: the same, with sizes that are nearly equal; quantity: sizes alone are skewed; iid;
               classes: so many for each client; shards: as many blocks of the sorted labels
    classes    of a client, for partition: classes and shards
    seed       of the split into train, val and test, and of the partition

    Every client has at least 20 training and 20 test images (10 with more than 12 clients), or there is an error.
    """
    images, labels = load()
    parts = shipped(clients, alpha, seed) if partition == "dirichlet" else None
    source = "shipped"
    if parts is None:
        parts, source = private_partition(labels, clients, alpha, partition, seed, classes), "generated"
    members: list[ClientData] = []
    for index in range(clients):
        train, val, test = (records(images, labels, parts[split][index]) for split in SIZES)
        members.append(ClientData(f"client-{index:02d}", train, val, test))
    arguments = {"clients": clients, "alpha": alpha, "partition": partition, "seed": seed}
    if partition in ("classes", "shards"):
        arguments["classes"] = classes
    manifest = {
        "sources": [SOURCE],
        "partition": {
            "name": partition,
            "args": arguments,
            "seed": seed,
            "indices": source,
            "sha256": splits_hash(parts),
        },
        "counts": {client.id: client.sizes for client in members},
    }
    return Federation(
        "digits",
        "1",
        "image-classification",
        tuple(members),
        label_names=tuple(map(str, range(10))),
        public=records(images, labels, np.arange(PUBLIC)),
        manifest=manifest,
    )


def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All images (1797, 8, 8) in [0, 1], and their labels.

    The same as `sklearn.datasets.load_digits`, from its file: importing scikit-learn takes over a second.
    """
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "scikit-learn is a requirement of befit"
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)
    return (table[:, :-1].reshape(-1, 8, 8) / 16).astype(np.float32), table[:, -1].copy()


def public_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The part that the backbone is trained on, which no client holds."""
    images, labels = load()
    return images[:PUBLIC], labels[:PUBLIC]


def records(
    images: NDArray[np.float32], labels: NDArray[np.int64], indices: NDArray[np.int64]
) -> tuple[dict[str, Any], ...]:
    return tuple({"id": f"digit-{i:04d}", "image": images[i], "label": int(labels[i])} for i in indices)


def private_partition(
    labels: NDArray[np.int64], clients: int, alpha: float, partition: Division, seed: int, classes: int = 2
) -> dict[str, Partition]:
    """Indices of every client in train, val and test. One draw of shares serves all three, but with shards and iid."""
    order = PUBLIC + generator(seed, "digits", "split").permutation(len(labels) - PUBLIC)
    ends = np.cumsum(list(SIZES.values()))[:-1]
    pools = dict(zip(SIZES, np.split(order, ends), strict=True))
    minimum = 20 if clients <= 12 else 10
    drawn: dict[str, Partition] = {}
    if partition != "dirichlet":
        training = labels[pools["train"]]
        first = divided(training, clients, alpha, partition, seed, classes, minimum, "train")
        for split, pool in pools.items():
            if split == "train":
                parts = first
            elif partition in ("shards", "iid"):
                parts = divided(labels[pool], clients, alpha, partition, seed, classes, minimum, split)
            else:
                parts = shares_as(training, first, labels[pool], generator(seed, "digits", split))
            drawn[split] = [pool[part] for part in parts]
        if (least := min(map(len, [*drawn["train"], *drawn["test"]]))) < minimum:
            raise DataError(
                f"digits: partition {partition} leaves a client {least} training or test images, and "
                f"{minimum} is the least; take fewer clients, another seed or more even parts"
            )
        return drawn

    def draw(rng: np.random.Generator) -> Partition:
        shares = dirichlet_shares(10, clients, alpha, rng)
        for split, pool in pools.items():
            drawn[split] = [pool[part] for part in split_by_shares(labels[pool], shares, rng)]
        return [*drawn["train"], *drawn["test"]]

    redraw_until(draw, lambda parts: min(map(len, parts)), minimum, seed, "digits", "shares")
    return drawn


def divided(
    labels: NDArray[np.int64],
    clients: int,
    alpha: float,
    partition: Division,
    seed: int,
    classes: int,
    minimum: int,
    stage: str,
) -> Partition:
    """Indices of every client by a rule other than plain Dirichlet."""
    if partition == "shards":
        return shards(labels, clients, classes, seed, "digits", stage)
    if partition == "iid":
        return iid(len(labels), clients, seed, "digits", stage)
    if partition == "classes":
        return classes_per_client(labels, clients, classes, seed, "digits", stage)
    if partition == "balanced":
        return dirichlet_balanced(labels, clients, alpha, seed, "digits", stage, minimum)
    sizes = quantity(len(labels), clients, alpha, minimum, seed, "digits")
    order = generator(seed, "digits", stage).permutation(len(labels))
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def shipped(clients: int, alpha: float, seed: int) -> dict[str, Partition] | None:
    """The index lists that ship with the package; None for other arguments."""
    path = files("befit.data.offline").joinpath("digits_partitions.json")
    return read_stored(path, f"clients={clients},alpha={float(alpha)},seed={seed}")


def write_shipped() -> str:
    """The content of digits_partitions.json, drawn again (a maintainer's command)."""
    _, labels = load()
    shipping = [(10, 0.5, seed) for seed in range(5)] + [(20, 0.5, 0), (3, 10.0, 0)]
    return stored_text(
        {
            f"clients={clients},alpha={alpha},seed={seed}": private_partition(labels, clients, alpha, "dirichlet", seed)
            for clients, alpha, seed in shipping
        }
    )


if __name__ == "__main__":
    from pathlib import Path

    from befit.core.storage import atomic_write

    atomic_write(Path(__file__).with_name("digits_partitions.json"), write_shipped().encode())
