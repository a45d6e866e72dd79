"""Clients of two backbones for FedMosaic and RELA, which adapt every linear module."""

from collections.abc import Mapping
from typing import Any

from tests.federation import FAMILIES, Families


def start(name: str = "fedmosaic", families: Mapping[str, str] = FAMILIES, **settings: Any) -> Families:
    usual = {"rank": 4, "blocks": 2} if name == "fedmosaic" else {"rank": 4}
    return Families({"name": name, **usual, **settings}, families, targets="all", public=40)
