"""One client with both of its branches: estimate, weigh, merge and score, as often as an ablation wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from befit.core.seeds import derive_seed
from befit.core.values import ClientInfo, State, Tick
from befit.core.wire import cast as cast_payload
from befit.merge.pair import merge_pair
from befit.methods.parts.recipe.recipe import Recipe
from befit.methods.potara import PotaraMerge
from befit.protocol.registry import build_method
from befit.protocol.site import Site
from befit.runs.host import Host
from befit.studies.ablations.branches import Branches, federated_rounds
from befit.train.paired_fisher import PairedFisher

__all__ = ["Client", "Pair", "single"]


@dataclass(frozen=True)
class Client:
    """One client of one seed.

    config  the method's block of the configuration
    """

    host: Host
    config: Mapping[str, Any]
    info: ClientInfo
    branches: Branches

    @property
    def total_rounds(self) -> int:
        """Rounds of the federated branch."""
        return federated_rounds(cast(Recipe, build_method(self.config)), self.host.experiment.federation.rounds)

    def pair(self, round_: int | None = None) -> Pair:
        """Its local adapter, with the federated one after a kept round; default the last."""
        # What a client of the run holds is what came over the wire, in the wire's type.
        wire = getattr(torch, self.host.experiment.wire.dtype)
        sent = cast_payload(self.branches.federated(self.total_rounds if round_ is None else round_), wire)
        local = self.branches.local(self.info.id).arrays
        return Pair(self, self.host.site(self.info), cast_payload(sent, torch.float32).arrays, local)

    def rule(self, **options: Any) -> PotaraMerge:
        """How the configured method merges, with some options changed, for one weight for each client or as they say.

        Puts the slots that the merge needs on the model. Raises ConfigError for options that exclude each other.
        """
        method = cast(Recipe, build_method({**self.config, **options}))
        if self.host.model.layout != method.layout:
            self.host.install(method)
        return cast(PotaraMerge, cast(Any, method.then[0]).rule)

    def count(self, split: str) -> int:
        """Examples of a split."""
        return len(self.host.examples(self.info.id, split))


@dataclass(frozen=True)
class Pair:
    """A federated adapter in slot `shared` and a local one in `personal`, at one client."""

    client: Client
    site: Site
    fed: State
    local: State

    def moments(self, rule: PotaraMerge, draw: int = 0) -> PairedFisher:
        """The statistics on `rule.samples` examples. Draw 0 takes the examples that a run takes, others take others.

        A client with fewer examples gives all of them, without a warning: `count` of the result says how many.
        """
        seed = self.client.host.experiment.federation.seed
        at = Tick("merge", 1, 1, derive_seed(seed, "draw", draw) if draw else seed)
        self.site.model.reset()
        self.site.model.load(self.fed)
        self.site.model.load(self.local)
        samples = min(rule.samples, max(1, self.client.count(rule.split)))
        return replace(rule, samples=samples).moments(self.site, at)

    def merged(self, weights: Mapping[str, Tensor | float] | float, rule: PotaraMerge) -> State:
        """The adapter in slot `merged`."""
        by_key = {"": weights} if isinstance(weights, (int, float)) else weights
        return merge_pair(self.fed, self.local, by_key, rule.merge_space)

    def score(self, state: State, split: str | None = None) -> float:
        """The headline metric of an adapter in slot `merged`; default on the split that the run is scored on."""
        settings, model = self.client.host.experiment.evaluate, self.site.model
        examples = self.site.examples(split or settings.split)
        with model.using(state, "merged"):
            found = self.site.task.evaluate(model.backbone, examples, settings.batch_size, model.device)
        return found[self.site.task.metric]

    def score_at(self, w: float, rule: PotaraMerge, split: str | None = None) -> float:
        """The score of one weight for everything: 1 is the federated adapter, 0 the local one."""
        return self.score(self.merged(w, rule), split)


def single(rule: PotaraMerge) -> PotaraMerge:
    """The rule with one weight for each client, whatever the configuration says."""
    return replace(rule, granularity="client")
