"""What a gradient sketch tells whoever receives it: the server compares it with sketches of records that it has itself.

The frozen model is everybody's, so a server can take the same gradient of any text. Here it does so for public records
of the digits questions, and names the client's by the nearest (cosine): the answer and the question of one record; and
of an upload of several records, how many of the five nearest ask what the client asks, beside five random ones.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.config.load import load_experiment
from befit.data.federation import Record
from befit.methods.parts.mosaic.mixing import Relevance
from befit.methods.parts.mosaic.sketch import Sketch, last_gradient
from befit.runs.host import Host
from befit.tasks.base import Examples
from common import HERE, publish, ranged, spread

NEAREST = 5


class Server:
    """Knows the frozen model, which entries travel, and public records."""

    def __init__(self, host: Host, sketch: Sketch, public: int, seed: int) -> None:
        self.host, self.sketch, self.seed = host, sketch, seed
        assert host.common is not None
        records = host.federation.public
        chosen = torch.randperm(len(records), generator=generator(seed, 1))[:public].tolist()
        examples = host.common.task.prepare(records)
        self.records = [records[place] for place in chosen]
        self.sketches = torch.stack([self.take(examples, [place]) for place in chosen])

    def take(self, examples: Examples, places: list[int]) -> Tensor:
        """The entries that travel of one batch's gradient."""
        assert self.host.common is not None
        batch = examples.batch(torch.tensor(places))
        return self.sketch.take(last_gradient(self.host.common, batch), self.seed)

    def nearest(self, sketch: Tensor) -> list[Record]:
        """The public records whose gradients are most like this one."""
        cosines = F.cosine_similarity(self.sketches, sketch[None])
        return [self.records[place] for place in cosines.argsort(descending=True)[:NEAREST].tolist()]


def generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**31)


def question(record: Record) -> str:
    return str(record["conversation"][0]["content"])


def answer(record: Record) -> str:
    return str(record["conversation"][1]["content"])


def trial(
    host: Host, noise: float, batches: int, batch_size: int, uploads: int, public: int, seed: int
) -> dict[str, float]:
    """Shares over `uploads` uploads of clients in turn, each the mean over batches of one of its tasks."""
    assert host.common is not None
    server = Server(host, Sketch(Relevance().share), public, seed)
    draw, counted = generator(seed, 2), dict.fromkeys(("answer", "question", "five", "random"), 0.0)
    for number in range(uploads):
        client = host.federation.clients[number % len(host.federation.clients)]
        examples = host.examples(client.id, "train", host.common)
        first = int(torch.randint(len(client.train), (1,), generator=draw))
        alike = [place for place, record in enumerate(client.train) if record["task"] == client.train[first]["task"]]
        order = torch.randperm(len(alike), generator=draw)[: batches * batch_size].tolist()
        groups = [[alike[place] for place in order[at : at + batch_size]] for at in range(0, len(order), batch_size)]
        taken = torch.stack([server.take(examples, group) for group in groups])
        sent = (taken + noise * torch.randn(taken.shape, generator=draw)).mean(0)
        record, found = client.train[groups[0][0]], server.nearest(sent)
        others = [server.records[place] for place in torch.randperm(public, generator=draw)[:NEAREST].tolist()]
        counted["answer"] += answer(found[0]) == answer(record)
        counted["question"] += question(found[0]) == question(record)
        counted["five"] += sum(question(one) == question(record) for one in found) / NEAREST
        counted["random"] += sum(question(one) == question(record) for one in others) / NEAREST
    answers = [answer(record) for record in server.records]
    common = max(answers.count(text) for text in set(answers)) / len(answers)
    return {**{name: count / uploads for name, count in counted.items()}, "commonest": common}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--uploads", type=int, default=100)
    parser.add_argument("--public", type=int, default=600)
    parser.add_argument("--dry", action="store_true", help="print, and leave the document and its numbers alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    host = Host(load_experiment(str(HERE.parent / "configs" / "digits-vqa-hetero.yaml"), ["method.name=rela"]))
    default = Relevance().noise
    cases = [(default, 1, 1), (10 * default, 1, 1), (100 * default, 1, 1), (default, 1, 4), (default, 10, 4)]
    rows, data = [], []
    for noise, batches, size in cases:
        trials = [trial(host, noise, batches, size, options.uploads, options.public, seed) for seed in options.seeds]
        shares = {name: spread([one[name] for one in trials]) for name in trials[0]}
        data.append({"noise": noise, "batches": batches, "batch_size": size, **shares})
        single = batches * size == 1
        rows.append(
            [
                str(batches * size),
                f"{noise:g}",
                shown(shares["answer"]) if single else "",
                shown(shares["question"]) if single else "",
                shown(shares["five"]),
                shown(shares["random"]),
            ]
        )
        print(rows[-1], shares["commonest"]["median"], flush=True)
    if options.dry:
        return
    publish(
        "sketch_leak",
        "What a gradient sketch tells",
        f"Of {options.uploads} uploads of the digits questions at the defaults of `relevance`: the share for which "
        f"the nearest of {options.public} public records' gradients has the answer, or the question, of the one "
        "record behind the upload; and how many of the five nearest ask the question that the upload's records ask, "
        f"beside five random ones. Medians of {len(options.seeds)} draws, with ranges. "
        f"{data[0]['commonest']['median']:.0%} of the public records have the commonest answer.",
        ["records", "noise", "answer", "question", "five nearest", "five random"],
        rows,
        data,
    )


def shown(share: dict[str, Any]) -> str:
    return ranged(share, ".0%")


if __name__ == "__main__":
    main()
