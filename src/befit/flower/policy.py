"""Which settings of a configuration may travel to a site, and the experiment that the site makes of them.

Only listed settings travel; a site refuses all others. A test demands that every setting is on one of the lists here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from befit.config.experiment import NOT_AT_SITES, Experiment, ModelSettings, method_blocks, to_dict
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.plugins import load_plugins
from befit.core.schema import Mark, Parameter, parameters_of, plain
from befit.core.text import readable
from befit.flower.amounts import exceeded, too_large
from befit.flower.own_slots import withheld
from befit.flower.remote_clients import common_model, families_of
from befit.flower.site_file import SiteFile
from befit.protocol.check import unsummed
from befit.protocol.method import Method, run_stages
from befit.protocol.registry import build_method, get_method
from befit.runs.clients import OWN_MODEL
from befit.tasks import get_task, task_names


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# None of these names a path, a repository, an address or code; they are what a client's numbers depend on.
TRAVELS = _set("""
    model.id model.revision model.dtype model.gradient_checkpointing model.max_length model.prompt model.quantise
    data.task data.columns data.label_names data.val_fraction data.test_fraction
    data.missing data.drop_duplicates
    adapter.targets adapter.dropout adapter.head adapter.compute
    train.max_steps train.epochs train.batch_size train.micro_batch train.lr train.loraplus_ratio train.class_weights
    train.dpo_beta train.weight_decay train.optimiser train.betas train.momentum
    train.grad_clip train.schedule train.lr_end train.schedule_over train.warmup_steps
    stream.kind stream.sampling limit.clients limit.records limit.rounds
    federation.rounds federation.seed federation.deploy federation.deploy_margin federation.secure_sums
    evaluate.split evaluate.batch_size evaluate.generate evaluate.max_new_tokens evaluate.metrics
    wire.dtype wire.top_k
    privacy.unit privacy.epsilon privacy.delta privacy.noise_multiplier privacy.clip privacy.quantile
    privacy.accountant privacy.reproducible
    benchmark.name benchmark.version
""")
# Arguments of benchmarks. All others, such as root, hub, revisions, scenario, public and tasks, decide where a
# benchmark reads from, and are for the site's file.
ARGUMENTS = _set("""
    alpha answers classes clients clients_per_language files language languages looks minimum minimum_test
    minimum_train model_map newcomers on_shortage one_per_category partition pool public_count rounding seed streams
    test test_fraction train unseen val val_fraction with_passage
""")
AT_SITE = _set("model.device data.clients benchmark.arguments")  # which the site's own file says
AT_SERVER = _set("""
    name method baselines engine guard checkpoint trackers report plugins
    federation.cohort federation.min_replies federation.max_weight federation.patience federation.asynchronous
    evaluate.every evaluate.newcomers evaluate.wins
    data.public
""")
BY_FAMILY = _set("families")  # told as clients by their ids, and models with the keys of `model` above
_OF_MODEL = frozenset(path.removeprefix("model.") for path in TRAVELS if path.startswith("model."))


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """The blocks and keys that travel. Raises ConfigError for a setting that cannot be used at sites."""
    values, problems = to_dict(experiment), []
    settings: dict[str, Any] = {}
    for path, value, default in _fields(experiment):
        block, _, key = path.partition(".")
        if path in TRAVELS:
            settings.setdefault(block, {})[key] = values[block][key]
        elif path not in AT_SITE | AT_SERVER | BY_FAMILY and value != default:
            problems.append(f"{path}: {NOT_AT_SITES.get(path, 'cannot be used on Flower; leave it out')}")
    problems += [
        f"families.{name}.model.{key}: {NOT_AT_SITES[f'model.{key}']}"
        for name, family in experiment.families.items()
        for key, value in plain(family.model).items()
        if f"model.{key}" in NOT_AT_SITES and value != getattr(ModelSettings, key)
    ]
    if "benchmark" in settings:
        settings["benchmark"] |= {key: value for key, value in values["benchmark"].items() if key in ARGUMENTS}
    if experiment.families and not problems:
        settings |= _by_family(experiment)
        settings["limit"]["clients"] = None  # they are the first of each family, and a site reads its own alone
    for label, block in method_blocks(experiment).items():
        problems += refused_in_method(method_of(block), None)
        if experiment.data is not None and build_method(block).needs.public_at_clients:
            problems.append(f"method {label}: its clients need the public records, which only the server has")
    if problems:
        raise ConfigError(problems)
    return settings


def _by_family(experiment: Experiment) -> dict[str, Any]:
    """The clients of every family by their ids, and its model; and the model that all clients need beside their own."""
    families = families_of(experiment)
    told: dict[str, Any] = {
        "families": {
            name: {"clients": [client for client, of in families.of.items() if of == name], "model": _model_told(model)}
            for name, model in families.models.items()
            if name != OWN_MODEL
        }
    }
    common = common_model(experiment, families)
    return told if common is None else {**told, "common_model": _model_told(common)}


def _model_told(model: ModelSettings) -> dict[str, Any]:
    return {key: value for key, value in plain(model).items() if key in _OF_MODEL}


def models_told(settings: Mapping[str, Any], client: str) -> list[dict[str, Any]]:
    """The blocks of the models that a client needs for these settings: its own, and the one that all have.

    Raises PayloadMismatch for families that are none, ConfigError for a client in two.
    """
    blocks: Mapping[str, Any] = settings.get("families", {})
    for name, block in blocks.items():
        if not (_mapping(block) and block.keys() == {"clients", "model"} and _mapping(block["model"])):
            raise PayloadMismatch(f"families.{readable(str(name), 40)}: is no mapping of clients and a model")
        if not (isinstance(block["clients"], list) and all(isinstance(one, str) for one in block["clients"])):
            raise PayloadMismatch(f"families.{readable(str(name), 40)}.clients: is no list of clients")
    own = [block["model"] for block in blocks.values() if client in block["clients"]]
    if len(own) > 1:
        raise ConfigError([f"families: client {client} is in {len(own)} of them"])
    common = [settings["common_model"]] if "common_model" in settings else []
    return [dict(block) for block in (*(own or [settings.get("model", {})]), *common)]


def method_of(block: Mapping[str, Any]) -> dict[str, Any]:
    """A method's block, and those within it, without what only the server uses."""
    name = block.get("name")
    return _sent(get_method(name).parameters, block) if isinstance(name, str) else dict(block)


def _sent(parameters: Sequence[Parameter], block: Mapping[str, Any]) -> dict[str, Any]:
    sent = dict(block)
    for parameter in parameters:
        if Mark.SERVER in parameter.marks:
            sent.pop(parameter.name, None)
        elif dataclasses.is_dataclass(parameter.type) and isinstance(sent.get(parameter.name), Mapping):
            sent[parameter.name] = _sent(_parameters(parameter.type), sent[parameter.name])
        elif Mark.METHOD in parameter.marks and isinstance(sent.get(parameter.name), Mapping):
            sent[parameter.name] = method_of(sent[parameter.name])
    return sent


def refused_in_method(block: Mapping[str, Any], allowed: Sequence[str] | None, path: str = "method") -> list[str]:
    """Why a method's block may not come from a server: the method, or one within it, is not among `allowed` (None:
    all are), or an argument takes any text, which could name a place."""
    name = block.get("name")
    if allowed is not None and name not in allowed:
        listed = ", ".join(sorted(allowed)) or "none"
        return [f"{path}.name: {name} is not among the site's methods: {listed}"]
    if not isinstance(name, str):
        return [f"{path}.name: is required"]
    problems: list[str] = []
    for parameter in get_method(name).parameters:
        value, here = block.get(parameter.name), f"{path}.{parameter.name}"
        if Mark.METHOD in parameter.marks and isinstance(value, Mapping):
            problems += refused_in_method(value, allowed, here)
        else:
            problems += [
                f"{place}: takes any text, which a server may not set at a site"
                for place in _any_text(parameter.type, value, here)
            ]
    return problems


def harmless(kind: Any) -> bool:
    """Whether no value of a type can name a place: numbers, truth values, choices, and collections of them.

    >>> harmless(dict[str, int]), harmless(str | None), harmless(Literal["a", "b"])
    (True, False, True)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return harmless(inner[0])
    if origin is Literal:
        return True
    if origin in (dict, Mapping):
        return inner[0] is str and harmless(inner[1])  # names of clients, which are only looked up
    if origin in (list, tuple, Sequence, Union, types.UnionType):
        return all(harmless(part) for part in inner if part is not Ellipsis)
    if dataclasses.is_dataclass(kind):
        return all(harmless(parameter.type) for parameter in _parameters(kind))
    return kind in (int, float, bool, type(None))


def _any_text(kind: Any, value: Any, path: str) -> Iterator[str]:
    """Where a value has text that its type does not restrict to choices."""
    if value is None or isinstance(value, (bool, int, float)) or harmless(kind):
        return
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        for parameter in _parameters(kind):
            yield from _any_text(parameter.type, value.get(parameter.name), f"{path}.{parameter.name}")
    else:
        yield path


def _fields(experiment: Experiment) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and default of every setting; of a block that is listed as one, the block."""
    for outer in parameters_of(Experiment):
        value = getattr(experiment, outer.name)
        if outer.name in AT_SERVER | BY_FAMILY | NOT_AT_SITES.keys() or not (
            dataclasses.is_dataclass(value) or value is None
        ):
            yield outer.name, value, outer.default
        elif value is not None:
            for inner in _parameters(type(value)):
                yield f"{outer.name}.{inner.name}", getattr(value, inner.name), inner.default


def _parameters(kind: Any) -> tuple[Parameter, ...]:
    return parameters_of(kind)


def experiment_here(settings: Mapping[str, Any], method: Mapping[str, Any], site: SiteFile) -> Experiment:
    """The experiment as this site runs it, with its own data, model directory and device.

    Raises ConfigError with everything that the site has not allowed or that is no valid configuration, PayloadMismatch
    for what is no configuration at all.
    """
    if _mapping(settings) and "plugins" in settings:
        raise ConfigError(["plugins: a site loads those of its own file, and none that a server names"])
    if not _mapping(settings) or not all(map(_mapping, settings.values())) or not _mapping(method):
        raise PayloadMismatch("the request's settings and method are not mappings of mappings")
    load_plugins(site.plugins)
    own, *common = models_told(settings, site.client)
    wanted = {block: dict(values) for block, values in settings.items() if block != "families"} | {"model": own}
    problems = [*_unlisted(wanted), *too_large(settings, method), *refused_in_method(method, site.methods)]
    problems += _model("model", own, site)
    problems += [problem for model in common for problem in _model("common_model", model, site)]
    if "benchmark" in wanted:
        benchmark = wanted["benchmark"].get("name")
        if benchmark not in site.benchmarks:
            problems.append(
                f"benchmark.name: {benchmark} is not among the site's benchmarks: {_listed(site.benchmarks)}"
            )
    elif site.data is None:
        problems.append("data: the site has none; it takes part in benchmarks only")
    if problems:
        raise ConfigError(problems, f"what the server asks of site {site.client}")
    for key in wanted.keys() & {"model", "common_model"}:
        place, _, revision = place_of(site, wanted[key]["id"])
        wanted[key] |= {"id": place, "revision": revision or None, "device": site.device}
    if isinstance(site.benchmarks, dict) and "benchmark" in wanted:
        wanted["benchmark"] |= site.benchmarks[wanted["benchmark"]["name"]]
    if "benchmark" not in wanted:
        data = wanted.get("data", {})
        problems += _data(data, site)
        wanted["data"] = {**data, "clients": {site.client: site.data}, "columns": site.columns}
    engine = {"store": "disk", "threads": site.threads}
    whole = {"name": "site", **wanted, "method": dict(method), "baselines": [], "engine": engine}
    whole["plugins"] = list(site.plugins)
    experiment = load_experiment(whole)
    built = build_method(experiment.method)
    problems += [*exceeded(experiment, built, site.limits), *_unprotected(experiment, site)]
    problems += [
        f"method: {method['name']} sends what is in slot {slot}, which is the client's own; the site's file does not "
        "list that slot under shares"
        for slot in withheld(built, site)
    ]
    problems += _sums(experiment, built, site)
    if problems:
        raise ConfigError(problems, f"what the server asks of site {site.client}")
    return experiment


def _unprotected(experiment: Experiment, site: SiteFile) -> Iterator[str]:
    """Why a run does not protect records as the site's file wants it."""
    if site.privacy is not None and experiment.privacy.unit != "example":
        yield f"privacy.unit: {experiment.privacy.unit}, and the site takes part in runs of unit example only (privacy)"
    if site.privacy is not None and experiment.privacy.reproducible:
        yield "privacy.reproducible: true, which the site's file does not allow (privacy): it protects nobody"
    if experiment.data is not None and experiment.privacy.unit == "example" and experiment.limit.records is not None:
        yield (
            "limit.records: takes a client's first records, so one more changes which others are trained on, and "
            "privacy.unit: example hides one record alone"
        )


def _sums(experiment: Experiment, method: Method, site: SiteFile) -> list[str]:
    """Why updates would leave in the open, where the run or the site's file says that they do not."""
    if not any(stage.federated for stage in run_stages(method)):
        return []
    if experiment.federation.secure_sums is None:
        wanted = (
            "federation.secure_sums: the site's file demands secure sums (require_secure_sums), and the run has none"
        )
        return [wanted] if site.require_secure_sums else []
    return [
        f"federation.secure_sums: in stage {stage} of {experiment.method['name']} the server needs each site's own "
        "reply, which no sum has"
        for stage in unsummed(method)
    ]


def names_a_place(site: SiteFile, text: str) -> bool:
    """Whether a text for the server has one of the site's own paths in it. A model that the server itself calls by its
    path is none of them."""
    data = site.data.values() if isinstance(site.data, dict) else [site.data]
    roots = (
        [root for arguments in site.benchmarks.values() for root in arguments.values()]
        if isinstance(site.benchmarks, dict)
        else []
    )
    models = [place for name, place in site.models.items() if place != name]
    places = [site.state, site.key, *site.peers.values(), *data, *models, *site.plugins, *roots]
    return any(isinstance(place, str) and Path(place).is_absolute() and place in text for place in places)


def place_told(model: Mapping[str, Any]) -> str:
    """What a site's file has as the place of a model that is where the server has it: a folder's path, or the name,
    with the hub's revision where the run wants one."""
    name, revision = model["id"], model["revision"]
    return name if revision is None or name.startswith("/") else f"{name}@{revision}"


def place_of(site: SiteFile, name: str) -> tuple[str, str, str]:
    """Where a model is for a site, "@" and the revision; the last two are empty but for a hub id that has one."""
    place = site.models[name]
    return (place, "", "") if Path(place).is_absolute() else place.partition("@")


def _unlisted(wanted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Everything that no server may set at a site."""
    allowed = {*(path.partition(".")[0] for path in TRAVELS), "common_model"}
    problems = [f"{block}: the server may not set it" for block in wanted if block not in allowed]
    for path in (f"{block}.{key}" for block in wanted if block in allowed for key in wanted[block]):
        block, _, key = path.partition(".")
        listed = f"model.{key}" if block == "common_model" else path
        if listed in TRAVELS or (block == "benchmark" and key in ARGUMENTS):
            continue
        for_site = listed in AT_SITE or block == "benchmark"
        problems.append(
            f"{path}: " + ("is for the site to say, not for the server" if for_site else "the server may not set it")
        )
    return problems


def _model(block: str, wanted: Mapping[str, Any], site: SiteFile) -> list[str]:
    """Why the model that is wanted is none of the site's: another name, or another revision on the hub."""
    name, wanted_revision = (wanted.get(key) for key in ("id", "revision"))
    if not isinstance(name, str) or name not in site.models:
        why = "; it is the smallest backbone, which the method has every client run" if block != "model" else ""
        return [f"{block}.id: {name} is not among the site's models: {_listed(site.models)}{why}"]
    place, _, revision = place_of(site, name)
    if Path(place).is_absolute() or wanted_revision in (None, revision):
        return []
    return [
        f"{block}.revision: {wanted_revision} is not the one that the site's file lists, which is "
        f"{revision or 'none'}; its way to list one is models: {{{name}: {place}@{wanted_revision}}}"
    ]


def _data(wanted: Mapping[str, Any], site: SiteFile) -> list[str]:
    """Why the site's data may not be read as the server says. None of it depends on what is in the data."""
    problems, columns = [], wanted.get("columns") or {}
    task, names = wanted.get("task"), wanted.get("label_names")
    if site.tasks is not None and task not in site.tasks:
        problems.append(f"data.task: {task} is not among the site's tasks: {_listed(site.tasks)}")
    if not _mapping(columns):
        problems.append("data.columns: must be a mapping")
    else:
        problems += [
            f"data.columns.{field}: the site's file does not list it under columns, and a server can name no other"
            for field in columns
            if field not in site.columns
        ]
    chosen = isinstance(task, str) and task in task_names() and get_task(task).has_classes
    listed = {*map(str, names)} if isinstance(names, list) else set[str]()
    if chosen and not {*(site.label_names or ())} <= listed:
        problems.append("data.label_names: must have all classes of the site's label_names")
    return problems


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
