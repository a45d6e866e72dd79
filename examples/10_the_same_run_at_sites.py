"""The same run at sites: two services with files of their own, a server without data, and frames of bytes between them.

Over a network Flower carries the frames (docs/flower.md); here a link of five lines does, so this runs anywhere.
"""

import tempfile
from pathlib import Path

import torch

import befit
from befit import flower

EXPERIMENT = {
    "name": "at-sites",
    "benchmark": {"name": "digits", "clients": 2},
    "method": "fedsa",
    "baselines": [],
    "federation": {"rounds": 3},
}


class Wire:
    """Takes a frame to each client's service and brings back its answer."""

    def __init__(self, services):
        self.services = services

    def deliver(self, purpose, clients, frame, group, under_way):
        for client in clients:
            yield client, self.services[client].answer(frame(client))


def server_memory(run):
    return befit.protocol.read_payload(next((run.path / "state").glob("server.*"))).arrays


with tempfile.TemporaryDirectory() as folder:
    clients = ("client-00", "client-01")
    allowed = {"models": {"digits-vit": "digits-vit"}, "benchmarks": ["digits"]}
    sites = [flower.SiteFile(client, state=f"{folder}/{client}", **allowed) for client in clients]
    services = {site.client: flower.SiteService(site) for site in sites}

    remote = befit.load_experiment({**EXPERIMENT, "engine": {"kind": "flower"}})
    question = flower.hello(remote, "trial")
    answers = {client: flower.checked(service.answer(question), {}, "hello")[0] for client, service in services.items()}
    host = flower.RemoteClients(remote, answers).host(list(answers))
    there = flower.run_at_sites(remote, Wire(services), "trial", host, Path(folder) / "there")
    here = befit.run(EXPERIMENT, out=f"{folder}/here")

    remote_memory, local_memory = server_memory(there), server_memory(here)
    same = all(torch.equal(remote_memory[key], local_memory[key]) for key in local_memory)
    print("the same server, bit by bit:", same)
    for client in clients:
        kept = sorted(path.name for path in (Path(folder) / client / "runs" / "trial" / "fedsa").iterdir())
        print(f"{client} scores {there.results['clients'][client]['accuracy']:.1%} and keeps {', '.join(kept)}")
