"""A merged adapter on a disk: arrays written as they come, and a folder that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from befit.core.errors import ConfigError, RunError
from befit.core.wire import DTYPE_NAMES

_ENTRY = 160  # bytes of a header's entry beside its name: type, shape and offsets


class SafetensorsFile:
    """A safetensors file whose arrays are appended, so that they need not be in memory together.

    The format's header comes first and may end in spaces: room for `names` is left free and filled at the end.
    """

    def __init__(self, path: Path, names: list[str]) -> None:
        self._room = -(-(sum(len(json.dumps(name)) + _ENTRY for name in names) + _ENTRY) // 8) * 8
        self._entries: dict[str, dict[str, object]] = {}
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self._end = 0

    def __enter__(self) -> SafetensorsFile:
        return self

    def append(self, name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Write an array; or, with the `shape` of the whole, its first rows, and further ones by `more`."""
        self._entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape if shape is None else shape),
            "data_offsets": [self._end, self._end],
        }
        self.more(name, tensor)

    def more(self, name: str, tensor: Tensor) -> None:
        """Write further rows of the array that was appended last."""
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(data)  # pyright: ignore[reportArgumentType]  (numpy's arrays are buffers)
        self._end += data.nbytes
        self._entries[name]["data_offsets"][1] = self._end  # type: ignore[index]

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file as file:
            if error is None:
                header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}).encode()
                assert len(header) <= self._room, "more names than the file was made for"
                file.seek(0)
                file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
                file.flush()
                os.fsync(file.fileno())


def check_target(out: Path, inputs: list[Path], force: bool, config: str) -> None:
    """Raise ConfigError where `out` may not be written: it is an input, or exists.

    With `force`, an existing adapter is replaced; any other folder or file is never overwritten.
    """
    problem = ""
    if any(out.resolve() == path.resolve() for path in inputs):
        problem = "is one of the adapters to merge"
    elif out.exists() and not out.is_dir():
        problem = "is a file"
    elif out.is_dir() and any(out.iterdir()):
        if not (out / config).is_file():
            problem = f"holds files but no {config}; it will not be replaced"
        elif not force:
            problem = "holds an adapter already; --force replaces it"
    if problem:
        raise ConfigError([f"{out}: {problem}"], "--out")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, whose files become those of `out` once everything in it was written, the configuration last.

    Other files that `out` may hold stay. Raises RunError, and leaves `out` as it was, if the disk is full or the place
    cannot be written.
    """
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp"))
        yield temporary
        temporary.chmod(0o755)
        if out.is_dir() and any(out.iterdir()):
            for path in sorted(temporary.iterdir(), key=lambda path: path.suffix == ".json"):
                os.replace(path, out / path.name)
        else:
            os.replace(temporary, out)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}; nothing half-written was kept") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
