"""`befit worker`: a process that stays at a site and holds the backbone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from befit.cli.output import messages

__all__ = ["worker"]


def worker(
    site: Annotated[Path, typer.Argument(metavar="SITE", help="The site's own file.")] = Path("site.yaml"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No log.")] = False,
) -> None:
    """Stay resident at a site, so that no round begins with loading the backbone.

    Flower starts a new process for every message. With a worker it only passes the message on; without one, or when it
    is gone, that process does the work itself, with the same numbers.
    """
    console = messages()
    if not quiet:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        console.print("befit is loading …", style="dim")
    from befit.flower.worker import serve_site

    serve_site(site, lambda address: console.print(f"the worker of {site} listens at {address}", soft_wrap=True))
