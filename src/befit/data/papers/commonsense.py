"""`commonsense-8` and `commonsense-16`: eight data sets of questions with options (Potara, Tables 3 and 9)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np

from befit.core.errors import ConfigError, DataError
from befit.core.schema import at_least, variant
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import Row
from befit.data.papers.assemble import assemble, ordered, same_text, shuffled, source_entry
from befit.data.papers.commonsense_tasks import TASKS, CommonsenseTask, Question, rendered
from befit.data.papers.llm_adapters import LLM_ADAPTERS, adapters_rows, as_published
from befit.data.papers.source import Place, read_split
from befit.data.registry import benchmark

_LOG = logging.getLogger(__name__)


def commonsense(
    root: str = "",
    hub: bool = False,
    train: Annotated[int, at_least(1)] = 1000,
    val: Annotated[int, at_least(0)] = 100,
    test: Annotated[int, at_least(1)] = 500,
    with_passage: bool = False,
    answers: Literal["sentence", "name"] = "sentence",
    seed: int = 42,
    revisions: dict[str, str] | None = None,
    files: Literal["sources", "llm-adapters"] = "sources",
    *,
    each: int,
) -> Federation:
    """Eight tasks: training and validation from the train split, the test from the split with labels.

    Clients of the same task share no record to learn or to validate on, and have the same test.

    root          directory with ai2_arc, boolq, hellaswag, openbookqa, piqa, social_i_qa and winogrande
    hub           load them from the hub instead
    train         records that a client trains on; where a data set has too few for two clients, they share them, and
                  each divides its part as `train` to `val`
    val           further records of the train split that it validates on; fewer where there are no more
    test          records that it is tested on
    with_passage  give BoolQ's passage with its question; the version that the paper's numbers fit has none
    answers       sentence: the answer to learn is "the correct answer is X"; name: X alone
    seed          of which records are drawn
    revisions     hub id to the commit that is wanted
    files         sources: the data sets themselves; llm-adapters: the questions as that repository words them, with the
                  repository as root
    each          clients of a task
    """
    arguments = {
        "train": train,
        "val": val,
        "test": test,
        "with_passage": with_passage,
        "answers": answers,
        "seed": seed,
        "files": files,
    }
    name = f"commonsense-{each * len(TASKS)}"
    place = Place(name, root, hub, revisions)
    published = files == "llm-adapters"
    if published and (hub or with_passage):
        raise ConfigError(
            [
                "benchmark.files: llm-adapters is on no hub, and has BoolQ without its passages; give root, "
                "without hub and with_passage"
            ],
            "the benchmark",
        )
    place.check([LLM_ADAPTERS] if published else [task.source for task in TASKS])
    clients: list[ClientData] = []
    entries: list[dict[str, Any]] = []
    dropped: dict[str, int] = {}
    for task in TASKS:
        tested = "test" if published else task.test
        pools = {split: pool(place, task, split, arguments, entries) for split in ("train", tested)}
        tests = pools[tested][:test]
        if len(tests) < test:
            raise DataError(f"{task.name}: {len(tests)} records are too few to test on {test}")
        questions = {same_text(record["instruction"]) for record in tests}
        once: dict[str, dict[str, Any]] = {}
        for record in pools["train"]:
            once.setdefault(same_text(record["instruction"]), record)
        free = [record for asked, record in once.items() if asked not in questions]
        dropped[task.name] = len(once) - len(free)
        for index, (learnt, validated) in enumerate(dealt(task.name, free, each, train, val)):
            client = task.name if each == 1 else f"{task.name}-{index + 1}"
            clients.append(ClientData(client, learnt, validated, tuple(tests), {"task": task.name}))
    if not published:
        del arguments["files"]
    return assemble(
        name,
        clients,
        partition="by_task",
        arguments=arguments,
        sources=entries,
        notes={"training_records_dropped_for_the_test": dropped},
    )


for _each, _summary in (
    (1, "ARC, BoolQ, HellaSwag, OpenBookQA, PIQA, SIQA, WinoGrande, one client each (Potara); needs the data"),
    (2, "The eight data sets of commonsense-8 with two clients each (Potara); needs the data"),
):
    benchmark(
        f"commonsense-{_each * len(TASKS)}",
        "2",
        summary=_summary,
        default_model="meta-llama/Llama-3.2-3B-Instruct",
        task="causal-lm",
        seeded=False,
    )(variant(commonsense, each=_each))


def pool(
    place: Place, task: CommonsenseTask, split: str, arguments: dict[str, Any], entries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A split's records in random order; what was read is noted in `entries`."""
    published, with_name_only = arguments["files"] == "llm-adapters", arguments["answers"] == "name"
    if published:
        source, (rows, sha256) = replace(LLM_ADAPTERS, config=task.name), adapters_rows(place, task.name, split)
    else:
        source = task.source
        rows, sha256 = ordered(read_split(place, source, split, task.fields), task.fields)
    entries.append(source_entry(place, source, split, len(rows), sha256))
    records = []
    for row in shuffled(rows, arguments["seed"], place.benchmark, f"{task.name}/{split}"):
        record = (
            as_published(row, with_name_only)
            if published
            else rendered(task, question(task, row, arguments["with_passage"]), with_name_only)
        )
        records.append({"id": f"{task.name}-{split}-{len(records):05d}", "task": task.name, **record})
    return records


def question(task: CommonsenseTask, row: Row, with_passage: bool) -> Question:
    bare = task.question(row)
    if task.name == "boolq" and with_passage:
        return replace(bare, text=f"{str(row.values['passage']).strip()}\n{bare.text}")
    return bare


def dealt(
    task: str, records: list[dict[str, Any]], each: int, train: int, val: int
) -> list[tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]]:
    """Training and validation records of every client of a task, none in two of them.

    Where there are too few to train on so many and to validate at all, each one's part is divided as `train` to `val`.
    """
    size, share = train, len(records) // each
    if share < train + bool(val):
        size = share - round(share * val / (train + val))
        if size < 1 or (each == 1 and share < train):
            raise DataError(f"{task}: {len(records)} training records are too few for {each} x {train}")
        _LOG.warning(
            "%s: %d training records are too few for %d clients with %d and %d to validate on; they train on %d each, "
            "and validate on %d",
            task,
            len(records),
            each,
            train,
            val,
            size,
            share - size,
        )
    rest = np.array_split(np.arange(each * size, len(records)), each)
    return [
        (
            tuple(records[index * size : (index + 1) * size]),
            tuple(records[at] for at in rest[index][:val]),
        )
        for index in range(each)
    ]
