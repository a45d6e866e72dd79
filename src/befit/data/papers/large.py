"""`fedaya-8` and `fed-llm-large-52`: FedMosaic's text clients, from the files of snumprlab/fedmosaic.

Their tasks were made by a language model's judgement and by drawing users that are not named, so they cannot be made
again: the files DATASET/train/dataset-N.json and DATASET/test/dataset-N.json are read as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from befit.core.errors import DataError
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import read_rows
from befit.data.papers.assemble import assemble, content_hash, digest, source_entry
from befit.data.papers.public import conversation_text, public_texts
from befit.data.papers.scenarios import ClientTask
from befit.data.papers.source import Place, Source, check_fields
from befit.data.registry import benchmark

_LOG = logging.getLogger(__name__)

TEXTS = Source(
    "the text data of the repository snumprlab/fedmosaic",
    "Aya Apache-2.0, ChatbotIT CC BY-NC 4.0, FLAN data as its sources",
    on_hub=False,
    layout="DATASET/train/dataset-N.json and DATASET/test/dataset-N.json",
)
SIZES = {"size=small": "meta-llama/Llama-3.2-1B", "size=large": "meta-llama/Llama-3.2-3B"}
FIELDS = ("sciences", "sciences", "humanities", "humanities", "humanities", "society", "health", "health")
AYA_SMALL = {2, 4, 6, 7}


@benchmark(
    "fedaya-8",
    "1",
    summary="Eight clients of four languages each in a field of knowledge (FedMosaic); needs the data",
    default_model="meta-llama/Llama-3.2-3B",
    task="causal-lm",
    seeded=False,
    families=SIZES,
)
def fedaya_8(root: str = "", public: str = "", seed: int = 42) -> Federation:
    """Four tasks a client, 10 j to 10 j + 3 of client j: a field of knowledge in four languages.

    root    directory with Fed-aya_topic/train and Fed-aya_topic/test
    public  JSON file of conversations below the root, of which 5,000 without an image become the public split
    seed    of the public split; the released files are read as they are
    """
    tasks = [[ClientTask("Fed-aya_topic", 10 * client + task) for task in range(4)] for client in range(8)]
    infos = [{"size": "small" if client in AYA_SMALL else "large", "field": FIELDS[client]} for client in range(8)]
    return authors_clients(Place("fedaya-8", root), tasks, infos, seed, public)


@benchmark(
    "fed-llm-large-52",
    "1",
    summary="52 clients of two tasks each: FLAN, Aya by topic, users of a chatbot (FedMosaic); needs the data",
    default_model="meta-llama/Llama-3.2-3B",
    task="causal-lm",
    seeded=False,
    families=SIZES,
)
def fed_llm_large_52(root: str = "", public: str = "", seed: int = 42) -> Federation:
    """Clients 0 to 15 have halves of FLAN tasks, 16 to 31 two topics of Aya, 32 to 51 two users of a chatbot.

    root    directory with FedDPA, Fed-aya_topic and FedchatbotIT, each with train and test
    public  JSON file of conversations below the root, of which 5,000 without an image become the public split
    seed    of the public split; the released files are read as they are
    """
    tasks = [large_tasks(client) for client in range(52)]
    sources = ["flan"] * 16 + ["aya"] * 16 + ["chatbot"] * 20
    infos = [{"size": ("small", "large")[client % 2], "source": sources[client]} for client in range(52)]
    return authors_clients(Place("fed-llm-large-52", root), tasks, infos, seed, public)


def large_tasks(client: int) -> list[ClientTask]:
    """The two tasks of a client.

    >>> [[part.name for part in large_tasks(client)] for client in (3, 17, 32)]
    [['FedDPA-112', 'FedDPA-212'], ['Fed-aya_topic-102', 'Fed-aya_topic-103'], ['FedchatbotIT-0', 'FedchatbotIT-20']]
    """
    if client < 16:
        task, half = client // 2, 1 + client % 2
        return [ClientTask("FedDPA", 100 + 10 * task + half), ClientTask("FedDPA", 200 + 10 * task + half)]
    if client < 32:
        first = 100 + 10 * ((client - 16) // 2) + 2 * (client % 2)
        return [ClientTask("Fed-aya_topic", first), ClientTask("Fed-aya_topic", first + 1)]
    return [ClientTask("FedchatbotIT", client - 32), ClientTask("FedchatbotIT", client - 12)]


def authors_clients(
    place: Place, tasks: Sequence[Sequence[ClientTask]], infos: Sequence[dict[str, str]], seed: int, public: str
) -> Federation:
    """Clients from released files, in the order of their tasks."""
    place.check([TEXTS])
    folder = place.folder(TEXTS)
    entries: list[dict[str, Any]] = []
    clients = []
    streams = {}
    longer = 0
    for number, (parts, info) in enumerate(zip(tasks, infos, strict=True)):
        splits: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
        for part in parts:
            for split, records in splits.items():
                part_records, more = text_records(place, folder, part, split, entries)
                records += part_records
                longer += more
        names = [part.name for part in parts]
        client = f"client-{number:02d}"
        clients.append(
            ClientData(client, tuple(splits["train"]), (), tuple(splits["test"]), {"tasks": ", ".join(names), **info})
        )
        streams[client] = [
            {"task": name, **{split: sum(record["task"] == name for record in splits[split]) for split in splits}}
            for name in names
        ]
    if longer:
        _LOG.warning(
            "%s: %d conversations have more than one question; only the first is learnt and asked",
            place.benchmark,
            longer,
        )
    return assemble(
        place.benchmark,
        clients,
        partition="natural",
        arguments={"public": public, "seed": seed},
        sources=entries,
        public=public_texts(folder, public, seed, place.benchmark),
        notes={"streams": streams, "conversations_with_more_questions": longer},
    )


def text_records(
    place: Place, folder: Path, part: ClientTask, split: str, entries: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """A split of a task as causal-lm records, and how many conversations have a second question."""
    path = folder / part.dataset / split / f"dataset-{part.subset}.json"
    if not path.is_file():
        raise place.missing(path, TEXTS)
    rows = read_rows(path, ())
    check_fields(rows, ("conversations",))
    records: list[dict[str, Any]] = []
    longer = 0
    for number, row in enumerate(rows):
        if row.values.get("image"):
            raise DataError(f"{row.where}: has an image; {place.benchmark} is text alone")
        instruction, output, more = conversation_text(row)
        longer += more
        records.append(
            {"id": f"{part.name}-{split}-{number:05d}", "task": part.name, "instruction": instruction, "output": output}
        )
    hashed = content_hash([digest([record["instruction"], record["output"]]) for record in records])
    entries.append({**source_entry(place, TEXTS, split, len(records), hashed), "config": part.name})
    return records, longer
