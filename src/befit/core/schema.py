"""A signature is a schema: plain values from YAML checked against the parameters of a function or dataclass.

Used for the experiment, for methods and for benchmarks, so that a mistake reads the same wherever it is made.
Every problem is collected as one line `path: what is wrong, got value`; nothing is skipped, cast or filled in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

from befit.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Result = TypeVar("Result")
REQUIRED = inspect.Parameter.empty
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Rule:
    """A demand on one value that its type cannot say, written beside it: `rounds: Annotated[int, POSITIVE]`.

    `text` continues "<path>: ". Null is never tested: whether it is allowed is the type's to say. `bounds` says as much
    of it as JSON Schema can.
    """

    holds: Callable[[Any], bool]
    text: str
    bounds: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Called by pydantic where a type that is annotated with this becomes a JSON Schema."""
        return {**handler(core), **self.bounds}


POSITIVE = Rule(lambda value: 0 < value < math.inf, "must be positive", {"exclusiveMinimum": 0})
SHARE = Rule(lambda value: 0 < value <= 1, "must be above 0 and at most 1", {"exclusiveMinimum": 0, "maximum": 1})
_OPEN = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
OPEN_SHARE = Rule(lambda value: 0 < value < 1, "must be above 0 and below 1", _OPEN)


def at_least(least: float) -> Rule:
    return Rule(lambda value: least <= value < math.inf, f"must be {least:g} or more", {"minimum": least})


def between(low: float, high: float) -> Rule:
    bounds = {"minimum": low, "exclusiveMaximum": high}
    return Rule(lambda value: low <= value < high, f"must be at least {low:g} and below {high:g}", bounds)


def within(low: float, high: float) -> Rule:
    bounds = {"minimum": low, "maximum": high}
    return Rule(lambda value: low <= value <= high, f"must be from {low:g} to {high:g}", bounds)


def not_empty(text: str) -> Rule:
    return Rule(lambda value: len(value) > 0, text, {"minItems": 1})


class Mark(Enum):
    """What a value is, where befit treats it differently for that: `base: Annotated[dict | None, Mark.METHOD]`."""

    METHOD = "the block of a method"
    SERVER = "used at the server alone, so it never travels"
    CAP = "an upper limit, so that a larger number makes no more work"
    DRAWN = "how many records are drawn, of which numbers of the method's own leave"
    HELD_OUT = "the share of a client's train records that is held out from training"
    LOOP = "a loop within the other ones of a round"
    PASSES = "how often all train records of a client are gone through"
    TOKENS = "without effect on tasks whose examples are not texts with an answer of several tokens"


@dataclass(frozen=True)
class Parameter:
    """One key of a mapping: its resolved type, its default (or `REQUIRED`), what its docstring says of it, and the
    rule and the marks that its type is annotated with."""

    name: str
    type: Any
    default: Any = REQUIRED
    description: str = ""
    rule: Rule | None = None
    marks: frozenset[Mark] = frozenset()


def parameters_of(factory: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters of a function or dataclass, in order, described by the table of its docstring.

    A line of that table is the parameter's name, two spaces or more, and its description; deeper lines continue it.

    >>> [(p.name, p.default) for p in parameters_of(lambda rank=8: rank)]
    [('rank', 8)]
    """
    factories = {
        field.name: field.default_factory
        for field in getattr(factory, "__dataclass_fields__", {}).values()
        if field.default_factory is not dataclasses.MISSING
    }
    declared = _declared(factory)  # a default that is made anew stays the caller's own
    return tuple(dataclasses.replace(p, default=factories[p.name]()) if p.name in factories else p for p in declared)


@functools.lru_cache(maxsize=1024)
def _declared(factory: Callable[..., Any]) -> tuple[Parameter, ...]:
    """Remembered: a study asks for the same ones in each of its cells."""
    hints = typing.get_type_hints(_annotated(factory), include_extras=True)
    described = _described(inspect.getdoc(factory) or "")
    declared: list[Parameter] = []
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            kind, rule, marks = _apart(hints.get(name, Any))
            declared.append(Parameter(name, kind, parameter.default, described.get(name, ""), rule, marks))
    return tuple(declared)


def _annotated(factory: Callable[..., Any]) -> Any:
    """What has the types of a factory's parameters: of a class its `__init__`, where it is written by hand; of a
    dataclass its fields."""
    if not isinstance(factory, type):
        return factory
    owner = next(kind for kind in factory.__mro__ if "__init__" in vars(kind))
    fields = vars(owner).get("__dataclass_fields__", {})
    generated = fields and inspect.signature(factory).parameters.keys() <= fields.keys()
    return factory if generated or owner is object else owner.__init__


def variant(factory: Callable[..., Result], **fixed: Any) -> Callable[..., Result]:
    """The function with some of its arguments fixed: the others are its parameters, with their docstring's table.

    >>> [parameter.name for parameter in parameters_of(variant(lambda rank=8, alpha=16: rank, alpha=1))]
    ['rank']
    """

    @functools.wraps(factory)
    def build(**values: Any) -> Result:
        return factory(**values, **fixed)

    signature = inspect.signature(factory)
    free = [parameter for name, parameter in signature.parameters.items() if name not in fixed]
    build.__signature__ = signature.replace(parameters=free)  # type: ignore[attr-defined]
    return build


def check_values(
    parameters: Sequence[Parameter], values: Mapping[str, Any], path: str = "", owner: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Values by parameter name, and every problem found.

    path   dotted prefix of the keys, with its last dot ("train.")
    owner  what the keys belong to, for the message about an unknown one ("fedsa")

    Lists become tuples and mappings dataclasses where the type says so. Only keys that were given are returned.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    checked: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in values.items():
        here = f"{path}{key}"
        if key not in by_name:
            belongs = f" for {owner}" if owner else ""
            hint = did_you_mean(str(key), by_name) or f" Known: {', '.join(by_name) or 'none'}"
            problems.append(f"{here}: unknown key{belongs}.{hint}")
            continue
        value, mistakes = _check(by_name[key].type, value, here)
        rule = by_name[key].rule
        if not mistakes and rule is not None and value is not None and not rule.holds(value):
            mistakes = [f"{here}: {rule.text}, got {show(value)}"]
        problems += mistakes
        checked[key] = value
    problems += [
        f"{path}{parameter.name}: is required ({type_words(parameter.type)})"
        for parameter in parameters
        if parameter.default is REQUIRED and parameter.name not in values
    ]
    return checked, problems


def check_fields(value: Any, where: str) -> None:
    """The same for a dataclass that may have been made in Python, called by its `__post_init__`. Raises ConfigError
    with every field that is not as its type and rule ask; `where` is what the dataclass is of, for the message."""
    parameters = parameters_of(type(value))
    if problems := check_values(parameters, {option.name: getattr(value, option.name) for option in parameters})[1]:
        raise ConfigError(problems, where)


def type_words(kind: Any) -> str:
    """A type in words for people.

    >>> type_words(int | None), type_words(Literal["a", "b"]), type_words(tuple[float, float])
    ('a whole number or null', 'one of a, b', 'a list of 2 numbers')
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(part) for part in inner)
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(str(choice) for choice in inner)
    if origin in (list, tuple, Sequence):
        items = _PLURALS.get(inner[0], "values") if inner else "values"
        fixed = len(inner) if origin is tuple and Ellipsis not in inner else None
        return f"a list of {fixed} {items}" if fixed else f"a list of {items}"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(kind):
        return "a mapping"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def plain(value: Any) -> Any:
    """A value as YAML and JSON can hold it: dataclasses as mappings, tuples as lists.

    >>> plain((1, 2.0))
    [1, 2.0]
    """
    kind = type(value)
    if kind in _SCALARS:  # most of all values
        return value
    if dataclasses.is_dataclass(kind):
        return {name: plain(getattr(value, name)) for name in _arguments(kind)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@functools.cache
def _arguments(kind: type) -> tuple[str, ...]:
    """The fields that a dataclass is made with."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def show(value: Any) -> str:
    """A value in a message, short, as YAML writes it: text in double quotes, `true` and not `True`."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _apart(kind: Any) -> tuple[Any, Rule | None, frozenset[Mark]]:
    """A type, and the rule and the marks that it is annotated with."""
    if get_origin(kind) is not typing.Annotated:
        return kind, None, frozenset()
    inner, *notes = get_args(kind)
    rule = next((note for note in notes if isinstance(note, Rule)), None)
    return inner, rule, frozenset(note for note in notes if isinstance(note, Mark))


def _check(kind: Any, value: Any, path: str) -> tuple[Any, list[str]]:
    nested = _dataclass_in(kind)
    if nested is None or isinstance(value, nested):
        return _check_leaf(kind, value, path)
    if value is None and type(None) in get_args(kind):
        return None, []
    if not isinstance(value, Mapping):
        keys = ", ".join(parameter.name for parameter in parameters_of(nested))
        return value, [f"{path}: must be {type_words(kind)}, got {show(value)}; its keys are {keys}"]
    values, problems = check_values(parameters_of(nested), value, f"{path}.", path.split(".")[-1])
    if problems:
        return value, problems
    try:
        return nested(**values), []
    except ConfigError as error:
        return value, [f"{path}.{problem}" for problem in error.problems]
    except ValueError as error:
        return value, [f"{path}: {error}"]


def _check_leaf(kind: Any, value: Any, path: str) -> tuple[Any, list[str]]:
    """Pydantic in strict mode, through JSON: it reads a list as a tuple, but neither "5" nor true as a number."""
    from pydantic import ValidationError

    adapter = _adapter(kind)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = None
    try:
        checked = (
            adapter.validate_python(value, strict=True) if text is None else adapter.validate_json(text, strict=True)
        )
    except ValidationError as error:
        return value, _leaf_problems(kind, value, path, error.errors(include_url=False))
    return checked, []


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """What checks values of a type; making one takes far longer than using it."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind, config=None if dataclasses.is_dataclass(kind) else {"allow_inf_nan": False})


def _leaf_problems(kind: Any, value: Any, path: str, errors: Sequence[Any]) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{path}: must be finite, got {show(value)}"]
    is_union = get_origin(kind) in (Union, types.UnionType)
    mappings = [part for part in get_args(kind) if get_origin(part) in (dict, Mapping)] if is_union else []
    if len(mappings) == 1 and isinstance(value, Mapping):  # say which of its keys is wrong
        return _check_leaf(mappings[0], value, path)[1]
    options = [str(choice) for choice in _literals(kind)]
    if options and isinstance(value, str):
        listed = f"one of {', '.join(options)}" if len(options) > 1 else options[0]
        return [f"{path}: {show(value)} is not {listed}.{did_you_mean(value, options)}".removesuffix(".")]
    inner = [error for error in errors if error["loc"] and not is_union]
    if inner and isinstance(value, (list, tuple, Mapping)) and get_origin(kind) is not tuple:
        return [f"{path}.{'.'.join(map(str, e['loc']))}: {_lower(e['msg'])}, got {show(e['input'])}" for e in inner]
    return [f"{path}: must be {type_words(kind)}, got {show(value)}"]


def _literals(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(choice for part in get_args(kind) for choice in _literals(part))
    return ()


def _dataclass_in(kind: Any) -> Any:
    """The dataclass that a type names, alone or beside None."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    classes = [option for option in options if dataclasses.is_dataclass(option)]
    return classes[0] if len(classes) == 1 and len(options) - len(classes) == (type(None) in options) else None


def _described(doc: str) -> dict[str, str]:
    descriptions: dict[str, str] = {}
    name, column = "", 0
    for line in doc.splitlines():
        if row := re.match(r"(\w+)( {2,})(\S.*)", line):
            name, column = row[1], len(row[1]) + len(row[2])
            descriptions[name] = row[3].strip()
        elif name and line.startswith(" ") and len(line) - len(line.lstrip()) >= min(column, 2):
            descriptions[name] += " " + line.strip()
        else:
            name = ""
    return descriptions


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
