"""What a finished run leaves for each client: a PEFT checkpoint or a model directory, and what `predict` reads.

A fully fine-tuned backbone is written as a model directory that transformers loads, and that `model.id` can name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.adapters.keys import slot_of
from befit.adapters.layer import SlotLinear
from befit.adapters.mixers import mix_from, plain_mix
from befit.adapters.model import AdaptedModel, in_order
from befit.config.experiment import Experiment, method_blocks
from befit.core.errors import Damaged, RunError, did_you_mean, map_all
from befit.core.jsonfile import parse_json
from befit.core.names import folder_name, method_folder
from befit.core.storage import atomic_write, read_bytes, read_durable, read_sealed, write_shared
from befit.core.text import first_of
from befit.core.values import State
from befit.core.wire import from_bytes, pieces, to_bytes, whole, whole_if_told
from befit.data.files.records import input_record
from befit.models.source import find_model
from befit.protocol.method import Deployment
from befit.protocol.registry import build_method
from befit.report.structure import write_structure
from befit.report.table import escape_markdown
from befit.runs.clients import OWN_MODEL, family_experiment
from befit.runs.deploy import DEPLOYED, chosen_run
from befit.runs.directory import METHOD_RESULTS, finished
from befit.runs.host import Host
from befit.runs.inputs import read_inputs
from befit.runs.loading import columns_of, load_model
from befit.runs.peft_io import write_adapter
from befit.runs.provenance import experiment_of, read_manifest

if TYPE_CHECKING:
    from befit.tasks.base import Task

_SAME = ".same"  # a folder with one copy of every file that is equal for several clients
_BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "*processor_config.json", "*token*", "*vocab*", "merges.txt", "*.model"),
    *("chat_template*", "LICENSE*", "NOTICE*"),
)  # what befit and transformers read of a model's folder, and its licence


def write_client(folder: Path, deployed: Deployment, host: Host, method: str, client: str) -> None:
    """The client's model in its folder: a PEFT checkpoint or, where all weights were trained, a model directory; and
    the deployment in full for `predict`."""
    whose = escape_markdown(client)
    if host.experiment.data is None:
        whose += f" of {escape_markdown(host.federation.name)}"
    note = f"Trained by the befit method {method} for client {whose}."
    _write_one(folder, "", deployed, host, client, note)
    for name, other in deployed.others.items():
        _write_one(folder, f"-{name}", other, host, client, f"{note} With the budget {name}.")
    write_structure(folder, deployed, in_order(host.backbone_of(client).model))
    use = json.dumps({"slots": deployed.slots, "mixer": plain_mix(deployed.mixer)})
    data = pieces(deployed.arrays, {"use": use})
    if is_whole(deployed, host.backbone_of(client).model):
        write_shared(folder / "deployment.safetensors", b"".join(data), folder.parent / _SAME)
    else:
        atomic_write(folder / "deployment.safetensors", data)


def _write_one(folder: Path, suffix: str, deployed: Deployment, host: Host, client: str, note: str) -> None:
    """`adapter` of a deployment, `model` of one that changes all weights, or an adapter with its model inside."""
    backbone = host.backbone_of(client)
    model, base = backbone.model, family_experiment(host.experiment, backbone.name).model
    rest, name = deployed, public_name(base.id)
    if is_whole(deployed, model):
        rest = without_whole(deployed, model)
        target = folder / f"adapter{suffix}" / "model" if rest.slots else folder / f"model{suffix}"
        write_model(target, deployed, model, find_model(base.id, base.revision)[0], folder.parent / _SAME)
        note += " Its backbone is the folder `model` inside this one." if rest.slots else ""
        name = "model"
    if rest.slots:
        with folded(deployed, model):  # a task head is written whole, as the sum of the backbone's and the adapter's
            write_adapter(
                folder / f"adapter{suffix}",
                rest,
                model,
                base=name,
                task=host.federation.task,
                note=note,
                label_names=host.federation.label_names,
            )


def public_name(model: str) -> str:
    """What an adapter says of the model it is for: its id, or of a folder on this machine the last part of its path.

    >>> public_name("owner/name"), public_name("/home/somebody/models/small")
    ('owner/name', 'small')
    """
    return Path(model).name if Path(model).is_absolute() else model


def gone_from(path: Path, rows: Iterable[Mapping[str, Any]], *more: str) -> list[str]:
    """What rows of a method's results say that clients have, and its directory holds no longer, or not as it was
    written: paths within it.

    more  names of further files that every client with an adapter has
    """
    gone: list[str] = []
    for adapter in filter(None, (row.get("adapter") for row in rows)):
        folder = (path / adapter).parent
        weights = list((path / adapter).glob("*.safetensors"))
        gone += [adapter] if not weights else []
        files = [*weights, *(folder / name for name in ("deployment.safetensors", *more))]
        gone += [file.relative_to(path).as_posix() for file in files if not _is_whole_file(file)]
    return gone


def _is_whole_file(file: Path) -> bool:
    """Whether a file is there and, where it has a checksum, which whole models have not, is as it was written."""
    try:
        if file.suffix == ".json":
            read_sealed(file)
        else:
            whole_if_told(read_durable(file), str(file))
    except Damaged:
        return False
    return True


def export_name(folder: Path) -> str:
    """What `export` copies from a client's folder: "adapter", or "model" where all weights were trained."""
    return "adapter" if (folder / "adapter").is_dir() else "model"


def predict(
    run_dir: str | PathLike[str], client: str, inputs: Iterable[Any], method: str | None = None
) -> list[dict[str, Any]]:
    """What the client's own model says to each input: a text, the path of an image, or a record.

    run_dir  what `befit.run` gave, or its directory
    inputs  a `Path` stands for all that is in the file or folder, read as training data is: see
            `befit.runs.inputs.read_inputs`. A record's fields may have the names of data.columns in the run's
            configuration, or befit's own
    method  the run's own method or one of its baselines, by its label; None: what the client deploys

    Raises RunError for a directory without a finished run, an unknown client or method, DataError for no inputs,
    files that are not read, and records without the fields that the task needs.
    """
    return [answer for _, _, answer in answers(run_dir, client, inputs, method)]


def answers(
    run_dir: str | PathLike[str], client: str, inputs: Iterable[Any], method: str | None = None
) -> list[tuple[Any, str, dict[str, Any]]]:
    """Every input of `predict`, the place it is from, and the answer."""
    client_folder(Path(run_dir), client, method)  # so that a wrong name is told before anything is read
    manifest, experiment = read_manifest(Path(run_dir)), experiment_of(Path(run_dir))
    columns = columns_of(experiment, client)
    read = read_inputs(inputs, manifest["task"], columns)
    records = map_all(lambda placed: input_record(placed[0], manifest["task"], columns, placed[1]), read)
    with deployed_model(Path(run_dir), client, method) as (model, task):
        said = task.predict(model.backbone, records)
    return [(value, place, answer) for (value, place), answer in zip(read, said, strict=True)]


@contextmanager
def deployed_model(run_dir: Path, client: str, method: str | None = None) -> Iterator[tuple[AdaptedModel, Task]]:
    """A client's own model, with all its slots active as they were trained, and the task. Raises as `predict`."""
    folder, experiment = client_folder(run_dir, client, method), experiment_of(run_dir)
    model, task = backbone_of_run(run_dir, client)
    label = method or chosen_run(folder)
    block = experiment.method if label is None else method_blocks(experiment)[label]
    model.install(build_method(block).layout, experiment.federation.seed)
    deployed = read_deployment(folder)
    model.load(deployed.arrays)
    with model.active(*deployed.slots, mixer=deployed.mixer):
        yield model, task


def backbone_of_run(run_dir: Path, client: str) -> tuple[AdaptedModel, Task]:
    """The backbone of a client without slots, and the task.

    Raises RunError where the backbone is no longer the one that the run trained on.
    """
    manifest, experiment = read_manifest(run_dir), experiment_of_client(run_dir, client)
    model, task, fingerprint = load_model(experiment, manifest["task"], manifest["label_names"])
    check_backbone(run_dir, client, experiment.model.id, fingerprint)
    return model, task


def experiment_of_client(run_dir: Path, client: str) -> Experiment:
    """The run's configuration, with the model of the client's family."""
    return family_experiment(experiment_of(run_dir), read_manifest(run_dir)["families"].get(client, OWN_MODEL))


def check_backbone(run_dir: Path, client: str, name: str, fingerprint: str) -> None:
    """Raises RunError where the backbone of this fingerprint is not the one that the run trained on."""
    manifest = read_manifest(run_dir)
    trained_on = manifest["backbones"].get(client, manifest["backbone"])
    if fingerprint != trained_on:
        raise RunError(
            f"the model {name} is not the one that {run_dir} was trained on: its fingerprint "
            f"is {fingerprint[:12]}, the run's {trained_on[:12]}"
        )


def read_deployment(folder: Path) -> Deployment:
    """What `write_client` keeps in full in a client's folder. Raises Damaged unless the file is whole."""
    path = folder / "deployment.safetensors"
    try:
        arrays, metadata = from_bytes(whole(read_durable(path), str(path)), str(path))
    except Damaged as error:
        again = f". Remove {folder} and run the same with --resume: it is made again"
        raise Damaged(f"{error}{again if folder.parent.name == 'clients' else ''}") from error
    use = parse_json(metadata["use"], str(path), RunError)
    return Deployment(arrays, tuple(use["slots"]), mix_from(use["mixer"]))


def is_whole(deployed: Deployment, model: AdaptedModel) -> bool:
    """Whether a slot that changes every weight takes part."""
    return any(name in model.whole_slots for name in deployed.slots)


def folded(deployed: Deployment, model: AdaptedModel) -> AbstractContextManager[None]:
    """With the backbone's parameters as the deployment's slots of the whole model change them."""
    slots = [name for name in model.whole_slots if name in deployed.slots]
    return model.folded({key: value for key, value in deployed.arrays.items() if slot_of(key) in slots}, *slots)


def model_weights(model: AdaptedModel, deployed: Deployment) -> State:
    """The backbone's tensors as the deployment's slots of the whole model change them, by the names of its own
    architecture; tied ones once."""
    first: dict[int, str] = {}
    for key, tensor in model.backbone.state_dict(keep_vars=True).items():
        first.setdefault(tensor.data_ptr(), key)
    wrappers = [f"{path}." for path, module in model.backbone.named_modules() if isinstance(module, SlotLinear)]
    weights: State = {}
    with folded(deployed, model):
        for key, tensor in model.backbone.state_dict().items():
            if key not in first.values():
                continue  # another name of the same weights
            outer = next((prefix for prefix in wrappers if key.startswith(f"{prefix}base.")), None)
            weights[key if outer is None else outer + key.removeprefix(f"{outer}base.")] = tensor.detach().cpu()
    return weights


def write_model(folder: Path, deployed: Deployment, model: AdaptedModel, source: Path, same: Path) -> None:
    """Write the backbone as the deployment's slots of the whole model change it: config.json, weights, tokenizer files.

    source  the directory that the backbone was loaded from, for what is not weights
    same    folder for files that are equal for several clients
    """
    write_shared(folder / "model.safetensors", to_bytes(model_weights(model, deployed), {"format": "pt"}), same)
    copy_beside_weights(source, folder)
    atomic_write(folder / "config.json", model.backbone.config.to_json_string().encode())  # type: ignore[union-attr, operator]


def copy_beside_weights(source: Path, folder: Path) -> None:
    """Copy what is needed to use a model beside its weights, such as its tokenizer, and its licence, where `folder`
    lacks it; not a model's other formats, cards, pictures and scripts."""
    for file in sorted(source.iterdir()):
        needed = any(fnmatch(file.name, pattern) for pattern in _BESIDE_WEIGHTS)
        if needed and file.is_file() and not (folder / file.name).exists():
            atomic_write(folder / file.name, read_bytes(file))


def without_whole(deployed: Deployment, model: AdaptedModel) -> Deployment:
    """The rest of a deployment, to be read as adapters of the changed backbone."""
    kept = tuple(name for name in deployed.slots if name not in model.whole_slots)
    arrays = {key: value for key, value in deployed.arrays.items() if slot_of(key) not in model.whole_slots}
    return Deployment(arrays, kept, deployed.mixer, own=deployed.own)


def check_run(run_dir: Path) -> None:
    """Raise RunError unless the directory is that of a run."""
    if not (run_dir / "run.json").exists():
        of_run = run_dir.parent.name == "baselines"
        hint = f"; name the run {run_dir.parent.parent}, with --method {run_dir.name}" if of_run else ""
        there = next((path for path in (run_dir, *run_dir.parents) if path.is_dir()), run_dir)
        if inside := sorted(path.parent.name for path in there.glob("*/run.json")):
            hint = f"; name one of those in {'it' if there == run_dir else there}: {first_of(inside)}"
        missing = "is not a run directory: it has no run.json" if run_dir.exists() else "is not there"
        raise RunError(f"{run_dir} {missing}{hint}")


def client_folder(run_dir: Path, client: str, method: str | None = None) -> Path:
    """Where a client's trained model is: what it deploys, or what `method`, by its label in the run, made for it.

    Raises RunError for a directory without a finished run, and for an unknown client or method.
    """
    check_run(run_dir)
    manifest = read_manifest(run_dir)
    newcomers = manifest.get("newcomers", [])
    everybody = [*manifest["clients"], *newcomers]
    if client not in everybody:
        raise RunError(
            f"{run_dir} has no client {client!r}; it has {first_of(everybody)}.{did_you_mean(client, everybody)}"
        )
    root = run_dir
    if method is not None:
        labels = list(method_blocks(experiment_of(run_dir)))
        if method not in labels:
            raise RunError(
                f"{run_dir} trained no {method!r}; it has {', '.join(labels)}.{did_you_mean(method, labels)}"
            )
        root = method_folder(run_dir, method, labels[0])
    experiment = experiment_of(run_dir)
    folder = root / ("newcomers" if client in newcomers else "clients") / folder_name(client)
    # What a site keeps of a run is of one method, and nothing to choose among.
    chooses = experiment.federation.deploy == "best" and len(experiment.blocks) > 1
    if chose := chooses and method is None and client not in newcomers:
        folder = run_dir / DEPLOYED / folder_name(client)
    if not (folder / "deployment.safetensors").exists():
        if experiment.engine.kind != "local":
            raise RunError(
                f"{run_dir} ran at sites, and what client {client} deploys is at its own: there, name "
                "state/runs/RUN/METHOD (docs/flower.md)"
            )
        row = finished(folder / "result.json") or {}
        if row.get("reason"):
            raise RunError(f"{run_dir}: newcomer {client} has no adapter: {row['reason']}{_by_others(run_dir, client)}")
        if (results := finished(run_dir / "results.json" if chose else root / METHOD_RESULTS)) is not None:
            if chose and results["clients"].get(client, {}).get("deployed", "") is None:
                raise RunError(
                    f"{run_dir}: client {client} deploys none of its models: no loss on its held-out examples is finite"
                )
            if reason := _never_had(results, client):
                raise RunError(f"{run_dir}: client {client} has no adapter: {reason}")
            raise RunError(
                f"{folder} no longer holds what client {client} deploys. To have it made again, run the same with "
                "--resume"
            )
        raise RunError(f"{run_dir} is not finished: client {client} has no adapter yet. Continue with --resume")
    return folder


def _by_others(run_dir: Path, newcomer: str) -> str:
    """Which of the run's methods have a model for a newcomer, as the end of a sentence; empty where none has."""
    own, *_ = labels = list(method_blocks(experiment_of(run_dir)))
    folders = {label: method_folder(run_dir, label, own) / "newcomers" / folder_name(newcomer) for label in labels}
    having = [label for label, folder in folders.items() if (folder / "deployment.safetensors").exists()]
    return f". It has one by --method {first_of(having, between=' or ')}" if having else ""


def _never_had(results: Mapping[str, Any], client: str) -> str:
    """Why a method ended without a model for a client; empty where it had one."""
    row = results["clients"].get(client, {})
    if "adapter" not in row or row["adapter"] is not None:
        return ""
    reasons = [failure["reason"] for failure in results["failures"] if failure["client"] == client]
    return reasons[-1] if reasons else "none was made for it"
