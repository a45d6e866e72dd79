"""A method in words, for `befit explain`: its stages, what travels in each, what it trains and deploys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from befit.adapters.forms import ModuleShape
from befit.adapters.keys import NOTHING
from befit.adapters.layout import ModelShapes
from befit.protocol.client_privacy import unfit_for_clients
from befit.protocol.method import Method, run_stages, trains_in_fleets
from befit.protocol.privacy import unfit_stage
from befit.protocol.stage import Message, Stage


def describe(method: Method) -> dict[str, object]:
    """Stages and what travels in each, in words, for `befit explain`."""
    stages = run_stages(method)
    return {
        "stages": [
            f"{stage.name} ({_kind(stage)}): up {', then '.join(map(str, _replies(stage)))}; down {stage.down}"
            for stage in method.plan()
        ],
        "up": _together(message for stage in stages for message in _replies(stage)),
        "down": _together(stage.down for stage in stages),
        "trained": str(method.trainable()),
        "deployed": str(method.use),
        **_private(method),
        "trains in fleets": f"no: {reason}" if (reason := trains_in_fleets(method)) else "yes",
    }


# A model as good as any, to see which arrays a method would send: only shapes are made of it.
ANY_MODEL = ModelShapes(
    {f"block.{number:02d}.{name}": ModuleShape(4096, 4096) for number in range(100) for name in ("q_proj", "v_proj")},
    {"classifier": ModuleShape(4096, 2, True)},
    hidden=4096,
    last=(4096, 4096),
    linears=200,
    parameters={("embeddings", "weight"): (4096, 4096), ("block.00.q_proj", "weight"): (4096, 4096)},
    outputs=2,
)


def _private(method: Method) -> dict[str, object]:
    """Whether its examples and its clients can be protected, in words."""
    if not any(stage.federated for stage in run_stages(method)):
        return {"protects examples": "nothing leaves a client", "protects clients": "nothing leaves a client"}
    reasons = {"examples": unfit_stage(method), "clients": next(unfit_for_clients(method, [ANY_MODEL]), "")}
    words = {f"protects {what}": f"no: {reason}" if reason else "yes" for what, reason in reasons.items()}
    return {**words, "protects examples": words["protects examples"].replace("yes", "yes, each client alone")}


def _replies(stage: Stage) -> list[Message]:
    """What travels up in the rounds of a stage: one message, or one for each turn."""
    return [stage.reply_in(number + 1) for number in range(max(1, len(stage.turns)))]


def _kind(stage: Stage) -> str:
    return "newcomers" if stage.who == "newcomer" else "federated" if stage.federated else "personal"


def _together(messages: Iterable[Message]) -> str:
    """The arrays of any of the messages, each thing once."""
    words = dict.fromkeys(
        str(replace(message, numbers=())) for message in messages if message.arrays != NOTHING or message.pieces
    )
    return ", ".join(words) or "nothing"
