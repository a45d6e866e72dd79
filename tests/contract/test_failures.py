"""Clients that fail or send nonsense: named, left out, and nothing else disturbed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import select, slot
from befit.adapters.state import fingerprint, norm
from befit.core.errors import NotEnoughReplies
from befit.core.values import ClientInfo, Failure, Payload, Score, State, Tick, Update
from befit.protocol.check import check
from befit.protocol.registry import build_method, method_names
from befit.protocol.settings import GuardSettings
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from tests.federation import Federation, Memo

from .conftest import ROUNDS, BackToFront, Once, Play, built


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


@pytest.fixture(scope="module")
def _plays() -> dict[int, Federation]:
    return {}


@pytest.fixture
def without(play: Play, _plays: dict[int, Federation]) -> Callable[..., Federation]:
    """What comes of FedIT where one client is not there: trained once for all tests of the file."""

    def run(rounds: int = ROUNDS) -> Federation:
        if rounds not in _plays:
            _plays[rounds] = play("fedit", rounds=rounds, every=1, engine_class=Absent)
        return _plays[rounds]

    return run


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
def test_a_malformed_reply_is_refused_and_the_others_are_as_without_that_client(
    case: str, play: Play, without: Callable[..., Federation]
) -> None:
    """In both of two rounds: the first one's failure is nothing that the second starts from."""
    change, reason = CORPUS[case]
    attacked = play("fedit", rounds=2, engine_class=tampering(change))
    assert attacked.prints()["server"] == without(rounds=2).prints()["server"]
    assert len(attacked.journal.failures) == 2
    for failure in attacked.journal.failures:
        assert failure.kind == "refused"
        assert failure.client == "client-01" or failure.client == attacked.engine.clients()[1].id
        assert any(part in failure.reason for part in reason.split("|")), failure.reason
    listed = attacked.journal.outbound.as_dict()[attacked.engine.clients()[1].id]
    if "norm" not in reason:  # which is judged when all replies of a round are there, so as they were declared
        assert {row["stage"] for row in listed} <= {"federate failure", "score test", "score test cost"}, listed


class Spoiling(BackToFront):
    """All but client-01 send nothing, the last of them first."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        for reply in super().exchange(requests, at):
            if isinstance(reply, Update) and reply.client.id != "client-01":
                reply = replace(reply, payload=Payload())
            yield reply


def test_failures_are_told_in_the_order_of_clients_and_not_of_their_replies(play: Play) -> None:
    spoilt = play("fedit", rounds=1, min_replies=1, engine_class=Spoiling)
    assert [failure.client for failure in spoilt.journal.failures] == ["client-00", "client-02"]


def boasting(by: float, client: int = 1) -> type[LocalEngine]:
    """An engine in which one client's update is so many times as long."""

    class Boasting(LocalEngine):
        def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
            victim = self.clients()[client].id
            for reply in super().exchange(requests, at):
                if isinstance(reply, Update) and reply.client.id == victim:
                    start = requests[victim].arrays
                    longer = {
                        key: start[key] + by * (array - start[key]) for key, array in reply.payload.arrays.items()
                    }
                    reply = replace(reply, payload=Payload(longer, reply.payload.scalars))
                yield reply

    return Boasting


CLIPPED = GuardSettings(clip=1.0, rule="multi-krum", attackers=1)


def honest_mean(done: Any) -> float:
    hostile = done.engine.clients()[1].id
    last = {score.client: score.metrics["accuracy"] for _, score in done.journal.scores if score.client != hostile}
    return sum(last.values()) / len(last)


def test_what_the_guard_lets_through_ruins_a_mean_and_not_what_clipping_and_a_rule_make(
    play: Play, without: Callable[..., Federation]
) -> None:
    alone = honest_mean(without(rounds=6))
    ruined = play("fedit", rounds=6, engine_class=boasting(-10))
    defended = play("fedit", rounds=6, engine_class=boasting(-10), guard=CLIPPED)
    assert not ruined.journal.failures and not defended.journal.failures
    assert honest_mean(ruined) < alone - 0.2
    assert honest_mean(defended) > alone - 0.05


def test_a_client_that_grows_without_end_is_refused_and_the_others_are_as_without_it(
    play: Play, without: Callable[..., Federation]
) -> None:
    """x90 in every round: measured by what it was sent, which grows with it, each of them was let through."""
    attacked = play("fedit", engine_class=boasting(90))
    assert attacked.prints()["server"] == without().prints()["server"]
    assert [failure.kind for failure in attacked.journal.failures] == ["refused"] * ROUNDS


def test_a_client_that_claims_all_examples_counts_for_half_where_weights_are_capped(play: Play) -> None:
    class Claiming(LocalEngine):
        def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
            for reply in super().exchange(requests, at):
                if isinstance(reply, Update) and reply.client.id == self.clients()[1].id:
                    reply = replace(reply, client=replace(reply.client, num_examples=2**31 - 1))
                yield reply

    believed = play("fedit", rounds=1, engine_class=Claiming)
    own = believed.journal.updates[1][1].payload.arrays
    liked = play("fedit", rounds=1, engine_class=Claiming, max_weight=0.5)
    replies = {update.client.id: update.payload.arrays for _, update in liked.journal.updates}
    counts = {info.id: info.num_examples for info in liked.engine.clients()}
    liar, *others = sorted(replies, key=lambda client: client != liked.engine.clients()[1].id)
    total = sum(counts[client] for client in others)
    for key, array in believed.server.arrays.items():
        torch.testing.assert_close(array, own[key], rtol=1e-4, atol=1e-6)
        rest = sum(replies[client][key] * (counts[client] / total) for client in others)
        torch.testing.assert_close(liked.server.arrays[key], (replies[liar][key] + rest) / 2)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("scaffold", "median"),
        ("fedsvd", "trimmed-mean"),
        ("relora", "geometric-median"),
        ("fedsa", "krum"),
        ("fedmosaic", "multi-krum"),
    ],
)
def test_rules_work_with_servers_that_do_more_than_a_mean(play: Play, name: str, rule: Any) -> None:
    done = play(name, rounds=1, guard=GuardSettings(clip=1.5, rule=rule, attackers=1), spool_bytes=0)
    assert not done.journal.failures and done.server.arrays
    assert all(torch.isfinite(array).all() for array in done.server.arrays.values())


@pytest.mark.parametrize(("name", "stage"), [("fdlora", "seed"), ("fedlease", "cluster")])
def test_an_adapter_that_was_trained_in_a_stage_before_is_an_update_too(
    host: Host, play: Play, name: str, stage: str
) -> None:
    """It counts from the initial adapters: times 90 it is refused, and times 10 it is shortened."""
    start = host.install(built(name)).initial

    def sent(by: float, guard: GuardSettings) -> tuple[list[str], float]:
        class Boasting(LocalEngine):
            def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
                for reply in super().exchange(requests, at):
                    if at.stage == stage and isinstance(reply, Update) and reply.client.id == self.clients()[1].id:
                        arrays = {key: start[key] + by * (v - start[key]) for key, v in reply.payload.arrays.items()}
                        reply = replace(reply, payload=Payload(arrays, reply.payload.scalars))
                    yield reply

        done = play(name, rounds=1, engine_class=Boasting, guard=guard)
        return [failure.stage for failure in done.journal.failures], norm(done.server.arrays)

    plain, clip = GuardSettings(), GuardSettings(clip=1.0)
    assert sent(90, plain)[0] == [stage]
    honest, clipped, believed = (sent(by, guard)[1] for by, guard in ((1, plain), (10, clip), (10, plain)))
    assert abs(clipped - honest) < (believed - honest) / 4


PAGE = (Path(__file__).parents[2] / "docs" / "robust.md").read_text()
EVERY_RULE = re.findall(r"`(\w+)`", PAGE.partition("tell them apart:\n")[2].partition("The others need")[0])
NAMES = method_names()  # before any test runs, since tests register methods of their own


def test_which_methods_every_rule_fits(host: Host) -> None:
    """Those that the page lists; multi-Krum fits all."""

    def fits(name: str, rule: Any) -> bool:
        context = replace(host.context, guard=GuardSettings(rule=rule))
        return not any(problem.severity == "error" for problem in check(built(name), context))

    federated = [name for name in NAMES if any(stage.federated for stage in built(name).plan())]
    assert [name for name in federated if fits(name, "median")] == EVERY_RULE
    assert all(fits(name, "multi-krum") for name in federated if fits(name, "none"))
    without = build_method({"name": "fed_sb", "estimate_batches": 0})
    assert not check(without, replace(host.context, guard=GuardSettings(rule="median")))


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


def test_a_client_that_crashes_is_named_and_the_round_goes_on(play: Play, without: Callable[..., Federation]) -> None:
    crashed = play("fedit", engine_class=Crashing)
    left = {(row["stage"], row["name"]) for row in crashed.journal.outbound.as_dict()["client-01"]}
    told = {("federate failure", "error"), ("federate failure", "reason")}
    assert left == told | {("federate cost", key) for key in ("seconds", "cpu_seconds", "peak_memory_mib")}
    assert crashed.prints()["server"] == without().prints()["server"]
    training = [failure for failure in crashed.journal.failures if failure.round <= ROUNDS][:ROUNDS]
    assert {(f.client, f.kind, f.reason) for f in training} == {
        (crashed.engine.clients()[1].id, "OSError", "the scanner is offline")
    }
    assert "the scanner is offline" in training[0].traceback


def test_a_client_that_never_trained_alone_is_in_no_cluster_and_uses_the_others_expert(play: Play) -> None:
    class Away(LocalEngine):
        def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
            asked = {client: sent for client, sent in requests.items() if (at.stage, client) != ("local", "client-01")}
            yield from super().exchange(asked, at)

    done = play("fedlease", rounds=2, every=1, engine_class=Away)
    known, mean = done.server.part("groups").scalars, select(done.server.arrays, slot("expert-0"))
    assert known.keys() == {"client-00", "client-02"} and all(array.any() for array in mean.values())
    told = [failure for failure in done.journal.failures if failure.stage != "local"]
    assert [(f.client, f.stage, f.kind) for f in told] == [
        ("client-01", stage, "NotTrained") for stage in ("cluster", "federate", "federate")
    ]
    assert "client-01" in {score.client for at, score in done.journal.scores if at.stage == "federate"}


class Picky(Memo):
    """A journal that cannot write down what one client says, at one of the three times when it has to."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.when = at

    def accepted(self, at: Tick, update: Update, step: bool = False) -> None:
        self._look("accepted", update.client.id)
        super().accepted(at, update, step)

    def trained(self, at: Tick, update: Update) -> None:
        self._look("trained", update.client.id)
        super().trained(at, update)

    def scored(self, at: Tick, score: Score) -> None:
        self._look("scored", score.client)
        super().scored(at, score)

    def _look(self, when: str, client: str) -> None:
        if (when, client) == (self.when, "client-01"):
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")


@pytest.mark.parametrize("when", ["accepted", "trained", "scored"])
def test_what_cannot_be_written_down_of_a_client_is_its_own_failure(
    when: str, play: Play, once: Once, without: Callable[..., Federation]
) -> None:
    noted = play("fedit", every=1, journal=Picky(when))
    expected = once("fedit") if when == "scored" else without()
    assert noted.prints()["server"] == expected.prints()["server"]
    assert len(noted.journal.failures) == ROUNDS
    for failure in noted.journal.failures:
        assert (failure.client, failure.kind) == ("client-01", "refused")
        assert failure.reason.startswith("UnicodeEncodeError: ")
    others = [
        [(score.client, score.metrics) for _, score in one.journal.scores if score.client != "client-01"]
        for one in (noted, expected)
    ]
    assert others[0] == others[1] and len(others[0]) == 2 * ROUNDS


@pytest.mark.parametrize("when", ["accepted", "trained"])
def test_replies_that_cannot_be_written_down_count_as_missing(when: str, play: Play) -> None:
    with pytest.raises(NotEnoughReplies, match=r"2 of 3 .* 3 are needed .*UnicodeEncodeError"):
        play("fedit", journal=Picky(when), min_replies=3)


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

    honest = deepcopy(build_method("ditto"))  # which others have too
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
