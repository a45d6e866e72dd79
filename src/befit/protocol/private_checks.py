"""Where a configuration's privacy cannot be had, found before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from befit.protocol.accountant import MISSING, installed
from befit.protocol.privacy import Privacy, unfit_stage

if TYPE_CHECKING:
    from befit.protocol.check import Context
    from befit.protocol.method import Method

Found = tuple[str, str]  # the key, and what is wrong with it


def refused(method: Method, privacy: Privacy, context: Context) -> Iterator[Found]:
    """Why the method cannot run with this privacy."""
    if not installed():
        yield "privacy.unit", MISSING.removeprefix("unit: ")
        return
    yield from _delta(privacy, context)
    if privacy.by_example:
        yield from _by_example(method, privacy, context)


def _delta(privacy: Privacy, context: Context) -> Iterator[Found]:
    delta, clients = privacy.settings.delta or 0.0, context.federation.clients
    largest = max(clients, key=lambda client: len(client.train), default=None)
    if largest is None:
        return
    count, whose = len(clients), "number of clients"
    if privacy.by_example:
        count, whose = len(largest.train), f"number of training examples of {largest.id}"
    if delta >= 1 / count:
        yield (
            "privacy.delta",
            f"{delta:g} is not below 1 / {count}, of the {whose}: one of them could be published whole",
        )


def _by_example(method: Method, privacy: Privacy, context: Context) -> Iterator[Found]:
    if reason := unfit_stage(method):
        yield (
            "privacy.unit",
            f"{reason}; take a method that trains by gradients alone (befit explain says which), or unit client",
        )
        return
    budget, counts = privacy.settings.epsilon, {len(client.train) for client in context.federation.clients}
    try:
        worst = max(privacy.whole(method, context.train, count) for count in (min(counts), max(counts)) if count)
    except ValueError as error:
        yield "privacy.epsilon", f"{error}; take fewer rounds or steps, or a larger epsilon"
        return
    if budget is not None and worst > budget:
        yield (
            "privacy.epsilon",
            f"all rounds together would spend {worst:.4g}, and {budget:g} is the budget; take fewer rounds or steps, "
            "or a larger noise_multiplier, or leave it out",
        )
