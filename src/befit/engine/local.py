"""All clients in this process, one after the other, on one backbone."""

from __future__ import annotations

import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from befit.engine.store import ClientStore
from befit.engine.wire import cast, from_bytes, payload_bytes, to_bytes
from befit.ledger import Outbound
from befit.method import Deployment, Method
from befit.serve import deployment, score, serve
from befit.site import Site
from befit.types import ClientInfo, Cost, Failure, Payload, Score, Tick, Update

__all__ = ["LocalEngine"]


class LocalEngine:
    """Calls the clients' kernel directly.

    sites      the site of each client, by id, in the order they are visited
    wire       dtype of floating-point arrays on the wire; bytes are counted in it
    serialise  turn every payload into bytes and back, as a network would
    """

    span = 1

    def __init__(
        self,
        method: Method,
        infos: Sequence[ClientInfo],
        sites: Callable[[ClientInfo], Site],
        store: ClientStore,
        outbound: Outbound,
        wire: torch.dtype = torch.float32,
        serialise: bool = False,
        eval_batch_size: int = 256,
    ) -> None:
        self._method, self._infos, self._sites, self._store = method, {i.id: i for i in infos}, sites, store
        self.outbound = outbound
        self._wire, self._serialise, self._eval_batch_size = wire, serialise, eval_batch_size

    def clients(self) -> Sequence[ClientInfo]:
        return list(self._infos.values())

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        for client, request in requests.items():
            start = time.perf_counter()
            try:
                site = self._sites(self._infos[client])
                sent = self._encode(request)
                reply = self._encode(serve(self._method, site, self._store, self._decode(sent), at))
                report = dict(site.report)
                self.outbound.payload(client, at.stage, reply)
                self.outbound.numbers(client, f"{at.stage} report", report)
                cost = Cost(payload_bytes(reply), payload_bytes(sent), time.perf_counter() - start, peak_memory_mib())
                yield Update(self._infos[client], self._decode(reply), report, cost)
            except Exception as error:
                yield _failure(client, at, error)

    def score(self, requests: Mapping[str, Payload], at: Tick, split: str) -> Iterator[Score | Failure]:
        for client, request in requests.items():
            start = time.perf_counter()
            try:
                site = self._sites(self._infos[client])
                sent = self._encode(request)
                found = score(self._method, site, self._store, self._decode(sent), at, split, self._eval_batch_size)
                self.outbound.numbers(client, f"score {split}", dict(found.metrics))
                cost = Cost(0, payload_bytes(sent), time.perf_counter() - start, peak_memory_mib())
                yield Score(found.client, found.split, found.examples, found.metrics, cost)
            except Exception as error:
                yield _failure(client, at, error)

    def deployment(self, client: str, request: Payload, at: Tick) -> Deployment:
        """The client's model as it would be used now; it stays on this side of the wire."""
        site = self._sites(self._infos[client])
        return deployment(self._method, site, self._store, self._decode(self._encode(request)), at)

    def _encode(self, payload: Payload) -> Payload:
        encoded = cast(payload, self._wire)
        if not self._serialise:
            return encoded
        arrays, _ = from_bytes(to_bytes(encoded.arrays, {}))
        return Payload(arrays, dict(encoded.scalars))

    def _decode(self, payload: Payload) -> Payload:
        return cast(payload, torch.float32)


def _failure(client: str, at: Tick, error: Exception) -> Failure:
    text = "".join(traceback.format_exception(error))
    return Failure(client, at.stage, at.round, type(error).__name__, str(error), text)


def peak_memory_mib() -> float:
    """The most memory that this process has held so far; on a GPU, the most that was allocated there."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
