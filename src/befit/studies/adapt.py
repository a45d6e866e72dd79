"""Fast adaptation out of finished runs: how soon newcomers learn their task from different starts.

The newcomers of a run's benchmark, or of one's own files, train one adapter alone from several starts; the curves of
their test scores are what is compared (FedMosaic, Figures 6 and 19).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from befit.adapters.keys import Selector, select, slot, slot_of, to_slot
from befit.adapters.layout import GATE
from befit.config.experiment import Experiment, method_blocks
from befit.core.errors import BefitError, ConfigError, DataError, NotTrained, RunError, did_you_mean
from befit.core.names import folder_name, method_folder
from befit.core.values import ClientInfo, Failure, Payload, State, Tick
from befit.protocol.federate import final_download
from befit.protocol.method import Deployment, Method
from befit.protocol.schedule import resolved_stages
from befit.protocol.site import Site
from befit.runs.artifacts import check_run, read_deployment
from befit.runs.directory import last_checkpoint
from befit.runs.host import Host
from befit.runs.newcomers import arrive, newcomer_engine
from befit.runs.outbound import Outbound
from befit.runs.progress import Progress, watched
from befit.runs.provenance import experiment_of, read_manifest
from befit.train.loop import train
from befit.train.passes import Pass

if TYPE_CHECKING:
    from befit.runs.journal import Observer


@dataclass(frozen=True)
class AdaptationCurve:
    """Metrics of the test split by steps of training, from step 0 on."""

    steps: tuple[int, ...]
    metrics: tuple[Mapping[str, float], ...]

    def mean(self, metric: str) -> float:
        """The curve's mean, by which curves are compared."""
        return sum(scores[metric] for scores in self.metrics) / len(self.metrics)


def fast_adaptation(
    site: Site,
    start: State,
    *,
    name: str = "personal",
    steps: int = 200,
    every: int = 25,
    seed: int = 0,
    trainable: Selector | None = None,
    split: str = "test",
    batch_size: int = 32,
) -> AdaptationCurve:
    """Train slot `name` alone on an unseen task, and score it after 0, every, 2 every, … steps.

    site       of the unseen task, its model with a layout installed that has the slot
    start      arrays of the slot, such as what a federation's clients have on average; nothing for a fresh adapter,
               the paper's "random init"
    trainable  what of the model is trained; the whole slot without

    One optimiser runs through, batches come from the training split. Ends with the model reset. Raises ConfigError for
    steps that are no multiple of `every`.
    """
    _check_steps(steps, every)
    model = site.model
    model.reset()
    model.load(start)
    stage_pass = Pass(trainable or slot(name), (name,), keep_optimiser=True)
    part, memory, metrics = replace(site.budget, max_steps=every), Payload(), []
    site = replace(site, budget=part)
    rounds = steps // every
    for number in range(rounds + 1):
        if number:
            memory = train(site, [stage_pass], Tick("adapt", number, rounds, seed), memory=memory).memory
        with model.active(name):
            metrics.append(site.task.evaluate(model.backbone, site.examples(split), batch_size, model.device))
    model.reset()
    return AdaptationCurve(tuple(range(0, steps + 1, every)), tuple(metrics))


def _check_steps(steps: int, every: int) -> None:
    if every < 1 or steps < 1 or steps % every:
        text = f"steps: must be a positive multiple of every (--steps and --every), got {steps} and {every}"
        raise ConfigError([text], "fast adaptation")


def mean_start(adapters: Sequence[State], name: str = "personal") -> State:
    """Where a newcomer starts: the mean of clients' adapters of its backbone, all in slot `name`, in float32."""
    from befit.adapters.state import rename, weighted_mean

    mean = weighted_mean(adapters, [1.0] * len(adapters))
    return {key: value.to(torch.float32) for key, value in rename(mean, name).items()}


STARTS = {
    "random": "a fresh adapter",
    "mean": "the mean of the clients' adapters, of those with the newcomer's backbone",
    "server": "what the method's server has for a newcomer: its download, or a mixture made for it alone",
}


# Blocks that say what a run trained: another method's name would stand at this one's curves.
_TRAINED = ("method", "baselines", "federation", "families", "adapter")


@dataclass(frozen=True)
class Adapted:
    """One newcomer from one start: its curve, or the reason why it has none.

    run, method  the run directory, and the label of the method in it
    """

    run: str
    method: str
    start: str
    newcomer: str
    metric: str
    curve: AdaptationCurve | None
    reason: str = ""


def adapt(
    runs: Sequence[Path | str],
    *,
    starts: Sequence[str] = tuple(STARTS),
    steps: int = 200,
    every: int = 25,
    seed: int = 0,
    methods: Sequence[str] | None = None,
    newcomers: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    observer: Observer | None = None,
    quiet: bool = False,
) -> list[Adapted]:
    """Adapt newcomers from the starts that finished runs offer.

    runs       run directories; all methods in them are taken, or those labelled `methods`
    starts     of `STARTS`
    newcomers  their ids; all of the run's data without
    overrides  changes to the runs' configurations, such as train.lr=1e-4; what says what was trained stays
    observer   called with events, as in `befit.run`; without one, a terminal or a notebook shows how far it is
    quiet      show nothing

    Every curve has the same batches for the same newcomer. Nothing in a run directory changes. Raises ConfigError for
    starts, steps, methods or newcomers that cannot be, RunError for a directory without a finished run, DataError where
    there are no newcomers.
    """
    for name, choices in (("starts", starts), ("methods", methods), ("newcomers", newcomers)):
        if choices is not None and not choices:
            raise ConfigError([f"{name}: must name at least one"], "fast adaptation")
    if unknown := [start for start in starts if start not in STARTS]:
        raise ConfigError(
            [f"starts: {unknown[0]} is none of {', '.join(STARTS)}.{did_you_mean(unknown[0], STARTS)}"],
            "fast adaptation",
        )
    if fixed := [key for key in (one.partition("=")[0] for one in overrides) if _stays(key)]:
        text = f"{fixed[0]}: stays as the run had it; steps say how long is trained, and methods which of a run's"
        raise ConfigError([text], "fast adaptation")
    if twice := [path for path, count in Counter(Path(run).resolve() for run in runs).items() if count > 1]:
        raise ConfigError([f"runs: {twice[0]} is named twice"], "fast adaptation")
    _check_steps(steps, every)
    with watched(observer, quiet, lambda console: Progress(console, title="newcomers adapt")) as observer:
        return [
            adapted
            for path in map(Path, runs)
            for adapted in _adapted(path, starts, steps, every, seed, methods, newcomers, overrides, observer)
        ]


def _stays(key: str) -> bool:
    return key in ("train.epochs", "train.max_steps") or key.partition(".")[0] in _TRAINED


def _adapted(
    path: Path,
    starts: Sequence[str],
    steps: int,
    every: int,
    seed: int,
    methods: Sequence[str] | None,
    newcomers: Sequence[str] | None,
    overrides: Sequence[str],
    observer: Observer | None,
) -> Iterator[Adapted]:
    """The same of one run. Every curve counts as a round of the run's progress."""
    host = _host(path, overrides)
    chosen = _newcomers(host, newcomers)
    for label, block, folder in _methods(path, host.experiment, methods):
        method = host.build(block)
        host.install(method)
        server = last_checkpoint(folder).server

        def tell(kind: str, run: str = f"{path.name} {label}", **what: Any) -> None:
            if observer:
                observer({"kind": kind, "run": run, "stage": "adapt", "bytes_up": 0, "bytes_down": 0, **what})

        curves, done, without = len(chosen) * len(starts), 0, 0
        stages = [{"name": "adapt", "rounds": curves}]
        tell("run_started", stages=stages, clients=len(chosen), metric=host.task.metric)
        backbones = dict.fromkeys(info.backbone for info in chosen)
        means = {backbone: _or_reason(partial(_mean_of_clients, host, folder, backbone)) for backbone in backbones}
        for info in chosen:
            for start, begin in _starts(host, method, server, means[info.backbone], info, starts).items():
                metric = host.backbone_of(info.id).task.metric
                result = Adapted(str(path), label, start, info.id, metric, None)
                if isinstance(begin, str):
                    result, without = replace(result, reason=begin), without + 1
                else:
                    result = replace(result, curve=_curve(host, method, info, begin, steps, every, seed))
                done += 1
                tell("round", round=done, clients=done - without, failed=without)
                if result.curve is not None:
                    tell("score", round=done, mean=result.curve.metrics[-1][metric])
                yield result
        tell("run_finished")


def summary(results: Sequence[Adapted]) -> list[dict[str, Any]]:
    """Means over newcomers by run, method and start: scores by step, their mean, and who has none for which reason."""
    groups: dict[tuple[str, str, str], list[Adapted]] = {}
    for result in results:
        groups.setdefault((result.run, result.method, result.start), []).append(result)
    rows: list[dict[str, Any]] = []
    for (run, method, start), members in groups.items():
        curves = [(result.curve, result.metric) for result in members if result.curve is not None]
        row: dict[str, Any] = {"run": run, "method": method, "start": start, "newcomers": len(curves)}
        if curves:
            steps = curves[0][0].steps
            row["scores"] = {
                step: sum(curve.metrics[place][metric] for curve, metric in curves) / len(curves)
                for place, step in enumerate(steps)
            }
            row["mean"] = sum(row["scores"].values()) / len(steps)
        row["reasons"] = {result.newcomer: result.reason for result in members if result.reason}
        rows.append(row)
    return rows


def _host(path: Path, overrides: Sequence[str]) -> Host:
    """What the run was started on, with its newcomers."""
    check_run(path)
    if not (path / "results.json").exists():
        raise RunError(f"{path} is not finished; continue with --resume")
    experiment = experiment_of(path, overrides)
    host = Host(replace(experiment, evaluate=replace(experiment.evaluate, newcomers=True)))
    before = read_manifest(path)
    trained_on = {before["backbone"], *before["backbones"].values()}
    for backbone in host.backbones.values():
        if backbone.fingerprint not in trained_on:
            raise RunError(
                f"the model of {backbone.name} is not one that {path} was trained on: its fingerprint is "
                f"{backbone.fingerprint[:12]}"
            )
    return host


def _newcomers(host: Host, wanted: Sequence[str] | None) -> list[ClientInfo]:
    if not host.newcomers:
        raise DataError(
            f"{host.federation.name} has no newcomers to adapt: name some under data.newcomers, or take a "
            "benchmark that has some"
        )
    by_id = {info.id: info for info in host.newcomers}
    for newcomer in wanted or ():
        if newcomer not in by_id:
            raise ConfigError(
                [f"newcomers: {newcomer} is none of {', '.join(by_id)}.{did_you_mean(newcomer, by_id)}"],
                "fast adaptation",
            )
    chosen = [by_id[newcomer] for newcomer in wanted] if wanted is not None else list(by_id.values())
    if empty := [info.id for info in chosen if not info.num_examples]:
        raise DataError(f"newcomer {empty[0]} has no training examples, so it cannot adapt")
    return chosen


def _methods(
    path: Path, experiment: Experiment, wanted: Sequence[str] | None
) -> list[tuple[str, Mapping[str, Any], Path]]:
    """Label, configuration block and folder of each method of a run."""
    blocks = method_blocks(experiment)
    for label in wanted or ():
        if label not in blocks:
            raise ConfigError(
                [f"methods: {path} has no {label}; it has {', '.join(blocks)}.{did_you_mean(label, blocks)}"],
                "fast adaptation",
            )
    return [
        (label, block, method_folder(path, label, next(iter(blocks))))
        for label, block in blocks.items()
        if wanted is None or label in wanted
    ]


@dataclass(frozen=True)
class _Begin:
    """The arrays at the start, and the slot that is trained."""

    arrays: State
    name: str


def _starts(
    host: Host, method: Method, server: Payload, from_clients: _Start | str, info: ClientInfo, wanted: Sequence[str]
) -> dict[str, _Begin | str]:
    """Every requested start, or the reason why it is missing. All have the same frozen arrays, and train one slot."""
    from_server = _or_reason(lambda: _server_start(host, method, server, info))
    available = [start for start in (from_clients, from_server) if not isinstance(start, str)]
    if not available:  # then the slot to train is unknown too
        reasons = {
            "mean": from_clients,
            "server": from_server,
            "random": f"clients have no one adapter to train: {from_clients}",
        }
        return {start: reasons[start] for start in wanted}  # type: ignore[misc]
    name, frozen = available[0][0], {key: value for _, _, rest in available for key, value in rest.items()}
    starts: dict[str, _Begin | str] = {}
    for start in wanted:
        chosen = {"random": (name, {}, {}), "mean": from_clients, "server": from_server}[start]
        if isinstance(chosen, str):
            starts[start] = chosen
        else:
            arrays = {to_slot(key, name): value for key, value in chosen[1].items()}
            starts[start] = _Begin({**frozen, **arrays}, name)
    return starts


_Start = tuple[str, State, State]  # a slot, its arrays, and frozen arrays that it rests on


def _or_reason(find: Callable[[], _Start]) -> _Start | str:
    """A start, or the message of the error that prevents it."""
    try:
        return find()
    except BefitError as error:
        return str(error)


def _mean_of_clients(host: Host, folder: Path, backbone: str) -> _Start:
    """The mean of the adapters of the clients with this backbone."""
    peers = [client.id for client in host.infos if client.backbone == backbone]
    folders = [folder / "clients" / folder_name(client) for client in peers]
    deployed = [read_deployment(folder) for folder in folders if (folder / "deployment.safetensors").exists()]
    if not deployed:
        raise NotTrained("no client with its backbone has an adapter here")
    name = _single_slot(deployed[0])
    states = [select(deployment.arrays, slot(name)) for deployment in deployed]
    return name, mean_start(states, name=name), _frozen_arrays(deployed[0])


def _server_start(host: Host, method: Method, server: Payload, info: ClientInfo) -> _Start:
    """The adapter that the method's server has for this newcomer."""
    engine = newcomer_engine(host, method, info)
    row = {"bytes_up": 0, "bytes_down": 0, "seconds": 0.0, "cpu_seconds": 0.0}
    welcome = arrive(engine, host, method, server, info, row, Outbound())
    if isinstance(welcome, Failure):
        raise NotTrained(welcome.reason)
    experiment = host.experiment
    stage = resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)[-1]
    at = Tick(stage.name, stage.rounds or 1, stage.rounds or 1, experiment.federation.seed)
    try:
        deployed = engine.deployment(info.id, final_download(method, welcome, info, at), at)
    except NotTrained as error:
        made = "the server sends no model: it is made by stages at a client, and a newcomer has run none"
        raise NotTrained(made) from error
    name = _single_slot(deployed)
    return name, select(deployed.arrays, slot(name)), _frozen_arrays(deployed)


def _single_slot(deployed: Deployment) -> str:
    """The slot whose adapter is a model by itself. Raises NotTrained where a model needs several slots together."""
    if len(deployed.slots) == 1:
        return deployed.slots[0]
    if deployed.mixer == "gate" and "personal" in deployed.slots:  # a gate chooses between whole adapters
        return "personal"
    raise NotTrained(f"what clients use is {' + '.join(deployed.slots)}, mixed by {deployed.mixer}, and no one adapter")


def _frozen_arrays(deployed: Deployment) -> State:
    """Untrained arrays that the used slots rest on, such as a basis."""
    used = {*deployed.slots, GATE}
    return {key: value for key, value in deployed.arrays.items() if slot_of(key) not in used}


def _curve(
    host: Host, method: Method, info: ClientInfo, begin: _Begin, steps: int, every: int, seed: int
) -> AdaptationCurve:
    """The curve from one start, over all of the newcomer's data at once."""
    site, evaluate = replace(host.site(info), stream=None), host.experiment.evaluate
    chosen = method.trainable() & slot(begin.name)
    return fast_adaptation(
        site,
        begin.arrays,
        name=begin.name,
        steps=steps,
        every=every,
        seed=seed,
        split=evaluate.split,
        batch_size=evaluate.batch_size,
        trainable=chosen if any(map(chosen, site.model.keys)) else slot(begin.name),
    )
