"""Peak memory for more and more clients: growth per client over what the client itself has to keep.

Every size runs in a process of its own. What a client keeps is its memory between rounds (adapter and optimiser) and
its prepared examples; both are counted exactly, in bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from befit.protocol.registry import build_method
from common import federated, host, in_fresh_process, peak_mib, publish, resident_mib

REPEATS = 3  # peaks of one size differ by some 20 MiB, by when Python collects its garbage


def one_size(clients: int, store: str, method_name: str) -> dict[str, Any]:
    settings = {"federation": {"rounds": 3}, "train": {"max_steps": 1}, "checkpoint": {"every_s": 1e9}}
    where = host("digits", clients, method_name, **settings)
    loaded = resident_mib()
    with tempfile.TemporaryDirectory() as folder:
        method, resident = build_method(method_name), store == "memory"
        _, kept, _ = federated(where, method, Path(folder) / "run", resident, scored=True)
        peak = peak_mib()
        memories = (kept.load(info.id) for info in where.infos)
        state = sum(t.nbytes for memory in memories if memory for t in memory.arrays.values())
    prepared = sum(
        t.nbytes
        for info in where.infos
        for split in ("train", "test")
        for t in where.examples(info.id, split).batch(range(len(where.examples(info.id, split)))).values()
    )
    return {
        "clients": clients,
        "store": store,
        "method": method_name,
        "loaded_mib": loaded,
        "peak_mib": peak,
        "state_mib": state / 2**20,
        "examples_mib": prepared / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument(
        "--one", nargs=3, metavar=("CLIENTS", "STORE", "METHOD"), help="measure one size and print JSON"
    )
    options = parser.parse_args()
    if options.one:
        clients, store, method = options.one
        print(json.dumps(one_size(int(clients), store, method)))
        return
    found: list[dict[str, Any]] = []
    for store, method in (("memory", "fedit"), ("memory", "ditto"), ("disk", "ditto")):
        for clients in options.clients:
            runs = [in_fresh_process(__file__, "--one", clients, store, method) for _ in range(REPEATS)]
            found.append(min(runs, key=lambda one: one["peak_mib"]))
            print(found[-1], flush=True)
    rows = []
    for one in found:
        same = [o for o in found if (o["store"], o["method"]) == (one["store"], one["method"])]
        before = same[max(0, same.index(one) - 1)]
        more = one["clients"] - before["clients"]
        growth = (one["peak_mib"] - before["peak_mib"]) / more * 1024 if more else 0.0
        held = (one["state_mib"] + one["examples_mib"]) / one["clients"] * 1024
        rows.append(
            [
                one["method"],
                one["store"],
                str(one["clients"]),
                f"{one['peak_mib']:.0f}",
                f"{growth:.1f}" if more else "-",
                f"{one['state_mib'] / one['clients'] * 1024:.1f}",
                f"{held:.1f}",
            ]
        )
    publish(
        "memory",
        "Memory",
        "Peak resident memory of the whole process, the least of three runs; growth per client from the size above (at "
        "64 clients mostly buffers that are filled once); what a client keeps: its adapter and optimiser between "
        "rounds, and with its prepared examples.",
        [
            "method",
            "store",
            "clients",
            "peak (MiB)",
            "growth per client (KiB)",
            "stored state (KiB)",
            "state and examples (KiB)",
        ],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
