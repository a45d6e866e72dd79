"""Methods with the arguments that a command line gives them, every mistake at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from befit.config.overrides import apply_overrides
from befit.core.errors import ConfigError, did_you_mean
from befit.protocol.registry import check_method, get_method, method_names

if TYPE_CHECKING:
    from befit.protocol.method import Method


def chosen_methods(names: Sequence[str], assignments: Sequence[str] = ()) -> dict[str, tuple[dict[str, Any], Method]]:
    """By name: the block with all defaults filled in, and the method.

    names        methods, each once
    assignments  `METHOD.key=value` for one of them, or `key=value` for all that have this argument; values are YAML,
                 later ones win, and one for a method wins over one for all

    Raises ConfigError with every unknown method, argument and value.
    """
    problems = [f"method: {name} is named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    unknown = [name for name in dict.fromkeys(names) if name not in method_names()]
    problems += [
        f"method: there is none called {name!r}.{did_you_mean(name, method_names())} Known: {', '.join(method_names())}"
        for name in unknown
    ]
    known = [name for name in dict.fromkeys(names) if name not in unknown]
    arguments: dict[str, dict[str, Any]] = {name: {} for name in known}
    for text in sorted(assignments, key=lambda text: _owner(text, known) is not None):  # stable: a method's own last
        problems += _assign(arguments, text)
    checked = {name: check_method({**values, "name": name}, name) for name, values in arguments.items()}
    problems += [problem for _, _, mistakes in checked.values() for problem in mistakes]
    if problems:
        raise ConfigError(problems, "the command")
    return {name: (block, method) for name, (block, method, _) in checked.items() if method is not None}


def _owner(assignment: str, names: Sequence[str]) -> str | None:
    first, dot, _ = assignment.partition("=")[0].partition(".")
    return first if dot and first in names else None


def _assign(arguments: dict[str, dict[str, Any]], text: str) -> list[str]:
    """Put one assignment into the blocks it is for; what is wrong with it."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        return [f'"{text}": must be key=value or METHOD.key=value, such as rank=4']
    owner = _owner(text, list(arguments))
    path = path.removeprefix(f"{owner}.") if owner else path
    first = path.split(".")[0]
    parameters = {name: [parameter.name for parameter in get_method(name).parameters] for name in arguments}
    if owner is None and "." in path and first in method_names():
        return [f"{path}: {first} is not among the methods ({', '.join(arguments)}); add --method {first}"]
    takers = [owner] if owner else [name for name, keys in parameters.items() if first in keys]
    if not takers and arguments:
        every = sorted({key for keys in parameters.values() for key in keys})
        hint = did_you_mean(first, every) or f" Known: {', '.join(every)}"
        return [f"{path}: unknown key for {', '.join(arguments)}.{hint}"]
    if first == "name":
        return [f"{text}: choose the method with --method"]
    problems = []
    for name in takers:
        problems += apply_overrides(arguments[name], [f"{path}={value}"])
    return list(dict.fromkeys(problems))
