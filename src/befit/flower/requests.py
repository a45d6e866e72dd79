"""Checks of a request from the server, before a site acts on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from befit.config.experiment import Experiment
from befit.core.errors import PayloadMismatch
from befit.core.text import readable
from befit.core.values import Tick
from befit.core.version import __version__
from befit.flower.frame import PROTOCOL
from befit.protocol.method import Method
from befit.protocol.schedule import resolved_stages
from befit.protocol.secure.desk import STEPS

DOES = ("hello", "train", "score", "export", "secure")
MOST_METHODS = 100


def check_request(header: Mapping[str, Any], client: str) -> None:
    """Raise PayloadMismatch, with the reason, unless a header is that of a request to this client."""
    if (header.get("protocol"), header.get("version")) != (PROTOCOL, __version__):
        theirs = f"befit {readable(header.get('version'), 50)} (protocol {readable(header.get('protocol'), 50)})"
        raise PayloadMismatch(
            f"the server has {theirs}, this site befit {__version__} ({PROTOCOL}); install the same version, since "
            "another may come to other numbers"
        )
    if header.get("do") not in DOES:
        raise PayloadMismatch(f"the server asks for {header.get('do')!r}, which this befit does not know")
    if header["do"] != "hello" and header.get("client") != client:
        raise PayloadMismatch(f"the request is for client {header.get('client')}, and this site is {client}")
    for key in ("run", "label"):
        if not is_name(header.get(key)):
            raise PayloadMismatch(f"invalid {key} name {header.get(key)!r}")
    if header["do"] == "hello":
        if not isinstance(header.get("settings"), dict):
            raise PayloadMismatch("the request's settings are no mapping")
        _check_methods(header.get("methods"))
    if header["do"] != "hello" and not isinstance(header.get("scalars"), dict):
        raise PayloadMismatch("the request's numbers are no mapping")
    if header["do"] == "secure" and header.get("step") not in STEPS:
        raise PayloadMismatch(f"the request is for step {header.get('step')!r} of a secure sum, which there is not")
    if header["do"] == "score" and header.get("split") not in ("val", "test"):
        raise PayloadMismatch(f"the request is for a score on {header.get('split')!r}; it may be val or test")


def _check_methods(methods: Any) -> None:
    """Raise PayloadMismatch unless a hello names a block of a method for every label of the run."""
    if not isinstance(methods, dict) or not 0 < len(methods) <= MOST_METHODS:
        raise PayloadMismatch(f"the request's methods are no mapping of 1 to {MOST_METHODS} labels to methods")
    for label, block in methods.items():
        if not is_name(label) or not isinstance(block, dict):
            raise PayloadMismatch(f"invalid label name {label!r}, or its method is no mapping")
        if label.lower().endswith(".json"):
            raise PayloadMismatch(f"invalid label name {label!r}: the site keeps files of such names beside them")
    if len({label.lower() for label in methods}) < len(methods):
        raise PayloadMismatch("invalid label names: two are the same but for case")


def is_name(value: Any) -> bool:
    """Whether the name of a run, or of a method in it, is valid as the name of a folder."""
    return isinstance(value, str) and bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", value))


def tick_of(header: Mapping[str, Any], method: Method, experiment: Experiment) -> Tick:
    """The stage and rounds that a request is for. Raises PayloadMismatch for any not in the configuration:
    a server may not keep a site busy for longer than its own configuration says."""
    time = header.get("at")
    try:
        at = Tick(**time)  # type: ignore[arg-type]
        plan = resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)
        stage = next(planned_stage for planned_stage in plan if planned_stage.name == at.stage)
        if not all(type(number) is int for number in (at.round, at.rounds, at.span, at.seed)):
            raise TypeError
    except (TypeError, StopIteration):
        raise PayloadMismatch(f"unknown stage or round: {time!r}") from None
    rounds = max(stage.rounds or 0, 1)  # a stage of no rounds is scored and exported as if it had one
    if header.get("do") in ("score", "export") and at.rounds == at.round and at.span == 1:
        rounds = min(rounds, max(at.round, 1))  # the run ends there: it is its best round
    if at.seed != experiment.federation.seed:
        raise PayloadMismatch(f"the request has seed {at.seed}, and the run {experiment.federation.seed}")
    if at.rounds != rounds or not 1 <= at.round <= at.last <= rounds or (stage.federated and at.span > 1):
        raise PayloadMismatch(
            f"the request is for rounds {at.round} to {at.last} of {at.rounds} of stage {at.stage}, which has {rounds}"
        )
    return at


def kept_of(header: Mapping[str, Any], method: Method, experiment: Experiment) -> tuple[int, int] | None:
    """The stage and round whose memory is to be kept beside the last one. Raises PayloadMismatch for any that is not in
    the configuration."""
    if (kept := header.get("kept")) is None:
        return None
    plan = resolved_stages(method, experiment.federation.rounds, experiment.limit.rounds)
    numbers = isinstance(kept, list) and len(kept) == 2 and all(type(number) is int for number in kept)
    if not numbers or not 0 <= kept[0] < len(plan) or not 1 <= kept[1] <= (plan[kept[0]].rounds or 0):
        raise PayloadMismatch(f"the request is to keep the state of {readable(repr(kept), 100)}, which is no round")
    return kept[0], kept[1]
