"""What is found by name: methods, benchmarks, ablations. The modules that register them are imported on first use."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from befit.core.errors import ConfigError, did_you_mean

__all__ = ["Registry"]

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name. Every module of some packages registers what it defines, once a name is first asked for.

    kind      what an entry is, for messages: "method"
    packages  packages whose modules are imported
    """

    def __init__(self, kind: str, packages: Sequence[str]) -> None:
        super().__init__()
        self.kind, self.packages = kind, packages
        self._loaded = False
        self._makers: dict[str, tuple[str, str]] = {}

    def enter(self, name: str, maker: Callable[..., Any], entry: Entry) -> None:
        """Add an entry that `maker` makes. Raises ValueError where another maker has that name."""
        where = (maker.__module__, maker.__qualname__)
        if name in self and (other := self._makers.get(name, where)) != where:
            raise ValueError(f"two {self.kind}s are called {name!r}: {other[0]} and {where[0]}")
        self[name], self._makers[name] = entry, where

    def load(self) -> None:
        """Import all modules of the packages, the first time."""
        if self._loaded:
            return
        for name in self.packages:
            package = import_module(name)
            for module in pkgutil.iter_modules(package.__path__, f"{name}."):
                import_module(module.name)
        self._loaded = True

    def names(self) -> list[str]:
        """All names, sorted."""
        self.load()
        return sorted(self)

    def find(self, name: str, path: str = "", where: str = "the configuration") -> Entry:
        """The entry of a name. Raises ConfigError with a suggestion; `path` is the key that holds the name."""
        self.load()
        if name not in self:
            problem = f"unknown {self.kind} {name!r}.{did_you_mean(name, self)} Known: {', '.join(sorted(self))}"
            raise ConfigError([f"{path}: {problem}" if path else problem], where)
        return self[name]
