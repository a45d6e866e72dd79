"""Where a configuration's privacy cannot be had, found before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from befit.protocol.accountant import MISSING, installed
from befit.protocol.client_privacy import hides_clients, unfit_for_clients
from befit.protocol.context import Context, Problem
from befit.protocol.mechanism import Privacy
from befit.protocol.method import Method
from befit.protocol.privacy import unfit_stage, whole
from befit.protocol.registry import standard_method
from befit.protocol.settings import TrainSettings


def refused(method: Method, privacy: Privacy, context: Context) -> Iterator[Problem]:
    """Why the method cannot run with this privacy."""
    if not installed():
        yield Problem("error", "privacy.unit", MISSING.removeprefix("unit: "))
        return
    yield from _delta(privacy, context)
    check = _by_example if privacy.by_example else _by_client
    yield from check(method, privacy, context)


def refused_client(
    method: Method, privacy: Privacy, train: TrainSettings, client: str, examples: int
) -> Iterator[Problem]:
    """Why no client of so many training examples can have each of them protected, as `refused` tells of all clients.
    Nothing for a method with which none can."""
    if installed() and not unfit_stage(method):
        yield from _not_below(privacy, examples, f"number of training examples of {client}")
        yield from _too_much(lambda: whole(privacy, method, train, examples), privacy)


def _delta(privacy: Privacy, context: Context) -> Iterator[Problem]:
    clients = context.federation.clients
    largest = max(clients, key=lambda client: len(client.train))
    count, whose = len(clients), "number of clients"
    if privacy.by_example:
        count, whose = len(largest.train), f"number of training examples of {largest.id}"
    if not count:
        return  # what sites have is known there
    yield from _not_below(privacy, count, whose)


def _not_below(privacy: Privacy, count: int, whose: str) -> Iterator[Problem]:
    if (delta := privacy.settings.delta or 0.0) >= 1 / count:
        text = f"{delta:g} is not below 1 / {count}, of the {whose}: one of them could be published whole"
        yield Problem("error", "privacy.delta", text)


def _by_example(method: Method, privacy: Privacy, context: Context) -> Iterator[Problem]:
    if reason := unfit_stage(method):
        text = f"{reason}; take a method that trains by gradients alone (befit explain says which), or unit client"
        yield Problem("error", "privacy.unit", text)
        return
    counts = {len(client.train) for client in context.federation.clients} - {0}  # of those who have said so
    ends = {min(counts), max(counts)} if counts else set[int]()
    yield from _too_much(lambda: max((whole(privacy, method, context.train, n) for n in ends), default=0.0), privacy)


def _by_client(method: Method, privacy: Privacy, context: Context) -> Iterator[Problem]:
    for reason in unfit_for_clients(method, context.shapes.values()):
        text = f"{reason}; take a method of plain averages, such as {standard_method()}, or unit example"
        yield Problem("error", "privacy.unit", text)
    if context.guard.rule != "none" or context.guard.clip is not None:
        key = "guard.clip" if context.guard.rule == "none" else "guard.rule"
        text = "depends on what is usual among all updates, which privacy.unit client does not count; leave it out"
        yield Problem("error", key, text)
    plan = hides_clients(method, context)
    assert plan is not None
    yield from _too_much(lambda: plan.epsilon, privacy)


def _too_much(spent: Callable[[], float], privacy: Privacy) -> Iterator[Problem]:
    budget = privacy.settings.epsilon
    try:
        total = spent()
    except ValueError as error:
        yield Problem("error", "privacy.epsilon", f"{error}; take fewer rounds or steps, or a larger epsilon")
        return
    if budget is not None and total > budget:
        text = (
            f"all rounds together would spend {total:.4g}, and {budget:g} is the budget; take fewer rounds or steps, "
            "or a larger noise_multiplier, or leave it out"
        )
        yield Problem("error", "privacy.epsilon", text)
