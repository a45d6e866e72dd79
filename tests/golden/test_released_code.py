"""Parts of methods against numbers of their released code, to 1e-5.

`data/released.npz` was made once by scripts/released_numbers.py, which names repositories and commits: the code of
FedP2EFT's authors (SamsungLabs/fedp2eft; BayesTune-LoRA and FedL2P in it too), of FedMosaic's (snumprlab/fedmosaic;
FedDAT, TAKFL and PerAda in it too) and of FedALT's (jmbian/FedALT), run on small random arrays.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.adapters.gates import SOFTMAX
from befit.adapters.layer import LoraBranch, Router, SlotLinear
from befit.methods.feddat import Learn
from befit.methods.parts.budget.features import Moments
from befit.methods.parts.budget.generator import generate
from befit.methods.parts.budget.rates import rate_multiples
from befit.methods.parts.budget.search import Prior
from befit.methods.parts.distil.ensemble import TeacherLogits
from befit.methods.parts.distil.student import soft_loss
from befit.methods.parts.distil.translate import View
from befit.methods.parts.mosaic.relevance import mixtures, relevance
from befit.protocol.registry import build_method
from befit.train.hypergrad import rate_hypergradient

CHECKED = {
    "fedalt": "released code of its gate",
    "feddat": "released code of its loss",
    "takfl": "released code of its loss",
    "perada": "released code of its loss",
    "rela": "released code of its mixture",
    "fedmosaic": "released code of its mixture",
    "bayestune": "released code of its prior",
    "fedp2eft": "released code of its generator and features",
    "fedl2p": "released code of its network and hypergradient",
}
RELEASED = np.load(Path(__file__).parent / "data" / "released.npz")


def released(part: str, *names: str) -> Any:
    found = [torch.tensor(RELEASED[f"{part}/{name}"]) for name in names]
    return found if len(found) > 1 else found[0]


def named(part: str, prefix: str, **names: str) -> dict[str, Tensor]:
    """Arrays of a network, by befit's keys."""
    return {key.replace("_", "/"): released(part, f"{prefix}.{name}") for key, name in names.items()}


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_gate_of_fedalt() -> None:
    base = nn.Linear(6, 5)
    base.load_state_dict({name: released("fedalt", name) for name in ("weight", "bias")})
    layer = SlotLinear(base, "layer", Router(("first", "second"), SOFTMAX))
    for place, slot in enumerate(("first", "second")):
        A, B = (released("fedalt", f"lora_{factor}{place}.weight") for factor in "AB")
        layer.branches[slot] = LoraBranch(A, B, 2.0)
    layer.gate = released("fedalt", "lora_route.weight")
    near(layer(released("fedalt", "x")), released("fedalt", "y"))


def test_the_distillation_of_feddat_takfl_and_perada() -> None:
    student, teacher, own, labels = released("divergences", "student", "teacher", "own", "labels")
    model = SimpleNamespace(rows=None, training=lambda on: nullcontext(), active=lambda *slots, mixer: nullcontext())
    task = SimpleNamespace(judged=lambda rows, batch: (rows, None))
    site: Any = SimpleNamespace(model=model, task=task, logits=lambda batch: teacher)
    extra = Learn(("shared",), "sum", 2.0).bind(site)({}, student)
    near((F.cross_entropy(student, labels) + extra) / 2, released("divergences", "feddat"))
    near(soft_loss((teacher / 2).softmax(-1), student, 2.0), released("divergences", "perada"))
    rule: Any = build_method("takfl").after  # type: ignore[attr-defined]
    view = View(task, {"labels": labels})  # type: ignore[arg-type]
    taught = TeacherLogits(view, teacher, 3)
    near(rule._loss(taught, taught, own, student), released("divergences", "takfl"))


def test_the_mixtures_of_rela_and_fedmosaic() -> None:
    similarity, uploads = released("mosaic", "similarity", "uploads")
    near(mixtures(relevance(similarity, 0.5, range(4)), uploads), released("mosaic", "received"))


def test_the_prior_of_bayestune() -> None:
    """The released code's "sparsity" is the hyper-prior `sum log lambda + 100 lambda`."""
    near(Prior().spread(released("fedp2eft", "scales")), released("fedp2eft", "sparsity"))


def test_the_generator_of_fedp2eft_and_its_gradient() -> None:
    names = {
        "generator_first_W": "first_layer.0.weight",
        "generator_first_b": "first_layer.0.bias",
        "generator_activation_slope": "first_layer.1.weight",
        "generator_second_W": "last_layer.weight",
        "generator_second_b": "last_layer.bias",
    }
    net = {key: value.requires_grad_(True) for key, value in named("fedp2eft", "generator", **names).items()}
    found = generate(net, released("fedp2eft", "features"))
    near(found, released("fedp2eft", "generated"))
    gradients = torch.autograd.grad((found - 0.3).abs().sum(), list(net.values()))
    for gradient, expected in zip(gradients, named("fedp2eft", "gradient", **names).values(), strict=True):
        near(gradient, expected)


def test_pooled_moments() -> None:
    moments = Moments()
    for batch in released("fedp2eft", "batches"):
        moments.add(batch)
    near(torch.stack([moments.mean, moments.variance]).float(), released("fedp2eft", "moments"))


def test_the_network_of_fedl2p() -> None:
    places = {"first": "first_layer.0", "second": "hl_0.0", "third": "last_layer"}
    kinds = {"W": "weight", "b": "bias"}
    names = {
        f"rates_{place}_{kind}": f"{ours}.{theirs}" for place, ours in places.items() for kind, theirs in kinds.items()
    }
    net = {**named("fedp2eft", "rates", **names), "rates/eta/value": torch.ones(5)}
    near(rate_multiples(net, released("fedp2eft", "features")), released("fedp2eft", "rates"))


def test_the_hypergradient_of_fedl2p() -> None:
    """The released code has the opposite sign, which preset "parity" restores."""
    data, answers = released("fedp2eft", "data", "answers")
    params = [released("fedp2eft", f"params.{place}").requires_grad_(True) for place in (0, 1)]
    directions = [released("fedp2eft", f"directions.{place}") for place in (0, 1)]
    train, val = (
        F.cross_entropy(torch.tanh(x @ params[0].T) @ params[1].T, y) for x, y in zip(data, answers, strict=True)
    )
    near(-rate_hypergradient(train, val, params, directions, 3, 0.1), released("fedp2eft", "by_rate"))
