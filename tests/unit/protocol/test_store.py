"""Memories of clients that go back to what they were at a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from befit.core.values import Payload
from befit.protocol.store import ClientStore
from tests.unit.flower.states import same


def memory(value: float) -> Payload:
    return Payload({"own/m/A": torch.full((2, 3), value), "own/m/n": torch.tensor([int(value)])}, {"value": value})


@pytest.mark.parametrize("resident", [True, False], ids=["memory", "disk"])
def test_a_store_that_goes_back_knows_nothing_of_what_came_later(resident: bool, tmp_path: Path) -> None:
    store = ClientStore(tmp_path, resident)
    store.save("a", memory(1.0))
    files = store.commit()
    store.hold(files, None)
    store.settle()
    for value in (2.0, 3.0, 4.0):
        for client in "ab":
            store.save(client, memory(value))
        store.commit()
        store.settle()
    store.restore(files, store.serial)
    found = store.load("a")
    assert found is not None and same(found, memory(1.0)) and store.load("b") is None
    store.save("a", memory(5.0))
    anew = ClientStore(tmp_path, resident)
    anew.restore(store.commit(), store.serial)
    found = anew.load("a")
    assert found is not None and same(found, memory(5.0)) and anew.load("b") is None
