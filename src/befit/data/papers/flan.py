"""`flan-8`: eight tasks of FLAN (Potara, Tables 6 and 7), and the two sets of FedDPA's release.

FLAN writes one question in up to ten templates. Before it is divided, records that may be the same question are put
into one group, and a group stays on one side of the split, or the test would be known from training.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from befit.core.errors import DataError
from befit.core.schema import at_least, between, variant
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import read_rows
from befit.data.papers.assemble import assemble, content_hash, digest, ordered, same_text, shuffled, source_entry
from befit.data.papers.source import Place, Source, check_fields, read_split, text_of
from befit.data.registry import benchmark

_SAME = ("arc_challenge", "cosmos_qa", "definite_pronoun_resolution", "glue_qqp", "hellaswag")
# FLAN has no mnli, only mnli_matched and mnli_mismatched.
TASKS = {name: name for name in (*_SAME, "mnli", "squad_v1", "sst2")} | {"mnli": "mnli_matched"}
FLAN = Source(
    "Muennighoff/flan",
    "FLAN code Apache-2.0, data as its sources",
    revision="049702ca5ffc5b3c62bf226aac67ba1493e8d548",
    needed=tuple(f"train/{name}_10templates_train.jsonl" for name in TASKS.values()),
)
FEDDPA = Source(
    "the data of the repository Lydia-yang/FedDPA",
    "no licence file; for your own use",
    on_hub=False,
    layout="data/dataset1 or data/dataset2: 8/local_training_0.json to 8/local_training_7.json, and one *test*.jsonl",
)
FEDDPA_TASKS = {
    "1": ("definite_pronoun_resolution", "snli", "cola", "glue_qqp", "trec", "web_nlg_en", "fix_punct", "wic"),
    "2": ("hellaswag", "qnli", "arc_easy", "paws_wiki", "bool_q", "sentiment140", "gigaword", "word_segment"),
}
FIELDS = ("inputs", "targets")
RUN = 8  # words in a row that two records share for their questions to count as one


@benchmark(
    "flan-8",
    "2",
    summary="Eight tasks of FLAN, one client each (Potara); needs the data",
    default_model="Qwen/Qwen3-4B-Instruct-2507",
    task="causal-lm",
    seeded=False,
)
def flan_8(
    root: str = "",
    hub: bool = False,
    train: Annotated[int, at_least(1)] = 2000,
    val: Annotated[int, at_least(0)] = 100,
    test: Annotated[int, at_least(1)] = 300,
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
    place.check([FLAN])
    clients: list[ClientData] = []
    entries: list[dict[str, Any]] = []
    grouped: dict[str, Any] = {}
    for client, task in TASKS.items():
        source = replace(FLAN, files=f"{{split}}/{task}_10templates_{{split}}.jsonl")
        rows, sha256 = ordered(read_split(place, source, "train", FIELDS), FIELDS)
        entries.append({**source_entry(place, source, "train", len(rows), sha256), "config": task})
        pairs = [(text_of(row, "inputs"), text_of(row, "targets")) for row in rows]
        by_question = groups(pairs)
        split = by_group(by_question, sizes, seed, client)
        if len(split["train"]) < train and (on_shortage == "fail" or not split["train"]):
            raise DataError(
                f"{client}: {len(by_question)} groups of questions in {len(rows)} records give "
                f"{len(split['test'])} to test, {len(split['val'])} to validate and "
                f"{len(split['train'])} of {train} to train on"
            )
        data = {name: tuple(record(client, pairs[at], at) for at in picked) for name, picked in split.items()}
        clients.append(ClientData(client, data["train"], data["val"], data["test"], {"task": client}))
        grouped[client] = {"records": len(rows), "questions": len(by_question)}
    arguments = {"train": train, "val": val, "test": test, "on_shortage": on_shortage, "seed": seed}
    return assemble(
        "flan-8",
        clients,
        partition="by_task",
        arguments=arguments,
        sources=entries,
        notes={"grouping": {"rule": f"same target, and {RUN} words in a row or all own words", **grouped}},
    )


def record(client: str, pair: tuple[str, str], at: int) -> dict[str, Any]:
    return {"id": f"{client}-{at:06d}", "instruction": pair[0], "output": pair[1], "task": client}


def groups(pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Records that may be one question in several templates: same target, and a run of words or all own ones in common.

    What many records of a target share belongs to templates, not to questions: a run or a word that is in more than a
    twentieth of them (and in more than 20) joins nobody. A short question has no run of its own, and its other words
    are the same in every template. Groups are in order of their first record.

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
        common = max(20, len(members) // 20)
        words = {at: re.findall(r"\w+", same_text(pairs[at][0])) for at in members}
        holding = Counter(word for said in words.values() for word in set(said))
        holders: dict[bytes, list[int]] = {}
        for at, said in words.items():
            runs = {" ".join(said[start : start + RUN]) for start in range(max(1, len(said) - RUN + 1))}
            if own := [word for word in said if holding[word] <= common]:
                runs.add("\n".join(own))
            for run in runs:
                holders.setdefault(hash_of(run), []).append(at)
        for who in holders.values():
            if len(who) <= common:
                for other in who[1:]:
                    parent[root(other)] = root(who[0])
    members_of: dict[int, list[int]] = {}
    for at in range(len(pairs)):
        members_of.setdefault(root(at), []).append(at)
    return sorted(members_of.values(), key=lambda group: group[0])


def hash_of(text: str) -> bytes:
    """Eight bytes that stand for a run: there are millions of runs, and a chance of one in a million of two alike."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def by_group(
    by_question: Sequence[Sequence[int]], sizes: Mapping[str, int], seed: int, client: str
) -> dict[str, list[int]]:
    """Indices of every split, in the order of `sizes`: one record of a group in test and validation, all in training.

    A group goes to one split alone.
    """
    order = shuffled(list(by_question), seed, "flan-8", client)
    splits: dict[str, list[int]] = {}
    at = 0
    for split, size in sizes.items():
        taken: list[int] = []
        while at < len(order) and len(taken) < size:
            taken += list(order[at])[: 1 if split != "train" else size - len(taken)]
            at += 1
        splits[split] = taken
    return splits


def flan_feddpa(
    root: str = "", val_fraction: Annotated[float, between(0, 1)] = 0.1, seed: int = 42, *, number: str
) -> Federation:
    """Eight files of training records, and one file with the tests of all tasks.

    root          a set's folder in the clone, with 8/local_training_0.json to 8/local_training_7.json and the file of
                  tests, *test*.jsonl; or all of these in one folder
    val_fraction  share of a client's training records that are held out for validation
    seed          of what is held out
    """
    place = Place(f"flan-feddpa-{number}", root)
    folder, tasks = place.folder(FEDDPA), FEDDPA_TASKS[number]
    trained = folder / "8" if (folder / "8").is_dir() else folder
    tests = sorted(folder.glob("*test*.jsonl"))
    if not tests:
        raise place.missing(folder / "*test*.jsonl", FEDDPA)
    if len(tests) > 1:
        raise DataError(
            f"{folder} must have one file of tests, *test*.jsonl; found {', '.join(file.name for file in tests)}"
        )
    tested = triples(tests[0])
    if unknown := sorted({str(record["task"]) for record in tested} - set(tasks)):
        raise DataError(f"{tests[0]}: has the tasks {', '.join(unknown)}; set {number} has {', '.join(tasks)}")
    clients, entries = [], [entry(place, tests[0], tested)]
    for index, task in enumerate(tasks):
        path = trained / f"local_training_{index}.json"
        if not path.is_file():
            raise place.missing(path, FEDDPA, f"which has the training records of {task}")
        records = triples(path)
        if other := sorted({str(record["task"]) for record in records} - {task}):
            raise DataError(f"{path} holds the task {', '.join(other)}, and client {index} of set {number} is {task}")
        entries.append(entry(place, path, records))
        mixed = shuffled(records, seed, place.benchmark, task)
        count = max(5, round(val_fraction * len(mixed))) if val_fraction else 0
        if count >= len(mixed):
            raise DataError(f"{path}: {len(mixed)} records are too few to hold out {count} for validation")
        test = tuple(record for record in tested if record["task"] == task)
        clients.append(ClientData(task, tuple(mixed[count:]), tuple(mixed[:count]), test, {"task": task}))
    return assemble(
        place.benchmark,
        clients,
        partition="by_task",
        sources=entries,
        arguments={"val_fraction": val_fraction, "seed": seed},
    )


for _number, _word in (("1", "first"), ("2", "second")):
    benchmark(
        f"flan-feddpa-{_number}",
        "1",
        summary=f"The {_word} set of eight FLAN tasks of FedDPA's release, one client each; needs the data",
        default_model="Qwen/Qwen3-4B-Instruct-2507",
        task="causal-lm",
        seeded=False,
    )(variant(flan_feddpa, number=_number))


def entry(place: Place, path: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    hashed = content_hash([digest(dict(record)) for record in records])
    return {**source_entry(place, FEDDPA, path.name, len(records), hashed), "config": ""}


def triples(path: Path) -> list[dict[str, Any]]:
    """Records {instruction, output, task, category}, by their hash."""
    rows = read_rows(path, ())
    check_fields(rows, ("instruction", "output", "task"))
    in_order, _ = ordered(rows, ("instruction", "output", "task"))
    records = []
    for row in in_order:
        for field in ("instruction", "output", "task"):
            text_of(row, field)
        values = {field: row.values[field] for field in ("instruction", "output", "task")}
        records.append({"id": f"{values['task']}-{path.stem}-{len(records):05d}", **values})
    return records
