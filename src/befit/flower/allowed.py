"""What of a configuration may travel to a site. The list is of what may: whatever is not on it stays, and is refused.

A field that is added later fails a test until it has its place here. Until then an experiment that sets it cannot run
at sites, and a site refuses a server that sends it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError
from befit.core.schema import Mark, Parameter, parameters_of
from befit.protocol.registry import get_method

__all__ = [
    "ARGUMENTS",
    "AT_SERVER",
    "AT_SITE",
    "NOWHERE",
    "TRAVELS",
    "harmless",
    "method_of",
    "refused_in_method",
    "settings_of",
]


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# None of these names a path, a repository, an address or code; they are what a client's numbers depend on.
TRAVELS = _set("""
    model.id model.revision model.dtype model.gradient_checkpointing model.max_length model.prompt model.quantise
    data.kind data.task data.columns data.label_names data.val_fraction data.test_fraction
    adapter.targets adapter.dropout adapter.head
    train.max_steps train.batch_size train.lr train.weight_decay train.optimiser train.betas train.momentum
    train.grad_clip train.schedule train.schedule_over train.warmup_steps
    stream.kind stream.sampling limit.clients limit.records limit.rounds
    federation.rounds federation.seed
    evaluate.split evaluate.batch_size evaluate.generate evaluate.max_new_tokens evaluate.metrics
    wire.dtype
    benchmark.name benchmark.version
""")
# Arguments of benchmarks. All others, such as root, hub, revisions, scenario, public and tasks, decide where a
# benchmark reads from, and are for the site's file.
ARGUMENTS = _set("""
    alpha answers classes clients clients_per_language files languages minimum minimum_test minimum_train model_map
    newcomers on_shortage one_per_category partition pool rounding seed test test_fraction train unseen val val_fraction
    with_passage
""")
AT_SITE = _set("model.device data.clients benchmark.arguments")  # which the site's own file says
AT_SERVER = _set("""
    name method baselines engine guard checkpoint trackers report
    federation.cohort federation.min_replies evaluate.every evaluate.newcomers evaluate.wins
""")
# Not at sites yet, and why.
NOWHERE = {
    "model.long_prompts": "no site leaves records out on Flower yet; set it to refuse",
    "families": "every site has the backbone of `model` on Flower; give model.id, without families",
    "common_model": "no site has a second model on Flower yet; set it to null",
    "data.newcomers": "no site is a newcomer on Flower yet; set it to null",
    "data.public": "public records of your own cannot be used on Flower yet; set it to null",
    "evaluate.by": "what a site's records say would leave it, as names of scores; set it to null",
    "evaluate.others": "no site has the others' examples on Flower; set it to never",
}


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """The blocks and keys that travel. Raises ConfigError for a setting that cannot be used at sites."""
    from befit.config.experiment import to_dict

    values, problems = to_dict(experiment), []
    settings: dict[str, Any] = {}
    for path, value, default in _fields(experiment):
        block, _, key = path.partition(".")
        if path in TRAVELS:
            settings.setdefault(block, {})[key] = values[block][key]
        elif path not in AT_SITE | AT_SERVER and value != default:
            problems.append(f"{path}: {NOWHERE.get(path, 'cannot be used on Flower; leave it out')}")
    if "benchmark" in settings:
        settings["benchmark"] |= {key: value for key, value in values["benchmark"].items() if key in ARGUMENTS}
    for block in (experiment.method, *experiment.baselines):
        problems += refused_in_method(method_of(block), None)
    if problems:
        raise ConfigError(problems)
    return settings


def method_of(block: Mapping[str, Any]) -> dict[str, Any]:
    """A method's block without what only the server uses."""
    name = block.get("name")
    return _sent(get_method(name).parameters, block) if isinstance(name, str) else dict(block)


def _sent(parameters: Sequence[Parameter], block: Mapping[str, Any]) -> dict[str, Any]:
    sent = dict(block)
    for one in parameters:
        if one.mark is Mark.SERVER:
            sent.pop(one.name, None)
        elif dataclasses.is_dataclass(one.type) and isinstance(sent.get(one.name), Mapping):
            sent[one.name] = _sent(_parameters(one.type), sent[one.name])
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
        if parameter.mark is Mark.METHOD and isinstance(value, Mapping):
            problems += refused_in_method(value, allowed, here)
        else:
            problems += [
                f"{found}: takes any text, which a server may not set at a site"
                for found in _any_text(parameter.type, value, here)
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
        return all(harmless(one) for one in inner if one is not Ellipsis)
    if dataclasses.is_dataclass(kind):
        return all(harmless(one.type) for one in _parameters(kind))
    return kind in (int, float, bool, type(None))


def _any_text(kind: Any, value: Any, path: str) -> Iterator[str]:
    """Where a value has text that its type does not restrict to choices."""
    if value is None or isinstance(value, (bool, int, float)) or harmless(kind):
        return
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        for one in _parameters(kind):
            yield from _any_text(one.type, value.get(one.name), f"{path}.{one.name}")
    else:
        yield path


def _fields(experiment: Experiment) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and default of every setting; of a block that is listed as one, the block."""
    for outer in _parameters(Experiment):
        value = getattr(experiment, outer.name)
        if outer.name in AT_SERVER | NOWHERE.keys() or not (dataclasses.is_dataclass(value) or value is None):
            yield outer.name, value, outer.default
        elif value is not None:
            for inner in _parameters(type(value)):
                yield f"{outer.name}.{inner.name}", getattr(value, inner.name), inner.default


def _parameters(kind: Any) -> tuple[Parameter, ...]:
    return parameters_of(kind)
