"""Public names of a package that are imported when they are first used, as PEP 562 allows."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names come from the modules below it, without importing them now.

    file  the package's `__init__.py`. The imports under its `if TYPE_CHECKING` say where each name is, so that editors,
          type checkers and the running program read the same list

    >>> import befit.core
    >>> find, names = lazy("befit.core", befit.core.__file__)
    >>> find("ConfigError").__module__
    'befit.core.errors'
    """
    places = {
        alias.asname or alias.name: (statement.module, alias.name)
        for block in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, member = places[name]
        return import_module(f"{package}.{member}") if module == package else getattr(import_module(module), member)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names
