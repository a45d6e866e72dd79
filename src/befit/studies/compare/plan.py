"""From a study, or a configuration and some methods, to the cells of a comparison. Reads no data, trains nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from befit.config.experiment import NO_CHOICE, Experiment, method_blocks, to_dict
from befit.config.load import load_experiment
from befit.config.overrides import apply_overrides, seeds_problem
from befit.config.parse import sized_like
from befit.core.errors import ConfigError, did_you_mean
from befit.protocol.registry import ALONE, get_method
from befit.report.comparison import run_title
from befit.studies.compare.cells import Collector, PlannedRun, StudyCell
from befit.studies.compare.choice import Candidates, Frozen, add_candidates, chosen_path, frozen
from befit.studies.compare.claims import Claim, claim_problems, says_nothing
from befit.studies.compare.grids import GridTable, add_grid
from befit.studies.compare.study import Head, Study


@dataclass(frozen=True)
class Plan:
    """Everything that is to be run. `reference` is the label of the run that others are compared with."""

    name: str
    head: Head
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    tables: tuple[GridTable, ...]
    reference: str
    chosen: Frozen | None = None
    changed: tuple[str, ...] = ()  # in the command, on top of everything
    claims: Mapping[str, Claim] = field(default_factory=dict[str, Claim])

    @property
    def cells(self) -> list[StudyCell]:
        """Seed by seed, so that one backbone and one partition serve all runs of a seed."""
        return [run.cells[index] for index in range(len(self.seeds)) for run in self.runs if index < len(run.cells)]

    def trial(self) -> Plan:
        """The same with the first seed alone, under a name of its own."""
        runs = tuple(replace(run, cells=run.cells[:1]) for run in self.runs)
        return replace(self, name=f"{self.name}-trial", seeds=self.seeds[:1], runs=runs)

    def only(self, methods: Sequence[str]) -> Plan:
        """The runs of these methods, and the reference; of tables, the rows and columns that have any of them.

        Raises ConfigError where there is no run of a method.
        """
        known = list(dict.fromkeys(run.method for run in self.runs))
        problems = [
            f"--methods: no run is of {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}"
            for name in dict.fromkeys(methods)
            if name not in known
        ]
        if problems or not methods:
            raise ConfigError(problems or ["--methods: must name at least one method"], "the command")
        runs = tuple(run for run in self.runs if run.method in methods or run.label == self.reference)
        tables = (table.only({run.label for run in runs}) for table in self.tables)
        there = {run.label for run in runs}
        claims = {
            name: claim for name, claim in self.claims.items() if all(there.issuperset(one) for one in claim.sums)
        }
        return replace(self, runs=runs, tables=tuple(table for table in tables if table is not None), claims=claims)


def plan_config(
    source: Experiment | Mapping[str, Any] | Path | str,
    methods: Sequence[str] | None,
    seeds: Sequence[int] | None,
    overrides: Sequence[str],
    reference: str | None,
    plugins: Sequence[str],
) -> Plan:
    """One run for each method, labelled with the method's title. Raises ConfigError with all problems.

    methods  a method that the configuration has, as its own or as a baseline, is taken with the arguments there; any
             other with its defaults and the rank and alpha of the configuration's own. Default: all that it has
    """
    experiment = load_experiment(source, overrides, plugins)
    blocks = method_blocks(experiment)
    problems: list[str] = []
    if methods is None:  # baselines first, as in a run's tables
        own, *others = blocks
        methods = [*others, own]
    if not methods:
        problems.append("--methods: must name at least one method")
    if repeated := sorted({name for name in methods if list(methods).count(name) > 1}):
        problems.append(f"--methods: {', '.join(repeated)} more than once")
    chosen: dict[str, Any] = {}
    for name in methods:
        try:
            chosen[name] = blocks.get(name) or _like(name, experiment.method)
        except ConfigError as error:
            problems += [problem.replace("method.name", "--methods", 1) for problem in error.problems]
    if problems:
        raise ConfigError(problems, "the command")
    base = {**to_dict(experiment), "baselines": []}
    base["federation"] |= NO_CHOICE  # a study can have a choice among its methods as a run
    collector = Collector(base, Path.cwd(), (), _chosen_seeds(seeds, None, experiment.federation.seed))
    for name, block in chosen.items():
        collector.run(run_title(name), {"method": block}, None)
    head = Head(experiment.name)
    if reference in chosen:  # a label too
        reference = run_title(reference)
    return _planned(collector, f"{experiment.name}-compare", head, [], reference, f"the methods for {experiment.name}")


def plan_study(
    study: Study,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    reference: str | None = None,
    trial: bool = False,
) -> Plan:
    """All runs of a study, those of its grids after the named ones. Raises ConfigError with all problems.

    overrides  `key=value` on top of every run, whatever the study says
    trial      runs as they are written, where settings are chosen that have not been yet, with the first seed alone
    """
    chosen = None if trial else frozen(study)
    every = _chosen_seeds(seeds, study.seeds, _own_seed(study))
    collector = _collector(study, overrides, every[:1] if trial else every)
    if study.choose and (both := sorted(set(every) & set(study.choose.seeds))):
        raise ConfigError([f"--seeds: settings are chosen by seed {both[0]}"], "the command")
    for label, entry in study.runs.items():
        settings = {} if chosen is None else chosen.settings[label]
        collector.run(label, {**entry.changes, **settings}, entry.paper, f"runs.{label}")
    tables = [add_grid(collector, name, grid, study.axes[name]) for name, grid in study.grids.items()]
    plan = _planned(collector, study.name, study.head, tables, reference or study.head.reference, study.where)
    if chosen is not None and plan.cells[0].experiment.evaluate.split == "val":
        raise ConfigError(["evaluate.split: val is what settings are chosen on; report them on test"], study.where)
    problems = claim_problems(study.claims, list(collector.labels))
    # Runs that a choice or the command has made equal are no mistake of the study's: their difference is zero.
    changed = tuple(override for override in overrides if not override.startswith("report."))
    if not (problems or study.choose or changed):
        problems = list(_of_one_run(study.claims, collector.labels))
    if problems:
        raise ConfigError(problems, study.where)
    return replace(
        plan,
        chosen=chosen,
        changed=changed,
        claims=_relabelled(study.claims, collector.labels),
    )


def _relabelled(claims: Mapping[str, Claim], labels: Mapping[str, str]) -> dict[str, Claim]:
    """Claims as contrasts of the runs that are kept: runs with equal settings are one run."""
    changed: dict[str, Claim] = {}
    for name, claim in claims.items():
        sums: list[dict[str, float]] = []
        for contrast in claim.sums:
            total: dict[str, float] = {}
            for label, weight in contrast.items():
                total[labels[label]] = total.get(labels[label], 0.0) + weight
            sums.append(total)
        changed[name] = replace(claim, better={}, order=[], contrasts=sums)
    return changed


def _of_one_run(claims: Mapping[str, Claim], labels: Mapping[str, str]) -> Iterator[str]:
    """Claims about runs that are one, for their settings are equal."""
    for name, claim in _relabelled(claims, labels).items():
        for written, kept in zip(claims[name].sums, claim.sums, strict=True):
            if says_nothing(kept):
                alike = " and ".join(label for label, weight in written.items() if weight)
                yield f"claims.{name}: {alike} are the same run, for their settings are equal"


def plan_choice(study: Study) -> tuple[Plan, Candidates]:
    """Every candidate of every run, on validation examples of the seeds that settings are chosen by.

    Raises ConfigError for a study that chooses nothing, and with all other problems.
    """
    if study.choose is None:
        raise ConfigError(["choose: this study does not say what is to be chosen, see docs/protocol.md"], study.where)
    chosen_path(study)  # refused now rather than when all candidates have run
    collector = _collector(study, ["report.plots=false"], tuple(study.choose.seeds))
    candidates = add_candidates(study, collector)
    if problem := _unknown(study.head.reference, list(study.runs)):  # told before anything runs
        collector.report(problem, "")
    head = Head(f"{study.head.title}: settings", "Candidates on validation examples.")
    return _planned(collector, f"{study.name}-choice", head, [], None, study.where), candidates


def _collector(study: Study, overrides: Sequence[str], seeds: tuple[int, ...]) -> Collector:
    """What collects the runs of a study. Raises ConfigError for changes that are none."""
    if problems := apply_overrides({}, overrides):  # reported once rather than for every run
        raise ConfigError(problems, "the command")
    base = {**copy.deepcopy(study.base), "baselines": []}
    base.setdefault("name", study.name)
    return Collector(base, study.folder, overrides, seeds)


def _own_seed(study: Study) -> Any:
    federation = study.base.get("federation", {})
    return federation.get("seed", 0) if isinstance(federation, Mapping) else 0


def _planned(
    collector: Collector, name: str, head: Head, tables: list[GridTable], reference: str | None, where: str
) -> Plan:
    """The plan, or all problems at once."""
    problems = [_placed(problem, places) for problem, places in collector.problems.items()]
    problems += _scored_alike(list(collector.runs.values()))
    if problem := _unknown(reference, list(collector.named)):
        problems.append(problem)
    if problems:
        raise ConfigError(problems, where)
    local = [run.label for run in collector.runs.values() if run.method == ALONE]
    chosen = collector.labels[reference] if reference is not None else [*local, *collector.runs][0]
    return Plan(name, head, collector.seeds, tuple(collector.runs.values()), tuple(tables), chosen)


def _unknown(reference: str | None, labels: Sequence[str]) -> str:
    """What is wrong with the label of the run that others are compared with; empty where nothing is."""
    if reference is None or reference in labels:
        return ""
    return f"reference: there is no run {reference!r}.{did_you_mean(reference, labels)} Known: {', '.join(labels)}"


def _like(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """A method with its defaults, and the rank and alpha of another one. Raises ConfigError for the name of none."""
    get_method(name)
    return sized_like(name, block)


def _chosen_seeds(requested: Sequence[int] | None, usual: Sequence[int] | None, seed: Any) -> tuple[int, ...]:
    if requested is not None and (problem := seeds_problem(requested)):
        raise ConfigError([f"--seeds: {problem}"], "the command")
    return tuple(requested or usual or (seed if isinstance(seed, int) else 0,))


def _scored_alike(runs: Sequence[PlannedRun]) -> Iterator[str]:
    """Settings that differ between runs, so that the numbers of one table would mean different things."""
    for name in ("split", "fold", "metrics", "generate", "wins", "by"):
        values: dict[str, str] = {}
        for run in runs:
            values.setdefault(json.dumps(getattr(run.cells[0].experiment.evaluate, name)), run.label)
        if len(values) > 1:
            listed = " and ".join(f"{value} ({label})" for value, label in list(values.items())[:2])
            yield f"evaluate.{name}: must be the same for all runs of a comparison, got {listed}"
    if any(run.cells[0].experiment.engine.kind != "local" for run in runs):
        yield "engine.kind: comparisons run on this machine (local)"


def _placed(problem: str, places: Sequence[str]) -> str:
    """A problem with the first place where it occurs, and the number of the others."""
    first, *others = dict.fromkeys(places)
    where = f"{first}: " if first else ""
    return f"{where}{problem}" + (f" (and {len(others)} more)" if others else "")
