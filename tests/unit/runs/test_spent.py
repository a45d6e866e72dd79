"""Whose replies may have left and were not read, of clients on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from befit.config.load import load_experiment
from befit.core.storage import log_line
from befit.protocol.registry import build_method
from befit.runs.host import Host
from befit.runs.spent import protected
from tests.backbones import short_vit

pytest.importorskip("dp_accounting")
CLIENTS = ("client-00", "client-01", "client-02")


def host(**federation: Any) -> Host:
    """Of FedDPA, which has a stage of its own, in which nothing leaves, after one that is private."""
    return Host(
        load_experiment(
            {
                "model": {"id": short_vit()},
                "benchmark": {"name": "digits", "clients": 3},
                "limit": {"records": 48},
                "method": "feddpa",
                "privacy": {"unit": "example", "delta": 1e-3, "noise_multiplier": 1.0},
                "federation": {"rounds": 2, **federation},
            }
        )
    )


def unread(folder: Path, host: Host, *lines: dict[str, Any], here: tuple[str, ...] = ()) -> Any:
    (folder / "metrics.jsonl").write_bytes(b"".join(map(log_line, lines)))
    method = build_method(host.experiment.method)
    rows = {client: {"diagnostics": {"epsilon": 1.0}} for client in CLIENTS}
    elsewhere = {client: 0 if client in here else 16 for client in CLIENTS}
    return protected(folder, host, method, method.plan(), rows, elsewhere).get("unread")


def failed(client: str, error: str = "timeout", stage: str = "federate", **more: Any) -> dict[str, Any]:
    return {"kind": "failure", "stage": stage, "round": 1, "client": client, "error": error, "reason": "", **more}


def told(client: str) -> dict[str, Any]:
    """What a client has spent in all, which it says with its update."""
    line = {"kind": "diagnostic", "stage": "federate", "round": 2, "client": client}
    return {**line, "name": "epsilon", "value": 1.0}


def test_a_reply_that_was_lost_is_unread_until_its_client_tells_what_it_has_spent(tmp_path: Path) -> None:
    first, second, third = CLIENTS
    one = host()
    lost = [failed(first), failed(second), told(first)]
    assert unread(tmp_path, one, *lost) == [second]
    assert unread(tmp_path, one, *lost, failed(first)) == [second, first]
    assert unread(tmp_path, one, *lost, here=(second,)) is None  # what it has spent is known
    nothing = [failed(third, "ConfigError"), failed(third, scoring=True), failed(third, stage="remember")]
    assert unread(tmp_path, one, *nothing) is None


def test_where_rounds_do_not_wait_anybody_may_be_at_work_when_the_last_one_ends(tmp_path: Path) -> None:
    late = host(asynchronous={"buffer": 2})
    assert unread(tmp_path, late, *map(told, CLIENTS)) == [*CLIENTS]
