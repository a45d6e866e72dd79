"""The server's part in one sum: it passes on what it cannot read, and takes off the sum the masks that are left."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping

from befit.core.errors import NotEnoughReplies, PayloadMismatch
from befit.protocol.secure.client import PublicKeys, bound, graph, places
from befit.protocol.secure.masks import (
    FEWEST,
    Numbers,
    add_mask,
    agreed_key,
    derived,
    fewest_left,
    mask_name,
    needed,
    public_key,
)
from befit.protocol.secure.shamir import combine


class Server:
    """One sum. `about` and `threshold` are those of its members; the keys are bound to `about` from then on.

    keys   of all members
    boxes  by who made them, and for whom; once somebody's are here, everybody has masks with it
    """

    def __init__(self, about: str, threshold: float, keys: Mapping[str, PublicKeys]) -> None:
        self.threshold, self.keys = threshold, dict(keys)
        self.boxes: dict[str, dict[str, bytes]] = {}
        self._check(len(keys), FEWEST, "sent keys")
        self.about = bound(about, keys)
        self.graph = graph(keys, threshold)

    def take(self, sender: str, boxes: Mapping[str, bytes]) -> None:
        self.boxes[sender] = dict(boxes)

    def inbox(self, client: str) -> dict[str, bytes]:
        """The boxes for a client, of all its neighbours that made some."""
        return {other: self.boxes[other][client] for other in self.graph[client] if other in self.boxes}

    def check_shared(self) -> None:
        """Raise NotEnoughReplies where so few made boxes that the sum could not be uncovered."""
        self._check(len(self.boxes), self.fewest, "shared keys")

    @property
    def fewest(self) -> int:
        return fewest_left(len(self.keys), self.threshold)

    def owners_of_shares(self, holder: str) -> list[str]:
        """Of whom a client has shares, itself among them, in the order in which it gives them."""
        return sorted([holder, *(other for other in self.graph[holder] if other in self.boxes)])

    def uncover(
        self, total: Numbers, left: Collection[str], shares: Mapping[str, Mapping[str, bytes]], download: bytes = b""
    ) -> None:
        """Take all masks off the sum of hidden vectors, in place.

        left      whose vectors these are
        shares    by holder and owner, of the holders that answered
        download  hash of what all of them were sent
        Raises NotEnoughReplies where they are too few, PayloadMismatch where wrong ones are among them and too few
        others.
        """
        self._check(len(left), self.fewest, "sent an update")
        for owner in sorted(left):
            digest = self.keys[owner].seed
            seed = self._secret(owner, shares, lambda seed, digest=digest: hashlib.sha256(seed).digest() == digest)
            add_mask(total, derived(seed, "own mask", self.about), -1)
        for owner in sorted(self.boxes.keys() - {*left}):
            if not (others := [other for other in self.graph[owner] if other in left]):
                continue
            mask = self.keys[owner].mask
            private = self._secret(owner, shares, lambda private, mask=mask: public_key(private) == mask)
            for other in others:
                key = agreed_key(private, self.keys[other].mask, *mask_name(self.about, download, owner, other))
                add_mask(total, key, 1 if owner < other else -1)

    def _secret(self, owner: str, shares: Mapping[str, Mapping[str, bytes]], right: Callable[[bytes], bool]) -> bytes:
        place, enough = places(self.keys), needed(len(self.graph[owner]) + 1, self.threshold)
        by_place = {
            place[holder]: of_holder[owner] for holder, of_holder in sorted(shares.items()) if owner in of_holder
        }
        self._check(len(by_place), enough, f"gave a share of {owner}'s secret")
        chosen = sorted(by_place)
        # All but one at a time, so that one wrong share does no harm where there are more than are needed.
        for without in (None, *chosen) if len(chosen) > enough else (None,):
            some = [point for point in chosen if point != without][:enough]
            try:
                secret = combine({point: by_place[point] for point in some})
            except OverflowError:
                continue
            if right(secret):
                return secret
        raise PayloadMismatch(
            f"secure sums: the shares of {owner}'s secret do not fit together, so at least one of their holders has "
            "sent a wrong one"
        )

    def _check(self, here: int, enough: int, what: str) -> None:
        if here < enough:
            raise NotEnoughReplies(
                f"secure sums: {here} of {len(self.keys)} clients {what}, and {enough} are needed "
                "(federation.secure_sums.threshold)"
            )
