"""Steps that are captured once and replayed, for all clients in turn: the numbers of steps that are taken as usual.

What captures here is no GPU but a list of PyTorch's operations with the tensors they were called with. Replaying it is
bound as a CUDA graph is: Python's numbers are those of the capture, memory is where it was, nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from befit.adapters.bayestune import Budgeted
from befit.adapters.keys import EVERYTHING, slot
from befit.adapters.layout import Layout, Slot
from befit.adapters.mixers import ByInput, Weighted
from befit.core.values import Payload, Tick
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.tasks.answers import ANSWERS, answer_places
from befit.tasks.unasked import unasked
from befit.train import replay
from befit.train.blend import Fixed
from befit.train.loop import training
from befit.train.passes import Pass
from befit.train.replay import WARM, WIDTH, rounded, steps_of
from befit.train.request import TrainingReport
from befit.train.terms import L2
from tests.tiny import make_site
from tests.tiny import random_state as random_arrays

AT = Tick("federate", 1, 2, 0)
SHARED = Pass(slot("shared"), ("shared",))
# Rates that float32 has exactly: on a device they lie in that.
BUDGET = TrainSettings(max_steps=4, batch_size=4, lr=2**-6, schedule="linear", schedule_over="round", grad_clip=0.5)
BOTH = Layout((Slot("shared", 2, 4.0), Slot("personal", 2, 4.0)))


class Operations(TorchDispatchMode):
    """A list of operations, which can be done again."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError(f"{func} reads a value back, which a capture refuses")
        made = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, made))
        return made

    def again(self) -> None:
        now: dict[int, Tensor] = {}

        def present(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [present(each) for each in value]
            return now.get(id(value), value) if isinstance(value, Tensor) else value

        with torch.no_grad():
            for func, args, kwargs, made in self.done:
                new = func(*map(present, args), **{key: present(value) for key, value in kwargs.items()})
                for before, after in zip(tree_leaves(made), tree_leaves(new), strict=True):
                    if isinstance(before, Tensor):
                        now[id(before)] = after


class Recorder:
    """Captures on a CPU, unless `reason` says why not."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.warmed = self.captured = self.replayed = 0

    def warm(self, work: Callable[[], None]) -> str:
        self.warmed += 1
        work()
        return self.reason

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        before, numbers = flat(), torch.get_rng_state()
        with Operations() as operations:
            work()
        self.captured += 1
        for value, old in before:  # a capture computes nothing
            value.copy_(old)
        torch.set_rng_state(numbers)

        def again() -> None:
            self.replayed += 1
            operations.again()

        return again


def flat() -> list[tuple[Tensor, Tensor]]:
    """All that steps change, with a copy."""
    (of_model,) = replay._STEPS.items()
    values = [of_model[0]._values, of_model[0]._gradients]
    for steps in of_model[1].values():
        kept = [value for optimiser in steps.optimisers for one in optimiser.state.values() for value in one.values()]
        values += [*kept, *(place.loss for places in steps._places for place in places.values())]
    return [(value, value.clone()) for value in values]


def capture_with(recorder: Recorder | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, with nothing captured yet; None: steps are taken as where nothing captures."""
    monkeypatch.setattr(replay, "recorder", lambda device: recorder)
    monkeypatch.setattr(replay, "_STEPS", type(replay._STEPS)())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    capture_with(found, monkeypatch)
    monkeypatch.setattr(replay, "_TOLD", set())
    return found


def play(
    site: Site, passes: Sequence[Pass], rounds: Sequence[int] = (1, 2), memories: Sequence[Payload] = ()
) -> list[tuple[Tensor, TrainingReport]]:
    """Two clients in turn, from arrays of their own, with the averages that they keep."""
    sites = [replace(site, info=replace(site.info, id=f"client-{place}")) for place in range(2)]
    memories, found = list(memories) or [Payload(), Payload()], []
    for round_ in rounds:
        for place, one in enumerate(sites):
            at = Tick("federate", round_, 2, 0)
            one.model.load(random_arrays(one.model, seed=place))
            torch.manual_seed(at.seed_for(one.info.id, "dropout"))
            report = next(training(one, passes, at, memory=memories[place])).alone()
            memories[place] = report.memory
            found.append((one.model.snapshot(), report))
    return found


def assert_equal(first: Any, second: Any) -> None:
    for (arrays, report), (others, other) in zip(first, second, strict=True):
        assert torch.equal(arrays, others)
        assert report.losses == other.losses
        assert report.moments.keys() == other.moments.keys()
        assert all(torch.equal(value, other.moments[key]) for key, value in report.moments.items())


OWN = Pass(slot("personal"), ("shared", "personal"), mixer=Weighted((0.5, 0.5)), name="own", keep_optimiser=True)
GPU = torch.device("meta")  # for what transformers asks on a CPU alone


@pytest.mark.parametrize(("kind", "optimiser"), [("vit", "adamw"), ("vit", "sgd"), ("llama", "adamw")])
def test_replayed_steps_give_the_bits_of_steps_as_usual(
    kind: str, optimiser: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two clients in turn, over two rounds: two passes, kept averages, dropout, clipping, a rate that falls."""
    passes = [SHARED, replace(OWN, rates=((slot("personal"), 0.25),))]
    budget = replace(BUDGET, optimiser=optimiser, momentum=0.5)
    site = make_site(kind, BOTH, rows=8, adapter_dropout=0.25, budget=budget)
    with unasked(GPU):
        replayed = play(site, passes)
    assert recorder.captured >= len(passes) and recorder.warmed == WARM * recorder.captured
    assert recorder.replayed == len(passes) * 2 * 2 * BUDGET.max_steps  # all of them
    # Texts are widened where steps are to be captured, whether they then can be or not.
    capture_with(None if kind == "vit" else Recorder("not here"), monkeypatch)
    if kind == "vit":  # of which all batches have one shape: one graph of each pass serves both clients
        assert recorder.captured == len(passes)
    assert_equal(replayed, play(site, passes))


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_nothing_depends_on_who_trained_before(optimiser: str, recorder: Recorder) -> None:
    """Not even where a client comes with averages of its own to the first capture, as after a crash."""
    passes = [SHARED, replace(OWN, rates=((slot("personal"), 0.25),))]
    budget = replace(BUDGET, optimiser=optimiser, momentum=0.5)
    site = make_site("vit", BOTH, rows=8, adapter_dropout=0.25, budget=budget)
    first = play(site, passes)
    (of_model,) = replay._STEPS.values()
    of_model.clear()
    again = play(site, passes, memories=[report.memory for _, report in first[:2]], rounds=(2,))
    assert_equal(first[2:], again)


@pytest.mark.parametrize("at", ["first", "second", "capture"])
def test_want_of_memory_in_a_trial_costs_the_capture_alone(
    at: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where AdamW has made a part of its averages, which the next client would take for whole ones."""
    real, made = torch.zeros_like, list[int]()

    def tight(*arguments: Any, **options: Any) -> Tensor:
        made.append(1)
        if len(made) == 2 and at == "first":
            raise torch.OutOfMemoryError("within AdamW")
        return real(*arguments, **options)

    def short(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError(f"at the {at}")

    def warm(work: Callable[[], None]) -> str:
        return short() if at == "second" and recorder.warmed == 1 else usual(work)

    site = make_site("vit", BOTH, rows=8, adapter_dropout=0.25, budget=replace(BUDGET, optimiser="adamw"))
    usual = recorder.warm
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", tight)
        patch.setattr(recorder, "warm", warm)
        if at == "capture":
            patch.setattr(recorder, "capture", short)
        tried = play(site, [SHARED, OWN])
    assert recorder.replayed == (2 * 2 * BUDGET.max_steps if at == "first" else 0)  # of the other pass
    assert any("OutOfMemoryError" in told for told in replay._TOLD)
    capture_with(None, monkeypatch)
    assert_equal(tried, play(site, [SHARED, OWN]))


def test_a_shape_that_cannot_be_captured_leaves_the_others_alone(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or numbers would depend on when it comes."""
    whole = make_site("vit", BOTH, rows=8, budget=BUDGET)
    half = replace(whole, budget=replace(BUDGET, batch_size=2))
    replayed = []
    for turn, site in enumerate((whole, half, whole)):
        recorder.reason, before = ("too large" if turn == 1 else ""), recorder.replayed
        play(site, [SHARED], rounds=(1,))
        replayed.append(recorder.replayed - before)
    assert replayed == [2 * BUDGET.max_steps, 0, 2 * BUDGET.max_steps]


# Gates, a copy of the batch for each slot, weights of the backbone itself, cores over frozen factors with noise.
METHODS: dict[str, dict[str, Any]] = {
    "fedalt": {},
    "fedsim": {},
    "fedavg": {},
    "fedmosaic": {"blocks": 2, "gate": "noisy-input"},
}


@pytest.mark.parametrize("name", METHODS)
def test_whatever_slots_and_mixers_compute_is_replayed(
    name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    method: Any = build_method({"name": name, **METHODS[name]})
    site = make_site("vit", method.layout, rows=8, adapter_dropout=0.25, budget=BUDGET)
    replayed = play(site, method.passes, rounds=(1,))
    assert recorder.replayed, replay._TOLD
    capture_with(None, monkeypatch)
    assert_equal(replayed, play(site, method.passes, rounds=(1,)))


def test_a_step_that_reads_something_back_is_taken_as_usual(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU transformers looks at the positions of a Llama's tokens."""
    caplog.set_level("INFO")
    site = make_site("llama", rows=8, budget=BUDGET)
    tried = play(site, [SHARED])
    assert not recorder.captured and not recorder.replayed
    assert caplog.text.count("reads a value back") == 1
    capture_with(Recorder("not here"), monkeypatch)
    assert_equal(tried, play(site, [SHARED]))


def test_what_is_each_clients_own_is_not_captured(recorder: Recorder) -> None:
    """A term's targets, and the ranks that a budget leaves, are those of the client that was there at the capture."""
    site = make_site("vit", BOTH)
    for one, reason in (
        (replace(OWN, terms=(L2("personal", to="shared", weight=0.1),)), "its term L2"),
        (replace(OWN, mixer=ByInput(0.5, "similar")), "weighed by each input"),
        (replace(OWN, blend=Fixed(0.5)), "its loss is weighed by a number"),
    ):
        assert steps_of(next(training(site, [one], AT))) is None
        assert any(reason in told for told in replay._TOLD)
    assert steps_of(next(training(site, [OWN], AT))) is steps_of(next(training(site, [OWN], AT))) is not None
    budgeted = make_site("vit", Layout((Slot("shared", 2, 4.0, form=Budgeted()),)))
    assert steps_of(next(training(budgeted, [SHARED], AT))) is None
    assert any("BudgetedBranch" in told for told in replay._TOLD)


@pytest.mark.parametrize(("kind", "width"), [("bert", 12), ("llama", WIDTH)])
def test_a_rounded_batch_has_the_loss_and_gradients_of_the_batch(kind: str, width: int) -> None:
    site: Any = make_site(kind)
    site.task.max_length = min(width, site.task.max_length)  # beyond it a model may have no positions
    batch = site.examples("train").batch([0, 5, 7])
    wide = rounded(batch, site.task)
    assert wide["input_ids"].shape == (3, width) != batch["input_ids"].shape
    if kind == "llama":
        count = len(answer_places(batch["labels"]))
        assert count < len(wide[ANSWERS]) == 16
    found = []
    for one in (batch, wide):
        site.model.load(random_arrays(site.model))
        site.model.zero_gradients()
        with site.model.active("shared"), site.model.trainable(EVERYTHING):
            loss = site.loss(one)
            loss.backward()
        found.append([loss.detach(), *(value.grad.clone() for value in site.model.leaves(EVERYTHING).values())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
