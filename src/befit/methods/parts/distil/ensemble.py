"""Clients' models as teachers at the server: the mean of their logits on public records, and who learns from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from befit.adapters.keys import select, slot, slot_of
from befit.core.errors import ConfigError
from befit.core.values import Payload, State, Tick, Update
from befit.methods.parts.distil.settings import Distillation
from befit.methods.parts.distil.student import ModelAndTask, Student, forward_rows, view
from befit.methods.parts.distil.translate import View, same_rows, translate_rows
from befit.protocol.site import ServerSite

if TYPE_CHECKING:
    from befit.protocol.settings import TrainSettings
    from befit.tasks.base import Examples


@dataclass(frozen=True)
class TeacherLogits:
    """The mean logits of one family's clients on a batch.

    rows     (rows, classes) float32
    clients  their number
    """

    seen: View
    rows: Tensor
    clients: int


def lessons(
    site: ServerSite, updates: Sequence[Update], settings: Distillation, at: Tick
) -> Iterator[dict[str, TeacherLogits]]:
    """For every batch of the round's public records, the mean logits of each family that replied.

    Teachers are the shared adapters that clients sent, without dropout. One update is in memory at a time, and the
    logits of one batch.
    """
    public = public_of(site)
    families = _replied(site, updates)
    examples = {family: public(family) for family in families}
    chosen = settings.records(len(next(iter(examples.values()))), at)
    for places in settings.batches(chosen, at, "server"):
        taught: dict[str, TeacherLogits] = {}
        for family, of_family in families.items():
            backbone = site.backbones[family]
            seen = view(backbone, examples[family], places)
            states = (select(update.payload.arrays, slot("shared")) for update in of_family)
            taught[family] = TeacherLogits(seen, mean_logits(backbone, seen, states), len(of_family))
        yield taught


def mean_logits(model_and_task: ModelAndTask, seen: View, states: Iterator[State]) -> Tensor:
    """(rows, classes) float32: the mean logits of several adapters of one backbone."""
    total, count = torch.zeros((), device=model_and_task.model.device), 0
    for state in states:
        model = model_and_task.model
        with torch.no_grad(), model.training(False), model.using(state, slot_of(next(iter(state)))):
            total = total + forward_rows(model_and_task, seen)
        count += 1
    return total / count


def blend_teachers(
    student: View, teachers: Sequence[TeacherLogits], classes: int, temperature: float, top: int
) -> Tensor:
    """(student's rows, classes) float32: `softmax(mean of all teachers' logits / T)`, every client counting the same.

    Logits can only be averaged where rows and classes are the same; families with other tokenizers are translated,
    and add their probabilities, by their number of clients.
    """
    same = [family for family in teachers if family.rows.shape[-1] == classes and same_rows(family.seen, student)]
    parts: list[tuple[int, Tensor]] = []
    if same:
        clients = sum(family.clients for family in same)
        mean = torch.stack([family.clients * family.rows for family in same]).sum(0) / clients
        parts.append((clients, (mean / temperature).softmax(-1)))
    for family in teachers:
        if not any(family is other for other in same):
            likely = (family.rows / temperature).softmax(-1).topk(min(top, family.rows.shape[-1]))
            parts.append((family.clients, translate_rows(likely.values, likely.indices, family.seen, student, classes)))
    if len(parts) == 1:
        return parts[0][1]
    return torch.stack([clients * part for clients, part in parts]).sum(0) / sum(clients for clients, _ in parts)


def students(
    site: ServerSite, server: Payload, updates: Sequence[Update], settings: Distillation, at: Tick
) -> dict[str, Student]:
    """One for each family that replied, starting from the family's shared adapter in the server's memory."""
    public_of(site)  # refuses a server without public records
    budget = budget_of(site)
    rate = settings.rate(budget, at)
    return {
        family: Student(site.backbones[family], select(server.part(family).arrays, slot("shared")), budget, rate)
        for family in _replied(site, updates)
    }


def with_states(server: Payload, states: Mapping[str, State]) -> Payload:
    """The server's memory with the shared adapters of some families replaced."""
    for family, state in states.items():
        server = server.with_part(family, server.part(family) | Payload(state))
    return server


def _replied(site: ServerSite, updates: Sequence[Update]) -> dict[str, list[Update]]:
    """The updates of every family that has any, in the order of families."""
    by_family = {family: [update for update in updates if update.client.backbone == family] for family in site.families}
    return {family: of_family for family, of_family in by_family.items() if of_family}


def public_of(site: ServerSite) -> Callable[[str], Examples]:
    """The server's public records by backbone. Raises ConfigError where it has none, or lacks a backbone."""
    if site.public is None or set(site.backbones) < set(site.families):
        raise ConfigError(["distillation happens at the server, which has no public records or not all backbones"])
    return site.public


def budget_of(site: ServerSite) -> TrainSettings:
    """The server's settings of training; of epochs, with the steps that clients have in the mean, by which a schedule
    goes. Raises ConfigError where it has none."""
    if (budget := site.budget) is None:
        raise ConfigError(["train: the server has no settings to train with"])
    if budget.epochs is None:
        return budget
    return replace(budget, max_steps=round(fmean(budget.steps_for(client.num_examples) for client in site.clients)))
