"""`fedscope-5`: mathematics, instructions and code by kind (FedMosaic, Table 12)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from befit.core.errors import DataError
from befit.core.schema import at_least, show
from befit.core.text import first_of
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import read_rows
from befit.data.papers.assemble import assemble, ordered, same_text, shuffled, source_entry
from befit.data.papers.large import authors_clients
from befit.data.papers.public import public_texts
from befit.data.papers.scenarios import ClientTask
from befit.data.papers.source import Place, Source, check_fields, read_split, text_of
from befit.data.partition import iid
from befit.data.registry import benchmark

GSM8K = Source("openai/gsm8k", "MIT", "gsm8k", "main")
DOLLY = Source(
    "databricks/databricks-dolly-15k", "CC BY-SA 3.0", "databricks-dolly-15k", files="databricks-dolly-15k.jsonl"
)
ROSETTA = Source(
    "rosetta_alpaca.json of the repository sahil280114/codealpaca", "GFDL (Rosetta Code)", "rosetta", on_hub=False
)
# Four tasks of each client: GSM8K in quarters, Dolly by category, Rosetta by language.
CLIENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("large", ("gsm8k-0", "gsm8k-1", "gsm8k-2", "gsm8k-3")),
    ("small", ("classification", "closed_qa", "general_qa", "open_qa")),
    ("small", ("information_extraction", "creative_writing", "brainstorming", "summarization")),
    ("small", ("java", "c+php", "c#", "c++")),
    ("large", ("python", "go", "pascal", "scala")),
)
IDS = ((0, 1, 2, 3), (10, 11, 12, 13), (14, 15, 16, 17), (20, 21, 22, 23), (24, 25, 26, 27))  # of the released files
LANGUAGES = {"c": "c+php", "php": "c+php"} | {
    name: name for name in ("java", "c#", "c++", "python", "go", "pascal", "scala")
}
Pools = dict[str, list[dict[str, Any]]]


@benchmark(
    "fedscope-5",
    "2",
    summary="GSM8K, Dolly by category, Rosetta Code by language: five clients (FedMosaic); needs the data",
    default_model="meta-llama/Llama-3.2-3B",
    task="causal-lm",
    seeded=False,
    families={"size=small": "meta-llama/Llama-3.2-3B", "size=large": "meta-llama/Llama-3.1-8B"},
)
def fedscope_5(
    root: str = "",
    files: Literal["sources", "authors"] = "sources",
    test: Annotated[int, at_least(1)] = 100,
    public: str = "",
    seed: int = 42,
) -> Federation:
    """Five clients of four tasks each.

    root    directory with gsm8k, databricks-dolly-15k and rosetta/rosetta_alpaca.json; or with FS_LLM_Instruct
    files   sources: made from the three data sets, with a test that nobody trains on; authors: the released files,
            whose tests are the last 100 training records, so that they show only whether something runs
    test    records of each task that are held out for the test, with sources
    public  JSON file of conversations below the root, of which 5,000 without an image become the public split
    seed    of the quarters of GSM8K, of what is held out and of the public split

    The paper's measures (MMLU, GSM8K's test and HumanEval with few examples) are not part of this benchmark.
    """
    if files == "authors":
        tasks = [[ClientTask("FS_LLM_Instruct", number) for number in ids] for ids in IDS]
        return authors_clients(Place("fedscope-5", root), tasks, [{"size": size} for size, _ in CLIENTS], seed, public)
    place = Place("fedscope-5", root)
    place.check([GSM8K, DOLLY, ROSETTA])
    entries: list[dict[str, Any]] = []
    pools = gsm8k(place, entries, seed) | dolly(place, entries) | rosetta(place, entries)
    clients = []
    streams = {}
    for number, (size, names) in enumerate(CLIENTS):
        client = f"client-{number:02d}"
        splits: Pools = {"train": [], "test": []}
        streams[client] = stream = []
        for name in names:
            task = held_out(name, pools[name], test, seed)
            for split, records in task.items():
                splits[split] += records
            stream.append({"task": name, **{split: len(records) for split, records in task.items()}})
        info = {"size": size, "tasks": ", ".join(names)}
        clients.append(ClientData(client, tuple(splits["train"]), (), tuple(splits["test"]), info))
    shared = public_texts(Path(root).expanduser(), public, seed, "fedscope-5")
    return assemble(
        "fedscope-5",
        clients,
        partition="natural",
        sources=entries,
        arguments={"files": files, "test": test, "public": public, "seed": seed},
        notes={"streams": streams},
        public=shared,
    )


def held_out(name: str, records: Sequence[dict[str, Any]], test: int, seed: int) -> Pools:
    """A test of different prompts than the training records'; a prompt that comes twice is used once."""
    once: dict[str, dict[str, Any]] = {}
    for record in records:
        once.setdefault(same_text(f"{record['instruction']}\n{record.get('input', '')}"), record)
    order = shuffled(list(once.values()), seed, "fedscope-5", name)
    if len(order) <= test:
        raise DataError(f"{name}: {len(order)} records are too few to hold out {test}")
    named = [{"id": f"{name}-{at:05d}", "task": name, **fields} for at, fields in enumerate(order)]
    return {"train": named[test:], "test": named[:test]}


def gsm8k(place: Place, entries: list[dict[str, Any]], seed: int) -> Pools:
    fields = ("question", "answer")
    rows, sha256 = ordered(read_split(place, GSM8K, "train", fields), fields)
    entries.append(source_entry(place, GSM8K, "train", len(rows), sha256))
    records = []
    for row in rows:
        answer = text_of(row, "answer")
        if answer.count("####") != 1:
            raise DataError(f"{row.where}: answer must have one mark #### before its number, got {show(answer)}")
        working, _, number = answer.partition("####")
        records.append(
            {"instruction": text_of(row, "question"), "output": f"{working.strip()}\nThe answer is {number.strip()}"}
        )
    quarters = iid(len(records), 4, seed, "fedscope-5", "gsm8k")
    return {f"gsm8k-{number}": [records[at] for at in part] for number, part in enumerate(quarters)}


def dolly(place: Place, entries: list[dict[str, Any]]) -> Pools:
    fields = ("instruction", "context", "response", "category")
    rows, sha256 = ordered(read_split(place, DOLLY, "train", fields), fields)
    entries.append(source_entry(place, DOLLY, "train", len(rows), sha256))
    categories = [name for _, names in CLIENTS[1:3] for name in names]
    pools: Pools = {name: [] for name in categories}
    for row in rows:
        category = text_of(row, "category")
        if category not in pools:
            raise DataError(f"{row.where}: category {category!r} is not one of {', '.join(categories)}")
        context = row.values["context"]
        pools[category].append(
            {
                "instruction": text_of(row, "instruction"),
                "output": text_of(row, "response"),
                "input": context if isinstance(context, str) else "",
            }
        )
    return pools


def rosetta(place: Place, entries: list[dict[str, Any]]) -> Pools:
    fields = ("instruction", "input", "output")
    path = place.folder(ROSETTA) / "rosetta_alpaca.json"
    if not path.is_file():
        raise place.missing(path, ROSETTA)
    unordered = read_rows(path, fields)
    check_fields(unordered, fields)
    rows, sha256 = ordered(unordered, fields)
    pools: Pools = {name: [] for name in LANGUAGES.values()}
    others: set[str] = set()
    for row in rows:
        language = text_of(row, "input")
        name = LANGUAGES.get(language.casefold())
        if name is None:
            others.add(language)
        else:
            pools[name].append(
                {"instruction": text_of(row, "instruction"), "input": language, "output": text_of(row, "output")}
            )
    if empty := [name for name, records in pools.items() if not records]:
        raise DataError(
            f"{path} has no records whose input is {', '.join(empty)}; further languages found: "
            f"{first_of(sorted(others)) or 'none'}"
        )
    entries.append({**source_entry(place, ROSETTA, "all", len(rows), sha256), "other_languages": len(others)})
    return pools
