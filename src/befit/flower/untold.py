"""Which sites have too few records to tell a score, before a run shows it by a gap."""

from __future__ import annotations

from dataclasses import replace

from befit.config.experiment import EvaluateSettings, Experiment
from befit.core.errors import BefitError
from befit.data.federation import ClientData
from befit.data.files.client_files import client_sources
from befit.data.files.load import load_files
from befit.data.files.settings import DataSettings
from befit.flower.policy import experiment_here, method_of, settings_of
from befit.flower.site_file import SiteFile
from befit.runs.loading import load_federation, resolve_model


def untold_in(site: SiteFile, experiment: Experiment) -> str:
    """Why a site would tell no score in a run that it takes part in, in a sentence; empty where it would tell them, or
    where that has other reasons than its records: `scores: none`, a private run, or data that cannot be read."""
    if site.data is None or experiment.benchmark is not None or experiment.privacy.unit == "example":
        return ""
    try:
        resolved = resolve_model(experiment)
        here = experiment_here(settings_of(resolved), method_of(experiment.method), site)
        (client,) = load_federation(here).clients
    except BefitError:
        return ""
    split = experiment.evaluate.split
    return _sentence(site, client, split, f"data.{split}_fraction of the run")


def untold_as_usual(site: SiteFile, settings: DataSettings) -> str:
    """The same for a run that is not known yet, and holds out what runs hold out unless they say otherwise.

    settings  the site's data in other respects, as the run reads it
    """
    split, share = EvaluateSettings.split, DataSettings.test_fraction
    try:
        (client,) = load_files(replace(settings, val_fraction=DataSettings.val_fraction, test_fraction=share)).clients
    except BefitError:
        return ""
    return _sentence(site, client, split, f"data.{split}_fraction {share:g}, unless a run says otherwise")


def _sentence(site: SiteFile, client: ClientData, split: str, share: str) -> str:
    least = site.limits.min_records
    counts = client.sizes
    if site.scores == "none" or counts[split] >= least or site.data is None:
        return ""
    its = f"its {counts[split]} {split} records are"
    if split not in client_sources({client.id: site.data})[client.id]:
        its = f"{counts[split]} of its {sum(counts.values())} records would be {split} ({share}):"
    return f"{its} fewer than limits.min_records, {least}, so it tells no score"
