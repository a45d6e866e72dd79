"""The server's kernel: the only loop that knows stages and rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from befit.core.errors import NotEnoughReplies, NotTrained
from befit.core.plugins import returned
from befit.core.values import ClientInfo, Clock, Failure, Payload, Score, Tick
from befit.protocol.client_privacy import ClientNoise
from befit.protocol.engine import Best, Checkpoint, Engine
from befit.protocol.flights import by_round, restored, saved
from befit.protocol.guard import check_memory
from befit.protocol.journal import Journal
from befit.protocol.method import Method
from befit.protocol.round import Requests, Round, written
from befit.protocol.schedule import Schedule, resolved_stages
from befit.protocol.serve import final_stages
from befit.protocol.site import ServerSite
from befit.protocol.stage import Stage, dispatched

OPENING = "opening"  # what a server computes before the first round, such as an alignment of backbones


def federate(method: Method, engine: Engine, site: ServerSite, schedule: Schedule, journal: Journal) -> Payload:
    """Run a method's stages from where the journal stands; returns the server's final memory.

    Raises NotEnoughReplies when a round has fewer good replies than `schedule.min_replies`, and TrainingDiverged where
    the server's memory is not finite any more.
    """
    stages = resolved_stages(method, schedule.rounds, schedule.most_rounds)
    point = journal.resume() or _opened(method, site, journal)
    server, done, best = point.server, (point.stage, point.round), point.best
    noise = None if schedule.clients is None else ClientNoise(schedule.clients, point.clip)
    flying = {point.stage: point.flights}
    del point  # the memory that a run began with is not kept beside the one it has come to
    for index, stage in enumerate(stages):
        for ahead in journal.rounds_from_cache(index, server) if done < (index, 1) else ():
            server, done = ahead.server, (ahead.stage, ahead.round)
            last = stages[ahead.stage]
            if _scores_now(stages[ahead.stage :], ahead.round, schedule.evaluate_every):
                at = Tick(last.name, ahead.round, last.rounds or 0, schedule.seed)
                _score(method, engine, server, schedule, journal, at)
            if ahead.round == last.rounds:
                journal.completed(ahead, force=True)
        rounds, later = stage.rounds or 0, stages[index + 1 :]
        chooses = schedule.patience is not None and rounds > 1 and not any(other.federated for other in later)
        flights = restored(flying.get(index), Tick(stage.name, 1, rounds, schedule.seed))
        for then, requests in by_round(flights):
            engine.exchange(requests, then)  # once more; what comes back is a later round's
        for first, last in _messages(stage, engine.span, schedule.evaluate_every):
            if (index, last) <= done or _is_over(best, index, first - 1, schedule):
                continue
            at = Tick(stage.name, first, rounds, schedule.seed, last - first + 1)
            round_ = Round(stage, engine, site, server, schedule, journal, at, flights, noise, method.trainable())
            server, flights = round_.play()
            at, ends, before = replace(at, round=last, span=1), last == rounds, best
            scored = None
            if _scores_now(stages[index:], last, schedule.evaluate_every) and not (chooses and ends and not later):
                scored = _score(method, engine, server, schedule, journal, at)
            if chooses and (ends or last % schedule.evaluate_every == 0):
                if scored is None or schedule.split != "val":
                    scored = _validated(method, engine, server, journal, at)
                now = Best(index, last, scored.mean, scored.without)
                best = now if now.beats(best) else best
            point = Checkpoint(index, last, server, best, noise and noise.clip, None if ends else saved(flights))
            # With noise for clients what goes on to them has to last: made anew, it would be a second release.
            journal.completed(point, force=ends or best != before or noise is not None)
        if best is not None and best.stage == index and not best.back:
            at = Tick(stage.name, best.round, rounds, schedule.seed)
            server, best = journal.back(at, best), replace(best, back=True)
            if not later:
                _score(method, engine, server, schedule, journal, replace(at, rounds=best.round))
            journal.completed(Checkpoint(index, best.round, server, best), force=True)
    return server


def _is_over(best: Best | None, stage: int, round_: int, schedule: Schedule) -> bool:
    """Whether a stage ends here: so many measurements in a row were no better than the best one."""
    if best is None or best.stage != stage or schedule.patience is None:
        return False
    return best.back or round_ - best.round >= schedule.patience * schedule.evaluate_every


def _opened(method: Method, site: ServerSite, journal: Journal) -> Checkpoint:
    clock = Clock()
    server = returned(method.server_init, method.server_init(site), Payload)
    check_memory("before the first round", server)
    journal.served(OPENING, 0, clock.cost())
    return Checkpoint(0, 0, server)


def _messages(stage: Stage, span: int, every: int) -> Iterator[tuple[int, int]]:
    """First and last round of each message of a stage; a message of several rounds ends where a score is due."""
    first, rounds = 1, stage.rounds or 0
    while first <= rounds:
        last = first if stage.federated else min(rounds, first + span - 1)
        if every and not stage.federated:
            last = min(last, math.ceil(first / every) * every)
        yield first, last
        first = last + 1


def _scores_now(remaining: Sequence[Stage], round_: int, every: int) -> bool:
    """At the end, and every so often, but never while a federated stage still lies ahead: then there is no model yet
    that the method would deploy."""
    stage, *later = remaining
    if any(other.federated for other in later):
        return False
    if round_ == stage.rounds and not later:
        return True
    return bool(every) and round_ % every == 0


def final_download(method: Method, server: Payload, client: ClientInfo, at: Tick) -> Payload:
    """What a client would hold if the run ended now: the downloads of `final_stages`, of which the later ones count."""
    received = Payload()
    for stage in final_stages(method, at.stage):
        received |= dispatched(stage, server, client, at)
    return received


@dataclass(frozen=True)
class _Measured:
    """The headline's name, its mean over the clients that told it, and how many clients have no model yet."""

    metric: str
    mean: float
    without: int


def _score(
    method: Method, engine: Engine, server: Payload, schedule: Schedule, journal: Journal, at: Tick
) -> _Measured | None:
    """Have all clients measure their models."""
    measured = _measured(method, engine, server, journal, at, schedule.split, journal.scored)
    if measured is not None:
        where = {"stage": at.stage, "round": at.last}
        journal.event({"kind": "score", **where, "metric": measured.metric, "mean": measured.mean})
    return measured


def _validated(method: Method, engine: Engine, server: Payload, journal: Journal, at: Tick) -> _Measured:
    """Have all clients measure their models on validation examples."""
    measured = _measured(method, engine, server, journal, at, "val", journal.validated)
    if measured is None:
        raise NotEnoughReplies(
            f"stage {at.stage}, round {at.last}: no client told a score on its validation examples, by which "
            "federation.patience finds the best round"
        )
    return measured


def _measured(
    method: Method,
    engine: Engine,
    server: Payload,
    journal: Journal,
    at: Tick,
    split: str,
    note: Callable[[Tick, Score], None],
) -> _Measured | None:
    """What clients measured on one split; None where nobody told anything."""
    free = [info for info in engine.clients() if at.round == at.rounds or info.id not in engine.busy]
    requests = Requests(free, lambda info: final_download(method, server, info, at))
    values: list[Mapping[str, float]] = []
    without = 0
    replies = sorted(engine.score(requests, at, split), key=lambda r: r.client)
    for reply in replies:
        noted = reply if isinstance(reply, Failure) else written(note, at, reply)
        if isinstance(noted, Failure):
            without += noted.kind == NotTrained.__name__
            journal.failed(noted, scoring=True)
        else:
            values.append(noted.metrics)
    if not values:
        return None
    metric = next(iter(values[0]))
    numbers = [value[metric] for value in values if metric in value]
    return _Measured(metric, sum(numbers) / len(numbers), without)
