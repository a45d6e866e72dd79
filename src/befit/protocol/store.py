"""Where clients' memories live between rounds, and how a set of them becomes durable at one instant.

Files are written under new names and never changed. A run's state is the list of current files in its
checkpoint, so a crash leaves either the old list or the new one, and files that no list names can be removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from befit.adapters.state import PackedState
from befit.core.errors import RunError
from befit.core.names import folder_name
from befit.core.storage import atomic_write, read_durable
from befit.core.values import Payload, Scalar, State
from befit.core.wire import from_bytes, pieces, whole

if TYPE_CHECKING:
    from befit.protocol.engine import Best

_SHARD = 2**22
_MANY = "+"  # begins the name of a file with the memories of many clients, and of no client's own
_Memory = tuple[PackedState, dict[str, Scalar]]


def write_payload(path: Path, payload: Payload) -> None:
    """Make a memory durable, in a file with a checksum; `read_payload` reads it."""
    atomic_write(path, pieces(payload.arrays, {"scalars": json.dumps(payload.scalars)}))


def read_payload(path: Path) -> Payload:
    """A memory that was written to a file: arrays and plain numbers. Raises Damaged unless the file is whole."""
    arrays, metadata = from_bytes(whole(read_durable(path), str(path)), str(path))
    return Payload(arrays, json.loads(metadata["scalars"]))


class ClientStore:
    """Memories of all clients of one run.

    root      folder for the files; None keeps everything in memory and nothing durable
    resident  True: memories stay in memory and go into few files at `commit`; False: each goes to a file of its own as
              soon as it is saved, and is read back when it is needed
    """

    def __init__(self, root: Path | None, resident: bool = True) -> None:
        self._root = root
        self._resident = resident or root is None
        self._memories: dict[str, _Memory] = {}
        self._files: dict[str, str] = {}
        self._committed: set[str] = set()
        self._kept: set[str] = set()  # what the last commit names, and the one before
        self._held: set[str] = set()
        self._serial = 0
        self._dirty = False

    def load(self, client: str) -> Payload | None:
        """The client's memory, or None if it never had one. Raises Damaged where its file is not whole."""
        if self._resident:
            memory = self._memories.get(client)
            return None if memory is None else Payload(memory[0].unpack(), memory[1])
        name = self._files.get(client)
        return None if name is None else read_payload(self._path(name))

    def save(self, client: str, memory: Payload) -> None:
        self._dirty = True
        if self._resident:
            self._memories[client] = PackedState.of(memory.arrays), memory.scalars
            return
        name = f"{folder_name(client)}.{self._next()}.safetensors"
        write_payload(self._path(name), memory)
        before, self._files[client] = self._files.get(client), name
        if before is not None and before not in self._kept:
            self._path(before).unlink(missing_ok=True)

    def commit(self) -> dict[str, str]:
        """Make everything durable; returns client -> file for the checkpoint. Call `settle` once that is written."""
        if self._root is None:
            return {}
        if self._resident and self._dirty:
            for group in self._shards():
                name = f"{_MANY}{self._next()}.safetensors"
                arrays: State = {}
                for place, client in enumerate(group):
                    arrays |= {f"{place}/{key}": value for key, value in self._memories[client][0].unpack().items()}
                scalars = {client: self._memories[client][1] for client in group}
                atomic_write(self._path(name), pieces(arrays, {"clients": json.dumps(scalars)}))
                self._files |= dict.fromkeys(group, name)
        self._dirty = False
        return dict(self._files)

    def hold(self, files: Mapping[str, str], best: Best | None) -> None:
        """From the next `settle` on, keep what an earlier commit returned too, until other files are named here.

        best  what they are kept for
        """
        self._held = set(files.values())

    def settle(self) -> None:
        """The last commit is now the truth: remove every file that neither it nor the one before it names, and that is
        not held. A second call removes those of the one before as well."""
        last = set(self._files.values()) | self._held
        self._kept, self._committed = self._committed | last, last
        if self._root is not None and self._root.is_dir():
            for path in self._root.iterdir():
                if path.name not in self._kept:
                    path.unlink(missing_ok=True)

    def restore(self, files: Mapping[str, str], serial: int) -> None:
        """Go back to a checkpoint's list of files. `serial` is at least every number used in names of files.

        Reads every file, and removes none before `settle` is called. Raises Damaged for one that is not whole.
        """
        self._files, self._serial, self._memories = dict(files), serial, {}
        named = set(files.values())
        self._committed, self._kept = self._committed | named, self._kept | named
        if not self._resident and any(name.startswith(_MANY) for name in files.values()):
            raise RunError("this run kept clients in memory (engine.store: memory); resume it with the same setting")
        for name in sorted(named):
            if not self._resident:
                whole(read_durable(self._path(name)), str(self._path(name)))
                continue
            if name.startswith(_MANY):
                memories = self._unpack(name)
            else:
                memories = {c: read_payload(self._path(name)) for c, file in files.items() if file == name}
            for client, memory in memories.items():
                self._memories[client] = PackedState.of(memory.arrays), memory.scalars

    @property
    def serial(self) -> int:
        return self._serial

    def _shards(self) -> Iterator[list[str]]:
        """Clients in groups of some 4 MiB: writing a file needs its size in memory once more."""
        group: list[str] = []
        size = 0
        for client, (arrays, _) in self._memories.items():
            group.append(client)
            size += sum(block.nbytes for block in arrays.blocks)
            if size >= _SHARD:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _unpack(self, name: str) -> dict[str, Payload]:
        path = self._path(name)
        arrays, metadata = from_bytes(whole(read_durable(path), str(path)), str(path))
        scalars = json.loads(metadata["clients"])
        states: list[State] = [{} for _ in scalars]
        for key, tensor in arrays.items():
            place, _, rest = key.partition("/")
            states[int(place)][rest] = tensor
        return {client: Payload(state, scalars[client]) for client, state in zip(scalars, states, strict=True)}

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _path(self, name: str) -> Path:
        assert self._root is not None
        return self._root / name
