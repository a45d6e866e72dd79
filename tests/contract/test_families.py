"""Clients with two backbones in one federation: each family as it would be alone, and nothing crosses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import befit
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.values import Payload
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.describe import describe
from befit.protocol.federate import federate
from befit.protocol.method import Method, Wrapped, shared_stages_of
from befit.protocol.per_family import ByFamily, _PerFamilyExchange, each_family
from befit.protocol.registry import build_method
from befit.protocol.schedule import Schedule
from befit.protocol.stage import Exchange
from befit.protocol.store import ClientStore
from befit.runs.artifacts import predict
from befit.runs.clients import family_settings
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.method_run import relative_costs
from befit.runs.runner import check
from tests.federation import Federation, Memo, Stop

from .conftest import experiment

SMALL = {"id": "skills-llama-s"}


def settings(**more: Any) -> dict[str, Any]:
    return {
        "name": "mixed",
        "benchmark": {"name": "skills", "clients": 4, "train": 8, "val": 2, "test": 4},
        "model": {"id": "skills-llama", "max_length": 96},
        "adapter": {"targets": ["q_proj", "v_proj"]},
        "families": {"small": {"clients": ["reverse.upper", "star-vowels.reverse"], "model": SMALL}},
        "method": {"name": "fedit", "rank": 4},
        "baselines": [],
        "train": {"max_steps": 1, "batch_size": 2},
        "federation": {"rounds": 2},
        "report": {"plots": False},
        "evaluate": {"metrics": ["exact_match"], "max_new_tokens": 3},
        **more,
    }


@pytest.fixture(scope="module")
def mixed() -> Host:
    return Host(load_experiment(settings()))


def test_every_client_has_the_backbone_that_the_configuration_gives_it(mixed: Host) -> None:
    small, large = mixed.backbone_of("reverse.upper"), mixed.backbone_of("drop-first.reverse")
    assert mixed.backbone_of("star-vowels.reverse") is small and mixed.backbone_of("upper.swap-ends") is large
    assert small.parameters < large.parameters and mixed.common is small
    assert [info.backbone for info in mixed.infos] == [one.key for one in (small, large, small, large)]


@pytest.mark.parametrize("name", ["fedit", "scaffold", "potara", "fedalt"])
def test_a_family_gets_what_it_would_get_alone_bit_for_bit(mixed: Host, name: str) -> None:
    together = Federation.on(mixed, mixed.build(name))
    together.run()
    for clients in (["reverse.upper", "star-vowels.reverse"], ["drop-first.reverse", "upper.swap-ends"]):
        alone = Federation.on(mixed, mixed.build(name), clients)
        alone.run()
        family = mixed.backbone_of(clients[0]).key
        mine, wanted = together.server.part(family), alone.server.part(family)
        assert mine.arrays.keys() == wanted.arrays.keys() and mine.arrays
        assert all(torch.equal(mine.arrays[key], wanted.arrays[key]) for key in wanted.arrays)
        for client in clients:
            kept, there = together.store.load(client), alone.store.load(client)
            assert (kept is None) == (there is None)
            if kept is not None and there is not None:
                assert all(torch.equal(kept.arrays[key], value) for key, value in there.arrays.items())


def test_a_family_of_which_nobody_replied_while_clusters_were_found_has_them_from_those_who_come_later(
    mixed: Host,
) -> None:
    """One client takes part in a round, so one of two families is away from the only round that finds clusters."""
    federation = Federation.on(mixed, mixed.build("fedlease"))
    federation.run(rounds=4, cohort=1)
    found = [federation.server.part(one.key) for one in (mixed.common, mixed.backbone_of("drop-first.reverse"))]
    assert all(memory.number("experts") >= 1 and memory.arrays for memory in found)


def test_grouping_says_all_that_the_method_says() -> None:
    """A member of `Method` that `Wrapped` left to the default would be forgotten where there are families or folds."""
    said = {name for name in vars(Method) if not name.startswith("_")} | {"layout", "use"}
    of_its_own = {"plan", "trainable", "starting"}  # the last two are final, and read from the plan
    assert said - of_its_own <= vars(Wrapped).keys()
    alone = build_method({"name": "fedp2eft", "base": {"name": "fedit"}})
    grouped = each_family(alone, 2)
    assert shared_stages_of(grouped) == shared_stages_of(alone) != {}
    assert describe(grouped) == describe(alone)


class Own:
    """A term written for one client."""

    def bind(self, site: Any) -> Any:
        return lambda batch, logits: logits.new_zeros(())


def test_grouping_says_of_an_exchange_what_the_method_says() -> None:
    assert {name for name in vars(Exchange) if not name.startswith("_")} <= vars(_PerFamilyExchange).keys()
    recipe = build_method("ditto")
    assert isinstance(recipe, Recipe) and describe(recipe)["trains in fleets"] == "yes"
    own = replace(recipe, passes=(replace(recipe.passes[0], terms=(Own(),)), *recipe.passes[1:]))
    told = describe(own)["trains in fleets"]
    assert "Own" in told and told == describe(each_family(own, 2))["trains in fleets"]


def test_runs_of_two_families_share_their_first_stages_and_end_as_each_would_alone(tmp_path: Path) -> None:
    """Two rounds of four clients for both methods together, not for each."""
    base = {"name": "fedit", "rank": 2}
    methods = [{"name": name, "rank": 1, "epochs": 1, "base": base} for name in ("lora", "bayestune")]
    some = {"benchmark": {"name": "skills", "clients": 4, "train": 4, "val": 1, "test": 1}}
    events: list[dict[str, Any]] = []
    both = befit.run(settings(**some, method=methods[0], baselines=[methods[1]]), out=tmp_path, observer=events.append)
    trained = [one for one in events if one["kind"] == "client" and one["stage"] == "federate"]
    assert len(trained) == 2 * 4
    alone = befit.run(settings(**some, method=methods[0]), out=tmp_path / "alone")
    for name in ("metrics.jsonl", "outbound.json"):
        assert (both.path / name).read_bytes() == (alone.path / name).read_bytes()
    for path in (alone.path / "clients").rglob("*.safetensors"):
        assert path.read_bytes() == (both.path / path.relative_to(alone.path)).read_bytes()


def test_one_backbone_needs_no_grouping() -> None:
    method = build_method("fedit")
    assert each_family(method, 1) is method and isinstance(each_family(method, 2), ByFamily)


def test_a_mixed_run_from_training_to_predictions(tmp_path: Path) -> None:
    run = befit.run(settings(), out=tmp_path / "run")
    ranks = {
        client: {
            value.shape
            for key, value in load_file(run.path / "clients" / client / "adapter" / "adapter_model.safetensors").items()
            if "lora_A" in key
        }
        for client in ("reverse.upper", "drop-first.reverse")
    }
    assert ranks["reverse.upper"] != ranks["drop-first.reverse"]
    config = json.loads((run.path / "clients" / "reverse.upper" / "adapter" / "adapter_config.json").read_text())
    assert "skills-llama-s" in config["base_model_name_or_path"]
    for client in ("reverse.upper", "drop-first.reverse"):
        (answer,) = predict(run.path, client, [{"instruction": "Reverse: abc"}])
        assert isinstance(answer, dict) and answer
    families = {client: row["family"] for client, row in run.results["clients"].items()}
    assert families["reverse.upper"] == "small" and families["drop-first.reverse"] == "model"
    assert run.results["model"] == "skills-llama-s, skills-llama"
    assert "skills-llama-s" in (run.path / "report.md").read_text()


def test_a_check_has_a_row_for_every_family() -> None:
    checked = check(settings())
    small, large = sorted(checked["families"], key=lambda row: row["backbone_parameters"])
    assert (small["family"], large["family"]) == ("small", "model")
    assert small["clients"] == large["clients"] == 2
    assert small["trainable_parameters"] < large["trainable_parameters"]
    alone = check({**settings(), "families": {}})
    assert alone["trainable_parameters"] == large["trainable_parameters"] and alone["families"] == []


def test_what_is_wrong_with_families_is_said_at_once() -> None:
    wrong = {
        "a": {"clients": [], "model": SMALL},
        "b": {"clients": ["x"]},
        "c": {"clients": ["x"], "model": {"id": "m", "dtyp": "x"}},
    }
    with pytest.raises(ConfigError) as caught:
        load_experiment(settings(families=wrong))
    said = str(caught.value)
    assert "families.a.clients" in said and "families.b.model.id" in said and "families.c.model.dtyp" in said


def test_a_client_in_two_families_and_a_pattern_that_is_nobody_are_refused() -> None:
    both = {
        "a": {"clients": ["*reverse*"], "model": SMALL},
        "b": {"clients": ["drop-first.reverse", "klient-9"], "model": SMALL},
    }
    with pytest.raises(ConfigError, match=r"drop-first.reverse is in a and in b[\s\S]*klient-9 is no client"):
        family_settings(load_experiment(settings(families=both)), {"reverse.upper": {}, "drop-first.reverse": {}})


def test_a_method_that_needs_more_clients_than_a_family_has_says_so() -> None:
    lonely = {"small": {"clients": ["reverse.upper"], "model": SMALL}}
    with pytest.raises(
        ConfigError, match="serves each backbone by itself and needs at least 2 clients of each; the family small has 1"
    ):
        check(settings(families=lonely, method="fedalt"))


def test_a_pattern_may_be_what_is_known_of_a_client() -> None:
    by_size = {"small": {"clients": ["size=sm*"], "model": SMALL}}
    clients = {"a": {"size": "small"}, "b": {"size": "large"}, "small": {}}
    found = family_settings(load_experiment(settings(families=by_size)), clients)
    assert found == {"a": "small", "b": "model", "small": "model"}


@pytest.mark.parametrize(("when", "stop"), [("end", None), ("always", 1)])
def test_others_is_the_mean_score_of_a_clients_model_on_every_other_clients_examples(
    when: str, stop: int | None
) -> None:
    """Of the model that it has at that round: at the end of two, or after the first, where the run is stopped."""
    host = Host(load_experiment(experiment("local", federation={"rounds": 2}, evaluate={"others": when, "every": 1})))
    method = host.build("local")
    memo, store = Memo(stop_after=stop), ClientStore(None, resident=True)
    site = host.install(method)
    engine = LocalEngine.of(host, method, store)
    with nullcontext() if stop is None else pytest.raises(Stop):
        federate(method, engine, site, Schedule(2, 0, evaluate_every=1), memo)
    last = stop or 2
    assert {at.round for at, _ in memo.scores} == set(range(1, last + 1))
    for at, score in memo.scores:
        assert ("others" in score.metrics) == (at.round == 2 or when == "always")
    final = {score.client: score.metrics for at, score in memo.scores if at.round == last}
    for info in host.infos:
        deployed = engine.deployment(info.id, Payload(), memo.scores[-1][0])
        expected = []
        with host.model.using(deployed.arrays, *deployed.slots, mixer=deployed.mixer):
            for other in host.infos:
                if other.id != info.id:
                    examples = host.examples(other.id, "test")
                    expected.append(host.task.evaluate(host.model.backbone, examples, 7, "cpu")["accuracy"])
        assert final[info.id]["others"] == pytest.approx(sum(expected) / 2)
        assert final[info.id]["others"] != final[info.id]["accuracy"]


@pytest.mark.parametrize(("method", "measured"), [("local", 6), ("fedit", 3)])
def test_a_model_that_all_clients_have_is_measured_once_on_each_clients_examples(method: str, measured: int) -> None:
    """In each of two rounds, whose models differ."""
    host = Host(
        load_experiment(experiment(method, federation={"rounds": 2}, evaluate={"others": "always", "every": 1}))
    )
    built = host.build(method)
    memo, store, asked = Memo(), ClientStore(None, resident=True), list[object]()
    site, real = host.install(built), host.task.headline

    def counted(model: Any, examples: Any, *more: Any) -> float:
        asked.append(examples)
        return real(model, examples, *more)

    host.task.headline = counted  # type: ignore[method-assign]
    federate(built, LocalEngine.of(host, built, store), site, Schedule(2, 0, evaluate_every=1), memo)
    assert len(asked) == 2 * measured
    for at, score in memo.scores:
        others = [each.metrics["accuracy"] for when, each in memo.scores if when == at and each.client != score.client]
        if method == "fedit":  # what it has on another's examples is what the other has on its own
            assert score.metrics["others"] == pytest.approx(sum(others) / 2)


def test_a_step_is_counted_on_each_familys_backbone_and_the_frozen_pass_on_the_smallest(mixed: Host) -> None:
    """RELA: 2N + 5n and a gate for each module, and a tenth of the small model's parameters, over 2N + 3n."""
    found = relative_costs(mixed, mixed.build({"name": "rela", "rank": 4}))
    assert {*found} == {"model", "small"} and mixed.common.name == "small"
    for one in mixed.backbones.values():
        shapes = one.model.shapes.targets.values()
        N, n, gates = one.parameters, sum(4 * (shape.d_in + shape.d_out) for shape in shapes), len(shapes)
        units = 2 * (N + 2 * n) + n + gates + 0.1 * mixed.common.parameters
        assert found[one.name]["compute"] == pytest.approx(units / (2 * N + 3 * n), abs=1e-9)
