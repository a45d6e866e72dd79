"""Rounds that lose nothing of the mean update: FLoRA, FedEx-LoRA, FedMomentum.

Every round by dense weights, `torch.optim` and a loop; what moves into the backbone is a dense matrix here.
"""

from __future__ import annotations

import torch

from befit.adapters.layout import initial_values
from befit.core.seeds import derive_seed
from befit.core.values import TensorSpec
from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played, of
from tests.golden.reference import (
    HEAD,
    MODULES,
    SCALE,
    Arrays,
    assert_near,
    change,
    logits,
    loss,
    mean,
    only,
    plus,
    trained,
)
from tests.golden.test_ranks import RANKS, cut, padded

CHECKED = {"flora": "by hand", "fedex_lora": "by hand", "fedmomentum": "by hand"}
SHARES = [n / sum(EXAMPLES) for n in EXAMPLES]


def products(each: list[Arrays]) -> Arrays:
    """`sum_k p_k s B_k A_k` of every module, by the name of the weight."""
    return {
        f"{path}.weight": sum(
            p * SCALE * one[f"{name}/B"] @ one[f"{name}/A"] for p, one in zip(SHARES, each, strict=True)
        )
        for name, path in MODULES.items()
    }  # type: ignore[return-value]


def assert_answers(played: Played, *changes: Arrays) -> None:
    for client in CLIENTS:
        pixels, _ = played.data(client, "test")
        expected = logits(pixels, *changes)
        torch.testing.assert_close(played.answers(client), expected, rtol=2e-3, atol=2e-3)


def test_flora() -> None:
    """Wang et al. 2024a: `W <- W + sum_k p_k s B_k A_k`, of any ranks, and a new A and B = 0. A is drawn by befit."""
    played = Played({"name": "flora", "rank": 4, "alpha": 8.0, "ranks": {"a": 1, "b": 2}})
    moved: Arrays = {}
    shapes = {f"shared/{key}": TensorSpec(tuple(value.shape)) for key, value in played.start("shared").items()}
    for round_ in (1, 2):
        fresh, each = of(initial_values(shapes, derive_seed(0, "relora", str(round_))), "shared"), []
        for client in CLIENTS:
            start = cut(fresh, RANKS[client])
            each.append(trained(start, lambda own: loss(played.data(client), moved, change(own))))
            assert_near(played.sent(round_, client), padded(each[-1]), atol=1e-4)
        heads = mean([{key: one[key] for key in HEAD} for one in each], EXAMPLES)
        moved = plus(moved, products(each), {key.replace("/", "."): value for key, value in heads.items()})
        stacked = played.server.part("pieces").part(str(round_)).arrays
        assert {len(value) for key, value in stacked.items() if key.endswith("/A")} == {sum(RANKS.values())}
    assert_answers(played, moved)


def test_fedex_lora() -> None:
    """Singhal et al. 2025a: clients go on from the means of A and B, and
    `W <- W + s (sum_k p_k B_k A_k - sum_k p_k B_k sum_k p_k A_k)`."""
    played = Played({"name": "fedex_lora", **LORA})
    common, moved = played.start("shared"), dict[str, torch.Tensor]()
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            each.append(trained(common, lambda own: loss(played.data(client), moved, change(own))))
            assert_near(played.sent(round_, client), each[-1], atol=1e-4)
        common = mean(each, EXAMPLES)
        moved = plus(moved, products(each), change(only(common, "A", "B"), -1.0))
    assert_near(of(played.server.arrays, "shared"), common, atol=1e-4)
    assert_answers(played, moved, change(common))


def test_fedmomentum() -> None:
    """Yan et al. 2026: of `D = sum_k p_k s B_k A_k = U S V^T` the first r directions go on, as `B = U_r (S_r/s)^1/2`
    and `A = (S_r/s)^1/2 V_r^T`, and the others move into the backbone. Signs of U and V are nobody's: that of every
    direction is taken from what befit sent out, before it is trained on."""
    played = Played({"name": "fedmomentum", **LORA})
    first = [played.sent(1, client) for client in CLIENTS]
    second = played.uploads(2, "federate")
    assert second.keys() == set(CLIENTS)
    whole, common = products(first), mean(first, EXAMPLES)
    sent, moved = (
        of(Played({"name": "fedmomentum", **LORA}, rounds=1).server.arrays, "shared"),
        dict[str, torch.Tensor](),
    )
    for name, path in MODULES.items():
        U, S, Vh = torch.linalg.svd(whole[f"{path}.weight"].double())
        signs = torch.sign((sent[f"{name}/A"].double() * Vh[:2]).sum(1))
        root = (S[:2] / SCALE).sqrt()
        common[f"{name}/B"], common[f"{name}/A"] = (
            (U[:, :2] * signs * root).float(),
            (Vh[:2].T * signs * root).T.float(),
        )
        moved[f"{path}.weight"] = whole[f"{path}.weight"] - SCALE * common[f"{name}/B"] @ common[f"{name}/A"]
    assert_near(sent, common, rtol=1e-3, atol=1e-5)
    for client in CLIENTS:
        after = trained(common, lambda own: loss(played.data(client), moved, change(own)))
        assert_near(played.sent(2, client), after, rtol=5e-3, atol=5e-4)
    last = products([of(second[client], "shared") for client in CLIENTS])
    heads = mean([of(second[client], "shared") for client in CLIENTS], EXAMPLES)
    assert_answers(played, moved, last, {key.replace("/", "."): heads[key] for key in HEAD})
