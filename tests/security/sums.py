"""Hostile secure sums, as data: what a server may ask of a site in one, and what the refusal has to say.

`Sum` is the first round of a run that one site of five takes part in, behind its real service. The other four are
played by the protocol itself, so that whatever a case does not change is as it should be.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from befit.config.load import load_experiment
from befit.core.values import Payload, State, Tick
from befit.flower.agreement import AGAIN
from befit.flower.engine import ask
from befit.flower.frame import hash_of_run, unpack
from befit.flower.keys import SiteIdentity, write_site_keys
from befit.flower.service import SiteService
from befit.flower.site_file import Limits, SiteFile
from befit.protocol.secure.client import Member, PublicKeys, bound, text_to_sign
from befit.protocol.secure.desk import about_of, as_texts, keys_as_payload, keys_of, with_shares
from befit.protocol.secure.masks import KEY, MOST
from tests.security.requests import SITE, Change, changed, header_of

ME, *OTHERS = ALL = [f"client-0{number}" for number in range(5)]
A, B, *_ = OTHERS
SHARE_OF_ALL = 0.6
EXPERIMENT = load_experiment(
    {
        "name": "sums",
        "benchmark": {"name": "digits", "clients": 5},
        "model": {"id": "digits-vit"},
        "method": "fedit",
        "baselines": [],
        "train": {"max_steps": 1, "batch_size": 2},
        "federation": {"rounds": 2, "secure_sums": {"clip": 20.0, "threshold": SHARE_OF_ALL}},
        "engine": {"kind": "flower"},
    }
)
Said = tuple[dict[str, Any], State]


class Consortium:
    """Five sites that know each other's keys, of which the first is here. It takes part in sums of four or more."""

    def __init__(self, folder: Path) -> None:
        keys = {name: write_site_keys(folder / name) for name in ALL}
        lines = {name: public.read_text().strip() for name, (_, public) in keys.items()}

        def others(name: str) -> dict[str, str]:
            return {other: line for other, line in lines.items() if other != name}

        self.who = {name: SiteIdentity(name, str(key), others(name)) for name, (key, _) in keys.items()}
        limits, state = Limits(min_records=1, min_sites=4), str(folder / "state")
        more: dict[str, Any] = {"key": str(keys[ME][0]), "peers": others(ME), "require_secure_sums": True}
        self.service = SiteService(SiteFile(**SITE, **more, limits=limits, state=state))


class Sum:
    """A new run at the site; `change` is what differs in all its requests, `sent` every array of its replies."""

    def __init__(self, consortium: Consortium, change: Change) -> None:
        self.service, self.who, self.change = consortium.service, consortium.who, change
        self.run, self.sent = f"run-{secrets.token_hex(8)}", list[tuple[str, torch.Tensor]]()
        self.hello = self._say("hello", {}, Payload())

    def _say(self, do: str, more: Change, request: Payload) -> Said:
        header = changed(header_of(EXPERIMENT, do, "fedit", run=self.run), {**self.change, **more})
        scalars = {} if do == "hello" else {"scalars": request.scalars}
        reply, arrays = unpack(self.service.answer(ask(do, {**header, **scalars}, request.arrays)), "a reply")
        self.sent += arrays.items()
        return reply, arrays

    def step(self, step: str, request: Payload, **more: Any) -> Said:
        return self._say("secure", {"step": step, **more}, request)

    def begin(self, session: str = "", terms: str = "") -> Sum:
        """Everybody has keys. `terms`: what the others were told that the run is."""
        self.session = session or secrets.token_hex(16)
        reply, arrays = done(self.step("keys", Payload({}, {"session": [self.session]})))
        header = changed(header_of(EXPERIMENT, "train", "fedit", run=self.run), self.change)
        about = about_of(
            self.session, Tick("federate", 1, 2, 0), terms or hash_of_run(header["settings"], header["method"])
        )
        self.others = {name: Member.begun(name, about, SHARE_OF_ALL) for name in OTHERS}
        own = keys_of(Payload(arrays, reply["scalars"]))
        self.keys = {**own, **{name: other.own_keys(self.who[name]) for name, other in self.others.items()}}
        return self

    def told(self, keys: Mapping[str, PublicKeys]) -> Said:
        return self.step("shares", keys_as_payload(keys))

    def shared(self, others_are_told: Mapping[str, PublicKeys] | None = None) -> Sum:
        """Everybody has made boxes for the others."""
        done(self.told(self.keys))
        keys = others_are_told or self.keys
        self.boxes = {name: other.share(keys)[ME] for name, other in self.others.items()}
        return self

    def train(self, boxes: Mapping[str, bytes], download: State | None = None) -> Said:
        return self._say("train", {}, with_shares(Payload(download or {}), boxes))

    def trained(self) -> Sum:
        """Its vector has left, hidden."""
        done(self.train(self.boxes))
        return self

    def agree(self, left: Collection[str]) -> Said:
        return self.step("agree", Payload({}, {"left": list(left)}))

    def uncover(
        self, left: Collection[str], signed: Collection[str] | None = None, by: Collection[str] = OTHERS
    ) -> Said:
        """With the others' signatures of the list, or of another one."""
        text = text_to_sign("left", bound(self.others[A].about, self.keys), left if signed is None else signed)
        words = as_texts([self.who[name].sign(text) if name in by else b"" for name in left])
        return self.step("uncover", Payload({}, {"left": list(left), "words": words}))


def done(reply: Said) -> Said:
    assert reply[0]["kind"] in ("step", "update"), reply[0]
    return reply


@dataclass(frozen=True)
class Case:
    """One hostile sum.

    name    what it tries
    reason  what the refusal has to say
    play    what the server does; the last request is the one to be refused
    change  dotted paths in all headers of the run, and their values
    """

    name: str
    reason: str
    play: Callable[[Sum], Said]
    change: Change = field(default_factory=dict[str, Any])


def _told(change: Callable[[Sum], Mapping[str, PublicKeys]]) -> Callable[[Sum], Said]:
    return lambda sum_: sum_.begin().told(change(sum_))


def _listed(arrays: Callable[[State], State] = lambda state: state, **scalars: Any) -> Callable[[Sum], Said]:
    """The list of all keys, in another form."""

    def play(sum_: Sum) -> Said:
        request = keys_as_payload(sum_.begin().keys)
        return sum_.step("shares", Payload(arrays(request.arrays), {**request.scalars, **scalars}))

    return play


def _boxed(change: Callable[[Sum], Mapping[str, bytes]]) -> Callable[[Sum], Said]:
    return lambda sum_: sum_.train(change(sum_.begin().shared()))


def _after(play: Callable[[Sum], Said]) -> Callable[[Sum], Said]:
    """Once the site's vector has left."""
    return lambda sum_: play(sum_.begin().shared().trained())


def _replayed(sum_: Sum) -> Said:
    """Keys that their site signed for another session of this round."""
    old = sum_.begin().keys[A]
    return sum_.told({**sum_.begin().keys, A: old})


def _second_list(sum_: Sum) -> Said:
    sum_.begin().shared()
    return sum_.told({name: sum_.keys[name] for name in ALL[:4]})


def _session_again(sum_: Sum) -> Said:
    """One session twice: what a site made for the keys of the first time is none for those of the second."""
    old = sum_.begin().shared().boxes[A]
    return sum_.train({**sum_.begin(sum_.session).shared().boxes, A: old})


def _two_lists(sum_: Sum) -> Said:
    """The others are told of a site more."""
    more = Member.begun("made-up", "", SHARE_OF_ALL).own_keys()
    return sum_.train(sum_.begin().shared({**sum_.keys, "made-up": more}).boxes)


def _second_model(sum_: Sum) -> Said:
    """The same round from another model, with the masks of the first."""
    (host,) = sum_.service.hosts._hosts.values()
    assert host is not None
    download = {key: torch.ones(spec.shape) for key, spec in host.model.specs.items() if key.startswith("shared/")}
    return sum_.train(sum_.boxes, download)


def _both_secrets(sum_: Sum) -> Said:
    done(sum_.uncover(ALL))
    return sum_.uncover([ME, *OTHERS[1:]])


def _two_words(sum_: Sum) -> Said:
    done(sum_.agree(ALL))
    return sum_.agree(ALL[:4])


def _word_and_another_sum(sum_: Sum) -> Said:
    done(sum_.agree(ALL))
    return sum_.uncover(ALL[:4])


def _other_sites(sum_: Sum) -> Said:
    """The round once more, without a site that was in its sum."""
    done(sum_.uncover(ALL))
    return sum_.begin().shared().trained().uncover(ALL[:4])


def _without_end(sum_: Sum) -> Said:
    """Ever new sessions of one round."""
    for number in range(AGAIN):
        done(sum_.step("keys", _payload(session=[f"{number:032x}"])))
    return sum_.step("keys", _payload(session=["f" * 32]))


def _settings(path: str, value: Any, reason: str) -> Case:
    name = f"a run with {path} {value}"
    return Case(name, reason, lambda sum_: sum_.hello, {f"settings.federation.secure_sums{path}": value})


def _flat(state: State) -> State:
    return {key: value.reshape(-1) for key, value in state.items()}


def _numbers(state: State) -> State:
    return {key: value.float() for key, value in state.items()}


_NONE = PublicKeys(bytes(KEY), bytes(KEY), bytes(KEY))
_WRONG_BOX = "did not make for it"
CASES = [
    # Runs whose sums would hide nothing, or hold nothing.
    _settings("", None, "the site's file demands secure sums"),
    _settings(".threshold", 0.5, "must be above 0.5"),
    _settings(".threshold", 0, "must be above 0.5"),
    _settings(".bits", 1, "must be from 8 to 32"),
    _settings(".bits", 64, "must be from 8 to 32"),
    _settings(".clip", 0, "must be from 1e-6 to 1e6"),
    _settings(".clip", 1e-320, "must be from 1e-6 to 1e6"),
    _settings(".clip", 1e308, "must be from 1e-6 to 1e6"),
    _settings(".clip", float("inf"), "must be finite"),
    _settings(".most_examples", 0, "must be positive"),
    Case(
        "a method of which each reply is needed",
        "which no sum has",
        lambda sum_: sum_.hello,
        {"methods.fedit": {"name": "flexlora"}},
    ),
    Case(
        "sums that do not fit into 64 bits",
        "do not fit into sums of 64 bits",
        lambda sum_: sum_.begin().told(sum_.keys),
        {"settings.federation.secure_sums.most_examples": 2**62},
    ),
    # Keys.
    Case("a session of another form", "32 hexadecimal digits", lambda s: s.step("keys", _payload(session=["x"]))),
    Case("a session of half the letters", "32 hexad", lambda s: s.step("keys", _payload(session=["a" * 16]))),
    Case("sessions without end", "answered 10 requests", _without_end),
    Case("two sessions", "has 2 texts, not 1", lambda s: s.step("keys", _payload(session=["a" * 32, "b" * 32]))),
    Case("no session", "has 0 texts, not 1", lambda s: s.step("keys", _payload())),
    Case("a step that there is not", "for step 'reveal'", lambda s: s.step("reveal", _payload())),
    Case("a round that there is not", "for rounds 3 to 3", lambda s: s.step("keys", _payload(), **{"at.round": 3})),
    Case("a stage that there is not", "unknown stage", lambda s: s.step("keys", _payload(), **{"at.stage": "local"})),
    # The list of all keys.
    Case("keys before its own", "has made no keys for round 1", lambda s: s.step("shares", _payload())),
    Case("a sum of two sites", "was told of 2 clients", _told(lambda s: {n: s.keys[n] for n in (ME, A)})),
    Case("fewer sites than it asks for", "takes part with 4", _told(lambda s: {n: s.keys[n] for n in ALL[:3]})),
    Case(
        "more sites than there are", f"to {MOST}", _told(lambda s: {**s.keys, **{f"x{n}": _NONE for n in range(MOST)}})
    ),
    Case("a sum without itself", "other keys of its own", _told(lambda s: {n: s.keys[n] for n in OTHERS})),
    Case("other keys of its own", "other keys of its own", _told(lambda s: {**s.keys, ME: s.keys[A]})),
    Case("one key for two sites", "one key twice", _told(lambda s: {**s.keys, A: s.keys[B]})),
    Case("keys that nobody signed", "client-01 did not sign", _told(lambda s: {**s.keys, A: s.others[A].own_keys()})),
    Case(
        "keys that the server signed",
        "client-01 did not sign",
        _told(lambda s: {**s.keys, A: s.others[A].own_keys(s.who[B])}),
    ),
    Case("a site that it does not know", "eve did not sign", _told(lambda s: {**s.keys, "eve": _fresh(s)})),
    Case("keys of another session", "client-01 did not sign", _replayed),
    Case("other settings at the others", "did not sign", lambda s: s.begin(terms="other").told(s.keys)),
    Case("keys that hide nothing", "none that hides anything", _told(lambda s: {**s.keys, A: _weak(s)})),
    Case("two lists of keys", "the keys of all clients before", _second_list),
    Case("one site twice", "is there twice", _listed(clients=[ME, A, A, *OTHERS[2:]])),
    Case("a name that is none", "a name that is none", _listed(clients=[ME, " x", *OTHERS[1:]])),
    Case("names that are numbers", "a list of texts", _listed(clients=[1, 2, 3, 4, 5])),
    Case("more names than keys", "has to be 6 rows", _listed(clients=[*ALL, "more"])),
    Case("keys in one row", "has to be 5 rows of 96 bytes", _listed(_flat)),
    Case("keys that are numbers", "has to be 5 rows of 96 bytes", _listed(_numbers)),
    Case("no keys", "has to be 5 rows of 96 bytes, got none", _listed(lambda state: {})),
    Case("signatures that are none", "a list of signatures", _listed(words=["%"] * 5)),
    Case("a signature too few", "has 4 texts, not 5", _listed(words=[""] * 4)),
    # The request to train.
    Case("an update without keys", "has made no keys", lambda s: s.train({})),
    Case("an update before the list of keys", "out of turn", lambda s: s.begin().train({A: _box()})),
    Case("an update in the open", "without shares to hide it by", lambda s: _open(s.begin().shared())),
    Case("an update behind nobody", "shares of 0 others, and 2 have", _boxed(lambda s: {})),
    Case("an update behind one site", "shares of 1 others, and 2 have", _boxed(lambda s: {A: s.boxes[A]})),
    Case("shares of a stranger", "with whom it has none in common", _boxed(lambda s: {**s.boxes, "eve": _box()})),
    Case("shares of itself", "with whom it has none in common", _boxed(lambda s: {**s.boxes, ME: _box()})),
    Case("shares that the server made", _WRONG_BOX, _boxed(lambda s: {**s.boxes, A: _box()})),
    Case("shares of two sites, exchanged", _WRONG_BOX, _boxed(lambda s: {**s.boxes, A: s.boxes[B], B: s.boxes[A]})),
    Case("shares of another session", _WRONG_BOX, _session_again),
    Case("another list of keys at the others", _WRONG_BOX, _two_lists),
    Case("one vector, masked twice", "out of turn", _after(_second_model)),
    # What uncovers the sum.
    Case("the sum before its vector", "no part of", lambda s: s.begin().shared().uncover(ALL)),
    Case("its word before its vector", "no part of", lambda s: s.begin().shared().agree(ALL)),
    Case("a sum that it is not in", "no part of", _after(lambda s: s.uncover(OTHERS))),
    Case("a sum with a stranger", "no part of", _after(lambda s: s.uncover([*ALL, "eve"]))),
    Case(
        "a sum of fewer than it asks for", "3 of 5 clients are left, and 4 have", _after(lambda s: s.uncover(ALL[:3]))
    ),
    Case("a sum of itself", "1 of 5 clients are left", _after(lambda s: s.uncover([ME]))),
    Case("a sum of nobody", "no part of", _after(lambda s: s.uncover([]))),
    Case("one site counted as four", "told twice", _after(lambda s: s.uncover([ME, A, A, A, A, A], by=[A]))),
    Case("a site whose shares it never got", "whose shares it never got", lambda s: _without_shares(s).uncover(ALL)),
    Case("both secrets of one site", "helped to uncover the sum of other clients", _after(_both_secrets)),
    Case("its word on two lists", "helps to uncover one sum", _after(_two_words)),
    Case("another list than it signed", "helps to uncover one sum", _after(_word_and_another_sum)),
    Case("a list that nobody signed", "the word of 0 clients", _after(lambda s: s.uncover(ALL, by=[]))),
    Case("a list that three signed", "the word of 3 clients", _after(lambda s: s.uncover(ALL, by=OTHERS[:3]))),
    Case("words on another list", "the word of 0 clients", _after(lambda s: s.uncover(ALL, signed=ALL[:4]))),
    Case("a list of no names", "a list of texts", _after(lambda s: s.step("uncover", _payload(left=[1])))),
    Case(
        "words that are none",
        "a list of signatures",
        _after(lambda s: s.step("uncover", _payload(left=ALL, words=["%"]))),
    ),
    Case("the round again over other sites", "the difference of two sums is an update", _after(_other_sites)),
]


def _payload(**scalars: Any) -> Payload:
    return Payload({}, {**scalars})


def _box() -> bytes:
    from befit.protocol.secure.client import BOX

    return bytes(BOX)


def _fresh(sum_: Sum) -> PublicKeys:
    return Member.begun("eve", sum_.others[A].about, SHARE_OF_ALL).own_keys(sum_.who[A])


def _weak(sum_: Sum) -> PublicKeys:
    """Zeros, which its site has signed."""
    text = text_to_sign("keys", sum_.others[A].about, [A], _WEAK)
    return PublicKeys.from_bytes(_WEAK, sum_.who[A].sign(text))


_WEAK = bytes([1]) * KEY + bytes(KEY) + bytes(KEY)  # a key of masks, the zero key of boxes, and a hash


def _open(sum_: Sum) -> Said:
    return sum_._say("train", {}, Payload())


def _without_shares(sum_: Sum) -> Sum:
    boxes = sum_.begin().shared().boxes
    done(sum_.train({name: boxes[name] for name in OTHERS[1:]}))
    return sum_
