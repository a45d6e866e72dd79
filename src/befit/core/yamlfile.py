"""YAML as people mean it: the core types of YAML 1.2, no key twice, and nothing that takes long to read.

PyYAML reads `1e-3` as text, `no` (Norwegian, a client's id) as false and `12:30` as 750. Here numbers are numbers,
only `true` and `false` are booleans, and a repeated key is an error and not a silent choice. A file is refused before
it is long to read: by its length, by its depth, and by the number of its values, each of them counted wherever an alias
repeats it, since nine lines of nine aliases each stand for 9^9 values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser  # pyright: ignore[reportAttributeAccessIssue]
from yaml.resolver import Resolver

from befit.core.errors import ConfigError
from befit.core.jsonfile import MOST_LEVELS, whole_number

MOST_CHARACTERS, MOST_VALUES = 1_000_000, 30_000  # of a document, about a second of PyYAML each
_LONGEST = 200  # of what an error quotes
_TOO_DEEP = f"is nested more than {MOST_LEVELS} levels deep; make it flatter"

_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)
_BREAKS = set("\r\x85\u2028\u2029\ufeff")


class _Loader(Composer, CParser, SafeConstructor, Resolver):
    """libyaml's parser, of which the wheels of PyYAML have one for every system, below the rules of this module."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        for part in (Composer, SafeConstructor, Resolver):
            part.__init__(self)
        self._level = self._values = 0
        self._sizes: dict[str, int] = {}  # of what an anchor names, with all aliases in it; known once it has been read

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._count(event, self._sizes.get(event.anchor, 0))
            if event.anchor in self.anchors and event.anchor not in self._sizes:
                raise _refusal(event, f"the alias *{event.anchor} stands within what it names; write the value out")
            return super().compose_node(parent, index)
        if event.tag is not None:
            raise _refusal(event, f"the tag {event.tag} is not read here; write the value without it, text in quotes")
        if event.anchor in self.anchors:
            raise _refusal(event, f"the anchor &{event.anchor} names two values; give one another name")
        before = self._values
        self._count(event, 1)
        self._level += 1
        if self._level > MOST_LEVELS:
            raise _refusal(event, _TOO_DEEP)
        node = super().compose_node(parent, index)
        self._level -= 1
        if event.anchor is not None:
            self._sizes[event.anchor] = self._values - before
        return node

    def _count(self, event: yaml.Event, more: int) -> None:
        self._values += more
        if self._values > MOST_VALUES:
            raise _refusal(
                event, f"more than {MOST_VALUES} values, those that aliases repeat counted each time; use fewer"
            )


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _refusal(place: Any, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


def _no_text(character: str) -> str:
    return f"holds \\u{ord(character):04x}, which is no text; remove it"


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else f"of a {key_node.id}"
            raise _refusal(key_node, f"the key {shown} is not text: write it in quotes")
        if key in seen:
            raise _refusal(key_node, f"the key {key!r} appears twice")
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    if "\0" in node.value:
        raise _refusal(node, _no_text("\0"))
    return node.value


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    try:
        return whole_number(node.value)
    except ValueError as error:
        raise _refusal(node, str(error)) from None


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes the Unicode line breaks unescaped, and reads them back as spaces, in all styles but this.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & _BREAKS else None)


for _tag, _pattern, _first in _RESOLVERS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [*_first.replace("\0", ""), ""])
_Dumper.add_representer(str, _represent_text)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_yaml(path: Path) -> Any:
    """The value of a file. Raises ConfigError that names it, OSError where it cannot be opened."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ConfigError([f"cannot be read as UTF-8 text: {error}; save it as UTF-8"], str(path)) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str = "the configuration") -> Any:
    """The value of one YAML document. Raises ConfigError with line and column.

    >>> parse_yaml("{lr: 1e-3, language: no}")
    {'lr': 0.001, 'language': 'no'}
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError([f"has more than {MOST_CHARACTERS} characters; data belongs into files of its own"], where)
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = str(error.problem or error.context)
        if mark and "cannot start any token" in problem:
            wrong = text.splitlines()[mark.line][mark.column]
            problem = (
                "a tab, where YAML takes blanks alone" if wrong == "\t" else f"write what starts with {wrong} in quotes"
            )
        elif "maximum nesting depth" in problem:  # libyaml's own bound, where it reads further ahead
            problem = _TOO_DEEP
        raise ConfigError([f"{place}{problem[:_LONGEST]}{'…' * (len(problem) > _LONGEST)}"], where) from None
    except yaml.reader.ReaderError as error:  # whose position is in bytes
        line = text.encode()[: error.position].count(b"\n") + 1
        raise ConfigError([f"line {line}: {_no_text(chr(error.character))}"], where) from None
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise ConfigError([f"line {line}: {_no_text(text[error.start])}"], where) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError([f"not valid YAML: {error}"], where) from None


def write_yaml(value: Mapping[str, Any]) -> str:
    """A mapping as YAML text that `parse_yaml` reads back unchanged; keys keep their order.

    >>> print(write_yaml({"lr": 1e-05, "text": "1e-3"}), end="")
    lr: 1.0e-05
    text: '1e-3'
    """
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
