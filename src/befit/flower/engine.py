"""The engine whose clients are sites elsewhere: makes their requests, and checks every reply."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from befit.core.errors import PayloadMismatch, refusal
from befit.core.text import readable
from befit.core.values import REFUSED, ClientInfo, Cost, Failure, Payload, Score, State, Tick, Update
from befit.core.version import __version__
from befit.core.wire import payload_bytes
from befit.core.wire_form import Wire
from befit.flower import replies
from befit.flower.frame import PROTOCOL, bytes_of_arrays, digest, hash_of_run, pack, unpack
from befit.protocol.engine import Best

Header = dict[str, Any]
Reply = TypeVar("Reply")
KINDS = {
    "hello": "hello",
    "train": "update",
    "score": "score",
    "export": "exported",
    "secure": "step",
}  # of replies, by what was asked
WITH_ARRAYS = ("update", "step")


class Lost(Exception):
    """A reply that did not come or was refused, or a site's own refusal.

    kind, reason  in a word, and in one line; much of them can be a site's own words
    client        that a site says it is
    cost          what a site says that its failure took; of a refused reply its bytes
    """

    def __init__(self, kind: str, reason: str, client: str = "", cost: Cost | None = None) -> None:
        super().__init__(readable(reason))
        self.kind, self.reason, self.client, self.cost = kind, readable(reason), client, cost or Cost()


@dataclass
class UnderWay:
    """Questions of one kind that are not answered yet, and answers that nobody has taken.

    messages  by its id, the node that each went to, and the client there
    ends      when each client is given up
    """

    messages: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    ends: dict[str, float] = field(default_factory=dict[str, float])
    answers: deque[tuple[str, bytes | Lost]] = field(default_factory=deque[tuple[str, "bytes | Lost"]])


class Link(Protocol):
    """Takes frames to sites and brings back theirs, in any order, one for each client that was asked."""

    def deliver(
        self,
        purpose: str,
        clients: Sequence[str],
        frame: Callable[[str], bytes],
        group: str,
        under_way: UnderWay,
    ) -> Iterator[tuple[str, bytes | Lost]]:
        """The frames are sent when this returns. Answers are those to all that is under way; what nobody takes of them
        stays there."""
        ...


@dataclass(frozen=True)
class _PendingRequest:
    """What a client was asked: when it is of, the hash of the request, its bytes, and all payloads of that round."""

    at: Tick
    request: str
    down: int
    payloads: Mapping[str, Payload]


class RemoteEngine:
    """An engine over a link.

    infos             every client of the run by its id, in the order that decides cohorts; a site that has not come yet
                      may have no examples there
    run, label        names of the run and of the method in it, under which sites keep their state
    settings, method  what sites have to know of the configuration, see `befit.flower.policy`
    wire              the form of arrays on the wire
    metric            the headline of a score
    examples          how many a client has of a split, by what it said when it joined
    labels            of all methods of the run, among which sites may choose what they deploy
    max_bytes         of the arrays of the largest reply that is declared: a larger one is not looked into
    memories          which round's state sites have to keep
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
        wire: Wire,
        metric: str,
        examples: Callable[[str, str], int],
        max_bytes: int,
        labels: Collection[str] = (),
        memories: RemoteMemories | None = None,
    ) -> None:
        self._link, self._infos, self._wire = link, infos, wire
        self._memories = memories or RemoteMemories()
        self._common = {"run": run, "label": label, "settings": dict(settings), "method": dict(method)}
        self._metric, self._examples, self._max_bytes = metric, examples, max_bytes
        self._labels, self.terms = labels, hash_of_run(settings, method)
        # Scores have no noise: every site would refuse to tell them where single records are protected.
        self._scores = settings.get("privacy", {}).get("unit") != "example"
        self._training, self._under_way = dict[str, _PendingRequest](), UnderWay()

    @property
    def busy(self) -> Collection[str]:
        """Sites that train, and are not waited for now."""
        return self._training.keys()

    def clients(self) -> Sequence[ClientInfo]:
        return list(self._infos.values())

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        if any(sent.at.stage != at.stage for sent in self._training.values()):  # which is over
            self._training, self._under_way = {}, UnderWay()
        return self._ask("train", requests, at, {}, self._update, self._training, self._under_way)

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        if not self._scores:
            return iter(())
        return self._ask("score", requests, at, {"split": split}, partial(self._score, split=split))

    def secure(self, step: str, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return self._ask("secure", requests, at, {"step": step}, self._update)

    def export(self, requests: Mapping[str, Payload], at: Tick) -> tuple[dict[str, Failure], dict[str, str]]:
        """Have every site write its adapter at its own place; returns the failures of those that could not, and of
        those that have chosen among the run's methods what they deploy, its label."""
        chosen: dict[str, str] = {}

        def read(client: str, header: Header, arrays: State, sent: _PendingRequest) -> Failure | None:
            """A site without a model of this method may have chosen among the others."""
            failure = None
            if "error" in header:
                kind, reason, _, cost = replies.failure(header)
                failure = Failure(client, at.stage, at.last, kind, reason, cost=replace(cost, bytes_down=sent.down))
            if (label := replies.deployed(header, self._labels)) is not None:
                chosen[client] = label
            return failure

        answers = list(self._ask("export", requests, at, {}, read))
        return {answer.client: answer for answer in answers if answer is not None}, chosen

    def _ask(
        self,
        do: str,
        requests: Mapping[str, Payload],
        at: Tick,
        extra: Mapping[str, Any],
        read: Callable[[str, Header, State, _PendingRequest], Reply],
        asked: dict[str, _PendingRequest] | None = None,
        under_way: UnderWay | None = None,
    ) -> Iterator[Reply | Failure]:
        """Send every client its request; gives what `read` makes of the replies, of header, arrays and what was sent.
        Whatever goes wrong with one client's reply is that client's Failure.

        asked, under_way  questions that have no answer yet, to which these are added; None: there are no others
        """
        waiting = {} if asked is None else asked
        sent_to = dict(waiting)

        def frame(client: str) -> bytes:
            payload = self._wire.down(requests[client])
            header = {"client": client, "at": asdict(at), "scalars": payload.scalars, **self._common, **extra}
            header["kept"] = self._memories.kept
            data = ask(do, header, payload.arrays)
            sent_to[client] = waiting[client] = _PendingRequest(at, digest(data), payload_bytes(payload), requests)
            return data

        purpose = {"train": "train", "score": "evaluate"}.get(do, "query")
        group = f"{at.stage} {at.last}"
        answers = self._link.deliver(purpose, list(requests), frame, group, under_way or UnderWay())
        return self._replies(do, answers, at, read, sent_to, waiting)

    def _replies(
        self,
        do: str,
        answers: Iterator[tuple[str, bytes | Lost]],
        at: Tick,
        read: Callable[[str, Header, State, _PendingRequest], Reply],
        sent_to: Mapping[str, _PendingRequest],
        waiting: dict[str, _PendingRequest],
    ) -> Iterator[Reply | Failure]:
        names = {key: self._common[key] for key in ("run", "label")}
        for client, data in answers:
            sent = sent_to.get(client, _PendingRequest(at, "", 0, {}))
            waiting.pop(client, None)
            size = 0 if isinstance(data, Lost) else len(data)
            try:
                if isinstance(data, Lost):
                    raise data
                stamp = {**names, "at": asdict(sent.at), "client": client, "request": sent.request}
                most = self._max_bytes if KINDS[do] in WITH_ARRAYS else 0
                reply = read(client, *checked(data, stamp, KINDS[do], most), sent)
            except Exception as error:
                lost = error if isinstance(error, Lost) else _refused(client, error, size)
                cost = replace(lost.cost, bytes_down=sent.down)
                reply = Failure(client, at.stage, at.last, lost.kind, lost.reason, cost=cost)
            yield reply

    def _update(self, client: str, header: Header, arrays: State, sent: _PendingRequest) -> Update:
        """Whether the arrays are those declared is the guard's to say."""
        said = Payload(arrays, replies.scalars(header))
        reply = self._wire.replied(said, sent.payloads[client])
        cost = replies.cost(header, payload_bytes(said), sent.down)
        return Update(self._infos[client], reply, replies.report(header), cost)

    def _score(self, client: str, header: Header, arrays: State, sent: _PendingRequest, split: str) -> Score:
        examples = replies.examples(header, self._examples(client, split))
        metrics = replies.metrics(header, self._metric, examples)
        return Score(client, split, examples, metrics, replies.cost(header, 0, sent.down))


def _refused(client: str, error: Exception, size: int) -> Lost:
    return Lost(REFUSED, f"client {client}: {refusal(error)}", cost=Cost(size))


class RemoteMemories:
    """Sites keep their own state, each stamped with its round: the server has nothing to commit or restore.

    kept  stage, by its place in the plan, and round whose state sites keep beside the last one, and go back to once the
          stage is over; every request says it
    """

    serial = 0

    def __init__(self) -> None:
        self.kept: list[int] | None = None

    def commit(self) -> dict[str, str]:
        return {}

    def hold(self, files: Mapping[str, str], best: Best | None) -> None:
        self.kept = None if best is None else [best.stage, best.round]

    def settle(self) -> None:
        return

    def restore(self, files: Mapping[str, str], serial: int) -> None:
        return


def ask(do: str, header: Mapping[str, Any], arrays: State) -> bytes:
    """A request as bytes."""
    return pack({"do": do, "protocol": PROTOCOL, "version": __version__, **header}, arrays)


def checked(data: bytes, expected: Mapping[str, Any], kind: str, most: int = 0) -> tuple[Header, State]:
    """A reply's header and arrays, of which there may be so many bytes at most; with 0 there may be none.

    Raises PayloadMismatch unless it is of this kind and answers the request that `expected` describes, Lost where it
    reports a failure.
    """
    if (size := bytes_of_arrays(data)) > most:
        raise PayloadMismatch(f"it has {size} bytes of arrays; the largest reply declared has {most}")
    header, arrays = unpack(data, "a reply")
    if arrays and not most:
        raise PayloadMismatch(f"it comes with {len(arrays)} arrays, where none were asked for")
    if not _same(header.get("protocol"), PROTOCOL):
        theirs = readable(header.get("protocol"), 50)
        raise PayloadMismatch(f"a reply of protocol {theirs}, here it is {PROTOCOL}: install one befit")
    for key, value in expected.items():
        if not _same(header.get(key), value):
            value_there = readable(repr(header.get(key)), 200)
            raise PayloadMismatch(f"a reply to another request: its {key} is {value_there}, not {value!r}")
    if header.get("kind") == "failure":
        raise Lost(*replies.failure(header))
    if header.get("kind") != kind:
        raise PayloadMismatch(f"a reply of the kind {readable(header.get('kind'), 50)}, where {kind} was asked for")
    return header, arrays


def _same(said: Any, expected: Any) -> bool:
    """Whether both are the same JSON: 2.0 and true are neither 2 nor 1."""
    return json.dumps(said, sort_keys=True) == json.dumps(expected, sort_keys=True)
