"""Runs that begin with the same stages train them once: their result is kept in a folder, from which other runs start.

Such a run starts as one that was interrupted right after those stages. It ends with the same bytes in its adapters and
metrics as one that trained all stages itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment
from befit.core.errors import PayloadMismatch, RunError
from befit.core.storage import read_bytes, read_json, write_json
from befit.protocol.engine import Checkpoint
from befit.protocol.federate import resolved_stages
from befit.protocol.method import Method, federated_stage, opening_of, run_stages
from befit.protocol.registry import build_method
from befit.protocol.site import ServerSite
from befit.protocol.stage import Opening
from befit.protocol.store import ClientStore, read_payload, write_payload
from befit.runs.directory import LOGS, RunDirectory
from befit.runs.host import Host
from befit.runs.outbound import Outbound
from befit.runs.provenance import data_and_weights, settings_hash

__all__ = ["forget_openings", "opening_key", "share_opening", "shared_openings"]

_LOG = logging.getLogger(__name__)
_ABOUT = "opening.json"


def opening_key(experiment: Experiment, block: Mapping[str, Any]) -> str | None:
    """Hash of everything that affects the result of a method's opening stages; None for a method without any.

    None also where the whole method is scored during those stages, since such scores differ between methods.
    """
    method = build_method(block)
    if (opened := opening_of(method)) is None:
        return None
    opening, count = opened
    if experiment.evaluate.every and federated_stage(run_stages(method)[count:]) is None:
        return None
    blocks: dict[str, Any] = {name: replace(getattr(experiment, name), **own) for name, own in opening.settings.items()}
    return settings_hash(replace(experiment, method=dict(opening.block), baselines=[], **blocks))


def shared_openings(keys: Iterable[str | None]) -> set[str]:
    """The keys that occur more than once."""
    return {key for key, count in Counter(keys).items() if key is not None and count > 1}


def share_opening(
    folder: Path,
    host: Host,
    method: Method,
    block: Mapping[str, Any],
    directory: RunDirectory,
    store: ClientStore,
    site: ServerSite,
) -> Callable[[Checkpoint, Outbound], None] | None:
    """Let a run that has not begun start behind its opening, if `folder` has that.

    Returns what has to be called with every checkpoint of the run, so that others find its opening; None without one.
    """
    opened, key = opening_of(method), opening_key(host.experiment, block)
    if opened is None or key is None:
        return None
    opening, count = opened
    limits = host.experiment.federation.rounds, host.experiment.limit.rounds
    end = count - 1, resolved_stages(method, *limits)[count - 1].rounds or 0
    shared = _Shared(folder / key, host, method, opening, end)
    shared.begin(directory, store, site)
    return lambda point, outbound: shared.keep(point, directory, store, outbound)


@dataclass(frozen=True)
class _Shared:
    """One opening, and the folder where runs leave it, or find it."""

    path: Path
    host: Host
    method: Method
    opening: Opening
    end: tuple[int, int]

    def begin(self, directory: RunDirectory, store: ClientStore, site: ServerSite) -> None:
        """Put what is in the folder into the directory of a run that has not begun, as its first checkpoint.

        What is damaged, or of other data or weights, is thrown away: this run then does its opening itself.
        """
        if directory.begun or not self.path.exists():
            return
        directory.restore(store)  # removes what a crash left before the first checkpoint
        try:
            self._verify()
            outbound = Outbound(read_json(self.path / "outbound.json"))
            _copy_logs(self.path, directory.path)
            for info in self.host.infos:
                if (path := self._client(self.path, info.id)).exists():
                    _, own = self.opening.divide(self.method.client_init(self.host.site(info)))
                    store.save(info.id, read_payload(path) | own)
            _, own = self.opening.divide(self.method.server_init(site))
            server = read_payload(self.path / "server.safetensors") | own
        except (OSError, RunError, PayloadMismatch) as problem:
            _LOG.warning("%s is not used, and made again: %s", self.path, problem)
            shutil.rmtree(self.path, ignore_errors=True)
            directory.restore(store)
            return
        directory.commit(Checkpoint(*self.end, server), store, outbound)

    def keep(self, point: Checkpoint, directory: RunDirectory, store: ClientStore, outbound: Outbound) -> None:
        """Called with every checkpoint: put what the opening has come to into the folder.

        A folder that cannot be written costs the others their time, and this run nothing.
        """
        if (point.stage, point.round) != self.end or self.path.exists():
            return
        if any(line["kind"] == "failure" for line in directory.read("metrics")):
            return  # of a client, maybe for want of memory: another run should try for itself
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed, and had this number
        try:
            _copy_logs(directory.path, draft)
            write_payload(draft / "server.safetensors", self.opening.divide(point.server)[0])
            for info in self.host.infos:
                if (memory := store.load(info.id)) is not None:
                    write_payload(self._client(draft, info.id), self.opening.divide(memory)[0])
            write_json(draft / "outbound.json", outbound.saved())
            write_json(draft / _ABOUT, {"on": data_and_weights(self.host), "files": _hashes(draft)})
            with contextlib.suppress(OSError):  # another run was first
                draft.rename(self.path)
        except (OSError, RunError) as problem:
            _LOG.warning("other runs have to train the same base again, since it cannot be kept: %s", problem)
        shutil.rmtree(draft, ignore_errors=True)

    def _verify(self) -> None:
        """Raise RunError unless the folder is complete, and of this run's data and weights."""
        about, hashes = read_json(self.path / _ABOUT), _hashes(self.path)
        if not (isinstance(about, dict) and isinstance(listed := about.get("files"), dict)):
            raise RunError(f"{_ABOUT} is damaged")
        if about.get("on") != data_and_weights(self.host):
            raise RunError("it is of other data, clients or weights")
        if different := sorted(name for name in {*hashes, *listed} if hashes.get(name) != listed.get(name)):
            raise RunError(f"{different[0]} is missing, new or damaged")

    @staticmethod
    def _client(folder: Path, client: str) -> Path:
        return folder / "clients" / f"{client}.safetensors"


def forget_openings(folder: Path, keys: Iterable[str]) -> None:
    """Remove these, and the folder if nothing else is in it."""
    for key in keys:
        for path in (folder / key, *folder.glob(f".{key}.*")):
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the one that lists them, by its path in the folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(read_bytes(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _ABOUT
    }


def _copy_logs(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in LOGS:
        shutil.copyfile(source / name, target / name)
