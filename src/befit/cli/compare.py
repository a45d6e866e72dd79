"""`befit compare`: methods over seeds from a study or a configuration, with tables and plots. Knows no method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import (
    Imports,
    each_warning,
    messages,
    only_json,
    print_json,
    print_table,
    print_warning,
    screen,
    show_table,
    warnings_to,
)

if TYPE_CHECKING:
    from befit.studies.compare.comparison import Compared
    from befit.studies.compare.plan import Plan

TRIAL_HELP = "Does all of it run? One seed, round and step on two clients (of each family) with four records a task."


def compare(
    source: Annotated[Path, typer.Argument(metavar="STUDY|CONFIG", help="A study, or an experiment, in YAML.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to all its runs, such as train.lr=3e-4.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="NAME,NAME,...",
            help="Which of an experiment's (default: its own, its baselines) or of a study's, whose reference stays.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N,N,...", help="Repeat for each of them, such as 0,1,2.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Processes that share the runs.")] = 1,
    reference: Annotated[
        str | None, typer.Option("--reference", metavar="RUN", help="Whom wins and tests are against. Default: local.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Finished runs there are used. Default: runs/NAME.")
    ] = None,
    trial: Annotated[bool, typer.Option("--trial", help=TRIAL_HELP)] = False,
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compare methods over seeds: tables with spread and tests, plots, LaTeX.

    The same command again, after a crash too, goes on where it stopped: every run is in DIR/runs, and done once.
    """
    from befit.cli.progress import CompareProgress
    from befit.config.overrides import parse_seeds

    console = messages()
    with only_json(as_json), warnings_to(console, but=() if quiet else ("befit.runs.journal",)):
        if not quiet:
            console.print("befit is loading …", style="dim")
        from befit.studies.compare.comparison import compare as run_comparison
        from befit.studies.compare.comparison import make_plan

        plan = make_plan(
            source,
            methods=_names(methods),
            seeds=parse_seeds(seeds),
            overrides=overrides or (),
            reference=reference,
            trial=trial,
            plugins=imports or (),
        )
        progress = CompareProgress(console, plan, jobs=jobs, quiet=quiet)
        try:
            with progress:
                done = run_comparison(plan, jobs=jobs, out=out, observer=progress)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on where it stopped", style="yellow")
            raise typer.Exit(130) from None
    if as_json:
        print_json({"path": str(done.path), "results": done.results, "failures": [vars(one) for one in done.failures]})
    else:
        _show(plan, done)
    if done.failures:
        for one in done.failures:
            text = f"{one.label}, seed {one.seed}: {one.error}"
            console.print(text, style="red", markup=False, soft_wrap=True)
        console.print(
            f"{len(done.failures)} of {len(plan.cells)} runs failed; the same command tries them again", style="red"
        )
        raise typer.Exit(1)


def check_study(study: Path, overrides: Sequence[str], imports: Sequence[str], data: bool, as_json: bool) -> None:
    """What `befit check` says of a study."""
    logged: list[str] = []
    with only_json(as_json), each_warning(logged.append):
        from befit.studies.compare.check import check_plan
        from befit.studies.compare.comparison import make_plan

        plan = make_plan(study, overrides=overrides, plugins=imports)
        found = check_plan(plan, data)
    found["warnings"] = list(dict.fromkeys([*logged, *found["warnings"]]))
    if as_json:
        print_json(found)
        return
    console = screen()
    console.print(f"{study}: no mistakes", style="green", markup=False)
    if not data:
        console.print("Data and models were not looked at.", style="dim")
    console.print()
    rows = [
        (one["run"], one["method"]["name"], "reference" if one["run"] == found["reference"] else "")
        for one in found["runs"]
    ]
    print_table(console, ("run", "method", ""), rows, title=found["title"])
    for one in found["left_out"]:
        where = ", ".join((*one["row"], *one["column"]))
        console.print(f"left out of {one['table']}: {where}: {one['because']}", markup=False, soft_wrap=True)
    console.print()
    seeds = ", ".join(map(str, found["seeds"]))
    console.print(f"{len(found['runs'])} runs with seeds {seeds}: {found['cells']} cells", markup=False)
    for warning in found["warnings"]:
        print_warning(messages(), warning)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _show(plan: Plan, done: Compared) -> None:
    if done.results is None:
        return
    from befit.studies.compare.tables import all_tables

    console = screen()
    for table in all_tables(done.results):
        if not table.detail:
            console.print()
            show_table(console, table)
    console.print()
    for sentence in done.results["sentences"]:
        console.print(sentence, markup=False)
    console.print()
    console.print("Written", style="bold italic")
    files: dict[str, Any] = {
        "page with plots": "html",
        "as text": "md",
        "for LaTeX": "tex",
        "every client's score": "csv",
        "all of it": "json",
    }
    for what, suffix in files.items():
        console.print(f"{what:22} {done.path / f'compare.{suffix}'}", markup=False, soft_wrap=True)
    if done.results["wins"]:
        console.print(f"{'wins by group':22} {done.path / 'compare-wins.csv'}", markup=False, soft_wrap=True)
    console.print(f"{'runs with adapters':22} {done.path / 'runs'}", markup=False, soft_wrap=True)
