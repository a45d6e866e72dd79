"""One FedIT run on the digits' transformer by befit, by loops over PEFT, and by a usual app in Flower's simulation.

Every side takes the same steps on the same batches of the same clients, with one thread a process, and ends with the
accuracy of the shared adapter. Each runs in processes of its own. Measured is processor time of all of them, since the
packages, the model and the examples were there: of Flower's simulation that is its actors too, each of which imports
PyTorch and loads the model once. All sides have befit's setting of the C library's memory
(`befit.core.freed_memory`), which comes with the backbone. Sides take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from befit.core.values import Tick
from befit.protocol.federate import final_download
from befit.protocol.registry import build_method
from befit.protocol.serve import score
from befit.runs.host import Host
from common import HERE, federated, publish, ranged, spread

SIDES = {
    "befit": "befit",
    "fleet": "befit, ten clients at once",
    "peft": "PEFT, a fresh model a client",
    "peft-kept": "PEFT, one model kept",
    "pfl": "pfl 0.6, one process",
    "flower": "Flower's simulation, a usual app",
}

PACKAGES = {
    "pfl": ("pfl.aggregate.simulate", "pfl.algorithm.federated_averaging", "pfl.model.pytorch"),
    "flower": ("flwr.clientapp", "flwr.serverapp.strategy", "flwr.simulation", "ray"),
}


def run_befit(where: Host, fleet: int) -> tuple[float, float]:
    """The process's seconds at the end of the run, and the accuracy."""
    method = build_method("fedit")
    with tempfile.TemporaryDirectory() as folder:
        server, store, _ = federated(where, method, Path(folder) / "run", fleet=fleet)
        spent = time.process_time()
    rounds, info = where.experiment.federation.rounds, where.infos[0]
    at = Tick("federate", rounds, rounds, 0)
    found = score(method, where.site(info), store, final_download(method, server, info, at), at, {}, "test", 256)
    return spent, found.metrics["accuracy"]


def one_side(side: str, clients: int, rounds: int, steps: int, batch_size: int) -> dict[str, float]:
    """In this process: seconds of the process from when all is there, and the accuracy."""
    import peers_app

    where = peers_app.made(clients, rounds, steps, batch_size)
    peers_app.backbone(where)
    for package in PACKAGES.get(side, ()):
        importlib.import_module(package)
    began = time.process_time()
    if side in ("befit", "fleet"):
        spent, accuracy = run_befit(where, 10 if side == "fleet" else 1)
        return {"cpu_s": spent - began, "accuracy": accuracy}
    if side == "flower":
        from flwr.simulation import run_simulation

        results: list[Any] = []
        with Children() as children:
            server, client = peers_app.flower_apps(clients, rounds, steps, batch_size, results)
            resources = {"num_cpus": 1, "num_gpus": 0.0}
            run_simulation(server, client, clients, backend_config={"client_resources": resources})  # type: ignore[arg-type]
        cpu = time.process_time() - began + children.seconds
        return {"cpu_s": cpu, "accuracy": peers_app.accuracy(where, results[0], peers_app.fresh(where))}
    if side == "pfl":
        shared, model = peers_app.run_pfl(where, rounds, steps, batch_size)
    else:
        shared, model = peers_app.loop(where, rounds, steps, batch_size, side == "peft-kept")
    cpu = time.process_time() - began
    return {"cpu_s": cpu, "accuracy": peers_app.accuracy(where, shared, model)}


class Children:
    """Adds up the processor time of the processes that are started within it, however deep, by a mark that each has
    in its environment: Ray's are no children of ours."""

    def __init__(self) -> None:
        self._mark = f"PEERS_MARK={uuid.uuid4()}"
        self._spent: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Children:
        name, _, value = self._mark.partition("=")
        os.environ[name] = value
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return sum(self._spent.values())

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            for folder in Path("/proc").iterdir():
                if not folder.name.isdigit() or int(folder.name) == os.getpid():
                    continue
                try:
                    if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        times = (folder / "stat").read_text().rpartition(")")[2].split()
                        self._spent[int(folder.name)] = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
                except OSError:  # it ended meanwhile, or is not ours
                    continue


def measure(side: str, python: str, *numbers: int) -> dict[str, float]:
    """A side in a fresh process; `python` is one that has pfl too, which asks for other versions than befit."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [python if side == "pfl" else sys.executable, __file__, "--one", side, *map(str, numbers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pfl", default="", metavar="PYTHON", help="an interpreter that has befit's packages and pfl")
    parser.add_argument("--print", action="store_true", help="print, and publish nothing")
    parser.add_argument("--one", nargs=5, help="one side in this process, printed as JSON")
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(1)
        side, *numbers = options.one
        print(json.dumps(one_side(side, *map(int, numbers))))
        return
    numbers = (options.clients, options.rounds, options.steps, options.batch_size)
    sides = [side for side in options.sides if side != "pfl" or options.pfl]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            found[side].append(measure(side, options.pfl, *numbers))
            print(side, found[side][-1], file=sys.stderr, flush=True)
    if options.print:
        return
    rows = []
    for side in sides:
        seconds = spread([one["cpu_s"] for one in found[side]])
        ratios = spread([one["cpu_s"] / own["cpu_s"] for one, own in zip(found[side], found[sides[0]], strict=True)])
        rows.append(
            [
                SIDES[side],
                f"{seconds['median']:.1f} ({seconds['min']:.1f}-{seconds['max']:.1f})",
                ranged(ratios),
                f"{found[side][0]['accuracy']:.4f}",
            ]
        )
    load = os.getloadavg()[0]
    publish(
        "peers",
        "The same run elsewhere",
        f"FedIT of {numbers[0]} clients x {numbers[1]} rounds x {numbers[2]} steps of {numbers[3]} images on the "
        "digits' transformer: processor time of all processes, one thread each, without the first one's imports, and "
        "the shared adapter's accuracy at the end on 68 test images of one client; medians and ranges of "
        f"{options.repeats} turns. The other sides, too, have befit's setting of the C library's memory (above, under "
        f"Memory), which comes with the backbone. Load average of the machine at the end: {load:.1f}.",
        ["side", "processor time (s)", f"times {SIDES[sides[0]]}", "accuracy"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
