"""A method with its clients and its server, everything laid open: run by the kernels, or verb by verb by a test.

`Clients` are tiny and have one backbone, `Families` are tiny and have several; those of a configuration come from its
host (`Federation.on`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from befit.adapters.keys import EVERYTHING
from befit.adapters.model import AdaptedModel
from befit.adapters.state import fingerprint
from befit.core.seeds import derive_seed
from befit.core.values import ClientInfo, Cost, Failure, Payload, Score, State, Tick, Update
from befit.core.wire import from_bytes, to_bytes
from befit.core.wire_form import Wire
from befit.protocol.engine import Checkpoint, Engine
from befit.protocol.federate import federate
from befit.protocol.jobs import finish
from befit.protocol.method import Method
from befit.protocol.per_family import each_family
from befit.protocol.registry import build_method
from befit.protocol.schedule import Schedule
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Backbone, ServerSite, Site
from befit.protocol.store import ClientStore
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.outbound import Outbound
from tests.tiny import federated, make_site, tiny_examples, tiny_model, tiny_task

BUDGET = TrainSettings(max_steps=3, batch_size=4, lr=2e-2)

SMALL, MIDDLE, LARGE = "5" * 16, "3" * 16, "1" * 16
FAMILIES = {"a": SMALL, "b": LARGE, "c": SMALL, "d": LARGE, "e": SMALL}
THREE = {**FAMILIES, "f": MIDDLE, "g": MIDDLE}


class Stop(BaseException):
    """Ends a run in the middle, as a crash does."""


@dataclass
class Memo:
    """A journal that remembers, and that can stop a run after so many completed messages.

    point  where the run goes on from
    wire   the form in which arrays travel
    """

    spool: Path = Path("unset")
    point: Checkpoint | None = None
    stop_after: int | None = None
    wire: Wire = field(default_factory=Wire)
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

    def accepted(self, at: Tick, update: Update, step: bool = False) -> None:
        self.outbound.note(update, at.stage, self.wire)

    def trained(self, at: Tick, update: Update) -> None:
        self.updates.append((at, update))

    def scored(self, at: Tick, score: Score) -> None:
        self.scores.append((at, score))
        self.outbound.note(score, at.stage, Wire())

    def failed(self, failure: Failure, scoring: bool = False) -> None:
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


class AsBytes(LocalEngine):
    """Turns every message into bytes and back, as a network would."""

    def _encode(self, payload: Payload) -> Payload:
        return _as_bytes(super()._encode(payload))

    def answers(self, sent: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return map(_replied, super().answers(sent, at))

    def secure(self, step: str, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return map(_replied, super().secure(step, requests, at))


def _replied(reply: Update | Failure) -> Update | Failure:
    return replace(reply, payload=_as_bytes(reply.payload)) if isinstance(reply, Update) else reply


def _as_bytes(payload: Payload) -> Payload:
    arrays, metadata = from_bytes(to_bytes(payload.arrays, {"scalars": json.dumps(payload.scalars)}))
    return Payload(arrays, json.loads(metadata["scalars"]))


class Federation:
    """A method with the sites of its clients and its server.

    site    makes a client's site
    infos   the clients that take part; None: all that the server knows
    server  the server's memory, once something has been run
    """

    server: Payload

    def __init__(
        self,
        method: Method,
        server_site: ServerSite,
        site: Callable[[ClientInfo], Site],
        infos: Sequence[ClientInfo] | None = None,
        store: ClientStore | None = None,
        journal: Memo | None = None,
        engine_class: type[LocalEngine] = LocalEngine,
        **engine: Any,
    ) -> None:
        self.method, self.server_site, self._site = method, server_site, site
        self.infos = server_site.clients if infos is None else tuple(infos)
        self.store, self.journal = store or ClientStore(None), journal or Memo()
        self.engine = engine_class(method, self.infos, self.site, self.store, **engine)

    @classmethod
    def on(cls, host: Host, method: Method, only: Sequence[str] | None = None, **more: Any) -> Federation:
        """The clients of a configuration, or `only` some of them."""
        infos = [info for info in host.infos if only is None or info.id in only]
        return cls(method, host.install(method), host.site, infos, **more)

    def run(
        self, rounds: int = 2, seed: int = 0, min_replies: int | float = 1.0, engine: Engine | None = None, **when: Any
    ) -> Payload:
        """All stages by the kernels; `engine` stands in for the local one. Returns what the server has then."""
        schedule = Schedule(rounds, seed, min_replies=min_replies, **when)
        self.server = federate(self.method, engine or self.engine, self.server_site, schedule, self.journal)
        return self.server

    def site(self, info: ClientInfo) -> Site:
        return self._site(info)

    def info(self, client: str) -> ClientInfo:
        return next(one for one in self.server_site.clients if one.id == client)

    def fresh(self, client: str) -> Site:
        """The client's site with a bare model, as a kernel hands it to a method."""
        site = self.site(self.info(client))
        site.model.reset()
        return site

    def tick(self, number: int) -> Tick:
        return Tick("federate", number, 3, 0)

    def received(self, client: str, number: int) -> Payload:
        """What the server sends a client in a round."""
        return federated(self.method).dispatch(self.server, self.info(client), self.tick(number))

    def update(self, client: str, number: int) -> tuple[Payload, Update]:
        """One client's reply, and what it received for it."""
        received, before = self.received(client, number), self.store.load(client) or Payload()
        memory, reply = finish(
            federated(self.method).client_update(before, received, self.fresh(client), self.tick(number))
        )
        self.store.save(client, memory)
        return received, Update(self.info(client), reply)

    def aggregate(self, updates: Sequence[Update], number: int) -> None:
        self.server = federated(self.method).aggregate(self.server, updates, self.server_site, self.tick(number))

    def round(self, number: int, clients: str = "abcde") -> dict[str, Update]:
        """A round verb by verb, of these clients."""
        updates = {client: self.update(client, number)[1] for client in clients}
        self.aggregate(list(updates.values()), number)
        return updates

    def memory(self, client: str) -> Payload:
        memory = self.store.load(client)
        assert memory is not None
        return memory

    def memories(self) -> dict[str, Payload | None]:
        return {info.id: self.store.load(info.id) for info in self.infos}

    def uploads(self, round_: int, stage: str = "federate") -> dict[str, State]:
        return {
            u.client.id: u.payload.arrays for at, u in self.journal.updates if (at.stage, at.round) == (stage, round_)
        }

    def prints(self) -> dict[str, Any]:
        """Fingerprints of everything a run leaves behind."""
        clients = {
            client: None if memory is None else (_prints_of(memory), memory.scalars)
            for client, memory in self.memories().items()
        }
        return {"server": (_prints_of(self.server), self.server.scalars), "clients": clients}


def _prints_of(payload: Payload) -> dict[str, str]:
    return {key: fingerprint({key: tensor}) for key, tensor in payload.arrays.items()}


class Clients(Federation):
    """Clients a, b, c, … with 6, 9, 12, … examples of their own, or `rows` each, on one model."""

    def __init__(
        self,
        method: Method,
        count: int = 3,
        kind: str = "vit",
        seed: int = 0,
        rows: int | None = None,
        **more: Any,
    ) -> None:
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
        server = ServerSite({"tiny": self.initial}, tuple(site.info for site in self.sites.values()))
        super().__init__(method, server, lambda info: replace(self.sites[info.id], report={}), **more)


def llama(family: str) -> LlamaForCausalLM:
    """The model of a family; each has a depth and a width of its own."""
    torch.manual_seed(derive_seed("llama", family))
    width, depth = {SMALL: (16, 2), MIDDLE: (20, 4), LARGE: (24, 5)}[family]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width + 8,
        num_hidden_layers=depth,
        vocab_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


class Families(Federation):
    """Clients with 12 examples each and a backbone by family, which have public records; gradients are compared on the
    small one. The server has begun.

    families  the family of each client
    public    how many public records there are
    """

    def __init__(
        self,
        method: Mapping[str, Any],
        families: Mapping[str, str] = FAMILIES,
        targets: str = "auto",
        public: int = 8,
        budget: TrainSettings = TrainSettings(max_steps=2, batch_size=4, lr=1e-2),  # noqa: B008 frozen
    ) -> None:
        keys = dict.fromkeys(families.values())
        made = each_family(build_method(method), len(keys))
        models = {key: AdaptedModel(llama(key), targets) for key in keys}
        self.backbones = {key: Backbone(key, key.ljust(64, "0"), models[key], tiny_task("llama")) for key in keys}
        self.common = self.backbones[SMALL]
        starts: dict[str, State] = {}
        for key, one in self.backbones.items():
            one.model.shapes = replace(one.model.shapes, last=self.common.model.shapes.last)
            one.model.install(made.layout, 0)
            starts[key] = one.model.dump(EVERYTHING)
        records, infos = tiny_examples("llama", public, 99), tuple(ClientInfo(*one, 12) for one in families.items())
        site = ServerSite(starts, infos, self.backbones, lambda key: records, budget, self.common)
        super().__init__(made, site, self._made)
        self.server = made.server_init(site)

    def _made(self, info: ClientInfo) -> Site:
        one, server = self.backbones[info.backbone], self.server_site
        examples = {split: tiny_examples("llama", 12, derive_seed(info.id, split)) for split in ("train", "test")}
        assert server.budget is not None and server.public is not None
        return Site(
            info,
            one.model,
            one.task,
            server.budget,
            examples.__getitem__,
            common=self.common,
            common_examples=examples.__getitem__,
            public=lambda: server.public(info.backbone),
        )
