"""`befit doctor`: what keeps a machine from taking part in a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from befit.cli.output import Json, print_json, screen, show_table
from befit.report.table import Table

__all__ = ["doctor"]


def doctor(
    site: Annotated[
        Path | None, typer.Argument(metavar="SITE", help="The site's file. Default: site.yaml.", show_default=False)
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="The SuperLink.")] = None,
    ca: Annotated[Path, typer.Option("--ca", metavar="FILE", help="The server's authority.")] = Path("ca.crt"),
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The site's private key.")] = Path("keys/site.key"),
    certificates: Annotated[
        Path | None,
        typer.Option("--certificates", metavar="DIR", help="On the server's machine: its certificates, without SITE."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for what keeps a site or a server from taking part in a federation, and say how to mend it.

    At a site: versions, its file, data, models, state, key and the server's authority; with --server also the server,
    its certificate, its version of Flower and its clock. Exit code 2 if something is wrong.
    """
    from befit.flower.doctor import examine

    if site is None and certificates is None:
        site = Path("site.yaml")
    findings = examine(site, server, ca, key, certificates)
    in_order = not any(finding.mend for finding in findings)
    if as_json:
        print_json({"in_order": in_order, "findings": [*map(vars, findings)]})
    else:
        rows = [[finding.what, finding.found, finding.mend or "in order"] for finding in findings]
        show_table(screen(), Table("", ["what", "found", "how to mend it"], rows), wrap=(1, 2))
    if not in_order:
        raise typer.Exit(2)
