"""A site's data and backbone, read and checked when a run begins, and kept from request to request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from befit.config.experiment import Experiment, ModelSettings
from befit.core.errors import ConfigError, DataError, ModelError, RunError
from befit.core.plugins import plugin_hash
from befit.core.text import first_of
from befit.data.federation import SPLITS, ClientData, Federation
from befit.flower.agreement import Misfits, keyed_hash
from befit.flower.amounts import lacking_records, size_of
from befit.flower.policy import experiment_here
from befit.flower.site_file import Limits, SiteFile
from befit.protocol.method import Method
from befit.protocol.registry import build_method
from befit.protocol.wire import wire_of
from befit.runs.engines import pick_threads
from befit.runs.host import Host
from befit.runs.loading import load_federation


class SiteHosts:
    """The hosts of one site, or of all clients of a simulation, each with another site's file.

    everybody  the clients of a simulation; None: there is one site, which reads its own data
    """

    def __init__(self, everybody: Federation | None = None) -> None:
        self._everybody = everybody
        self._hosts: dict[ModelSettings, Host] = {}  # by its model: a site has one
        self._installed: dict[ModelSettings, str] = {}  # the method of each
        self._settings = ""

    def fitting(self, site: SiteFile, settings: Mapping[str, Any], experiment: Experiment) -> Host:
        """The host of a new run. What is wrong with the site's own data counts as an answer, of which there are few."""
        if experiment.benchmark is not None:
            return self.of(site, settings, experiment)
        misfits = Misfits(site)
        misfits.check(settings)
        try:
            host = self.of(site, settings, experiment, anew=True)
            _check_classes(host, site)
            _read_all(host, site.client)
            return host
        except (ConfigError, ModelError, RunError, MemoryError):
            raise  # none of which depends on what is in the records
        except Exception:
            misfits.add(settings)
            raise

    def ready(self, site: SiteFile, header: Mapping[str, Any]) -> tuple[Host, Method]:
        """The host of a request's settings with the request's method installed; the last one if it is the same."""
        host = self.of(site, header["settings"], experiment_here(header["settings"], header["method"], site))
        method, wanted = build_method(header["method"]), json.dumps(header["method"], sort_keys=True)
        if wanted != self._installed.get(host.experiment.model):
            host.install(method)
            self._installed[host.experiment.model] = wanted
        return host, method

    def of(self, site: SiteFile, settings: Mapping[str, Any], experiment: Experiment, anew: bool = False) -> Host:
        """The host of these settings; the last one if it is the same.

        anew  the site's own data is read again, and the last host goes if it is not what it was
        """
        wanted = json.dumps([settings, *map(plugin_hash, site.plugins)], sort_keys=True)
        if wanted != self._settings:
            self._forget()
        host, federation = self._hosts.get(experiment.model), None
        if host is not None and anew and experiment.benchmark is None:
            federation = self._federation(site, experiment)
            if federation.manifest != host.federation.manifest:
                host = None
                self._forget()
        if host is None:
            host = Host(experiment, federation or self._federation(site, experiment))
            self._hosts[experiment.model] = host
        self._settings = wanted
        torch.set_num_threads(pick_threads(host))
        return host

    def _forget(self) -> None:
        """Let go of the old backbone before a new one comes."""
        self._hosts, self._installed, self._settings = {}, {}, ""

    def _federation(self, site: SiteFile, experiment: Experiment) -> Federation:
        if self._everybody is not None:
            return self._everybody
        private = experiment.privacy.unit == "example" and experiment.benchmark is None
        return _own(experiment, site.client, keyed_hash(Path(site.state), "held out") if private else "")


def lacking(
    label: str, method: Method, experiment: Experiment, host: Host, data: ClientData, limits: Limits
) -> Iterator[str]:
    """Why a method cannot run on what the site has: too few records, or arrays too large to be kept."""
    yield from (f"{label}: {problem}" for problem in lacking_records(data, experiment, method, limits))
    try:
        specs = method.layout.specs(host.model.shapes)
    except ModelError as error:  # the server's arguments, and no fault of the model
        yield f"{label}: {error}"
        return
    owed = wire_of(method, experiment.wire, [specs]).updates  # of which the client keeps what a form left out
    if (size := size_of(specs) + size_of({key: specs[key] for key in owed})) > limits.max_state_gib * 2**30:
        yield f"{label}: its arrays take {size / 2**30:.1f} GiB, more than the site allows (limits.max_state_gib)"


def _check_classes(host: Host, site: SiteFile) -> None:
    """Raise DataError where the data has a class that the site's own list has not, whatever the server's list has."""
    if site.label_names is None or not (names := host.federation.label_names):
        return
    for client in host.federation.clients:
        for record in (*client.train, *client.val, *client.test):
            if (name := names[record["label"]]) not in site.label_names:
                raise DataError(f"client {client.id}: label {name!r} is not among label_names of the site's file")


def _read_all(host: Host, client: str) -> None:
    """Raise DataError where a record cannot be used, as its prompt is too long: told in a round, it would be an answer
    that nobody counts. What is read is kept for the rounds."""
    (data,) = (data for data in host.federation.clients if data.id == client)
    for split in SPLITS:
        if getattr(data, split):
            host.examples(client, split)


def _own(experiment: Experiment, client: str, secret: str) -> Federation:
    """The federation with this client alone."""
    federation = load_federation(experiment, secret)
    clients = tuple(data for data in federation.clients if data.id == client)
    if not clients:
        names = first_of(data.id for data in federation.clients)
        raise ConfigError([f"client: {federation.name} has no client {client}; it has {names}"], "the site's file")
    return replace(federation, clients=clients, newcomers=())
