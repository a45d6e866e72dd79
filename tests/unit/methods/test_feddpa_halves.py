"""FedDPA as in snumprlab/fedmosaic, federated_methods/feddpa.py: what is used, and at which weights."""

from __future__ import annotations

import pytest
import torch

from befit.adapters.keys import slot
from befit.adapters.mixers import Weighted
from befit.core.errors import ConfigError
from befit.core.values import State, Tick
from befit.protocol.federate import final_download
from befit.protocol.registry import build_method
from befit.train.passes import Pass
from tests.federation import Clients
from tests.tiny import make_site, random_state

HALVES = {"name": "feddpa", "variant": "halves", "rank": 2, "alpha": 4.0}
SHARED = Pass(slot("shared"), ("shared",), name="shared")
BESIDE = Pass(
    slot("personal"), ("shared", "personal"), mixer=Weighted((0.5, 0.5)), name="personal", keep_optimiser=True
)


def test_both_are_used_at_fixed_weights_and_no_hidden_states_are_kept() -> None:
    clients = Clients(build_method({**HALVES, "train_weight": 0.25}))
    server = clients.run(2)
    assert [stage.name for stage in clients.method.plan()] == ["federate"]
    at = Tick("federate", 2, 2, 0)
    deployed = clients.engine.deployment("a", final_download(clients.method, server, clients.infos[0], at), at)
    assert (deployed.slots, deployed.mixer) == (("shared", "personal"), Weighted((0.75, 0.25)))
    assert {key.partition("/")[0] for key in deployed.arrays} == {"shared", "personal"}


def test_the_mixture_in_training_is_half_of_each_update() -> None:
    """`W x + (h_w + h_v) / 2`, from dense matrices."""
    site = make_site("llama", build_method(HALVES).layout, targets="all")
    state: State = random_state(site.model)
    site.model.load(state)
    layer = site.model.layers["block.01.down_proj"]
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    names = [f"{name}/block.01.down_proj" for name in ("shared", "personal")]
    update = sum(2.0 * state[f"{name}/B"] @ state[f"{name}/A"] for name in names)
    with site.model.active("shared", "personal", mixer=BESIDE.mixer), torch.no_grad():
        torch.testing.assert_close(layer(x), x @ (layer.weight + update / 2).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"variant": "halves", "rounds_local": 2}, "rounds_local: has no meaning for variant halves"),
        ({"variant": "T", "legacy_average_personal": True}, "legacy_average_personal: has no meaning for variant T"),
    ],
)
def test_options_of_another_variant_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_method({"name": "feddpa", **settings})
