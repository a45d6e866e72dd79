"""Trained models in the form that others read: PEFT adapters as servers of many adapters expect them, or whole models.

Where a server looks for DIR/NAME, a run of many clients is written as DIR/CLIENT, with the backbone by its public name.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from befit.config.experiment import ModelSettings
from befit.core.errors import BefitError, ModelError, RunError
from befit.core.metrics import Measure
from befit.core.names import folder_name
from befit.core.storage import atomic_write, check_folder, read_bytes, read_json, read_sealed, write_json
from befit.core.wire import from_bytes, pieces, whole_if_told
from befit.core.yamlfile import parse_yaml
from befit.models import load_backbone
from befit.models.backbone import quiet
from befit.models.source import find_model, is_hub_id
from befit.runs.artifacts import (
    backbone_of_run,
    check_backbone,
    check_run,
    client_folder,
    copy_beside_weights,
    experiment_of_client,
    export_name,
)
from befit.runs.loading import load_federation
from befit.runs.peft_io import PARTIAL, cut_ranks
from befit.runs.provenance import experiment_of, read_manifest
from befit.tasks import get_task
from befit.zoo import zoo_names

SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank may be, besides 1
CARD, CONFIG, WEIGHTS = "README.md", "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class ExportForm:
    """How a client's model is written.

    method  the run's own method or one of its baselines, by its label; None: what the client deploys
    budget  r of one of several budgets that the run measured; None: the one that is deployed
    base    what the adapter calls its backbone; None: as the run does
    rank    most ranks of a module: what has more is cut to its best approximation
    merged  the adapter added to its backbone, as a model by itself
    """

    method: str | None = None
    budget: int | None = None
    base: str | None = None
    rank: int | None = None
    merged: bool = False


@dataclass(frozen=True)
class Exported:
    """What was written for a client.

    path     its folder; None where it has no model
    rank     the most of any module; None for a model by itself
    energy   the share of the squared Frobenius norm of all updates that a cut left
    metric   the run's
    score    of the client's model in the run
    cut      the same, of what was written after a cut; None where the data is not there, and without a cut
    limits   why it is not the client's whole model, or cannot be served, each a sentence
    """

    client: str
    path: Path | None
    base: str = ""
    rank: int | None = None
    energy: float = 1.0
    metric: str = ""
    score: float | None = None
    cut: float | None = None
    limits: tuple[str, ...] = ()


def export(
    run_dir: str | PathLike[str],
    client: str,
    out: Path | str,
    budget: int | None = None,
    *,
    method: str | None = None,
    base: str | None = None,
    rank: int | None = None,
    merged: bool = False,
) -> Path:
    """Write one client's PEFT adapter, or its model where all weights were trained, to `out`, which must not hold
    anything else. Returns `out`. The settings are those of `ExportForm`.

    run_dir  what `befit.run` gave, or its directory

    Raises RunError for a directory without a finished run, an unknown client, method or budget, or a folder in use.
    """
    form = ExportForm(method, budget, base, rank, merged)
    return Path(export_to(Path(run_dir), {client: Path(out)}, form)[0].path or out)


def export_all(run_dir: Path, out: Path, form: ExportForm) -> list[Exported]:
    """Write every client's model to a folder of its name in `out`. A client without one is listed with the reason.

    Raises RunError where no client has a model.
    """
    check_run(run_dir)
    manifest = read_manifest(run_dir)
    folders, without = dict[str, Path](), list[Exported]()
    for client in (*manifest["clients"], *manifest.get("newcomers", [])):
        try:
            client_folder(run_dir, client, form.method)
            folders[client] = out / folder_name(client)
        except RunError as error:
            without.append(Exported(client, None, limits=(str(error),)))
    if not folders:
        raise RunError(without[0].limits[0])
    return [*export_to(run_dir, folders, form), *without]


def export_to(run_dir: Path, targets: Mapping[str, Path], form: ExportForm) -> list[Exported]:
    """Write the models of these clients, each to its folder, which must not hold anything else."""
    sources = {client: _source(run_dir, client, form) for client in targets}
    for target in targets.values():
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RunError(f"{target} exists already and is not an empty folder; name another")
        check_folder(target)
    scores = _Scores(run_dir, form)
    return [_export(run_dir, client, source, targets[client], form, scores) for client, source in sources.items()]


def serving_command(folder: Path, written: list[Exported]) -> str | None:
    """The command by which vLLM serves these adapters, each by its folder's name; None where it can serve none."""
    fit = [
        exported
        for exported in written
        if exported.path is not None and exported.rank is not None and not _refused(exported)
    ]
    if not fit:
        return None
    rank = next(size for size in SERVED_RANKS if size >= max(exported.rank or 0 for exported in fit))
    return (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=true VLLM_PLUGINS=lora_filesystem_resolver "
        f"VLLM_LORA_RESOLVER_CACHE_DIR={folder.resolve()} vllm serve {fit[0].base} --enable-lora --max-lora-rank {rank}"
    )


_NO_SERVER = "servers of adapters, such as vLLM, cannot load it: "


def _refused(exported: Exported) -> bool:
    return any(limit.startswith(_NO_SERVER) for limit in exported.limits)


def _source(run_dir: Path, client: str, form: ExportForm) -> Path:
    folder = client_folder(run_dir, client, form.method)
    name, budget = export_name(folder), form.budget
    source = folder / (name if budget is None else f"{name}-r{budget}")
    if budget is not None and not source.is_dir():
        there = sorted(int(path.name.rpartition("-r")[2]) for path in folder.glob(f"{name}-r*"))
        hint = f"it has {', '.join(map(str, there))}" if there else "the run measured no other than what is deployed"
        raise RunError(f"{run_dir}: client {client} has no adapter of the budget {budget}; {hint}")
    if not (source / CONFIG).exists() and (form.rank is not None or form.base is not None):
        raise RunError(
            f"{run_dir}: all weights of client {client} were trained; it is exported without --rank and --base"
        )
    return source


def _export(run_dir: Path, client: str, source: Path, target: Path, form: ExportForm, scores: _Scores) -> Exported:
    if not (source / CONFIG).exists():
        _copy(source, target)
        metric = scores.metric
        return Exported(
            client,
            target,
            metric=metric,
            score=scores.of(client),
            limits=() if form.merged else (f"{_NO_SERVER}all its weights were trained",),
        )
    config: dict[str, Any] = read_json(source / CONFIG)
    tensors, _ = from_bytes(whole_if_told(read_bytes(source / WEIGHTS), str(source / WEIGHTS)), str(source))
    energy = 1.0
    if form.rank is not None:
        tensors, entries, energy = cut_ranks(tensors, config, form.rank)
        config |= entries
    own_base = config["base_model_name_or_path"]
    config["base_model_name_or_path"] = form.base or own_base
    settings = _model_settings(run_dir, client, source)
    ranks = [len(tensor) for name, tensor in tensors.items() if name.endswith("lora_A.weight")]
    done = Exported(
        client,
        target,
        base=config["base_model_name_or_path"],
        rank=None if form.merged else max(ranks, default=0),
        energy=energy,
        metric=scores.metric,
        score=scores.of(client),
        limits=_limits(read_manifest(run_dir)["task"], config, source, form, settings),
    )
    with tempfile.TemporaryDirectory() as scratch:
        adapter = Path(scratch) / "adapter" if form.merged else target
        if not form.merged:
            _copy(source, target)
        write_json(adapter / CONFIG, config)
        atomic_write(adapter / WEIGHTS, pieces(tensors, {"format": "pt"}))
        if form.rank is not None:
            done = replace(done, cut=scores.measured(client, adapter, settings))
        if form.merged:
            if settings.quantise != "none":
                raise RunError(
                    f"an adapter cannot be added to a backbone of {settings.quantise} without rounding it: export the "
                    "adapter, and merge it into the backbone in full with PEFT"
                )
            _write_merged(target, _with_adapter(run_dir, client, adapter, settings), settings)
    card = (source / CARD).read_text(encoding="utf-8").replace(json.dumps(own_base), json.dumps(done.base))
    atomic_write(target / CARD, _card(card, done, scores, settings, form).encode())
    return done


def _copy(source: Path, target: Path) -> None:
    """Raises RunError for a link out of it: a run that somebody passed on may not name files of this machine."""
    inside = source.resolve()
    for file in sorted(source.rglob("*")):
        if not file.resolve().is_relative_to(inside):
            raise RunError(f"{file} is a link to {file.resolve()}, which is no part of the run; remove it")
        if file.is_file():
            atomic_write(target / file.relative_to(source), read_bytes(file))


def _model_settings(run_dir: Path, client: str, source: Path) -> ModelSettings:
    """The backbone of an adapter: the run's, or the one beside it where its weights were trained too."""
    settings, inside = experiment_of_client(run_dir, client).model, source / "model"
    return replace(settings, id=str(inside), revision=None) if inside.is_dir() else settings


def _limits(
    task: str, config: Mapping[str, Any], source: Path, form: ExportForm, settings: ModelSettings
) -> tuple[str, ...]:
    """Why an adapter is not the client's whole model, or cannot be served."""
    kind, heads, rank = get_task(task), config["modules_to_save"] or [], config["r"]
    refused = {
        f"its head ({', '.join(heads)}) is trained too; use PEFT, or --merged": bool(heads),
        f"models of {task} write no text; use PEFT": not kind.writes_text and not heads,
        "it has biases, which they leave out; use PEFT, or --merged": config.get("lora_bias"),
        f"its rank {rank} is above {SERVED_RANKS[-1]}; cut it with --rank": rank > SERVED_RANKS[-1],
    }
    if form.merged:
        refused = {}
    limits = [_NO_SERVER + reason for reason, holds in refused.items() if holds]
    if PARTIAL in (source / CARD).read_text(encoding="utf-8"):
        limits.append("the client's model mixes several adapters by the input, and this is one of them alone")
    if (source / "model").is_dir() and not form.merged:
        limits.append("its backbone was trained too, and is the folder model inside: serve that")
    elif not limits and not form.merged and form.base is None and not is_hub_id(settings.id):
        limits.append(
            f"its backbone is called {config['base_model_name_or_path']}: give the name it is served by as --base"
        )
    return tuple(limits)


def _with_adapter(run_dir: Path, client: str, adapter: Path, settings: ModelSettings) -> nn.Module:
    """The backbone with the adapter as PEFT loads it. Raises RunError where it is not the one of the run."""
    from peft import PeftModel

    manifest = read_manifest(run_dir)
    seed = experiment_of(run_dir).federation.seed
    backbone = load_backbone(settings, manifest["task"], manifest["label_names"], seed)
    if settings == experiment_of_client(run_dir, client).model:  # or it is the trained one inside the adapter
        check_backbone(run_dir, client, settings.id, backbone.fingerprint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is going
        warnings.filterwarnings("ignore", "Model (with|has) `tie_word_embeddings=True`")  # see `_part_embeddings`
        return PeftModel.from_pretrained(backbone.model, str(adapter)).eval()


def _write_merged(target: Path, model: Any, settings: ModelSettings) -> None:
    _part_embeddings(model)
    try:
        merged = model.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"PEFT cannot add this adapter to its backbone: {error}") from error
    with quiet():
        merged.save_pretrained(target)
    copy_beside_weights(find_model(settings.id, settings.revision)[0], target)


def _part_embeddings(model: Any) -> None:
    """Give an adapted output embedding a weight of its own where it shares the input's, which would change with it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    backbone = model.get_base_model()
    outputs = backbone.get_output_embeddings()
    if not isinstance(outputs, BaseTunerLayer):
        return
    base, shared = outputs.get_base_layer(), backbone.get_input_embeddings().weight
    if base.weight is shared:
        base.weight = nn.Parameter(shared.detach().clone(), requires_grad=False)
        backbone.config.tie_word_embeddings = backbone.config.get_text_config().tie_word_embeddings = False


class _Scores:
    """Scores of the run's models, from its results, and of what is exported, on the run's data where that is here."""

    def __init__(self, run_dir: Path, form: ExportForm) -> None:
        self.run_dir, self.form = run_dir, form
        path = run_dir / "results.json"
        self.results: dict[str, Any] = read_sealed(path) if path.exists() else {}
        self._records: dict[str, Any] | None = None

    @property
    def metric(self) -> str:
        return self.results.get("metric", "")

    def row(self, client: str) -> Mapping[str, Any]:
        return {**self.results.get("clients", {}), **self.results.get("newcomers", {}).get("clients", {})}.get(
            client, {}
        )

    def of(self, client: str) -> float | None:
        row, method = self.row(client), self.form.method
        if method is not None and method != self.results.get("method"):
            return None if self.form.budget else row.get("baselines", {}).get(method)  # which is of what it deploys
        return row.get(str(Measure(self.metric, f"r{self.form.budget}" if self.form.budget else "")))

    def measured(self, client: str, adapter: Path, settings: ModelSettings) -> float | None:
        experiment = experiment_of(self.run_dir)
        if self._records is None:
            try:
                federation = load_federation(experiment)
                everybody = (*federation.clients, *federation.newcomers)
                self._records = {data.id: getattr(data, experiment.evaluate.split) for data in everybody}
            except (BefitError, OSError):  # on another machine the data is not there; the adapter needs none
                self._records = {}
        if not self._records.get(client):
            return None
        _, task = backbone_of_run(self.run_dir, client)
        peft: Any = _with_adapter(self.run_dir, client, adapter, settings)
        model, batch_size = peft.base_model.model, experiment.evaluate.batch_size
        with peft.disable_adapter():
            examples = task.refer(model, task.prepare(self._records[client]), batch_size, model.device)
        return task.evaluate(model, examples, batch_size, model.device)[task.metric]


def licence_of(settings: ModelSettings) -> str | None:
    """The licence that a backbone's own card names; None where no card of it is on this machine."""
    if settings.id in zoo_names():
        return "apache-2.0"  # befit's own
    try:
        if is_hub_id(settings.id):
            from huggingface_hub import try_to_load_from_cache

            card = try_to_load_from_cache(settings.id, CARD, revision=settings.revision)
        else:
            card = find_model(settings.id, weights=False)[0] / CARD
        if not isinstance(card, str | Path):
            return None
        _, head, _ = Path(card).read_text(encoding="utf-8").split("---\n", 2)
        licence = (parse_yaml(head) or {}).get("license")
    except (BefitError, OSError, ValueError, AttributeError):
        return None
    return licence if isinstance(licence, str) and licence.replace("-", "").replace(".", "").isalnum() else None


def _card(card: str, done: Exported, scores: _Scores, settings: ModelSettings, form: ExportForm) -> str:
    """The card of a run's adapter, with data, score, limits and licence."""
    row, results, licence = scores.row(done.client), scores.results, licence_of(settings)
    lines = [f"Trained on {row.get('train_examples', 'an unknown number of')} examples of one client."]
    if done.score is not None:
        lines.append(
            f"Its {scores.metric} is {done.score:.3f} on this client's own {row.get('examples')} {results['split']} "
            "examples; nothing is known of other data."
        )
    if form.rank is not None:
        after = "" if done.cut is None else f" Its {scores.metric} is then {done.cut:.3f}."
        lines.append(f"Cut to rank {form.rank}: {100 * done.energy:.2f} % of the update's squared norm is left.{after}")
    if results.get("limit"):
        lines.append("From a trial on a part of the data: its numbers mean nothing.")
    if not form.merged and get_task(results.get("task", "causal-lm")).processor != "images":
        lines.append(f"It has seen texts of up to {settings.max_length} tokens.")
    lines += [f"{limit[0].upper()}{limit[1:]}." for limit in done.limits]
    lines.append(
        f"The base model's licence is {licence}, by its own card."
        if licence
        else "The base model's licence is not known here: look where the base model is from."
    )
    if licence:
        card = card.replace("library_name: peft\n", f"library_name: peft\nlicense: {licence}\n", 1)
    if form.merged:
        card = card.partition("```python")[0].replace("library_name: peft", "library_name: transformers", 1)
        card = card.replace("# LoRA adapter", "# Model with a merged LoRA adapter", 1)
    return f"{card.rstrip()}\n\n## Data, score and limits\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def as_plain(done: Exported) -> dict[str, Any]:
    """As JSON can hold it."""
    return {**asdict(done), "path": None if done.path is None else str(done.path)}
