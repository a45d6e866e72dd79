"""Weights from training examples that the models they weigh have not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from befit.adapters.keys import slot
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.values import ClientInfo, Payload, Tick
from befit.data.folds import without_part
from befit.merge.pair import merge_pair
from befit.methods.parts.recipe import branches, cross_fit
from befit.methods.parts.recipe.cross_fit import FOLDS, CrossFitted
from befit.methods.potara import merge_rule
from befit.protocol.federate import final_download
from befit.protocol.jobs import finish
from befit.protocol.method import Method, run_stages
from befit.protocol.settings import Asynchronous, SecureSums, WireSettings
from befit.protocol.site import Site
from befit.protocol.stage import Stage
from befit.protocol.store import ClientStore
from befit.protocol.wire import wire_of
from befit.runs.host import Host
from tests.federation import FAMILIES, Families, Federation

from .conftest import ROUNDS, BackToFront, Play, built, experiment

STEPS = 4
CROSS_FITTED = {"w": "cross-fitted", "steps": STEPS}


@dataclass(frozen=True)
class Renamed(Method):
    """The branches of a recipe under other names, which decide the batches."""

    method: Method
    number: int

    @property
    def layout(self):  # type: ignore[override]
        return self.method.layout

    @property
    def use(self):  # type: ignore[override]
        return self.method.use

    def plan(self) -> list[Stage]:
        return [replace(stage, name=f"{stage.name}-{self.number}") for stage in self.method.plan()[:2]]

    def server_init(self, site):  # type: ignore[override]
        return self.method.server_init(site)

    def deploy(self, client, received, site):  # type: ignore[override]
        raise AssertionError


def measured(host: Host, number: int, federated: Payload | None = None) -> Iterator[tuple[str, list[float]]]:
    """The losses of a fold by client, from a federation whose clients never had the other examples; or, where it is
    given, with another's adapter in place of that federation's."""
    seed = host.experiment.federation.seed
    held = [without_part(client, number, FOLDS, seed) for client in host.federation.clients]
    fewer = Host(host.experiment, replace(host.federation, clients=tuple(held)))
    method = Renamed(built("interpolation"), number)
    played = Federation.on(fewer, method)
    server = played.run(ROUNDS, seed, evaluate_every=0)
    for info in fewer.infos:
        site = played.fresh(info.id)
        site.model.load(
            (federated or server).arrays
            | {k: v for k, v in played.memory(info.id).arrays.items() if k in site.model.keys}
        )
        fed, local = site.model.dump(slot("shared")), site.model.dump(slot("personal"))
        losses = []
        for w in np.linspace(0, 1, STEPS + 1):
            with site.model.using(merge_pair(fed, local, {"": float(w)}, "factors"), "merged"):
                losses.append(site.task.total_loss(site.model.backbone, site.examples("val"), 64, "cpu"))
        yield info.id, losses


def test_each_part_is_judged_by_a_federation_that_never_had_it(play: Play, host: Host) -> None:
    played = play(built("interpolation", **CROSS_FITTED))
    totals: dict[str, np.ndarray] = {info.id: np.zeros(STEPS + 1) for info in host.infos}
    for number in range(1, FOLDS + 1):
        for client, losses in measured(host, number):
            kept = played.memory(client).part(f"fold-{number}")
            assert not kept.arrays and kept.scalars["losses"] == pytest.approx(losses, rel=1e-5)
            totals[client] += losses
    reported = {update.client.id: update.report["w"] for at, update in played.journal.updates if at.stage == "merge"}
    for client, losses in totals.items():
        likely = np.exp(losses.min() - losses)
        assert reported[client] == pytest.approx(float(likely @ np.linspace(0, 1, STEPS + 1) / likely.sum()), rel=1e-4)
    assert len({round(w, 6) for w in reported.values()}) == len(reported)


def test_the_branches_are_those_of_everything_and_nothing_of_a_fold_stays_at_the_server(play: Play) -> None:
    folded, plain = play(built("interpolation", **CROSS_FITTED)), play(built("interpolation"))
    for info in plain.infos:
        own, usual = folded.memory(info.id).arrays, plain.memory(info.id).arrays
        assert own.keys() == usual.keys()
        assert all(own[key].equal(usual[key]) for key in own if key.startswith("personal/"))
    assert folded.server.arrays.keys() == plain.server.arrays.keys()
    assert all(folded.server.arrays[key].equal(plain.server.arrays[key]) for key in plain.server.arrays)
    sent = [sum(len(u.payload.arrays) for _, u in run.journal.updates) for run in (folded, plain)]
    assert sent[0] == (1 + FOLDS) * sent[1]
    at = folded.journal.updates[-1][0]
    assert final_download(folded.method, folded.server, folded.infos[0], at).arrays.keys() == plain.server.arrays.keys()


def test_its_numbers_do_not_depend_on_how_it_is_carried_out(play: Play, tmp_path: Path) -> None:
    method = built("potara", weight="cross-fitted")
    usual = play(method)
    other = play(
        method,
        engine_class=BackToFront,
        store=ClientStore(tmp_path / "state", resident=False),
        spool_bytes=0,
        every=1,
    )
    assert usual.prints() == other.prints()
    assert [stage.name for stage in run_stages(method)] == [
        "local",
        *("local-1", "federate-1", "weigh-1"),
        *("local-2", "federate-2", "weigh-2"),
        *("local-3", "federate-3", "weigh-3"),
        *("federate", "merge"),
    ]


@pytest.mark.parametrize(
    "how",
    [
        {"wire": WireSettings(dtype="int8", top_k=0.5)},
        {"secure_sums": SecureSums(1000.0, 32)},
        {"asynchronous": Asynchronous(2, times={"client-02": 1.5})},
        {"cohort": 1},
    ],
    ids=["wire", "sums", "late", "cohort"],
)
def test_folds_are_federations_like_any_other(how: dict[str, Any], play: Play, host: Host) -> None:
    """Each starts from the initial adapter, from which updates are taken, clipped and caught up."""
    method = built("interpolation", **CROSS_FITTED)
    if "wire" in how:
        how = {"wire": wire_of(method, how["wire"], [method.layout.specs(host.model.shapes)])}
    played, plain = play(method, **how), play(built("interpolation"), **how)
    assert not played.journal.failures
    assert played.server.arrays.keys() == plain.server.arrays.keys()
    assert all(played.server.arrays[key].equal(plain.server.arrays[key]) for key in plain.server.arrays)
    merged = [update for at, update in played.journal.updates if at.stage == "merge"]
    assert len(merged) == 3 and all(0 <= update.report["w"] <= 1 for update in merged)
    if "secure_sums" in how:
        alone = play(built("interpolation", **CROSS_FITTED))
        weights = [update.report["w"] for at, update in alone.journal.updates if at.stage == "merge"]
        assert [update.report["w"] for update in merged] == pytest.approx(weights, abs=1e-3)


def test_families_that_no_round_has_drawn_yet_start_theirs_later() -> None:
    clients = Families({"name": "interpolation", "rank": 2, "w": "cross-fitted"})
    clients._site = partial(_parted, clients._site)
    clients.run(rounds=3, cohort=1)
    assert not clients.journal.failures
    assert {update.client.id for at, update in clients.journal.updates if at.stage == "merge"} == {*FAMILIES}


def _parted(site: Callable[[ClientInfo], Site], info: ClientInfo) -> Site:
    """A tiny client, whose every part holds out the same examples: a part of what it has is all that this needs."""
    made = site(info)
    return replace(made, parts=lambda site, number, of: replace(site, examples=lambda split: made.examples("train")))


def test_a_budget_on_top_is_scored_after_the_merge(play: Play) -> None:
    base = {"name": "interpolation", "w": "cross-fitted"}
    played = play(built("bayestune", rank=2, base=base), every=1)
    assert not played.journal.failures and played.journal.scores


def test_what_is_scored_and_kept_of_rounds_is_the_federation_of_everything(play: Play, host: Host) -> None:
    """Scores of the rounds before, by the personal stages that are ahead, are of what a client would have then."""
    played = play(built("interpolation", **CROSS_FITTED), every=1)
    assert {at.stage for at, _ in played.journal.scores} == {"federate", "merge"}
    plain = play(built("interpolation", w=0.5), every=1)
    assert [at.round for at, _ in played.journal.scores] == [at.round for at, _ in plain.journal.scores]


def test_a_newcomer_weighs_the_federation_which_has_seen_nothing_of_it(play: Play, host: Host) -> None:
    """Here a client that took part, so that a federation without each part can be told from the one of everything."""
    method = built("interpolation", **CROSS_FITTED)
    played = play(method)
    info, memory = host.infos[0], Payload()
    for stage in run_stages(method):
        if stage.federated:
            continue
        for round_ in range(1, (stage.rounds or ROUNDS) + 1):
            at = Tick(stage.name, round_, stage.rounds or ROUNDS, host.experiment.federation.seed)
            site = played.fresh(info.id)
            received = stage.exchange.dispatch(played.server, info, at)
            memory, _ = finish(stage.exchange.client_update(memory, received, site, at))
    totals = np.zeros(STEPS + 1)
    for number in range(1, FOLDS + 1):
        losses = dict(measured(host, number, played.server))[info.id]
        assert memory.part(f"fold-{number}").scalars["losses"] == pytest.approx(losses, rel=1e-5)
        assert losses != pytest.approx(dict(measured(host, number))[info.id], rel=1e-4)
        totals += losses
    likely = np.exp(totals.min() - totals)
    assert memory.scalars["w"] == pytest.approx(float(likely @ np.linspace(0, 1, STEPS + 1) / likely.sum()), rel=1e-4)


def test_a_client_that_took_part_in_no_fold_weighs_both_alike(play: Play, host: Host) -> None:
    method = built("interpolation", **CROSS_FITTED)
    host.install(method)
    site = host.site(host.infos[0])
    assert isinstance(method, CrossFitted)
    played = play(method)
    memory = played.memory(site.info.id)
    for number in range(1, FOLDS + 1):
        memory = memory.with_part(f"fold-{number}", Payload())
    site.model.reset()
    merge = method.plan()[-1]
    at = played.journal.updates[-1][0]
    received = merge.exchange.dispatch(played.server, site.info, at)
    kept, _ = merge.exchange.client_update(memory, received, site, at)  # type: ignore[misc]
    assert kept.scalars["w"] == 0.5


def test_a_site_in_part_is_the_client_without_these_records() -> None:
    host = Host(load_experiment(experiment(train={"epochs": 2, "batch_size": 4}, evaluate={"by": "label"})))
    site = host.site(host.infos[0])
    whole = len(site.examples("train"))
    for number in range(1, FOLDS + 1):
        part = site.in_part(number, FOLDS)
        left, held = len(part.examples("train")), len(part.examples("val"))
        assert left + held == whole and held in (whole // FOLDS, -(-whole // FOLDS))
        assert part.info.num_examples == left and part.budget.max_steps == 2 * -(-left // 4)
        assert [len(part.values(split)) for split in ("train", "val")] == [left, held]
        assert part.common_examples is not None and len(part.common_examples("train")) == left
        assert part.report is site.report and part.steps is site.steps and part.asked is site.asked
    assert site.budget.max_steps == 2 * -(-whole // 4)


def test_passes_of_a_base_are_over_what_is_left(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    base, of_site = {"name": "interpolation", "w": "cross-fitted", "epochs": 2}, Site.in_part
    steps: list[tuple[int, int]] = []

    def noted(site: Site, number: int, of: int) -> Site:
        part = of_site(site, number, of)
        steps.append((part.budget.max_steps, 2 * -(-len(part.examples("train")) // part.budget.batch_size)))
        return part

    monkeypatch.setattr(Site, "in_part", noted)
    play(built("bayestune", rank=2, base=base), rounds=1)
    assert len(steps) >= 27 and all(taken == wanted for taken, wanted in steps)


def test_ablations_know_how_a_cross_fitted_potara_merges() -> None:
    rule = merge_rule(built("potara", weight="cross-fitted"))
    assert replace(rule, weight="closed-form") == merge_rule(built("potara"))


def test_a_merge_without_a_finite_loss_has_no_weight_and_ends_no_fold(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The federated adapter's own loss overflows: what remains is the mean of the other weights."""
    measured = branches.on_grid
    monkeypatch.setattr(cross_fit, "on_grid", lambda *of: measured(*of) | {1.0: math.inf})
    played = play(built("interpolation", **CROSS_FITTED))
    assert not played.journal.failures
    for info in played.infos:
        losses = played.memory(info.id).part("fold-1").scalars["losses"]
        assert isinstance(losses, list) and losses[-1] == 1e300
    assert all(u.report["w"] < 0.75 for at, u in played.journal.updates if at.stage == "merge")


def test_clients_with_fewer_examples_than_parts_are_named_before_a_run() -> None:
    cross_fitted = {"name": "interpolation", "w": "cross-fitted"}
    host = Host(load_experiment(experiment(limit={"records": 6})))
    host.check_methods({"m": cross_fitted})
    first, *others = host.federation.clients
    few = Host(host.experiment, replace(host.federation, clients=(replace(first, train=first.train[:2]), *others)))
    with pytest.raises(ConfigError, match=f"client {first.id} has 2 training examples, too few for 3 parts"):
        few.check_methods({"m": cross_fitted})
    with pytest.raises(ConfigError, match="weight: cross-fitted is one weight for each client"):
        built("potara", weight="cross-fitted", granularity="layer")
