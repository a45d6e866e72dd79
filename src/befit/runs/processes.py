"""Clients spread over several processes of this machine, each with a backbone of its own.

Every worker runs the local engine for its share of the clients: worker i of N has clients i, i + N, … So a client's
state lives in one process, and the numbers of a run are the same for any number of workers, but for the roundings of
fleets, which are of one worker's clients. Where there are GPUs they take turns: worker i has GPU i mod their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from befit.adapters.mixers import mix_from, plain_mix
from befit.config.experiment import Experiment, to_dict
from befit.config.load import load_experiment
from befit.core.errors import BefitError, Damaged, NotTrained, RunError
from befit.core.plugins import named_reason, reason_of
from befit.core.values import ClientInfo, Cost, Failure, Payload, Score, State, Tick, Update
from befit.protocol.engine import Best
from befit.protocol.method import Deployment
from befit.protocol.store import ClientStore
from befit.runs.fleets import Fleets
from befit.runs.local import batched
from befit.runs.workers import PipeEnd, Worker, parent, take_gpu
from befit.train.fleet import most_at_once

_ABOUT = "about"


class MultiprocessEngine:
    """An engine and the owner of its workers; use it in a `with`.

    state  folder for the clients' files; every worker has one of its own in it
    """

    span, terms = 1, ""
    busy = frozenset[str]()

    def __init__(
        self,
        experiment: Experiment,
        method: Mapping[str, Any],
        infos: Sequence[ClientInfo],
        state: Path,
        workers: int,
        fleets: Fleets | None = None,
    ) -> None:
        self._fleets = fleets
        self._infos = {info.id: info for info in infos}
        setup = {"experiment": to_dict(experiment), "method": dict(method), "threads": torch.get_num_threads()}
        self._workers: list[_ClientWorker] = []
        try:
            for index in range(workers):
                self._workers.append(_ClientWorker())
                self._workers[-1].send({**setup, "state": str(state / f"worker-{index}"), "index": index})
            self._home = {client: self._workers[index % workers] for index, client in enumerate(self._infos)}
            self._check_clients(infos)
        except BaseException:
            self.__exit__()
            raise

    def _check_clients(self, infos: Sequence[ClientInfo]) -> None:
        """Raise RunError unless every worker makes the same clients of the configuration."""
        for worker in self._workers:
            worker.send({"do": "hello"})
        answers = [worker.receive()[0]["clients"] for worker in self._workers]
        if any(answer != [asdict(info) for info in infos] for answer in answers):
            raise RunError(
                "worker processes load other clients from the configuration than this process has: data that exists "
                "in memory alone needs engine.workers: 1"
            )

    def __enter__(self) -> MultiprocessEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.stop()

    def clients(self) -> Sequence[ClientInfo]:
        return list(self._infos.values())

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        size = 1 if self._fleets is None else self._fleets.size(at)
        replies = self._updates("exchange", requests, at, {}, size)
        return replies if self._fleets is None else self._fleets.watched(at, replies)

    def secure(self, step: str, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        """See `befit.protocol.engine.Engine`."""
        return self._updates("secure", requests, at, {"step": step}, 1)

    def _updates(
        self, do: str, requests: Mapping[str, Payload], at: Tick, extra: Mapping[str, Any], size: int
    ) -> Iterator[Update | Failure]:
        for clients, header, arrays in self._spread(do, requests, at, extra, size):
            payload = Payload(arrays, header["scalars"])
            if do == "exchange" and self._fleets is not None:
                self._fleets.hold(at, header["most"])
            for client in clients:
                about = header["replies"][client]
                if about["kind"] == "failure":
                    yield _failure(about["failure"])
                else:
                    yield Update(self._infos[client], payload.part(client), about["report"], Cost(**about["cost"]))

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        for (client,), header, _ in self._spread("score", requests, at, {"split": split}):
            if header["kind"] == "failure":
                yield _failure(header["failure"])
                continue
            cost = Cost(**header["cost"])
            rest = (header[key] for key in ("others", "each", "confusion"))
            yield Score(client, split, header["examples"], header["metrics"], cost, *rest)

    def deployment(self, client: str, request: Payload, at: Tick) -> Deployment:
        """The client's model as it would be used now."""
        ((_, header, arrays),) = self._spread("deployment", {client: request}, at, {})
        if header.get("kind") == "failure":
            raise _error_of(header)
        others = {
            name: _deployment_of(fields, Payload(arrays).part(name).arrays) for name, fields in header["others"].items()
        }
        values = {key: value for key, value in arrays.items() if "@" not in key}
        about = Payload(arrays).part(_ABOUT).arrays
        return replace(_deployment_of(header, values), others=others, about=about)

    def store(self) -> PoolStore:
        return PoolStore(self._workers, self._home)

    def _spread(
        self, do: str, requests: Mapping[str, Payload], at: Tick, extra: Mapping[str, Any], size: int = 1
    ) -> Iterator[tuple[list[str], dict[str, Any], dict[str, torch.Tensor]]]:
        """Keep every worker busy with `size` clients at a time; yields answers as they come."""
        homes: dict[_ClientWorker, list[str]] = {worker: [] for worker in self._workers}
        for client in requests:
            homes[self._home[client]].append(client)
        queues = {worker: deque(batched(clients, size)) for worker, clients in homes.items()}

        def send(worker: _ClientWorker) -> None:
            clients = queues[worker].popleft()
            # Copies: clients may be sent the same arrays, and a message holds every array once.
            sent = Payload.of_parts({client: _copied(requests[client]) for client in clients})
            header = {"do": do, "clients": clients, "at": asdict(at), "scalars": sent.scalars, **extra}
            worker.send(header, sent.arrays)
            busy[worker.connection] = (worker, clients)

        busy: dict[Connection, tuple[_ClientWorker, list[str]]] = {}
        for worker in self._workers:
            if queues[worker]:
                send(worker)
        while busy:
            for connection in wait(list(busy)):
                worker, clients = busy.pop(connection)  # type: ignore[arg-type]
                header, arrays = worker.receive()
                if queues[worker]:
                    send(worker)
                yield clients, header, arrays


def _copied(payload: Payload) -> Payload:
    return Payload({key: value.clone() for key, value in payload.arrays.items()}, payload.scalars)


def _error_of(fields: Mapping[str, Any]) -> Exception:
    """A worker's error, as far as it matters here: the name of its class, whether befit raised it on purpose, and what
    it says."""
    base = NotTrained if fields["error"] == NotTrained.__name__ else BefitError if fields["foreseen"] else Exception
    return type(fields["error"], (base,), {})(fields["reason"])


def _failure(fields: dict[str, Any]) -> Failure:
    return Failure(**{**fields, "cost": Cost(**fields["cost"])})


class PoolStore:
    """The workers' stores as one, for checkpoints; see `befit.protocol.store.ClientStore`."""

    def __init__(self, workers: Sequence[_ClientWorker], home: Mapping[str, _ClientWorker]) -> None:
        self._workers, self._home = workers, home

    def commit(self) -> dict[str, str]:
        return {client: name for answer in self._ask({"do": "commit"}) for client, name in answer["files"].items()}

    def settle(self) -> None:
        self._ask({"do": "settle"})

    def hold(self, files: Mapping[str, str], best: Best | None) -> None:
        self._tell({"do": "hold"}, files)

    def restore(self, files: Mapping[str, str], serial: int) -> None:
        self._tell({"do": "restore", "serial": serial}, files)

    def _tell(self, header: dict[str, Any], files: Mapping[str, str]) -> None:
        """Each worker what concerns its own clients."""
        of: dict[_ClientWorker, dict[str, str]] = {worker: {} for worker in self._workers}
        for client, name in files.items():
            of[self._home[client]][client] = name
        for worker in self._workers:
            worker.send({**header, "files": of[worker]})
        self._answers()

    @property
    def serial(self) -> int:
        return max(answer["serial"] for answer in self._ask({"do": "serial"}))

    def _ask(self, header: dict[str, Any]) -> list[dict[str, Any]]:
        for worker in self._workers:
            worker.send(header)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        """One of every worker; what went wrong is raised when all have answered."""
        answers, problem = [], None
        for worker in self._workers:
            try:
                answers.append(worker.receive()[0])
            except Damaged as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return answers


class _ClientWorker:
    """One process with its share of the clients."""

    def __init__(self) -> None:
        self._worker = Worker("befit.runs.processes", patience=10.0)
        self.connection = self._worker.connection

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, torch.Tensor] | None = None) -> None:
        try:
            self._worker.send(header, arrays)
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if (answer := self._worker.receive()) is None:
            raise self._lost()
        if answer[0].get("kind") == "damaged":
            raise Damaged(answer[0]["reason"])
        if answer[0].get("kind") == "error":
            raise RunError(f"a worker process failed: {answer[0]['reason']}")
        return answer

    def _lost(self) -> RunError:
        return RunError(f"a worker process ended ({self._worker.ending()}); the run can be resumed with --resume")

    def stop(self) -> None:
        self._worker.stop()


def work(line: PipeEnd) -> None:
    """A worker's life: build the host, then answer frames until the pipe closes."""
    from befit.runs.host import Host
    from befit.runs.local import LocalEngine

    if (setup := line.receive()) is None:
        return
    reason = ""
    try:
        torch.set_num_threads(setup[0]["threads"])
        experiment = load_experiment(setup[0]["experiment"])
        take_gpu(setup[0]["index"], experiment.devices)
        host = Host(experiment)
        method = host.build(setup[0]["method"])
        host.install(method)
        store = ClientStore(Path(setup[0]["state"]), experiment.engine.store == "memory")
        engine = LocalEngine.of(host, method, store)
    except Exception as error:
        reason = named_reason(error)
    while (question := line.receive()) is not None:
        try:
            answer, sent = ({"kind": "error", "reason": reason}, {}) if reason else _answer(engine, store, *question)
        except Damaged as error:
            answer, sent = {"kind": "damaged", "reason": str(error)}, {}
        except Exception as error:
            answer, sent = {"kind": "error", "reason": named_reason(error)}, {}
        try:
            line.send(answer, sent)
        except OSError:  # the parent is gone
            return


def _answer(
    engine: Any, store: ClientStore, header: Mapping[str, Any], arrays: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    do = header["do"]
    if do == "hello":
        return {"clients": [asdict(info) for info in engine.clients()]}, {}
    if do == "commit":
        return {"files": store.commit()}, {}
    if do == "settle":
        store.settle()
        return {}, {}
    if do == "hold":
        store.hold(header["files"], None)
        return {}, {}
    if do == "restore":
        store.restore(header["files"], header["serial"])
        return {}, {}
    if do == "serial":
        return {"serial": store.serial}, {}
    at, sent = Tick(**header["at"]), Payload(arrays, header["scalars"])
    requests = {client: sent.part(client) for client in header["clients"]}
    if do in ("exchange", "secure"):
        steps = engine.updates(requests, at, len(requests)) if do == "exchange" else None
        replies = list(steps if steps is not None else engine.secure(header["step"], requests, at))
        joined = Payload.of_parts(
            {update.client.id: update.payload for update in replies if isinstance(update, Update)}
        )
        return {"scalars": joined.scalars, "replies": dict(map(_about, replies)), "most": most_at_once()}, joined.arrays
    ((client, request),) = requests.items()
    if do == "deployment":
        try:
            deployed = engine.deployment(client, request, at)
        except (Damaged, RunError, MemoryError):
            raise
        except Exception as error:  # one client's own: it gets no adapter, and the others theirs
            foreseen = isinstance(error, BefitError)
            about = {"error": type(error).__name__, "foreseen": foreseen, "reason": reason_of(error)}
            return {"kind": "failure", **about}, {}
        others = {name: _use_of(other) for name, other in deployed.others.items()}
        # Copies: others can hold the same tensors, and a message holds every tensor once.
        copies = {
            name: {key: value.clone() for key, value in other.arrays.items()} for name, other in deployed.others.items()
        }
        copies[_ABOUT] = {key: value.clone() for key, value in deployed.about.items()}
        marked = Payload.of_parts({name: Payload(arrays) for name, arrays in copies.items()})
        return {**_use_of(deployed), "others": others}, {**deployed.arrays, **marked.arrays}
    (reply,) = engine.score({client: request}, at, header["split"])
    if isinstance(reply, Failure):
        return {"kind": "failure", "failure": asdict(reply)}, {}
    return {
        "kind": "score",
        "metrics": dict(reply.metrics),
        "others": dict(reply.others),
        "each": list(reply.each),
        "confusion": dict(reply.confusion),
        "examples": reply.examples,
        "cost": asdict(reply.cost),
    }, {}


def _use_of(deployed: Deployment) -> dict[str, Any]:
    """Everything of a deployment but its arrays and what stands beside it, as JSON can hold it."""
    return {"slots": list(deployed.slots), "mixer": plain_mix(deployed.mixer), "own": deployed.own}


def _deployment_of(use: Mapping[str, Any], arrays: State) -> Deployment:
    return Deployment(arrays, tuple(use["slots"]), mix_from(use["mixer"]), own=use["own"])


def _about(reply: Update | Failure) -> tuple[str, dict[str, Any]]:
    """A client, and its reply without what it sends."""
    if isinstance(reply, Failure):
        return reply.client, {"kind": "failure", "failure": asdict(reply)}
    return reply.client.id, {"kind": "update", "report": reply.report, "cost": asdict(reply.cost)}


if __name__ == "__main__":
    work(parent())
