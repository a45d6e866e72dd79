"""How long a federation with slow sites takes to a score, in simulated time: whole rounds against buffers.

FedIT at ten sites whose times for a round are log-normal, with the data alike or divided by class. Every run ends at
the same simulated time, that of so many whole rounds, whatever it computes until then. Each finished run is a line of
results/asynchronous.jsonl, and runs that are there are not done again; the tables of docs/asynchronous.md are written
from what is there.

    python benchmarks/asynchronous.py           # everything that is missing
    python benchmarks/asynchronous.py --page    # write the tables alone
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from befit.config.load import load_experiment
from befit.core.values import Failure, Score, Tick, Update
from befit.protocol.engine import Checkpoint
from befit.protocol.federate import federate
from befit.protocol.schedule import Schedule
from befit.protocol.settings import Asynchronous
from befit.protocol.store import ClientStore
from befit.runs.clock import SimulatedEngine, client_time
from befit.runs.fleets import Fleets
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from common import HERE, RESULTS, Memo

RAW, PAGE = RESULTS / "asynchronous.jsonl", HERE.parent / "docs" / "asynchronous.md"
BEGIN, END = "<!-- numbers: benchmarks/asynchronous.py -->\n", "<!-- end of numbers -->\n"
CLIENTS, WHOLE, STEPS, LR, SLOW, SIGMA = 10, 5, 5, 5e-3, 3, 1.0
SEEDS = range(3)
BUFFERS = (10, 5, 2)
DATA: dict[str, dict[str, Any]] = {
    "alike": {"name": "digits", "clients": CLIENTS, "alpha": 100.0},
    "two classes each": {"name": "digits", "clients": CLIENTS, "partition": "classes", "classes": 2},
}


class Setting(NamedTuple):
    data: str
    buffer: int
    seed: int


class Over(Exception):
    """The time is up."""


@dataclass
class Clocked(Memo):
    """Keeps scores and who has counted, by round, and ends the run when the clock says so."""

    clock: dict[str, Any]
    end: float
    scores: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    used: Counter[str] = field(default_factory=Counter[str])
    staleness: list[float] = field(default_factory=list[float])

    def trained(self, at: Tick, update: Update) -> None:
        self.used[update.client.id] += 1
        self.staleness.append(update.report["staleness"])

    def scored(self, at: Tick, score: Score) -> None:
        self.scores.setdefault(at.round, {})[score.client] = score.metrics["accuracy"]

    def failed(self, failure: Failure, scoring: bool = False) -> None:
        raise AssertionError(failure)

    def completed(self, point: Checkpoint, force: bool) -> None:
        if self.clock["federate"]["now"] >= self.end:
            raise Over


@lru_cache(maxsize=1)
def host_of(data: str, seed: int) -> Host:
    values = {
        "benchmark": {**DATA[data], "seed": seed},
        "method": "fedit",
        "baselines": [],
        "train": {"max_steps": STEPS, "lr": LR},
        "federation": {"rounds": 1, "seed": seed},
        "engine": {"threads": 1},
    }
    return Host(load_experiment(values))


def play(setting: Setting) -> dict[str, Any]:
    """A run until the time of `WHOLE` whole rounds; scored after each of those, or 20 updates."""
    host = host_of(setting.data, setting.seed)
    method = host.build({"name": "fedit"})
    site = host.install(method)
    times = {info.id: client_time(info.id, SIGMA, setting.seed) for info in host.infos}
    late, rounds, clock = Asynchronous(setting.buffer, times=SIGMA), 10**6, dict[str, Any]()
    fleets = Fleets(CLIENTS, host.model, {})  # whoever starts from the same version trains as one
    inner = LocalEngine(method, host.infos, host.site, ClientStore(None), rounds=rounds, fleets=fleets)
    engine = SimulatedEngine(inner, late, setting.seed, ["federate"], clock)
    with tempfile.TemporaryDirectory() as folder:
        memo = Clocked(Path(folder) / "spool", clock, WHOLE * max(times.values()))
        every = 1 if setting.buffer == CLIENTS else 20 // setting.buffer
        schedule = Schedule(rounds, setting.seed, evaluate_every=every, asynchronous=late)
        with contextlib.suppress(Over):
            federate(method, engine, site, schedule, memo)
    over, slow = clock["federate"]["over"], sorted(times, key=lambda client: -times[client])[:SLOW]
    last = memo.scores[max(round_ for round_ in memo.scores if over[round_ - 1] <= memo.end)]
    return {
        "slowest": max(times.values()),
        "curve": [[over[round_ - 1], statistics.mean(each.values())] for round_, each in memo.scores.items()],
        "updates": memo.used.total(),
        "of_slow": sum(memo.used[client] for client in slow),
        "staleness": statistics.mean(memo.staleness),
        "mean": statistics.mean(last.values()),
        "worst": min(last.values()),
        "slow": statistics.mean(last[client] for client in slow),
    }


def plan() -> Iterator[Setting]:
    for seed in SEEDS:
        for data in DATA:
            for buffer in BUFFERS:
                yield Setting(data, buffer, seed)


def read() -> dict[Setting, dict[str, Any]]:
    rows = [json.loads(line) for line in RAW.read_text().splitlines()] if RAW.exists() else []
    return {Setting(*(row.pop(name) for name in Setting._fields)): row for row in rows}


def measure(until: float) -> None:
    done = read()
    RESULTS.mkdir(exist_ok=True)
    for setting in plan():
        if setting in done:
            continue
        if time.time() > until:
            return
        began = time.process_time()
        row = {**setting._asdict(), **play(setting)}
        with RAW.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*setting, f"{row['mean']:.3f}", f"{time.process_time() - began:.1f} s", flush=True)


HEADERS = (
    "buffer",
    "time to the score",
    "mean at the end",
    "worst site",
    "slowest three",
    "updates",
    "of the slowest three",
    "staleness",
)
NOTE = (
    f"FedIT on digits at {CLIENTS} sites, {STEPS} steps a round, times log-normal with sigma {SIGMA:g}, seeds "
    f"{SEEDS[0]} to {SEEDS[-1]} of partition, run and times. Every run has the simulated time of {WHOLE} whole "
    "rounds. *The score* is the mean accuracy that whole rounds have at the end; the time to it is a share of that "
    "time, seed by seed (–: not reached), to the next 20 updates, after which a run is scored. All else is a mean over "
    "seeds: accuracy of the shared model at the end, its "
    f"mean over sites, at the worst one and over the {SLOW} slowest; updates, the share of the {SLOW} slowest sites in "
    "them, and how many rounds late they were. Clients that start from the same version train as one. "
    "`python benchmarks/asynchronous.py`, raw in `benchmarks/results/asynchronous.jsonl`."
)


def write_page() -> None:
    done = read()
    lines = [NOTE, ""]
    for data in DATA:
        lines += [f"Data {data}:", "", *(f"| {' | '.join(row)} |" for row in _table(done, data)), ""]
    page = PAGE.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{chr(10).join(lines)}{END}{after}")


def _table(done: dict[Setting, dict[str, Any]], data: str) -> Iterator[Sequence[str]]:
    yield HEADERS
    yield ["---"] * len(HEADERS)
    for buffer in BUFFERS:
        pairs = [
            (done[whole], done[own])
            for seed in SEEDS
            if (whole := Setting(data, CLIENTS, seed)) in done and (own := Setting(data, buffer, seed)) in done
        ]
        if not pairs:
            continue
        rows = [own for _, own in pairs]

        def mean(key: str, rows: Sequence[dict[str, Any]] = rows) -> float:
            return statistics.mean(row[key] for row in rows)

        name = f"{buffer}, whole rounds" if buffer == CLIENTS else str(buffer)
        yield [
            name,
            ", ".join(_time_to(whole, own) for whole, own in pairs),
            *(f"{mean(key):.3f}" for key in ("mean", "worst", "slow")),
            f"{mean('updates'):.0f}",
            f"{sum(row['of_slow'] for row in rows) / sum(row['updates'] for row in rows):.0%}",
            f"{mean('staleness'):.1f}",
        ]


def _time_to(whole: dict[str, Any], own: dict[str, Any]) -> str:
    """When a run first has what whole rounds have at the end, as a share of the time that these take."""
    end = WHOLE * whole["slowest"]
    reached = [when for when, accuracy in own["curve"] if accuracy >= whole["mean"] and when <= end * (1 + 1e-9)]
    return f"{min(reached) / end:.2f}" if reached else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the tables alone")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after so many minutes")
    given = parser.parse_args()
    if not given.page:
        measure(time.time() + 60 * given.minutes)
    write_page()


if __name__ == "__main__":
    main()
