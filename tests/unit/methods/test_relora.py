"""ReLoRA merging: adapters start afresh, and clients get all that was merged since they took part last."""

from __future__ import annotations

import pytest
import torch

from befit.core.errors import ConfigError
from befit.core.values import Tick
from befit.merge.merge import Merge
from befit.methods.relora import relora as Relora
from befit.protocol.federate import final_download
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from tests.federation import Clients
from tests.tiny import federated


def test_adapters_start_at_zero_and_everybody_draws_the_same_anew_in_every_round() -> None:
    clients = Clients(Relora(rank=2, alpha=4.0))
    clients.run(3)
    starts = []
    for number in (1, 2, 2):
        site = clients.fresh("b")
        stopped = Tick("federate", number, 3, 0)
        site.budget = type(site.budget)(max_steps=1, lr=1e-30, batch_size=4)
        memory, _ = finish(
            federated(clients.method).client_update(
                clients.memory("b"),
                federated(clients.method).dispatch(clients.run(1), site.info, stopped),
                site,
                stopped,
            )
        )
        starts.append({key: value for key, value in memory.arrays.items() if key.endswith("/A") and "personal" in key})
        assert all(
            float(v.abs().max()) < 1e-20
            for k, v in memory.arrays.items()
            if k.startswith("personal/") and k.endswith("/B")
        )
    key = next(iter(starts[0]))
    assert not torch.equal(starts[0][key], starts[1][key]) and torch.equal(starts[1][key], starts[2][key])


def test_a_client_that_missed_rounds_gets_all_of_them_and_then_only_what_is_new() -> None:
    clients = Clients(Relora(rank=2, alpha=4.0))
    server = clients.run(3, cohort=1)
    took_part = {
        info.id: max((at.round for at, u in clients.journal.updates if u.client.id == info.id), default=0)
        for info in clients.infos
    }
    assert len(set(took_part.values())) > 1
    for info in clients.infos:
        received = federated(clients.method).dispatch(server, info, Tick("federate", 4, 4, 0))
        numbers = {int(number) for number in received.part("pieces").parts()}
        missing_from = max(took_part[info.id], 1)  # who trained in round t has what was merged before it
        assert numbers == set(range(missing_from, 4))


def test_the_largest_rank_of_a_round_is_kept() -> None:
    whole, cut = (
        Clients(Relora(rank=2, alpha=4.0, merge=Merge(space="knots"), relora_rank=limit)).run(1) for limit in (None, 3)
    )
    assert {value.shape[0] for key, value in whole.arrays.items() if key.endswith("/A")} == {6}
    assert {value.shape[0] for key, value in cut.arrays.items() if key.endswith("/A")} == {3}
    for key, A in whole.arrays.items():
        if key.endswith("/A"):
            delta = whole.arrays[key[:-1] + "B"] @ A
            u, s, v = torch.linalg.svd(delta)
            best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
            torch.testing.assert_close(cut.arrays[key[:-1] + "B"] @ cut.arrays[key], best, rtol=1e-3, atol=1e-6)


def test_rebuilding_the_backbone_twice_is_bit_identical_and_deploys_what_was_trained() -> None:
    clients = Clients(Relora(rank=2, alpha=4.0))
    server = clients.run(2)
    at = Tick("federate", 2, 2, 0)
    received = final_download(clients.method, server, clients.infos[0], at)
    first, second = (clients.engine.deployment("a", received, at).arrays for _ in range(2))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    sent = clients.uploads(2)["a"]
    assert all(torch.equal(first[key], value) for key, value in sent.items())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"relora_rank": 0, "merge": Merge(space="knots")}, "relora_rank: must be positive"),
        ({"relora_rank": 4}, "relora_rank: the space factors gives"),
        ({"merge": Merge(space="knots", rank=4)}, "merge.rank: nothing is cut"),
        ({"merge": Merge(space="knots", split="B")}, "merge.split: nothing becomes an adapter"),
        ({"merge": Merge(space="delta", tolerance=1e-3)}, "merge.tolerance: the space delta"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_method({"name": "relora", **arguments})
