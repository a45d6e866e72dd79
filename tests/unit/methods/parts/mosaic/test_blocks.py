"""Mixtures of many clients: by blocks of rows, and never all of them at once."""

from __future__ import annotations

import gc

import pytest
import torch

from befit.adapters.keys import slot_of, to_slot
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.mosaic import relevance as blocks
from befit.methods.parts.mosaic.bank import described
from befit.methods.parts.mosaic.relevance import ROWS, mixture
from befit.methods.parts.mosaic.sketch import SKETCH
from befit.protocol.registry import build_method
from befit.protocol.site import ServerSite
from tests.tiny import federated

COUNT = 150  # two whole blocks and a part


def made_of(seed: int, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, count, generator=generator).softmax(1), torch.randn(count, 3, 5, generator=generator)


def test_a_row_is_the_weighted_sum_of_all_clients_whatever_was_asked_before() -> None:
    W, X = made_of(0)
    for row in (149, 0, 63, 64, 127, 128):
        expected = sum(W[row, one].double() * X[one].double() for one in range(COUNT))
        torch.testing.assert_close(mixture(W, X, row).double(), expected, rtol=0, atol=1e-6)
    again_W, again_X = made_of(0)
    assert all(torch.equal(mixture(W, X, row), mixture(again_W, again_X, row)) for row in reversed(range(COUNT)))


def test_clients_in_order_make_every_block_once_and_two_of_them_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    W, X = made_of(1)
    made: list[int] = []
    original = blocks.mixtures
    monkeypatch.setattr(blocks, "mixtures", lambda w, x: made.append(len(w)) or original(w, x))
    for row in range(COUNT):
        mixture(W, X, row)
        mixture(W, X, row)  # a download is made again for a score
        assert sum(len(block) for block in blocks._BLOCKS[X].blocks.values()) <= 2 * ROWS
    assert made == [64, 64, 22]


def test_other_weights_give_other_mixtures_and_nothing_outlives_its_stack() -> None:
    W, X = made_of(2)
    first = mixture(W, X, 3)
    other = W.flip(0)
    assert not torch.equal(mixture(other, X, 3), first) and torch.equal(mixture(W, X, 3), first)
    gc.collect()  # what other tests of this process left
    before = len(blocks._BLOCKS)
    del X
    gc.collect()
    assert len(blocks._BLOCKS) == before - 1


def sent(client: int, family: str) -> State:
    """Family f has a plain and a PQ module; family g two plain ones, of another width, and the same PQ module."""
    generator = torch.Generator().manual_seed(client)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    width, plain, site = (
        (6, ["block.00.q_proj"], "block.01.q_proj")
        if family == "f"
        else (9, ["block.00.q_proj", "block.01.q_proj"], "block.02.q_proj")
    )
    arrays = {f"personal/{site}/P": draw(2, 2), f"personal/{site}/Q": draw(2), SKETCH: draw(40)}
    for name in plain:
        arrays |= {f"personal/{name}/A": draw(2, width), f"personal/{name}/B": draw(width, 2)}
    return arrays


def naive(clients: dict[str, tuple[str, State]], receiver: str) -> State:
    """Client by client as the paper writes it: cosines, softmax over the others (of the family), weighted sums."""
    family, own = clients[receiver]
    names = [name for name in clients if name != receiver]
    found: State = {}
    for key in own:
        if slot_of(key) != "personal":
            continue
        common = key.endswith(("/P", "/Q"))
        peers = [name for name in names if common or clients[name][0] == family]
        cosines = [torch.cosine_similarity(own[SKETCH], clients[name][1][SKETCH], dim=0) / 0.5 for name in peers]
        weights = torch.stack(cosines).softmax(0)
        held = [clients[name][1] for name in peers]
        theirs = [next(one[k] for k in one if k[-2:] == key[-2:]) if common else one[key] for one in held]
        found[to_slot(key, "shared")] = sum(
            (weight * value for weight, value in zip(weights, theirs, strict=True)), torch.zeros(own[key].shape)
        )
    return found


def test_the_server_sends_what_a_loop_over_clients_gives() -> None:
    """70 clients of two backbones, so that a block ends among them."""
    clients = {f"{one:03d}": ("fg"[one % 3 == 0], sent(one, "fg"[one % 3 == 0])) for one in range(70)}
    infos = {name: ClientInfo(name, family, 1) for name, (family, _) in clients.items()}
    method = build_method({"name": "fedmosaic", "blocks": 1})
    starts = {family: {k: v for k, v in sent(0, family).items() if slot_of(k) == "personal"} for family in "fg"}
    site = ServerSite(starts, tuple(infos.values()), {}, None)
    server = described(starts, 1)
    at = Tick("federate", 1, 3, 0)
    updates = [Update(infos[name], Payload(arrays)) for name, (_, arrays) in clients.items()]
    server = federated(method).aggregate(server, updates, site, at)
    for name in clients:
        received = federated(method).dispatch(server, infos[name], at).arrays
        expected = naive(clients, name)
        assert received.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(received[key], value, rtol=0, atol=2e-6)
    stored = sum(value.numel() for key, value in server.arrays.items() if slot_of(key).endswith("@own"))
    assert stored == sum(v.numel() for _, arrays in clients.values() for k, v in arrays.items() if k != SKETCH)
