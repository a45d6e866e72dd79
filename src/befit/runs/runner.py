"""Runs as a person asks for them: a configuration in, a directory with adapters, numbers and a report out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

from befit.config.experiment import Experiment, method_blocks, to_dict
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.names import method_folder
from befit.core.storage import read_sealed, write_json
from befit.protocol.registry import get_method
from befit.report.results import RunResults
from befit.report.table import aligned, html
from befit.report.tables import overview_table
from befit.runs.artifacts import gone_from
from befit.runs.clients import check_choice
from befit.runs.deploy import CHOICE, choices_of, deployed_results, put_deployed
from befit.runs.directory import METHOD_RESULTS, finished
from befit.runs.engines import Engines, pick_threads, plain_torch, threads
from befit.runs.host import Host, shared
from befit.runs.journal import Observer
from befit.runs.loading import resolve_model
from befit.runs.method_run import MethodRun, missing_of
from befit.runs.progress import Progress, watched
from befit.runs.provenance import (
    check_directory,
    check_inputs,
    check_same,
    default_directory,
    environment,
    identify,
    locked,
)
from befit.runs.shared_stages import SharedFolder, forget_shared_stages, repeated_keys, shared_stages_keys
from befit.runs.trackers import check_trackers, tracked
from befit.runs.write_results import write_results


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, and the content of its results.json."""

    path: Path
    results: RunResults

    def __repr__(self) -> str:
        """A row for each method, and where the report is."""
        return f"{aligned(overview_table(self.results))}\n\nreport: {self.path / 'report.html'}"

    def __fspath__(self) -> str:
        """Its directory, so that a run stands for it: `befit.predict(run, "north", ["a text"])`."""
        return str(self.path)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return f"{html(overview_table(self.results))}<p>report: {escape(str(self.path / 'report.html'))}</p>"


@plain_torch()
def run(
    config: Experiment | Mapping[str, Any] | Path | str,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    quiet: bool = False,
    host: Host | None = None,
    engines: Engines | None = None,
    shared_stages: SharedFolder | None = None,
) -> Run:
    """Federate, personalise, export and report.

    config    an experiment, its fields as a mapping, or the path of a YAML file
    out       the run directory; default runs/<name>, or the first of runs/<name>-2, … that has no results yet, and with
              `resume` the last of them
    resume    go on where `out` was interrupted, with bit-identical numbers; a finished run comes back as it is
    observer  called with an event (a dict with a "kind") whenever something happened; without one, a terminal or a
              notebook shows how far the run is
    quiet     show nothing
    host      the loaded experiment, for callers that run one more than once; a finished run of other data is refused
    engines   makes the engine for one method, by its label and block, where clients are not on this machine
    shared_stages  a folder: stages that other runs have too are taken from there, or left there; see
              `befit.runs.shared_stages`. Methods of this run share their stages without it

    Raises ConfigError, DataError, ModelError for what the user can mend, RunError for a directory that cannot be used,
    NotEnoughReplies when too many clients failed.
    """
    experiment = resolve_model(load_experiment(config))
    check_trackers(experiment.trackers)
    if experiment.engine.kind != "local" and engines is None:
        raise ConfigError(
            [
                f"engine.kind: {experiment.engine.kind} runs at sites: befit flower app CONFIG --out DIR "
                "makes what Flower runs; engine.kind=local does the same run on this machine"
            ]
        )
    path = default_directory(experiment.name, resume) if out is None else Path(out)
    check_choice(experiment)
    check_directory(path, experiment, resume)
    configs = method_blocks(experiment)
    name, *labels = configs
    folders = {label: method_folder(path, label, name) for label in (*labels, name)}
    if resume and (results := _finished_before(path, folders.values(), experiment)) is not None:
        if host is not None:
            check_same(path, host)
        elif engines is None:
            check_inputs(path, experiment)
        return Run(path, cast(RunResults, results))
    loaded = _host_for(experiment, configs, host)
    from befit.report import write_report

    with (
        locked_for(path, experiment, resume),
        threads(pick_threads(loaded)),
        watched(observer, quiet, lambda console: Progress(console, [*labels, name], experiment.name)) as observer,
        tracked(experiment.trackers, path, name, to_dict(experiment), observer) as observer,
    ):
        identify(path, loaded)
        write_json(path / "env.json", environment(loaded))
        alike = repeated_keys(
            key for block in configs.values() for key in shared_stages_keys(experiment, block).values()
        )
        folder = shared_stages or (SharedFolder(path / "shared_stages", alike) if alike else None)
        if experiment.privacy.unit != "none":
            folder = None  # each run counts what it releases itself

        def played(label: str) -> dict[str, Any]:
            return MethodRun(loaded, configs[label], label, folders[label], observer, engines, folder).results()

        baselines = {label: played(label) for label in labels}
        results = played(name)
        if experiment.federation.deploy == "best":
            baselines[name] = results
            newcomers = {"newcomers": results["newcomers"]} if "newcomers" in results else {}
            margin, here = experiment.federation.deploy_margin, results["clients"] if engines is None else ()
            choices = choices_of(folders, here, margin)
            name, results = CHOICE, {**deployed_results(baselines, loaded.task.metric, choices), **newcomers}
            if engines is None:
                put_deployed(path, folders, results["clients"], margin)
        majority = loaded.majority() if engines is None else {}
        write_results(path, loaded, name, results, baselines, majority)
        forget_shared_stages(path / "shared_stages", alike)
        write_report(path, plots=experiment.report.plots)
    return Run(path, cast(RunResults, read_sealed(path / "results.json")))


@contextmanager
def locked_for(path: Path, experiment: Experiment, resume: bool, hand_on: bool = False) -> Iterator[None]:
    """The directory for this run alone. Looks at it again, since another run may have been there while the model was
    read. `hand_on`: for `run` to go on with."""
    with locked(path, hand_on):
        check_directory(path, experiment, resume)
        yield


def _finished_before(path: Path, folders: Iterable[Path], experiment: Experiment) -> dict[str, Any] | None:
    """The results of a run that has ended, where neither the report nor anything of its methods is missing."""
    results = finished(path / "results.json")
    if results is None or not (path / "report.html").exists() or not (path / "run.json").exists():
        return None
    if experiment.federation.deploy == "best" and gone_from(path, results["clients"].values()):
        return None
    of_methods = ((folder, finished(folder / METHOD_RESULTS)) for folder in folders)
    gone = any(found is not None and missing_of(folder, found, experiment) for folder, found in of_methods)
    return None if gone else results


def _host_for(experiment: Experiment, configs: Mapping[str, Mapping[str, Any]], host: Host | None) -> Host:
    """The host given, or a new one, for these methods. Raises ConfigError where they cannot run on it."""
    if experiment.engine.workers > 1 and (here := [name for name in configs if _of_this_process(configs[name])]):
        raise ConfigError(
            [
                f"engine.workers: {here[0]} was registered in this process alone, and others do not know it; put it "
                "into a file and name that in `plugins`, or set engine.workers: 1"
            ]
        )
    if host is None:
        host = Host(experiment)
    elif shared(host.experiment) != shared(experiment):
        raise ConfigError(
            ["the host was made for another experiment: data, models, seed and what is measured must be the same"]
        )
    host.experiment = experiment
    host.check_methods(configs)
    return host


def _of_this_process(block: Mapping[str, Any]) -> bool:
    """Whether a method is from a script or a notebook, which worker processes do not load."""
    return get_method(block["name"]).factory.__module__ == "__main__"


def check(config: Experiment | Mapping[str, Any] | Path | str) -> dict[str, Any]:
    """Resolve an experiment without training it: parameters, bytes per round, memory; see `befit.runs.estimate`."""
    from befit.runs.estimate import estimate

    return estimate(load_experiment(config))
