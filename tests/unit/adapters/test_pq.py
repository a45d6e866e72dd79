"""PQ-LoRA and the gates between two slots (Seo et al. 2026, FedMosaic, eqs. 5 to 18)."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from befit.adapters.forms import ModuleShape
from befit.adapters.gates import SOFTMAX, Gate, InputGate, ScalarGate, SoftmaxGate
from befit.adapters.keys import factor, slot, split
from befit.adapters.layout import GATE, Layout, Slot
from befit.adapters.model import AdaptedModel
from befit.adapters.pq import BASIS, Basis, PQBranch, PQLora, orthonormal, placement, polar, pq_modules
from befit.core.errors import ModelError
from befit.core.values import Tick
from befit.protocol.method import Deployment
from befit.runs.peft_io import write_adapter
from befit.train.loop import train
from befit.train.passes import Pass
from tests.tiny import assert_same, make_site, random_state, tiny_model

BOTH = ("personal", "shared")
PQ = factor("P", "Q")


def pq_layout(rank: int = 3, blocks: int = 1, gate: object = None) -> Layout:
    slots = (
        Slot(BASIS, rank, 2.0 * rank, head=False, form=Basis(blocks)),
        *(Slot(name, rank, 2.0 * rank, form=PQLora(blocks)) for name in BOTH),
    )
    return Layout(slots, BOTH, gate=gate or ScalarGate())  # type: ignore[arg-type]


def span(B: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """(r^2, d_out d_in): every `B e_i e_j^T A` as a row."""
    return torch.einsum("oi,jd->ijod", B, A).reshape(B.shape[1] * len(A), -1)


@pytest.mark.parametrize(
    ("count", "blocks", "expected"),
    [
        (16, 2, [7, 15]),
        (16, 4, [3, 7, 11, 15]),
        (16, 8, [1, 3, 5, 7, 9, 11, 13, 15]),
        (24, 2, [11, 23]),
        (24, 4, [5, 11, 17, 23]),
        (24, 8, [2, 5, 8, 11, 14, 17, 20, 23]),
        (28, 2, [13, 27]),
        (28, 4, [6, 13, 20, 27]),
        (28, 8, [2, 5, 8, 11, 14, 17, 20, 27]),
        (32, 2, [15, 31]),
        (32, 4, [7, 15, 23, 31]),
        (32, 8, [3, 7, 11, 15, 19, 23, 27, 31]),
        (36, 2, [17, 35]),
        (36, 4, [8, 17, 26, 35]),
        (36, 8, [3, 7, 11, 15, 19, 23, 27, 35]),
        (22, 4, [4, 9, 14, 21]),
        (30, 4, [6, 13, 20, 29]),
        (5, 5, [0, 1, 2, 3, 4]),
        (5, 1, [4]),
        (5, 0, []),
    ],
)
def test_blocks_are_placed_as_equation_6_says(count: int, blocks: int, expected: list[int]) -> None:
    """Equation 6 by hand; 22 and 30 blocks are where Algorithm 2 would differ."""
    assert placement(blocks, count) == expected


def test_more_blocks_than_the_model_has_are_refused() -> None:
    with pytest.raises(ModelError, match="in 6 blocks: this model has 5"):
        placement(6, 5)


def test_sites_are_matched_by_their_place_and_projection_whatever_the_depth() -> None:
    def of(depth: int) -> dict[tuple[int, str], str]:
        names = [f"block.{n:02d}.{p}" for n in range(depth) for p in ("q_proj", "mlp.up")]
        return {place: name for name, place in pq_modules([*names, "classifier"], 2).items()}

    small, large = of(4), of(7)
    assert small.keys() == large.keys() == {(k, p) for k in (0, 1) for p in ("q_proj", "mlp.up")}
    assert small[0, "q_proj"] == "block.01.q_proj" and large[0, "q_proj"] == "block.02.q_proj"
    assert small[1, "mlp.up"] == "block.03.mlp.up" and large[1, "mlp.up"] == "block.06.mlp.up"


def test_a_rank_above_the_width_of_a_module_is_refused_with_the_modules() -> None:
    shapes = {"block.00.q_proj": ModuleShape(16, 16), "block.00.k_proj": ModuleShape(16, 8)}
    with pytest.raises(ModelError, match=r"rank 9 .* 1 modules are narrower: block\.00\.k_proj \(8\).* at most 8"):
        Basis(1).factors(9, shapes)
    assert Basis(1).factors(8, shapes)["B"]["block.00.k_proj"] == (8, 8)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_orthonormal_factors_are_so_to_float_precision_and_differ_by_seed(shape: tuple[int, int]) -> None:
    one, other = (orthonormal(shape, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    short = one if shape[0] <= shape[1] else one.T
    torch.testing.assert_close(short @ short.T, torch.eye(min(shape)), rtol=0, atol=1e-5)
    assert not torch.allclose(one, other, atol=0.1)


def test_the_projection_is_idempotent_and_nothing_orthonormal_is_nearer() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    nearest = polar(matrix)
    torch.testing.assert_close(nearest @ nearest.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(polar(nearest), nearest, rtol=0, atol=1e-12)
    distance = (matrix - nearest).norm()
    for _ in range(50):
        step = 0.2 * torch.randn(3, 7, generator=generator, dtype=torch.float64)
        assert (matrix - polar(nearest + step)).norm() > distance


def test_the_products_of_a_core_have_the_dimension_r_squared_unless_the_factors_are_dependent() -> None:
    """Theorem 1: orthonormal or merely independent factors span r^2 = 16; a repeated column leaves 12."""
    generator = torch.Generator().manual_seed(0)
    A, B = orthonormal((4, 9), generator), orthonormal((8, 4), generator)
    assert torch.linalg.matrix_rank(span(B, A)) == 16
    A, B = torch.randn(4, 9, generator=generator), torch.randn(8, 4, generator=generator)
    assert torch.linalg.matrix_rank(span(B, A)) == 16
    B[:, 3] = B[:, 0]
    assert torch.linalg.matrix_rank(span(B, A)) == 12


def test_averaging_cores_averages_updates_exactly_and_averaging_lora_factors_does_not() -> None:
    """Theorem 2: `B (sum w P) A = sum w B P A`; for plain factors `(sum w B)(sum w A)` is another matrix."""
    generator = torch.Generator().manual_seed(0)
    A, B = orthonormal((3, 8), generator), orthonormal((6, 3), generator)
    cores = [torch.randn(3, 3, generator=generator) for _ in range(3)]
    weights = [0.5, 0.3, 0.2]
    mean = sum(w * P for w, P in zip(weights, cores, strict=True))
    exact = sum(w * (B @ P @ A) for w, P in zip(weights, cores, strict=True))
    torch.testing.assert_close(B @ mean @ A, exact, rtol=0, atol=1e-6)
    As, Bs = ([torch.randn(*s, generator=generator) for _ in range(3)] for s in ((3, 8), (6, 3)))
    means = [sum(w * X for w, X in zip(weights, Xs, strict=True)) for Xs in (Bs, As)]
    product = sum(w * (b @ a) for w, b, a in zip(weights, Bs, As, strict=True))
    assert (means[0] @ means[1] - product).abs().max() > 0.1  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("beta", [-3.0, 0.0, 5.0])
def test_a_fresh_adapter_changes_nothing_whatever_the_gate(kind: str, beta: float) -> None:
    site = make_site(kind, pq_layout(), targets="all")
    site.model.load({key: torch.full(spec.shape, beta) for key, spec in site.model.specs.items() if slot(GATE)(key)})
    batch = site.examples("test").batch(range(4))
    with torch.no_grad():
        bare = site.logits(batch)
        with site.model.active(*BOTH, mixer="gate"):
            torch.testing.assert_close(site.logits(batch), bare, rtol=0, atol=0)


def test_both_slots_compute_with_one_copy_of_the_frozen_factors() -> None:
    model = make_site("llama", pq_layout(), targets="all").model
    branches = model.layers["block.01.q_proj"].branches
    own, other, basis = (branches[name] for name in (*BOTH, BASIS))
    assert isinstance(own, PQBranch) and isinstance(other, PQBranch)
    assert own.A.data_ptr() == other.A.data_ptr() == basis.A.data_ptr()  # type: ignore[attr-defined]
    assert own.P.data_ptr() != other.P.data_ptr()
    assert not isinstance(model.layers["block.00.q_proj"].branches["personal"], PQBranch)


def test_the_layer_computes_the_gated_formula_of_the_paper() -> None:
    """`h = W x + (1 - b) s B (P_L A x + Q_L) + b s B (P_G A x + Q_G)`, written with dense matrices."""
    model = make_site("llama", pq_layout(), targets="all").model
    state = random_state(model)
    model.load(state)
    layer, name = model.layers["block.01.up_proj"], "block.01.up_proj"
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    W = layer.base.weight.detach()  # type: ignore[union-attr]
    A, B = state[f"basis/{name}/A"].double(), state[f"basis/{name}/B"].double()
    b = float(state[f"gate/{name}/beta"].double().sigmoid())
    expected = x.double() @ W.double().T
    for weight, own in ((1 - b, "personal"), (b, "shared")):
        P, Q = state[f"{own}/{name}/P"].double(), state[f"{own}/{name}/Q"].double()
        expected = expected + weight * 2.0 * (x.double() @ (B @ P @ A).T + B @ Q)
    with model.active(*BOTH, mixer="gate"), torch.no_grad():
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [ScalarGate(), InputGate(), SOFTMAX])
def test_the_cores_of_a_site_share_the_products_with_the_basis_and_give_what_each_gives_alone(gate: Gate) -> None:
    """Output and all gradients of `y + sum_s w_s s B (P_s A x + Q_s)`, a slot at a time; A x and B are multiplied once
    where that takes each of them twice."""
    model = make_site("llama", pq_layout(gate=gate), targets="all").model
    model.load(random_state(model))
    name = "block.01.up_proj"
    layer, chosen = model.layers[name], slot(*BOTH, GATE)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    outer = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
    leaves = {key: leaf for key, leaf in model.leaves(chosen).items() if split(key)[1] == name}

    def apart() -> torch.Tensor:
        assert layer.gate is not None
        if isinstance(gate, SoftmaxGate):
            weights = list(torch.nn.functional.linear(x, layer.gate).softmax(-1).split(1, -1))
        else:
            b = (x @ layer.gate)[..., None].sigmoid() if isinstance(gate, InputGate) else layer.gate.sigmoid()
            weights = [1 - b, b]
        y = layer.base(x)
        for own, weight in zip(BOTH, weights, strict=True):
            y = y + layer.branches[own].scale * layer.branches[own].weighted(x, weight)
        return y

    results, products = [], []
    with model.trainable(chosen), model.active(*BOTH, mixer="gate"):
        for forward in (lambda: layer(x), apart):
            y = forward()
            results.append([y, *torch.autograd.grad((y * outer).sum(), [x, *leaves.values()])])
            with torch.no_grad(), FlopCounterMode(display=False) as counted:
                forward()
            products.append(counted.get_total_flops())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert products[1] - products[0] == 2 * 10 * 3 * (16 + 24)  # of 10 tokens at rank 3


def test_training_moves_cores_and_gates_and_leaves_the_basis_and_the_other_slot(kind: str) -> None:
    site = make_site(kind, pq_layout(), targets="all")
    before = site.model.dump(slot(BASIS, *BOTH, GATE))
    train(site, [Pass(slot("personal", GATE), BOTH, mixer="gate")], Tick("federate", 1, 1, 0))
    after = site.model.dump(slot(BASIS, *BOTH, GATE))
    frozen = slot(BASIS, "shared")
    assert_same({k: t for k, t in before.items() if frozen(k)}, {k: t for k, t in after.items() if frozen(k)})
    for key, tensor in before.items():
        assert frozen(key) or not torch.equal(tensor, after[key]), key


def test_the_number_of_trained_entries_is_the_predicted_one() -> None:
    """One of two blocks of a Llama of width 16, 24 inside and one key head of 8: in the PQ block 7 modules of
    r^2 + r = 12 entries, in the other r times the widths: 16+16, 16+8, 16+8, 16+16, 16+24, 16+24, 24+16 = 232."""
    model = make_site("llama", pq_layout(rank=3, blocks=1), targets="all").model
    assert model.count(slot("personal")) == 7 * 12 + 3 * 232
    assert model.count(slot(GATE)) == 14
    assert model.count(slot("personal") & PQ) == 7 * 12


def test_per_sample_gradients_of_a_core_add_up_to_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    A, B, P = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 5), (4, 3), (3, 3)))
    Q = torch.randn(3, generator=generator, dtype=torch.float64)
    P, Q = P.requires_grad_(), Q.requires_grad_()
    branch = PQBranch(A, B, P, Q, 1.0)
    x, grad = (torch.randn(2, 6, d, generator=generator, dtype=torch.float64) for d in (5, 4))
    (branch(x) * grad).sum().backward()
    found = branch.gradients(x, grad)
    torch.testing.assert_close(found["P"].detach().sum(0), P.grad)
    torch.testing.assert_close(found["Q"].detach().sum(0), Q.grad)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:UserWarning")
def test_peft_computes_what_a_scalar_gate_mixes(kind: str, tmp_path: Path) -> None:
    """PQ cores share A, so the PQ block needs rank 3 and the plain one 6; the bias s B Q goes into lora_bias."""
    site = make_site(kind, pq_layout(), targets="all")
    site.model.load(random_state(site.model))
    deployed = Deployment(site.model.dump(slot(BASIS, *BOTH, GATE)), BOTH, "gate")
    write_adapter(
        tmp_path,
        deployed,
        site.model,
        base="tiny",
        task="causal-lm" if kind in ("llama", "gpt2") else "image-classification",
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_bias"] and config["r"] == 6 and set(config["rank_pattern"].values()) == {3}
    assert "by weights that depend" not in (tmp_path / "README.md").read_text()
    batch = site.examples("test").batch(range(6))
    with torch.no_grad():
        bare = site.logits(batch)
        with site.model.active(*BOTH, mixer="gate"):
            here = site.logits(batch)
        loaded = peft.PeftModel.from_pretrained(tiny_model(kind), str(tmp_path)).eval()  # type: ignore[arg-type]
        there = site.task.logits(loaded, batch)
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(bare, here, atol=1e-2)


def test_an_input_gate_cannot_be_folded_and_the_files_say_so(tmp_path: Path) -> None:
    site = make_site("llama", pq_layout(gate=InputGate()))
    site.model.load(random_state(site.model))
    deployed = Deployment(site.model.dump(slot(BASIS, *BOTH, GATE)), BOTH, "gate")
    write_adapter(tmp_path, deployed, site.model, base="tiny", task="causal-lm")
    assert "depend on the input" in (tmp_path / "README.md").read_text()


def test_an_input_gate_is_causal_and_ignores_padding() -> None:
    """What follows a token, padding or not, changes nothing at the token: the released gate's sequence mean does."""
    model = make_site("llama", pq_layout(gate=InputGate()), targets="all").model
    model.load(random_state(model))
    ids = torch.randint(2, 32, (1, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), model.active(*BOTH, mixer="gate"):
        whole = model.backbone(ids).logits
        start = model.backbone(ids[:, :4]).logits
        changed = model.backbone(torch.cat([ids[:, :4], torch.zeros(1, 2, dtype=torch.long)], 1)).logits
    torch.testing.assert_close(whole[:, :4], start, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(changed[:, :4], start, rtol=1e-5, atol=1e-5)


def test_noise_of_an_input_gate_is_there_in_training_only() -> None:
    model = make_site("llama", pq_layout(gate=InputGate(noise=InputGate.RELEASED))).model
    model.load(random_state(model))
    ids = torch.arange(6)[None]

    def logits(training: bool) -> torch.Tensor:
        with torch.no_grad(), model.training(training), model.active(*BOTH, mixer="gate"):
            return model.backbone(ids).logits

    assert torch.equal(logits(False), logits(False))
    assert not torch.equal(logits(True), logits(True))


def test_a_gate_of_two_refuses_three_slots() -> None:
    with pytest.raises(ValueError, match="weighs two slots, got 3"):
        AdaptedModel(tiny_model("llama")).install(
            Layout(tuple(Slot(n, 2, 2.0) for n in "abc"), ("a", "b", "c"), gate=ScalarGate()), 0
        )


def test_all_clients_of_one_seed_start_from_one_basis_and_another_seed_gives_another() -> None:
    states = []
    for seed in (0, 0, 1):
        model = AdaptedModel(tiny_model("llama"), "all")
        model.install(pq_layout(), seed)
        states.append(model.dump(slot(BASIS)))
    assert_same(states[0], states[1])
    for key, tensor in states[0].items():
        short = tensor if split(key)[2] == "A" else tensor.T
        torch.testing.assert_close(short @ short.T, torch.eye(3), rtol=0, atol=1e-5)
        assert not torch.allclose(tensor, states[2][key], atol=0.1), key
