"""What results.json of a run holds, key by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Required, cast

from typing_extensions import TypedDict

from befit.protocol.registry import ALONE


class ClientRow(TypedDict, total=False, extra_items=Any):
    """One client or newcomer; beside these keys, every metric by the name of its `befit.core.metrics.Measure`.

    baselines           every baseline's headline
    updates             rounds of exchanges whose update was used
    over_time           A_last and A_AUC of its own model, as in the summary
    on_others           its model's headline on each other client's examples, where that was measured
    each                its model's headline on each of its own examples, see `befit.report.comparison.compact`
    errors              standard error of the difference from every baseline, paired by example
    confusion           by class and by what it was taken for, how many of its own examples
    majority            what the class that is most frequent in its training scores as the answer to everything
    weights             how much each client counts in what it is sent, where the method says
    gates               by layer, what a gate of one number gives to what was received
    deployed            label of the run whose model it deploys, and `held_out`, by run, the loss on its validation
                        examples that decides it; with `federation.deploy: best`
    gain                over the best baseline of this client; `gain_over_local` over training alone
    download, backbone  a newcomer's headline before any stage of its own, and without adapters
    unchanged           whether all of a newcomer's metrics are the backbone's
    reason              why a newcomer has no model
    """

    examples: int
    train_examples: int
    updates: int
    bytes_up: int
    bytes_down: int
    bytes_scoring: int
    seconds: float
    cpu_seconds: float
    diagnostics: dict[str, Any]
    over_time: dict[str, float]
    on_others: dict[str, float]
    each: str | list[float]
    errors: dict[str, float]
    confusion: dict[str, dict[str, int]]
    majority: float
    weights: dict[str, float]
    gates: dict[str, float]
    deployed: str | None
    held_out: dict[str, float]
    baselines: dict[str, float | None]
    gain: float
    gain_over_local: float
    family: str
    info: dict[str, str]
    adapter: str | None
    download: float | None
    backbone: float | None
    unchanged: bool
    reason: str


class Worst(TypedDict):
    client: str
    value: float


class Summary(TypedDict, total=False):
    """Over clients: the headline, with std dividing by n - 1 and 0 for one client; bytes and seconds in all.

    weighted_mean       the mean with each client's number of examples as its weight
    majority            the same of the clients' `majority`
    cpu_seconds         processor time at the clients, beside the wall's in `seconds`
    server_cpu_seconds  processor time at the server; before the first round `opening_cpu_seconds` of it, with the most
                        memory that the process held until then
    over_time           A_last and A_AUC of FedMosaic, see `befit.runs.results`
    """

    scored: int
    mean: float | None
    std: float | None
    weighted_mean: float
    majority: Summary
    worst: Worst | None
    bytes_up: int
    bytes_down: int
    bytes_scoring: int
    seconds: float
    cpu_seconds: float
    peak_memory_mib: float
    server_cpu_seconds: float
    opening_cpu_seconds: float
    opening_peak_memory_mib: float
    over_time: dict[str, float]
    download: Summary
    backbone: Summary
    gained: list[str]
    not_gained: list[str]


class BestRound(TypedDict):
    """The round of a run's stage that counts, where `federation.patience` is set: the one after which the clients' mean
    headline on validation examples is highest; `of` is how many rounds the stage could have had."""

    run: str
    stage: str
    round: int
    of: int
    validation: float


class Group(TypedDict):
    """A group of clients or examples, with its scores by run and metric, and the run that is best."""

    clients: int
    examples: int
    scores: dict[str, dict[str, float | None]]
    winner: str | None


class Grouped(TypedDict, total=False):
    """All groups by one thing that is known of clients, or of their examples (`of`), and the wins of every run."""

    groups: Required[dict[str, Group]]
    wins: Required[dict[str, int]]
    metrics: list[str]
    of: str
    budgets: dict[str, Grouped]


class Shown(TypedDict):
    """How numbers among the clients' diagnostics are shown, see `befit.protocol.method.Diagnostic`."""

    kind: str
    keys: list[str]
    text: str
    title: str
    limit: float


class RunResults(TypedDict, total=False):
    """results.json. Baselines, curves and costs are by label of a run; costs then by family of models."""

    name: str
    method: Required[str]
    status: str
    task: str
    model: str
    seed: int
    data: str
    partition: Any
    metric: Required[str]
    metrics: list[str]
    split: str
    higher_is_better: bool
    left_out: dict[str, Any]
    limit: dict[str, Any]
    clients: Required[dict[str, ClientRow]]
    summary: Required[Summary]
    baselines: dict[str, Summary]
    groups: dict[str, Grouped]
    newcomers: dict[str, Any]
    curves: dict[str, list[dict[str, Any]]]
    costs: dict[str, dict[str, dict[str, Any]]]
    failures: list[dict[str, Any]]
    diagnostics: list[Shown]
    fleet: dict[str, int]
    clock: dict[str, list[float]]
    privacy: dict[str, Any]
    best_rounds: list[BestRound]


def failures_of(results: RunResults, scoring: bool) -> list[dict[str, Any]]:
    """The failures to score, each of which cost a client that score and nothing else; or all others."""
    return [failure for failure in results.get("failures") or [] if failure.get("scoring", False) == scoring]


def newcomers_of(results: RunResults) -> RunResults | None:
    """The results as if the newcomers were the clients; None where there are none."""
    newcomers = results.get("newcomers") or {}
    if not newcomers.get("clients"):
        return None
    return cast(RunResults, {**results, "baselines": {}, "failures": [], "curves": {}, "groups": {}, **newcomers})


def split_name(results: Mapping[str, Any]) -> str:
    """Which examples the scores are of: "test" or "validation"."""
    return "validation" if results.get("split") == "val" else "test"


def baseline_labels(results: RunResults) -> list[str]:
    """Labels of the baselines in the order in which they were run; those of any client where that is unknown."""
    labels = dict.fromkeys(results.get("baselines") or {})
    for row in results["clients"].values():
        labels |= dict.fromkeys(row.get("baselines") or {})
    return list(labels)


def training_alone(results: RunResults) -> str | None:
    """The baseline in which every client trains alone; None without one, and where the method does so itself."""
    return ALONE if results["method"] != ALONE and ALONE in baseline_labels(results) else None


def runs_of(results: RunResults) -> list[tuple[str, Summary]]:
    """Label and summary of every baseline, and of the method at last."""
    summaries = results.get("baselines") or {}
    baselines: list[tuple[str, Summary]] = [(label, summaries.get(label) or {}) for label in baseline_labels(results)]
    return [*baselines, (results["method"], results["summary"])]
