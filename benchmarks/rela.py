"""What relevance-guided aggregation costs: a client over training alone, and a server of many clients.

Client: the same training of one round, with and without the frozen model's gradients, in turns; one adapter trained as
in FedIT; and FedMosaic's training with PQ-LoRA in one block. Server: aggregation of a round from files, and the
downloads of all clients after it; every number of clients in a process of its own. Seconds of the process, on one
thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.methods.parts.mosaic.mosaic import Mosaic
from befit.methods.parts.mosaic.sketch import SKETCH, mean_sketch
from befit.protocol.jobs import finish
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.protocol.site import ServerSite
from befit.protocol.spool import Spool
from befit.protocol.stage import Exchange
from befit.runs.host import Host
from befit.train.loop import train
from common import (
    HERE,
    experiment,
    federation,
    in_fresh_process,
    peak_mib,
    publish,
    random_adapter,
    ranged,
    resident_mib,
    spread,
)

AT = Tick("federate", 1, 10, 0)


def exchange(method: Method) -> Exchange:
    return method.plan()[0].exchange


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def vqa_host(steps: int) -> Host:
    from befit.config.load import load_experiment

    changes = [f"train.max_steps={steps}"]
    return Host(load_experiment(str(HERE.parent / "configs" / "digits-vqa-hetero.yaml"), changes))


def rela(every: int) -> Mosaic:
    method = build_method({"name": "rela", "relevance": {"every": every}})
    assert isinstance(method, Mosaic)
    return method


def fedmosaic(every: int) -> Mosaic:
    """With PQ-LoRA in one block, which the smallest backbones here can spare."""
    method = build_method({"name": "fedmosaic", "blocks": 1, "relevance": {"every": every}})
    assert isinstance(method, Mosaic)
    return method


def client(kind: str, steps: int, every: int, repeats: int) -> dict[str, Any]:
    """The largest backbone's client trains; gradients are of the smallest."""
    if kind == "digits-vqa-hetero":
        where = vqa_host(steps)
    else:
        where = Host(experiment(kind, "rela", train={"max_steps": steps, "batch_size": 4}), federation(kind, 2))
    info = max(where.infos, key=lambda one: where.site(one).model.backbone.num_parameters())  # type: ignore[operator]
    fedit, methods = build_method("fedit"), (rela(every), fedmosaic(every))
    found: dict[str, list[float]] = {"fedit": [], "training": [], "pq_training": [], "gradients": []}
    for turn in range(repeats + 1):
        where.install(fedit)
        site = where.site(info)
        one = {
            "fedit": seconds(lambda site=site: finish(exchange(fedit).client_update(Payload(), Payload(), site, AT)))
        }
        for name, method in zip(("training", "pq_training"), methods, strict=True):
            where.install(method)
            site = where.site(info)
            one[name] = seconds(lambda site=site, method=method: train(site, method.passes, AT, memory=Payload()))
            sketch = method.sketch
            assert sketch is not None
        one["gradients"] = seconds(lambda site=site, sketch=sketch: mean_sketch(site, AT, sketch, every, 1e-4))
        if turn:  # the first warms up
            for name, value in one.items():
                found[name].append(value)
    extra = [g / t for g, t in zip(found["gradients"], found["training"], strict=True)]
    gated, cores = (
        [t / f for t, f in zip(found[name], found["fedit"], strict=True)] for name in ("training", "pq_training")
    )
    return {
        "backbone": kind,
        "steps": steps,
        "every": every,
        "extra": spread(extra),
        "gated": spread(gated),
        "cores": spread(cores),
        **{f"{name}_s": spread(values) for name, values in found.items()},
    }


def adapter(number: int, layers: int, width: int) -> State:
    sketch = torch.randn(10_000, generator=torch.Generator().manual_seed(number))
    return {SKETCH: sketch, **random_adapter(number, "personal", layers, width, width)}


def server(clients: int, layers: int, width: int) -> dict[str, Any]:
    method = build_method("rela")
    infos = tuple(ClientInfo(f"{one:04d}", "llama", 1) for one in range(clients))
    site = ServerSite({"llama": adapter(0, layers, width)}, infos, {}, None)
    memory = method.server_init(site)
    with tempfile.TemporaryDirectory() as folder, Spool(Path(folder) / "spool", 0) as spool:
        for number, info in enumerate(infos):
            spool.add(Update(info, Payload(adapter(number, layers, width))))
        before, began, aggregated, sent = resident_mib(), 0.0, 0.0, 0.0
        for _ in range(2):  # in the second round there are stacks already
            began = time.process_time()
            memory = exchange(method).aggregate(memory, spool.updates(), site, AT)
            aggregated = time.process_time()
            for info in infos:
                exchange(method).dispatch(memory, info, AT)
            sent = time.process_time()
    size = sum(value.nbytes for value in adapter(0, layers, width).values())
    return {
        "clients": clients,
        "adapter_bytes": size,
        "aggregate_s": aggregated - began,
        "downloads_s": sent - aggregated,
        "uploads_mib": clients * size / 2**20,
        "before_mib": before,
        "peak_mib": peak_mib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny shapes, printed and not published")
    parser.add_argument("--servers", action="store_true", help="servers alone; the clients' last numbers stay")
    parser.add_argument("--one", nargs=3, metavar=("CLIENTS", "LAYERS", "WIDTH"), help="one server, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(server(*map(int, options.one))))
        return
    served: list[dict[str, Any]] = []
    for clients in [3, 6] if options.small else options.clients:
        shape = (2, 16) if options.small else (16, 256)
        served.append(in_fresh_process(__file__, "--one", clients, *shape))
    kinds = [("digits", 20)] if options.small else [("digits", 100), ("minilm", 30), ("digits-vqa-hetero", 30)]
    if options.servers:
        trained = json.loads((HERE / "results" / "rela.json").read_text())["data"]["client"]
    else:
        trained = [client(kind, steps, 10, 1 if options.small else options.repeats) for kind, steps in kinds]
    print(trained, served, flush=True)
    if options.small:
        return
    table = [
        [
            one["backbone"],
            str(one["steps"]),
            f"{one['fedit_s']['median']:.2f}",
            f"{one['training_s']['median']:.2f}",
            f"{one['gated']['median']:.2f}",
            f"{one['cores']['median']:.2f}",
            f"{one['gradients_s']['median']:.3f}",
            ranged(one["extra"], ".1%"),
            "",
            "",
            "",
            "",
        ]
        for one in trained
    ]
    table += [
        [
            f"server, {one['clients']} clients of {one['adapter_bytes'] / 1e6:.2f} MB",
            "",
            "",
            "",
            "",
            "",
            "",
            "",
            f"{one['aggregate_s']:.2f}",
            f"{one['downloads_s']:.2f}",
            f"{one['uploads_mib']:.0f}",
            f"{one['peak_mib'] - one['before_mib']:.0f}",
        ]
        for one in served
    ]
    publish(
        "rela",
        "Relevance-guided aggregation",
        "A client's round of RELA, in seconds of the process on one thread: FedIT's training, RELA's training of "
        "both adapters with gates, the same for FedMosaic with one block of PQ-LoRA, and the frozen model's "
        "gradients at every tenth step, with their share of RELA's training (median and range of turns; the "
        "federation of two sizes measures a client with the large model). A server's second round: aggregation from "
        "files, and the downloads of all clients. It keeps the last uploads of all clients, so its memory cannot be "
        "below them; the last column is the memory that both add: those uploads, at most 128 rows of every "
        "mixture, and 64 MiB of gradients.",
        [
            "what",
            "steps",
            "FedIT (s)",
            "training (s)",
            "RELA of FedIT",
            "FedMosaic of FedIT",
            "gradients (s)",
            "extra",
            "aggregation (s)",
            "downloads (s)",
            "uploads (MiB)",
            "memory (MiB)",
        ],
        table,
        {"client": trained, "server": served},
    )


if __name__ == "__main__":
    main()
