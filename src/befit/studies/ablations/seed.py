"""The runs of one seed, all behind the same two branches, and one client with both of its adapters."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from befit.adapters.keys import select, slot
from befit.config.experiment import Experiment
from befit.config.overrides import put
from befit.core.errors import NotTrained
from befit.core.seeds import derive_seed
from befit.core.storage import read_lines, read_sealed
from befit.core.values import ClientInfo, State, Tick
from befit.core.yamlfile import parse_yaml
from befit.merge.pair import merge_pair
from befit.methods.potara import PotaraMerge, merge_rule
from befit.protocol.method import federated_stage, run_stages
from befit.protocol.registry import build_method, check_method
from befit.protocol.schedule import resolved_stages
from befit.protocol.site import Site
from befit.protocol.store import ClientStore, read_payload
from befit.runs.directory import RunDirectory
from befit.runs.engines import pick_threads, threads
from befit.runs.host import Host
from befit.runs.journal import kept_path
from befit.runs.provenance import settings_hash
from befit.runs.shared_stages import SharedFolder, forget_shared_stages, shared_stages_keys
from befit.studies.compare.cells import StudyCell, find_folder
from befit.studies.compare.execute import Runner
from befit.tasks.base import batches, inference
from befit.train.paired_fisher import PairedFisher

_LOG = logging.getLogger(__name__)
FEDERATED, LOCAL = "federated alone", "local alone"
_BRANCHES = ("rank", "alpha", "rounds_local", "rounds_fedit", "weights")  # options that decide the two branches


def changed(block: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A method's block with some of its options changed, by dotted key."""
    values = copy.deepcopy(dict(block))
    for key, value in changes.items():
        put(values, key.split("."), value)
    return values


def end_of(block: Mapping[str, Any], w: float) -> dict[str, Any]:
    """The method that has the branches of this one and deploys one of them: the local (w = 0) or the federated one."""
    return {"name": "interpolation", "w": w, **{key: block[key] for key in _BRANCHES if key in block}}


@dataclass(frozen=True)
class Seed:
    """One seed of a configuration.

    root    runs are in <root>/runs/, and what they share in <root>/shared/
    runner  keeps backbone and data from run to run
    keep    federated rounds whose adapter is needed
    tell    called with every event of a run, under the run's label
    """

    experiment: Experiment
    root: Path
    runner: Runner
    keep: Sequence[int]
    tell: Callable[[dict[str, Any]], None]

    @cached_property
    def host(self) -> Host:
        return self.runner.host(self.experiment)

    def label(self, label: str) -> str:
        """How events call a run."""
        return f"{label}, seed {self.experiment.federation.seed}"

    def run(self, label: str, block: Mapping[str, Any]) -> Path:
        """The directory of a finished run of a method; it is run unless it was before. Raises whatever stopped it."""
        cell = self._cell(label, block)
        path = find_folder(self.root, cell)
        self.runner(
            cell, path, lambda event: self.tell({**event, "run": self.label(label)}), SharedFolder(self.root / "shared")
        )
        return path

    def _cell(self, label: str, block: Mapping[str, Any]) -> StudyCell:
        experiment = replace(self.experiment, method=check_method(block)[0])
        return StudyCell(label, experiment.federation.seed, experiment, settings_hash(experiment))

    def federated(self) -> Path:
        """The run that deploys the federated branch: the first one, which all others share their branches with.

        It keeps the adapters of `keep`. One that kept others is trained again.
        """
        block, keep = end_of(self.experiment.method, 1.0), set(self.keep)
        path = find_folder(self.root, self._cell(FEDERATED, block))
        if (path / "config.yaml").exists():
            kept = set(parse_yaml((path / "config.yaml").read_text())["checkpoint"]["keep"])
            if missing := keep - kept:
                wanted = ", ".join(map(str, sorted(missing)))
                _LOG.warning("the run in %s did not keep rounds %s; the branches are trained anew", path, wanted)
                shutil.rmtree(path)
                forget_shared_stages(self.root / "shared", shared_stages_keys(self.experiment, block).values())
            keep |= kept
        settings = replace(self.experiment.checkpoint, keep=tuple(sorted(keep)))
        return replace(self, experiment=replace(self.experiment, checkpoint=settings)).run(FEDERATED, block)

    def scores(self, run: Path) -> dict[str, float]:
        """Every client's score. Raises NotTrained where a client has none."""
        results = read_sealed(run / "results.json")
        scores = {client: row.get(results["metric"]) for client, row in results["clients"].items()}
        if missing := [client for client, score in scores.items() if score is None]:
            raise NotTrained(
                f"{len(missing)} clients have no score, first {missing[0]}; every client needs both adapters. "
                f"Why is in {run / 'metrics.jsonl'}"
            )
        return scores

    def reported(self, run: Path) -> dict[str, dict[str, float]]:
        """What every client reported of its merge, by name."""
        numbers: dict[str, dict[str, float]] = {}
        for line in read_lines(run / "metrics.jsonl"):
            if line["kind"] == "diagnostic":
                numbers.setdefault(line["client"], {})[line["name"]] = line["value"]
        return numbers

    def clients(self) -> Iterator[Client]:
        """Every client with both of its adapters, one after the other. Raises NotTrained naming one without."""
        run = self.federated()
        directory, store = RunDirectory(run), ClientStore(run / "state" / "clients")
        point, _ = directory.restore(store)
        assert point is not None
        memories = {info.id: store.load(info.id) for info in self.host.infos}
        local = {client: select(memory.arrays, slot("personal")) for client, memory in memories.items() if memory}
        if missing := [client for client in memories if not local.get(client)]:
            raise NotTrained(
                f"{len(missing)} clients have no adapter of their own, first {missing[0]}; every client needs both "
                f"adapters. Why is in {run / 'metrics.jsonl'}"
            )
        sent: dict[str, list[dict[str, Any]]] = {}
        for line in read_lines(run / "ledger.jsonl"):
            if line["purpose"] == "train":
                sent.setdefault(line["client"], []).append(line)
        total, rounds = len(local), federated_rounds(self.experiment)
        stages = [{"name": "measure", "rounds": total}]
        run_label = {"run": self.label("measure")}
        self.tell({"kind": "run_started", "stages": stages, "clients": total, **run_label})
        for number, info in enumerate(self.host.infos, start=1):
            lines = sent.get(info.id, [])
            with threads(pick_threads(self.host)):
                yield Client(self.host, self.experiment.method, info, run, local[info.id], lines, rounds)
            self.tell({"kind": "client", "stage": "measure", "round": number, "done": 1, "of": 1, **run_label})
        self.tell({"kind": "run_finished", **run_label})


@dataclass(frozen=True)
class Client:
    """One client of one seed.

    block  the method's block of the configuration
    run    the directory of the run that trained both branches
    local  the adapter that it trained alone, in slot `personal`
    sent   lines of the ledger: what it sent, and when
    rounds rounds of the federated branch
    """

    host: Host
    block: Mapping[str, Any]
    info: ClientInfo
    run: Path
    local: State
    sent: Sequence[Mapping[str, Any]]
    rounds: int

    def bytes_up(self, round_: int) -> int:
        """Bytes that it had sent after a federated round; personal stages send nothing, so their lines add nothing."""
        return sum(line["bytes_up"] for line in self.sent if line["round"] <= round_)

    def pair(self, round_: int | None = None) -> Pair:
        """Its local adapter, with the federated one after a kept round; default the last."""
        # What a client of the run has is what came over the wire, in the wire's form.
        wire = self.host.wire(method := self.host.build(self.block))
        stage = federated_stage(run_stages(method))
        assert stage is not None
        server = read_payload(kept_path(self.run, stage.name, round_ or self.rounds))
        sent = replace(server, arrays=select(server.arrays, slot("shared")))
        return Pair(self, self.host.site(self.info), wire.received(wire.down(sent)).arrays, self.local)

    def rule(self, changes: Mapping[str, Any] | None = None) -> PotaraMerge:
        """How the configured method merges, with some options changed.

        Puts the slots that the merge needs on the model. Raises ConfigError for options that exclude each other.
        """
        method = build_method(changed(self.block, changes or {}))
        if self.host.model.layout != method.layout:
            self.host.install(method)
        return merge_rule(method)

    def count(self, split: str) -> int:
        """Examples of a split."""
        return len(self.host.examples(self.info.id, split))


@dataclass(frozen=True)
class Pair:
    """A federated adapter in slot `shared` and a local one in `personal`, at one client."""

    client: Client
    site: Site
    fed: State
    local: State

    def moments(self, rule: PotaraMerge, draw: int = 0) -> PairedFisher:
        """The statistics on as many examples as the rule says. Draw 0 takes those that a run takes, others take others.

        A client with fewer examples gives all of them, without a warning: `count` of the result says how many.
        """
        seed = self.client.host.experiment.federation.seed
        at = Tick("merge", 1, 1, derive_seed(seed, "draw", draw) if draw else seed)
        self.site.model.reset()
        self.site.model.load(self.fed)
        self.site.model.load(self.local)
        how = rule.statistics
        how = replace(how, samples=min(how.samples, max(1, self.client.count(how.split))))
        return replace(rule, statistics=how).moments(self.site, at)

    def merged(self, weights: Mapping[str, Tensor | float] | float, rule: PotaraMerge) -> State:
        """The adapter in slot `merged`."""
        by_key = {"": weights} if isinstance(weights, (int, float)) else weights
        return merge_pair(self.fed, self.local, by_key, rule.merge_space)

    def score(self, state: State, split: str | None = None) -> float:
        """The headline metric of an adapter in slot `merged`; default on the split that the run is scored on."""
        settings, model = self.client.host.experiment.evaluate, self.site.model
        examples = self.site.examples(split or settings.split)
        with model.using(state, "merged"):
            metrics = self.site.task.evaluate(model.backbone, examples, settings.batch_size, model.device)
        return metrics[self.site.task.metric]

    def loss(self, state: State) -> float:
        """The mean loss of an adapter in slot `merged` over the examples that the run is scored on."""
        settings, model, task = self.client.host.experiment.evaluate, self.site.model, self.site.task
        total, examples = 0.0, self.site.examples(settings.split)
        with model.using(state, "merged"), inference(model.backbone):
            for _, batch in batches(examples, settings.batch_size, model.device):
                total += float(task.sample_losses(task.logits(model.backbone, batch), batch).double().sum())
        return total / len(examples)

    def score_at(self, w: float, rule: PotaraMerge, split: str | None = None) -> float:
        """The score of one weight for everything: 1 is the federated adapter, 0 the local one."""
        return self.score(self.merged(w, rule), split)


def federated_rounds(experiment: Experiment) -> int:
    """How many rounds the federated branch takes."""
    stages = resolved_stages(build_method(experiment.method), experiment.federation.rounds, experiment.limit.rounds)
    return next(stage.rounds or 0 for stage in stages if stage.federated)
