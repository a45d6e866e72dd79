"""A small federation of real digits, and ways to run one method on it with everything laid open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from befit.adapters.state import fingerprint
from befit.config.load import load_experiment
from befit.core.values import Cost, Failure, Payload, Score, Tick, Update
from befit.core.wire_form import Wire
from befit.protocol.client_privacy import ClientPlan
from befit.protocol.engine import Checkpoint
from befit.protocol.federate import federate
from befit.protocol.method import Method, run_stages
from befit.protocol.registry import build_method, method_names
from befit.protocol.schedule import Schedule
from befit.protocol.secure.desk import SecureDesk
from befit.protocol.settings import Asynchronous, GuardSettings, SecureSums
from befit.protocol.stage import Stage
from befit.protocol.store import ClientStore
from befit.runs.clock import SimulatedEngine
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.outbound import Outbound
from tests.backbones import half_a_model

ROUNDS = 3
# What a method does beside local training, as little of it as shows.
LITTLE: dict[str, dict[str, Any]] = {name: {"distil": {"samples": 6}} for name in ("perada", "takfl", "fedmkt")}
LITTLE |= {name: {"statistics": {"samples": 6}} for name in ("potara", "fisher_merging")}
LITTLE["fedl2p"] = {"outer": 1, "draws": 1}
LITTLE["fedmosaic"] = {"blocks": 2}
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
        "model": {"id": half_a_model()},
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


class Stop(BaseException):
    """Ends a run in the middle, as a crash does."""


@dataclass
class Memo:
    """A journal that remembers, and that can stop a run after so many completed messages."""

    spool: Path = Path("unset")
    point: Checkpoint | None = None
    stop_after: int | None = None
    updates: list[tuple[Tick, Update]] = field(default_factory=list)
    scores: list[tuple[Tick, Score]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    outbound: Outbound = field(default_factory=Outbound)
    completed_points: list[Checkpoint] = field(default_factory=list)
    forced: int = 0

    def resume(self) -> Checkpoint | None:
        return self.point

    def rounds_from_cache(self, stage: int, server: Payload) -> Iterator[Checkpoint]:
        return iter(())

    def accepted(self, at: Tick, update: Update) -> None:
        self.outbound.note(update, at.stage, Wire())

    def trained(self, at: Tick, update: Update) -> None:
        self.updates.append((at, update))

    def scored(self, at: Tick, score: Score) -> None:
        self.scores.append((at, score))
        self.outbound.note(score, at.stage, Wire())

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.outbound.note(failure, failure.stage, Wire())

    def served(self, stage: str, round_: int, cost: Cost) -> None:
        pass

    def event(self, event: dict[str, Any]) -> None:
        pass

    def completed(self, point: Checkpoint, force: bool) -> None:
        self.completed_points.append(point)
        self.forced += force
        if self.stop_after is not None and len(self.completed_points) >= self.stop_after:
            raise Stop


class BackToFront(LocalEngine):
    """Visits the clients, and so answers, in the opposite order."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return super().exchange({client: requests[client] for client in reversed(list(requests))}, at)


class Unmeasured(LocalEngine):
    """Asks nobody for a score, for tests that look at none."""

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        return iter(())


@dataclass
class Outcome:
    server: Payload
    store: ClientStore
    engine: LocalEngine
    journal: Memo

    def memories(self) -> dict[str, Payload | None]:
        return {info.id: self.store.load(info.id) for info in self.engine.clients()}

    def prints(self) -> dict[str, Any]:
        """Fingerprints of everything a run leaves behind."""
        clients = {
            client: None if memory is None else (fingerprint_with_slots(memory), memory.scalars)
            for client, memory in self.memories().items()
        }
        return {"server": (fingerprint_with_slots(self.server), self.server.scalars), "clients": clients}


def fingerprint_with_slots(payload: Payload) -> dict[str, str]:
    return {key: fingerprint({key: tensor}) for key, tensor in payload.arrays.items()}


Play = Callable[..., Outcome]


@pytest.fixture
def play(host: Host, tmp_path: Path) -> Play:
    """Run a method (by name, or a method) and return all that it left."""

    def run(
        method: str | Method,
        *,
        rounds: int = ROUNDS,
        seed: int = 0,
        every: int = 0,
        spool_bytes: int = 2**28,
        serialise: bool = False,
        wire: Wire = Wire(),  # noqa: B008 frozen
        engine_class: type[LocalEngine] = LocalEngine,
        clients: int | None = None,
        cohort: int | None = None,
        journal: Memo | None = None,
        store: ClientStore | None = None,
        min_replies: int | float = 0.5,
        guard: GuardSettings = GuardSettings(),  # noqa: B008 frozen
        max_weight: float | None = None,
        clients_plan: ClientPlan | None = None,
        secure_sums: SecureSums | None = None,
        asynchronous: Asynchronous | None = None,
        clock: dict[str, Any] | None = None,
    ) -> Outcome:
        made = built(method) if isinstance(method, str) else method
        site = host.install(made)
        kept = store or ClientStore(None)
        memo = journal or Memo()
        sums = None if secure_sums is None else SecureDesk(secure_sums, made, {})
        engine = engine_class(made, host.infos[:clients], host.site, kept, wire=wire, serialise=serialise, sums=sums)
        schedule = Schedule(
            rounds,
            seed,
            cohort,
            min_replies,
            every,
            guard=guard,
            max_weight=max_weight,
            secure_sums=secure_sums,
            spool_bytes=spool_bytes,
            clients=clients_plan,
            asynchronous=asynchronous,
        )
        memo.spool, asked = tmp_path / "spool", engine
        if asynchronous is not None:
            stages = [stage.name for stage in stages_of(made) if stage.federated]
            asked = SimulatedEngine(engine, asynchronous, seed, stages, {} if clock is None else clock)
        return Outcome(federate(made, asked, site, schedule, memo), kept, engine, memo)

    return run


Once = Callable[..., Outcome]


@pytest.fixture(scope="session")
def _played() -> dict[tuple[str, int | None], Outcome]:
    return {}


@pytest.fixture
def once(play: Play, _played: dict[tuple[str, int | None], Outcome]) -> Once:
    """What a plain run of a method left, scored after every round; trained only once for all tests that look at it
    and change nothing of it."""

    def run(name: str, *, clients: int | None = None) -> Outcome:
        if (name, clients) not in _played:
            _played[name, clients] = play(name, every=1, clients=clients)
        return _played[name, clients]

    return run


def stages_of(method: Method) -> list[Stage]:
    return run_stages(method)
