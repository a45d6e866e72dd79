"""Every method whose clients can train as one: it comes to what it comes to one by one, but for rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch import Tensor

from befit.config.load import load_experiment
from befit.core.values import Failure, Payload, Tick, Update
from befit.protocol.method import trains_in_fleets
from befit.runs.host import Host
from befit.train import fleet
from tests.contract.conftest import METHODS_BY_PATTERN, Play, Unmeasured, built, experiment
from tests.federation import Federation

ONE_BY_ONE = {"dept", "fedavg", "fedl2p"}  # two change every weight, and one needs derivatives of its training


FEDERATIONS: dict[str, dict[str, Any]] = {
    "digits": {},
    "digits-vqa": {  # questions about one to four images
        "benchmark": {"name": "digits-vqa", "clients": 3, "train": 6, "test": 1},
        "model": {"id": "digits-llava-s", "max_length": 128},
        "evaluate": {"metrics": ["token_accuracy"]},  # which writes no answers
    },
}


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Host:
    """With SGD: AdamW turns an error of 1e-8 in a gradient of 0 into one of a whole step."""
    train = {"max_steps": 2, "lr": 5e-2, "optimiser": "sgd", "momentum": 0.9, "grad_clip": 0.5}
    return Host(load_experiment(experiment(train=train, adapter={"dropout": 0.1}, **FEDERATIONS[request.param])))


class AtOnce(Unmeasured):
    """All clients of a round at once."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return self.updates(requests, at, len(requests))


def arrays(outcome: Federation) -> dict[tuple[str, str], Tensor]:
    memories = {"server": outcome.server, **outcome.memories()}
    return {(owner, key): value for owner, one in memories.items() if one for key, value in one.arrays.items()}


# Terms, gates and settings that no method has by default.
OPTIONS: dict[str, dict[str, Any]] = {
    "guidance, distilled": {"guide": "function", "similarity": "cosine", "keep_optimiser": True},
    "guidance, Jensen-Shannon": {"guide": "function", "kd_direction": "js", "beta": 0.5},
    "guidance, aligned": {"guide": "parametric", "align": "procrustes", "beta": 0.3},
    "guidance, products": {"guide": "parametric", "penalty": "product", "similarity": "min"},
    "hetlora, ranks": {"ranks": {"client-00": 2, "client-01": 5}, "decay": 0.1},
    "rela, noisy gate": {"gate": "noisy-input"},
    "fedmosaic, cores": {"blocks": 1, "gate": "input", "gate_rate": 3.0},
    "lora, base with dropout": {"base": {"name": "fedit", "rounds": 1, "dropout": 0.4, "train": {"lr": 0.02}}},
    "bayestune, parity": {"preset": "parity"},
    "fedprox, strong": {"mu": 1.0},
}


# One of each way in which rows are put together: copies of a batch, a second forward pass, gates over frozen factors.
SEEING = ["fedsim", "guidance, distilled", "fedmosaic, cores"]


@pytest.mark.parametrize(
    ("host", "name"),
    [
        *(pytest.param("digits", *one.values, marks=one.marks) for one in METHODS_BY_PATTERN),
        *(("digits", name) for name in OPTIONS),
        *(("digits-vqa", name) for name in SEEING),
    ],
    indirect=["host"],
)
def test_clients_that_train_as_one_come_to_what_they_come_to_alone(
    name: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds, so that what is kept from the first one counts."""
    method = built(name.partition(",")[0], **OPTIONS.get(name, {}))
    sizes: list[int] = []
    real = fleet.at_once

    def counted(asked: Any, *others: Any) -> Any:
        ended = real(asked, *others)
        sizes.append(len(asked))
        return ended

    monkeypatch.setattr(fleet, "at_once", counted)
    alone = play(method, rounds=2, engine_class=Unmeasured)
    assert not sizes
    together = play(method, rounds=2, engine_class=AtOnce)
    assert set(sizes) == (set() if name in ONE_BY_ONE else {3})
    assert (trains_in_fleets(method) == "") == bool(sizes)
    expected, found = arrays(alone), arrays(together)
    assert expected.keys() == found.keys()
    assert not together.journal.failures
    for key, value in expected.items():
        if value.is_floating_point() and value.numel():
            assert float((value - found[key]).norm()) <= 1e-4 * float(value.norm()) + 1e-7, key
    for (_, mine), (_, theirs) in zip(alone.journal.updates, together.journal.updates, strict=True):
        assert mine.client == theirs.client
        assert mine.report == pytest.approx(theirs.report, rel=1e-3, abs=1e-5)
