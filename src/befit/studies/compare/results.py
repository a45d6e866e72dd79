"""What compare.json holds, key by key."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from befit.core.metrics import Spread


class TTest(TypedDict):
    """A paired t test of differences, one for each of n seeds.

    mean, sd   of the differences
    low, high  95 % interval of the mean; None for a single seed, or where the differences do not vary
    p          two-sided; None there too, but 1 where there is no difference at all; `p_holm` after Holm's correction
    """

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: NotRequired[float | None]


class SignedTest(TypedDict):
    """Wilcoxon's signed-rank test of n differences, one for each client and seed.

    better, ties, worse  how many
    p                    two-sided; None with fewer than LEAST_PAIRS differences that are not zero
    """

    better: int
    ties: int
    worse: int
    n: int
    p: float | None
    p_holm: NotRequired[float | None]


class ByExample(TypedDict):
    """Differences paired by test example: of all clients and seeds, on how many of n examples a run is better or worse.

    mean, half  the difference, a mean over seeds of the mean over clients as in `TTest`, and half of the 95 % interval
                that the choice of test examples gives it, for these very models
    """

    n: int
    better: int
    worse: int
    mean: float
    half: float


class Against(TypedDict):
    """A run's differences from the reference: over seeds, over clients of all seeds, and over their test examples where
    those were measured one by one."""

    t: TTest
    signed: SignedTest
    examples: ByExample | None


class SeedScores(TypedDict):
    """One cell: keys of `befit.studies.compare.collect.Scores`, and the mean over clients."""

    seed: int
    folder: str
    mean: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    steps: float
    data: str | None
    tested: str | None
    clients: dict[str, float | None]
    auc: dict[str, float | None]
    examples: dict[str, int]
    beside: dict[str, float]


class ScoredRound(TypedDict):
    """A scored round, all numbers means over seeds."""

    round: int
    mean: float
    bytes_up: float
    bytes_down: float


class RunScores(TypedDict):
    """One run: spreads over seeds of the mean over clients, of the worst client and of each client; means of costs.

    paper    the paper's number, in its unit
    against  None for the reference, and where no seed has the same clients and data
    remarks  what the reports of its cells warn of, with the clients of all seeds together
    """

    label: str
    method: str
    paper: float | None
    mean: Spread | None
    worst: Spread | None
    clients: dict[str, Spread | None]
    bytes_up: float | None
    bytes_down: float | None
    seconds: float | None
    cpu_seconds: float | None
    server_cpu_seconds: float | None
    steps: float | None
    curve: list[ScoredRound]
    failed_exchanges: int
    against: Against | None
    beside: dict[str, Spread]
    beside_against: dict[str, TTest]
    diagnostics: dict[str, Spread]
    remarks: list[str]
    seeds: list[SeedScores]
    config: dict[str, Any]


class GridResults(TypedDict):
    """A grid's table, every cell by row and column: the label of its run, why it was left out, the paper's number."""

    name: str
    title: str
    note: str
    corner: str
    rows: list[list[str]]
    columns: list[list[str]]
    runs: list[list[str | None]]
    reasons: list[list[str | None]]
    paper: list[list[float | None]]


class SpreadOfSeeds(Spread):
    """With the standard deviation that divides by n, as some papers print it."""

    population_sd: float


class OtherSeed(TypedDict):
    seed: int
    mean: dict[str, float | None]
    clients: dict[str, dict[str, float | None]]


class OtherRun(TypedDict):
    scores: dict[str, Spread | None]
    seeds: list[OtherSeed]


class OtherMetrics(TypedDict):
    """Of clients or newcomers (`pool`), the metrics beside the headline that some run has, by label of the run."""

    pool: str
    metrics: list[str]
    runs: dict[str, OtherRun]


class BudgetRow(TypedDict):
    """A method at several budgets: by budget, the label of its run and its mean over clients."""

    setup: str
    method: str
    scores: dict[str, SpreadOfSeeds | None]
    runs: dict[str, str]


class BudgetScores(TypedDict):
    pool: str
    budgets: list[str]
    rows: list[BudgetRow]


class GroupScores(TypedDict):
    """A group of clients or examples: scores by method, the method that is best, and the methods that are tied; how
    many clients and examples are means over seeds."""

    clients: int
    examples: int
    scores: dict[str, SpreadOfSeeds | None]
    best: str | None
    tied: list[str]


class Scored(TypedDict):
    """All groups in one metric; the mean over groups and the wins by method (None without score or rival), and how
    many groups nobody wins."""

    groups: dict[str, GroupScores]
    mean: dict[str, SpreadOfSeeds | None]
    wins: dict[str, int | None]
    nobody: int


class AtBudget(Scored):
    """`Scored` in the headline at one budget, and in every other metric that counts, each with its wins alone.

    left_out  groups that some seed has nobody in
    """

    seeds: list[int]
    left_out: list[str]
    runs: dict[str, str]
    other_metrics: NotRequired[dict[str, Scored]]


class Wins(TypedDict):
    """Who is best in the groups that clients or newcomers (`pool`) are divided into in a setup, or their examples, as
    `of` says.

    by       the property that divides them, such as language
    metrics  by which wins are counted
    budgets  "r2", "r4", …, or "" alone
    methods  labels of series
    """

    pool: str
    setup: str
    by: str
    of: str
    metrics: list[str]
    budgets: list[str]
    methods: list[str]
    at: dict[str, AtBudget]


class FailedCell(TypedDict):
    run: str
    seed: int
    error: str
    traceback: str


class ContrastResult(TypedDict):
    """A sum of runs' scores with weights, over seeds: mean and SD, 95 % interval, and one-sided p values that it is
    above and below what the claim asks for; None where fewer than two seeds have all of its runs."""

    weights: dict[str, float]
    spread: Spread | None
    low: float | None
    high: float | None
    p_above: float | None
    p_below: float | None


class Verdict(TypedDict):
    """A claim of the study and what its results say of it; p values after Holm's correction for all claims.

    of  what is measured: mean, worst, others or newcomers
    at  the rank of the budget at which it is; None: as deployed
    by  the margin in points of a hundred
    """

    name: str
    says: str
    source: str
    of: str
    at: int | None
    by: float
    contrasts: list[ContrastResult]
    p_shown: float | None
    p_refuted: float | None
    verdict: Literal["shown", "refuted", "undecided"]


class ChosenSettings(TypedDict):
    """Settings that were chosen before: the file, its hash, the seeds that it rests on, and the settings by run.

    changed  what the command changed on top of them
    """

    file: str
    sha256: str
    seeds: list[int]
    settings: dict[str, dict[str, Any]]
    changed: list[str]


class Comparison(TypedDict):
    """compare.json. `reference` is the label of the run that the others are compared with, `level` the one below which
    p values of two-sided tests, with Holm's correction, show a difference."""

    title: str
    about: str
    paper: str
    table: str
    note: str
    name: str
    metric: str
    split: str
    higher_is_better: bool
    seeds: list[int]
    level: float
    reference: str
    runs: list[RunScores]
    tables: list[GridResults]
    other_metrics: list[OtherMetrics]
    budgets: list[BudgetScores]
    wins: list[Wins]
    failures: list[FailedCell]
    claims: list[Verdict]
    chosen: ChosenSettings | None
    sentences: list[str]
