"""A federation of tiny clients on one backbone, run by the real kernels with everything laid open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from befit.adapters.keys import EVERYTHING
from befit.adapters.model import AdaptedModel
from befit.core.values import ClientInfo, Cost, Failure, Payload, Score, Tick, Update
from befit.core.wire_form import Wire
from befit.protocol.engine import Checkpoint
from befit.protocol.federate import federate
from befit.protocol.method import Method
from befit.protocol.schedule import Schedule
from befit.protocol.settings import TrainSettings
from befit.protocol.site import ServerSite, Site
from befit.protocol.store import ClientStore
from befit.runs.local import LocalEngine
from befit.runs.outbound import Outbound
from tests.tiny import make_site, tiny_model

BUDGET = TrainSettings(max_steps=3, batch_size=4, lr=2e-2)


@dataclass
class Notes:
    """A journal that writes down what the kernel tells it."""

    spool: Path = Path("unused")
    updates: list[tuple[Tick, Update]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    outbound: Outbound = field(default_factory=Outbound)

    def resume(self) -> Checkpoint | None:
        return None

    def rounds_from_cache(self, stage: int, server: Payload) -> Iterator[Checkpoint]:
        return iter(())

    def accepted(self, at: Tick, update: Update) -> None:
        self.outbound.note(update, at.stage, Wire())

    def trained(self, at: Tick, update: Update) -> None:
        self.updates.append((at, update))

    def scored(self, at: Tick, score: Score) -> None:
        pass

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def served(self, stage: str, round_: int, cost: Cost) -> None:
        pass

    def event(self, event: dict[str, Any]) -> None:
        pass

    def completed(self, point: Checkpoint, force: bool) -> None:
        pass


class Clients:
    """Clients a, b, c, … with 6, 9, 12, … examples of their own, or `rows` each, on one model."""

    def __init__(
        self, method: Method, count: int = 3, kind: str = "vit", seed: int = 0, rows: int | None = None
    ) -> None:
        self.method = method
        self.model = AdaptedModel(tiny_model(kind), head=kind in ("vit", "bert"))
        names = [chr(ord("a") + index) for index in range(count)]
        self.sites = {
            name: make_site(
                kind, rows=rows or 6 + 3 * index, client=name, data_seed=index, model=self.model, budget=BUDGET
            )
            for index, name in enumerate(names)
        }
        self.model.install(method.layout, seed)
        self.model.reset()
        self.initial = self.model.dump(EVERYTHING)
        self.infos = tuple(site.info for site in self.sites.values())
        self.server_site = ServerSite({"tiny": self.initial}, self.infos)
        self.store, self.notes = ClientStore(None), Notes()
        self.engine = LocalEngine(method, self.infos, self.site, self.store)

    def site(self, info: ClientInfo) -> Site:
        return replace(self.sites[info.id], report={})

    def run(self, rounds: int = 2, seed: int = 0, cohort: int | None = None, min_replies: int | float = 1.0) -> Payload:
        schedule = Schedule(rounds, seed, cohort, min_replies)
        return federate(self.method, self.engine, self.server_site, schedule, self.notes)

    def memory(self, client: str) -> Payload:
        memory = self.store.load(client)
        assert memory is not None
        return memory

    def fresh(self, client: str) -> Site:
        """The client's site with a bare model, as a kernel hands it to a method."""
        self.model.reset()
        return self.site(self.sites[client].info)

    def uploads(self, round_: int, stage: str = "federate") -> dict[str, dict[str, torch.Tensor]]:
        return {
            u.client.id: u.payload.arrays for at, u in self.notes.updates if (at.stage, at.round) == (stage, round_)
        }
