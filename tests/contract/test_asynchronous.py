"""Rounds that end with the first so many updates, on a simulated clock."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.core.values import Failure, Payload, Tick, Update
from befit.protocol.check import check
from befit.protocol.flights import restored
from befit.protocol.registry import method_names
from befit.protocol.settings import Asynchronous
from befit.protocol.store import ClientStore
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from tests.federation import Memo, Stop

from .conftest import REPRESENTATIVES, Once, Play, built

ALL = Asynchronous(3, times=1.0)  # of three clients
SLOW = Asynchronous(2, times={"client-02": 2.5})  # client-02 is one or two rounds late


def may_be_late(host: Host, name: str) -> bool:
    context = replace(host.context, asynchronous=SLOW)
    federates = any(stage.federated for stage in built(name).plan())
    return federates and not any(problem.severity == "error" for problem in check(built(name), context))


PAGE = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text()
ADDED = re.findall(r"`(\w+)`", PAGE.partition("These are\n")[2].partition("and whatever trains alone")[0])


NAMES = method_names()  # before any test runs, since tests register methods of their own


def test_which_methods_late_updates_fit(host: Host) -> None:
    """Those that the page lists: they add up changes of what everybody was sent. Others are refused, such as rounds
    that fold or turn what changes are expressed in (fedsvd, relora), take turns (rolora) or send control variates
    (scaffold)."""
    assert [name for name in NAMES if may_be_late(host, name)] == ADDED


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.slow) for name in ADDED],
)
def test_with_a_buffer_of_all_clients_the_numbers_are_those_of_ordinary_rounds(
    name: str, once: Once, play: Play
) -> None:
    """To the bit, whoever is first: server, clients' memories and scores."""
    plain, late = once(name), play(name, asynchronous=ALL)
    assert late.prints() == plain.prints()
    scores = [[(at, score.client, score.metrics) for at, score in one.journal.scores] for one in (plain, late)]
    assert scores[0][-3:] == scores[1] and len(scores[1]) == 3


def test_a_cohort_that_is_the_buffer_is_the_same_cohort(play: Play) -> None:
    settings = Asynchronous(2, times=1.0)
    assert play("fedsa", cohort=2, asynchronous=settings).prints() == play("fedsa", cohort=2).prints()


def fedbuff(host: Host, name: str, rounds: int, buffer: int, times: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """FedBuff (Nguyen et al. 2022, Algorithm 1) written down once more: a heap of events, and sums of changes."""
    site, made = host.install(built(name)), built(name)
    engine = LocalEngine(made, host.infos, host.site, ClientStore(None))
    (stage,) = made.plan()
    model = dict(stage.exchange.dispatch(made.server_init(site), host.infos[0], Tick("federate", 1, rounds, 0)).arrays)
    now, heap, idle = 0.0, list[tuple[float, int, int, dict[str, torch.Tensor]]](), list(range(len(host.infos)))
    for version in range(rounds):
        for place in idle:
            heapq.heappush(heap, (now + times.get(host.infos[place].id, 1.0), place, version, dict(model)))
        step, examples, idle = {key: torch.zeros_like(value) for key, value in model.items()}, 0, []
        for _ in range(buffer):
            now, place, born, start = heapq.heappop(heap)
            info = host.infos[place]
            (update,) = engine.exchange({info.id: Payload(start)}, Tick("federate", born + 1, rounds, 0))
            assert isinstance(update, Update)
            weight = info.num_examples * (1 + version - born) ** -0.5
            for key, value in update.payload.arrays.items():
                step[key] += weight * (value - start[key])
            examples += info.num_examples
            idle.append(place)
        model = {key: value + step[key] / examples for key, value in model.items()}
    return model


def test_late_updates_count_as_in_fedbuff(host: Host, play: Play) -> None:
    late = play("fedit", rounds=6, asynchronous=SLOW)
    wanted = fedbuff(host, "fedit", 6, 2, {"client-02": 2.5})
    for key, value in wanted.items():
        assert float((late.server.arrays[key] - value).norm()) <= 1e-2 * float(value.norm()), key
    behind = [(at.round, update.client.id[-1], update.report["staleness"]) for at, update in late.journal.updates]
    assert [(round_, client, tau) for round_, client, tau in behind if tau] == [
        (3, "2", 2.0),
        (4, "1", 1.0),
        (6, "2", 2.0),
    ]


def test_an_update_that_is_too_late_is_not_used_and_its_client_goes_on(play: Play) -> None:
    """client-02's first update is two rounds late: round 3 waits for client-01 instead."""
    late = play("fedit", rounds=4, asynchronous=replace(SLOW, max_staleness=1))
    (failure,) = late.journal.failures
    assert (failure.client, failure.round, failure.kind) == ("client-02", 3, "refused") and failure.cost.bytes_up
    assert "2 rounds ago, and 1 is the most" in failure.reason
    trained = [(at.round, update.client.id[-1]) for at, update in late.journal.updates]
    assert trained == [(round_, client) for round_ in (1, 2, 3, 4) for client in "01"]


def test_an_update_that_is_as_late_as_may_be_is_used(play: Play) -> None:
    late = play("fedit", rounds=3, asynchronous=replace(SLOW, max_staleness=2))
    assert not late.journal.failures
    assert [update.report["staleness"] for at, update in late.journal.updates if at.round == 3] == [0.0, 2.0]


def test_no_more_clients_are_at_work_than_a_cohort_has(play: Play) -> None:
    """One of two ends a round, so that one of the others takes its place."""
    settings = Asynchronous(1, times={"client-00": 1.5, "client-01": 2.5})
    late = play("fedit", rounds=4, cohort=2, asynchronous=settings)
    *points, _ = late.journal.completed_points
    flights = [restored(point.flights, Tick("federate", 1, 4, 0)) for point in points]
    assert [len(at_work) for at_work in flights] == [1, 1, 1]


class Failing(LocalEngine):
    """client-00 fails in round 1."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        for reply in super().exchange(requests, at):
            if isinstance(reply, Update) and reply.client.id == "client-00" and at.round == 1:
                yield Failure("client-00", at.stage, at.round, "crashed", "")
            else:
                yield reply


def test_a_failure_is_no_update_and_is_made_up_for_by_the_next_client(play: Play) -> None:
    late = play("fedit", rounds=2, asynchronous=SLOW, engine_class=Failing)
    trained = [(at.round, update.client.id[-1]) for at, update in late.journal.updates]
    assert trained == [(1, "1"), (1, "2"), (2, "0"), (2, "1")]


def test_the_guard_judges_what_a_late_client_has_changed_since_its_own_start(play: Play) -> None:
    """Adam at a rate of 100 takes the server further in two rounds than any update may be long."""
    far = built("fedadam", server_lr=100.0)
    late = play(far, rounds=3, asynchronous=SLOW)
    assert not late.journal.failures
    assert [update.client.id for at, update in late.journal.updates if at.round == 3] == ["client-00", "client-02"]


class Busy(LocalEngine):
    busy = frozenset(["client-01"])


def test_who_is_at_work_is_measured_at_the_end_alone(play: Play) -> None:
    done = play("fedit", rounds=2, every=1, engine_class=Busy)
    measured = [(at.round, score.client[-1]) for at, score in done.journal.scores]
    assert measured == [(1, "0"), (1, "2"), (2, "0"), (2, "1"), (2, "2")]


@pytest.mark.parametrize("name", ["fedsa", "fedadam"])
def test_a_run_that_was_stopped_goes_on_with_the_clients_that_were_at_work(name: str, play: Play) -> None:
    """Memories of clients and an optimiser at the server; stopped after round 2, with client-02 in flight since 1."""
    whole = play(name, rounds=5, asynchronous=SLOW)
    memo, store, clock = Memo(stop_after=2), ClientStore(None), dict[str, Any]()
    with pytest.raises(Stop):
        play(name, rounds=5, asynchronous=SLOW, journal=memo, store=store, clock=clock)
    point = memo.completed_points[-1]
    assert point.flights is not None and list(restored(point.flights, Tick("federate", 1, 5, 0))) == ["client-02"]
    resumed = play(name, rounds=5, asynchronous=SLOW, journal=Memo(point=point), store=store, clock=clock)
    assert resumed.prints() == whole.prints()
