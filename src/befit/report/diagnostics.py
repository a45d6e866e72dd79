"""Numbers beside the scores: what clients report of their training and how much they count for each other, shown as
the method declares (`befit.protocol.method.Diagnostic`), and their models on each other's examples."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Literal

from befit.report.numbers import NOTHING, count_text, listing, score_of
from befit.report.results import ClientRow, RunResults, Shown

Values = dict[str, tuple[float, float]]  # by client, the least and the largest number, the same where there is one

Rows = Mapping[str, Mapping[str, float]]  # by client, a number for each client
ON_OTHERS = "Every model on every client's examples"


def declared(results: RunResults, kind: Literal["share", "choice", "alarm", "weights"]) -> list[Shown]:
    """What the method declares of one kind."""
    return [shown for shown in results.get("diagnostics") or [] if shown["kind"] == kind]


def shares(results: RunResults) -> list[tuple[Shown, Values]]:
    """Every number or range in [0, 1] that some client has, with all clients that have it."""
    pairs = []
    for shown in declared(results, "share"):
        ends = {client: share_of(row, shown) for client, row in results["clients"].items()}
        pairs.append((shown, {client: pair for client, pair in ends.items() if pair is not None}))
    return [(shown, values) for shown, values in pairs if values]


def share_of(row: ClientRow, shown: Shown) -> tuple[float, float] | None:
    """Least and largest number of one client, the same where there is one; None if not known."""
    least, most = (score_of(row.get("diagnostics") or {}, shown["keys"][place]) for place in (0, -1))
    return None if least is None or most is None else (least, most)


def share_header(shown: Shown) -> str:
    return NOTHING.join(shown["keys"])


def share_text(pair: tuple[float, float] | None, shown: Shown) -> str:
    """The number, or the range from the least to the largest; a dash where there is none."""
    return NOTHING if pair is None else NOTHING.join(f"{pair[place]:.2f}" for place in range(len(shown["keys"])))


def choice_notes(results: RunResults) -> list[str]:
    """For whom a choice among several kept what."""
    notes = []
    for shown in declared(results, "choice"):
        kept: dict[str, list[str]] = {}
        for client, row in results["clients"].items():
            for name, value in (row.get("diagnostics") or {}).items():
                for start in shown["keys"]:
                    if name.startswith(start):
                        kept.setdefault(name.removeprefix(start), []).extend([client] if value else [])
        words = [f"the {name} one for {listing(clients)}" for name, clients in kept.items() if clients]
        notes += [shown["text"].format(choices=listing(list(kept)), kept=listing(words))] * bool(kept)
    return notes


def alarms(results: RunResults) -> list[str]:
    """What the method warns of, with the number of clients that it is true for."""
    return [alarm_text(text, *counts) for text, counts in alarm_counts(results).items()]


def alarm_counts(results: RunResults) -> dict[str, tuple[int, int]]:
    """By the method's sentence, for how many clients it is true, if for any, and how many say."""
    counts = {}
    for shown in declared(results, "alarm"):
        values = [pair[0] for row in results["clients"].values() if (pair := share_of(row, shown)) is not None]
        if few := sum(value <= shown["limit"] for value in values):
            counts[shown["text"]] = few, len(values)
    return counts


def alarm_text(text: str, few: int, known: int, of: str = "") -> str:
    """The sentence with its numbers; `of` says what else the clients are of."""
    return text.format(clients=f"{few} of {count_text(known, 'client')}{of}")


def client_means(results: RunResults) -> dict[str, float]:
    """The mean over clients of every number that the method names alone, such as a mixing weight or a mean scale."""
    keys = [key for shown in results.get("diagnostics") or [] if shown["kind"] != "choice" for key in shown["keys"]]
    rows = [row.get("diagnostics") or {} for row in results["clients"].values()]
    values = {key: [value for row in rows if (value := score_of(row, key)) is not None] for key in keys}
    return {key: fmean(numbers) for key, numbers in values.items() if numbers}


def on_others(results: RunResults) -> Rows:
    """By client, its model's headline on every client's examples, its own among them; nothing where not measured."""
    rows: dict[str, dict[str, float]] = {}
    for client, row in results["clients"].items():
        own, others = score_of(row, results["metric"]), row.get("on_others")
        if others and own is not None:
            rows[client] = {client: own, **others}
    return rows


def weights(results: RunResults) -> Rows:
    """By client, how much every client counts in what it is sent."""
    return {client: counts for client, row in results["clients"].items() if (counts := row.get("weights"))}
