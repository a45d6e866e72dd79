"""When a run asks whom, and how many replies a round needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from befit.core.seeds import derive_seed
from befit.core.shares import rounded_up
from befit.core.values import ClientInfo, Tick
from befit.protocol.client_privacy import ClientPlan
from befit.protocol.method import Method, run_stages
from befit.protocol.settings import Asynchronous, GuardSettings, SecureSums
from befit.protocol.stage import Stage


@dataclass(frozen=True)
class Schedule:
    """What the configuration says about when: see `befit.config.experiment` for the fields' meaning.

    clients  how the server hides who took part; None where it does not
    """

    rounds: int
    seed: int = 0
    cohort: int | None = None
    min_replies: int | float = 0.5
    evaluate_every: int = 0
    split: str = "test"
    guard: GuardSettings = field(default_factory=GuardSettings)
    max_weight: float | None = None
    secure_sums: SecureSums | None = None
    spool_bytes: int = 2**22
    most_rounds: int | None = None
    patience: int | None = None
    clients: ClientPlan | None = None
    asynchronous: Asynchronous | None = None


def sample_cohort(clients: Sequence[ClientInfo], size: int | None, at: Tick) -> list[ClientInfo]:
    """`size` clients without replacement, by a seed of this round, in their own order; None takes all."""
    if size is None or size >= len(clients):
        return list(clients)
    generator = torch.Generator().manual_seed(derive_seed(at.seed, "cohort", at.stage, at.round))
    chosen = torch.randperm(len(clients), generator=generator)[:size].tolist()
    return [clients[index] for index in sorted(chosen)]


def replies_of(clients: int, cohort: int | None, asynchronous: Asynchronous | None) -> int:
    """How many replies a round of so many clients waits for: those of its cohort, or the first so many."""
    return min(clients, cohort or clients, clients if asynchronous is None else asynchronous.buffer)


def required_replies(wanted: int | float, cohort: int) -> int:
    """A whole number counts replies; a fraction is a share of the cohort, rounded up. At least one, and never more than
    the cohort has: of nobody, none.

    >>> required_replies(0.5, 5), required_replies(2, 5), required_replies(0.55, 100), required_replies(0.5, 0)
    (3, 2, 55, 0)
    """
    count = wanted if isinstance(wanted, int) else rounded_up(wanted, cohort)
    return min(max(1, count), cohort)


def resolved_stages(method: Method, rounds: int, most: int | None = None) -> list[Stage]:
    """The method's plan with every number of rounds filled in, none above `most`.

    Raises ValueError for two stages of one name.
    """
    with_rounds = [(stage, stage_rounds(stage, rounds)) for stage in run_stages(method)]
    stages = [replace(stage, rounds=count if most is None else min(count, most)) for stage, count in with_rounds]
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise ValueError(f"the stages of a plan need names of their own, got {', '.join(names)}")
    return stages


def stage_rounds(stage: Stage, default: int) -> int:
    return default if stage.rounds is None else stage.rounds
