"""`xnli-600`: 15 languages of XNLI, 20 clients and 20 newcomers each (FedP2EFT, Tables 3, 4, 8 and 9)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from befit.core.errors import ConfigError, DataError
from befit.core.schema import POSITIVE, at_least
from befit.data.federation import ClientData, Federation
from befit.data.papers.assemble import assemble, content_hash, source_entry
from befit.data.papers.source import Place, Source, load_table
from befit.data.partition import Partition, generator, lda_equal, lda_mixtures
from befit.data.registry import benchmark

if TYPE_CHECKING:
    import pyarrow

XNLI = Source(
    "facebook/xnli", "CC BY-NC 4.0", config="all_languages", revision="b8dd5d7af51114dbda02c0e3f6133f332186418e"
)
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
LABELS = ("entailment", "neutral", "contradiction")
POOLS = ("seen", "unseen")
FIELDS = ("premise", "hypothesis", "label")


@benchmark(
    "xnli-600",
    "1",
    summary="XNLI in 15 languages, 300 clients and 300 newcomers with skewed labels (FedP2EFT); needs the data",
    default_model="google-bert/bert-base-multilingual-cased",
    task="text-classification",
    seeded=False,
)
def xnli_600(
    root: str = "",
    hub: bool = False,
    clients: Annotated[int, at_least(1)] = 20,
    train: Annotated[int, at_least(1)] = 2000,
    test: Annotated[int, at_least(1)] = 500,
    alpha: Annotated[float, POSITIVE] = 0.5,
    unseen: Literal["own_labels", "shared_indices"] = "own_labels",
    seed: int = 42,
    revisions: dict[str, str] | None = None,
) -> Federation:
    """The first rows of the shuffled data are the clients', the next as many the newcomers'; all languages have the
    same rows in translation, and one partition. A client's test set has the class mixture of its training set.

    root       directory with the Parquet files of config all_languages, or a `datasets` directory
    hub        load facebook/xnli from the hub instead
    clients    for each language and pool
    train      rows of the train split for each pool
    test       rows of the test split for each pool
    alpha      of each client's Dirichlet distribution over the three classes, for each class
    unseen     how newcomers are divided: own_labels by their own labels, shared_indices as the positions of the
               clients' rows, which is the released code's and leaves nearly no skew
    seed       of the shuffle and of the partition
    revisions  hub id to the commit that is wanted
    """
    place = Place("xnli-600", root, hub, revisions)
    if problems := [
        f"benchmark.{key}: {value} rows are too few for {clients} clients"
        for key, value in (("train", train), ("test", test))
        if value < clients
    ]:
        raise ConfigError(problems, "the benchmark")
    place.check([XNLI])
    arguments = {"clients": clients, "train": train, "test": test, "alpha": alpha, "unseen": unseen, "seed": seed}
    sizes = {"train": train, "test": test}
    mixtures = lda_mixtures(clients, len(LABELS), alpha, seed, "xnli-600")
    chosen: dict[str, list[list[dict[str, Any]]]] = {}
    parts: dict[str, list[Partition]] = {}
    entries = []
    for split, size in sizes.items():
        table = load_table(place, XNLI, split, FIELDS)
        keys = row_keys(table)
        entries.append(source_entry(place, XNLI, split, len(keys), content_hash(keys)))
        if len(keys) < 2 * size:
            raise DataError(f"{XNLI.id}, {split}: {len(keys)} rows are too few for two pools of {size}")
        order = np.argsort(np.array(keys))[generator(seed, "xnli-600", split).permutation(len(keys))]
        taken = table.take(order[: 2 * size]).to_pylist()
        chosen[split] = [checked(taken[:size], split), checked(taken[size:], split)]
        parts[split] = [
            lda_equal([row["label"] for row in rows], clients, alpha, seed, "xnli-600", f"{split}/{pool}", mixtures)
            for pool, rows in zip(POOLS, chosen[split], strict=True)
        ]
        if unseen == "shared_indices":
            parts[split][1] = parts[split][0]
    pools: list[list[ClientData]] = [[], []]
    for pool, members in enumerate(pools):
        texts = {split: [translated(row) for row in chosen[split][pool]] for split in sizes}
        for position, language in enumerate(LANGUAGES):
            for index in range(clients):
                number = pool * clients * len(LANGUAGES) + position * clients + index
                splits = {
                    split: tuple(
                        record(
                            texts[split][row],
                            chosen[split][pool][row]["label"],
                            language,
                            f"{split}-{pool}-{row:04d}-{language}",
                        )
                        for row in parts[split][pool][index]
                    )
                    for split in sizes
                }
                info = {"language": language, "pool": POOLS[pool]}
                members.append(ClientData(f"client-{number:03d}", splits["train"], (), splits["test"], info))
    return assemble(
        "xnli-600",
        pools[0],
        newcomers=pools[1],
        label_names=LABELS,
        partition="lda_equal",
        arguments=arguments,
        sources=entries,
    )


def row_keys(table: pyarrow.Table) -> list[str]:
    """A row's hash by its English side, which the others translate; equal ones are told apart by their order."""
    import pyarrow

    pc: Any = import_module("pyarrow.compute")

    premises = table["premise"].combine_chunks()
    hypotheses = table["hypothesis"].combine_chunks()
    try:
        english = pc.struct_field(premises, "en").to_pylist()
        languages = pc.struct_field(hypotheses, "language")[0].as_py() if len(table) else list(LANGUAGES)
        translations = pc.struct_field(hypotheses, "translation")
        hypothesis = pc.list_element(translations, languages.index("en")).to_pylist()
    except (pyarrow.ArrowException, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{XNLI.id}: premise must be {{language: text}} and hypothesis {{language: [...], translation: "
            f"[...]}}; found {table.schema.field('premise').type} and "
            f"{table.schema.field('hypothesis').type}"
        ) from error
    seen: dict[str, int] = {}
    keys = []
    for first, second, label in zip(english, hypothesis, table["label"].to_pylist(), strict=True):
        key = hashlib.sha256(f"{first}\0{second}\0{label}".encode()).hexdigest()
        seen[key] = seen.get(key, -1) + 1
        keys.append(f"{key}-{seen[key]:04d}" if seen[key] else key)
    return keys


def checked(rows: Sequence[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """The rows, or DataError for a label or a set of languages that XNLI does not have."""
    for row in rows:
        languages = row["hypothesis"]["language"]
        if sorted(languages) != sorted(LANGUAGES) or sorted(row["premise"]) != sorted(LANGUAGES):
            raise DataError(
                f"{XNLI.id}, {split}: a row has the languages {', '.join(sorted(languages))} of hypotheses "
                f"and {', '.join(sorted(row['premise']))} of premises, not {', '.join(LANGUAGES)}"
            )
        if row["label"] not in range(len(LABELS)):
            raise DataError(f"{XNLI.id}, {split}: label must be 0, 1 or 2, got {row['label']!r}")
    return list(rows)


def translated(row: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Premise and hypothesis of every language."""
    hypotheses = dict(zip(row["hypothesis"]["language"], row["hypothesis"]["translation"], strict=True))
    return {language: (row["premise"][language], hypotheses[language]) for language in LANGUAGES}


def record(texts: dict[str, tuple[str, str]], label: int, language: str, name: str) -> dict[str, Any]:
    premise, hypothesis = texts[language]
    return {"id": name, "text": premise, "text_pair": hypothesis, "label": label, "language": language}
