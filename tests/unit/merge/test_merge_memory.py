"""What merges hold in memory: nothing as large as a weight matrix, and one update at a time for linear rules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from befit.core.values import ClientInfo, Payload, State, Update
from befit.merge.merge import Merge, MergeContext
from befit.merge.spaces import ModuleUpdates, merge_updates
from befit.merge.update import finish
from tests.unit.merge.oracle import random_updates

WIDTH = 160


class Largest(TorchDispatchMode):
    """The most numbers that any operation put into one array."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return result


def largest(merge: Merge, rank: int | None = 4) -> int:
    updates = random_updates((3, 4, 2), WIDTH, WIDTH, dtype=torch.float32)
    modules = [ModuleUpdates("m", [(B, A) for B, A, _ in updates], [1.0] * 3)]
    with Largest() as seen:
        for _, update in merge_updates(
            lambda: modules, merge.coordinates, merge.rule_value, [1.0] * 3, lambda k, n: torch.Generator()
        ):
            update.pair() if rank is None else finish(update, rank, 1.0, torch.Generator())
    return seen.numbers


@pytest.mark.parametrize("rank", [4, None])
@pytest.mark.parametrize(
    "merge",
    [
        *(
            Merge(space=space, rule=rule)
            for space in ("knots", "delta")
            for rule in ("mean", "task-arithmetic", "iso-c")
        ),
        *(Merge(space="knots", rule=rule) for rule in ("ties", "dare", "dare-ties", "magnitude")),
        Merge(space="knots", rule="ties", knots_input="v", trim_scope="global", zero_sign="majority"),
        Merge(space="knots", rule="iso-c", knots_input="v"),
    ],
    ids=lambda merge: f"{merge.space}-{merge.rule}-{merge.trim_scope}-{merge.knots_input}-{merge.delta_reference}",
)
def test_no_array_of_the_size_of_a_weight_is_formed(merge: Merge, rank: int | None) -> None:
    """Ranks sum to 9: the basis has 160 x 9 numbers, all coordinates of one client as many, a weight 160 x 160.

    The counts of a streamed cut are 2^16 numbers however large a module is, and are left out of the bound.
    """
    limit = WIDTH * WIDTH // 4 if merge.trim_scope == "tensor" else (1 << 16) + 1
    assert largest(merge, rank) < limit


@pytest.mark.parametrize("rule", ["ties", "dare"])
def test_the_hook_sees_dense_updates_where_they_are_formed(rule: Any) -> None:
    assert largest(Merge(space="delta", rule=rule)) >= WIDTH * WIDTH


class OneAtATime(Sequence[Update]):
    """Updates whose arrays are made when asked for; `most` is how many were alive together."""

    def __init__(self, count: int) -> None:
        self.count, self.read, self.most = count, 0, 0
        self.alive: set[int] = set()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Update:
        if index >= self.count:
            raise IndexError(index)
        return Update(ClientInfo(f"c{index}", "m", 1 + index), _Lazy(self, index))

    def arrays(self, index: int) -> State:
        gc.collect()
        self.read += 1
        value = torch.full((2, 3), float(index))
        self.alive.add(id(value))
        weakref.finalize(value, self.alive.discard, id(value))
        self.most = max(self.most, len(self.alive))
        return {"s/m/A": value, "s/m/B": torch.ones(3, 2) * index}


class _Lazy(Payload):
    __slots__ = ("_index", "_owner")

    def __init__(self, owner: OneAtATime, index: int) -> None:
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_index", index)

    @property
    def arrays(self) -> State:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._owner.arrays(self._index)


@pytest.mark.parametrize(
    "merge",
    [
        Merge("uniform", rule="task-arithmetic"),
        Merge("uniform", rule="task-arithmetic", delta_reference="round_start"),
    ],
    ids=lambda merge: f"{merge.space}-{merge.rule}-{merge.trim_scope}-{merge.knots_input}-{merge.delta_reference}",
)
def test_linear_rules_read_each_update_once_and_hold_two_at_most(merge: Merge) -> None:
    """Two: a generator's frame may keep the last one while the next is read."""
    gc.freeze()  # what other tests hold is none of it, and is not to be gone through for every array
    updates = OneAtATime(12)
    start = {"s/m/A": torch.zeros(2, 3), "s/m/B": torch.zeros(3, 2)}
    found = merge(updates, MergeContext(start=start))
    assert updates.read == 12 and updates.most <= 2
    mean = sum(range(12)) / 12
    expected = 12 * mean if merge.rule == "task-arithmetic" else mean
    torch.testing.assert_close(found["s/m/A"], torch.full((2, 3), float(expected)))
