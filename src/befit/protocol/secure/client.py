"""A client's part in one sum: keys, shares of its secrets, a hidden vector, and what uncovers the sum of all."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from befit.core.errors import PayloadMismatch
from befit.protocol.secure.masks import (
    FEWEST,
    KEY,
    MOST,
    Numbers,
    add_mask,
    agreed_key,
    derived,
    fewest_left,
    mask_name,
    needed,
    neighbours,
    public_key,
    sealed,
    unsealed,
)
from befit.protocol.secure.shamir import SHARE, share

BOX = 2 * SHARE + 16  # bytes of two shares for one holder, encrypted


@dataclass(frozen=True)
class PublicKeys:
    """What a client tells of itself for one sum.

    mask       for masks that it has in common with others; its private key is shared among the holders
    box        for what others send it
    seed       SHA-256 of the seed of its own mask, which is shared too: a wrong share is found by it
    signature  of all this by the client's identity, where it has one
    """

    mask: bytes
    box: bytes
    seed: bytes
    signature: bytes = b""

    def to_bytes(self) -> bytes:
        return self.mask + self.box + self.seed

    @classmethod
    def from_bytes(cls, raw: bytes, signature: bytes = b"") -> PublicKeys:
        return cls(raw[:KEY], raw[KEY : 2 * KEY], raw[2 * KEY : 3 * KEY], signature)


class Identity(Protocol):
    """Signs for one client, and knows the others by what the server cannot change."""

    def sign(self, text: bytes) -> bytes: ...

    def is_of(self, client: str, text: bytes, signature: bytes) -> bool: ...


def graph(keys: Mapping[str, PublicKeys], threshold: float) -> dict[str, list[str]]:
    """Who has masks in common, as everybody finds it from all keys: the server does not choose."""
    return neighbours(sorted(keys), hash_of(keys), threshold)


def bound(about: str, keys: Mapping[str, PublicKeys]) -> str:
    """What all that follows on the keys is made for: the sum, and these keys of these clients. Of two clients that were
    told different ones, neither can read what the other makes for it."""
    return f"{about} {hash_of(keys).hex()}"


def hash_of(keys: Mapping[str, PublicKeys]) -> bytes:
    listed = [[client, keys[client].to_bytes().hex()] for client in sorted(keys)]
    return hashlib.sha256(json.dumps(listed).encode()).digest()


def text_to_sign(what: str, about: str, names: Collection[str], raw: bytes = b"") -> bytes:
    """The text that a client signs."""
    return json.dumps([what, about, sorted(names)]).encode() + raw


@dataclass
class Member:
    """One client's secrets of one sum, in the order of its steps: `begun`, `share`, `mask`, `uncover`.

    about    what the sum is of, such as run, stage and round, with what makes it this one; everybody is told the same
    private  keys of masks and boxes, and the seed of its own mask
    keys     of all members
    shares   of others' secrets and its own, two of each, that it holds
    left     whose vectors are in the sum, as it was told first
    fewest   clients that it takes part with, itself among them
    """

    client: str
    about: str
    threshold: float
    private: dict[str, bytes]
    keys: dict[str, PublicKeys] = field(default_factory=dict[str, PublicKeys])
    shares: dict[str, bytes] = field(default_factory=dict[str, bytes])
    left: list[str] | None = None
    fewest: int = FEWEST

    @classmethod
    def begun(cls, client: str, about: str, threshold: float, fewest: int = FEWEST) -> Member:
        """With new secrets: those of one sum serve no other."""
        private = {name: secrets.token_bytes(KEY) for name in ("mask", "box", "seed")}
        return cls(client, about, threshold, private, fewest=fewest)

    def own_keys(self, identity: Identity | None = None) -> PublicKeys:
        mask, box = public_key(self.private["mask"]), public_key(self.private["box"])
        keys = PublicKeys(mask, box, hashlib.sha256(self.private["seed"]).digest())
        if identity is None:
            return keys
        text = text_to_sign("keys", self.about, [self.client], keys.to_bytes())
        return PublicKeys(mask, box, keys.seed, identity.sign(text))

    def share(self, keys: Mapping[str, PublicKeys], identity: Identity | None = None) -> dict[str, bytes]:
        """A box for each neighbour with a share of either secret, which nobody else can open.

        Raises PayloadMismatch where these are not everybody's keys, as far as this client can tell.
        """
        if self.keys:
            raise self._wrong("was told the keys of all clients before")
        if not self.fewest <= len(keys) <= MOST:
            raise self._wrong(f"was told of {len(keys)} clients, and takes part with {self.fewest} to {MOST}")
        own = keys.get(self.client)
        if own is None or own.to_bytes() != self.own_keys().to_bytes():
            raise self._wrong("was told other keys of its own than it has")
        raw = [key for public in keys.values() for key in (public.mask, public.box)]
        if len({*raw}) < len(raw):
            raise self._wrong("was told one key twice")
        for other, public in keys.items():
            text = text_to_sign("keys", self.about, [other], public.to_bytes())
            if identity is not None and not identity.is_of(other, text, public.signature):
                raise self._wrong(f"was told keys of {other} that {other} did not sign")
        self.keys = dict(keys)
        places, near = self._places(), self._neighbours()
        holders = [places[name] for name in (*near, self.client)]
        enough = needed(len(holders), self.threshold)
        mask, seed = (share(self.private[name], holders, enough) for name in ("mask", "seed"))
        self.shares[self.client] = mask[places[self.client]] + seed[places[self.client]]
        return {
            other: sealed(self._box_key(self.client, other, other), mask[places[other]] + seed[places[other]])
            for other in near
        }

    def opened(self, boxes: Mapping[str, bytes]) -> dict[str, bytes]:
        """The shares that others made for it. Raises PayloadMismatch for a box that is not from its neighbours to
        itself, and for so few that the sum could not be uncovered."""
        if not self.keys or len(self.shares) > 1 or self.left is not None:
            raise self._wrong("was asked for its vector out of turn")
        near = self._neighbours()
        if strangers := boxes.keys() - {*near}:
            raise self._wrong(f"was sent shares of {min(strangers)}, with whom it has none in common")
        opened: dict[str, bytes] = {}
        for other, box in boxes.items():
            try:
                opened[other] = unsealed(self._box_key(other, self.client, other), box)
            except ValueError as error:
                raise self._wrong(f"was sent shares that {other} did not make for it") from error
        if len(opened) + 1 < (enough := needed(len(near) + 1, self.threshold)):
            raise self._wrong(f"was sent shares of {len(opened)} others, and {enough - 1} have to be there")
        return opened

    def mask(self, numbers: Numbers, boxes: Mapping[str, bytes], download: bytes = b"") -> Numbers:
        """The client's vector, hidden, once it has the boxes that others made for it; `download` is the hash of what it
        was sent. Raises PayloadMismatch as `opened` does."""
        opened, hidden = self.opened(boxes), numbers.copy()
        about = bound(self.about, self.keys)
        add_mask(hidden, derived(self.private["seed"], "own mask", about), 1)
        for other in opened:
            name = mask_name(about, download, self.client, other)
            key = agreed_key(self.private["mask"], self.keys[other].mask, *name)
            add_mask(hidden, key, 1 if self.client < other else -1)
        self.shares |= opened
        return hidden

    def agree(self, left: Collection[str], identity: Identity) -> bytes:
        """Its word on whose vectors are in the sum, which it gives on one list."""
        self._settle(left)
        return identity.sign(text_to_sign("left", bound(self.about, self.keys), left))

    def uncover(
        self,
        left: Collection[str],
        words: Mapping[str, bytes] | None = None,
        identity: Identity | None = None,
    ) -> dict[str, bytes]:
        """A share for every client whose shares it has: of the own mask of those that are left, of the key of those
        that are gone. Of no client does it ever give both: then the server could lay its vector open.

        left   whose vectors are in the sum
        words  what `agree` said, by client, where there are identities
        """
        self._settle(left)
        if identity is not None:
            text, signatures = text_to_sign("left", bound(self.about, self.keys), left), words or {}
            agreed = [name for name in left if name in signatures and identity.is_of(name, text, signatures[name])]
            if len(agreed) < (enough := self._enough):
                raise self._wrong(
                    f"was shown the word of {len(agreed)} clients on who is left, and {enough} have to agree"
                )
        return {
            owner: shares[SHARE:] if owner in left else shares[:SHARE] for owner, shares in sorted(self.shares.items())
        }

    def _settle(self, left: Collection[str]) -> None:
        """Take the list of those that are left, once."""
        if len({*left}) < len(left):
            raise self._wrong("was told twice that a client is left")
        if len(self.shares) < 2 or self.client not in left or not {*left} <= self.keys.keys():
            raise self._wrong("was asked to uncover a sum that it is no part of")
        others = {*left} & {*self._neighbours()}
        if not others <= self.shares.keys():
            raise self._wrong(f"was told that {min(others - self.shares.keys())} is left, whose shares it never got")
        here, everybody = needed(len(self._neighbours()) + 1, self.threshold), self._enough
        if len(others) + 1 < here or len(left) < everybody:
            raise self._wrong(
                f"was told that {len(left)} of {len(self.keys)} clients are left, and {max(here, everybody)} have "
                "to be (federation.secure_sums.threshold)"
            )
        if self.left is not None and self.left != sorted(left):
            raise self._wrong("was told before that other clients are left, and helps to uncover one sum")
        self.left = sorted(left)

    @property
    def _enough(self) -> int:
        return max(self.fewest, fewest_left(len(self.keys), self.threshold))

    def _neighbours(self) -> list[str]:
        return graph(self.keys, self.threshold)[self.client]

    def _places(self) -> dict[str, int]:
        return places(self.keys)

    def _box_key(self, sender: str, receiver: str, other: str) -> bytes:
        about = bound(self.about, self.keys)
        return agreed_key(self.private["box"], self.keys[other].box, "shares", about, sender, receiver)

    def _wrong(self, what: str) -> PayloadMismatch:
        return PayloadMismatch(f"secure sums: client {self.client} {what}")

    def saved(self) -> dict[str, Any]:
        """As JSON holds it; `restored` takes it."""
        return {
            "client": self.client,
            "about": self.about,
            "threshold": self.threshold,
            "private": {name: value.hex() for name, value in self.private.items()},
            "keys": {name: [public.to_bytes().hex(), public.signature.hex()] for name, public in self.keys.items()},
            "shares": {name: value.hex() for name, value in self.shares.items()},
            "left": self.left,
            "fewest": self.fewest,
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Member:
        plain = {key: saved[key] for key in ("client", "about", "threshold", "left", "fewest")}
        keys = {name: PublicKeys.from_bytes(*map(bytes.fromhex, pair)) for name, pair in saved["keys"].items()}
        private, shares = ({k: bytes.fromhex(v) for k, v in saved[name].items()} for name in ("private", "shares"))
        return cls(**plain, private=private, keys=keys, shares=shares)


def places(clients: Collection[str]) -> dict[str, int]:
    """Where each client's shares are taken of a polynomial."""
    return {client: place for place, client in enumerate(sorted(clients), start=1)}
