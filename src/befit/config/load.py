"""An experiment from a YAML file, a mapping or another experiment, with overrides on top."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment, to_dict
from befit.config.overrides import apply_overrides
from befit.config.parse import parse_experiment
from befit.core.errors import ConfigError
from befit.core.plugins import resolve_plugins
from befit.core.schema import plain, show
from befit.core.text import looked_from
from befit.core.yamlfile import read_yaml
from befit.protocol.registry import ALONE

# Where the folders configs and studies are: in an installation, or in the clone that an editable one is of.
_SHIPPED = (Path(__file__).parents[1] / "shipped", Path(__file__).parents[3])
_FOLDERS = ("configs", "studies")


def load_experiment(
    source: Path | str | Mapping[str, Any] | Experiment, overrides: Sequence[str] = (), plugins: Sequence[str] = ()
) -> Experiment:
    """An experiment from a YAML file, a mapping or another experiment, with overrides `path.to.key=value` on top.

    Values of overrides are YAML. Relative paths of data, models and plugins count from the configuration's folder, or
    from the current one where there is no file; those of `plugins`, which come before the configuration's own, from the
    current one. Raises ConfigError that lists every problem.
    """
    values, folder, where, name = read_source(source)
    if names_runs(values):
        path = source if isinstance(source, (str, Path)) else "STUDY"
        raise ConfigError([f"this is a study, which names runs to compare: befit compare {path}"], where)
    return experiment_from(values, folder, where, name, overrides, plugins)


def experiment_from(
    values: dict[str, Any],
    folder: Path,
    where: str,
    name: str,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> Experiment:
    """What `load_experiment` makes of what `read_source` has read."""
    values.setdefault("baselines", [ALONE])
    problems = apply_overrides(values, overrides)
    add_plugins(values, plugins)
    values.setdefault("name", name or _default_name(values))
    experiment, mistakes = parse_experiment(values, folder)
    if problems or mistakes or experiment is None:
        raise ConfigError([*problems, *mistakes], where)
    return experiment


def add_plugins(values: dict[str, Any], plugins: Sequence[str]) -> None:
    """Put plugins, whose paths count from the current folder, before those that a configuration or study names."""
    listed = values.get("plugins")
    if plugins and (listed is None or isinstance(listed, list)):  # anything else is refused when the values are checked
        values["plugins"] = [*resolve_plugins(plugins, Path.cwd()), *(listed or ())]


def names_runs(values: Mapping[str, Any]) -> bool:
    """Whether these are a study's keys and not a configuration's."""
    return bool({"study", "runs", "grids"} & values.keys())


def read_source(source: Path | str | Mapping[str, Any] | Experiment) -> tuple[dict[str, Any], Path, str, str]:
    """Values, the folder that relative paths count from, the source in words, and a name for the run."""
    if isinstance(source, Experiment):
        return to_dict(source), Path.cwd(), f"the experiment {source.name}", source.name
    if isinstance(source, Mapping):
        return plain(source), Path.cwd(), "the configuration", ""
    path = Path(source)
    if not path.exists() and path.parts[:1] and path.parts[0] in _FOLDERS:
        path = next((place / path for place in _SHIPPED if (place / path).is_file()), path)
    try:
        values = read_yaml(path)
    except FileNotFoundError:
        raise ConfigError([f"there is no file {path}{looked_from(path)}"], "the command") from None
    except IsADirectoryError:
        raise ConfigError([f"{path} is a folder: name the configuration file in it"], "the command") from None
    except OSError as error:
        raise ConfigError([f"cannot be read: {error}"], str(path)) from error
    if not isinstance(values, dict):
        what = "it is empty" if values is None else f"got {show(values)}"
        raise ConfigError([f"must be a mapping of keys to values; {what}"], str(path))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip(".-")[:100]  # a file may have any name, a run may not
    return values, path.resolve().parent, str(path), name


def _default_name(values: Mapping[str, Any]) -> str:
    def first(block: Any) -> Any:
        return block.get("name") if isinstance(block, Mapping) else block

    parts = (first(values.get("benchmark")), first(values.get("method")))
    return "-".join(part for part in parts if isinstance(part, str)) or "run"
