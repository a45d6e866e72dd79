"""Clients of different ranks in one adapter: HETLoRA and FlexLoRA (Cho et al. 2024; Bai et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from befit.adapters.keys import select, slot, split
from befit.adapters.layout import lora
from befit.adapters.lowrank import spectrum
from befit.core.errors import ConfigError
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.merge.merge import MergeContext
from befit.methods.hetlora import RankDecay, SelfPruning, by_norm
from befit.methods.parts.recipe.ranked import Ranked, to_rank
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.protocol.site import ServerSite
from tests.tiny import assert_near, assert_same, federated, make_site, random_state

AT = Tick("federate", 1, 2, 0)


def ranked(name: str, **settings: object) -> Ranked:
    made = build_method({"name": name, "rank": 4, **settings})
    assert isinstance(made, Ranked)
    return made


def uploads(ranks: Mapping[str, int], examples: Mapping[str, int] | None = None) -> list[Update]:
    model = make_site("llama", lora(4, 16.0)).model
    return [
        Update(
            ClientInfo(client, "tiny", (examples or {}).get(client, 1)),
            Payload(to_rank(random_state(model, seed), rank)),
        )
        for seed, (client, rank) in enumerate(ranks.items())
    ]


def aggregated(method: Ranked, updates: list[Update]) -> State:
    before = updates[0].payload.arrays
    return federated(method).aggregate(Payload(before), updates, ServerSite({}, ()), AT).arrays


def products(state: State) -> dict[str, torch.Tensor]:
    return {
        split(key)[1]: state[f"{key[:-1]}B"].double() @ A.double() for key, A in state.items() if split(key)[2] == "A"
    }


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_ranks_beyond_a_clients_own_stay_zero_and_the_others_learn(name: str) -> None:
    method = ranked(name, ranks={"client-01": 2})
    site = make_site("llama", method.layout)
    start = Payload(select(site.model.dump(slot("shared")), slot("shared")))
    memory = method.client_init(site)
    assert memory.scalars == {"rank": 2}
    _, reply = finish(federated(method).client_update(memory, start, site, AT))
    for key, value in reply.arrays.items():
        kept, gone = (value[:2], value[2:]) if split(key)[2] == "A" else (value[:, :2], value[:, 2:])
        assert kept.any() and not gone.any(), key
    small = make_site("llama", lora(2, 8.0))  # the same scale
    small.model.load({key: value[:2] if split(key)[2] == "A" else value[:, :2] for key, value in start.arrays.items()})
    alone = finish(
        federated(ranked("flexlora")).client_update(
            Payload({}, {"rank": 2}), Payload(small.model.dump(slot("shared"))), small, AT
        )
    )
    if name == "flexlora":  # without HETLoRA's decay: as an adapter of rank 2 would train
        cut = {key: value[:2] if split(key)[2] == "A" else value[:, :2] for key, value in reply.arrays.items()}
        assert_near(cut, alone[1].arrays, rtol=1e-4, atol=1e-6)


def test_cutting_a_padded_adapter_gives_it_back() -> None:
    (update,) = uploads({"a": 3})
    assert_same(to_rank(update.payload.arrays, 3), update.payload.arrays)
    assert not any(torch.equal(t, update.payload.arrays[k]) for k, t in to_rank(update.payload.arrays, 2).items())


def test_flexlora_with_one_client_gives_its_update_back() -> None:
    updates = uploads({"a": 4})
    found = products(aggregated(ranked("flexlora"), updates))
    for name, product in products(updates[0].payload.arrays).items():
        torch.testing.assert_close(found[name], product, rtol=0, atol=1e-5)


def test_flexlora_gives_every_rank_the_best_approximation_of_the_averaged_update() -> None:
    """Weights 3/4 and 1/4 by examples; the first r ranks are the leading r singular directions of the average."""
    updates = uploads({"a": 4, "b": 2}, {"a": 3, "b": 1})
    made = aggregated(ranked("flexlora"), updates)
    parts = [products(update.payload.arrays) for update in updates]
    for name in parts[0]:
        U, S, Vh = torch.linalg.svd(0.75 * parts[0][name] + 0.25 * parts[1][name])
        for rank in (4, 2, 1):
            best = U[:, :rank] * S[:rank] @ Vh[:rank]
            torch.testing.assert_close(products(to_rank(made, rank))[name], best, rtol=0, atol=1e-5)
        A = made[f"shared/{name}/A"]
        torch.testing.assert_close(A @ A.T, torch.eye(4), rtol=0, atol=1e-5)  # B holds the singular values


def test_flexlora_with_uniform_weights_counts_everybody_alike_whatever_they_hold() -> None:
    """Three examples against one change nothing; by examples it would be 3/4 and 1/4."""
    updates = uploads({"a": 2, "b": 2}, {"a": 3, "b": 1})  # of rank 4 together: nothing is cut off
    found = products(aggregated(ranked("flexlora", weights="uniform"), updates))
    first, second = (products(update.payload.arrays) for update in updates)
    for name, product in found.items():
        torch.testing.assert_close(product, (first[name] + second[name]) / 2, rtol=0, atol=1e-5)


def test_hetlora_weighs_padded_factors_by_the_norm_of_the_whole_update() -> None:
    updates = uploads({"a": 4, "b": 2})
    norms = [
        sum(float(product.square().sum()) for product in products(update.payload.arrays).values()) ** 0.5
        for update in updates
    ]
    found = by_norm(updates, MergeContext())
    share = norms[0] / sum(norms)
    for key, value in found.items():
        expected = share * updates[0].payload.arrays[key] + (1 - share) * updates[1].payload.arrays[key]
        torch.testing.assert_close(value, expected)
    assert 0.55 < share < 0.95


def test_without_decay_and_pruning_and_weighed_by_examples_it_is_the_mean_of_padded_factors() -> None:
    plain = ranked("hetlora", weights="examples", decay=0.0, prune=False)
    updates = uploads({"a": 1, "b": 4}, {"a": 10, "b": 30})
    a, b = (update.payload.arrays for update in updates)
    assert_near(aggregated(plain, updates), {key: 0.25 * a[key] + 0.75 * b[key] for key in a}, 1e-6)


def test_hetlora_counts_everybody_alike_before_anybody_has_learnt_anything() -> None:
    updates = [
        Update(one.client, Payload({k: t * (split(k)[2] == "A") for k, t in one.payload.arrays.items()}))
        for one in uploads({"a": 4, "b": 4})
    ]
    for key, value in by_norm(updates, MergeContext()).items():
        torch.testing.assert_close(value, (updates[0].payload.arrays[key] + updates[1].payload.arrays[key]) / 2)


def test_the_decay_is_the_product_of_the_norms_of_the_last_ranks() -> None:
    """Rows from 2 on of A all 1 (2 x 16 entries) and of B all 2: ||A|| = sqrt(32), ||B|| = 2 sqrt(2 d_out), twice for
    the two query projections (d_out 16) and the value projections (8)."""
    site = make_site("llama", lora(4, 16.0))
    site.model.load(
        {key: torch.full(spec.shape, 1.0 if split(key)[2] == "A" else 2.0) for key, spec in site.model.specs.items()}
    )
    expected = 0.5 * 2 * 32**0.5 * 2 * ((2 * 16) ** 0.5 + (2 * 8) ** 0.5)
    penalty = RankDecay(2, 4, 0.5).bind(site)({}, torch.zeros(()))
    assert float(penalty) == pytest.approx(expected, rel=1e-5)


def test_a_client_gives_up_its_last_ranks_when_they_have_shrunk_and_never_the_first() -> None:
    (update,) = uploads({"a": 4})
    state = update.payload.arrays
    tail = {key: to_rank({key: value}, 3)[key] * 0.5 + value * 0.5 for key, value in state.items()}
    rule = SelfPruning(1e-3, 0.99, True)
    assert rule.next_rank(4, state, tail) == 3
    assert rule.next_rank(4, tail, state) == 4
    assert SelfPruning(1e-3, 0.99, False).next_rank(4, state, tail) == 4
    assert rule.next_rank(1, state, tail) == 1
    assert SelfPruning(1e-3, 0.1, True).next_rank(4, state, to_rank(state, 1)) == 1
    assert SelfPruning(1e-3, 0.58, True).terms(50) == (RankDecay(29, 50, 1e-3),)  # in binary 28.99... are kept


def test_a_client_deploys_the_average_at_its_own_rank() -> None:
    method = ranked("flexlora", ranks={"client-0*": 3})
    site = make_site("llama", method.layout)
    (update,) = uploads({"a": 4})
    deployed = method.deploy(method.client_init(site), Payload(update.payload.arrays), site)
    assert_same(deployed.arrays, to_rank(update.payload.arrays, 3))
    assert all(
        int((spectrum((deployed.arrays[f"{key[:-1]}B"], A)).sigma > 1e-6).sum()) == 3
        for key, A in deployed.arrays.items()
        if split(key)[2] == "A"
    )


@pytest.mark.parametrize("name", ["hetlora", "flexlora"])
def test_ranks_that_nobody_can_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="phone-1 has rank 5, which must be from 1 to rank, 4"):
        ranked(name, ranks={"phone-1": 5})
    with pytest.raises(ConfigError, match="phone-1 has rank 0"):
        ranked(name, ranks={"phone-1": 0})


def test_every_wrong_option_of_hetlora_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ranked("hetlora", decay=-1.0, gamma=1.0)
    assert [problem.split(":")[0].rpartition(".")[2] for problem in caught.value.problems] == ["decay", "gamma"]


def test_a_rank_that_no_client_of_a_round_has_stays_as_it_is_in_fedilora() -> None:
    method = ranked("fedilora", ranks={"small-*": 2})
    start = random_state(make_site("llama", lora(4, 16.0)).model, 9)
    merged = method.merge(uploads({"small-0": 2, "small-1": 2}), MergeContext(start, round=1))
    A, B = merged["shared/block.00.q_proj/A"], merged["shared/block.00.q_proj/B"]
    assert torch.equal(A[2:], start["shared/block.00.q_proj/A"][2:]) and bool(A.isfinite().all())
    assert torch.equal(B[:, 2:], start["shared/block.00.q_proj/B"][:, 2:]) and B.is_contiguous()


@pytest.mark.parametrize("name", ["hetlora", "flexlora", "fedilora"])
def test_a_client_of_small_rank_is_sent_what_it_starts_from(name: str) -> None:
    """What it would cut away is no part of its update then, by which the guard judges and the wire leaves out."""
    method = ranked(name, ranks={"phone-*": 1})
    model = make_site("llama", lora(4, 16.0)).model
    server = Payload(random_state(model))
    phone, other = (ClientInfo(client, "tiny", 1) for client in ("phone-1", "server-1"))
    sent = federated(method).dispatch(server, phone, AT)
    assert_same(sent.arrays, to_rank(server.arrays, 1))
    assert_same(federated(method).dispatch(server, other, AT).arrays, dict(server.arrays))
