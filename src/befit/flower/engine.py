"""The engine whose clients are sites elsewhere: makes their requests, and checks every reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from befit.core.errors import PayloadMismatch
from befit.core.values import ClientInfo, Cost, Failure, Payload, Score, State, Tick, Update
from befit.core.version import __version__
from befit.core.wire import cast, payload_bytes
from befit.flower import replies
from befit.flower.frame import PROTOCOL, digest, pack, unpack
from befit.runs.outbound import Outbound

Header = dict[str, Any]
_FRAME = 2**20  # for what a frame has beside its arrays


class Lost(Exception):
    """A reply that did not come or was refused, or a site's own refusal: `kind` in a word, the reason, and the client
    that a site says it is."""

    def __init__(self, kind: str, reason: str, client: str = "") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.client = kind, reason, client


class Link(Protocol):
    """Takes frames to sites and brings back theirs, in any order, one for each client that was asked."""

    def deliver(
        self, purpose: str, clients: Sequence[str], frame: Callable[[str], bytes], group: str
    ) -> Iterator[tuple[str, bytes | Lost]]: ...


class RemoteEngine:
    """An engine over a link.

    infos             every client of the run by its id, in the order that decides cohorts; a site that has not come yet
                      may have no examples there
    run, label        names of the run and of the method in it, under which sites keep their state
    settings, method  what sites have to know of the configuration, see `befit.flower.policy`
    wire              dtype of floating-point arrays on the wire
    metric            the headline of a score
    max_bytes         largest reply that is looked into, in bytes of its arrays; None for no limit
    """

    span = 2**31  # a stage that needs no server between its rounds travels as one message

    def __init__(
        self,
        link: Link,
        infos: Mapping[str, ClientInfo],
        run: str,
        label: str,
        settings: Mapping[str, Any],
        method: Mapping[str, Any],
        wire: torch.dtype,
        metric: str,
        max_bytes: int | None = None,
    ) -> None:
        self._link, self._infos, self._wire = link, infos, wire
        self._common = {"run": run, "label": label, "settings": dict(settings), "method": dict(method)}
        self._metric, self._max_bytes = metric, max_bytes
        self.outbound = Outbound()

    def clients(self) -> Sequence[ClientInfo]:
        return list(self._infos.values())

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        for client, header, arrays, down in self._ask("train", requests, at, {}):
            try:
                if isinstance(header, Lost):
                    raise header
                yield self._update(client, header, arrays, down, at)
            except Lost as lost:
                yield self._failure(client, lost, at, down)

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        for client, header, _, down in self._ask("score", requests, at, {"split": split}):
            try:
                if isinstance(header, Lost):
                    raise header
                yield self._score(client, header, down, split)
            except Lost as lost:
                yield self._failure(client, lost, at, down)

    def export(self, requests: Mapping[str, Payload], at: Tick) -> dict[str, Exception]:
        """Have every site write its adapter at its own place; returns those that could not, with the reason."""
        replies = self._ask("export", requests, at, {})
        return {client: header for client, header, _, _ in replies if isinstance(header, Lost)}

    def _ask(
        self, do: str, requests: Mapping[str, Payload], at: Tick, extra: Mapping[str, Any]
    ) -> Iterator[tuple[str, Header | Lost, State, int]]:
        """Send every client its request; yields client, the reply's header and arrays, and the bytes that went down."""
        sent: dict[str, tuple[str, int]] = {}

        def frame(client: str) -> bytes:
            payload = cast(requests[client], self._wire)
            header = {"client": client, "at": asdict(at), "scalars": payload.scalars, **self._common, **extra}
            data = ask(do, header, payload.arrays)
            sent[client] = digest(data), payload_bytes(payload)
            return data

        purpose = {"train": "train", "score": "evaluate"}.get(do, "query")
        expected = {**{key: self._common[key] for key in ("run", "label")}, "at": asdict(at)}
        for client, data in self._link.deliver(purpose, list(requests), frame, f"{at.stage} {at.last}"):
            request, down = sent.get(client, ("", 0))
            if isinstance(data, Lost):
                yield client, data, {}, down
                continue
            try:
                if self._max_bytes is not None and len(data) > self._max_bytes + _FRAME:
                    raise PayloadMismatch(
                        f"client {client} sent {len(data)} bytes; guard.max_bytes is {self._max_bytes}"
                    )
                header, arrays = checked(data, {**expected, "client": client, "request": request})
            except (Lost, PayloadMismatch) as refusal:
                lost = refusal if isinstance(refusal, Lost) else Lost("refused", str(refusal))
                yield client, lost, {}, down
                continue
            self.outbound.hello(self._infos[client])
            yield client, header, arrays, down

    def _update(self, client: str, header: Header, arrays: State, down: int, at: Tick) -> Update:
        """Raises Lost for a reply that is not well formed; whether its arrays are those declared is the guard's."""
        try:
            sent = Payload(arrays, replies.scalars(header))
            report = replies.report(header)
            cost = replies.cost(header, payload_bytes(sent), down)
        except PayloadMismatch as error:
            raise Lost("refused", f"client {client}: {error}") from error
        if wrong := [key for key, array in arrays.items() if array.is_floating_point() and array.dtype != self._wire]:
            raise Lost(
                "refused",
                f"client {client} sent {wrong[0]} as {arrays[wrong[0]].dtype}; the run's wire.dtype "
                f"is {str(self._wire)[6:]}",
            )
        self.outbound.payload(client, at.stage, sent)
        self.outbound.numbers(client, f"{at.stage} report", report)
        return Update(self._infos[client], cast(sent, torch.float32), report, cost)

    def _score(self, client: str, header: Header, down: int, split: str) -> Score:
        try:
            metrics = replies.metrics(header, self._metric)
            score = Score(client, split, replies.examples(header), metrics, replies.cost(header, 0, down))
        except PayloadMismatch as error:
            raise Lost("refused", f"client {client}: {error}") from error
        self.outbound.numbers(client, f"score {split}", {**metrics, "examples": score.examples})
        return score

    def _failure(self, client: str, lost: Lost, at: Tick, down: int) -> Failure:
        return Failure(client, at.stage, at.last, lost.kind, lost.reason, cost=Cost(0, down))


class RemoteMemories:
    """Sites keep their own state, each stamped with its round: the server has nothing to commit or restore."""

    serial = 0

    def commit(self) -> dict[str, str]:
        return {}

    def settle(self) -> None:
        return

    def restore(self, files: Mapping[str, str], serial: int) -> None:
        return


def ask(do: str, header: Mapping[str, Any], arrays: State) -> bytes:
    """A request as bytes."""
    return pack({"do": do, "protocol": PROTOCOL, "version": __version__, **header}, arrays)


def checked(data: bytes, expected: Mapping[str, Any]) -> tuple[Header, State]:
    """A reply's header and arrays.

    Raises PayloadMismatch unless it answers the request that `expected` describes, Lost where it reports a failure.
    """
    header, arrays = unpack(data, "a reply")
    if header.get("protocol") != PROTOCOL:
        raise PayloadMismatch(f"a reply of protocol {header.get('protocol')}, here it is {PROTOCOL}: install one befit")
    for key, value in expected.items():
        if header.get(key) != value:
            value_there = replies.readable(repr(header.get(key)))
            raise PayloadMismatch(f"a reply to another request: its {key} is {value_there}, not {value!r}")
    if header.get("kind") == "failure":
        error, reason, client = (replies.readable(header.get(key)) for key in ("error", "reason", "client"))
        raise Lost(error, reason, client)
    return header, arrays
