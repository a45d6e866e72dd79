"""The replies of one round, of which only so many bytes are in memory at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from befit.adapters.state import PackedState
from befit.core.errors import RunError
from befit.core.values import Payload, Scalar, State, Update


class LazyPayload(Payload):
    """A payload whose arrays are made each time they are asked for."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], State], scalars: dict[str, Scalar]) -> None:
        object.__setattr__(self, "_read", read)
        object.__setattr__(self, "scalars", scalars)

    @property
    def arrays(self) -> State:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._read()


class Spool:
    """Collects updates. Those beyond `limit` bytes of arrays go to files in `folder`, which `with` makes and removes.

    Reading an update twice reads its file twice, so an aggregation should go through the updates once.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit, self._held = folder, limit, 0
        self._updates: list[Update] = []

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._updates)

    def add(self, update: Update) -> None:
        packed = PackedState.of(update.payload.arrays)
        size = sum(block.nbytes for block in packed.blocks)
        if self._held + size > self._limit:
            read = _written(self._folder / str(len(self._updates)), packed)
        else:
            self._held += size
            read = packed.unpack
        update = replace(update, payload=LazyPayload(read, update.payload.scalars))
        self._updates.append(update)

    def updates(self) -> Sequence[Update]:
        """All updates, sorted by client id."""
        return sorted(self._updates, key=lambda update: update.client.id)


def _written(path: Path, packed: PackedState) -> Callable[[], State]:
    """What reads the arrays back from a file that this writes: their blocks, each by itself, and nothing else."""
    blocks = tuple((block.dtype, block.nbytes) for block in packed.blocks)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for block in packed.blocks:
                file.write(block.cpu().view(torch.uint8).numpy().data)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    return partial(_read_back, path, blocks, replace(packed, blocks=()))


def _read_back(path: Path, blocks: Sequence[tuple[torch.dtype, int]], emptied: PackedState) -> State:
    try:
        with path.open("rb") as file:
            read = [np.fromfile(file, np.uint8, size) for _, size in blocks]
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    if any(array.size < size for array, (_, size) in zip(read, blocks, strict=True)):
        raise RunError(f"{path} is cut off")
    found = [torch.from_numpy(array).view(dtype) for array, (dtype, _) in zip(read, blocks, strict=True)]
    return replace(emptied, blocks=tuple(found)).unpack()
