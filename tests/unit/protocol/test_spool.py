from pathlib import Path

import pytest
import safetensors.torch
import torch

from befit.adapters.state import PackedState
from befit.core.errors import RunError
from befit.core.values import ClientInfo, Payload, Update
from befit.protocol.spool import Spool
from befit.protocol.store import read_payload, write_payload


def update(name: str, value: float) -> Update:
    arrays = {
        "shared/m/A": torch.full((2, 3), value),
        "shared/m/n": torch.tensor([int(value)]),
        "shared/e": torch.ones(0),
    }
    return Update(ClientInfo(name, "b", 5), Payload(arrays, {"of": name}), {"loss": value})


@pytest.mark.parametrize(("limit", "files"), [(0, 3), (60, 2), (2**20, 0)])
def test_updates_come_back_whole_and_sorted_from_memory_and_from_files(tmp_path: Path, limit: int, files: int) -> None:
    folder = tmp_path / "spool"
    with Spool(folder, limit) as spool:
        for name, value in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
            spool.add(update(name, value))
        found = spool.updates()
        assert len(list(folder.glob("*"))) == files
        assert [one.client.id for one in found] == ["a", "b", "c"] and len(spool) == 3
        for one, value in zip(found, (1.0, 2.0, 3.0), strict=True):
            expected = update(one.client.id, value)
            assert one.report == expected.report and one.payload.scalars == expected.payload.scalars
            assert one.payload.arrays.keys() == expected.payload.arrays.keys()
            for key, tensor in expected.payload.arrays.items():
                assert one.payload.arrays[key].dtype == tensor.dtype and torch.equal(one.payload.arrays[key], tensor)
    assert not folder.exists()


def test_a_spool_is_removed_when_the_round_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Spool(tmp_path / "spool", 0) as spool:
        spool.add(update("a", 1.0))
        raise KeyError
    assert not (tmp_path / "spool").exists()


def test_a_spool_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with Spool(tmp_path / "file" / "spool", 0) as spool, pytest.raises(RunError, match="cannot write"):
        spool.add(update("a", 1.0))


def test_a_packed_state_is_a_copy_in_one_block_per_type_and_comes_back_whole() -> None:
    state = {"s/a": torch.arange(6.0).view(2, 3).T, "s/i": torch.arange(3), "s/e": torch.ones(0), "s/b": torch.ones(4)}
    packed = PackedState.of(state)
    copy = packed.unpack()
    assert list(copy) == list(state) and len(packed.blocks) == 2
    assert all(torch.equal(copy[key], state[key]) and copy[key].dtype == state[key].dtype for key in state)
    copy["s/a"].zero_()
    copy["s/i"].zero_()
    assert state["s/a"].sum() == 15 and state["s/i"].sum() == 3
    assert PackedState.of({}).unpack() == {}


@pytest.mark.parametrize("others", [{}, {"s/b": torch.ones(4)}])
def test_a_packed_state_belongs_to_no_graph(others: dict[str, torch.Tensor]) -> None:
    packed = PackedState.of({"s/a": torch.ones(2, 3).T.requires_grad_(), **others})
    assert not packed.blocks[0].requires_grad and packed.unpack()["s/a"].shape == (3, 2)


def test_states_of_other_shapes_do_not_share_a_description() -> None:
    first, second = {"s/a": torch.ones(2, 3)}, {"s/a": torch.ones(3, 2)}
    assert PackedState.of(first).unpack()["s/a"].shape == (2, 3)
    assert PackedState.of(second).unpack()["s/a"].shape == (3, 2)


def test_a_memory_is_written_in_pieces_and_read_by_the_library(tmp_path: Path) -> None:
    """Several types, no element, no dimension, nothing at all: the same arrays, in whatever order they come."""
    arrays = {
        "own/a/A": torch.randn(3, 5),
        "own/a/B": torch.randn(2, 4).bfloat16(),
        "own/b/on": torch.tensor([True, False]),
        "own/b/step": torch.tensor(7),
        "own/c/A": torch.zeros(0, 4),
        "own/c/B": torch.arange(6.0).view(2, 3).T,
    }
    memory = Payload(arrays, {"clients:x": ["a", "b"], "n": 1})
    write_payload(tmp_path / "server.safetensors", memory)
    read = safetensors.torch.load_file(tmp_path / "server.safetensors")
    assert read.keys() == arrays.keys()
    for key, value in arrays.items():
        assert read[key].dtype == value.dtype and torch.equal(read[key], value), key
    assert read_payload(tmp_path / "server.safetensors").scalars == memory.scalars
    write_payload(tmp_path / "again.safetensors", Payload(dict(reversed(arrays.items())), memory.scalars))
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "server.safetensors").read_bytes()
    write_payload(tmp_path / "empty.safetensors", Payload())
    assert read_payload(tmp_path / "empty.safetensors") == Payload()
