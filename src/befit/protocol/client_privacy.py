"""Client-level differential privacy at the server: whether a client took part at all, with all its records, is hidden
in what the server makes of a round's updates (McMahan et al. 2018, Algorithm 1).

Every client is drawn by itself; an update is a reply minus what the client started from, clipped as one vector; their
sum with noise, divided by how many clients are expected, takes the place of every reply. The server itself is trusted,
and what it keeps to itself is not protected: each client's own reports, scores and failures.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from befit.adapters.keys import EVERYTHING
from befit.adapters.layout import ModelShapes
from befit.adapters.state import norm
from befit.core.chance import Chance
from befit.core.values import ClientInfo, Payload, State, Tick, Update
from befit.protocol.accountant import Release, epsilon, noise_for, together
from befit.protocol.context import Context
from befit.protocol.method import Method, run_stages
from befit.protocol.settings import PrivacySettings

_PACE = 0.2  # of the clip, and the share of a round's clients that the noise of their count is: Andrew et al. 2021, 3.1
_SHARE = 20


@dataclass(frozen=True)
class ClientPlan:
    """What a run releases of its clients.

    rate    with which every client is drawn for a round
    rounds  in which something is released
    """

    settings: PrivacySettings
    clients: int
    rate: float
    rounds: int

    @property
    def noise(self) -> float:
        """The noise multiplier of a round. Raises ValueError where none is enough."""
        settings = self.settings
        if settings.noise_multiplier is not None:
            return settings.noise_multiplier
        assert settings.epsilon is not None and settings.delta is not None
        steps = together([Release(self.rate, 1.0, self.rounds)])
        return noise_for(steps, settings.epsilon, settings.delta, settings.accountant)

    @property
    def epsilon(self) -> float:
        """Of all rounds."""
        assert self.settings.delta is not None
        releases = together([Release(self.rate, self.noise, self.rounds)])
        return epsilon(releases, self.settings.delta, self.settings.accountant)

    def epsilon_sentence(self) -> str:
        if not self.rounds:
            return "nothing leaves a client, so nothing is spent"
        return (
            f"epsilon {self.epsilon:.4g} for every client, at delta {self.settings.delta:g} "
            f"({self.settings.accountant}; noise multiplier {self.noise:.4g}, each client in a share of "
            f"{self.rate:.3g} of {self.rounds} rounds)"
        )


class ClientNoise:
    """Draws cohorts and makes one noisy update of a round's.

    clip  the longest update that counts in full; it moves where the configuration says so
    """

    def __init__(self, plan: ClientPlan, clip: float | None = None) -> None:
        self._plan, self._settings = plan, plan.settings
        self._noise = plan.noise if plan.rounds else 1.0
        self.clip = plan.settings.clip if clip is None else clip

    def cohort(self, clients: Sequence[ClientInfo], at: Tick) -> list[ClientInfo]:
        """Every client by itself, in their own order; there may be none."""
        drawn = self._chance(at, "cohort").uniform(len(clients)) <= self._plan.rate
        return [client for client, chosen in zip(clients, drawn.tolist(), strict=True) if chosen]

    def hidden(
        self, updates: Sequence[Update], start_of: Callable[[Update], State], all_of: Sequence[ClientInfo], at: Tick
    ) -> list[Update]:
        """The noisy mean of each family, in place of as many updates as are expected of it: how many there were
        would tell of a client, to a method that counts them.

        start_of  what an update started from, in all its arrays
        all_of    the clients of all families; a family of which nobody replied is moved by noise all the same
        """
        chance, short, hidden = self._chance(at, "noise"), 0.0, list[Update]()
        count_noise = max(self._plan.rate * self._plan.clients / _SHARE, self._noise)
        noise = self._noise
        if self._settings.quantile is not None:  # both releases together have the multiplier that is counted
            noise = (self._noise**-2 - (2 * count_noise) ** -2) ** -0.5
        for family in dict.fromkeys(info.backbone for info in all_of):
            everyone = [info for info in all_of if info.backbone == family]
            own = [update for update in updates if update.client.backbone == family]
            stand_in = Update(everyone[0], Payload())
            sums = {key: torch.zeros_like(value) for key, value in start_of(own[0] if own else stand_in).items()}
            for update in own:
                start, reply = start_of(update), update.payload.arrays
                change = {key: reply[key] - start[key] for key in sums}
                length = norm(change)
                short += (length <= self.clip) - 0.5  # so that one client more or less moves it by a half
                for key, value in change.items():
                    sums[key].add_(value, alpha=min(1.0, self.clip / length) if length else 1.0)
            expected = self._plan.rate * len(everyone)
            mean = {key: (value + noise * self.clip * _drawn(chance, value)) / expected for key, value in sums.items()}
            for info in everyone[: max(1, round(expected))]:
                blank = Update(replace(info, num_examples=1), Payload())  # all replies are the same now
                start = start_of(blank)
                hidden.append(replace(blank, payload=Payload({key: start[key] + mean[key] for key in mean})))
        if self._settings.quantile is not None:
            noisy = (short + count_noise * float(chance.normal(1))) / (self._plan.rate * self._plan.clients) + 0.5
            self.clip *= math.exp(-_PACE * (noisy - self._settings.quantile))
        return sorted(hidden, key=lambda update: update.client.id)

    def _chance(self, at: Tick, purpose: str) -> Chance:
        if self._settings.reproducible:
            return Chance(at.seed_for("server", purpose).to_bytes(8, "big"))
        return Chance(secrets.token_bytes(32))


def _drawn(chance: Chance, like: Tensor) -> Tensor:
    return chance.normal(like.numel()).view(like.shape).to(like.device)


def hides_clients(method: Method, context: Context) -> ClientPlan | None:
    """How the server hides who took part; None where it does not."""
    if (privacy := context.privacy) is None or privacy.by_example:
        return None
    clients = len(context.federation.clients)
    rate = 1.0 if context.cohort is None else min(1.0, context.cohort / clients)
    rounds = sum(privacy.rounds_of(stage.rounds or None) for stage in run_stages(method) if stage.federated)
    return ClientPlan(privacy.settings, clients, rate, rounds)


def unfit_for_clients(method: Method, shapes: Iterable[ModelShapes] = ()) -> Iterator[str]:
    """Why the server cannot hide who took part; more is known where the models' shapes are."""
    if method.needs.individual_updates:
        yield "its server needs the update of each client, but with noise it would get only their noisy sum"
    for stage in run_stages(method):
        if stage.up is not None and stage.up.numbers:
            yield f"stage {stage.name} sends plain numbers ({', '.join(stage.up.numbers)}), which get no noise"
        if stage.up is not None and stage.down.pieces:
            yield f"stage {stage.name} starts anew in every round, so what it sends cannot be clipped as an update"
    for specs in (method.layout.specs(of_family) for of_family in shapes):
        for stage in run_stages(method):
            sent, received = stage.reply.specs(specs), stage.down.specs(specs)
            trains = EVERYTHING if stage.trains is None else stage.trains
            for key, spec in sent.items():
                if not (key in received or trains(key)) or not getattr(torch, spec.dtype).is_floating_point:
                    yield f"stage {stage.name} sends {key}, which cannot be clipped as an update"
                    return
