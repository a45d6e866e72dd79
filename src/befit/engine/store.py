"""Where clients' memories live between rounds, and how a set of them becomes durable at one instant.

Files are written under new names and never changed. What a run has come to is the list of current files in its
checkpoint, so a crash leaves either the old list or the new one, and files that no list names are litter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from befit.engine.wire import from_bytes, to_bytes
from befit.errors import RunError
from befit.storage import atomic_write, read_bytes
from befit.types import Payload, State

__all__ = ["ClientStore", "read_payload", "write_payload"]


def write_payload(path: Path, payload: Payload) -> None:
    atomic_write(path, to_bytes(payload.arrays, {"scalars": json.dumps(payload.scalars)}))


def read_payload(path: Path) -> Payload:
    arrays, metadata = from_bytes(read_bytes(path), str(path))
    return Payload(arrays, json.loads(metadata.get("scalars", "{}")))


class ClientStore:
    """Memories of all clients of one run.

    root      folder for the files; None keeps everything in memory and nothing durable
    resident  True: memories stay in memory and all go into one file at `commit`; False: each goes to a file of its
              own as soon as it is saved, and is read back when it is needed
    """

    def __init__(self, root: Path | None, resident: bool = True) -> None:
        self._root = root
        self._resident = resident or root is None
        self._memories: dict[str, Payload] = {}
        self._files: dict[str, str] = {}
        self._committed: set[str] = set()
        self._serial = 0
        self._dirty = False

    def load(self, client: str) -> Payload | None:
        """The client's memory, or None if it never had one."""
        if self._resident:
            return self._memories.get(client)
        name = self._files.get(client)
        return None if name is None else read_payload(self._path(name))

    def save(self, client: str, memory: Payload) -> None:
        self._dirty = True
        if self._resident:
            self._memories[client] = memory
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
        if self._resident and self._dirty and self._memories:
            name = f"all.{self._next()}.safetensors"
            arrays: State = {}
            for client, memory in self._memories.items():
                arrays |= {f"{client}/{key}": tensor for key, tensor in memory.arrays.items()}
            scalars = {client: memory.scalars for client, memory in self._memories.items()}
            atomic_write(self._path(name), to_bytes(arrays, {"clients": json.dumps(scalars)}))
            self._files = dict.fromkeys(self._memories, name)
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
                if name.startswith("all."):
                    self._memories |= self._unpack(name)
                else:
                    client = name.rsplit(".", 2)[0]
                    self._memories[client] = read_payload(self._path(name))
        elif any(name.startswith("all.") for name in files.values()):
            raise RunError("this run kept clients in memory (engine.store: memory); resume it with the same setting")
        self.settle()

    def has(self, name: str) -> bool:
        """Whether a file of this name is in this store's folder."""
        return self._root is not None and self._path(name).exists()

    @property
    def serial(self) -> int:
        return self._serial

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
