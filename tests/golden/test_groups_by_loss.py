"""IFCA: clients choose among the adapters of several groups, by their loss."""

from __future__ import annotations

import torch

from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played, of
from tests.golden.reference import Arrays, assert_near, change, logits, loss, mean, trained

CHECKED = {"ifca": "by hand"}


def said(played: Played, round_: int) -> dict[str, int]:
    """The group that each client names in its reply."""
    replies = {u.client.id: u.payload.arrays for at, u in played.journal.updates if at.round == round_}
    return {client: int(arrays["choice/all/group"].argmax()) for client, arrays in replies.items()}


def test_ifca() -> None:
    """Ghosh et al. 2020, Algorithm 1, option II: `j_k = argmin_j L_k(theta_j)`, and a mean over each group's clients.
    In the first round all adapters are alike, and befit draws."""
    played = Played({"name": "ifca", **LORA, "groups": 2}, rounds=3)
    assert not played.server.scalars
    groups = [of(Played({"name": "ifca", **LORA, "groups": 2}, rounds=1).server.arrays, f"group-{j}") for j in (0, 1)]
    assert set(said(played, 1).values()) == {0, 1}, "take another seed: nobody drew one of the groups"
    for round_ in (2, 3):
        each: dict[int, list[tuple[Arrays, float]]] = {0: [], 1: []}
        chosen: dict[str, int] = {}
        for client, count in zip(CLIENTS, EXAMPLES, strict=True):
            data = played.data(client)
            own = min((0, 1), key=lambda j: float(loss(data, change(groups[j]))))
            chosen[client] = own
            each[own].append((trained(groups[own], lambda a: loss(data, change(a))), count))
            assert_near(played.sent(round_, client), each[own][-1][0], rtol=5e-3, atol=5e-4)
        groups = [mean(*map(list, zip(*own, strict=True))) if own else groups[j] for j, own in each.items()]
        assert said(played, round_) == chosen
    for j in (0, 1):
        assert_near(of(played.server.arrays, f"group-{j}"), groups[j], rtol=5e-3, atol=5e-4)
    for client in CLIENTS:
        best = min((0, 1), key=lambda j: float(loss(played.data(client), change(groups[j]))))
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(groups[best])), rtol=5e-3, atol=5e-3)
