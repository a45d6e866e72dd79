"""Clients of two backbones, or of one, for methods that distil on public records."""

from collections.abc import Mapping
from typing import Any

from befit.protocol.settings import TrainSettings
from tests.federation import FAMILIES, SMALL, Families

SGD = TrainSettings(max_steps=2, batch_size=4, lr=0.1, optimiser="sgd", momentum=0.0, weight_decay=0.0)
RECORDS = 8
ALIKE = {client: family for client, family in FAMILIES.items() if family == SMALL}


def started(method: str, families: Mapping[str, str] = FAMILIES, **arguments: Any) -> Families:
    return Families({"name": method, "rank": 2, **arguments}, families, public=RECORDS, budget=SGD)
