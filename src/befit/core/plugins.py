"""Plugins: methods, benchmarks and tasks in a user's own files, loaded where a configuration or a command names them.

A plugin is a file (`my_method.py`) or a module that Python can import (`lab.methods`); loading it runs its
`@befit.register(…)` and `@befit.benchmark(…)`. A distribution can instead name its modules as entry points of the
groups `befit.methods`, `befit.benchmarks` and `befit.tasks`; those are loaded when a name is first looked up.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from befit.core.errors import BefitError, ConfigError

Result = TypeVar("Result")

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_loaded: dict[str, str] = {}  # SHA-256 by path, so that a file is run once, and again where it has changed
_modules: set[str] = set()  # the files of modules that are plugins, and the folders of packages
_groups_loaded: set[str] = set()


def resolve_plugins(names: Sequence[str], folder: Path) -> list[str]:
    """The same plugins with absolute paths, which count from `folder`; modules keep their name, and none is twice.

    >>> resolve_plugins(["lab.methods", "/srv/mine.py", "/srv/mine.py"], Path("/home"))
    ['lab.methods', '/srv/mine.py']
    """
    places = (str((folder / Path(name).expanduser()).resolve()) if _is_file(name) else name for name in names)
    return list(dict.fromkeys(places))


def came_with(name: str, folder: Path) -> bool:
    """Whether a plugin's file or module is in a folder, or its path does not say where else it is. Loads nothing."""
    if _is_file(name):
        path = Path(name).expanduser()
        return not path.is_absolute() or path.resolve().is_relative_to(folder.resolve())
    try:
        spec = find_spec(name.partition(".")[0])
    except ValueError:  # no name of a module, which loading it says
        return False
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(place and Path(place).resolve().is_relative_to(folder.resolve()) for place in places)


def load_plugins(names: Sequence[str], key: str = "plugins") -> None:
    """Run every plugin once; `names` are as `resolve_plugins` gives them.

    key  where they are named, for the messages

    Raises ConfigError with every plugin that cannot be loaded, and why.
    """
    problems = []
    for name in names:
        try:
            _load_file(Path(name)) if _is_file(name) else _load_module(name)
        except (Exception, SystemExit) as error:
            problems.append(f"{key}: {name}: {_reason(error, name)}")
    if problems:
        raise ConfigError(problems, "the plugins")


def load_entry_points(group: str) -> None:
    """Load what installed distributions name under a group, such as `befit.methods`; once in a process.

    Raises ConfigError with every entry point that cannot be loaded, its distribution, and why.
    """
    if group in _groups_loaded:
        return
    _groups_loaded.add(group)
    problems = []
    for point in entry_points(group=group):
        try:
            point.load()
            _note(sys.modules[point.module])
        except (Exception, SystemExit) as error:
            owner = point.dist.name if point.dist else "an installed distribution"
            problems.append(f"{owner}: {point.name} = {point.value}: {_reason(error, point.module)}")
    if problems:
        _groups_loaded.discard(group)  # so that the next look-up says the same
        raise ConfigError(problems, f"the entry points of {group}")


def ignore_entry_points() -> None:
    """For the rest of this process load no entry point: a site runs only what its own file names."""
    _groups_loaded.update({"befit.methods", "befit.benchmarks", "befit.tasks"})


def plugin_hash(name: str) -> str:
    """SHA-256 of a plugin's source: of its file, or of every Python file of a package, in the order of their paths.

    A module without a source file is hashed by its name.
    """
    if _is_file(name):
        return _sha256(Path(name))
    spec = find_spec(name)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return hashlib.sha256(name.encode()).hexdigest()
    if spec.submodule_search_locations is None:
        return _sha256(Path(spec.origin))
    root = Path(spec.origin).parent
    parts = [f"{path.relative_to(root)} {_sha256(path)}\n" for path in sorted(root.rglob("*.py"))]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def origin(factory: Callable[..., Any]) -> str:
    """Where a function or class was defined: befit's own module by its name, any other by its file.

    >>> origin(plugin_hash)
    'befit.core.plugins'
    """
    name = factory.__module__
    module = sys.modules.get(name)
    return name if name.startswith("befit.") else getattr(module, "__file__", None) or name


def not_returned(factory: Callable[..., Any], returned: object, wanted: type) -> str:
    """What is wrong with what a factory, or another function of a plugin, returned; empty where it is a `wanted`.

    >>> not_returned(plugin_hash, None, dict)
    'plugin_hash of befit.core.plugins returns nothing; it must return a dict'
    """
    if isinstance(returned, wanted):
        return ""
    what = "nothing" if returned is None else f"a value of type {type(returned).__name__}"
    article = "an" if wanted.__name__[0] in "AEIOU" else "a"
    return f"{factory.__qualname__} of {origin(factory)} returns {what}; it must return {article} {wanted.__name__}"


def returned(function: Callable[..., Any], value: Result, wanted: type) -> Result:
    """The value, which a function of a plugin returned. Raises BefitError that names function and file where it is no
    `wanted`."""
    if wrong := not_returned(function, value, wanted):
        raise BefitError(wrong)
    return value


def reason_of(error: BaseException) -> str:
    """What an error says, and where in a plugin it came from: file and line, if the last call in one led to it.

    What befit raises on purpose says all there is to say, and is given as it is.
    """
    place = in_plugin(error)
    return f"{error} ({place})".lstrip() if place else str(error)


def named_reason(error: BaseException) -> str:
    """The kind of an error, and its `reason_of`."""
    return f"{type(error).__name__}: {reason_of(error)}"


def in_plugin(error: BaseException) -> str:
    """File and line of the last call in a plugin that led to an error which nobody raised on purpose; else empty."""
    places = tuple(f"{place}/" for place in _modules)
    for frame in reversed([] if isinstance(error, BefitError) else traceback.extract_tb(error.__traceback__)):
        if frame.filename in _loaded or frame.filename in _modules or frame.filename.startswith(places):
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _load_file(path: Path) -> None:
    """Run a file as a module whose name depends on its path alone, so that a file that changed replaces itself."""
    if path.is_dir():
        raise ConfigError([_a_folder(path)])
    if not path.is_file():
        raise ConfigError(["there is no such file"])
    place, source = str(path), path.read_bytes()
    content = hashlib.sha256(source).hexdigest()
    if _loaded.get(place) == content:
        return
    module = ModuleType(f"befit_plugin_{path.stem}_{hashlib.sha256(place.encode()).hexdigest()[:8]}")
    module.__file__ = place
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__], _loaded[place] = module, content  # first: dataclasses look their module up by name
    try:
        exec(compile(source, place, "exec"), vars(module))  # and not importlib, whose cache would outlive a quick edit
    except BaseException:
        del sys.modules[module.__name__], _loaded[place]
        if before is not None:
            sys.modules[module.__name__] = before
        raise


def _load_module(name: str) -> None:
    if not _MODULE.fullmatch(name):
        raise ConfigError(["is neither a Python file nor the dotted name of a module"])
    _note(import_module(name))


def _note(module: ModuleType) -> None:
    """Remember where a plugin's code is, for `reason_of`."""
    file = getattr(module, "__file__", None)
    if file is not None:
        _modules.add(str(Path(file).parent) if hasattr(module, "__path__") else file)


def _reason(error: BaseException, name: str) -> str:
    """The error with the last line of the plugin itself that led to it."""
    if isinstance(error, ConfigError):
        return "; ".join(error.problems)
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and (name == error.name or name.startswith(f"{error.name}."))
    ):
        if Path(name).is_dir():
            return _a_folder(Path(name))
        return f"Python finds no module {error.name}; install it, or name its file"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    where = f", line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _a_folder(path: Path) -> str:
    files = sorted(path.glob("*.py"))
    return f"is a folder; name a file in it{f', such as {path / files[0].name}' if files else ''}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
