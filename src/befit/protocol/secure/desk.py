"""The client's side of secure sums in a run: answers the steps of a round, and lets no update leave in the open."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from befit.core.errors import PayloadMismatch
from befit.core.names import is_id
from befit.core.values import Payload, State, TensorSpec, Tick
from befit.protocol.method import Method, run_stages
from befit.protocol.secure.client import BOX, Identity, Member, PublicKeys
from befit.protocol.secure.fixed import FixedPoint
from befit.protocol.secure.masks import FEWEST, KEY
from befit.protocol.secure.shamir import SHARE
from befit.protocol.serve import SUMS, stage_named
from befit.protocol.settings import SecureSums
from befit.protocol.stage import Stage

if TYPE_CHECKING:
    from befit.protocol.store import ClientStore

STEPS = ("keys", "shares", "agree", "uncover")  # "update" is between the second and the third: a request to train
KEYS, BOXES, HIDDEN, SHARES, BEFORE = "keys", "boxes", "hidden", "shares", "before"
_SENT = "sent"  # in a vault, or in the part `SUMS` of a client's memory: what it trained on
_PART = "secure sums"
_SESSION = 32  # letters, of hexadecimal digits
Vault = MutableMapping[str, dict[str, Any]]  # what clients keep of a sum, by client; plain values


class SecureDesk:
    """Of the clients of one process, for one method.

    vault     where their secrets are between two steps
    identity  signs for them, and knows the others
    fewest    clients of a sum that they take part in
    store     of their memories, where what they trained on lies beside them, so that a resumed run knows it as a whole
              one does; None: it lies in the vault, which outlives the process
    terms     hash of what they were told that the run is; see `befit.protocol.engine.Engine`
    """

    def __init__(
        self,
        settings: SecureSums,
        method: Method,
        vault: Vault,
        identity: Identity | None = None,
        fewest: int = FEWEST,
        terms: str = "",
        store: ClientStore | None = None,
    ) -> None:
        self._settings, self._method, self._vault, self._identity = settings, method, vault, identity
        self._fewest, self._terms, self._store = fewest, terms, store
        self._carries = any(stage.carries for stage in run_stages(method))

    def answer(self, step: str, client: str, request: Payload, at: Tick) -> Payload:
        """Raises PayloadMismatch for a request that is out of turn, or that would tell the server more than a sum."""
        stage = stage_named(self._method, at.stage)
        if step not in STEPS or stage.mean is None:
            raise PayloadMismatch(f"secure sums: stage {at.stage} has no step {step!r}")
        kept = self._vault.get(client, {})
        if step == "keys":
            session = texts(request, "session", 1)[0]
            if len(session) != _SESSION or not {*session} <= {*"0123456789abcdef"}:
                raise PayloadMismatch(f"secure sums: a session has to be {_SESSION} hexadecimal digits")
            about = about_of(session, at, self._terms)
            member = Member.begun(client, about, self._settings.threshold, self._fewest)
            keys = member.own_keys(self._identity)
            self._keep(client, kept, member)
            before = self._before(client, at) if stage.carries else ""
            return keys_as_payload({client: keys}) | Payload({}, {BEFORE: [before]})
        member = self._member(client, kept, at)
        if step == "shares":
            boxes = member.share(keys_of(request), self._identity)
            _ = self._form(stage, {}, member).width  # raises what does not fit, before anybody trains
            self._keep(client, kept, member)
            return Payload({BOXES: rows(list(boxes.values()), BOX)})
        left = texts(request, "left")
        if step == "agree":
            if self._identity is None:
                raise PayloadMismatch("secure sums: this client has no identity to agree by")
            words = as_texts([member.agree(left, self._identity)])
            self._keep(client, kept, member)
            return Payload({}, {"words": words})
        # An interrupted round may be done again: with the same clients its sum says nothing new.
        opened, when = kept.setdefault("opened", {}), f"{at.stage} {at.round}"
        names = hashlib.sha256(repr(sorted(left)).encode()).hexdigest()
        if opened.get(when, names) != names:
            raise PayloadMismatch(
                f"secure sums: client {client} has helped to uncover the sum of other clients in round {at.round} of "
                f"stage {at.stage}, and the difference of two sums is an update; start a new run"
            )
        shares = member.uncover(left, dict(zip(left, signatures(request, "words"), strict=False)), self._identity)
        member.private.clear()
        opened[when] = names
        self._keep(client, kept, member)
        return Payload({SHARES: rows(list(shares.values()), SHARE)})

    def opened(self, client: str, received: Payload, at: Tick) -> tuple[Payload, Payload]:
        """A request to train, apart: what the method is sent, and the shares that come with it. Raises PayloadMismatch
        where an update would have nothing to hide behind."""
        part, rest = received.split([_PART])
        shares = part.part(_PART)
        if stage_named(self._method, at.stage).federated:
            member = self._member(client, self._vault.get(client, {}), at)
            if not part.arrays:
                raise PayloadMismatch("secure sums: the server asks for an update without shares to hide it by")
            member.opened(boxes_of(shares))  # so that nothing is trained in vain
        return rest, shares

    def hidden(
        self,
        client: str,
        reply: Payload,
        received: Payload,
        shares: Payload,
        examples: int,
        layout: Mapping[str, TensorSpec],
        at: Tick,
    ) -> Payload:
        """The reply as it may leave. What a client was sent of an array is taken off it first."""
        stage = stage_named(self._method, at.stage)
        before = self._before(client, at) if self._carries else ""
        if self._carries:
            self._note(client, [*self._earlier(client, at), [*self._place(at), hash_after(before, received).hex()]])
        if not stage.federated:
            return reply
        kept = self._vault.get(client, {})
        member = self._member(client, kept, at)
        specs = stage.reply_in(at.round).specs(layout)
        form = self._form(stage, specs, member)
        start = started(specs, received.arrays)
        update = {key: value - start[key] if key in start else value for key, value in reply.arrays.items()}
        vector = form.encode(update, examples)
        numbers = member.mask(vector, boxes_of(shares), hash_of_download(stage, received, before))
        self._keep(client, kept, member)
        return Payload({HIDDEN: form.to_bytes(numbers)})

    def _form(self, stage: Stage, specs: Mapping[str, TensorSpec], member: Member) -> FixedPoint:
        return FixedPoint(self._settings, specs, len(member.keys), stage.mean == "examples")

    def _member(self, client: str, kept: Mapping[str, Any], at: Tick) -> Member:
        if "member" in kept:
            member = Member.restored(kept["member"])
            if member.about == about_of(member.about[:_SESSION], at, self._terms):
                return member
        raise PayloadMismatch(f"secure sums: client {client} has made no keys for round {at.round} of stage {at.stage}")

    def _place(self, at: Tick) -> tuple[int, int]:
        return [stage.name for stage in run_stages(self._method)].index(at.stage), at.round

    def _earlier(self, client: str, at: Tick) -> list[list[Any]]:
        """Stage and round of every download that a client trained on before this round, with the hash of all until
        then. What is done again from there is in place of what it was."""
        if self._store is None:
            sent = self._vault.get(client, {}).get(_SENT, [])
        else:
            sent = json.loads(str((self._store.load(client) or Payload()).part(SUMS).scalars.get(_SENT, "[]")))
        place = self._place(at)
        return [entry for entry in sent if tuple(entry[:2]) < place]

    def _note(self, client: str, sent: list[list[Any]]) -> None:
        if self._store is None:
            self._vault[client] = {**self._vault.get(client, {}), _SENT: sent}
        else:
            memory = self._store.load(client) or Payload()
            self._store.save(client, memory.with_part(SUMS, Payload({}, {_SENT: json.dumps(sent)})))

    def _before(self, client: str, at: Tick) -> str:
        """Hash of all downloads that a client trained on before this round; empty where there is none."""
        earlier = self._earlier(client, at)
        return str(earlier[-1][2]) if earlier else ""

    def _keep(self, client: str, kept: dict[str, Any], member: Member) -> None:
        self._vault[client] = {**kept, "member": member.saved()}


def with_shares(request: Payload, boxes: Mapping[str, bytes]) -> Payload:
    """A request to train, with what others made for this client."""
    return request.with_part(_PART, Payload({BOXES: rows(list(boxes.values()), BOX)}, {"from": list(boxes)}))


def boxes_of(shares: Payload) -> dict[str, bytes]:
    """What others made for a client. Raises PayloadMismatch for anything else."""
    senders = texts(shares, "from")
    if len({*senders}) < len(senders):
        raise PayloadMismatch("secure sums: a client's shares are there twice")
    return dict(zip(senders, parts(shares, BOXES, len(senders), BOX), strict=True))


def without_shares(request: Payload) -> Payload:
    """A request to train as the method's declaration knows it."""
    return request.split([_PART])[1]


def started(specs: Mapping[str, TensorSpec], sent: State) -> State:
    """What an update counts from, of the arrays that a client was sent under the names of its reply."""
    return {key: sent[key] for key, spec in specs.items() if key in sent and tuple(sent[key].shape) == spec.shape}


def alike(stage: Stage, sent: Payload) -> Payload:
    """What every client of a round is sent alike: all but what rounds added while it was away."""
    return sent if stage.down.pieces is None else sent.split([stage.down.pieces.name])[1]


def hash_of_download(stage: Stage, sent: Payload, before: str = "") -> bytes:
    """What the masks of a round are bound to: the hash of what every client of it is sent alike. Where clients go on
    from what they kept, all that they were sent `before` is in it, so that no masks cancel between clients whose
    memories a server has filled differently."""
    return hash_after(before, sent) if stage.carries else hash_of(alike(stage, sent))


def hash_after(before: str, sent: Payload) -> bytes:
    """Of all downloads so far, `before` that of those ahead of this one."""
    return hashlib.sha256(before.encode() + hash_of(sent)).digest()


def hash_of(common: Payload) -> bytes:
    """SHA-256 of a payload, its arrays as float32, which is how they travel."""
    hashed = hashlib.sha256(json.dumps(common.scalars, sort_keys=True).encode())
    for key in sorted(common.arrays):
        array = common.arrays[key].detach().cpu()
        array = (array.float() if array.is_floating_point() else array).contiguous()
        hashed.update(json.dumps([key, list(array.shape), str(array.dtype)]).encode())
        hashed.update(array.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.digest()


def about_of(session: str, at: Tick, terms: str) -> str:
    """What a sum is of. A session is another one where the same round is done again."""
    return f"{session:.{_SESSION}} {at.stage} {at.round} {terms}"


def keys_as_payload(keys: Mapping[str, PublicKeys]) -> Payload:
    raws = rows([public.to_bytes() for public in keys.values()], 3 * KEY)
    return Payload(
        {KEYS: raws}, {"clients": list(keys), "words": as_texts([public.signature for public in keys.values()])}
    )


def keys_of(payload: Payload) -> dict[str, PublicKeys]:
    """What `keys_as_payload` made. Raises PayloadMismatch for anything else."""
    clients = texts(payload, "clients")
    raws = parts(payload, KEYS, len(clients), 3 * KEY)
    words = signatures(payload, "words", len(clients))
    if len({*clients}) < len(clients) or not all(map(is_id, clients)):
        raise PayloadMismatch("secure sums: a client is there twice, or has a name that is none")
    return {name: PublicKeys.from_bytes(raw, word) for name, raw, word in zip(clients, raws, words, strict=True)}


def rows(pieces: Sequence[bytes], size: int) -> torch.Tensor:
    """(len(pieces), size) of bytes."""
    raw = bytearray(b"".join(pieces))
    return (torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)).reshape(-1, size)


def as_texts(values: Sequence[bytes]) -> list[str]:
    return [base64.b64encode(value).decode() for value in values]


def signatures(payload: Payload, name: str, count: int | None = None) -> list[bytes]:
    encoded = texts(payload, name, count)
    try:
        return [base64.b64decode(text, validate=True) for text in encoded]
    except ValueError as error:
        raise PayloadMismatch(f"secure sums: {name} has to be a list of signatures") from error


def parts(payload: Payload, name: str, count: int, size: int) -> list[bytes]:
    """The rows of an array of bytes. Raises PayloadMismatch for another shape."""
    sent = payload.arrays.get(name)
    if sent is None or sent.dtype != torch.uint8 or tuple(sent.shape) != (count, size):
        what = "none" if sent is None else f"{tuple(sent.shape)} of {sent.dtype}"
        raise PayloadMismatch(f"secure sums: {name} has to be {count} rows of {size} bytes, got {what}")
    return [bytes(row) for row in sent.numpy()]


def texts(payload: Payload, name: str, count: int | None = None) -> list[str]:
    """Texts that come with a step. Raises PayloadMismatch for anything else."""
    listed = payload.scalars.get(name, [])
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise PayloadMismatch(f"secure sums: {name} has to be a list of texts")
    if count is not None and len(listed) != count:
        raise PayloadMismatch(f"secure sums: {name} has {len(listed)} texts, not {count}")
    return [str(text) for text in listed]
