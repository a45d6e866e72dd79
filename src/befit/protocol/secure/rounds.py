"""The server's side of secure sums in a run: one round, around the exchange in which clients train.

keys      every client of the round makes keys for it
shares    everybody is told all keys, and sends each neighbour shares of its secrets, which only that one can read
          (then clients train; with the request comes what others have made for them, and back come hidden vectors)
agree     where clients have identities: they sign whose vectors have come
uncover   those clients give the shares with which the masks that are left come off the sum

Whoever is missing in a step is missing from there on, and is a failure of that client.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from befit.core.errors import NotEnoughReplies, PayloadMismatch
from befit.core.values import LEFT_OUT, REFUSED, Cost, Failure, Payload, State, Stopwatch, TensorSpec, Tick, Update
from befit.protocol.engine import Engine
from befit.protocol.secure.client import BOX
from befit.protocol.secure.desk import (
    BEFORE,
    BOXES,
    HIDDEN,
    KEYS,
    SHARES,
    about_of,
    alike,
    as_texts,
    hash_after,
    hash_of_download,
    keys_as_payload,
    keys_of,
    parts,
    signatures,
    started,
    texts,
    with_shares,
)
from befit.protocol.secure.fixed import FixedPoint
from befit.protocol.secure.masks import FEWEST, KEY, agreed_key
from befit.protocol.secure.server import Server
from befit.protocol.secure.shamir import SHARE
from befit.protocol.settings import SecureSums
from befit.protocol.stage import Stage

_LOG = logging.getLogger(__name__)


class SecureRound:
    """One round of a stage. Made before the clients train; raises NotEnoughReplies where too few take part.

    accepted  told of every reply to a step that is as it should be
    failed    told of every other one, and of those that do not come
    watch     of what the server does: it is stopped while clients answer
    requests  what the clients that take part are sent to train
    clipped   how many updates were shortened, once the sum is there
    """

    def __init__(
        self,
        settings: SecureSums,
        engine: Engine,
        stage: Stage,
        layout: Mapping[str, TensorSpec],
        requests: Mapping[str, Payload],
        at: Tick,
        accepted: Callable[[Update], None],
        failed: Callable[[Failure], None],
        watch: Stopwatch,
    ) -> None:
        self._watch = watch
        self._engine, self._at, self._accepted, self._failed = engine, at, accepted, failed
        self.clipped = 0
        self._costs: dict[str, Cost] = {}
        session = secrets.token_hex(16)
        begin = dict.fromkeys(requests, Payload({}, {"session": [session]}))
        known: set[bytes] = set()

        check = partial(check_keys, known=known)
        made = dict(self._ask("keys", begin, check))
        before = {client: texts(reply, BEFORE, 1)[0] for client, reply in made.items()}
        if stage.carries:
            made = self._of_one_past(made, before, requests)
        keys = {client: keys_of(reply)[client] for client, reply in made.items()}
        if len(keys) < FEWEST:
            raise NotEnoughReplies(
                f"secure sums: {len(keys)} of {len(requests)} clients sent keys, and {FEWEST} are needed for any sum"
            )
        self._sum = Server(about_of(session, at, engine.terms), settings.threshold, keys)
        everybody = keys_as_payload(dict(sorted(keys.items())))

        def check_boxes(client: str, reply: Payload) -> None:
            _check_whole(reply, {BOXES}, set())
            parts(reply, BOXES, len(self._sum.graph[client]), BOX)

        for client, reply in self._ask("shares", dict.fromkeys(keys, everybody), check_boxes):
            near = self._sum.graph[client]
            self._sum.take(client, dict(zip(near, parts(reply, BOXES, len(near), BOX), strict=True)))
        self._sum.check_shared()
        specs = stage.reply_in(at.round).specs(layout)
        self._form = FixedPoint(settings, specs, len(keys), stage.mean == "examples")
        asked = _WithShares(requests, self._sum, stage)
        self.requests: Mapping[str, Payload] = asked
        self._start, first = started(specs, asked.alike.arrays), next(iter(asked))
        self._download = hash_of_download(stage, requests[first], before[first])

    def _of_one_past(
        self, made: Mapping[str, Payload], before: Mapping[str, str], requests: Mapping[str, Payload]
    ) -> dict[str, Payload]:
        """The largest group of clients that were sent the same until now, and are in this round. The others are left
        out: no masks would cancel between the groups."""
        groups: dict[bytes, list[str]] = {}
        for client in sorted(made):
            groups.setdefault(hash_after(before[client], requests[client]), []).append(client)
        chosen = max(groups.values(), key=len, default=[])
        at = self._at
        for client in sorted(made.keys() - {*chosen}):
            reason = (
                "secure sums: it was not sent the same as the others in all rounds so far, on which its update "
                "depends; it can take part in a new run"
            )
            self._failed(Failure(client, at.stage, at.last, LEFT_OUT, reason))
        return {client: made[client] for client in chosen}

    @property
    def declared(self) -> dict[str, TensorSpec]:
        """A hidden vector."""
        return {HIDDEN: TensorSpec((self._form.length, self._form.width), "uint8")}

    @property
    def fewest(self) -> int:
        """Updates that a sum needs."""
        return self._sum.fewest

    def opened(self, updates: Sequence[Update]) -> list[Update]:
        """The replies with the mean of all in place of each, which counts the same for every client, so that
        whatever mean a method makes of them is this one.

        Raises NotEnoughReplies where too few are there, or give what uncovers the sum.
        """
        left = [update.client.id for update in updates]
        if len(left) < self.fewest:
            raise NotEnoughReplies(
                f"secure sums: {len(left)} of {len(self._sum.keys)} clients sent an update, and {self.fewest} are "
                "needed (federation.secure_sums.threshold)"
            )
        total = np.zeros(self._form.length, np.uint64)
        for update in updates:
            total += self._form.from_bytes(update.payload.arrays[HIDDEN])
        ask: dict[str, list[str]] = {"left": left}
        there = left
        if any(keys.signature for keys in self._sum.keys.values()):
            agreed = dict(self._ask("agree", self._to(left, ask), _check_words))
            said = {client: signatures(reply, "words")[0] for client, reply in agreed.items()}
            ask = {**ask, "words": as_texts([said.get(client, b"") for client in left])}
            there = [client for client in left if client in agreed]  # who is missing in one step is in all that follow

        def check_shares(client: str, reply: Payload) -> None:
            _check_whole(reply, {SHARES}, set())
            parts(reply, SHARES, len(self._sum.owners_of_shares(client)), SHARE)

        shares = {
            client: dict(zip(owners, parts(reply, SHARES, len(owners), SHARE), strict=True))
            for client, reply in self._ask("uncover", self._to(there, ask), check_shares)
            for owners in [self._sum.owners_of_shares(client)]
        }
        self._sum.uncover(total, left, shares, self._download)
        summed = self._form.decode(total)
        self.clipped = summed.clipped
        _LOG.info("%d of %d updates were shortened (federation.secure_sums.clip)", summed.clipped, len(left))
        start = self._start
        mean: State = {
            key: ((start[key].double() if key in start else 0) + value).float() for key, value in summed.mean.items()
        }
        return [
            replace(
                update,
                client=replace(update.client, num_examples=1),
                payload=Payload(mean),
                cost=update.cost + self._costs.get(update.client.id, Cost()),
            )
            for update in updates
        ]

    def _to(self, clients: Sequence[str], ask: Mapping[str, list[str]]) -> dict[str, Payload]:
        return dict.fromkeys(clients, Payload({}, {**ask}))

    def _ask(
        self, step: str, requests: Mapping[str, Payload], check: Callable[[str, Payload], None]
    ) -> Iterator[tuple[str, Payload]]:
        """The replies of a step that are as they should be, by client; all others become failures."""
        waiting = {*requests}
        for reply in self._watch.outside(self._engine.secure(step, requests, self._at)):
            if isinstance(reply, Failure):
                self._failed(reply)
                continue
            client = reply.client.id
            try:
                if client not in waiting:
                    raise PayloadMismatch(f"secure sums: client {client} sent a reply that nobody asked for, or twice")
                waiting.remove(client)
                check(client, reply.payload)
            except PayloadMismatch as error:
                at = self._at
                self._failed(Failure(client, at.stage, at.last, REFUSED, str(error), cost=reply.cost))
                continue
            self._accepted(reply)
            self._costs[client] = self._costs.get(client, Cost()) + reply.cost
            yield client, reply.payload


class _WithShares(Mapping[str, Payload]):
    """The requests to train of those that take part, each with its shares, made when it is asked for.

    alike  what all of them are sent
    """

    def __init__(self, requests: Mapping[str, Payload], sum_: Server, stage: Stage) -> None:
        self._requests, self._sum, self._stage = requests, sum_, stage
        self._clients = [client for client in requests if client in sum_.boxes]
        self.alike = alike(stage, requests[self._clients[0]])

    def __getitem__(self, client: str) -> Payload:
        if client not in self._sum.boxes:
            raise KeyError(client)
        request = self._requests[client]
        mine, its = alike(self._stage, request), self.alike.arrays
        assert mine.scalars == self.alike.scalars and mine.arrays.keys() == its.keys()
        assert all(value is its[key] or value.equal(its[key]) for key, value in mine.arrays.items())
        return with_shares(request, self._sum.inbox(client))

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def check_keys(client: str, reply: Payload, known: set[bytes]) -> None:
    """Raise PayloadMismatch for keys for which the other clients would refuse the sum."""
    _check_whole(reply, {KEYS}, {"clients", "words", BEFORE})
    keys, before = keys_of(reply), texts(reply, BEFORE, 1)[0]
    if before and not re.fullmatch("[0-9a-f]{64}", before):
        raise PayloadMismatch(f"secure sums: client {client} sent no hash of what it was sent before")
    if [*keys] != [client]:
        raise PayloadMismatch(f"secure sums: client {client} sent keys of another")
    both = keys[client].mask, keys[client].box
    for key in both:
        agreed_key(bytes(KEY), key)
    if len({*both} - known) < len(both):
        raise PayloadMismatch(f"secure sums: client {client} sent one key twice, or another's")
    known |= {*both}


def _check_words(client: str, reply: Payload) -> None:
    _check_whole(reply, set(), {"words"})
    signatures(reply, "words", 1)


def _check_whole(reply: Payload, arrays: set[str], numbers: set[str]) -> None:
    if reply.arrays.keys() != arrays or reply.scalars.keys() != numbers:
        raise PayloadMismatch("secure sums: a reply has more than its step, or less")
