"""What has to be so before a federation works on real records: the points of docs/security.md, looked at here."""

from __future__ import annotations

import getpass
import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import BefitError
from befit.core.text import first_of
from befit.flower.doctor_server import NO_ANSWER, Finding, answer_of
from befit.flower.keys import fingerprint, public_key
from befit.flower.own_slots import SKETCH
from befit.flower.policy import place_of
from befit.flower.remote_clients import client_ids
from befit.flower.site_file import Limits, SiteFile, load_site
from befit.models.source import is_hub_id
from befit.protocol.guard import MAJORITY
from befit.protocol.schedule import replies_of, required_replies
from befit.tasks import get_task

Status = Literal["done", "not done", "cannot be seen from here"]
DONE, NOT, UNSEEN = "done", "not done", "cannot be seen from here"
_APP = "--app names the run's app folder"
_FEW = 3  # of a mean of two, each of the two can take its own part away


@dataclass(frozen=True)
class Sight:
    """What can be looked at: what the doctor found, and of a site its file, of a server its app folder.

    cohort      replies that a round of that app waits for
    server, ca  HOST:PORT of the SuperLink and its authority
    """

    findings: list[Finding]
    site: SiteFile | None = None
    app: Path | None = None
    experiment: Experiment | None = None
    cohort: int = 0
    server: str | None = None
    ca: Path = Path("ca.crt")

    def by(self, *names: str) -> Answer:
        """The doctor's findings of these names, which are in order where none has a mend."""
        findings = [finding for finding in self.findings if finding.what in names]
        wrong = [finding for finding in findings if finding.mend]
        if not findings:
            return UNSEEN, "", ""
        first = (wrong or findings)[0]
        return (NOT if wrong else DONE), first.found, "; ".join(finding.mend for finding in wrong)


Answer = tuple[Status, str, str]  # what is so, what was seen of it, and how to mend it


@dataclass(frozen=True)
class Point:
    """One point of the checklist. `text` is what has to be so, in Markdown; `look` says whether it is."""

    name: str
    at: Literal["site", "server"]
    text: str
    look: Callable[[Sight], Answer]


@dataclass(frozen=True)
class Checked:
    """A point with its answer; `mend` says how to get it done, and is empty where it is."""

    point: str
    at: str
    status: Status
    found: str
    mend: str


def checked(
    findings: list[Finding], site: Path | None, app: Path | None, server: str | None, ca: Path, servers: bool
) -> list[Checked]:
    """Every point of the site, of the server, or of both.

    findings    what `befit.flower.doctor.examine` found
    site, app   the site's file, the folder of an app, or None
    server, ca  HOST:PORT of the SuperLink, or None, and its authority
    servers     whether this is the server's machine, or the server's too
    """
    sight = Sight(findings, _read_site(site), app, *_read_app(app), server, ca)
    places = (("site",) if site is not None else ()) + (("server",) if servers else ())
    return [_answered(point, sight) for point in POINTS if point.at in places]


def _answered(point: Point, sight: Sight) -> Checked:
    status, seen, mend = point.look(sight)
    return Checked(point.name, point.at, status, seen, "" if status == DONE else mend or _plain(point.text))


def _plain(text: str) -> str:
    return text.replace("`", "")


def _read_site(path: Path | None) -> SiteFile | None:
    try:
        return None if path is None else load_site(path)
    except BefitError:
        return None  # the doctor's finding says why


def _read_app(folder: Path | None) -> tuple[Experiment | None, int]:
    if folder is None:
        return None, 0
    try:
        experiment = load_experiment(folder / "befit_app" / "experiment.yaml")
        federation, clients = experiment.federation, len(client_ids(experiment))
        return experiment, replies_of(clients, federation.cohort, federation.asynchronous)
    except BefitError:
        return None, 0  # the doctor's finding says why


def _of_site(look: Callable[[SiteFile], Answer]) -> Callable[[Sight], Answer]:
    return lambda sight: (UNSEEN, "the site's file cannot be read", "") if sight.site is None else look(sight.site)


def _of_data(look: Callable[[SiteFile], Answer]) -> Callable[[Sight], Answer]:
    return _of_site(lambda site: (DONE, "no data but benchmarks", "") if site.data is None else look(site))


def _of_app(look: Callable[[Experiment, int], Answer]) -> Callable[[Sight], Answer]:
    """`look` takes the experiment and the number of replies that a round waits for."""

    def looked(sight: Sight) -> Answer:
        return (UNSEEN, "", _APP) if sight.experiment is None else look(sight.experiment, sight.cohort)

    return looked


def _unseen(mend: str = "") -> Callable[[Sight], Answer]:
    return lambda sight: (UNSEEN, "", mend)


def _answer(holds: bool, seen: str, mend: str) -> Answer:
    return (DONE if holds else NOT), seen, mend


def _places(site: SiteFile) -> list[Path]:
    return [*map(Path, [site.data] if isinstance(site.data, str) else (site.data or {}).values())]


def _data(site: SiteFile) -> Answer:
    inside = (path for place in _places(site) for path in ([place, *place.rglob("*")] if place.is_dir() else [place]))
    seen = [path for path in inside if path.exists()]
    open_ = [path for path in seen if _open(path)]
    if not seen:
        return UNSEEN, "the data is not there", ""
    return _answer(
        not open_,
        f"{len(seen)} in {', '.join(map(str, _places(site)))}",
        f"other users can read {first_of(map(str, open_), 2)}: chmod go-rwx",
    )


def _open(path: Path) -> bool:
    """Whether other users, or those of its group, can come to it, through all folders above, and use it."""
    about, above = path.stat(), [folder.stat() for folder in path.parents]
    if about.st_mode & 0o007 and all(folder.st_mode & 0o001 for folder in above):
        return True
    passed = all(folder.st_mode & (0o010 if folder.st_gid == about.st_gid else 0o001) for folder in above)
    return bool(about.st_mode & 0o070) and passed and not _private(about.st_gid, about.st_uid)


def _private(group: int, owner: int) -> bool:
    """Whether a file's group is that of one user alone, who is its owner or this one: of the user's name, and with no
    other member."""
    try:
        import grp
        import pwd
    except ImportError:  # Windows, which has no groups of this kind
        return True
    try:
        entry, users = grp.getgrgid(group), [pwd.getpwuid(number) for number in {owner, os.geteuid()}]
    except KeyError:
        return False
    return any(
        user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name} for user in users
    )


def _columns(site: SiteFile) -> Answer:
    if site.columns:
        return DONE, ", ".join(site.columns.values()), ""
    return UNSEEN, "none: of the files, whatever has one of befit's own names is read", "name them under columns"


def _listed(key: str, every: str) -> Callable[[SiteFile], Answer]:
    def look(site: SiteFile) -> Answer:
        names = getattr(site, key)
        return _answer(names is not None, ", ".join(names or ()) or every, f"list them under {key}")

    return look


def _label_names(site: SiteFile) -> Answer:
    if site.label_names is None and site.tasks is not None and not any(map(_has_classes, site.tasks)):
        return DONE, "no task with classes", ""
    return _answer(
        site.label_names is not None,
        ", ".join(site.label_names or ()) or "none: a server can try three times what they are",
        "list them under label_names",
    )


def _has_classes(task: str) -> bool:
    try:
        return get_task(task).has_classes
    except BefitError:
        return True  # a plugin's, or nobody's


def _shares(site: SiteFile) -> Answer:
    if not site.shares:
        return DONE, "nothing", ""
    meant = "is it meant that the server gets adapters of this site's own"
    sketch = " and gradients of a few of its records" if SKETCH in site.shares else ""
    return UNSEEN, ", ".join(site.shares), f"{meant}{sketch}?"


def _peers(site: SiteFile) -> Answer:
    if not site.peers:
        mend = "list every other site's site.pub under peers, and key: keys/site.key"
        seen = "none: the server can pose as the other sites" if site.require_secure_sums else "no secure sums wanted"
        return _answer(not site.require_secure_sums, seen, mend)
    try:
        keys = [f"{name} {fingerprint(public_key(key).encode())}" for name, key in sorted(site.peers.items())]
    except BefitError as error:
        return NOT, str(error), "put that site's site.pub there"
    return UNSEEN, ", ".join(keys), "is this what ssh-keygen -lf keys/site.pub prints at each of them?"


def _limits(site: SiteFile) -> Answer:
    """At the defaults, or stricter."""
    usual, wide = Limits(), list[str]()
    for name in (field.name for field in fields(Limits)):
        limit, default = getattr(site.limits, name), getattr(usual, name)
        if limit < default if name.startswith("min_") else limit > default:
            wide.append(f"{name} {limit:g} (default {default:g})")
    return _answer(not wide, ", ".join(wide) or "at the defaults or stricter", "set them back, unless a run needs it")


def _models(site: SiteFile) -> Answer:
    loose = [name for name in site.models if _moves(site, name)]
    mend = f"name a folder, or the revision: {', '.join(f'{name}: {place_of(site, name)[0]}@COMMIT' for name in loose)}"
    return _answer(not loose, ", ".join(f"{name}: {place}" for name, place in site.models.items()) or "none", mend)


def _moves(site: SiteFile, name: str) -> bool:
    """Whether a model is what its hub says it is today."""
    place, _, revision = place_of(site, name)
    return not place.startswith("/") and is_hub_id(place) and len(revision) != 40


def _reviewed(key: str, question: str) -> Callable[[SiteFile], Answer]:
    def look(site: SiteFile) -> Answer:
        names = getattr(site, key)
        return (UNSEEN, ", ".join(names), question) if names else (DONE, "none", "")

    return look


def _user(sight: Sight) -> Answer:
    number = os.geteuid() if hasattr(os, "geteuid") else None  # which Windows lacks
    if number == 0:
        return NOT, "root", "run the worker and the SuperNode as a user of their own"
    who = getpass.getuser() if number is None else f"number {number}"
    return UNSEEN, f"user {who}", "may it read nothing but befit, the site's files and its data?"


def _way_in(sight: Sight) -> Answer:
    """Whether Flower's Control API answers here. Its routes take POST: asked by GET, one says so and does nothing."""
    if sight.server is None:
        return UNSEEN, "", "--server HOST:PORT tries it"
    host, _, port = sight.server.rpartition(":")
    try:
        with answer_of(host.strip("[]"), int(port), sight.ca, "/v1/control/list-runs") as answer:
            code = answer.status
    except NO_ANSWER as error:
        return UNSEEN, str(error), ""
    mend = "the server's operator lets through /v1/fleet/, /health and /openapi.json alone"
    return _answer(code in (403, 404), f"/v1/control/ answers {code}", mend)


def _keys(sight: Sight) -> Answer:
    if sight.app is None:
        return UNSEEN, "", _APP
    status, seen, mend = sight.by("app", "keys")
    count = sum(finding.what.startswith("key of ") for finding in sight.findings)
    return (status, f"{count} keys", "") if status == DONE else (status, seen, mend)


def _secure(sight: Sight) -> Answer:
    settings = _settings(sight)
    if settings is None:
        return UNSEEN, "", _APP
    insecure = settings.get("insecure") is not False
    return _answer(not insecure, "without node authentication" if insecure else "keys are asked for", "write it anew")


def _settings(sight: Sight) -> dict[str, object] | None:
    try:
        text = (sight.app / "pyproject.toml").read_text(encoding="utf-8") if sight.app else ""
        return tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run_dir(sight: Sight) -> Answer:
    path = Path(str((_settings(sight) or {}).get("out", "")))
    if not path.is_absolute() or not path.exists():
        return UNSEEN, "it is not there yet", ""
    if _open(path):
        return _answer(False, str(path), f"other users can look into it: chmod 700 {path}")
    database = sight.app and sight.app.parent / "server" / "superlink.db"  # where the written services put it
    if not database or not database.exists():
        return UNSEEN, f"{path} is closed to others", "look at superlink.db, which holds every update: chmod 600"
    return _answer(not _open(database), f"{path}, {database}", f"other users can read it: chmod 600 {database}")


def _replies(experiment: Experiment, cohort: int) -> Answer:
    needed = required_replies(experiment.federation.min_replies, cohort)
    seen = f"{needed} of the {cohort} of a round"
    if cohort < _FEW:
        mend = f"a mean of so few cannot hide one from another; let {_FEW} clients or more make a round"
        return NOT, seen, f"{mend} (federation.cohort, federation.asynchronous.buffer)"
    return _answer(needed >= _FEW, seen, f"federation.min_replies: {_FEW}, or more")


def _guard(experiment: Experiment, cohort: int) -> Answer:
    guard = experiment.guard
    if experiment.federation.secure_sums is not None:
        return NOT, "under secure sums no update is compared", "choose between the two: docs/secure_sums.md"
    words = ([f"clip {guard.clip:g}"] if guard.clip else []) + ([guard.rule] if guard.rule != "none" else [])
    seen = ", ".join(words)
    needed = required_replies(experiment.federation.min_replies, cohort)
    if guard.clip and guard.rule == "none" and needed < MAJORITY:
        seen += f", which shortens none where fewer than {MAJORITY} reply, and {needed} are enough for a round"
        return NOT, seen, f"federation.min_replies: {MAJORITY}, or more"
    return _answer(bool(seen), seen or "neither", "guard.clip: 1, and guard.rule where clients may be hostile")


def _weight(experiment: Experiment, cohort: int) -> Answer:
    share, sums = experiment.federation.max_weight, experiment.federation.secure_sums
    if sums is not None:
        return NOT, f"up to {sums.most_examples}, by an honest site's own word", "choose: docs/secure_sums.md"
    seen = "none: a client's weight is the number of records that it says" if share is None else f"{share:g}"
    return _answer(share is not None, seen, f"federation.max_weight: {min(1.0, 2 / cohort):.2g}")


def _by(*names: str) -> Callable[[Sight], Answer]:
    return lambda sight: sight.by(*names)


POINTS: tuple[Point, ...] = (
    Point(
        "authority",
        "site",
        "`ca.crt` came from the server's operator over a channel that you trust, and is valid for at least 30 days",
        _by("authority", "server", "server's certificate"),
    ),
    Point(
        "way in",
        "site",
        "seen from here, only `/v1/fleet/`, `/health` and `/openapi.json` answer on the server's port: whoever can "
        "reach Flower's `/v1/control/` can start code at every site",
        _way_in,
    ),
    Point(
        "key", "site", "`keys/site.key` is readable by this user alone, and only `site.pub` was ever sent", _by("key")
    ),
    Point(
        "code",
        "site",
        "`flower-supernode --trusted-entities` lists whose signed apps may run; without it, the server's operator is "
        "trusted with this machine",
        _unseen(),
    ),
    Point(
        "user",
        "site",
        "worker and SuperNode run as a user of their own, in a container or on a machine of their own, with nothing "
        "else to read and no network but the way to the server",
        _user,
    ),
    Point("state", "site", "the folder `state` is readable by this user alone", _by("state")),
    Point("data", "site", "other users of the machine cannot read the data", _of_data(_data)),
    Point(
        "columns",
        "site",
        "`columns` names what is read, and the files have no other column of one of befit's own names (text, label, …) "
        "that should stay unread",
        _of_data(_columns),
    ),
    Point("tasks", "site", "`tasks` lists what may be learned", _of_data(_listed("tasks", "any"))),
    Point("classes", "site", "`label_names` lists the classes of the data", _of_data(_label_names)),
    Point(
        "methods",
        "site",
        "`methods` lists only methods whose row in the table above somebody at this site has read",
        _of_site(_listed("methods", "all")),
    ),
    Point("shares", "site", "`shares` is empty, or what it names is meant to leave", _of_site(_shares)),
    Point(
        "peers",
        "site",
        "where secure sums are demanded, each key in `peers` came from that site itself and not from the server",
        _of_site(_peers),
    ),
    Point(
        "scores",
        "site",
        "`scores` is `rounded` or `none`",
        _of_site(lambda site: _answer(site.scores != "exact", site.scores, "scores: rounded")),
    ),
    Point(
        "errors",
        "site",
        "`errors` is `kind`, because error texts can quote records",
        _of_site(lambda site: _answer(site.errors == "kind", site.errors, "errors: kind")),
    ),
    Point("limits", "site", "`limits` are the defaults or stricter", _of_site(_limits)),
    Point(
        "models",
        "site",
        "each of `models` is a folder at this site, a model that ships with befit, or a hub id at a full commit",
        _of_site(_models),
    ),
    Point(
        "benchmarks",
        "site",
        "`benchmarks` lists only what is public",
        _of_site(_reviewed("benchmarks", "is what each of them reads here public?")),
    ),
    Point(
        "plugins",
        "site",
        "`plugins` is empty, or somebody at this site has read every line of them",
        _of_site(_reviewed("plugins", "has somebody here read them? They run with this user's rights")),
    ),
    Point(
        "certificate",
        "server",
        "the server's certificate comes from an authority made for it, is valid for at least 30 days, and its key is "
        "readable by this user alone",
        _by("certificate", "server's key"),
    ),
    Point(
        "known nodes",
        "server",
        "the SuperLink runs with `--enable-supernode-auth`",
        _unseen("look at the SuperLink's command line: it needs --enable-supernode-auth"),
    ),
    Point(
        "way in",
        "server",
        "a proxy or firewall lets others reach only `/v1/fleet/`, `/health` and `/openapi.json` of the SuperLink's "
        "port: `/v1/control/` starts runs and registers keys, and authenticates nobody",
        _unseen(),
    ),
    Point("keys", "server", "`engine.keys` names a key for every client", _keys),
    Point("app", "server", "the app was written without `--insecure` and `--simulation`", _secure),
    Point(
        "run directory",
        "server",
        "other users of the machine cannot read the run directory and `superlink.db`",
        _run_dir,
    ),
    Point(
        "replies",
        "server",
        f"`federation.min_replies` makes every mean one of at least {_FEW} clients",
        _of_app(_replies),
    ),
    Point(
        "guard",
        "server",
        "`guard.rule` is set, or `guard.clip` is and every mean is one of at least three, below which it does not act",
        _of_app(_guard),
    ),
    Point(
        "weight",
        "server",
        "`federation.max_weight` is set, because a client may claim any number of records",
        _of_app(_weight),
    ),
)


def listed() -> Iterator[str]:
    """The checklist in Markdown, line by line."""
    for place, title in (("site", "At each site"), ("server", "At the server")):
        yield f"{title}:\n"
        yield from (f"- [ ] **{point.name}**: {point.text}." for point in POINTS if point.at == place)
        yield ""
