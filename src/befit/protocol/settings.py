"""What local training may spend, how arrays travel, what the server does about replies that it does not trust, and what
noise hides: the blocks `train`, `wire`, `guard` and `privacy` of a configuration; and what a method within another one
has for itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from befit.core.schema import OPEN_SHARE, POSITIVE, Mark, Rule, at_least, between, within

_CLIP = Rule(lambda value: 1e-6 <= value <= 1e6, "must be from 1e-6 to 1e6", {"minimum": 1e-6, "maximum": 1e6})
_MAJORITY = Rule(lambda value: 0.5 < value <= 1, "must be above 0.5 and at most 1")
_ABOVE_ONE = Rule(lambda value: value > 1, "must be above 1")
_TIMES = Rule(
    lambda value: all(0 < time < math.inf for time in value.values()) if isinstance(value, dict) else 0 <= value <= 10,
    "must be a sigma from 0 to 10, or finite times above 0 by client",
)
_NAMES = Rule(bool, "must name at least one module, or be null for all of them")
SENT = Rule(lambda value: 0 < value <= 0.5, "must be above 0 and at most 0.5")
BETAS = Rule(lambda value: all(0 <= beta < 1 for beta in value), "must both be at least 0 and below 1")


@dataclass(frozen=True)
class TrainSettings:
    """Local training in one round.

    max_steps      mini-batch steps per round
    epochs         passes over a client's own examples per round, in place of max_steps; null: max_steps
    batch_size     examples per step
    micro_batch    most examples that go through the model at once; the gradients of a step's parts add up (gradient
                   accumulation), so that a step is that of the whole batch but for rounding and for what dropout draws.
                   Clients then train one by one, also with engine.fleet; null: the whole batch
    lr             learning rate
    loraplus_ratio  multiple of lr by which every factor B learns (LoRA+, Hayou et al. 2024)
    class_weights  balanced: in training, an example counts by how rare its class is at its client, examples / (classes
                   x examples of the class), as scikit-learn's; none: all alike. For classification
    dpo_beta       of the task preference: how near the model is held to the bare backbone (beta of direct preference
                   optimisation, Rafailov et al. 2023)
    weight_decay   decoupled (adamw) or L2 (sgd)
    optimiser      adamw or sgd
    betas          decay of adamw's two running averages
    momentum       of sgd
    grad_clip      largest gradient norm; 0 does not clip
    schedule       course of the learning rate
    lr_end         where a linear or cosine schedule ends
    schedule_over  stage: once over all rounds of a stage; round: anew in every round, warm-up included
    warmup_steps   steps in which it first rises
    """

    max_steps: Annotated[int, POSITIVE] = 5
    epochs: Annotated[int | None, POSITIVE] = None
    batch_size: Annotated[int, POSITIVE] = 10
    micro_batch: Annotated[int | None, POSITIVE] = None
    lr: Annotated[float, POSITIVE] = 1e-3
    loraplus_ratio: Annotated[float, POSITIVE] = 1.0
    class_weights: Literal["none", "balanced"] = "none"
    dpo_beta: Annotated[float, POSITIVE] = 0.1
    weight_decay: Annotated[float, at_least(0)] = 0.0
    optimiser: Literal["adamw", "sgd"] = "adamw"
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.999)
    momentum: Annotated[float, between(0, 1)] = 0.0
    grad_clip: Annotated[float, at_least(0)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_end: Annotated[float, at_least(0)] = 0.0
    schedule_over: Literal["stage", "round"] = "stage"
    warmup_steps: Annotated[int, at_least(0)] = 0

    def steps_for(self, examples: int) -> int:
        """Steps in a round of a client with so many examples."""
        return self.max_steps if self.epochs is None else self.epochs * max(1, -(-examples // self.batch_size))

    def contradictions(self) -> list[str]:
        """What is wrong with fields beside each other, each with its name first."""
        problems = []
        if self.momentum and self.optimiser != "sgd":
            problems.append(f"momentum: belongs to sgd, but optimiser is {self.optimiser}")
        if self.lr_end and self.schedule == "constant":
            problems.append("lr_end: belongs to a schedule that falls, and schedule is constant")
        elif self.lr_end > self.lr:
            problems.append(f"lr_end: a schedule falls from lr, which is {self.lr:g}, got {self.lr_end:g}")
        if self.schedule_over == "round" and self.epochs is None and self.warmup_steps >= max(1, self.max_steps):
            problems.append(
                f"warmup_steps: {self.warmup_steps} steps of warm-up in every round leave nothing of its "
                f"{self.max_steps} for the schedule (schedule_over)"
            )
        return problems


@dataclass(frozen=True)
class BaseSettings:
    """What a method that another one builds on has for itself, in its block beside its own options.

    rounds   of its stages that would have federation.rounds
    train    what of the run's `train` it has otherwise, such as {lr: 1e-4}: all but the number of steps
    epochs   passes over a client's examples in each of its rounds; null: train.max_steps
    dropout  of its adapters; null: adapter.dropout
    targets  those of the run's target modules that its adapters sit on; null: all of them
    """

    rounds: Annotated[int | None, POSITIVE] = None
    train: dict[str, Any] | None = None
    epochs: Annotated[int | None, POSITIVE, Mark.PASSES] = None
    dropout: Annotated[float | None, between(0, 1)] = None
    targets: Annotated[list[str] | None, _NAMES] = None


@dataclass(frozen=True)
class WireSettings:
    """How arrays travel; they are float32 on both ends. What int8 and top_k leave out of an update, its client adds to
    its next one (docs/wire.md).

    dtype  dtype of floating-point arrays on the way; int8: whatever clients train and both receive and send goes as
           8-bit integers with scales, and all else as float32
    top_k  share of the entries of an update that a client sends, the largest ones, each with its place, in `dtype`;
           null: all. What the server sends stays whole
    """

    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    top_k: Annotated[float | None, SENT] = None

    @property
    def compresses(self) -> bool:
        """Whether clients send changes of what they received, instead of all arrays as they are."""
        return self.dtype == "int8" or self.top_k is not None


@dataclass(frozen=True)
class GuardSettings:
    """What the server does about replies of which some may be wrong or hostile (docs/robust.md).

    An update is a reply minus what the client was sent, slot by slot; arrays that were not sent count from the initial
    adapters. Usual is the median of the norms of a round's updates, where there are at least three of one backbone.

    max_norm_ratio  a reply is refused if its update is longer than this many times the usual; of one or two replies,
                    if longer than this many times the initial adapters, 100 at least
    clip            updates longer than this many times the usual are shortened to that; null: none is
    rule            how updates become one if some of them may be anything: median, trimmed-mean and geometric-median
                    give all clients' replies the centre of the updates; krum and multi-krum leave replies out; none: as
                    the method does
    attackers       f, how many of a round's replies the rule allows for: fewer than half
    """

    max_norm_ratio: Annotated[float, _ABOVE_ONE] = 20.0
    clip: Annotated[float | None, POSITIVE] = None
    rule: Literal["none", "median", "trimmed-mean", "geometric-median", "krum", "multi-krum"] = "none"
    attackers: Annotated[int, at_least(0)] = 1


@dataclass(frozen=True)
class SecureSums:
    """The server learns the sum of a round's updates and no single one (docs/secure_sums.md).

    clip           norm to which a client shortens a longer update before it is hidden
    bits           of a number between -clip and clip, in which updates are added: a mean is exact to clip / 2^bits
    most_examples  where a mean is by examples, a client with more counts as one with this many
    threshold      share of the clients that have to stay to the end of a round, three at least; fewer cannot uncover
                   anything
    """

    clip: Annotated[float, _CLIP]
    bits: Annotated[int, within(8, 32)] = 24
    most_examples: Annotated[int, POSITIVE] = 65536
    threshold: Annotated[float, _MAJORITY] = 0.67


@dataclass(frozen=True)
class Asynchronous:
    """A round ends with the first so many updates, and a slow client holds up nobody (docs/asynchronous.md).

    buffer         updates that make a round, whoever sends them; the other clients of the cohort go on meanwhile, and
                   their updates count in later rounds, by 1 / sqrt(1 + how many rounds later)
    max_staleness  rounds after which an update is not used any more; null: every update is
    times          on one machine, the time that clients take for a round on a simulated clock, which decides who is
                   first: a number is the sigma of log-normal times of median 1, drawn once for each client by
                   federation.seed, and 0.0 gives all the same; or times by pattern of client ids, such as
                   {hospital-b: 4}, and 1 for all others. On Flower the sites' own time counts
    """

    buffer: Annotated[int, POSITIVE]
    max_staleness: Annotated[int | None, at_least(0)] = None
    times: Annotated[float | dict[str, float], _TIMES] = 0.0


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy (docs/privacy.md), by noise whose effect is counted.

    unit              whose presence the noise hides: example, each single training record, by noise that clients add
                      to their gradients; client, each client with all its records, by noise that the server adds to the
                      sum of updates; none: no noise
    epsilon           the most that a method may spend, over all its rounds. Without noise_multiplier the noise is
                      chosen so that they spend it; with it, a run that would spend more is refused
    delta             the probability with which epsilon may not hold: below 1 / (number of examples or clients)
    noise_multiplier  standard deviation of the noise, in multiples of clip; null: what epsilon asks for
    clip              largest norm of one example's gradient, over everything that is trained, or of one client's update
    quantile          of unit client: clip follows the share of updates that are shorter than it, such as 0.5, and its
                      value is where it starts (Andrew et al. 2021); null: it stays
    accountant        pld (privacy loss distribution) or rdp (Rényi), which shows more, sometimes twice as much
    reproducible      draw noise and batches from federation.seed instead of from the system's random numbers: the same
                      numbers in every run, for tests and papers. Whoever knows the seed can take the noise away again,
                      so it protects nobody
    """

    unit: Literal["none", "example", "client"] = "none"
    epsilon: Annotated[float | None, POSITIVE] = None
    delta: Annotated[float | None, OPEN_SHARE] = None
    noise_multiplier: Annotated[float | None, POSITIVE] = None
    clip: Annotated[float, _CLIP] = 1.0
    quantile: Annotated[float | None, OPEN_SHARE] = None
    accountant: Literal["pld", "rdp"] = "pld"
    reproducible: bool = False

    def contradictions(self) -> list[str]:
        """What is wrong with fields beside each other, each with its name first."""
        if self.unit == "none":
            names = [name for name in ("epsilon", "delta", "noise_multiplier") if getattr(self, name) is not None]
            return [f"{name}: has no effect with privacy.unit none; set it to example or client" for name in names[:1]]
        problems = []
        if self.epsilon is None and self.noise_multiplier is None:
            problems.append("epsilon: is required, or noise_multiplier")
        if self.delta is None:
            problems.append("delta: is required, such as 1e-5")
        if self.quantile is not None and self.unit == "example":
            problems.append("quantile: belongs to unit client, whose clip can follow the updates")
        return problems
