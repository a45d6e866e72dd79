"""Who gets what: from the server's memory to each client's download, and from updates to a new memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from befit.adapters.keys import NOTHING, Selector, slot, to_slot
from befit.core.values import ClientInfo, Payload, State, Update
from befit.merge.server_opt import PRIVATE

MergeRule = Callable[[Sequence[Update]], State]


class Route(Protocol):
    """Who gets what from the server, and under which slot it arrives at a client."""

    def holds(self, share: Selector) -> Selector:
        """What the server starts with, of what clients would start with."""
        ...

    def initial(self, held: Payload) -> Payload:
        """The server's memory before the first round, from the initial values of what it holds."""
        ...

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload: ...

    def start(self, server: Payload, sent: State) -> State:
        """Where the round started, under the keys of what clients send; empty where they started apart."""
        ...

    def absorb(self, server: Payload, updates: Sequence[Update], merge: MergeRule) -> Payload: ...

    def arrives(self, share: Selector) -> Selector:
        """Which keys of a client's model a download overwrites."""
        ...

    def fewer(self, share: Selector) -> Selector:
        """Which of these a client may lack in a download after the first round too."""
        ...

    @property
    def once(self) -> Selector:
        """What comes with a client's first download alone, for it to keep."""
        ...


@dataclass(frozen=True)
class Broadcast:
    """Everybody gets the merged arrays, under the names they went up with, or in slot `to`.

    beside  what the server holds and sends beside what clients share: it changes when it is shared in its turn, or by
            what the server does after a merge
    """

    to: str | None = None
    beside: Selector = NOTHING

    @property
    def once(self) -> Selector:
        return NOTHING

    def holds(self, share: Selector) -> Selector:
        return share if self.beside in (NOTHING, share) else share | self.beside

    def initial(self, held: Payload) -> Payload:
        return Payload(self._arriving(held.arrays), held.scalars)

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload:
        public = {key: value for key, value in server.arrays.items() if not key.startswith(PRIVATE)}
        return Payload(public, server.scalars)

    def start(self, server: Payload, sent: State) -> State:
        return {key: server.arrays[self._name(key)] for key in sent if self._name(key) in server.arrays}

    def absorb(self, server: Payload, updates: Sequence[Update], merge: MergeRule) -> Payload:
        still = {} if self.beside == NOTHING else server.arrays
        return Payload(still | self._arriving(merge(updates)), server.scalars)

    def arrives(self, share: Selector) -> Selector:
        return self.holds(share) if self.to is None else _moved(share, self.to)

    def fewer(self, share: Selector) -> Selector:
        return NOTHING

    def _name(self, key: str) -> str:
        return key if self.to is None else to_slot(key, self.to)

    def _arriving(self, state: State) -> State:
        return {self._name(key): value for key, value in state.items()}


@dataclass(frozen=True)
class LeaveOneOut:
    """Everybody gets the mean of the others' last uploads, in slot `to` (FedALT, Bian et al. 2025b, eq. 3).

    The server keeps each client's last upload, as part `bank`, and their sum and number beside it, so a round costs
    O(clients): `(sum - own) / (clients - 1)`. Before anybody else has uploaded nothing is sent, and the slot stays
    initial.
    """

    to: str = "shared"

    @property
    def once(self) -> Selector:
        return NOTHING

    def holds(self, share: Selector) -> Selector:
        return share

    def initial(self, held: Payload) -> Payload:
        return Payload()

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload:
        own, total = server.part("bank", client.id).arrays, server.part("total")
        known = total.scalars.get("members")  # of which runs from before it have none
        members = len(server.part("bank").parts()) if known is None else total.number("members")
        others = members - bool(own) if total.arrays else 0
        if others < 1:
            return Payload()
        rest = {key: tensor - own[key] if own else tensor for key, tensor in total.arrays.items()}
        return Payload({to_slot(key, self.to): tensor / others for key, tensor in rest.items()})

    def start(self, server: Payload, sent: State) -> State:
        return {}

    def absorb(self, server: Payload, updates: Sequence[Update], merge: MergeRule) -> Payload:
        bank = server.part("bank").parts() | {update.client.id: update.payload for update in updates}
        total: State = {}
        for client in sorted(bank, key="{}/".format):  # so that the sum does not depend on the order of arrival
            for key, sent in bank[client].arrays.items():
                total[key] = total[key] + sent if key in total else sent.to(torch.float32)
        kept = Payload.of_parts(bank)
        members = len(kept.parts())  # without those whose upload was empty
        return server.with_part("bank", kept).with_part("total", Payload(total, {"members": members}))

    def arrives(self, share: Selector) -> Selector:
        return _moved(share, self.to)

    def fewer(self, share: Selector) -> Selector:
        return self.arrives(share)  # nothing, as long as nobody else has sent anything


@dataclass(frozen=True)
class Once:
    """Everybody gets the merged arrays, and once what they are expressed in, which no round changes.

    The server's memory says in part `has` who has it.
    """

    once: Selector

    def holds(self, share: Selector) -> Selector:
        return share | self.once

    def initial(self, held: Payload) -> Payload:
        return held

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload:
        has_it = bool(server.part("has").number(client.id, 0))
        rest = server.with_part("has", Payload())
        return Payload({k: v for k, v in rest.arrays.items() if not (has_it and self.once(k))}, rest.scalars)

    def start(self, server: Payload, sent: State) -> State:
        return {key: server.arrays[key] for key in sent}

    def absorb(self, server: Payload, updates: Sequence[Update], merge: MergeRule) -> Payload:
        return self.mark_received(server | Payload(merge(updates)), updates)

    @staticmethod
    def mark_received(server: Payload, updates: Sequence[Update]) -> Payload:
        """The memory that says of these clients too that they have it."""
        have = server.part("has") | Payload({}, {update.client.id: 1 for update in updates})
        return server.with_part("has", have)

    def arrives(self, share: Selector) -> Selector:
        return share

    def fewer(self, share: Selector) -> Selector:
        return NOTHING


def _moved(share: Selector, to: str) -> Selector:
    """What is shared, under the keys of another slot."""
    if share == slot(*sorted(share.slots)):
        return slot(to)
    of, names = slot(to), share.slots | {to}
    return Selector(
        f"{share} in {of}",
        lambda key: of(key) and any(share(to_slot(key, name)) for name in names),
        frozenset({to}),
    )
