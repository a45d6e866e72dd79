"""All clients in this process, one after the other, on one backbone."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from befit.core.errors import BefitError, PayloadMismatch, RunError
from befit.core.values import ClientInfo, Clock, Cost, Failure, Payload, Score, Tick, Update
from befit.core.wire import payload_bytes
from befit.core.wire_form import Wire
from befit.protocol.method import Deployment, Method
from befit.protocol.schedule import resolved_stages
from befit.protocol.secure.desk import SecureDesk
from befit.protocol.serve import ScoresOnOthers, deployment, score, serve, serve_together
from befit.protocol.site import Site
from befit.protocol.store import ClientStore

if TYPE_CHECKING:
    from befit.runs.fleets import Fleets
    from befit.runs.host import Host

Reply = TypeVar("Reply", Update, Score)
Value = TypeVar("Value")
_PEAK, _PEAK_AT = 0.0, float("-inf")


class LocalEngine:
    """Calls the clients' kernel directly.

    sites            makes the site of a client
    wire             the form of arrays on the wire; bytes are counted in it
    eval_batch_size  examples per forward pass when scoring
    rounds           the configuration's, for stages that do not say their own
    most_rounds      that any stage has, where the configuration limits them
    fleets           how many clients train as one; None: each by itself
    others           when to score a client's model on the other clients' examples: see
                     `befit.protocol.serve.ScoresOnOthers`
    sums             hides what leaves clients; None: it leaves as it is
    """

    span, terms = 1, ""
    busy = frozenset[str]()

    def __init__(
        self,
        method: Method,
        infos: Sequence[ClientInfo],
        sites: Callable[[ClientInfo], Site],
        store: ClientStore,
        wire: Wire = Wire(),  # noqa: B008 frozen
        eval_batch_size: int = 256,
        rounds: int = 1,
        most_rounds: int | None = None,
        others: str = "never",
        fleets: Fleets | None = None,
        sums: SecureDesk | None = None,
    ) -> None:
        self._method, self._infos, self._sites, self._store = method, {i.id: i for i in infos}, sites, store
        self._wire = wire
        self._eval_batch_size = eval_batch_size
        self._rounds = {stage.name: stage.rounds or 0 for stage in resolved_stages(method, rounds, most_rounds)}
        self._elsewhere = None if others == "never" else ScoresOnOthers(others == "always")
        self._fleets, self._sums = fleets, sums
        self._form = wire if sums is None else Wire()  # masked numbers travel whole

    @classmethod
    def of(
        cls,
        host: Host,
        method: Method,
        store: ClientStore,
        fleets: Fleets | None = None,
        sums: SecureDesk | None = None,
    ) -> LocalEngine:
        """The engine that the host's configuration describes, for a method that the host has installed.

        sums  the desk of a site, which keeps its secrets; None: one in memory, where the configuration has secure sums
        """
        experiment = host.experiment
        secure = experiment.federation.secure_sums
        return cls(
            method,
            host.infos,
            host.site,
            store,
            wire=host.wire(method),
            eval_batch_size=experiment.evaluate.batch_size,
            rounds=experiment.federation.rounds,
            most_rounds=experiment.limit.rounds,
            others=experiment.evaluate.others,
            fleets=fleets,
            sums=sums or (None if secure is None else SecureDesk(secure, method, {}, store=store)),
        )

    def clients(self) -> Sequence[ClientInfo]:
        return list(self._infos.values())

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        size = 1 if self._fleets is None else self._fleets.size(at)
        replies = self.updates(requests, at, size)
        return replies if self._fleets is None else self._fleets.watched(at, replies)

    def updates(self, requests: Mapping[str, Payload], at: Tick, size: int) -> Iterator[Update | Failure]:
        """The clients' updates, `size` clients at once."""
        for clients in batched(requests, size):
            batch = {client: requests[client] for client in clients}
            for reply in self.answers({client: self._encode(request) for client, request in batch.items()}, at):
                if isinstance(reply, Update):
                    sent = batch[reply.client.id]
                    reply = replace(reply, payload=self._wire.replied(reply.payload, sent))
                yield reply

    def answers(self, sent: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        """The updates of clients at once, where what they are sent and what they send is as it travels."""
        if len(sent) > 1:
            yield from self._together(sent, at)
        for client, request in sent.items() if len(sent) == 1 else ():
            yield self._attempt(client, request, at, self._update)

    def _together(self, sent: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        """The updates of several clients that train as one, as far as they can. Each has its share of what it took."""
        clock = Clock()
        opened = {client: self._caught(self._begun, client, sent[client], at) for client in sent}
        ready = {client: result for client, result in opened.items() if not isinstance(result, Exception)}
        calls = [(site, received) for site, received, _ in ready.values()]
        replies = dict(zip(ready, serve_together(self._method, calls, self._store, at, self._form), strict=True))
        for client, reply in replies.items():
            if not isinstance(reply, Exception):
                site, received, shares = ready[client]
                replies[client] = self._caught(self._hidden, site, reply, received, shares, at)
        whole = clock.cost()
        share = replace(whole, seconds=whole.seconds / len(sent), cpu_seconds=whole.cpu_seconds / len(sent))
        for client, before in opened.items():
            reply = before if isinstance(before, Exception) else replies[client]
            down = payload_bytes(sent[client])
            if isinstance(reply, Exception):
                cost = replace(share, bytes_down=down, peak_memory_mib=peak_memory_mib())
                yield self._failure(client, reply, at, cost)
                continue
            cost = replace(share, bytes_up=payload_bytes(reply), bytes_down=down, peak_memory_mib=peak_memory_mib())
            yield Update(self._infos[client], reply, dict(ready[client][0].report), cost)

    def _caught(self, act: Callable[..., Value], *arguments: Any) -> Value | Exception:
        """What it gives, or what went wrong at the client. Raises what ends the run, as `_failure` does."""
        try:
            return act(*arguments)
        except (RunError, MemoryError):
            raise
        except Exception as error:
            return error

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        for client, request in requests.items():
            yield self._attempt(client, self._encode(request), at, partial(self._score, split=split))

    def deployment(self, client: str, request: Payload, at: Tick) -> Deployment:
        """The client's model as it would be used now; it stays on this side of the wire."""
        site, received = self._sites(self._infos[client]), self._wire.received(self._encode(request))
        return deployment(self._method, site, self._store, received, at, self._rounds)

    def _attempt(self, client: str, sent: Payload, at: Tick, act: Callable[..., Reply]) -> Reply | Failure:
        """Deliver a request. What goes wrong at the client becomes a Failure; what goes wrong here is raised."""
        clock = Clock()
        try:
            return act(client, sent, at, clock)
        except Exception as error:
            return self._failure(client, error, at, clock.cost(0, payload_bytes(sent), peak_memory_mib()))

    def _failure(self, client: str, error: Exception, at: Tick, cost: Cost) -> Failure:
        """What went wrong at a client, with a traceback where befit did not see it coming. Raises what ends the run."""
        if isinstance(error, (RunError, MemoryError)):
            raise error
        text = "" if isinstance(error, BefitError) else "".join(traceback.format_exception(error))
        return Failure.of(client, at.stage, at.last, error, text, cost)

    def _update(self, client: str, sent: Payload, at: Tick, clock: Clock) -> Update:
        site, received, shares = self._begun(client, sent, at)
        answer = serve(self._method, site, self._store, received, at, self._form)
        reply = self._hidden(site, answer, received, shares, at)
        cost = clock.cost(payload_bytes(reply), payload_bytes(sent), peak_memory_mib())
        return Update(self._infos[client], reply, dict(site.report), cost)

    def secure(self, step: str, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        """See `befit.protocol.engine.Engine`."""
        for client, request in requests.items():
            yield self._attempt(client, self._encode(request), at, partial(self._step, step=step))

    def _step(self, client: str, sent: Payload, at: Tick, clock: Clock, step: str) -> Update:
        if self._sums is None:
            raise PayloadMismatch("this run has no secure sums (federation.secure_sums)")
        reply = self._sums.answer(step, client, self._wire.received(sent), at)
        cost = clock.cost(payload_bytes(reply), payload_bytes(sent), peak_memory_mib())
        return Update(self._infos[client], reply, {}, cost)

    def _begun(self, client: str, sent: Payload, at: Tick) -> tuple[Site, Payload, Payload]:
        """A client's site, what it received, and its shares of secure sums."""
        received, shares = self._wire.received(sent), Payload()
        if self._sums is not None:
            received, shares = self._sums.opened(client, received, at)
        return self._sites(self._infos[client]), received, shares

    def _hidden(self, site: Site, answer: Payload, received: Payload, shares: Payload, at: Tick) -> Payload:
        if self._sums is None:
            return answer
        info, layout = site.info, site.model.specs
        return self._sums.hidden(info.id, answer, received, shares, info.num_examples, layout, at)

    def _score(self, client: str, sent: Payload, at: Tick, clock: Clock, split: str) -> Score:
        site = self._sites(self._infos[client])
        received = self._wire.received(sent)
        scored = score(
            self._method, site, self._store, received, at, self._rounds, split, self._eval_batch_size, self._elsewhere
        )
        cost = clock.cost(0, payload_bytes(sent), peak_memory_mib())
        return replace(scored, cost=cost)

    def _encode(self, payload: Payload) -> Payload:
        return self._wire.down(payload)


def batched(values: Iterable[Value], size: int) -> Iterator[list[Value]]:
    """The values, at most `size` at a time.

    >>> list(batched("abc", 2))
    [['a', 'b'], ['c']]
    """
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some


def peak_memory_mib() -> float:
    """The most memory that this process has held so far; on a GPU, the most that was allocated there.

    Asked of the system at most once a second, since on some that takes longer than a training step's arithmetic.
    """
    global _PEAK, _PEAK_AT
    if (now := time.monotonic()) - _PEAK_AT >= 1:
        _PEAK, _PEAK_AT = max(_PEAK, _system_peak_mib()), now
    return _PEAK


def _system_peak_mib() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
