"""What a method makes leave a site and what it brings in, told in words, and what of it needs the site's own yes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from befit.config.experiment import Experiment, method_blocks
from befit.core.errors import BefitError, ConfigError
from befit.core.plugins import load_plugins
from befit.core.text import first_of
from befit.data.federation import ClientData
from befit.flower.agreement import check_sums, uncounted
from befit.flower.amounts import lacking_records
from befit.flower.own_slots import SKETCH, withheld
from befit.flower.policy import experiment_here, method_of, settings_of
from befit.flower.site_file import SiteFile
from befit.protocol.describe import describe
from befit.protocol.registry import build_method, method_names
from befit.protocol.schedule import resolved_stages
from befit.runs.loading import load_federation, resolve_model


@dataclass(frozen=True)
class Terms:
    """What one method means for a site.

    method   its name, or its label in a run
    leaves   arrays and numbers that leave with an update, stage by stage
    arrives  what the server sends
    updates  how many updates leave in a run, at most, however its rounds are divided among stages
    mend     what the site's file has to say of methods and slots before the method may run; empty where it says so
    """

    method: str
    leaves: str
    arrives: str
    updates: int
    mend: str


def terms(label: str, block: Mapping[str, Any], site: SiteFile, rounds: int | None = None) -> Terms:
    """The terms of a method's block at a site. `rounds` are those of the run; null: as many as the site allows."""
    method, name = build_method(dict(block)), str(block["name"])
    about, mends = describe(method), []
    if site.methods is not None and name not in site.methods:
        mends.append(f"methods: [{', '.join([*site.methods, name])}]")
    if missing := withheld(method, site):
        mends.append(f"shares: [{', '.join([*site.shares, *missing])}]")
    federated = [stage for stage in resolved_stages(method, rounds or 0) if stage.federated]
    most = site.limits.max_rounds if federated else 0
    updates = most if rounds is None else sum(stage.rounds or 0 for stage in federated)
    return Terms(label, str(about["up"]), str(about["down"]), updates, "; ".join(mends))


def terms_of(site: SiteFile, experiment: Experiment | None = None) -> list[Terms]:
    """The terms of an experiment's methods, by label; without one, of every method that the site's file lists, or of
    all that befit has."""
    load_plugins(site.plugins)
    if experiment is None:
        names = method_names() if site.methods is None else [name for name in site.methods if name in method_names()]
        return [terms(name, {"name": name}, site) for name in names]
    rounds = experiment.federation.rounds
    return [terms(label, block, site, rounds) for label, block in method_blocks(experiment).items()]


def refused_run(site: SiteFile, experiment: Experiment) -> list[str]:
    """Why this site would refuse an experiment; nothing where it would take part. Where its own records are not here,
    or cannot be read, nothing is said of them."""
    settings, problems = settings_of(resolve_model(experiment)), dict[str, None]()
    listed = experiment.data.clients if experiment.data is not None else None
    if isinstance(listed, Mapping) and site.client not in listed:
        shown = first_of(sorted(listed))
        problems[f"client: {site.client} is no client of this run (data.clients); it has {shown}"] = None
    data: ClientData | None = None
    lacking: dict[str, list[str]] = {}  # each with the methods that it is said of
    for label, block in method_blocks(experiment).items():
        try:
            here = experiment_here(settings, method_of(block), site)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        if experiment.data is not None and (data := data or _records(here)) is not None:
            for problem in lacking_records(data, here, build_method(here.method), site.limits):
                lacking.setdefault(problem, []).append(label)
    problems |= dict.fromkeys(f"{', '.join(labels)}: {problem}" for problem, labels in lacking.items())
    try:
        check_sums(experiment, method_blocks(experiment))
    except ConfigError as error:
        problems |= dict.fromkeys(error.problems)
    return list(problems)


def _records(experiment: Experiment) -> ClientData | None:
    """What a site has for its own experiment; None where that is not here, or cannot be read."""
    try:
        (client,) = load_federation(experiment).clients
    except BefitError:
        return None
    return client


def uncounted_sentence(runs: Sequence[str]) -> str:
    """What a site's budget says nothing about, as `uncounted` gives it."""
    told = "Its budget does not count what it told in earlier runs that were not of privacy.unit example"
    return f"{told}: {first_of(runs, 3)}."


def promises(site: SiteFile) -> list[str]:
    """What holds for every run, whatever its method, in sentences."""
    limits, wordings = site.limits, {"exact": "as they are", "rounded": "rounded to three digits", "none": "not told"}
    sentences = [
        "At the start of a run the server learns the site's id, its version of befit, the fingerprint of its backbone "
        "(and of the smallest one, where a method has every client run that), its numbers of train, val and test "
        "records, and a hash of its data that only this site can make (of a benchmark: its plain hash).",
        f"Losses, diagnostics and scores of its own data are {wordings[site.scores]}, and a split with fewer than "
        f"{limits.min_records} records gives none. Every reply names its seconds, on the "
        "wall and of processors, and its memory.",
        f"An update is made of at least {limits.min_records} records, in batches of {limits.min_batch} to "
        f"{limits.max_batch}, in at most {limits.max_steps} steps a round and {limits.max_rounds} rounds in all.",
        "Settings, methods and their labels are those of the start of a run; a request that says otherwise is refused.",
    ]
    if site.privacy is not None:
        sentences.append(
            f"Whether any single record is in the data stays hidden up to epsilon {site.privacy.epsilon:g} at delta "
            f"{site.privacy.delta:g}, over all private runs together; losses and scores are not told at all."
        )
    if others := uncounted(site):
        sentences.append(uncounted_sentence(others))
    if site.require_secure_sums:
        signed = "signed by the keys in its file" if site.peers else "with keys as the server tells them (peers)"
        sentences.append(f"Updates leave hidden, and the server learns their sum alone, {signed}.")
    if SKETCH in site.shares:
        sentences.append(
            "shares: sketch lets gradients of a few records leave: they often tell what these are about, and of a "
            "single one its answer."
        )
    if site.errors == "text":
        sentences.append("errors: text tells the server the text of errors, which may quote records.")
    if site.data is not None and site.label_names is None:
        sentences.append("Without label_names a server can try three times whether its classes are those of the data.")
    return sentences
