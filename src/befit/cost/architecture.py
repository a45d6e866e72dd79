"""A backbone's shapes without its weights: of public models by name, or of any Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from befit.core.errors import ModelError, did_you_mean
from befit.tasks import get_task, task_names

if TYPE_CHECKING:
    from torch import nn

_FILE = Path(__file__).parent / "architectures.yaml"


@dataclass(frozen=True)
class Architecture:
    """A transformers configuration, what it is used for, and where it came from, for people."""

    name: str
    config: Any
    task: str
    source: str

    def skeleton(self, labels: int = 1) -> nn.Module:
        """The model on the meta device, with a head for so many classes where the task has one.

        Raises ModelError for a configuration that makes no model of this task.
        """
        from befit.models.backbone import build
        from befit.models.heads import check_causal, label_config
        from befit.models.source import reading

        with reading(f"{self.source} cannot be built for {self.task}"):
            check_causal(self.config, self.task, self.source)
            label_config(self.config, self.task, [f"class {index}" for index in range(labels)], self.source)
            return build(self.config, self.task, "float32", self.source).requires_grad_(False).eval()


@cache
def builtin_architectures() -> Mapping[str, Mapping[str, Any]]:
    """What ships, by name: `hub` (checkpoints of these shapes), `task` and `config`. Imports neither torch nor models.

    Their numbers of parameters are those that are published: tests/unit/cost/test_architectures.py has the list.
    """
    from befit.core.yamlfile import parse_yaml

    return parse_yaml(_FILE.read_text(encoding="utf-8"), _FILE.name)


def find_architecture(name: str, task: str | None = None) -> Architecture:
    """The architecture called `name`; the first that matches wins, and no network is asked:

    1. a built-in one, in any case, or the hub id of a checkpoint of its shapes
    2. a `config.json`, or a directory that has one
    3. a model that ships with befit, or `package:NAME/SUB/DIRECTORY`

    `task` overrides what the configuration says of itself. Raises ModelError that says what is known.
    """
    from befit.models.backbone import read_config
    from befit.models.source import find_model
    from befit.zoo import zoo_names

    builtin = builtin_architectures()
    ids = {hub.lower(): architecture for architecture, entry in builtin.items() for hub in entry["hub"]}
    if known_name := name.lower() if name.lower() in builtin else ids.get(name.lower()):
        return _builtin(known_name, task)
    path = Path(name).expanduser()
    if path.is_file():
        directory, source = path, name
    elif path.is_dir() or name in zoo_names() or name.startswith("package:"):
        directory, source = find_model(name, weights=False)
    else:
        raise ModelError(
            f"no architecture is called {name!r}, and no such file or directory exists."
            f"{did_you_mean(name.lower(), [*builtin, *ids])}\n  Known: {', '.join(builtin)}; of any other "
            "model give its config.json, or the directory with it: nothing is fetched"
        )
    config = read_config(directory, source)
    return Architecture(name, config, task or _task_of(config, source), source)


def _builtin(name: str, task: str | None) -> Architecture:
    from transformers import AutoConfig

    entry = builtin_architectures()[name]
    values = {key: value for key, value in entry["config"].items() if key != "model_type"}
    config = AutoConfig.for_model(entry["config"]["model_type"], **values)
    return Architecture(name, config, task or entry["task"], f"the built-in architecture {name}")


def _task_of(config: Any, source: str) -> str:
    """By the class that the checkpoint was saved from, else by what models of this type are for."""
    from transformers.models.auto import modeling_auto as auto

    for saved in config.architectures or ():
        for task in task_names():
            if saved.endswith(get_task(task).auto_class.removeprefix("AutoModel")):
                return task
    kind = config.model_type
    if kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "image-classification"
    decodes = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if decodes and (getattr(config, "is_decoder", False) or kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        return "causal-lm"
    if kind in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return "text-classification"
    raise ModelError(
        f"{source}: a {kind} model is for none of the tasks that befit has; name one of "
        f"{', '.join(task_names())} with --task"
    )
