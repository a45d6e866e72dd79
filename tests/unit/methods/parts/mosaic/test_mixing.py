"""What FedMosaic compares relevance with: equal weights and a bargain (Tables 30 and 33)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from befit.adapters.keys import select, slot, slot_of, split
from befit.core.errors import ConfigError
from befit.core.values import State, Tick, Update
from befit.merge.nash import nash_weights
from befit.methods.parts.mosaic.bank import EVERYBODY, GROUPS, WEIGHTS
from befit.methods.parts.mosaic.mixing import Equal, Nash, ServerBank
from befit.methods.parts.mosaic.mosaic import Mosaic
from befit.methods.parts.mosaic.sketch import SKETCH
from befit.protocol.describe import describe
from befit.protocol.registry import build_method
from tests.federation import FAMILIES, LARGE, SMALL, Families
from tests.tiny import assert_near, federated
from tests.unit.methods.parts.mosaic.families import start


def mixture(federation: Families, client: str, number: int = 3) -> State:
    at = Tick("federate", number, 3, 0)
    return federated(federation.method).dispatch(federation.server, federation.info(client), at).arrays


def sent(update: Update) -> State:
    return select(update.payload.arrays, slot("personal"))


@pytest.mark.parametrize("name", ["rela", "fedmosaic"])
@pytest.mark.parametrize("mixing", ["equal", "nash"])
def test_no_gradient_is_taken_or_sent(name: str, mixing: str) -> None:
    federation = start(name, mixing=mixing)
    for update in federation.round(1).values():
        assert {slot_of(key) for key in update.payload.arrays} == {"personal"}
    assert not any(slot_of(key) == "sketch" for memory in federation.memories().values() for key in memory.arrays)
    assert len(federation.method.work()) == 1
    assert "sketch" not in str(describe(federation.method)["up"])


@pytest.mark.parametrize("include_self", [False, True])
def test_equal_weights_give_the_plain_mean_of_a_backbones_others(include_self: bool) -> None:
    federation = start("rela", mixing="equal", relevance={"include_self": include_self})
    updates = federation.round(1)
    counted = "ace" if include_self else "ce"
    for key, value in mixture(federation, "a").items():
        others = [sent(updates[client])[key.replace("shared", "personal")] for client in counted]
        torch.testing.assert_close(value, torch.stack(others).mean(0))


def test_the_bargain_is_over_what_changed_since_the_last_mixture_by_hand() -> None:
    """Round 1 against the initial adapter, round 2 against the mixture of round 1; one for each backbone, all equal."""
    federation = start("rela", mixing="nash")
    starts = federation.server_site.starts
    last = {family: select(starts[family], slot("personal")) for family in (SMALL, LARGE)}
    for number in (1, 2):
        updates = federation.round(number)
        for family, clients in ((SMALL, "ace"), (LARGE, "bd")):
            states = [sent(updates[client]) for client in clients]
            D = torch.stack([torch.cat([(one[key] - last[family][key]).flatten() for key in one]) for one in states], 1)
            w = nash_weights(D.double().T @ D.double()).float()
            expected = {
                key: torch.stack([p * one[key] for p, one in zip(w, states, strict=True)]).sum(0) for key in states[0]
            }
            for client in clients:
                got = {key.replace("shared", "personal"): value for key, value in mixture(federation, client).items()}
                assert_near(got, expected, rtol=1e-4, atol=1e-6)
            last[family] = expected


def test_cores_are_bargained_for_by_everybody_and_plain_factors_within_a_backbone() -> None:
    federation = start(mixing="nash")
    updates = federation.round(1)
    cores = [
        torch.cat(
            [value.flatten() for key, value in sorted(sent(updates[client]).items()) if split(key)[2] in ("P", "Q")]
        )
        for client in "abcde"
    ]
    D = torch.stack(cores, 1).double()  # P and Q start at zero
    w = nash_weights(D.T @ D)
    torch.testing.assert_close(federation.server.part(GROUPS, EVERYBODY).arrays[WEIGHTS], w.float().expand(5, 5))
    small, large = "block.00.q_proj/P", "block.01.q_proj/P"
    places = {SMALL: f"personal/{small}", LARGE: f"personal/{large}"}
    expected = sum(float(p) * sent(updates[c])[places[FAMILIES[c]]] for p, c in zip(w, "abcde", strict=True))
    torch.testing.assert_close(mixture(federation, "a")[f"shared/{small}"], expected)
    plain = [mixture(federation, client)["shared/block.02.q_proj/A"] for client in "bd"]
    assert torch.equal(*plain)


def test_a_cohort_bargains_with_everybodys_last_uploads() -> None:
    federation = start("rela", mixing="nash")
    federation.round(1)
    federation.round(2, "ac")
    assert torch.equal(
        mixture(federation, "e")["shared/block.00.q_proj/A"], mixture(federation, "a")["shared/block.00.q_proj/A"]
    )


def test_products_are_summed_over_stacks_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    stacks = {name: torch.randn(3, 4, 5, generator=generator) for name in ("own/a/P", "own/b/P")}
    before = {name: torch.randn(4, 5, generator=generator) for name in stacks}
    held = ServerBank({"": stacks}, {"": [0, 1, 2]}, {"": before})
    whole = Nash()(held)[""]
    monkeypatch.setattr("befit.methods.parts.mosaic.mixing._CHUNK", 7)
    torch.testing.assert_close(Nash()(held)[""], whole)
    D = torch.cat([(stacks[name] - before[name]).reshape(3, -1) for name in stacks], 1).double()
    torch.testing.assert_close(whole[0], nash_weights(D @ D.T).float())
    torch.testing.assert_close(Equal()(held)[""], (1 - torch.eye(3)) / 2)


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"mixing": "nash", "relevance": {"temperature": 0.2, "include_self": True}}, {"temperature", "include_self"}),
        ({"mixing": "equal", "relevance": {"share": 0.1, "mask": "rows", "ema": 1.0}}, {"share", "mask", "ema"}),
        ({"mixing": "equal", "relevance": {"include_self": True}}, set()),
    ],
)
def test_options_that_a_mixing_has_no_use_for_are_refused(settings: dict[str, Any], problems: set[str]) -> None:
    if not problems:
        build_method({"name": "rela", **settings})
        return
    with pytest.raises(ConfigError) as caught:
        build_method({"name": "rela", **settings})
    assert {one.split(":")[0].rpartition(".")[2] for one in caught.value.problems} == problems


def cosine(first: torch.Tensor, second: torch.Tensor, similarity: str) -> float:
    """Of whole gradients, or the mean of that of every column."""
    pairs = [(first, second)] if similarity == "flat" else list(zip(first.T, second.T, strict=True))
    found = [float((a * b).sum() / (a.norm() * b.norm())) for a, b in pairs]
    return sum(found) / len(found)


@pytest.mark.parametrize("name", ["rela", "fedmosaic"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"include_self": True}, {"temperature": 0.1}, {"mask": "rows"}, {"mask": "rows", "similarity": "colmean"}],
    ids=lambda settings: " ".join(settings) or "defaults",
)
def test_weights_are_those_that_the_methods_options_ask_for(name: str, settings: dict[str, Any]) -> None:
    """Equation 4 over what the clients sent, number by number, in every group and for a newcomer."""
    federation = start(name, relevance={"every": 1, **settings})
    updates = federation.round(1)
    sketches = {client: updates[client].payload.arrays[SKETCH].double() for client in "abcde"}
    assert sketches["a"].shape == ((6, 24) if "mask" in settings else (153,))

    def share(one: str, other: str) -> float:
        likeness = cosine(sketches[one], sketches[other], settings.get("similarity", "flat"))
        return math.exp(likeness / settings.get("temperature", 0.5))

    for group, clients in ((EVERYBODY, "abcde"), (SMALL, "ace"), (LARGE, "bd")):
        expected = [
            [share(one, other) if one != other or "include_self" in settings else 0.0 for other in clients]
            for one in clients
        ]
        rows = torch.tensor(expected)
        found = federation.server.part(GROUPS, group).arrays[WEIGHTS]
        torch.testing.assert_close(found, rows / rows.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)
    method = federation.method
    assert isinstance(method, Mosaic)
    arriving = method.mixing.newcomer(torch.stack(list(sketches.values())), sketches["b"], torch.eye(5))
    everybody = torch.tensor([share("b", other) for other in "abcde"])
    torch.testing.assert_close(arriving, everybody / everybody.sum(), rtol=1e-4, atol=1e-6)
