"""The client's kernel: restore, update, save; and score. The same code in process and on another machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from inspect import GEN_CREATED, getgeneratorstate
from typing import TYPE_CHECKING, Any

import torch

from befit.adapters.keys import slot_of
from befit.core.errors import BefitError, DataError, PayloadMismatch, RunError
from befit.core.metrics import Measure
from befit.core.plugins import origin, returned
from befit.core.seeds import seed_draws
from befit.core.values import Payload, Score, Tick
from befit.core.wire_form import Wire
from befit.protocol.download import check_download
from befit.protocol.guard import check_declared, check_finite, check_numbers
from befit.protocol.jobs import (
    Job,
    Steps,
    Updated,
    done_alone,
    finish,
    random_state,
    set_random_state,
    steps_of,
)
from befit.protocol.method import Deployment, Method, federated_stage, run_stages
from befit.protocol.privacy import EPSILON, PRIVACY, Guarded, guarded, hides, with_spent
from befit.protocol.site import Site
from befit.protocol.stage import Stage
from befit.tasks.base import ANSWER, LABEL, one_by_one, take_singles
from befit.tasks.class_metrics import confusion

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel
    from befit.protocol.store import ClientStore


_OWED = "owed"  # what a client's updates left out on the wire, as a part of its memory that no method sees
SUMS = "sums"  # another: what it was sent, where its updates are part of secure sums
_PLAIN = Wire()


def serve(method: Method, site: Site, store: ClientStore, received: Payload, at: Tick, wire: Wire = _PLAIN) -> Payload:
    """Run the client's side of `at.span` rounds of one stage and save its memory; returns what leaves, as it travels.

    The reply holds exactly the arrays that the method declares for this stage; anything else raises PayloadMismatch
    here, at the client, and neither leaves nor is saved. So does any other error: the memory stays that of before. What
    was received is checked alike, before the method sees it.
    """
    with _own_random_numbers(site):
        return finish(_served(method, site, store, received, at, wire))


def serve_together(
    method: Method, calls: Sequence[tuple[Site, Payload]], store: ClientStore, at: Tick, wire: Wire = _PLAIN
) -> list[Payload | Exception]:
    """The same for several clients of this process; what they ask for that can be done at once is. Each one's reply, or
    what went wrong with it alone."""
    with ExitStack() as numbers:
        for site in {site.model.device: site for site, _ in calls}.values():
            numbers.enter_context(_own_random_numbers(site))
        desks = [_Desk(site.model, _served(method, site, store, received, at, wire)) for site, received in calls]
        for desk in desks:
            desk.go_on(next)
        while waiting := [desk for desk in desks if desk.job is not None]:
            kin: dict[Hashable, list[_Desk]] = {}
            for desk in waiting:
                kin.setdefault(desk.kin, []).append(desk)
            for members in kin.values():
                _together(members)
    return [desk.outcome for desk in desks]


def _together(desks: Sequence[_Desk]) -> None:
    """Do the jobs of one kin, and go on with each client."""
    first, *others = [desk.job for desk in desks]
    assert first is not None
    if not others:
        desks[0].go_on(lambda update: done_alone(update, first))
        return
    done = first.together(others, [desk.model_state for desk in desks], [desk.draws for desk in desks])
    for desk, (result, model_state, draws) in zip(desks, done, strict=True):
        desk.model_state, desk.draws = model_state, draws
        if isinstance(result, Exception):
            desk.go_on(lambda update, result=result: update.throw(result))
        else:
            desk.go_on(lambda update, result=result: update.send(result))


class _Desk:
    """One client's update between its jobs: what of the shared model and of the random numbers is its own.

    job      what it waits for; None once it is over
    outcome  its reply or its error, then
    """

    def __init__(self, model: AdaptedModel, update: Steps[Payload]) -> None:
        self._model, self._update = model, update
        self._dropout, self.draws = model.dropout, random_state(model.device)
        self.model_state: Any = None
        self.job: Job | None = None
        self.outcome: Payload | Exception = RunError("an update was left unfinished")

    @property
    def kin(self) -> Hashable:
        assert self.job is not None
        kin = getattr(self.job, "kin", None)  # what is no job is told of by itself
        return id(self) if kin is None else kin

    def go_on(self, act: Callable[[Steps[Payload]], Job]) -> None:
        """Let the update run until it waits again, with the model as it left it."""
        model, usual = self._model, self._model.dropout
        if self.model_state is not None:
            model.fill(self.model_state)
        model.dropout = self._dropout
        set_random_state(model.device, self.draws)
        try:
            self.job = act(self._update)
            self.model_state, self._dropout = model.snapshot(), model.dropout
            self.draws = random_state(model.device)
        except StopIteration as done:
            self.job, self.outcome = None, done.value
        except Exception as error:
            self.job, self.outcome = None, error
        finally:
            model.dropout = usual


def _served(method: Method, site: Site, store: ClientStore, received: Payload, at: Tick, wire: Wire) -> Steps[Payload]:
    stage, name = stage_named(method, at.stage), site.info.id
    check_download(name, [stage], received, site.model.specs, whole=at.round > 1)
    before, kept = _split_memory(store, name)
    private = site.privacy is not None and hides(site.privacy, method, stage)
    guard = guarded(method, stage, site, kept, at) if private else None
    memory, reply = yield from _update(
        method, stage, site if guard is None else guard.site, before, received, at, guard
    )
    declared = stage.reply_in(at.round)
    check_declared(name, reply, declared.specs(site.model.specs), declared.numbers)
    check_numbers(f"client {name} reports", site.report)
    before = kept.part(_OWED)
    of_stage = before.scalars.get("stage", at.stage) == at.stage  # another stage is of other arrays, by the same names
    sent, owed = wire.up(reply, received, before.arrays if of_stage else {})
    if guard is not None:
        assert site.privacy is not None
        kept = with_spent(kept, guard.spent)
        site.report[EPSILON] = site.privacy.spends(guard.spent)
    memory |= kept.split([PRIVACY, SUMS])[0]
    if owed:
        memory = memory.with_part(_OWED, Payload(owed, {"stage": at.stage}))
    check_finite(f"client {name} would keep", memory)
    store.save(name, memory)
    return sent


def _split_memory(store: ClientStore, client: str) -> tuple[Payload | None, Payload]:
    """A client's memory as its method knows it, and what befit keeps beside it: what it owes the server, what it has
    spent of its privacy, and what it trained on, for secure sums."""
    if (memory := store.load(client)) is None:
        return None, Payload()
    kept, own = memory.split([_OWED, PRIVACY, SUMS])
    return (own, kept) if kept.arrays or kept.scalars else (memory, kept)


def deployment(
    method: Method, site: Site, store: ClientStore, received: Payload, at: Tick, rounds: Mapping[str, int]
) -> Deployment:
    """The model this client would use if the run ended now.

    Personal stages that still lie ahead are replayed on a scratch copy of its memory; nothing stored changes. `rounds`
    are those of every stage, by name.
    """
    check_download(site.info.id, final_stages(method, at.stage), received, site.model.specs, whole=True)
    memory, _ = _split_memory(store, site.info.id)
    for stage in later_personal_stages(method, at.stage):
        total = rounds[stage.name]
        for number in range(1, total + 1):
            tick = replace(at, stage=stage.name, round=number, rounds=total, span=1)
            with _own_random_numbers(site):
                memory, _ = finish(_update(method, stage, site, memory, received, tick))
    site.model.reset()
    memory = _first_memory(method, site) if memory is None else memory
    deployed = returned(method.deploy, method.deploy(memory, received, site), Deployment)
    for each in (deployed, *deployed.others.values()):
        _check_deployment(f"client {site.info.id} would deploy", each, site.model)
    return deployed


def _check_deployment(what: str, deployed: Deployment, model: AdaptedModel) -> None:
    """Raise PayloadMismatch where a slot lacks an array, or has one of another shape: the model would keep what it held
    before. Raise NotFinite where numbers are not: such a model has a score like any other."""
    known = [slot.name for slot in model.layout.slots]
    if unknown := next((name for name in deployed.slots if name not in known), None):
        raise PayloadMismatch(f"{what} slot {unknown!r}; its method's layout has {', '.join(known)}")
    if deployed.own and deployed.own not in deployed.slots:
        raise PayloadMismatch(
            f"{what} slot {deployed.own!r} as its own, which is not active: {', '.join(deployed.slots)}"
        )
    for key, spec in model.specs.items():
        if key not in deployed.arrays and slot_of(key) in deployed.slots:
            raise PayloadMismatch(f"{what} slot {slot_of(key)} without {key}")
        if key in deployed.arrays and tuple(deployed.arrays[key].shape) != spec.shape:
            shape = tuple(deployed.arrays[key].shape)
            raise PayloadMismatch(f"{what} {key} with shape {shape}; its method's layout has {spec.shape}")
    if foreign := deployed.arrays.keys() - model.specs.keys():
        raise PayloadMismatch(f"{what} {min(foreign)!r}, which is not in its method's layout")
    check_finite(what, Payload(dict(deployed.arrays)))


def _first_memory(method: Method, site: Site) -> Payload:
    return returned(method.client_init, method.client_init(site), Payload)


class ScoresOnOthers:
    """Scores on the other clients' examples. A model that several clients have is measured once.

    always  in every round that is scored, instead of the last one of the last stage
    """

    def __init__(self, always: bool) -> None:
        self.always = always
        # By client and split: the model, and its score; None where the examples have no such metric.
        self._last: dict[tuple[str, str], tuple[Hashable, float | None]] = {}

    def headlines(self, site: Site, deployed: Deployment, split: str, batch_size: int) -> dict[str, float]:
        """By client, the headline of the model as it stands; nothing where the others' examples are elsewhere, and
        without the clients whose examples have no such metric."""
        model, by_client = site.model, dict[str, float]()
        values = hashlib.sha256(model.snapshot().cpu().view(torch.uint8).numpy().tobytes()).digest()
        about = (values, deployed.slots, deployed.mixer, id(model), id(site.task))
        for client, examples in (site.others(split) if site.others is not None else {}).items():
            if not len(examples):
                continue
            last_about, value = self._last.get((client, split), (None, None))
            if last_about != about:
                try:
                    value = site.task.headline(model.backbone, examples, batch_size, model.device)
                except DataError:  # which that client is told of itself, when its own model is scored
                    value = None
                self._last[client, split] = about, value
            if value is not None:
                by_client[client] = value
        return by_client


def score(
    method: Method,
    site: Site,
    store: ClientStore,
    received: Payload,
    at: Tick,
    rounds: Mapping[str, int],
    split: str,
    batch_size: int,
    elsewhere: ScoresOnOthers | None = None,
) -> Score:
    """Measure the client's current model on one split of its own data.

    elsewhere  measures it on every other client's data too; the mean of the headline over those clients is the metric
               `others` (Others, Seo et al. 2026), and each of them is kept

    A deployment's `others` are measured too, by all metrics: `accuracy r4`. Where the configuration asks for
    scores by a field of the records, so are the examples of each of its values: `accuracy of ar`, `accuracy r4 of ar`.
    """
    deployed = deployment(method, site, store, received, at, rounds)
    site.model.load(deployed.arrays)
    examples, values = site.examples(split), site.values(split)
    with site.model.scoring(*deployed.slots, mixer=deployed.mixer):
        ends = at.round == at.rounds and at.stage == run_stages(method)[-1].name
        measured_by = one_by_one(values, len(examples)) if ends else values
        metrics = dict(site.task.evaluate(site.model.backbone, examples, batch_size, site.model.device, measured_by))
        if site.task.metric not in metrics:
            raise PayloadMismatch(
                f"{type(site.task).__name__}.evaluate returned no {site.task.metric}, which it is to measure; it "
                f"returned {', '.join(metrics) or 'nothing'}"
            )
        singles = take_singles(metrics, site.task.metric) if ends else {}
        headlines: dict[str, float] = {}
        if elsewhere is not None and (ends or elsewhere.always):
            headlines = elsewhere.headlines(site, deployed, split, batch_size)
            if headlines:
                metrics["others"] = sum(headlines.values()) / len(headlines)
    for name, other in deployed.others.items():
        site.model.reset()
        site.model.load(other.arrays)
        with site.model.scoring(*other.slots, mixer=other.mixer):
            measured = site.task.evaluate(site.model.backbone, examples, batch_size, site.model.device, values)
        for metric, value in measured.items():
            if not (measure := Measure.named(metric)).counts:
                metrics[str(replace(measure, budget=name))] = value
    return Score(
        site.info.id,
        split,
        len(examples),
        metrics,
        others=headlines,
        each=singles.get(site.task.metric, ()),
        confusion=confusion(singles.get(LABEL, ()), singles.get(ANSWER, ()), site.task.label_names),
    )


def held_out_loss(site: Site, deployed: Deployment, batch_size: int) -> float:
    """The mean loss of a deployment on the client's validation examples, of a text summed over its answer."""
    site.model.reset()
    site.model.load(deployed.arrays)
    examples = site.examples("val")
    with site.model.scoring(*deployed.slots, mixer=deployed.mixer):
        total = site.task.total_loss(site.model.backbone, examples, batch_size, site.model.device)
    return total / len(examples)


def stage_named(method: Method, name: str) -> Stage:
    """A stage of the plan, or a newcomer's first."""
    return next(stage for stage in method.plan() if stage.name == name)


def final_stages(method: Method, name: str) -> list[Stage]:
    """The stages whose downloads a client would hold if the run ended in the stage of this name: the federated one that
    ran last, if what it sends lasts, and those still ahead that a client would take alone."""
    stages = run_stages(method)
    now = next(number for number, stage in enumerate(stages, start=1) if stage.name == name)
    last = federated_stage(stages[:now])
    latest = [last] if last is not None and (last.lasts or last.name == name) else []
    return [*latest, *later_personal_stages(method, name), stages[-1]]


def later_personal_stages(method: Method, name: str) -> list[Stage]:
    """The personal stages that come after this one."""
    stages = run_stages(method)
    index = next(i for i, stage in enumerate(stages) if stage.name == name)
    return [stage for stage in stages[index + 1 :] if not stage.federated]


def _update(
    method: Method,
    stage: Stage,
    site: Site,
    memory: Payload | None,
    received: Payload,
    at: Tick,
    guard: Guarded | None = None,
) -> Steps[Updated]:
    """Rounds `at.round` to `at.last` on a bare model, each with dropout seeded by its own tick."""
    reply, steps = Payload(), 0.0
    for number in range(at.round, at.last + 1):
        tick = at if at.span == 1 else replace(at, round=number, span=1)
        if guard is not None:
            guard.begin_round(tick)
        site.model.reset()
        site.report.clear()
        site.asked.clear()
        site.steps.clear()
        if memory is None:
            memory = _first_memory(method, site)
        seed_draws(tick.seed_for(site.info.id, "dropout"), site.model.device)
        update = stage.exchange.client_update
        memory, reply = _memory_and_reply(update, (yield from steps_of(update(memory, received, site, tick))))
        if any(getgeneratorstate(training) == GEN_CREATED for training in site.asked):
            raise BefitError(
                f"{update.__qualname__} of {origin(update)} asks for training that is never done: write "
                "`report = yield from befit.training(…)`, or call befit.train_client(…)"
            )
        told, taken = site.report.get("steps", 0.0), float(sum(site.steps))
        if isinstance(told, int | float):
            steps += max(told, taken)  # told are those of one training of several, or none
            if steps or "steps" in site.report:
                site.report["steps"] = steps
    assert memory is not None
    return memory, reply


def _memory_and_reply(update: Callable[..., Any], result: Any) -> Updated:
    """What an update returned. Raises BefitError where that is not two payloads."""
    if isinstance(result, tuple) and [isinstance(part, Payload) for part in result] == [True, True]:
        return result
    what = f"{len(returned(update, result, tuple))} values"
    raise BefitError(
        f"{update.__qualname__} of {origin(update)} returns {what}; it must return two of type Payload, the client's "
        "memory and its reply"
    )


def _own_random_numbers(site: Site) -> AbstractContextManager[None]:
    """What is drawn within leaves the process's random numbers as they are."""
    return torch.random.fork_rng([site.model.device] if site.model.device.type == "cuda" else [])
