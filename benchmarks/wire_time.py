"""What a form of the wire costs in time: an adapter encoded and read, down to a client and back, one thread."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from befit.core.values import Payload
from befit.core.wire_form import Wire
from common import HERE, publish

MODULES, RANK, WIDTH, TIMES = 64, 16, 2048, 7
PAGE = HERE.parent / "docs" / "wire.md"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    shapes = {f"shared/{n}/{f}": (RANK, WIDTH) if f == "A" else (WIDTH, RANK) for n in range(MODULES) for f in "AB"}
    server = Payload({key: torch.randn(shape, generator=random) for key, shape in shapes.items()})
    change = {key: 0.01 * torch.randn(shape, generator=random) for key, shape in shapes.items()}
    forms = {
        "float32": Wire(),
        "bfloat16": Wire(torch.bfloat16),
        "int8": Wire(int8=True, updates=frozenset(shapes)),
        "top 10%": Wire(top_k=0.1, updates=frozenset(shapes)),
        "top 10% in int8": Wire(int8=True, top_k=0.1, updates=frozenset(shapes)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(TIMES):  # forms in turn
        for name, wire in forms.items():
            start = time.perf_counter()
            received = wire.received(wire.down(server))
            reply = Payload({key: value + change[key] for key, value in received.arrays.items()})
            encoded, _ = wire.up(reply, received, {})
            wire.replied(encoded, server)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    entries = sum(value.numel() for value in server.arrays.values())
    publish(
        "wire_time",
        "What it costs in time",
        f"Milliseconds of one thread to encode and read an adapter of {entries / 1e6:.1f} million entries, down and "
        f"up, with the addition between them; median of {TIMES}, forms in turn.",
        list(forms),
        [[f"{medians[name]:.0f}" for name in forms]],
        {"milliseconds": medians, "entries": entries, "seconds": seconds},
        document=PAGE,
    )


if __name__ == "__main__":
    main()
