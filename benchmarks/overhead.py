"""How much a federated round costs over the same number of bare PyTorch LoRA steps.

Both sides take N x S steps on the same batches with the same optimiser. The bare loop knows nothing of clients: one
model, one optimiser, no adapter is ever swapped, saved, counted or checked. The two take turns, and the ratio is of
each pair, so that a change of the machine's speed hits both. The bare loop, too, has befit's setting of the C library's
memory (`befit.core.freed_memory`), which comes with the backbone.
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

MANY = 512  # clients, from which on two turns are enough


def bare_steps(where: Host, rounds: int, steps: int, batch_size: int) -> float:
    model, parameters = bare_model(where)
    optimiser = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)
    task = where.task
    start = time.process_time()
    for round_ in range(1, rounds + 1):
        at = Tick("federate", round_, rounds, where.experiment.federation.seed)
        for info in where.infos:
            examples = where.examples(info.id, "train")
            generator = torch.Generator().manual_seed(at.seed_for(info.id, "batches"))
            for indices in shuffled_batches(len(examples), batch_size, steps, generator):
                batch = examples.batch(indices)
                loss = task.loss(task.logits(model, batch), batch)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return time.process_time() - start


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
            _, _, a = federated(where, method, Path(folder) / "run")
        b = bare_steps(where, rounds, steps, batch_size)
        if turn:  # the first turn warms up
            ours.append(a)
            bare.append(b)
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
        "over the same number of bare PyTorch LoRA steps, in turns in one process: "
        f"{options.repeats} turns, from {MANY} clients on 2; medians, ratio with its range. The bare loop, too, has "
        "befit's setting of the C library's memory (below, under Memory).",
        ["backbone", "clients", "rounds", "steps x batch", "bare loop (s)", "befit (s)", "ratio"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
