"""Potara's statistics from one backward pass per batch, against one per sample, and against steps of training.

Both ways take the same adapters, the same M examples and the same running sums, and must agree. They take turns, and
the ratio is of each pair, so that a change of the machine's speed hits both. On one thread of a CPU the seconds are
those of the process, which other processes do not add to. The step of training is one of the federated branch at the
benchmark's batch size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.adapters.model import AdaptedModel
from befit.core.values import ClientInfo, State, Tick
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.tasks.base import Examples
from befit.train.loop import train
from befit.train.paired_fisher import PairedFisher, Statistics, estimate
from befit.train.passes import Pass
from common import host, publish, ranged, spread

SAMPLES = 30
AT = Tick("merge", 1, 1, 0)
SLOTS = ("shared", "personal")
LLAMA: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Case:
    """One backbone with a client on it."""

    name: str
    site: Site


def classifier(kind: str, budget: TrainSettings) -> Case:
    """A client of 40 examples of a real benchmark, on its own pre-trained backbone."""
    where = host(kind, 1, "fedit")
    site = replace(where.site(where.infos[0]), budget=budget)
    names = {"digits": "digits ViT", "minilm": "MiniLM"}
    return Case(names[kind], prepared(site))


def llama(budget: TrainSettings) -> Case:
    """A random language model; 40 texts of 32 to 128 random tokens, half of each to be learnt."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from befit.tasks.causal_lm import CausalLM

    torch.manual_seed(0)
    model = AdaptedModel(LlamaForCausalLM(LlamaConfig(**LLAMA)).eval(), head=False)
    words = {f"w{index}": index for index in range(8)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )
    texts = random_texts()
    site = Site(ClientInfo("client-000", "llama", len(texts)), model, CausalLM(tokenizer), budget, lambda _: texts)
    return Case("Llama, random", prepared(site))


def random_texts(count: int = 40) -> Examples:
    from befit.tasks.examples import PaddedExamples, pad_right

    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, 129, (count,), generator=draw)
    tokens = [torch.randint(2, LLAMA["vocab_size"], (int(n),), generator=draw).tolist() for n in lengths]
    learnt = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in tokens]
    return PaddedExamples({"input_ids": pad_right(tokens, 0), "labels": pad_right(learnt, -100)}, lengths)


def prepared(site: Site) -> Site:
    """With two adapters of random values, as after training: no factor is zero."""
    site.model.install(lora(8, 16.0, slots=SLOTS), seed=0)
    draw = torch.Generator().manual_seed(0)
    values: State = {key: 0.02 * torch.randn(spec.shape, generator=draw) for key, spec in site.model.specs.items()}
    site.model.load(values)
    return site


def by_sample(site: Site) -> PairedFisher:
    """What everybody would write first: a batch of one, a backward pass, and what it leaves at the leaves."""
    examples = site.examples("train")
    generator = torch.Generator().manual_seed(AT.seed_for(site.info.id, "statistics"))
    chosen = torch.randperm(len(examples), generator=generator)[:SAMPLES]
    keys = sorted(key.partition("/")[2] for key in site.model.leaves(slot("shared")))
    keys = [key for key in keys if key.partition("/")[0] in site.model.shapes.targets]
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for key in keys:
        size = site.model.leaves(slot("shared"))[f"shared/{key}"].numel()
        spans[key] = (end, end + size)
        end += size
    moments = PairedFisher(spans, site.model.device)
    for index in chosen:
        batch = site.to_device(examples.batch(index[None]))
        pair = []
        for name in SLOTS:
            site.model.zero_gradients()
            leaves = site.model.leaves(slot(name))
            with site.model.training(False), site.model.active(name), site.model.trainable(slot(name)):
                site.task.sample_losses(site.logits(batch), batch, "mean").sum().backward()
                grads = [leaves[f"{name}/{key}"].grad for key in keys]
                pair.append(torch.cat([grad.flatten() for grad in grads if grad is not None])[None].clone())
        moments.add(*pair)
    return moments


def by_hooks(site: Site) -> PairedFisher:
    return estimate(site, AT, *SLOTS, Statistics(SAMPLES))


def timed(work: Callable[[], Any], site: Site) -> tuple[float, Any]:
    """Seconds and result: of the process on one thread of a CPU, else of the wall."""
    on_gpu = site.model.device.type == "cuda"
    clock = time.process_time if not on_gpu and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    result = work()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, result


def disagreement(one: PairedFisher, other: PairedFisher) -> float:
    """The largest relative difference of a row of sums."""
    assert one.spans == other.spans and one.count == other.count
    return float(((one.sums - other.sums).norm(dim=1) / other.sums.norm(dim=1)).max())


def measure(case: Case, repeats: int, steps: int = 10) -> dict[str, Any]:
    site = case.site
    values = site.model.dump(slot(*SLOTS))
    hooks, loop, step = [], [], []
    worst = 0.0
    for turn in range(repeats + 1):
        fast, found = timed(lambda: by_hooks(site), site)
        slow, expected = timed(lambda: by_sample(site), site)
        worst = max(worst, disagreement(found, expected))
        seconds, _ = timed(lambda: train(site, [Pass(slot("shared"), ("shared",))], AT, steps=steps), site)
        site.model.load(values)  # so that every turn has the same statistics
        if turn:  # the first turn warms up
            hooks.append(fast)
            loop.append(slow)
            step.append(seconds / steps)
    if not worst < 1e-3:
        raise SystemExit(f"{case.name}: the two ways differ by {worst:.1e}")
    return {
        "backbone": case.name,
        "parameters": sum(p.numel() for p in site.model.backbone.parameters()),
        "entries": site.model.count(slot("shared")),
        "samples": SAMPLES,
        "batch_size": site.budget.batch_size,
        "threads": torch.get_num_threads(),
        "device": str(site.model.device),
        "disagreement": worst,
        "hooks_s": spread(hooks),
        "by_sample_s": spread(loop),
        "step_s": spread(step),
        "speedup": spread([slow / fast for fast, slow in zip(hooks, loop, strict=True)]),
        "steps": spread([fast / one for fast, one in zip(hooks, step, strict=True)]),
    }


def cases() -> dict[str, Callable[[], Case]]:
    return {
        "digits": lambda: classifier("digits", TrainSettings(max_steps=5, batch_size=10)),
        "minilm": lambda: classifier("minilm", TrainSettings(max_steps=4, batch_size=8)),
        "llama": lambda: llama(TrainSettings(max_steps=4, batch_size=4)),
    }


def row(one: dict[str, Any]) -> list[str]:
    speedup, steps = one["speedup"], one["steps"]
    return [
        one["backbone"],
        f"{one['parameters'] / 1e6:.2f}",
        f"{1000 * one['hooks_s']['median']:.0f}",
        f"{1000 * one['by_sample_s']['median']:.0f}",
        ranged(speedup, ".1f"),
        f"{1000 * one['step_s']['median']:.0f} (batch {one['batch_size']})",
        ranged(steps, ".1f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbones", nargs="+", choices=list(cases()), default=list(cases()))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="print, and leave the document and its numbers alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = []
    for name in options.backbones:
        found.append(measure(cases()[name](), options.repeats))
        print(found[-1], flush=True)
    if options.dry:
        return
    publish(
        "per_sample",
        "Per-sample statistics",
        f"One client's statistics from {SAMPLES} examples and both adapters, by hooks in one backward pass per batch, "
        "and by one backward pass per sample, in turns. A batch is all examples below ten million parameters, else "
        f"as many as a batch of training. Medians, ratios with their ranges. Threads: {options.threads}; seconds of "
        "the process where that is 1. The Llama's texts have 32 to 128 tokens; padding them to the longest of their "
        "batch adds 25 % to the tokens, which cancels what batches save on a CPU. No GPU was measured. A run takes "
        "(rounds_local + rounds_fedit) x max_steps steps of training per client; the last column gives the cost of "
        "the statistics in such steps.",
        [
            "backbone",
            "parameters (M)",
            "hooks (ms)",
            "one per sample (ms)",
            "times faster",
            "one training step (ms)",
            "statistics in steps",
        ],
        [row(one) for one in found],
        found,
    )


if __name__ == "__main__":
    main()
