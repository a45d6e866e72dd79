"""`masakhanews-320`: news topics in 16 African languages (FedP2EFT, Tables 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from befit.core.errors import DataError
from befit.core.schema import POSITIVE, at_least, show
from befit.data.federation import ClientData, Federation
from befit.data.files.readers import Row, read_rows
from befit.data.papers.assemble import assemble, ordered, shuffled, source_entry
from befit.data.papers.source import Place, Source, check_fields, read_split
from befit.data.partition import lda_equal, lda_mixtures
from befit.data.registry import benchmark

# Its main branch is a loading script, which `datasets` refuses from version 4 on: the converted branch is Parquet.
NEWS = Source("masakhane/masakhanews", "AFL-3.0", revision="refs/convert/parquet")
LANGUAGES = tuple(
    ["amh", "eng", "fra", "hau", "ibo", "lin", "lug", "orm", "pcm", "run", "sna", "som", "swa", "tir", "xho", "yor"]
)
LABELS = ("business", "entertainment", "health", "politics", "religion", "sports", "technology")
POOLS = ("seen", "unseen")
FIELDS = ("headline_text", "label")
AUTHORS = ("category", "headline", "text")


@benchmark(
    "masakhanews-320",
    "2",
    summary="News topics in 16 languages, 160 clients and 160 newcomers of all sizes (FedP2EFT); needs the data",
    default_model="google-bert/bert-base-multilingual-cased",
    task="text-classification",
    seeded=False,
)
def masakhanews_320(
    root: str = "",
    hub: bool = False,
    clients: Annotated[int, at_least(1)] = 10,
    alpha: Annotated[float, POSITIVE] = 0.5,
    seed: int = 42,
    revisions: dict[str, str] | None = None,
) -> Federation:
    """Half of each language is the clients', half the newcomers'; validation rows are training rows. Languages differ
    in size, and clients with them.

    root       directory with LANGUAGE/train, validation and test, as Parquet, JSON Lines or `datasets` directories, or
               LANGUAGE/train.tsv, dev.tsv and test.tsv as the authors publish them
    hub        load the converted branch of masakhane/masakhanews from the hub instead
    clients    for each language and pool
    alpha      of each client's Dirichlet distribution over the seven classes, which is the same in all languages
    seed       of the halves and of the partition
    revisions  hub id to the commit that is wanted
    """
    place = Place("masakhanews-320", root, hub, revisions)
    place.check([NEWS])
    entries: list[dict[str, Any]] = []
    pools: list[list[ClientData]] = [[], []]
    # The same for all languages and both pools, as a fixed seed gives them; by class number of all seven, so that a
    # language without some of the classes keeps the others' places.
    mixtures = lda_mixtures(clients, len(LABELS), alpha, seed, "masakhanews-320")
    for position, language in enumerate(LANGUAGES):
        rows = {
            split: read(place, language, names, entries)
            for split, names in (("train", ("train", "validation")), ("test", ("test",)))
        }
        for pool, members in enumerate(pools):
            stage = f"{language}/{POOLS[pool]}"
            dealt: dict[str, list[tuple[Any, ...]]] = {}
            for split, of_split in rows.items():
                order = shuffled(of_split, seed, "masakhanews-320", f"{language}/{split}")
                half = order[: len(order) // 2] if pool == 0 else order[len(order) // 2 :]
                if len(half) < clients:
                    raise DataError(
                        f"{NEWS.id}, {language}, {split}: {len(half)} rows of a pool are too few for {clients} clients"
                    )
                parts = lda_equal(
                    [row.values["label"] for row in half],
                    clients,
                    alpha,
                    seed,
                    "masakhanews-320",
                    f"{stage}/{split}",
                    mixtures,
                )
                halves = records(half, f"{split}-{pool}", language)
                dealt[split] = [tuple(halves[index] for index in part) for part in parts]
            for index in range(clients):
                number = pool * clients * len(LANGUAGES) + position * clients + index
                info = {"language": language, "pool": POOLS[pool]}
                members.append(
                    ClientData(f"client-{number:03d}", dealt["train"][index], (), dealt["test"][index], info)
                )
    return assemble(
        "masakhanews-320",
        pools[0],
        newcomers=pools[1],
        label_names=LABELS,
        partition="lda_equal",
        arguments={"clients": clients, "alpha": alpha, "seed": seed},
        sources=entries,
    )


def read(place: Place, language: str, splits: Sequence[str], entries: list[dict[str, Any]]) -> list[Row]:
    """Rows of some splits of a language; what was read is noted in `entries`."""
    if place.hub:
        source = replace(NEWS, config=language, files=f"{language}/{{split}}/*.parquet")
    else:
        source = replace(NEWS, config=language)
    rows = []
    for split in splits:
        path = None if place.hub else authors_file(place, language, split)
        rows += read_split(place, source, split, FIELDS) if path is None else authors_rows(path)
    for row in rows:
        label, text = row.values["label"], row.values["headline_text"]
        if type(label) is not int or not 0 <= label < len(LABELS):
            raise DataError(f"{row.where}: label must be 0 to {len(LABELS) - 1}, got {label!r}")
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{row.where}: headline_text must be text, got {text!r}")
    in_order, sha256 = ordered(rows, FIELDS)
    entries.append(source_entry(place, source, "+".join(splits), len(rows), sha256))
    return in_order


def authors_file(place: Place, language: str, split: str) -> Path | None:
    """A split as the repository masakhane-io/masakhane-news and the hub's main branch have it: `data/lug/dev.tsv`."""
    name = f"{'dev' if split == 'validation' else split}.tsv"
    root = place.folder(NEWS)
    return next((path for folder in (root, root / "data") if (path := folder / language / name).is_file()), None)


def authors_rows(path: Path) -> list[Row]:
    """Rows with the columns `category`, `headline`, `text` and `url`, as those of the converted branch.

    Its `headline_text` is headline and text; here a space is between them. Either may be empty: in Luganda's files
    the headline holds the whole article.
    """
    rows = read_rows(path, AUTHORS)
    check_fields(rows, AUTHORS)
    converted = []
    for row in rows:
        category = row.values["category"].strip()
        if category not in LABELS:
            raise DataError(f"{row.where}: category must be one of {', '.join(LABELS)}, got {show(category)}")
        text = " ".join(part for name in ("headline", "text") if (part := row.values[name].strip()))
        converted.append(replace(row, values={"headline_text": text, "label": LABELS.index(category)}))
    return converted


def records(rows: Sequence[Row], name: str, language: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{language}-{name}-{index:04d}",
            "text": row.values["headline_text"],
            "label": row.values["label"],
            "language": language,
        }
        for index, row in enumerate(rows)
    ]
