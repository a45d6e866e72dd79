"""Seeds of what is drawn without a generator."""

from __future__ import annotations

import torch

from befit.core.seeds import seed_draws


def test_draws_are_those_of_torchs_manual_seed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2**62 + 5)
        expected = torch.rand(3), torch.nn.functional.dropout(torch.ones(9), 0.5, True)
        torch.rand(1)
        seed_draws(2**62 + 5, torch.device("cpu"))
        found = torch.rand(3), torch.nn.functional.dropout(torch.ones(9), 0.5, True)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
