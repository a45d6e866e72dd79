"""What a client costs in a round of a thousand over one in a round of ten.

One round of FedIT on the digits at the default training, through the whole product but without scoring: dispatch,
training, guard, aggregation, log and checkpoint. Both sizes take turns; seconds of the process, on one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from befit.protocol.registry import build_method
from befit.runs.host import Host
from common import experiment, federated, host, publish, ranged, spread


def per_client_ms(where: Host, rounds: int) -> float:
    """Mean over as many rounds, each a run of its own, as make the small size long enough to time."""
    method, seconds = build_method("fedit"), 0.0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds += federated(where, method, Path(folder) / "run")[-1]
    return 1e3 * seconds / rounds / len(where.infos)


def measure(steps: int, sizes: tuple[int, int], repeats: int) -> dict[str, Any]:
    train = {"max_steps": steps, "batch_size": 10}
    hosts = [host("digits", clients, "fedit", train=train, federation={"rounds": 1}) for clients in sizes]
    for where in hosts:
        for info in where.infos:
            where.examples(info.id, "train")
    found: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        few, many = per_client_ms(hosts[0], 20), per_client_ms(hosts[1], 1)
        if turn:  # the first turn warms up
            found.append((few, many))
    return {
        "steps": steps,
        "few_ms": spread([few for few, _ in found]),
        "many_ms": spread([many for _, many in found]),
        "ratio": spread([many / few for few, many in found]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--sizes", type=int, nargs=2, default=[10, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (options.sizes[0], options.sizes[1])
    found = [measure(steps, sizes, options.repeats) for steps in options.steps]
    rows = [
        [
            str(one["steps"]),
            f"{one['few_ms']['median']:.2f}",
            f"{one['many_ms']['median']:.2f}",
            ranged(one["ratio"], ".3f"),
        ]
        for one in found
    ]
    publish(
        "many_clients",
        "A thousand clients in a round",
        f"CPU time of a client in a round of FedIT on the digits with {sizes[0]} and with {sizes[1]} clients, in "
        "turns; ratio with its range. Beside training, a large round has replies beyond "
        f"{experiment('digits', 'fedit').engine.spool_mib} MiB, which wait on the disk.",
        ["steps", f"{sizes[0]} clients (ms)", f"{sizes[1]} clients (ms)", "ratio"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
