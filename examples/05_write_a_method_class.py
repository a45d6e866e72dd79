"""A method with an exchange of its own: each client sends its loss beside its adapter, and counts by it at the server.

With weights `loss_k^q` the clients that are served worst count most, in the spirit of q-FFL (Li et al. 2020).
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import befit
from befit import Exchange, Message, Method, Pass, Payload, Stage, Use, slot

SHARED = slot("shared")


@dataclass(frozen=True)
class ByLoss(Exchange):
    q: float

    def dispatch(self, server, client, at):
        return server

    def client_update(self, client, received, site, at):
        site.model.load(received.arrays)
        report = befit.train_client(site, [Pass(SHARED, active=("shared",))], at)
        return client, Payload(site.model.dump(SHARED), {"loss": report.losses["train"]})

    def aggregate(self, server, updates, site, at):
        weights = [update.payload.number("loss") ** self.q for update in updates]
        return Payload(befit.weighted_mean((update.payload.arrays for update in updates), weights))


@befit.register("by_loss", title="Weighted by loss")
class WeightedByLoss(Method):
    """Average adapters by the clients' losses (up = r(d_in + d_out) per module and one number; down the same)."""

    use = Use(("shared",))

    def __init__(self, rank: int = 8, alpha: float = 16.0, q: float = 1.0):
        self.layout, self.q = befit.lora(rank, alpha), q

    def plan(self):  # what is declared here is all that may travel; the guard refuses everything else
        up = Message(SHARED, numbers=("loss",))
        return [Stage("federate", ByLoss(self.q), up=up, down=Message(SHARED), trains=SHARED)]

    def server_init(self, site):
        return Payload(befit.select_state(site.initial, SHARED))

    def deploy(self, client, received, site):
        return befit.Deployment(received.arrays, ("shared",))


settings = {"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}, "baselines": ["fedit"]}
with tempfile.TemporaryDirectory() as folder:
    run = befit.run({**settings, "method": {"name": "by_loss", "q": 2.0}}, out=Path(folder) / "run")
    for client, row in run.results["clients"].items():
        print(f"{client}: by loss {row['accuracy']:.3f}, by examples {row['baselines']['fedit']:.3f}")
