"""IFCA (Ghosh et al. 2020): which group a client chooses."""

from __future__ import annotations

from befit.adapters.keys import select, slot
from befit.adapters.layout import lora
from befit.methods.parts.groups import fitting
from tests.tiny import make_site


def test_nobody_chooses_a_group_whose_loss_is_no_number() -> None:
    site = make_site("llama", lora(2, 4.0))
    fresh = select(site.model.dump(slot("shared")), slot("shared"))
    diverged = {key: value + 1e25 for key, value in fresh.items()}
    assert fitting(site, [diverged, fresh], prefer=0) == 1
    assert fitting(site, [fresh, diverged], prefer=1) == 0
