"""What local training may spend, and how: the block `train` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["TrainSettings"]


@dataclass(frozen=True)
class TrainSettings:
    """Local training in one round.

    max_steps      mini-batch steps per round
    batch_size     examples per step
    lr             learning rate
    weight_decay   decoupled (adamw) or L2 (sgd)
    optimiser      adamw or sgd
    betas          decay of adamw's two running averages
    momentum       of sgd
    grad_clip      largest gradient norm; 0 does not clip
    schedule       course of the learning rate
    schedule_over  stage: once over all rounds of a stage; round: anew in every round, warm-up included
    warmup_steps   steps in which it first rises
    """

    max_steps: int = 5
    batch_size: int = 10
    lr: float = 1e-3
    weight_decay: float = 0.0
    optimiser: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    grad_clip: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_over: Literal["stage", "round"] = "stage"
    warmup_steps: int = 0
