"""`flan-8`: eight tasks of FLAN (Potara, Tables 6 and 7), and the two sets of FedDPA's release.

FLAN writes one question in up to ten templates. Before it is divided, records that may be the same question are put
into one group, and a group stays on one side of the split, or the test would be known from training.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from befit.core.errors import ConfigError, DataError
from befit.core.schema import show
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import read_rows
from befit.data.papers.assemble import assemble, content_hash, digest, ordered, same_text, shuffled, source_entry
from befit.data.papers.source import Place, Source, check_fields, read_split
from befit.data.registry import benchmark

__all__ = ["TASKS", "flan_8", "flan_feddpa_1", "flan_feddpa_2", "groups"]

# FLAN has no mnli, only mnli_matched and mnli_mismatched.
TASKS = {
    "arc_challenge": "arc_challenge",
    "cosmos_qa": "cosmos_qa",
    "definite_pronoun_resolution": "definite_pronoun_resolution",
    "glue_qqp": "glue_qqp",
    "hellaswag": "hellaswag",
    "mnli": "mnli_matched",
    "squad_v1": "squad_v1",
    "sst2": "sst2",
}
FLAN = Source(
    "Muennighoff/flan",
    "FLAN code Apache-2.0, data as its sources",
    revision="049702ca5ffc5b3c62bf226aac67ba1493e8d548",
    wanted=tuple(f"train/{one}_10templates_train.jsonl" for one in TASKS.values()),
)
FEDDPA = Source(
    "the data of the repository Lydia-yang/FedDPA",
    "no licence file; for your own use",
    on_hub=False,
    layout="local_training_0.json to local_training_7.json and one *test*.jsonl",
)
FEDDPA_TASKS = {
    "1": ("definite_pronoun_resolution", "snli", "cola", "glue_qqp", "trec", "web_nlg_en", "fix_punct", "wic"),
    "2": ("hellaswag", "qnli", "arc_easy", "paws_wiki", "bool_q", "sentiment140", "gigaword", "word_segment"),
}
FIELDS = ("inputs", "targets")
RUN = 8  # words in a row that two records share for their questions to count as one


@benchmark(
    "flan-8",
    "1",
    summary="Eight tasks of FLAN, one client each (Potara); needs the data",
    default_model="Qwen/Qwen3-4B-Instruct-2507",
    task="causal-lm",
    seeded=False,
)
def flan_8(
    root: str = "",
    hub: bool = False,
    train: int = 2000,
    val: int = 100,
    test: int = 300,
    on_shortage: Literal["take_all", "fail"] = "take_all",
    seed: int = 42,
    revisions: dict[str, str] | None = None,
) -> Federation:
    """Eight tasks, one a client, all records from FLAN's train files.

    root         directory with train/TASK_10templates_train.jsonl, as in Muennighoff/flan
    hub          load the files from the hub instead
    train        records that a client trains on
    val          records that it validates on
    test         records that it is tested on, of other questions than it trains on
    on_shortage  take_all: a task with too few questions fills its test first, then validation, and trains on the rest;
                 fail: an error
    seed         of which records are drawn
    revisions    hub id to the commit that is wanted
    """
    place = Place("flan-8", root, hub, revisions)
    sizes = {"test": test, "val": val, "train": train}
    if problems := [
        f"benchmark.{key}: must be {least} or more, got {sizes[key]}"
        for key, least in (("train", 1), ("val", 0), ("test", 1))
        if sizes[key] < least
    ]:
        raise ConfigError(problems, "the benchmark")
    place.check([FLAN])
    held: list[ClientData] = []
    entries: list[dict[str, Any]] = []
    grouped: dict[str, Any] = {}
    for client, task in TASKS.items():
        source = replace(FLAN, files=f"{{split}}/{task}_10templates_{{split}}.jsonl")
        rows, sha256 = ordered(read_split(place, source, "train", FIELDS), FIELDS)
        entries.append({**source_entry(place, source, "train", len(rows), sha256), "config": task})
        for row in rows:
            for field in FIELDS:
                if not isinstance(row.values[field], str) or not row.values[field].strip():
                    raise DataError(f"{row.where}: {field} must be text, got {show(row.values[field])}")
        pairs = [(row.values["inputs"], row.values["targets"]) for row in rows]
        known = groups(pairs)
        wanted = dict(sizes)
        split = by_group(known, wanted, seed, client)
        if len(split["train"]) < train and (on_shortage == "fail" or not split["train"]):
            raise DataError(
                f"{client}: {len(known)} groups of questions in {len(rows)} records give "
                f"{len(split['test'])} to test, {len(split['val'])} to validate and "
                f"{len(split['train'])} of {train} to train on"
            )
        made = {name: tuple(record(client, pairs[at], at) for at in picked) for name, picked in split.items()}
        held.append(ClientData(client, made["train"], made["val"], made["test"], {"task": client}))
        grouped[client] = {"records": len(rows), "questions": len(known)}
    arguments = {"train": train, "val": val, "test": test, "on_shortage": on_shortage, "seed": seed}
    return assemble(
        "flan-8",
        "1",
        "causal-lm",
        held,
        partition="by_task",
        arguments=arguments,
        sources=entries,
        notes={"grouping": {"rule": f"same target and {RUN} words in a row", **grouped}},
    )


def record(client: str, pair: tuple[str, str], at: int) -> dict[str, Any]:
    return {"id": f"{client}-{at:06d}", "instruction": pair[0].strip(), "output": pair[1].strip(), "task": client}


def groups(pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Records that may be one question in several templates: same target, and a run of words in common.

    The runs of a record that many others with its target share belong to templates, not to questions: one that is in
    more than a twentieth of them (and in more than 20) joins nobody. A record shorter than a run joins those of the
    same text. Groups are in order of their first record.

    >>> text = "the boy who cried wolf was not believed at last"
    >>> groups([(f"Premise: {text}", "yes"), (f"Is it so? {text}", "yes"), (f"{text}", "no"), ("x", "no")])
    [[0, 1], [2], [3]]
    """
    parent = list(range(len(pairs)))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    same_target: dict[str, list[int]] = {}
    for at, (_, target) in enumerate(pairs):
        same_target.setdefault(same_text(target), []).append(at)
    for members in same_target.values():
        holders: dict[bytes, list[int]] = {}
        for at in members:
            words = re.findall(r"\w+", same_text(pairs[at][0]))
            runs = {" ".join(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1))}
            for run in runs:
                holders.setdefault(hash_of(run), []).append(at)
        common = max(20, len(members) // 20)
        for who in holders.values():
            if len(who) <= common:
                for other in who[1:]:
                    parent[root(other)] = root(who[0])
    found: dict[int, list[int]] = {}
    for at in range(len(pairs)):
        found.setdefault(root(at), []).append(at)
    return sorted(found.values(), key=lambda one: one[0])


def hash_of(text: str) -> bytes:
    """Eight bytes that stand for a run: there are millions of runs, and a chance of one in a million of two alike."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def by_group(known: Sequence[Sequence[int]], sizes: Mapping[str, int], seed: int, client: str) -> dict[str, list[int]]:
    """Indices of every split, in the order of `sizes`: one record of a group in test and validation, all in training.

    A group goes to one split alone.
    """
    order = shuffled(list(known), seed, "flan-8", client)
    made: dict[str, list[int]] = {}
    at = 0
    for split, size in sizes.items():
        taken: list[int] = []
        while at < len(order) and len(taken) < size:
            taken += list(order[at])[: 1 if split != "train" else size - len(taken)]
            at += 1
        made[split] = taken
    return made


@benchmark(
    "flan-feddpa-1",
    "1",
    summary="The first set of eight FLAN tasks of FedDPA's release, one client each; needs the data",
    default_model="Qwen/Qwen3-4B-Instruct-2507",
    task="causal-lm",
    seeded=False,
)
def flan_feddpa_1(root: str = "", val_fraction: float = 0.1, seed: int = 42) -> Federation:
    """Eight files of training records, and one file with the tests of all tasks.

    root          directory with local_training_0.json to local_training_7.json and the file of tests, *test*.jsonl
    val_fraction  share of a client's training records that are held out for validation
    seed          of what is held out
    """
    return feddpa("1", Place("flan-feddpa-1", root), val_fraction, seed)


@benchmark(
    "flan-feddpa-2",
    "1",
    summary="The second set of eight FLAN tasks of FedDPA's release, one client each; needs the data",
    default_model="Qwen/Qwen3-4B-Instruct-2507",
    task="causal-lm",
    seeded=False,
)
def flan_feddpa_2(root: str = "", val_fraction: float = 0.1, seed: int = 42) -> Federation:
    """As `flan-feddpa-1`, of the other set.

    root          directory with local_training_0.json to local_training_7.json and the file of tests, *test*.jsonl
    val_fraction  share of a client's training records that are held out for validation
    seed          of what is held out
    """
    return feddpa("2", Place("flan-feddpa-2", root), val_fraction, seed)


def feddpa(number: str, place: Place, val_fraction: float, seed: int) -> Federation:
    if not 0 <= val_fraction < 1:
        raise ConfigError(
            [f"benchmark.val_fraction: must be at least 0 and below 1, got {val_fraction}"], "the benchmark"
        )
    folder, tasks = place.folder(FEDDPA), FEDDPA_TASKS[number]
    tests = sorted(folder.glob("*test*.jsonl"))
    if not tests:
        raise place.missing(folder / "*test*.jsonl", FEDDPA)
    if len(tests) > 1:
        raise DataError(
            f"{folder} must have one file of tests, *test*.jsonl; found {', '.join(one.name for one in tests)}"
        )
    tested = triples(tests[0])
    if unknown := sorted({str(one["task"]) for one in tested} - set(tasks)):
        raise DataError(f"{tests[0]}: has the tasks {', '.join(unknown)}; set {number} has {', '.join(tasks)}")
    held, entries = [], [entry(place, tests[0], tested)]
    for index, task in enumerate(tasks):
        path = folder / f"local_training_{index}.json"
        if not path.is_file():
            raise place.missing(path, FEDDPA, f"which has the training records of {task}")
        known = triples(path)
        if other := sorted({str(one["task"]) for one in known} - {task}):
            raise DataError(f"{path} holds the task {', '.join(other)}, and client {index} of set {number} is {task}")
        entries.append(entry(place, path, known))
        mixed = shuffled(known, seed, f"flan-feddpa-{number}", task)
        count = max(5, round(val_fraction * len(mixed))) if val_fraction else 0
        if count >= len(mixed):
            raise DataError(f"{path}: {len(mixed)} records are too few to hold out {count} for validation")
        test = tuple(one for one in tested if one["task"] == task)
        held.append(ClientData(task, tuple(mixed[count:]), tuple(mixed[:count]), test, {"task": task}))
    return assemble(
        f"flan-feddpa-{number}",
        "1",
        "causal-lm",
        held,
        partition="by_task",
        sources=entries,
        arguments={"val_fraction": val_fraction, "seed": seed},
    )


def entry(place: Place, path: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    hashed = content_hash([digest(dict(one)) for one in records])
    return {**source_entry(place, FEDDPA, path.name, len(records), hashed), "config": ""}


def triples(path: Path) -> list[dict[str, Any]]:
    """Records {instruction, output, task, category}, by their hash."""
    rows = read_rows(path, ())
    check_fields(rows, ("instruction", "output", "task"))
    known, _ = ordered(rows, ("instruction", "output", "task"))
    made = []
    for row in known:
        values = {field: row.values[field] for field in ("instruction", "output", "task")}
        for field, value in values.items():
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{row.where}: {field} must be text, got {show(value)}")
        made.append({"id": f"{values['task']}-{path.stem}-{len(made):05d}", **values})
    return made
