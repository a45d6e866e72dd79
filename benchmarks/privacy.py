"""A step of private training against one of plain training, of the same client, in turns.

Both take batches of the same expected size from the same examples; the private one clips every example's gradient and
adds noise. On one thread of a CPU the seconds are those of the process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from befit.adapters.keys import slot
from befit.core.chance import Chance
from befit.core.values import Tick
from befit.protocol.mechanism import Mechanism
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.protocol.stage import Gradients
from befit.train.loop import train
from befit.train.passes import Pass
from common import publish, ranged, spread
from per_sample import Case, classifier, llama, timed

STEPS = 20
AT = Tick("federate", 1, 1, 0)
STEP = [Pass(slot("shared"), ("shared",))]


def cases() -> dict[str, Callable[[], Case]]:
    return {
        "digits": lambda: classifier("digits", TrainSettings(max_steps=STEPS, batch_size=10)),
        "minilm": lambda: classifier("minilm", TrainSettings(max_steps=STEPS, batch_size=8)),
        "llama": lambda: llama(TrainSettings(max_steps=STEPS, batch_size=4)),
    }


def private(site: Site, key: int) -> Site:
    rate = site.budget.batch_size / len(site.examples("train"))
    chance = Chance(key.to_bytes(8, "big"))
    mechanism = Mechanism(1.0, 1.0, rate, chance, site.examples, Gradients(), left=STEPS)
    return replace(site, mechanism=mechanism)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    site, plain, hidden = case.site, [], []
    start = site.model.dump(slot("shared"))

    def one(chosen: Site) -> float:
        site.model.load(start)
        seconds, _ = timed(lambda: train(chosen, STEP, AT), site)
        return seconds / STEPS

    for number in range(repeats + 1):  # the first pair is not counted
        pair = one(site), one(private(site, number))
        if number:
            plain.append(pair[0])
            hidden.append(pair[1])
    return {
        "backbone": case.name,
        "parameters": site.model.parameters_of_backbone,
        "trained": sum(value.numel() for value in start.values()),
        "batch_size": site.budget.batch_size,
        "plain_s": spread(plain),
        "private_s": spread(hidden),
        "ratio": spread([after / before for before, after in zip(plain, hidden, strict=True)]),
    }


def row(one: dict[str, Any]) -> list[str]:
    ratio = one["ratio"]
    return [
        one["backbone"],
        f"{one['parameters'] / 1e6:.2f}",
        f"{one['trained']:,}",
        str(one["batch_size"]),
        f"{1000 * one['plain_s']['median']:.1f}",
        f"{1000 * one['private_s']['median']:.1f}",
        ranged(ratio),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbones", nargs="+", choices=list(cases()), default=list(cases()))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="print, and leave the document and its numbers alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in options.backbones:
        found.append(measure(cases()[name](), options.repeats))
        print(found[-1], flush=True)
    if options.dry:
        return
    publish(
        "privacy",
        "Private training",
        "A step of training one adapter with example-level privacy (per-example gradients clipped, noise, Poisson "
        f"batches), against a plain step on batches of the same expected size; {STEPS} steps of each in turns. "
        "Medians, ratios with their ranges. One thread, seconds of the process. No GPU was measured.",
        ["backbone", "parameters (M)", "trained", "batch", "plain step (ms)", "private step (ms)", "private / plain"],
        [row(one) for one in found],
        found,
    )


if __name__ == "__main__":
    main()
