"""How much faster clients train as one than one by one: processor time of a FedIT round, by clients and backbone.

Both sides are the same round through the local engine: downloads, encoding, training, check and store. They take
turns, and the ratio is of each pair. Every client has the batches of its own examples; texts are of their real lengths.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from befit.core.values import Payload, Tick, Update
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.protocol.store import ClientStore
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from common import host, publish, ranged, spread

# The first is a shipped configuration's.
BATCHES = {"digits": (10, 3, 1), "skills": (4, 1), "names": (8, 2), "minilm": (8, 2), "vqa": (4, 1)}
STEPS = {"digits": 5, "skills": 2, "names": 2, "minilm": 1, "vqa": 2}
NAMES = {
    "digits": "digits ViT",
    "skills": "skills-llama",
    "names": "names-bert",
    "minilm": "MiniLM",
    "vqa": "digits-llava-s",
}


def seconds(where: Host, method: Method, download: Payload, clients: list[str], fleet: int, round_: int) -> float:
    """Processor time of one round."""
    engine = LocalEngine(method, where.infos, where.site, ClientStore(None))
    start = time.process_time()
    for reply in engine.updates(dict.fromkeys(clients, download), Tick("federate", round_, 1000, 0), fleet):
        assert isinstance(reply, Update)
    return time.process_time() - start


def tokens(where: Host, clients: list[str], batch_size: int) -> float:
    """Of one client's step, padded as it is alone; for images the patches and the class token."""
    at, widths = Tick("federate", 1, 1000, 0), []
    for info in where.infos[:8]:
        if info.id in clients:
            for batch in where.site(info).batches("train", 2, at):
                if "attention_mask" in batch:
                    widths.append(batch["attention_mask"].numel())
    if widths:
        return sum(widths) / len(widths)
    config: Any = where.model.backbone.config
    return batch_size * ((config.image_size // config.patch_size) ** 2 + 1)


def measure(kind: str, batch_size: int, sizes: list[int], pairs: int) -> list[dict[str, Any]]:
    steps = STEPS[kind]
    where = host(kind, max(sizes), "fedit", train={"max_steps": steps, "batch_size": batch_size})
    method = build_method("fedit")
    download = method.server_init(where.install(method))
    download = method.plan()[0].exchange.dispatch(download, where.infos[0], Tick("federate", 1, 1000, 0))
    found = []
    for count in sizes:
        clients = [info.id for info in where.infos[:count]]
        alone, fleet = [], []
        for turn in range(pairs + 1):
            a = seconds(where, method, download, clients, 1, turn + 1)
            b = seconds(where, method, download, clients, count, turn + 1)
            if turn:  # the first turn warms up
                alone.append(a / count / steps * 1e3)
                fleet.append(b / count / steps * 1e3)
        row = {
            "backbone": kind,
            "parameters": sum(one.numel() for one in where.model.backbone.parameters()),
            "batch_size": batch_size,
            "clients": count,
            "steps": steps,
            "tokens": tokens(where, clients, batch_size),
            "alone_ms": spread(alone),
            "fleet_ms": spread(fleet),
            "speed_up": spread([a / b for a, b in zip(alone, fleet, strict=True)]),
        }
        print(row, flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbones", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="in place of each backbone's own")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--print-only", action="store_true", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        row
        for kind in options.backbones
        for batch_size in options.batch_sizes or BATCHES[kind]
        for row in measure(kind, batch_size, options.clients, options.pairs)
    ]
    if not options.print_only:
        show(found)


def show(found: list[dict[str, Any]]) -> None:
    """Publish the curves, by backbone and tokens of a step."""
    found.sort(key=lambda row: (row["backbone"], row["batch_size"], row["clients"]))
    rows = [
        [
            f"{NAMES[row['backbone']]}, {row['parameters'] / 1e6:.2f} M",
            str(row["batch_size"]),
            f"{row['tokens']:.0f}",
            str(row["clients"]),
            f"{row['alone_ms']['median']:.1f}",
            f"{row['fleet_ms']['median']:.1f}",
            ranged(row["speed_up"]),
        ]
        for row in found
    ]
    publish(
        "fleet",
        "Fleets",
        "A FedIT round of K clients, one by one and as one fleet (`engine.fleet: K`): processor milliseconds per "
        "client and step, in turns on one thread; medians, speed-up with its range. Tokens are those of one client's "
        "step.",
        ["backbone", "batch", "tokens", "K", "one by one (ms)", "fleet (ms)", "speed-up"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
