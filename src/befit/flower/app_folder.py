"""A Flower app directory for one configuration: two modules of a line, the configuration, and how to start it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from befit.config.experiment import Experiment, to_yaml
from befit.core.errors import ConfigError, ModelError, RunError
from befit.core.storage import atomic_write
from befit.core.version import __version__
from befit.data.files.client_files import client_entries
from befit.flower.keys import fingerprints, public_key
from befit.flower.policy import settings_of
from befit.flower.remote_clients import RemoteClients, client_ids, families_of, needs_model
from befit.models.source import find_model
from befit.runs.loading import load_federation, resolve_model

_SERVER = '''"""Flower's ServerApp: the befit run that experiment.yaml describes."""

from pathlib import Path

from befit.flower.server_app import server_app

app = server_app(Path(__file__).with_name("experiment.yaml"))
'''
_CLIENT = '''"""Flower's ClientApp: befit as it is installed at the site, with the site's own file."""

from befit.flower.client_app import app

__all__ = ["app"]
'''
_SIMULATED = '''"""Flower's ClientApp: every client of experiment.yaml, on this machine."""

from pathlib import Path

from befit.flower.simulation import simulated_app

app = simulated_app(Path(__file__).with_name("experiment.yaml"))
'''


def write_app(
    experiment: Experiment, out: Path, runs: Path, insecure: bool = False, simulation: bool = False
) -> list[str]:
    """Write the directory `out`, which must be new or empty; returns the clients that the run waits for.

    runs        run directory, on the machine where the SuperLink runs
    insecure    for a federation without node authentication: a site that comes back may have another identity
    simulation  for Flower's simulation runtime: all clients are on this machine, and so is their data

    The keys that `engine.keys` names are written into it. Raises ConfigError for a configuration that cannot run at
    sites, ModelError for a model that this machine, the server, does not have, RunError for a directory in use.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists already and is not an empty folder; name another")
    experiment = resolve_model(experiment)
    settings_of(replace(experiment, families={}))  # raises for what no site could do
    experiment = _listed(experiment) if simulation else experiment
    clients = client_ids(experiment)
    check_server(experiment)
    experiment = _with_keys(experiment, clients, insecure, simulation)
    if experiment.data is not None and not simulation:  # where the data is, each site says itself
        experiment = replace(experiment, data=replace(experiment.data, clients=dict.fromkeys(clients, "at-its-site")))
    name = experiment.name.lower().replace("_", "-").replace(".", "-")
    settings = {"out": str(runs), "resume": False, "insecure": insecure or simulation}
    written = {
        "pyproject.toml": fill("app.toml", name=name, version=__version__, settings=_toml(settings)),
        "README.md": fill(
            "simulated.md" if simulation else "app.md",
            name=experiment.name,
            start=start_command(Path(), clients, simulation),
            clients="\n".join(f"- `{client}`" for client in clients),
        ),
        "befit_app/__init__.py": "",
        "befit_app/server_app.py": _SERVER,
        "befit_app/client_app.py": _SIMULATED if simulation else _CLIENT,
        "befit_app/experiment.yaml": to_yaml(experiment),
    }
    for path, text in written.items():
        atomic_write(out / path, text.encode())
    return clients


def start_command(app: Path, clients: Sequence[str], simulation: bool) -> str:
    """What starts the run of an app folder."""
    command = f"flwr run {shlex.quote(str(app))} befit --stream"
    if simulation:  # a CPU for each node that works, where Flower's own choice is two
        command += f" --federation-config 'num-supernodes={len(clients)} client-resources-num-cpus=1'"
    return command


def check_server(experiment: Experiment) -> list[str]:
    """Raise now what the run would only say once sites wait for it: ModelError unless the server has what it reads of
    the models, DataError unless it has its public records, ConfigError for settings that no site can have and where a
    method does not fit models and clients. Returns the names of the models, for people.
    """
    settings_of(experiment)
    try:
        models = find_models(experiment)
    except ModelError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the server needs the model itself, whatever sites call theirs (models in a site's file), and {reason}"
        ) from error
    RemoteClients(experiment).check_methods()
    return models


def find_models(experiment: Experiment) -> list[str]:
    """What the server reads of every family's model is there: names of the models, for people."""
    weights = needs_model(experiment)
    models = families_of(experiment).models.values()
    return list(dict.fromkeys(find_model(model.id, model.revision, weights=weights)[1] for model in models))


def _with_keys(experiment: Experiment, clients: Sequence[str], insecure: bool, simulation: bool) -> Experiment:
    """The same with the text of every client's key, so that the app needs no other file."""
    keys = experiment.engine.keys
    if keys and insecure:
        raise ConfigError(
            ["engine.keys: have no effect without node authentication; leave out --insecure, or the keys"]
        )
    texts = {} if simulation else {client: public_key(keys[client]) for client in keys}
    fingerprints(texts, clients)
    return replace(experiment, engine=replace(experiment.engine, keys=texts))


def _listed(experiment: Experiment) -> Experiment:
    """The same with every client and every class by its name, as the data on this machine tells."""
    data = experiment.data
    if data is None:
        return experiment
    places = data.clients if isinstance(data.clients, dict) else client_entries(Path(data.clients))
    places = {client: str(place) if isinstance(place, Path) else place for client, place in places.items()}
    names = data.label_names or list(load_federation(experiment).label_names) or None
    return replace(experiment, data=replace(data, clients=places, label_names=names))


def fill(template: str, **values: str) -> str:
    """The text of a file in `templates`, with a value for each @key@."""
    text = files("befit.flower").joinpath("templates", template).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def _toml(values: dict[str, str | bool]) -> str:
    """Flat settings: a text of JSON is one of TOML too."""
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
