"""`cifar100-10` and `cifar100-20`: CIFAR-100 with skewed labels (Zou et al. 2026, Potara, Tables 2 and 8).

Read from Parquet, from `datasets` directories, or from the binary version of the data set; its Python version is made
of pickles, which befit does not read. All of them give the same clients: records are ordered by their pixels.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import DataError
from befit.core.schema import POSITIVE, between, variant
from befit.data.federation import SPLITS, ClientData, Federation
from befit.data.papers.assemble import assemble, content_hash, digest, source_entry
from befit.data.papers.source import Place, Source, read_split
from befit.data.partition import Partition, Rounding, dirichlet_shares, generator, redraw_until, split_by_shares
from befit.data.registry import benchmark

CIFAR = Source("uoft-cs/cifar100", "no explicit licence", config="cifar100", revision="aadb3af")
RECORD = 2 + 3 * 32 * 32  # bytes of a record of the binary version: coarse label, fine label, planes of R, G and B
_WORDS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
FINE_LABELS = tuple(_WORDS.split())
Pixels = NDArray[np.uint8]


def cifar100(
    root: str = "",
    hub: bool = False,
    alpha: Annotated[float, POSITIVE] = 0.5,
    rounding: Rounding = "remainder",
    val_fraction: Annotated[float, between(0, 1)] = 0.1,
    minimum_train: int = 50,
    minimum_test: int = 10,
    seed: int = 42,
    revisions: dict[str, str] | None = None,
    *,
    clients: int,
) -> Federation:
    """CIFAR-100 with its 100 fine labels; every class is divided by one draw of shares for train, val and test.

    root           directory with the Parquet files, a `datasets` directory, or train.bin and test.bin
    hub            load uoft-cs/cifar100 from the hub instead
    alpha          of the Dirichlet distribution of each class over clients; the paper's is not published
    rounding       remainder, or cumfloor: floors of cumulative sums
    val_fraction   share of the training images held out for validation before they are divided
    minimum_train  fewest training images of a client; drawn again until all have them
    minimum_test   fewest test images of a client
    seed           of the partition
    revisions      hub id to the commit that is wanted
    """
    arguments = {
        "alpha": alpha,
        "rounding": rounding,
        "val_fraction": val_fraction,
        "minimum_train": minimum_train,
        "minimum_test": minimum_test,
        "seed": seed,
    }
    name = f"cifar100-{clients}"
    place = Place(name, root, hub, revisions)
    place.check([CIFAR])
    images, labels, entries = {}, {}, []
    for split in ("train", "test"):
        pixels, classes = read(place, split)
        keys = [digest([image.tobytes(), int(label)]) for image, label in zip(pixels, classes, strict=True)]
        order = np.argsort(np.array(keys))
        images[split], labels[split] = pixels[order], classes[order]
        entries.append(source_entry(place, CIFAR, split, len(classes), content_hash(keys)))
    pools = {"train": np.arange(len(labels["train"])), "val": np.arange(0), "test": np.arange(len(labels["test"]))}
    if val_fraction:
        count = max(5, round(val_fraction * len(labels["train"])))
        order = generator(seed, name, "val").permutation(len(labels["train"]))
        pools |= {"val": np.sort(order[:count]), "train": np.sort(order[count:])}
    parts = divide(name, clients, labels, pools, arguments)
    federation = []
    for client in range(clients):
        train, val, test = (records(images, labels, split, parts[split][client]) for split in SPLITS)
        federation.append(ClientData(f"client-{client:02d}", train, val, test))
    return assemble(
        name, federation, partition="dirichlet_class", arguments=arguments, sources=entries, label_names=FINE_LABELS
    )


for _clients, _words in ((10, "ten"), (20, "twenty")):
    benchmark(
        f"cifar100-{_clients}",
        "1",
        summary=f"CIFAR-100, {_words} clients with skewed labels (Potara); needs the data",
        default_model="google/vit-base-patch16-224-in21k",
        task="image-classification",
        seeded=False,
    )(variant(cifar100, clients=_clients))


def divide(
    name: str,
    clients: int,
    labels: dict[str, NDArray[np.int64]],
    pools: dict[str, NDArray[np.int64]],
    arguments: dict[str, Any],
) -> dict[str, Partition]:
    """Indices of every client in each split, by one draw of shares."""
    drawn: dict[str, Partition] = {}
    if missing := sorted(set(labels["test"].tolist()) - set(labels["train"][pools["train"]].tolist())):
        raise DataError(
            f"{name}: {', '.join(FINE_LABELS[label] for label in missing[:5])} is in the test split and not "
            "in the training split"
        )

    def draw(rng: np.random.Generator) -> Partition:
        shares = dirichlet_shares(len(FINE_LABELS), clients, arguments["alpha"], rng)
        for split, pool in pools.items():
            classes = labels[home(split)][pool]
            parts = split_by_shares(classes, shares, rng, arguments["rounding"]) if len(pool) else [pool] * clients
            drawn[split] = [pool[part] for part in parts]
        return drawn["train"]

    def slack(parts: Partition) -> int:
        """Images of the worst client beyond what it needs."""
        return min(
            min(map(len, parts)) - arguments["minimum_train"], min(map(len, drawn["test"])) - arguments["minimum_test"]
        )

    try:
        redraw_until(draw, slack, 0, arguments["seed"], name, "shares")
    except DataError as error:
        raise DataError(
            f"{name}: no partition in 1,000 attempts gives every client {arguments['minimum_train']} "
            f"training and {arguments['minimum_test']} test images; use a larger alpha, fewer clients or "
            "smaller minimum_train and minimum_test"
        ) from error
    return drawn


def home(split: str) -> str:
    return "test" if split == "test" else "train"


def records(
    images: dict[str, Pixels], labels: dict[str, NDArray[np.int64]], split: str, indices: NDArray[np.int64]
) -> tuple[dict[str, Any], ...]:
    pixels, classes = images[home(split)], labels[home(split)]
    return tuple({"id": f"{home(split)}-{i:05d}", "image": pixels[i], "label": int(classes[i])} for i in indices)


def read(place: Place, split: str) -> tuple[Pixels, NDArray[np.int64]]:
    """All images (n, 32, 32, 3) and fine labels (n,) of a split."""
    if not place.hub and (binary := binary_file(place.folder(CIFAR), split)):
        return read_binary(binary)
    rows = read_split(place, CIFAR, split, ("img", "fine_label"))
    wrong = [
        row for row in rows if type(row.values["fine_label"]) is not int or not 0 <= row.values["fine_label"] < 100
    ]
    if wrong:
        raise DataError(f"{wrong[0].where}: fine_label must be 0 to 99, got {wrong[0].values['fine_label']!r}")
    pixels = np.stack([decoded(row.values["img"], row.where) for row in rows])
    return pixels, np.array([row.values["fine_label"] for row in rows], dtype=np.int64)


def binary_file(folder: Path, split: str) -> Path | None:
    places = (folder / f"{split}.bin", folder / "cifar-100-binary" / f"{split}.bin")
    return next((path for path in places if path.is_file()), None)


def read_binary(path: Path) -> tuple[Pixels, NDArray[np.int64]]:
    data = np.fromfile(path, dtype=np.uint8)
    if not len(data) or len(data) % RECORD:
        raise DataError(f"{path} has {len(data)} bytes, which is no number of records of {RECORD}")
    table = data.reshape(-1, RECORD)
    if (largest := int(table[:, 1].max())) >= 100:
        raise DataError(f"{path} has a fine label {largest}; CIFAR-100 has 0 to 99")
    pixels = table[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), table[:, 1].astype(np.int64)


def decoded(image: Any, where: str) -> Pixels:
    """(32, 32, 3) of an encoded picture as Parquet files hold it."""
    from PIL import Image, UnidentifiedImageError

    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        raise DataError(f"{where}: img must be {{bytes, path}} with the encoded picture, got {type(image).__name__}")
    try:
        with Image.open(io.BytesIO(data)) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{where}: img is no picture: {error}") from error
    if pixels.shape != (32, 32, 3):
        raise DataError(f"{where}: img has shape {pixels.shape}, CIFAR-100's is (32, 32, 3)")
    return pixels
