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
from befit.core.names import folder_name
from befit.core.storage import read_bytes, read_json, write_json
from befit.protocol.engine import Checkpoint
from befit.protocol.federate import resolved_stages
from befit.protocol.method import Method, federated_stage, run_stages, shared_prefix_of
from befit.protocol.registry import build_method
from befit.protocol.site import ServerSite
from befit.protocol.stage import SharedPrefix
from befit.protocol.store import ClientStore, read_payload, write_payload
from befit.runs.directory import LOGS, RunDirectory
from befit.runs.host import Host
from befit.runs.outbound import Outbound
from befit.runs.provenance import data_and_weights, settings_hash

_LOG = logging.getLogger(__name__)
_ABOUT = "shared_stages.json"


def shared_stages_key(experiment: Experiment, block: Mapping[str, Any]) -> str | None:
    """Hash of all that decides the result of a plan's shared prefix; None for a plan without one.

    None also where scores of the whole method are taken during those stages: the prefix alone does not decide those.
    """
    method = build_method(block)
    if (beginning := shared_prefix_of(method)) is None:
        return None
    prefix, count = beginning
    if experiment.evaluate.every and federated_stage(run_stages(method)[count:]) is None:
        return None
    blocks: dict[str, Any] = {
        name: replace(getattr(experiment, name), **changes) for name, changes in prefix.settings.items()
    }
    return settings_hash(replace(experiment, method=dict(prefix.block), baselines=[], **blocks))


def repeated_keys(keys: Iterable[str | None]) -> set[str]:
    """The keys that come more than once."""
    return {key for key, count in Counter(keys).items() if key is not None and count > 1}


def share_stages(
    folder: Path,
    host: Host,
    method: Method,
    block: Mapping[str, Any],
    directory: RunDirectory,
    store: ClientStore,
    site: ServerSite,
) -> Callable[[Checkpoint, Outbound], None] | None:
    """Let a new run start after its shared stages, if `folder` has their result.

    Returns what has to be called with every checkpoint of the run, so that other runs find that result; None where the
    plan has no shared stages.
    """
    beginning, key = shared_prefix_of(method), shared_stages_key(host.experiment, block)
    if beginning is None or key is None:
        return None
    prefix, count = beginning
    limits = host.experiment.federation.rounds, host.experiment.limit.rounds
    end = count - 1, resolved_stages(method, *limits)[count - 1].rounds or 0
    shared = _Shared(folder / key, host, method, prefix, end)
    shared.begin(directory, store, site)
    return lambda point, outbound: shared.keep(point, directory, store, outbound)


@dataclass(frozen=True)
class _Shared:
    """One run's shared stages, and the folder where runs leave and find their result."""

    path: Path
    host: Host
    method: Method
    prefix: SharedPrefix
    end: tuple[int, int]

    def begin(self, directory: RunDirectory, store: ClientStore, site: ServerSite) -> None:
        """Put the folder's content into the directory of a new run, as its first checkpoint.

        A folder that is damaged, or of other data or weights, is removed: this run then does those stages itself.
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
                    _, own = self.prefix.divide(self.method.client_init(self.host.site(info)))
                    store.save(info.id, read_payload(path) | own)
            _, own = self.prefix.divide(self.method.server_init(site))
            server = read_payload(self.path / "server.safetensors") | own
        except (OSError, RunError, PayloadMismatch) as problem:
            _LOG.warning("%s is not used, and made again: %s", self.path, problem)
            shutil.rmtree(self.path, ignore_errors=True)
            directory.restore(store)
            return
        directory.commit(Checkpoint(*self.end, server), store, outbound)

    def keep(self, point: Checkpoint, directory: RunDirectory, store: ClientStore, outbound: Outbound) -> None:
        """Called with every checkpoint: put the result of the shared stages into the folder, once they are done.

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
            write_payload(draft / "server.safetensors", self.prefix.divide(point.server)[0])
            for info in self.host.infos:
                if (memory := store.load(info.id)) is not None:
                    write_payload(self._client(draft, info.id), self.prefix.divide(memory)[0])
            write_json(draft / "outbound.json", outbound.saved())
            write_json(draft / _ABOUT, {"on": data_and_weights(self.host), "files": _hashes(draft)})
            with contextlib.suppress(OSError):  # another run was first
                draft.rename(self.path)
        except (OSError, RunError) as problem:
            _LOG.warning("other runs have to train the same base again, since it cannot be kept: %s", problem)
        shutil.rmtree(draft, ignore_errors=True)

    def _verify(self) -> None:
        """Raise RunError unless the folder is whole, and of the data and weights that this run has."""
        about, hashes = read_json(self.path / _ABOUT), _hashes(self.path)
        if not (isinstance(about, dict) and isinstance(listed := about.get("files"), dict)):
            raise RunError(f"{_ABOUT} is damaged")
        if about.get("on") != data_and_weights(self.host):
            raise RunError("it is of other data, clients or weights")
        if different := sorted(name for name in {*hashes, *listed} if hashes.get(name) != listed.get(name)):
            raise RunError(f"{different[0]} is missing, new or damaged")

    @staticmethod
    def _client(folder: Path, client: str) -> Path:
        return folder / "clients" / f"{folder_name(client)}.safetensors"


def forget_shared_stages(folder: Path, keys: Iterable[str]) -> None:
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
