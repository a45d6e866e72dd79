"""YAML as people mean it: the core types of YAML 1.2, and no key twice.

PyYAML reads `1e-3` as text, `no` (Norwegian, a client's id) as false and `12:30` as 750. Here numbers are numbers,
only `true` and `false` are booleans, and a repeated key is an error and not a silent choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from befit.core.errors import ConfigError

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


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            mark = key_node.start_mark
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key_node.value!r} is not text: write it in quotes", mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes the Unicode line breaks unescaped, and reads them back as spaces, in all styles but this.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & _BREAKS else None)


for _tag, _pattern, _first in _RESOLVERS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), [*_first.replace("\0", ""), ""])
_Dumper.add_representer(str, _represent_text)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str, where: str = "the configuration") -> Any:
    """The value of one YAML document. Raises ConfigError with line and column.

    >>> parse_yaml("{lr: 1e-3, language: no}")
    {'lr': 0.001, 'language': 'no'}
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError([f"{place}{error.problem or error.context}"], where) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"not valid YAML: {error}"], where) from None


def write_yaml(value: Mapping[str, Any]) -> str:
    """A mapping as YAML text that `parse_yaml` reads back unchanged; keys keep their order.

    >>> print(write_yaml({"lr": 1e-05, "text": "1e-3"}), end="")
    lr: 1.0e-05
    text: '1e-3'
    """
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
