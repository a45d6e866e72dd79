"""A server's aggregation of many clients' adapters from a disk: bytes a second, and memory by number of clients.

Adapters have the shape of Llama-3.2-1B with rank 8 on q_proj and v_proj: 851,968 numbers, 3.4 MB in float32. Every
number of clients runs in a process of its own. Files were just written, so they come from the page cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from befit.core.values import ClientInfo, Payload, State, Update
from befit.merge.merge import Merge, MergeContext
from befit.protocol.spool import Spool
from common import in_fresh_process, peak_mib, publish, random_adapter, resident_mib

RULES: dict[str, Callable[[], Merge]] = {
    "mean of factors": Merge,
    "Task Arithmetic on factors": lambda: Merge(rule="task-arithmetic"),
    "KnOTS, mean": lambda: Merge(space="knots"),
    "KnOTS, TIES": lambda: Merge(space="knots", rule="ties"),
}


def adapter(client: int, layers: int, width: int) -> State:
    return random_adapter(client, "shared", layers, width, width // 4)


def one_size(clients: int, rule: str, layers: int, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Spool(Path(folder) / "spool", 0) as spool:
        for client in range(clients):
            update = Update(ClientInfo(f"{client:04d}", "llama", 1), Payload(adapter(client, layers, width)))
            spool.add(update)
        size = sum(value.nbytes for value in adapter(0, layers, width).values())
        before = resident_mib()
        began = time.perf_counter()
        RULES[rule]()(spool.updates(), MergeContext())
        seconds = time.perf_counter() - began
    return {
        "rule": rule,
        "clients": clients,
        "adapter_bytes": size,
        "seconds": seconds,
        "gb_per_s": clients * size / seconds / 1e9,
        "before_mib": before,
        "peak_mib": peak_mib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--small", action="store_true", help="a tiny shape and few clients, printed and not published")
    parser.add_argument("--one", nargs=4, metavar=("CLIENTS", "RULE", "LAYERS", "WIDTH"), help="one size, as JSON")
    options = parser.parse_args()
    if options.one:
        clients, rule, layers, width = options.one
        print(json.dumps(one_size(int(clients), rule, int(layers), int(width))))
        return
    layers, width = (2, 64) if options.small else (16, 2048)
    rows: list[dict[str, Any]] = []
    for rule in RULES:
        for clients in [3, 6] if options.small else options.clients:
            if "KnOTS" in rule and clients > 100:
                continue  # these hold all updates at once
            rows.append(in_fresh_process(__file__, "--one", clients, rule, layers, width, threads=None))
            print(rows[-1], flush=True)
    if options.small:
        return
    publish(
        "aggregate",
        "Aggregating adapters from a disk",
        "Adapters of Llama-3.2-1B, rank 8 on q_proj and v_proj (3.4 MB each), are read one after the other from the "
        "files of a round's replies. Memory is resident memory before the merge, and the peak of the whole process. "
        "Rules that are linear in the factors hold one adapter at a time; KnOTS holds all.",
        ["merge", "clients", "data (GB)", "seconds", "GB/s", "before (MiB)", "peak (MiB)"],
        [
            [
                row["rule"],
                str(row["clients"]),
                f"{row['clients'] * row['adapter_bytes'] / 1e9:.2f}",
                f"{row['seconds']:.2f}",
                f"{row['gb_per_s']:.2f}",
                f"{row['before_mib']:.0f}",
                f"{row['peak_mib']:.0f}",
            ]
            for row in rows
        ],
        rows,
    )


if __name__ == "__main__":
    main()
