"""AdaLoRA's terms and budgets; LoRA as a personal stage against local training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import select, slot, to_slot
from befit.adapters.layout import lora
from befit.adapters.model import AdaptedModel
from befit.core.errors import ConfigError
from befit.core.storage import read_json
from befit.core.values import Payload, Tick
from befit.methods.adalora import AdaLora
from befit.methods.fedl2p import FedL2P
from befit.methods.lora import Lora
from befit.methods.parts.budget.allocate import Allocator, Orthogonality, Timetable
from befit.methods.parts.recipe.personal import LocalTraining
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.federate import final_download
from befit.protocol.jobs import finish
from befit.protocol.method import Use
from befit.protocol.registry import build_method
from befit.protocol.serve import deployment
from befit.protocol.settings import TrainSettings
from befit.runs.peft_io import write_adapter
from befit.train.loop import train
from befit.train.passes import Pass
from tests.federation import Clients
from tests.tiny import assert_same, make_site, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
STEPS = 14
AT = Tick("budget", 1, 1, 0)


def adapted(method: AdaLora):
    """A ViT without a trained head, whose loss is then the same in PEFT."""
    model = AdaptedModel(tiny_model("vit"), "all", head=False)
    budget = TrainSettings(max_steps=STEPS, batch_size=4, lr=2e-2)
    return make_site("vit", method.layout, model=model, budget=budget)


def test_the_orthogonality_term_is_a_mean_of_norms() -> None:
    """Orthonormal factors cost nothing; twice as long ones || 3 I ||_F = 3 sqrt(r)."""
    method = AdaLora(rank=2)
    site = adapted(method)
    state = site.model.dump(slot(BUDGETED))
    for key, value in state.items():
        if not key.endswith("lambda"):
            tall = torch.linalg.qr(torch.randn(max(value.shape), min(value.shape)))[0]
            state[key] = 2 * (tall if value.shape[0] > value.shape[1] else tall.T)
    site.model.load(state)
    penalty = Orthogonality(BUDGETED, 0.5).bind(site)
    assert float(penalty({}, torch.zeros(1))) == pytest.approx(0.5 * 3 * 3**0.5, rel=1e-4)
    site.model.load({key: value / 2 for key, value in state.items()})
    assert float(penalty({}, torch.zeros(1))) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(("kind", "active"), [("bert", False), ("llama", True)])
def test_the_parity_preset_leaves_orthogonality_out_where_there_are_classes(kind: str, active: bool) -> None:
    """Its adapters are those without the term for a classifier, and those with it for a language model."""
    adapters = {}
    for name, options in (("parity", {"preset": "parity"}), ("with", {}), ("without", {"orthogonal": 0.0})):
        method = AdaLora(rank=2, **options)
        site = make_site(kind, method.layout, budget=TrainSettings(max_steps=3, batch_size=4, lr=2e-2))
        (stage,) = method.plan()
        adapters[name] = finish(stage.exchange.client_update(Payload(), Payload(), site, AT))[0].arrays
    same, other = ("with", "without") if active else ("without", "with")
    assert_same(adapters["parity"], adapters[same])
    key = next(key for key in adapters["parity"] if key.endswith("/A"))
    assert not torch.equal(adapters["parity"][key], adapters[other][key])


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 57])
@pytest.mark.parametrize("final", [0.0, 0.3])
def test_however_few_steps_there_are_the_last_choice_is_the_budget(steps: int, final: float) -> None:
    table = Timetable.over(steps, 24, 16, 0.1, final)
    ranks = [table.ranks(step) for step in range(steps)]
    assert ranks == sorted(ranks, reverse=True) and ranks[-1] == 16 and table.allocates(steps - 1)


def test_shares_of_steps_are_those_of_the_decimals() -> None:
    """In binary 0.58 of 50 is 28.99... and 0.29 of 100 is 28.99..., too."""
    assert Timetable.over(50, 24, 16, 0.1, 0.58) == Timetable(24, 16, 5, 50 - 29)
    assert Timetable.over(100, 24, 16, 0.29, 0.3) == Timetable(24, 16, 29, 70)


@pytest.mark.parametrize(("rank", "rounds"), [(1, 1), (1, 2), (2, 2), (4, 3)])
def test_a_budget_is_exact_whatever_the_rounds(rank: int, rounds: int) -> None:
    """Of a module that lost all its ranks in the last round nothing is kept of the round before."""
    method = AdaLora(rank=rank)
    clients = Clients(method)
    clients.run(rounds=rounds)
    shapes = clients.model.shapes.targets
    for client in clients.sites:
        memory = clients.memory(client).arrays
        assert not {"optimiser", "allocation"} & Payload(memory).parts().keys()
        kept = {key.split("/")[1]: value for key, value in memory.items() if key.endswith("/lambda")}
        assert sum(int((value != 0).sum()) for value in kept.values()) == rank * len(shapes)
        numbers = sum(int((kept[name] != 0).sum()) * (shape.d_in + shape.d_out) for name, shape in shapes.items())
        stored = [v.numel() for k, v in memory.items() if k.startswith(BUDGETED) and k.endswith(("/A", "/B"))]
        assert sum(stored) == numbers


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_is_deployed_before_the_timetable_ends_is_cut_to_the_budget(rounds: int) -> None:
    """Before and after the first choice: a run can go back to its best round, and a client can miss the last one."""
    method = AdaLora(rank=2)
    site, memory = adapted(method), Payload()
    (stage,) = method.plan()
    for number in range(1, rounds + 1):
        site.model.reset()
        tick = Tick("budget", number, 10, 0)
        memory = finish(stage.exchange.client_update(memory, Payload(), site, tick))[0]
    budget = 2 * len(site.model.shapes.targets)
    adapter = select(memory.arrays, slot(BUDGETED))
    before = {key: int((value != 0).sum()) for key, value in adapter.items() if key.endswith("/lambda")}
    site.model.reset()
    arrays = method.deploy(memory, Payload(), site).arrays
    after = {key: int((value != 0).sum()) for key, value in arrays.items() if key.endswith("/lambda")}
    assert sum(before.values()) > budget == sum(after.values())
    assert all(after[key] <= count for key, count in before.items())


def test_a_client_that_missed_the_last_choice_keeps_the_budget_too() -> None:
    """It is there in rounds 1 and 4 of four; the last choice is in the third."""
    method, memory = AdaLora(rank=2), Payload()
    (stage,) = method.plan()
    for round_ in (1, 4):
        site = make_site("vit", method.layout, targets="all", budget=TrainSettings(max_steps=5, batch_size=4, lr=2e-2))
        update = stage.exchange.client_update(memory, Payload(), site, Tick("budget", round_, 4, 0))
        memory = finish(update)[0]
    scales = [value for key, value in memory.arrays.items() if key.startswith(BUDGETED) and key.endswith("/lambda")]
    assert sum(int((value != 0).sum()) for value in scales) == 2 * len(site.model.shapes.targets)


def test_rounds_are_one_training_cut_in_pieces() -> None:
    """Two rounds that keep averages and optimiser choose as a single allocator over the same batches does."""
    method = AdaLora(rank=2)
    clients = Clients(method, count=1)
    clients.run(rounds=2)
    site = clients.fresh("a")
    modules = len(site.model.shapes.targets)
    table = Timetable.over(6, 3 * modules, 2 * modules, 0.1, 0.3)
    running = Payload()
    allocator = Allocator(site.model, BUDGETED, table)
    for round_ in (1, 2):
        one = Pass(
            slot(BUDGETED),
            (BUDGETED,),
            (Orthogonality(BUDGETED, 0.1),),
            keep_optimiser=True,
            after=lambda step, leaves, offset=3 * (round_ - 1): allocator(step + offset, leaves),
        )
        running = train(site, [one], Tick("budget", round_, 2, 0), memory=running).memory
    found, memory = site.model.dump(slot(BUDGETED)), clients.memory("a").arrays
    for key, value in memory.items():
        if key.endswith("/lambda"):
            assert torch.equal(value, found[key])


@pytest.mark.parametrize(
    "method",
    [
        AdaLora(rank=1),
        Lora(rank=2),
        AdaLora(rank=1, base={"name": "fedit", "rank": 2}),
        FedL2P(rank=2, outer=1, draws=1),
        FedL2P(rank=2, outer=1, draws=1, base={"name": "ditto", "rank": 2}),
    ],
)
def test_the_checkpoint_gives_the_same_logits_in_PEFT(method: Any, tmp_path: Path) -> None:
    import peft

    clients = Clients(method)
    server = clients.run()
    assert not clients.journal.failures
    received = final_download(method, server, clients.sites["a"].info, Tick("budget", 2, 2, 0))
    found = deployment(method, clients.fresh("a"), clients.store, received, Tick("budget", 2, 2, 0), 2)
    write_adapter(tmp_path / "adapter", found, clients.model, base="tiny", task="image-classification")
    config = read_json(tmp_path / "adapter" / "adapter_config.json")
    ranks = [config["rank_pattern"].get(path, config["r"]) for path in config["target_modules"]]
    if method.before is None:
        assert sum(ranks) == method.rank * len(clients.model.shapes.targets)
    site = clients.fresh("a")
    batch = site.examples("test").batch(torch.arange(4))
    site.model.load(found.arrays)
    with torch.no_grad(), site.model.active(*found.slots):
        ours = site.logits(batch)
        loaded = peft.PeftModel.from_pretrained(tiny_model("vit"), str(tmp_path / "adapter")).eval()
        theirs = site.task.logits(loaded, batch)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_lora_without_a_base_is_local_training_bit_for_bit() -> None:
    """Under the same name of the stage, which decides the batches."""
    alone = LocalTraining((Pass(slot("personal"), ("personal",), keep_optimiser=True),), name="budget")
    recipe = Recipe(layout=lora(2, 4.0, slots=("personal",)), before=(alone,), use=Use(("personal",)))
    ours, theirs = Clients(Lora(rank=2)), Clients(recipe)
    ours.run()
    theirs.run()
    found, expected = ours.memory("a").arrays, theirs.memory("a").arrays
    adapter = {to_slot(key, BUDGETED): value for key, value in expected.items() if key.startswith("personal/")}
    assert_same(adapter, {key: found[key] for key in found if key.startswith(f"{BUDGETED}/")})
    assert len(found) == len(adapter)  # nothing goes on after the last round


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 0}, "rank: must be 1 or more"),
        ({"rank": 8, "init_rank": 4}, "init_rank: must not be below"),
        ({"warmup": 0.6, "final": 0.5}, "warmup: and final"),
        ({"interval": 0}, "interval"),
        ({"beta1": 1.0}, "beta1"),
        ({"orthogonal": -1.0}, "orthogonal"),
        ({"base": {"name": "lora"}}, "has a stage 'budget'"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_method({"name": "adalora", **arguments})
