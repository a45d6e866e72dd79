"""Frames to sites and back over Flower's Grid: who is there, deadlines, and replies that do not come."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from befit.core.errors import PayloadMismatch
from befit.core.text import readable
from befit.flower import replies
from befit.flower.engine import Lost, UnderWay, checked
from befit.flower.frame import digest, from_content, to_content
from befit.flower.members import Members

_LOG = logging.getLogger(__name__)
_AT_ONCE = 8  # replies that are fetched together, so that not all of a round are in memory
_BREATH_S = 5.0  # for the rest of a reply that has begun to come
_TELL_S = 30.0  # between two lines that say the same while the server waits
_AGAIN_S = 60.0  # until a node that did not take part is asked once more
_WORLD = {3: "late", 4: "late", 5: "offline", 8: "crashed"}  # Flower's error codes that a later attempt may not meet
_NOT_TAKEN = "Flower's SuperLink did not take the message: the site has just gone, or it is too large on the way"
_WORDS = {
    "late": "no reply in time (engine.wait_s for the first answer, else engine.deadline_s), or it was lost in Flower",
    "offline": "the site is not connected",
    "crashed": "the site's process was killed, perhaps for want of memory; its log says more",
}


class GridLink:
    """The link to the sites of one run. While it waits for anything it asks nodes that connect who they are.

    members      who takes part
    hello        the question that a node is asked first
    wait_s       longest wait for members to connect, at the start and before a round; how long a hello may take
    deadline_s   longest wait for the replies of one round; a site does not take up a request that is older
    required     how many of so many clients that a round asks have to be connected for it to begin
    changed      called when a member has come, or was refused
    """

    def __init__(
        self,
        grid: Grid,
        members: Members,
        hello: bytes,
        wait_s: float,
        deadline_s: float,
        required: Callable[[int], int],
        changed: Callable[[], None] = lambda: None,
        poll_s: float = 0.5,
    ) -> None:
        self._grid, self.members, self._hello = grid, members, hello
        self._wait_s, self._deadline_s, self._required = wait_s, deadline_s, required
        self._changed, self._poll_s = changed, poll_s
        self._greeted: dict[int, tuple[str, float]] = {}  # node: when it had connected, when to ask it once more
        self._hellos: dict[str, tuple[int, str]] = {}  # messages under way: node, and the client whose key it has

    def gather(self) -> None:
        """Wait until every member has come or refused, or for `wait_s`; go on with those that are here, if enough.

        Raises ConfigError where members refuse and too few are left, NotEnoughReplies where too few have come.
        """
        end, line = time.monotonic() + self._wait_s, _Line(f"waiting up to {self._wait_s:g} s, engine.wait_s")
        while True:
            self._meet()
            if not self.members.missing or self.members.broken:
                break
            line.tell(self.members.attendance_text(), self.members.advice())
            if time.monotonic() >= end:
                break
            time.sleep(self._poll_s)
        self.members.demand_enough(self._wait_s)
        _LOG.info("the run starts: %s", self.members.attendance_text())

    def deliver(
        self,
        purpose: str,
        clients: Sequence[str],
        frame: Callable[[str], bytes],
        group: str,
        under_way: UnderWay,
    ) -> Iterator[tuple[str, bytes | Lost]]:
        """Send each client its frame, and give the answers as they come; see `befit.flower.engine.Link`."""
        there = self._connected(clients, len(under_way.messages))
        end = time.monotonic() + self._deadline_s
        for client in clients:
            if client in there:
                message = self._push(purpose, there[client], frame(client), group, self._deadline_s)
                if message is None:
                    under_way.answers.append((client, Lost("offline", _NOT_TAKEN)))
                else:
                    under_way.messages[message], under_way.ends[client] = (there[client], client), end
            else:
                under_way.answers.append((client, Lost(*self.members.why(client))))
        return self._answers(under_way, absent=len(there) < len(clients))

    def _answers(self, under_way: UnderWay, absent: bool) -> Iterator[tuple[str, bytes | Lost]]:
        """What is answered, each once; somebody may stop taking them and go on later.

        absent  there are clients that could still come
        """
        messages, answers, count = under_way.messages, under_way.answers, len(under_way.messages)
        line = _Line(f"waiting up to {self._deadline_s:g} s, engine.deadline_s", at_changes=False)
        while True:
            while answers:
                yield answers.popleft()
            for some in self._fetch(messages, under_way.ends):
                answers.extend((client, reply) for _, client, reply in some)
                while answers:
                    yield answers.popleft()
            now = time.monotonic()
            for message in [message for message, (_, client) in messages.items() if now > under_way.ends[client]]:
                late = Lost("late", f"no reply within {self._deadline_s:g} s (engine.deadline_s)")
                answers.append((messages.pop(message)[1], late))
            if not messages and not answers:
                return
            if answers:
                continue
            missing = ", ".join(client for _, client in messages.values())
            line.tell(f"{count - len(messages)} of {count} sites have replied; missing: {missing}")
            if absent:
                self._meet()
            time.sleep(self._poll_s)

    def _connected(self, clients: Sequence[str], others: int) -> dict[str, int]:
        """The nodes of those clients that are connected. While they are too few, wait for others to come.

        others  clients that are at work already, and count as connected
        """
        end, line = time.monotonic() + self._wait_s, _Line(f"waiting up to {self._wait_s:g} s, engine.wait_s")
        needed = self._required(len(clients) + others) - others
        online = set(self._grid.get_node_ids())
        while True:
            there = self._there(clients, online)
            if len(there) < len(clients):
                online = self._meet()
                there = self._there(clients, online)
            if len(there) >= needed or time.monotonic() >= end:
                return there
            missing = ", ".join(client for client in clients if client not in there)
            line.tell(f"{len(there)} of {len(clients)} sites are connected, {needed} are needed; missing: {missing}")
            time.sleep(self._poll_s)

    def _there(self, clients: Sequence[str], online: set[int]) -> dict[str, int]:
        nodes = {client: self.members.nodes[client] for client in clients if client in self.members.met}
        return {client: node for client, node in nodes.items() if node in online}

    def _meet(self) -> set[int]:
        """Ask nodes that are new who they are, and hear those that have answered; waits for none. Returns all nodes.

        A node that did not take part is asked again when it connects anew, and now and then: its operator may have
        corrected what was wrong.
        """
        now, nodes = time.monotonic(), list(self._grid.get_nodes())
        online, before = {node.node_id for node in nodes}, (len(self.members.met), dict(self.members.refused))
        at_home = {self.members.nodes[client] for client in self.members.met}
        for node in nodes:
            connected, again = self._greeted.get(node.node_id, ("", 0.0))
            if node.node_id in at_home or (connected == node.last_activated_at and now < again):
                continue
            self._greeted[node.node_id] = node.last_activated_at, now + self._wait_s
            owner = self.members.owner(node.node_id, node.public_key)
            if owner is not None:
                message = self._push("query", node.node_id, self._hello, "hello", self._wait_s)
                if message is not None:
                    self._hellos[message] = node.node_id, owner
        for node, owner, reply in itertools.chain.from_iterable(self._fetch(self._hellos, {})):
            self._greeted[node] = self._greeted[node][0], now + _AGAIN_S
            self._hear(node, owner, reply, online)
        self.members.silent = {node: owner for node, owner in self._hellos.values() if node in online}
        if before != (len(self.members.met), self.members.refused):
            self._changed()
        return online

    def _hear(self, node: int, owner: str, reply: bytes | Lost, online: set[int]) -> None:
        """What a node answered to `hello`, or why it did not."""
        claimed = ""
        try:
            if isinstance(reply, Lost):
                raise reply
            header, _ = checked(reply, {"request": digest(self._hello)}, "hello")
            claimed = readable(header.get("client", ""), 100)
            self.members.admit(node, owner, replies.hello(header), online)
        except Lost as lost:
            if lost.kind in _WORDS:
                _LOG.warning("node %d, client %s: %s", node, owner or "unknown", lost)
            else:
                self.members.refuse(node, owner or lost.client, str(lost))
        except PayloadMismatch as refusal:
            self.members.refuse(node, owner or claimed, str(refusal))

    def _push(self, purpose: str, node: int, frame: bytes, group: str, ttl: float) -> str | None:
        """One message at a time, so that downloads of many clients are not in memory together; returns its id, None
        where the SuperLink did not take it: the node has just gone, or the message is too large for what is between."""
        message = Message(to_content(frame), node, purpose, ttl=ttl, group_id=group)
        (number, *_) = [*self._grid.push_messages([message]), None]  # none, or an empty one, for what is not taken
        if not number:
            _LOG.warning("Flower's SuperLink did not take a message of %d bytes to node %d", len(frame), node)
        return number or None

    def _fetch(
        self, waiting: dict[str, tuple[int, str]], ends: Mapping[str, float]
    ) -> Iterator[list[tuple[int, str, bytes | Lost]]]:
        """The answers that are there, some at a time and each once; they are taken out of `waiting`.

        ends  by client, when its answer is too late; once others have begun to come, they get `_BREATH_S`
        """
        names = list(waiting)
        for start in range(0, len(names), _AT_ONCE):
            some: list[tuple[int, str, bytes | Lost]] = []
            asked = names[start : start + _AT_ONCE]
            until = min(ends.get(waiting[name][1], 0.0) for name in asked)
            with _no_longer_than(until, self._grid):
                messages = [*self._grid.pull_messages(asked)]
            for message in messages:
                question = waiting.pop(message.metadata.reply_to_message_id, None)
                if question is not None:  # else a reply that came twice
                    some.append((*question, _read(message, question[0])))
            yield some


@contextmanager
def _no_longer_than(until: float, grid: Grid) -> Iterator[None]:
    """Once a site has announced a reply, Flower's Grid waits up to two hours for the rest of it, and with it all others
    do: here no longer than this time, or `_BREATH_S` where it has passed. What is not there then is late."""
    module = sys.modules[type(grid).__module__]
    if (whole := getattr(module, "pull_objects", None)) is None:  # a Grid without this wait
        yield
        return

    def bounded(*arguments: Any, **options: Any) -> Any:
        return whole(*arguments, **{**options, "max_time": max(_BREATH_S, until - time.monotonic())})

    module.pull_objects = bounded  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.pull_objects = whole  # type: ignore[attr-defined]


class _Line:
    """Tells how far something is every 30 s, and with `at_changes` whenever that changes."""

    def __init__(self, limit: str, at_changes: bool = True) -> None:
        self._limit, self._at_changes, self._text, self._next = limit, at_changes, "", time.monotonic() + _TELL_S

    def tell(self, text: str, advice: str = "") -> None:
        """advice  added once the text has stayed the same for 30 s"""
        stays = time.monotonic() >= self._next
        if (self._at_changes and text != self._text) or stays:
            self._text, self._next = text, time.monotonic() + _TELL_S
            _LOG.info("%s%s (%s)", text, f"; {advice}" if stays and advice else "", self._limit)


def _read(message: Message, node: int) -> bytes | Lost:
    """The frame of a reply, or why there is none."""
    if message.has_error():
        kind = _WORLD.get(message.error.code)
        if kind is not None:
            return Lost(kind, _WORDS[kind])
        return Lost(
            "app",
            f"Flower's app failed at the site (code {message.error.code}): {replies.readable(message.error.reason)}",
        )
    if message.metadata.src_node_id != node:
        return Lost("refused", f"the reply came from node {message.metadata.src_node_id}, the request went to {node}")
    try:
        return from_content(message.content)
    except (PayloadMismatch, ValueError) as refusal:  # Flower's own for a message without any content
        return Lost("refused", str(refusal))
