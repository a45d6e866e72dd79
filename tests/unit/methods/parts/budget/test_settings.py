"""Steps, defaults and the generator's arithmetic, each of which a run goes through without a complaint if it is wrong
(Lee et al. 2025a; SamsungLabs/fedp2eft)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import select, slot
from befit.adapters.layout import Layout
from befit.config.load import load_experiment
from befit.core.values import Payload, Tick
from befit.data.streams import Stream
from befit.methods.adalora import AdaLora
from befit.methods.bayestune import BayesTune
from befit.methods.fedl2p import FedL2P
from befit.methods.fedp2eft import FedP2EFT
from befit.methods.lora import Lora
from befit.methods.parts.budget.features import features
from befit.methods.parts.budget.generator import GENERATOR, Generator, fit, generate
from befit.methods.parts.budget.personal import budgeted_layout, steps_for
from befit.methods.parts.budget.search import ScaleSearch, Search, searching
from befit.methods.parts.budget.stages import features_of
from befit.protocol.jobs import finish
from befit.protocol.registry import check_method
from befit.runs.runner import check
from tests.federation import BUDGET, Clients
from tests.tiny import make_site

AT = Tick("budget", 1, 1, 0)
SMALL: dict[str, Any] = {"rank": 1, "epochs": 2}


def network(seed: int = 0) -> tuple[dict[str, torch.Tensor], nn.Sequential]:
    """A generator of 6 features and 8 scales with outputs well inside the bounds, as a state and as torch modules."""
    torch.manual_seed(seed)
    modules = nn.Sequential(nn.Linear(6, 12), nn.PReLU(), nn.Linear(12, 8))
    nn.init.constant_(modules.get_parameter("2.bias"), 5.0)
    names = ("first/W", "first/b", "activation/slope", "second/W", "second/b")
    return {
        f"{GENERATOR}/{name}": value.detach().clone()
        for name, value in zip(names, modules.state_dict().values(), strict=True)
    }, modules


def test_the_generator_is_two_linear_layers_with_one_slope_between() -> None:
    state, modules = network()
    f = torch.randn(6, generator=torch.Generator().manual_seed(1))
    assert bool((modules[0](f) < 0).any())  # where the slope matters
    torch.testing.assert_close(generate(state, f), modules(f))


def test_a_fit_is_so_many_steps_of_adam_on_the_sum_of_distances() -> None:
    state, modules = network()
    f, target = torch.ones(6), torch.linspace(1, 9, 8)
    fitted, gaps = fit(state, f, target, steps=4, lr=0.05)
    optimiser = torch.optim.Adam(modules.parameters(), lr=0.05)
    for gap in gaps[:-1]:
        loss = (modules(f) - target).abs().sum()
        assert gap == pytest.approx(float(loss.detach()), rel=1e-6)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert len(gaps) == 5
    for value, expected in zip(fitted.values(), modules.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected)


def test_features_of_inputs_that_never_change_have_the_smallest_spread() -> None:
    """sqrt(0 + 1e-5), with every weight of the backbone at zero and so every input of a linear module."""
    site = make_site("bert")
    for parameter in site.model.backbone.parameters():
        parameter.data.zero_()
    found = features(site)
    assert not found[::2].any() and torch.allclose(found[1::2], torch.tensor(1e-5).sqrt())


def test_features_are_taken_without_dropout() -> None:
    site, plain = make_site("bert", dropout=0.5), make_site("bert")
    site.model.backbone.train()
    assert torch.equal(features(site), features(plain))


def test_features_are_taken_once_of_data_that_stay_and_anew_of_those_that_arrive() -> None:
    site = make_site("vit")
    held = Payload({"features/all/f": torch.zeros(2 * site.model.shapes.linears)})
    assert not features_of(held, site, False)[0].any() and features_of(held, site, False)[1] == {}
    arriving = replace(site, stream=Stream.of("a", [{"task": 0}] * 12, "static", "uniform"))
    assert features_of(held, arriving, False)[0].any()


@pytest.mark.parametrize(("rows", "size", "steps"), [(100, 32, 8), (12, 5, 6), (12, 4, 6), (3, 32, 2)])
def test_two_epochs_see_every_example_twice(rows: int, size: int, steps: int) -> None:
    """XNLI's 100 records in batches of 32 are eight steps."""
    site = make_site("vit", rows=rows, budget=replace(BUDGET, batch_size=size))
    assert steps_for(site, 2) == steps
    seen = torch.cat([batch["pixel_values"].flatten(1).sum(1) for batch in site.batches("train", steps, AT)])
    assert len(seen) == 2 * rows and bool((seen.unique(return_counts=True)[1] == 2).all())


WAYS = [
    Lora(**SMALL),
    AdaLora(**SMALL),
    BayesTune(**SMALL, rank_max=2),
    FedP2EFT(**SMALL, rank_max=2),
    FedL2P(**SMALL, outer=1, draws=1),
]


@pytest.mark.parametrize("method", WAYS, ids=lambda method: type(method).__name__)
def test_every_way_to_spend_a_budget_trains_as_long(method: Any) -> None:
    """Client a has six examples in batches of four, five of them where one is held out: two epochs are four steps, in
    the last stage of each method."""
    clients = Clients(method, count=1)
    clients.run(rounds=1)
    last = method.plan()[-1].name
    reports = [one.report for at, one in clients.journal.updates if at.stage == last]
    assert reports and {report["steps"] for report in reports} == {4.0}


def test_the_defaults_are_the_papers() -> None:
    """Those of the paper, also of what stands beside FedP2EFT. The learning rate of A and B is `train.lr`."""
    ours, alone = FedP2EFT(), BayesTune()
    for method in (ours, alone):
        assert (method.rank_max, method.scale, method.preset) == (16, 2, "recommended")
        assert method.search == ScaleSearch(lr=1e-2, alpha_s=1e2, alpha_p=1e-2, prior="simplified", clip=1.0)
        adapter = next(one for one in method.layout.slots if one.name == BUDGETED)
        assert (adapter.rank, adapter.alpha) == (32, 64)
    assert (ours.generator.lr, ours.generator.steps, ours.mask_padding, ours.weights) == (1e-4, 10, False, "examples")
    generator = next(one for one in ours.layout.extras if isinstance(one, Generator))
    assert (generator.rank, generator.gain, generator.bias) == (32, 1e-6, 1e-4)
    l2p = FedL2P()
    assert (l2p.validation, l2p.outer, l2p.draws, l2p.terms, l2p.psi, l2p.patience) == (0.2, 3, 16, 3, 0.1, 50)
    assert [AdaLora(rank=r).start for r in (2, 4, 8, 16)] == [3, 6, 12, 24]
    ada = AdaLora()
    assert (ada.alpha, ada.orthogonal, ada.interval, ada.warmup, ada.final) == (8, 0.1, 1, 0.1, 0.3)
    assert (ada.beta1, ada.beta2) == (0.85, 0.85)


def test_a_new_generator_is_drawn_as_stated() -> None:
    """Xavier normal: the standard deviation is 1e-6 sqrt(2 / (in + out)); the slope starts at 0.25, biases at 1e-4."""
    layout = Layout(budgeted_layout(8, 2.0, True).slots, extras=(Generator(8),))
    state = select(make_site("vit", layout, targets="all").model.dump(slot(GENERATOR)), slot(GENERATOR))
    for name in ("first", "second"):
        weight = state[f"{GENERATOR}/{name}/W"]
        assert float(weight.std()) == pytest.approx(1e-6 * (2 / sum(weight.shape)) ** 0.5, rel=0.05)
        assert bool((state[f"{GENERATOR}/{name}/b"] == 1e-4).all())
    assert state[f"{GENERATOR}/activation/slope"].tolist() == [0.25]


def test_wrong_settings_of_a_block_are_named_with_their_place() -> None:
    _, method, problems = check_method(
        {"name": "fedp2eft", "generator": {"steps": 0, "lr": 0.0}, "search": {"priors": "exact"}}
    )
    assert method is None
    keys = {problem.split(":")[0] for problem in problems}
    assert keys == {"method.generator.steps", "method.generator.lr", "method.search.priors"}


@pytest.mark.parametrize(("steps", "inert"), [(1, True), (2, True), (3, False), (4, False)])
def test_scales_leave_their_bound_in_the_third_step_of_a_search(steps: int, inert: bool) -> None:
    """While B is zero only the priors speak, and the first step sends every scale below its bound of 1e-4."""
    site = make_site("bert", budgeted_layout(4, 2.0, True), rows=32, budget=replace(BUDGET, lr=1e-4), targets="all")
    found = finish(searching(site, AT, Search(), steps))
    assert bool((found == 1e-4).all()) == inert
    assert float(found.mean()) < {3: 0.006, 4: 0.015}.get(steps, 0.0002)  # 0.0048 and 0.011 on names in 15 languages


@pytest.mark.parametrize(
    ("method", "train", "told"),
    [
        ({"name": "fedp2eft", "epochs": 2}, {"batch_size": 100}, ""),
        ({"name": "fedp2eft", "epochs": 1}, {"batch_size": 100}, "3 of 3 clients search .* first client-00 in 2: in"),
        ({"name": "fedp2eft"}, {"max_steps": 3}, "3 of 3 clients search .* in 3: in .* Give a larger train.max_steps"),
        ({"name": "bayestune", "rounds_search": 2}, {"max_steps": 1}, "3 of 3 clients search .* first client-00 in 2"),
        ({"name": "bayestune", "rounds_search": 2}, {"max_steps": 2}, ""),
    ],
)
def test_fewer_search_steps_than_scales_need_are_warned_of(
    method: dict[str, Any], train: dict[str, Any], told: str
) -> None:
    values = {"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}, "method": method, "train": train}
    warnings = check(load_experiment({**values, "baselines": []}))["warnings"]
    found = [one for one in warnings if "for ranks in fewer than 4 steps" in one]
    assert len(found) == bool(told) and all(re.search(told, one) for one in found)
