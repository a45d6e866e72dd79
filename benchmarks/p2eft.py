"""A client's federated round of FedP2EFT against one of FedL2P, and the memory that both need.

Both at the paper's settings for classification: rank 16, all linear modules of the blocks, batches of 32, two epochs
over 100 examples (FedL2P: three times over 80 of them, with 16 hypergradients each). Features are part of a round: they
are not kept from an earlier one. The two take turns in one process. Memory is the peak of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from befit.host import Host
from befit.registry import build_method
from befit.types import Payload, Tick
from common import experiment, federation, peak_mib, publish, resident_mib, spread

EXAMPLES, RANK = 100, 16
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora", "rank": 2 * RANK, "epochs": 2},  # as many ranks as FedP2EFT learns the scales of
    "fedp2eft": {"name": "fedp2eft", "rank": RANK, "rank_max": RANK, "epochs": 2},
    "fedl2p": {"name": "fedl2p", "rank": RANK, "epochs": 2},
}


def make_host(kind: str) -> Host:
    settings = experiment(kind, "local", train={"batch_size": 32, "lr": 1e-4, "grad_clip": 1.0},
                          adapter={"targets": ["all"]})  # fmt: skip
    return Host(settings, federation(kind, 1, EXAMPLES))


def one_round(where: Host, block: dict[str, Any]) -> dict[str, float]:
    """Seconds of one client's first round, without what the engine does around it."""
    method, (info,) = build_method(block), where.infos
    server = where.install(method)
    site, stage = where.site(info), method.plan()[0]
    at = Tick(stage.name, 1, 1, 0)
    received = stage.exchange.dispatch(method.server_init(server), info, at)
    memory = method.client_init(site)
    site.model.reset()
    before = resident_mib()
    start = time.perf_counter()
    stage.exchange.client_update(memory, Payload(received.arrays, received.scalars), site, at)
    return {"seconds": time.perf_counter() - start, "before_mib": before, "peak_mib": peak_mib()}


def in_turns(kind: str, repeats: int) -> dict[str, Any]:
    where = make_host(kind)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(repeats + 1):
        for name, block in METHODS.items():
            seconds = one_round(where, block)["seconds"]
            if turn:  # the first one warms up
                times[name].append(seconds)
    ratios = [slow / fast for slow, fast in zip(times["fedl2p"], times["fedp2eft"], strict=True)]
    return {"kind": kind, "seconds": {name: spread(found) for name, found in times.items()}, "ratio": spread(ratios)}


def alone(kind: str, name: str) -> dict[str, Any]:
    """The peak of a fresh process that takes one round, above what it held before."""
    command = [sys.executable, __file__, "--one", kind, name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["digits", "minilm"])
    parser.add_argument("--one", nargs=2, metavar=("KIND", "METHOD"), help="measure one process and print JSON")
    options = parser.parse_args()
    if options.one:
        kind, name = options.one
        where = make_host(kind)
        parameters = where.model.backbone.parameters()
        print(json.dumps({"model_mib": sum(p.numel() * p.element_size() for p in parameters) / 2**20,
                          **one_round(where, METHODS[name])}))  # fmt: skip
        return
    rows, data = [], []
    for kind in options.kinds:
        found = in_turns(kind, options.repeats)
        memory = {name: alone(kind, name) for name in METHODS}
        grown = {name: one["peak_mib"] - one["before_mib"] for name, one in memory.items()}
        model = memory["lora"]["model_mib"]
        data.append({**found, "memory": memory})
        for name in METHODS:
            ratio = found["ratio"]
            rows.append([
                kind, name, f"{found['seconds'][name]['median']:.2f}",
                f"**{ratio['median']:.1f}** ({ratio['min']:.1f}-{ratio['max']:.1f})" if name == "fedl2p" else "",
                f"{grown[name]:.0f}", f"{grown[name] - grown['lora']:+.0f}" if name != "lora" else "", f"{model:.0f}",
            ])  # fmt: skip
    publish(
        "p2eft",
        "FedP2EFT and FedL2P",
        f"One federated round of one client, rank {RANK} on all linear modules, {EXAMPLES} examples, batches of 32, "
        f"two epochs: FedP2EFT learns {2 * RANK} scales per module and fits the generator, FedL2P trains three times "
        "and adds up 16 hypergradients each time; `lora` is two epochs at the rank at which FedP2EFT searches. "
        "Medians of turns in one process, the ratio of each pair with its range. Memory is the growth of a fresh "
        "process in the round. The paper measured 8.4 (mBERT on XNLI) and 2.8 (Llama-3.2-3B on Fed-Aya) on an A100, "
        "where its search took about one more copy of the model; befit keeps none.",
        ["backbone", "method", "seconds", "times FedP2EFT's", "growth (MiB)", "above `lora` (MiB)", "model (MiB)"],
        rows,
        data,
    )


if __name__ == "__main__":
    main()
