"""Runs released code of methods on small random arrays: `python scripts/released_numbers.py FOLDER`.

FOLDER holds clones of the repositories below, by their names. Functions and classes are taken out of their files, since
the files import what a small array does not need; none of that code is part of befit. What went in and what came out
goes to tests/golden/data/released.npz, which tests/golden/test_released_code.py compares with befit.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

COMMITS = {
    "fedp2eft": "eb79464b9f5149f9d31230dc91a3c48409594102",  # github.com/SamsungLabs/fedp2eft
    "fedmosaic": "7887f5fab899534e3833e596dacf305b7f04bddf",  # github.com/snumprlab/fedmosaic
    "FedALT": "8be3dde2569cef47ecab2d7d931667606a921a47",  # github.com/jmbian/FedALT
}


def taken(clones: Path, repository: str, path: str, *names: str, **known: Any) -> SimpleNamespace:
    """Functions and classes of one file, which see torch and what is `known`."""
    command = ["git", "-C", str(clones / repository), "show", f"{COMMITS[repository]}:{path}"]
    tree = ast.parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    scope = {"torch": torch, "nn": nn, "F": F, "math": math, **known}
    exec(compile(tree, path, "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def fedalt(clones: Path) -> dict[str, torch.Tensor]:
    """A linear layer with two adapters and the gate between them; adapter 0 comes first in the gate."""
    code = taken(
        clones, "FedALT", "peft/tuners/lora.py", "LoraLayer", "Linear", transpose=lambda weight, flipped: weight
    )
    layer = code.Linear(6, 5, r=2, lora_alpha=4, asymmetric=False)
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(3, 4, 6)
    return {"x": x, "y": layer(x), **{name: value for name, value in layer.named_parameters()}}


def divergences(clones: Path) -> dict[str, torch.Tensor]:
    """The distillation losses of FedDAT, TAKFL and PerAda, of a student's logits from a teacher's."""
    (student, teacher, own), labels = torch.randn(3, 7, 5), torch.randint(5, (7,))
    losses = {
        name: taken(clones, "fedmosaic", f"federated_methods/{name}.py", "kl_loss").kl_loss
        for name in ("feddat", "takfl", "feddistill")
    }
    return {
        "student": student,
        "teacher": teacher,
        "own": own,
        "labels": labels,
        "feddat": (F.cross_entropy(student, labels) + losses["feddat"](student, teacher)) / 2,
        "takfl": losses["takfl"](student, teacher, temp=3) + 0.01 * losses["takfl"](student, own, temp=20),
        "perada": losses["feddistill"](student, teacher),
    }


def mosaic(clones: Path) -> dict[str, torch.Tensor]:
    """What each of four clients gets from the others' adapters, by similarities and a temperature of one half."""
    known = {"load_deepspeed": None, "get_target_layers": None, "copy": None}
    path, name = "federated_methods/fedmosaic_utils.py", "fedmosaic_homo_load_state_dict"
    load = getattr(taken(clones, "fedmosaic", path, name, **known), name)
    similarity = F.normalize(torch.randn(4, 9), dim=-1)
    similarity = similarity @ similarity.T
    uploads, received = torch.randn(4, 3, 2), []
    for client in range(4):
        model = SimpleNamespace(load_state_dict=lambda state, strict: received.append(state))
        load(
            model,
            {"lora1": uploads[0]},
            [{"lora2": upload} for upload in uploads],
            client,
            SimpleNamespace(deepspeed="", softmax_temp=0.5),
            {"curr_round": 1, "task_similarity": similarity, "selected_ids": range(4)},
        )
    return {
        "similarity": similarity,
        "uploads": uploads,
        "received": torch.stack([one["lora1"] for one in received[1::2]]),
    }


def fedp2eft(clones: Path) -> dict[str, torch.Tensor]:
    """The priors of the search, both networks, the pooled moments, and the hypergradient of a small network's rates."""
    prior = taken(clones, "fedp2eft", "src/models/btlora/layer.py", "sparsity_loss")
    utils = taken(clones, "fedp2eft", "src/models/model_utils.py", "ClampSTE", "clampSTE_max", "update_mean_and_var")
    nets = taken(clones, "fedp2eft", "src/models/weight_net.py", "BTNet", "ClampLRNet", clampSTE_max=utils.clampSTE_max)
    hypergrad = taken(clones, "fedp2eft", "src/apps/clients/client_utils.py", "Hypergrad").Hypergrad(0.1, 3)
    scales = torch.rand(3, 4) + 0.01
    found = {"scales": scales, "sparsity": torch.as_tensor(prior.sparsity_loss(tuple(scales)))}
    features = torch.randn(6)
    generator = nets.BTNet(input_size=6, hl_size=12, output_size=8, max_limit=1e3)
    rates = nets.ClampLRNet(input_size=6, hl_size=10, output_size=5, max_limit=1e3)
    found |= {"features": features, "generated": generator(features), "rates": rates(features)}
    gap = (generator(features) - 0.3).abs().sum()
    gradients = torch.autograd.grad(gap, list(generator.parameters()))
    found |= {f"generator.{name}": value for name, value in generator.named_parameters()}
    names = [name for name, _ in generator.named_parameters()]
    found |= {f"gradient.{name}": value for name, value in zip(names, gradients, strict=True)}
    found |= {f"rates.{name}": value for name, value in rates.named_parameters()}
    batches = torch.randn(3, 20) + torch.arange(3.0)[:, None]
    moments = (0.0, 0.0, 0)
    for batch in batches:
        moments = utils.update_mean_and_var(*moments, batch.mean(), batch.var(), batch.numel())
    found |= {"batches": batches, "moments": torch.stack([torch.as_tensor(moment) for moment in moments[:2]])}
    before, directions = [torch.randn(4, 3), torch.randn(2, 4)], [torch.randn(4, 3), torch.randn(2, 4)]
    lrs = [torch.tensor(0.1, requires_grad=True), torch.tensor(0.05, requires_grad=True)]
    params = [w.requires_grad_(True) - lr * u for w, lr, u in zip(before, lrs, directions, strict=True)]
    data, answers = torch.randn(2, 6, 3), torch.randint(2, (2, 6))
    losses = [F.cross_entropy(torch.tanh(x @ params[0].T) @ params[1].T, y) for x, y in zip(data, answers, strict=True)]
    by_rate = hypergrad.grad(losses[1], losses[0], lrs, params)
    found |= {"data": data, "answers": answers, "by_rate": torch.stack(by_rate)}
    for name, values in (("params", params), ("directions", directions)):
        found |= {f"{name}.{place}": value for place, value in enumerate(values)}
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    clones = Path(sys.argv[1])
    made = {"fedalt": fedalt, "divergences": divergences, "mosaic": mosaic, "fedp2eft": fedp2eft}
    arrays = {
        f"{name}/{key}": value.detach().numpy() for name, make in made.items() for key, value in make(clones).items()
    }
    np.savez_compressed(Path(__file__).parents[1] / "tests" / "golden" / "data" / "released.npz", **arrays)  # type: ignore[arg-type]
