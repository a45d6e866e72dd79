"""`scanners`: ten sites read handwritten digits, each with a scanner whose pictures look different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE, at_least, show
from befit.data.federation import ClientData, Federation
from befit.data.offline.digits import PUBLIC, SOURCE, load, records
from befit.data.partition import Partition, generator, lda_equal, splits_hash
from befit.data.registry import benchmark

Images = NDArray[np.float32]  # (images, 8, 8), 0 to 1


def _noisy(images: Images, rng: np.random.Generator) -> Images:
    shifted = np.roll(images, 1, axis=2)
    return np.clip(shifted + 0.25 * rng.standard_normal(images.shape), 0, 1).astype(np.float32)


LOOKS: dict[str, Callable[[Images, np.random.Generator], Images]] = {
    "plain": lambda images, _: images,
    "inverted": lambda images, _: 1 - images,
    "turned-90": lambda images, _: np.rot90(images, 1, (1, 2)),
    "mirrored": lambda images, _: images[:, :, ::-1],
    "noisy": _noisy,
    "transposed": lambda images, _: images.transpose(0, 2, 1),
    "turned-180": lambda images, _: np.rot90(images, 2, (1, 2)),
    "mirrored-inverted": lambda images, _: 1 - images[:, :, ::-1],
    "faint": lambda images, _: np.float32(0.3) + np.float32(0.4) * (images - np.float32(0.3)),
    "turned-270": lambda images, _: np.rot90(images, 3, (1, 2)),
}


@benchmark(
    "scanners",
    "1",
    summary="Handwritten digits, 8 x 8, few at each site, whose scanners differ in look; real data, ships with befit",
    default_model="digits-vit-augmented",
    task="image-classification",
)
def scanners(
    clients: int = 10,
    looks: tuple[str, ...] = ("turned-90", "inverted"),
    train: Annotated[int, POSITIVE] = 30,
    val: Annotated[int, at_least(0)] = 15,
    alpha: float = 1.0,
    seed: int = 0,
) -> Federation:
    """Sites that can help each other and still differ: the same ten digits, some sites' pictures inverted or turned.

    The backbone is trained on the first 500 images of the file, which no site holds.

    clients  number of sites
    looks    of the scanners, which sites have in turn: plain, inverted, turned-90, turned-180, turned-270, mirrored,
             mirrored-inverted, transposed, noisy (moved by a pixel, noise of 0.25) or faint (contrast of 0.4)
    train    training images of each site
    val      validation images of each site; all other images of a site are test images
    alpha    of the Dirichlet distribution of a site's classes; small is skewed
    seed     of the partition and of the noise
    """
    images, labels = load()
    size = (len(labels) - PUBLIC) // max(1, clients)
    problems = [f"looks: {show(look)} is none of {', '.join(LOOKS)}" for look in looks if look not in LOOKS]
    problems += ["looks: name at least one"] * (not looks)
    if not problems and size - train - val < 10:
        problems.append(
            f"train: {clients} sites have {size} images each, of which {train} for training and {val} for validation "
            "leave fewer than 10 test images; take fewer"
        )
    if problems:
        raise ConfigError(problems, "the benchmark scanners")
    parts = _divided(labels, clients, train, val, alpha, seed)
    noise = generator(seed, "scanners", "noise")
    seen = {look: LOOKS[look](images, noise) for look in looks}
    members: list[ClientData] = []
    for index in range(clients):
        look = looks[index % len(looks)]
        splits = (records(seen[look], labels, parts[split][index]) for split in ("train", "val", "test"))
        members.append(ClientData(f"site-{index:02d}", *splits, info={"scanner": look}))
    arguments = {"clients": clients, "looks": list(looks), "train": train, "val": val, "alpha": alpha, "seed": seed}
    partition = {"name": "dirichlet", "args": arguments, "seed": seed, "indices": "generated"}
    return Federation(
        "scanners",
        "1",
        "image-classification",
        tuple(members),
        label_names=tuple(map(str, range(10))),
        public=records(images, labels, np.arange(PUBLIC)),
        manifest={
            "sources": [SOURCE],
            "partition": {**partition, "sha256": splits_hash(parts)},
            "counts": {client.id: client.sizes for client in members},
        },
    )


def _divided(
    labels: NDArray[np.int64], clients: int, train: int, val: int, alpha: float, seed: int
) -> dict[str, Partition]:
    """Indices of every site in train, val and test: an equal number of images each, in an order of its own."""
    whole = lda_equal(labels[PUBLIC:], clients, alpha, seed, "scanners")
    parts: dict[str, Partition] = {"train": [], "val": [], "test": []}
    for client, indices in enumerate(whole):
        order = PUBLIC + generator(seed, "scanners", f"splits of {client}").permutation(indices)
        for split, chosen in zip(parts, np.split(order, [train, train + val]), strict=True):
            parts[split].append(np.sort(chosen))
    return parts
