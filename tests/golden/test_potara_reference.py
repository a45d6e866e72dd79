"""Potara's merge in numpy, step by step (Zou et al. 2026, eqs. 13 to 20, 53 to 59), from one backward pass per sample.

Gradients come from PEFT in float64, of samples without padding, and the reference shares no code with befit: two-pass
moments, damping, correlation, clipping, the weight of each group, and the interpolation of arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from befit.adapters.keys import select, slot
from befit.core.values import Payload, State, Tick
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from tests.tiny import make_site, random_state
from tests.unit.adapters.peft_oracle import parameters_of, peft_model
from tests.unit.train.test_persample_oracles import ROWS, TWO, looped

CHECKED = {"potara": "numpy, gradients by PEFT"}

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"damping": {"delta": 1e-2}},
    {"damping": {"scope": "tensor"}},
    {"damping": {"drop_dead": False}},
    {"damping": {"kind": "absolute", "delta": 1e-3}},
    {"damping": {"kind": "quantile"}},
    {"damping": {"kind": "quantile", "delta": 0.5}},
    {"correlation": {"estimate": False}},
    {"correlation": {"centred": False}},
    {"correlation": {"shrink": 1.0}},
    {"granularity": "factor"},
    {"granularity": "layer"},
    {"granularity": "tensor"},
    {"granularity": "coordinate"},
    {"granularity": "coordinate", "correlation": {"centred": False}, "damping": {"delta": 1e-2}},
    {"granularity": "layer", "damping": {"scope": "tensor"}, "correlation": {"shrink": 0.5}},
]


@dataclass(frozen=True)
class Case:
    """Two adapters of one client and their gradients, (samples, entries) by module/factor, heads left out."""

    kind: str
    fed: dict[str, np.ndarray]
    local: dict[str, np.ndarray]
    state: State


@cache
def case(kind: str, dead: bool = False) -> Case:
    """With `dead`, the B of query projections is zero in both models, which leaves their A without gradient."""
    site = make_site(kind, TWO, rows=ROWS)
    state = random_state(site.model)
    if dead:
        state = {key: tensor * (not key.endswith("q_proj/B")) for key, tensor in state.items()}
    batch = site.examples("train").batch(range(ROWS))
    found = []
    for name in ("shared", "personal"):
        oracle = peft_model(kind, site.model, state, name).double()
        gradients = looped(site, oracle, dict(parameters_of(oracle, site.model, name)), batch, "mean")
        found.append(
            {
                key.partition("/")[2]: value.flatten(1).numpy()
                for key, value in gradients.items()
                if key.endswith(("/A", "/B"))
            }
        )
    fed, local = found
    return Case(kind, fed, local, state)


def merged_by_befit(one: Case, options: dict[str, Any]) -> tuple[State, dict[str, float]]:
    site = make_site(one.kind, rows=ROWS)
    method: Any = build_method({"name": "potara", "rank": 2, "alpha": 6.0, "statistics": {"samples": ROWS}, **options})
    site.model.install(method.layout, seed=0)
    same = {"initial": "the same"}
    memory = Payload(select(one.state, slot("personal")), dict(same))
    received = Payload(select(one.state, slot("shared")), dict(same))
    kept, _ = finish(method.plan()[-1].exchange.client_update(memory, received, site, Tick("merge", 1, 1, 0)))
    return select(kept.arrays, slot("merged")), site.report


def group_of(key: str, granularity: str) -> str:
    module, factor = key.split("/")
    return {"client": "", "factor": factor, "layer": module.rsplit(".", 1)[0], "tensor": key}.get(granularity, key)


def optimum(a: Any, b: Any, c: Any) -> Any:
    """Eq. 17; 1/2 where the trace is flat."""
    curvature = a + b - 2 * c
    flat = curvature <= 1e-12 * (a + b)
    return np.where(flat, 0.5, (b - c) / np.where(flat, 1.0, curvature))


def by_the_book(
    one: Case,
    damping: dict[str, Any] | None = None,
    correlation: dict[str, Any] | None = None,
    granularity: str = "client",
) -> tuple[dict[str, Any], tuple[float, float, float]]:
    """The weight of each key, and the client's traces a, b, c."""
    fisher = {key: ((one.fed[key] ** 2).mean(0), (one.local[key] ** 2).mean(0)) for key in one.fed}
    every = np.concatenate([np.concatenate(pair) for pair in fisher.values()])
    kind, scope, drop_dead = (
        (damping or {}).get(*pair) for pair in (("kind", "relative"), ("scope", "client"), ("drop_dead", True))
    )
    delta = (damping or {}).get("delta", {"relative": 1e-4, "absolute": 1e-8, "quantile": 0.05}[str(kind)])
    estimate, centred, shrink = (
        (correlation or {}).get(*pair) for pair in (("estimate", True), ("centred", True), ("shrink", 0.0))
    )
    parts: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for key, (F_f, F_l) in fisher.items():
        if kind == "quantile":
            floor = np.quantile(every[every > 0], delta, method="lower")
            D_f, D_l = np.maximum(F_f, floor), np.maximum(F_l, floor)
        else:
            about = every if scope == "client" else np.concatenate([F_f, F_l])
            eps = delta if kind == "absolute" else delta * about.mean()
            D_f, D_l = F_f + eps, F_l + eps
        alive = (F_f > 0) | (F_l > 0) | (not drop_dead)
        v_f, v_l = (np.divide(1.0, D, out=np.zeros_like(D), where=alive & (D > 0)) for D in (D_f, D_l))
        g_f, g_l = one.fed[key], one.local[key]
        if centred:
            g_f, g_l = g_f - g_f.mean(0), g_l - g_l.mean(0)
        size = np.sqrt((g_f**2).sum(0) * (g_l**2).sum(0))
        rho = np.divide((g_f * g_l).sum(0), size, out=np.zeros_like(size), where=size > 0) * estimate
        rho = np.sign(rho) * np.maximum(np.abs(rho) - shrink / ROWS**0.5, 0)
        parts[key] = v_f, v_l, np.clip(rho * np.sqrt(v_f * v_l), 0, np.minimum(v_f, v_l))
    total = tuple(float(sum(part[i].sum() for part in parts.values())) for i in range(3))
    weights: dict[str, Any] = {"": float(optimum(*total))}
    for key in parts:
        group = [part for other, part in parts.items() if group_of(other, granularity) == group_of(key, granularity)]
        sums = (sum(part[i].sum() for part in group) for i in range(3))
        weights[key] = optimum(*parts[key]) if granularity == "coordinate" else float(optimum(*sums))
    return weights, (total[0], total[1], total[2])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: ",".join(f"{k}={v}" for k, v in one.items()) or "default")
def test_the_merge_is_that_of_the_equations(kind: str, options: dict[str, Any]) -> None:
    """Weights to 1e-4: traces are sums of reciprocals, so float32 gradients near zero count for most."""
    one = case(kind)
    weights, traces = by_the_book(one, **options)
    merged, numbers = merged_by_befit(one, options)
    assert numbers["w"] == pytest.approx(weights[""], abs=1e-4)
    assert [numbers[f"trace_{name}"] for name in ("fed", "local", "shared")] == pytest.approx(traces, rel=1e-3)
    for key, found in merged.items():
        name = key.partition("/")[2]
        w = np.reshape(
            weights.get(name, weights[""]), found.shape if name in weights and np.ndim(weights[name]) else ()
        )
        fed, local = (one.state[f"{slot_name}/{name}"].double().numpy() for slot_name in ("shared", "personal"))
        np.testing.assert_allclose(found.numpy(), w * fed + (1 - w) * local, rtol=0, atol=2e-4, err_msg=key)


@pytest.mark.parametrize("drop_dead", [True, False])
@pytest.mark.parametrize("granularity", ["client", "tensor", "coordinate"])
def test_coordinates_without_gradient_leave_the_sums_or_stay_as_asked(drop_dead: bool, granularity: str) -> None:
    """All A of query projections are dead: half of all A. Alone they say nothing, so their own weight is 1/2."""
    one = case("vit", dead=True)
    options: dict[str, Any] = {"damping": {"drop_dead": drop_dead}, "granularity": granularity}
    weights, traces = by_the_book(one, **options)
    merged, numbers = merged_by_befit(one, options)
    assert numbers["w"] == pytest.approx(weights[""], abs=1e-4)
    assert numbers["trace_fed"] == pytest.approx(traces[0], rel=1e-3)
    dead = sum(value.shape[1] for key, value in one.fed.items() if key.endswith("q_proj/A"))
    entries = sum(value.shape[1] for value in one.fed.values())
    assert numbers["dead_share"] == pytest.approx(dead / entries if drop_dead else 0.0)
    if granularity != "client":
        fed, local = one.state["shared/block.00.q_proj/A"], one.state["personal/block.00.q_proj/A"]
        np.testing.assert_allclose(merged["merged/block.00.q_proj/A"], (fed + local) / 2, rtol=0, atol=1e-6)


def test_the_options_do_not_all_give_the_same_weight() -> None:
    """Otherwise the comparison above would prove little."""
    weights = {
        round(by_the_book(case("vit"), **options)[0][""], 4) for options in OPTIONS if "granularity" not in options
    }
    assert len(weights) >= 9
