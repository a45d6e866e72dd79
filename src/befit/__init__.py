"""befit: bespoke federated fine-tuning. Every client of a federation ends with its own LoRA adapter.

`import befit` is enough for users and for authors of methods. Every name is imported when it is first used, so that
neither `import befit` nor `befit --help` loads torch. What is more special is public in the packages below, each of
which lists its names in `__all__`.
"""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy
from befit.core.version import __version__

if TYPE_CHECKING:
    from befit import (
        adapters,
        cli,
        config,
        core,
        cost,
        data,
        flower,
        merge,
        methods,
        models,
        protocol,
        report,
        runs,
        studies,
        tasks,
        train,
        zoo,
    )
    from befit.adapters.keys import EVERYTHING, NOTHING, Selector, block, factor, module, slot
    from befit.adapters.keys import select as select_state
    from befit.adapters.layout import Layout, Slot, lora, whole
    from befit.adapters.mixers import ByInput, Weighted
    from befit.adapters.state import add, cosine, interpolate, norm, rename, scale, weighted_mean
    from befit.config.experiment import Experiment
    from befit.config.load import load_experiment
    from befit.core.errors import (
        BefitError,
        ConfigError,
        DataError,
        IncompatibleAdapters,
        ModelError,
        NotEnoughReplies,
        NotTrained,
        PayloadMismatch,
        RunError,
    )
    from befit.core.values import ClientInfo, Payload, TensorSpec, Tick, Update
    from befit.data.federation import ClientData, Federation
    from befit.data.registry import benchmark
    from befit.merge.files import merge_checkpoints
    from befit.merge.merge import Merge
    from befit.methods.parts.recipe.branches import MergeBranches, two_branches
    from befit.methods.parts.recipe.personal import Adopt, LocalTraining, Remember
    from befit.methods.parts.recipe.recipe import Recipe
    from befit.methods.parts.recipe.route import Broadcast, LeaveOneOut
    from befit.protocol.mechanism import Gradients
    from befit.protocol.method import Deployment, Method, Needs, Use
    from befit.protocol.registry import build_method, register
    from befit.protocol.site import ServerSite, Site
    from befit.protocol.stage import Exchange, Message, Personal, Stage
    from befit.protocol.work import Work
    from befit.runs.artifacts import predict
    from befit.runs.exporting import export
    from befit.runs.loading import load_federation
    from befit.runs.runner import Run, check, run
    from befit.studies.adapt import Adapted, adapt
    from befit.studies.compare.comparison import Compared, compare
    from befit.studies.select import choose_models as select
    from befit.tasks.registry import register_task
    from befit.train.loop import train as train_client
    from befit.train.loop import training
    from befit.train.passes import Pass
    from befit.train.terms import L2, Distil, Laned, ProductDistance, Term, Tilt

__all__ = [
    "EVERYTHING",
    "L2",
    "NOTHING",
    "Adapted",
    "Adopt",
    "BefitError",
    "Broadcast",
    "ByInput",
    "ClientData",
    "ClientInfo",
    "Compared",
    "ConfigError",
    "DataError",
    "Deployment",
    "Distil",
    "Exchange",
    "Experiment",
    "Federation",
    "Gradients",
    "IncompatibleAdapters",
    "Laned",
    "Layout",
    "LeaveOneOut",
    "LocalTraining",
    "Merge",
    "MergeBranches",
    "Message",
    "Method",
    "ModelError",
    "Needs",
    "NotEnoughReplies",
    "NotTrained",
    "Pass",
    "Payload",
    "PayloadMismatch",
    "Personal",
    "ProductDistance",
    "Recipe",
    "Remember",
    "Run",
    "RunError",
    "Selector",
    "ServerSite",
    "Site",
    "Slot",
    "Stage",
    "TensorSpec",
    "Term",
    "Tick",
    "Tilt",
    "Update",
    "Use",
    "Weighted",
    "Work",
    "__version__",
    "adapt",
    "adapters",
    "add",
    "benchmark",
    "block",
    "build_method",
    "check",
    "cli",
    "compare",
    "config",
    "core",
    "cosine",
    "cost",
    "data",
    "export",
    "factor",
    "flower",
    "interpolate",
    "load_experiment",
    "load_federation",
    "lora",
    "merge",
    "merge_checkpoints",
    "methods",
    "models",
    "module",
    "norm",
    "predict",
    "protocol",
    "register",
    "register_task",
    "rename",
    "report",
    "run",
    "runs",
    "scale",
    "select",
    "select_state",
    "slot",
    "studies",
    "tasks",
    "train",
    "train_client",
    "training",
    "two_branches",
    "weighted_mean",
    "whole",
    "zoo",
]

__getattr__, __dir__ = lazy(__name__, __file__)
