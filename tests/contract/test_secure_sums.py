"""Methods that declare that a mean is enough for them, with the mean of a secure sum."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.core.errors import DataError, NotEnoughReplies
from befit.core.values import Failure, Payload, Tick, Update
from befit.protocol.engine import Checkpoint
from befit.protocol.registry import method_names
from befit.protocol.secure.desk import HIDDEN, without_shares
from befit.protocol.secure.rounds import SecureRound
from befit.protocol.settings import SecureSums
from befit.runs.directory import RunDirectory
from befit.runs.local import LocalEngine
from befit.runs.runner import run
from tests.backbones import short_vit
from tests.federation import Memo

from .conftest import Play, built, by_pattern

FINE = SecureSums(1000.0, 32)
LOOSE = {
    "fedsvd": 1e-4,  # singular vectors of the mean: near singular values mix them
    "fdlora": 1e-3,  # clients train from a first mean
}
BY_MEANS = [name for name in method_names() if any(stage.mean for stage in built(name).plan())]


@pytest.mark.parametrize("name", by_pattern(BY_MEANS, "guidance"))
def test_a_round_by_a_sum_is_the_round_with_everybodys_reply(name: str, play: Play) -> None:
    """To the step of 5e-7 and the rounding of float32, or what a decomposition makes of these. All methods of which it
    is declared, in all stages."""
    plain, summed = play(name, rounds=1), play(name, rounds=1, secure_sums=FINE)
    assert not summed.journal.failures
    assert plain.server.arrays.keys() == summed.server.arrays.keys()
    for key, array in plain.server.arrays.items():
        torch.testing.assert_close(summed.server.arrays[key], array, rtol=1e-5, atol=LOOSE.get(name, 2e-6))
    assert {k: m and m.arrays.keys() for k, m in plain.memories().items()} == {
        k: m and m.arrays.keys() for k, m in summed.memories().items()
    }


def test_the_servers_processor_time_has_its_sums_in_it_and_no_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def burning(whole: Any, seconds: float) -> Any:
        def slower(*arguments: Any, **options: Any) -> Any:
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass
            return whole(*arguments, **options)

        return slower

    monkeypatch.setattr(SecureRound, "opened", burning(SecureRound.opened, 0.3))
    monkeypatch.setattr(LocalEngine, "_step", burning(LocalEngine._step, 0.1))
    config = {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "model": {"id": short_vit()},
        "method": "fedit",
        "train": {"max_steps": 1},
        "federation": {"rounds": 1, "secure_sums": {"clip": 1.0}},
    }
    done = run(config, out=tmp_path / "run")
    assert 0.3 <= done.results["summary"]["server_cpu_seconds"] < 0.9  # as much as the clients burn, at least


def test_what_leaves_does_not_depend_on_the_masks_and_the_sum_on_no_order(play: Play) -> None:
    """New keys in each run, and other hidden vectors; the same numbers to the bit."""
    seen: list[list[torch.Tensor]] = [[], []]

    def watching(number: int) -> type[LocalEngine]:
        class Watching(LocalEngine):
            def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
                order = list(requests) if number else list(reversed(list(requests)))
                for reply in super().exchange({client: requests[client] for client in order}, at):
                    if isinstance(reply, Update):
                        assert reply.payload.arrays.keys() == {HIDDEN} and not reply.payload.scalars
                        seen[number].append(reply.payload.arrays[HIDDEN])
                    yield reply

        return Watching

    first, second = (play("fedit", rounds=2, secure_sums=FINE, engine_class=watching(number)) for number in (0, 1))
    assert first.prints() == second.prints()
    assert len(seen[0]) == 6
    # Of random bytes one of 256 is equal.
    assert all(float((a == b).float().mean()) < 0.02 for a, b in zip(*seen, strict=True))


class WithoutShares(LocalEngine):
    """A server that asks for updates as if there were no secure sums."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return super().exchange({client: without_shares(requests[client]) for client in requests}, at)


class Together(LocalEngine):
    """Clients train as one."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return self.updates(requests, at, len(requests))


class TogetherWithoutShares(WithoutShares, Together):
    pass


@pytest.mark.parametrize("engine", [WithoutShares, TogetherWithoutShares])
def test_no_client_sends_an_update_that_nothing_hides(engine: type[LocalEngine], play: Play) -> None:
    with pytest.raises(NotEnoughReplies, match="an update without shares to hide it by"):
        play("fedit", rounds=1, secure_sums=FINE, engine_class=engine)


def test_clients_that_train_as_one_hide_their_updates_too(play: Play) -> None:
    alone, together = (play("fedit", rounds=1, secure_sums=FINE, engine_class=kind) for kind in (LocalEngine, Together))
    for key, array in alone.server.arrays.items():
        torch.testing.assert_close(together.server.arrays[key], array, rtol=1e-4, atol=1e-5)


def test_two_sums_of_one_round_are_of_the_same_clients(play: Play) -> None:
    """A round that is done again after an interruption: over other clients, the difference would be an update."""

    class Again(LocalEngine):
        def secure(self, step: str, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
            if step == "uncover":
                assert self._sums is not None
                vault, first = self._sums._vault, min(requests)
                vault[first] = {**vault[first], "opened": {f"{at.stage} {at.round}": "of other clients"}}
            return super().secure(step, requests, at)

    memo = Memo()
    with pytest.raises(NotEnoughReplies, match="2 of 3 clients gave a share"):
        play("fedit", rounds=1, secure_sums=FINE, engine_class=Again, journal=memo)
    (failure,) = memo.failures
    assert f"client {failure.client} has helped" in failure.reason
    assert "round 1 of stage federate" in failure.reason


@pytest.mark.parametrize(("method", "left_out"), [("fedsa", {"client-03"}), ("fedit", set())])
def test_who_missed_a_round_is_in_no_later_sum_where_clients_go_on_from_what_they_kept(
    method: str, left_out: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its masks would cancel with nobody's. The others have theirs, round after round."""
    update = LocalEngine._update

    def missing(self: LocalEngine, client: str, sent: Payload, at: Tick, clock: Any) -> Update:
        if (client, at.round) == ("client-03", 1):
            raise DataError("away")
        return update(self, client, sent, at, clock)

    monkeypatch.setattr(LocalEngine, "_update", missing)
    settings = {
        "benchmark": {"name": "digits", "clients": 4},
        "model": {"id": short_vit()},
        "method": {"name": method, "rank": 2},
        "baselines": [],
        "train": {"max_steps": 1},
        "limit": {"records": 20},
        "federation": {"rounds": 3, "secure_sums": {"clip": 20.0, "threshold": 0.6}},
        "report": {"plots": False},
    }
    results = run(settings, out=tmp_path / "run").results
    later = [failure for failure in results["failures"] if failure["round"] > 1]
    assert {failure["client"] for failure in later} == left_out
    assert all("not sent the same as the others" in failure["reason"] for failure in later)
    updates = {client: row["updates"] for client, row in results["clients"].items()}
    assert updates == {"client-00": 3, "client-01": 3, "client-02": 3, "client-03": 0 if left_out else 2}

    commit = RunDirectory.commit

    def cut(self: RunDirectory, point: Checkpoint, *others: Any) -> None:
        commit(self, point, *others)
        if point.round == 2:
            raise KeyboardInterrupt

    settings["checkpoint"] = {"every_s": 0}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDirectory, "commit", cut)
        run(settings, out=tmp_path / "cut")
    resumed = run(settings, out=tmp_path / "cut", resume=True).results
    assert resumed["failures"] == results["failures"]
    assert {client: row["accuracy"] for client, row in resumed["clients"].items()} == {
        client: row["accuracy"] for client, row in results["clients"].items()
    }
