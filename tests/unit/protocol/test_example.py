"""The method that the contract's own documentation writes out."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

from befit.adapters.keys import select, slot
from befit.adapters.layout import lora
from befit.adapters.state import weighted_mean
from befit.core.values import Payload
from befit.protocol import method as contract
from befit.protocol.method import Deployment, Method, Use
from befit.protocol.registry import build_method
from befit.protocol.stage import Exchange, Message, Stage
from befit.train.loop import training
from befit.train.passes import Pass
from tests.federation import Clients
from tests.tiny import assert_same

NAMES = (Deployment, Exchange, Message, Method, Pass, Payload, Stage, Use, lora, select, slot, training, weighted_mean)


def test_the_worked_example_is_fedit_bit_for_bit() -> None:
    text = contract.__doc__ or ""
    names: dict[str, Any] = {one.__name__: one for one in NAMES}
    exec(dedent(text[text.index("    class Average") :]), names)
    example, fedit = Clients(names["Average"]()), Clients(build_method("fedit"))
    assert_same(example.run(2).arrays, fedit.run(2).arrays)
    assert example.uploads(2).keys() == fedit.uploads(2).keys()
