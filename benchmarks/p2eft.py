"""A client's federated round of FedP2EFT against one of FedL2P, and the memory that both need.

Both at the paper's settings for classification: rank 16, all linear modules of the blocks, batches of 32, two epochs
over 100 examples (FedL2P: three times over 80 of them, with 16 hypergradients each). Features are part of a round: they
are not kept from an earlier one. The two take turns, each in a process of its own, whose peak is the memory.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from befit.core.values import Payload, Tick
from befit.protocol.jobs import finish
from befit.protocol.registry import build_method
from befit.runs.host import Host
from common import experiment, federation, in_fresh_process, peak_mib, publish, ranged, resident_mib, spread

EXAMPLES, RANK = 100, 16
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora", "rank": 2 * RANK, "epochs": 2},  # as many ranks as FedP2EFT learns the scales of
    "fedp2eft": {"name": "fedp2eft", "rank": RANK, "rank_max": RANK, "epochs": 2},
    "fedl2p": {"name": "fedl2p", "rank": RANK, "epochs": 2},
}


def make_host(kind: str) -> Host:
    settings = experiment(
        kind, "local", train={"batch_size": 32, "lr": 1e-4, "grad_clip": 1.0}, adapter={"targets": ["all"]}
    )
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
    start = time.process_time()
    finish(stage.exchange.client_update(memory, Payload(received.arrays, received.scalars), site, at))
    return {"seconds": time.process_time() - start, "before_mib": before, "peak_mib": peak_mib()}


def alone(kind: str, name: str) -> dict[str, Any]:
    """What a fresh process measures."""
    return in_fresh_process(__file__, "--one", kind, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--kinds", nargs="+", default=["digits", "minilm"])
    parser.add_argument("--one", nargs=2, metavar=("KIND", "METHOD"), help="measure one process and print JSON")
    options = parser.parse_args()
    if options.one:
        kind, name = options.one
        where = make_host(kind)
        parameters = where.model.backbone.parameters()
        print(
            json.dumps(
                {
                    "model_mib": sum(p.numel() * p.element_size() for p in parameters) / 2**20,
                    **one_round(where, METHODS[name]),
                }
            )
        )
        return
    wanted = [(kind, name) for _ in range(options.repeats) for kind in options.kinds for name in METHODS]
    with ThreadPoolExecutor(options.jobs) as pool:
        measured = list(pool.map(lambda one: alone(*one), wanted))
    rows, data = [], []
    for kind in options.kinds:
        found = {
            name: [one for place, one in zip(wanted, measured, strict=True) if place == (kind, name)]
            for name in METHODS
        }
        seconds = {name: spread([one["seconds"] for one in runs]) for name, runs in found.items()}
        grown = {name: spread([one["peak_mib"] - one["before_mib"] for one in runs]) for name, runs in found.items()}
        ratio = spread(
            [slow["seconds"] / fast["seconds"] for slow, fast in zip(found["fedl2p"], found["fedp2eft"], strict=True)]
        )
        data.append({"kind": kind, "runs": found, "ratio": ratio})
        for name in METHODS:
            above = grown[name]["median"] - grown["lora"]["median"]
            rows.append(
                [
                    kind,
                    name,
                    f"{seconds[name]['median']:.2f}",
                    ranged(ratio, ".1f") if name == "fedl2p" else "",
                    f"{grown[name]['median']:.0f}",
                    f"{above:+.0f}" if name != "lora" else "",
                    f"{found[name][0]['model_mib']:.1f}",
                ]
            )
    publish(
        "p2eft",
        "FedP2EFT and FedL2P",
        f"One federated round of one client, rank {RANK} on all linear modules, {EXAMPLES} examples, batches of 32, "
        f"two epochs. FedP2EFT learns {2 * RANK} scales per module and fits the generator; FedL2P trains three times "
        "and adds up 16 hypergradients each time; `lora` is two epochs at the rank at which FedP2EFT searches. Each "
        f"round runs in a fresh process on one CPU thread: medians of {options.repeats} runs, of seconds and of the "
        "growth of memory in the round, the ratio with its range. The paper measured 8.4 (mBERT on XNLI) and 2.8 "
        "(Llama-3.2-3B on Fed-Aya) on an A100, where its search took about one more copy of the model; befit keeps "
        "none.",
        ["backbone", "method", "seconds", "times FedP2EFT's", "growth (MiB)", "above `lora` (MiB)", "model (MiB)"],
        rows,
        data,
    )


if __name__ == "__main__":
    main()
