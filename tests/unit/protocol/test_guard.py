"""What the server does about replies that are well formed and may still be wrong or hostile."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from befit.core.errors import NotEnoughReplies, NotFinite, PayloadMismatch, TrainingDiverged
from befit.core.values import ClientInfo, Payload, State, TensorSpec, Update
from befit.data.federation import ClientData
from befit.data.registry import build
from befit.merge import robust
from befit.protocol.check import check
from befit.protocol.context import Context, Problem
from befit.protocol.guard import Replies, check_declared, check_memory, measured, reference_norm, sizes_of
from befit.protocol.registry import build_method
from befit.protocol.settings import GuardSettings, TrainSettings
from befit.protocol.weights import capped, dominating, weighed

KEY = "shared/block.00.q_proj/A"
START = {KEY: torch.tensor([30.0, 40.0])}  # norm 50
GUARD = GuardSettings()


def replies(
    moved: Mapping[str, State], start: State = START, initial: float = 1.0, backbones: Mapping[str, str] | None = None
) -> Replies:
    """What clients sent that all started from one place."""
    updates = [
        Update(ClientInfo(client, (backbones or {}).get(client, "tiny"), 10), Payload(arrays))
        for client, arrays in sorted(moved.items())
    ]
    sizes = {update.client.id: sizes_of(update.payload.arrays, start) for update in updates}
    return Replies.of(
        updates, lambda update: start, sizes, dict.fromkeys({"tiny", *(backbones or {}).values()}, initial)
    )


def steps(**lengths: float) -> dict[str, State]:
    """Updates of these lengths, all in one direction."""
    return {client: {KEY: START[KEY] + torch.tensor([length, 0.0])} for client, length in lengths.items()}


def sent(updates: list[Update]) -> dict[str, list[float]]:
    return {update.client.id: (update.payload.arrays[KEY] - START[KEY]).tolist() for update in updates}


def refused(given: Replies, guard: GuardSettings = GUARD) -> set[str]:
    kept, reasons = given.judged(guard)
    assert {update.client.id for update in kept.updates} == {u.client.id for u in given.updates} - reasons.keys()
    return set(reasons)


def test_what_is_measured_is_the_change_and_not_the_reply() -> None:
    """Against the start's norm of 50, a step of 21 would be little; the median of the four steps is 1."""
    assert refused(replies(steps(a=1.0, b=1.0, c=0.9, d=21.0))) == {"d"}
    assert not refused(replies(steps(a=1.0, b=1.0, c=0.9, d=19.0)))


def test_what_an_attacker_grew_in_former_rounds_is_no_measure_of_the_next() -> None:
    """x90 every round: each would be inside 100 times what was sent down, which grows with it."""
    grown = {KEY: 1e4 * START[KEY]}
    moved = {client: {KEY: grown[KEY] + length} for client, length in {"a": 1.0, "b": 1.0, "c": 90.0}.items()}
    assert refused(replies(moved, grown)) == {"c"}


def test_the_reason_says_how_long_it_was_and_which_key_decides() -> None:
    _, reasons = replies(steps(a=1.0, b=1.0, c=50.0)).judged(GUARD)
    assert reasons == {
        "c": "client c: the update of slot shared has norm 50, and 20 is the most that this round allows "
        "(guard.max_norm_ratio)"
    }


@pytest.mark.parametrize("lengths", [{"a": 90.0}, {"a": 90.0, "b": 1.0}])
def test_without_a_majority_the_initial_adapters_are_the_measure(lengths: dict[str, float]) -> None:
    assert not refused(replies(steps(**lengths), initial=1.0))
    assert refused(replies(steps(**lengths), initial=0.8)) == {"a"}  # 100 times 0.8


def test_where_hardly_anybody_moves_a_client_that_does_is_kept() -> None:
    assert not refused(replies(steps(a=0.0, b=0.0, c=0.019), initial=1.0))
    assert refused(replies(steps(a=0.0, b=0.0, c=0.021), initial=1.0)) == {"c"}  # 20 times a thousandth


def test_slots_are_judged_each_by_itself() -> None:
    """A control variate of norm 1000 leaves no room for an adapter of norm 100 beside it."""
    start = {"shared/m/A": torch.zeros(1), "control/m/A": torch.zeros(1)}
    moved = {
        client: {"shared/m/A": torch.tensor([length]), "control/m/A": torch.tensor([1000.0])}
        for client, length in {"a": 1.0, "b": 1.0, "c": 100.0}.items()
    }
    assert refused(replies(moved, start)) == {"c"}


def test_what_is_no_update_has_a_wide_limit_of_its_own() -> None:
    """A loss of 40 times the usual is an honest one; of 1000 times, and of the adapters, it is not."""
    moved = {
        client: {**arrays, "validation/loss/value": torch.tensor([loss])}
        for (client, arrays), loss in zip(steps(a=1, b=1, c=1, d=1).items(), (0.1, 0.2, 4.0, 1e4), strict=True)
    }
    assert refused(replies(moved)) == {"d"}


def test_the_limit_of_what_is_no_update_grows_with_what_is_usual_and_not_below_a_hundred() -> None:
    """Losses of 50 are usual, adapters of norm 1: 100 times 50 is the most, whatever smaller ratio is set."""

    def outside(loss: float, guard: GuardSettings) -> set[str]:
        losses = {"a": 50.0, "b": 50.0, "c": loss}
        moved = {
            client: {**arrays, "validation/loss/value": torch.tensor([losses[client]])}
            for client, arrays in steps(a=1, b=1, c=1).items()
        }
        return refused(replies(moved), guard)

    assert not outside(4990.0, GUARD) and outside(5010.0, GUARD) == {"c"}
    wide = replace(GUARD, max_norm_ratio=200.0)
    assert not outside(9990.0, wide) and outside(10010.0, wide) == {"c"}


def test_weights_that_all_start_at_zero_are_measured_by_what_weights_have() -> None:
    assert reference_norm(START) == 50.0
    assert reference_norm({"whole/m": torch.zeros(10, 10)}) == pytest.approx(0.2)  # 0.02 in each of a hundred


def test_numbers_that_overflow_are_too_long() -> None:
    far = {client: {KEY: torch.tensor([value, 0.0])} for client, value in {"a": 1.0, "b": 1.0, "c": 3e38}.items()}
    assert sizes_of(far["c"], {KEY: torch.tensor([-3e38, 0.0])}) == {"shared": math.inf}
    assert refused(replies(far)) == {"c"}


def test_backbones_are_judged_apart() -> None:
    other = {"d": "large", "e": "large", "f": "large"}
    assert not refused(replies(steps(a=1, b=1, c=1, d=100, e=100, f=100), backbones=other))
    assert refused(replies(steps(a=1, b=1, c=1, d=1, e=100, f=100))) == {"e", "f"}


def test_clipping_shortens_what_is_long_and_leaves_the_rest_untouched() -> None:
    moved = steps(a=1.0, b=2.0, c=3.0, d=-19.0, e=2.0)
    moved["d"] |= {"shared/ids/x": torch.tensor([7]), "validation/loss/value": torch.tensor([5.0])}
    given = replies(moved)
    found = given.trusted(replace(GUARD, clip=1.0))
    for client, length in {"a": 1.0, "b": 2.0, "c": 2.0, "d": -2.0, "e": 2.0}.items():
        assert sent(found)[client] == pytest.approx([length, 0.0])
    assert [one is two for one, two in zip(found, given.updates, strict=True)] == [True, True, False, False, True]
    assert found[3].payload.arrays["shared/ids/x"].tolist() == [7]
    assert found[3].payload.arrays["validation/loss/value"].tolist() == [5.0]


def test_only_the_slot_that_is_long_is_shortened_and_an_update_of_nothing_stays_one() -> None:
    start = {"shared/m/A": torch.ones(1), "personal/m/A": torch.ones(1)}
    lengths = {"a": (1.0, 1.0), "b": (1.0, 1.0), "c": (4.0, 0.5), "d": (0.0, 4.0)}
    moved = {
        client: {key: start[key] + length for key, length in zip(start, both, strict=True)}
        for client, both in lengths.items()
    }
    found = {update.client.id: update.payload.arrays for update in replies(moved, start).trusted(GuardSettings(clip=1))}
    changes = {
        client: [pytest.approx(float(found[client][key] - start[key])) for key in start] for client in ("a", "c", "d")
    }
    assert changes == {"a": [1.0, 1.0], "c": [1.0, 0.5], "d": [0.0, 1.0]}


def test_updates_of_several_backbones_come_out_in_the_order_of_their_clients() -> None:
    backbones = {"a": "small", "b": "large", "c": "small", "d": "large", "e": "small", "f": "large"}
    given = replies(steps(a=1, b=2, c=1, d=2, e=1, f=2), backbones=backbones)
    found = given.trusted(GuardSettings(rule="median", attackers=1))
    assert list(sent(found)) == list("abcdef") and [change[0] for change in sent(found).values()] == [1, 2] * 3


def test_what_is_usual_stays_when_a_reply_is_refused() -> None:
    """Two replies are left of three, and the long one of them is still clipped."""
    kept, reasons = replies(steps(a=1.0, b=10.0, c=1000.0)).judged(GUARD)
    assert set(reasons) == {"c"}
    assert sent(kept.trusted(replace(GUARD, clip=0.5))) == {"a": [1.0, 0.0], "b": [5.0, 0.0]}


@pytest.mark.parametrize("rule", ["median", "geometric-median", "multi-krum"])
def test_arrays_that_only_some_clients_were_sent_are_left_as_they_came(rule: str) -> None:
    """To the others they are no update, so they cannot be compared."""
    more = "control/m/A"
    moved = {client: {**arrays, more: torch.tensor([5.0])} for client, arrays in steps(a=1.0, b=2.0, c=3.0).items()}
    starts = {"a": START, "b": START | {more: torch.tensor([4.0])}, "c": START}
    sizes = {client: sizes_of(arrays, starts[client]) for client, arrays in moved.items()}
    updates = [Update(ClientInfo(client, "tiny", 10), Payload(arrays)) for client, arrays in moved.items()]
    given = Replies.of(updates, lambda update: starts[update.client.id], sizes, {"tiny": 1.0})
    assert not refused(given)
    found = given.trusted(GuardSettings(clip=2.0, rule=rule, attackers=1))  # type: ignore[arg-type]
    assert all(update.payload.arrays[more].tolist() == [5.0] for update in found)


def test_nothing_is_clipped_without_a_majority() -> None:
    given = replies(steps(a=1.0, b=50.0))
    assert given.trusted(replace(GUARD, clip=1.0)) == list(given.updates)


def test_by_default_the_method_gets_the_replies_themselves() -> None:
    given = replies(steps(a=1.0, b=2.0, c=19.0))
    assert all(one is two for one, two in zip(given.trusted(GUARD), given.updates, strict=True))


@pytest.mark.parametrize(
    ("rule", "expected"), [("median", 2.0), ("trimmed-mean", 2.0), ("geometric-median", 2.0), ("krum", None)]
)
def test_a_rule_gives_every_reply_the_centre_of_the_updates(rule: str, expected: float | None) -> None:
    given = replies(steps(a=1.0, b=2.0, c=3.0, d=2.0, e=19.0))
    found = sent(given.trusted(GuardSettings(rule=rule, attackers=1)))  # type: ignore[arg-type]
    if rule == "krum":  # one reply alone, as it came
        assert found in ({"b": [2.0, 0.0]}, {"d": [2.0, 0.0]})
    else:
        wanted = {"trimmed-mean": (2 + 2 + 3) / 3}.get(rule, expected)
        assert found == {client: pytest.approx([wanted, 0.0], abs=1e-4) for client in "abcde"}


def test_multi_krum_leaves_out_as_many_replies_as_there_may_be_attackers() -> None:
    given = replies(steps(a=1.0, b=2.0, c=3.0, d=2.0, e=19.0, f=-15.0))
    found = given.trusted(GuardSettings(rule="multi-krum", attackers=2))
    assert [update.client.id for update in found] == ["a", "b", "c", "d"]
    assert all(update in given.updates for update in found)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "geometric-median", "krum", "multi-krum"])
def test_replies_without_an_update_are_left_as_they_are_for_there_is_nothing_to_compare(rule: str) -> None:
    """Otherwise Krum would leave out those whose names come last."""
    given = replies({client: {"statistics/x": torch.tensor([1.0])} for client in "abc"}, start={})
    assert not refused(given)
    assert given.trusted(GuardSettings(clip=1.0, rule=rule, attackers=1)) == list(given.updates)  # type: ignore[arg-type]


def test_a_client_that_was_sent_something_else_is_moved_from_there() -> None:
    """The centre of the updates is 2: a client that started at 100 ends at 102."""
    given = replies(steps(a=1.0, b=2.0, c=3.0))
    starts = {"a": START, "b": START, "c": {KEY: torch.tensor([100.0, 0.0])}}
    given = replace(given, starts=lambda update: starts[update.client.id])
    updates = [replace(given.updates[2], payload=Payload({KEY: torch.tensor([103.0, 0.0])}))]
    given = replace(given, updates=[*given.updates[:2], *updates])
    found = given.trusted(GuardSettings(rule="median", attackers=1))
    assert found[2].payload.arrays[KEY].tolist() == [102.0, 0.0]


def test_a_rule_without_enough_replies_ends_the_round() -> None:
    with pytest.raises(NotEnoughReplies, match=r"2 good replies .* guard.attackers 1 it needs 3"):
        replies(steps(a=1.0, b=1.0)).trusted(GuardSettings(rule="median"))
    assert robust.least_replies(1) == 3


def test_a_rule_needs_enough_replies_of_every_backbone() -> None:
    given = replies(steps(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0), backbones={"d": "large", "e": "large"})
    with pytest.raises(NotEnoughReplies, match=r"^2 good replies of one backbone"):
        given.trusted(GuardSettings(rule="median"))


DECLARED = {KEY: TensorSpec((2,))}


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({}, "the plain number 'loss' was sent and not declared, or declared and not sent"),
        ({"loss": 1.0, "more": 1.0}, "the plain number 'more' was sent and not declared"),
        ({"loss": "text"}, "'loss' as a str, and not as one number"),
        ({"loss": [1.0, 2.0]}, "'loss' as a list, and not as one number"),
        ({"loss": 2**63}, "'loss' as an integer of more than 64 bits"),
        ({"loss": -(2**63)}, "'loss' as an integer of more than 64 bits"),
    ],
)
def test_beside_arrays_a_reply_has_the_declared_single_numbers(numbers: dict[str, Any], reason: str) -> None:
    for fine in (0.5, 2**63 - 1, 1 - 2**63, True):
        check_declared("a", Payload(dict(START), {"loss": fine}), DECLARED, {"loss"})
    with pytest.raises(PayloadMismatch, match=re.escape(reason)):
        check_declared("a", Payload(dict(START), numbers), DECLARED, {"loss"})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_named_in_replies_and_in_the_memory_of_the_server(value: float) -> None:
    with pytest.raises(NotFinite, match=r"a sent a number that is not finite \(loss\); if training diverged"):
        check_declared("a", Payload(dict(START), {"loss": value}), DECLARED, {"loss"})
    check_memory("then", Payload(dict(START), {"losses": [1.0, 2.0], "name": "x"}))
    with pytest.raises(TrainingDiverged, match=r"memory then holds a number that is not finite \(losses\)"):
        check_memory("then", Payload(dict(START), {"losses": [1.0, value]}))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("start", [START, {}])
def test_a_reply_that_is_not_finite_is_named_where_it_is_measured_and_a_large_one_is_not(
    value: float, start: State
) -> None:
    with pytest.raises(NotFinite, match=f"a sent numbers that are not finite .first in {KEY}"):
        measured("a", Payload({KEY: torch.tensor([0.0, value])}), DECLARED, (), start)
    with pytest.raises(NotFinite, match=r"a sent a number that is not finite \(loss\)"):
        measured("a", Payload(dict(START), {"loss": value}), DECLARED, {"loss"}, start)
    (size,) = measured("a", Payload({KEY: torch.tensor([3e38, -3e38])}), DECLARED, (), start).values()
    assert size == math.inf


@pytest.mark.parametrize(("share", "most"), [(0.5, 100), (0.4, 66), (0.9, 900)])
def test_no_client_has_more_than_its_share_of_a_mean(share: float, most: int) -> None:
    found = capped([2**31 - 1, 60, 40], share)
    assert found == [most, 60, 40] and found[0] / sum(found) <= share < (found[0] + 1) / (sum(found) + 1)


def test_no_client_has_more_than_its_share_of_the_mean_of_its_backbone() -> None:
    """A liar among three small models is not given the room that the large ones' examples make."""
    counts = {"a": 2**31 - 1, "b": 10, "c": 10, "d": 100, "e": 100, "f": 100}
    backbones = dict.fromkeys("abc", "small") | dict.fromkeys("def", "large")
    updates = [Update(ClientInfo(client, backbones[client], count), Payload()) for client, count in counts.items()]
    found = {update.client.id: update.client.num_examples for update in weighed(updates, 0.5)}
    assert found == {"a": 20, "b": 10, "c": 10, "d": 100, "e": 100, "f": 100}
    assert [update.client.num_examples for update in weighed(updates, None)] == list(counts.values())


def test_a_share_that_cannot_be_kept_makes_all_alike() -> None:
    assert capped([30, 10, 20], 0.2) == [10, 10, 10]
    assert capped([30, 0, 20], 0.2) == [20, 0, 20] and capped([0, 0], 0.2) == [0, 0]


def test_only_a_majority_of_the_examples_is_told_of() -> None:
    assert not dominating({"a": 20, "b": 10, "c": 10}, {}) and not dominating({"a": 30, "b": 1}, {})
    assert "client a says it has 21 of all 41" in dominating({"a": 21, "b": 10, "c": 10}, {})[0]
    counts, large = {"a": 21, "b": 10, "c": 10, "d": 90, "e": 90}, {"d": "large", "e": "large"}
    assert not dominating(counts, dict.fromkeys("abcde", "small")) and not dominating(counts, large)[1:]
    assert (
        "client a says it has 21 of all 41 training examples of clients with the model small"
        in dominating(counts, {**dict.fromkeys("abc", "small"), **large})[0]
    )


def problems(method: str, guard: GuardSettings = GUARD, clients: int = 5, **more: float | None) -> list[Problem]:
    federation = build("digits", None, {"clients": clients})
    families = {client.id: "model" for client in federation.clients}
    return check(build_method(method), Context(federation, families, TrainSettings(), guard=guard, **more))  # type: ignore[arg-type]


def test_a_rule_that_the_clients_are_too_few_for_is_refused_before_a_run() -> None:
    rule = GuardSettings(rule="median", attackers=2)
    assert not problems("fedit", rule)
    (small,) = problems("fedit", rule, cohort=4)
    (few,) = problems("fedit", rule, clients=4)
    assert small.severity == few.severity == "error" and small.key == few.key == "guard.attackers"
    (alone,) = problems("fedit", GuardSettings(attackers=2))
    assert alone.key == "guard.attackers" and "the rule is none" in alone.text
    assert "needs 5 clients" in small.text and "not 4" in small.text
    assert not problems("local", rule, clients=4)  # which sends nothing


def test_a_clip_that_no_round_has_enough_updates_for_is_warned_of() -> None:
    clip = GuardSettings(clip=1.0)
    assert not problems("fedit", clip, clients=3)
    for few in ({"clients": 2}, {"cohort": 2}):
        (found,) = problems("fedit", clip, **few)
        assert (found.severity, found.key) == ("warning", "guard.clip") and "a round has 2" in found.text
    assert not problems("local", clip, clients=2)


def test_a_rule_that_makes_one_of_all_is_refused_where_the_server_keeps_clients_apart() -> None:
    (found,) = [one for one in problems("rela", GuardSettings(rule="median")) if one.severity == "error"]
    assert found.key == "guard.rule" and "multi-krum" in found.text
    assert not [one for one in problems("rela", GuardSettings(rule="multi-krum")) if one.severity == "error"]


def test_a_client_with_most_of_the_examples_is_warned_of_unless_weights_are_capped() -> None:
    federation = build("digits", None, {"clients": 3})
    first, *others = federation.clients
    few = tuple(replace(client, train=list(client.train)[:5]) for client in others)
    large = replace(federation, clients=(ClientData(first.id, first.train, first.val, first.test), *few))
    context = Context(large, {client.id: "model" for client in large.clients}, TrainSettings())
    (warning,) = check(build_method("fedit"), context)
    assert (warning.severity, warning.key) == ("warning", "federation.max_weight") and first.id in warning.text
    apart = replace(context, families={client.id: client.id for client in large.clients})
    assert not check(build_method("fedit"), apart)  # each backbone has a mean of its own
    assert not check(build_method("fedit"), replace(context, max_weight=0.5))
    assert not check(build_method("local"), context)
