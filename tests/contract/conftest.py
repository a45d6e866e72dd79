"""A small federation of real digits, and ways to run one method on it with everything laid open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from befit.config.load import load_experiment
from befit.core.values import Failure, Payload, Score, Tick, Update
from befit.core.wire_form import Wire
from befit.protocol.client_privacy import ClientPlan
from befit.protocol.method import Method, run_stages
from befit.protocol.registry import build_method, method_names
from befit.protocol.secure.desk import SecureDesk
from befit.protocol.settings import Asynchronous, SecureSums
from befit.protocol.store import ClientStore
from befit.runs.clock import SimulatedEngine
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from tests.backbones import short_vit
from tests.federation import AsBytes, Federation, Memo

ROUNDS = 3
# What a method does beside local training, as little of it as shows.
LITTLE: dict[str, dict[str, Any]] = {name: {"distil": {"samples": 6}} for name in ("perada", "takfl", "fedmkt")}
LITTLE |= {name: {"statistics": {"samples": 6}} for name in ("potara", "fisher_merging")}
LITTLE["fedl2p"] = {"outer": 1, "draws": 1}
LITTLE["fedmosaic"] = {"blocks": 1}
LITTLE["fdlora"] = {"evaluations": 3}
LITTLE["fedlease"] = {"experts": 2, "rounds_local": 1}  # as many as three clients have, so that bytes are no bound
LITTLE["lora_fair"] = {"server_steps": 2, "server_lr": 1e-6}  # more overshoots where B is as small as here


def built(name: str, **changes: Any) -> Method:
    """A registered method with its defaults, but for `changes` and what would only take time."""
    return build_method({"name": name, **LITTLE.get(name, {}), **changes})


def pattern(name: str) -> tuple[object, ...]:
    """How a method exchanges: the class of each stage, whether it is federated, whether its rounds are the run's; and
    the slots that a client uses in the end."""
    method = built(name)
    stages = [(stage.federated, stage.rounds is None, type(stage.exchange)) for stage in run_stages(method)]
    return *stages, method.use.slots


def _representatives() -> list[str]:
    first: dict[tuple[object, ...], str] = {}
    for name in method_names():
        first.setdefault(pattern(name), name)
    return list(first.values())


# One method of every pattern, so that a new pattern has one by itself.
REPRESENTATIVES = _representatives()


def by_pattern(names: Iterable[str], *also: str) -> list[Any]:
    """Parameters for what is expensive and knows of methods no more than how they exchange: those that represent no
    pattern are slow tests, but for those that a test names."""
    quick = {*REPRESENTATIVES, *also}
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


METHODS_BY_PATTERN = by_pattern(method_names())


def experiment(method: Any = "fedit", **changes: Any) -> dict[str, Any]:
    """Three clients with a few real digits each, and two steps a round: what every run and play of these tests is."""
    return {
        "model": {"id": short_vit()},
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "limit": {"records": 48},
        "method": method,
        "baselines": [],
        "train": {"max_steps": 2, "lr": 5e-3},
        "federation": {"rounds": ROUNDS},
        "report": {"plots": False},
        **changes,
    }


@pytest.fixture(scope="session")
def host() -> Host:
    return Host(load_experiment(experiment()))


class BackToFront(AsBytes):
    """Visits the clients, and so answers, in the opposite order, with messages as bytes."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return super().exchange({client: requests[client] for client in reversed(list(requests))}, at)


class Unmeasured(LocalEngine):
    """Asks nobody for a score, for tests that look at none."""

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        return iter(())


Play = Callable[..., Federation]


@pytest.fixture
def play(host: Host, tmp_path: Path) -> Play:
    """Run a method (by name, or a method) and return all that it left."""

    def run(
        method: str | Method,
        *,
        rounds: int = ROUNDS,
        seed: int = 0,
        every: int = 0,
        clients: int | None = None,
        min_replies: int | float = 0.5,
        spool_bytes: int = 2**28,
        wire: Wire = Wire(),  # noqa: B008 frozen
        secure_sums: SecureSums | None = None,
        clients_plan: ClientPlan | None = None,
        asynchronous: Asynchronous | None = None,
        clock: dict[str, Any] | None = None,
        engine_class: type[LocalEngine] = LocalEngine,
        journal: Memo | None = None,
        store: ClientStore | None = None,
        **schedule: Any,
    ) -> Federation:
        made = built(method) if isinstance(method, str) else method
        sums = None if secure_sums is None else SecureDesk(secure_sums, made, {})
        only = [info.id for info in host.infos[:clients]]
        engine = {"engine_class": engine_class, "wire": wire, "sums": sums}
        played = Federation.on(host, made, only, store=store, journal=journal, **engine)
        played.journal.spool, asked = tmp_path / "spool", played.engine
        if asynchronous is not None:
            stages = [stage.name for stage in run_stages(made) if stage.federated]
            asked = SimulatedEngine(asked, asynchronous, seed, stages, {} if clock is None else clock)
        schedule |= {"evaluate_every": every, "spool_bytes": spool_bytes, "clients": clients_plan}
        schedule |= {"secure_sums": secure_sums, "asynchronous": asynchronous}
        played.run(rounds, seed, min_replies, asked, **schedule)
        return played

    return run


Once = Callable[..., Federation]


@pytest.fixture(scope="session")
def _played() -> dict[tuple[str, int | None], Federation]:
    return {}


@pytest.fixture
def once(play: Play, _played: dict[tuple[str, int | None], Federation]) -> Once:
    """What a plain run of a method left, scored after every round; trained only once for all tests that look at it
    and change nothing of it."""

    def run(name: str, *, clients: int | None = None) -> Federation:
        if (name, clients) not in _played:
            _played[name, clients] = play(name, every=1, clients=clients)
        return _played[name, clients]

    return run
