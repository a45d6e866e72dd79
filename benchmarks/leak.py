"""What one round's update of a LoRA adapter tells a server that knows the model and a list of all that records may say.

The records are names of languages, places, currencies and scripts, of which Unicode's list is public; the server wants
to know which of a client's were trained on, and of which classes. It takes the gradient of every name itself, and
takes those that explain the update best (ridge regression: an update of one step is a sum of gradients); classes it
reads off the gradient of the head's bias (Zhao et al. 2020; Wainakh et al. 2022).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.keys import slot
from befit.config.load import load_experiment
from befit.core.chance import Chance
from befit.core.values import Tick
from befit.protocol.accountant import Release, noise_for
from befit.protocol.mechanism import Mechanism
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.protocol.stage import Gradients
from befit.runs.host import Host
from befit.tasks.base import Batch, Examples
from befit.train.loop import train
from befit.train.passes import Pass
from befit.train.persample import sample_gradients
from common import HERE, publish

STEP = [Pass(slot("shared"), ("shared",))]
SETTINGS: dict[str, Any] = {
    "benchmark": {"name": "names", "languages": ["fr"], "clients_per_language": 1},
    "model": {"id": "names-bert-fl", "max_length": 64, "device": "cpu"},
    "adapter": {"targets": ["all"]},
}
LR, CLIP, DELTA = 0.1, 1.0, 1e-5
RUN = 100  # steps, 20 rounds of 5, that an epsilon is for
CHANCE = "_by_chance"
BIAS = "shared/classifier/bias"


@dataclass(frozen=True)
class Case:
    """How a client trains.

    records  that it trains on in the round; with an epsilon, how many are expected
    steps    in which it goes through them, once
    sites    whose updates the server gets the mean of
    epsilon  of a run of `RUN` such steps; None: without noise
    """

    records: int
    steps: int = 1
    optimiser: Literal["sgd", "adamw"] = "sgd"
    sites: int = 1
    epsilon: float | None = None

    @property
    def text(self) -> list[str]:
        how = "AdamW" if self.optimiser == "adamw" else "SGD"
        protected = "nothing" if self.epsilon is None else f"noise, epsilon {self.epsilon:g}"
        return [str(self.records), str(self.steps), how, f"a sum of {self.sites}" if self.sites > 1 else protected]


CASES = [
    Case(1),
    Case(1, optimiser="adamw"),
    Case(8),
    Case(8, optimiser="adamw"),
    Case(32),
    Case(32, steps=8),
    Case(8, sites=5),
    Case(8, epsilon=8),
    Case(8, epsilon=3),
    Case(8, epsilon=1),
]


@dataclass(frozen=True)
class Some:
    """A few of a client's records."""

    whole: Examples
    places: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        return self.whole.batch(self.places[torch.as_tensor(indices)])


class Server:
    """Knows the model, where training starts, and the list of names with their classes."""

    def __init__(self, site: Site) -> None:
        self.site, names = site, site.examples("train")
        batch = names.batch(range(len(names)))
        self.labels, self.start = batch["labels"], site.model.dump(slot("shared"))
        found = sample_gradients(site, batch, "shared")
        self.gradients = F.normalize(torch.cat([found[key].flatten(1) for key in self.start], 1))
        self.products = self.gradients @ self.gradients.T
        with torch.no_grad():
            self.guess = site.logits(batch).softmax(-1).mean(0)

    def names(self, update: dict[str, Tensor], count: int) -> list[int]:
        """So many names that explain the update best; of one record, that with the likest gradient."""
        likeness = self.gradients @ -torch.cat([update[key].flatten() for key in self.start])
        if count > 1:
            likeness = torch.linalg.solve(self.products + 0.01 * torch.eye(len(likeness)), likeness)
        return likeness.argsort(descending=True)[:count].tolist()

    def classes(self, update: dict[str, Tensor], scale: float, count: int) -> Tensor:
        """How many of so many records are of each class: the gradient of the bias is the mean of what the model says
        minus what is right."""
        return shared_out(self.guess + update[BIAS] * scale, count)


def shared_out(shares: Tensor, count: int) -> Tensor:
    """Whole numbers that add up to `count`, as near to the shares as can be.

    >>> shared_out(torch.tensor([0.55, -0.2, 0.45]), 4)
    tensor([2., 0., 2.])
    """
    wanted = shares.clamp(min=0) / shares.clamp(min=1e-9).sum() * count
    whole = wanted.floor()
    for place in (wanted - whole).argsort(descending=True)[: count - int(whole.sum())].tolist():
        whole[place] += 1
    return whole


def trained(site: Site, server: Server, places: Tensor, case: Case, seed: int) -> dict[str, Tensor]:
    """What a client's round changes that has these records, as the library trains."""
    budget = TrainSettings(
        max_steps=case.steps, batch_size=max(1, len(places) // case.steps), lr=LR, optimiser=case.optimiser
    )
    mine = replace(site, budget=budget, examples=lambda split: Some(server.site.examples("train"), places))
    return moved(mine, server, seed)


def moved(site: Site, server: Server, seed: int) -> dict[str, Tensor]:
    site.model.load(server.start)
    torch.manual_seed(seed)
    train(site, STEP, Tick("federate", 1, 1, seed))
    after = site.model.dump(slot("shared"))
    return {key: after[key] - server.start[key] for key in after}


def hidden(site: Site, server: Server, case: Case, noise: float, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The records that a private step draws, and what it changes."""

    def mechanism() -> Mechanism:
        rate = case.records / len(server.labels)
        return Mechanism(noise, CLIP, rate, Chance(seed.to_bytes(8, "big")), site.examples, Gradients(), left=1)

    budget = TrainSettings(max_steps=1, batch_size=case.records, lr=LR, optimiser=case.optimiser)
    (places,) = mechanism().batches(1)
    return places, moved(replace(site, budget=budget, mechanism=mechanism()), server, seed)


def trial(site: Site, server: Server, case: Case, noise: float, seed: int) -> dict[str, float] | None:
    """Shares of a client's records whose names and classes the server has right; None of a step without records."""
    everybody = len(server.labels)
    draw = torch.Generator().manual_seed(seed)
    if case.epsilon is not None:
        places, update = hidden(site, server, case, noise, seed)
    else:
        order = torch.randperm(everybody, generator=draw)[: case.records * case.sites].split(case.records)
        places, updates = order[0], [trained(site, server, each, case, seed + n) for n, each in enumerate(order)]
        update = {key: torch.stack([each[key] for each in updates]).mean(0) for key in updates[0]}
    if not (count := len(places)):
        return None
    truly = F.one_hot(server.labels[places], len(server.guess)).sum(0)
    # AdamW's first step is as long whatever the gradient, so only its direction says something.
    scale = 1 / (LR * case.steps) * (count / case.records if case.epsilon is None else case.records / count)
    usual = shared_out(torch.bincount(server.labels, minlength=len(server.guess)).float(), count)
    return {
        "names": len({*server.names(update, count)} & {*places.tolist()}) / count,
        "classes": float(torch.minimum(server.classes(update, scale, count), truly).sum()) / count,
        "names_by_chance": count / everybody,
        "classes_by_chance": float(torch.minimum(usual, truly).sum()) / count,
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    """The mean, and a 95 % interval of it (normal, over draws)."""
    found = torch.tensor(values)
    half = 1.96 * float(found.std()) / math.sqrt(len(values))
    return {"mean": float(found.mean()), "low": float(found.mean()) - half, "high": float(found.mean()) + half}


def measure(case: Case, draws: int, site: Site, server: Server) -> dict[str, Any]:
    noise = 0.0
    if case.epsilon is not None:
        release = Release(case.records / len(server.labels), 1.0, RUN)
        noise = noise_for((release,), case.epsilon, DELTA)
    found = [one for seed in range(draws) if (one := trial(site, server, case, noise, 100 * seed)) is not None]
    numbers = {name: interval([one[name] for one in found]) for name in found[0]}
    return {**case.__dict__, "noise_multiplier": noise, "draws": len(found), "list": len(server.labels), **numbers}


def client(seed: int = 0) -> Site:
    """The one client of French names, with the adapter that a run begins with."""
    host = Host(load_experiment({**SETTINGS, "method": "fedit", "baselines": [], "federation": {"seed": seed}}))
    host.install(host.build("fedit"))
    return host.site(host.infos[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--dry", action="store_true", help="print, and leave the document and its numbers alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    site = client()
    server, data = Server(site), list[dict[str, Any]]()
    for case in CASES:
        data.append(measure(case, options.draws, site, server))
        print(data[-1], flush=True)
    if not options.dry:
        told(data, options.draws)


def told(data: Sequence[dict[str, Any]], draws: int) -> None:
    rows = [
        [*case.text, *(f(one[what + by]) for what in ("names", "classes") for f, by in ((shown, ""), (mean, CHANCE)))]
        for case, one in zip(CASES, data, strict=True)
    ]
    publish(
        "leak",
        "What an update tells",
        f"The first round of FedIT (rank 8, all projections and the head) at a client of French names, seen by a "
        f"server that knows the model and the list of all {data[0]['list']} names with their classes. *Names*: the "
        "server picks as many names as the round has records; the share of the records among them. *Classes*: share "
        "of the records whose class the server counts right. *By chance*: what the list alone gives. Means of "
        f"{draws} draws with 95 % intervals. Epsilon is for {RUN} such steps, of which the server sees "
        f"one; clip {CLIP:g}, delta {DELTA:g}. For a sum, the server looks for the names and classes of one site.",
        ["records", "steps", "optimiser", "protected by", "names", "by chance", "classes", "by chance"],
        rows,
        data,
        HERE.parent / "docs" / "privacy.md",
    )


def mean(one: dict[str, float]) -> str:
    return f"{one['mean']:.1%}"


def shown(one: dict[str, float]) -> str:
    return f"**{one['mean']:.0%}** ({max(0.0, one['low']):.0%}-{min(1.0, one['high']):.0%})"


if __name__ == "__main__":
    main()
