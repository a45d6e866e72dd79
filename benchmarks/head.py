"""What it saves to ask a language model's head for answer tokens alone, by the size of the vocabulary.

A Llama of random weights and, as it ships, that of the skills. One side is befit's; the other computes the logits of
all tokens and chooses those of the answers, as befit did before. Training steps in turns in one process, on one thread,
in seconds of the process; memory is the peak of a process of its own for each side.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.config.load import load_experiment
from befit.core.values import Tick
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.runs.host import Host
from befit.tasks import answers
from befit.train.loop import train
from befit.train.passes import Pass
from common import HERE, in_fresh_process, peak_mib, publish, ranged, resident_mib, spread
from random_llama import sites

PASS = Pass(slot("shared"), ("shared",))
AT = Tick("federate", 1, 1, 0)
ROWS, TOKENS, ANSWER = 4, 256, 32


def random_site(vocabulary: int, steps: int) -> Site:
    """Four texts of 256 tokens a step, of which the last 32 are learnt."""
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    budget = TrainSettings(max_steps=steps, batch_size=ROWS)
    (site,) = sites(1, budget, TOKENS, ANSWER, {**shape, "vocab_size": vocabulary})
    site.model.install(lora(8, 16.0), 0)
    return site


def skills_site(steps: int) -> Site:
    where = Host(load_experiment(HERE.parent / "configs" / "skills-fedit.yaml", [f"train.max_steps={steps}"]))
    where.model.install(lora(8, 16.0), 0)
    site = where.site(where.infos[0])
    site.examples("train")
    return site


def site_of(kind: str, steps: int) -> Site:
    return skills_site(steps) if kind == "skills" else random_site(int(kind), steps)


@contextmanager
def whole(on: bool, site: Site) -> Iterator[None]:
    """The logits of all tokens: a model that names no head has them chosen behind it."""
    model: Any = site.model.backbone
    if on:
        model.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        if on:
            del model.get_output_embeddings


def steps_s(site: Site, everywhere: bool) -> float:
    site.model.reset()
    with whole(everywhere, site):
        start = time.process_time()
        train(site, [PASS], AT)
        return (time.process_time() - start) / site.budget.max_steps


def measure(kind: str, pairs: int, steps: int) -> dict[str, Any]:
    site = site_of(kind, steps)
    found = []
    for turn in range(pairs + 1):
        one = {"answers_s": steps_s(site, False), "all_s": steps_s(site, True)}
        if turn:  # the first turn warms up
            found.append(one)
    batch = next(iter(site.batches("train", 1, AT)))
    with torch.no_grad(), site.model.active("shared"):
        chosen = site.logits(batch)
        with whole(True, site):
            difference = float((site.logits(batch) - chosen).abs().max())
    memory = [in_fresh_process(__file__, "--one", kind, side) for side in ("answers", "all")]
    return {
        "kind": kind,
        "answers": len(answers.answer_places(batch["labels"])),
        "tokens": batch["input_ids"].numel(),
        "answers_ms": spread([1e3 * one["answers_s"] for one in found]),
        "all_ms": spread([1e3 * one["all_s"] for one in found]),
        "ratio": spread([one["all_s"] / one["answers_s"] for one in found]),
        "answers_mib": memory[0]["growth_mib"],
        "all_mib": memory[1]["growth_mib"],
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["skills", "32000", "128256"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SIDE"), help="measure memory and print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        kind, side = options.one
        site = site_of(kind, 2)
        before = resident_mib()
        steps_s(site, side == "all")
        print(json.dumps({"growth_mib": peak_mib() - before}))
        return
    found = []
    for kind in options.kinds:
        found.append(measure(kind, options.pairs, options.steps if kind != "skills" else 20))
        print(found[-1], file=sys.stderr, flush=True)
    rows = [
        [
            one["kind"] if one["kind"] == "skills" else f"random, {int(one['kind']):,} tokens",
            f"{one['answers']} of {one['tokens']}",
            f"{one['all_ms']['median']:.1f}",
            f"{one['answers_ms']['median']:.1f}",
            ranged(one["ratio"]),
            f"{one['all_mib']:.0f}",
            f"{one['answers_mib']:.0f}",
            "0" if not one["difference"] else f"{one['difference']:.0e}",
        ]
        for one in found
    ]
    publish(
        Path(__file__).stem,
        "The head for answer tokens alone",
        "A training step of a language model that computes the logits of all tokens, and one that computes only "
        "those the loss needs. Milliseconds of the process, one thread, in turns; growth of resident memory in two "
        "steps of a fresh process; the largest difference of a logit.",
        ["model", "answer tokens", "all (ms)", "answers (ms)", "ratio", "all (MiB)", "answers (MiB)", "difference"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
