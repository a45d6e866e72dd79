"""One round of a run, from drawing the cohort to the server's new memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from befit.adapters.keys import EVERYTHING, NOTHING, Selector, select
from befit.adapters.state import specs_of
from befit.core.errors import NotEnoughReplies, PayloadMismatch, RunError, refusal
from befit.core.plugins import returned
from befit.core.values import (
    REFUSED,
    ClientInfo,
    Failure,
    Payload,
    Score,
    State,
    Stopwatch,
    TensorSpec,
    Tick,
    Update,
)
from befit.protocol.client_privacy import ClientNoise
from befit.protocol.engine import Engine
from befit.protocol.flights import Flight, Flights, behind, caught_up, too_late
from befit.protocol.guard import Replies, Sizes, check_memory, measured, reference_norm
from befit.protocol.journal import Journal
from befit.protocol.schedule import Schedule, required_replies, sample_cohort
from befit.protocol.secure.rounds import SecureRound
from befit.protocol.site import ServerSite
from befit.protocol.spool import Spool
from befit.protocol.stage import Stage, dispatched
from befit.protocol.weights import weighed

Reply = TypeVar("Reply", Update, Score)


class Round:
    """One exchange of a stage: whom the server asks, which replies count, and what it makes of them."""

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        site: ServerSite,
        server: Payload,
        schedule: Schedule,
        journal: Journal,
        at: Tick,
        flights: Flights,
        noise: ClientNoise | None = None,
        trained: Selector = NOTHING,
    ) -> None:
        """`flights`: who is at work from earlier rounds. `noise`: hides who took part, where that is protected.
        `trained`: what clients train in any stage of the method."""
        self._watch = Stopwatch()  # what the server does, without clients in this process and waiting for others
        self._stage, self._engine, self._site, self._server = stage, engine, site, server
        self._schedule, self._journal, self._at, self._flights = schedule, journal, at, flights
        self._noise = noise if stage.federated else None
        self._asynchronous = schedule.asynchronous if stage.federated else None
        self._cohort = self._drawn()
        self._enough = math.inf if self._asynchronous is None else self._asynchronous.buffer
        self._expected = int(min(self._enough, len(flights) + len(self._cohort)))
        everybody = () if self._noise is None else engine.clients()
        self._requests = Requests(
            self._cohort, lambda info: dispatched(stage, server, info, at), everybody, self._watch
        )
        self._failures: list[Failure] = []
        self._landed: set[str] = set()
        self._sums: SecureRound | None = None
        if stage.federated and schedule.secure_sums is not None:
            layout, accepted = specs_of(site.initial), partial(journal.accepted, at, step=True)
            try:
                self._sums = SecureRound(
                    schedule.secure_sums, engine, stage, layout, self._requests, at, accepted, self._lost, self._watch
                )
            except NotEnoughReplies as error:
                raise NotEnoughReplies(f"stage {at.stage}, round {at.last}: {error}{self._first_reason()}") from error
            self._check_enough(len(self._sums.requests), self._sums.fewest)  # before anybody trains in vain
        self._asked: Mapping[str, Payload] = self._requests if self._sums is None else self._sums.requests
        declared = None if self._sums is None else self._sums.declared
        self._check = Check(stage, site, self._asked, at, declared, flights, trained)

    def play(self) -> tuple[Payload, Flights]:
        """Ask, collect, check and aggregate.

        ->  the server's new memory, and who is at work now

        Raises NotEnoughReplies, and TrainingDiverged where the new memory is not finite.
        """
        stage, at, guard = self._stage, self._at, self._schedule.guard
        with Spool(self._journal.spool, self._schedule.spool_bytes) as replies:
            refused = self._collected(replies)
            good = self._judged(replies, refused)
            good = replace(good, updates=self._trained(good.updates))
            self._check_enough(len(good.updates))
            updates = good.updates
            trusted = good.trusted(guard) if stage.federated and self._noise is None else updates
            self._tell(updates, trusted)
            if self._noise is not None:
                trusted = self._noise.hidden(updates, self._check.start, self._engine.clients(), at)
            if stage.federated:
                updates = weighed(trusted, self._schedule.max_weight)
            if self._flights:
                now = dispatched(stage, self._server, updates[0].client, at).arrays
                updates = [caught_up(update, self._flights, now, at) for update in updates]
            flights = self._at_work()
            aggregate = stage.exchange.aggregate  # requests are of the memory before
            following = returned(aggregate, aggregate(self._server, updates, self._site, at), Payload)
            if following is not self._server:  # a personal stage leaves it as it is
                check_memory(f"after round {at.last} of stage {at.stage}", following)
            if stage.federated:
                self._journal.served(at.stage, at.last, self._watch.cost())
            return following, flights

    def _drawn(self) -> list[ClientInfo]:
        if self._noise is not None:
            return self._noise.cohort(self._engine.clients(), self._at)
        size = self._schedule.cohort if self._stage.federated else None
        idle = [info for info in self._engine.clients() if info.id not in self._flights]
        return sample_cohort(idle, None if size is None else size - len(self._flights), self._at)

    def _lost(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._journal.failed(failure)

    def _collected(self, replies: Spool) -> list[Failure]:
        """Put what comes back and may be used into the spool; returns the rest."""
        at, refused = self._at, list[Failure]()
        event = {"kind": "client", "stage": at.stage, "round": at.last, "span": at.span, "of": self._expected}
        for done, reply in enumerate(self._watch.outside(self._engine.exchange(self._asked, at)), start=1):
            self._journal.event({**event, "done": done})
            self._landed.add(reply.client.id if isinstance(reply, Update) else reply.client)
            checked = self._check(reply, at)
            noted = written(self._journal.accepted, at, checked) if isinstance(checked, Update) else checked
            if isinstance(noted, Update) and self._asynchronous is not None:
                noted = too_late(noted, self._flights, self._asynchronous.max_staleness, at) or noted
            if isinstance(noted, Update):
                replies.add(noted)
            else:
                refused.append(noted)
            if len(replies) >= self._enough:
                break
        return refused

    def _judged(self, replies: Spool, refused: list[Failure]) -> Replies:
        """The replies that the guard lets pass, opened where they came as parts of a sum."""
        at = self._at
        good, reasons = self._check.replies(replies.updates()), dict[str, str]()
        if self._noise is None:  # what is usual among replies depends on all of them; a clip does not
            good, reasons = good.judged(self._schedule.guard)
        refused += [
            Failure(update.client.id, at.stage, at.last, REFUSED, reasons[update.client.id], cost=update.cost)
            for update in replies.updates()
            if update.client.id in reasons
        ]
        for failure in sorted(refused, key=lambda failure: failure.client):
            self._lost(failure)
        self._check_enough(len(good.updates), for_sum=0 if self._sums is None else self._sums.fewest)
        if self._sums is None:
            return good
        try:
            return replace(good, updates=self._sums.opened(good.updates))
        except NotEnoughReplies as error:
            raise NotEnoughReplies(f"stage {at.stage}, round {at.last}: {error}{self._first_reason()}") from error
        except PayloadMismatch as error:
            raise PayloadMismatch(f"stage {at.stage}, round {at.last}: {error}") from error

    def _trained(self, updates: Sequence[Update]) -> list[Update]:
        """The updates that could be written down as taken, with how late each is."""
        kept: list[Update] = []
        for update in updates:
            if self._asynchronous is not None:
                late = float(behind(self._flights, update, self._at))
                update = replace(update, report={**update.report, "staleness": late})
            noted = written(self._journal.trained, self._at, update)
            if isinstance(noted, Update):
                kept.append(noted)
            else:
                self._lost(noted)
        return kept

    def _tell(self, updates: Sequence[Update], trusted: Sequence[Update]) -> None:
        at, kept = self._at, {update.client.id for update in trusted}
        losses = [update.report["loss"] for update in updates if "loss" in update.report]
        self._journal.event(
            {
                "kind": "round",
                "stage": at.stage,
                "round": at.last,
                "rounds": at.rounds,
                "clients": len(updates),
                "failed": len(self._failures),
                "left_out": [update.client.id for update in updates if update.client.id not in kept],
                "loss": sum(losses) / len(losses) if losses else None,
                **({} if self._sums is None else {"clipped": self._sums.clipped}),
            }
        )

    def _at_work(self) -> Flights:
        """Who has not replied: from earlier rounds, and of this one where it did not wait for all."""
        new = [] if self._asynchronous is None else [info.id for info in self._cohort if info.id not in self._landed]
        still = {client: flight for client, flight in self._flights.items() if client not in self._landed}
        return still | {client: Flight(self._at, self._requests[client]) for client in new}

    def _check_enough(self, replies: int, for_sum: int = 0) -> None:
        """for_sum  how many a sum needs that is still hidden"""
        needed, by = required_replies(self._schedule.min_replies, self._expected), "federation.min_replies"
        if for_sum > needed:
            needed, by = for_sum, "federation.secure_sums.threshold"
        if replies < needed:
            raise NotEnoughReplies(
                f"stage {self._at.stage}, round {self._at.last}: {replies} of {self._expected} clients gave a "
                f"usable reply, {needed} are needed ({by}){self._first_reason()}"
            )

    def _first_reason(self) -> str:
        first = self._failures[0] if self._failures else None
        return "" if first is None else f"; {first.client}: {first.kind}: {first.reason}"


def written(note: Callable[[Tick, Reply], None], at: Tick, reply: Reply) -> Reply | Failure:
    """The reply once it is noted. What cannot be noted of what a client says costs that client its reply, and nobody
    else anything; where nothing can be written at all, that is the run's end."""
    try:
        note(at, reply)
    except RunError:
        raise
    except Exception as error:
        return _refusal(reply, at, error)
    return reply


def _refusal(reply: Update | Score, at: Tick, error: Exception) -> Failure:
    client = reply.client.id if isinstance(reply, Update) else reply.client
    return Failure(client, at.stage, at.last, REFUSED, refusal(error), cost=reply.cost)


class Requests(Mapping[str, Payload]):
    """What each client of the cohort receives, made when it is asked for: downloads of many clients are never all
    in memory. The last one is kept, for a reply is mostly checked before the next request is made.

    others  clients that are not of the cohort, and of whom it can be asked all the same what they would receive
    watch   runs while they are made
    """

    def __init__(
        self,
        cohort: Sequence[ClientInfo],
        make: Callable[[ClientInfo], Payload],
        others: Sequence[ClientInfo] = (),
        watch: Stopwatch | None = None,
    ) -> None:
        self._watch = watch or Stopwatch()
        self._cohort, self._make = {info.id: info for info in cohort}, make
        self._known = {**{info.id: info for info in others}, **self._cohort}
        self._last: tuple[str, Payload] | None = None

    def __getitem__(self, client: str) -> Payload:
        if self._last is None or self._last[0] != client:
            running = self._watch.runs
            self._watch.start()
            self._last = client, self._make(self._known[client])
            if not running:
                self._watch.stop()
        return self._last[1]

    def __contains__(self, client: object) -> bool:
        return client in self._cohort

    def __iter__(self) -> Iterator[str]:
        return iter(self._cohort)

    def __len__(self) -> int:
        return len(self._cohort)


class Check:
    """Turns a reply that must not reach the method into a Failure: not asked for, sent twice, or malformed."""

    def __init__(
        self,
        stage: Stage,
        site: ServerSite,
        requests: Mapping[str, Payload],
        at: Tick,
        hidden: Mapping[str, TensorSpec] | None = None,
        flights: Flights | None = None,
        trained: Selector = NOTHING,
    ) -> None:
        """`hidden`: what comes in place of what the stage declares, where updates are hidden. `flights`: whose
        replies are to requests of earlier rounds. `trained`: what clients train in other stages."""
        declared = stage.reply_in(at.round)
        self._declared = {
            backbone: declared.specs(specs_of(start)) if hidden is None else dict(hidden)
            for backbone, start in site.starts.items()
        }
        self._initial = {backbone: reference_norm(start) for backbone, start in site.starts.items()}
        trains = EVERYTHING if stage.trains is None else stage.trains | trained
        self._trained = {backbone: select(start, trains) for backbone, start in site.starts.items()}
        self._numbers, self._requests = stage.reply.numbers, requests
        self._flights = flights or {}
        self._seen: set[str] = set()
        self._sizes: dict[str, Sizes] = {}

    def __call__(self, reply: Update | Failure, at: Tick) -> Update | Failure:
        if isinstance(reply, Failure):
            return reply
        client = reply.client.id
        try:
            if not (client in self._requests or client in self._flights) or client in self._seen:
                twice = "a second reply" if client in self._seen else "a reply that nobody asked for"
                raise PayloadMismatch(f"client {client} sent {twice}")
            self._seen.add(client)
            declared, start = self._declared[reply.client.backbone], self.start(reply)
            self._sizes[client] = measured(client, reply.payload, declared, self._numbers, start)
        except Exception as error:
            return _refusal(reply, at, error)
        return reply

    def replies(self, updates: Sequence[Update]) -> Replies:
        """The replies that were let through, to be judged together."""
        return Replies.of(updates, self.start, self._sizes, self._initial)

    def start(self, reply: Update) -> State:
        """What a reply's update started from: what the client was sent, else the initial values of what it trains, in
        this stage or another."""
        declared = self._declared[reply.client.backbone]
        if not declared:
            return {}
        flight = self._flights.get(reply.client.id)
        sent = self._requests[reply.client.id] if flight is None else flight.sent
        arrays = {**self._trained[reply.client.backbone], **sent.arrays}
        return {
            key: arrays[key]
            for key, spec in declared.items()
            if key in arrays and arrays[key].shape == spec.shape and arrays[key].is_floating_point()
        }
