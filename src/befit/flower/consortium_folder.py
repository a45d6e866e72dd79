"""The folder of a federation: certificates, keys, each site's file, services, the app, and a script that tries it."""

from __future__ import annotations

import getpass
import hashlib
import logging
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from befit.core.errors import ConfigError, RunError
from befit.core.storage import atomic_write, read_json, write_json
from befit.core.version import __version__
from befit.core.yamlfile import write_yaml
from befit.flower import commands
from befit.flower.app_folder import fill, write_app
from befit.flower.consortium import AWAY, EVERYWHERE, Consortium, SiteEntry
from befit.flower.doctor_server import names_in
from befit.flower.keys import public_key, write_certificates, write_site_keys

_LOG = logging.getLogger(__name__)
_OPEN = (
    "server.listen: port %d opens to all networks of this machine, and whoever reaches it can start code at the sites "
    "and register keys: let only the sites reach it (docs/security.md, Who is trusted with what)"
)
_LOOPBACK = ("127.0.0.1", "localhost")
_BIN = Path(sys.executable).parent
_WRITTEN = ".written.json"  # the hash of every file of the last call, by its name in the folder


def write_consortium(consortium: Consortium, out: Path) -> list[tuple[str, str]]:
    """Write or renew the folder `out`, which stays on the server; returns its parts, each with what it is for.

    Certificates and keys are made where there are none and never changed; all other files are written anew, but those
    that are not as the last call wrote them: such a file stays, with NAME.new beside it. Sites' folders, and those of
    the server and of the runs, only this user can read. Raises ConfigError where certificates that are there do not
    fit, RunError where something cannot be written.
    """
    out = out.resolve()
    experiment, server, sites = consortium.experiment, consortium.server, consortium.sites
    runs = out / "runs" / experiment.name
    _closed(out / "runs")
    _closed(out / "server")  # superlink.db has every message
    _certificates(out / "server" / "certificates", (server.host, *_LOOPBACK, consortium.near))
    if consortium.listen == EVERYWHERE:
        _LOG.warning(_OPEN, server.port)
    for site in sites:
        _keys(out / "sites" / site.folder, site.place.key)
    keys = {site.client: str(_folder(out, site) / "keys" / "site.pub") for site in sites}
    lines = {client: public_key(path) for client, path in keys.items()}
    public_keys = lines if experiment.federation.secure_sums is not None else {}
    _remove_app(out / "app")
    write_app(replace(experiment, engine=replace(experiment.engine, keys=keys)), out / "app", runs)
    certificate = (out / "server" / "certificates" / "ca.crt").read_bytes()
    texts = {**_server(consortium, out), **_scripts(consortium, out, runs)}
    for site in sites:
        of_site = _site(site, consortium, out, public_keys)
        texts |= {f"sites/{site.folder}/{name}": text for name, text in of_site.items()}
    files = {name: text.encode() for name, text in texts.items()}
    kept = _renew(out, files | {f"sites/{site.folder}/ca.crt": certificate for site in sites})
    return [
        ("run-here.sh", "runs all of it on this machine, over loopback with TLS"),
        ("README.md", "the commands, for this machine and for several"),
        ("server", "the SuperLink's certificates and service; certificates/server.key is secret"),
        *((f"sites/{site.folder}", _meant(site)) for site in sites),
        ("app", f"what Flower runs; the run will be in {runs}"),
        *((f"{name}.new", f"what {name} would be now; it was changed since, so it stayed as it is") for name in kept),
    ]


def _renew(out: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write files of the folder; returns those that somebody has changed since the last call. These stay, for what a
    site agrees to is the site's to say, and what they would be now is beside them, as NAME.new."""
    record = out / _WRITTEN
    written: dict[str, str] = read_json(record) if record.exists() else {}
    kept = []
    for name, data in files.items():
        path = out / name
        before = path.read_bytes() if path.exists() else data
        changed = before != data and _hash(before) != written.get(name)
        beside = path.with_name(f"{path.name}.new")
        atomic_write(beside if changed else path, data, 0o755 if path.suffix == ".sh" else 0o644)
        if changed:
            kept.append(name)
        else:
            beside.unlink(missing_ok=True)
    write_json(record, {name: _hash(data) for name, data in files.items()})
    return kept


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _meant(site: SiteEntry) -> str:
    if site.place.host is None:
        return f"{site.client}, on this machine"
    secret = "" if site.place.key else "; its keys/site.key is secret"
    return f"{site.client}: copy it to {site.place.host}, as {AWAY}{secret}"


def _folder(out: Path, site: SiteEntry) -> Path:
    return out / "sites" / site.folder


def _certificates(folder: Path, hosts: Sequence[str]) -> None:
    hosts = list(dict.fromkeys(hosts))
    if not (folder / "server.crt").exists():
        write_certificates(folder, hosts)
    elif lacking := [host for host in hosts if host not in names_in(folder / "server.crt")]:
        raise ConfigError(
            [
                f"server.host: {folder / 'server.crt'} lacks the name {', '.join(lacking)}; remove {folder} to have "
                "new certificates made, whose ca.crt every site then needs"
            ]
        )


def _keys(folder: Path, public: str | None) -> None:
    """The site's key pair, or the public key that it gave; what is there already stays."""
    keys, public_path = folder / "keys", folder / "keys" / "site.pub"
    _closed(folder)
    if public_path.exists():
        if public is not None and public_key(str(public_path)) != public:
            raise RunError(f"{public_path} is another key than the consortium's file names; remove one of them")
    elif public is not None:
        atomic_write(public_path, f"{public}\n".encode())
    else:
        write_site_keys(keys)


def _closed(folder: Path) -> None:
    """Make a folder that only this user can read, if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _remove_app(folder: Path) -> None:
    """What an earlier call wrote, and nothing else."""
    if (folder / "befit_app" / "experiment.yaml").exists():
        shutil.rmtree(folder)


def _server(consortium: Consortium, out: Path) -> Mapping[str, str]:
    server, folder = consortium.server, out / "server"
    sites = shlex.join(site.folder for site in consortium.sites)
    command, inside = (
        commands.superlink(host, server.port, "--database", "superlink.db") for host in (consortium.listen, EVERYWHERE)
    )
    connection = (
        f'[superlink]\ndefault = "befit"\n\n[superlink.befit]\naddress = "{consortium.near}:{server.port}"\n'
        f'root-certificates = "{folder}/certificates/ca.crt"\n'
    )
    service = {"command": inside, "ports": [f"{consortium.listen}:{server.port}:{server.port}"]}
    return {
        "server/flwr/config.toml": connection,
        "server/register.sh": fill("register.sh", bin=shlex.quote(str(_BIN)), sites=sites),
        "server/befit-superlink.service": _unit("befit's SuperLink", folder, command),
        "server/compose.yaml": _compose({"superlink": service}),
    }


def _site(site: SiteEntry, consortium: Consortium, out: Path, public_keys: Mapping[str, str]) -> Mapping[str, str]:
    """Its files; `public_keys` are those by which sites know each other in secure sums."""
    here, host, port = site.place.host is None, consortium.server.host, consortium.server.port
    folder, server = _folder(out, site) if here else AWAY, f"{host}:{port}"
    node = commands.supernode(folder / "site.yaml", f"{consortium.near}:{port}" if here else server, site.port)
    worker = ["befit", "worker", "site.yaml"]
    inside = commands.supernode("/befit/site.yaml", server, site.port)
    read = _read_by(site) if here else []  # elsewhere in the folder itself, or to be added there
    about = "what this site agrees to; befit flower node-config explains every key"
    peers = {client: line for client, line in public_keys.items() if client != site.client}
    values = ({"peers": peers} if peers else {}) | site.values
    if values.get("peers"):
        values["key"] = "keys/site.key"
    return {
        "site.yaml": f"# {about}\n{write_yaml(values)}",
        "befit-worker.service": _unit(f"befit's worker of {site.client}", folder, worker, here),
        "befit-supernode.service": _unit(f"the SuperNode of {site.client}", folder, node, here),
        "compose.yaml": _compose({"worker": {"command": worker}, "supernode": {"command": inside}}, read),
    }


def _read_by(site: SiteEntry) -> list[str]:
    """Files and folders outside the site's own that it reads."""
    data, models = site.values.get("data"), site.values.get("models", {})
    places = [*(data.values() if isinstance(data, dict) else [data]), *models.values()]
    return [place for place in places if isinstance(place, str) and place.startswith("/")]


def _unit(what: str, folder: Path, command: Sequence[str], here: bool = True) -> str:
    """A systemd service. In its file % and $ are written twice, and a program by its whole path."""
    place = _BIN if here else AWAY / ".venv" / "bin"
    line = shlex.join([str(place / command[0]), *command[1:]])
    values = {"what": what, "folder": str(folder), "command": line.replace("$", "$$"), "bin": str(place)}
    values["user"] = getpass.getuser() if here else "befit"
    return fill("unit.service", **{key: value.replace("%", "%%") for key, value in values.items()})


def _compose(services: Mapping[str, Mapping[str, Any]], read: Sequence[str] = ()) -> str:
    """Services of one machine in containers: they share the folder, and /tmp, where the worker's socket is."""
    common = {
        "image": f"befit:{__version__}",
        "restart": "always",
        "working_dir": "/befit",
        "environment": {"FLWR_TELEMETRY_ENABLED": "0"},
        "volumes": ["./:/befit", "sockets:/tmp", *(f"{place}:{place}:ro" for place in dict.fromkeys(read))],
    }
    doubled = {
        name: {**common, **service, "command": [word.replace("$", "$$") for word in service["command"]]}
        for name, service in services.items()
    }
    return fill(
        "compose.yaml", version=__version__, services=write_yaml({"services": doubled, "volumes": {"sockets": {}}})
    )


def _scripts(consortium: Consortium, out: Path, runs: Path) -> Mapping[str, str]:
    port, sites = consortium.server.port, consortium.sites
    rows = "\n".join(f"site {shlex.quote(site.folder)} {site.port}" for site in sites)
    values = {
        "name": consortium.experiment.name,
        "bin": shlex.quote(str(_BIN)),
        "runs": shlex.quote(str(runs)),
        "port": str(port),
        "near": consortium.near,
        "superlink": shlex.join(commands.superlink(consortium.near, port)),
        "sites": rows,
    }
    away = [site for site in sites if site.place.host is not None]
    targets = [f"sites/{site.folder}/ {site.place.host}:{AWAY}/" for site in away]
    none = "    (none: all sites are on this machine)"
    readme = {
        "name": values["name"],
        "server": f"{consortium.server.host}:{port}",
        "folder": str(out),
        "runs": str(runs),
        "copies": "\n".join(f"    rsync -a --exclude state {target}" for target in targets) or none,
        "later": "\n".join(f"    rsync -a --exclude state --exclude site.yaml {target}" for target in targets) or none,
    }
    return {"run-here.sh": fill("run-here.sh", **values), "README.md": fill("federation.md", **readme)}
