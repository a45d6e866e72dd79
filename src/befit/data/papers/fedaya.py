"""`fedaya-38`: the clients of FedLLM-Bench's Fed-Aya (FedP2EFT, Tables 6, 7, 10 and 11), and `aya-users`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from befit.core.errors import DataError
from befit.core.schema import OPEN_SHARE, at_least, show
from befit.core.storage import read_json
from befit.data.federation import ClientData, Federation
from befit.data.papers.assemble import assemble, content_hash, digest, ordered, same_text, shuffled, source_entry
from befit.data.papers.source import Place, Source, read_split
from befit.data.partition import natural
from befit.data.registry import benchmark

BENCH = Source(
    "aya_38c_25k.json of the data that rui-ye/FedLLM-Bench links to",
    "Fed-Aya Apache-2.0, FedLLM-Bench as a whole CC BY-NC 4.0",
    on_hub=False,
)
AYA = Source("CohereForAI/aya_dataset", "Apache-2.0", revision="74195be")
FILE = "aya_38c_25k.json"
NEWCOMERS = (21, 22, 23, 24, 25, 26, 27, 34)
CLIENTS = 38
# How the eight languages are written: two-letter code, three-letter code, name.
LANGUAGES: Mapping[str, tuple[str, ...]] = {
    "ar": ("arb", "ara", "Arabic", "Standard Arabic"),
    "en": ("eng", "English"),
    "es": ("spa", "Spanish"),
    "fr": ("fra", "French"),
    "pt": ("por", "Portuguese"),
    "ru": ("rus", "Russian"),
    "te": ("tel", "Telugu"),
    "zh": ("zho", "Chinese", "Simplified Chinese"),
}


@benchmark(
    "fedaya-38",
    "2",
    summary="38 annotators of Aya, 30 clients and 8 newcomers, eight languages (FedP2EFT); needs the data",
    default_model="meta-llama/Llama-3.2-3B-Instruct",
    task="causal-lm",
    seeded=False,
)
def fedaya_38(root: str = "", test_fraction: Annotated[float, OPEN_SHARE] = 0.2, seed: int = 42) -> Federation:
    """The clients of the file in its order; those of eight languages are kept, 80 % of each client train.

    root           directory with aya_38c_25k.json
    test_fraction  share of a client's records that it is tested on
    seed           of which ones

    The paper also drops training records whose prompt is longer than 1,024 tokens. That depends on the tokenizer, and
    is asked of the model: model.max_length: 1024 with model.long_prompts: drop.
    """
    place = Place("fedaya-38", root)
    place.check([BENCH])
    path = place.folder(BENCH) / FILE
    if not path.is_file():
        raise place.missing(path, BENCH)
    document = read_json(path)
    if (
        not isinstance(document, dict)
        or len(document) != CLIENTS
        or not all(isinstance(rows, list) for rows in document.values())
    ):
        content = f"{len(document)} entries" if isinstance(document, (dict, list)) else type(document).__name__
        raise DataError(f"{path} must be an object of {CLIENTS} clients with a list of records each; found {content}")
    everybody: list[ClientData] = []
    hashes: list[str] = []
    left_out: dict[str, int] = {}
    repeats: dict[str, int] = {}
    for index, (key, rows) in enumerate(document.items()):
        records, left_out[key], repeats[key] = usable_records(rows, f"{path}, client {key}")
        hashes += [digest([key, record]) for record in records]
        if not records:
            languages = ", ".join(sorted({row["language"] for row in rows})) or "none"
            raise DataError(
                f"{path}, client {key}: none of its {len(rows)} records is of {', '.join(LANGUAGES)}; its "
                f"languages are {languages}"
            )
        everybody.append(client(f"client-{index:02d}", records, test_fraction, seed, "fedaya-38", {"key": key}))
    arguments = {"test_fraction": test_fraction, "seed": seed}
    entry = {
        **source_entry(place, BENCH, "all", len(hashes), content_hash(hashes)),
        "other_languages": left_out,
        "repeated_prompts": repeats,
    }
    return assemble(
        "fedaya-38",
        [member for at, member in enumerate(everybody) if at not in NEWCOMERS],
        newcomers=[everybody[at] for at in NEWCOMERS],
        partition="natural",
        arguments=arguments,
        sources=[entry],
    )


def usable_records(rows: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], int, int]:
    """Records of the eight languages, each prompt once, or one could be in training and test; how many are of other
    languages, and how many repeat a prompt."""
    records: dict[str, dict[str, Any]] = {}
    other = repeated = 0
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or (missing := {"instruction", "response", "language"} - row.keys()):
            keys = ", ".join(row) if isinstance(row, dict) else show(row)
            raise DataError(
                f"{where}, record {number}: must have instruction, response and language; found {keys}"
                + (f", without {', '.join(sorted(missing))}" if isinstance(row, dict) else "")
            )
        for field in ("language", "instruction", "response"):
            if not isinstance(row[field], str) or not row[field].strip():
                raise DataError(f"{where}, record {number}: {field} must be text, got {show(row[field])}")
            if (code := language_code(row["language"])) is None:
                break  # what else it holds does not matter
        if code is None:
            other += 1
            continue
        prompt = same_text(row["instruction"])
        repeated += prompt in records
        records.setdefault(prompt, {"instruction": row["instruction"], "output": row["response"], "language": code})
    return list(records.values()), other, repeated


def language_code(name: str) -> str | None:
    """The two-letter code of one of the eight languages, however it is written; None for others.

    >>> language_code("Standard_Arabic"), language_code("fra"), language_code("Moroccan Arabic")
    ('ar', 'fr', None)
    """
    word = name.replace("_", " ").strip().casefold()
    return next(
        (code for code, names in LANGUAGES.items() if word in {code, *(spelling.casefold() for spelling in names)}),
        None,
    )


def client(
    name: str,
    records: Sequence[dict[str, Any]],
    test_fraction: float,
    seed: int,
    federation: str,
    info: Mapping[str, str],
) -> ClientData:
    """A client with a part of its records held out for the test, rounded up as the released code of FedP2EFT does;
    `language` is what most of its records are in."""
    order = shuffled(sorted(records, key=digest), seed, federation, name)
    count = math.ceil(test_fraction * len(order))
    if count >= len(order):
        raise DataError(f"{federation}, {name}: {len(order)} records are too few to hold out {count} for the test")
    named = [{"id": f"{name}-{at:05d}", **record} for at, record in enumerate(order)]
    languages = [record["language"] for record in order]
    most = max(sorted(set(languages)), key=languages.count)
    return ClientData(name, tuple(named[count:]), (), tuple(named[:count]), {"language": most, **info})


@benchmark(
    "aya-users",
    "2",
    summary="Annotators of the Aya data set as clients: as fedaya-38, but not the same 38; needs the data",
    default_model="meta-llama/Llama-3.2-3B-Instruct",
    task="causal-lm",
    seeded=False,
)
def aya_users(
    root: str = "",
    hub: bool = False,
    clients: Annotated[int, at_least(1)] = 30,
    minimum: Annotated[int, at_least(1)] = 100,
    test_fraction: Annotated[float, OPEN_SHARE] = 0.2,
    seed: int = 42,
    revisions: dict[str, str] | None = None,
) -> Federation:
    """Aya's train split by user_id, in the eight languages of `fedaya-38`: natural clients, the largest ones.

    root           directory with the Parquet files or a `datasets` directory
    hub            load CohereForAI/aya_dataset from the hub instead
    clients        how many
    minimum        fewest records of a client, each prompt counted once
    test_fraction  share of a client's records that it is tested on
    seed           of which ones
    revisions      hub id to the commit that is wanted
    """
    place = Place("aya-users", root, hub, revisions)
    place.check([AYA])
    fields = ("inputs", "targets", "language", "user_id")
    rows, sha256 = ordered(read_split(place, AYA, "train", fields), fields)
    rows = [row for row in rows if language_code(str(row.values["language"]))]
    groups, _ = natural([str(row.values["user_id"]) for row in rows], minimum=minimum)
    usable: dict[str, list[dict[str, Any]]] = {}
    for user in sorted(groups, key=lambda user: (-len(groups[user]), user)):
        if len(usable) == clients:
            break
        candidates = [
            {
                "instruction": row.values["inputs"],
                "response": row.values["targets"],
                "language": str(row.values["language"]),
            }
            for row in (rows[at] for at in groups[user])
        ]
        records, _, _ = usable_records(candidates, f"{AYA.id}, user {user}")
        if len(records) >= minimum:
            usable[user] = records
    if len(usable) < clients:
        raise DataError(
            f"{AYA.id} has {len(usable)} users with {minimum} records of the eight languages, not {clients}"
        )
    members = [
        client(f"client-{number:02d}", records, test_fraction, seed, "aya-users", {"user": user})
        for number, (user, records) in enumerate(usable.items())
    ]
    arguments = {"clients": clients, "minimum": minimum, "test_fraction": test_fraction, "seed": seed}
    entry = source_entry(place, AYA, "train", len(rows), sha256)
    return assemble("aya-users", members, partition="natural", arguments=arguments, sources=[entry])
