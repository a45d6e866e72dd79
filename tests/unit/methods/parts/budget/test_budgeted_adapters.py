"""BayesTune-LoRA against Lee et al. 2025a, eqs. 1 to 5: the layer, the clamp, the priors and the budgets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from befit.adapters.bayestune import BUDGETED, HIGH, LOW, SCALES, clamp_through
from befit.adapters.forms import ModuleShape
from befit.adapters.keys import factor, join, slot
from befit.methods.parts.budget.budget import affordable, compact, expand, keep, kept_ranks, order
from befit.methods.parts.budget.personal import budgeted_layout
from befit.methods.parts.budget.search import Prior, column_norms
from tests.tiny import make_site, random_state

RANKS = 8  # r_init of these tests


def loaded(seed: int = 0, scales: torch.Tensor | None = None):
    """A site whose budgeted slot holds random A and B, and the given scales (L, RANKS)."""
    site = make_site("bert", budgeted_layout(RANKS, 2.0, True), targets="all")
    state = random_state(site.model, seed)
    for index, name in enumerate(site.model.shapes.targets):
        row = torch.rand(RANKS) + 0.1 if scales is None else scales[index]
        state[join(BUDGETED, name, "lambda")] = row
        state[join(SCALES, name, "lambda")] = row.clone()
    site.model.load(state)
    return site, state


def logits(site, *slots: str) -> torch.Tensor:
    batch = site.examples("train").batch(torch.arange(4))
    with site.model.active(*slots):
        return site.logits(batch)


def some_scales(site, count: int, seed: int = 1) -> torch.Tensor:
    drawn = torch.rand(len(site.model.shapes.targets), RANKS, generator=torch.Generator().manual_seed(seed)) + 0.1
    return keep(drawn, count)


def test_a_layer_computes_the_dense_update() -> None:
    """y = x (W + s B diag(lambda) A)^T + b, property 1, for both branches."""
    site, state = loaded()
    name = next(iter(site.model.layers))
    layer = site.model.layers[name]
    x = torch.randn(3, layer.in_features)
    A, B = (state[join(BUDGETED, name, part)] for part in ("A", "B"))
    delta = 2.0 * B @ torch.diag(state[join(BUDGETED, name, "lambda")]) @ A
    expected = torch.nn.functional.linear(x, layer.weight + delta, layer.bias)
    for active in (BUDGETED, SCALES):
        with site.model.active(active):
            assert torch.allclose(layer(x), expected, atol=1e-5)


def test_without_ranks_or_with_B_at_zero_the_model_is_the_backbone_bit_for_bit() -> None:
    site, state = loaded(scales=torch.zeros(12, RANKS))
    bare = logits(site)
    site.model.load({key: torch.zeros_like(value) for key, value in state.items() if "classifier" in key})
    assert torch.equal(logits(site, BUDGETED), bare)
    site.model.reset()
    assert torch.equal(logits(site, BUDGETED), logits(site)) and torch.equal(logits(site, SCALES), logits(site))


@pytest.mark.parametrize("value", [-5.0, 0.5, 2e3])
def test_the_clamp_holds_its_bounds_exactly_and_lets_every_gradient_through(value: float) -> None:
    v = torch.tensor([value], requires_grad=True)
    out = clamp_through(v, LOW, HIGH)
    assert float(out.detach()) == float(torch.tensor(min(HIGH, max(LOW, value))))
    (3 * out).sum().backward()
    assert v.grad is not None and float(v.grad) == 3


def test_scales_below_the_bound_act_as_the_bound() -> None:
    site, state = loaded()
    for name in site.model.shapes.targets:
        state[join(SCALES, name, "lambda")] = torch.full((RANKS,), -3.0)
        state[join(BUDGETED, name, "lambda")] = torch.full((RANKS,), LOW)
    site.model.load(state)
    for key, leaf in site.model.leaves(slot(SCALES) & ~factor("lambda")).items():
        leaf.copy_(site.model.leaves(slot(BUDGETED))[key.replace(SCALES, BUDGETED)])
    assert torch.equal(logits(site, SCALES), logits(site, BUDGETED))


def test_penalties_are_the_sums_by_hand() -> None:
    """n = [3, 4], lam = [0.5, 2]: L_s = 6 + 2, L_p = log 1 + 250; (100 * 8 + 0.01 * 250) / 10, half for twice N."""
    B = torch.tensor([[1.0, -4.0], [-2.0, 0.0]])
    norms, scales = column_norms([B]), torch.tensor([[0.5, 2.0]])
    assert norms.tolist() == [[3, 4]]
    assert float(Prior()(norms, scales, 10)) == pytest.approx(80.25)
    assert float(Prior()(norms, scales, 20)) == pytest.approx(40.125)
    assert torch.equal(column_norms([B.flip(0)]), norms) and torch.equal(column_norms([B.flip(1)]), norms.flip(1))


def test_the_exact_priors_are_the_distributions_negative_logarithms() -> None:
    """A Laplace of scale lam at distance n, and a Gamma(0.01, rate 100), by torch.distributions."""
    n, lam = torch.tensor([[0.3, 0.0]]), torch.tensor([[0.2, 1.7]])
    exact = Prior(form="exact")
    laplace = -torch.distributions.Laplace(torch.zeros(1), lam).log_prob(n).sum()
    gamma = -torch.distributions.Gamma(torch.tensor(0.01), torch.tensor(100.0)).log_prob(lam).sum()
    assert float(exact.sparsity(n, lam)) == pytest.approx(float(laplace))
    assert float(exact.spread(lam)) == pytest.approx(float(gamma), rel=1e-5)


def stationary_scale(norm: float, prior: Prior) -> float:
    """Where the simplified penalties alone leave a scale: `(-1 + sqrt(1 + 400 n alpha_s / alpha_p)) / 200`, clamped."""
    return min(HIGH, max(LOW, (math.sqrt(1 + 400 * norm * prior.alpha_s / prior.alpha_p) - 1) / 200))


def test_penalties_alone_leave_a_scale_where_the_closed_form_says() -> None:
    """By plain descent on four scales, which know nothing of each other, with B fixed."""
    norms = torch.tensor([[0.0, 1e-4, 0.01, 0.1]], dtype=torch.float64)
    raw = torch.full_like(norms, 0.5).requires_grad_()
    optimiser = torch.optim.Adam([raw], lr=5e-3)
    for _ in range(4000):
        loss = Prior()(norms, clamp_through(raw, LOW, HIGH), 1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    expected = [stationary_scale(n, Prior()) for n in norms[0].tolist()]
    assert raw.detach()[0].clamp(LOW, HIGH).tolist() == pytest.approx(expected, rel=2e-2)


@given(st.integers(1, 5), st.integers(0, 2**20), st.booleans())
def test_budgets_are_exact_and_nest_with_ties_too(modules: int, seed: int, tied: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    scales = torch.rand(modules, 32, generator=draw) + 1e-4
    scales = (scales * 3).ceil() if tied else scales
    before: set[int] = set()
    for r in (2, 4, 8, 16, 32):
        kept = keep(scales, r * modules)
        now = set(kept.flatten().nonzero().flatten().tolist())
        assert len(now) == r * modules and before <= now
        dropped = scales.flatten()[kept.flatten() == 0]
        assert not len(dropped) or float(kept[kept > 0].min()) >= float(dropped.max())
        before = now
    assert torch.equal(kept, scales)


def test_equal_scales_are_kept_from_the_front() -> None:
    kept = keep(torch.full((3, 4), LOW), 6)
    assert kept.flatten().nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert order(torch.tensor([[1.0, 2.0, 2.0, 1.0]])).tolist() == [1, 2, 0, 3]


def test_a_limit_in_parameters_takes_the_largest_scales_that_fit() -> None:
    """Ranks cost 10 and 4: in the order 10, 4, 4, 10 a limit of 20 holds three, one of 9 none."""
    scales, shapes = torch.tensor([[4.0, 1.0], [3.0, 2.0]]), [ModuleShape(6, 4), ModuleShape(2, 2)]
    assert [affordable(scales, shapes, limit) for limit in (9, 10, 17, 18, 27, 28)] == [0, 1, 2, 3, 3, 4]


def test_a_trimmed_adapter_gives_the_outputs_and_gradients_of_a_masked_one() -> None:
    """Property 8: zero scales at full rank against kept ranks alone, and no gradient where nothing was kept."""
    site, state = loaded()
    kept = some_scales(site, 2 * len(site.model.shapes.targets))
    for row, name in zip(kept, site.model.shapes.targets, strict=True):
        state[join(BUDGETED, name, "lambda")] = row
    site.model.load(state)
    weights = slot(BUDGETED) & factor("A", "B")

    def computed() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with site.model.active(BUDGETED), site.model.trainable(weights):
            site.model.zero_gradients()
            site.loss(site.examples("train").batch(torch.arange(4))).backward()
            found = site.model.leaves(weights).items()
            return logits(site, BUDGETED).detach(), {k: leaf.grad.clone() for k, leaf in found if leaf.grad is not None}

    outputs, trimmed = computed()
    for name in site.model.shapes.targets:
        branch = site.model.layers[name].branches[BUDGETED]
        branch._kept, branch._version = torch.arange(RANKS), branch.scales._version  # type: ignore[attr-defined]
    all_outputs, masked = computed()
    assert torch.allclose(outputs, all_outputs, atol=1e-5)
    assert not torch.allclose(outputs, logits(site), atol=1e-2)
    for row, name in zip(kept, site.model.shapes.targets, strict=True):
        for part, axis in (("A", 0), ("B", 1)):
            key = join(BUDGETED, name, part)
            chosen = row.nonzero().flatten()
            assert torch.allclose(
                trimmed[key].index_select(axis, chosen), masked[key].index_select(axis, chosen), atol=1e-6
            )
            assert not trimmed[key].index_select(axis, (row == 0).nonzero().flatten()).any()


def test_a_module_without_ranks_issues_no_product() -> None:
    site, _ = loaded(scales=torch.zeros(12, RANKS))
    name = next(iter(site.model.shapes.targets))
    branch = site.model.layers[name].branches[BUDGETED]
    assert branch.idle
    x = torch.randn(2, site.model.layers[name].in_features)
    assert site.model.layers[name].branch_output(BUDGETED, x, x) is None
    site.model.load({join(BUDGETED, name, "lambda"): torch.ones(RANKS)})
    assert not branch.idle and branch.scale == 2.0


def test_what_is_stored_of_a_budget_comes_back_and_holds_only_kept_ranks() -> None:
    site, state = loaded()
    kept = some_scales(site, 7)
    own = {key: value for key, value in state.items() if key.startswith(f"{BUDGETED}/")}
    own |= {join(BUDGETED, name, "lambda"): row for row, name in zip(kept, site.model.shapes.targets, strict=True)}
    stored = compact(own, "half")
    ranks = kept_ranks({key: value for key, value in own.items() if key.endswith("/lambda")})
    factors = sum(value.numel() for key, value in stored.items() if key.endswith(("/A", "/B")))
    shapes = site.model.shapes.targets
    widths = {name: shape.d_in + shape.d_out for name, shape in shapes.items()}
    assert sum(ranks.values()) == 7
    assert factors == sum(rank * widths[key.split("/")[1]] for key, rank in ranks.items())
    site.model.load(expand(stored, "half", site.model.dump(slot(BUDGETED))))
    again = logits(site, BUDGETED)
    site.model.load(own)
    assert torch.equal(logits(site, BUDGETED), again)


def test_stationary_scales_grow_with_their_columns() -> None:
    found = [stationary_scale(10.0**power, Prior()) for power in range(-6, 2)]
    assert found == sorted(found) and math.isclose(found[4], 0.995, abs_tol=1e-3)
