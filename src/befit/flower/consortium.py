"""One file for a whole federation: the server, its sites and the run, from which every other file is written."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from befit.config.experiment import BENCHMARK_PATHS, Experiment
from befit.config.load import load_experiment, read_source
from befit.core.errors import BefitError, ConfigError
from befit.core.names import folder_name, id_problems
from befit.core.schema import Mark, Rule, check_values, parameters_of, plain
from befit.core.text import first_of
from befit.data.files.client_files import client_entries, columns_by_client, files_of
from befit.flower.app_folder import check_server
from befit.flower.consent import refused_run
from befit.flower.doctor import data_seen
from befit.flower.keys import public_key
from befit.flower.policy import models_told, place_told, settings_of
from befit.flower.remote_clients import client_ids
from befit.flower.site_file import SiteFile, absolute
from befit.flower.untold import untold_in
from befit.protocol.registry import get_method
from befit.runs.loading import resolve_model

_LOG = logging.getLogger(__name__)
AWAY = Path("/srv/befit")  # where a site on another machine keeps its folder
EVERYWHERE = "0.0.0.0"
UNSAID = "at-its-site"  # stands for a place that only a site's own file knows
_FIRST_PORT = 9094  # of SuperNodes, where none is named; Flower's own defaults are below
_PORT = Rule(lambda value: 0 < value < 2**16, "must be a port, from 1 to 65535")
_ADDRESS = Rule(
    lambda value: bool(re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", value)) and max(map(int, value.split("."))) < 256,
    "must be an address of this machine, such as 127.0.0.1",
)
_SITES = Rule(bool, "must name at least one site")


@dataclass(frozen=True)
class ServerEntry:
    """The machine that sites call.

    host    its name or address, as sites reach it
    port    the SuperLink's, the only one that anybody has to reach
    listen  its own address at which that port opens: 0.0.0.0 is every one, 127.0.0.1 lets nobody in but from here, such
            as a proxy; null: 127.0.0.1 if all sites are on this machine, else 0.0.0.0
    """

    host: str
    port: Annotated[int, _PORT] = 8000
    listen: Annotated[str | None, _ADDRESS] = None


@dataclass(frozen=True)
class SitePlace:
    """Where a site is and by which key it is known; beside these a site has the keys of a site's own file.

    host  its machine, on which paths are as they are there, counted from the site's folder; null: this one, with paths
          that count from the consortium's file
    port  its SuperNode's, on its own machine alone; null: 9094 for the first site, 9095 for the second
    key   its public key, the site.pub that `befit flower keys` made there; null: a key pair is made here
    """

    host: str | None = None
    port: Annotated[int | None, _PORT] = None
    key: str | None = None


@dataclass(frozen=True)
class _File:
    """The file as it is.

    run     the run's configuration: a file, or the configuration itself
    server  the machine that sites call
    sites   each client of the run by its id, with what differs from the run: where its data is, its limits
    """

    run: str | dict[str, Any]
    server: ServerEntry
    sites: Annotated[dict[str, dict[str, Any] | None], _SITES]


@dataclass(frozen=True)
class SiteEntry:
    """One site: its client's id, its folder's name, where it is, its own file as values, and as it is there."""

    client: str
    folder: str
    place: SitePlace
    port: int
    values: dict[str, Any]
    file: SiteFile


@dataclass(frozen=True)
class Consortium:
    """A federation whose every mistake that can be seen from here has been told."""

    experiment: Experiment
    server: ServerEntry
    sites: list[SiteEntry]

    @property
    def listen(self) -> str:
        """Where the SuperLink's port opens."""
        here = all(site.place.host is None for site in self.sites)
        return self.server.listen or ("127.0.0.1" if here else EVERYWHERE)

    @property
    def near(self) -> str:
        """The server's address as this machine itself reaches it."""
        return "127.0.0.1" if self.listen == EVERYWHERE or self.listen.startswith("127.") else self.listen


def load_consortium(path: Path) -> Consortium:
    """Read and check the file: the run, and for every site whether it would take part in it.

    Relative paths count from the file's folder. Raises ConfigError with everything that is wrong.
    """
    values, folder, where, _ = read_source(path)
    checked, problems = check_values(parameters_of(_File), values, owner="a consortium")
    if problems:
        raise ConfigError(problems, where)
    blocks = {client: block or {} for client, block in checked["sites"].items()}
    problems = [f"sites: {problem}" for problem in id_problems(blocks)]
    try:
        experiment = _experiment(checked["run"], blocks, folder)
        clients = client_ids(experiment)
    except BefitError as error:
        reasons = list(error.problems) if isinstance(error, ConfigError) else [str(error)]
        name = "run" if isinstance(checked["run"], dict) else f"run, {checked['run']}"
        raise ConfigError([*problems, *(f"{name}: {problem}" for problem in reasons)], where) from error
    problems += [f"sites.{client}: is missing; it is a client of the run" for client in clients if client not in blocks]
    sites = []
    for number, (client, block) in enumerate(blocks.items()):
        if client not in clients:
            problems.append(f"sites.{client}: is no client of the run, which has {first_of(clients)}")
            continue
        site, mistakes = _site(client, block, experiment, folder, _FIRST_PORT + number)
        problems += [f"sites.{client}.{mistake}" for mistake in mistakes]
        sites += [site] if site is not None else []
    problems += _clashes(checked["server"], sites)
    if problems:
        raise ConfigError(problems, where)
    return Consortium(experiment, checked["server"], sites)


def _experiment(run: str | dict[str, Any], sites: Mapping[str, Mapping[str, Any]], folder: Path) -> Experiment:
    """The run's; where its data names no clients, they are the sites."""
    source = run if isinstance(run, dict) else folder / run
    values, *_ = read_source(source)
    overrides = ["engine.kind=flower"]
    if isinstance(data := values.get("data"), Mapping) and not data.get("clients"):
        places = {client: block.get("data") or UNSAID for client, block in sites.items()}
        overrides.append(f"data.clients={json.dumps(places)}")
    with contextlib.chdir(folder):  # what is written in the consortium's file counts from its folder
        experiment = resolve_model(load_experiment(source, overrides))
    data = experiment.data
    if data is not None and isinstance(data.clients, str):
        places = {client: str(place) for client, place in client_entries(Path(data.clients)).items()}
        experiment = replace(experiment, data=replace(data, clients=places))
    check_server(experiment)
    return experiment


def _site(
    client: str, block: Mapping[str, Any], experiment: Experiment, folder: Path, port: int
) -> tuple[SiteEntry | None, list[str]]:
    """A site with all that its own file says, and what is wrong with it."""
    of_place, of_file = parameters_of(SitePlace), [key for key in parameters_of(SiteFile) if key.name != "client"]
    checked, problems = check_values([*of_place, *of_file], block, owner="a site")
    if problems:
        return None, problems
    names = {key.name for key in of_place}
    place = SitePlace(**{key: value for key, value in checked.items() if key in names})
    site_values = {key: value for key, value in checked.items() if key not in names}
    derived, problems = _derived(client, site_values, experiment, place.host is None)
    if place.key is not None:
        try:
            with contextlib.chdir(folder):
                place = replace(place, key=public_key(place.key))
        except ConfigError as error:
            problems += [f"key: {problem}" for problem in error.problems]
    values = {"client": client, **derived, **site_values}
    file = absolute(SiteFile(**values), folder if place.host is None else AWAY)
    problems += refused_run(file, experiment)
    if not problems and place.host is None:
        problems = [f"data: there is no {path}" for path in _missing(file)] or _unfit(file, experiment)
        if not problems and (untold := untold_in(file, experiment)):
            _LOG.warning("site %s: %s", client, untold)
    if place.host is None:  # with paths that hold wherever its file lies
        values = {key: getattr(file, key) for key in values}
    return SiteEntry(client, folder_name(client), place, place.port or port, plain(values), file), problems


def _derived(
    client: str, site_values: Mapping[str, Any], experiment: Experiment, here: bool
) -> tuple[dict[str, Any], list[str]]:
    """What a site's file says unless the consortium's says otherwise: what this run needs, and nothing more."""
    data, benchmark = experiment.data, experiment.benchmark
    blocks, models = experiment.blocks, models_told(settings_of(experiment), client)
    values: dict[str, Any] = {"models": {model["id"]: place_told(model) for model in models}}
    values["methods"] = sorted({name for block in blocks for name in _methods(block)})
    values |= {"require_secure_sums": True} if experiment.federation.secure_sums is not None else {}
    values |= {"plugins": experiment.plugins} if here and experiment.plugins else {}
    away = "" if here else "where it is on another machine (host)"
    problems = []
    places = [model["id"] for model in models if model["id"].startswith("/")]
    if away and places and "models" not in site_values:
        problems.append(f"models: is needed {away}, such as models: {{{places[0]}: models/its-folder}}")
    if benchmark is not None:
        read = {key: value for key, value in benchmark.arguments.items() if key in BENCHMARK_PATHS and value}
        values["benchmarks"] = {benchmark.name: read} if read else [benchmark.name]
        if away and read and "benchmarks" not in site_values:
            problems.append(f"benchmarks: is needed {away}, with what {benchmark.name} reads there: {', '.join(read)}")
    if data is not None:
        assert isinstance(data.clients, dict)
        # A client's entry in the run may hold its columns beside its files; a site's own file has them apart.
        columns = dict(columns_by_client(data.clients, data.columns).get(client, data.columns))
        values |= {"columns": columns, "tasks": [data.task]} | (
            {"label_names": data.label_names} if data.label_names else {}
        )
        values["data"] = files_of(data.clients.get(client)) or UNSAID
        if "data" not in site_values and (away or str(values["data"]).endswith(UNSAID)):
            problems.append(f"data: is needed {away or 'here'}, the file or folder of its records")
    return values, problems


def _methods(block: Mapping[str, Any]) -> Iterator[str]:
    """The names of a method and of those in it."""
    yield str(block["name"])
    for parameter in get_method(str(block["name"])).parameters:
        if Mark.METHOD in parameter.marks and isinstance(inner := block.get(parameter.name), Mapping):
            yield from _methods(inner)


def _missing(site: SiteFile) -> list[str]:
    places = [site.data] if isinstance(site.data, str) else list((site.data or {}).values())
    return [place for place in places if not Path(place).exists()]


def _unfit(site: SiteFile, experiment: Experiment) -> list[str]:
    """What is wrong with the records of a site that is here, as the run reads them."""
    missing = None if experiment.data is None else experiment.data.missing
    findings = data_seen(site, missing) if site.data is not None else ()
    return [f"data: {finding.found}; {finding.mend}" for finding in findings if finding.mend]


def _clashes(server: ServerEntry, sites: list[SiteEntry]) -> list[str]:
    """Two processes of one machine on one port, and one key for two clients."""
    problems = []
    ports, keys = {server.port: "server.port"}, dict[str, str]()
    for site in sites:
        if (other := ports.setdefault(site.port, f"sites.{site.client}.port")) != f"sites.{site.client}.port":
            problems.append(f"sites.{site.client}.port: {site.port} is {other} too; give each one of its own")
        if site.place.key and (other := keys.setdefault(site.place.key, site.client)) != site.client:
            problems.append(f"sites.{site.client}.key: is the key of {other} too; a client is one site")
    return problems
