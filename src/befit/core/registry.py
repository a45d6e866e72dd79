"""What is found by name: methods, benchmarks, tasks, ablations. Modules that register them are imported on first use.

What a user's own files register comes from plugins: see `befit.core.plugins`.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar

from befit.core.errors import ConfigError, did_you_mean
from befit.core.plugins import load_entry_points, origin
from befit.core.schema import Parameter, parameters_of

Entry = TypeVar("Entry")


class Documented:
    """What is known of an entry by its `factory`, a function or a class: arguments and docstring."""

    factory: Callable[..., Any]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Name, type, default and description of every argument."""
        return parameters_of(self.factory)

    @property
    def docstring(self) -> str:
        return inspect.getdoc(self.factory) or ""

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.docstring.split("\n", 1)[0]


class Registry(dict[str, Entry]):
    """Entries by name. Every module of some packages registers what it defines, once a name is first asked for.

    kind      what an entry is, for messages: "method"
    packages  packages whose modules are imported
    group     of entry points, under which installed distributions name modules with more; none where plugins have none
    """

    def __init__(self, kind: str, packages: Sequence[str], group: str = "") -> None:
        super().__init__()
        self.kind, self.packages, self.group = kind, packages, group
        self._loaded = False
        self._makers: dict[str, Callable[..., Any] | str] = {}

    def enter(self, name: str, maker: Callable[..., Any] | str, entry: Entry) -> None:
        """Add an entry that `maker` makes, a function or class, or the place of one of befit's own as "module:name".

        Raises ValueError where another maker has that name.
        """
        place = _place(maker)
        if not place.startswith("befit."):
            self.load()  # so that it is the newcomer that is refused where befit has the name already
        other = self._makers.get(name, maker)
        if name in self and (_place(other) != place or _twice(other, maker)):
            places = (each.partition(":")[0] if isinstance(each, str) else origin(each) for each in (other, maker))
            raise ValueError(f"two {self.kind}s are called {name!r}: {' and '.join(places)}")
        self[name], self._makers[name] = entry, maker

    def load(self) -> None:
        """Import all modules of the packages, and what entry points name, the first time."""
        if not self._loaded:
            for name in self.packages:
                package = import_module(name)
                for module in pkgutil.iter_modules(package.__path__, f"{name}."):
                    import_module(module.name)
            self._loaded = True
        if self.group:
            load_entry_points(self.group)

    def names(self) -> list[str]:
        """All names, sorted."""
        self.load()
        return sorted(self)

    def find(self, name: str, path: str = "", where: str = "the configuration") -> Entry:
        """The entry of a name. Raises ConfigError with a suggestion; `path` is the key that holds the name."""
        self.load()
        if name not in self:
            problem = f"unknown {self.kind} {name!r}.{did_you_mean(name, self)} Known: {', '.join(sorted(self))}"
            if self.group:
                problem += f". A {self.kind} in a file of your own is known once `plugins` or --import names the file"
            raise ConfigError([f"{path}: {problem}" if path else problem], where)
        return self[name]


def check_name(name: object, decorator: str) -> None:
    """Raise TypeError where what should be an entry's name is no text, such as the function itself."""
    if not isinstance(name, str):
        what = "without brackets" if callable(name) else f"with {name!r}"
        raise TypeError(f'@{decorator} stands {what}; it takes a name: @{decorator}("mine")')


def _twice(other: Callable[..., Any] | str, maker: Callable[..., Any] | str) -> bool:
    """Whether two functions stand in one and the same file as it was loaded once, and not in it before and after an
    edit, nor in a cell of a notebook that was run again."""
    if not (isinstance(other, FunctionType) and isinstance(maker, FunctionType)):
        return False
    first, second = other.__code__, maker.__code__
    same_scope = other.__globals__ is maker.__globals__ and first.co_filename == second.co_filename
    return same_scope and first.co_firstlineno != second.co_firstlineno


def _place(maker: Callable[..., Any] | str) -> str:
    return maker if isinstance(maker, str) else f"{maker.__module__}:{maker.__qualname__}"
