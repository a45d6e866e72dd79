"""What a method of one's own gets wrong is told with the function and its file, and nothing undeclared leaves it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import befit
from befit.adapters.keys import select
from befit.adapters.layout import Layout
from befit.core.errors import BefitError, NotEnoughReplies, TrainingDiverged
from befit.core.values import Payload, Tick
from befit.data.registry import build
from befit.protocol.check import check
from befit.protocol.context import Context
from befit.protocol.method import Method, Use, malformed
from befit.protocol.serve import serve
from befit.protocol.settings import TrainSettings, WireSettings
from befit.protocol.stage import Exchange, Message, Personal, Stage
from befit.protocol.wire import wire_of
from befit.train.loop import train, training
from befit.train.passes import Pass
from tests.federation import Clients
from tests.tiny import assert_same

SHARED = befit.slot("shared")
PASSES = (Pass(SHARED, ("shared",)),)


class Averaging(Exchange):
    """One function of it may be another."""

    def __init__(self, **others: Callable[..., Any]) -> None:
        self.others = others

    def dispatch(self, server, client, at):
        return self.others.get("dispatch", lambda: server)()

    def client_update(self, client, received, site, at):
        site.model.load(received.arrays)
        usual = Payload(site.model.dump(SHARED), {"loss": 0.5})
        return self.others.get("client_update", _trained)(client, usual, site, at)

    def aggregate(self, server, updates, site, at):
        return self.others.get("aggregate", lambda: Payload(updates[0].payload.arrays))()


def _trained(client: Payload, reply: Payload, site: Any, at: Any) -> tuple[Payload, Payload]:
    train(site, PASSES, at)
    return client, Payload(site.model.dump(SHARED), reply.scalars)


class Own(Method):
    layout, use = befit.lora(2, 4.0), Use(("shared",))

    def __init__(self, exchange: Any = None, stages: Any = None, **others: Callable[..., Any]) -> None:
        usual = Stage("federate", exchange or Averaging(), up=Message(SHARED, ("loss",)), down=Message(SHARED))
        self.stages, self.others = [usual] if stages is None else stages, others

    def plan(self):
        return self.stages

    def check(self, context):
        return self.others.get("check", list)()

    def server_init(self, site):
        return self.others.get("server_init", lambda: Payload(site.initial))()

    def client_init(self, site):
        return self.others.get("client_init", Payload)()

    def deploy(self, client, received, site):
        return self.others.get("deploy", lambda: befit.Deployment(received.arrays, ("shared",)))()


def nothing(*_: Any) -> None:
    return None


def test_it_runs_as_it_stands() -> None:
    clients = Clients(Own())
    clients.run(rounds=1)
    assert not clients.journal.failures and len(clients.journal.scores) == 3
    assert malformed(clients.method) == ""


def test_what_the_server_gets_in_place_of_a_payload_is_named_with_its_function() -> None:
    for name, method in {
        "Own.server_init": Own(server_init=nothing),
        "Averaging.dispatch": Own(Averaging(dispatch=nothing)),
        "Averaging.aggregate": Own(Averaging(aggregate=nothing)),
    }.items():
        with pytest.raises(BefitError, match=rf"{name} of .*test_own_methods\.py returns nothing.* a Payload"):
            Clients(method).run(rounds=1)


@pytest.mark.parametrize(
    ("method", "words"),
    {
        "client_init": (Own(client_init=nothing), "Own.client_init of {}: returns nothing; a Payload"),
        "no pair": (Own(Averaging(client_update=nothing)), "Averaging.client_update of {}: returns nothing; a tuple"),
        "a payload alone": (
            Own(Averaging(client_update=lambda client, reply, site, at: reply)),
            "Averaging.client_update of {}: type Payload; a tuple",
        ),
        "three": (
            Own(Averaging(client_update=lambda client, reply, site, at: (client, reply, reply))),
            "Averaging.client_update of {}: 3 values; two",
        ),
        "training that nobody waits for": (
            Own(
                Averaging(
                    client_update=lambda client, reply, site, at: (training(site, PASSES, at), (client, reply))[1]
                )
            ),
            "Averaging.client_update of {}: never done; yield from",
        ),
    }.values(),
)
def test_a_client_says_what_its_method_should_have_returned(method: Own, words: str) -> None:
    clients = Clients(method)
    with pytest.raises(BefitError):  # nobody is left
        clients.run(rounds=1)
    assert len(clients.journal.failures) == 3
    function, _, rest = words.partition(" of {}: ")
    for part in (function, __file__, *rest.split("; ")):
        assert part in clients.journal.failures[0].reason


@pytest.mark.parametrize(
    ("asked", "kind"), [(lambda site, at: training(site, PASSES, at), "generator"), (lambda site, at: 5, "int")]
)
def test_what_is_yielded_and_is_no_training_names_the_words_that_are_missing(asked: Any, kind: str) -> None:
    def update(client: Any, reply: Any, site: Any, at: Any) -> Any:
        yield asked(site, at)

    clients = Clients(Own(Averaging(client_update=update)))
    with pytest.raises(BefitError):
        clients.run(rounds=1)
    assert f"yields a {kind}: ask for training by yield from training(…)" in clients.journal.failures[0].reason


@pytest.mark.parametrize("value", ["patient Erika Mustermann", ["a", "b"], [0.5, 1.5], 2**80, None], ids=str)
def test_a_declared_number_is_one_number_and_can_carry_nothing_else(value: Any) -> None:
    def update(client: Payload, reply: Payload, site: Any, at: Any) -> tuple[Payload, Payload]:
        return client, Payload(reply.arrays, {"loss": value})

    clients = Clients(Own(Averaging(client_update=update)))
    with pytest.raises(BefitError):
        clients.run(rounds=1)
    assert not clients.journal.updates and "Mustermann" not in str(clients.journal.outbound.as_dict())
    assert all("'loss'" in failure.reason and "one number" in failure.reason for failure in clients.journal.failures)


def test_a_number_for_the_log_is_one_too() -> None:
    def update(client: Payload, reply: Payload, site: Any, at: Any) -> tuple[Payload, Payload]:
        site.report["note"] = "patient Erika Mustermann"
        return client, reply

    clients = Clients(Own(Averaging(client_update=update)))
    with pytest.raises(BefitError):
        clients.run(rounds=1)
    assert not clients.journal.updates
    assert all("'note'" in failure.reason for failure in clients.journal.failures)


def poisoned(arrays: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(arrays))
    return {**arrays, first: arrays[first] * float("nan")}


class Mean(Averaging):
    """What the server makes of the first reply, beside what the client sends."""

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self.change = change

    def aggregate(self, server, updates, site, at):
        return Payload(self.change(updates[0].payload.arrays))


def test_a_server_that_forgets_an_array_is_told_in_the_next_round_and_when_the_last_one_is_scored() -> None:
    def less(arrays: dict[str, Any]) -> dict[str, Any]:
        return {key: arrays[key] for key in sorted(arrays)[1:]}

    words = r"was not sent 'shared/.*', one of 1 arrays .* a download of stage federate"
    with pytest.raises(NotEnoughReplies, match=rf"stage federate, round 2: .* {words}"):
        Clients(Own(Mean(less))).run(rounds=2)
    clients = Clients(Own(Mean(less)))
    clients.run(rounds=1)
    assert not clients.journal.scores and len(clients.journal.failures) == 3
    assert all(re.search(words, failure.reason) for failure in clients.journal.failures)


def test_what_a_stage_alone_receives_is_missed_too_when_its_last_round_is_scored() -> None:
    """The server forgets what it is to send in a stage after the federated one, whose own download is whole."""

    class Receiving(Personal):
        def dispatch(self, server, client, at):
            return Payload(select(server.arrays, befit.slot("extra")))

        def client_update(self, client, received, site, at):
            return client, Payload()

    class Two(Own):
        layout = befit.lora(2, 4.0, slots=("shared", "extra"))

    class Federated(Averaging):
        def dispatch(self, server, client, at):
            return Payload(select(server.arrays, SHARED))

    federated = Stage("federate", Federated(), up=Message(SHARED, ("loss",)), down=Message(SHARED))
    clients = Clients(Two(stages=[federated, Stage("receive", Receiving(), down=Message(befit.slot("extra")))]))
    clients.run(rounds=1)
    assert not clients.journal.scores and len(clients.journal.failures) == 3
    assert all("was not sent 'extra/" in failure.reason for failure in clients.journal.failures)


class Deploying(Own):
    def __init__(
        self, change: Callable[[dict[str, Any]], dict[str, Any]], slots: tuple[str, ...] = ("shared",), own: str = ""
    ):
        super().__init__()
        self.change, self.slots, self.own = change, slots, own

    def deploy(self, client, received, site):
        return befit.Deployment(self.change(dict(received.arrays)), self.slots, own=self.own)


def test_a_servers_memory_that_is_not_finite_ends_the_run_where_it_is_made_even_in_the_last_round() -> None:
    clients = Clients(Own(Mean(poisoned)))
    with pytest.raises(
        TrainingDiverged, match=r"memory after round 1 of stage federate .* not finite .first in shared/"
    ):
        clients.run(rounds=1)
    assert not clients.journal.failures and not clients.journal.scores  # no client is at fault
    with pytest.raises(TrainingDiverged, match="memory before the first round holds a number that is not finite"):
        Clients(Own(server_init=lambda: Payload({}, {"tau": float("inf")}))).run(rounds=1)


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    {
        "not finite": (Deploying(poisoned), "NotFinite", "would deploy numbers that are not finite"),
        "an array less": (
            Deploying(lambda arrays: {key: arrays[key] for key in sorted(arrays)[1:]}),
            "PayloadMismatch",
            "would deploy slot shared without shared/",
        ),
        "another shape": (
            Deploying(lambda arrays: {key: value[None] for key, value in arrays.items()}),
            "PayloadMismatch",
            "with shape",
        ),
        "another slot": (Deploying(dict, ("nope",)), "PayloadMismatch", "slot 'nope'; its method's layout has shared"),
        "another own slot": (
            Deploying(dict, own="nope"),
            "PayloadMismatch",
            "slot 'nope' as its own, which is not active",
        ),
        "a foreign array": (
            Deploying(lambda arrays: {**arrays, "x/y/z": arrays[min(arrays)]}),
            "PayloadMismatch",
            "would deploy 'x/y/z', which is not in",
        ),
    }.values(),
)
def test_a_deployment_that_is_no_model_of_the_layout_has_no_score(method: Own, kind: str, words: str) -> None:
    clients = Clients(method)
    clients.run(rounds=1)
    assert not clients.journal.scores and len(clients.journal.failures) == 3
    assert all(failure.kind == kind and words in failure.reason for failure in clients.journal.failures)


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "not finite": (poisoned, "would deploy numbers that are not finite"),
        "an array less": (lambda arrays: {key: arrays[key] for key in sorted(arrays)[1:]}, "slot shared without"),
    }.values(),
)
def test_a_further_model_of_a_deployment_is_checked_as_the_first_is(change: Any, words: str) -> None:
    class Two(Own):
        def deploy(self, client, received, site):
            further = befit.Deployment(change(dict(received.arrays)), ("shared",))
            return befit.Deployment(received.arrays, ("shared",), others={"r1": further})

    clients = Clients(Two())
    clients.run(rounds=1)
    assert not clients.journal.scores and len(clients.journal.failures) == 3
    assert all(words in failure.reason for failure in clients.journal.failures)


@pytest.mark.parametrize("told", [(), (1,), (0, 1)], ids=str)
def test_steps_are_counted_whatever_a_method_tells_of_its_trainings(told: tuple[int, ...]) -> None:
    """Two trainings a round, of one step and of two."""

    def update(client: Payload, reply: Payload, site: Any, at: Any) -> Any:
        for number in range(2):
            report = yield from training(site, PASSES, at, steps=number + 1)
            if number in told:
                site.report.update(report.numbers())
        return client, Payload(site.model.dump(SHARED), reply.scalars)

    clients = Clients(Own(Averaging(client_update=update)))
    clients.run(rounds=2)
    assert {reply.report["steps"] for _, reply in clients.journal.updates} == {3.0}
    assert all(("loss" in reply.report) == bool(told) for _, reply in clients.journal.updates)


def test_a_method_that_trains_in_its_own_way_tells_its_own_steps() -> None:
    def update(client: Payload, reply: Payload, site: Any, at: Any) -> Any:
        train(site, PASSES, at, steps=1)
        site.report["steps"] = 7.0
        return client, Payload(site.model.dump(SHARED), reply.scalars)

    clients = Clients(Own(Averaging(client_update=update)))
    clients.run(rounds=1)
    assert {reply.report["steps"] for _, reply in clients.journal.updates} == {7.0}


def test_steps_of_rounds_that_travel_as_one_message_are_added_up() -> None:
    """One step, two steps, and a last round without training."""

    def update(client: Payload, reply: Payload, site: Any, at: Any) -> Any:
        if at.round < 3:
            report = yield from training(site, PASSES, at, steps=at.round)
            site.report.update(report.numbers())
        return client, reply

    clients = Clients(Own(Averaging(client_update=update)))
    site = clients.site(clients.infos[0])
    serve(clients.method, site, clients.store, Payload(), Tick("federate", 1, 3, 0, span=3))
    assert site.report["steps"] == 3.0


def test_what_a_client_owes_of_one_stage_is_no_part_of_its_updates_in_another() -> None:
    """Nothing is trained in the second stage, so the server has what it had before."""

    def update(client: Payload, reply: Payload, site: Any, at: Any) -> tuple[Payload, Payload]:
        return _trained(client, reply, site, at) if at.stage == "first" else (client, reply)

    message = Message(SHARED, ("loss",))
    stages = [Stage(name, Averaging(client_update=update), message, Message(SHARED)) for name in ("first", "second")]
    method = Own(stages=stages)
    wire = wire_of(method, WireSettings(top_k=0.1), [Clients(method).model.specs])
    clients = Clients(method, wire=wire)
    final = clients.run(rounds=1)
    assert all(value.any() for value in clients.uploads(1, "first")["a"].values())
    assert_same(final.arrays, clients.journal.completed_points[0].server.arrays)


def test_a_plan_that_is_none_is_refused_before_a_run() -> None:
    stage = Own().stages[0]
    for plan, part in {
        None: "Own.plan",
        (): "returns no stage",
        ("federate",): "a str among its stages",
        (stage, stage): "two stages of the name 'federate'",
        (Stage("federate", Averaging),): "an exchange that is no Exchange",  # type: ignore[arg-type]
    }.items():
        method = Own()
        method.stages = plan
        assert part in malformed(method), plan
    method: Any = Own()
    method.layout = "lora"
    assert "no `layout` that is a Layout" in malformed(method)


def test_a_check_that_returns_nothing_is_named() -> None:
    context = Context(build("digits", None, {"clients": 2}), {}, TrainSettings())
    with pytest.raises(BefitError, match=r"Own\.check of .* returns nothing"):
        check(Own(check=nothing), context)


def test_texts_in_place_of_names_and_selectors_are_refused_where_they_stand() -> None:
    text: Any = "shared"
    for name, make in {
        "slots": lambda: Use(text),
        "active": lambda: Pass(SHARED, text),
        "trainable": lambda: Pass(text, ("shared",)),
        "share": lambda: befit.Recipe(layout=Own.layout, use=Own.use, passes=PASSES, share=text),
        "label_names": lambda: befit.Federation("own", "1", "image-classification", (), label_names=text),
    }.items():
        with pytest.raises(TypeError, match=rf"{name} must be"):
            make()
    with pytest.raises(ValueError, match="nothing is trained"):
        befit.Recipe(layout=Layout(()), use=Own.use)
