"""Generating with adapters whose ranks a budget placed, against the same number of ranks placed evenly.

The inference half of FedP2EFT's Table 5: a language model generates with one client's adapter beside its weights, of
LoRA, AdaLoRA, BayesTune-LoRA and FedP2EFT at the same budget. A module that got no rank costs nothing. The adapters are
made here from that client's records; which modules keep ranks is what the search on these records says. Every
measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from befit.config.load import load_experiment
from befit.core.values import Payload, Tick, Update
from befit.protocol.jobs import finish
from befit.protocol.method import Deployment, run_stages
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.runs.host import Host
from befit.runs.loading import load_federation
from common import in_fresh_process, peak_mib, publish, resident_mib, spread

RANKS = (2, 16)
METHODS: dict[str, dict[str, Any]] = {
    "backbone": {},
    "lora": {"name": "lora", "epochs": 2},
    "adalora": {"name": "adalora", "epochs": 2},
    "bayestune": {"name": "bayestune", "epochs": 2},
    "fedp2eft": {"name": "fedp2eft", "epochs": 2, "generator": {"steps": 300}},  # for the ranks to be no ties
}


def make_host(model: str, device: str) -> Host:
    """One client of `skills` and a language model that ships, or another one by its id."""
    settings = load_experiment(
        {
            "benchmark": {"name": "skills"},
            "method": "local",
            "baselines": [],
            "limit": {"clients": 1},
            "model": {"id": model, "device": device},
            "adapter": {"targets": ["all"]},
            "train": {"batch_size": 16, "lr": 1e-3, "grad_clip": 1.0},
        }
    )
    return Host(settings, load_federation(settings))


def adapted(where: Host, block: dict[str, Any]) -> tuple[Site, Deployment]:
    """What the host's client deploys after all stages of a method, each of one round."""
    method, (info, *_) = build_method(block), where.infos
    server = where.install(method)
    site, state, memory = where.site(info), method.server_init(server), method.client_init(where.site(info))
    received = Payload()
    for stage in run_stages(method):
        at = Tick(stage.name, 1, 1, 0)
        received = stage.exchange.dispatch(state, info, at)
        site.model.reset()
        memory, reply = finish(
            stage.exchange.client_update(memory, Payload(received.arrays, received.scalars), site, at)
        )
        if stage.federated:
            state = stage.exchange.aggregate(state, [Update(info, reply)], server, at)
    site.model.reset()
    return site, method.deploy(memory, received, site)


@torch.no_grad()
def generate(site: Site, deployed: Deployment | None, answers: int, tokens: int) -> dict[str, float]:
    """Seconds for each token of a batch, and the peak of memory above what was held before."""
    model, on_gpu = site.model, site.model.device.type == "cuda"
    prompts = torch.full((answers, 64), 5, device=model.device)
    active = nullcontext() if deployed is None else model.using(deployed.arrays, *deployed.slots, mixer=deployed.mixer)
    asked: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(prompts), "pad_token_id": 0}
    with active:
        model.backbone.generate(prompts, max_new_tokens=2, **asked)  # type: ignore[operator]  # to warm up
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:  # what training needed is handed back, or it would be the peak and what generating takes would fit in it
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        before, start = torch.cuda.memory_allocated() / 2**20 if on_gpu else resident_mib(), time.perf_counter()
        model.backbone.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, **asked)  # type: ignore[operator]
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else peak_mib()  # since it was cleared
    return {"milliseconds_a_token": 1000 * seconds / tokens, "before_mib": before, "peak_mib": peak}


def measure(model: str, device: str, name: str, rank: int, answers: int, tokens: int) -> dict[str, Any]:
    where = make_host(model, device)
    site, deployed = adapted(where, {**METHODS["lora" if name == "backbone" else name], "rank": rank})
    scales = {key: value for key, value in deployed.arrays.items() if key.endswith("/lambda")}
    every = len(site.model.shapes.targets)
    modules = sum(bool(value.any()) for value in scales.values()) if scales else every
    used = None if name == "backbone" else deployed
    return {
        "modules": 0 if used is None else modules,
        "of": every,
        **generate(site, used, answers, tokens),
    }


def alone(name: str, rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """What a fresh process measures."""
    asked = ("--model", options.model, "--device", options.device, "--answers", options.answers)
    return in_fresh_process(__file__, "--one", name, rank, *asked, "--tokens", options.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--model", default="skills-llama", help="a language model that ships, a folder or a hub id")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--answers", type=int, default=8, help="answers at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "RANK"), help="measure one process and print JSON")
    options = parser.parse_args()
    if options.one:
        name, rank = options.one
        found = measure(options.model, options.device, name, int(rank), options.answers, options.tokens)
        print(json.dumps(found))
        return
    wanted = [(name, rank) for _ in range(options.repeats) for rank in RANKS for name in METHODS]
    with ThreadPoolExecutor(options.jobs) as pool:
        measured = list(pool.map(lambda one: alone(one[0], one[1], options), wanted))
    rows, data = [], []
    for place in dict.fromkeys(wanted):
        runs = [one for other, one in zip(wanted, measured, strict=True) if other == place]
        times = spread([one["milliseconds_a_token"] for one in runs])
        grown = spread([one["peak_mib"] - one["before_mib"] for one in runs])
        data.append({"method": place[0], "rank": place[1], "runs": runs})
        modules = f"{runs[0]['modules']} of {runs[0]['of']}"
        time_ = f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})"
        rows.append([place[0], str(place[1]), modules, time_, f"{grown['median']:.1f}"])
    publish(
        "p2eft_inference",
        "Generating with ranks under a budget",
        f"{options.answers} answers of {options.tokens} tokens at once with `{options.model}` on {options.device}, "
        "one client's adapter beside the weights: the median time of a token with its range, and how much memory "
        "generating takes. Modules without a rank have no adapter, except with AdaLoRA, whose ranks all stay in "
        "place. `backbone` has no adapter. The paper (Table 5, Llama-3.2-3B on an A100, r = 16, including training "
        "the adapter) has 347 s and 17.9 GB for LoRA, 424 s and 18.8 GB for AdaLoRA, 358 s and 18.3 GB for "
        "BayesTune-LoRA, 401 s and 15.7 GB for FedP2EFT.",
        ["method", "r", "modules with ranks", "ms a token", "growth (MiB)"],
        rows,
        data,
    )


if __name__ == "__main__":
    main()
