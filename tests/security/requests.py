"""Hostile requests to a site, as data: what a server may send, and what has to come of it.

A case is a change of an honest request, so that it can be played against a service in this process or over a network:
`frame` makes the bytes, `HONEST` the experiment of the run that goes before. No case may change what the site keeps,
make it work for long, or be answered with anything but a refusal that holds `reason`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from befit.config.experiment import Experiment, run_names
from befit.config.load import load_experiment
from befit.core.values import State
from befit.flower.engine import ask
from befit.flower.policy import method_of, settings_of

RUN = "honest"
HONEST: dict[str, Any] = {
    "name": "honest",
    "benchmark": {"name": "digits", "clients": 2},
    "model": {"id": "digits-vit"},
    "method": "ditto",
    "baselines": ["local", "fedit"],
    "train": {"max_steps": 2},
    "federation": {"rounds": 3},
    "engine": {"kind": "flower"},
}
CLIENT = "client-00"
SITE: dict[str, Any] = {"client": CLIENT, "models": {"digits-vit": "digits-vit"}, "benchmarks": ["digits"]}

Change = Mapping[str, Any]
GONE = object()  # as a value: the key is left out


@dataclass(frozen=True)
class Case:
    """One hostile request.

    name    what it tries
    reason  what the refusal has to say; empty where the text is withheld
    do      hello, train, score or export
    change  dotted paths in the header of the honest request, and their values
    label   the method of the run that it is for
    arrays  what becomes of the honest download
    """

    name: str
    reason: str
    do: str = "hello"
    change: Change = field(default_factory=dict[str, Any])
    label: str = "ditto"
    arrays: Callable[[State], State] = lambda honest: honest


def honest() -> Experiment:
    return load_experiment(HONEST)


def header_of(experiment: Experiment, do: str, label: str = "ditto", run: str = RUN, client: str = CLIENT) -> Change:
    """What an honest server says in a request of the first round of a run."""
    blocks = [method_of(block) for block in (experiment.method, *experiment.baselines)]
    methods = dict(zip(run_names(experiment), blocks, strict=True))
    stage = "local" if label == "local" else "federate"
    rounds = experiment.federation.rounds
    at = {"stage": stage, "round": 1, "rounds": rounds, "seed": experiment.federation.seed, "span": 1}
    common = {"run": run, "settings": settings_of(experiment)}
    if do == "hello":
        return {**common, "label": "hello", "methods": methods}
    split = {"split": "test"} if do == "score" else {}
    return {**common, "label": label, "method": methods[label], "client": client, "at": at, "scalars": {}, **split}


def changed(header: Any, change: Change) -> Any:
    """A header with other values at dotted paths."""
    for path, value in change.items():
        header = _put(header, path.split("."), value)
    return header


def _put(value: Any, path: list[str], new: Any) -> Any:
    first, *rest = path
    inner = value if isinstance(value, Mapping) else {}
    if rest:
        return {**inner, first: _put(inner.get(first), rest, new)}
    return {key: one for key, one in {**inner, first: new}.items() if one is not GONE}


def frame(case: Case, download: State) -> bytes:
    """The case as bytes. A hello is of a run of its own, unless the case says another."""
    header = header_of(honest(), case.do, case.label, run="hostile" if case.do == "hello" else RUN)
    header = changed(header, case.change)
    arrays = {} if case.do == "hello" or case.label == "local" else dict(download)
    return ask(header.pop("do", case.do), header, case.arrays(arrays))


def _setting(path: str, value: Any, reason: str, name: str = "") -> Case:
    return Case(name or f"sets {path} to {str(value)[:40]}", reason, change={f"settings.{path}": value})


def _method(block: Any, reason: str, name: str) -> Case:
    return Case(name, reason, change={"methods.ditto": block})


def _personal(honest: State) -> State:
    return {**honest, **{key.replace("shared/", "personal/"): value + 1 for key, value in honest.items()}}


def _renamed(name: str) -> Callable[[State], State]:
    def rename(honest: State) -> State:
        return {**honest, name: torch.ones(2, 2)}

    return rename


def _first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    def with_first(honest: State) -> State:
        return {**honest, min(honest): change(honest[min(honest)])}

    return with_first


PRIVATE: dict[str, Any] = {"unit": "example", "epsilon": 8.0, "delta": 1e-5}
_CLIP = "privacy.clip: must be from 1e-6 to 1e6"
_AT_SITE = "is for the site to say"


def _family(model: str, **settings: Any) -> dict[str, Any]:
    return {"clients": [CLIENT], "model": {"id": model, **settings}}


_MAY_NOT = "the server may not set it"
LIES_BEFORE: list[Case] = [
    # Places: a path, an address, a device, a package, other clients.
    _setting("model.id", "/etc/passwd", "is not among the site's models"),
    _setting("model.id", "evil/repository", "is not among the site's models"),
    _setting("model.id", "../../secret", "is not among the site's models"),
    _setting("model.id", "https://evil.example/model", "is not among the site's models"),
    _setting("model.id", ["digits-vit"], "is not among the site's models"),
    _setting("model.revision", "refs/pr/1", "is not the one that the site's file lists"),
    _setting("model.device", "cuda:7", _AT_SITE),
    _setting("engine.workers", 64, _MAY_NOT),
    _setting("plugins", ["evil.py"], "a site loads those of its own file"),
    _setting("data.clients", {CLIENT: "/etc"}, _AT_SITE),
    _setting("data.newcomers", "/etc", _MAY_NOT),
    _setting("data.public", "/etc/passwd", _MAY_NOT),
    _setting("benchmark.root", "/home", _AT_SITE),
    _setting("benchmark.hub", True, _AT_SITE),
    _setting("benchmark.scenario", "/etc/passwd", _AT_SITE),
    _setting("benchmark.tasks", ["../../x"], _AT_SITE),
    _setting("benchmark.public", "../x.json", _AT_SITE),
    _setting("benchmark.revisions", {"a/b": "evil"}, _AT_SITE),
    _setting("benchmark.name", "sni-10", "is not among the site's benchmarks"),
    _setting("families", {"x": {"clients": [CLIENT]}}, "families.x: is no mapping of clients and a model"),
    _setting("families", {"x": {"clients": CLIENT, "model": {}}}, "families.x.clients: is no list of clients"),
    _setting("families", {"x": _family("evil/repository")}, "model.id: evil/repository is not", "a family of another"),
    _setting("families", {key: _family("digits-vit") for key in "xy"}, f"client {CLIENT} is in 2", "two families"),
    _setting("families", {"x": _family("digits-vit", max_length=10**6)}, "(limits.max_length)", "a long family"),
    _setting("common_model", {"id": "evil/repository"}, "common_model.id: evil/repository is not among"),
    _setting("common_model", {"id": "digits-vit", "max_length": 10**6}, "(limits.max_length)"),
    _setting("trackers", {"kind": "wandb"}, _MAY_NOT),
    _setting("checkpoint.every_s", 0, _MAY_NOT),
    _setting("evaluate.by", "ssn", _MAY_NOT),
    _setting("evaluate.others", "always", _MAY_NOT),
    _setting("federation.cohort", 1, _MAY_NOT),
    _setting("__class__", {}, _MAY_NOT),
    _setting("wire.dtype", "object", "is not one of"),
    _setting("wire.top_k", 0.9, "must be above 0 and at most 0.5"),
    _setting("data", {"task": "image-classification"}, "not both", name="asks for a benchmark and for data"),
    # Amounts: too little behind what leaves, or too much work.
    _setting("limit.records", 1, "limits.min_records"),
    _setting("train.batch_size", 1, "limits.min_batch"),
    Case("one step of two records", "limits.min_records", change={"settings.train": {"max_steps": 1, "batch_size": 2}}),
    Case(
        "a stream that brings a few records at a time",
        "an update would be of",
        change={"settings.stream.kind": "static", "settings.federation.rounds": 400},
    ),
    _setting("train.max_steps", 10**12, "limits.max_steps"),
    _setting("train.batch_size", 10**9, "limits.max_batch"),
    _setting("evaluate.batch_size", 10**9, "limits.max_batch"),
    _setting("evaluate.max_new_tokens", 10**9, "limits.max_length"),
    _setting("model.max_length", 10**12, "limits.max_length"),
    _setting("federation.rounds", 10**12, "limits.max_rounds"),
    _setting("benchmark.clients", 10**6 + 1, "are too much for a trial"),
    _setting("train.lr", float("inf"), "train.lr"),
    _setting("train.max_steps", True, "train.max_steps"),
    # A clip, and so noise, that is nothing beside the gradients of a download as small.
    *(_setting("privacy", PRIVATE | {"clip": clip}, _CLIP, f"clips at {clip}") for clip in (1e-30, 1e-320, 1e308)),
    _setting("adapter.targets", ["q_proj"] * 10_001, "has 10001 entries"),
    _method({"name": "fedit", "rank": 513}, "limits.max_rank", "a rank beyond the limit"),
    _method({"name": "fedit", "rank": 10**9}, "limits.max_rank", "a rank of a thousand million"),
    _method({"name": "potara", "rounds_local": 10**9}, "limits.max_rounds", "a stage without end"),
    _method({"name": "lora", "epochs": 10**9}, "limits.max_steps", "epochs without end"),
    _method(
        {"name": "fedp2eft", "generator": {"steps": 10**9}},
        "method.generator.steps: 1000000000 is more",
        "a generator's steps without end",
    ),
    _method({"name": "lora", "base": {"name": "fedit", "rounds": 10**9}}, "limits.max_rounds", "a base without end"),
    _method(
        {"name": "lora", "base": {"name": "fedit", "train": {"batch_size": 1}}},
        "method.base.train.batch_size: 1 is less",
        "a base that trains on one record at a time",
    ),
    _method({"name": "hetlora", "rank": 10**9, "ranks": {"*": 10**9}}, "limits.max", "ranks of clients without end"),
    _method(
        {"name": "hetlora", "ranks": {f"client-{number}": 2 for number in range(10_001)}},
        "method.ranks: has 10001 entries",
        "ranks of ten thousand clients and one",
    ),
    # What would leave that the site keeps to itself.
    _method({"name": "ditto", "legacy_average_personal": True}, "list that slot under shares", "the personal adapter"),
    _method({"name": "guidance"}, "does not list that slot under shares", "an adapter that the server only takes"),
    _method({"name": "rela"}, "sends what is in slot sketch", "gradients of a few records"),
    _method({"name": "fedalt"}, "does not list that slot under shares", "an adapter for the others' mean"),
    _method(
        {"name": "fedp2eft", "base": {"name": "ditto", "legacy_average_personal": True}},
        "does not list that slot under shares",
        "the personal adapter of a base",
    ),
    # Code and text in a method.
    _method({"name": "os.system"}, "method.name", "a method that is code"),
    _method({"name": "../../x"}, "method.name", "a method that is a path"),
    _method({"name": ["fedit"]}, "method.name", "a method of no name"),
    _method({"name": "fedmosaic", "align": {"folder": "/etc"}}, "takes any text", "a folder of an alignment"),
    _method({"name": "fedp2eft", "limits": {"*": {"x": "/etc"}}}, "takes any text", "a mapping of anything"),
    _method({"name": "fedit", "__init__": {}}, "unknown key", "an argument that is none"),
    _method("fedit", "its method is no mapping", "a method that is a text"),
    # A hello that is none.
    Case("no methods", "no mapping of 1 to 100", change={"methods": GONE}),
    Case("methods as a list", "no mapping of 1 to 100", change={"methods": [{"name": "fedit"}]}),
    Case("101 methods", "no mapping of 1 to 100", change={"methods": {f"m{n}": {"name": "fedit"} for n in range(101)}}),
    Case("a label that is a path", "invalid label name", change={"methods": {"../../x": {"name": "fedit"}}}),
    Case(
        "a label that is the site's own file", "keeps files of", change={"methods": {"agreed.json": {"name": "fedit"}}}
    ),
    Case("the same in capitals", "keeps files of", change={"methods": {"Chosen.JSON": {"name": "fedit"}}}),
    Case("two labels of one folder", "but for case", change={"methods": {n: {"name": "fedit"} for n in ("a", "A")}}),
    Case("settings that are a list", "settings are no mapping", change={"settings": []}),
    Case("settings without blocks", "are not mappings", change={"settings": {"model": "digits-vit"}}),
    Case("a run that is a path", "invalid run name", change={"run": "../../x"}),
    Case("a run of two hundred letters", "invalid run name", change={"run": "r" * 200}),
    Case("an older protocol", "(protocol 1), this site befit", change={"protocol": 1}),
    Case("another version", "the server has befit 0.0.9 (protocol", change={"version": "0.0.9"}),
    Case("no version", "install the same version", change={"version": None}),
    Case("something else to do", "asks for 'shell'", change={"do": "shell"}),
]
LIES_LATER: list[Case] = [
    # Another run than the one that began.
    Case("a run without a hello", "has not begun at this site", "train", {"run": "another"}),
    Case("a score of a run without a hello", "has not begun at this site", "score", {"run": "another"}),
    Case("an export of a run without a hello", "has not begun at this site", "export", {"run": "another"}),
    Case("a label that no hello named", "no method of the label", "train", {"label": "more"}),
    Case("the method of another label", "methods.ditto.name", "train", {"method": {"name": "local"}}),
    Case("a switch of an argument", "legacy_average_personal", "train", {"method.legacy_average_personal": True}),
    Case("a switch of a number", "methods.ditto.mu", "train", {"method.mu": 1e9}),
    Case("another rate", "train.lr is 1e-30 and was", "train", {"settings.train.lr": 1e-30}),
    Case("fewer records", "limit.records is 1 and was", "train", {"settings.limit.records": 1}),
    Case("another batch", "train.batch_size is 1 and was", "train", {"settings.train.batch_size": 1}),
    Case("another wire", "wire.dtype", "train", {"settings.wire.dtype": "bfloat16"}),
    Case("another seed", "federation.seed is 7 and was 0", "train", {"settings.federation.seed": 7}),
    Case("another seed of the time", "the request has seed 7", "train", {"at.seed": 7}),
    Case("a block of settings more", "data.columns.label", "train", {"settings.data.columns": {"label": "ssn"}}),
    Case("a block of settings less", "wire.dtype is not given", "train", {"settings.wire": GONE}),
    Case("no settings", "began with other settings", "train", {"settings": GONE}),
    Case("settings that are a text", "began with other settings", "score", {"settings": "x"}),
    Case("a hello with other settings", "train.lr is 1.0", "hello", {"run": RUN, "settings.train.lr": 1.0}),
    Case("a hello with another method", "methods.fedit.rank", "hello", {"run": RUN, "methods.fedit.rank": 4}),
    Case("a hello with a method more", "methods.more.name", "hello", {"run": RUN, "methods.more": {"name": "fedit"}}),
    Case("a hello with a method less", "methods.fedit.name", "hello", {"run": RUN, "methods.fedit": GONE}),
    # Arrays that nobody declared.
    Case("a personal adapter for ditto", "does not declare as a download", "train", arrays=_personal),
    Case(
        "a personal adapter for local",
        "does not declare",
        "train",
        {},
        "local",
        _renamed("personal/x/A"),
    ),
    Case("a shared adapter for local", "does not declare", "train", {}, "local", _renamed("shared/x/A")),
    Case("a personal adapter for a score", "does not declare", "score", arrays=_personal),
    Case("a personal adapter for an export", "does not declare", "export", arrays=_personal),
    Case("a personal adapter for fedit", "does not declare", "train", {}, "fedit", _personal),
    Case("a gate", "does not declare", "train", arrays=_renamed("gate/x/G")),
    Case("a name that is a path", "does not declare", "train", arrays=_renamed("../../x")),
    Case("a part of a memory", "does not declare", "train", arrays=_renamed("optimiser@personal/x/A")),
    Case("another shape", "with shape", "train", arrays=_first(lambda value: torch.zeros(3))),
    Case("a transposed factor", "with shape", "train", arrays=_first(lambda value: value.T.contiguous())),
    Case("a huge array", "with shape", "train", arrays=_first(lambda value: torch.zeros(2**20))),
    Case("whole numbers", "int64", "train", arrays=_first(lambda value: value.long())),
    Case("truth values", "bool", "train", arrays=_first(lambda value: value.bool())),
    Case("what is no number", "not finite", "train", arrays=_first(lambda value: value * float("nan"))),
    Case("what is infinite", "not finite", "score", arrays=_first(lambda value: value + float("inf"))),
    Case("a number that is not declared", "the plain number 'stopped'", "train", {"scalars": {"stopped": 1}}),
    Case("a number of a part", "the plain number", "train", {"scalars": {"base@round": 1}}),
    Case("a number that is a mapping", "it has to be a number", "train", {"scalars": {"a": {"b": 1}}}),
    Case("numbers that are a list", "numbers are no mapping", "train", {"scalars": [1]}),
    # Times that the run does not have.
    Case("another stage", "unknown stage or round", "train", {"at.stage": "local"}),
    Case("a stage that is a path", "unknown stage or round", "score", {"at.stage": "../x"}),
    Case("round 0", "for rounds 0 to 0", "train", {"at.round": 0}),
    Case("a round after the last", "for rounds 4 to 4", "train", {"at.round": 4}),
    Case("rounds without end", "which has 3", "train", {"at.rounds": 10**9}),
    Case("all rounds at once", "for rounds 1 to 3 of 3", "train", {"at.span": 3}),
    Case("a round that is a text", "unknown stage or round", "train", {"at.round": "1"}),
    Case("a round that is true", "unknown stage or round", "train", {"at.round": True}),
    Case("a time with more in it", "unknown stage or round", "train", {"at.extra": 1}),
    Case("no time", "unknown stage or round", "export", {"at": GONE}),
    Case("a score of the training data", "a score on 'train'", "score", {"split": "train"}),
    Case("a score of a path", "a score on '../x'", "score", {"split": "../x"}),
    # Somebody else's request.
    Case("another client's", "is for client client-01", "train", {"client": "client-01"}),
    Case("nobody's", "is for client None", "score", {"client": GONE}),
    Case("a label that is a path", "invalid label name", "train", {"label": "../../x"}),
    Case("a run that is a path", "invalid run name", "export", {"run": "a/b"}),
]
CASES = [*LIES_BEFORE, *LIES_LATER]
