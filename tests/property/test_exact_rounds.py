"""What all clients hold after a round is the weighted mean of their updates, in every method that folds the rest in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from befit.adapters.forms import ModuleShape
from befit.adapters.layout import ModelShapes
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.recipe.folded import Folded
from befit.methods.parts.recipe.ranked import to_rank
from befit.protocol.registry import build_method, method_names
from befit.protocol.site import ServerSite
from tests.conftest import federated

SHAPES = ModelShapes({"block.00.q_proj": ModuleShape(9, 7), "block.00.v_proj": ModuleShape(5, 12)})
RANK = 2
EXACT = [name for name in method_names() if isinstance(made := build_method(name), Folded) and not made.own]


def held(method: Folded, server: Payload, newcomer: ClientInfo, at: Tick) -> dict[str, torch.Tensor]:
    """What a client that was never there would add to each module's weight."""
    received = federated(method).dispatch(server, newcomer, at)
    scale, total = method.layout.slot("shared").scale, dict[str, torch.Tensor]()
    plain = {key: value for key, value in received.arrays.items() if key.startswith("shared/")}
    pairs = [(plain, scale), *((part.arrays, 1.0) for part in received.part("pieces").parts().values())]
    for name in SHAPES.targets:
        total[name] = torch.zeros(SHAPES.targets[name].d_out, SHAPES.targets[name].d_in, dtype=torch.float64)
        for arrays, times in pairs:
            factors = {key.rpartition("/")[2]: value for key, value in arrays.items() if f"/{name}/" in key}
            if factors:
                total[name] += times * factors["B"].double() @ factors["A"].double()
    return total


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_a_round_loses_nothing(name: str, counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks = {"c0": 1} if name == "flora" else None
    method = build_method({"name": name, "rank": RANK, "alpha": 3.0} | ({"ranks": ranks} if ranks else {}))
    assert isinstance(method, Folded)
    start = method.layout.initial(SHAPES, 0)
    clients = [ClientInfo(f"c{index}", "x", count) for index, count in enumerate(counts)]
    site, newcomer = ServerSite({"x": start}, tuple(clients)), ClientInfo("new", "x", 1)
    server, scale = method.server_init(site), method.layout.slot("shared").scale
    for round_ in (1, 2):
        at = Tick("federate", round_, 2, 0)
        own = {key: value for key, value in start.items() if key.startswith("shared/")}
        updates = []
        for info in clients:
            sent: State = {key: torch.randn(value.shape, generator=generator) for key, value in own.items()}
            sent = to_rank(sent, 1) if ranks and info.id == "c0" else sent
            updates.append(Update(info, Payload(sent)))
        moved = backbone(method, server, at)
        server = federated(method).aggregate(server, updates, site, at)
        for module, found in held(method, server, newcomer, Tick("federate", round_ + 1, 3, 0)).items():
            mean = sum(
                update.client.num_examples
                / sum(counts)
                * scale
                * update.payload.arrays[f"shared/{module}/B"].double()
                @ update.payload.arrays[f"shared/{module}/A"].double()
                for update in updates
            )
            expected = moved[module] + mean
            assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())


def backbone(method: Folded, server: Payload, at: Tick) -> dict[str, torch.Tensor]:
    """The part of it that clients trained beside: without the adapter that they go on from."""
    still = {key: value for key, value in server.arrays.items() if not key.startswith("shared/")}
    return held(method, Payload(still, server.scalars), ClientInfo("new", "x", 1), at)
