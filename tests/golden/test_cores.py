"""Small cores between frozen factors: Fed-SB, Ravan. Dense weights, `torch.optim`, and a loop over heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from befit.adapters.core import Cores, blocks
from befit.adapters.forms import ModuleShape
from befit.adapters.layer import LoraBranch
from befit.core.errors import ModelError
from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played, of
from tests.golden.reference import HEAD, MODULES, RATE, SCALE, WEIGHTS, Arrays, assert_near, logits, loss, mean, trained

CHECKED = {"fed_sb": "by hand", "ravan": "by hand"}
SHARES = [n / sum(EXAMPLES) for n in EXAMPLES]


def change(bases: Arrays, own: Arrays, heads: int = 1) -> Arrays:
    """`s sum_i c_i B_i R_i A_i`, head by head, and the head's arrays."""
    changes = {key.replace("/", "."): own[key] for key in HEAD}
    for name, path in MODULES.items():
        A, B, R = bases[f"{name}/A"].chunk(heads), bases[f"{name}/B"].chunk(heads, 1), own[f"{name}/R"].chunk(heads)
        c = own.get(f"{name}/c", torch.ones(heads))
        changes[f"{path}.weight"] = SCALE * torch.stack([c[i] * B[i] @ R[i] @ A[i] for i in range(heads)]).sum(0)
    return changes


def test_fed_sb() -> None:
    """Singhal et al. 2025b: of the mean of the clients' first steps `-lr sign(gradient)`, each cut to the rank,
    `U S V^T`: B = U_r and A = V_r^T stay, R starts as S_r / s and is averaged."""
    played = Played({"name": "fed_sb", **LORA, "estimate_batches": 1}, rounds=2)
    steps: dict[str, torch.Tensor] = {}
    for client, share in zip(CLIENTS, SHARES, strict=True):
        names = [f"{path}.weight" for path in MODULES.values()]
        leaves = {name: torch.zeros_like(WEIGHTS[name]).requires_grad_() for name in names}
        loss(played.data(client), leaves).backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            U, S, Vh = torch.linalg.svd(-RATE * leaf.grad.double().sign())
            best = U[:, :2] * S[:2] @ Vh[:2]
            steps[name] = steps.get(name, torch.zeros_like(best)) + share * best
    bases, common = of(played.server.arrays, "shared"), {key: played.start("shared")[key] for key in HEAD}
    for name, path in MODULES.items():
        U, S, Vh = torch.linalg.svd(steps[f"{path}.weight"])
        A, B = bases[f"{name}/A"].double(), bases[f"{name}/B"].double()
        torch.testing.assert_close(B @ B.T, U[:, :2] @ U[:, :2].T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(B.T @ U[:, :2] * S[:2] @ Vh[:2] @ A.T, torch.diag(S[:2]), rtol=1e-4, atol=1e-6)
        common[f"{name}/R"] = torch.diag(S[:2] / SCALE).float()
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            each.append(trained(common, lambda own: loss(played.data(client), change(bases, own))))
            assert_near(played.sent(round_, client), each[-1], rtol=2e-3, atol=1e-4)
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        assert_near(played.kept(client, "shared"), {key: bases[key] for key in bases if key.endswith(("/A", "/B"))})
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(bases, common)), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "heads"), [({"name": "ravan", "heads": 3}, 3), ({"name": "fed_sb", "estimate_batches": 0}, 1)]
)
def test_cores_between_drawn_factors(method: dict[str, Any], heads: int) -> None:
    """Raje et al. 2025: `sum_i c_i B_i R_i A_i` with R and c trained; the server averages `c_i R_i`, and c is one
    again. Fed-SB without a first step has one head, and no c."""
    played = Played({**method, **LORA}, rounds=2)
    start = played.start("shared")
    bases = {key: value for key, value in start.items() if key.endswith(("/A", "/B"))}
    for key, value in bases.items():
        square = value @ value.T if key.endswith("/A") else value.T @ value
        torch.testing.assert_close(square, torch.eye(2 * heads), rtol=0, atol=1e-5)
    common = {key: value for key, value in start.items() if key not in bases}
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            own = trained(common, lambda own: loss(played.data(client), change(bases, own, heads)))
            assert_near(played.sent(round_, client), own, rtol=2e-3, atol=1e-4)
            for name in MODULES if heads > 1 else ():
                c, R = own[f"{name}/c"], own[f"{name}/R"].chunk(3)
                own[f"{name}/R"] = torch.cat([c[i] * R[i] for i in range(3)])
                own[f"{name}/c"] = torch.ones(3)
            each.append(own)
        common = mean(each, EXAMPLES)
    for client in CLIENTS:
        pixels, _ = played.data(client, "test")
        expected = logits(pixels, change(bases, common, heads))
        torch.testing.assert_close(played.answers(client), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_core_computes_what_its_product_does_alone_and_in_lanes_and_knows_its_gradients(heads: int) -> None:
    form, generator = Cores(heads), torch.Generator().manual_seed(0)
    shapes = {factor: one["m"] for factor, one in form.factors(2, {"m": ModuleShape(7, 6)}).items()}
    lanes = {key: torch.randn(2, *shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}
    x = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    together = form.branch(lanes, 1.0)(x)
    for lane in range(2):
        arrays = {key: value[lane].requires_grad_() for key, value in lanes.items()}
        branch = form.branch(arrays, 1.0)
        B, A = form.low_rank(arrays)
        torch.testing.assert_close(branch(x[lane]), LoraBranch(A, B, 1.0)(x[lane]))
        torch.testing.assert_close(together[lane], branch(x[lane]))
        grad = torch.randn(3, 1, 6, generator=generator, dtype=torch.float64)
        for sample in range(3):
            wanted = [arrays[key] for key in arrays if key in ("R", "c")]
            found = torch.autograd.grad((branch(x[lane][sample]) * grad[sample, 0]).sum(), wanted)
            ours = branch.gradients(x[lane][:, None], grad)
            for key, value in zip([key for key in arrays if key in ("R", "c")], found, strict=True):
                torch.testing.assert_close(ours[key][sample], value)
    torch.testing.assert_close(blocks(torch.eye(2), None), torch.eye(2))


def test_heads_that_a_module_is_too_narrow_for_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="2 x rank 4 needs 8 orthonormal directions, and narrow has 6"):
        Cores(2).factors(4, {"wide": ModuleShape(9, 9), "narrow": ModuleShape(9, 6)})
