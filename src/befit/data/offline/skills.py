"""`skills`: clients that each want another text made of a word; docs/skills.md.

A client's task is a pair of operations that the backbone knows, in a combination that it has never seen, on real words
where it was trained on random letters. Words come from `befit.data.offline.skills_words`; which ones a client holds is
decided by SHA-256 alone, so that no list of indices has to ship.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from befit.core.errors import ConfigError, DataError
from befit.core.schema import variant
from befit.data.federation import SPLITS, ClientData, Federation
from befit.data.offline.name_strings import BABEL, pinned_babel
from befit.data.offline.skills_tasks import (
    CLIENT_PAIRS,
    HELD_OUT,
    NEWCOMER_PAIRS,
    answer,
    generated_records,
    near_miss,
)
from befit.data.registry import benchmark

WORDS_SHA256 = "9af9f64a701a86bf5a363a07c3a0b45b99fb733a33db8bb5fd8b3999af88e0b2"


def english_words() -> tuple[str, ...]:
    """The 771 different English names of the CLDR with 4 to 12 ASCII letters, sorted.

    Raises DataError where Babel is missing, of another release, or gives other names than were recorded.
    """
    locale = pinned_babel("skills").Locale.parse("en")
    tables = (locale.languages, locale.territories, locale.currencies, locale.scripts)
    names = {name for table in tables for name in table.values()}
    words = tuple(sorted(name for name in names if re.fullmatch(r"[A-Za-z]{4,12}", name)))
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()
    if digest != WORDS_SHA256:
        raise DataError(
            f"skills: the words that Babel {BABEL} gives here have the hash {digest[:12]}, recorded is "
            f"{WORDS_SHA256[:12]}; install Babel anew: pip install --force-reinstall babel=={BABEL}"
        )
    return words


def halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """386 words to train and validate on, and 385 to test on, in an order that their SHA-256 decides."""
    words = sorted(english_words(), key=lambda word: hashlib.sha256(f"skills:{word}".encode()).digest())
    middle = (len(words) + 1) // 2
    return tuple(words[:middle]), tuple(words[middle:])


PUBLIC = 5000
PUBLIC_SEED = 1_000_003  # not one of those that the backbones were trained with


def skills(
    clients: int = 8,
    train: int = 128,
    val: int = 60,
    test: int = 200,
    seed: int = 0,
    tasks: int | None = None,
    *,
    name: str = "skills",
    pairs: Sequence[str] = CLIENT_PAIRS,
    newcomers: Sequence[str] = NEWCOMER_PAIRS,
    preference: bool = False,
) -> Federation:
    """Eight pairs of operations, one a client, and two more for newcomers. Ships with its backbone.

    clients    how many of the eight, from the first
    train      words that each client trains on
    val        words that each client validates on, of the same half of all words
    test       words of the other half that each client is tested on
    seed       of which words a client holds
    tasks      different pairs, which the clients have in turn; null: each its own
    pairs      of operations, one a client
    newcomers  pairs of newcomers
    preference of the answer over a near miss is learnt, instead of the answer

    Clients may hold the same words; their answers differ. Raises ConfigError where the 386 and 385 words of the two
    halves are not enough, DataError without Babel.
    """
    sizes = (train, val, test)
    first, second = halves()
    check(clients, tasks, len(pairs), sizes, len(first), len(second))
    form = preferring if preference else dict
    of_clients = (pairs[index % (tasks or clients)] for index in range(clients))
    members = tuple(
        client(pair, (first, second), sizes, seed, 1 + index // (tasks or clients), form)
        for index, pair in enumerate(of_clients)
    )
    new = tuple(client(pair, (first, second), sizes, seed, form=form) for pair in newcomers)
    manifest = {
        "sources": [
            {
                "id": f"babel=={BABEL} (Unicode CLDR, English)",
                "sha256": WORDS_SHA256,
                "rows": len(first) + len(second),
                "licence": "Unicode-3.0",
            }
        ],
        "partition": {
            "name": "by_task",
            "seed": seed,
            "sha256": words_hash((*members, *new)),
            "args": {"clients": clients, "train": train, "val": val, "test": test, "seed": seed}
            | ({} if tasks is None else {"tasks": tasks}),
        },
        "counts": {member.id: member.sizes for member in (*members, *new)},
    }
    avoid = {word.lower() for word in english_words()}
    public = islice(generated_records(PUBLIC_SEED + seed, avoid, mixed_case=True), PUBLIC)
    return Federation(
        name,
        "1",
        "preference" if preference else "causal-lm",
        members,
        newcomers=new,
        public=tuple(map(form, public)),
        manifest=manifest,
    )


_WORDS = "Text to text: eight clients, each with its own operation on words; needs the extra benchmarks"
_LOW = "`skills` with 12 training words a client, which a client alone learns by heart"
_TEN = "`skills` with all ten unseen pairs as clients, and no newcomers"
_SHIFT = "`skills` on a backbone that has never seen a capital letter: averages of adapters fall apart"
_PREFER = "`skills` where the right answer is to be preferred to a near miss"
_EIGHT = {"pairs": CLIENT_PAIRS, "newcomers": NEWCOMER_PAIRS, "preference": False}
for _name, _summary, _model, _fixed in (
    ("skills", _WORDS, "skills-llama", _EIGHT),
    ("skills-low", _LOW, "skills-llama", {**_EIGHT, "train": 12}),
    (
        "skills-10",
        _TEN,
        "skills-llama",
        {"clients": len(HELD_OUT), "pairs": HELD_OUT, "newcomers": (), "preference": False},
    ),
    ("skills-shift", _SHIFT, "skills-llama-lower", _EIGHT),
    ("skills-preference", _PREFER, "skills-llama", {**_EIGHT, "preference": True}),
):
    _task = "preference" if _fixed["preference"] else "causal-lm"
    benchmark(_name, "1", summary=_summary, default_model=_model, task=_task)(variant(skills, name=_name, **_fixed))


def client(
    pair: str,
    words: tuple[Sequence[str], Sequence[str]],
    sizes: tuple[int, int, int],
    seed: int,
    number: int = 1,
    form: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> ClientData:
    """The client "drop-first.reverse" of the pair "drop first, reverse", or "drop-first.reverse-2", its second.

    form  what its records become
    """
    name = pair.replace(", ", ".").replace(" ", "-") + (f"-{number}" if number > 1 else "")
    train, val, test = sizes
    learn = shuffled(words[0], f"{seed}/{name}/train")
    # Validation words come from the end: training on fewer words leaves them as they are.
    parts = {
        "train": learn[:train],
        "val": learn[len(learn) - val :],
        "test": shuffled(words[1], f"{seed}/{name}/test")[:test],
    }
    splits = {split: tuple(form(record(name, pair, word)) for word in part) for split, part in parts.items()}
    return ClientData(name, splits["train"], splits["val"], splits["test"], {"task": pair})


def record(name: str, pair: str, word: str) -> dict[str, Any]:
    return {"id": f"{name}-{word}", "instruction": pair, "input": word, "output": answer(pair, word)}


def preferring(record: Mapping[str, Any]) -> dict[str, Any]:
    """The answer as the chosen one, beside a near miss."""
    kept = {key: value for key, value in record.items() if key != "output"}
    return {**kept, "chosen": record["output"], "rejected": near_miss(record["instruction"], record["input"])}


def shuffled(words: Sequence[str], salt: str) -> list[str]:
    """The words in an order that `salt` decides, the same with every version of everything."""
    return sorted(words, key=lambda word: hashlib.sha256(f"skills/{salt}/{word}".encode()).digest())


def words_hash(clients: Sequence[ClientData]) -> str:
    """SHA-256 of who holds which words in which split."""
    digest = hashlib.sha256()
    for member in clients:
        for split in SPLITS:
            words = " ".join(row["input"] for row in getattr(member, split))
            digest.update(f"{member.id}/{split}: {words}\n".encode())
    return digest.hexdigest()


def check(clients: int, tasks: int | None, pairs: int, sizes: tuple[int, int, int], learn: int, rest: int) -> None:
    """Raise ConfigError naming all sizes that cannot be."""
    train, val, test = sizes
    problems = [] if 1 <= clients <= pairs else [f"benchmark.clients: must be 1 to {pairs}, got {clients}"]
    if tasks is not None and not 1 <= tasks <= max(clients, 1):
        problems.append(f"benchmark.tasks: must be 1 to the number of clients, {clients}, got {tasks}")
    problems += [
        f"benchmark.{key}: must be {least} or more, got {value}"
        for key, value, least in (("train", train, 1), ("val", val, 0), ("test", test, 0))
        if value < least
    ]
    if train + val > learn:
        problems.append(f"benchmark.train: {train} and val {val} words are more than the {learn} of their half")
    if test > rest:
        problems.append(f"benchmark.test: there are {rest} words to test on, not {test}")
    if problems:
        raise ConfigError(problems, "the benchmark")
