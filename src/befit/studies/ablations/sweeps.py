"""Ablations that are a grid of a method's options: one run for each choice, all behind the same two branches."""

from __future__ import annotations

import itertools
import statistics
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from befit.methods.potara import Granularity
from befit.studies.ablations.base import Row, register
from befit.studies.ablations.seed import LOCAL, Seed, changed, end_of
from befit.studies.ablations.tabulated import PERCENT, Groups, Tabulated, between, extremes, label_of, mean


class Sweep(Tabulated):
    """A grid of options."""

    @abstractmethod
    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Every run: its values of `axes`, and the options that it changes."""

    @abstractmethod
    def numbers(self, reported: Mapping[str, float]) -> Row:
        """The columns of a row, from the numbers that a client reported of its merge."""

    def variants(self) -> Mapping[str, Mapping[str, Any]]:
        # A guard could keep something else than the merge that is compared.
        return {label_of(values): {**changes, "guard": "none"} for values, changes in self.grid()}

    def rows(self, seed: Seed) -> Iterator[Row]:
        block = seed.experiment.method
        ends = {"federated": seed.scores(seed.federated()), "local": seed.scores(seed.run(LOCAL, end_of(block, 0.0)))}
        runs = [seed.run(label, changed(block, changes)) for label, changes in self.variants().items()]
        measured = [(seed.scores(run), seed.reported(run)) for run in runs]
        for client in ends["local"]:
            for (values, _), (scores, reported) in zip(self.grid(), measured, strict=True):
                yield {
                    "client": client,
                    **dict(zip(self.axes, values, strict=True)),
                    **self.numbers(reported[client]),
                    "score": scores[client],
                    **{name: end[client] for name, end in ends.items()},
                }


@register("potara-damping", title="Damping", method="potara")
@dataclass(frozen=True)
class DampingSweep(Sweep):
    """How weight and score hang on the damping of 1/F.

    deltas  sizes of the damping, of the configured kind

    The statistics stay, only `damping.delta` changes. Damping is ours (docs/methods/potara.md): it shrinks the weight
    towards one half, and too little of it lets a few coordinates decide.
    """

    deltas: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)

    axes: ClassVar = ("delta",)
    columns: ClassVar = (("mean w", mean("w")), ("damped", mean("damped_share", PERCENT)))
    title: ClassVar = "Every size of the damping"
    figure_title: ClassVar = "Weight and score over the damping"
    note: ClassVar = "Damped: entries of the statistics with less Fisher information than the damping adds."

    def __post_init__(self) -> None:
        if not self.deltas or not min(self.deltas) > 0:
            raise ValueError(f"deltas: must be positive numbers, got {list(self.deltas)}")

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [((delta,), {"damping.delta": delta}) for delta in dict.fromkeys(map(float, self.deltas))]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        return {name: reported[name] for name in ("w", "damped_share")}

    def remark(self, groups: Groups) -> str:
        first, last = min(groups), max(groups)
        return (
            f"From delta {label_of(first)} to {label_of(last)} the mean weight goes from {mean('w')(groups[first])} "
            f"to {mean('w')(groups[last])}."
        )


@register("potara-granularity", title="Granularity and correlation", method="potara")
@dataclass(frozen=True)
class GranularitySweep(Sweep):
    """One weight, or many, to the single coordinate.

    granularities  those to compare, from coarse to fine

    Each with and without the correlation. The paper has one weight per client; refining a partition can only lower the
    total trace. Whether it raises the score is the question. Traces are shares of the better parent's, `min(a, b)`, at
    each client. Without correlation, coordinates are Fisher merging.
    """

    granularities: tuple[Granularity, ...] = get_args(Granularity)

    axes: ClassVar = ("granularity", "correlation")
    columns: ClassVar = (("total trace", mean("trace")), ("weights, mean range", between("w_min", "w_max")))
    panels: ClassVar = (("trace", "total optimal trace", "share of the better parent's"),)
    title: ClassVar = "Every granularity"
    figure_title: ClassVar = "Total optimal trace and score by granularity"
    note: ClassVar = (
        "Traces with the correlation on and off come from different estimates of the same errors: compare them only "
        "within one setting. A lower trace is a tighter bound."
    )

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [
            ((granularity, correlation), {"granularity": granularity, "correlation.estimate": correlation})
            for correlation in (True, False)
            for granularity in dict.fromkeys(self.granularities)
        ]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        total = reported.get("trace_merged_groups", reported["trace_merged"])
        least = min(reported["trace_fed"], reported["trace_local"])
        return {
            "w": reported["w"],
            **{name: reported.get(name, reported["w"]) for name in ("w_min", "w_max")},
            "trace": total / least if least > 0 else None,
        }

    def remark(self, groups: Groups) -> str:
        with_correlation = [values for values in groups if values[1]]
        words = [
            f"{values[0]} weights reach {mean('trace')(groups[values])} of the better parent's trace"
            for values in (with_correlation[0], with_correlation[-1])
        ]
        return f"With correlation, {'; '.join(dict.fromkeys(words))}."


@register("potara-merge-space", title="Merge space", method="potara")
@dataclass(frozen=True)
class MergeSpace(Sweep):
    """Merge A and B, their product, or that cut to the rank.

    With the same weights. The paper merges factors (appendix B): `B_m A_m = w B_f A_f + (1-w) B_l A_l - w (1-w) (B_f -
    B_l)(A_f - A_l)`. The product gap is the size of the last term over that of the first two, for one weight for each
    client.
    """

    axes: ClassVar = ("space",)
    columns: ClassVar = (("mean w", mean("w", 2)), ("product gap", mean("product_gap")))
    panels: ClassVar = ()
    single: ClassVar = "score"
    title: ClassVar = "Every space"
    figure_title: ClassVar = "Score by merge space"

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [((space,), {"merge_space": space}) for space in ("factors", "product", "product-truncated")]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        return {"w": reported["w"], "product_gap": reported.get("product_gap")}

    def remark(self, groups: Groups) -> str:
        gap = mean("product_gap")(groups["factors",])
        return f"Merges of factors and of products differ by {gap} of the product's norm on average."


@register("potara-statistics", title="Source of the statistics", method="potara")
@dataclass(frozen=True)
class Statistics(Sweep):
    """Training or validation data, true or sampled labels.

    The paper takes true labels of training examples; there, a model that has learned its training examples by heart has
    small gradients, which reads as little information. Held-out examples and sampled labels are the safeguards.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    axes: ClassVar = ("variant",)
    columns: ClassVar = (
        ("examples used", mean("used", 0)),
        ("mean w", mean("w")),
        ("weights of clients", extremes("w")),
    )
    single: ClassVar = "w"
    title: ClassVar = "Every source"
    figure_title: ClassVar = "Weight and score by source of the statistics"
    note: ClassVar = "A client with fewer examples than the configured number gives all of them."

    def grid(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [
            ((f"{split}, {fisher}",), {"statistics.split": split, "statistics.fisher": fisher})
            for split, fisher in itertools.product(("train", "val"), ("empirical", "sampled"))
        ]

    def numbers(self, reported: Mapping[str, float]) -> Row:
        return {
            "used": int(reported["samples"]),
            **{name: reported[name] for name in ("w", "trace_fed", "trace_local")},
        }

    def remark(self, groups: Groups) -> str:
        paper, *others = groups.values()
        moved = [abs(row["w"] - first["w"]) for other in others for row, first in zip(other, paper, strict=True)]
        return (
            f"Another source than the paper's moves a client's weight by {statistics.fmean(moved):.2f} on average, by "
            f"{max(moved):.2f} at most."
        )
