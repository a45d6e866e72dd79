"""Settings that are chosen on validation examples, of seeds that nothing reports, and then kept: see docs/protocol.md.

`choose` runs every candidate and writes the winners beside the study; `frozen` reads them for the comparison.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from befit.adapters.keys import NOTHING
from befit.adapters.model import model_shapes
from befit.config.experiment import Experiment
from befit.core.errors import ConfigError
from befit.core.plugins import plugin_hash
from befit.core.storage import atomic_write
from befit.core.yamlfile import read_yaml, write_yaml
from befit.cost.compare import relative_cost
from befit.models import skeleton
from befit.protocol.registry import build_method
from befit.protocol.schedule import resolved_stages
from befit.runs.loading import load_federation, resolve_model, trains_head
from befit.studies.compare.cells import Collector
from befit.studies.compare.grids import SEPARATOR
from befit.studies.compare.statistics import paired
from befit.studies.compare.study import Choose, Study, label_text

Settings = Mapping[str, Any]  # by dotted key
_MEASURED: Settings = {"evaluate.split": "val", "evaluate.others": "never", "evaluate.newcomers": False}
TOLERANCE = 0.05  # by which a run may miss equal compute without a word, for its steps are whole
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frozen:
    """The chosen settings of a study's runs, by label, with the file that holds them and its hash."""

    file: str
    sha256: str
    seeds: tuple[int, ...]
    settings: Mapping[str, Settings]


@dataclass(frozen=True)
class Candidates:
    """What a choice tries.

    settings  by label of the study's run, each combination of values
    labels    of the planned run, by the study's label and the number of the combination; runs that have nothing to
              choose are left out, unless none has
    steps     train.max_steps of each run, where compute is made equal
    """

    settings: Mapping[str, Sequence[Settings]]
    labels: Mapping[tuple[str, int], str]
    steps: Mapping[str, int]


def chosen_path(study: Study) -> Path:
    """Where the chosen settings of a study are kept: beside its file. Raises ConfigError where it has none."""
    path = Path(study.where)
    if not path.is_file():
        problem = "choose: keeps what is chosen beside the study's file, and this study has none"
        raise ConfigError([problem], study.where)
    return path.with_suffix(".chosen.yaml")


def waits(study: Study) -> bool:
    """Whether settings of a study have still to be chosen."""
    return study.choose is not None and not chosen_path(study).is_file()


def fingerprint(study: Study) -> str:
    """A hash of everything that decides what is chosen: base, runs without the paper's numbers, and the choice."""
    runs = {label: {"method": entry.method, "set": entry.set} for label, entry in study.runs.items()}
    base = dict(study.base)
    if plugins := base.get("plugins"):  # by content: their paths differ from clone to clone
        base["plugins"] = sorted(map(plugin_hash, plugins))
    content = {"base": base, "runs": runs, "choose": asdict(_choose(study))}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def frozen(study: Study) -> Frozen | None:
    """The settings that were chosen for a study; None where it chooses nothing.

    Raises ConfigError where they have still to be chosen, or the study has changed since.
    """
    if study.choose is None:
        return None
    path = chosen_path(study)
    if not path.is_file():
        raise ConfigError([f"choose: nothing is chosen yet; run befit compare {study.where} --choose"], study.where)
    kept = read_yaml(path)
    whole = isinstance(kept, dict) and {"study", "seeds", "settings"} <= kept.keys()
    if not whole or kept["study"] != fingerprint(study) or kept["settings"].keys() != study.runs.keys():
        plugin = ", or to a plugin of it that has changed" if study.base.get("plugins") else ""
        problem = (
            f"choose: {path.name} belongs to other settings of this study{plugin}; run befit compare {study.where} "
            "--choose"
        )
        raise ConfigError([problem], study.where)
    for label, settings in kept["settings"].items():
        tried = {**study.choose.axes, **study.choose.runs.get(label, {})}
        if any(settings.get(key) not in values for key, values in tried.items()):
            raise ConfigError(
                [f"choose: {path.name} has settings for {label} that the study does not try"], study.where
            )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Frozen(path.name, sha256, tuple(kept["seeds"]), kept["settings"])


def add_candidates(study: Study, collector: Collector) -> Candidates:
    """Add every candidate of every run of a study to a comparison on validation examples."""
    choose = _choose(study)
    settings = {label: _combinations(choose, label) for label in study.runs}
    nothing = all(len(tried) == 1 for tried in settings.values())
    labels: dict[tuple[str, int], str] = {}
    steps: dict[str, int] = {}
    silent: dict[str, None] = {}  # methods, in their order
    budget = _budget(collector) if choose.compute == "equal" else (0, 0)
    for label, entry in study.runs.items():
        changes = entry.changes
        where = f"runs.{label}"
        if choose.compute == "equal":
            experiment, problems = collector.resolve(label, changes)
            for problem in problems:
                collector.report(problem, where)
            if experiment is None:
                continue
            if not build_method(experiment.method).work():
                silent[experiment.method["name"]] = None
                continue
            steps[label] = equal_steps(experiment, *budget, label)
            changes["train.max_steps"] = steps[label]
        if len(settings[label]) == 1 and not nothing:
            continue
        for number, combination in enumerate(settings[label]):
            name = SEPARATOR.join([label, *map(label_text, combination.values())])
            labels[label, number] = name
            collector.run(name, {**changes, **combination, **_MEASURED}, None, where)
    if silent:
        collector.report(
            f"choose.compute: Method.work does not say what a step of {', '.join(silent)} computes; define it "
            "(docs/plugins.md), or give the runs their steps and set choose.compute: as-written"
        )
    return Candidates(settings, {place: collector.labels.get(name, name) for place, name in labels.items()}, steps)


def _combinations(choose: Choose, label: str) -> list[Settings]:
    """What a run tries, as settings by dotted key; one without any where it tries nothing."""
    axes = {**choose.axes, **choose.runs.get(label, {})}
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _budget(collector: Collector) -> tuple[int, int]:
    """Rounds and steps of the base."""
    base, problems = collector.resolve("base", {})
    if base is None:
        raise ConfigError([f"base: {problem}" for problem in problems])
    rounds, most = base.federation.rounds, base.limit.rounds
    return rounds if most is None else min(rounds, most), base.train.max_steps


def equal_steps(experiment: Experiment, rounds: int, steps: int, label: str = "") -> int:
    """train.max_steps with which a client computes, in all rounds of this run, what `rounds` rounds of so many steps of
    one adapter cost; at least 1. That is by `befit cost`: what is computed on public records or beside training is not
    in it. Of several models, `model` counts, beside the smallest of all. `label` is the run's, for a warning.

    Raises ConfigError for a method that does not say what a step of it computes.
    """
    if experiment.train.epochs is not None:
        text = "counts steps, and train.epochs is by a client's examples; give train.max_steps, or as-written"
        raise ConfigError([f"choose.compute: equal {text}"])
    method = build_method(experiment.method)
    federation, resolved = load_federation(experiment), resolve_model(experiment)
    others = [family.model for family in resolved.families.values()]
    models = [resolved.model, *others, *([resolved.common_model] if resolved.common_model else [])]
    backbone, *more = (skeleton(model, federation.task, federation.label_names) for model in models)
    shapes = model_shapes(backbone, resolved.adapter.targets, trains_head(resolved, federation.task))
    parameters = _parameters(backbone)
    step = relative_cost(method, shapes, parameters, min(map(_parameters, more), default=None))["compute"]
    if step is None:
        raise ConfigError(
            [f"choose.compute: Method.work of {experiment.method['name']} does not say what a step computes"]
        )
    stages = resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)
    trained = [stage for stage in stages if stage.trains != NOTHING]
    exact = rounds * steps / (step * sum(stage.rounds or 0 for stage in trained))
    whole = max(1, round(exact))
    if abs(whole / exact - 1) > TOLERANCE:
        text = "%s: equal compute is %.2f steps a round, so its %d compute %+.0f %%; more train.max_steps come closer"
        _LOG.warning(text, label or experiment.name, exact, whole, 100 * (whole / exact - 1))
    return whole


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def stopped(
    study: Study,
    candidates: Candidates,
    scores: Mapping[str, Mapping[int, float]],
    lost: Collection[str] = (),
) -> dict[str, int]:
    """The planned runs that need no more seeds, by label, each with the number of seeds after which that was known.

    scores  of the planned runs by label and seed, so far
    lost    planned runs whose training diverged on some seed, so that nothing is stopped for being below them

    From the second seed on, a combination is out where the 95 % interval of the paired difference (`paired`) from the
    combination that is best so far, of the same run or family, lies below zero. A planned run is out where it is of
    no combination that is still in. The last seed decides nothing here.
    """
    seeds, last = _choose(study).seeds, dict[str, int]()
    for labels in _open(study, candidates):
        out = dict[int, int]()
        for count in range(2, len(seeds)):
            scored = {
                number: by_seed
                for number in set(range(len(candidates.settings[labels[0]]))) - out.keys()
                if not any(candidates.labels[label, number] in lost for label in labels)
                and (by_seed := _of_group(candidates, labels, number, scores, seeds[:count])) is not None
            }
            if not scored:
                break
            best = scored[max(sorted(scored), key=lambda number: statistics.fmean(scored[number]))]
            for number, values in scored.items():
                test = paired([value - best_value for value, best_value in zip(values, best, strict=True)])
                if test is not None and test["high"] is not None and test["high"] < 0:
                    out[number] = count
        for number in range(len(candidates.settings[labels[0]])):
            for label in labels:
                name = candidates.labels[label, number]
                last[name] = max(last.get(name, 0), out.get(number, len(seeds)))
    return {name: count for name, count in last.items() if count < len(seeds)}


def stop_text(about: str, stops: Mapping[str, int]) -> str:
    """What a comparison of candidates is about, with those that were stopped and by what rule."""
    if not stops:
        return about
    listed = "; ".join(f"{name} after {count}" for name, count in stops.items())
    return (
        f"{about} Seeds after which a candidate got no more, for it was below the best one of its run or family: the "
        f"95 % interval of the difference, paired by seed, lay below zero. {listed}."
    )


def _of_group(
    candidates: Candidates,
    labels: Sequence[str],
    number: int,
    scores: Mapping[str, Mapping[int, float]],
    seeds: Sequence[int],
) -> list[float] | None:
    """By seed, the mean over a group's runs of one combination; None where a score is missing."""
    names = [candidates.labels[label, number] for label in labels]
    if any(seed not in scores.get(name, {}) for name in names for seed in seeds):
        return None
    return [statistics.fmean(scores[name][seed] for name in names) for seed in seeds]


def _groups(study: Study) -> list[list[str]]:
    """The study's runs that are given one choice together."""
    groups = [list(labels) for labels in _choose(study).families.values()]
    grouped = {label for labels in groups for label in labels}
    return groups + [[label] for label in study.runs if label not in grouped]


def _open(study: Study, candidates: Candidates) -> list[list[str]]:
    """The groups of which candidates are compared."""
    return [labels for labels in _groups(study) if (labels[0], 0) in candidates.labels]


def pick(
    study: Study,
    candidates: Candidates,
    means: Mapping[str, Mapping[str, Any]],
    lost: Collection[str] = (),
) -> dict[str, Settings]:
    """By run, the combination with the highest mean, over the family's runs where it is in one; of equals the first.

    means  of the planned runs by label
    lost   planned runs whose combination cannot be chosen: it diverged, or `stopped` found it out
    Raises ConfigError where another candidate has no score, or all of a run have lost.
    """
    if missing := [name for name in candidates.labels.values() if not means.get(name) and name not in lost]:
        raise ConfigError([f"choose: {missing[0]} has no score; the same command tries it again"], study.where)
    chosen = {label: tried[0] for label, tried in candidates.settings.items()}
    for labels in _open(study, candidates):
        combinations = candidates.settings[labels[0]]
        names = [[candidates.labels[label, number] for label in labels] for number in range(len(combinations))]
        scores = {
            number: statistics.fmean(means[name]["mean"] for name in of)
            for number, of in enumerate(names)
            if not set(of) & set(lost)
        }
        if not scores:
            raise ConfigError([f"choose: training diverges with everything that {labels[0]} tries"], study.where)
        best = combinations[max(scores, key=lambda number: (scores[number], -number))]
        chosen |= dict.fromkeys(labels, best)
    steps = {label: {"train.max_steps": count} for label, count in candidates.steps.items()}
    return {label: {**steps.get(label, {}), **chosen[label]} for label in study.runs}


def write_choice(
    study: Study,
    candidates: Candidates,
    means: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Settings],
) -> Path:
    """Keep what was chosen beside the study, with the scores that it was chosen by."""
    path = chosen_path(study)
    scores = {
        label: [
            {**combination, **(_rounded(means.get(candidates.labels[label, number], {})) or {"diverged": True})}
            for number, combination in enumerate(candidates.settings[label])
        ]
        for label in study.runs
        if (label, 0) in candidates.labels
    }
    head = (
        f"# Chosen by `befit compare {path.name.replace('.chosen', '')} --choose`, on validation examples. The\n"
        "# comparison refuses this file once the study's base, runs, choices or plugins change.\n"
    )
    content = {
        "study": fingerprint(study),
        "seeds": list(_choose(study).seeds),
        "settings": {label: dict(combination) for label, combination in settings.items()},
        "scores": scores,
    }
    atomic_write(path, (head + write_yaml(content)).encode())
    return path


def _rounded(score: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if value is None else round(value, 6) for key, value in score.items()}


def _choose(study: Study) -> Choose:
    assert study.choose is not None
    return study.choose
