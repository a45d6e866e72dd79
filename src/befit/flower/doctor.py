"""What stands between a site and a federation: each thing looked at, what was found, and how to mend it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from befit.config import BENCHMARK_PATHS
from befit.errors import BefitError, RunError
from befit.flower.call import worker_file
from befit.flower.claim import claim
from befit.flower.doctor_server import authority, server_seen, servers_own
from befit.flower.finding import Finding
from befit.flower.site_file import SiteFile, load_site

__all__ = ["Finding", "examine"]


def examine(
    site: Path | None, server: str | None, ca: Path, key: Path, certificates: Path | None = None
) -> list[Finding]:
    """Look at versions, then at a site's machine, the server's, or both.

    site          a site's file: with its data, models, state and worker, the key and the server's authority
    server        HOST:PORT of the SuperLink, or None to leave it out
    ca, key       the server's authority and the site's private key
    certificates  on the server's machine, the folder that `befit flower certificates` wrote
    """
    findings = list(_versions())
    installed = find_spec("flwr") is not None  # which brings what reads keys
    if site is not None:
        findings += [*_site(site), *(_key(key) if installed else ()), *(authority(ca) if installed else ())]
    if certificates is not None and installed:
        findings += servers_own(certificates, server)
        ca = ca if site is not None else certificates / "ca.crt"
    if server and installed:
        findings += server_seen(server, ca)
    return findings


def _versions() -> Iterator[Finding]:
    yield Finding("befit", version("befit"))
    try:
        flower = version("flwr")
    except PackageNotFoundError:
        yield Finding("flwr", "not installed", "pip install 'befit[flower]'")
        return
    tested = tuple(map(int, flower.split(".")[:2])) in ((1, 41), (1, 42))
    yield Finding("flwr", flower, "" if tested else "install flwr>=1.41,<1.43, the same minor version as the server's")


def _site(path: Path) -> Iterator[Finding]:
    try:
        site = load_site(path)
    except BefitError as error:
        yield Finding("site's file", str(error), "befit flower node-config explains every key")
        return
    yield Finding("site's file", f"{path}, client {site.client}")
    for name, place in site.models.items():
        if place.startswith("/"):
            there = (Path(place) / "config.json").is_file()
            yield Finding(f"model {name}", place, "" if there else "this folder has no config.json; correct models")
        else:
            yield Finding(f"model {name}", f"{place}: ships with befit, or comes from the hub")
    for one in _read_by(site):
        yield Finding("data", one, "" if os.access(one, os.R_OK) else "it is missing or not readable; correct data")
    yield _state(site)
    resident = worker_file(site).exists()
    yield Finding("worker", "resident" if resident else "none; every message loads the backbone (befit worker)")


def _read_by(site: SiteFile) -> list[str]:
    """The files and folders that a site's data and benchmarks are in."""
    places = [site.data] if isinstance(site.data, str) else list((site.data or {}).values())
    if isinstance(site.benchmarks, dict):
        places += [given[key] for given in site.benchmarks.values() for key in BENCHMARK_PATHS if given.get(key)]
    return places


def _state(site: SiteFile) -> Finding:
    folder = Path(site.state)
    try:
        claim(site)
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except RunError as error:
        return Finding("state", str(error), "give every site a folder of its own, which this user can write")
    except OSError as error:
        return Finding("state", f"{folder}: {error.strerror}", "this user has to be able to write there; correct state")
    open_to = stat.S_IMODE(folder.stat().st_mode) & 0o077
    return Finding("state", str(folder), f"others can look into it: chmod 700 {folder}" if open_to else "")


def _key(path: Path) -> Iterator[Finding]:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        yield Finding("key", f"{path}: {error}", "befit flower keys makes one")
        return
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        yield Finding("key", f"{path} is no elliptic-curve key", "befit flower keys makes one")
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Finding("key", str(path), f"others can read it: chmod 600 {path}")
    else:
        yield Finding("key", str(path))
