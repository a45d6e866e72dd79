"""What a GPU makes of it: a round of sixteen clients on a Llama of Llama-3.2-1B's shape, the demo, the offline suites.

The round is that of FedIT at the clients alone: their memories, training and replies, for texts of 256 tokens, one
client after the other, operation by operation and as captured graphs, and all at once. Weights are random, which
changes no time. Seconds are the wall's, until the device has done its work; memory is the most that was allocated on
it. A run of a configuration is measured whole, in a process of its own: on the GPU with nothing else on it, and on the
CPU beside it, where befit computes on one thread with models below ten million parameters, as all of these are.

It publishes where there is a GPU. `--small` tries everything with a tiny model on whatever device there is, and
publishes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from befit.adapters.keys import EVERYTHING
from befit.config.load import load_experiment
from befit.core.values import Payload, Tick
from befit.protocol import serve as desk
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.site import ServerSite, Site
from befit.protocol.store import ClientStore
from befit.runs.runner import run
from befit.train import replay
from common import HERE, peak_mib, publish, ranged, spread
from random_llama import sites

ONE_B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
ROUNDS = ("16x256", "4x256", "16x64", "16x1024")
FLEET = 64  # clients at most: all of every suite
SUITES = ("scanners", "digits-fedit", "names-bert", "skills-fedit", "digits-vqa-fedit")
Way = Callable[[Any, Sequence[Site], ClientStore, Sequence[Payload], Tick], None]


def one_by_one(method: Any, clients: Sequence[Site], store: ClientStore, sent: Sequence[Payload], at: Tick) -> None:
    for site, received in zip(clients, sent, strict=True):
        desk.serve(method, site, store, received, at)


def uncaptured(method: Any, clients: Sequence[Site], store: ClientStore, sent: Sequence[Payload], at: Tick) -> None:
    with patch.object(replay, "recorder", lambda device: None):
        one_by_one(method, clients, store, sent, at)


def all_at_once(method: Any, clients: Sequence[Site], store: ClientStore, sent: Sequence[Payload], at: Tick) -> None:
    replies = desk.serve_together(method, list(zip(clients, sent, strict=True)), store, at)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply


WAYS: dict[str, Way] = {"one by one": uncaptured, "one by one, captured": one_by_one, "all at once": all_at_once}


def round_of_clients(
    clients: int, tokens: int, steps: int, repeats: int, shape: dict[str, Any], device: str, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Every way in turns: seconds of a training step of all clients, tokens a second, and memory."""
    made = sites(clients, TrainSettings(max_steps=steps, batch_size=1), tokens, tokens // 8, shape, device, dtype)
    method, model = build_method("fedit"), made[0].model
    model.install(method.layout, 0)
    model.reset()
    infos = tuple(site.info for site in made)
    server = method.server_init(ServerSite({"llama": model.dump(EVERYTHING)}, infos))
    at, exchange = Tick("federate", 1, 1, 0), method.plan()[0].exchange
    sent = [Payload(exchange.dispatch(server, info, at).arrays) for info in infos]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for turn in range(repeats + 1):
        for name, way in WAYS.items():
            reset_peak(device)
            began = now(device)
            way(method, made, ClientStore(None), sent, at)
            seconds = (now(device) - began) / steps
            if turn:  # the first turn warms up, and captures
                found[name].append({"seconds": seconds, "peak_mib": peak(device)})
    return [
        {
            "way": name,
            "clients": clients,
            "tokens": tokens,
            "step_s": spread([one["seconds"] for one in turns]),
            "tokens_s": clients * tokens / spread([one["seconds"] for one in turns])["median"],
            "speed-up": spread([a["seconds"] / b["seconds"] for a, b in zip(found["one by one"], turns, strict=True)]),
            "peak_mib": max(one["peak_mib"] for one in turns),
        }
        for name, turns in found.items()
    ]


def suite(name: str, device: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds of a whole run of a configuration, start-up apart, the mean that it is scored at, and its fleets."""
    experiment = load_experiment(HERE.parent / "configs" / f"{name}.yaml", [*changes, f"model.device={device}"])
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = run(experiment, out=Path(folder) / "run")
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "mean": done.results["summary"]["mean"], "fleet": experiment.engine.fleet}


def suites(names: Sequence[str]) -> list[dict[str, Any]]:
    """All on two cores of the CPU each at once, and beside them one after the other on the GPU, one by one and with
    fleets; where there are too few cores for that, first one after the other on the CPU."""
    cores = sorted(os.sched_getaffinity(0))
    enough = len(cores) > 2 * len(names)
    mine = cores[2 * len(names) :] if enough else cores
    started: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    try:
        for place, name in enumerate(names):
            own = cores[2 * place : 2 * place + 2] if enough else cores[:2]
            started[name] = _started(name, "cpu", own, "engine.fleet=1")
            if not enough:
                found[name]["cpu"] = _ended(started[name])
        for name in names:
            for way, fleet in (("gpu", 1), ("fleets", FLEET)):
                started[f"{name} {way}"] = _started(name, "cuda", mine, f"engine.fleet={fleet}")
                found[name][way] = _ended(started[f"{name} {way}"])
        for name in names:
            if enough:
                found[name]["cpu"] = _ended(started[name])
    finally:
        for process in started.values():
            process.kill()
    return [{"suite": name, **found[name]} for name in names]


def _started(name: str, device: str, cores: Sequence[int], *changes: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--cores", ",".join(map(str, cores)), "--suite", name, device, *changes]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    said = process.communicate()[0]
    if process.returncode:
        sys.exit(f"{' '.join(map(str, process.args[2:]))} failed")  # type: ignore[index]
    found = json.loads(said.splitlines()[-1])
    print(*process.args[5:], found, file=sys.stderr, flush=True)  # type: ignore[index]
    return found


def fleets(size: int | str) -> str:
    return "" if size == 1 else f", `engine.fleet: {size}`"


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float:
    return peak_mib() if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a trial on any device; publishes nothing")
    parser.add_argument("--rounds", nargs="*", default=ROUNDS, help="clients x tokens, such as 16x256")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--suites", nargs="*", default=SUITES)
    parser.add_argument("--suite", nargs="+", metavar="NAME DEVICE [KEY=VALUE]", help="one run of one, told as JSON")
    parser.add_argument("--cores", help="for --suite: those to stay on, such as 0,1")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, [int(core) for core in options.cores.split(",")])
    if options.suite:
        name, device, *changes = options.suite
        print(json.dumps(suite(name, device, changes)))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.small:
        tried = round_of_clients(3, 16, 1, 1, TINY, device, torch.bfloat16)
        small = ["federation.rounds=1", "train.max_steps=1", "evaluate.every=0"]
        print({"device": device, "round": tried, "suite": suite("digits-fedit", device, small)})
        return
    if device == "cpu":
        sys.exit("There is no GPU here, so nothing is measured and nothing is published; --small tries the script.")
    rounds = []
    for words in options.rounds:
        clients, tokens = map(int, words.split("x"))
        rounds += round_of_clients(clients, tokens, options.steps, options.repeats, ONE_B, device, torch.bfloat16)
        print(*rounds[-len(WAYS) :], sep="\n", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    measured = suites(options.suites)
    tell(torch.cuda.get_device_name(), torch.__version__, options.steps, options.repeats, rounds, measured)


def tell(
    name: str, version: str, steps: int, repeats: int, rounds: list[dict[str, Any]], measured: list[dict[str, Any]]
) -> None:
    """Publish what was measured, on a GPU of this name with this version of PyTorch."""
    rows = [
        [
            f"{one['clients']} clients x {one['tokens']} tokens, {one['way']}",
            f"{1e3 * one['step_s']['median']:.0f} ms a step of all",
            ranged(one["speed-up"]),
            f"{one['tokens_s']:,.0f}",
            ""
            if "captured" in one["way"]
            else f"{one['peak_mib']:,.0f}",  # what graphs hold is not counted as allocated
            "",
        ]
        for one in rounds
    ]
    rows += [
        [
            f"configs/{one['suite']}.yaml{', CPU' if key == 'cpu' else ''}{fleets(one[key]['fleet'])}",
            f"{one[key]['seconds']:.0f} s",
            "" if key == "cpu" else f"**{one['cpu']['seconds'] / one[key]['seconds']:.2f}**",
            "",
            "",
            f"{100 * one[key]['mean']:.2f} %",
        ]
        for one in measured
        for key in ("cpu", "gpu", "fleets")
        if key in one
    ]
    publish(
        "gpu",
        "On a GPU",
        f"{name}, PyTorch {version}. First a round of FedIT at the clients: {steps} steps of one text each, "
        "Llama-3.2-1B's shape with random weights in bfloat16, rank 8 on q_proj and v_proj, an eighth of the tokens "
        f"learnt. Time is that of the round over its steps; medians of {repeats} turns after one that warms up and "
        "captures, speed-up over one by one with its range. Memory is the most that was allocated on the GPU, which "
        "does not count what graphs hold. Then whole runs of configurations, each once, without starting Python: "
        "speed-up is over the CPU of the same machine, on one thread, which is what befit uses with models below ten "
        "million parameters; the last column is the mean score of the run's method.",
        ["what", "time", "speed-up", "tokens a second", "memory (MiB)", "score"],
        rows,
        {"gpu": name, "torch": version, "steps": steps, "repeats": repeats, "round": rounds, "suites": measured},
    )


if __name__ == "__main__":
    main()
