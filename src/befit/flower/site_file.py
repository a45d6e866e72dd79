"""A site's own file: its data, its models, and what it agrees to. The server cannot change any of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from befit.config.experiment import BENCHMARK_PATHS, DEVICE
from befit.core.errors import ConfigError, RunError
from befit.core.names import RULE, folder_name, is_id
from befit.core.plugins import resolve_plugins
from befit.core.schema import OPEN_SHARE, POSITIVE, Rule, at_least, check_values, parameters_of
from befit.data.files.settings import CLASSES
from befit.protocol.secure.masks import FEWEST

_MARK = "client"  # holds the id of the client whose folder it is
_CLIENT = Rule(is_id, RULE)


_SLOTS = Rule(lambda value: all(map(str.isidentifier, value)), "must name slots, such as [personal]")


@dataclass(frozen=True)
class Limits:
    """The least and the most that a server may ask for.

    min_records    train records behind every update, and records behind every score: a run that would use fewer is
                   refused, and a split that has fewer gives no score
    min_batch      smallest batch of training; the last of a pass over the records may have fewer, which are left
    min_sites      sites of a secure sum, this one among them, and of those that stay to its end: three at least
    max_batch      largest batch of training and of scoring
    max_length     longest text that is read or written, in tokens
    max_rounds     most rounds of a method, of all its stages together
    max_steps      most steps of training in a round, and the largest of all other whole numbers that a method takes,
                   ranks aside
    max_rank       highest rank of an adapter
    max_runs       most runs of which the site keeps the state; further ones are refused until old ones are removed
    max_state_gib  most disk space of all their states
    """

    min_records: Annotated[int, POSITIVE] = 10
    min_batch: Annotated[int, POSITIVE] = 2
    min_sites: Annotated[int, at_least(FEWEST)] = FEWEST
    max_batch: Annotated[int, POSITIVE] = 1024
    max_length: Annotated[int, POSITIVE] = 8192
    max_rounds: Annotated[int, POSITIVE] = 1000
    max_steps: Annotated[int, POSITIVE] = 10_000
    max_rank: Annotated[int, POSITIVE] = 512
    max_runs: Annotated[int, POSITIVE] = 100
    max_state_gib: Annotated[float, POSITIVE] = 20.0

    def __post_init__(self) -> None:
        if self.min_batch > self.max_batch:
            raise ConfigError([f"min_batch: {self.min_batch} is more than max_batch, which is {self.max_batch}"])


@dataclass(frozen=True)
class SiteBudget:
    """What single records of the site's data may lose, over all private runs together (docs/privacy.md).

    epsilon  the most that they may lose; what would bring more is refused
    delta    the probability with which that may not hold
    """

    epsilon: Annotated[float, POSITIVE]
    delta: Annotated[float, OPEN_SHARE]


@dataclass(frozen=True)
class SiteFile:
    """One site, which is one client.

    client      id of the client; no two sites of a run have the same
    data        its file or folder, or {train, val, test}; null: it takes part in benchmarks only
    columns     befit's name of a field to its name in the files, also of a group, such as a patient, whose records are
                all in one split. Only these columns are read, and those that have
                befit's own names; a server can name no other
    tasks       what may be learned from the data, such as [text-classification]; null: any task that befit has
    label_names  the classes of the data; a server has to know them all. null: what the server lists, which it can try
                three times
    models      the id of a run's model, or of its family's, to where that model is here: a directory, or its own name
                again for a model that ships with befit, or a hub id with the only revision that is taken,
                owner/name@revision; a model that is not listed is refused
    benchmarks  names of benchmarks that may be run here, on records that are public; or each name with what it reads
                here, such as {drake: {root: data/drake}}
    require_secure_sums  take part only where the server learns sums of updates and no single one
                (federation.secure_sums)
    peers       every other site's public key, as a file or as its line, and
    key         this site's own site.key: in secure sums nobody is then believed to be a site without its signature, and
                the server can tell no site another list of who is left than all others (docs/secure_sums.md)
    methods     names of the methods that this site takes part in, baselines and methods in methods too; null: all
    shares      slots of a method that may leave although they are the client's own: personal, its adapter, and sketch,
                gradients of a few of its records, from which somebody may tell what these are about
    scores      how losses and scores of the site's own data are told: exact; rounded to three digits; or none,
                and then not either which model the site prefers (federation.deploy: best)
    limits      the least and the most that a server may ask for
    privacy     the differential privacy of single records, such as {epsilon: 8, delta: 1.0e-5}: only runs with
                privacy.unit example take place here, and only as long as all such runs together stay below it; null:
                as the run says
    plugins     Python files or modules with methods, benchmarks and tasks of your own that may run here; nothing else
                is loaded, whatever the server's configuration or installed packages name
    device      auto (cuda where there is one, else cpu), cpu, cuda or cuda:N
    threads     CPU threads; null: as a local run picks them
    state       folder for memories, adapters and the list of what left; nobody else needs to read it
    errors      what the server learns of an error here: its kind, or its text too, which may quote data
    """

    client: Annotated[str, _CLIENT]
    data: str | dict[str, str] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    tasks: list[str] | None = None
    label_names: Annotated[list[str] | None, CLASSES] = None
    models: dict[str, str] = field(default_factory=dict)
    benchmarks: list[str] | dict[str, dict[str, Any]] = field(default_factory=list)
    methods: list[str] | None = None
    require_secure_sums: bool = False
    peers: dict[str, str] = field(default_factory=dict[str, str])
    key: str | None = None
    shares: Annotated[list[str], _SLOTS] = field(default_factory=list)
    scores: Literal["exact", "rounded", "none"] = "rounded"
    limits: Limits = field(default_factory=Limits)
    privacy: SiteBudget | None = None
    plugins: list[str] = field(default_factory=list)
    device: Annotated[str, DEVICE] = "auto"
    threads: Annotated[int | None, POSITIVE] = None
    state: str = "state"
    errors: Literal["kind", "text"] = "kind"


def load_site(path: Path | str) -> SiteFile:
    """Read a site's file; relative paths in it count from its folder. Raises ConfigError that lists every problem."""
    from befit.core.yamlfile import read_yaml

    path = Path(path)
    try:
        values = read_yaml(path)
    except OSError as error:
        raise ConfigError([f"the site's file cannot be read: {error}"], str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError(["must be a mapping, with client and models at least"], str(path))
    if "method" in values and "client" not in values:
        raise ConfigError(["this is a run's configuration, and no site's file, which begins with client"], str(path))
    checked, problems = check_values(parameters_of(SiteFile), values, owner="a site")
    if not problems and not checked.get("data") and not checked.get("benchmarks"):
        problems.append("data: is required, unless benchmarks lists some that may be run here")
    if not problems and bool(checked.get("peers")) != (checked.get("key") is not None):
        problems.append("peers: and key belong together; give both, or neither")
    if problems:
        raise ConfigError(problems, str(path))
    return absolute(SiteFile(**checked), path.resolve().parent)


def absolute(site: SiteFile, folder: Path) -> SiteFile:
    def resolve(value: str) -> str:
        return str((folder / Path(value).expanduser()).resolve())

    def model(value: str) -> str:
        here = value.startswith((".", "/", "~")) or (folder / value / "config.json").is_file()
        return resolve(value) if here else value

    data: Any = site.data
    if data is not None:
        data = resolve(data) if isinstance(data, str) else {split: resolve(place) for split, place in data.items()}
    benchmarks: Any = site.benchmarks
    if isinstance(benchmarks, dict):
        benchmarks = {
            name: {key: resolve(value) if key in BENCHMARK_PATHS and value else value for key, value in values.items()}
            for name, values in benchmarks.items()
        }
    models = {name: model(value) for name, value in site.models.items()}
    plugins = resolve_plugins(site.plugins, folder)
    return replace(
        site,
        data=data,
        models=models,
        benchmarks=benchmarks,
        plugins=plugins,
        state=resolve(site.state),
        # A key is a file, or the line in it.
        peers={name: key if key.startswith("ecdsa-") else resolve(key) for name, key in site.peers.items()},
        key=None if site.key is None else resolve(site.key),
    )


def claim(site: SiteFile) -> Path:
    """The site's state folder, which is made and marked as its own by the first who comes.

    Raises RunError where it is another site's, or cannot be written.
    """
    folder = Path(site.state)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if owner(folder) is None:
            folder.chmod(0o700)  # also where it was there before
            _mark(folder, site.client)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error} (state)") from error
    if (present := owner(folder)) != site.client:
        raise RunError(
            f"state: {folder} is the folder of site {present}, and this is site {site.client}. Give it one of "
            f"its own, such as state: state-{folder_name(site.client)}; or, if the site has a new name and no run of "
            f"the old one goes on, remove {folder / _MARK}"
        )
    return folder


def owner(folder: Path) -> str | None:
    """The client whose state is in a folder; None where it is nobody's yet."""
    try:
        return (folder / _MARK).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def _mark(folder: Path, client: str) -> None:
    """Whole or not at all, and never over another's: a link fails where a file is."""
    written = folder / f".{_MARK}.{os.getpid()}"
    try:
        written.write_text(f"{client}\n", encoding="utf-8")
        os.link(written, folder / _MARK)
    except FileExistsError:
        pass
    finally:
        written.unlink(missing_ok=True)
