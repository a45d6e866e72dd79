"""What a real run's ledger counts is what `befit cost` says, for every method, stage by stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from befit.config.experiment import run_names
from befit.config.load import load_experiment
from befit.cost.architecture import find_architecture
from befit.cost.compare import compare
from befit.protocol.method import run_stages
from befit.protocol.registry import build_method, method_names
from befit.protocol.settings import WireSettings
from befit.runs.runner import run
from tests.backbones import short_vit
from tests.contract.conftest import LITTLE

ROUNDS, CLIENTS = 2, ("client-00", "client-01")
Ledger = dict[tuple[str, str, int], tuple[int, int]]  # (client, stage, round) -> bytes up, bytes down
# Before any test runs, since tests register methods of their own.
NAMES = method_names()
EVERY_METHOD = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Ledger]]:
    """By dtype of the wire and method: the ledger of one run of all methods on digits."""
    found: dict[str, dict[str, Ledger]] = {}
    first, *others = ({"name": name, **LITTLE.get(name, {})} for name in NAMES)
    for dtype in ("float32", "bfloat16"):
        experiment = load_experiment(
            {
                "benchmark": {"name": "digits", "clients": len(CLIENTS), "alpha": 10.0},
                "model": {"id": short_vit()},
                "limit": {"records": 12},
                "method": first,
                "baselines": others,
                "wire": {"dtype": dtype},
                "train": {"max_steps": 1},
                "federation": {"rounds": ROUNDS},
                "report": {"plots": False},
            }
        )
        path = run(experiment, out=tmp_path_factory.mktemp("run") / dtype).path
        folders = [path, *(path / "baselines" / label for label in run_names(experiment)[1:])]
        found[dtype] = {name: dict(_lines(folder)) for name, folder in zip(NAMES, folders, strict=True)}
    return found


def _lines(folder: Path) -> Iterator[tuple[tuple[str, str, int], tuple[int, int]]]:
    for line in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()):
        if line["purpose"] == "train":
            yield (line["client"], line["stage"], line["round"]), (line["bytes_up"], line["bytes_down"])


def row_of(name: str, dtype: Any = "float32") -> dict[str, Any]:
    model, methods = find_architecture(short_vit()), {name: build_method({"name": name, **LITTLE.get(name, {})})}
    return compare(model, methods, "auto", rounds=ROUNDS, wire=WireSettings(dtype), labels=10, clients=len(CLIENTS))[0]


@EVERY_METHOD
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_client_uploads_the_bytes_of_the_formula(
    name: str, dtype: str, ledgers: dict[str, dict[str, Ledger]]
) -> None:
    row, ledger = row_of(name, dtype), ledgers[dtype][name]
    stages = run_stages(build_method({"name": name, **LITTLE.get(name, {})}))
    numbers = {stage.name: bool(stage.reply.numbers) for stage in stages}  # whose bytes are in the ledger alone
    if not any(numbers.values()) and not any(stage.turns for stage in stages):
        sent = {stage["name"]: stage["upload_bytes_per_round"] for stage in row["stages"]}
        assert {key: up for key, (up, _) in ledger.items()} == {
            (client, stage["name"], round_ + 1): sent[stage["name"]]
            for client in CLIENTS
            for stage in row["stages"]
            for round_ in range(stage["rounds"])
        }
    for client in CLIENTS:
        mine = {key: up for key, (up, _) in ledger.items() if key[0] == client}
        beside = sum(mine.values()) - row["upload_bytes_total"]
        with_numbers = sum(numbers[stage] for _, stage, _ in mine)
        assert with_numbers <= beside <= 24 * with_numbers


@EVERY_METHOD
def test_each_client_downloads_the_bytes_of_the_formula(name: str, ledgers: dict[str, dict[str, Ledger]]) -> None:
    """Plain numbers beside the arrays are in the ledger, and are the same on both wires; arrays are half on one. So
    twice the difference is the arrays. In a first round there may be less to send yet."""
    wide, narrow = ledgers["float32"][name], ledgers["bfloat16"][name]
    assert wide.keys() == narrow.keys()
    stages = {stage["name"]: stage for stage in row_of(name)["stages"]}
    for key, (_, down) in wide.items():
        _, stage, round_ = key
        arrays, expected = 2 * (down - narrow[key][1]), stages[stage]["download_bytes_per_round"]
        assert 0 <= down - arrays < 1000
        fewer = name == "fedlease"  # of two clients no two clusters can be told apart
        if fewer or (stages[stage]["federated"] and round_ == 1):
            assert 0 <= arrays <= expected
        else:
            assert arrays == expected
