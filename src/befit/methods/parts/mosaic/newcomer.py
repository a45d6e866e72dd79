"""A mixture for somebody who never trained: by the likeness of a gradient of its data to those of all clients.

Fast adaptation of Seo et al. 2026 (FedMosaic): the gradient is of a few batches of the unseen task, and the
softmax runs over all old clients. A newcomer sends that one gradient, gets its mixture, and nobody else gets anything
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from befit.core.errors import NotTrained
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.mosaic.bank import EVERYBODY, GROUPS, WEIGHTS, members, mixed
from befit.methods.parts.mosaic.mixing import Mixing, Relevance
from befit.methods.parts.mosaic.sketch import SKETCH, Sketch, agreement, check_agreed, disturbed, newcomer_sketch
from befit.protocol.stage import Exchange

if TYPE_CHECKING:
    from befit.protocol.site import ServerSite, Site

__all__ = ["ARRIVED", "Arrival", "newcomer_mixture"]

ARRIVED = "arrived"  # the part of the server's memory with what was mixed for newcomers


def newcomer_mixture(
    server: Payload,
    own: Tensor | None,
    family: str,
    mixing: Mixing = Relevance(),  # noqa: B008 frozen
    name: str = "personal",
) -> State:
    """What a newcomer with this backbone starts from, in slot `name`, out of the server's memory after any round.

    own  the newcomer's gradient, see `newcomer_sketch`; none where the mixing takes no gradients

    Cores of PQ sites are mixed over all clients, the rest over those of the backbone, each with weights of sum 1.
    Raises NotTrained where nobody has this backbone, PayloadMismatch where no gradients are held.
    """
    whose = members(server)
    if family not in whose:
        raise NotTrained("a newcomer cannot be given a mixture: nobody of its backbone has sent anything")
    weights: dict[str, Tensor] = {}
    for group in (EVERYBODY, family):
        sketches = server.part(GROUPS, EVERYBODY).arrays.get(SKETCH)
        if sketches is not None and group != EVERYBODY:
            sketches = sketches[[whose[EVERYBODY].index(client) for client in whose[group]]]
        weights[group] = mixing.newcomer(sketches, own, server.part(GROUPS, group).arrays[WEIGHTS])
    return mixed(server, family, name, weights)


@dataclass(frozen=True)
class Arrival(Exchange):
    """A newcomer's only message: the gradient by which the server mixes the clients' adapters for it."""

    mixing: Mixing
    sketch: Sketch | None

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload({}, agreement(server.scalars, self.sketch, at.seed))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> tuple[Payload, Payload]:
        if self.sketch is None or not isinstance(self.mixing, Relevance):
            return client, Payload()
        check_agreed(received, site, self.sketch, at.seed)
        own = newcomer_sketch(site, at, self.sketch, self.mixing.noise_on("gradient"))
        return client, Payload({SKETCH: disturbed(own, site, at, self.mixing.noise_on("upload"))})

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """The server's memory with a mixture for each of them beside it."""
        arrived = Payload()
        for update in updates:
            info, own = update.client, update.payload.arrays.get(SKETCH)
            mixture = newcomer_mixture(server, own, info.backbone, self.mixing, "shared")
            arrived = arrived.with_part(info.id, Payload(mixture))
        return server.with_part(ARRIVED, arrived)
