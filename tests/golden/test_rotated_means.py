"""FedRot-LoRA, round by round with dense weights, and its rotation against a search over all angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from befit.methods.fedrot_lora import rotation
from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played, of
from tests.golden.reference import MODULES, assert_near, change, loss, mean, trained

CHECKED = {"fedrot_lora": "by hand"}


def turned(angle: float, reflect: bool = False) -> Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64) @ torch.diag(
        torch.tensor([1.0, -1.0 if reflect else 1.0], dtype=torch.float64)
    )


def test_the_rotation_is_the_best_of_all_angles_with_and_without_a_reflection() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        X, Y = (torch.randn(2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        angles = [2 * math.pi * step / 3600 for step in range(3600)]
        far = {(a, f): float((turned(a, f).T @ X - Y).norm()) for a in angles for f in (False, True)}
        found = rotation(X @ Y.T, 1.0)
        assert float((found.T @ X - Y).norm()) <= min(far.values()) + 1e-9
        proper = min((key for key in far if not key[1]), key=far.__getitem__)[0]
        half = rotation(X @ Y.T, 0.5)  # of two rotations of the plane, the middle is that of half the angle
        expected = turned((proper if proper < math.pi else proper - 2 * math.pi) / 2)
        torch.testing.assert_close(half, expected, atol=2e-3, rtol=0)


def test_fedrot_lora() -> None:
    """Zhang et al. 2026: in round 2 by A, in round 3 by B, `R = U V^T` of `A_k A^T = U S V^T` or of `B_k^T B`."""
    played = Played({"name": "fedrot_lora", **LORA}, rounds=3)
    common = played.start("shared")
    for round_ in (1, 2, 3):
        each = []
        for client in CLIENTS:
            own = trained(common, lambda own: loss(played.data(client), change(own)))
            assert_near(played.sent(round_, client), own, rtol=5e-3, atol=5e-4)
            own = played.sent(round_, client)
            for name in MODULES if round_ > 1 else ():
                A, B = f"{name}/A", f"{name}/B"
                U, _, Vh = torch.linalg.svd(own[A] @ common[A].T if round_ == 2 else own[B].T @ common[B])
                own = {**own, A: (U @ Vh).T @ own[A], B: own[B] @ U @ Vh}
            each.append(own)
        common = mean(each, EXAMPLES)
    assert_near(of(played.server.arrays, "shared"), common, atol=1e-4)
