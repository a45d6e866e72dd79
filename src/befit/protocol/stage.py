"""The steps of a protocol: an exchange is one step between server and clients, a stage repeats it.

An exchange computes; a stage says, as data, who takes part and what travels. The guard, the site, estimates and
`befit explain` read the stage, so what is declared there is what is enforced.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from befit.adapters.keys import NOTHING, Selector
from befit.core.plugins import returned
from befit.core.values import ClientInfo, ClientWeights, Payload, TensorSpec, Tick, Update
from befit.protocol.mechanism import Gradients

if TYPE_CHECKING:
    from befit.protocol.jobs import Steps, Updated
    from befit.protocol.site import ServerSite, Site

Specs = dict[str, TensorSpec]


class Exchange(ABC):
    """One repeated step of the protocol: the server dispatches, a client updates, the server aggregates."""

    @abstractmethod
    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        """What this client receives. Must not change `server`."""

    @abstractmethod
    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated] | Updated:
        """The client's new memory and its reply. The model starts bare; stored tensors must not be written to.

        A generator may ask for training in between, which is then done for several clients at once where that pays; see
        `befit.protocol.jobs`.
        """

    @property
    def asks(self) -> bool:
        """Whether a client's update asks for its training, so that it can be done for several clients at once."""
        return inspect.isgeneratorfunction(self.client_update)

    @property
    def lone(self) -> str:
        """Why clients take training that is asked for one by one all the same; empty where several can at once."""
        return ""

    @abstractmethod
    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        """The server's new memory. Updates are sorted by client id; there is at least one.

        Arrays of an update may be read from a disk when they are asked for: go through the updates one at a time.
        `server` is handed over: the caller keeps no other reference to it. Only a memory that holds an adapter of
        every client makes use of that (`befit.methods.parts.mosaic.bank`); everybody else leaves it as it is.
        """


class Personal(Exchange):
    """A step that a client takes alone, after receiving what the server dispatches: it sends nothing back."""

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload()

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        return server


@dataclass(frozen=True)
class Pieces:
    """What a round adds for clients that were away too: it comes any number of times, as numbered parts of one part.

    arrays  which arrays of the layout a piece stands for
    become  how one round makes it: declarations from those of the chosen arrays and the number of replies in a round.
            A low-rank pair may have any rank; what is declared is what estimates count
    name    of the part that holds the numbered ones
    """

    arrays: Selector
    become: Callable[[Specs, int], Specs]
    name: str = "pieces"

    def specs(self, layout: Mapping[str, TensorSpec], replies: int) -> Specs:
        return self.become({key: spec for key, spec in layout.items() if self.arrays(key)}, replies)


@dataclass(frozen=True)
class Message:
    """What travels one way in a stage.

    arrays   which arrays of the layout
    numbers  names of the plain values beside them; in a reply each is one number of at most 64 bits
    become   how those arrays are sent, where that is not as they are: declarations from those of the chosen arrays
    text     what travels in words, where the selector does not say it
    besides  arrays of the layout that may come along, seldom enough to be left out of estimates
    fewer    arrays, as they are sent, of which a client may get fewer or none after the first round too: those of
             groups that are not there, or a mixture that is for clients who have sent something
    pieces   what rounds add and what comes for each of them, beside all that
    """

    arrays: Selector = NOTHING
    numbers: tuple[str, ...] = ()
    become: Callable[[Specs], Specs] | None = None
    text: str = ""
    besides: Selector = NOTHING
    pieces: Pieces | None = None
    fewer: Selector = NOTHING

    def specs(self, layout: Mapping[str, TensorSpec], replies: int = 1) -> Specs:
        """Declares every array of the message, from all arrays of the installed layout.

        replies  how many a round has, where pieces grow with them
        """
        chosen = {key: layout[key] for key in self.arrays.of(layout)}
        plain = chosen if self.become is None else self.become(chosen)
        return plain if self.pieces is None else plain | self.pieces.specs(layout, replies)

    def whole(self, layout: Mapping[str, TensorSpec]) -> set[str]:
        """The arrays without which it is not whole."""
        return {key for key in self.plain.specs(layout) if not self.fewer(key)}

    @property
    def plain(self) -> Message:
        """The message without its pieces."""
        return self if self.pieces is None else replace(self, pieces=None)

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The arrays of the layout that it is about, however they are sent."""
        return (self.arrays,) if self.pieces is None else (self.arrays, self.pieces.arrays)

    def without(self, others: Selector) -> Message:
        """The same message in a layout with further arrays, which are no part of it."""

        def apart(chosen: Selector) -> Selector:
            return Selector(chosen.text, lambda key: chosen(key) and not others(key), chosen.slots)

        pieces = self.pieces and replace(self.pieces, arrays=apart(self.pieces.arrays))
        return replace(self, arrays=apart(self.arrays), besides=apart(self.besides), pieces=pieces)

    def __str__(self) -> str:
        """
        >>> from befit.adapters.keys import slot
        >>> str(Message(slot("rates"), numbers=("stopped",))), str(Message())
        ('slot(rates), number stopped', 'nothing')
        """
        words = [self.text or self.arrays.text] if self.arrays != NOTHING or self.pieces else []
        return ", ".join([*words, *(f"number {name}" for name in self.numbers)]) or "nothing"


@dataclass(frozen=True)
class SharedStages:
    """Stages whose result does not depend on the rest of the plan: runs that have the same ones train them once.

    block     what decides the result beside the settings of the run, such as the configuration of another method
    count     how many stages they are: the one that says so, and those right before it
    clients   names of the parts of a client's memory that they read and write; None where all of it is theirs
    server    the same of the server's memory
    settings  the settings in which they differ from the run, by block of the configuration
    others    where all of the server's memory is theirs: names of the parts that other stages of the plan have there
    """

    block: Mapping[str, Any]
    count: int = 1
    clients: tuple[str, ...] | None = None
    server: tuple[str, ...] | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    others: tuple[str, ...] = ()

    def of_server(self, memory: Payload) -> tuple[Payload, Payload]:
        """What in the server's memory is theirs, and the rest."""
        if self.server is not None:
            return memory.split(self.server)
        rest, theirs = memory.split(self.others)
        return theirs, rest


@dataclass(frozen=True)
class Stage:
    """A repeated exchange, and what travels in it.

    up       every array and number of a reply: a reply with anything else is stopped at the client, and refused by the
             server. None for a *personal* stage, in which nothing ever leaves the client
    down     what the server sends once a round has been aggregated, all of it but for `Message.fewer`; a first round
             may send less
    rounds   None where the configuration's `federation.rounds` decides
    who      takes part: the round's cohort; or a newcomer, a client that takes part in no round, once before its first
             download. `aggregate` then gives what the server holds for this newcomer alone
    lasts    whether clients deploy from what its server sends in later stages too, or only from what they keep
    trains   what a client trains in it, for reports and estimates; None where a method does not say
    shared   the shared stages of which this is the last, if there are any
    turns    what of `up` a round's replies hold, one after the other and then from the first again; empty: all of it
    mean     how clients count, by "examples" or "uniform", where the replies' mean is all that the server needs of
              them and every client is sent the same: then nobody has to see a single one (docs/secure_sums.md). None
              where it needs each reply by itself
    carries  whether what a client sends may depend on what it kept of earlier rounds; a secure sum is then of clients
             that were sent the same in all of them
    parts    of how many equal parts of its training examples a client leaves one out (`Site.in_part`); 1: it has all
    reads    what a client's update computes from its records: gradients in training alone, which can be made private;
             or in words what else, for which the stage is refused where records are protected (docs/privacy.md)
    """

    name: str
    exchange: Exchange
    up: Message | None = None
    down: Message = Message()
    rounds: int | None = None
    who: Literal["cohort", "newcomer"] = "cohort"
    lasts: bool = True
    trains: Selector | None = None
    shared: SharedStages | None = None
    turns: tuple[Selector, ...] = ()
    mean: ClientWeights | None = None
    carries: bool = True
    parts: int = 1
    reads: Gradients | str = "what it does not declare"

    def __post_init__(self) -> None:
        if self.mean is not None and (self.up is None or self.up.numbers or self.up.pieces):
            raise ValueError(f"stage {self.name} sends up what has no mean: {self.reply}")

    @property
    def federated(self) -> bool:
        return self.up is not None

    @property
    def reply(self) -> Message:
        """What a client may send: `up`, and nothing at all in a personal stage."""
        return Message() if self.up is None else self.up

    def reply_in(self, round_: int) -> Message:
        """What a client may send in one round."""
        if self.up is None or not self.turns:
            return self.reply
        return replace(self.up, arrays=self.up.arrays & turn_of(self.turns, round_))


def dispatched(stage: Stage, server: Payload, client: ClientInfo, at: Tick) -> Payload:
    """What the server sends a client. Raises BefitError where the exchange returns no payload."""
    return returned(stage.exchange.dispatch, stage.exchange.dispatch(server, client, at), Payload)


def turn_of(turns: Sequence[Selector], round_: int) -> Selector:
    """Whose turn it is in a round, from 1.

    >>> from befit.adapters.keys import factor
    >>> [turn_of((factor("B"), factor("A")), round_) for round_ in (1, 2, 3)]
    [factor(B), factor(A), factor(B)]
    """
    return turns[(round_ - 1) % len(turns)]
