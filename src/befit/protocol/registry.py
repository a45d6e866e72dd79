"""The methods by name. A factory's signature is the schema of its block in a configuration.

    @register("fedsa", paper="arXiv:2410.01463", year=2025, title="FedSA-LoRA")
    def fedsa(rank: int = 8, alpha: float = 16.0) -> Recipe:
        \"\"\"Train both factors, share only A.\"\"\"

Each module of `befit.methods` registers what it defines; they are imported when a name is first asked for. Methods of
your own come from plugins: see `befit.core.plugins`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from befit.core.errors import ConfigError
from befit.core.plugins import in_plugin, not_returned, origin, reason_of
from befit.core.registry import Documented, Registry, check_name
from befit.core.schema import REQUIRED, Parameter, Rule, check_values, plain

if TYPE_CHECKING:
    from befit.protocol.method import Method

Factory = TypeVar("Factory", bound=Callable[..., Any])


@dataclass(frozen=True)
class MethodEntry(Documented):
    """A registered method: where it comes from and how it is made. `factory` is a function or a dataclass.

    paper     "arXiv:<number>" or "openreview.net/forum?id=<id>"; empty where none is followed
    standard  it is plain averaging of adapters, with which the costs of all others are compared
    """

    name: str
    title: str
    paper: str
    year: int | None
    factory: Callable[..., Any]
    standard: bool = False

    @property
    def paper_url(self) -> str:
        """Where the paper is found; empty without one."""
        if self.paper.startswith("arXiv:"):
            return f"https://arxiv.org/abs/{self.paper.removeprefix('arXiv:')}"
        return self.paper and f"https://{self.paper}"


ALONE = "local"  # the method in which every client trains alone
METHODS: Registry[MethodEntry] = Registry("method", ("befit.methods",), "befit.methods")
_Checked = tuple[dict[str, Any], "Method | None", list[str]]
_FOUND: dict[tuple[str, str], _Checked] = {}  # by a method's block and its place
_MOST, _LONGEST = 500, 10_000  # blocks that are kept, and the characters of one: they may come from elsewhere


def register(
    name: str, *, paper: str = "", year: int | None = None, title: str = "", standard: bool = False
) -> Callable[[Factory], Factory]:
    """Enter a factory under `name`; see `MethodEntry`. Raises ValueError where another factory has that name, and
    TypeError for a name that is no text."""
    check_name(name, "register")

    def enter(factory: Factory) -> Factory:
        METHODS.enter(name, factory, MethodEntry(name, title or name, paper, year, factory, standard))
        _FOUND.clear()
        return factory

    return enter


def method_names() -> list[str]:
    """Names of all methods, sorted."""
    return METHODS.names()


def standard_method() -> str:
    """Name of the method that costs are compared with."""
    METHODS.load()
    return next(entry.name for entry in METHODS.values() if entry.standard)


def get_method(name: str, path: str = "method.name") -> MethodEntry:
    """The entry of one method. Raises ConfigError with a suggestion; `path` is the key that holds the name."""
    return METHODS.find(name, path)


def check_method(
    config: str | Mapping[str, Any], path: str = "method"
) -> tuple[dict[str, Any], Method | None, list[str]]:
    """Plain form with all defaults filled in, the method (None if there are problems), and every problem found.

    `path` is where the block stands, for the messages. A default that YAML cannot hold is left out of the plain form.

    A study asks the same for each of its thousands of cells, so what was found is kept: methods are frozen values.
    """
    config = {"name": config} if isinstance(config, str) else dict(config)
    key = repr(config), path
    if not _writable(config) or len(key[0]) > _LONGEST:
        return _checked(config, path)
    if key not in _FOUND:
        found = _checked(deepcopy(config), path)
        if len(_FOUND) >= _MOST:
            _FOUND.clear()
        _FOUND[key] = found
    resolved, method, problems = _FOUND[key]
    return deepcopy(resolved), method, [*problems]


def _checked(config: dict[str, Any], path: str) -> _Checked:
    name = config.get("name")
    if not isinstance(name, str):
        return config, None, [f"{path}.name: is required, one of {', '.join(method_names())}"]
    try:
        entry = get_method(name, f"{path}.name")
    except ConfigError as error:
        return config, None, list(error.problems)
    options = {key: value for key, value in config.items() if key != "name"}
    ruled = [replace(option, rule=option.rule or _RULES.get(option.name)) for option in entry.parameters]
    arguments, problems = check_values(ruled, options, f"{path}.", name)
    defaults = {option.name: plain(option.default) for option in entry.parameters if _writable(plain(option.default))}
    blocks = {key: value for key, value in arguments.items() if is_dataclass(value)}  # filled in as well
    resolved = {"name": name, **defaults, **plain({**options, **blocks})}
    if problems:  # all mistakes at once: those of the other arguments too, with defaults in place of the wrong ones
        wrong = {problem.removeprefix(f"{path}.").split(":")[0].split(".")[0] for problem in problems}
        right = {key: value for key, value in arguments.items() if key not in wrong}
        about = tuple(f"{path}.{key}{end}" for key in right for end in (":", "."))
        others = (problem for problem in _make(entry, right, path)[1] if problem.startswith(about))
        return resolved, None, [*problems, *others]
    return resolved, *_make(entry, arguments, path)


def _make(entry: MethodEntry, arguments: Mapping[str, Any], path: str) -> tuple[Method | None, list[str]]:
    """The method, or why it cannot be. Arguments that are missing have their defaults; one without refuses nothing."""
    from befit.protocol.method import Method, malformed

    if any(option.default is REQUIRED and option.name not in arguments for option in entry.parameters):
        return None, []
    try:
        made = entry.factory(**arguments)
    except ConfigError as error:
        return None, [_placed(problem, path, entry.parameters) for problem in error.problems]
    except ValueError as error:  # a value that the method itself refuses, such as a rank of 0
        return None, [_placed(reason_of(error), path, entry.parameters)]
    except (Exception, SystemExit) as error:
        if in_plugin(error) or origin(entry.factory).startswith("befit."):
            raise
        return None, [f"{path}: {type(error).__name__}: {error} ({origin(entry.factory)})"]
    wrong = not_returned(entry.factory, made, Method) or malformed(made)
    return (None, [f"{path}: {wrong}"]) if wrong else (made, [])


# What the arguments of these names are in every method that does not say otherwise.
_RULES = {
    "rank": Rule(lambda value: not isinstance(value, int) or value >= 1, "must be 1 or more"),
    "alpha": Rule(lambda value: not isinstance(value, (int, float)) or 0 < value < math.inf, "must be positive"),
}


def build_method(config: str | Mapping[str, Any]) -> Method:
    """The method that a configuration block describes. Raises ConfigError with every problem at once."""
    _, method, problems = check_method(config)
    if method is None:
        raise ConfigError(problems, "the method")
    return method


def _placed(problem: str, path: str, parameters: Sequence[Parameter]) -> str:
    """A factory's problem with the path of the key that it begins with (`samples: …`, `merge.rank: …`)."""
    key = problem.split(":", 1)[0]
    about = key.split(".", 1)[0] in {option.name for option in parameters}
    return f"{path}{'.' if about else ': '}{problem}"


def _writable(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _writable(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_writable(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
