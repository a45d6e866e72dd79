"""Certificates and keys: a certificate authority of one's own, the server's certificate, and a site's key pair."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from befit.core.errors import ConfigError, RunError

_KIND = "ecdsa-sha2-"  # what the line of a public elliptic-curve key begins with
NO_KEYS = (
    "the first registered site that says it is a client is that client; list each one's site.pub under engine.keys"
)
_DAYS = 825  # the longest that common TLS libraries accept


def write_certificates(out: Path, hosts: Sequence[str], days: float = _DAYS) -> list[Path]:
    """A certificate authority and a server certificate for `hosts`, names or addresses, each valid for `days`.

    Written are ca.crt, which every site needs; server.crt and server.key, which stay with the SuperLink. The
    authority's own key is not kept, so nobody can issue another certificate in its name: a new server needs a new
    authority. Raises RunError rather than overwrite.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    if not hosts:
        raise ConfigError(["a certificate needs the name or address under which sites reach the server (--host)"])
    paths = [out / name for name in ("ca.crt", "server.crt", "server.key")]
    _refuse_existing(paths)
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)  # for clocks that are a little behind
    end = start + datetime.timedelta(days=days)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(named("befit federation"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
        )

    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    uses = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    usage = dict.fromkeys(uses.split(), False)
    authority = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        builder(named("befit federation"), ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**{**usage, "key_cert_sign": True, "crl_sign": True}), critical=True)
        .add_extension(authority, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    server = (
        builder(named(hosts[0]), server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{**usage, "digital_signature": True}), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for path, data in zip(
        paths, (ca.public_bytes(Encoding.PEM), server.public_bytes(Encoding.PEM), private), strict=True
    ):
        _write(path, data, secret=path.suffix == ".key")
    return paths


def write_site_keys(out: Path) -> list[Path]:
    """A site's key pair, as `ssh-keygen -t ecdsa -b 384` makes it: site.key stays here, site.pub goes to the server."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    paths = [out / "site.key", out / "site.pub"]
    _refuse_existing(paths)
    key = ec.generate_private_key(ec.SECP384R1())
    _write(paths[0], key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), secret=True)
    _write(paths[1], key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n", secret=False)
    return paths


class SiteIdentity:
    """Signs for one site, and knows the others by the public keys of its own file; see
    `befit.protocol.secure.client.Identity`.

    client, key  the site and its private key's file
    peers        the other sites' public keys, each as a file or as its line
    Raises ConfigError where one of them is none.
    """

    def __init__(self, client: str, key: str, peers: Mapping[str, str]) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

        try:
            own = load_ssh_private_key(Path(key).read_bytes(), None)
        except Exception as error:  # whatever cryptography says to another file
            raise ConfigError([f"key: {key} is no site.key that befit flower keys makes"], "the site's file") from error
        if not isinstance(own, ec.EllipticCurvePrivateKey):
            raise ConfigError([f"key: {key} is no elliptic-curve key"], "the site's file")
        self._own = own
        self._known = {other: load_ssh_public_key(public_key(line).encode()) for other, line in peers.items()}
        self._known[client] = own.public_key()

    def sign(self, text: bytes) -> bytes:
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA384

        return self._own.sign(text, ECDSA(SHA384()))

    def is_of(self, client: str, text: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
        from cryptography.hazmat.primitives.hashes import SHA384

        public = self._known.get(client)
        if not isinstance(public, EllipticCurvePublicKey):
            return False
        try:
            public.verify(signature, text, ECDSA(SHA384()))
        except InvalidSignature:
            return False
        return True


def public_key(place: str) -> str:
    """A site's public key in one line, as `site.pub` has it, from that file or from the line itself.

    Raises ConfigError for what is neither.
    """
    text = place
    if not place.startswith(_KIND):
        try:
            text = Path(place).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{place}: {getattr(error, 'strerror', None) or 'no public key'}"]) from error
    if not (line := _line(text.encode())):
        raise ConfigError([f"{place}: is no public key; a site's is the site.pub that befit flower keys makes"])
    return line.decode()


def fingerprint(key: bytes) -> str:
    """SHA-256 of a public elliptic-curve key, in PEM or as one line, as `ssh-keygen -l` prints it; "" for another."""
    if not (line := _line(key)):
        return ""
    hashed = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(hashed).decode().rstrip('=')}"


def _line(key: bytes) -> bytes:
    """A public elliptic-curve key, in PEM or as one line, as one line without a comment; empty for another."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_public_key,
        load_ssh_public_key,
    )

    try:
        loaded = (load_ssh_public_key if key.startswith(_KIND.encode()) else load_pem_public_key)(key)
    except Exception:  # whatever cryptography says to bytes from elsewhere
        return b""
    if not isinstance(loaded, ec.EllipticCurvePublicKey):
        return b""
    return loaded.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def fingerprints(keys: Mapping[str, str], clients: Sequence[str]) -> dict[str, str]:
    """Fingerprint of each client's key. Raises ConfigError unless every client has one of its own, or none has any."""
    prints = {client: fingerprint(public_key(key).encode()) for client, key in keys.items()}
    problems = [f"engine.keys: {client} is no client of this run" for client in prints.keys() - set(clients)]
    if prints:
        problems += [f"engine.keys: has none for {client}" for client in clients if client not in prints]
    first: dict[str, str] = {}
    for client, its in prints.items():
        if first.setdefault(its, client) != client:
            problems.append(f"engine.keys: {client} has the key of {first[its]}; a client is one site")
    if problems:
        raise ConfigError(sorted(problems))
    return prints


def _general_name(host: str):
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _refuse_existing(paths: Sequence[Path]) -> None:
    if existing := [str(path) for path in paths if path.exists()]:
        raise RunError(f"{', '.join(existing)} exist already; keys are not overwritten")


def _write(path: Path, data: bytes, secret: bool) -> None:
    """A secret file is readable by its owner alone from its first byte on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(number, "wb") as file:
            file.write(data)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
