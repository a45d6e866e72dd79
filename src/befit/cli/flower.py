"""`befit flower …`, `befit worker` and `befit doctor`: what a federation on many machines needs."""

from __future__ import annotations

import logging
import shlex
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import (
    Imports,
    Json,
    Overrides,
    messages,
    print_json,
    remember_config,
    say,
    screen,
    show_table,
    warnings_to,
)
from befit.core.errors import ConfigError
from befit.core.text import to_install
from befit.report.table import Table

if TYPE_CHECKING:
    from befit.config.experiment import Experiment

app = typer.Typer(no_args_is_help=True, help="Run the same configuration on many machines, over Flower.")


@app.command("init")
def init(
    consortium: Annotated[
        Path | None,
        typer.Argument(metavar="CONSORTIUM", help="Server, sites and run, in YAML. Without it, an example is written."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Folder to write; existing keys, certificates and changed files are kept."
        ),
    ] = Path("federation"),
    as_json: Json = False,
) -> None:
    """Write all that a federation needs from one file: certificates, keys, each site's file, services, the app.

    And run-here.sh, which runs all of it on this machine. Without CONSORTIUM: write consortium.yaml, a commented
    example that runs as it is.
    """
    _need_extra()
    from befit.core.storage import atomic_write
    from befit.flower.app_folder import fill
    from befit.flower.consortium import load_consortium
    from befit.flower.consortium_folder import write_consortium

    if consortium is None:
        example = Path("consortium.yaml")
        if example.exists():
            raise ConfigError([f"{example} exists already: befit flower init {example} writes its federation"], "here")
        atomic_write(example, fill(example.name).encode())
        parts = [(str(example), f"an example that runs as it is: befit flower init {example}")]
    else:
        with warnings_to(messages()):
            parts = [(str(out / name), what) for name, what in write_consortium(load_consortium(consortium), out)]
    if as_json:
        print_json(dict(parts))
        return
    for path, what in parts:
        say(f"{path}: {what}")


@app.command("app")
def write(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", callback=remember_config, help="Configuration in YAML.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write, new or empty.")],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="Where the server writes the run. Default: runs/NAME."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="For trials on one machine, without TLS and node authentication.")
    ] = False,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="For all clients on this machine, in Flower's simulation runtime.")
    ] = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Write a Flower app directory for a configuration; `flwr run` starts it."""
    from befit.config.load import load_experiment
    from befit.flower.app_folder import start_command, write_app
    from befit.flower.keys import NO_KEYS

    experiment = load_experiment(config, [*(overrides or ()), "engine.kind=flower"], imports or ())
    runs = (run_dir or Path("runs") / experiment.name).resolve()
    with warnings_to(messages()):
        clients = write_app(experiment, out, runs, insecure, simulation)
    start = start_command(out, clients, simulation)
    if as_json:
        print_json({"app": str(out), "run_dir": str(runs), "clients": clients, "start": start})
        return
    rows = [
        ("Flower app", str(out)),
        ("run directory", f"{runs} (on the SuperLink's machine)"),
        ("waits for", ", ".join(clients)),
        ("start it with", start),
    ]
    if not (experiment.engine.keys or insecure or simulation):
        rows.append(("keys", f"none: {NO_KEYS}"))
    if experiment.plugins:
        stay = f"{', '.join(experiment.plugins)} (stay here: a site loads what its own file names under plugins)"
        rows.append(("plugins", stay))
    for what, where in rows:
        say(f"{what:22} {where}")


@app.command("certificates")
def certificates(
    hosts: Annotated[
        list[str], typer.Argument(metavar="HOST", help="Names and addresses that sites use for the server.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for ca.crt, server.crt and server.key.")
    ] = Path("certificates"),
    as_json: Json = False,
) -> None:
    """Make a certificate authority and the server's certificate, on the server's machine."""
    _need_extra()
    from befit.flower.keys import write_certificates

    _written(
        write_certificates(out, hosts),
        as_json,
        {
            "ca.crt": "give it to every site and to whoever calls flwr run",
            "server.crt": "stays with the SuperLink",
            "server.key": "stays with the SuperLink; secret",
        },
    )


@app.command("keys")
def keys(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for site.key and site.pub.")] = Path("keys"),
    as_json: Json = False,
) -> None:
    """Make a site's key pair, at the site. The server's operator registers the public half."""
    _need_extra()
    from befit.flower.keys import write_site_keys

    _written(
        write_site_keys(out),
        as_json,
        {
            "site.key": "stays at this site; secret",
            "site.pub": "send it to the server's operator: flwr supernode register site.pub befit",
        },
    )


def _need_extra() -> None:
    """Raise ConfigError unless the extra `flower` is installed, which brings Flower and makes keys."""
    if not find_spec("flwr"):
        raise ConfigError([f"the extra flower is not installed: {to_install('flower')}"], "this environment")


def _written(paths: list[Path], as_json: bool, meaning: dict[str, str]) -> None:
    if as_json:
        print_json({path.name: str(path) for path in paths})
        return
    rows = [[str(path), meaning[path.name]] for path in paths]
    show_table(screen(), Table("", ["file", "what to do with it"], rows), wrap=1)


@app.command("node-config")
def node_config(
    site: Annotated[Path, typer.Argument(metavar="SITE", help="The site's file; it is read and checked.")] = Path(
        "site.yaml"
    ),
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The SuperLink.")] = "HOST:8000",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="CONFIG", help="A configuration in YAML, or its app folder: show what it would mean here."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain what a site sets, what it agrees to with that, and print the command that connects it.

    With --run, what a configuration's methods would send and bring in, and why the site would refuse it. As at the site
    itself, no code is loaded but the plugins that the site's own file names.
    """
    from befit.core.plugins import ignore_entry_points, load_plugins
    from befit.core.schema import plain
    from befit.flower import commands
    from befit.flower.consent import promises, refused_run, terms_of
    from befit.flower.site_file import SiteFile, load_site
    from befit.flower.untold import untold_in

    ignore_entry_points()
    site_file = load_site(site) if site.exists() else None
    if site_file is None and run is not None:
        raise ConfigError([f"--run: needs the site's file, and there is no {site}"], "the command")
    load_plugins([] if site_file is None else site_file.plugins)
    experiment = None if run is None else _experiment_of(run)
    keys = _explained(SiteFile, site_file)
    command = shlex.join(commands.supernode(site.resolve(), server))
    agreed = [] if site_file is None else terms_of(site_file, experiment)
    sentences = [] if site_file is None else promises(site_file)
    problems = [] if site_file is None or experiment is None else refused_run(site_file, experiment)
    untold = "" if site_file is None or experiment is None or problems else untold_in(site_file, experiment)
    if as_json:
        listed = {name: {"type": type_, "means": means} for name, type_, _, means in keys}
        values = None if site_file is None else plain(site_file)
        consent = {"always": sentences, "methods": [*map(vars, agreed)], "refused": problems, "untold": untold}
        print_json({"keys": listed, "site": values, "consent": consent, "command": command})
        if problems:
            raise typer.Exit(2)
        return
    console = screen()
    rows = [[name, value, means] for name, _, value, means in keys]
    show_table(console, Table(f"{site}", ["key", "this site" if site_file else "", "meaning"], rows), wrap=2)
    if site_file is None:
        console.print(f"\n{site} does not exist yet; the shortest one:\n\n{EXAMPLE}", markup=False)
    else:
        for sentence in sentences:
            say(f"- {sentence}")
        terms_table = [
            [terms.method, terms.leaves, terms.arrives, str(terms.updates), terms.mend or "nothing"] for terms in agreed
        ]
        header = ["method", "leaves the site", "comes in", "updates, at most", "what its file lacks for it"]
        show_table(console, Table("What each method means for this site", header, terms_table), wrap=(1, 2, 4))
    if experiment is not None:
        say(f"\nThis site would {'refuse' if problems else 'take part in'} {run}.")
        for problem in problems:
            say(f"  {problem}")
        if untold:
            say(f"  {untold}.")
    say(f"\nConnect the site with\n\n  {command}")
    if problems:
        raise typer.Exit(2)


def _experiment_of(path: Path) -> Experiment:
    """A server's experiment, of a file or of the folder that `befit flower app` wrote, without the server's plugins."""
    from befit.config.load import experiment_from, read_source

    file = path / "befit_app" / "experiment.yaml" if path.is_dir() else path
    values, folder, where, name = read_source(file)
    return experiment_from({key: value for key, value in values.items() if key != "plugins"}, folder, where, name)


def _explained(kind: Any, values: Any, path: str = "") -> list[tuple[str, str, str, str]]:
    """Of every key, those in blocks too: its dotted name, its type, its value at this site, and what it means."""
    from befit.core.schema import parameters_of, type_words

    rows: list[tuple[str, str, str, str]] = []
    for parameter in parameters_of(kind):
        value = None if values is None else getattr(values, parameter.name)
        if is_dataclass(parameter.type):
            rows += _explained(parameter.type, value, f"{path}{parameter.name}.")
        else:
            shown = "" if values is None else _short(value)
            rows.append((f"{path}{parameter.name}", type_words(parameter.type), shown, parameter.description))
    return rows


@app.command("executor")
def executor(
    node: Annotated[
        str, typer.Option("--node", metavar="HOST:PORT", help="Where the SuperNode is, by its --host and --port.")
    ] = "127.0.0.1:9094",
    secret: Annotated[
        Path | None,
        typer.Option("--secret", metavar="FILE", help="The SuperNode's --superexec-auth-secret-file."),
    ] = None,
) -> None:
    """For a slow site: answer a SuperNode's messages by processes that start at once.

    The SuperNode has to run with --isolation process. Flower gives a process 30 seconds to start, and without this a
    site that needs more answers nothing.
    """
    _need_extra()
    from befit.flower.executor import serve_messages

    serve_messages(node, secret)


EXAMPLE = """  client: hospital-a
  data: data/train.jsonl
  models: {HuggingFaceTB/SmolLM2-135M: /models/smollm2-135m}
"""


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def worker(
    site: Annotated[Path, typer.Argument(metavar="SITE", help="The site's own file.")] = Path("site.yaml"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write no log.")] = False,
) -> None:
    """Stay in memory at a site, so that rounds need not load the backbone first.

    Flower starts a new process for every message. With a worker it only passes the message on; without one, or when it
    is gone, that process does the work itself, with the same numbers.
    """
    console = messages()
    if not quiet:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        console.print("befit is loading …", style="dim")
    from befit.flower.worker import serve_site

    serve_site(site, lambda address: console.print(f"the worker of {site} listens at {address}", soft_wrap=True))


def doctor(
    site: Annotated[
        Path | None, typer.Argument(metavar="SITE", help="The site's file. Default: site.yaml.", show_default=False)
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="The SuperLink.")] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="The server's authority. Default: ca.crt beside SITE.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="The site's private key. Default: keys/site.key beside SITE."),
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option("--certificates", metavar="DIR", help="On the server's machine: its certificates, without SITE."),
    ] = None,
    run_app: Annotated[
        Path | None,
        typer.Option("--app", metavar="DIR", help="On the server's machine: the app of a run, without SITE."),
    ] = None,
    checklist: Annotated[
        bool, typer.Option("--checklist", help="Instead: list the points of docs/security.md as done or not.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check whether a site or a server can take part in a federation, and how to fix what is wrong.

    At a site: versions, its file, data, models, state, key and the server's authority; with --server also the server,
    its certificate, its version of Flower and its clock. At the server: its certificates, and with --app whether every
    client of a run is known by its key. Exit code 2 if something is wrong. With --checklist: what has to be so before
    real records are used, at the site, or at the server where --certificates or --app is given; exit code 2 if a point
    is not done.
    """
    from befit.flower.doctor import examine

    if site is None and certificates is None and run_app is None:
        site = Path("site.yaml")
    beside = Path() if site is None else site.parent
    ca, key = ca or beside / "ca.crt", key or beside / "keys" / "site.key"
    with warnings_to(messages()):
        findings = examine(site, server, ca, key, certificates, run_app)
    in_order = not any(finding.mend for finding in findings)
    if checklist:
        from befit.flower.checklist import NOT, checked

        servers = certificates is not None or run_app is not None
        authority = certificates / "ca.crt" if certificates is not None and site is None else ca
        points = checked(findings, site, run_app, server, authority, servers)
        in_order = not any(point.status == NOT for point in points)
        if as_json:
            print_json({"in_order": in_order, "points": [*map(vars, points)]})
        else:
            rows = [
                [f"{point.at}: {point.point}", point.status, "; ".join(filter(None, (point.found, point.mend)))]
                for point in points
            ]
            show_table(screen(), Table("", ["point", "", "what was found, and what to do"], rows), wrap=(1, 2))
    elif as_json:
        print_json({"in_order": in_order, "findings": [*map(vars, findings)]})
    else:
        rows = [[finding.what, " ".join(finding.found.split()), finding.mend or "in order"] for finding in findings]
        show_table(screen(), Table("", ["what", "found", "how to mend it"], rows), wrap=(1, 2))
    if not in_order:
        raise typer.Exit(2)
