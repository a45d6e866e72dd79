"""The replies of one round, of which only so many bytes are in memory at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from befit.adapters.state import PackedState
from befit.core.values import Payload, Scalar, State, Update
from befit.core.wire import payload_bytes
from befit.protocol.store import read_scratch, write_scratch


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
        size = payload_bytes(update.payload)
        if self._held + size > self._limit:
            path = self._folder / f"{len(self._updates)}.safetensors"
            write_scratch(path, update.payload)
            read = partial(_arrays_of, path)
        else:
            self._held += size
            read = PackedState.of(update.payload.arrays).unpack
        update = replace(update, payload=LazyPayload(read, update.payload.scalars))
        self._updates.append(update)

    def updates(self) -> Sequence[Update]:
        """All updates, sorted by client id."""
        return sorted(self._updates, key=lambda update: update.client.id)


def _arrays_of(path: Path) -> State:
    return read_scratch(path).arrays
