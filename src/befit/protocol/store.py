"""Where clients' memories live between rounds, and how a set of them becomes durable at one instant.

Files are written under new names and never changed. A run's state is the list of current files in its
checkpoint, so a crash leaves either the old list or the new one, and files that no list names can be removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from befit.adapters.state import PackedState
from befit.core.errors import RunError
from befit.core.storage import atomic_write, read_bytes
from befit.core.values import Payload, Scalar, State
from befit.core.wire import array_bytes, from_bytes, pieces, to_bytes

_SHARD = 2**22
_Memory = tuple[PackedState, dict[str, Scalar]]


def write_payload(path: Path, payload: Payload) -> None:
    atomic_write(path, pieces(payload.arrays, {"scalars": json.dumps(payload.scalars)}))


def write_scratch(path: Path, payload: Payload) -> None:
    """The same file, but not forced to the disk: for what a crash may lose."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_bytes(payload.arrays, {"scalars": json.dumps(payload.scalars)}))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def read_payload(path: Path) -> Payload:
    """A memory that was written to a file: arrays and plain numbers. Raises PayloadMismatch for a damaged one."""
    arrays, metadata = from_bytes(read_bytes(path), str(path))
    return Payload(arrays, json.loads(metadata.get("scalars", "{}")))


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
        self._serial = 0
        self._dirty = False

    def load(self, client: str) -> Payload | None:
        """The client's memory, or None if it never had one."""
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
        name = f"{client}.{self._next()}.safetensors"
        write_payload(self._path(name), memory)
        before, self._files[client] = self._files.get(client), name
        if before is not None and before not in self._committed:
            self._path(before).unlink(missing_ok=True)

    def commit(self) -> dict[str, str]:
        """Make everything durable; returns client -> file for the checkpoint. Call `settle` once that is written."""
        if self._root is None:
            return {}
        if self._resident and self._dirty:
            for group in self._shards():
                name = f"all.{self._next()}.safetensors"
                arrays: State = {}
                for client in group:
                    arrays |= {f"{client}/{key}": value for key, value in self._memories[client][0].unpack().items()}
                scalars = {client: self._memories[client][1] for client in group}
                atomic_write(self._path(name), to_bytes(arrays, {"clients": json.dumps(scalars)}))
                self._files |= dict.fromkeys(group, name)
        self._dirty = False
        return dict(self._files)

    def settle(self) -> None:
        """The last commit is now the truth: remove every file that it does not name."""
        self._committed = set(self._files.values())
        if self._root is not None and self._root.is_dir():
            for path in self._root.iterdir():
                if path.name not in self._committed:
                    path.unlink(missing_ok=True)

    def restore(self, files: Mapping[str, str], serial: int) -> None:
        """Go back to a checkpoint's list of files. `serial` is above every number used in their names."""
        self._files, self._serial = dict(files), serial
        self._memories = {}
        if self._resident:
            for name in sorted(set(files.values())):
                memories = (
                    self._unpack(name)
                    if name.startswith("all.")
                    else {name.rsplit(".", 2)[0]: read_payload(self._path(name))}
                )
                for client, memory in memories.items():
                    self._memories[client] = PackedState.of(memory.arrays), memory.scalars
        elif any(name.startswith("all.") for name in files.values()):
            raise RunError("this run kept clients in memory (engine.store: memory); resume it with the same setting")
        self.settle()

    def has(self, name: str) -> bool:
        """Whether a file of this name is in this store's folder."""
        return self._root is not None and self._path(name).exists()

    @property
    def serial(self) -> int:
        return self._serial

    def _shards(self) -> Iterator[list[str]]:
        """Clients in groups of some 4 MiB: writing a file needs its size in memory once more."""
        group: list[str] = []
        size = 0
        for client, (arrays, _) in self._memories.items():
            group.append(client)
            size += sum(map(array_bytes, arrays.blocks))
            if size >= _SHARD:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _unpack(self, name: str) -> dict[str, Payload]:
        arrays, metadata = from_bytes(read_bytes(self._path(name)), name)
        states: dict[str, State] = {}
        for key, tensor in arrays.items():
            client, _, rest = key.partition("/")
            states.setdefault(client, {})[rest] = tensor
        scalars = json.loads(metadata["clients"])
        return {client: Payload(states.get(client, {}), values) for client, values in scalars.items()}

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _path(self, name: str) -> Path:
        assert self._root is not None
        return self._root / name
