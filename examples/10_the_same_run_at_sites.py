"""The same run at sites: two desks with files of their own, a server without data, and frames of bytes between them.

Over a network Flower carries the frames (docs/flower.md); here a link of five lines does, so this runs anywhere.
"""

import tempfile
from pathlib import Path

import torch

import befit
from befit.config.experiment import load_experiment
from befit.flower.at_sites import hello, run_at_sites
from befit.flower.engine import checked
from befit.flower.service import Desk
from befit.flower.site_file import SiteFile
from befit.protocol.store import read_payload

EXPERIMENT = {
    "name": "at-sites",
    "benchmark": {"name": "digits", "clients": 2},
    "method": "fedsa",
    "baselines": [],
    "federation": {"rounds": 3},
}


class Wire:
    """Takes a frame to each client's desk and brings back its answer."""

    def __init__(self, desks):
        self.desks = desks

    def deliver(self, purpose, clients, frame, group):
        for client in clients:
            yield client, self.desks[client].answer(frame(client))


def server_memory(run):
    return read_payload(next((run.path / "state").glob("server.*"))).arrays


with tempfile.TemporaryDirectory() as folder:
    clients = ("client-00", "client-01")
    allowed = {"models": {"digits-vit": "digits-vit"}, "benchmarks": ["digits"]}
    desks = {client: Desk(SiteFile(client, state=f"{folder}/{client}", **allowed)) for client in clients}

    remote = load_experiment({**EXPERIMENT, "engine": {"kind": "flower"}})
    said = {client: checked(desk.answer(hello(remote, "trial")), {})[0] for client, desk in desks.items()}
    there = run_at_sites(remote, Wire(desks), "trial", said, Path(folder) / "there")
    here = befit.run(EXPERIMENT, out=f"{folder}/here")

    one, other = server_memory(there), server_memory(here)
    print("the same server, bit by bit:", all(torch.equal(one[key], other[key]) for key in other))
    for client in clients:
        kept = sorted(path.name for path in (Path(folder) / client / "runs" / "trial" / "fedsa").iterdir())
        print(f"{client} scores {there.results['clients'][client]['accuracy']:.1%} and keeps {', '.join(kept)}")
