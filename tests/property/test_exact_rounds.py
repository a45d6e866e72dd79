"""What all clients hold after a round is the weighted mean of their updates, in every method that folds the rest in."""

from __future__ import annotations

from typing import Any

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
from tests.tiny import federated

SHAPES = ModelShapes({"block.00.q_proj": ModuleShape(9, 7), "block.00.v_proj": ModuleShape(5, 12)})
RANK = 2
# ReLoRA merging folds updates in as products in the space that it is told.
OPTIONS: dict[str, dict[str, Any]] = {"flora": {"ranks": {"c0": 1}}, "relora": {"merge": {"space": "delta"}}}
EXACT = [name for name in method_names() if isinstance(build_method(name), Folded)]


def held(
    method: Folded, server: Payload, client: ClientInfo, at: Tick, memory: Payload | None = None
) -> dict[str, torch.Tensor]:
    """What a client with this memory would add to each module's weight before it trains."""
    received = federated(method).dispatch(server, client, at)
    scale, total = method.layout.slot(method.trained).scale, dict[str, torch.Tensor]()
    plain = {key: value for key, value in received.arrays.items() if key.startswith(f"{method.trained}/")}
    pieces = (memory or Payload()).part("pieces") | received.part("pieces")
    pairs = [(plain, scale), *((part.arrays, 1.0) for part in pieces.parts().values())]
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
    """For a client that was never there, and for one that takes part in every other round."""
    generator = torch.Generator().manual_seed(seed)
    method = build_method({"name": name, "rank": RANK, "alpha": 3.0, **OPTIONS.get(name, {})})
    assert isinstance(method, Folded)
    start = method.layout.initial(SHAPES, 0)
    clients = [ClientInfo(f"c{index}", "x", count) for index, count in enumerate(counts)]
    site, newcomer = ServerSite({"x": start}, tuple(clients)), ClientInfo("new", "x", 1)
    server, scale = method.server_init(site), method.layout.slot(method.trained).scale
    memory = Payload()
    for round_ in (1, 2, 3, 4):
        at, after = Tick("federate", round_, 4, 0), Tick("federate", round_ + 1, 5, 0)
        own = {key: value for key, value in start.items() if key.startswith(f"{method.trained}/")}
        cohort = clients if round_ % 2 or len(clients) == 1 else clients[1:]
        if cohort[0].id == "c0":
            received = federated(method).dispatch(server, clients[0], at)
            memory = Payload().with_part("pieces", memory.part("pieces") | received.part("pieces"))
        updates = []
        for info in cohort:
            sent: State = {key: torch.randn(value.shape, generator=generator) for key, value in own.items()}
            sent = to_rank(sent, 1) if method.ranks and info.id == "c0" else sent
            updates.append(Update(info, Payload(sent)))
        moved = backbone(method, server, at)
        server = federated(method).aggregate(server, updates, site, at)
        seldom = held(method, server, clients[0], after, memory)
        examples = sum(update.client.num_examples for update in updates)
        for module, never in held(method, server, newcomer, after).items():
            mean = sum(
                update.client.num_examples
                / examples
                * scale
                * update.payload.arrays[f"{method.trained}/{module}/B"].double()
                @ update.payload.arrays[f"{method.trained}/{module}/A"].double()
                for update in updates
            )
            expected = moved[module] + mean
            for found in (never, seldom[module]):
                assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())


def backbone(method: Folded, server: Payload, at: Tick) -> dict[str, torch.Tensor]:
    """The part of it that clients trained beside: without the adapter that they go on from."""
    still = {key: value for key, value in server.arrays.items() if not key.startswith(f"{method.trained}/")}
    return held(method, Payload(still, server.scalars), ClientInfo("new", "x", 1), at)
