"""The ablations by name. An ablation is a frozen dataclass whose fields are its options, and so the schema of them.

Each module of this package registers what it defines; they are imported when a name is first asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from befit.core.errors import ConfigError
from befit.core.registry import Registry
from befit.core.schema import Parameter, check_values, parameters_of, plain

if TYPE_CHECKING:
    from befit.studies.ablations.base import Ablation

__all__ = ["Entry", "build", "get", "names", "register"]

Factory = TypeVar("Factory", bound=type)


@dataclass(frozen=True)
class Entry:
    """A registered ablation: of which method it is, and how it is made."""

    name: str
    title: str
    method: str
    factory: Callable[..., Ablation]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters_of(self.factory)

    @property
    def docstring(self) -> str:
        return inspect.getdoc(self.factory) or ""

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.docstring.split("\n", 1)[0]


_ABLATIONS: Registry[Entry] = Registry("ablation", ("befit.studies.ablations",))


def register(name: str, *, title: str, method: str) -> Callable[[Factory], Factory]:
    """Enter a class under `name`. Raises ValueError where another one has that name."""

    def enter(factory: Factory) -> Factory:
        _ABLATIONS.enter(name, factory, Entry(name, title, method, factory))
        return factory

    return enter


def names() -> list[str]:
    """Names of all ablations, sorted."""
    return _ABLATIONS.names()


def get(name: str) -> Entry:
    """The entry of one ablation. Raises ConfigError with a suggestion."""
    return _ABLATIONS.find(name, where="the command")


def build(name: str, options: Mapping[str, Any] | None = None) -> tuple[Ablation, dict[str, Any]]:
    """The ablation with these options, and all its options in plain form. Raises ConfigError with every problem."""
    entry = get(name)
    options_given = dict(options or {})
    values, problems = check_values(entry.parameters, options_given, "ablation.", name)
    if not problems:
        try:
            ablation = entry.factory(**values)
        except ValueError as error:
            problems = [f"ablation.{error}"]
        else:
            defaults = {parameter.name: plain(parameter.default) for parameter in entry.parameters}
            return ablation, {**defaults, **plain(options_given)}
    raise ConfigError(problems, "the ablation")
