"""What the server asks of a site, and what the site makes of it: its own data, model and device, or a refusal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from befit.config.experiment import Experiment, load_experiment
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.plugins import load_plugins
from befit.flower.allowed import ARGUMENTS, AT_SITE, TRAVELS, refused_in_method
from befit.flower.site_file import SiteFile

__all__ = ["experiment_here", "names_a_place"]


def experiment_here(settings: Mapping[str, Any], method: Mapping[str, Any], site: SiteFile) -> Experiment:
    """The experiment as this site runs it, with its own data, model directory and device.

    Raises ConfigError with everything that the site has not allowed or that is no valid configuration, PayloadMismatch
    for what is no configuration at all.
    """
    if _mapping(settings) and "plugins" in settings:
        raise ConfigError(["plugins: a site loads those of its own file, and none that a server names"])
    if not _mapping(settings) or not all(map(_mapping, settings.values())) or not _mapping(method):
        raise PayloadMismatch("the request's settings and method are not mappings of mappings")
    load_plugins(site.plugins)
    wanted = {block: dict(values) for block, values in settings.items()}
    problems = [*_unlisted(wanted), *refused_in_method(method, site.methods), *_model(wanted, site)]
    if "benchmark" in wanted:
        benchmark = wanted["benchmark"].get("name")
        if benchmark not in site.benchmarks:
            problems.append(
                f"benchmark.name: {benchmark} is not among the site's benchmarks: {_listed(site.benchmarks)}"
            )
    elif site.data is None:
        problems.append("data: the site has none; it takes part in benchmarks only")
    if problems:
        raise ConfigError(problems, f"what the server asks of site {site.client}")
    place, _, revision = place_of(site, wanted["model"]["id"])
    wanted["model"] |= {"id": place, "revision": revision or None, "device": site.device}
    if isinstance(site.benchmarks, dict) and "benchmark" in wanted:
        wanted["benchmark"] |= site.benchmarks[wanted["benchmark"]["name"]]
    if "benchmark" not in wanted:
        data = wanted.get("data", {})
        wanted["data"] = {**data, "clients": {site.client: site.data}}
        wanted["data"]["columns"] = {**data.get("columns", {}), **site.columns}
    engine = {"store": "disk", "threads": site.threads}
    whole = {"name": "site", **wanted, "method": dict(method), "baselines": [], "engine": engine}
    whole["plugins"] = list(site.plugins)
    return load_experiment(whole)


def names_a_place(site: SiteFile, text: str) -> bool:
    """Whether a text for the server has one of the site's own paths in it."""
    data = site.data.values() if isinstance(site.data, dict) else [site.data]
    roots = (
        [one for given in site.benchmarks.values() for one in given.values()]
        if isinstance(site.benchmarks, dict)
        else []
    )
    places = [site.state, *data, *site.models.values(), *site.plugins, *roots]
    return any(isinstance(one, str) and one.startswith("/") and one in text for one in places)


def place_of(site: SiteFile, name: str) -> tuple[str, str, str]:
    """Where a model is for a site, "@" and the revision; the last two are empty but for a hub id that has one."""
    place = site.models[name]
    return (place, "", "") if place.startswith("/") else place.partition("@")


def _unlisted(wanted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Everything that no server may set at a site."""
    known = {path.partition(".")[0] for path in TRAVELS}
    problems = [f"{block}: the server may not set it" for block in wanted if block not in known]
    for path in (f"{block}.{key}" for block in wanted if block in known for key in wanted[block]):
        block, _, key = path.partition(".")
        if path in TRAVELS or (block == "benchmark" and key in ARGUMENTS):
            continue
        theirs = path in AT_SITE or block == "benchmark"
        problems.append(
            f"{path}: " + ("is for the site to say, not for the server" if theirs else "the server may not set it")
        )
    return problems


def _model(wanted: Mapping[str, Mapping[str, Any]], site: SiteFile) -> list[str]:
    """Why the model that is wanted is none of the site's: another name, or another revision on the hub."""
    name, wanted_revision = (wanted.get("model", {}).get(key) for key in ("id", "revision"))
    if not isinstance(name, str) or name not in site.models:
        return [f"model.id: {name} is not among the site's models: {_listed(site.models)}"]
    place, _, revision = place_of(site, name)
    if place.startswith("/") or wanted_revision in (None, revision):
        return []
    return [
        f"model.revision: {wanted_revision} is not the one that the site's file lists, which is "
        f"{revision or 'none'}; its way to list one is models: {{{name}: {place}@{wanted_revision}}}"
    ]


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
