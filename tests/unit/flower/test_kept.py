"""Which round's state a server may have a site keep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.config.load import load_experiment
from befit.core.errors import PayloadMismatch
from befit.core.values import Payload
from befit.flower.requests import kept_of, tick_of
from befit.flower.site_state import SiteMemory, Stamp
from befit.protocol.registry import build_method

EXPERIMENT = load_experiment({"benchmark": "digits", "method": "feddpa", "federation": {"rounds": 4}})
METHOD = build_method(EXPERIMENT.method)  # of two stages, the second one of a single round


def test_a_round_of_the_plan_may_be_kept() -> None:
    for kept in (None, [0, 1], [0, 4], [1, 1]):
        assert kept_of({"kept": kept}, METHOD, EXPERIMENT) == (kept and tuple(kept))


@pytest.mark.parametrize(
    "kept", [[0, 5], [0, 0], [2, 1], [-1, 1], [0, True], [0], "01", {"0": 1}, [0, 1, 2], 7, [0.0, 1]]
)
def test_no_other_round_may(kept: Any) -> None:
    with pytest.raises(PayloadMismatch, match=re.escape(f"the state of {kept!r},")):
        kept_of({"kept": kept}, METHOD, EXPERIMENT)


@pytest.mark.parametrize(("do", "rounds"), [("train", 2), ("score", 3), ("export", 1)])
def test_a_run_may_end_at_a_round_for_its_last_score_and_export_only(do: str, rounds: int) -> None:
    at = {"stage": "federate", "round": 2, "rounds": 2, "seed": 0, "span": 1}
    if do != "train":
        assert tick_of({"do": do, "at": at}, METHOD, EXPERIMENT).round == 2
    with pytest.raises(PayloadMismatch, match="which has 4"):
        tick_of({"do": do, "at": {**at, "rounds": rounds}}, METHOD, EXPERIMENT)


def test_a_site_goes_back_to_the_memory_that_it_kept_and_to_no_other(tmp_path: Path) -> None:
    """Trained in rounds 1 to 4, with round 2 to be kept from round 3 on."""
    for round_ in range(1, 5):
        memory = SiteMemory(tmp_path, (0, 2) if round_ > 2 else (0, 1))
        memory.ask(0, round_)
        memory.save("a", Payload({"x": torch.tensor([float(round_)])}))
        memory.keep(Stamp(0, round_, round_, f"request {round_}"), b"reply")

    def holds(stage: int, round_: int, kept: tuple[int, int] | None = (0, 2)) -> float:
        memory = SiteMemory(tmp_path, kept)
        memory.ask(stage, round_)
        found = memory.load("a")
        assert found is not None
        return float(found.arrays["x"])

    assert holds(0, 2) == 2 and holds(1, 1) == 2  # its score and export, or a later stage
    assert holds(0, 4) == holds(0, 5) == holds(1, 1, None) == 4
    assert len(list(tmp_path.glob("memory.*"))) == 3
