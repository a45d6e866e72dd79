"""A comparison from its study or configuration to runs, tables and plots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment
from befit.config.load import names_runs
from befit.core.errors import ConfigError, Damaged, RunError
from befit.core.storage import read_json
from befit.data.limit import limit_sentence, trial_overrides
from befit.report.numbers import count_text
from befit.report.table import aligned, html
from befit.runs.progress import watched
from befit.runs.provenance import locked
from befit.studies.compare.choice import Candidates, pick, stop_text, stopped, write_choice
from befit.studies.compare.collect import Scores, collect
from befit.studies.compare.execute import CellFailure, execute
from befit.studies.compare.kept import FILE, KeptCell, read_kept
from befit.studies.compare.plan import Plan, plan_choice, plan_config, plan_study
from befit.studies.compare.progress import CompareProgress
from befit.studies.compare.results import Comparison
from befit.studies.compare.study import Study, is_study, read_study
from befit.studies.compare.summary import limit_of
from befit.studies.compare.tables import summary_table

Tell = Callable[[dict[str, Any]], None]
Narrow = Callable[[Mapping[str, Mapping[int, float]], Collection[str]], Mapping[str, int]]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compared:
    """A comparison that has been run: its directory, the content of its compare.json, and the cells without results.

    `results` is None where no cell has any.
    """

    path: Path
    results: Comparison | None
    failures: tuple[CellFailure, ...]

    def __repr__(self) -> str:
        """A row for each run, and where the page is."""
        failed = f"\n{len(self.failures)} runs failed" * bool(self.failures)
        table = "" if self.results is None else aligned(summary_table(self.results))
        return f"{table}\n\npage: {self.path / 'compare.html'}{failed}"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        table = "" if self.results is None else html(summary_table(self.results))
        return f"{table}<p>page: {escape(str(self.path / 'compare.html'))}</p>"


def make_plan(
    source: Experiment | Mapping[str, Any] | Path | str,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    reference: str | None = None,
    trial: bool = False,
    plugins: Sequence[str] = (),
) -> Plan:
    """The plan of a study or a configuration, before anything is read or trained; see `compare`.

    trial    every run once, for one round of one step on two clients of each family with a few records
    """
    if trial:
        if seeds is not None and len(seeds) > 1:
            _LOG.warning("a trial runs one seed: %s alone, of --seeds %s", seeds[0], ",".join(map(str, seeds)))
        overrides = trial_overrides(overrides)
    overrides = ["report.plots=false", *overrides]  # what is looked at is the comparison's own page
    study = isinstance(source, Mapping) and names_runs(source)
    if study or (isinstance(source, (str, Path)) and is_study(source)):
        assert not isinstance(source, Experiment)
        plan = plan_study(read_study(source, plugins), seeds, overrides, reference, trial)
        plan = plan if methods is None else plan.only(methods)
    else:
        plan = plan_config(source, methods, seeds, overrides, reference, plugins)
    return plan.trial() if trial else plan


def compare(
    source: Plan | Experiment | Mapping[str, Any] | Path | str,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    reference: str | None = None,
    jobs: int = 1,
    out: Path | str | None = None,
    cells: Sequence[Path | str] = (),
    plugins: Sequence[str] = (),
    observer: Tell | None = None,
    quiet: bool = False,
) -> Compared:
    """Run every method with every seed, unless `out` holds the run already, and write the results.

    source     a study, a configuration, or the plan that `make_plan` made of one
    methods    of a configuration: which; default: its own and its baselines. Of a study: its runs of these, beside the
               reference; default: all
    seeds      default: the study's, or the configuration's only one
    overrides  `key=value` on top of every run
    reference  label of the run that the others are compared with; default: the study's, else local, else the first
    jobs       processes, each with a backbone of its own
    out        directory, default runs/<name>; runs are in <out>/runs/, and are used again by any comparison there
    cells      files that comparisons elsewhere have left (`cells.jsonl`, or compressed as `.gz`): cells that they have
               count as finished
    plugins    Python files or modules with methods, benchmarks and tasks of your own, beside those that `source` names
    observer   called with events: those of `befit.studies.compare.execute.execute`; without one, a terminal or notebook
               shows how far the comparison is
    quiet      show nothing

    A cell that fails stops no other. Raises ConfigError for mistakes, RunError for a directory that cannot be used, or
    whose tables of a whole comparison a limited one would replace.
    """
    plan = (
        source
        if isinstance(source, Plan)
        else make_plan(source, methods=methods, seeds=seeds, overrides=overrides, reference=reference, plugins=plugins)
    )
    with watched(observer, quiet, lambda console: CompareProgress(console, plan, jobs)) as tell:
        kept = {key: cell.scores for key, cell in read_kept(cells).items()}
        if kept and kept.keys().isdisjoint(cell.key for cell in plan.cells):
            _LOG.warning(
                "none of the %s in --cells is of this comparison: their settings are others, or their data or models "
                "lie elsewhere",
                count_text(len(kept), "cell"),
            )
        return _compared(plan, jobs, out, tell or (lambda event: None), kept)


def _compared(
    plan: Plan,
    jobs: int,
    out: Path | str | None,
    tell: Tell,
    kept: Mapping[str, Scores],
    narrow: Narrow | None = None,
) -> Compared:
    """Run the cells of a plan and write its files.

    kept    the numbers of cells that were finished elsewhere, by key
    narrow  says, from the scores by run and seed and the runs that diverged, which runs get no more seeds, and after
            how many
    """
    if jobs < 1:
        raise ConfigError([f"--jobs: must be 1 or more, got {jobs}"], "the command")
    path = Path("runs") / plan.name if out is None else Path(out)
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; name a directory for the comparison")
    if (path / "config.yaml").exists():
        raise RunError(f"{path} holds a single run; name another directory for the comparison")
    with locked(path):
        _keep_whole(path, plan)
        earlier = _kept_here(path / FILE)
        if narrow is None:
            failures = tuple(execute(plan.cells, path, jobs, tell, kept))
        else:
            plan, failures = _seed_by_seed(plan, path, jobs, tell, kept, narrow)
        from befit.studies.compare.write import write_comparison

        results = write_comparison(path, plan, failures, kept, earlier)
    return Compared(path, results, failures)


def _kept_here(file: Path) -> dict[str, KeptCell]:
    """The cells that an earlier comparison left in the same directory."""
    try:
        return read_kept([file]) if file.exists() else {}
    except Damaged as error:
        raise Damaged(
            f"{error}. Or remove it: cells whose runs are in {file.parent} are read from these again"
        ) from error


def _seed_by_seed(
    plan: Plan, path: Path, jobs: int, tell: Tell, kept: Mapping[str, Scores], narrow: Narrow
) -> tuple[Plan, tuple[CellFailure, ...]]:
    """Run one seed after the other, of the runs that are still in; the plan as it was carried out, and what failed.

    A run that was stopped for being below one that diverges later is in again, with the seeds that it was spared.
    """
    failures, scores, tried, lost = list[CellFailure](), dict[str, dict[int, float]](), set[int](), set[str]()
    place, stops, spared = 0, dict(narrow(scores, ())), set[int]()
    while place < len(plan.seeds):
        begun = plan.seeds[: place + 1]
        left = [number for number, cell in enumerate(plan.cells) if cell.seed in begun and number not in tried]
        wanted = [
            number
            for number in left
            if begun.index(plan.cells[number].seed) < stops.get(plan.cells[number].label, len(plan.seeds))
        ]
        if not wanted:
            place += 1
            continue
        cells = [plan.cells[number] for number in wanted]
        failures += execute(
            cells, path, jobs, lambda event, at=wanted: tell({**event, "cell": at[event["cell"]]}), kept
        )
        tried.update(wanted)
        lost |= {failure.label for failure in failures if failure.diverged}
        for run in plan.runs:
            done = [cell for cell in collect(path, run, kept).cells if cell.seed in begun]  # others may be there too
            lost |= {run.label} if any(cell.diverged for cell in done) else set()
            means = {cell.seed: cell.mean for cell in done}
            scores[run.label] = {seed: mean for seed in begun if (mean := means.get(seed)) is not None}
        stops = dict(narrow(scores, lost))
        for number in left:
            if number not in tried | spared:
                tell({"kind": "cell_spared", "cell": number})
        spared.update(left)
    runs = tuple(replace(run, cells=run.cells[: stops.get(run.label)]) for run in plan.runs)
    return replace(plan, runs=runs, head=replace(plan.head, about=stop_text(plan.head.about, stops))), tuple(failures)


@dataclass(frozen=True)
class Choice:
    """A choice that is to be made: the study, and the comparison of its candidates."""

    study: Study
    plan: Plan
    candidates: Candidates


def make_choice(source: Mapping[str, Any] | Path | str, plugins: Sequence[str] = ()) -> Choice:
    """What a study's settings are chosen from. Raises ConfigError for a study that chooses nothing."""
    study = read_study(source, plugins)
    plan, candidates = plan_choice(study)
    return Choice(study, plan, candidates)


@dataclass(frozen=True)
class ChoiceResult:
    """What a study's settings came to, by run; the file that keeps them, None where a candidate has no score though its
    training did not diverge; the comparison of the candidates; and those that were stopped, each with its number of
    seeds."""

    path: Path | None
    settings: Mapping[str, Mapping[str, Any]]
    compared: Compared
    stopped: Mapping[str, int] = field(default_factory=dict[str, int])


def choose(
    source: Choice | Path | str,
    *,
    jobs: int = 1,
    out: Path | str | None = None,
    early_stop: bool = False,
    observer: Tell | None = None,
) -> ChoiceResult:
    """Run every candidate of a study's `choose` on validation examples and keep the best of each run beside the study.

    early_stop  candidates that are shown to have lost get no more seeds, see `befit.studies.compare.choice.stopped`
    out  directory of the candidates' comparison, default runs/<name>-choice; the other arguments are those of `compare`

    The file is written once every candidate has a score or has diverged, which loses. Raises ConfigError for a study
    that chooses nothing, or where all candidates of a run diverge, and what `compare` raises.
    """
    choice = source if isinstance(source, Choice) else make_choice(source)
    stops: dict[str, int] = {}

    def narrow(scores: Mapping[str, Mapping[int, float]], diverged: Collection[str]) -> Mapping[str, int]:
        stops.clear()
        stops.update(stopped(choice.study, choice.candidates, scores, diverged))
        return stops

    tell = observer or (lambda event: None)
    compared = _compared(choice.plan, jobs, out, tell, {}, narrow if early_stop else None)
    if not all(failure.diverged for failure in compared.failures):
        return ChoiceResult(None, {}, compared, stops)
    lost = {failure.label for failure in compared.failures}
    done = [collect(compared.path, run, {}) for run in choice.plan.runs]
    lost |= {finished.run.label for finished in done if any(cell.diverged for cell in finished.cells)}
    runs = compared.results["runs"] if compared.results is not None else []
    means = {run["label"]: run["mean"] or {} for run in runs if run["label"] not in lost}
    settings = pick(choice.study, choice.candidates, means, {*stops, *lost})
    return ChoiceResult(write_choice(choice.study, choice.candidates, means, settings), settings, compared, stops)


def _keep_whole(path: Path, plan: Plan) -> None:
    """Raise RunError where numbers of part of the data or rounds would replace those of all of them."""
    whole = any(limit_sentence(asdict(cell.experiment.limit)) is None for cell in plan.cells)
    if whole or not (path / "compare.json").exists() or limit_of(read_json(path / "compare.json")):
        return
    raise RunError(
        f"{path} holds a comparison without a limit, whose tables a trial or limited one would replace; "
        "name another directory for it"
    )
