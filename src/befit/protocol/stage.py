"""The steps of a protocol: an exchange is one step between server and clients, a stage repeats it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from befit.core.values import ClientInfo, Payload, TensorSpec, Tick, Update

if TYPE_CHECKING:
    from befit.protocol.site import ServerSite, Site

__all__ = ["Exchange", "Personal", "Stage"]


class Exchange(ABC):
    """One repeated step of the protocol: the server dispatches, a client updates, the server aggregates."""

    @abstractmethod
    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """What this client receives. Must not change `server`."""

    @abstractmethod
    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        """The client's new memory and its reply. The model starts bare; stored tensors must not be written to."""

    @abstractmethod
    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """The server's new memory. Updates are sorted by client id; there is at least one.

        `server` is handed over: whoever calls does not use it again, so what is large in it may be written into rather
        than copied. Arrays of an update may be read from a disk when they are asked for: go through the updates one at
        a time.
        """

    def uplink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Declares every array that a reply of this stage holds. `specs` are all arrays of the installed layout.

        A reply with anything else is stopped at the client, and refused by the server.
        """
        return {}

    def uplink_numbers(self, stage: Stage) -> frozenset[str]:
        """Declares the names of the plain numbers that a reply of this stage holds beside its arrays."""
        return frozenset()

    def downlink(self, stage: Stage, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The arrays that `dispatch` sends once a round has been aggregated, for estimates before a run."""
        return {}


class Personal(Exchange):
    """A step that a client takes alone, after receiving what the method dispatches: it sends nothing back."""

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload()

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return server


@dataclass(frozen=True)
class Stage:
    """A repeated exchange. Without `uplink` it is *personal*: no array ever leaves the client in it.

    `rounds` is None where the configuration's `federation.rounds` decides.
    """

    name: str
    exchange: Exchange
    rounds: int | None = None
    uplink: bool = True
