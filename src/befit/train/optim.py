"""Optimisers and learning-rate schedules from the configuration, and their state as plain arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from befit.adapters.keys import join
from befit.core.values import State, Tick

if TYPE_CHECKING:
    from befit.protocol.settings import TrainSettings

MOMENTS = "optimiser"  # the part of a client's memory that holds them


def make_optimiser(
    parameters: list[nn.Parameter] | list[dict[str, Any]], budget: TrainSettings, on: torch.device | None = None
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD with momentum, on long flat parameters or groups of them.

    AdamW is PyTorch's fused one: one pass over the memory a step, with the same bits for any number of threads.

    on  the device on which steps read their rates, so that a CUDA graph can capture them; None: rates are numbers
    """
    if budget.optimiser == "adamw":
        optimiser: torch.optim.Optimizer = torch.optim.AdamW(
            parameters,
            lr=budget.lr,
            betas=budget.betas,
            weight_decay=budget.weight_decay,
            fused=True,
            capturable=on is not None,
        )
    else:
        fused = None if on is None else True  # the only form that takes its rate from the device
        optimiser = torch.optim.SGD(
            parameters, lr=budget.lr, momentum=budget.momentum, weight_decay=budget.weight_decay, fused=fused
        )
    for group in optimiser.param_groups if on is not None else ():
        group["lr"] = torch.tensor(budget.lr, device=on)
    return optimiser


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step have this learning rate, times each group's `multiple`."""
    for group in optimiser.param_groups:
        now = rate * group["multiple"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(now)
        else:
            group["lr"] = now


def learning_rate(budget: TrainSettings, step: int, at: Tick) -> float:
    """Rate at `step` (from 0) of this round; a schedule runs over all rounds of the stage, with linear warm-up first.

    With `schedule_over: round` every round goes through all of it.

    >>> from befit.config.experiment import TrainSettings
    >>> budget = TrainSettings(lr=1.0, schedule="linear", max_steps=5)
    >>> [learning_rate(budget, step, Tick("federate", 2, 2, 0)) for step in (0, 4)]
    [0.5, 0.1]
    """
    rounds, before = (at.rounds, at.round - 1) if budget.schedule_over == "stage" else (1, 0)
    total = rounds * budget.max_steps
    now = before * budget.max_steps + step
    if now < budget.warmup_steps:
        return budget.lr * (now + 1) / budget.warmup_steps
    if budget.schedule == "constant":
        return budget.lr
    share = (now - budget.warmup_steps) / max(1, total - budget.warmup_steps)  # of the decay that is over
    left = 1 - share if budget.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return round(budget.lr_end + (budget.lr - budget.lr_end) * left, 15)


def dump_moments(optimiser: torch.optim.Optimizer, name: str) -> State:
    """The optimiser's running averages and step counts, as arrays `<name>/<parameter>/<quantity>`."""
    return {
        join(name, str(index), quantity): value.detach().cpu().clone()
        for index, parameter in enumerate(_parameters(optimiser))
        for quantity, value in optimiser.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def load_moments(optimiser: torch.optim.Optimizer, name: str, state: Mapping[str, torch.Tensor]) -> None:
    """Put back what `dump_moments` took; without any, the optimiser starts fresh."""
    prefix, parameters = f"{name}/", _parameters(optimiser)
    for key, value in state.items():
        if key.startswith(prefix):
            _, index, quantity = key.split("/")
            parameter = parameters[int(index)]
            kept = optimiser.state[parameter]
            if quantity in kept:
                kept[quantity].copy_(value)  # where a captured step finds it
            else:
                kept[quantity] = value.clone().to(parameter.device)


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]
