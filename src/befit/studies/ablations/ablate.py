"""One ablation as a person asks for it: a configuration in; measurements, tables and plots out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from befit.config.experiment import Experiment, load_experiment, to_dict
from befit.config.seeds import seeded
from befit.core.errors import ConfigError
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.federate import resolved_stages
from befit.protocol.registry import build_method
from befit.runs.host import Host
from befit.runs.journal import Observer
from befit.runs.loading import resolve_model
from befit.runs.provenance import environment, locked
from befit.runs.runner import pick_threads, threads
from befit.studies.ablations import registry
from befit.studies.ablations.base import Ablation, Findings, Row
from befit.studies.ablations.branches import federated_rounds, train_branches, trunk
from befit.studies.ablations.pairs import Client

__all__ = ["Finished", "ablate"]


@dataclass(frozen=True)
class Finished:
    """A finished ablation: its directory, the content of its ablation.json, and what that says."""

    path: Path
    results: dict[str, Any]
    findings: Findings


def ablate(
    name: str,
    config: Experiment | Mapping[str, Any] | Path | str,
    *,
    options: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    out: Path | str | None = None,
    observer: Observer | None = None,
) -> Finished:
    """Train the branches for every seed, or find them on the disk, measure at every client, and write what came out.

    options   of the ablation, by name
    seeds     each changes adapters and batches, and the partition of a benchmark that has a seed; default: the
              configuration as it is
    out       directory of all ablations of this configuration, default runs/<name>-ablations; the results are in
              <out>/<ablation>/, trained branches in <out>/branches/
    observer  called with events, as `befit.runs.runner.run` calls it

    Raises ConfigError for an ablation that does not go with the configuration, and whatever `befit.run` raises.
    """
    experiment = resolve_model(load_experiment(config))
    ablation, chosen = _check(name, options, experiment, seeds)
    root = Path("runs") / f"{experiment.name}-ablations" if out is None else Path(out)
    labels = [f"seed {seed}" for seed in (seeds or [experiment.federation.seed])]
    rows: list[Row] = []
    described: dict[str, Any] = {}
    with locked(root):
        for label, one in zip(labels, seeded(experiment, seeds), strict=True):
            host = Host(one)
            with threads(pick_threads(host)):
                rows += _measure(name, ablation, host, root / "branches", label, observer)
            described = {
                "metric": host.task.metric,
                "task": host.federation.task,
                "backbone": host.fingerprint,
                "data": f"{host.federation.name} {host.federation.version}".strip(),
                "environment": environment(host),
            }
        entry = registry.get(name)
        results = {
            "ablation": name,
            "title": entry.title,
            "summary": entry.summary,
            "about": entry.docstring,
            "name": experiment.name,
            "method": experiment.method["name"],
            "options": chosen,
            "seeds": list(dict.fromkeys(row["seed"] for row in rows)),
            "split": experiment.evaluate.split,
            **described,
            "config": to_dict(experiment),
            "rows": rows,
        }
        findings = ablation.findings(rows, results["metric"])
        results["findings"] = {
            "sentences": list(findings.sentences),
            "tables": [
                {"title": one.title, "headers": one.table[0], "rows": one.table[1], "note": one.note}
                for one in findings.tables
            ],
        }
        from befit.studies.ablations.page import write_ablation

        write_ablation(root / name, results, findings.tables, findings.figures)
    return Finished(root / name, results, findings)


def _check(
    name: str, options: Mapping[str, Any] | None, experiment: Experiment, seeds: Sequence[int] | None
) -> tuple[Ablation, dict[str, Any]]:
    """The ablation and all its options. Raises ConfigError for all that is wrong, before any data is read."""
    entry = registry.get(name)
    problems: list[str] = []
    if experiment.method["name"] != entry.method:
        raise ConfigError(
            [f"method.name: {name} needs a configuration of {entry.method}, this one is of {experiment.method['name']}"]
        )
    ablation, chosen = registry.build(name, options)
    for key, value in ablation.options().items():  # one by one, since they are not varied together
        try:
            build_method({**experiment.method, key: value})
        except ConfigError as error:
            problems += [f"{name} sets {key}: {value}, and then {problem}" for problem in error.problems]
    total = federated_rounds(cast(Recipe, build_method(experiment.method)), experiment.federation.rounds)
    if late := sorted(round_ for round_ in ablation.checkpoints(total) if round_ > total):
        problems.append(
            f"ablation.rounds: {', '.join(map(str, late))} are beyond the {total} rounds of the federated "
            "branch (method.rounds_fedit or federation.rounds)"
        )
    if seeds is not None and (not seeds or len(set(seeds)) < len(seeds)):
        problems.append(f"--seeds: must be different whole numbers, got {list(seeds)}")
    if experiment.evaluate.split == "val":
        problems.append(
            "evaluate.split: ablations score on test examples, so that what is picked on validation "
            "examples is not scored on them; got val"
        )
    if experiment.engine.kind != "local":
        problems.append(f"engine.kind: ablations run on this machine (local), not {experiment.engine.kind}")
    if problems:
        raise ConfigError(problems)
    return ablation, chosen


def _measure(name: str, ablation: Ablation, host: Host, root: Path, label: str, observer: Observer | None) -> list[Row]:
    """Rows of all clients of one seed, in the order of the clients."""
    config, rounds = host.experiment.method, host.experiment.federation.rounds
    method = cast(Recipe, build_method(config))
    problems = host.problems(config["name"], config)
    for split in ablation.splits:
        if empty := [client.id for client in host.federation.clients if not len(getattr(client, split))]:
            problems.append(f"{name} needs {split} examples at every client; {empty[0]} has none ({label})")
    if problems:
        raise ConfigError(problems)
    tell = observer or (lambda event: None)
    stages = [{"name": stage.name, "rounds": stage.rounds} for stage in resolved_stages(trunk(method), rounds)]
    total = len(host.infos)
    stages.append({"name": "measure", "rounds": total})
    tell({"kind": "run_started", "run": label, "stages": stages, "clients": total})
    wanted = ablation.checkpoints(federated_rounds(method, rounds))
    branches = train_branches(host, method, root, wanted, observer, label)
    host.install(method)
    sent = max(branches.bytes_up[branches.rounds[-1]].values()) * total
    rows: list[Row] = []
    for number, info in enumerate(host.infos, start=1):
        where = {"seed": host.experiment.federation.seed, "client": info.id}
        rows += [{**where, **row} for row in ablation.measure(Client(host, config, info, branches))]
        tell(
            {
                "kind": "round",
                "run": label,
                "stage": "measure",
                "round": number,
                "rounds": total,
                "clients": number,
                "failed": 0,
                "loss": None,
                "bytes_up": sent,
                "bytes_down": 0,
            }
        )
    tell({"kind": "run_finished", "run": label})
    return rows
