"""Frames to sites and back over Flower's Grid: who is where, deadlines, and replies that do not come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from befit.core.errors import ConfigError, NotEnoughReplies, PayloadMismatch
from befit.flower import replies
from befit.flower.engine import Lost, checked
from befit.flower.frame import digest, from_content, to_content

_LOG = logging.getLogger(__name__)
_AT_ONCE = 8  # replies that are fetched together, so that not all of a round are in memory
_WORLD = {3: "late", 4: "late", 5: "offline", 8: "crashed"}  # Flower's error codes that a later attempt may not meet
_WORDS = {
    "late": "no reply in time (engine.deadline_s), or the message was lost in Flower",
    "offline": "the site is not connected",
    "crashed": "the site's process was killed, perhaps for want of memory; its log says more",
}


class GridLink:
    """The link to the sites of one run.

    deadline_s  longest wait for the replies of one round; a site does not take up a request that is older
    pinned      a client stays at the node where it first was, as it does with node authentication
    nodes       client to node, as an earlier part of the run left them
    """

    def __init__(
        self,
        grid: Grid,
        deadline_s: float,
        pinned: bool = True,
        nodes: Mapping[str, int] | None = None,
        poll_s: float = 0.5,
    ) -> None:
        self._grid, self._deadline_s, self._pinned, self._poll_s = grid, deadline_s, pinned, poll_s
        self.nodes = dict(nodes or {})
        self._answered: set[int] = set()
        self._refused: dict[int, str] = {}
        self._hello, self._expected = b"", frozenset[str]()

    def gather(self, clients: Sequence[str], hello: bytes, wait_s: float, absent: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until every client has said hello; returns what each one said, in the order of `clients`.

        absent  what they said in an earlier part of the run, taken for those that do not come

        Raises ConfigError if a site refuses, NotEnoughReplies if some are still missing after `wait_s`.
        """
        self._hello, self._expected = hello, frozenset(clients)
        hellos: dict[str, Any] = {}
        end = time.monotonic() + wait_s
        while True:
            hellos |= self._meet(end)
            missing = [client for client in clients if client not in hellos]
            if self._refused and missing:
                raise ConfigError(self._refused.values(), "the federation")
            if not missing or all(client in absent for client in missing):
                return {client: hellos.get(client) or absent[client] for client in clients}
            if time.monotonic() > end:
                raise NotEnoughReplies(
                    f"after {wait_s:g} s {len(hellos)} of {len(clients)} sites have come; missing: "
                    f"{', '.join(missing)} (engine.wait_s)"
                )
            time.sleep(self._poll_s)

    def deliver(
        self, purpose: str, clients: Sequence[str], frame: Callable[[str], bytes], group: str
    ) -> Iterator[tuple[str, bytes | Lost]]:
        """Send each client its frame, and yield the answers as they come; see `befit.flower.engine.Link`."""
        end = time.monotonic() + self._deadline_s
        online = set(self._grid.get_node_ids())
        if any(self.nodes.get(client) not in online for client in clients):
            self._meet(end)  # a site that came back may have another number
        asked: dict[str, tuple[str, int]] = {}
        for client in clients:
            node = self.nodes.get(client)
            if node is None or node not in online:
                yield client, Lost("offline", _WORDS["offline"])
                continue
            asked[self._push(purpose, node, frame(client), group, self._deadline_s)] = client, node
        for client, _, reply in self._pull(asked, end):
            yield client, reply

    def _meet(self, end: float) -> dict[str, Any]:
        """Ask every node that is new who it is; returns what the clients of this run among them said."""
        new = [node for node in self._grid.get_node_ids() if node not in self._answered and node not in self._refused]
        ttl = max(end - time.monotonic(), 1.0)
        asked = {self._push("query", node, self._hello, "hello", ttl): (str(node), node) for node in new}
        hellos: dict[str, Any] = {}
        for name, node, reply in self._pull(asked, end):
            try:
                if isinstance(reply, Lost):
                    raise reply
                header, _ = checked(reply, {"request": digest(self._hello)}, "hello")
                answer = replies.hello(header)
                if self._admit(answer["client"], node):
                    hellos[answer["client"]] = answer
                self._answered.add(node)
            except (Lost, PayloadMismatch) as refusal:
                client = refusal.client if isinstance(refusal, Lost) else ""
                _LOG.warning("node %s, client %s: %s", name, client or "unknown", refusal)
                if client and client not in self._expected:
                    self._answered.add(node)  # another run's site: what it thinks of this one does not matter
                elif not isinstance(refusal, Lost) or refusal.kind not in _WORDS:
                    self._refused[node] = f"client {client or 'unknown'} at node {name}: {refusal}"
        return hellos

    def _admit(self, client: str, node: int) -> bool:
        """Whether this node may be this client. The first that says so is; another one never takes its place while
        it is connected, nor later where nodes are authenticated."""
        if client not in self._expected:
            _LOG.warning("node %d says that it is %s, which is no client of this run; it is left alone", node, client)
            return False
        before = self.nodes.get(client)
        if before not in (None, node) and (self._pinned or before in set(self._grid.get_node_ids())):
            raise PayloadMismatch(
                f"it says that it is client {client}, but node {before} is; a client has one site, "
                "and its key stays the same for a run"
            )
        self.nodes[client] = node
        return True

    def _push(self, purpose: str, node: int, frame: bytes, group: str, ttl: float) -> str:
        """One message at a time, so that downloads of many clients are not in memory together; returns its id."""
        message = Message(to_content(frame), node, purpose, ttl=ttl, group_id=group)
        (number,) = self._grid.push_messages([message])
        if number is None:
            raise ConfigError([f"Flower's SuperLink did not take a message of {len(frame)} bytes to node {node}"])
        return number

    def _pull(self, asked: dict[str, tuple[str, int]], end: float) -> Iterator[tuple[str, int, bytes | Lost]]:
        """Each answer once, as it comes; `Lost` for those that have not come at the end."""
        waiting = dict(asked)
        while waiting:
            names = list(waiting)
            for start in range(0, len(names), _AT_ONCE):
                for message in self._grid.pull_messages(names[start : start + _AT_ONCE]):
                    question = waiting.pop(message.metadata.reply_to_message_id, None)
                    if question is not None:  # else a reply that came twice
                        yield *question, _read(message, question[1])
            if waiting and time.monotonic() > end:
                break
            if waiting:
                time.sleep(self._poll_s)
        for name, node in waiting.values():
            yield name, node, Lost("late", f"no reply within {self._deadline_s:g} s (engine.deadline_s)")


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
