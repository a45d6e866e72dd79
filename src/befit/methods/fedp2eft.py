"""FedP2EFT (Lee et al. 2025a): the federation learns to say which ranks a client should get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from befit.adapters.bayestune import BUDGETED, SCALES
from befit.adapters.keys import select, slot
from befit.adapters.state import weighted_mean
from befit.core.values import ClientInfo, ClientWeights, Payload, Tick, Update
from befit.merge.clients import counts_of
from befit.methods.parts.budget.base import (
    base_slots,
    load_base,
    with_base,
)
from befit.methods.parts.budget.generator import GENERATOR, Generator, GeneratorTraining, fit, generate
from befit.methods.parts.budget.personal import WEIGHTS, few_steps, steps_for
from befit.methods.parts.budget.search import Search, searching
from befit.methods.parts.budget.stages import (
    ByScales,
    FineTune,
    Predict,
    features_of,
    generator_of,
    load_scales,
)
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps, Updated
from befit.protocol.registry import register
from befit.protocol.site import ServerSite, Site
from befit.protocol.stage import Exchange, Message, Stage
from befit.protocol.work import Work


@register("fedp2eft", title="FedP2EFT", paper="arXiv:2502.04387", year=2025)
@dataclass(frozen=True)
class FedP2EFT(ByScales):
    """Federate a generator of rank scales; each client then keeps a budget's worth of its own and trains those.

    rank             r of the budget: r L ranks for L target modules, anywhere in the model
    budgets          further values of r, trained and scored beside `rank` from the same scales
    rank_max         largest r that is meant; scales are learnt for 2 rank_max ranks per module
    parameters       the client's own limit in trained numbers of A and B, in place of rank
    megabytes        the same limit in 10^6 bytes of float32
    limits           budgets of single clients: the first pattern of ids that fits, with rank, parameters or megabytes
    base             the method whose result is personalised: {name: fedit, rounds: 100, train: {lr: 5e-5}}; null: none
    scale            s of delta = s B diag(lambda) A, whatever rank a module ends with
    epochs           passes over the client's examples, in a round's search and in the training; null: train.max_steps
    search           how the scales of the ranks are searched, see `ScaleSearch`
    generator        how the generator is trained, see `GeneratorTraining`
    mask_padding     leave padding out of the features, which makes them independent of batches
    weights          how the server averages: "examples" (the paper) or "uniform"
    preset           "parity" does what the released code does where it differs

    A round: `lambda = generator(features)`, BayesTune-LoRA from there, then the generator's L1 distance to what that
    found is lowered. At the end: the r L largest of `generator(features)` are kept, frozen, and A and B trained.
    up = down = 8 M^2 + 4 M (2 rank_max L + 1) + 2 rank_max L + 1 for M linear modules, L of them adapted; the generator
    once more at the end. Adapters, scales and features never leave a client.

    Source: Lee et al. 2025a, eqs. 1 to 6; Lee et al. 2025a, Figures 1 and 2; docs/methods/fedp2eft.md.
    """

    generator: GeneratorTraining = GeneratorTraining()  # noqa: RUF009 frozen
    mask_padding: bool = False
    weights: ClientWeights = "examples"

    def __post_init__(self) -> None:
        self.prepare_with("fedp2eft", Generator(2 * self.rank_max))

    def own_stages(self) -> list[Stage]:
        generator = Message(slot(GENERATOR))
        return [
            Stage(
                "generate",
                _Generate(self),
                generator,
                generator,
                lasts=False,
                trains=slot(GENERATOR),
                reads="features, and the ranks that suit them,",
                mean=self.weights,
            ),
            Predict(self.mask_padding, self.all_padding, self.precision).stage(),
            FineTune(self.kept, self.epochs).stage(),
        ]

    def check(self, context: Context) -> list[Problem]:
        return [*super().check(context), *few_steps(context, self.epochs)]

    def work(self) -> tuple[Work, ...]:
        return (Work((BUDGETED, SCALES), WEIGHTS | slot(SCALES)),)  # the scales' slot uses A and B of the other

    def server_init(self, site: ServerSite) -> Payload:
        generator = Payload(select(site.initial, slot(GENERATOR)))
        return with_base(generator, None if self.before is None else self.before.server_init(site))

    @property
    def searching(self) -> Search:
        parity = self.preset == "parity"
        return self.search.make(accumulate=parity, return_raw=parity, precision=self.precision)

    @property
    def all_padding(self) -> bool:
        return self.preset == "parity" and not self.mask_padding

    @property
    def precision(self) -> torch.dtype:
        """Of scales, generator and features; bfloat16 in the released code."""
        return torch.bfloat16 if self.preset == "parity" else torch.float32


@dataclass(frozen=True)
class _Generate(Exchange):
    """Each client searches from the generator's scales; the generator learns what the search ends with."""

    method: FedP2EFT

    def dispatch(self, server: Payload, client: ClientInfo, at: Tick) -> Payload:
        return Payload(select(server.arrays, slot(GENERATOR)))

    def client_update(self, client: Payload, received: Payload, site: Site, at: Tick) -> Steps[Updated]:
        how = self.method
        load_base(client, site)
        seen, kept = features_of(client, site, how.mask_padding, how.all_padding)
        generator = generator_of(received)
        with torch.no_grad():
            load_scales(site, generate(generator, seen, how.precision).view(len(site.model.shapes.targets), -1))
        target = yield from searching(site, at, how.searching, steps_for(site, how.epochs), base_slots(client))
        generator, gaps = fit(generator, seen, target.flatten(), how.generator.steps, how.generator.lr, how.precision)
        site.report.update({"gap_before": gaps[0], "gap_after": gaps[-1], "scale_mean": float(target.mean())})
        return client | Payload(kept), Payload(generator)

    def aggregate(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        weights = counts_of(updates, self.method.weights)
        return server | Payload(weighted_mean((update.payload.arrays for update in updates), weights))
