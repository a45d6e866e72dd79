"""How clients' updates become one: weights x space x rule x finish, as one value that a configuration can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from befit.adapters.keys import split
from befit.adapters.lowrank import Pair, negligible
from befit.adapters.state import check_same, weighted_mean
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.schema import POSITIVE, SHARE, Mark, at_least, between, check_fields
from befit.core.values import ClientWeights, State, Update
from befit.merge.clients import MergeContext, counts_of, entries_of, finite_states, is_factor, modules_of, to_scale
from befit.merge.rules import Elementwise, Isotropic, Rule
from befit.merge.spaces import Delta, Draw, Knots, Modules, ModuleUpdates, merge_tensors, merge_updates, naming
from befit.merge.update import LowRankUpdate, Split, finish

# Where an option means something, as (rules, spaces); None stands for all.
_TRIMS = frozenset({"ties", "magnitude"})
_ELECTS = frozenset({"ties", "dare-ties"})
_MEANINGFUL: dict[str, tuple[frozenset[str] | None, frozenset[str] | None]] = {
    "density": (_TRIMS | {"dare", "dare-ties"}, None),
    "trim_scope": (_TRIMS, None),
    "trim_count": (_TRIMS, None),
    "sign": (_ELECTS, None),
    "zero_sign": (_ELECTS, None),
    "combine": (_ELECTS, None),
    "delta_reference": (None, frozenset({"factors"})),
    "knots_input": (None, frozenset({"knots"})),
    "iso_mean": (frozenset({"iso-c"}), None),
    "rank": (None, frozenset({"knots", "delta"})),
    "split": (None, frozenset({"knots", "delta"})),
    "precision": (None, frozenset({"knots", "delta"})),
}


@dataclass(frozen=True)
class Merge:
    """Clients' updates become one adapter (docs/methods/guidance.md, Merging).

    weights          "examples" weighs a client by its training examples, "uniform" gives all the same
    space            "factors" merges A and B each on its own, "knots" the updates in one shared basis, "delta" the
                     updates themselves
    rule             "mean" (FedAvg), "task-arithmetic" (K times the mean), "ties", "dare", "dare-ties", "iso-c",
                     "magnitude" (trimmed sum)
    density          share of entries that TIES and DARE keep; null takes 0.2
    scale            the merged update is multiplied by this (alpha); in factors B alone is
    rank             of the result, in the spaces knots and delta; null keeps the largest rank of the clients
    split            there, singular values go to both factors ("even") or all to "B" (FlexLoRA)
    trim_scope       trimming counts the entries of a "tensor" or of the whole adapter ("global")
    trim_count       "exact", or "reference": one more and all equal ones, as the public TIES code
    sign             elected by the "sum" of values or by their "frequency", of which a tie goes to the sum
    zero_sign        what an elected sign of zero becomes: "plus", or the "majority" over the scope of trimming
    combine          entries that agree are averaged ("mean") or added ("sum")
    delta_reference  in factors, rules see the factors ("none") or their change since the "round_start"
    knots_input      KnOTS merges "sigma_v" (public code) or "v" (as printed)
    iso_mean         singular values of Iso-C: mean over those "kept" in the result, all of the mean update's "rank", or
                     the "full" width
    tolerance        singular values below it, relative to the largest, count as zero, in Iso-C and in the spaces knots
                     and delta; null takes 1e-5, or 1e-10 for factors in float64
    precision        type of decompositions

    In the space factors the linear rules hold one update at a time, however many clients there are; all other merges
    hold all of them. Only rules that are not linear, in the space delta, form arrays of the size of a weight matrix.
    Task heads are always averaged.
    """

    weights: ClientWeights = "examples"
    space: Literal["factors", "knots", "delta"] = "factors"
    rule: Literal["mean", "task-arithmetic", "ties", "dare", "dare-ties", "iso-c", "magnitude"] = "mean"
    density: Annotated[float | None, SHARE] = None
    scale: Annotated[float, Mark.SERVER, at_least(0)] = 1.0
    rank: Annotated[int | None, POSITIVE] = None
    split: Split = "even"
    trim_scope: Literal["tensor", "global"] = "tensor"
    trim_count: Literal["exact", "reference"] = "exact"
    sign: Literal["sum", "frequency"] = "sum"
    zero_sign: Literal["plus", "majority"] = "plus"
    combine: Literal["mean", "sum"] = "mean"
    delta_reference: Literal["none", "round_start"] = "none"
    knots_input: Literal["sigma_v", "v"] = "sigma_v"
    iso_mean: Literal["kept", "rank", "full"] = "kept"
    tolerance: Annotated[float | None, between(0, 1)] = None
    precision: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        check_fields(self, "the merge")
        problems = list[str]()
        for option in fields(self):
            rules, spaces = _MEANINGFUL.get(option.name, (None, None))
            value = getattr(self, option.name)
            if value == option.default:
                continue
            if rules is not None and self.rule not in rules:
                problems.append(f"{option.name}: applies to {_listed(rules)} only, and the rule is {self.rule}")
            elif spaces is not None and self.space not in spaces:
                problems.append(f"{option.name}: applies to {_listed(spaces)} only, and the space is {self.space}")
        if self.tolerance is not None and self.space == "factors" and self.rule != "iso-c":
            problems.append(f"tolerance: factors are decomposed by the rule iso-c only, and the rule is {self.rule}")
        if problems:
            raise ConfigError(problems, "the merge")

    def __call__(self, updates: Sequence[Update], context: MergeContext | None = None) -> State:
        """The merged arrays, under the keys and in the types of the updates. Raises PayloadMismatch where they differ,
        and where a number of an update or of the result is not finite.

        In the spaces knots and delta, `context.scale` times the product of what comes back is the merged update at
        its best approximation of the wanted rank.
        """
        context = context or MergeContext()
        if self.individual:
            states = [*finite_states(updates)]
            merged = {**self._heads(states, updates), **self._factors(states, updates, context)}
        else:
            merged = self._streamed(updates, context)
        for key, value in merged.items():
            if not bool(value.isfinite().all()):  # a sum shows it too, so that only now every update is looked at
                for _ in finite_states(updates):
                    pass
                raise PayloadMismatch(f"the merged {key} does not fit into {value.dtype}; merge with a smaller scale")
        return merged

    def updates_of(
        self, updates: Sequence[Update], context: MergeContext | None = None, rank: int | None = None
    ) -> Iterator[tuple[str, Pair]]:
        """(B, A) of the merged update of every module, by `slot/module`: for folding into a backbone (ReLoRA).

        rank  the largest; None leaves the update whole
        Only in the spaces knots and delta; in factors the update is the product of what a call returns.
        """
        if self.space == "factors":
            raise ValueError("the space factors has no update beside the product of its merged factors")
        context = context or MergeContext()
        with self._modules([*finite_states(updates)], updates, context) as modules:
            for module, update in self._updates(modules, updates, context):
                yield module.name, update.pair() if rank is None else update.spectrum(rank).balanced()

    @property
    def linear(self) -> bool:
        """Whether the result is a weighted sum of what is merged."""
        return self.rule in ("mean", "task-arithmetic")

    @property
    def individual(self) -> bool:
        """Whether it needs every update by itself. For the others their weighted mean, and their number, are enough."""
        return self.space != "factors" or not self.linear

    @property
    def rule_value(self) -> Rule:
        """The rule with its options, for the functions of `befit.merge.spaces`."""
        if self.rule == "iso-c":
            return Isotropic(self.iso_mean, self.tolerance)
        density = 0.2 if self.density is None else self.density
        scope = "adapter" if self.trim_scope == "global" else "tensor"
        elect = "count" if self.sign == "frequency" else "sum"
        signs: dict[str, Any] = {"elect": elect, "zero_sign": self.zero_sign, "combine": self.combine, "scope": scope}
        reference = self.trim_count == "reference"
        return {
            "mean": Elementwise(),
            "task-arithmetic": Elementwise(combine="sum"),
            "ties": Elementwise("trim", density, reference=reference, **signs),
            "dare": Elementwise("drop", density),
            "dare-ties": Elementwise("drop", density, **signs),
            "magnitude": Elementwise("trim", density, combine="sum", scope=scope, reference=reference),
        }[self.rule]

    @property
    def coordinates(self) -> Knots | Delta:
        """The space with its options, unless that is factors."""
        dtype = getattr(torch, self.precision)
        return Knots(self.knots_input, self.tolerance, dtype) if self.space == "knots" else Delta(dtype)

    def rounding(self, dtype: torch.dtype) -> float:
        """What counts as zero beside the largest singular value of merged factors of this type."""
        return negligible(dtype) if self.tolerance is None else self.tolerance

    def shares(self, updates: Sequence[Update]) -> list[float]:
        """Weights with mean 1, so that a sum over clients is Task Arithmetic's where all count the same."""
        weights = counts_of(updates, self.weights)
        return [len(weights) * weight / sum(weights) for weight in weights]

    def _streamed(self, updates: Sequence[Update], context: MergeContext) -> State:
        """One pass over the updates: `A = sum_k p_k A_k`, `B = scale sum_k p_k B_k`; Task Arithmetic K times each."""
        states = (to_scale(u.payload.arrays, context.scales.get(u.client.id, 1.0) / context.scale) for u in updates)
        merged = weighted_mean(states, counts_of(updates, self.weights))
        if self.rule == "task-arithmetic":
            factors = {key: value for key, value in merged.items() if is_factor(key)}
            start = {key: value for key, value in context.start.items() if key in factors}
            if self.delta_reference == "none":
                start = {key: torch.zeros_like(value) for key, value in factors.items()}
            check_same(factors, start, "an update and the start of its round")
            merged |= {key: start[key] + len(updates) * (value - start[key]) for key, value in factors.items()}
        return {key: self._scaled(key, value) for key, value in merged.items()}

    def _scaled(self, key: str, value: Tensor) -> Tensor:
        """Times `scale` for a B, so that the product is scaled once."""
        return value if self.scale == 1 or split(key)[2] != "B" else self.scale * value

    def _heads(self, states: Sequence[State], updates: Sequence[Update]) -> State:
        heads = [{key: value for key, value in state.items() if not is_factor(key)} for state in states]
        return weighted_mean(heads, self.shares(updates))

    def _factors(self, states: Sequence[State], updates: Sequence[Update], context: MergeContext) -> State:
        merged: State = {}
        if self.space == "factors":
            clients, changes = [update.client.id for update in updates], self.delta_reference == "round_start"
            entries = entries_of(states, clients, context, changes)
            draw = self._draw(updates, context)
            for entry, value in merge_tensors(entries, self.rule_value, self.shares(updates), draw):
                value = value if entry.context is None else entry.context + value
                merged[entry.name] = self._scaled(entry.name, value).to(states[0][entry.name].dtype)
            return merged
        with self._modules(states, updates, context) as modules:
            for module, update in self._updates(modules, updates, context):
                A, B = states[0][f"{module.name}/A"], states[0][f"{module.name}/B"]
                rank = self.rank or max(len(A) for _, A in module.pairs)
                spare = context.start.get(f"{module.name}/A")
                spare = spare if spare is not None and len(spare) == rank else None
                fill = context.generator("fill", module.name)
                filled = finish(update, rank, context.scale, fill, spare, self.split, self.rounding(A.dtype))
                merged |= {f"{module.name}/A": filled.A.to(A.dtype), f"{module.name}/B": filled.B.to(B.dtype)}
        return merged

    def _modules(
        self, states: Sequence[State], updates: Sequence[Update], context: MergeContext
    ) -> AbstractContextManager[Modules]:
        clients = [update.client.id for update in updates]
        return naming(modules_of(states, clients, context), [f"client {client}" for client in clients])

    def _updates(
        self, modules: Modules, updates: Sequence[Update], context: MergeContext
    ) -> Iterator[tuple[ModuleUpdates, LowRankUpdate]]:
        weights, draw = self.shares(updates), self._draw(updates, context)
        return merge_updates(modules, self.coordinates, self.rule_value, weights, draw, self.scale)

    def _draw(self, updates: Sequence[Update], context: MergeContext) -> Draw:
        return lambda client, name: context.generator(updates[client].client.id, name)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
