"""`names`: which kind of thing has this name? Four kinds in 15 languages; docs/names.md.

The strings are not in this repository: `befit.data.offline.name_strings` builds them from Babel. Names are divided *by
key* (the code of a language, territory, currency or script) and in the same way for all languages, so that no client
trains on a translation of a name that another one is tested on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Annotated, Any, Literal

from befit.core.errors import ConfigError, DataError, did_you_mean
from befit.core.schema import POSITIVE, between
from befit.data.federation import ClientData, Federation
from befit.data.offline.name_strings import (
    BABEL,
    CLIENT_LANGUAGES,
    KINDS,
    PUBLIC_LANGUAGES,
    STRINGS_SHA256,
    Name,
    fold,
    name_hash,
    name_strings,
)
from befit.data.partition import Partition, generator, lda_equal, lda_mixtures, partition_hash, read_stored, stored_text
from befit.data.registry import benchmark

SMALL = ("en", "de", "ru", "hi", "zh")
# Twelfths of all keys: where a name goes depends on its key alone, never on the language.
POOLS = {
    ("seen", "train"): range(4),
    ("new", "train"): range(4, 8),
    ("seen", "test"): range(8, 10),
    ("new", "test"): range(10, 12),
}
MINIMUM = {"train": 30, "test": 15}
MODEL = "names-bert-fl"


@benchmark(
    "names",
    "1",
    summary="Language, territory, currency or script? Names in 15 languages, newcomers too; needs the extra benchmarks",
    default_model=MODEL,
    task="text-classification",
)
def names(
    clients_per_language: int = 4,
    languages: list[str] | None = None,
    pool: Literal["both", "seen"] = "both",
    alpha: float = 0.5,
    val_fraction: Annotated[float, between(0, 1)] = 0.0,
    seed: int = 0,
    train: Annotated[int | None, POSITIVE] = None,
) -> Federation:
    """Clients with skewed parts of one language's names, and as many newcomers with other names.

    clients_per_language  clients of each language; the newcomers are as many again
    languages             codes of the clients' languages; null: all 15
    pool                  both, or seen: no newcomers
    alpha                 per class, of the Dirichlet distribution of a client's kinds; small is skewed
    val_fraction          share of every client's training names (at least 5) that is held out for validation
    seed                  of the partition
    train                 at most so many training names of each client, beside those held out; null: all

    Raises DataError without Babel, with another release of it, or where a client would hold fewer than 30 training or
    15 test names; ConfigError for an unknown language.
    """
    chosen = known_languages(languages)
    pools, dropped = split_pools(name_strings())
    lists: Partition = []
    clients = {"seen": [], "new": []}
    for language in chosen:
        for group in ("seen", "new") if pool == "both" else ("seen",):
            rows = {split: pools[language, group, split] for split in MINIMUM}
            parts = partition(rows, language, group, clients_per_language, alpha, seed)
            lists += [indices for split in MINIMUM for indices in parts[split]]
            for number in range(clients_per_language):
                name = f"{language}-{number}" if group == "seen" else f"{language}-new-{number}"
                records = {split: [record(rows[split][i]) for i in parts[split][number]] for split in MINIMUM}
                rest, val = hold_out(records["train"], val_fraction, seed, name)
                if train is not None and train < len(rest):
                    drawn = generator(seed, "names", f"{name}/train").permutation(len(rest))[:train]
                    rest = tuple(rest[index] for index in sorted(drawn.tolist()))
                clients[group].append(ClientData(name, rest, val, tuple(records["test"]), {"language": language}))
    arguments = {
        "clients_per_language": clients_per_language,
        "languages": list(chosen),
        "pool": pool,
        "alpha": alpha,
        "val_fraction": val_fraction,
        "seed": seed,
        **({} if train is None else {"train": train}),
    }
    manifest = {
        "sources": [{"id": f"babel=={BABEL} (Unicode CLDR)", "sha256": STRINGS_SHA256, "licence": "Unicode-3.0"}],
        "partition": {"name": "lda_equal", "args": arguments, "seed": seed, "sha256": partition_hash(lists)},
        "dropped": {"training names equal to a test name": dropped},
        "counts": {client.id: client.sizes for client in (*clients["seen"], *clients["new"])},
    }
    return Federation(
        "names",
        "1",
        "text-classification",
        tuple(clients["seen"]),
        label_names=KINDS,
        newcomers=tuple(clients["new"]),
        public=tuple(record(row) for language in PUBLIC_LANGUAGES for row in pools[language, "public", "train"]),
        manifest=manifest,
    )


@benchmark(
    "names-small",
    "1",
    summary="`names` with five languages (en, de, ru, hi, zh): 20 clients and 20 newcomers",
    default_model=MODEL,
    task="text-classification",
)
def names_small(alpha: float = 0.5, val_fraction: Annotated[float, between(0, 1)] = 0.0, seed: int = 0) -> Federation:
    """The clients that `names` has in English, German, Russian, Hindi and Chinese.

    alpha         per class, of the Dirichlet distribution of a client's kinds; small is skewed
    val_fraction  share of every client's training names (at least 5) that is held out for validation
    seed          of the partition
    """
    return replace(names(languages=list(SMALL), alpha=alpha, val_fraction=val_fraction, seed=seed), name="names-small")


def known_languages(languages: Sequence[str] | None) -> tuple[str, ...]:
    """The languages in the order given. Raises ConfigError for unknown or repeated ones, or for none."""
    if languages is None:
        return CLIENT_LANGUAGES
    known = ", ".join(CLIENT_LANGUAGES)
    problems = [
        f"benchmark.languages: {code!r} is not one of {known}.{did_you_mean(code, CLIENT_LANGUAGES)}"
        for code in languages
        if code not in CLIENT_LANGUAGES
    ]
    problems += [
        f"benchmark.languages: {code} is there twice"
        for code in sorted(set(languages))
        if list(languages).count(code) > 1
    ]
    if not languages:
        problems = ["benchmark.languages: must name at least one language, or be null for all"]
    if problems:
        raise ConfigError(problems, "the benchmark")
    return tuple(languages)


def split_pools(strings: Sequence[Name]) -> tuple[dict[tuple[str, str, str], list[Name]], int]:
    """Names by (language, pool, split), each in the order of its id, and how many training names were dropped.

    A training name that equals a test name of any language (NFKC, casefold) is dropped: names of different keys can
    coincide between languages. A public one is dropped where it equals any client's name.
    """
    pools: dict[tuple[str, str, str], list[Name]] = {}
    for row in sorted(strings):
        if row.language in PUBLIC_LANGUAGES:
            pools.setdefault((row.language, "public", "train"), []).append(row)
        else:
            twelfth = name_hash(f"{row.kind}:{row.key}") % 12
            pool, split = next(place for place, twelfths in POOLS.items() if twelfth in twelfths)
            pools.setdefault((row.language, pool, split), []).append(row)
    tested = {fold(row.text) for (_, _, split), rows in pools.items() if split == "test" for row in rows}
    private = {fold(row.text) for (_, pool, _), rows in pools.items() if pool != "public" for row in rows}
    kept: dict[tuple[str, str, str], list[Name]] = {}
    for (language, pool, split), rows in pools.items():
        refused = set() if split == "test" else private if pool == "public" else tested
        kept[language, pool, split] = [row for row in rows if fold(row.text) not in refused]
    lost = sum(len(pools[place]) - len(kept[place]) for place in pools if place[1] != "public")
    return kept, lost


def partition(
    rows: dict[str, list[Name]], language: str, pool: str, clients: int, alpha: float, seed: int
) -> dict[str, Partition]:
    """Index lists into `rows[split]`: equal sizes, one mixture of kinds per client that serves both splits.

    The lists of the default arguments ship with the package, since NumPy may change what a seed draws.
    """
    for split, minimum in MINIMUM.items():
        if clients < 1 or len(rows[split]) // clients < minimum:
            raise DataError(
                f"names: {len(rows[split])} {split} names in {language} do not give each of {clients} clients "
                f"{minimum}; use 1 to {len(rows[split]) // minimum} clients_per_language"
            )
    return shipped(language, pool, clients, alpha, seed) or draw(rows, language, pool, clients, alpha, seed)


def draw(
    rows: dict[str, list[Name]], language: str, pool: str, clients: int, alpha: float, seed: int
) -> dict[str, Partition]:
    federation = f"names/{language}/{pool}"
    mixtures = lda_mixtures(clients, len(KINDS), alpha, seed, federation)
    return {
        split: lda_equal(
            [KINDS.index(row.kind) for row in rows[split]], clients, alpha, seed, federation, split, mixtures
        )
        for split in MINIMUM
    }


def shipped(language: str, pool: str, clients: int, alpha: float, seed: int) -> dict[str, Partition] | None:
    """The index lists that ship; None for other arguments than the defaults."""
    if (clients, alpha, seed) != (4, 0.5, 0):
        return None
    path = files("befit.data.offline").joinpath("names_partitions.json")
    return read_stored(path, f"{language}/{pool}")


def hold_out(
    records: list[dict[str, Any]], fraction: float, seed: int, client: str
) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    """Training and validation records: `fraction` of them at random, at least 5, or none where it is 0."""
    if not fraction:
        return tuple(records), ()
    count = max(5, round(fraction * len(records)))
    if count >= len(records):
        raise DataError(
            f"names: val_fraction {fraction} leaves client {client} with {len(records)} names nothing to train on"
        )
    chosen = set(generator(seed, "names", f"{client}/val").permutation(len(records))[:count].tolist())
    train = tuple(row for index, row in enumerate(records) if index not in chosen)
    return train, tuple(row for index, row in enumerate(records) if index in chosen)


def record(row: Name) -> dict[str, Any]:
    return {"id": row.id, "text": row.text, "label": KINDS.index(row.kind), "language": row.language}


def write_shipped() -> str:
    """The content of names_partitions.json, drawn again (a maintainer's command)."""
    pools, _ = split_pools(name_strings())
    return stored_text(
        {
            f"{language}/{pool}": draw(
                {split: pools[language, pool, split] for split in MINIMUM}, language, pool, 4, 0.5, 0
            )
            for language in CLIENT_LANGUAGES
            for pool in ("seen", "new")
        }
    )


if __name__ == "__main__":
    from pathlib import Path

    from befit.core.storage import atomic_write

    atomic_write(Path(__file__).with_name("names_partitions.json"), write_shipped().encode())
