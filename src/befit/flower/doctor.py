"""What stands between a site and a federation: each thing looked at, what was found, and how to mend it."""

from __future__ import annotations

import datetime
import email.parser
import email.utils
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from befit.errors import BefitError, RunError
from befit.flower.call import worker_file
from befit.flower.claim import claim
from befit.flower.site_file import SiteFile, load_site

__all__ = ["Finding", "examine"]

_SKEW_S = 10.0  # Flower refuses signed requests whose time is further off


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` is empty where it is in order."""

    what: str
    found: str
    mend: str = ""


def examine(site: Path, server: str | None, ca: Path, key: Path) -> list[Finding]:
    """Look at versions, the site's file, its data, models and state, the key, the certificate, the server and clocks.

    server  HOST:PORT of the SuperLink, or None to leave it out
    """
    findings = [*_versions(), *_site(site)]
    if find_spec("flwr"):  # which brings what reads keys
        findings += [*_key(key), *_certificate(ca), *(_server(server, ca) if server else ())]
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
    for one in [site.data] if isinstance(site.data, str) else list((site.data or {}).values()):
        yield Finding("data", one, "" if os.access(one, os.R_OK) else "it is missing or not readable; correct data")
    yield _state(site)
    resident = worker_file(site).exists()
    yield Finding("worker", "resident" if resident else "none; every message loads the backbone (befit worker)")


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


def _certificate(path: Path) -> Iterator[Finding]:
    from cryptography import x509

    try:
        ca = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        yield Finding("authority", f"{path}: {error}", "the server's operator has ca.crt")
        return
    left = (ca.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    yield Finding("authority", f"{path}, {left} days left", "" if left > 0 else "it has expired; ask for a new ca.crt")


def _server(server: str, ca: Path) -> Iterator[Finding]:
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        yield Finding("server", server, "give it as HOST:PORT")
        return
    mends: list[tuple[type[Exception], Callable[[Exception], str]]] = [
        (ssl.SSLCertVerificationError, lambda error: "ca.crt is another server's, or its certificate lacks this name: "
                                                     f"befit flower certificates {host}"),
        (ssl.SSLError, lambda error: "the server there does not speak TLS"),
        (OSError, lambda error: "is the SuperLink running, and does a firewall let this machine out to it?"),
    ]  # fmt: skip
    try:
        context = ssl.create_default_context(cafile=str(ca))
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as line,
        ):
            line.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = line.recv(4096).decode(errors="replace")
    except (OSError, ValueError) as error:
        mend = next((say(error) for kind, say in mends if isinstance(error, kind)), "correct the address")
        yield Finding("server", f"{server}: {error}", mend)
        return
    yield Finding("server", f"{server} answers over TLS")
    dates = [
        value.strip()
        for name, _, value in (line.partition(":") for line in answer.splitlines())
        if name.lower() == "date"
    ]
    if dates:
        skew = abs((email.utils.parsedate_to_datetime(dates[0]) - datetime.datetime.now(datetime.UTC)).total_seconds())
        yield Finding("clocks", f"{skew:.0f} s apart", "" if skew <= _SKEW_S else "set both clocks by NTP")
