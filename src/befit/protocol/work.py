"""What a step of local training computes, and a round on public records, as values that estimates can count."""

from __future__ import annotations

from dataclasses import dataclass

from befit.adapters.keys import NOTHING, Selector


@dataclass(frozen=True)
class Work:
    """One pass of the model over a batch, in one step of local training.

    active     slots in the forward pass
    trainable  what gets gradients; nothing for a forward pass alone, such as a teacher's
    times      how often it happens in a step; 0.1 for once in ten
    smallest   of the smallest backbone of the federation, frozen, in place of the client's own
    """

    active: tuple[str, ...]
    trainable: Selector = NOTHING
    times: float = 1.0
    smallest: bool = False


@dataclass(frozen=True)
class PublicWork:
    """What one round computes on public records where all clients have one backbone, and what comes before it where
    they have several; `times` counts records.

    Where it depends on who knows a record better, all that can be asked for.

    client   by every client
    server   by the server, however many clients reply
    each     by the server for each client that replies
    opening  by the server for each backbone but the smallest, once, before the first round
    """

    client: tuple[Work, ...] = ()
    server: tuple[Work, ...] = ()
    each: tuple[Work, ...] = ()
    opening: tuple[Work, ...] = ()
