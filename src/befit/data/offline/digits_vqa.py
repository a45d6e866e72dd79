"""`digits-vqa`: questions about images, clients with streams of tasks; docs/digits-vqa.md."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import ConfigError
from befit.data.federation import ClientData, Federation, Record
from befit.data.offline.digits import SOURCE, load
from befit.data.offline.digits_vqa_tasks import (
    NEWCOMER_TASKS,
    QUESTIONS,
    SMALL,
    STREAMS,
    Pool,
    generated_records,
    task_records,
)
from befit.data.partition import partition_hash
from befit.data.registry import benchmark

BLOCKS = {"public": range(500), "train": range(500, 1150), "test": range(1150, 1797)}  # indices in the file
PUBLIC = 2000
PUBLIC_SEED = "public"  # not that of the backbones' own records
HETERO = (
    "2"  # of digits-vqa-hetero; in version 1 other clients had the small model, and no style of theirs the large one
)
HELD_OUT = 20  # images of a client that its validation questions are about, where there are any
UNLIKE = (0, 3, 6, 1, 4, 7, 2, 5, 8, 9)  # the clients' streams, one of each style first


@benchmark(
    "digits-vqa",
    "1",
    summary="Questions about one to four images: ten clients with four tasks each, seven newcomers; ships with befit",
    default_model="digits-llava-s",
    task="vqa",
)
def digits_vqa(
    clients: int = 10, train: int = 60, val: int = 0, test: int = 60, streams: int | None = None, seed: int = 0
) -> Federation:
    """Ten clients with a stream of four tasks each, sixteen tasks in all, and seven newcomers with a task each.

    A task is a question in a style of writing. A client asks about 65 images of its own, which nobody else has; tests
    are about images that nobody trains on. A newcomer asks about the images of all clients, and never trains.

    clients  how many of the ten, from the first
    train    records of each task to train on
    val      records of each task to validate on, about 20 of the client's images that are then kept for it
    test     records of each task that a client is tested on
    streams  different streams of tasks, which the clients have in turns; null: each its own
    seed     of which images a client holds, and of what it asks
    """
    check(clients, train, val, test, streams)
    images, labels = load()
    dealt = deal(labels, seed)
    parts = {"test": pool_of(labels, BLOCKS["test"])}
    everybody = pool_of(labels, BLOCKS["train"])
    sizes = {"train": train, "val": val, "test": test}

    def make(name: str, tasks: Sequence[str], pools: dict[str, Pool], info: dict[str, str]) -> ClientData:
        splits = {
            split: tuple(
                record
                for task in tasks
                for record in task_records(images, pools[split], task, size, f"{name}-{split}", f"digits-vqa/{seed}")
            )
            for split, size in sizes.items()
        }
        return ClientData(name, splits["train"], splits["val"], splits["test"], info)

    members = []
    for index, tasks in enumerate(streams_of(clients, streams)):
        places = dealt[index]
        kept = places[:HELD_OUT] if val else places[:0]
        pools = {**parts, "train": pool_of(labels, places[len(kept) :]), "val": pool_of(labels, kept)}
        info = {"tasks": ", ".join(tasks), "style": styles(tasks), "size": "small" if index in SMALL else "large"}
        members.append(make(f"client-{index:02d}", tasks, pools, info))
    # Newcomers have no images of their own: there are none left.
    new_pools = {**parts, "train": everybody, "val": everybody}
    new = [
        make(task.replace("/", "."), (task,), new_pools, {"tasks": task, "style": styles([task]), "size": "large"})
        for task in NEWCOMER_TASKS
    ]
    public = islice(generated_records(images, pool_of(labels, BLOCKS["public"]), PUBLIC_SEED), PUBLIC)
    arguments = {"clients": clients, "train": train, "val": val, "test": test, "seed": seed} | (
        {} if streams is None else {"streams": streams}
    )
    manifest = {
        "sources": [SOURCE],
        "partition": {
            "name": "stratified",
            "args": arguments,
            "seed": seed,
            "sha256": partition_hash(dealt),
            "records": records_hash([*members, *new]),
        },
        "counts": {client.id: client.sizes for client in (*members, *new)},
        "streams": {client.id: stream_of(client) for client in (*members, *new)},
    }
    return Federation(
        "digits-vqa", "1", "vqa", tuple(members), newcomers=tuple(new), public=tuple(public), manifest=manifest
    )


@benchmark(
    "digits-vqa-hetero",
    HETERO,
    summary="`digits-vqa` with a small backbone for four of the clients and a large one for the others",
    default_model="digits-llava-l",
    families={"size=small": "digits-llava-s"},
    task="vqa",
)
def digits_vqa_hetero(
    clients: int = 10, train: int = 60, val: int = 0, test: int = 60, streams: int | None = None, seed: int = 0
) -> Federation:
    """The records of `digits-vqa`; clients 0, 6, 8 and 9 have another backbone than the others.

    clients  how many of the ten, from the first; two or more, so that there are two sizes
    train    records of each task to train on
    val      records of each task to validate on, about 20 of the client's images that are then kept for it
    test     records of each task that a client is tested on
    streams  different streams of tasks, which the clients have in turns; null: each its own
    seed     of which images a client holds, and of what it asks
    """
    return replace(digits_vqa(clients, train, val, test, streams, seed), name="digits-vqa-hetero", version=HETERO)


def streams_of(clients: int, streams: int | None = None) -> list[tuple[str, ...]]:
    """The tasks of every client, in the order of its stream.

    >>> [tasks[0] for tasks in streams_of(4, streams=2)]
    ['name/invert', 'name/rot', 'name/invert', 'name/rot']
    """
    different = sorted(UNLIKE[:streams])
    return [STREAMS[different[index % len(different)]] for index in range(clients)]


def deal(labels: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
    """65 images of the training block for each of the ten clients, of every digit six or seven; in an order in which
    the first twenty have two of each."""
    dealt: list[list[int]] = [[] for _ in STREAMS]
    turn = 0
    for digit in range(10):
        members = [index for index in BLOCKS["train"] if labels[index] == digit]
        for index in sorted(members, key=lambda image: hashed(seed, image)):
            dealt[turn % len(dealt)].append(index)
            turn += 1
    return [np.array(interleaved(part, labels), dtype=np.int64) for part in dealt]


def hashed(seed: int, index: int) -> bytes:
    return hashlib.sha256(f"digits-vqa/{seed}/{index}".encode()).digest()


def interleaved(indices: Sequence[int], labels: NDArray[np.int64]) -> list[int]:
    """The first image of every digit, then the second of every digit, and so on."""
    seen: dict[int, int] = {}
    ranked = []
    for index in indices:
        digit = int(labels[index])
        seen[digit] = seen.get(digit, 0) + 1
        ranked.append((seen[digit], digit, index))
    return [index for *_, index in sorted(ranked)]


def pool_of(labels: NDArray[np.int64], indices: Sequence[int] | NDArray[np.int64] | range) -> Pool:
    """The images of every digit, among these."""
    pool: dict[int, list[int]] = {}
    for index in indices:
        pool.setdefault(int(labels[index]), []).append(int(index))
    return pool


def styles(tasks: Sequence[str]) -> str:
    """
    >>> styles(["max/plain", "digit/noise", "count/plain"])
    'noise, plain'
    """
    return ", ".join(sorted({task.split("/")[1] for task in tasks}))


def stream_of(client: ClientData) -> list[dict[str, Any]]:
    """The client's tasks in the order of its stream: how each is scored, and how many records it has."""
    tasks = client.info["tasks"].split(", ")
    return [
        {
            "task": task,
            "form": "choice" if QUESTIONS[task.split("/")[0]][1] else "open",
            "metric": "choice_parse" if QUESTIONS[task.split("/")[0]][1] else "exact_match",
            "train": sum(record["task"] == task for record in client.train),
            "test": sum(record["task"] == task for record in client.test),
        }
        for task in tasks
    ]


def records_hash(clients: Sequence[ClientData]) -> str:
    """SHA-256 of who asks what about which images, and of the answers."""
    digest = hashlib.sha256()
    for client in clients:
        for record in (*client.train, *client.val, *client.test):
            digest.update(f"{record['id']} {record['source']} {text_of(record)}\n".encode())
    return digest.hexdigest()


def text_of(record: Record) -> str:
    return " | ".join(turn["content"] for turn in record["conversation"])


def check(clients: int, train: int, val: int, test: int, streams: int | None = None) -> None:
    """Raise ConfigError naming all sizes that cannot be."""
    problems: list[str] = []
    if not 1 <= clients <= len(STREAMS):
        problems.append(f"benchmark.clients: must be 1 to 10, got {clients}")
    elif streams is not None and not 1 <= streams <= clients:
        problems.append(f"benchmark.streams: must be 1 to the number of clients, {clients}, got {streams}")
    problems += [
        f"benchmark.{key}: must be {least} or more, got {value}"
        for key, value, least in (("train", train, 1), ("val", val, 0), ("test", test, 0))
        if value < least
    ]
    if problems:
        raise ConfigError(problems, "the benchmark")
