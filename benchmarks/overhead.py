"""How much a federated round costs over the same number of bare PyTorch LoRA steps.

Both sides take N x S steps on the same batches with the same optimiser. The bare loop knows nothing of clients: one
model, one optimiser, no adapter is ever swapped, saved, counted or checked. After each client's steps in befit the bare
loop takes the same ones, so that a change of the machine's speed hits both. The bare loop, too, has befit's setting of
the C library's memory (`befit.core.freed_memory`), which comes with the backbone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from befit.core.values import Tick
from befit.protocol.registry import build_method
from befit.protocol.site import shuffled_batches
from befit.runs.engines import pick_threads
from befit.runs.host import Host
from common import bare_model, federated, host, publish, ranged, spread

MANY = 512  # clients, from which on two runs are enough


class BareLoop:
    """Steps on the batches of clients, one client after the other, and the seconds of the process that they took."""

    def __init__(self, where: Host, steps: int, batch_size: int) -> None:
        self._where, self._steps, self._batch_size = where, steps, batch_size
        self._model, parameters = bare_model(where)
        self._optimiser = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)
        self.seconds = 0.0

    def take(self, client: str, at: Tick) -> None:
        task, start = self._where.task, time.process_time()
        examples = self._where.examples(client, "train")
        generator = torch.Generator().manual_seed(at.seed_for(client, "batches"))
        for indices in shuffled_batches(len(examples), self._batch_size, self._steps, generator):
            batch = examples.batch(indices)
            loss = task.loss(task.logits(self._model, batch), batch)
            self._optimiser.zero_grad()
            loss.backward()
            self._optimiser.step()
        self.seconds += time.process_time() - start


def measure(kind: str, clients: int, rounds: int, steps: int, batch_size: int, repeats: int) -> dict[str, Any]:
    train = {"max_steps": steps, "batch_size": batch_size}
    where = host(kind, clients, "fedit", train=train, federation={"rounds": rounds})
    method = build_method("fedit")
    torch.set_num_threads(pick_threads(where))  # as a run does, for both sides
    for info in where.infos:
        where.examples(info.id, "train")
    ours, bare = [], []
    for turn in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            loop = BareLoop(where, steps, batch_size)
            _, _, seconds = federated(where, method, Path(folder) / "run", after=loop.take)
        if turn:  # the first turn warms up
            ours.append(seconds - loop.seconds)
            bare.append(loop.seconds)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    return {
        "backbone": kind,
        "clients": clients,
        "rounds": rounds,
        "steps": steps,
        "batch_size": batch_size,
        "befit_s": spread(ours),
        "bare_s": spread(bare),
        "ratio": spread(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--backbones", nargs="+", default=["digits", "minilm"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    found = []
    for kind in options.backbones:
        for clients in options.clients:
            steps, batch_size = (5, 10) if kind == "digits" else (2, 4)
            rounds = max(
                1, 64 // clients
            )  # a run's last checkpoint is always written, so one short round is not typical
            repeats = options.repeats if clients < MANY else 2
            found.append(measure(kind, clients, rounds, steps, batch_size, repeats))
            print(found[-1], flush=True)
    rows = [
        [
            one["backbone"],
            str(one["clients"]),
            str(one["rounds"]),
            f"{one['steps']} x {one['batch_size']}",
            f"{one['bare_s']['median']:.2f}",
            f"{one['befit_s']['median']:.2f}",
            ranged(one["ratio"], ".3f"),
        ]
        for one in found
    ]
    publish(
        "overhead",
        "Overhead of a round",
        "FedIT rounds (dispatch, training, encoding, byte count, guard, aggregation, log, checkpoint) of N clients "
        "over the same number of bare PyTorch LoRA steps, in turns in one process, client by client; processor time: "
        f"{options.repeats} runs, from {MANY} clients on 2; medians, ratio with its range. The bare loop, too, has "
        "befit's setting of the C library's memory (below, under Memory).",
        ["backbone", "clients", "rounds", "steps x batch", "bare loop (s)", "befit (s)", "ratio"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
