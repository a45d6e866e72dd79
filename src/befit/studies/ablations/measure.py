"""An ablation from its configuration to runs, tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment, ReportSettings, to_dict
from befit.config.load import load_experiment, names_runs, read_source
from befit.config.overrides import seeded, seeds_problem
from befit.core.errors import ConfigError
from befit.core.storage import atomic_write
from befit.core.yamlfile import write_yaml
from befit.data.limit import limit_sentence, trial_overrides
from befit.protocol.check import without_examples
from befit.protocol.registry import build_method
from befit.runs.journal import Observer
from befit.runs.loading import resolve_model
from befit.runs.provenance import environment, locked
from befit.studies.ablations import base
from befit.studies.ablations.base import Ablation, Findings, Row
from befit.studies.ablations.seed import FEDERATED, LOCAL, Seed, changed, end_of, federated_rounds
from befit.studies.compare.execute import Runner
from befit.studies.compare.plan import plan_study
from befit.studies.compare.study import read_study


@dataclass(frozen=True)
class FinishedAblation:
    """A finished ablation: its directory, the content of its ablation.json, and its findings."""

    path: Path
    results: dict[str, Any]
    findings: Findings


@dataclass(frozen=True)
class AblationInput:
    """What an ablation runs on.

    seeds  those of a study; a configuration has one, in its experiment
    run    label of the study's run; nothing for a configuration
    """

    experiment: Experiment
    seeds: tuple[int, ...] | None = None
    run: str = ""


def choose(
    name: str,
    source: Experiment | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    trial: bool = False,
) -> AblationInput:
    """The experiment of a configuration, or the first run of a study that is of the ablation's method.

    trial  everything once: one seed, round and step on two clients of each family with a few records

    Raises ConfigError with all problems, and for a study that has no such run, or several whose settings differ in more
    than the method's options, so that there is no first among equals.
    """
    entry = base.get(name)
    values, *_ = read_source(source)
    overrides = trial_overrides(overrides) if trial else overrides
    mark = "-trial" if trial else ""
    if not names_runs(values):
        experiment = load_experiment(source, overrides, plugins)
        return AblationInput(replace(experiment, name=experiment.name + mark))
    assert not isinstance(source, Experiment)
    plan = plan_study(read_study(source, plugins))
    runs = {
        run.label: load_experiment(run.cells[0].experiment, overrides)
        for run in plan.runs
        if run.method == entry.method
    }
    if not runs:
        methods = ", ".join(dict.fromkeys(run.method for run in plan.runs))
        raise ConfigError([f"runs: {name} needs a run of {entry.method}, and these are of {methods}"], plan.name)
    settings = [replace(experiment, name="", method={}) for experiment in runs.values()]
    if any(setting != settings[0] for setting in settings):
        problem = (
            f"runs: {', '.join(runs)} are of {entry.method}, with different settings; give those that differ beside "
            "the study, such as benchmark.alpha=0.5"
        )
        raise ConfigError([problem], plan.name)
    label, experiment = next(iter(runs.items()))
    return AblationInput(replace(experiment, name=plan.name + mark), plan.seeds[:1] if trial else plan.seeds, label)


def ablate(
    name: str,
    config: AblationInput | Experiment | Mapping[str, Any] | Path | str,
    *,
    options: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    out: Path | str | None = None,
    observer: Observer | None = None,
) -> FinishedAblation:
    """Run what the ablation compares, for every seed, unless `out` has it, and write the results.

    config    a configuration; or a study, which stands for its first run of the ablation's method; or what `choose`
              made of either
    options   of the ablation, by name
    seeds     each changes adapters and batches, and the partition of a benchmark that has a seed; default: those of
              the study, or the configuration as it is
    out       directory of all ablations of this configuration, default runs/<name>-ablations; the results are in
              <out>/<ablation>/, the runs in <out>/runs/, and what they share in <out>/shared/
    observer  called with events, as `befit.runs.runner.run` calls it, after one of kind "planned" with all `runs`

    A grid of options is also left as <out>/<ablation>/study.yaml, for `befit compare`, which finds its runs in `out`.
    Raises ConfigError for an ablation that does not go with the configuration, and whatever `befit.run` raises.
    """
    chosen_run = config if isinstance(config, AblationInput) else choose(name, config)
    seeds = chosen_run.seeds if seeds is None else seeds
    experiment = replace(resolve_model(chosen_run.experiment), baselines=[], report=ReportSettings(plots=False))
    experiment = replace(
        experiment,
        engine=replace(experiment.engine, workers=1),  # runs in several processes share no stages
        evaluate=replace(experiment.evaluate, every=0, newcomers=False),
    )
    ablation, chosen = _check(name, options, experiment, seeds)
    root = Path("runs") / f"{experiment.name}-ablations" if out is None else Path(out)
    total = federated_rounds(experiment)
    keep = tuple(sorted({*ablation.checkpoints(total), total}))
    # The first run alone keeps rounds: one that does takes no federated stage over from another.
    experiment = replace(experiment, checkpoint=replace(experiment.checkpoint, keep=()))
    runner, tell = Runner(), observer or (lambda event: None)
    all_seeds = [Seed(seeded_experiment, root, runner, keep, tell) for seeded_experiment in seeded(experiment, seeds)]
    labels = [FEDERATED, *([LOCAL, *ablation.variants()] if ablation.variants() else ["measure"])]
    tell({"kind": "planned", "runs": [seed.label(label) for seed in all_seeds for label in labels]})
    rows: list[Row] = []
    described: dict[str, Any] = {}
    with locked(root):
        for seed in all_seeds:
            host = seed.host
            if problems := [f"{name} {text}" for text in without_examples(ablation.splits, host.federation)]:
                raise ConfigError(problems)
            rows += [{"seed": seed.experiment.federation.seed, **row} for row in ablation.rows(seed)]
            described = {
                "metric": host.task.metric,
                "task": host.federation.task,
                "backbone": host.fingerprint,
                "data": f"{host.federation.name} {host.federation.version}".strip(),
                "environment": environment(host),
            }
        findings = ablation.findings(rows, described["metric"])
        if limited := limit_sentence(asdict(experiment.limit)):
            findings = replace(findings, sentences=[limited, *findings.sentences])
        about = {"ablation": name, "run": chosen_run.run, "options": chosen, **described}
        results = _results(about, experiment, rows, findings)
        from befit.studies.ablations.page import write_ablation

        write_ablation(root / name, results, findings.tables, findings.figures)
        if ablation.variants():
            title, used = results["title"], [seed.experiment.federation.seed for seed in all_seeds]
            study = _study(title, ablation, experiment, used)
            atomic_write(root / name / "study.yaml", write_yaml(study).encode())
    return FinishedAblation(root / name, results, findings)


def _results(
    about: Mapping[str, Any], experiment: Experiment, rows: Sequence[Row], findings: Findings
) -> dict[str, Any]:
    """What ablation.json holds.

    about  name of the ablation, its options, and what it was run on
    """
    entry = base.get(about["ablation"])
    return {
        **about,
        "title": entry.title,
        "summary": entry.summary,
        "about": entry.docstring,
        "name": experiment.name,
        "method": experiment.method["name"],
        "seeds": list(dict.fromkeys(row["seed"] for row in rows)),
        "split": experiment.evaluate.split,
        "config": to_dict(experiment),
        "rows": list(rows),
        "findings": {
            "sentences": list(findings.sentences),
            "tables": [
                {"title": table.title, "headers": table.titles, "rows": table.texts, "note": table.note}
                for table in findings.tables
            ],
        },
    }


def _study(title: str, ablation: Ablation, experiment: Experiment, seeds: Sequence[int]) -> dict[str, Any]:
    """The runs of a grid as a study."""
    block = experiment.method
    runs = {LOCAL: end_of(block, 0.0), FEDERATED: end_of(block, 1.0)}
    runs |= {label: changed(block, changes) for label, changes in ablation.variants().items()}
    return {
        "study": {"title": f"{title}: {experiment.name}", "reference": LOCAL},
        "base": {key: value for key, value in to_dict(experiment).items() if key != "baselines"},
        "seeds": list(seeds),
        "runs": {label: {"method": method} for label, method in runs.items()},
    }


def _check(
    name: str, options: Mapping[str, Any] | None, experiment: Experiment, seeds: Sequence[int] | None
) -> tuple[Ablation, dict[str, Any]]:
    """The ablation and all its options. Raises ConfigError with all problems, before any data is read."""
    entry = base.get(name)
    problems: list[str] = []
    if experiment.method["name"] != entry.method:
        raise ConfigError(
            [f"method.name: {name} needs a configuration of {entry.method}, this one is of {experiment.method['name']}"]
        )
    ablation, chosen = base.build(name, options)
    for label, changes in ablation.variants().items():
        try:
            build_method(changed(experiment.method, changes))
        except ConfigError as error:
            problems += [f"{name} has a run {label!r}, and there {problem}" for problem in error.problems]
    total = federated_rounds(experiment)
    if late := sorted(round_ for round_ in ablation.checkpoints(total) if round_ > total):
        problems.append(
            f"ablation.rounds: {', '.join(map(str, late))} are beyond the {total} rounds of the federated "
            "branch (method.rounds_fedit or federation.rounds)"
        )
    if seeds is not None and (problem := seeds_problem(seeds)):
        problems.append(f"--seeds: {problem}")
    if experiment.evaluate.split == "val":
        problems.append(
            "evaluate.split: ablations score on test examples, so that what is picked on validation "
            "examples is not scored on them; got val"
        )
    if experiment.engine.kind != "local":
        problems.append(f"engine.kind: ablations run on this machine (local), not {experiment.engine.kind}")
    if problems:
        raise ConfigError(problems)
    return ablation, chosen
