"""Which clients take part, with which family's model, and what of an experiment cannot work for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from befit.core.errors import ConfigError, DataError, did_you_mean, listed
from befit.core.names import id_problems
from befit.core.schema import show
from befit.core.text import first_of
from befit.data.federation import ClientData, Federation
from befit.protocol.check import client_hint
from befit.protocol.context import Context, Problem
from befit.protocol.mechanism import Privacy
from befit.protocol.method import trained_alone
from befit.protocol.registry import build_method
from befit.tasks.base import Record, record_name

if TYPE_CHECKING:
    from befit.adapters.layout import ModelShapes
    from befit.config.experiment import EvaluateSettings, Experiment

OWN_MODEL = "model"
MOST_VALUES = 100


def context_of(
    experiment: Experiment,
    federation: Federation,
    families: Mapping[str, str],
    shapes: Mapping[str, ModelShapes],
) -> Context:
    """What methods are to run on, see `befit.protocol.check`."""
    settings = experiment.federation
    return Context(
        federation,
        families,
        experiment.train,
        shapes,
        experiment.guard,
        settings.cohort,
        settings.max_weight,
        experiment.wire,
        settings.secure_sums,
        privacy_of(experiment),
        settings.asynchronous,
        experiment.adapter.start is not None,
        streams=experiment.stream.kind != "none",
    )


def privacy_of(experiment: Experiment) -> Privacy | None:
    """What the configuration protects; None where it protects nothing."""
    if experiment.privacy.unit == "none":
        return None
    return Privacy(experiment.privacy, experiment.federation.rounds, experiment.limit.rounds)


def family_settings(
    experiment: Experiment, clients: Mapping[str, Mapping[str, str]], whole: bool = True
) -> dict[str, str]:
    """The family of every client, by the configuration's patterns; "model" for those that none names.

    clients  what is known of each client, by its id
    whole    these are all clients, of whom every pattern has to fit one
    Raises ConfigError for a client in two families and for a pattern that fits nobody.
    """
    family_of: dict[str, str] = {}
    problems: list[str] = []
    for client, info in clients.items():
        named = [
            name
            for name, family in experiment.families.items()
            if any(_fits(pattern, client, info) for pattern in family.clients)
        ]
        if len(named) > 1:
            problems.append(f"families: client {client} is in {' and in '.join(named)}")
        family_of[client] = named[0] if named else OWN_MODEL
    for name, family in experiment.families.items() if whole else ():
        for pattern in family.clients:
            if not any(_fits(pattern, client, info) for client, info in clients.items()):
                problems.append(f"families.{name}.clients: {pattern} is no client.{client_hint(pattern, clients)}")
    if problems:
        raise ConfigError(problems)
    return family_of


def _fits(pattern: str, client: str, info: Mapping[str, str]) -> bool:
    key, equals, value = pattern.partition("=")
    return fnmatchcase(info.get(key, ""), value) if equals and key in info else fnmatchcase(client, pattern)


def family_experiment(experiment: Experiment, name: str) -> Experiment:
    """The experiment as one family's clients see it: with their model."""
    if name == OWN_MODEL:
        return experiment
    return replace(experiment, model=experiment.families[name].model, families={})


def check_clients(federation: Federation, experiment: Experiment) -> None:
    """Raise DataError naming every client that could not train, and every client or newcomer that could not be scored,
    before anything is trained."""
    if not federation.clients:
        raise DataError(f"{federation.name} has no clients")
    if wrong := id_problems(client.id for client in (*federation.clients, *federation.newcomers)):
        raise DataError(f"{federation.name}: {listed(wrong)}")
    split = experiment.evaluate.split
    problems = [f"client {c.id} has no training examples" for c in federation.clients if not c.train]
    problems += [
        f"client {c.id} has no {split} examples to be scored on: give it some (data.{split}_fraction, or a file)"
        for c in federation.clients
        if not getattr(c, split)
    ]
    if problems:
        raise DataError(f"{federation.name}: " + first_of(problems, 5, "; "))
    cohort, wanted = experiment.federation.cohort, experiment.federation.min_replies
    refused = []
    if cohort is not None and cohort > len(federation.clients):
        refused.append(f"federation.cohort: {cohort} is more than there are clients, {len(federation.clients)}")
    if isinstance(wanted, int) and wanted > len(federation.clients):
        refused.append(f"federation.min_replies: {wanted} is more than there are clients, {len(federation.clients)}")
    if experiment.federation.deploy == "best":
        refused += _no_choice(federation.clients, split)
    if experiment.federation.patience is not None:
        refused += _no_validation(federation.clients, "federation.patience finds the best round")
    if refused:
        raise ConfigError(refused)
    arriving = federation.newcomers if experiment.evaluate.newcomers else ()
    _check_newcomers(federation.name, arriving, split)
    _check_values(federation, arriving, experiment.evaluate)


def check_choice(experiment: Experiment) -> None:
    """Raise ConfigError where clients are to choose what they deploy, and there is nothing else to choose, or nothing
    that a margin would be over."""
    federation, blocks = experiment.federation, experiment.blocks
    if federation.deploy == "best" and not experiment.baselines:
        text = "federation.deploy: best chooses among the method and its baselines, and there are no baselines"
        raise ConfigError([text])
    if not federation.deploy_margin:
        return
    if federation.deploy != "best":
        raise ConfigError(["federation.deploy_margin: has no effect without federation.deploy: best"])
    if not any(trained_alone(build_method(block)) for block in blocks):
        text = (
            "federation.deploy_margin: is a share of the loss of what a client trains alone, and no method of the run "
            "trains clients alone; add such a baseline"
        )
        raise ConfigError([text])


def _no_choice(clients: Sequence[ClientData], split: str) -> list[str]:
    """Why clients cannot choose what they deploy (`federation.deploy: best`)."""
    problems = []
    if split == "val":
        problems.append(
            "evaluate.split: val are the examples that federation.deploy: best chooses by, so scores on them would "
            "flatter the choice; use test"
        )
    return problems + _no_validation(clients, "federation.deploy: best chooses")


def _no_validation(clients: Sequence[ClientData], what: str) -> list[str]:
    """Why there is nothing that could be chosen by clients' validation examples."""
    if not (empty := [client.id for client in clients if not client.val]):
        return []
    return [
        f"{what} by the clients' validation examples, and {len(empty)} of {len(clients)} clients have none, first "
        f"{empty[0]}; data.val_fraction holds some of the training examples out, of a benchmark that has it "
        "benchmark.val_fraction"
    ]


def _check_newcomers(name: str, newcomers: Sequence[ClientData], split: str) -> None:
    """Raise DataError naming every newcomer that could not be scored. One may well have nothing to train on."""
    problems = [
        f"newcomer {client.id} has no {split} examples to be scored on (evaluate.split)"
        for client in newcomers
        if not len(getattr(client, split))
    ]
    if problems:
        raise DataError(f"{name}: {first_of(problems, 5, '; ')}. evaluate.newcomers: false leaves them out")


def _check_values(federation: Federation, newcomers: Sequence[ClientData], settings: EvaluateSettings) -> None:
    """Raise DataError unless what the records say under `evaluate.by` divides them into groups, before anything is
    trained."""
    if (field := settings.by) is None:
        return
    seen: dict[str, None] = {}
    for client in (*federation.clients, *newcomers):
        records, where = getattr(client, settings.split), f"client {client.id}, {settings.split}"
        seen |= dict.fromkeys(values_of(records, field, federation.label_names, where))
    if len(seen) > MOST_VALUES:
        some = ", ".join(show(value) for value in list(seen)[:3])
        raise DataError(
            f"evaluate.by: the records of {federation.name} have {len(seen)} different values of {field}, "
            f"such as {some}; at most {MOST_VALUES} are allowed. Name a field that many "
            "records share"
        )


def values_of(records: Sequence[Record], field: str, label_names: Sequence[str], where: str) -> tuple[str, ...]:
    """The value of a field in each record, as text; a class by its name.

    Raises DataError for a record that does not have the field, or has neither text nor a whole number there.

    >>> values_of([{"label": 1}, {"label": 0}], "label", ["cat", "dog"], "client a, test")
    ('dog', 'cat')
    """
    values = []
    for position, record in enumerate(records):
        if field not in record:
            raise DataError(
                f"{where}: {record_name(record, position)} has no {field}, by which evaluate.by wants "
                f"scores; it has {', '.join(record)}.{did_you_mean(field, record)}"
            )
        value = record[field]
        if not isinstance(value, (str, int)) or not str(value).strip() or not str(value).isprintable():
            raise DataError(
                f"{where}: {record_name(record, position)}: {field}, by which evaluate.by wants scores, "
                f"must be text of one line or a whole number, got {show(value)}"
            )
        is_class = field == "label" and isinstance(value, int) and value < len(label_names)
        values.append(label_names[int(value)] if is_class else str(value).strip())
    return tuple(values)


def check_families(settings: Mapping[str, str], clients: Sequence[str]) -> None:
    """Raise ConfigError for newcomers of a family without clients: the server would have nothing for them."""
    with_clients = {settings[client] for client in clients}
    alone = [client for client, family in settings.items() if family not in with_clients]
    if alone:
        families = ", ".join(sorted({settings[client] for client in alone}))
        raise ConfigError(
            [
                f"families: no client has the backbone of {families}, so the server has nothing for "
                f"newcomer {alone[0]}; name clients of it, or set evaluate.newcomers: false"
            ]
        )


def warning_of(label: str, problem: Problem) -> str:
    """What is wrong with a method, by the name of its run; with a setting of the whole run, without it, so that it is
    told once."""
    return str(problem) if problem.key.startswith("federation.") else f"method {label}: {problem}"


def refuse(problems: Iterable[tuple[str, Problem]]) -> None:
    """Raise ConfigError with every error among the problems of some methods, each by the name of its run."""
    refused = (f"method {label}: {problem}" for label, problem in problems if problem.severity == "error")
    if each := dict.fromkeys(refused):  # of two backbones the same may be wrong
        raise ConfigError(each)
