"""results.json of a whole run: a method beside its baselines, with what is known of clients and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from befit.config.experiment import method_blocks
from befit.core.metrics import group_keys
from befit.core.storage import write_sealed
from befit.data.federation import ClientData
from befit.data.limit import limit_sentence
from befit.runs.clients import family_experiment
from befit.runs.groups import Rows, by_budget, by_group, by_record
from befit.runs.host import Host
from befit.runs.results import add_majority, against_baselines


def write_results(
    path: Path,
    host: Host,
    name: str,
    results: dict[str, Any],
    baselines: Mapping[str, dict[str, Any]],
    majority: Mapping[str, float | None],
) -> None:
    """results.json of the whole run: the method, compared with its baselines."""
    metric, families = host.task.metric, host.families
    for client, row in results["clients"].items() if len(host.backbones) > 1 else ():
        row["family"] = families[client]
    against_baselines(results, baselines, metric)
    add_majority(results["clients"], majority, results["summary"])
    add_groups(host, name, results, baselines, host.federation.clients)
    if "newcomers" in results:
        arrived = {label: other["newcomers"] for label, other in baselines.items() if "newcomers" in other}
        against_baselines(results["newcomers"], arrived, metric)
        add_majority(results["newcomers"]["clients"], majority, results["newcomers"]["summary"])
        add_groups(host, name, results["newcomers"], arrived, host.federation.newcomers)
    curve, failures, cost = results.pop("curve"), results.pop("failures"), results.pop("cost", {})
    head = {
        "name": host.experiment.name,
        "method": name,
        "status": "complete",
        "task": host.federation.task,
        "model": ", ".join({family_experiment(host.experiment, family).model.id: 0 for family in families.values()}),
        "seed": host.experiment.federation.seed,
        "data": f"{host.federation.name} {host.federation.version}".strip(),
        "partition": host.federation.manifest.get("partition", {}),
        "metric": metric,
        "split": host.experiment.evaluate.split,
        "higher_is_better": True,
    }
    if host.experiment.evaluate.metrics:
        head["metrics"] = host.experiment.evaluate.metrics
    if "left_out" in host.federation.manifest:
        head["left_out"] = host.federation.manifest["left_out"]
    limit = asdict(host.experiment.limit)
    if limit_sentence(limit) is not None:  # reports then say first that the numbers mean nothing
        head["limit"] = limit
    curves = {name: curve, **{label: other["curve"] for label, other in baselines.items()}}
    costs = {name: cost, **{label: other.get("cost", {}) for label, other in baselines.items()}}
    best = [
        {**best_round, "run": label}
        for label, method_results in {name: results, **baselines}.items()
        for best_round in method_results.get("best_rounds", ())
    ]
    results.pop("best_rounds", None)
    if best:
        head["best_rounds"] = best
    failures += [{**failure, "run": label} for label, other in baselines.items() for failure in other["failures"]]
    write_sealed(path / "results.json", {**head, **results, "curves": curves, "costs": costs, "failures": failures})


def add_groups(
    host: Host,
    name: str,
    results: dict[str, Any],
    baselines: Mapping[str, dict[str, Any]],
    clients: Sequence[ClientData],
) -> None:
    """What is known of each client, and all runs compared by it."""
    infos = {client.id: dict(client.info) for client in clients if client.id in results["clients"]}
    for client, info in infos.items():
        if info:
            results["clients"][client]["info"] = info
    runs = {**{label: other["clients"] for label, other in baselines.items()}, name: results["clients"]}
    evaluate = host.experiment.evaluate
    metrics, wins = evaluate.metrics or [host.task.metric], evaluate.wins

    def grouped(rows: Mapping[str, Rows], key: str, measured: Sequence[str]) -> dict[str, Any]:
        if key == evaluate.by:
            return {**by_record(rows, key, measured, wins), "of": "examples"}
        return by_group(rows, infos, key, measured, wins)

    of_examples: list[str] = [] if evaluate.by is None else [evaluate.by]
    by_key = {key: grouped(runs, key, metrics) for key in dict.fromkeys([*group_keys(infos), *of_examples])}
    if groups := {key: group for key, group in by_key.items() if group["groups"]}:
        results["groups"] = groups
        ranks = {label: block.get("rank") for label, block in method_blocks(host.experiment).items()}
        for budget, there in by_budget(runs, ranks, metrics).items():
            for key in groups:
                results["groups"][key].setdefault("budgets", {})[budget] = grouped(there, key, metrics)
