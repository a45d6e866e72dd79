"""Flower's ServerApp: a befit run whose clients are sites."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import RunError
from befit.core.storage import read_sealed, write_sealed
from befit.flower.at_sites import hello, run_at_sites
from befit.flower.keys import NO_KEYS, fingerprints
from befit.flower.link import GridLink
from befit.flower.members import Members
from befit.flower.remote_clients import RemoteClients
from befit.flower.run_log import RunLog, tell_results, told_in_a_line
from befit.protocol.schedule import required_replies
from befit.protocol.secure.masks import FEWEST
from befit.runs.journal import Observer
from befit.runs.loading import resolve_model
from befit.runs.provenance import check_directory
from befit.runs.runner import Run, locked_for

_LOG = logging.getLogger(__name__)


def server_app(config: Path) -> ServerApp:
    """The app of one configuration. Flower's run settings: `out`, `resume`, `insecure`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("befit").setLevel(logging.INFO)
        settings = context.run_config
        out = Path(str(settings["out"])).expanduser()
        resume, pinned = bool(settings["resume"]), not settings["insecure"]
        with told_in_a_line(out):
            done = run_over(grid, load_experiment(config), out, resume, pinned, RunLog())
            tell_results(done.path, done.results)

    return app


def run_over(
    grid: Grid,
    experiment: Experiment,
    out: Path,
    resume: bool = False,
    pinned: bool = True,
    observer: Observer | None = None,
    poll_s: float = 0.5,
) -> Run:
    """Run an experiment over a grid, into the directory `out`; see `befit.runs.runner.run`.

    Which node is which client, and the run's name at the sites, are in `.sites.json` there; a resumed run needs it.
    """
    record = out / ".sites.json"
    before: Mapping[str, Any] = read_sealed(record) if resume and record.exists() else {}
    if resume and not before and (out / "config.yaml").exists():
        raise RunError(f"{out} was not run on Flower: it has no .sites.json")
    name = before.get("run") or f"{experiment.name[:60]}-{uuid.uuid4().hex}"  # people at sites see it too
    began = list(before.get("began", ()))
    experiment = resolve_model(experiment)
    check_directory(out, experiment, resume)  # before any site is greeted under a new run's name
    federation, engine = experiment.federation, experiment.engine
    said = dict(before.get("said", {}))
    clients = RemoteClients(experiment, said, before.get("backbones"))
    keys = fingerprints(engine.keys, clients.ids)
    if not keys and pinned:
        _LOG.warning("engine.keys lists no keys: %s", NO_KEYS)
    fewest = 1 if federation.secure_sums is None else FEWEST  # fewer have no sum

    def required(asked: int) -> int:
        return max(required_replies(federation.min_replies, asked), min(fewest, asked))

    nodes = {} if keys else dict(before.get("nodes", {}))
    members = Members(
        clients.ids,
        clients.problem,
        required(len(clients.ids)),
        "federation.min_replies" if fewest == 1 else f"federation.min_replies, and {fewest} for any secure sum",
        keys,
        pinned,
        nodes,
        said,
        awaited=clients.awaited,
    )

    def keep() -> None:
        if began:
            now = {
                "run": name,
                "nodes": members.nodes,
                "said": members.introductions,
                "began": began,
                "backbones": clients.backbones,
            }
            write_sealed(record, now)

    clients.read_backbones()
    greeting = hello(experiment, name)
    link = GridLink(grid, members, greeting, engine.wait_s, engine.deadline_s, required, keep, poll_s)
    with locked_for(out, experiment, resume, hand_on=True):  # another run would write its own names into the record
        link.gather()
        began = began or [client for client in clients.ids if client in members.met]
        host = clients.host(began)
        members.check_again(engine.wait_s)
        keep()
        return run_at_sites(experiment, link, name, host, out, resume, observer)
