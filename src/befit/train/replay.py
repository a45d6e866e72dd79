"""A client's training steps as CUDA graphs: captured once for each shape of batch, and replayed from then on.

Where a step is short, Python takes longer to queue its operations than the GPU to do them. A graph queues them at once,
and does the same operations at the same addresses again. So whatever differs between steps and clients lies in places
that stay: the adapters and their gradients (`FlatState`), the batch, the learning rate, the optimiser's averages and
the loss. Random numbers come from the device's own generator, whose state a graph reads whenever it is replayed.

Every step that counts is a replay, from the first one of a shape: what is taken before a capture is undone. A replay
rounds otherwise than a step as usual, so a client's numbers would depend on who trained before it.

One graph of each pass and shape serves all clients of a model. To have few shapes, texts are padded to a multiple of
`WIDTH` tokens and answer tokens to a power of two.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.flat import FlatState
from befit.core.values import IGNORED
from befit.protocol.jobs import random_state, set_random_state
from befit.tasks.answers import ANSWERS, answer_places
from befit.tasks.base import Batch, Task

if TYPE_CHECKING:
    from befit.train.request import Request

WIDTH = 32
WARM = 2  # steps of a shape before it is captured, so that everything is allocated which stays
MOST = 64  # shapes of one pass
Step = Callable[[int, list[Batch]], Tensor]  # pass, batch -> detached loss
_LOG = logging.getLogger(__name__)
_STEPS: WeakKeyDictionary[FlatState, dict[Hashable, Steps]] = WeakKeyDictionary()
_TOLD: set[str] = set()


class Recorder(Protocol):
    """What captures work on a device."""

    def warm(self, work: Callable[[], None]) -> str:
        """Do it as usual; why it cannot be captured, if so."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does the same operations again; the work itself is not done."""
        ...


class CudaGraphs:
    """Graphs that share one pool of memory: nothing in it outlives a step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], None]) -> str:
        now = torch.cuda.current_stream(self._device)
        mode = torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(now)
        # A capture that fails may leave the allocator and the generator in the middle of it: waiting is found before.
        with torch.cuda.stream(self._stream), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                now.wait_stream(self._stream)
        waits = [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        return "it waits for the device" if waits else ""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        now, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        except Exception:
            torch.cuda.set_stream(now)
            raise
        return graph.replay


def recorder(device: torch.device) -> Recorder | None:
    """What captures on a device; None where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


@dataclass
class _Place:
    """Where the steps of one shape find their batch and leave their loss.

    again   takes the step, once it is captured
    cannot  whether it was tried in vain
    """

    batch: Batch
    loss: Tensor
    again: Callable[[], None] | None = None
    cannot: bool = False


class Steps:
    """The steps of all trainings of one kind.

    optimisers  one for each pass, of every client in turn
    """

    def __init__(self, request: Request, recorder: Recorder) -> None:
        self.optimisers = request.optimisers(request.model.device)
        self._recorder, self._device = recorder, request.model.device
        self._places: list[dict[Hashable, _Place]] = [{} for _ in self.optimisers]

    def begin(self) -> None:
        """Forget the averages of the client before."""
        for optimiser in self.optimisers:
            for kept in optimiser.state.values():
                for value in kept.values():
                    value.zero_()

    def take(self, step: Step, index: int, batch: list[Batch]) -> Tensor:
        """What `step(index, batch)` does, and its loss, which the next step overwrites."""
        if (place := self._place(index, batch[0])) is None or place.cannot:
            return step(index, batch)
        for name, values in batch[0].items():
            place.batch[name].copy_(values, non_blocking=True)
        if place.again is None:
            self._capture(place, self.optimisers[index], lambda: _leave(place.loss, step(index, [place.batch])))
        if place.again is None:
            return step(index, batch)
        place.again()
        return place.loss

    def _place(self, index: int, batch: Batch) -> _Place | None:
        places = self._places[index]
        key = tuple((name, values.shape, values.dtype) for name, values in batch.items())
        if key not in places and len(places) < MOST:
            like = {name: torch.empty_like(values) for name, values in batch.items()}
            places[key] = _Place(like, torch.zeros((), device=self._device))
        return places.get(key)

    def _capture(self, place: _Place, optimiser: torch.optim.Optimizer, work: Callable[[], None]) -> None:
        """Let the place have what takes its steps; where nothing can, for want of memory too, say why."""
        undo, reason = None, ""
        try:
            undo = _undo(optimiser, self._device)
            for _ in range(WARM):  # the first one may wait for what is set up once
                reason = self._recorder.warm(work)
            if not reason:
                place.again = self._recorder.capture(work)
        except Exception as error:  # where it is the step's own, the step as usual raises it again
            reason = f"{type(error).__name__}: {error}"
        if undo is not None:
            undo(bool(reason))
        if reason:
            place.cannot = True
            tell(reason)


def _undo(optimiser: torch.optim.Optimizer, device: torch.device) -> Callable[[bool], None]:
    """What takes back the optimiser's steps from here on, with the random numbers that they drew; called with whether
    they failed, in which case it also takes away the averages that they made, or half made."""
    values = [(leaf, leaf.detach().clone()) for group in optimiser.param_groups for leaf in group["params"]]
    averages = {leaf: {name: value.clone() for name, value in kept.items()} for leaf, kept in optimiser.state.items()}
    draws = random_state(device)

    @torch.no_grad()
    def undo(failed: bool) -> None:
        for leaf, value in values:
            leaf.copy_(value)
        for leaf, kept in list(optimiser.state.items()):
            if leaf not in averages and failed:
                del optimiser.state[leaf]
                continue
            for name, value in kept.items():
                before = averages.get(leaf, {}).get(name)
                value.zero_() if before is None else value.copy_(before)
        set_random_state(device, draws)

    return undo


def _leave(place: Tensor, value: Tensor) -> None:
    place.copy_(value)


def steps_of(request: Request) -> Steps | None:
    """What takes this training's steps; None where they are taken one operation at a time."""
    model, task = request.model, request.site.task
    if (of_device := recorder(model.device)) is None:
        return None
    if reason := _apart(request):
        tell(reason)
        return None
    passes = tuple(
        (
            current.trainable.text,
            current.beside.text,
            current.active,
            current.mixer,
            tuple((chosen.text, rate) for chosen, rate in current.rates),
        )
        for current in request.passes
    )
    of_model, budget = _STEPS.setdefault(model.flat, {}), request.site.budget
    optimiser = (budget.optimiser, budget.betas, budget.momentum, budget.weight_decay, budget.grad_clip)
    key = (task, passes, optimiser, request.dropout)
    if key not in of_model:
        of_model[key] = Steps(request, of_device)
    return of_model[key]


def _apart(request: Request) -> str:
    """Why the steps of this training are not those of others of its kind, or cannot be captured; empty if they are."""
    terms = [term for current in request.passes for term in current.terms]
    if terms:
        return f"its term {type(terms[0]).__name__} keeps values of every client's own"
    if any(strength is not None for strength in request.strengths):
        return "its loss is weighed by a number of every client's own"
    if lone := [current.lone for current in request.passes if current.lone]:
        return lone[0]
    if request.site.budget.micro_batch is not None:
        return "train.micro_batch is set"
    if request.model.recomputes:
        return "activations are computed anew, with the random numbers of before"
    return request.model.varies(*dict.fromkeys(name for current in request.passes for name in current.active))


def tell(reason: str) -> None:
    """Say once why steps are not replayed."""
    if reason not in _TOLD:
        _TOLD.add(reason)
        _LOG.info("training steps are not captured as CUDA graphs: %s (said once)", reason)


def rounded(batch: Batch, task: Task) -> Batch:
    """A batch on the CPU in one of few shapes; what is added is no part of any loss.

    >>> from types import SimpleNamespace as Text
    >>> task = Text(padding={"input_ids": 0}, max_length=100)
    >>> rounded({"input_ids": torch.ones(2, 40), "labels": torch.ones(2)}, task)["input_ids"].shape
    torch.Size([2, 64])
    """
    padded = dict(batch)
    for name, filler in (task.padding or {}).items():
        if name in padded:
            width = padded[name].shape[1]
            wanted = min(-(-width // WIDTH) * WIDTH, getattr(task, "max_length", width))
            padded[name] = F.pad(padded[name], (0, max(0, wanted - width)), value=filler)
    labels = padded.get("labels")
    if labels is not None and labels.dim() == 2:
        places = answer_places(labels)
        unlearnt = (labels.flatten()[1:] == IGNORED).nonzero()[:1, 0]  # a place whose logits predict nothing learnt
        more = (1 << (len(places) - 1).bit_length()) - len(places) if len(unlearnt) else 0
        padded[ANSWERS] = torch.cat([places, unlearnt.expand(more)]) if more else places
    return padded
