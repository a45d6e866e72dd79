"""`commonsense-8` and `commonsense-16`: eight data sets of questions with options (Potara, Tables 3 and 9)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from befit.core.errors import ConfigError, DataError
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import Row
from befit.data.papers.assemble import assemble, ordered, same_text, shuffled, source_entry
from befit.data.papers.commonsense_tasks import TASKS, Question, Task, rendered
from befit.data.papers.llm_adapters import LLM_ADAPTERS, adapters_rows, as_published
from befit.data.papers.source import Place, read_split
from befit.data.registry import benchmark

logger = logging.getLogger(__name__)

__all__ = ["commonsense_8", "commonsense_16"]

Answers = Literal["sentence", "name"]
Files = Literal["sources", "llm-adapters"]


@benchmark(
    "commonsense-8",
    "1",
    summary="ARC, BoolQ, HellaSwag, OpenBookQA, PIQA, SIQA, WinoGrande, one client each (Potara); needs the data",
    default_model="meta-llama/Llama-3.2-3B-Instruct",
    task="causal-lm",
    seeded=False,
)
def commonsense_8(
    root: str = "",
    hub: bool = False,
    train: int = 1000,
    val: int = 100,
    test: int = 500,
    with_passage: bool = False,
    answers: Answers = "sentence",
    seed: int = 42,
    revisions: dict[str, str] | None = None,
    files: Files = "sources",
) -> Federation:
    """Eight tasks, one a client: training and validation from the train split, the test from the split with labels.

    root          directory with ai2_arc, boolq, hellaswag, openbookqa, piqa, social_i_qa and winogrande
    hub           load them from the hub instead
    train         records that a client trains on
    val           further records of the train split that it validates on; fewer where there are no more
    test          records that it is tested on
    with_passage  give BoolQ's passage with its question; the version that the paper's numbers fit has none
    answers       sentence: the answer to learn is "the correct answer is X"; name: X alone
    seed          of which records are drawn
    revisions     hub id to the commit that is wanted
    files         sources: the data sets themselves; llm-adapters: the questions as that repository words them, with the
                  repository as root
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
    return federation("commonsense-8", 1, Place("commonsense-8", root, hub, revisions), arguments)


@benchmark(
    "commonsense-16",
    "1",
    summary="The eight data sets of commonsense-8 with two clients each (Potara); needs the data",
    default_model="meta-llama/Llama-3.2-3B-Instruct",
    task="causal-lm",
    seeded=False,
)
def commonsense_16(
    root: str = "",
    hub: bool = False,
    train: int = 1000,
    val: int = 100,
    test: int = 500,
    with_passage: bool = False,
    answers: Answers = "sentence",
    seed: int = 42,
    revisions: dict[str, str] | None = None,
    files: Files = "sources",
) -> Federation:
    """`commonsense-8` with two clients a task, which share no training record and have the same test.

    root          directory with ai2_arc, boolq, hellaswag, openbookqa, piqa, social_i_qa and winogrande
    hub           load them from the hub instead
    train         records that a client trains on; where a data set has too few for both, half of them each
    val           further records of the train split that it validates on; fewer where there are no more
    test          records that it is tested on
    with_passage  give BoolQ's passage with its question; the version that the paper's numbers fit has none
    answers       sentence: the answer to learn is "the correct answer is X"; name: X alone
    seed          of which records are drawn
    revisions     hub id to the commit that is wanted
    files         sources: the data sets themselves; llm-adapters: the questions as that repository words them, with the
                  repository as root
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
    return federation("commonsense-16", 2, Place("commonsense-16", root, hub, revisions), arguments)


def federation(name: str, each: int, place: Place, arguments: dict[str, Any]) -> Federation:
    if problems := [
        f"benchmark.{key}: must be {least} or more, got {arguments[key]}"
        for key, least in (("train", 1), ("val", 0), ("test", 1))
        if arguments[key] < least
    ]:
        raise ConfigError(problems, "the benchmark")
    published = arguments["files"] == "llm-adapters"
    if published and (place.hub or arguments["with_passage"]):
        raise ConfigError(
            [
                "benchmark.files: llm-adapters is on no hub, and has BoolQ without its passages; give root, "
                "without hub and with_passage"
            ],
            "the benchmark",
        )
    place.check([LLM_ADAPTERS] if published else [task.source for task in TASKS])
    held: list[ClientData] = []
    entries: list[dict[str, Any]] = []
    dropped: dict[str, int] = {}
    for task in TASKS:
        tested = "test" if published else task.test
        pools = {split: pool(place, name, task, split, arguments, entries) for split in ("train", tested)}
        test = pools[tested][: arguments["test"]]
        if len(test) < arguments["test"]:
            raise DataError(f"{task.name}: {len(test)} records are too few to test on {arguments['test']}")
        asked = {same_text(one["instruction"]) for one in test}
        free = [one for one in pools["train"] if same_text(one["instruction"]) not in asked]
        dropped[task.name] = len(pools["train"]) - len(free)
        for index, (train, val) in enumerate(dealt(task.name, free, each, arguments)):
            client = task.name if each == 1 else f"{task.name}-{index + 1}"
            held.append(ClientData(client, train, val, tuple(test), {"task": task.name}))
    said = arguments if published else {key: value for key, value in arguments.items() if key != "files"}
    return assemble(
        name,
        "1",
        "causal-lm",
        held,
        partition="by_task",
        arguments=said,
        sources=entries,
        notes={"training_records_dropped_for_the_test": dropped},
    )


def pool(
    place: Place, name: str, task: Task, split: str, arguments: dict[str, Any], entries: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A split's records in random order; what was read is noted in `entries`."""
    published, with_name_only = arguments["files"] == "llm-adapters", arguments["answers"] == "name"
    if published:
        source, (rows, sha256) = replace(LLM_ADAPTERS, config=task.name), adapters_rows(place, task.name, split)
    else:
        source = task.source
        rows, sha256 = ordered(read_split(place, source, split, task.fields), task.fields)
    entries.append(source_entry(place, source, split, len(rows), sha256))
    made = []
    for row in shuffled(rows, arguments["seed"], name, f"{task.name}/{split}"):
        record = (
            as_published(row, with_name_only)
            if published
            else rendered(task, question(task, row, arguments["with_passage"]), with_name_only)
        )
        made.append({"id": f"{task.name}-{split}-{len(made):05d}", "task": task.name, **record})
    return made


def question(task: Task, row: Row, with_passage: bool) -> Question:
    asked = task.question(row)
    if task.name == "boolq" and with_passage:
        return replace(asked, text=f"{str(row.values['passage']).strip()}\n{asked.text}")
    return asked


def dealt(
    task: str, records: list[dict[str, Any]], each: int, arguments: dict[str, Any]
) -> list[tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]]:
    """Training and validation records of every client of a task, none in two of them."""
    size = arguments["train"]
    if each * size > len(records):
        size = len(records) // each
        if each == 1 or size < 1:
            raise DataError(f"{task}: {len(records)} training records are too few for {each} x {arguments['train']}")
        logger.warning(
            "%s: %d training records are too few for %d clients with %d; they get %d each",
            task,
            len(records),
            each,
            arguments["train"],
            size,
        )
    rest = np.array_split(np.arange(each * size, len(records)), each)
    return [
        (
            tuple(records[index * size : (index + 1) * size]),
            tuple(records[at] for at in rest[index][: arguments["val"]]),
        )
        for index in range(each)
    ]
