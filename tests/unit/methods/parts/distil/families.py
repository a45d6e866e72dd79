"""A federation of five tiny clients on two backbones, with public records, driven verb by verb."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from befit.adapters.keys import EVERYTHING
from befit.adapters.model import AdaptedModel
from befit.core.values import ClientInfo, State, Tick
from befit.protocol.per_family import each_family
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Backbone, ServerSite, Site
from tests.tiny import tiny_examples, tiny_task
from tests.unit.methods.parts.mosaic.test_mosaic import FAMILIES, LARGE, SMALL, Federation, llama

SGD = TrainSettings(max_steps=2, batch_size=4, lr=0.1, optimiser="sgd", momentum=0.0, weight_decay=0.0)
RECORDS = 8


@dataclass
class Public(Federation):
    """Everybody has the same public records, and plain SGD."""

    budget: TrainSettings = SGD

    def site(self, client: str) -> Site:
        public, family = self.server_site.public, FAMILIES[client]
        assert public is not None
        return replace(super().site(client), budget=self.budget, public=lambda: public(family))

    def tick(self, number: int) -> Tick:
        return Tick("federate", number, 3, 0)


def started(method: str, budget: TrainSettings = SGD, families: str = SMALL + LARGE, **arguments: Any) -> Public:
    """The federation before its first round; `families` leaves out the clients of another backbone."""
    made = each_family(build_method({"name": method, "rank": 2, **arguments}), len(families) // len(SMALL))
    backbones = {
        key: Backbone(key, key.ljust(64, "0"), AdaptedModel(llama(key)), tiny_task("llama"))
        for key in (SMALL, LARGE)
        if key in families
    }
    starts: dict[str, State] = {}
    for key, one in backbones.items():
        one.model.install(made.layout, 0)
        starts[key] = one.model.dump(EVERYTHING)
    infos = tuple(ClientInfo(client, family, 12) for client, family in FAMILIES.items() if family in starts)
    public = tiny_examples("llama", RECORDS, 99)
    site = ServerSite(starts, infos, backbones, lambda _: public, budget)
    return Public(made, backbones, site, {}, made.server_init(site), budget)
