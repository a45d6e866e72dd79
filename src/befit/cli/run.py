"""`befit run` and `befit demo`: train, show progress, print the tables and where everything was written."""

from __future__ import annotations

import shlex
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import (
    Imports,
    Json,
    Overrides,
    Quiet,
    Trial,
    messages,
    print_json,
    remember_config,
    say,
    screen,
    show_table,
    show_written,
    training,
)
from befit.core.storage import read_json
from befit.report.numbers import gain_text
from befit.runs.progress import Progress

if TYPE_CHECKING:
    from befit.config.experiment import Experiment
    from befit.report.results import RunResults
    from befit.runs.runner import Run

Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Run directory. Default: runs/NAME.")]

SHOWN_CLIENTS = 40


def demo(
    out: Out = None,
    seed: Annotated[int, typer.Option(help="Seed of partition, adapters and batches.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ten sites with few handwritten digits each: alone, FedIT, Potara and FedDPA compared, in a minute on a laptop.

    Everything it needs comes with befit: no download, no GPU. Called again, it continues where it was interrupted, and
    shows a finished run's tables.
    """
    from befit.config.load import load_experiment

    experiment = load_experiment(demo_config(seed))
    options = f" --seed {seed}" * (seed != 0) + (f" --out {shlex.quote(str(out))}" if out else "")
    out = out or Path("runs", f"demo-{seed}" if seed else "demo")
    if (out / "results.json").exists() and not quiet:
        say(f"{out} holds this run already: here are its tables. --out names a folder for a new one", "dim", messages())
    _run(experiment, out, True, as_json, quiet, other_seeds(), again=f"befit demo{options}")


def demo_config(seed: int) -> dict[str, Any]:
    """The configuration of the demo, with one seed for partition, adapters and batches."""
    from befit.core.yamlfile import parse_yaml

    values = parse_yaml(files("befit.cli").joinpath("demo.yaml").read_text(encoding="utf-8"), "demo.yaml")
    values["benchmark"]["seed"] = values["federation"]["seed"] = seed
    return values


def other_seeds() -> str:
    """What the demo's runs come to on the seeds that docs/results.md reports, in a sentence."""
    reported = read_json(Path(str(files("befit.cli").joinpath("demo_seeds.json"))))

    def gain(value: float) -> str:
        return gain_text(value, reported["metric"])

    seeds, sites = reported["seeds"], reported["sites"]
    parts = [
        f"{label} {gain(run['mean'])} points over training alone (95 % interval {gain(run['low'])} to "
        f"{gain(run['high'])}), {run['gained']:.1f} of {sites} sites gained"
        for label, run in reported["runs"].items()
    ]
    return f"On average over {len(seeds)} other seeds ({seeds[0]} to {seeds[-1]}): {'; '.join(parts)}."


def run(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", callback=remember_config, help="Configuration in YAML, such as those in configs/."
        ),
    ],
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    trial: Trial = False,
    imports: Imports = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Federate, personalise, export every client's adapter and write a report."""
    from befit.config.load import load_experiment
    from befit.core.errors import ConfigError
    from befit.data.limit import trial_overrides
    from befit.runs.provenance import default_directory
    from befit.studies.compare.study import is_study

    if trial and config.is_file() and is_study(config):
        raise ConfigError([f"this is a study, which names runs: befit compare {config} --trial"], str(config))
    changes = trial_overrides(overrides or ()) if trial else overrides or ()
    experiment = load_experiment(config, changes, imports or ())
    if trial:
        experiment = replace(experiment, name=f"{experiment.name}-trial")
    out = out or default_directory(experiment.name, resume)
    if resume and not (out / "config.yaml").exists():
        say(f"{out} holds no run to go on with: it starts from nothing", "yellow", messages())
    _run(experiment, out, resume, as_json, quiet)


def report(run: Annotated[Path, typer.Argument(metavar="DIR", help="A finished run's directory.")]) -> None:
    """Write a finished run's report again, with plots. Runs of a comparison have reports without."""
    from befit.report import write_report

    write_report(run)
    show_written([("report", str(run / "report.html")), ("report as text", str(run / "report.md"))])


def _run(
    experiment: Experiment,
    out: Path,
    resume: bool,
    as_json: bool,
    quiet: bool,
    closing: str = "",
    again: str = "",
) -> None:
    """again  the command that goes on after an interruption; default: `befit run` on the run's own configuration"""
    from befit.config.experiment import run_names

    name, *baselines = run_names(experiment)
    names = [*baselines, name]  # in the order in which they run
    source = experiment.benchmark.name if experiment.benchmark else "your files"
    with training(as_json, quiet, lambda: _resume_hint(out, again)) as console:
        from befit.runs.runner import run as run_experiment

        with Progress(console, names, title=f"{experiment.name}: {source}", quiet=quiet) as progress:
            done = run_experiment(experiment, out=out, resume=resume, observer=progress)
    if as_json:
        print_json({"path": str(done.path), "results": done.results})
    else:
        _show(done, closing)
    results = done.results
    if results["failures"] and results["summary"].get("mean") is None:
        reason = results["failures"][0]["reason"]
        say(f"no client has a model that could be scored; the first reason: {reason}", "red", messages())
        raise typer.Exit(1)


def _resume_hint(out: Path, again: str) -> str:
    config = out / "config.yaml"
    if not config.is_file():
        return f"nothing was saved in {out} yet"
    command = f"befit run {shlex.quote(str(config))} --out {shlex.quote(str(out))} --resume"
    return f"resume with: {again or command}"


def _show(done: Run, closing: str) -> None:
    """What came out, the `closing` sentence after the reading of it, and where everything is."""
    from befit.report import newcomers, tables
    from befit.report.groups import group_tables
    from befit.report.headline import headline

    console = screen()
    results = done.results
    shown = [
        tables.client_table(results),
        tables.summary_table(results).without("std", "processor time"),  # so that it fits 80 columns
        *group_tables(results),
        newcomers.newcomer_table(results),
        newcomers.newcomer_summary_table(results),
        tables.communication_table(results),
    ]
    for table in filter(None, shown):
        console.print()
        show_table(console, table, SHOWN_CLIENTS)
    console.print()
    console.print(headline(done.results), markup=False)
    if sentences := newcomers.newcomer_sentences(done.results):
        console.print()
        console.print(" ".join(sentences), markup=False)
    if closing:
        console.print()
        console.print(closing, markup=False)
    show_written(written(done.path, done.results))


def written(path: Path, results: RunResults) -> list[tuple[str, str]]:
    """The files of a run that a person may want to open: what each is, and its path."""
    from befit.report.record import adapters_of
    from befit.report.results import newcomers_of

    named = (("report", "report.html"), ("report as text", "report.md"), ("numbers", "results.json"))
    rows = [(what, str(path / name)) for what, name in named if (path / name).exists()]
    for group, view in (("clients", results), ("newcomers", newcomers_of(results))):
        adapters = adapters_of(view["clients"]) if view else []
        if not adapters:
            continue
        leaf = adapters[0].rpartition("/")[2]
        kind = "PEFT" if leaf == "adapter" else "transformers"
        whose = "newcomers'" if group == "newcomers" else f"{leaf}{'s' * (len(adapters) > 1)}"
        place = Path(adapters[0]).parts[0] if group == "clients" else group  # those that clients deploy, or their own
        rows.append((f"{len(adapters)} {whose} ({kind})", str(path / place / "*" / leaf)))
    if (path / "outbound.json").exists():
        rows.append(("what left the clients", str(path / "outbound.json")))
    return rows
