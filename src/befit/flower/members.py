"""Who takes part in a run over Flower: which node is which client, what each one said when it came, and who is missing.

Members are the clients that the configuration lists, whoever is there: cohorts are drawn from all of them, in their
order, so they are the same whoever comes when. Only a member is asked, believed or able to refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from befit.core.errors import ConfigError, NotEnoughReplies
from befit.core.values import LEFT_OUT
from befit.flower.keys import fingerprint

_LOG = logging.getLogger(__name__)
Introduction = Mapping[str, Any]  # what a site says of itself when it comes


@dataclass
class Members:
    """The members of one run.

    clients        their ids, in the order that decides cohorts
    check          why a site that says this cannot be this client; empty where it can
    needed         how many have to be there for the run to start, and
    needed_by      what says so
    keys           fingerprint of every client's public key; empty: the first node that says it is a client is it
    pinned         without keys, a client stays at the node where it first was
    nodes          client to node; with keys, only of those that are there
    introductions  what each client answered to `hello`, in an earlier part of the run too
    met            clients that have said hello to this process
    refused        clients whose site does not take part, with the reason
    silent         nodes that are connected and have not answered `hello` yet, with the client whose key each has
    awaited        groups of clients of which one has to be there for the run to start: each client's, by its name
    """

    clients: Sequence[str]
    check: Callable[[str, Introduction], str] = lambda client, said: ""
    needed: int = 1
    needed_by: str = "federation.min_replies"
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    pinned: bool = True
    nodes: dict[str, int] = field(default_factory=dict[str, int])
    introductions: dict[str, Introduction] = field(default_factory=dict[str, Introduction])
    met: set[str] = field(default_factory=set[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    silent: dict[int, str] = field(default_factory=dict[int, str])
    awaited: Mapping[str, str] = field(default_factory=dict[str, str])
    _broken: dict[int, str] = field(default_factory=dict[int, str])  # nodes that failed and did not say who they are
    _others: dict[int, str] = field(default_factory=dict[int, str])  # nodes left alone, with the reason

    def owner(self, node: int, key: bytes) -> str | None:
        """The client whose key a node has; "" where no keys are listed, None where it is nobody's.

        Flower lets a node do nothing without a signature by its key, so this is who it is, whatever it says.
        """
        if not self.keys:
            return ""
        its = fingerprint(key)
        for client, listed in self.keys.items():
            if its and listed == its:
                return client
        self._leave_alone(node, f"its key {its} is none of this run's (engine.keys)" if its else "it has no key")
        return None

    def admit(self, node: int, owner: str, said: Introduction, online: Collection[int]) -> bool:
        """Take in a node that has said hello, as the client that it says it is, or refuse it; returns whether it was.

        online  all nodes that are connected
        """
        client = said["client"]
        if owner and client != owner:
            reason = f"it says that it is {client}, but its key is {owner}'s; correct client in its site's file"
            return self.refuse(node, owner, reason)
        if client not in self.clients:
            return self._leave_alone(node, f"it says that it is {client}, which is no client of this run")
        before = self.nodes.get(client)
        if not owner and before not in (None, node) and (self.pinned or before in online):
            # Not a refusal: it would let anybody speak for a client that is there.
            return self._leave_alone(node, f"it says that it is {client}, but node {before} is")
        if not owner and before != node:
            self.nodes.pop(client, None)  # gone for good: whatever is wrong with this one is the client's own
        if self.introductions.get(client, said)["data"] != said["data"]:
            reason = "its data is not what it was when it first came, or data.key in its state folder is another"
            return self.refuse(node, client, f"{reason}; a new run can begin so")
        if problem := self.check(client, said):
            return self.refuse(node, client, problem)
        self.nodes[client], self.introductions[client] = node, said
        self.met.add(client)
        self.refused.pop(client, None)
        self._others.pop(node, None)
        _LOG.info("%s is here (node %d)", client, node)
        return True

    def refuse(self, node: int, client: str, reason: str) -> bool:
        """A node cannot take part. Where it is a client's own, that client is refused; anybody else is left alone.

        client  whose key it has, or without keys who it says it is; empty if neither tells
        """
        if client not in self.clients or (not self.keys and self.nodes.get(client) not in (None, node)):
            if not client:
                self._broken[node] = reason
            return self._leave_alone(node, f"{client or 'it'} says: {reason}")
        self.met.discard(client)
        if self.refused.get(client) != reason:
            self.refused[client] = reason
            _LOG.warning("client %s does not take part: %s", client, reason)
        return False

    def _leave_alone(self, node: int, reason: str) -> bool:
        if self._others.get(node) != reason:
            self._others[node] = reason
            _LOG.warning("node %d is left alone: %s", node, reason)
        return False

    @property
    def missing(self) -> list[str]:
        """Clients that may still come."""
        return [client for client in self.clients if client not in self.met and client not in self.refused]

    @property
    def broken(self) -> list[str]:
        """Why a trial without authentication, where all nodes are the user's own, cannot begin as it is."""
        return [] if self.pinned else [f"node {node}: {reason}" for node, reason in self._broken.items()]

    def why(self, client: str) -> tuple[str, str]:
        """Why a client cannot be asked now: the kind of its failure, and the reason."""
        if client in self.refused:
            return LEFT_OUT, self.refused[client]
        if client in self.silent.values():
            return "late", "the site is connected and has not answered yet"
        return "offline", "the site is not connected" if client in self.met else "the site has not come yet"

    def advice(self) -> str:
        """What to do about nodes that are connected and do not answer; empty if there are none."""
        if not self.silent:
            return ""
        return 'busy or slow to start: that site\'s log says more, and docs/flower.md, "A very slow site", what to do'

    def attendance_text(self) -> str:
        """Who is here, who is connected only, and who is missing, for people."""
        text = f"{len(self.met)} of {len(self.clients)} sites are here"
        text += f"; refused: {', '.join(self.refused)}" if self.refused else ""
        return text + self._absent()

    def _absent(self) -> str:
        missing, silent = self.missing, {*self.silent.values()}
        slow = [client for client in missing if client in silent]
        away = [client for client in missing if client not in silent]
        text = f"; missing: {', '.join(away)}" if away else ""
        if away and (unnamed := sum(not client for client in self.silent.values())):
            slow.append(
                "1 that has not said who it is" if unnamed == 1 else f"{unnamed} that have not said who they are"
            )
        return text + (f"; connected, but no answer yet: {', '.join(slow)}" if slow else "")

    def check_again(self, wait_s: float) -> None:
        """Refuse those that are here and cannot be, by what has become known since; see `demand_enough`."""
        for client in self.clients:
            if client in self.met and (problem := self.check(client, self.introductions[client])):
                self.refuse(self.nodes[client], client, problem)
        self.demand_enough(wait_s)

    def demand_enough(self, wait_s: float) -> None:
        """Raise ConfigError with all refusals, or NotEnoughReplies, if fewer are here than are needed, or none of a
        group."""
        if self.broken:
            raise ConfigError(self.broken, "the federation")
        here = {family for client, family in self.awaited.items() if client in self.met}
        if away := [family for family in dict.fromkeys(self.awaited.values()) if family not in here]:
            none = f"no site of family {away[0]} has come, and only one of its sites knows its backbone"
        elif len(self.met) < self.needed:
            none = f"{self.needed} are needed ({self.needed_by})"
        else:
            return
        missing = self._absent().removeprefix("; ") + (f" ({self.advice()})" if self.silent else "")
        if self.refused:
            reasons = [f"client {client}: {reason}" for client, reason in self.refused.items()]
            if missing:
                reasons.append(missing)
            reasons.append(f"{len(self.met)} sites are left, {none}")
            raise ConfigError(reasons, "the federation")
        others = "".join(f"; node {node} was left alone: {reason}" for node, reason in self._others.items())
        raise NotEnoughReplies(
            f"after {wait_s:g} s (engine.wait_s) {len(self.met)} of {len(self.clients)} sites have come, {none}; "
            f"{missing}{others}"
        )
