"""What once went wrong in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.adapters.state import fingerprint
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, RunError
from befit.core.values import Failure, Payload, Score, Tick
from befit.cost.architecture import find_architecture
from befit.cost.compare import compare
from befit.methods.parts.recipe.personal import LocalTraining
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.jobs import finish
from befit.protocol.method import Use
from befit.protocol.registry import build_method
from befit.protocol.schedule import resolved_stages
from befit.protocol.store import ClientStore
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.provenance import locked
from befit.runs.runner import run
from befit.train.passes import Pass
from tests.tiny import federated

from .conftest import Play, experiment


def config(method: Any, **changes: Any) -> dict[str, Any]:
    return experiment(method, **{"federation": {"rounds": 2}, **changes})


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of client-01 are not finite in the last step of every update; its losses all are."""
    import befit.train.request as request

    real = request.make_optimiser

    def make(parameters: Any, budget: Any, *more: Any) -> Any:
        optimiser, steps = real(parameters, budget, *more), 0
        original = optimiser.step

        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == budget.max_steps and make.client == "client-01":  # type: ignore[attr-defined]
                for parameter in (one for group in optimiser.param_groups for one in group["params"]):
                    parameter.grad.fill_(float("nan"))
            return original(*arguments, **options)

        optimiser.step = step
        return optimiser

    make.client = ""  # type: ignore[attr-defined]
    from befit.protocol.site import Site

    drawn = Site.indices

    def watched(self: Site, split: str, steps: int, at: Tick) -> Any:
        make.client = self.info.id  # type: ignore[attr-defined]
        return drawn(self, split, steps, at)

    monkeypatch.setattr(Site, "indices", watched)
    monkeypatch.setattr(request, "make_optimiser", make)


@pytest.mark.parametrize("method", ["local", "fedsa", "ditto", "potara"])
def test_a_client_whose_last_step_overflows_is_left_out_and_the_others_finish(
    method: str, poisoned: None, tmp_path: Path
) -> None:
    done = run(config(method), out=tmp_path / "run")
    rows = done.results["clients"]
    assert rows["client-01"]["updates"] == 0 and rows["client-00"]["updates"] > 0
    assert {f["client"] for f in done.results["failures"]} == {"client-01"}
    assert any("not finite" in f["reason"] for f in done.results["failures"])
    for client in ("client-00", "client-02"):
        assert rows[client]["accuracy"] is not None
        assert (done.path / rows[client]["adapter"] / "adapter_model.safetensors").exists()
    if method != "fedsa":  # whose deployed slot has a shared half, so there is something to deploy
        assert rows["client-01"]["accuracy"] is None and rows["client-01"]["adapter"] is None
        assert done.results["summary"]["scored"] == 2
        assert not (done.path / "clients" / "client-01").exists()


def test_bytes_of_exchanges_that_failed_are_counted(tmp_path: Path, poisoned: None) -> None:
    row = run(config("ditto"), out=tmp_path / "run").results["clients"]["client-01"]
    assert row["bytes_up"] == 0 and row["bytes_down"] > 0


def test_an_old_score_does_not_stand_for_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import befit.runs.local as local

    real = local.score

    def failing(method: Any, site: Any, store: Any, received: Any, at: Tick, *rest: Any) -> Any:
        if site.info.id == "client-01" and at.round == 2:
            raise ValueError("the labels of this site are gone")
        return real(method, site, store, received, at, *rest)

    monkeypatch.setattr(local, "score", failing)
    done = run(config("fedit", evaluate={"every": 1}), out=tmp_path / "run")
    assert done.results["clients"]["client-01"]["accuracy"] is None
    assert done.results["summary"]["scored"] == 2
    others = [done.results["clients"][c]["accuracy"] for c in ("client-00", "client-02")]
    assert done.results["summary"]["mean"] == pytest.approx(sum(others) / 2)


def answering(play: Play, host: Host, change: Any) -> Failure:
    """What comes of an update whose reply is changed at the client, before it is sent."""
    done = play(deepcopy(build_method("fedit")), rounds=1)  # which others have too
    method = done.engine._method
    (stage,) = method.plan()
    exchange = stage.exchange
    real = type(exchange).client_update

    def update(client: Payload, received: Payload, site: Any, at: Tick) -> tuple[Payload, Payload]:
        memory, reply = finish(real(exchange, client, received, site, at))
        return memory, change(reply)

    object.__setattr__(exchange, "client_update", update)
    object.__setattr__(method, "plan", lambda: [stage])
    (reply,) = list(done.engine.exchange({host.infos[0].id: Payload(done.server.arrays)}, Tick("federate", 1, 1, 0)))
    assert isinstance(reply, Failure)
    assert done.store.load(host.infos[0].id) is not None  # what it had before, from the honest round
    return reply


def test_plain_numbers_that_nobody_declared_do_not_leave(play: Play, host: Host) -> None:
    failure = answering(play, host, lambda reply: Payload(reply.arrays, {"labels": [1.0, 7.0, 9.0]}))
    assert "plain number 'labels'" in failure.reason


def test_another_floating_type_is_refused_and_not_cast(play: Play, host: Host) -> None:
    failure = answering(play, host, lambda reply: Payload({k: t.double() for k, t in reply.arrays.items()}))
    assert "float64; declared is float32" in failure.reason


def test_a_full_disk_is_not_the_clients_failure(host: Host, tmp_path: Path) -> None:
    method = build_method("ditto")
    site = host.install(method)
    store = ClientStore(tmp_path / "state", resident=False)
    (tmp_path / "state").write_text("a file where the folder should be")
    engine = LocalEngine(method, host.infos, host.site, store)
    requests = {
        info.id: federated(method).dispatch(method.server_init(site), info, Tick("federate", 1, 1, 0))
        for info in host.infos
    }
    with pytest.raises(RunError, match="cannot write"):
        list(engine.exchange(requests, Tick("federate", 1, 1, 0)))


def test_a_host_of_another_experiment_is_refused(tmp_path: Path) -> None:
    host = Host(load_experiment(config("fedit")))
    with pytest.raises(ConfigError, match="another experiment"):
        run(config("fedit", federation={"rounds": 1, "seed": 7}), out=tmp_path / "run", host=host)
    assert not (tmp_path / "run").exists()
    assert run(config("local"), out=tmp_path / "run", host=host).results["method"] == "local"


def test_a_host_gives_the_same_bits_as_a_new_one_whatever_ran_on_it_before(tmp_path: Path) -> None:
    """Another rate, batch size, number of rounds and wire; then as at first."""
    plain = config("fedit")
    other = config(
        "ditto",
        train={"max_steps": 3, "batch_size": 2, "lr": 0.05},
        federation={"rounds": 3},
        evaluate={"every": 1, "batch_size": 3},
        wire={"dtype": "bfloat16"},
    )
    kept = Host(load_experiment(plain))
    for number, values in enumerate((plain, other, plain)):
        one = run(values, out=tmp_path / f"kept-{number}", host=kept)
        new = run(values, out=tmp_path / f"new-{number}")
        scores = [
            {client: (row["accuracy"], row["loss"]) for client, row in each.results["clients"].items()}
            for each in (one, new)
        ]
        assert scores[0] == scores[1]
        files = sorted(one.path.glob("clients/*/*.safetensors"))
        assert files
        for file in files:
            assert file.read_bytes() == (new.path / file.relative_to(one.path)).read_bytes(), file


def test_two_processes_cannot_share_a_run_directory(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(RunError, match=rf"{re.escape(str(tmp_path / 'run'))} is in use"):
        run(config("fedit"), out=tmp_path / "run", resume=True)


def test_a_mistake_before_training_leaves_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        run(config("fedit", model={"id": str(tmp_path / "no-model")}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_passes_and_stages_need_names_of_their_own() -> None:
    passes = (Pass(slot("shared"), ("shared",)), Pass(slot("personal"), ("personal",)))
    layout = lora(2, 4.0, slots=("shared", "personal"))
    with pytest.raises(ValueError, match=r"passes .* train, train"):
        Recipe(layout=layout, passes=passes, use=Use(("personal",)))
    alone = LocalTraining(passes[:1])
    twice = Recipe(layout=layout, before=(alone,), then=(alone,), use=Use(("shared",)))
    with pytest.raises(ValueError, match=r"stages .* local, local"):
        resolved_stages(twice, 1)


def test_replayed_stages_take_the_configurations_rounds(play: Play, host: Host) -> None:
    """Federated 1 round, then 3 rounds alone: a score after the first stage is of a model that trained 3 more."""
    both, share = ("shared", "personal"), slot("shared")
    tune = LocalTraining((Pass(slot("personal"), both, name="tune"),), name="tune", receives=True)
    recipe = Recipe(
        layout=lora(2, 4.0, slots=both),
        passes=(Pass(share, ("shared",)),),
        share=share,
        then=(tune,),
        use=Use(both),
        rounds=1,
    )

    deployed: dict[tuple[str, int], list[str]] = {}

    class Noting(LocalEngine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "rounds": 3})

        def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
            models = [self.deployment(client, requests[client], at).arrays for client in requests]
            deployed[at.stage, at.round] = [fingerprint(model) for model in models]
            return super().score(requests, at, split)

    done = play(recipe, rounds=3, every=1, engine_class=Noting)
    first = [s.metrics for at, s in done.journal.scores if at.stage == "federate"]
    last = [s.metrics for at, s in done.journal.scores if at.stage == "tune" and at.round == 3]
    assert first == last
    assert deployed["federate", 1] == deployed["tune", 3] and deployed["tune", 2] != deployed["tune", 3]


@pytest.mark.parametrize(
    "block, problem",
    [
        ({"name": "potara", "statistics": {"samples": 0}}, "statistics.samples: must be positive"),
        ({"name": "potara", "correlation": {"shrink": -1.0}}, "correlation.shrink: must be 0 or more"),
        ({"name": "potara", "rounds_local": 0}, "rounds_local: must be positive"),
        ({"name": "local", "rounds": -3}, "rounds: must be positive"),
        ({"name": "ditto", "mu": -1.0}, "mu: must be 0 or more"),
        ({"name": "fedit", "rank": 0}, "rank: must be 1 or more"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_a_run(block: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_experiment(config(block))


def test_the_configuration_in_the_run_directory_names_the_model(tmp_path: Path) -> None:
    done = run(config("local", model={}), out=tmp_path / "run")
    assert load_experiment(done.path / "config.yaml").model.id == "digits-vit"
    assert json.loads((done.path / "run.json").read_text())["backbone"]


def test_an_optimiser_that_drops_gradients_does_not_stop_later_training(play: Play, host: Host) -> None:
    method = build_method("fedit")
    host.install(method)
    torch.optim.SGD(host.model.parameters(slot("shared")), lr=0.1).zero_grad()
    before = host.model.dump(slot("shared"))
    from befit.train.loop import train

    train(host.site(host.infos[0]), method.passes, Tick("federate", 1, 1, 0))  # type: ignore[attr-defined]
    after = host.model.dump(slot("shared"))
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_a_run_writes_what_a_step_of_each_method_computes_and_holds_as_befit_cost_does(tmp_path: Path) -> None:
    done = run(config("fedit", model={}, baselines=["ditto"], federation={"rounds": 1}), out=tmp_path / "run")
    methods = {name: build_method(name) for name in ("fedit", "ditto")}
    rows = {
        one["method"]: one for one in compare(find_architecture("digits-vit"), methods, "auto", rounds=1, labels=10)
    }
    keys = ("compute", "memory", "public_records")
    assert done.results["costs"] == {name: {"model": {key: rows[name][key] for key in keys}} for name in methods}
    assert done.results["costs"]["ditto"]["model"]["compute"] == 2
