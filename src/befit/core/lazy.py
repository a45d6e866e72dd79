"""Public names of a package that are imported when they are first used, as PEP 562 allows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names come from the modules below it, without importing them now.

    homes  by module, counted from the package, the names that it has, or `name:other` for one that is called otherwise
           here because a module of the package has its name; `.` stands for modules that are public themselves

    >>> find, names = lazy("befit.core", {"errors": "BefitError ConfigError"})
    >>> find("ConfigError").__module__
    'befit.core.errors'
    """
    places: dict[str, tuple[str, str]] = {}
    for module, words in homes.items():
        for word in words.split():
            own, _, name = word.partition(":")
            places[name or own] = module, own

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = places[name]
        if module == ".":
            return import_module(f"{package}.{own}")
        return getattr(import_module(f"{package}.{module}"), own)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names
