"""Checks whether a site, or the server, is ready for a federation: each finding, and how to mend it."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from befit.config.experiment import BENCHMARK_PATHS
from befit.core.errors import BefitError, ConfigError, DataError, ModelError, RunError, did_you_mean
from befit.core.plugins import ignore_entry_points, load_plugins
from befit.core.text import first_of, to_install
from befit.core.version import __version__
from befit.data.federation import SPLITS
from befit.data.files.load import load_files
from befit.data.files.records import check_columns
from befit.data.files.settings import DataSettings
from befit.flower.agreement import TRIES, Misfits, room, uncounted
from befit.flower.call import worker_file
from befit.flower.consent import terms_of, uncounted_sentence
from befit.flower.doctor_server import Finding, authority, server_seen, servers_app, servers_own
from befit.flower.policy import place_of
from befit.flower.site_file import SiteFile, claim, load_site
from befit.flower.untold import untold_as_usual
from befit.protocol.registry import method_names
from befit.tasks import get_task, task_names

_SHOWN = 12  # classes of the data


def examine(
    site: Path | None,
    server: str | None,
    ca: Path,
    key: Path,
    certificates: Path | None = None,
    app: Path | None = None,
) -> list[Finding]:
    """Look at versions, then at a site's machine, the server's, or both.

    site          a site's file: with its data, models, state and worker, the key and the server's authority
    server        HOST:PORT of the SuperLink, or None to leave it out
    ca, key       the server's authority and the site's private key
    certificates  on the server's machine, the folder that `befit flower certificates` wrote
    app           there too, the folder that `befit flower app` wrote
    """
    findings = list(_versions())
    installed = find_spec("flwr") is not None  # which brings what reads keys
    if site is not None:
        findings += [*_site(site), *(_key(key) if installed else ()), *(authority(ca) if installed else ())]
    if certificates is not None and installed:
        findings += servers_own(certificates, server)
        ca = ca if site is not None else certificates / "ca.crt"
    if app is not None and installed:
        findings += servers_app(app)
    if server and installed:
        findings += server_seen(server, ca)
    return findings


def _versions() -> Iterator[Finding]:
    yield Finding("befit", __version__)
    try:
        flower = version("flwr")
    except PackageNotFoundError:
        yield Finding("flwr", "not installed", to_install("flower"))
        return
    tested = tuple(map(int, flower.split(".")[:2])) in ((1, 41), (1, 42))
    yield Finding("flwr", flower, "" if tested else "install flwr>=1.41,<1.43, the same minor version as the server's")


def _site(path: Path) -> Iterator[Finding]:
    ignore_entry_points()  # as the site itself does
    try:
        site = load_site(path)
    except BefitError as error:
        yield Finding("site's file", str(error), "befit flower node-config explains every key")
        return
    yield Finding("site's file", f"{path}, client {site.client}")
    for name in site.plugins:
        yield _plugin(name)
    for name in site.models:
        yield _model(site, name)
    yield from _names(site)
    yield _device(site.device)
    unread = [place for place in _read_by(site) if not os.access(place, os.R_OK)]
    yield from (Finding("data", place, "it is missing or not readable; correct data") for place in unread)
    if site.data is not None and not unread:
        yield from data_seen(site)
    yield from _agreed(site)
    yield _state(site)
    yield from _services(path.resolve().parent)
    yield from _room_findings(site)
    resident = worker_file(site).exists()
    yield Finding("worker", "resident" if resident else "none; every message loads the backbone (befit worker)")


def _model(site: SiteFile, name: str) -> Finding:
    """Whether a model is here whole, so that no message has to wait for a download; asks no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from befit.models.source import find_model, hub_command, is_hub_id, missing

    place, _, revision = place_of(site, name)
    what = f"model {name}"
    if not place.startswith("/") and is_hub_id(place):
        try:
            config = try_to_load_from_cache(place, "config.json", revision=revision or None)
        except HFValidationError:
            return Finding(what, f"{place} is no folder and no hub id", "correct models")
        lacks = missing(Path(config).parent) if isinstance(config, str) else "is no folder here, nor in the hub's cache"
        fetch = hub_command(place, revision or None)
        fetch = f"correct models (a folder counts from the site's file), or fetch it: {fetch}"
        return Finding(what, f"{place} {lacks}" if lacks else f"{place}: in the hub's cache", fetch if lacks else "")
    if place.startswith("/") and not Path(place).is_dir():
        return Finding(what, f"{place} is no folder", "correct models")
    try:
        _, source = find_model(place, revision or None)
    except ModelError as error:
        return Finding(what, str(error), "correct models")
    return Finding(what, source)


def _plugin(name: str) -> Finding:
    try:
        load_plugins([name])
    except BefitError as error:
        return Finding("plugins", str(error), "correct plugins")
    return Finding("plugins", name)


def _names(site: SiteFile) -> Iterator[Finding]:
    """Methods, tasks and benchmarks that no befit of this version has."""
    from befit.data import registry

    for key, listed, names in (
        ("methods", site.methods or (), method_names),
        ("tasks", site.tasks or (), task_names),
        ("benchmarks", site.benchmarks, registry.names),
    ):
        for name in listed:
            if name not in names():
                every = ", ".join(names()) if key == "tasks" else f"befit {key} lists them all"
                mend = f"correct {key}.{did_you_mean(name, names())} {every}"
                yield Finding(key, f"befit has none called {name}", mend)


def _agreed(site: SiteFile) -> Iterator[Finding]:
    """Methods that the site lists and would still refuse, and what its file leaves to servers."""
    for terms in terms_of(site) if site.methods is not None else ():
        if terms.mend:
            yield Finding(
                "shares", f"{terms.method} sends the site's own adapter, so it is refused", f"add {terms.mend}"
            )
    if others := uncounted(site):
        yield Finding("privacy", uncounted_sentence(others))
    if site.errors == "text":
        yield Finding("errors", "text: the server reads the text of errors, which may quote records")
    if site.data is not None and site.label_names is None:
        yield Finding("label_names", "none: a server can try three times whether its classes fit the data")


def _room_findings(site: SiteFile) -> Iterator[Finding]:
    """How much of its room the site has used, and questions that did not fit its data."""
    runs, gib, oldest = room(site)
    limits = site.limits
    full = runs >= limits.max_runs or gib > limits.max_state_gib
    mend = f"remove runs that are over, the oldest first: {', '.join(map(str, oldest[:3]))}" if full else ""
    yield Finding("runs", f"{runs} of {limits.max_runs}, {gib:.2f} of {limits.max_state_gib:g} GiB", mend)
    misfits = Misfits(site)
    if misfits.asked:
        mend = f"set tasks, columns and label_names; or remove {misfits.path}" if misfits.used_up else ""
        yield Finding("questions", f"{len(misfits.asked)} of {TRIES} did not fit the site's data", mend)


def _device(name: str) -> Finding:
    from befit.models.backbone import pick_device

    try:
        return Finding("device", str(pick_device(name)))
    except ModelError as error:
        return Finding("device", str(error).replace("model.device", "device"), "correct device")


def _read_by(site: SiteFile) -> list[str]:
    """The files and folders that a site's data and benchmarks are in."""
    places = [site.data] if isinstance(site.data, str) else list((site.data or {}).values())
    if isinstance(site.benchmarks, dict):
        places += [values[key] for values in site.benchmarks.values() for key in BENCHMARK_PATHS if values.get(key)]
    return places


def data_seen(site: SiteFile, missing: str | None = None) -> Iterator[Finding]:
    """What is in the site's data for each of its tasks, read as a run reads it: columns, labels and sizes. Where its
    file lists no tasks, one that fits is enough.

    missing  the run's `data.missing`, where it is known; None takes gaps, and says so
    """
    listed = [name for name in site.tasks or () if name in task_names()]
    possible = [name for name in task_names() if _has_columns(name, site.columns)]
    seen = [_read_as(site, task, missing) for task in (possible or task_names() if site.tasks is None else listed)]
    yield from [finding for finding in seen if not finding.mend] or seen if site.tasks is None else seen


def _has_columns(task: str, columns: Mapping[str, str]) -> bool:
    try:
        check_columns(task, columns)
    except ConfigError:
        return False
    return True


def _read_as(site: SiteFile, task: str, missing: str | None) -> Finding:
    """The data as records of one task. How much is held out for validation and test, a run says."""
    data: Any = site.data
    names = site.label_names if get_task(task).has_classes else None
    settings = DataSettings({site.client: data}, task, site.columns, names, val_fraction=0, test_fraction=0)
    gaps, taken = "", replace(settings, missing=missing or "refuse")
    try:
        try:
            federation = load_files(taken)
        except DataError:
            if missing is not None:
                raise
            taken = replace(settings, missing="drop")
            federation = load_files(taken)
            gaps = "; a run has to say data.missing: drop, since some records lack a value"
    except BefitError as error:
        reason = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
        reason = reason.removeprefix(f"client {site.client}: ").replace("data.columns", "columns")
        return Finding(f"data, {task}", reason.replace("data.label", "label"), "correct data, columns or label_names")
    (client,), least = federation.clients, site.limits.min_records
    sizes = zip(SPLITS, (client.train, client.val, client.test), strict=True)
    summary = f"{', '.join(f'{len(records)} {split}' for split, records in sizes if records)} records{gaps}"
    if federation.label_names:
        counts = Counter(federation.label_names[record["label"]] for record in client.train)
        shown = [f"{name}: {counts[name]}" for name in federation.label_names]
        summary += f"; train records of each class: {first_of(shown, _SHOWN)}"
    if missing is None and len(client.train) >= least and (untold := untold_as_usual(site, taken)):
        summary += f"; {untold}"
    few = f"fewer than limits.min_records, {least}, so no run can use them: lower it, or give more records"
    return Finding(f"data, {task}", summary, few if len(client.train) < least else "")


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


def _services(folder: Path) -> Iterator[Finding]:
    """Whether the folder is of the user that its services run as. Looked at where they would run, so in no container,
    which has the folder elsewhere."""
    try:
        import pwd
    except ImportError:  # Windows, which has no such services
        return
    units = [path.read_text(encoding="utf-8").replace("%%", "%") for path in sorted(folder.glob("befit-*.service"))]
    here = [unit for unit in units if f"WorkingDirectory={folder}\n" in unit]
    for user in sorted({name for unit in here for name in re.findall(r"^User=(.+)$", unit, re.MULTILINE)}):
        owner, chown = folder.stat().st_uid, f"chown -R {user}: {folder}"
        try:
            if pwd.getpwnam(user).pw_uid == owner:
                yield Finding("services", f"run as {user}, whose folder this is")
            else:
                yield Finding("services", f"run as {user}, and {folder} is of user number {owner}", chown)
        except KeyError:
            make = f"useradd --system --user-group --home-dir {folder} {user}, then {chown}"
            yield Finding("services", f"run as {user}, and there is no such user here", make)


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
