"""The two branches of a method that merges: trained once through the real kernel, kept on disk, read many times.

done.json                    what they are, and the bytes sent until each kept round
federated/00010.safetensors  the server's adapter after round 10
local/<client>.safetensors   the adapter of a client that trained alone
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from befit.adapters.keys import select, slot
from befit.config.experiment import to_dict
from befit.core.errors import NotTrained
from befit.core.storage import read_json, write_json
from befit.core.values import ClientInfo, Failure, Payload, Score, Tick, Update
from befit.methods.parts.recipe.branches import check_same_start
from befit.methods.parts.recipe.personal import Use
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.engine import Checkpoint, Engine
from befit.protocol.federate import federate, resolved_stages
from befit.protocol.method import Needs
from befit.protocol.stage import Stage
from befit.protocol.store import ClientStore, read_payload, write_payload
from befit.runs.directory import RunDirectory
from befit.runs.host import Host
from befit.runs.journal import Observer, RunJournal
from befit.runs.local import LocalEngine
from befit.runs.runner import schedule_of

__all__ = ["Branches", "federated_rounds", "train_branches", "trunk"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Branches:
    """Trained branches in a folder.

    rounds    the federated rounds that are kept, rising; the last one is the end of training
    bytes_up  by kept round and client, what it had sent until then, as counted on the wire
    """

    path: Path
    rounds: tuple[int, ...]
    bytes_up: Mapping[int, Mapping[str, int]]

    def federated(self, round_: int) -> Payload:
        """The server's adapter after a round, in slot `shared`."""
        return read_payload(_federated(self.path, round_))

    def local(self, client: str) -> Payload:
        """The adapter of a client that trained alone, in slot `personal`."""
        return read_payload(self.path / "local" / f"{client}.safetensors")


def trunk(method: Recipe) -> Recipe:
    """The method without what it does after the federated stage: its two branches, which no merging option changes."""
    return replace(method, then=(), use=Use(("personal",)), needs=Needs())


def federated_rounds(method: Recipe, default: int) -> int:
    """How many rounds the federated branch takes."""
    return next(stage.rounds or 0 for stage in resolved_stages(method, default) if stage.federated)


def train_branches(
    host: Host, method: Recipe, root: Path, wanted: Sequence[int], observer: Observer | None, label: str
) -> Branches:
    """Both branches, from the disk if the same ones were trained before, with the federated rounds `wanted` kept.

    An interrupted training goes on at its last checkpoint. Branches without a wanted round are trained anew: only the
    rounds that were asked for are kept. Raises NotTrained naming a client without one of its two adapters.
    """
    base = trunk(method)
    path = root / f"seed-{host.experiment.federation.seed}-{_identity(host, base)}"
    done = path / "done.json"
    rounds = sorted({*wanted, federated_rounds(method, host.experiment.federation.rounds)})
    if done.exists():
        branches = _read(path)
        if set(rounds) <= set(branches.rounds):
            return branches
        rounds = sorted({*rounds, *branches.rounds})
        _LOG.warning("the branches in %s lack some of rounds %s; they are trained anew", path, _listed(rounds))
        shutil.rmtree(path)
    elif (path / "rounds.json").exists() and read_json(path / "rounds.json") != rounds:
        shutil.rmtree(path)  # an interrupted training that keeps other rounds
    write_json(path / "rounds.json", rounds)
    _train(host, base, path, rounds, observer, label)
    return _read(path)


def _train(host: Host, base: Recipe, path: Path, rounds: Sequence[int], observer: Observer | None, label: str) -> None:
    experiment = host.experiment
    if experiment.engine.workers > 1:
        _LOG.warning("branches are trained in one process; engine.workers: %d is not used", experiment.engine.workers)
    site = host.install(base)
    directory = RunDirectory(path, experiment.checkpoint.every_s)
    store = directory.store(experiment.engine.store == "memory")
    stages = [stage.federated for stage in base.plan()]
    journal = _Keeping(directory, store, label, observer)
    journal.keep(stages.index(True), rounds)
    engine = LocalEngine.of(host, base, store, journal.outbound)
    with contextlib.closing(directory):
        server = federate(base, _Unscored(engine), site, replace(schedule_of(experiment), evaluate_every=0), journal)
        _write_local(path, host.infos, store, server)
        ledger = directory.read("ledger")
    sent = {str(last): {info.id: _sent(ledger, info.id, last) for info in host.infos} for last in rounds}
    shutil.rmtree(path / "state", ignore_errors=True)
    write_json(path / "done.json", {"config": to_dict(experiment), "backbone": host.fingerprint, "bytes_up": sent})


def _write_local(path: Path, infos: Sequence[ClientInfo], store: ClientStore, server: Payload) -> None:
    missing = []
    for info in infos:
        memory = store.load(info.id)
        if memory is None or not (mine := select(memory.arrays, slot("personal"))):
            missing.append(info.id)
            continue
        check_same_start(memory, server, info.id)
        write_payload(path / "local" / f"{info.id}.safetensors", Payload(mine))
    if missing:
        raise NotTrained(
            f"{len(missing)} clients have no adapter of their own, first {missing[0]}; every client needs "
            f"both adapters. Why is in {path / 'metrics.jsonl'}"
        )


def _sent(ledger: Sequence[Mapping[str, Any]], client: str, last: int) -> int:
    """Bytes that a client had sent after a round; personal stages send nothing, so their lines add nothing."""
    return sum(
        line["bytes_up"]
        for line in ledger
        if line["client"] == client and line["purpose"] == "train" and line["round"] <= last
    )


class _Keeping(RunJournal):
    """A journal that keeps the server's memory at some rounds of one stage."""

    def keep(self, stage: int, rounds: Sequence[int]) -> None:
        self._stage, self._rounds = stage, set(rounds)

    def completed(self, point: Checkpoint, force: bool) -> None:
        if point.stage == self._stage and point.round in self._rounds:
            kept = Payload(select(point.server.arrays, slot("shared")))
            write_payload(_federated(self._directory.path, point.round), kept)
        super().completed(point, force)


class _Unscored:
    """An engine without scoring: the branches are scored later, merged."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.span = engine, engine.span

    def clients(self) -> Sequence[ClientInfo]:
        return self.engine.clients()

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return self.engine.exchange(requests, at)

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        return iter(())


def _identity(host: Host, base: Recipe) -> str:
    """Eight digits that change with whatever changes the branches, and not with how they are merged."""
    parents = replace(base.layout, slots=tuple(one for one in base.layout.slots if one.name in ("shared", "personal")))
    values = to_dict(host.experiment)
    deciding = {key: values.get(key) for key in ("model", "adapter", "train", "federation", "guard", "wire")}
    deciding["model"] = {key: value for key, value in values["model"].items() if key != "device"}
    stages = [_stage_text(stage) for stage in resolved_stages(base, host.experiment.federation.rounds)]
    data = {client.id: [len(client.train), len(client.val), len(client.test)] for client in host.federation.clients}
    parts = [
        stages,
        repr(replace(base, layout=parents)),
        deciding,
        values.get("benchmark"),
        values.get("data"),
        data,
        host.federation.manifest.get("partition", {}).get("sha256"),
        host.fingerprint,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _stage_text(stage: Stage) -> str:
    return f"{stage.name}:{stage.rounds}:{stage.federated}"


def _read(path: Path) -> Branches:
    sent = {int(round_): clients for round_, clients in read_json(path / "done.json")["bytes_up"].items()}
    return Branches(path, tuple(sorted(sent)), sent)


def _federated(path: Path, round_: int) -> Path:
    return path / "federated" / f"{round_:05d}.safetensors"


def _listed(rounds: Sequence[int]) -> str:
    return ", ".join(map(str, rounds))
