"""What Potara and Fisher merging refuse to merge: real branches that differ in one thing, which the message names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from befit.adapters.keys import EVERYTHING
from befit.core.errors import IncompatibleAdapters
from befit.core.values import Payload, Tick
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.site import ServerSite, Site
from tests.tiny import make_site

LOCAL, MERGE = Tick("local", 1, 1, 0), Tick("merge", 1, 1, 0)
METHODS = pytest.mark.parametrize("name", ["potara", "fisher_merging"])


@dataclass(frozen=True)
class Setting:
    """How one branch is trained."""

    rank: int = 2
    alpha: float = 6.0
    targets: str | tuple[str, ...] = "auto"
    seed: int = 0
    backbone: str = "0123456789abcdef"

    def client(self, name: str) -> tuple[Site, Any]:
        site = make_site("vit", rows=6, targets=self.targets)
        method = build_method({"name": name, "rank": self.rank, "alpha": self.alpha, "statistics": {"samples": 6}})
        site.model.install(method.layout, self.seed)
        return replace(site, info=replace(site.info, backbone=self.backbone)), method


SAME = Setting()
OTHERS: dict[str, tuple[Setting, str, str]] = {
    "rank": (Setting(rank=3, alpha=9.0), "2", "3"),
    "alpha": (Setting(alpha=7.0), "6", "7"),
    "targets": (Setting(targets=("q_proj",)), "classifier, q_proj, v_proj", "classifier, q_proj"),
    "modules": (
        Setting(targets=("block.00.q_proj", "block.00.v_proj", "block.01.v_proj")),
        r"5 \([0-9a-f]{8}\)",
        r"4 \([0-9a-f]{8}\)",
    ),
    "backbone": (Setting(backbone="fedcba9876543210"), "0123456789abcdef", "fedcba9876543210"),
    "initial values": (Setting(seed=1), "[0-9a-f]{16}", "[0-9a-f]{16}"),
}


def merge(name: str, local: Setting, fed: Setting) -> Payload:
    """A local branch by one setting, and the server's adapter by another, meet at the client."""
    site, method = local.client(name)
    memory, _ = finish(method.plan()[0].exchange.client_update(Payload(), Payload(), site, LOCAL))
    elsewhere, other = fed.client(name)
    starts = {elsewhere.info.backbone: elsewhere.model.dump(EVERYTHING)}
    server = other.server_init(ServerSite(starts, (elsewhere.info,)))
    site.model.reset()
    exchange = method.plan()[-1].exchange
    return finish(exchange.client_update(memory, exchange.dispatch(server, site.info, MERGE), site, MERGE))[0]


@METHODS
def test_branches_of_one_start_are_merged(name: str) -> None:
    assert {key.split("/")[0] for key in merge(name, SAME, SAME).arrays} >= {"merged", "personal"}


@METHODS
@pytest.mark.parametrize("field", OTHERS)
def test_branches_that_differ_are_refused_with_client_field_and_both_values(name: str, field: str) -> None:
    other, mine, theirs = OTHERS[field]
    for local, fed, first, second in ((SAME, other, mine, theirs), (other, SAME, theirs, mine)):
        with pytest.raises(
            IncompatibleAdapters,
            match=rf"^client client-01: .*\b{field} is {first} at the local adapter and {second} at the federated one",
        ):
            merge(name, local, fed)


@pytest.mark.parametrize("field", OTHERS)
def test_fields_that_agree_are_not_blamed(field: str) -> None:
    """Other shapes or places have other initial values, which are named beside the field itself."""
    other, *_ = OTHERS[field]
    with pytest.raises(IncompatibleAdapters) as caught:
        merge("potara", SAME, other)
    blamed = {one for one in OTHERS if f"{one} is " in str(caught.value)}
    beside = {
        "rank": {"alpha", "initial values"},
        "targets": {"modules", "initial values"},
        "modules": {"initial values"},
    }.get(field, set())
    assert blamed == {field} | beside


@METHODS
def test_a_federated_adapter_without_a_start_is_refused(name: str) -> None:
    site, method = SAME.client(name)
    exchange = method.plan()[-1].exchange
    memory = Payload({}, {"initial": "rank=2; initial values=00"})
    with pytest.raises(IncompatibleAdapters, match=r"client-01: rank is 2 .* unknown .*; initial values is 00 "):
        finish(exchange.client_update(memory, Payload(), site, MERGE))
    with pytest.raises(IncompatibleAdapters, match="client client-01: an adapter does not say where it started"):
        finish(exchange.client_update(Payload(), Payload(), site, MERGE))


@METHODS
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("slot", ["shared", "personal"])
def test_statistics_that_are_not_finite_stop_the_client_by_name(name: str, number: float, slot: str) -> None:
    """One entry of one B of one of the adapters is no number: all gradients through it are none either."""
    site, method = SAME.client(name)
    state = {key: torch.randn(spec.shape) for key, spec in site.model.specs.items()}
    state[f"{slot}/block.01.v_proj/B"][0, 0] = number
    same = {"initial": "the same"}
    halves = [
        Payload({k: t for k, t in state.items() if k.startswith(f"{own}/")}, dict(same))
        for own in ("personal", "shared")
    ]
    with pytest.raises(FloatingPointError, match=r"client client-01: .*not finite"):
        finish(method.plan()[-1].exchange.client_update(*halves, site, MERGE))
