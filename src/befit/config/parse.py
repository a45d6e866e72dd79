"""From plain values to an `Experiment`: types first, then ranges, then what settings demand of each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from befit.config.experiment import (
    BENCHMARK_PATHS,
    NOT_AT_SITES,
    Experiment,
    FamilySettings,
    ModelSettings,
)
from befit.core.errors import ConfigError, did_you_mean
from befit.core.metrics import LOWER_IS_BETTER
from befit.core.names import id_problems
from befit.core.plugins import load_plugins, resolve_plugins
from befit.core.schema import REQUIRED, check_values, parameters_of, plain, show
from befit.core.text import to_install
from befit.data.files.settings import ClientSettings
from befit.protocol.registry import ALONE, check_method, get_method, method_names
from befit.tasks import get_task, task_names
from befit.tasks.text_metrics import LIKELIHOOD
from befit.zoo import zoo_names

_SIZE = ("rank", "alpha")  # of a method's adapters, which others have too where they do not say their own


def parse_experiment(values: Mapping[str, Any], folder: Path) -> tuple[Experiment | None, list[str]]:
    """The experiment, or None and every problem. `folder` is where relative paths count from."""
    config = {key: {} if value is None and key in _BLOCKS else value for key, value in values.items()}
    config["plugins"], problems = _plugins(config.get("plugins"), folder)
    if problems:  # whatever a plugin defines is unknown without it, which is no mistake of its own
        return None, problems
    for key, complete in _COMPLETED.items():
        config[key], mistakes = complete(config)
        problems += mistakes
    checked, mistakes = check_values(_PARAMETERS, config)
    problems += [mistake for mistake in mistakes if not mistake.startswith(("method:", "baselines:"))]
    problems += _exclusive(config) + _dependent(checked)
    if problems:
        from befit.config.reference import pointed

        return None, pointed(problems)
    return _absolute(Experiment(**checked), folder), []


def _plugins(names: Any, folder: Path) -> tuple[list[str], list[str]]:
    """Load the plugins; their names with absolute paths."""
    names = [] if names is None else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        return [], [f"plugins: must be a list of Python files or modules, such as [my_method.py], got {show(names)}"]
    resolved = resolve_plugins(names, folder)
    try:
        load_plugins(resolved)
    except ConfigError as error:
        return [], list(error.problems)
    return resolved, []


def _method(block: Any, path: str) -> tuple[Any, list[str]]:
    if block is None:
        return {}, [f"{path}: is required, such as {path}: fedit; `befit methods` lists them"]
    if not isinstance(block, (str, Mapping)):
        return {}, [f"{path}: must be a method's name or a mapping with name and arguments, got {show(block)}"]
    resolved, _, problems = check_method(block, path)
    return resolved, problems


def sized_like(block: Any, method: Mapping[str, Any]) -> Any:
    """A method's block with the rank and alpha of another one, where it has such options and does not say its own;
    what is no method's block as it is."""
    named = {"name": block} if isinstance(block, str) else block
    if not isinstance(named, Mapping) or named.get("name") not in method_names():
        return block
    options = {option.name for option in get_method(named["name"]).parameters}
    return {**named, **{key: method[key] for key in _SIZE if key in options - named.keys() and key in method}}


def _baselines(config: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
    """Every baseline in plain form, of the method's rank and alpha where it gives none. A baseline `local` of the
    method `local` is the method itself, and dropped."""
    blocks, method = config.get("baselines"), config["method"]
    if not isinstance(blocks, (list, tuple)):
        return [], [f"baselines: must be a list of methods, such as [local, fedit], or [] for none, got {show(blocks)}"]
    resolved: list[Any] = []
    problems: list[str] = []
    sized = not _method(method, "method")[1]  # a mistake in it is told once
    for index, block in enumerate(blocks):
        baseline, mistakes = _method(sized_like(block, method) if sized else block, f"baselines.{index}")
        problems += mistakes
        name = baseline.get("name")
        if name == ALONE and name == method.get("name"):
            continue
        if name is not None and baseline == method:
            problems.append(f"baselines.{index}: {name} is the method itself; take it out, as with baselines=[local]")
        if baseline in resolved:
            problems.append(f"baselines.{index}: the same as baselines.{resolved.index(baseline)}")
        resolved.append(baseline)
    return resolved, problems


def _benchmark(config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The block with the benchmark's own arguments apart, checked against its signature."""
    from befit.data import registry

    block = config.get("benchmark")
    if not isinstance(block, (str, Mapping)):
        return block, []
    block = {"name": block} if isinstance(block, str) else dict(block)
    version = block.get("version")
    if isinstance(version, int) and not isinstance(version, bool):
        block["version"] = str(version)  # `version: 1` is how people write it
    identity = {key: block.pop(key) for key in ("name", "version") if key in block}
    name = identity.get("name")
    if not isinstance(name, str):
        return {**identity, "arguments": block}, []
    try:
        entry = registry.get(name)
    except ConfigError as error:
        return {**identity, "arguments": block}, list(error.problems)
    parameters = parameters_of(entry.build)
    _, problems = check_values(parameters, block, "benchmark.", name)
    if identity.get("version") not in (None, entry.version):
        problems.append(f"benchmark.version: {name} is at version {entry.version} here, not {identity['version']}")
    defaults = {
        parameter.name: plain(parameter.default) for parameter in parameters if parameter.default is not REQUIRED
    }
    return {"name": name, "version": entry.version, "arguments": {**defaults, **block}}, problems


def _data(config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The block as it is; what is wrong with a client's entry is said by its key."""
    block = config.get("data")
    if not isinstance(block, Mapping):
        return block, []
    problems: list[str] = []
    for key in ("clients", "newcomers"):
        entries = block.get(key)
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():
            path = f"data.{key}.{name}"
            if isinstance(entry, Mapping):
                problems += check_values(parameters_of(ClientSettings), entry, f"{path}.", "a client")[1]
            elif not isinstance(entry, str):
                problems.append(
                    f"{path}: must be a path or a mapping with train, val, test or columns, got {show(entry)}"
                )
    kept = block if not problems else {**block, "clients": "", "newcomers": None}
    return kept, problems


def _families(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Every family's settings, its model's completed by those of `model`."""
    blocks, model = config.get("families"), config.get("model")
    if blocks is None:
        return {}, []
    if not isinstance(blocks, Mapping):
        return {}, [f"families: must be a mapping from a name to clients and model, got {show(blocks)}"]
    common: Mapping[str, Any] = model if isinstance(model, Mapping) else {}
    families: dict[str, Any] = {}
    problems: list[str] = []
    for name, block in blocks.items():
        path = f"families.{name}"
        if name == "model":
            problems.append(f"{path}: is what clients of no family have; give it another name")
            continue
        if not isinstance(block, Mapping):
            problems.append(f"{path}: must be a mapping with clients and model, got {show(block)}")
            continue
        own_model = block.get("model")
        if not isinstance(own_model, Mapping) or not own_model.get("id"):
            problems.append(f"{path}.model.id: is required, the backbone of these clients")
            continue
        values, mistakes = check_values(
            parameters_of(FamilySettings), {**block, "model": {**common, **own_model}}, f"{path}.", path
        )
        problems += mistakes
        if not mistakes:
            families[name] = FamilySettings(**values)
    return families, problems


def _common_model(config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Its settings, completed by those of `model`."""
    block, model = config.get("common_model"), config.get("model")
    if block is None:
        return None, []
    if not isinstance(block, Mapping) or not block.get("id"):
        return None, ["common_model.id: is required, the model that all clients hold beside their own"]
    return {**(model if isinstance(model, Mapping) else {}), **block}, []


def _exclusive(config: Mapping[str, Any]) -> list[str]:
    sources = [key for key in ("benchmark", "data") if config.get(key) is not None]
    if len(sources) == 2:
        return ["benchmark: give benchmark or data, not both"]
    if not sources:
        return ["benchmark: is required, such as benchmark: digits, or your own files under data"]
    return []


def _dependent(checked: Mapping[str, Any]) -> list[str]:
    """Demands of settings on each other, where each of them is right by itself."""
    blocks: dict[str, Any] = {key: value for key, value in checked.items() if is_dataclass(value)}
    evaluate, data, benchmark, engine = (blocks.get(name) for name in ("evaluate", "data", "benchmark", "engine"))
    problems = [*_trained(blocks), *_protected(blocks, checked.get("families") or {}), *_federated(blocks)]
    if benchmark and (task := _task_of(benchmark.name)):
        problems += _generation(evaluate, task)
    if engine:
        problems += [*_places(engine), *(_not_at_sites(checked) if engine.kind == "flower" else ())]
    if data:
        problems += _files(data)
        try:
            get_task(data.task, "data.task")
            problems += _generation(evaluate, data.task)
        except ConfigError as error:
            problems += error.problems
        if "model" not in checked or ("model" in blocks and not blocks["model"].id):
            problems.append("model.id: is required with data (a directory or a hub id); only benchmarks have a default")
    return problems


def _trained(blocks: Mapping[str, Any]) -> list[str]:
    """What training and the data contradict each other in."""
    train, stream, data, benchmark = (blocks.get(name) for name in ("train", "stream", "data", "benchmark"))
    if not train:
        return []
    problems = [f"train.{problem}" for problem in train.contradictions()]
    if train.epochs is not None and stream and stream.kind != "none":
        problems.append("train.epochs: training data that arrives over time has no passes; give train.max_steps")
    task = data.task if data else _task_of(benchmark.name) if benchmark else None
    if train.class_weights != "none" and task in task_names() and not get_task(task).has_classes:
        problems.append(f"train.class_weights: {task} has no classes; leave it out")
    return problems


def _protected(blocks: Mapping[str, Any], families: Mapping[str, FamilySettings]) -> list[str]:
    """What contradicts differential privacy."""
    privacy, federation = blocks.get("privacy"), blocks.get("federation")
    if not privacy:
        return []
    problems = [f"privacy.{problem}" for problem in privacy.contradictions()]
    if privacy.unit != "none" and federation and federation.patience is not None:
        problems.append(
            "federation.patience: goes back to a round by validation records, which privacy does not count; set it "
            "to null"
        )
    if privacy.unit == "client" and federation and federation.secure_sums is not None:
        problems.append(
            "federation.secure_sums: privacy.unit client clips every update at the server, which then sees none; "
            "take unit example, or set it to null"
        )
    if privacy.unit == "example":
        models = {
            "model": blocks.get("model"),
            **{f"families.{name}.model": one.model for name, one in families.items()},
        }
        problems += _counted_otherwise(blocks)
        problems += [
            f"{place}.quantise: int8 chooses by all examples of a batch which columns it computes in full, which "
            "privacy.unit example cannot hide; take nf4, or none"
            for place, model in models.items()
            if model and model.quantise == "int8"
        ]
    return problems


def _federated(blocks: Mapping[str, Any]) -> list[str]:
    """What contradicts the settings of rounds."""
    federation, evaluate = blocks.get("federation"), blocks.get("evaluate")
    if not federation:
        return []
    problems: list[str] = []
    if evaluate and federation.patience is not None and not evaluate.every:
        problems.append(
            "federation.patience: counts measurements between rounds, and there are none: set evaluate.every: 1"
        )
    fewest, cohort = federation.min_replies, federation.cohort
    if cohort and isinstance(fewest, int) and fewest > cohort:
        problems.append(f"federation.min_replies: {fewest} is more than the cohort of {cohort}")
    if federation.secure_sums is not None:
        problems += _out_of_sight(federation, blocks.get("guard"), blocks.get("wire"))
    if federation.asynchronous is not None:
        problems += _one_time_for_all(federation, blocks.get("privacy"), blocks.get("engine"))
    return problems


def _not_at_sites(checked: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are not as they are by default and that no site can use."""
    for path, text in NOT_AT_SITES.items():
        block, _, key = path.partition(".")
        value, kind = checked.get(block), Experiment
        if key:
            if not is_dataclass(value):  # not given, or wrong, which another message says
                continue
            value, kind = getattr(value, key), type(value)
        usual = {parameter.name: parameter.default for parameter in parameters_of(kind)}
        if value is not None and value != usual[key or block]:
            yield f"{path}: {text}"


def _counted_otherwise(blocks: Mapping[str, Any]) -> list[str]:
    """Settings that compute from records what noise on gradients does not hide."""
    train, stream, federation, evaluate = (blocks.get(name) for name in ("train", "stream", "federation", "evaluate"))
    problems: list[str] = []
    if evaluate and evaluate.fold:
        problems.append(
            "evaluate.fold: a record changes which of the others are held out, which privacy.unit example cannot hide; "
            "set it to 0"
        )
    if train and train.class_weights != "none":
        problems.append(
            "train.class_weights: a record changes how much the others of its class count, which privacy.unit example "
            "cannot hide; set it to none"
        )
    if stream and stream.kind != "none":
        problems.append(
            "stream.kind: batches of data that arrives over time are no draws of all records, by which "
            "privacy.unit example counts; set it to none"
        )
    if federation and federation.deploy == "best":
        problems.append(
            "federation.deploy: best chooses by validation records and tells the choice, which privacy.unit example "
            "does not count; set it to method"
        )
    return problems


def _out_of_sight(federation: Any, guard: Any, wire: Any) -> list[str]:
    """Settings that need what the server does not see under secure sums."""
    why, problems = "under federation.secure_sums the server sees no client's update", list[str]()
    if find_spec("cryptography") is None:
        problems.append(f"federation.secure_sums: needs the package cryptography: {to_install('secure')}")
    if guard and guard.rule != "none":
        problems.append(f"guard.rule: {guard.rule} compares updates, and {why}; set it to none")
    if guard and guard.clip is not None:
        problems.append(f"guard.clip: {why}; set it to null, as every client keeps to federation.secure_sums.clip")
    if federation.max_weight is not None:
        problems.append(
            "federation.max_weight: under federation.secure_sums the server sees no client's weight; set it to null "
            "and lower federation.secure_sums.most_examples"
        )
    if wire and wire.dtype != "float32":
        problems.append(
            f"wire.dtype: {wire.dtype} is none of federation.secure_sums, whose updates are whole numbers; set it to "
            "float32"
        )
    if wire and wire.top_k is not None:
        problems.append("wire.top_k: under federation.secure_sums updates are added whole; set it to null")
    return problems


def _one_time_for_all(federation: Any, privacy: Any, engine: Any) -> list[str]:
    """Settings that need all clients of a round to have started from the same values, or a clock that is simulated."""
    buffer, problems = federation.asynchronous.buffer, list[str]()
    if federation.cohort is not None and buffer > federation.cohort:
        problems.append(f"federation.asynchronous.buffer: {buffer} is more than the cohort of {federation.cohort}")
    if federation.secure_sums is not None:
        problems.append(
            "federation.secure_sums: the masks of a sum are of clients that answer in one round, which "
            "federation.asynchronous does not wait for; set one of the two to null"
        )
    if federation.patience is not None:
        problems.append(
            "federation.patience: goes back to one round at all clients, and under federation.asynchronous each is at "
            "work on a round of its own; set it to null"
        )
    if privacy and privacy.unit == "client":
        problems.append(
            "privacy.unit: client counts by who is drawn for a round, and under federation.asynchronous the speed of "
            "clients decides that; take unit example, or set federation.asynchronous to null"
        )
    if engine and engine.kind == "flower" and federation.asynchronous.times != 0.0:
        problems.append(
            "federation.asynchronous.times: is of a simulated clock, and on Flower the sites' own time counts; leave "
            "it out"
        )
    return problems


def _task_of(benchmark: str) -> str:
    """The task of a benchmark; empty for an unknown one, which `_benchmark` reports."""
    from befit.data import registry

    return registry.get(benchmark).task if benchmark in registry.names() else ""


def _generation(evaluate: Any, task: str) -> list[str]:
    """What is measured, which is the task's own, and settings for text, which only tasks that write text can use."""
    if not evaluate:
        return []
    metrics, wins = evaluate.metrics or [], evaluate.wins or []
    kind = get_task(task)
    problems = []
    if evaluate.generate and not kind.writes_text:
        writers = ", ".join(task_names(writes_text=True))
        problems.append(f"evaluate.generate: is for {writers}, and the task is {task}; set it to false")
    problems += [
        f"evaluate.metrics: {name!r} is not one of those of {task}: "
        f"{', '.join(kind.metrics) or 'none, set it to null'}.{did_you_mean(name, kind.metrics)}"
        for name in metrics
        if name not in kind.metrics
    ]
    problems += [
        f"evaluate.{key}: begins with {names[0]}, of which less is better; begin with another"
        for key, names in (("metrics", metrics[:1]), ("wins", [name for name in wins if name in LOWER_IS_BETTER]))
        if set(names) & set(LOWER_IS_BETTER)
    ]
    problems += [
        f"evaluate.{key}: {name} is there twice"
        for key, names in (("metrics", metrics), ("wins", wins))
        for name in sorted(set(names))
        if names.count(name) > 1
    ]
    problems += [
        f"evaluate.wins: {name!r} is none of evaluate.metrics, which measures {', '.join(metrics) or 'null'}."
        f"{did_you_mean(name, metrics)}"
        for name in dict.fromkeys(wins)
        if name not in metrics
    ]
    if not problems and evaluate.generate and metrics and not set(metrics) - {"token_accuracy", *LIKELIHOOD}:
        problems.append(
            "evaluate.generate: is true, and no metric of evaluate.metrics is of generated text; set it to "
            "false, or add exact_match"
        )
    return problems


def _places(engine: Any) -> list[str]:
    """Settings of one kind of engine under the other."""
    by_kind = {"flower": ("deadline_s", "keys", "wait_s"), "local": ("workers", "store")}
    defaults = type(engine)()
    return [
        f"engine.{key}: belongs to engine.kind {kind}, which is {engine.kind} here"
        for kind, keys in by_kind.items()
        for key in keys
        if kind != engine.kind and getattr(engine, key) != getattr(defaults, key)
    ]


def _files(data: Any) -> list[str]:
    problems: list[str] = []
    for key, places in (("clients", data.clients), ("newcomers", data.newcomers)):
        clients = places if isinstance(places, dict) else {"all": places}
        problems += [] if clients else [f"data.{key}: must name at least one client"]
        problems += [f"data.{key}: {problem}" for problem in id_problems(clients)]
    if data.partition is not None and isinstance(data.clients, dict):
        problems.append("data.partition: divides one file or folder, and data.clients names a place for each client")
    if data.partition is not None:
        problems += data.partition.problems(data.task in task_names() and get_task(data.task).has_classes)
    if data.hub is not None and (data.partition is None or not isinstance(data.clients, str)):
        problems.append(
            "data.hub: holds everybody's records, so data.clients must be the dataset's id, and data.partition say "
            "whose a record is, such as {by: source}"
        )
    if data.val_fraction + data.test_fraction >= 1:
        shares = f"{data.test_fraction} and val_fraction {data.val_fraction}"
        problems.append(f"data.test_fraction: {shares} leave nothing to train on")
    return problems


def _absolute(experiment: Experiment, folder: Path) -> Experiment:
    """Relative paths made absolute, so that a run resumes from any folder. Hub ids and packages stay as they are."""

    def resolve(path: str) -> str:
        try:
            return str((folder / Path(path).expanduser()).resolve())
        except RuntimeError as error:
            raise ConfigError([f"{path}: there is no such user's home directory"]) from error

    model, data, benchmark = experiment.model, experiment.data, experiment.benchmark
    if benchmark is not None:
        arguments = benchmark.arguments
        paths = {
            key: resolve(arguments[key])
            for key in BENCHMARK_PATHS
            if isinstance(arguments.get(key), str) and arguments[key]
        }
        benchmark = replace(benchmark, arguments={**arguments, **paths})

    def place(model: ModelSettings) -> ModelSettings:
        here = bool(model.id) and model.id not in zoo_names() and (folder / model.id / "config.json").is_file()
        return replace(model, id=resolve(model.id)) if here or re.match(r"\.{1,2}(/|$)|~", model.id) else model

    families = {name: replace(family, model=place(family.model)) for name, family in experiment.families.items()}
    if data is not None:

        def placed(clients: Any) -> Any:
            if clients is None or isinstance(clients, str):
                return None if clients is None else resolve(clients)
            return {
                name: resolve(place)
                if isinstance(place, str)
                else {key: resolve(value) if isinstance(value, str) else value for key, value in place.items()}
                for name, place in clients.items()
            }

        on_hub = data.hub is not None and isinstance(data.clients, str) and not (folder / data.clients).is_dir()
        clients = data.clients if on_hub else placed(data.clients)
        data = replace(data, clients=clients, newcomers=placed(data.newcomers), public=placed(data.public))
    common = None if experiment.common_model is None else place(experiment.common_model)
    # A key is a file, or the line in it.
    keys = {client: key if key.startswith("ecdsa-") else resolve(key) for client, key in experiment.engine.keys.items()}
    adapter = experiment.adapter
    return replace(
        experiment,
        model=place(model),
        adapter=adapter if adapter.start is None else replace(adapter, start=resolve(adapter.start)),
        data=data,
        benchmark=benchmark,
        families=families,
        common_model=common,
        engine=replace(experiment.engine, keys=keys),
    )


_PARAMETERS = parameters_of(Experiment)
_BLOCKS = tuple(parameter.name for parameter in _PARAMETERS if is_dataclass(parameter.default))
_COMPLETED: Mapping[str, Callable[[Mapping[str, Any]], tuple[Any, list[str]]]] = {
    "method": lambda config: _method(config.get("method"), "method"),
    "baselines": _baselines,
    "benchmark": _benchmark,
    "data": _data,
    "families": _families,
    "common_model": _common_model,
}
