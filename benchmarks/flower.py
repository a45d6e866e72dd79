"""A round at sites over Flower against the same round in one process: seconds, bytes on the wire, memory.

Two sites, each a SuperNode with TLS and a registered key, on the machine that also has the server. All traffic of the
sites goes through a proxy that counts bytes at the socket. The local engine keeps its memories on the disk and writes a
checkpoint after every round, as the server on Flower does, and is clocked in the same way: by its ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from befit.config.experiment import to_yaml
from befit.config.load import load_experiment
from befit.flower.app_folder import write_app
from common import HERE, RESULTS, publish, ranged, spread
from flower_parts import Clock, CountingProxy, Peaks, write_llama, write_texts

sys.path.insert(0, str(HERE.parent))  # the tests' federation of processes
from tests.integration.flower_network import Network

ORDER = ("local", "cold", "worker")
CLIENTS = ("client-00", "client-01")
MIB = 2**20
ONE_RECORD = "limits: {min_records: 1, min_batch: 1}"  # what is measured is the way, and not the training


class Measured(Network):
    """As it comes: Flower looks for work once a second, and the sites' traffic is counted."""

    proxy: CountingProxy

    def __enter__(self) -> Measured:
        super().__enter__()
        return self

    def start_link(self) -> None:
        super().start_link()
        self.proxy = CountingProxy(self.port)

    def connect(self, name: str, site: Path, *others: Any) -> None:
        here, self.address = self.address, f"127.0.0.1:{self.proxy.port}"
        super().connect(name, site, *others)
        self.address = here

    def environment(self) -> dict[str, str]:
        return {key: value for key, value in super().environment().items() if "TASK_POLL" not in key}


def settings(kind: str, folder: Path, rounds: int) -> dict[str, Any]:
    """`small`: the digits and FedIT as it comes. `large`: a Llama whose adapter is 101 MB in bfloat16."""
    common = {"name": kind, "baselines": [], "federation": {"rounds": rounds}, "checkpoint": {"every_s": 0}}
    if kind == "small":
        return {**common, "benchmark": {"name": "digits", "clients": 2}, "method": "fedit"}
    places = {client: str(write_texts(folder / client / "data.jsonl")) for client in CLIENTS}
    return {
        **common,
        "model": {"id": str(folder / "llama"), "dtype": "bfloat16", "max_length": 32},
        "data": {"clients": places, "task": "causal-lm"},
        "adapter": {"targets": ["all"]},
        "method": {"name": "fedit", "rank": 320},
        "train": {"max_steps": 1, "batch_size": 1},
        "wire": {"dtype": "bfloat16"},
    }


def local(kind: str, folder: Path, rounds: int) -> dict[str, Any]:
    """The run in a process of its own, on the clock."""
    path, run = folder / "local.yaml", folder / "local"
    path.write_text(to_yaml(load_experiment({**settings(kind, folder, rounds), "engine": {"store": "disk"}})))
    clock = Clock(run, len(CLIENTS))
    with clock.watch():
        subprocess.run([sys.executable, "-m", "befit", "run", path, "--out", run], check=True, capture_output=True)
    return {"rounds_s": clock.seconds()}


def remote(kind: str, folder: Path, rounds: int, workers: bool) -> dict[str, Any]:
    """The same over processes, with what went over the sites' sockets and what every kind of process took at most."""
    wanted, run = settings(kind, folder, rounds), folder / "remote"
    write_app(load_experiment({**wanted, "engine": {"kind": "flower"}}), folder / "app", run)
    clock, peaks = Clock(run, len(CLIENTS)), Peaks()
    with Measured(folder) as network, peaks.watch():
        for client in CLIENTS:
            site = folder / client / "site.yaml"
            site.parent.mkdir(exist_ok=True)
            model = wanted.get("model", {}).get("id", "digits-vit")
            data = "benchmarks: [digits]" if kind == "small" else "data: data.jsonl"
            site.write_text(f"client: {client}\nmodels: {{{model}: {model}}}\n{data}\n{ONE_RECORD}\n")
            network.register(site)
            if workers:
                network.start(f"worker-{client}", ["python", "-m", "befit", "worker", site])
            network.connect(client, site)
        with clock.watch():
            number = network.run(folder / "app")
            network.wait_for_end(number)
        listed = json.loads(network.flwr("list", "befit", "--run-id", number, "--format", "json"))["runs"][0]
        wire = {"up": network.proxy.up, "down": network.proxy.down}
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    payload = {way: sum(line[f"bytes_{way}"] for line in lines) for way in ("up", "down")}
    # The export at the end carries each client's last download once more.
    payload["down"] += sum(line["bytes_down"] for line in lines if line["purpose"] == "score")
    return {"rounds_s": clock.seconds(), "wire": wire, "payload": payload, "peaks_mib": peaks.mib, "flower": listed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs=2, default=[4, 3], metavar=("SMALL", "LARGE"))
    parser.add_argument("--kinds", nargs="+", default=["small", "large"])
    parser.add_argument("--engines", nargs="+", default=list(ORDER))
    options = parser.parse_args()
    held = RESULTS / "flower.json"  # cells that are not measured again stay
    cells = {(one["kind"], one["engine"]): one for one in json.loads(held.read_text())["data"]} if held.exists() else {}
    rounds = dict(zip(("small", "large"), options.rounds, strict=True))
    for kind in options.kinds:
        for engine in options.engines:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if kind == "large":
                    write_llama(folder / "llama")
                before = os.getloadavg()[0]
                one = (
                    local(kind, folder, rounds[kind])
                    if engine == "local"
                    else remote(kind, folder, rounds[kind], engine == "worker")
                )
            cells[kind, engine] = {"kind": kind, "engine": engine, "load": [before, os.getloadavg()[0]], **one}
            print(cells[kind, engine], flush=True)
    found = sorted(cells.values(), key=lambda one: (one["kind"] != "small", ORDER.index(one["engine"])))
    publish(
        "flower",
        "The same run at sites, over Flower",
        NOTE,
        [
            "adapter",
            "engine",
            "rounds",
            "round (s)",
            "up, wire / payload (MiB)",
            "down, wire / payload (MiB)",
            "ServerApp (MiB)",
            "SuperLink",
            "SuperNode",
            "ClientApp",
            "worker",
            "load",
        ],
        [row(one) for one in found],
        found,
    )


def row(one: dict[str, Any]) -> list[str]:
    times = spread(one["rounds_s"])
    cells = [one["kind"], one["engine"], str(len(one["rounds_s"]) + 1), ranged(times)]
    for way in ("up", "down"):
        cells.append(f"{one['wire'][way] / MIB:.2f} / {one['payload'][way] / MIB:.2f}" if "wire" in one else "-")
    peaks = one.get("peaks_mib", {})
    cells += [f"{peaks[kind]:.0f}" if kind in peaks else "-" for kind in Peaks.kinds]
    return [*cells, f"{one['load'][0]:.1f}-{one['load'][1]:.1f}"]


NOTE = (
    "FedIT with two clients. Small: the digits, a payload of 35 kB. Large: a Llama of 104 million random weights in "
    "bfloat16, rank 320 on all linear modules, 50.5 million numbers, 101 MB in bfloat16, one training step. Round: "
    "seconds from one round's end in the ledger to the next, median and range without a run's first round; the median "
    "of two is their mean. Bytes: those of the whole run between the sites and the SuperLink, counted at the socket "
    "(TLS, HTTP, polling and the app's code included), over the payloads that befit counts. Memory: the peak resident "
    "memory of one process of each kind. Everything ran on one machine of two cores that others used too; the last "
    "column is its load average before and after. Every cell was run once, one after the other."
)

if __name__ == "__main__":
    main()
