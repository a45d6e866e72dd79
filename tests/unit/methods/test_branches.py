"""FFA-LoRA, FedDPA, Fisher merging and the guard, against what their pages in docs/methods say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from befit.adapters.keys import slot, split, to_slot
from befit.adapters.mixers import Weighted
from befit.adapters.state import weighted_mean
from befit.core.errors import ConfigError, IncompatibleAdapters
from befit.core.schema import plain
from befit.core.values import Payload, State, Tick
from befit.methods.feddpa import feddpa
from befit.methods.ffa_lora import ffa_lora
from befit.methods.fisher_merging import fisher_merging
from befit.methods.interpolation import interpolation
from befit.methods.parts.recipe.branches import check_same_start
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.potara import potara
from befit.protocol.federate import final_download
from befit.protocol.jobs import finish
from befit.protocol.method import Deployment
from befit.protocol.registry import build_method
from befit.report.diagnostics import alarms, share_text, shares
from befit.train.paired_fisher import Correlation, Damping, Statistics, estimate
from befit.train.persample import sample_gradients
from tests.federation import Clients
from tests.tiny import federated

AT = Tick("merge", 1, 1, 0)
SIX = Statistics(samples=6)


def test_ffa_lora_keeps_one_A_at_all_clients_and_averages_products_exactly() -> None:
    clients = Clients(ffa_lora(rank=2, alpha=4.0))
    start = clients.model.dump(slot("shared"))
    server = clients.run(3)
    assert not any(split(key)[2] == "A" for key in server.arrays)
    last = [update for at, update in clients.journal.updates if at.round == 3]
    weights = [update.client.num_examples for update in last]
    for key in server.arrays:
        if split(key)[2] != "B":
            continue
        A = start[key[:-1] + "A"]
        products = [{"": update.payload.arrays[key] @ A} for update in last]
        torch.testing.assert_close(server.arrays[key] @ A, weighted_mean(products, weights)[""])
    for name in clients.sites:
        deployed = _deployed(clients, name, server).arrays
        assert all(torch.equal(deployed[key], start[key]) for key in start if split(key)[2] == "A")


@pytest.mark.parametrize("variant", ["T", "F"])
def test_feddpa_never_sends_the_personal_adapter_and_deploys_both(variant: str) -> None:
    clients = Clients(feddpa(rank=2, alpha=4.0, variant=variant))  # type: ignore[arg-type]
    server = clients.run(3)
    sent = {row["name"] for rows in clients.journal.outbound.as_dict().values() for row in rows if row["shape"]}
    assert sent and all(name.startswith("shared/") for name in sent)
    deployed = _deployed(clients, "a", server)
    memory = clients.store.load("a")
    assert deployed.slots == ("shared", "personal") and memory is not None
    for key, tensor in deployed.arrays.items():
        expected = server.arrays.get(key, memory.arrays.get(key))
        assert expected is not None and torch.equal(tensor, expected)
    assert any(
        not torch.equal(t, server.arrays[to_slot(k, "shared")])
        for k, t in memory.arrays.items()
        if k.startswith("personal/")
    )


@pytest.mark.parametrize("method", [potara, fisher_merging])
def test_a_truncated_merge_has_the_rank_of_its_slot_above_the_width_of_a_module_too(method: Any) -> None:
    space = {"merge_space": "product-truncated"} if method is potara else {"space": "dense-truncated"}
    clients = Clients(method(rank=20, alpha=4.0, **space))
    server = clients.run(1)
    merged = _deployed(clients, "a", server).arrays
    shapes = {split(key)[2]: tuple(value.shape) for key, value in merged.items() if "q_proj" in key}
    assert shapes == {"A": (20, 16), "B": (16, 20)}


def test_feddpa_t_trains_only_the_shared_adapter_in_its_first_round_as_fedit_does() -> None:
    from befit.methods.fedit import fedit

    first = Clients(feddpa(rank=2, alpha=4.0, weights="examples")).run(1)
    plain = Clients(fedit(rank=2, alpha=4.0)).run(1)
    assert all(torch.equal(first.arrays[key], plain.arrays[key]) for key in plain.arrays)
    twice = Clients(feddpa(rank=2, alpha=4.0, weights="examples")).run(2)
    again = Clients(fedit(rank=2, alpha=4.0)).run(2)  # the personal pass must not move the shared adapter
    assert all(torch.equal(twice.arrays[key], again.arrays[key]) for key in again.arrays)


def test_feddpa_f_starts_the_personal_adapter_at_the_final_shared_one() -> None:
    clients = Clients(feddpa(rank=2, alpha=4.0, variant="F", rounds_local=1))
    server = clients.run(2)
    method = clients.method
    adopt = next(stage for stage in method.plan() if stage.name == "adopt")
    site = clients.fresh("a")
    memory, _ = finish(
        adopt.exchange.client_update(Payload(), federated(method).dispatch(server, site.info, AT), site, AT)
    )
    for key, tensor in server.arrays.items():
        assert torch.equal(memory.arrays[to_slot(key, "personal")], tensor)


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
@pytest.mark.parametrize("direction", ["similar", "reference"])
def test_an_inputs_weights_follow_its_likeness_to_the_references_example_by_example(kind: str, direction: str) -> None:
    """Against one forward pass per example with both deltas folded by hand-computed weights."""
    method = feddpa(rank=2, alpha=4.0, instances=3, max_weight=0.7, direction=direction)  # type: ignore[arg-type]
    clients = Clients(method, kind=kind)
    site = clients.sites["b"]
    model = clients.model
    _randomise(clients, ("shared", "personal"))
    memory, _ = finish(
        method.then[-1]
        .stage(method)
        .exchange.client_update(Payload(model.dump(slot("shared", "personal"))), Payload(), site, AT)
    )
    model.load(memory.arrays)
    references = memory.arrays["instance/references/H"]
    batch = site.examples("train").batch(range(5))
    mixer = method.use.mixer
    with torch.no_grad(), model.active("shared", "personal", mixer=mixer):
        together, samples = site.task.judged(site.logits(batch), batch)
    for row in range(5):
        one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        with torch.no_grad(), model.active("personal"):
            inputs = {name: tensor for name, tensor in one.items() if name != "labels"}
            hidden = model.backbone(**inputs, output_hidden_states=True).hidden_states[-1][0]
        place = int((one["labels"][0] != -100).int().argmax()) - 1 if kind == "llama" else 0
        h = hidden[place]
        omega = 0.7 * torch.cosine_similarity(h[None], references).clamp_min(0).mean().item()
        assert 0 < omega <= 0.7
        pair = (1 - omega, omega) if direction == "similar" else (omega, 1 - omega)
        with torch.no_grad(), model.active("shared", "personal", mixer=Weighted(pair)):
            alone = site.logits(one)
        torch.testing.assert_close(together[samples == row], alone, rtol=1e-4, atol=1e-5)


def test_references_are_the_clients_own_examples_and_few_are_repeated() -> None:
    method = feddpa(rank=2, alpha=4.0, instances=20)
    clients = Clients(method)
    site = clients.sites["a"]
    count = len(site.examples("train"))
    assert count < 20
    memory, _ = finish(method.then[-1].stage(method).exchange.client_update(Payload(), Payload(), site, AT))
    held = memory.arrays["instance/references/H"]
    assert torch.equal(held[: 20 - count], held[count:]) and len(held[:count].unique(dim=0)) == count
    assert not [name for name in site.report if name.startswith("omega")], "no example is left to look at"


def test_feddpa_reports_the_weights_of_inputs_that_are_none_of_its_references() -> None:
    """`omega = limit mean_s max(0, cos(h_x, h_s))`, one example at a time; here all others are few enough."""
    method = feddpa(rank=2, alpha=4.0, instances=3, max_weight=0.7)
    clients = Clients(method)
    site, model = clients.sites["c"], clients.model
    _randomise(clients, ("shared", "personal"))
    memory, _ = finish(
        method.then[-1]
        .stage(method)
        .exchange.client_update(Payload(model.dump(slot("shared", "personal"))), Payload(), site, AT)
    )
    references, examples = memory.arrays["instance/references/H"], site.examples("train")
    states = []
    for row in range(len(examples)):
        inputs = {name: tensor for name, tensor in examples.batch([row]).items() if name != "labels"}
        with torch.no_grad(), model.active("personal"):
            states.append(model.backbone(**inputs, output_hidden_states=True).hidden_states[-1][0, 0])
    others = [h for h in states if (h - references).norm(dim=1).min() > 1e-4]
    assert len(others) == len(examples) - 3
    weights = [0.7 * torch.cosine_similarity(h[None], references).clamp_min(0).mean().item() for h in others]
    assert site.report["omega_min"] == pytest.approx(min(weights), rel=1e-5)
    assert site.report["omega_max"] == pytest.approx(max(weights), rel=1e-5)
    assert site.report["omega_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert site.report["omega_spread"] == pytest.approx(max(weights) - min(weights), abs=1e-6)


def test_a_weight_by_input_that_is_a_constant_is_said_at_the_head_of_the_report() -> None:
    """0.49999 to 0.5 is the mean of both adapters for every input; 0.2 to 0.4 is not."""
    shown = [plain(diagnostic) for diagnostic in feddpa().diagnostics]
    found = {
        client: {"diagnostics": {"omega_min": low, "omega_max": high, "omega_spread": high - low}}
        for client, (low, high) in {"a": (0.49999, 0.5), "b": (0.2, 0.4)}.items()
    }
    results: Any = {"diagnostics": shown, "clients": {**found, "c": {"diagnostics": {}}}}
    (sentence,) = alarms(results)
    assert "differs by less than 0.01" in sentence and "1 of 2 clients" in sentence
    ((share, values),) = shares(results)
    assert share_text(values["a"], share) == "0.50–0.50" and share_text(values["b"], share) == "0.20–0.40"
    assert not feddpa(variant="halves").diagnostics


def test_fisher_merging_of_factors_equals_potara_by_coordinate_without_correlation() -> None:
    _, ours = _merged(fisher_merging(rank=2, alpha=4.0, statistics=SIX, space="lora"))
    _, theirs = _merged(
        potara(rank=2, alpha=4.0, statistics=SIX, granularity="coordinate", correlation=Correlation(estimate=False))
    )
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("space", ["dense", "dense-truncated"])
def test_fisher_merging_of_whole_updates(space: str) -> None:
    clients, merged = _merged(
        fisher_merging(rank=2, alpha=4.0, statistics=SIX, damping=Damping(delta=0.01), space=space)  # type: ignore[arg-type]
    )
    fisher = {name: _fisher_by_loop(clients, name, "product") for name in ("shared", "personal")}
    entries = torch.cat([F.flatten() for one in fisher.values() for F in one.values()])
    eps = 0.01 * float(entries.double().mean())
    for key, F_f in fisher["shared"].items():
        module = key.partition("/")[0]
        F_l = fisher["personal"][key]
        D_f, D_l = (_delta(clients, name, module) for name in ("shared", "personal"))
        expected = ((F_f + eps) * D_f + (F_l + eps) * D_l) / (F_f + F_l + 2 * eps)
        if space == "dense":
            found = merged[f"merged/{module}/weight"]
        else:
            found = 2.0 * merged[f"merged/{module}/B"] @ merged[f"merged/{module}/A"]
            u, s, v = torch.linalg.svd(expected)
            expected = u[:, :2] @ torch.diag(s[:2]) @ v[:2]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", ["lora", "dense", "dense-truncated"])
def test_fisher_merging_of_one_adapter_with_itself_returns_it(space: str) -> None:
    method = fisher_merging(rank=2, alpha=4.0, statistics=SIX, space=space)  # type: ignore[arg-type]
    clients = Clients(method)
    _randomise(clients, ("shared",))
    shared = clients.model.dump(slot("shared"))
    clients.model.load({to_slot(key, "personal"): tensor for key, tensor in shared.items()})
    merged, _ = _rule(method)(clients.sites["a"], AT)
    clients.model.load(merged)
    batch = clients.sites["a"].examples("train").batch(range(4))
    with torch.no_grad(), clients.model.active("merged"):
        found = clients.sites["a"].logits(batch)
    with torch.no_grad(), clients.model.active("shared"):
        torch.testing.assert_close(found, clients.sites["a"].logits(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merge_space", ["factors", "product", "product-truncated"])
@pytest.mark.parametrize("best", ["shared", "personal"])
def test_the_guard_deploys_what_scores_best_on_validation_data(best: str, merge_space: str) -> None:
    """One parent is made so strong, and the other so harmful, that the mean of both cannot win."""
    method = potara(rank=2, alpha=4.0, statistics=SIX, guard="validation", merge_space=merge_space)  # type: ignore[arg-type]
    clients = Clients(method, count=1)
    site = clients.sites["a"]
    other = "personal" if best == "shared" else "shared"
    _make_right_and_wrong(clients, best, other)
    merged, _ = _rule(method)(site, AT)
    report = site.report
    name = {"shared": "federated", "personal": "local"}[best]
    candidates = ("merged", "federated", "local")
    assert {one: report[f"guard_kept_{one}"] for one in candidates} == {one: float(one == name) for one in candidates}
    assert report[f"guard_score_{name}"] == max(report[f"guard_score_{one}"] for one in candidates)
    clients.model.load(merged)
    batch = site.examples("val").batch(range(len(site.examples("val"))))
    with torch.no_grad(), clients.model.active("merged"):
        found = site.logits(batch)
    with torch.no_grad(), clients.model.active(best):
        torch.testing.assert_close(found, site.logits(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("w", [0.0, 0.25, 0.5, 1.0])
def test_interpolation_by_a_given_weight_is_the_line_between_both(w: float) -> None:
    method = interpolation(rank=2, alpha=4.0, w=w)
    clients = Clients(method, count=1)
    _randomise(clients, ("shared", "personal"))
    fed, local = (clients.model.dump(slot(name)) for name in ("shared", "personal"))
    merged, numbers = _rule(method)(clients.sites["a"], AT)
    assert numbers == {"w": w} and len(merged) == len(fed) == len(local)
    for key, value in merged.items():
        expected = w * fed[to_slot(key, "shared")] + (1 - w) * local[to_slot(key, "personal")]
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(("best", "w"), [("shared", 1.0), ("personal", 0.0)])
def test_interpolation_picks_the_weight_that_scores_best_on_validation_data(best: str, w: float) -> None:
    """One parent is so strong, and the other so harmful, that nothing between wins but what is all but the strong one:
    of several weights with its score the one nearest to 0.5 is kept."""
    method = interpolation(rank=2, alpha=4.0, w="best", steps=4)
    clients = Clients(method, count=1)
    site = clients.sites["a"]
    _make_right_and_wrong(clients, best, "personal" if best == "shared" else "shared")
    fed, local = (clients.model.dump(slot(name)) for name in ("shared", "personal"))
    scores = {}
    for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
        state = {
            to_slot(key, "merged"): weight * fed[key] + (1 - weight) * local[to_slot(key, "personal")] for key in fed
        }
        with clients.model.using(state, "merged"):
            found = site.task.evaluate(clients.model.backbone, site.examples("val"), 64, "cpu")
        scores[weight] = found[site.task.metric]
    assert scores[w] == max(scores.values()) > scores[1 - w]
    _, numbers = _rule(method)(site, AT)
    kept = [weight for weight, score in scores.items() if score == max(scores.values())]
    assert numbers["w"] == min(kept, key=lambda weight: (abs(weight - 0.5), weight)) == site.report["w"]


def test_interpolation_with_equal_scores_takes_the_middle_and_refuses_what_is_no_weight() -> None:
    method = interpolation(rank=2, alpha=4.0, w="best", steps=5)
    clients = Clients(method, count=1)
    _randomise(clients, ("shared",))
    clients.model.load({to_slot(key, "personal"): value for key, value in clients.model.dump(slot("shared")).items()})
    _, numbers = _rule(method)(clients.sites["a"], AT)  # whatever the weight, the model is the same
    assert numbers == {"w": 0.4}
    assert method.needs.splits == ("train", "val") and interpolation().needs.splits == ("train",)
    for wrong in ({"w": 1.5}, {"w": -0.1}, {"steps": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            build_method({"name": "interpolation", **wrong})


def test_the_posterior_mean_weighs_every_merge_by_the_likelihood_of_the_validation_examples() -> None:
    method = interpolation(rank=2, alpha=4.0, w="posterior", steps=5)
    clients = Clients(method, count=1)
    _randomise(clients, ("shared", "personal"))
    site = clients.sites["a"]
    batch = site.examples("val").batch(range(len(site.examples("val"))))
    likelihood = []
    for w in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        merged, _ = _rule(interpolation(rank=2, alpha=4.0, w=w))(site, AT)
        with torch.no_grad(), clients.model.using(merged, "merged"):
            chances = site.logits(batch).double().softmax(-1)
        likelihood.append(float(chances[torch.arange(len(chances)), batch["labels"]].prod()))
    expected = sum(0.2 * step * share for step, share in enumerate(likelihood)) / sum(likelihood)
    assert 0 < expected < 1 and abs(expected - 0.5) > 0.02
    _, numbers = _rule(method)(site, AT)
    assert numbers["w"] == pytest.approx(expected, abs=1e-6) and site.report["w"] == numbers["w"]
    _, numbers = _rule(potara(rank=2, alpha=4.0, weight="posterior"))(site, AT)
    assert 0 < numbers["w"] < 1 and method.needs.splits == potara(weight="posterior").needs.splits == ("train", "val")


@pytest.mark.parametrize(("better", "end"), [("shared", 1.0), ("personal", 0.0)])
def test_the_posterior_mean_is_one_half_without_a_difference_and_an_end_where_all_examples_say_so(
    better: str, end: float
) -> None:
    method = interpolation(rank=2, alpha=4.0, w="posterior")
    clients = Clients(method, count=1)
    _make_right_and_wrong(clients, better, "personal" if better == "shared" else "shared")
    _, numbers = _rule(method)(clients.sites["a"], AT)
    assert abs(numbers["w"] - end) < 0.4  # type: ignore[operator]
    clients.model.load({to_slot(key, "personal"): value for key, value in clients.model.dump(slot("shared")).items()})
    _, numbers = _rule(method)(clients.sites["a"], AT)
    assert numbers["w"] == pytest.approx(0.5, abs=1e-3)


def test_sampled_fisher_draws_labels_from_each_model_and_repeats_by_seed() -> None:
    clients = Clients(potara(rank=2, alpha=4.0))
    _randomise(clients, ("shared", "personal"))
    site = clients.sites["c"]

    def sums(kind: str, at: Tick = AT) -> Tensor:
        return estimate(site, at, "shared", "personal", Statistics(8, fisher=kind)).sums  # type: ignore[arg-type]

    assert torch.equal(sums("sampled"), sums("sampled"))
    assert not torch.equal(sums("sampled"), sums("empirical"))
    assert torch.equal(sums("empirical"), sums("empirical"))


def test_drawn_labels_have_the_models_probabilities() -> None:
    clients = Clients(potara(rank=2, alpha=4.0))
    site = clients.sites["a"]
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20_000, 1)
    batch = {"labels": torch.zeros(20_000, dtype=torch.long)}
    drawn = site.task.draw_labels(logits, batch, torch.Generator().manual_seed(0))["labels"]
    shares = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.015, rtol=0)  # four standard errors
    assert batch["labels"].sum() == 0


def test_a_language_models_drawn_labels_stay_within_the_answer() -> None:
    clients = Clients(potara(rank=2, alpha=4.0), kind="llama")
    site = clients.sites["a"]
    batch = site.examples("train").batch(range(4))
    with torch.no_grad(), clients.model.active("shared"):
        logits = site.logits(batch)
    drawn = site.task.draw_labels(logits, batch, torch.Generator().manual_seed(0))
    learnt = batch["labels"] != -100
    learnt[:, 0] = False
    assert torch.equal(drawn["labels"][~learnt], batch["labels"][~learnt])
    assert (drawn["labels"][learnt] != batch["labels"][learnt]).any()
    assert torch.equal(drawn["input_ids"], batch["input_ids"])


def test_adapters_of_another_start_are_refused_with_the_field_that_differs() -> None:
    text = "backbone=b; rank=8; alpha=16; targets=q_proj; modules=2; initial values=aa"
    for field, other in (
        ("rank", "4"),
        ("alpha", "32"),
        ("targets", "k_proj"),
        ("backbone", "c"),
        ("initial values", "bb"),
    ):
        fields = dict(part.split("=") for part in text.split("; ")) | {field: other}
        theirs = "; ".join(f"{name}={value}" for name, value in fields.items())
        with pytest.raises(IncompatibleAdapters, match=rf"client a: {field} is .* and {other} at the federated one\."):
            check_same_start(Payload({}, {"initial": text}), Payload({}, {"initial": theirs}), "a")
    with pytest.raises(IncompatibleAdapters, match="client a: an adapter"):
        check_same_start(Payload(), Payload(), "a")
    check_same_start(Payload({}, {"initial": text}), Payload({}, {"initial": text}), "a")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: build_method({"name": "feddpa", "train_weight": 1.5}), "train_weight: must be from 0 to 1"),
        (lambda: build_method({"name": "feddpa", "instances": 0}), "instances: must be positive"),
        (lambda: feddpa(rounds_local=3), "rounds_local: has no meaning for variant T"),
        (lambda: fisher_merging(damping=Damping(delta=0.0)), "delta: must be positive"),
        (lambda: fisher_merging(statistics=Statistics(samples=0)), "samples: must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, problem: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=problem):
        make()


def _deployed(clients: Clients, name: str, server: Payload) -> Deployment:
    at = Tick(clients.method.plan()[-1].name, 1, 1, 0)
    received = final_download(clients.method, server, clients.sites[name].info, at)
    return clients.engine.deployment(name, received, at)


def _rule(method: Recipe):  # type: ignore[no-untyped-def]
    return lambda site, at: method.then[0].rule(site, at, Payload())  # type: ignore[union-attr]


def _randomise(clients: Clients, slots: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(7)
    state = clients.model.dump(slot(*slots))
    clients.model.load({key: torch.randn(t.shape, generator=generator) * 0.3 for key, t in state.items()})


def _merged(method: Recipe) -> tuple[Clients, State]:
    clients = Clients(method)
    _randomise(clients, ("shared", "personal"))
    merged, _ = _rule(method)(clients.sites["a"], AT)
    return clients, merged


def _fisher_by_loop(clients: Clients, name: str, space: str) -> State:
    """Mean squared gradient of single samples; six samples are all that client a has."""
    site = clients.sites["a"]
    total: State = {}
    for row in range(6):
        found = sample_gradients(site, site.examples("train").batch([row]), name, space)  # type: ignore[arg-type]
        for key, value in found.items():
            rest = key.partition("/")[2]
            if rest.partition("/")[0] in clients.model.shapes.targets:
                total[rest] = total.get(rest, torch.zeros(())) + value[0].square() / 6
    return total


def _delta(clients: Clients, name: str, module: str) -> Tensor:
    state = clients.model.dump(slot(name))
    return 2.0 * state[f"{name}/{module}/B"] @ state[f"{name}/{module}/A"]


def _make_right_and_wrong(clients: Clients, right: str, wrong: str) -> None:
    """Train one slot on the validation examples, and make the other point the opposite way, harder."""
    site = clients.sites["a"]
    model = clients.model
    examples = site.examples("val")
    batch = examples.batch(range(len(examples)))
    parameters = model.parameters(slot(right))
    optimiser = torch.optim.Adam(parameters, lr=0.05)
    for _ in range(60):
        with model.active(right), model.trainable(slot(right)):
            model.zero_gradients()
            site.loss(batch).backward()
        optimiser.step()
    state = model.dump(slot(right))
    model.load(
        {
            to_slot(key, wrong): -20 * tensor if split(key)[2] in ("B", "weight", "bias") else tensor
            for key, tensor in state.items()
        }
    )
