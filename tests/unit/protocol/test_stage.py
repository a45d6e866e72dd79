"""Messages as data: what is declared of a layout, and what of a method and a federation is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from befit.adapters.keys import EVERYTHING, factor, slot
from befit.core.values import TensorSpec
from befit.data.registry import build
from befit.protocol.check import check, unknown_clients
from befit.protocol.context import Context, Problem
from befit.protocol.method import Use
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.stage import Message, Personal, Stage

SPECS = {f"shared/block.00.q_proj/{name}": TensorSpec((2, 3)) for name in "AB"}


def test_a_message_declares_what_its_selector_chooses_as_it_is_sent() -> None:
    halves = Message(factor("A"), become=lambda chosen: {k: replace(s, shape=(1, 3)) for k, s in chosen.items()})
    assert halves.specs(SPECS) == {"shared/block.00.q_proj/A": TensorSpec((1, 3))}
    assert Message().specs(SPECS) == {}
    more = {**SPECS, "budgeted/block.00.q_proj/A": TensorSpec((4, 3))}
    assert Message(EVERYTHING).without(slot("budgeted")).specs(more) == SPECS


def test_nothing_is_declared_for_a_personal_stage() -> None:
    """Whatever it receives, and even where its exchange would send."""

    class Alone(Personal):
        def client_update(self, client, received, site, at):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    stage = Stage("alone", Alone(), up=None, down=Message(slot("shared")))
    assert not stage.federated and stage.reply.specs(SPECS) == {} and stage.reply.numbers == ()


def test_one_list_has_errors_of_the_federation_and_warnings_of_the_method() -> None:
    federation = build("digits", None, {"clients": 2})
    context = Context(federation, {client.id: "model" for client in federation.clients}, TrainSettings())
    (warning,) = check(build_method("scaffold"), context)
    assert (warning.severity, warning.key) == ("warning", "train.optimiser")
    assert check(build_method("scaffold"), replace(context, train=TrainSettings(optimiser="sgd"))) == []
    alone = replace(context, federation=replace(federation, clients=federation.clients[:1]))
    (error,) = check(build_method("fedalt"), alone)
    assert error.severity == "error" and "at least 2 clients" in error.text


def test_options_for_nobody_are_refused_unless_the_federation_is_limited() -> None:
    federation = build("digits", None, {"clients": 2})
    context = Context(federation, {}, TrainSettings())
    (problem,) = unknown_clients("limits", ["client-0*", "phone-*"], context)
    assert isinstance(problem, Problem) and problem.key == "limits.phone-*" and "client-00" in problem.text
    fewer_records = replace(federation, manifest={**federation.manifest, "limit": {"clients": None, "records": 9}})
    assert unknown_clients("limits", ["phone-*"], replace(context, federation=fewer_records)) != []
    limited = replace(federation, manifest={**federation.manifest, "limit": {"clients": 2, "records": None}})
    assert unknown_clients("limits", ["phone-*"], replace(context, federation=limited)) == []


@pytest.mark.parametrize("method", ["flexlora", "hetlora", "fedilora", "flora"])
def test_ranks_of_nobody_are_refused(method: str) -> None:
    context = Context(build("digits", None, {"clients": 2}), {}, TrainSettings())
    ranks = {"client-00": 2, "klinik-*": 4}
    problems = check(build_method({"name": method, "rank": 8, "ranks": ranks}), context)
    assert [problem.key for problem in problems if problem.severity == "error"] == ["ranks.klinik-*"]


def test_a_way_to_mix_that_there_is_not_is_refused_where_it_is_named() -> None:
    with pytest.raises(ValueError, match="no mixer 'average'; there are sum, gate, logits"):
        Use(("shared",), mixer="average")  # pyright: ignore[reportArgumentType]
