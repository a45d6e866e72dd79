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
from befit.protocol.context import Context
from befit.protocol.mechanism import Privacy
from befit.protocol.privacy import release_of
from befit.protocol.registry import build_method
from befit.protocol.settings import GuardSettings, PrivacySettings, TrainSettings
from befit.protocol.stage import Gradients, Stage
from befit.runs.provenance import settings_hash

pytest.importorskip("dp_accounting")
SMALL: dict[str, Any] = {"benchmark": "digits", "method": "fedit", "baselines": []}
RECORDS = tuple({"id": number} for number in range(100))
FEDERATION = Federation("toy", "1", "image-classification", tuple(ClientData(f"c{n}", RECORDS) for n in range(4)))  # type: ignore[arg-type]


def refusals(method: str, settings: PrivacySettings, guard: GuardSettings = GuardSettings()) -> str:  # noqa: B008 frozen
    families = {client.id: "model" for client in FEDERATION.clients}
    privacy = Privacy(settings, 3)
    context = Context(FEDERATION, families, TrainSettings(max_steps=5), guard=guard, privacy=privacy)
    return "; ".join(str(one) for one in check(build_method(method), context) if one.severity == "error")


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
    assert problem in refusals(method, PrivacySettings("client", epsilon=8.0, delta=1e-2), guard)
    assert not refusals("fedit", PrivacySettings("client", epsilon=8.0, delta=1e-2))


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accountant, "find_spec", lambda name: None)
    told = refusals("fedit", PrivacySettings("example", epsilon=8.0, delta=1e-5))
    assert told.endswith("pip install 'befit[privacy]'") and told.count("privacy.unit") == 1


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
