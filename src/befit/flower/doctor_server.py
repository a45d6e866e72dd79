"""The server of a federation, as a site's machine sees it and on its own: certificate, names, dates, version, clock."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import json
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` is empty where it is in order."""

    what: str
    found: str
    mend: str = ""


NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
_SKEW_S = 10.0  # Flower refuses signed requests whose time is further off
_SOON = 30  # days
_EXPIRED = 10  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED
_NEW = "befit flower certificates makes new ones"
_ASK = "get ca.crt from the server's operator, a copy of the one beside the server's own certificate"


def authority(path: Path, mend: str = _ASK) -> Iterator[Finding]:
    """The server's authority, by which a site knows it; where it cannot be read, what to do."""
    ca = _read(path, "authority", mend)
    if isinstance(ca, Finding):
        yield ca
    else:
        yield Finding("authority", f"{path}, {_dates(ca)}", _expiry(ca, "ask the server's operator for a new ca.crt"))


def server_seen(server: str, ca: Path) -> Iterator[Finding]:
    """What is at HOST:PORT: whether it answers, by whose certificate, with which Flower, and its clock."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isdecimal() and 0 < int(port) < 2**16):
        yield Finding("server", server, "give it as HOST:PORT, with a port from 1 to 65535, such as 8000")
        return
    try:
        with answer_of(host, int(port), ca, "/openapi.json") as answer:
            description, date = answer.read(2**22), answer.getheader("date")
    except NO_ANSWER as error:
        yield Finding("server", f"{server}: {error}", _mend(error, host))
        if isinstance(error, ssl.SSLCertVerificationError):
            yield from _shown(host, int(port))
        return
    yield Finding("server", f"{server} answers over TLS")
    yield from _shown(host, int(port))
    yield from _version(description)
    if date:
        try:
            there = email.utils.parsedate_to_datetime(date)
        except ValueError:
            yield Finding("clocks", f"the server's date cannot be read: {date}", "compare both clocks by hand")
            return
        there = there.replace(tzinfo=there.tzinfo or datetime.UTC)
        skew = abs((there - datetime.datetime.now(datetime.UTC)).total_seconds())
        yield Finding("clocks", f"{skew:.0f} s apart", "" if skew <= _SKEW_S else "set both clocks by NTP")


@contextmanager
def answer_of(host: str, port: int, ca: Path, path: str) -> Iterator[http.client.HTTPResponse]:
    """What a server that the authority knows answers to GET, over a connection that is closed afterwards. Raises one of
    `NO_ANSWER` where it does not."""
    context = ssl.create_default_context(cafile=str(ca))
    with closing(http.client.HTTPSConnection(host, port, timeout=10, context=context)) as line:
        line.request("GET", path)
        yield line.getresponse()


def servers_own(folder: Path, server: str | None) -> Iterator[Finding]:
    """On the server's machine: what `befit flower certificates` wrote, and whether it fits together."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    yield from authority(folder / "ca.crt", _NEW)
    ca, certificate = _read(folder / "ca.crt", "authority", _NEW), _read(folder / "server.crt", "certificate", _NEW)
    key = folder / "server.key"
    if isinstance(certificate, Finding):
        yield certificate
        return
    host = (server or "").rpartition(":")[0].strip("[]")
    names = _names(certificate)
    other = f"it lacks the name {host}, which sites call: befit flower certificates {host}" if host else ""
    yield Finding(
        "certificate",
        f"for {', '.join(names)}, {_dates(certificate)}",
        _expiry(certificate, _NEW) or (other if host and host not in names else ""),
    )
    try:
        if not isinstance(ca, Finding):
            certificate.verify_directly_issued_by(ca)
    except Exception as error:  # whatever cryptography finds wrong: issuer, signature, algorithm
        yield Finding("certificate", f"server.crt is not signed by ca.crt ({error})", _NEW)
    try:
        public = load_pem_private_key(key.read_bytes(), None).public_key()
    except (OSError, ValueError, TypeError) as error:
        yield Finding("server's key", f"{key}: {error}", _NEW)
        return
    forms = [
        public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for public_key in (public, certificate.public_key())
    ]
    mend = "" if forms[0] == forms[1] else f"it is not the certificate's; {_NEW}"
    if not mend and stat.S_IMODE(key.stat().st_mode) & 0o077:
        mend = f"others can read it: chmod 600 {key}"
    yield Finding("server's key", str(key), mend)


def servers_app(folder: Path) -> Iterator[Finding]:
    """On the server's machine: the app of a run, its model, and whether every client is known by its key."""
    from befit.config.load import load_experiment
    from befit.core.errors import BefitError
    from befit.flower.app_folder import check_server
    from befit.flower.keys import NO_KEYS, fingerprints
    from befit.flower.remote_clients import client_ids
    from befit.runs.loading import resolve_model

    try:
        experiment = resolve_model(load_experiment(folder / "befit_app" / "experiment.yaml"))
        clients = client_ids(experiment)
        prints = fingerprints(experiment.engine.keys, clients)
        sources = check_server(experiment)
    except BefitError as error:
        yield Finding("app", str(error), "correct the configuration, and befit flower app writes it anew")
        return
    yield Finding("app", f"{folder}, for {len(clients)} clients, with {', '.join(sources)}")
    if prints:
        yield from (Finding(f"key of {client}", its) for client, its in prints.items())
    else:
        yield Finding("keys", "none", NO_KEYS)


def _read(path: Path, what: str, mend: str) -> Certificate | Finding:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        return Finding(what, f"{path}: {getattr(error, 'strerror', None) or error}", mend)


def names_in(path: Path) -> list[str]:
    """The names and addresses that a certificate's file is for; none where it cannot be read."""
    certificate = _read(path, "certificate", _NEW)
    return [] if isinstance(certificate, Finding) else _names(certificate)


def _names(certificate: Certificate) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _dates(certificate: Certificate) -> str:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return f"valid from {start:%Y-%m-%d} to {end:%Y-%m-%d}"


def _expiry(certificate: Certificate, mend: str) -> str:
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_before_utc > now:
        return "it is not valid yet: is this machine's clock right?"
    left = certificate.not_valid_after_utc - now
    if left.total_seconds() < 0:
        return f"it has expired; {mend}"
    return f"it expires in {left.days} days; {mend}" if left.days < _SOON else ""


def _shown(host: str, port: int) -> Iterator[Finding]:
    """The certificate that a server shows, believed or not."""
    from cryptography import x509

    try:
        shown = x509.load_pem_x509_certificate(ssl.get_server_certificate((host, port), timeout=10).encode())
    except (OSError, ValueError):
        return
    yield Finding(
        "server's certificate",
        f"for {', '.join(_names(shown)) or 'no names'}, {_dates(shown)}",
        _expiry(shown, f"the server's operator has to make new ones: befit flower certificates {host}"),
    )


def _version(description: bytes) -> Iterator[Finding]:
    """Flower's version at the server, which its description of itself holds."""
    try:
        there = str(json.loads(description)["info"]["version"])
    except (ValueError, KeyError, TypeError, RecursionError):
        yield Finding("server's flwr", "it does not say; is it a SuperLink?")
        return
    here = version("flwr")
    same = there.split(".")[:2] == here.split(".")[:2]
    yield Finding(
        "server's flwr", there[:40], "" if same else f"here it is {here}: install the same minor version on both sides"
    )


def _mend(error: Exception, host: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return f"its certificate has expired: the operator makes new ones with befit flower certificates {host}"
        return f"ca.crt is another server's, or its certificate lacks the name {host}: befit flower certificates {host}"
    if isinstance(error, (ssl.SSLError, http.client.HTTPException)):
        return "the server there does not speak TLS"
    if isinstance(error, socket.gaierror):
        return f"no name server knows {host}; correct the name, or give the address"
    if isinstance(error, FileNotFoundError):
        return "the server's operator has ca.crt"
    if isinstance(error, OSError):
        return "is the SuperLink running, and does a firewall let this machine out to it?"
    return "correct the address"
