"""Example-level differential privacy of what leaves a client: which stages are private, with how much noise, and what
each client has spent. The noise itself is added in training, by `befit.train.private`.

A stage is *private* if what it computes can leave: it is federated, or a federated one comes after it. There a client's
update sees its records through `training` alone, whose sums of clipped gradients are noisy; everything else that it
sends is computed from these. The numbers of a client's examples are taken as public.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from befit.core.chance import Chance
from befit.core.errors import ConfigError, RunError
from befit.core.values import Payload, Tick
from befit.protocol.accountant import Release, above, noise_for, together
from befit.protocol.mechanism import Gradients, Mechanism, Privacy
from befit.protocol.method import Method, federated_stage, run_stages
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.protocol.stage import Stage

PRIVACY = "privacy"  # the part of a client's memory that holds what it has spent
EPSILON = "epsilon"  # what a client has spent so far, in its report


def hides(privacy: Privacy, method: Method, stage: Stage) -> bool:
    """Whether a stage is private."""
    return privacy.by_example and any(private.name == stage.name for private in private_stages(method))


def planned(privacy: Privacy, method: Method, train: TrainSettings, examples: int) -> list[tuple[Stage, int, Release]]:
    """Private stages, their rounds, and what a client of so many examples releases in each round, with the noise
    that it takes."""
    noiseless = [
        (stage, privacy.rounds_of(stage.rounds), release_of(stage, train, examples)) for stage in private_stages(method)
    ]
    noise = privacy.settings.noise_multiplier
    if noise is None:
        assert privacy.settings.epsilon is not None and privacy.settings.delta is not None
        steps = together(replace(release, count=release.count * rounds) for _, rounds, release in noiseless)
        noise = noise_for(steps, privacy.settings.epsilon, privacy.settings.delta, privacy.settings.accountant)
    return [(stage, rounds, replace(release, noise=release.noise * noise)) for stage, rounds, release in noiseless]


def whole(privacy: Privacy, method: Method, train: TrainSettings, examples: int) -> float:
    """Epsilon of a client that takes part in all rounds."""
    releases = planned(privacy, method, train, examples)
    return privacy.spends([replace(release, count=release.count * rounds) for _, rounds, release in releases])


def epsilon_sentence(privacy: Privacy, method: Method, train: TrainSettings, examples: Mapping[str, int]) -> str:
    """What clients of so many examples spend and how much noise that takes, in a sentence."""
    settings = privacy.settings
    if not (private := private_stages(method)):
        return "nothing leaves a client, so nothing is spent"
    if not any(isinstance(stage.reads, Gradients) and stage.reads.passes for stage in private):
        return "what leaves a client is computed from no record, so nothing is spent"
    examples = {client: count for client, count in examples.items() if count}
    if not examples:
        return "known at each site, which has the records"
    ends = [chosen(examples, key=lambda client: examples[client]) for chosen in (min, max)]
    words = []
    for client in dict.fromkeys(ends):
        releases = planned(privacy, method, train, examples[client])
        noise = max(release.noise * passes_of(stage) for stage, _, release in releases)
        spent = whole(privacy, method, train, examples[client])
        words.append(
            f"epsilon {spent:.4g} at {client} ({examples[client]} examples, noise multiplier {noise:.4g} in "
            f"batches of {min(1.0, train.batch_size / examples[client]):.3g} of them)"
        )
    return f"{' and '.join(words)}, each in every round, at delta {settings.delta:g} ({settings.accountant})"


def passes_of(stage: Stage) -> float:
    """By how much a release of all passes on one batch has less noise than each of them."""
    reads = stage.reads
    return 1.0 if isinstance(reads, str) or reads.in_sequence or not reads.passes else math.sqrt(reads.passes)


def private_stages(method: Method) -> list[Stage]:
    """The last federated stage and those before it."""
    stages = run_stages(method)
    last = federated_stage(stages)
    return [] if last is None else stages[: stages.index(last) + 1]


def unfit_stage(method: Method) -> str:
    """Why a method cannot protect single examples, in words; empty where it can."""
    for stage in private_stages(method):
        if isinstance(stage.reads, str):
            return f"stage {stage.name} computes {stage.reads} from records, and sends something that depends on it"
    for stage in method.plan():
        if stage.who == "newcomer" and stage.federated:
            return f"stage {stage.name} sends what newcomers compute from records, which is not counted"
    return ""


def release_of(stage: Stage, train: TrainSettings, examples: int) -> Release:
    """One round of a stage at a client of so many examples, with a noise multiplier of 1 in every pass.

    Passes that step on one batch are one release of all their sums, for which the noise of each counts less: Gaussians
    of multiplier z, P of them, are as one of `z / sqrt(P)` (Dong et al. 2022, corollary 3.3).
    """
    assert isinstance(stage.reads, Gradients)
    passes, steps = stage.reads.passes, train.steps_for(examples)
    count = steps * passes if stage.reads.in_sequence else steps * bool(passes)
    return Release(min(1.0, train.batch_size / examples), 1 / passes_of(stage), count)


@dataclass
class Guarded:
    """One private message at a client.

    site    the client's, which gives no records but through its mechanism
    spent   releases so far, with those of this message
    """

    site: Site
    spent: tuple[Release, ...]
    _each: int
    _mechanism: Mechanism = field(repr=False)

    def begin_round(self, at: Tick) -> None:
        self._mechanism.left, self._mechanism.chance = self._each, _chance(self.site, at)


def guarded(method: Method, stage: Stage, site: Site, memory: Payload, at: Tick) -> Guarded:
    """The client's site as an update may use it in a private stage, and what it will have spent.

    Raises ConfigError, before anything is trained, where that is more than the budget.
    """
    assert site.privacy is not None
    if isinstance(stage.reads, str):
        raise ConfigError([f"privacy.unit: {unfit_stage(method)}"], f"client {site.info.id}")
    settings, count = site.privacy.settings, len(site.examples("train"))
    releases = planned(site.privacy, method, site.budget, count)
    (release,) = (planned_release for planned_stage, _, planned_release in releases if planned_stage.name == stage.name)
    spent = together([*spent_of(memory), replace(release, count=release.count * at.span)])
    assert settings.delta is not None
    total = None if settings.epsilon is None else above(spent, settings.epsilon, settings.delta, settings.accountant)
    if total is not None:
        raise ConfigError(
            [
                f"privacy.epsilon: round {at.last} of stage {stage.name} is not started: with it {total:.4g} would be "
                f"spent, and {settings.epsilon:g} is the budget"
            ],
            f"client {site.info.id}",
        )
    noise = release.noise * passes_of(stage)
    mechanism = Mechanism(noise, settings.clip, release.rate, _chance(site, at), site.examples, stage.reads)
    none = _closed(stage)
    closed = replace(site, mechanism=mechanism, examples=none, common_examples=none, values=none)
    closed = replace(closed, parts=lambda site, number, of: none("train"), others=None, stream=None)
    return Guarded(closed, spent, release.count, mechanism)


def _chance(site: Site, at: Tick) -> Chance:
    """Anew for every round, so that rounds are the same whether they come in one message or in several."""
    assert site.privacy is not None
    reproducible = site.privacy.settings.reproducible
    seed = at.seed_for(site.info.id, "privacy").to_bytes(8, "big") if reproducible else secrets.token_bytes(32)
    return Chance(seed)


def _closed(stage: Stage) -> Callable[[str], Any]:
    def closed(split: str) -> NoReturn:
        raise RunError(
            f"stage {stage.name} reads {split} records otherwise than in training, which nothing would "
            "hide; the method's stage has to say so in `reads`"
        )

    return closed


def spent_of(memory: Payload) -> list[Release]:
    """What a client's memory says that it has released."""
    kept = memory.part(PRIVACY).scalars
    columns = [kept.get(name, []) for name in ("rates", "noises", "counts")]
    return [Release(float(rate), float(noise), int(count)) for rate, noise, count in zip(*columns, strict=True)]  # type: ignore[arg-type]


def with_spent(memory: Payload, releases: Sequence[Release]) -> Payload:
    """The memory with these releases in place of those it had."""
    if not releases:
        return memory
    columns: dict[str, Any] = {
        "rates": [release.rate for release in releases],
        "noises": [release.noise for release in releases],
        "counts": [release.count for release in releases],
    }
    return memory.with_part(PRIVACY, Payload({}, columns))
