"""Fleets: the trainings of several clients as one forward and backward pass over the backbone that they share.

Each client's adapters are a lane of the model (`befit.adapters.lanes`), and one optimiser steps over all lanes. Rows
go through the model in buckets: with samples of one size all at once, with texts by length, at most `TOKENS` in each
bucket, the gradients adding up before the step. Nothing that is random, clipped or accumulated for a client depends on
who else is there, so that its numbers are those of training alone but for rounding.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from befit.adapters.keys import Selector, union
from befit.adapters.lanes import Lanes
from befit.core.errors import BefitError, NotDivisible
from befit.core.values import State
from befit.protocol.jobs import random_state, set_random_state
from befit.train.alone import train_alone
from befit.train.draws import Draws
from befit.train.optim import MOMENTS, dump_moments, load_moments
from befit.train.passes import Stateful, objective
from befit.train.request import Request, TrainingReport
from befit.train.rows import Step
from befit.train.terms import Laned, task_loss

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel

_LOG = logging.getLogger(__name__)
_MOST: WeakKeyDictionary[AdaptedModel, int] = WeakKeyDictionary()  # clients at once, where no more can be
_Ended = tuple[TrainingReport | Exception, Tensor, Tensor]


def kin_of(request: Request) -> Hashable:
    """What trainings have in common that can be one; None for one that can only be a client's own."""
    model, task = request.model, request.site.task
    used = {name for current in request.passes for name in current.active}
    if task.padding is None or any(current.lone for current in request.passes) or model.lone(*used):
        return None
    if task.rows_each > 1:
        return None  # a pair's texts cannot go into batches by their lengths
    if request.site.mechanism is not None:
        return None  # batches of no size known before, and a budget for each
    if request.site.budget.micro_batch is not None:
        return None  # the whole batches of several clients would not fit either
    if model.recomputes and (request.dropout or model.drops):
        return None  # a second forward pass, in the middle of the backward one, would draw other numbers
    passes = tuple(
        (
            current.trainable.text,
            current.beside.text,
            current.active,
            current.mixer,
            current.name,
            current.keep_optimiser,
            current.blend is None,
            current.after is None,
            tuple((chosen.text, rate) for chosen, rate in current.rates),
            tuple(term.alike for term in current.terms if isinstance(term, Laned)),
        )
        for current in request.passes
    )
    # Averages that have seen different numbers of steps cannot be stepped by one optimiser.
    seen = tuple(
        (key, float(value) if value.dim() == 0 else None)
        for key, value in sorted(request.memory.part(MOMENTS).arrays.items())
    )
    about = (request.at, request.steps, request.split, request.in_sequence, request.site.budget, request.dropout)
    return (id(model), id(task), passes, seen, about)


def train_together(requests: Sequence[Request], starts: Sequence[Tensor], draws: Sequence[Tensor]) -> list[_Ended]:
    """Train clients of one kin at once, from a snapshot of each one's model and random numbers.

    Whatever goes wrong with several, for want of memory or because of one of them, is tried again with half of them,
    down to one by one; so nobody pays for another's failure. What memory cannot hold is not tried again, nor a model
    whose random numbers cannot be told apart by client.
    """
    if len(requests) == 1:
        return [_alone(requests[0], starts[0], draws[0])]
    model, half = requests[0].model, len(requests) // 2
    if len(requests) <= _MOST.get(model, len(requests)):
        changing = [step.after for request in requests for step in request.passes if isinstance(step.after, Stateful)]
        before = [copy.deepcopy(vars(after)) for after in changing]
        try:
            return at_once(requests, starts, draws)
        except Exception as error:
            for after, values in zip(changing, before, strict=True):
                vars(after).update(values)
            message, level = "%d clients cannot train as one and are tried as halves: %s: %s", logging.WARNING
            if _is_for_memory(error):
                _MOST[model] = len(requests) - half
                message += " (from now on there are no more than that at once)"
            elif isinstance(error, NotDivisible):
                _MOST[model] = 1
                message = "%d clients cannot train as one, and train one by one from now on: %s: %s"
            elif isinstance(error, BefitError):
                level = logging.DEBUG  # it is about one client, which says it again by itself
            _LOG.log(level, message, len(requests), type(error).__name__, error)
    return [
        ended
        for part in (slice(half), slice(half, None))
        for ended in train_together(requests[part], starts[part], draws[part])
    ]


def most_at_once() -> int | None:
    """The largest fleet that may work in this process; None where none was too large."""
    return min(_MOST.values(), default=None)


def forget_most() -> None:
    """Try any size again, for another run."""
    _MOST.clear()


def _is_for_memory(error: Exception) -> bool:
    """PyTorch's allocator for a CPU has no error of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _alone(request: Request, start: Tensor, draws: Tensor) -> _Ended:
    model = request.model
    model.fill(start)
    set_random_state(model.device, draws)
    try:
        report: TrainingReport | Exception = train_alone(request)
    except Exception as error:
        report = error
    return report, model.snapshot(), random_state(model.device)


def at_once(requests: Sequence[Request], starts: Sequence[Tensor], draws: Sequence[Tensor]) -> list[_Ended]:
    """The same, raising whatever goes wrong with any of them but a loss that is no number."""
    first, model = requests[0], requests[0].model
    generators = [torch.Generator(model.device).set_state(state) for state in draws]
    with model.lanes(starts, union(dict.fromkeys(current.reached for current in first.passes))) as lanes:
        optimisers, places = first.optimisers(), _places(first, lanes)
        moments = [request.memory.part(MOMENTS).arrays for request in requests]
        for current, optimiser, place in zip(first.passes, optimisers, places, strict=True):
            if current.keep_optimiser:
                of_pass = [_of_pass(state, current.name) for state in moments]
                load_moments(optimiser, current.name, lanes.beside(of_pass, place))
        totals = [
            total.expand(len(requests)).tolist() for total in first.run(optimisers, _Fleet(requests, lanes, generators))
        ]
        kept: list[State] = [{} for _ in requests]
        for current, optimiser, place in zip(first.passes, optimisers, places, strict=True):
            if current.keep_optimiser:
                states = lanes.apart(dump_moments(optimiser, current.name), place)
                kept = [state | new for state, new in zip(kept, states, strict=True)]
        snapshots = lanes.snapshots()
    ended: list[_Ended] = []
    for lane, request in enumerate(requests):
        try:
            report: TrainingReport | Exception = request.report([total[lane] for total in totals], kept[lane])
        except Exception as error:
            report = error
        ended.append((report, snapshots[lane], generators[lane].get_state()))
    return ended


def _places(request: Request, lanes: Lanes) -> list[dict[str, list[int]]]:
    """For every pass, over which arrays of what size each parameter of its optimiser runs."""
    by_pass = []
    for current in request.passes:
        sizes = [run for chosen, _ in current.rated for run in lanes.state.sizes(chosen)]
        runs = [[size // lanes.count for size in run] for run in sizes]
        by_pass.append({f"{current.name}/{index}": run for index, run in enumerate(runs)})
    return by_pass


def _of_pass(moments: Mapping[str, Tensor], name: str) -> State:
    return {key: value for key, value in moments.items() if key.startswith(f"{name}/")}


class _Fleet:
    """The gradients of several clients."""

    def __init__(self, requests: Sequence[Request], lanes: Lanes, generators: Sequence[torch.Generator]) -> None:
        self._requests, self._lanes, self._site = requests, lanes, requests[0].site
        self._draws = Draws(generators)
        self._terms = [
            [_joined(terms) for terms in zip(*of_clients, strict=True)] for of_clients in self._of_passes("terms")
        ]
        self._guides = [[term.bind(self._site) for term in terms] for terms in self._terms]
        self._strengths = [
            self._strength([request.strengths[index] for request in requests]) for index in range(len(self._terms))
        ]
        self._draws_in: dict[Hashable, bool] = {}  # by pass and what is in a batch: without images no tower draws

    def _of_passes(self, name: str) -> list[list[Any]]:
        """An attribute of each pass, of all clients."""
        passes = zip(*(request.passes for request in self._requests), strict=True)
        return [[getattr(current, name) for current in of_clients] for of_clients in passes]

    def _strength(self, strengths: Sequence[float | None]) -> float | Tensor | None:
        if strengths[0] is None or not any(strengths):
            return strengths[0]
        return torch.tensor(strengths, device=self._site.model.device)

    def batches(self) -> Iterator[Step]:
        device = self._site.model.device
        indices = [request.site.indices(request.split, request.steps, request.at) for request in self._requests]
        examples = [request.site.examples(request.split) for request in self._requests]
        for chosen in zip(*indices, strict=True):
            parts = [of_client.batch(rows) for of_client, rows in zip(examples, chosen, strict=True)]
            yield Step(parts, self._site.task, device)

    def take(self, step: Callable[[int, Step], Tensor], index: int, batch: Step) -> Tensor:
        return step(index, batch)

    def backward(self, index: int, batch: Step) -> Tensor:
        site, guides = self._site, self._guides[index]
        losses = torch.zeros(len(self._requests), device=site.model.device)
        self._draws.begin(batch)
        for number, bucket in enumerate(batch.buckets):
            if number == 1:  # what depends on the weights alone counts once
                pairs = zip(self._terms[index], guides, strict=True)
                guides = [guide for term, guide in pairs if not term.of_weights]
            kind = index, frozenset(bucket.batch)
            watched = self._draws_in.get(kind, True)
            drawing = self._draws.on(bucket) if watched else nullcontext()
            with site.model.using_rows(bucket.rows), drawing:
                part = site.to_device(bucket.batch)
                logits = site.logits(part)
                loss = task_loss(site, logits, part)
                objective(loss, guides, self._strengths[index], part, logits).sum().backward()
            losses += loss.detach()
            self._draws_in[kind] = watched and self._draws.used  # the same in every step: where not, none is watched
        return losses

    def clip(self, chosen: Selector, limit: float) -> None:
        self._lanes.clip(chosen, limit)

    def stepped(self, index: int, step: int) -> None:
        for lane, request in enumerate(self._requests):
            current = request.passes[index]
            if current.after is not None:
                current.after(step, self._lanes.leaves(lane, current.reached))


def _joined(terms: Sequence[Laned]) -> Any:
    first, *others = terms
    return first.joined(others)
