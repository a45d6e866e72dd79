"""BayesTune-LoRA by itself (Kim and Hospedales 2023; FedP2EFT's ablation): each client learns its own ranks, alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from befit.adapters.bayestune import BUDGETED
from befit.methods.parts.budget.personal import WEIGHTS, few_steps
from befit.methods.parts.budget.stages import ByScales, FineTune, SearchAlone
from befit.protocol.context import Context, Problem
from befit.protocol.registry import register
from befit.protocol.stage import Stage
from befit.protocol.work import Work


@register("bayestune", title="BayesTune-LoRA", paper="arXiv:2502.04387", year=2025)
@dataclass(frozen=True)
class BayesTune(ByScales):
    """Learn alone which ranks of which modules matter, keep a budget's worth of them, and train those afresh.

    rank           r of the budget: r L ranks for L target modules, anywhere in the model
    budgets        further values of r, trained and scored beside `rank` from the same scales
    rank_max       largest r that is meant; scales are learnt for 2 rank_max ranks per module
    parameters     the client's own limit in trained numbers of A and B, in place of rank
    megabytes      the same limit in 10^6 bytes of float32
    limits         budgets of single clients: the first pattern of ids that fits, with rank, parameters or megabytes
    base           the method whose result is personalised: {name: fedit, rounds: 100, train: {lr: 5e-5}}; null: none
    scale          s of delta = s B diag(lambda) A, whatever rank a module ends with
    epochs         passes over the client's examples, in the search and in the training; null: by train.max_steps
    rounds_search  how many times train.max_steps the search takes, without epochs
    search         how the scales of the ranks are searched, see `ScaleSearch`
    preset         "parity" does what the released code does where it differs

    Search: `loss + alpha_s / N sum_lk |B_l[:,k]|_1 / lambda_lk + alpha_p / N sum_lk (log lambda_lk + 100 lambda_lk)`
    with lambda clamped to [1e-4, 1000]; then the r L largest lambda are kept and frozen, and A and B start again.
    up = down = what the base method sends, no more.

    Source: Lee et al. 2025a, eqs. 1 to 5; docs/methods/bayestune.md.
    """

    rounds_search: int = 1

    def __post_init__(self) -> None:
        self.prepare_with("bayestune")

    def own_stages(self) -> list[Stage]:
        # The released code clamps the scales here, and only here.
        parity = self.preset == "parity"
        how = self.search.make(accumulate=parity, precision=torch.bfloat16 if parity else torch.float32)
        return [
            SearchAlone(how, self.epochs, self.rounds_search).stage(),
            FineTune(self.kept, self.epochs).stage(),
        ]

    def check(self, context: Context) -> list[Problem]:
        return [
            *super().check(context),
            *few_steps(context, self.epochs, self.rounds_search),
        ]

    def work(self) -> tuple[Work, ...]:
        return (Work((BUDGETED,), WEIGHTS),)
