"""Flower's ServerApp: a befit run whose clients are sites."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from befit.config.experiment import Experiment, load_experiment
from befit.core.errors import RunError
from befit.core.storage import read_json, write_json
from befit.flower.at_sites import hello, run_at_sites
from befit.flower.link import GridLink
from befit.flower.remote_clients import client_ids
from befit.runs.journal import Observer
from befit.runs.runner import Run

_LOG = logging.getLogger(__name__)


def server_app(config: Path) -> ServerApp:
    """The app of one configuration. Flower's run settings: `out`, `resume`, `insecure`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("befit").setLevel(logging.INFO)
        settings = context.run_config
        done = run_over(
            grid,
            load_experiment(config),
            Path(str(settings["out"])).expanduser(),
            resume=bool(settings["resume"]),
            pinned=not settings["insecure"],
        )
        _LOG.info("the run is finished: %s", done.path)

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
    before: Mapping[str, Any] = read_json(record) if resume and record.exists() else {}
    if resume and not before and (out / "config.yaml").exists():
        raise RunError(f"{out} was not run on Flower: it has no .sites.json")
    name = before.get("run") or uuid.uuid4().hex
    link = GridLink(grid, experiment.engine.deadline_s, pinned, before.get("nodes"), poll_s)
    hellos = link.gather(
        client_ids(experiment), hello(experiment, name), experiment.engine.wait_s, before.get("said", {})
    )
    write_json(record, {"run": name, "nodes": link.nodes, "said": hellos})
    return run_at_sites(experiment, link, name, hellos, out, resume, observer)
