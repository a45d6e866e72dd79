"""What a site keeps of one run: its client's state, stamped with stage and rounds, and the last reply.

A request that comes again, because its answer was lost or because the server went back to its last checkpoint, is
answered again and not trained again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from befit.core.errors import Damaged, PayloadMismatch
from befit.core.storage import atomic_write, read_durable, read_sealed, write_sealed
from befit.core.values import Payload
from befit.protocol.store import ClientStore, read_payload, write_payload

Value = TypeVar("Value")
_LOG = logging.getLogger(__name__)
_STAMP = "stamp.json"


@dataclass(frozen=True)
class Stamp:
    """When a memory was made: `stage` by its place in the plan, rounds `first` to `last`, for which request.

    request  hash of the request
    """

    stage: int
    first: int
    last: int
    request: str

    @property
    def end(self) -> tuple[int, int]:
        return self.stage, self.last

    @property
    def when(self) -> tuple[int, int, int]:
        return self.stage, self.first, self.last

    def follows(self, other: Stamp) -> bool:
        """Whether this one's rounds all come after the other's."""
        return (self.stage, self.first) > (other.stage, other.last)


def has_memory(folder: Path) -> bool:
    """Whether a client was trained in the run of a method that has this folder."""
    return (folder / _STAMP).exists()


class SiteMemory(ClientStore):
    """The store of one client for one run of one method, in `folder`.

    `stamp.json` names the files of the memory before and after the last request and of the reply to it. It is replaced
    at one instant, so a crash leaves the state before that request or after it.

    kept  stage and round whose memory is kept too, under "best", while later rounds are trained
    """

    def __init__(self, folder: Path, kept: tuple[int, int] | None = None) -> None:
        super().__init__(None)
        self._folder = folder
        path = folder / _STAMP
        saved = self._whole(lambda: read_sealed(path)) if path.exists() else None
        self.last = None if saved is None else Stamp(**saved["last"])
        self._files: dict[str, str] = {} if saved is None else saved["files"]
        self._number = 0 if saved is None else saved["number"]
        self._reply = "" if saved is None else saved["reply"]  # SHA-256 of the last reply
        self._from = "after"
        self._pending: Payload | None = None
        self._best_round = kept

    def ask(self, stage: int, round_: int) -> None:
        """Read the memory that a request of this stage and round is of: once a run has gone back to the round that is
        kept, that of then, where this client was trained in later rounds of the stage. Raises PayloadMismatch without
        one."""
        if self._best_round is None or self.last is None or self.last.stage != self._best_round[0]:
            return
        back = stage > self._best_round[0] or (stage, round_) == self._best_round
        if back and self.last.last > self._best_round[1]:
            if "best" not in self._files:
                stage, round_ = self._best_round
                raise PayloadMismatch(
                    f"the server goes back to round {round_} of stage {stage + 1}, and never said that it was to be "
                    "kept here; start a new run"
                )
            self._from = "best"

    def load(self, client: str) -> Payload | None:
        name = self._files.get(self._from)
        return None if not name else self._whole(lambda: read_payload(self._folder / name))

    def _whole(self, read: Callable[[], Value]) -> Value:
        try:
            return read()
        except Damaged as error:
            raise Damaged(
                f"{error}. Put it back from a copy; or remove {self._folder / _STAMP}, and this client goes on "
                "without what it had learned in this run"
            ) from error

    def save(self, client: str, memory: Payload) -> None:
        self._pending = memory  # durable together with its reply, in `keep`

    def answered(self, now: Stamp) -> bytes | None:
        """The reply to this request if it was the last one; None if it has to be worked on.

        Goes back by one request where the server asks something else for the same rounds, as it does after a resume
        with other clients. Raises PayloadMismatch for rounds that lie before.
        """
        if self.last is None or now.follows(self.last):
            return None
        if now == self.last:
            reply = self._folder / self._files["reply"]
            try:
                if sha256(data := read_durable(reply)).hexdigest() == self._reply:
                    return data
                problem = f"{reply} is damaged: its content does not match its checksum"
            except Damaged as error:
                problem = str(error)
            _LOG.warning("%s; it is made again, from the memory before it", problem)
        if now.when == self.last.when:
            self._from = "before"
            return None
        raise PayloadMismatch(
            f"round {now.last} of stage {now.stage + 1} is over here, where round {self.last.last} of stage "
            f"{self.last.stage + 1} was the last. The request is old, or the server went back by more than one round; "
            "start a new run"
        )

    def keep(self, stamp: Stamp, reply: bytes) -> None:
        """Make the memory that was saved, and the reply, durable as the state after this request."""
        assert self._pending is not None
        self._number += 1
        before, best = self._files.get(self._from), self._files.get("best")
        if (
            self._best_round is not None
            and self._from == "after"
            and (self.last is None or self.last.end <= self._best_round)
        ):
            best = before or ""  # a client that had no memory then
        files = {"after": f"memory.{self._number}.safetensors", "reply": f"reply.{self._number}.safetensors"}
        write_payload(self._folder / files["after"], self._pending)
        atomic_write(self._folder / files["reply"], reply)
        files |= {name: file for name, file in (("before", before), ("best", best)) if file is not None}
        self._reply = sha256(reply).hexdigest()
        write_sealed(
            self._folder / _STAMP,
            {"last": asdict(stamp), "files": files, "number": self._number, "reply": self._reply},
        )
        self._files, self.last, self._from, self._pending = files, stamp, "after", None
        for path in (*self._folder.glob("memory.*"), *self._folder.glob("reply.*")):
            if path.name not in files.values():
                path.unlink(missing_ok=True)


class SiteVault(dict[str, dict[str, Any]]):
    """What a site's client keeps of a secure sum, and its last reply, in `folder`, which its own user alone reads."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "secure.json"
        self._saved: dict[str, Any] = read_sealed(self._path) if self._path.exists() else {}
        super().__init__(self._saved.get("clients", {}))

    def __setitem__(self, client: str, kept: dict[str, Any]) -> None:
        super().__setitem__(client, kept)
        self._write({"clients": dict(self)})

    def answered(self, request: str) -> bytes | None:
        """The reply to the last request, if this is it."""
        last = self._saved.get("reply", {})
        return bytes.fromhex(last["frame"]) if last.get("request") == request else None

    def keep(self, request: str, frame: bytes) -> None:
        self._write({"clients": dict(self), "reply": {"request": request, "frame": frame.hex()}})

    def _write(self, values: dict[str, Any]) -> None:
        self._saved = values
        write_sealed(self._path, values, 0o600)
