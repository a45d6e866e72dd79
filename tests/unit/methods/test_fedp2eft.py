"""FedP2EFT and BayesTune-LoRA as runs: what travels, what stays, budgets from one training, bases, PEFT checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from befit import Run
from befit.adapters.bayestune import BUDGETED, LOW, SCALES
from befit.adapters.keys import select, slot, to_slot
from befit.cli.main import app
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, NotEnoughReplies
from befit.core.storage import read_json
from befit.core.values import Payload, Tick
from befit.methods.bayestune import BayesTune
from befit.methods.fedl2p import FedL2P
from befit.methods.fedp2eft import FedP2EFT
from befit.methods.lora import Lora
from befit.methods.parts.budget.generator import GENERATOR
from befit.protocol.federate import final_download
from befit.protocol.jobs import finish
from befit.protocol.method import Method, run_stages
from befit.protocol.registry import build_method
from befit.protocol.serve import deployment, score
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.peft_io import write_adapter
from befit.runs.runner import run
from tests.backbones import short_vit
from tests.contract.test_newcomers import arrivals
from tests.federation import Clients
from tests.tiny import assert_same, federated, tiny_model

# PEFT asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
SMALL: dict[str, Any] = {"rank": 2, "rank_max": 4}


def ended(clients: Clients, method: Any, server: Any, client: str, rounds: int = 2) -> tuple[Any, Any]:
    at = Tick("budget", rounds, rounds, 0)
    received = final_download(method, server, clients.sites[client].info, at)
    return received, at


def test_a_round_sends_the_generator_and_nothing_else_and_leaves_the_stored_one_alone() -> None:
    method = FedP2EFT(**SMALL)
    clients = Clients(method)
    weights = {key: value.clone() for key, value in clients.model.backbone.state_dict().items()}
    server = clients.run()
    assert not clients.journal.failures
    for sent in clients.uploads(1, "generate").values():
        assert sent and all(key.startswith(f"{GENERATOR}/") for key in sent)
    assert all(torch.equal(value, weights[key]) for key, value in clients.model.backbone.state_dict().items())
    assert server.arrays.keys() == select(clients.initial, slot(GENERATOR)).keys()
    assert all(
        u.report["gap_after"] < u.report["gap_before"] for at, u in clients.journal.updates if at.stage == "generate"
    )


def test_the_server_averages_by_examples() -> None:
    """Clients of 6, 9 and 12 examples: (6 a + 9 b + 12 c) / 27."""
    clients = Clients(FedP2EFT(**SMALL))
    server = clients.run(rounds=1)
    sent = clients.uploads(1, "generate")
    for key, value in server.arrays.items():
        expected = (6 * sent["a"][key] + 9 * sent["b"][key] + 12 * sent["c"][key]) / 27
        assert torch.allclose(value, expected, atol=1e-6)


@pytest.mark.parametrize("method", [FedP2EFT(**SMALL, budgets=(1, 2, 4)), BayesTune(**SMALL, budgets=(1, 2, 4))])
def test_all_budgets_come_from_one_set_of_scales_and_nest(method: Any) -> None:
    clients = Clients(method)
    server = clients.run()
    memory, modules = clients.memory("a"), len(clients.model.shapes.targets)
    assert sum(key.startswith("scales/") for key in memory.arrays) == 1
    ranks: dict[int, dict[str, torch.Tensor]] = {}
    for name, r in method.kept.names.items():
        ranks[r] = {
            key.split("/")[1]: value
            for key, value in memory.arrays.items()
            if key.startswith(f"{name}/") and key.endswith("/lambda")
        }
        assert sum(int((value != 0).sum()) for value in ranks[r].values()) == r * modules
    for less, more in ((1, 2), (2, 4)):
        assert all(bool((ranks[more][name] != 0)[value != 0].all()) for name, value in ranks[less].items())
    assert "optimiser" not in memory.parts()  # after the last round nothing goes on
    received, at = ended(clients, method, server, "a")
    found = score(method, clients.fresh("a"), clients.store, received, at, 2, "test", 8).metrics
    assert {"accuracy", "accuracy r1", "accuracy r2", "accuracy r4"} <= found.keys()
    assert all(found[metric] == found[f"{metric} r2"] for metric in found if " " not in metric)


def test_a_client_keeps_its_features_alone_and_starts_each_round_from_fresh_ranks() -> None:
    """Property 13: what it sends in round 2 is what it would send had it never been there before."""
    method = FedP2EFT(**SMALL)
    clients = Clients(method)
    server = clients.run()
    assert not any(clients.initial[key].any() for key in clients.initial if key.endswith("/B"))
    updates = {(at.round, u.client.id): u for at, u in clients.journal.updates if at.stage == "generate"}
    start = method.server_init(clients.server_site)
    first = federated(method).aggregate(
        start, [updates[1, client] for client in "abc"], clients.server_site, Tick("generate", 1, 2, 0)
    )
    for client in "abc":
        memory, sent = finish(
            federated(method).client_update(
                Payload(),
                federated(method).dispatch(first, clients.sites[client].info, Tick("generate", 2, 2, 0)),
                clients.fresh(client),
                Tick("generate", 2, 2, 0),
            )
        )
        assert [*memory.arrays] == ["features/all/f"] and not memory.scalars
        assert_same(sent.arrays, updates[2, client].payload.arrays)
        held = {key.partition("/")[0] for key in clients.memory(client).arrays}
        assert held == {"features", "scales", BUDGETED}, held  # of the stages after it: scales and the adapter
    assert server.arrays.keys() == first.arrays.keys()


@pytest.mark.parametrize("make", [FedP2EFT, BayesTune])
def test_every_budget_is_trained_from_fresh_ranks_as_if_it_were_the_only_one(make: Any) -> None:
    """Neither the search nor the budget before it leaves anything in A and B."""
    several, alone = Clients(make(rank=1, rank_max=4, budgets=(4, 2))), Clients(make(rank=2, rank_max=4))
    several.run()
    alone.run()
    for client in "abc":
        expected = select(dict(alone.memory(client).arrays), slot(BUDGETED))
        found = select(dict(several.memory(client).arrays), slot(f"{BUDGETED}-2"))
        assert_same({to_slot(key, BUDGETED): value for key, value in found.items()}, expected)
        # The same from nothing but the scales: the stage before it kept no A and B.
        scales = Payload(
            {key: value for key, value in alone.memory(client).arrays.items() if key.startswith("scales/")}
        )
        for round_ in (1, 2):
            at = Tick("budget", round_, 2, 0)
            scales, _ = finish(
                alone.method.plan()[-1].exchange.client_update(scales, Payload(), alone.fresh(client), at)
            )
        assert_same(select(dict(scales.arrays), slot(BUDGETED)), expected)


def test_training_a_budget_leaves_its_scales_as_they_were() -> None:
    method = BayesTune(**SMALL)
    clients = Clients(method)
    clients.run()
    memory = clients.memory("b")
    scales = memory.arrays["scales/all/lambda"]
    for row, name in zip(scales, clients.model.shapes.targets, strict=True):
        kept = memory.arrays[f"{BUDGETED}/{name}/lambda"]
        assert torch.equal(kept[kept != 0], row[kept != 0])
    assert bool((scales >= LOW).all()) and float(scales.std()) > 0


def test_a_limit_in_parameters_is_kept_and_one_that_holds_nothing_is_refused() -> None:
    """A rank of a 16 x 16 module takes 32 numbers: 100 parameters are three ranks."""
    clients = Clients(BayesTune(**SMALL, parameters=100))
    clients.run()
    sizes = [
        value.numel()
        for key, value in clients.memory("a").arrays.items()
        if key.startswith(f"{BUDGETED}/") and key.endswith(("/A", "/B"))
    ]
    assert sum(sizes) == 96
    refused = Clients(BayesTune(**SMALL, parameters=10))
    with pytest.raises(NotEnoughReplies, match=r"limit of 10 parameters holds no rank of the module"):
        refused.run()
    assert {(one.client, one.stage, one.kind) for one in refused.journal.failures} == {
        (client, "budget", "ModelError") for client in "abc"
    }


@pytest.mark.parametrize("make", [FedP2EFT, BayesTune])
def test_clients_have_limits_of_their_own_in_ranks_parameters_or_megabytes(make: Any) -> None:
    """Four modules of 16 x 16: a takes 3 ranks a module, b 200 // 32 ranks, c 0.001 MB = 250 numbers, so 7 ranks."""
    limits = {"a": {"rank": 3}, "[b]": {"parameters": 200}, "*": {"megabytes": 0.001}}
    clients = Clients(make(**SMALL, budgets=(4,), limits=limits))
    clients.run()
    modules = len(clients.model.shapes.targets)
    for client, ranks in (("a", 3 * modules), ("b", 6), ("c", 7)):
        arrays = clients.memory(client).arrays
        for name, expected in ((BUDGETED, ranks), (f"{BUDGETED}-4", 4 * modules)):
            found = [value for key, value in arrays.items() if key.startswith(f"{name}/") and key.endswith("/lambda")]
            assert sum(int((value != 0).sum()) for value in found) == expected, (client, name)


def test_bayestune_learns_its_scales_on_top_of_a_base() -> None:
    clients = Clients(BayesTune(**SMALL, base={"name": "fedit", "rank": 2}))
    clients.run()
    assert not clients.journal.failures
    bare = Clients(BayesTune(**SMALL))
    bare.run()
    on_base, alone = (one.memory("a").arrays["scales/all/lambda"] for one in (clients, bare))
    assert not torch.allclose(on_base, alone, rtol=1e-3)


def test_a_base_has_rounds_of_its_own_if_they_are_given() -> None:
    """A method with such an option keeps it; every other one's stages get them, where they would take the run's."""
    for base, rounds in (
        ({"name": "fedit"}, None),
        ({"name": "fedit", "rounds": 7}, 7),
        ({"name": "local", "rounds": 3}, 3),
    ):
        (first, fixed, own), (_, _, generate, *_) = Lora(base=base).plan(), FedP2EFT(base=base).plan()
        assert (first.rounds, fixed.name, fixed.rounds, own.rounds) == (rounds, "base", 1, None)
        assert (generate.name, generate.rounds) == ("generate", None)
    potara = Lora(base={"name": "potara", "rounds": 7}).plan()
    assert [(one.name, one.rounds) for one in potara][:3] == [("local", 7), ("federate", 7), ("merge", 1)]
    for wrong in (0, -1, 1.5, "x", True):
        with pytest.raises(ConfigError, match=r"base\.rounds: must be (positive|a whole number or null), got"):
            Lora(base={"name": "fedit", "rounds": wrong})


BASES: list[dict[str, Any]] = [
    {"name": "fedit", "rank": 2},
    {"name": "local", "rank": 2},
    {"name": "ditto", "rank": 2},
    {"name": "fedavg"},
    {"name": "dept"},
    {"name": "feddpa_t", "rank": 2},
]


def rounds_of(method: Method) -> dict[str, int]:
    return {stage.name: stage.rounds or 2 for stage in run_stages(method)}


@pytest.mark.parametrize(
    "method",
    [*(FedP2EFT(**SMALL, base=base) for base in BASES), FedL2P(rank=2, outer=1, draws=1, base=BASES[-1])],
    ids=lambda method: f"{type(method).__name__} on {method.base['name']}",
)
def test_a_base_stays_as_it_was_deployed_beneath_the_budget(method: Any) -> None:
    base = method.base
    clients = Clients(method)
    server = clients.run()
    assert not clients.journal.failures
    alone = build_method(base)
    others = Clients(alone)
    end = others.run()
    stage = alone.plan()[-1]
    at = Tick(stage.name, 2, 2, 0)
    received = final_download(alone, end, others.sites["a"].info, at)
    expected = deployment(alone, others.fresh("a"), others.store, received, at, rounds_of(alone))
    received, at = ended(clients, method, server, "a")
    found = deployment(method, clients.fresh("a"), clients.store, received, at, rounds_of(method))
    assert found.slots == (*expected.slots, BUDGETED)
    for key, value in expected.arrays.items():
        assert torch.equal(found.arrays[key], value), key


@pytest.mark.parametrize("name", ["feddpa_t", "dept"])
def test_a_client_that_the_base_never_asked_has_its_own_part_as_it_starts(name: str) -> None:
    """One client a round, one round: two of three have no personal adapter, or no embeddings, of their own."""
    clients = Clients(FedP2EFT(**SMALL, base={"name": name}))
    server = clients.run(rounds=1, cohort=1)
    assert not clients.journal.failures
    (took_part,) = {u.client.id for at, u in clients.journal.updates if at.stage == "federate"}
    own = "personal" if name == "feddpa_t" else "embeddings"
    for client in "abc":
        held = {
            key.partition("@")[2]: value
            for key, value in clients.memory(client).arrays.items()
            if key.startswith("fixed@")
        }
        mine = {key: value for key, value in held.items() if own in key and key not in server.part("base").arrays}
        moved = any(not torch.equal(value, clients.initial[key]) for key, value in mine.items())
        assert mine and moved == (client == took_part)


@pytest.mark.parametrize("kind", ["vit", "llama"])
def test_the_checkpoint_gives_the_same_logits_in_PEFT_with_ranks_by_module(kind: str, tmp_path: Path) -> None:
    import peft

    method = BayesTune(rank=1, rank_max=4)
    clients = Clients(method, kind=kind)
    server = clients.run()
    received, at = ended(clients, method, server, "a")
    found = deployment(method, clients.fresh("a"), clients.store, received, at, rounds_of(method))
    task = "causal-lm" if kind == "llama" else "image-classification"
    write_adapter(tmp_path / "adapter", found, clients.model, base="tiny", task=task)
    config = read_json(tmp_path / "adapter" / "adapter_config.json")
    modules = len(clients.model.shapes.targets)
    own = [config["rank_pattern"].get(path, config["r"]) for path in config["target_modules"]]
    assert sum(own) == modules and len(own) <= modules  # r L = 1 L, and no module of rank zero
    site = clients.fresh("a")
    batch = site.examples("test").batch(torch.arange(4))
    site.model.load(found.arrays)
    with torch.no_grad(), site.model.active(*found.slots):
        ours = site.logits(batch)
        loaded = peft.PeftModel.from_pretrained(tiny_model(kind), str(tmp_path / "adapter")).eval()
        theirs = site.task.logits(loaded, batch)
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.fixture(scope="module")
def three_budgets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Host, Run]:
    """Digits of two clients and a newcomer, with one budget deployed and two measured beside it."""
    settings = {
        "name": "budgets",
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "model": {"id": short_vit()},
        "limit": {"records": 48},
        "baselines": [],
        "adapter": {"targets": ["all"]},
        "method": {"name": "fedp2eft", "rank": 2, "rank_max": 4, "budgets": [1, 4]},
        "train": {"max_steps": 2, "lr": 5e-3},
        "federation": {"rounds": 1},
        "report": {"plots": False},
    }
    host = arrivals(load_experiment(settings))
    return host, run(host.experiment, out=tmp_path_factory.mktemp("budgets") / "run", host=host)


@pytest.mark.parametrize("budget", [None, 1, 2, 4])
def test_every_budget_of_clients_and_newcomers_is_an_adapter_that_PEFT_scores_alike(
    budget: int | None, three_budgets: tuple[Host, Run], tmp_path: Path
) -> None:
    """r L ranks in plain PEFT, exported on the command line; without a budget what is deployed, of rank 2."""
    import peft
    from transformers import AutoModelForImageClassification

    host, done = three_budgets
    modules = len(host.backbone_of(host.infos[0].id).model.shapes.targets)
    rows = {**done.results["clients"], **done.results["newcomers"]["clients"]}
    assert len(rows) == 3 and len(done.results["newcomers"]["clients"]) == 1
    for client, row in rows.items():
        out = tmp_path / client
        asked = () if budget is None else ("--budget", str(budget))
        called = CliRunner().invoke(app, ["export", str(done.path), "--client", client, "--out", str(out), *asked])
        assert called.exit_code == 0, called.stderr
        plain = AutoModelForImageClassification.from_pretrained(short_vit())
        loaded = peft.PeftModel.from_pretrained(plain, str(out)).eval()
        ranks = [value.shape[0] for key, value in loaded.named_parameters() if "lora_A" in key]
        assert sum(ranks) == (budget or 2) * modules
        site = host.site(next(info for info in (*host.infos, *host.newcomers) if info.id == client))
        found = site.task.evaluate(loaded, site.examples("test"), 64, torch.device("cpu"))
        assert found["loss"] == pytest.approx(row["loss" if budget is None else f"loss r{budget}"], rel=1e-4)
    refused = CliRunner().invoke(
        app, ["export", str(done.path), "--client", client, "--out", str(tmp_path / "x"), "--budget", "3"]
    )
    assert refused.exit_code == 2 and "no adapter of the budget 3; it has 1, 2, 4" in refused.stderr.replace("\n", " ")


def test_a_client_that_never_took_part_needs_the_download_and_its_own_data_alone() -> None:
    method = FedP2EFT(**SMALL)
    clients = Clients(method)
    info = clients.infos[2]
    clients.engine = LocalEngine(method, clients.infos[:2], clients.site, clients.store)
    server = clients.run()
    site, memory = clients.fresh(info.id), method.client_init(clients.fresh(info.id))
    assert clients.store.load(info.id) is None
    for stage in method.plan()[1:]:
        at = Tick(stage.name, 1, 1, 0)
        site.model.reset()
        received = stage.exchange.dispatch(server, info, at)
        memory, reply = finish(stage.exchange.client_update(memory, received, site, at))
        assert not reply.arrays
    site.model.reset()
    deployed = method.deploy(memory, received, site)
    kept = [int((value != 0).sum()) for key, value in deployed.arrays.items() if key.endswith("/lambda")]
    assert sum(kept) == 2 * len(clients.model.shapes.targets)
    assert SCALES not in {key.partition("/")[0] for key in deployed.arrays}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 9, "rank_max": 4}, "rank: must be from 1 to 2"),
        ({"budgets": (2, 40)}, "budgets: must be from 1"),
        ({"parameters": 5, "megabytes": 1.0}, "two ways"),
        ({"megabytes": -1.0}, "megabytes: must be positive"),
        ({"limits": {"a": {"rank": 99}}}, r"limits.a: rank: must be from 1 to 2 \* rank_max"),
        ({"limits": {"a": {"ranks": 2}}}, "limits.a: takes one of rank, parameters, megabytes"),
        ({"limits": {"a": {"parameters": 2.5}}}, "limits.a: parameters must be a whole number"),
        ({"limits": {"a": {"megabytes": 1e-6}}}, "limits.a: megabytes: 1e-06 are less than the 4 bytes"),
        ({"base": {"name": "fedid"}}, "fedit"),
        ({"base": {"name": "fedp2eft"}}, "has a stage"),
        ({"base": {"name": "fedalt"}}, "base: fedalt mixes its slots by 'gate'"),
        ({"base": {"name": "rela"}}, "base: rela mixes its slots by 'gate'"),
        ({"base": {"name": "fedsim"}}, "base: fedsim mixes its slots by 'logits'"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FedP2EFT(**arguments)
