"""What a round of secure sums takes beside training: processor seconds and bytes, of a client and of the server.

Every client takes its steps with keys, shares and masks of its own, one after the other in this process; a tenth drops
out after the shares, which is what costs the server most. Times are of one thread and one round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from befit.core.values import Payload, TensorSpec
from befit.core.wire import payload_bytes
from befit.protocol.secure.client import BOX, Member
from befit.protocol.secure.desk import BOXES, HIDDEN, SHARES, keys_as_payload, rows, with_shares
from befit.protocol.secure.fixed import FixedPoint
from befit.protocol.secure.masks import degree
from befit.protocol.secure.server import Server
from befit.protocol.secure.shamir import SHARE
from befit.protocol.settings import SecureSums
from common import publish

MOST, SAMPLE = 10**7, 10  # with more numbers at all sites, so many of them hide theirs
NOTE = (
    "A round beside its training, with 24 bits, weights by examples and a tenth of the sites gone after they shared "
    "keys. Times are of processors, one thread: medians over the sites, and sums for the server. With more than "
    f"{MOST:,} numbers at all sites, the times to hide and to add an update are of {SAMPLE} sites. In brackets: how "
    "many sites drop out, and an update's bytes relative to float32. docs/secure_sums.md explains the steps."
)
HEADERS = [
    "adapter",
    "sites",
    "neighbours",
    "site: keys and shares",
    "site: to hide its update",
    "server: to add, and to uncover",
    "update up",
    "else up",
    "else down",
]
Result = TypeVar("Result")
# Numbers of an adapter of rank 8 at the query and value projections, with the digits' head where there is one.
ADAPTERS = {"digits-vit": 8842, "Qwen2.5-0.5B": 540_672, "Llama-3.1-8B": 3_407_872}


class Clock:
    """Adds up the processor seconds of what it is given to do."""

    def __init__(self) -> None:
        self.spent: list[float] = []

    def __call__(self, act: Callable[..., Result], *given: Any) -> Result:
        start = time.process_time()
        done = act(*given)
        self.spent.append(time.process_time() - start)
        return done


def one_round(sites: int, numbers: int, leave: bool) -> dict[str, Any]:
    settings = SecureSums(10.0)
    form = FixedPoint(settings, {"shared/m/A": TensorSpec((numbers,))}, sites, True)
    names = [f"site-{number:03d}" for number in range(sites)]
    clocks = {step: Clock() for step in ("keys", "shares", "mask", "uncover", "server: add", "server: uncover")}
    draw = torch.Generator().manual_seed(0)
    update = {"shared/m/A": torch.randn(numbers, generator=draw) * 1e-3}
    members = {name: Member.begun(name, "a round", settings.threshold) for name in names}
    keys = {name: clocks["keys"](members[name].own_keys) for name in names}
    server = Server("a round", settings.threshold, keys)
    everybody = keys_as_payload(keys)
    for name in names:
        server.take(name, clocks["shares"](members[name].share, keys))
    gone = {name for number, name in enumerate(names) if leave and number % 10 == 9}
    total, left = np.zeros(form.length, np.uint64), [name for name in names if name not in gone]

    def hide(name: str) -> torch.Tensor:
        return form.to_bytes(members[name].mask(form.encode(update, 100), server.inbox(name)))

    def add(sent: torch.Tensor) -> None:
        np.add(total, form.from_bytes(sent), out=total)

    timed = left if sites * numbers <= MOST else left[:SAMPLE]
    for name in timed:
        hidden = clocks["mask"](hide, name)
        clocks["server: add"](add, hidden)
    for name in left[len(timed) :]:  # with masks of a single number: what they share is the same
        members[name].mask(np.zeros(1, np.uint64), server.inbox(name))
    shares = {name: clocks["uncover"](members[name].uncover, left) for name in left}
    clocks["server: uncover"](server.uncover, total, left, shares)
    if timed == left:
        summed = form.decode(total)
        off = float((summed.mean["shared/m/A"] - update["shared/m/A"].double()).abs().max())
        assert off <= form.step / 2 and summed.weight == 100 * len(left), off
    clocks["server: add"].spent = [median(clocks["server: add"].spent) * len(left)]

    first = names[0]
    up = {
        "keys": payload_bytes(keys_as_payload({first: keys[first]})),
        "shares": payload_bytes(Payload({BOXES: rows(list(server.boxes[first].values()), BOX)})),
        "update": payload_bytes(Payload({HIDDEN: hidden})),
        "uncover": payload_bytes(Payload({SHARES: rows(list(shares[first].values()), SHARE)})),
    }
    down = {
        "shares": payload_bytes(everybody),
        "update": payload_bytes(with_shares(Payload(), server.inbox(first))),
        "uncover": payload_bytes(Payload({}, {"left": left})),
    }
    return {
        "sites": sites,
        "numbers": numbers,
        "drop out": len(gone),
        "neighbours": degree(sites, settings.threshold),
        "bytes of a number": form.width,
        "client_s": {step: median(clock.spent) for step, clock in clocks.items() if "server" not in step},
        "server_s": {step: sum(clock.spent) for step, clock in clocks.items() if "server" in step},
        "up": up,
        "down": down,
        "up, plain": 4 * numbers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--adapters", nargs="+", default=list(ADAPTERS), choices=list(ADAPTERS))
    parser.add_argument("--stay", action="store_true", help="nobody drops out")
    parser.add_argument("--dry", action="store_true", help="print, and leave the document and its numbers alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    rows_: list[list[str]] = []
    for adapter in given.adapters:
        for sites in given.sites:
            row = {"adapter": adapter, **one_round(sites, ADAPTERS[adapter], not given.stay)}
            found.append(row)
            client, server = row["client_s"], row["server_s"]
            rows_.append(
                [
                    f"{adapter}, {row['numbers']:,} numbers",
                    f"{sites} ({row['drop out']})",
                    str(row["neighbours"]),
                    f"{client['keys'] + client['shares'] + client['uncover']:.3f} s",
                    f"{client['mask']:.3f} s",
                    f"{server['server: add']:.2f} + {server['server: uncover']:.2f} s",
                    f"{row['up']['update']:,} B ({row['up']['update'] / row['up, plain']:.2f})",
                    f"{sum(row['up'].values()) - row['up']['update']:,} B",
                    f"{sum(row['down'].values()):,} B",
                ]
            )
            print(" | ".join(rows_[-1]), flush=True)
    if not given.dry:
        publish("secure_sums", "Secure sums", NOTE, HEADERS, rows_, found)


if __name__ == "__main__":
    main()
