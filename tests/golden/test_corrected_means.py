"""Means of factors that are mended: LoRA-FAIR, with dense weights and `torch.optim.SGD`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from befit.adapters.lowrank import stack
from befit.merge.merge import Merge
from befit.methods.lora_fair import CorrectedMean
from befit.methods.lora_fair import corrected as ours
from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played, of
from tests.golden.reference import MODULES, Arrays, Learner, assert_near, change, loss, mean, trained

CHECKED = {"lora_fair": "by hand"}
SHARES = [n / sum(EXAMPLES) for n in EXAMPLES]


def corrected(common: Arrays, each: list[Arrays], decay: float, steps: int, lr: float) -> Arrays:
    """Steps of SGD on `1 - cos(D, (B + C) A) + decay ||C||^2` for every module, D a dense matrix."""
    moved = dict(common)
    for name in MODULES:
        products = [p * one[f"{name}/B"] @ one[f"{name}/A"] for p, one in zip(SHARES, each, strict=True)]
        wanted = torch.stack(products).sum(0)
        B, A = common[f"{name}/B"], common[f"{name}/A"]
        learner = Learner({"C": torch.zeros_like(B)}, lambda arrays: torch.optim.SGD(arrays, lr=lr))
        for _ in range(steps):
            C = learner.arrays["C"]
            cosine = F.cosine_similarity(((B + C) @ A).flatten(), wanted.flatten(), dim=0)
            learner.step(1 - cosine + decay * C.square().sum())
        moved[f"{name}/B"] = B + learner.now["C"]
    return moved


def test_lora_fair() -> None:
    """Bian et al. 2025a: the mean of A, and of B a little nearer to what the mean product wants."""
    how = {"decay": 0.5, "server_steps": 40, "server_lr": 0.2}
    played = Played({"name": "lora_fair", **LORA, **how}, rounds=2)
    common = played.start("shared")
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            own = trained(common, lambda own: loss(played.data(client), change(own)))
            assert_near(played.sent(round_, client), own, rtol=5e-3, atol=5e-4)
            each.append(played.sent(round_, client))
        plain = mean(each, EXAMPLES)
        common = corrected(plain, each, decay=0.5, steps=40, lr=0.2)
        far = max(float((common[f"{name}/B"] - plain[f"{name}/B"]).abs().max()) for name in MODULES)
        assert far > 5e-3, "a correction that can be told from none"
    assert_near(of(played.server.arrays, "shared"), common, atol=2e-5)


def test_lora_fair_leaves_a_product_that_points_the_right_way() -> None:
    """Where all clients have one A, the product of the means is the mean product; rounding is no reason to move B.

    Steps of this size are more than a product as short as this one bears.
    """
    A, *Bs = (torch.randn(8, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in range(4))
    Bs = [1e-3 * B.T for B in Bs]
    B = torch.stack(Bs).mean(0)
    wanted = stack([(one, A) for one in Bs], [1 / 3] * 3)
    assert torch.equal(ours((B, A), wanted, CorrectedMean(0.01, 1000, 0.01, Merge("examples"))), B)
