"""Who gets what: from the server's memory to each client's download, and from updates to a new memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from befit.adapters.keys import Selector, slot, slot_of, to_slot
from befit.adapters.state import rename
from befit.merge.merge import Merge
from befit.types import ClientInfo, Payload, State, Update

__all__ = ["Broadcast", "LeaveOneOut", "Route"]


class Route(Protocol):
    def initial(self, shared: Payload) -> Payload:
        """The server's memory before the first round, from the initial values of what is shared."""
        ...

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload: ...

    def absorb(self, server: Payload, updates: Sequence[Update], merge: Merge) -> Payload: ...

    def arrives(self, share: Selector) -> Selector:
        """Which keys of a client's model a download overwrites."""
        ...


@dataclass(frozen=True)
class Broadcast:
    """Everybody gets the merged arrays, under the names they went up with."""

    def initial(self, shared: Payload) -> Payload:
        return shared

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload:
        return server

    def absorb(self, server: Payload, updates: Sequence[Update], merge: Merge) -> Payload:
        return Payload(merge(updates), server.scalars)

    def arrives(self, share: Selector) -> Selector:
        return share


@dataclass(frozen=True)
class LeaveOneOut:
    """Everybody gets the mean of the others' last uploads, in slot `to` (FedALT, Bian et al. 2025, eq. 3).

    The server keeps each client's last upload in a bank and their sum beside it, so a round costs O(clients):
    `(sum - own) / (clients - 1)`. Before anybody else has uploaded nothing is sent, and the slot stays initial.
    """

    to: str = "shared"

    def initial(self, shared: Payload) -> Payload:
        return Payload()

    def dispatch(self, server: Payload, client: ClientInfo) -> Payload:
        own = f"bank:{client.id}"
        total = {key: tensor for key, tensor in server.arrays.items() if slot_of(key) == "total"}
        members = len({slot_of(key) for key in server.arrays}) - (1 if total else 0)
        others = members - (any(slot_of(key) == own for key in server.arrays) if members else 0)
        if others < 1:
            return Payload()
        if others == members:
            return Payload({to_slot(key, self.to): tensor / members for key, tensor in total.items()})
        return Payload(
            {
                to_slot(key, self.to): (tensor - server.arrays[to_slot(key, own)]) / others
                for key, tensor in total.items()
            }
        )

    def absorb(self, server: Payload, updates: Sequence[Update], merge: Merge) -> Payload:
        bank = {key: tensor for key, tensor in server.arrays.items() if slot_of(key) != "total"}
        for update in updates:
            bank |= rename(update.payload.arrays, f"bank:{update.client.id}")
        total: State = {}
        for key in sorted(bank):  # by client id, so that the sum does not depend on the order of arrival
            name = to_slot(key, "total")
            total[name] = total[name] + bank[key] if name in total else bank[key].to(torch.float32)
        return Payload({**bank, **total}, server.scalars)

    def arrives(self, share: Selector) -> Selector:
        return slot(self.to)
