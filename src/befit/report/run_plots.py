"""All plots of a run's report."""

from __future__ import annotations

from befit.report.client_maps import client_weights, gate_map, scores_on_others
from befit.report.client_plots import client_bars, client_distributions, share_bars, share_distribution
from befit.report.curve_plots import over_bytes, over_rounds
from befit.report.diagnostics import shares
from befit.report.drawing import MANY, Plot
from befit.report.rank_maps import client_ranks, mean_ranks, scale_distances
from befit.report.record import RunRecord


def plots_of(record: RunRecord) -> list[Plot]:
    """All plots for which the run has numbers."""
    results = record.results
    many = len(results["clients"]) > MANY
    candidates = (
        over_rounds(record),
        over_bytes(record),
        client_distributions(results) if many else client_bars(results),
        *(share_distribution(*pair) if many else share_bars(*pair) for pair in shares(results)),
        *client_weights(results),
        scores_on_others(results),
        gate_map(results),
        mean_ranks(record.structures),
        client_ranks(record.structures),
        scale_distances(record.structures, {client: row.get("info", {}) for client, row in results["clients"].items()}),
    )
    return [plot for plot in candidates if plot is not None]
