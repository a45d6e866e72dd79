"""What the measurements share: federations of any size, a bare LoRA loop, and results as JSON and as a table."""

from __future__ import annotations

import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.values import Cost, Failure, Payload, Score, State, Tick, Update
from befit.data.federation import ClientData, Federation
from befit.data.registry import build
from befit.protocol.engine import Best, Checkpoint
from befit.protocol.federate import federate
from befit.protocol.method import Method
from befit.protocol.store import ClientStore
from befit.runs.directory import RunDirectory
from befit.runs.engines import schedule_of
from befit.runs.fleets import Fleets
from befit.runs.host import Host
from befit.runs.journal import RunJournal
from befit.runs.local import LocalEngine

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCUMENT = HERE.parent / "docs" / "performance.md"
Exchange = Callable[[Mapping[str, Payload], Tick], Iterator[Update | Failure]]
BENCHMARKS = {"digits": "digits", "minilm": "names-small", "names": "names", "skills": "skills", "vqa": "digits-vqa"}


def federation(kind: str, clients: int, examples: int = 40) -> Federation:
    """`clients` clients of `examples` training examples each, from the records of a real benchmark, over and over."""
    source = build(BENCHMARKS[kind], None, {})
    records = [record for client in source.clients for record in client.train]
    held = tuple(
        ClientData(
            f"client-{index:03d}",
            [records[(index * examples + n) % len(records)] for n in range(examples)],
            (),
            source.clients[0].test,
        )
        for index in range(clients)
    )
    return Federation(kind, "benchmark", source.task, held, source.label_names)


def experiment(kind: str, method: dict[str, Any] | str, **changes: Any) -> Experiment:
    own: dict[str, Any] = {}
    if kind == "minilm":
        own = {"model": {"id": minilm(), "max_length": 32}}
    if kind == "vqa":  # as its configurations have it
        projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        own = {"model": {"max_length": 128}, "adapter": {"targets": projections}}
    return load_experiment({"benchmark": BENCHMARKS[kind], "method": method, "baselines": [], **own, **changes})


def minilm() -> str:
    """The identifier of the MiniLM encoder, from the configuration that users run."""
    import yaml

    settings = yaml.safe_load((HERE.parent / "configs" / "names-minilm.yaml").read_text())
    return str(settings["model"]["id"])


def host(kind: str, clients: int, method: dict[str, Any] | str, **changes: Any) -> Host:
    return Host(experiment(kind, method, **changes), federation(kind, clients))


def federated(
    where: Host,
    method: Method,
    folder: Path,
    resident: bool = True,
    fleet: int = 1,
    scored: bool = False,
    after: Callable[[str, Tick], None] | None = None,
) -> tuple[Payload, ClientStore, float]:
    """A method's rounds through the whole product: kernels, guard, ledger, log, checkpoint.

    after  called with each client's reply, once the server has it

    Returns the server's memory at the end, those of the clients, and the seconds of the process.
    """
    site = where.install(method)
    directory = RunDirectory(folder, where.experiment.checkpoint.every_s)
    store = directory.store(resident)
    engine = LocalEngine.of(where, method, store, Fleets(fleet, where.model, {}))
    if not scored:
        engine.score = lambda *_: iter(())  # type: ignore[method-assign]
    if after is not None:
        engine.exchange = _followed(engine.exchange, after)  # type: ignore[method-assign]
    journal, began = RunJournal(directory, store, "bench", None), time.process_time()
    server = federate(method, engine, site, schedule_of(where.experiment), journal)
    seconds = time.process_time() - began
    directory.close()
    return server, store, seconds


def _followed(exchange: Exchange, after: Callable[[str, Tick], None]) -> Exchange:
    def replies(requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        for reply in exchange(requests, at):
            yield reply
            after(reply.client.id if isinstance(reply, Update) else reply.client, at)

    return replies


def random_adapter(seed: int, slot: str, layers: int, query: int, value: int) -> State:
    """Of rank 8, on the query and value projections of a Llama, which are so wide."""
    random = torch.Generator().manual_seed(seed)
    state: State = {}
    for layer in range(layers):
        for name, d_out in (("q_proj", query), ("v_proj", value)):
            state[f"{slot}/block.{layer:02d}.{name}/A"] = torch.randn(8, query, generator=random)
            state[f"{slot}/block.{layer:02d}.{name}/B"] = torch.randn(d_out, 8, generator=random)
    return state


class BareLora(nn.Module):
    """LoRA as a textbook writes it."""

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)  # type: ignore[arg-type]
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))  # type: ignore[arg-type]
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


def bare_model(where: Host, rank: int = 8, alpha: float = 16.0) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy of the host's backbone with the same targets and head, without anything of befit in it."""
    import copy

    wrapped = where.model
    bare = copy.deepcopy(wrapped.backbone).requires_grad_(False)
    parameters: list[nn.Parameter] = []
    for name, path in wrapped.paths.items():
        parent, _, leaf = path.rpartition(".")
        base = bare.get_submodule(path).base
        if name in wrapped.shapes.targets:
            layer: nn.Module = BareLora(base, rank, alpha)  # type: ignore[arg-type]
            parameters += [layer.A, layer.B]  # type: ignore[list-item]
        else:
            layer = base.requires_grad_(True)  # type: ignore[union-attr,operator,assignment]
            parameters += list(layer.parameters())
        setattr(bare.get_submodule(parent), leaf, layer)
    return bare.train(), parameters


@dataclass
class Memo:
    """A journal that keeps nothing; what a measurement wants to know, it overrides."""

    spool: Path

    def resume(self) -> Checkpoint | None:
        return None

    def rounds_from_cache(self, stage: int, server: Payload) -> Iterator[Checkpoint]:
        return iter(())

    def accepted(self, at: Tick, update: Update, step: bool = False) -> None:
        pass

    def trained(self, at: Tick, update: Update) -> None:
        pass

    def scored(self, at: Tick, score: Score) -> None:
        pass

    def validated(self, at: Tick, score: Score) -> None:
        pass

    def back(self, at: Tick, best: Best) -> Payload:
        raise NotImplementedError("a measurement has no federation.patience")

    def failed(self, failure: Failure, scoring: bool = False) -> None:
        pass

    def served(self, stage: str, round_: int, cost: Cost) -> None:
        pass

    def event(self, event: dict[str, Any]) -> None:
        pass

    def completed(self, point: Checkpoint, force: bool) -> None:
        pass


def machine() -> dict[str, Any]:
    """What was measured with what, and when."""
    return {
        "befit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }


def commit() -> str | None:
    """befit's, where this is a clone of it."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def resident_mib() -> float:
    """Memory that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib(status: str | None = None) -> float:
    """The most memory that this process has held, or another whose /proc/self/status that is. Not what `getrusage`
    says, which counts what the process that started this one held then."""
    status = status or Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def spread(values: Sequence[float]) -> dict[str, Any]:
    """
    >>> spread([2.0, 1.0, 1.25])
    {'min': 1.0, 'median': 1.25, 'max': 2.0, 'values': [2.0, 1.0, 1.25]}
    """
    ends = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {**ends, "values": [float(f"{value:.6g}") for value in values]}


def ranged(one: Mapping[str, Any], form: str = ".2f") -> str:
    """A median, in bold, with its range.

    >>> ranged({"min": 1.0, "median": 1.5, "max": 2.0})
    '**1.50** (1.00-2.00)'
    """
    return f"**{one['median']:{form}}** ({one['min']:{form}}-{one['max']:{form}})"


def publish(
    name: str,
    title: str,
    note: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    data: Any,
    document: Path = DOCUMENT,
) -> None:
    """Write results/<name>.json and replace the section of that name in a page."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), "data": data}, indent=2) + "\n")
    lines = [
        f"## {title}",
        "",
        note,
        "",
        "| " + " | ".join(headers) + " |",
        "|" + "---|" * len(headers),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"Command: `python benchmarks/{name}.py`. Numbers: `benchmarks/results/{name}.json`.",
    ]
    section = "\n".join(lines)
    put_section(document, name, section)
    print(section, file=sys.stdout)


def in_fresh_process(script: str, *words: object, threads: int | None = 1) -> dict[str, Any]:
    """What a script prints as JSON in its last line, run by itself on so many threads; None: PyTorch's choice."""
    counts = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, script, *map(str, words)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **counts}).stdout
    return json.loads(output.splitlines()[-1])


def keep_cells(directory: Path, name: str) -> None:
    """Keep the cells of a comparison beside the other results.

    `befit compare STUDY --cells` counts them as finished, so that seeds can be added later.
    """
    kept = gzip.compress((directory / "cells.jsonl").read_bytes(), mtime=0)
    (RESULTS / f"{name}.cells.jsonl.gz").write_bytes(kept)


def put_section(document: Path, name: str, section: str) -> None:
    """Replace what stands between the marks of that name in a page, or append it with its marks."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    made = f"{start}\n{section}\n{end}"
    text = document.read_text() if document.exists() else "# Performance\n"
    if start in text:
        text = text[: text.index(start)] + made + text[text.index(end) + len(end) :]
    else:
        text = text.rstrip("\n") + "\n\n" + made + "\n"
    document.write_text(text)
