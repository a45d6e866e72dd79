"""What of a configuration's privacy cannot be had is said before anything is trained, each in a sentence."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.data.federation import ClientData, Federation
from befit.protocol import accountant
from befit.protocol.check import check
from befit.protocol.client_privacy import ClientPlan, hides_clients
from befit.protocol.context import Context
from befit.protocol.mechanism import Privacy
from befit.protocol.method import Method
from befit.protocol.privacy import release_of, whole
from befit.protocol.registry import build_method
from befit.protocol.settings import GuardSettings, PrivacySettings, TrainSettings
from befit.protocol.stage import Gradients, Stage
from befit.runs.provenance import settings_hash
from tests.unit.protocol.test_own_methods import Own

pytest.importorskip("dp_accounting")
SMALL: dict[str, Any] = {"benchmark": "digits", "method": "fedit", "baselines": []}
RECORD = {"id": 0}
TRAIN = TrainSettings(max_steps=5)


def context_of(settings: PrivacySettings, *counts: int, **more: Any) -> Context:
    """Of clients with so many records each, for three rounds."""
    clients = tuple(ClientData(f"c{n}", (RECORD,) * count) for n, count in enumerate(counts))  # type: ignore[arg-type]
    families = {client.id: "model" for client in clients}
    federation = Federation("toy", "1", "image-classification", clients)
    return Context(federation, families, TRAIN, privacy=Privacy(settings, 3), **more)


def refusals(method: str | Method, settings: PrivacySettings, *counts: int, **more: Any) -> str:
    context = context_of(settings, *(counts or 4 * (100,)), **more)
    built = build_method(method) if isinstance(method, str) else method
    return "; ".join(str(one) for one in check(built, context) if one.severity == "error")


def test_a_configuration_without_privacy_is_the_same_run_as_before_there_was_any() -> None:
    assert settings_hash(load_experiment(SMALL)) == "3e39a32247"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"epsilon": 1.0}, "privacy.epsilon: has no effect with privacy.unit none"),
        ({"unit": "example", "delta": 1e-5}, "privacy.epsilon: is required, or noise_multiplier"),
        ({"unit": "example", "epsilon": 1.0}, "privacy.delta: is required, such as 1e-5"),
        ({"unit": "example", "epsilon": 1.0, "delta": 1e-5, "clip": 0.0}, "privacy.clip: must be from 1e-6 to 1e6"),
        ({"unit": "example", "epsilon": 1.0, "delta": 1.0}, "privacy.delta: must be above 0 and below 1"),
        ({"unit": "example", "epsilon": 1.0, "delta": 1e-5, "quantile": 0.5}, "privacy.quantile: belongs to unit"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_experiment({**SMALL, "privacy": settings})


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"train": {"class_weights": "balanced"}}, "train.class_weights: a record changes how much the others"),
        ({"federation": {"patience": 2}, "evaluate": {"every": 1}}, "federation.patience: goes back to a round by"),
        ({"stream": {"kind": "dynamic"}}, "stream.kind: batches of data that arrives"),
        ({"federation": {"deploy": "best"}, "baselines": ["local"]}, "federation.deploy: best chooses by validation"),
        (
            {"model": {"id": "digits-vit", "quantise": "int8"}},
            "model.quantise: int8 chooses by all examples of a batch",
        ),
        (
            {"families": {"b": {"clients": ["0"], "model": {"id": "digits-vit", "quantise": "int8"}}}},
            "families.b.model.quantise: int8 chooses by all examples of a batch",
        ),
    ],
)
def test_what_noise_on_gradients_does_not_hide_is_refused(block: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_experiment({**SMALL, **block, "privacy": {"unit": "example", "epsilon": 8.0, "delta": 1e-5}})


@pytest.mark.parametrize(
    ("method", "settings", "problem"),
    [
        ("fedit", {"epsilon": 8.0, "delta": 0.01}, "privacy.delta: 0.01 is not below 1 / 100"),
        ("fedmosaic", {"epsilon": 8.0, "delta": 1e-5}, "privacy.unit: stage federate computes a sketch of gradients"),
        ("fedp2eft", {"epsilon": 8.0, "delta": 1e-5}, "stage generate computes features"),
        ("fedit", {"epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 0.5}, "and 1 is the budget"),
        ("fedit", {"epsilon": 1e-6, "delta": 1e-9}, "no noise multiplier up to 10000 gives epsilon"),
    ],
)
def test_a_run_that_cannot_be_private_is_refused_before_it_starts(
    method: str, settings: dict[str, Any], problem: str
) -> None:
    assert problem in refusals(method, PrivacySettings("example", **settings))


@pytest.mark.parametrize(
    ("method", "guard", "problem"),
    [
        ("fedalt", GuardSettings(), "the update of each client"),
        ("relora", GuardSettings(), "starts anew in every round"),
        ("fedit", GuardSettings(rule="median"), "guard.rule: depends on what is usual"),
        ("fedit", GuardSettings(clip=1.0), "guard.clip: depends on what is usual"),
    ],
)
def test_a_server_that_cannot_hide_clients_is_refused(method: str, guard: GuardSettings, problem: str) -> None:
    assert problem in refusals(method, PrivacySettings("client", epsilon=8.0, delta=1e-2), guard=guard)
    assert not refusals("fedit", PrivacySettings("client", epsilon=8.0, delta=1e-2))


def test_plain_numbers_of_a_reply_get_no_noise_and_are_refused() -> None:
    told = refusals(Own(), PrivacySettings("client", epsilon=8.0, delta=1e-2))
    assert "stage federate sends plain numbers (loss), which get no noise" in told


def test_clients_of_few_and_of_many_records_both_have_to_be_protected() -> None:
    """Many bound delta, and few are in every batch, so that they spend more."""
    settings = PrivacySettings("example", delta=0.01, noise_multiplier=1.0, accountant="rdp")
    assert "privacy.delta: 0.01 is not below 1 / 500, of the number of training examples of c1" in refusals(
        "fedit", settings, 50, 500
    )
    settings = replace(settings, delta=1e-3)
    few, many = (whole(Privacy(settings, 3), build_method("fedit"), TRAIN, count) for count in (50, 500))
    assert not refusals("fedit", replace(settings, epsilon=1.01 * few), 50, 500)
    told = refusals("fedit", replace(settings, epsilon=(few + many) / 2), 50, 500)
    assert f"privacy.epsilon: all rounds together would spend {few:.4g}, and" in told and many < few


def test_the_rounds_of_all_federated_stages_are_counted_where_clients_are_hidden() -> None:
    """FDLoRA sends personal adapters once, and the shared one in every round of the run."""
    settings, method = PrivacySettings("client", epsilon=8.0, delta=1e-2), build_method("fdlora")
    context = context_of(settings, 1, 1, 1, 1, cohort=2)
    assert hides_clients(method, context) == ClientPlan(settings, clients=4, rate=0.5, rounds=1 + 3)
    short = replace(context, cohort=None, privacy=Privacy(settings, 3, most=2))
    assert hides_clients(method, short) == ClientPlan(settings, clients=4, rate=1.0, rounds=1 + 2)


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant, "find_spec", lambda name: None)
    told = refusals("fedit", PrivacySettings("example", epsilon=8.0, delta=1e-5))
    assert told.endswith("pip install '.[privacy]' in the clone") and told.count("privacy.unit") == 1


def test_passes_share_a_batch_or_have_their_own() -> None:
    """Two passes on one batch: a release with 1 / sqrt(2) of the noise; in sequence: twice as many."""
    train = TrainSettings(max_steps=5, batch_size=20)
    together, apart = (Stage("a", None, reads=Gradients(2, each)) for each in (False, True))  # type: ignore[arg-type]
    one, two = (release_of(stage, train, 100) for stage in (together, apart))
    assert (one.rate, one.count, one.noise) == (0.2, 5, pytest.approx(2**-0.5))
    assert (two.rate, two.count, two.noise) == (0.2, 10, 1.0)
    assert release_of(together, train, 10).rate == 1.0


def test_what_newcomers_send_is_refused() -> None:
    """Nobody counts what clients release that come after the run."""
    from befit.adapters.keys import slot
    from befit.protocol.privacy import unfit_stage
    from befit.protocol.stage import Message

    fedit = build_method("fedit")
    (stage,) = fedit.plan()

    class Greets(type(fedit)):
        def plan(self) -> list[Stage]:
            return [stage, replace(stage, name="arrive", who="newcomer", up=Message(slot("shared")), rounds=1)]

    arriving = Greets(**{field.name: getattr(fedit, field.name) for field in fields(fedit) if field.init})
    assert unfit_stage(fedit) == "" and "stage arrive " in unfit_stage(arriving)
