"""What a site and a server agreed on when a run began, and how much the site has been asked since.

In the folder of a run: `agreed.json`, the settings and each label's method as the server's `hello` gave them, and for
each label `asked.json`, the requests that were answered. In the state folder: the key of the data's hash, and the
questions that did not fit the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, Damaged, PayloadMismatch, RunError
from befit.core.schema import Mark
from befit.core.storage import atomic_write, read_sealed, write_sealed
from befit.core.text import first_of
from befit.flower.frame import digest
from befit.flower.policy import method_of
from befit.flower.site_file import SiteFile
from befit.protocol.registry import check_method, get_method

_LOG = logging.getLogger(__name__)
AGAIN = 10  # requests of one kind that are answered for the same stage and rounds, as after resumes
TRIES = 3  # questions that do not fit the data, before the site's operator has to look
_SHOWN = 5
_AGREED = "agreed.json"
_KEY = 32  # bytes


def agree(run: Path, settings: Mapping[str, Any], methods: Mapping[str, Any], data: str) -> None:
    """Pin what a run is at this site, in its folder, which is made for that.

    data  hash of the site's records and of which of them are in which split
    """
    if not agreed(run):
        write_sealed(run / _AGREED, {"settings": dict(settings), "methods": dict(methods), "data": data})


def agreed(run: Path) -> bool:
    """Whether a run began here."""
    return (run / _AGREED).exists()


def agreed_methods(run: Path) -> dict[str, Any]:
    """The methods of a run that began here, by label, in the order in which they are run."""
    return read_sealed(run / _AGREED)["methods"]


def check_agreed(run: Path, label: str, settings: Any, method: Any) -> None:
    """Raise PayloadMismatch unless a request is of a run that began here, with the settings and the method of then."""
    if not agreed(run):
        raise PayloadMismatch(
            "this run has not begun at this site: a server says hello first. If it had, the site's state folder was "
            "lost, or is another"
        )
    agreement = read_sealed(run / _AGREED)
    if label not in agreement["methods"]:
        raise PayloadMismatch(f"the run has no method of the label {label} at this site; its hello named none")
    here = {"settings": agreement["settings"], "methods": {label: agreement["methods"][label]}}
    _compare(here, {"settings": settings, "methods": {label: method}})


def check_known(run: Path, settings: Mapping[str, Any], methods: Mapping[str, Any]) -> None:
    """Raise PayloadMismatch where a run that began here is to be another one now."""
    if agreed(run):
        agreement = read_sealed(run / _AGREED)
        here = {"settings": agreement["settings"], "methods": agreement["methods"]}
        _compare(here, {"settings": dict(settings), "methods": dict(methods)})


def check_data(run: Path, data: str) -> None:
    """Raise PayloadMismatch where a run that began here would go on with other records, or with other splits of them:
    it could then be measured on what it was trained on."""
    if agreed(run) and read_sealed(run / _AGREED).get("data") != data:
        raise PayloadMismatch(
            "its data is not what it was when this run began at this site; put it back, or start a new run"
        )


def check_sums(experiment: Experiment, methods: Mapping[str, Any]) -> None:
    """Raise ConfigError where updates are summed in secret and two of the run's methods are the same: their first
    updates are alike, so sums of other sites under each would differ by one of them."""
    if experiment.federation.secure_sums is None:
        return
    wholes = {label: _whole(block) for label, block in methods.items()}
    for (label, whole), (other, whole_of_other) in combinations(wholes.items(), 2):
        if whole == whole_of_other:
            text = "are the same, and the difference of their secure sums could be one site's update"
            raise ConfigError([f"methods: {label} and {other} {text}"])


def _whole(block: Mapping[str, Any]) -> dict[str, Any]:
    """A method's block and those within it, with all defaults, and without what only the server uses."""
    whole = method_of(check_method(block)[0])
    within = [parameter.name for parameter in get_method(whole["name"]).parameters if Mark.METHOD in parameter.marks]
    return whole | {name: _whole(whole[name]) for name in within if whole.get(name)}


def _compare(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """As JSON, in which 1, 1.0 and true are three."""
    if json.dumps(known, sort_keys=True) == json.dumps(wanted, sort_keys=True):
        return
    before, now = dict(_leaves(known)), dict(_leaves(wanted))
    differing = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    shown = [f"{path} is {_shortened_value(now, path)} and was {_shortened_value(before, path)}" for path in differing]
    raise PayloadMismatch(
        f"this run began with other settings at this site: {first_of(shown, _SHOWN, '; ')}. Start a new run, or "
        "have the site's operator remove the folder of this one"
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every value that is no mapping, as JSON by its dotted path."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path.removeprefix("settings."), json.dumps(value)


def _shortened_value(values: Mapping[str, str], path: str) -> str:
    text = values.get(path, "not given")
    return text if len(text) <= 60 else f"{text[:57]}..."


class AnsweredRequests:
    """The requests of one label that were answered, by what they were for, such as a score after a round. Without a
    limit a server could have one round done with ever other arrays. That it failed is an answer too.

    request  its hash, which counts once
    """

    def __init__(self, folder: Path, what: str, request: str) -> None:
        self._path, self._request = folder / "asked.json", request[:16]
        self._all: dict[str, list[str]] = read_sealed(self._path) if self._path.exists() else {}
        self._known = self._all.setdefault(what, [])
        if self._request not in self._known and len(self._known) >= AGAIN:
            raise PayloadMismatch(
                f"this site has answered {AGAIN} requests of this kind for the same stage and rounds, as "
                "many as a run that is resumed may need; start a new run"
            )

    def note(self) -> None:
        """It is about to be worked on, and to be answered by what comes of that or by a failure."""
        if self._request not in self._known:
            self._known.append(self._request)
            write_sealed(self._path, self._all)

    def close(self) -> None:
        """It was answered, with what another time would not be the same: asked once more, it counts once more."""
        self._known[self._known.index(self._request)] = secrets.token_hex(8)
        write_sealed(self._path, self._all)


def check_room(site: SiteFile, run: Path) -> None:
    """Raise ConfigError where the site keeps as many runs, or as much of them, as its limits allow."""
    limits, runs = site.limits, [folder for folder in _runs(site) if folder != run]
    used = sum(_size(folder) for folder in (*runs, run))
    problems = []
    if len(runs) >= limits.max_runs:
        problems.append(f"the site keeps {len(runs)} other runs (limits.max_runs)")
    if used > limits.max_state_gib * 2**30:
        problems.append(f"the site's runs take more than {limits.max_state_gib:g} GiB (limits.max_state_gib)")
    if problems:
        oldest = ", ".join(str(folder) for folder in runs[:_SHOWN])
        _LOG.error("no room for more state; remove runs that are over, the oldest first: %s", oldest)
        raise ConfigError(
            [f"{problem}; its operator has to remove old ones, which its log names" for problem in problems]
        )


def room(site: SiteFile) -> tuple[int, float, list[Path]]:
    """Number of runs that a site keeps, the GiB that they take, and their folders, the oldest first."""
    runs = _runs(site)
    return len(runs), sum(map(_size, runs)) / 2**30, runs


def uncounted(site: SiteFile) -> list[str]:
    """The runs on the site's own data, of those that it keeps, that its budget does not count: of no `unit: example`,
    or so damaged that nobody can say."""
    if site.privacy is None:
        return []
    return sorted(folder.name for folder in _runs(site) if agreed(folder) and not _counted(folder))


def _counted(run: Path) -> bool:
    try:
        settings = read_sealed(run / _AGREED)["settings"]
    except Damaged:
        return False
    return bool(settings.get("benchmark")) or settings["privacy"]["unit"] == "example"


def _runs(site: SiteFile) -> list[Path]:
    folder = Path(site.state) / "runs"
    folders = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a worker is renaming and removing files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def keyed_hash(state: Path, plain: str) -> str:
    """HMAC-SHA256 of a hash with the site's own key, which is made once: the same data give the same value here, and
    nobody without the key can tell whether a guess at the data is right."""
    path = state / "data.key"
    if not path.exists():
        atomic_write(path, secrets.token_bytes(_KEY), 0o600)
    if len(key := path.read_bytes()) != _KEY:
        raise RunError(f"{path} is damaged; bring it back, or remove it and begin new runs")
    return hmac.new(key, plain.encode(), hashlib.sha256).hexdigest()


class Misfits:
    """Questions whose answer told that the site's data do not fit. After `TRIES` different ones no other is answered:
    else a server could read columns and values out of refusals. An operator who changes the site's file begins anew.
    """

    def __init__(self, site: SiteFile) -> None:
        self.path = Path(site.state) / "misfits.json"
        self._site = digest(json.dumps(asdict(site), sort_keys=True).encode())
        saved = read_sealed(self.path) if self.path.exists() else {}
        self.asked: list[str] = saved["asked"] if saved.get("site") == self._site else []

    @property
    def used_up(self) -> bool:
        return len(self.asked) >= TRIES

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError for a new question once there have been too many that did not fit."""
        if self.used_up and _question(settings) not in self.asked:
            raise ConfigError(
                [
                    f"data: {TRIES} questions of servers did not fit the site's data, and it answers no others until "
                    "its operator has looked: see its log, and set tasks, columns and label_names in its file"
                ]
            )

    def add(self, settings: Mapping[str, Any]) -> None:
        if _question(settings) not in self.asked:
            self.asked.append(_question(settings))
            write_sealed(self.path, {"site": self._site, "asked": self.asked})


def _question(settings: Mapping[str, Any]) -> str:
    return digest(json.dumps(settings, sort_keys=True).encode())[:16]
