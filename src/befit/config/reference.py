"""The keys of a configuration as a reference: for `befit explain`, as a JSON Schema and as a page, from the docstrings
of the settings; and what keys of other tools are called here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, get_args

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError, did_you_mean
from befit.core.schema import REQUIRED, Parameter, parameters_of, plain, show, type_words

# Keys of other tools for what befit does not do.
ABSENT = {"use_dora": "DoRA", "packing": "packing", "init_lora_weights": "choice of how an adapter starts"}
# Keys as other tools call them, by what to write here.
ELSEWHERE = {
    "learning_rate": "train.lr",
    "per_device_train_batch_size": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "evaluate.batch_size",
    "eval_batch_size": "evaluate.batch_size",
    "num_train_epochs": "train.epochs",
    "gradient_accumulation_steps": "train.micro_batch, the examples of a batch that are computed at once",
    "num_epochs": "train.epochs",
    "local_epochs": "train.epochs",
    "epochs": "train.epochs",
    "local_steps": "train.max_steps",
    "steps": "train.max_steps",
    "optim": "train.optimiser",
    "optimizer": "train.optimiser",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "warmup": "train.warmup_steps",
    "max_grad_norm": "train.grad_clip",
    "num_rounds": "federation.rounds",
    "num_server_rounds": "federation.rounds",
    "clients_per_round": "federation.cohort",
    "fraction_fit": "federation.cohort, which counts clients",
    "min_fit_clients": "federation.min_replies",
    "eval_every": "evaluate.every",
    "eval_steps": "evaluate.every, which counts rounds",
    "model_name": "model.id",
    "model_name_or_path": "model.id",
    "base_model": "model.id",
    "load_in_4bit": "model.quantise: nf4",
    "load_in_8bit": "model.quantise: int8",
    "quantization": "model.quantise",
    "bf16": "model.dtype: bfloat16",
    "fp16": "model.dtype: float16",
    "torch_dtype": "model.dtype",
    "max_seq_length": "model.max_length",
    "max_seq_len": "model.max_length",
    "cutoff_len": "model.max_length",
    "cuda": "model.device: cuda",
    "gpu": "model.device: cuda",
    "r": "rank, an argument of the method: method: {name: fedit, rank: 8}",
    "rank": "rank, an argument of the method: method: {name: fedit, rank: 8}",
    "lora_r": "rank, an argument of the method: method: {name: fedit, rank: 8}",
    "lora_rank": "rank, an argument of the method: method: {name: fedit, rank: 8}",
    "alpha": "alpha, an argument of the method: method: {name: fedit, alpha: 16}",
    "lora_alpha": "alpha, an argument of the method: method: {name: fedit, alpha: 16}",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "modules_to_save": "adapter.head, for the classification head; other modules stay frozen",
    "report_to": "trackers",
    "output_dir": "--out DIR, an option of befit run",
    "out": "--out DIR, an option of befit run",
    "resume_from_checkpoint": "--resume, an option of befit run",
    "dataset": "data.clients, or benchmark",
    "text_column": "data.columns: {text: YOURS}",
    "label_column": "data.columns: {label: YOURS}",
    "labels": "data.label_names",
    "group": "data.columns: {group: YOURS}",
    "patient": "data.columns: {group: YOURS}",
}

# One for each block, in the order of the page; a test reads them all as parts of one configuration.
EXAMPLES = {
    "model": "model: {id: ./models/my-encoder, max_length: 128}",
    "benchmark": "benchmark: {name: digits, clients: 5, alpha: 0.5}",
    "data": """data:
  task: text-classification
  clients:
    north: data/north.csv
    south: {train: data/south.csv, columns: {text: free_text}}
  columns: {text: note, label: diagnosis}""",
    "limit": "limit: {clients: 2, records: 100}",
    "families": "families:\n  small: {clients: [clinic-*], model: {id: ./models/my-small-encoder}}",
    "adapter": "adapter: {targets: all, dropout: 0.05}",
    "train": "train: {max_steps: 20, batch_size: 16, lr: 3.0e-4, schedule: cosine}",
    "stream": "stream: {kind: dynamic}",
    "federation": "federation: {rounds: 20, seed: 1, min_replies: 0.5}",
    "evaluate": "evaluate: {every: 5}",
    "engine": "engine: {workers: 2}",
    "wire": "wire: {dtype: int8}",
    "guard": "guard: {clip: 2.0}",
    "privacy": "privacy: {unit: example, epsilon: 8, delta: 1.0e-5, clip: 1.0}",
    "checkpoint": "checkpoint: {every_s: 60}",
    "report": "report: {plots: false}",
}


@dataclass(frozen=True)
class Block:
    """One block of a configuration, or all top-level keys that are none.

    path   where it stands, such as train; "" for the top level
    about  what it is for
    keys   what it may have
    """

    path: str
    about: str
    keys: tuple[Parameter, ...]


def blocks() -> list[Block]:
    """The top level, then every block, in the order of `Experiment`."""
    return [Block("", "", parameters_of(Experiment)), *_blocks_in(parameters_of(Experiment), "")]


def _blocks_in(keys: tuple[Parameter, ...], path: str) -> Iterator[Block]:
    for key in keys:
        for kind in _classes(key.type):
            is_named = get_args(key.type)[:1] == (str,)  # a mapping from names to blocks
            here = f"{path}{key.name}" + ".NAME" * is_named
            inner = tuple(parameter for parameter in parameters_of(kind) if (kind.__name__, parameter.name) != _INLINED)
            if here not in _MODELS:
                yield Block(here, _about(kind), inner)
                yield from _blocks_in(inner, f"{here}.")


_MODELS = ("common_model", "families.NAME.model")  # have the keys of `model`
_INLINED = ("BenchmarkSettings", "arguments")  # written beside name and version


def _classes(kind: Any) -> list[Any]:
    """The dataclasses that a type is made of."""
    return [kind] if is_dataclass(kind) else [inner for part in get_args(kind) for inner in _classes(part)]


def _about(kind: Any) -> str:
    """The paragraphs of a docstring without its table of keys."""
    names = {parameter.name for parameter in parameters_of(kind)}
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs if part.split()[0] not in names)


def find(path: str) -> Block | Parameter | None:
    """The block or the key at a dotted path, or None. `families.small.model.id` is the key `model.id`."""
    path = re.sub(r"^families\.[^.]+", "families.NAME", path)
    path = re.sub(rf"^({'|'.join(_MODELS)})\.", "model.", path)
    by_path = {block.path: block for block in blocks()}
    if entry := by_path.get(path) or by_path.get(f"{path}.NAME"):
        return entry
    outer, _, name = path.rpartition(".")
    return next((key for key in by_path[outer].keys if key.name == name), None) if outer in by_path else None


def key_paths() -> list[str]:
    """The dotted path of every block and key."""
    return [
        path
        for block in blocks()
        for path in (block.path, *(f"{block.path}.{key.name}".lstrip(".") for key in block.keys))
        if path
    ]


def pointed(problems: list[str]) -> list[str]:
    """Problems of which those about an unknown key say where befit has it, if another tool or another block does.

    >>> pointed(["train.learning_rate: unknown key for train."])
    ['train.learning_rate: unknown key for train; write train.lr']
    >>> pointed(["adapter.use_dora: unknown key for adapter."])
    ['adapter.use_dora: befit has no DoRA; docs/training.md says why']
    >>> pointed(["benchmark.val_fraction: unknown key for digits. Known: alpha, clients, seed, sha256"])
    ['benchmark.val_fraction: unknown key for digits. Known: alpha, clients, seed, sha256']
    """
    return [_pointed(problem) for problem in problems]


def _pointed(problem: str) -> str:
    match = re.match(r"(?P<path>[^:]*?(?P<key>\w+)): unknown key(?P<owner> for [\w-]+)?\.", problem)
    if not match:
        return problem
    if feature := ABSENT.get(match["key"].lower()):
        return f"{match['path']}: befit has no {feature}; docs/training.md says why"
    if problem.count(",") <= 2 and " Known: " in problem:
        return problem  # of a block with few keys, which are all named
    owners = [path for path in key_paths() if path.rpartition(".")[2] == match["key"] and ".NAME" not in path]
    if match["path"].startswith("benchmark."):  # a configuration has that or data, not both
        owners = [path for path in owners if not path.startswith("data.")]
    target = ELSEWHERE.get(match["key"].lower()) or " or ".join(owners)
    return f"{match['path']}: unknown key{match['owner'] or ''}; write {target}" if target else problem


def unknown(path: str) -> ConfigError:
    """The error for a path at which there is neither a block nor a key."""
    return ConfigError(pointed([f"{path}: unknown key.{did_you_mean(path, key_paths())}"]), "the command")


def default_text(key: Parameter) -> str:
    """The default of a key, as YAML has it."""
    if is_dataclass(key.default):  # in full it would leave no room for the meanings
        return "its defaults"
    return "required" if key.default is REQUIRED else show(plain(key.default))


def kind_text(key: Parameter) -> str:
    """What values a key takes."""
    return type_words(key.type) + (f"; {key.rule.text}" if key.rule else "")


def page() -> str:
    """The reference in Markdown: every block with its keys and an example."""
    return "\n".join(line for block in blocks() for line in _section(block))


def _section(block: Block) -> Iterator[str]:
    if block.path:
        yield from ("", f"## {block.path}", "", block.about)
        if example := EXAMPLES.get(block.path.removesuffix(".NAME")):
            yield from ("", "```yaml", example, "```")
    yield from ("", "| key | default | values | what it is |", "|---|---|---|---|")
    for key in block.keys:
        cells = (f"`{key.name}`", default_text(key), kind_text(key), key.description)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def json_schema(kind: Any = Experiment) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a configuration's YAML, or of another dataclass that holds one, for editors. Methods
    and benchmarks are listed by name; what they take, and what keys demand of each other, is for `befit check`."""
    from pydantic import TypeAdapter

    from befit.data import registry
    from befit.protocol.registry import method_names

    schema = TypeAdapter(kind).json_schema()
    classes = {class_.__name__: class_ for class_ in (kind, *_all_classes(kind))}
    method = _named(method_names())
    parts = {**schema["$defs"], kind.__name__: schema}
    for name, part in parts.items():
        part |= {"description": _about(classes[name]), "additionalProperties": False}
        for key in parameters_of(classes[name]):
            if key.name in part["properties"]:
                part["properties"][key.name] = _described(part["properties"][key.name], key)
        if (described := part["properties"].get("method")) is not None:
            part["properties"]["method"] = {"description": described["description"], **method}
    model = schema["$defs"]["BenchmarkSettings"]
    del model["properties"]["arguments"]
    model["additionalProperties"] = True
    model["properties"]["version"]["anyOf"].append({"type": "integer"})
    keys = parts[Experiment.__name__]["properties"]
    keys["baselines"]["items"] = method
    others = [{"$ref": "#/$defs/BenchmarkSettings"}, {"type": "null"}]
    keys["benchmark"]["anyOf"] = [_named(registry.names())["anyOf"][0], *others]
    parts[Experiment.__name__]["required"] = ["method"] * (kind is Experiment)  # a name is made of the file's
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _all_classes(kind: Any) -> Iterator[Any]:
    for key in parameters_of(kind):
        for inner in _classes(key.type):
            yield inner
            yield from _all_classes(inner)


def _named(names: list[str]) -> dict[str, Any]:
    """A name, of which the known ones are offered, or a mapping with one."""
    name = {"anyOf": [{"enum": names}, {"type": "string"}]}
    return {"anyOf": [name, {"type": "object", "properties": {"name": name}, "required": ["name"]}]}


def _described(part: Mapping[str, Any], key: Parameter) -> dict[str, Any]:
    kept = {name: value for name, value in part.items() if name != "title"}
    default = {} if key.default is REQUIRED or is_dataclass(key.default) else {"default": plain(key.default)}
    rule = f" ({key.rule.text})" if key.rule else ""
    return {**kept, **default, "description": key.description + rule}
