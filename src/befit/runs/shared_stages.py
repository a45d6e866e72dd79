"""Stages that several runs have are trained once: their result is kept in a folder, from which other runs take it.

A run that takes a stage goes on as one that was interrupted right after it. It ends with the same bytes in its adapters
and metrics as one that trained all stages itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from befit.config.experiment import NO_CHOICE, Experiment
from befit.core.errors import PayloadMismatch, RunError
from befit.core.names import folder_name
from befit.core.storage import log_line, read_bytes, read_json, read_lines, write_json
from befit.core.values import Payload
from befit.protocol.engine import Checkpoint
from befit.protocol.method import Method, federated_stage, run_stages, shared_stages_of
from befit.protocol.registry import build_method
from befit.protocol.schedule import resolved_stages
from befit.protocol.stage import SharedStages, Stage
from befit.protocol.store import ClientStore, read_payload, write_payload
from befit.runs.directory import LOGS, RunDirectory
from befit.runs.host import Host
from befit.runs.outbound import Outbound
from befit.runs.provenance import data_and_weights, settings_hash

_LOG = logging.getLogger(__name__)
_ABOUT = "shared_stages.json"


@dataclass(frozen=True)
class SharedFolder:
    """Where runs leave and find the result of stages that others have too, each in a folder with the name of its key.

    keys  of those stages that some other run has; None where that is not known, and all may be of use
    """

    path: Path
    keys: Collection[str] | None = None


def shared_stages_keys(experiment: Experiment, block: Mapping[str, Any]) -> dict[int, str]:
    """A hash of all that decides the result of each of a plan's shared stages, by the number of the last of them."""
    return {number: _key(experiment, shared) for number, shared in shared_stages_of(build_method(block)).items()}


def _key(experiment: Experiment, shared: SharedStages) -> str:
    changed = {name: replace(getattr(experiment, name), **changes) for name, changes in shared.settings.items()}
    experiment = replace(experiment, method=dict(shared.block), baselines=[], **changed)
    return settings_hash(replace(experiment, federation=replace(experiment.federation, **NO_CHOICE)))


def repeated_keys(keys: Iterable[str]) -> set[str]:
    """The keys that come more than once."""
    return {key for key, count in Counter(keys).items() if count > 1}


class StageCache:
    """What a run takes from a folder of shared stages, and leaves there.

    kept  stages, by their number, and rounds after which this run needs the server's memory for itself
    """

    def __init__(
        self,
        folder: SharedFolder,
        host: Host,
        method: Method,
        directory: RunDirectory,
        store: ClientStore,
        kept: Container[tuple[int, int]],
    ) -> None:
        experiment = host.experiment
        self._host, self._method, self._directory, self._store = host, method, directory, store
        stages = resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)
        run = hashlib.sha256(str(directory.path.resolve()).encode()).hexdigest()[:12]
        self._each: dict[int, _Shared] = {}
        for number, shared in shared_stages_of(method).items():
            key = _key(experiment, shared)
            if folder.keys is None or key in folder.keys:
                covered = stages[number + 1 - shared.count : number + 1]
                self._each[number] = _Shared(folder.path / key, run, shared, covered, number)
        self._kept, self._every = kept, experiment.evaluate.every

    def take(self, stage: int, server: Payload, outbound: Outbound) -> Iterator[Checkpoint]:
        """The result of the stages that begin with this one, if the folder has it: their rounds that are scored, and
        their end, each with the run's memories and logs as they are then.

        A folder that is damaged, or of other data or weights, is removed: this run then trains those stages itself.
        """
        candidates = [shared for shared in self._each.values() if shared.first == stage and shared.path.exists()]
        for shared in candidates:
            if (scored := self._scored(shared)) is not None:
                yield from self._taken(shared, scored, server, outbound)
                return

    def _scored(self, shared: _Shared) -> list[int] | None:
        """The rounds before the last that this run scores; None where that takes more than the folder has."""
        if any((number, round_) in self._kept for number, round_ in shared.all_rounds()):
            return None
        plan, end = run_stages(self._method), (shared.last, shared.rounds)
        scored = [
            round_
            for number, round_ in shared.all_rounds()
            if self._every and round_ % self._every == 0 and (number, round_) != end
            if federated_stage(plan[number + 1 :]) is None
        ]
        return scored if shared.keeps_rounds or not scored else None

    def _taken(self, shared: _Shared, scored: list[int], server: Payload, outbound: Outbound) -> Iterator[Checkpoint]:
        try:
            shared.verify(self._host)
            states = {round_: read_payload(shared.server(round_)) for round_ in scored}
            states[shared.rounds] = read_payload(shared.server())
            lines = {name: read_lines(shared.path / name) for name in LOGS}
            left = Outbound(read_json(shared.path / "outbound.json"))
            for info in self._host.infos:
                if (path := shared.client(info.id)).exists():
                    memory = self._store.load(info.id) or self._method.client_init(self._host.site(info))
                    _, own = memory.split(shared.stages.clients)
                    self._store.save(info.id, read_payload(path) | own)
        except (OSError, RunError, PayloadMismatch) as problem:
            _LOG.warning("%s is not used, and made again: %s", shared.path, problem)
            shutil.rmtree(shared.path, ignore_errors=True)
            self._directory.restore(self._store)
            return
        _, own = shared.stages.of_server(server)
        for round_, state in states.items():
            ends = round_ == shared.rounds
            for name, rest in lines.items():
                until = next((n for n, line in enumerate(rest) if line["round"] > round_ and not ends), len(rest))
                for line in rest[:until]:
                    self._directory.log(name.removesuffix(".jsonl"), line)
                del rest[:until]
            if ends:
                outbound.add(left)
            yield Checkpoint(shared.last, round_, state | own)

    def note(self, point: Checkpoint) -> None:
        """Called after every round: keep what a run that scores this one needs of it."""
        shared = self._each.get(point.stage)
        if shared is None or not shared.keeps_rounds or shared.path.exists():
            return
        if self._every and point.round % self._every == 0 and point.round < shared.rounds:
            with _costing_others_only():
                write_payload(shared.server(point.round, shared.draft), shared.stages.of_server(point.server)[0])

    def leave(self, point: Checkpoint, outbound: Outbound) -> None:
        """Called with every checkpoint: put the result of shared stages into the folder, once they are done.

        A folder that cannot be written costs the others their time, and this run nothing.
        """
        shared = self._each.get(point.stage)
        if shared is None or point.round != shared.rounds or shared.path.exists():
            return
        metrics, names = self._directory.read("metrics"), [stage.name for stage in shared.each]
        if any(line["kind"] == "failure" and line["stage"] in names for line in metrics):
            return  # of a client, maybe for want of memory: another run should try for itself
        lines = {
            "metrics.jsonl": [
                line for line in metrics if line["stage"] in names and line["kind"] in ("train", "diagnostic")
            ],
            "ledger.jsonl": [
                line
                for line in self._directory.read("ledger")
                if line["stage"] in names and "score" not in line["purpose"]
            ],
        }
        draft, stages = shared.draft, shared.stages
        with _costing_others_only():
            draft.mkdir(parents=True, exist_ok=True)
            for name, chosen in lines.items():
                (draft / name).write_bytes(b"".join(map(log_line, chosen)))
            write_payload(draft / shared.server().name, stages.of_server(point.server)[0])
            for info in self._host.infos if stages.clients != () else ():
                if (memory := self._store.load(info.id)) is not None:
                    write_payload(shared.client(info.id, draft), memory.split(stages.clients)[0])
            write_json(draft / "outbound.json", outbound.of_stages(names).saved())
            write_json(draft / _ABOUT, {"on": data_and_weights(self._host), "files": _hashes(draft)})
            with contextlib.suppress(OSError):  # another run was first
                draft.rename(shared.path)
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _costing_others_only() -> Iterator[None]:
    try:
        yield
    except (OSError, RunError) as problem:
        _LOG.warning("other runs have to train the same stages again, since they cannot be kept: %s", problem)


@dataclass(frozen=True)
class _Shared:
    """Shared stages of one run, a name for it, the number of the last of them, and the folder where runs leave and find
    the result."""

    path: Path
    run: str
    stages: SharedStages
    each: list[Stage]
    last: int

    @property
    def first(self) -> int:
        return self.last + 1 - len(self.each)

    @property
    def rounds(self) -> int:
        """Of the last stage."""
        return self.each[-1].rounds or 0

    @property
    def keeps_rounds(self) -> bool:
        """Whether the server's memory says all of what a round came to."""
        return self.stages.clients == () and len(self.each) == 1

    @property
    def draft(self) -> Path:
        """Where this run gathers it: the same after a resume, and another run's is another."""
        return self.path.with_name(f".{self.path.name}.{self.run}")

    def all_rounds(self) -> Iterator[tuple[int, int]]:
        for number, stage in enumerate(self.each, start=self.first):
            yield from ((number, round_) for round_ in range(1, (stage.rounds or 0) + 1))

    def server(self, round_: int | None = None, folder: Path | None = None) -> Path:
        """The server's memory after a round; at the end without one."""
        return (folder or self.path) / ("server.safetensors" if round_ is None else f"server.{round_}.safetensors")

    def client(self, client: str, folder: Path | None = None) -> Path:
        return (folder or self.path) / "clients" / f"{folder_name(client)}.safetensors"

    def verify(self, host: Host) -> None:
        """Raise RunError unless the folder is whole, and of the data and weights that this run has."""
        about, hashes = read_json(self.path / _ABOUT), _hashes(self.path)
        if not (isinstance(about, dict) and isinstance(listed := about.get("files"), dict)):
            raise RunError(f"{_ABOUT} is damaged")
        if about.get("on") != data_and_weights(host):
            raise RunError("it is of other data, clients or weights")
        if different := sorted(name for name in {*hashes, *listed} if hashes.get(name) != listed.get(name)):
            raise RunError(f"{different[0]} is missing, new or damaged")


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
