"""Clients that fail or send nonsense: named, left out, and nothing else disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from befit.adapters.state import fingerprint
from befit.core.errors import NotEnoughReplies, PayloadMismatch
from befit.core.values import ClientInfo, Cost, Failure, Payload, State, TensorSpec, Tick, Update
from befit.protocol.guard import Guard
from befit.runs.host import Host
from befit.runs.local import LocalEngine

from .conftest import ROUNDS, Play


def tampering(change: Callable[[State], State], client: int = 1) -> type[LocalEngine]:
    """An engine in which one client's arrays are changed on the way to the server."""

    class Tampering(LocalEngine):
        def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
            victim = self.clients()[client].id
            for reply in super().exchange(requests, at):
                if isinstance(reply, Update) and reply.client.id == victim and reply.payload.arrays:
                    yield replace(reply, payload=Payload(change(dict(reply.payload.arrays)), reply.payload.scalars))
                else:
                    yield reply

    return Tampering


class Absent(LocalEngine):
    """One client is not there at all."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        victim = self.clients()[1].id
        return super().exchange({k: v for k, v in requests.items() if k != victim}, at)


def first(state: State) -> str:
    return min(state)


def drop(state: State) -> State:
    return {key: tensor for key, tensor in state.items() if key != first(state)}


def put(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, first(state): value(state[first(state)].clone())}


def poke(number: float) -> Callable[[State], State]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = number
        return tensor

    return put(change)


CORPUS = {
    "a missing tensor": (drop, "left out 1"),
    "an undeclared tensor": (lambda s: {**s, "personal/block.00.q_proj/A": torch.ones(2)}, "undeclared"),
    "nothing at all": (lambda s: {}, "left out"),
    "another name": (lambda s: {**drop(s), "shared/block.09.q_proj/A": s[first(s)]}, "left out"),
    "a shape that would broadcast": (put(lambda t: t[:1]), "shape"),
    "a larger shape": (put(lambda t: torch.cat([t, t])), "shape"),
    "a transposed matrix": (put(lambda t: t.T.contiguous()), "shape"),
    "a scalar": (put(lambda t: t.sum()), "shape"),
    "another dtype": (put(lambda t: t.double()), "float64"),
    "integers": (put(lambda t: t.long()), "int64"),
    "half precision": (put(lambda t: t.half()), "float16"),
    "NaN": (poke(float("nan")), "not finite"),
    "infinity": (poke(float("inf")), "not finite"),
    "minus infinity": (poke(float("-inf")), "not finite"),
    "one huge number": (poke(1e30), "norm"),
    "a number whose square overflows": (poke(3e38), "norm|not finite"),
    "everything times a thousand": (lambda s: {k: t * 1000 for k, t in s.items()}, "norm"),
    "everything times minus a million": (lambda s: {k: t * -1e6 for k, t in s.items()}, "norm"),
}


@pytest.mark.parametrize("case", CORPUS)
def test_a_malformed_reply_is_refused_and_the_others_are_as_without_that_client(case: str, play: Play) -> None:
    change, reason = CORPUS[case]
    honest = play("fedit", engine_class=Absent)
    attacked = play("fedit", engine_class=tampering(change))
    assert attacked.prints()["server"] == honest.prints()["server"]
    assert len(attacked.journal.failures) == ROUNDS
    for failure in attacked.journal.failures:
        assert failure.kind == "refused"
        assert failure.client == "client-01" or failure.client == attacked.engine.clients()[1].id
        assert any(part in failure.reason for part in reason.split("|")), failure.reason


def test_a_reply_above_the_size_limit_is_refused_with_both_sizes() -> None:
    update = Update(ClientInfo("a", "", 1), Payload({"s/m/A": torch.ones(4)}), cost=Cost(bytes_up=16))
    with pytest.raises(PayloadMismatch, match=r"16 bytes; guard\.max_bytes is 15"):
        Guard(max_bytes=15).check(update, {"s/m/A": TensorSpec((4,))}, (), 2.0)
    Guard(max_bytes=16).check(update, {"s/m/A": TensorSpec((4,))}, (), 2.0)


class Crashing(LocalEngine):
    """One client raises in the middle of its training."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        sites = self._sites

        def broken(info: ClientInfo) -> Any:
            if info.id == self.clients()[1].id:
                raise OSError("the scanner is offline")
            return sites(info)

        self._sites = broken


def test_a_client_that_crashes_is_named_and_the_round_goes_on(play: Play) -> None:
    crashed = play("fedit", engine_class=Crashing)
    assert crashed.prints()["server"] == play("fedit", engine_class=Absent).prints()["server"]
    training = [failure for failure in crashed.journal.failures if failure.round <= ROUNDS][:ROUNDS]
    assert {(f.client, f.kind, f.reason) for f in training} == {
        (crashed.engine.clients()[1].id, "OSError", "the scanner is offline")
    }
    assert "the scanner is offline" in training[0].traceback


def test_too_few_replies_stop_the_run_with_the_first_reason(play: Play) -> None:
    with pytest.raises(NotEnoughReplies, match=r"2 of 3 .* 3 are needed .*the scanner is offline"):
        play("fedit", engine_class=Crashing, min_replies=3)


def test_a_client_whose_update_fails_keeps_its_memory_of_before(play: Play, host: Host) -> None:
    done = play("ditto", rounds=2)
    victim = host.infos[0]
    before = done.store.load(victim.id)
    broken = Payload({key: torch.full_like(t, float("nan")) for key, t in done.server.arrays.items()})
    (reply,) = list(done.engine.exchange({victim.id: broken}, Tick("federate", 3, 3, 0)))
    assert isinstance(reply, Failure) and "nan" in reply.reason
    after = done.store.load(victim.id)
    assert before is not None and after is not None and after.scalars == before.scalars
    assert fingerprint(after.arrays) == fingerprint(before.arrays) and after.arrays.keys() == before.arrays.keys()


def test_a_client_that_would_send_more_than_it_declared_is_stopped_at_its_own_side(play: Play, host: Host) -> None:
    from befit.adapters.keys import slot
    from befit.methods.parts.recipe.recipe import Recipe
    from befit.protocol.registry import build_method

    class Leaking(Exception):
        pass

    honest = build_method("ditto")
    assert isinstance(honest, Recipe)
    done = play(honest, rounds=1)

    def leak(client: Payload, received: Payload, site: Any, at: Tick) -> tuple[Payload, Payload]:
        return client, Payload(site.model.dump(slot("shared", "personal")))

    stage = done.engine._method.plan()[0]
    object.__setattr__(stage.exchange, "client_update", leak)
    object.__setattr__(done.engine._method, "plan", lambda: [stage])
    victim = host.infos[0]
    (reply,) = list(done.engine.exchange({victim.id: Payload(done.server.arrays)}, Tick("federate", 2, 2, 0)))
    assert isinstance(reply, Failure)
    assert "undeclared arrays, first 'personal/" in reply.reason
    assert all("personal/" not in row["name"] for row in done.engine.outbound.as_dict()[victim.id])
