"""The server's noise against a plain computation of McMahan et al. 2018, Algorithm 1, and Andrew et al. 2021."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from befit.core.chance import Chance
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.protocol.client_privacy import ClientNoise, ClientPlan
from befit.protocol.settings import PrivacySettings

pytest.importorskip("dp_accounting")
AT = Tick("federate", 1, 2, 7)
INFOS = [ClientInfo(f"c{number}", "small", 10 * (number + 1)) for number in range(4)]
START = {"shared/a/A": torch.tensor([1.0, 0.0]), "shared/a/B": torch.tensor([2.0])}
LONG, SHORT = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 0.25])
SETTINGS = PrivacySettings("client", delta=1e-2, noise_multiplier=0.5, clip=1.0, reproducible=True)


def plan(**changes: object) -> ClientPlan:
    return ClientPlan(replace(SETTINGS, **changes), 4, 1.0, 2)  # type: ignore[arg-type]


def updates() -> list[Update]:
    """Changes of length 5, 5, 0.25 and 0."""
    changes = [(LONG, 4.0), (LONG, -4.0), (SHORT, 0.0), (0 * SHORT, 0.0)]
    return [
        Update(info, Payload({"shared/a/A": START["shared/a/A"] + a, "shared/a/B": START["shared/a/B"] + b}))
        for info, (a, b) in zip(INFOS, changes, strict=True)
    ]


def start(update: Update) -> State:
    return START


def test_updates_are_clipped_summed_made_noisy_and_divided_by_the_clients_expected() -> None:
    """(3, 0, 4)/5 + (3, 0, -4)/5 + (0, 0.25, 0) = (1.2, 0.25, 0), over 4."""
    hidden = ClientNoise(plan()).hidden(updates(), start, INFOS, AT)
    noise = Chance(AT.seed_for("server", "noise").to_bytes(8, "big"))
    moved = torch.cat([torch.tensor([1.2, 0.25]) + 0.5 * noise.normal(2), 0.5 * noise.normal(1)]) / 4
    for update in hidden:
        got = torch.cat([update.payload.arrays[key] - START[key] for key in START])
        assert torch.allclose(got, moved, atol=1e-6) and update.client.num_examples == 1
    assert [update.client.id for update in hidden] == [info.id for info in INFOS]


def test_a_round_without_clients_is_moved_by_noise_alone() -> None:
    only, *_ = ClientNoise(plan()).hidden([], start, INFOS, AT)
    assert not torch.equal(only.payload.arrays["shared/a/A"], START["shared/a/A"])


def test_how_many_replied_is_not_told() -> None:
    """A method that counts what it gets, as SCAFFOLD's control variate does, counts what was expected of the round."""
    noise = ClientNoise(replace(plan(), rate=0.5))
    counts = {len(noise.hidden(updates()[:number], start, INFOS, AT)) for number in range(5)}
    assert counts == {2}


def test_the_clip_follows_the_share_of_updates_below_it() -> None:
    """Two of four are below a clip of 1: it stays for a quantile of 1/2 but for the noise of the count, and moves by
    exp(-0.2 (share - quantile)) otherwise. The updates get as much more noise as the count's costs."""
    settings = {"quantile": 0.9, "noise_multiplier": 0.5}
    noise = ClientNoise(plan(**settings))
    first = noise.hidden(updates(), start, INFOS, AT)[0].payload.arrays
    chance = Chance(AT.seed_for("server", "noise").to_bytes(8, "big"))
    drawn, count_noise = chance.normal(2), max(4 / 20, 0.5)
    chance.normal(1)
    more = (0.5**-2 - (2 * count_noise) ** -2) ** -0.5
    assert torch.allclose(
        first["shared/a/A"] - START["shared/a/A"], (torch.tensor([1.2, 0.25]) + more * drawn) / 4, atol=1e-6
    )
    share = 0.5 + ((2 - 2) / 2 + count_noise * float(chance.normal(1))) / 4  # two below it, two above
    assert noise.clip == pytest.approx(math.exp(-0.2 * (share - 0.9)))
    assert ClientNoise(plan(**settings), clip=noise.clip).clip == noise.clip


def test_one_client_more_or_less_moves_the_count_of_short_updates_by_a_half() -> None:
    """What the multiplier of the count rests on (Andrew et al. 2021, theorem 1), whoever took part."""
    settings = {"quantile": 0.5, "noise_multiplier": 0.5}
    logs = []
    for taken in (updates(), updates()[:-1], updates()[1:]):
        noise = ClientNoise(plan(**settings))
        noise.hidden(taken, start, INFOS, AT)
        logs.append(math.log(noise.clip) / -0.2 * 4)  # 4 (share - quantile)
    assert [abs(log - logs[0]) for log in logs[1:]] == pytest.approx([0.5, 0.5])


def test_noise_is_drawn_anew_but_where_a_configuration_wants_it_again() -> None:
    again, secret = plan(), plan(reproducible=False)
    drawn = [
        ClientNoise(one).hidden([], start, INFOS, AT)[0].payload.arrays["shared/a/B"] for one in 2 * [again, secret]
    ]
    assert drawn[0].equal(drawn[2]) and not drawn[1].equal(drawn[3])


def test_each_family_has_the_mean_of_its_own_clients() -> None:
    """Of three small clients (3/5 + 3/5 + 0) / 3 and 0.25 / 3, next to no noise; of one large, what it sent."""
    large = ClientInfo("d", "large", 10)
    starts = {"small": START, "large": {"shared/a/A": torch.ones(3)}}
    sent = [*updates()[:3], Update(large, Payload({"shared/a/A": torch.tensor([1.5, 1.5, 1.0])}))]
    noise = ClientNoise(plan(noise_multiplier=1e-6))
    hidden = noise.hidden(sent, lambda update: starts[update.client.backbone], [*INFOS[:3], large], AT)
    assert [update.client.id for update in hidden] == ["c0", "c1", "c2", "d"]
    wanted = 3 * [START["shared/a/A"] + torch.tensor([0.4, 0.25 / 3])] + [sent[-1].payload.arrays["shared/a/A"]]
    for update, value in zip(hidden, wanted, strict=True):
        assert torch.allclose(update.payload.arrays["shared/a/A"], value, atol=1e-5)


def test_every_client_is_drawn_by_itself() -> None:
    """About a quarter of 4 clients in 2,000 rounds; also none, and all."""
    noise = ClientNoise(replace(plan(), rate=0.25))
    sizes = [len(noise.cohort(INFOS, replace(AT, round=number))) for number in range(2000)]
    assert sum(sizes) / 2000 == pytest.approx(1, abs=0.08) and {0, 4} <= {*sizes}
