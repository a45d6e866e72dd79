"""Plays a registered method on three clients of a tiny vision transformer, and lays open all that it leaves.

A batch is all examples of a client, so that what is expected can be computed without drawing batches. Clients `a`, `b`
and `c` have 6, 9 and 12 examples, and learn for `reference.STEPS` steps a round at `reference.RATE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from befit.core.values import ClientInfo, State, Tick
from befit.protocol.federate import final_download
from befit.protocol.registry import build_method
from befit.protocol.schedule import resolved_stages
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Backbone, Site
from tests.federation import Clients
from tests.golden.reference import RATE, STEPS, Arrays
from tests.tiny import tiny_examples, tiny_task

CLIENTS = "abc"
EXAMPLES = [6.0, 9.0, 12.0]
PUBLIC = 8
LORA = {"rank": 2, "alpha": 4.0}  # a scale of 2


class Played(Clients):
    """A finished run of `rounds` rounds.

    method  its block of a configuration
    rows    examples of every client, in the place of 6, 9 and 12
    budget  changes to the settings of training
    """

    def __init__(self, method: Mapping[str, Any], rounds: int = 2, rows: int | None = None, **budget: Any) -> None:
        super().__init__(build_method(method), rows=rows)
        self.budget = TrainSettings(**{"max_steps": STEPS, "batch_size": 64, "lr": RATE, **budget})
        self.rounds = rounds
        self.backbone = Backbone("model", "tiny", self.model, tiny_task("vit"))
        examples = tiny_examples("vit", PUBLIC, 99)
        self.server_site = replace(
            self.server_site,
            backbones={"tiny": self.backbone},
            public=lambda family: examples,
            budget=self.budget,
            common=self.backbone,
        )
        batch = examples.batch(range(PUBLIC))
        self.public = batch["pixel_values"], batch["labels"]
        self.server = self.run(rounds)
        assert not self.journal.failures

    def site(self, info: ClientInfo) -> Site:
        site = super().site(info)
        assert self.server_site.public is not None
        examples = self.server_site.public("tiny")
        return replace(
            site,
            budget=self.budget,
            common=self.backbone,
            common_examples=site.examples,
            public=lambda: examples,
        )

    def data(self, client: str, split: str = "train") -> tuple[Tensor, Tensor]:
        """Pixels and labels of all examples of a client."""
        examples = self.sites[client].examples(split)
        batch = examples.batch(range(len(examples)))
        return batch["pixel_values"], batch["labels"]

    def start(self, slot: str) -> Arrays:
        """The initial values of one slot."""
        return of(self.initial, slot)

    def sent(self, round_: int, client: str, slot: str = "shared", stage: str = "federate") -> Arrays:
        return of(self.uploads(round_, stage)[client], slot)

    def kept(self, client: str, slot: str) -> Arrays:
        """What a client has in its memory under one slot."""
        return of(self.memory(client).arrays, slot)

    def answers(self, client: str) -> Tensor:
        """The logits of the model that a client would use now, for its test examples."""
        last = resolved_stages(self.method, self.rounds)[-1]
        at = Tick(last.name, last.rounds or 0, last.rounds or 0, 0)
        info = self.sites[client].info
        deployed = self.engine.deployment(client, final_download(self.method, self.server, info, at), at)
        site = self.fresh(client)
        site.model.load(deployed.arrays)
        pixels, _ = self.data(client, "test")
        with torch.no_grad(), site.model.active(*deployed.slots, mixer=deployed.mixer):
            return site.logits({"pixel_values": pixels})


def of(arrays: State, slot: str) -> Arrays:
    """The arrays of one slot, without its name."""
    return {key.partition("/")[2]: value for key, value in arrays.items() if key.partition("/")[0] == slot}
