"""What the server asks of a site, and what the site makes of it: its own data, model and device, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from befit.config import Experiment, load_experiment, to_dict
from befit.errors import ConfigError
from befit.flower.site_file import SiteFile

__all__ = ["experiment_here", "settings_of"]

_BLOCKS = ("model", "benchmark", "data", "adapter", "train", "evaluate", "wire")
_PLACES = {"model": ("device",), "data": ("clients",)}  # where things are is for the site to say


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """What a site has to know of an experiment: no path, no device, no other client. A method is sent apart."""
    values = to_dict(experiment)
    settings = {
        block: {key: value for key, value in values[block].items() if key not in _PLACES.get(block, ())}
        for block in _BLOCKS
        if block in values
    }
    schedule = experiment.federation
    settings["federation"] = {"rounds": schedule.rounds, "seed": schedule.seed}
    return settings


def experiment_here(settings: Mapping[str, Any], method: Mapping[str, Any], site: SiteFile) -> Experiment:
    """The experiment as this site runs it, with its own data, model directory and device.

    Raises ConfigError with everything that the site has not allowed or that is no valid configuration.
    """
    wanted = {block: dict(values) for block, values in settings.items()}
    problems = [
        f"{block}: the server may not set it"
        for block in wanted
        if block not in (*_BLOCKS, "federation")
    ]  # fmt: skip
    problems += [
        f"{block}.{key}: is for the site to say, not for the server"
        for block, keys in _PLACES.items()
        for key in keys
        if key in wanted.get(block, {})
    ]
    if site.methods is not None and method.get("name") not in site.methods:
        problems.append(f"method.name: {method.get('name')} is not among the site's methods: {_listed(site.methods)}")
    name = wanted.get("model", {}).get("id")
    if name not in site.models:
        problems.append(f"model.id: {name} is not among the site's models: {_listed(site.models)}")
    if wanted.get("benchmark") is not None:
        benchmark = wanted["benchmark"].get("name")
        if benchmark not in site.benchmarks:
            problems.append(f"benchmark.name: {benchmark} is not among the site's benchmarks: "
                            f"{_listed(site.benchmarks)}")  # fmt: skip
    elif site.data is None:
        problems.append("data: the site has none; it takes part in benchmarks only")
    if problems:
        raise ConfigError(problems, f"what the server asks of site {site.client}")
    assert name is not None
    place = site.models[name]
    wanted["model"] |= {"id": place, "device": site.device}
    if place != name:
        wanted["model"].pop("revision", None)  # of a hub id; here it is a directory
    if "data" in wanted:
        wanted["data"]["clients"] = {site.client: site.data}
        wanted["data"]["columns"] = {**wanted["data"].get("columns", {}), **site.columns}
    engine = {"store": "disk", "threads": site.threads}
    whole = {"name": "site", **wanted, "method": dict(method), "baselines": [], "engine": engine}
    return load_experiment(whole)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"
