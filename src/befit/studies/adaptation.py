"""How fast a model adapts to a task that it has not seen (FedMosaic; specification fedmosaic.md, section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from befit.adapters.keys import Selector, slot
from befit.core.errors import ConfigError
from befit.core.values import Payload, State, Tick
from befit.protocol.site import Site
from befit.train.loop import Pass, train

__all__ = ["AdaptationCurve", "fast_adaptation", "mean_start"]


@dataclass(frozen=True)
class AdaptationCurve:
    """Metrics of the test split by steps of training, from step 0 on."""

    steps: tuple[int, ...]
    metrics: tuple[Mapping[str, float], ...]

    def mean(self, metric: str) -> float:
        """The curve's mean, by which curves are compared."""
        return sum(one[metric] for one in self.metrics) / len(self.metrics)


def fast_adaptation(
    site: Site,
    start: State,
    *,
    name: str = "personal",
    steps: int = 200,
    every: int = 25,
    seed: int = 0,
    trainable: Selector | None = None,
    split: str = "test",
    batch_size: int = 32,
) -> AdaptationCurve:
    """Train slot `name` alone on an unseen task, and score it after 0, every, 2 every, … steps.

    site       of the unseen task, its model with a layout installed that has the slot
    start      arrays of the slot, such as what a federation's clients have on average; nothing for a fresh adapter,
               the paper's "random init"
    trainable  what of the model is trained; the whole slot without

    One optimiser runs through, batches come from the training split. Ends with the model reset. Raises ConfigError for
    steps that are no multiple of `every`.
    """
    if every < 1 or steps < 1 or steps % every:
        raise ConfigError([f"steps: must be a positive multiple of every, got {steps} and {every}"], "fast adaptation")
    model = site.model
    model.reset()
    model.load(start)
    one = Pass(trainable or slot(name), (name,), keep_optimiser=True)
    part, memory, found = replace(site.budget, max_steps=every), Payload(), []
    site = replace(site, budget=part)
    rounds = steps // every
    for number in range(rounds + 1):
        if number:
            memory = train(site, [one], Tick("adapt", number, rounds, seed), memory=memory).memory
        with model.active(name):
            found.append(site.task.evaluate(model.backbone, site.examples(split), batch_size, model.device))
    model.reset()
    return AdaptationCurve(tuple(range(0, steps + 1, every)), tuple(found))


def mean_start(adapters: Sequence[State], weights: Sequence[float] | None = None, name: str = "personal") -> State:
    """Where a newcomer starts: the mean of clients' adapters of its backbone, all in slot `name`, in float32.

    weights  of the adapters; uniform without. By relevance they are those of `newcomer_weights`
    """
    from befit.adapters.state import rename, weighted_mean

    chosen = weighted_mean(adapters, weights if weights is not None else [1.0] * len(adapters))
    return {key: value.to(torch.float32) for key, value in rename(chosen, name).items()}
