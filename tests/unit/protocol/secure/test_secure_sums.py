"""The protocol of secure sums by itself: what comes out, who may be missing, and what nobody is given."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from befit.config.load import load_experiment
from befit.core.errors import ConfigError, NotEnoughReplies, NotFinite, PayloadMismatch
from befit.core.values import Payload, TensorSpec
from befit.data.registry import build
from befit.protocol.check import check
from befit.protocol.context import Context
from befit.protocol.registry import build_method
from befit.protocol.secure import masks
from befit.protocol.secure.client import Member, PublicKeys, bound
from befit.protocol.secure.desk import SecureDesk, keys_as_payload
from befit.protocol.secure.fixed import FixedPoint
from befit.protocol.secure.masks import KEY, Numbers, degree, fewest_left, mask_name, neighbours
from befit.protocol.secure.rounds import check_keys
from befit.protocol.secure.server import Server
from befit.protocol.secure.shamir import combine, share
from befit.protocol.settings import SecureSums, TrainSettings
from tests.federation import Clients

SHARE_OF_ALL = 0.67


class Federation:
    """Clients with a vector each, and a server, that take the steps of one sum."""

    def __init__(self, clients: int = 5, length: int = 3, about: str = "a round") -> None:
        self.names = [f"site-{number:03d}" for number in range(clients)]
        draw = np.random.default_rng(0)
        self.vectors = {name: draw.integers(-1000, 1000, length, np.int64).view(np.uint64) for name in self.names}
        self.members = {name: Member.begun(name, about, SHARE_OF_ALL) for name in self.names}
        self.hidden: dict[str, Numbers] = {}

    def keys(self, gone: Collection[str] = ()) -> Server:
        keys = {name: member.own_keys() for name, member in self.members.items() if name not in gone}
        self.server = Server("a round", SHARE_OF_ALL, keys)
        return self.server

    def shares(self, gone: Collection[str] = ()) -> None:
        for name in self.server.keys:
            made = self.members[name].share(self.server.keys)
            if name not in gone:
                self.server.take(name, made)
        self.server.check_shared()

    def mask(self, gone: Collection[str] = ()) -> list[str]:
        for name in self.server.boxes:
            # As at a site, whose process may be another one for every message.
            self.members[name] = Member.restored(json.loads(json.dumps(self.members[name].saved())))
            if name not in gone:
                self.hidden[name] = self.members[name].mask(self.vectors[name], self.server.inbox(name))
        return sorted(self.hidden)

    def total(self) -> Numbers:
        return np.sum([*self.hidden.values()], axis=0, dtype=np.uint64)

    def uncover(self, left: Collection[str], gone: Collection[str] = ()) -> Numbers:
        shares = {name: self.members[name].uncover(left) for name in left if name not in gone}
        total = self.total()
        self.server.uncover(total, left, shares)
        return total

    def plain(self, left: Collection[str]) -> Numbers:
        return np.sum([self.vectors[name] for name in left], axis=0, dtype=np.uint64)


@pytest.fixture
def federation() -> Federation:
    made = Federation()
    made.keys()
    return made


@pytest.mark.parametrize("step", ["nobody", "keys", "shares", "mask", "uncover", "every step"])
@pytest.mark.parametrize("clients", [10, 24])
def test_the_sum_is_that_of_the_vectors_that_came_whoever_drops_out_when(step: str, clients: int) -> None:
    """24 clients have masks with 18 others only."""
    federation = Federation(clients)
    gone = dict(zip(("keys", "shares", "mask", "uncover"), federation.names, strict=False))
    gone = {each: {name} for each, name in gone.items() if step in (each, "every step")}
    if step == "every step" and clients == 10:
        del gone["keys"]  # of ten, three at most may go
    federation.keys(gone.get("keys", ()))
    federation.shares(gone.get("shares", ()))
    left = federation.mask(gone.get("mask", ()))
    assert (federation.uncover(left, gone.get("uncover", ())) == federation.plain(left)).all()


def test_what_the_server_gets_is_no_vector_and_no_part_of_the_sum(federation: Federation) -> None:
    """Entries of +-1000 in 2^64: a masked one is as small as these with probability 2^-53."""
    federation.shares()
    left = federation.mask()
    for name, vector in federation.hidden.items():
        far = np.abs((vector - federation.vectors[name]).view(np.int64))
        assert (far > 10**6).all()
        assert (np.abs((federation.total() - vector).view(np.int64)) > 10**6).all()
    assert (federation.uncover(left) == federation.plain(left)).all()


def test_fewer_than_the_threshold_end_the_sum_at_every_step() -> None:
    """Of five, four have to stay."""
    federation = Federation()
    with pytest.raises(NotEnoughReplies, match="2 of 2 clients sent keys, and 3 are needed"):
        federation.keys(federation.names[:3])
    federation.keys()
    with pytest.raises(NotEnoughReplies, match="3 of 5 clients shared keys, and 4 are needed"):
        federation.shares(federation.names[:2])
    federation = Federation()
    federation.keys()
    federation.shares()
    left = federation.mask(federation.names[:2])
    with pytest.raises(PayloadMismatch, match="3 of 5 clients are left, and 4 have to be"):
        federation.members[left[0]].uncover(left)
    with pytest.raises(NotEnoughReplies, match="3 of 5 clients sent an update, and 4 are needed"):
        federation.server.uncover(federation.total(), left, {})
    federation = Federation()
    federation.keys()
    federation.shares()
    with pytest.raises(NotEnoughReplies, match="3 of 5 clients gave a share"):
        federation.uncover(federation.mask(), federation.names[:2])


def test_one_wrong_share_does_no_harm_where_there_are_others_and_is_found_where_there_are_none(
    federation: Federation,
) -> None:
    federation.shares()
    left = federation.mask([federation.names[4]])
    shares = {name: federation.members[name].uncover(left) for name in left}
    shares[left[1]][left[0]] = bytes(33)
    with pytest.raises(PayloadMismatch, match=f"the shares of {left[0]}'s secret do not fit together"):
        federation.server.uncover(federation.total(), left, shares)
    whole = Federation()
    whole.keys()
    whole.shares()
    left = whole.mask()
    shares = {name: whole.members[name].uncover(left) for name in left}
    shares[left[1]][left[0]], total = bytes([255] * 33), whole.total()
    whole.server.uncover(total, left, shares)
    assert (total == whole.plain(left)).all()


def test_shares_that_go_to_the_wrong_client_are_refused(federation: Federation) -> None:
    federation.shares()
    first, second, third, *_ = federation.names
    mixed = federation.server.inbox(first) | {third: federation.server.inbox(second)[third]}
    with pytest.raises(PayloadMismatch, match=f"{first} was sent shares that {third} did not make for it"):
        federation.members[first].mask(federation.vectors[first], mixed)


def test_shares_and_keys_of_another_round_are_refused(federation: Federation) -> None:
    """Keys are fresh in every sum, and derived for it."""
    again = Federation()
    again.keys()
    again.shares()
    federation.shares()
    first = federation.names[0]
    assert federation.server.keys[first] != again.server.keys[first]
    with pytest.raises(PayloadMismatch, match=f"{first} was sent shares that {federation.names[1]} "):
        federation.members[first].mask(federation.vectors[first], again.server.inbox(first))
    with pytest.raises(PayloadMismatch, match=f"{first} .* keys of its own"):
        Member.begun(first, "a round", SHARE_OF_ALL).share(federation.server.keys)


def test_sites_that_were_sent_two_models_have_no_sum(federation: Federation) -> None:
    """Else a server could send all but one a model that learns nothing, and the sum would be that one's update."""
    federation.shares()
    first = federation.names[0]
    for name in federation.names:
        download = b"a model" if name == first else b"another"
        inbox = federation.server.inbox(name)
        federation.hidden[name] = federation.members[name].mask(federation.vectors[name], inbox, download)
    shares = {name: federation.members[name].uncover(federation.names) for name in federation.names}
    for download in (b"a model", b"another"):
        total = federation.total()
        federation.server.uncover(total, federation.names, shares, download)
        assert (np.abs((total - federation.plain(federation.names)).view(np.int64)) > 10**6).all()


def test_masks_are_common_where_round_run_keys_and_model_are() -> None:
    keys = {name: Member.begun(name, "a round", SHARE_OF_ALL).own_keys() for name in "abc"}
    lists = [keys, {**keys, "c": replace(keys["c"], mask=keys["c"].box, box=keys["c"].mask)}]
    names = [
        mask_name(bound(about, each), download, *pair)
        for about, each, download in itertools.product(["a round", "another"], lists, [b"a model", b"another"])
        for pair in ("ab", "ba")
    ]
    assert names[::2] == names[1::2] and len({*names}) == 8


def own_part(keys: dict[str, PublicKeys]) -> Payload:
    """Keys as a client sends them, with the hash of what it was sent before."""
    return keys_as_payload(keys) | Payload({}, {"before": ["0" * 64]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own, other: own_part({"a": replace(own, box=bytes(KEY))}), "none that hides anything"),
        (lambda own, other: own_part({"a": replace(own, box=own.mask)}), "one key twice"),
        (lambda own, other: own_part({"a": replace(own, mask=other.mask)}), "another's"),
        (lambda own, other: own_part({"b": own}), "keys of another"),
        (lambda own, other: own_part({"a": own, "b": other}), "keys of another"),
        (lambda own, other: own_part({"a": own}).with_part("more", Payload({"x": torch.ones(1)})), "has more"),
        (lambda own, other: own_part({"a": own}) | Payload({}, {"more": 1}), "has more"),
        (lambda own, other: keys_as_payload({"a": own}), "or less"),
        (lambda own, other: own_part({"a": own}) | Payload({}, {"before": ["0" * 63]}), "no hash of what it was sent"),
        (lambda own, other: own_part({"a": own}) | Payload({}, {"before": []}), "before has 0 texts"),
    ],
)
def test_keys_for_which_all_others_would_refuse_the_sum_are_the_failure_of_their_client(
    change: Callable[[PublicKeys, PublicKeys], Payload], reason: str
) -> None:
    own, other = (Member.begun(name, "a round", SHARE_OF_ALL).own_keys() for name in "ab")
    check_keys("b", own_part({"b": other}), known := set())
    with pytest.raises(PayloadMismatch, match=reason):
        check_keys("a", change(own, other), known)
    check_keys("a", own_part({"a": own}), known)


def test_no_client_gives_both_secrets_of_another(federation: Federation) -> None:
    """First told that somebody is left, then that it is gone: the second question gets no answer."""
    federation.shares()
    left = federation.mask()
    asked = federation.members[left[0]]
    given = asked.uncover(left)
    assert asked.uncover(left) == given
    with pytest.raises(PayloadMismatch, match=f"client {left[0]} .* one sum"):
        asked.uncover(left[:4])


def test_a_server_that_leaves_out_or_adds_clients_gets_nothing(federation: Federation) -> None:
    first = federation.members[federation.names[0]]
    federation.shares()
    with pytest.raises(PayloadMismatch, match=f"client {first.client} .* keys of all clients"):
        first.share(federation.server.keys)
    with pytest.raises(PayloadMismatch, match=r"client x .* out of turn"):
        Member.begun("x", "a round", SHARE_OF_ALL).mask(federation.vectors[first.client], {})
    with pytest.raises(PayloadMismatch, match="shares of 1 others, and 3 have to be there"):
        second = federation.names[1]
        first.mask(federation.vectors[first.client], {second: federation.server.inbox(first.client)[second]})
    with pytest.raises(PayloadMismatch, match=f"client {first.client} .* no part of"):
        first.uncover(federation.names)
    left = federation.mask()
    with pytest.raises(PayloadMismatch, match=f"client {first.client} .* no part of"):
        first = federation.members[first.client]
        first.uncover(left[1:])
    lone = Member.begun("alone", "a round", SHARE_OF_ALL)
    with pytest.raises(PayloadMismatch, match="1 clients, and takes part with 3 to 10000"):
        lone.share({"alone": lone.own_keys()})
    twins = {"alone": lone.own_keys(), "b": first.own_keys(), "c": first.own_keys()}
    with pytest.raises(PayloadMismatch, match=r"client alone .* one key twice"):
        lone.share(twins)


class Signed:
    """Stands for a key pair: the others know what a client's own signatures look like, and only it can make them."""

    def __init__(self, client: str) -> None:
        self.client = client

    def sign(self, text: bytes) -> bytes:
        return self.client.encode() + text

    def is_of(self, client: str, text: bytes, signature: bytes) -> bool:
        return signature == client.encode() + text


def test_with_identities_the_server_can_neither_pose_as_a_client_nor_tell_two_lists() -> None:
    federation = Federation()
    who = {name: Signed(name) for name in federation.names}
    first, *others = federation.names
    keys = {name: federation.members[name].own_keys(who[name]) for name in federation.names}
    forged = Member.begun(others[0], "a round", SHARE_OF_ALL).own_keys(Signed("the server"))
    with pytest.raises(PayloadMismatch, match=f"keys of {others[0]} that {others[0]} did not sign"):
        Member.restored(federation.members[first].saved()).share({**keys, others[0]: forged}, who[first])
    federation.server = Server("a round", SHARE_OF_ALL, keys)
    for name in federation.names:
        federation.server.take(name, federation.members[name].share(keys, who[name]))
    left = federation.mask()
    words = {name: federation.members[name].agree(left if name != first else left[:4], who[name]) for name in left}
    asked = federation.members[others[0]]
    assert asked.uncover(left, words, who[others[0]])  # four of five agree
    fewer = {name: words[name] for name in left[:4]}
    with pytest.raises(PayloadMismatch, match="the word of 3 clients on who is left, and 4 have to agree"):
        federation.members[others[1]].uncover(left, fewer, who[others[1]])


def test_any_threshold_of_shares_gives_the_secret_and_fewer_give_another() -> None:
    secret = bytes(range(32))
    shares = share(secret, [1, 2, 3, 5, 8], 3)
    for some in ([1, 2, 3], [8, 5, 1], [1, 2, 3, 5, 8]):
        assert combine({place: shares[place] for place in some}) == secret
    for wrong in ({1: shares[1], 2: shares[2]}, {**{p: shares[p] for p in (2, 3)}, 1: bytes(33)}):
        with contextlib.suppress(OverflowError):
            assert combine(wrong) != secret


def test_the_sparse_graph_holds_for_what_it_is_made_for() -> None:
    """Of 50 clients, 10 work with the server and another 10 go, drawn 50 times: the rest stay in one part, and
    nobody's neighbours can give both of its secrets away."""
    count = 50
    names, random_ = [str(number) for number in range(count)], random.Random(0)
    known = neighbours(names, b"seed", SHARE_OF_ALL)
    number = degree(count, SHARE_OF_ALL)
    assert number == 34 and {len(others) for others in known.values()} == {number}
    assert all(name in known[other] for name, others in known.items() for other in others)
    assert fewest_left(count, SHARE_OF_ALL) == 40 and fewest_left(10, SHARE_OF_ALL) == 7
    enough = masks.needed(number + 1, SHARE_OF_ALL)
    for _ in range(50):
        away = random_.sample(names, 20)
        assert max(sum(other in away[:10] for other in others) for others in known.values()) < enough
        honest, found = {*names} - {*away}, {next(name for name in names if name not in away)}
        waiting = [*found]
        while waiting:
            new = {*known[waiting.pop()]} & honest - found
            found |= new
            waiting += new
        assert found == honest
    apart = neighbours(names, b"another", SHARE_OF_ALL)
    assert apart != known


def fixed(bits: int = 24, most: int = 100, clients: int = 5, clip: float = 2.0, weighted: bool = True) -> FixedPoint:
    specs = {"s/m/A": TensorSpec((2, 3)), "s/m/B": TensorSpec((4,))}
    return FixedPoint(SecureSums(clip, bits, most), specs, clients, weighted)


def test_a_mean_is_exact_to_half_a_step_and_the_same_in_any_order() -> None:
    form, draw = fixed(), torch.Generator().manual_seed(0)
    updates = [{key: torch.randn(spec.shape, generator=draw) / 9 for key, spec in form.specs.items()} for _ in "12345"]
    weights = [3, 50, 7, 100, 1]
    vectors = [
        form.from_bytes(form.to_bytes(form.encode(update, weight)))
        for update, weight in zip(updates, weights, strict=True)
    ]
    summed = form.decode(np.sum(vectors, axis=0, dtype=np.uint64))
    assert (summed.weight, summed.clipped) == (161, 0)
    for key in form.specs:
        mean = sum(w * u[key].double() for u, w in zip(updates, weights, strict=True)) / 161
        assert (summed.mean[key] - mean).abs().max() <= form.step / 2
        again = form.decode(np.sum(vectors[::-1], axis=0, dtype=np.uint64))
        assert torch.equal(again.mean[key], summed.mean[key])


def test_a_long_update_and_a_large_weight_are_cut_and_counted() -> None:
    form = fixed()
    update = {"s/m/A": torch.full((2, 3), 30.0), "s/m/B": torch.full((4,), 40.0)}
    summed = form.decode(form.encode(update, 10**9))
    assert (summed.weight, summed.clipped) == (100, 1)
    flat = torch.cat([summed.mean[key].reshape(-1) for key in sorted(form.specs)])
    torch.testing.assert_close(flat.norm(), torch.tensor(2.0, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(flat[0] / flat[-1], torch.tensor(0.75, dtype=torch.float64), rtol=0, atol=1e-5)


def test_widths_of_numbers_and_sums_that_nobody_could_have_made() -> None:
    assert fixed(weighted=False, bits=24, clients=255).width == 4
    assert fixed(weighted=True, most=65536, bits=24, clients=15).width == 6
    with pytest.raises(ConfigError, match=r"federation\.secure_sums\.bits: 32 bits"):
        assert fixed(bits=32, most=2**31, clients=5).width
    form = fixed()
    with pytest.raises(PayloadMismatch, match=r"federation\.secure_sums\.clip"):
        form.decode(np.full(form.length, 2**40 - 5, np.uint64))
    with pytest.raises(NotFinite, match="not finite"):
        form.encode({"s/m/A": torch.full((2, 3), torch.inf), "s/m/B": torch.zeros(4)}, 1)
    # Longer than a norm in float32 could be, and shortened like any other: whether it fits would tell of its length.
    long = form.encode({"s/m/A": torch.full((2, 3), 1e38), "s/m/B": torch.zeros(4)}, 1)
    assert list(long[-2:]) == [1, 1] and (np.abs(long[:-2].view(np.int64)) > 0).sum() == 6


@pytest.mark.parametrize(
    ("place", "value", "fits"), [(0, 2**23, True), (0, 2**23 + 1, False), (-1, 5, True), (-1, 6, False)]
)
def test_an_entry_and_a_count_have_to_be_what_clients_could_have_made(place: int, value: int, fits: bool) -> None:
    """Of a weight of one: an entry of the clip at most, and no more shortened updates than there are clients."""
    form = fixed()
    vector = form.encode({key: torch.zeros(spec.shape) for key, spec in form.specs.items()}, 1)
    vector[place] = value
    with contextlib.nullcontext() if fits else pytest.raises(PayloadMismatch, match="a client has sent a wrong vector"):
        form.decode(vector)


def test_a_client_that_has_helped_to_uncover_a_sum_keeps_no_secret_of_it() -> None:
    method, settings, vault = build_method("fedit"), SecureSums(1.0), dict[str, dict[str, Any]]()
    federation = Clients(method, sums=SecureDesk(settings, method, vault))
    federation.run(rounds=1, secure_sums=settings)
    assert {client: kept["member"]["private"] for client, kept in vault.items()} == {"a": {}, "b": {}, "c": {}}


def refusals(method: str, clients: int = 4, families: int = 1, **options: object) -> list[str]:
    federation = build("digits", None, {"clients": clients})
    names = {client.id: f"model-{number % families}" for number, client in enumerate(federation.clients)}
    sums = SecureSums(1.0)
    context = Context(federation, names, TrainSettings(), secure_sums=sums)
    return [str(one) for one in check(build_method({"name": method, **options}), context) if one.severity == "error"]


def test_a_method_that_needs_each_clients_own_reply_is_refused_before_a_run() -> None:
    assert not refusals("fedit") and not refusals("guidance") and not refusals("local", clients=2)
    for method in ("fedalt", "hetlora", "flexlora", "rela", "fedmkt", "perada"):
        assert any("in stage federate the server needs each client's own reply" in one for one in refusals(method))
    assert refusals("guidance", merge={"rule": "ties"}) and refusals("scaffold", weights="examples")
    (few,), (kinds,) = refusals("fedit", clients=2), refusals("fedit", families=2)
    assert "hides nobody among fewer than 3 clients in a round, not 2" in few and "different backbones" in kinds


def test_settings_that_need_what_the_server_does_not_see_are_refused_each_in_a_sentence() -> None:
    values = {"benchmark": "digits", "method": "fedit", "federation": {"secure_sums": {"clip": 1.0}, "max_weight": 0.4}}
    others = {"guard": {"rule": "median", "clip": 1.0}, "wire": {"dtype": "bfloat16", "top_k": 0.1}}
    with pytest.raises(ConfigError) as caught:
        load_experiment({**values, **others})
    about = ["guard.rule", "guard.clip", "federation.max_weight", "wire.dtype", "wire.top_k"]
    assert [problem.partition(":")[0] for problem in caught.value.problems] == about
    for wrong, text in (
        ({}, "clip: is required"),
        ({"clip": 0}, "clip: must be from 1e-6 to 1e6"),
        ({"clip": 1, "bits": 40}, "bits: must be from 8 to 32"),
        ({"clip": 1, "threshold": 0.5}, "threshold: must be above 0.5"),
        (True, "must be a mapping or null"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_experiment({**values, "federation": {"secure_sums": wrong}})
