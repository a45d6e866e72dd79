"""What every method says that it reads of records is true: nothing else gets at them where examples are protected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from befit.adapters.state import norm, scale
from befit.core.errors import ConfigError, NotEnoughReplies, RunError
from befit.core.values import Failure, Payload, Tick, Update
from befit.protocol.accountant import Release, epsilon
from befit.protocol.client_privacy import ClientPlan, unfit_for_clients
from befit.protocol.describe import describe
from befit.protocol.jobs import finish
from befit.protocol.mechanism import Privacy
from befit.protocol.privacy import EPSILON, guarded, private_stages, spent_of, unfit_stage
from befit.protocol.registry import method_names
from befit.protocol.settings import GuardSettings, PrivacySettings
from befit.protocol.site import Site
from befit.protocol.store import ClientStore
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from tests.federation import Memo, Stop

from .conftest import METHODS_BY_PATTERN, ROUNDS, Play, built

pytest.importorskip("dp_accounting")
SETTINGS = PrivacySettings("example", delta=1e-3, noise_multiplier=1.0, accountant="rdp", reproducible=True)
FIT = [name for name in method_names() if private_stages(built(name)) and not unfit_stage(built(name))]
UNFIT = [name for name in method_names() if unfit_stage(built(name))]
UNFIT_FOR_CLIENTS = (
    "fdlora fed_sb fedalt fedex_lora fedilora fedl2p fedlease fedmkt fedmomentum fedmosaic fedrot_lora flexlora flora "
    "hetlora ifca lora_fair perada ravan rela relora takfl"
)
AT = Tick("federate", 1, 1, 0)


@pytest.fixture
def private(host: Host) -> Iterator[Host]:
    before = host.experiment
    host.experiment = replace(before, privacy=SETTINGS)
    yield host
    host.experiment = before


@pytest.mark.parametrize("name", [param for param in METHODS_BY_PATTERN if param.values[0] in FIT])
def test_a_method_that_declares_gradients_reads_nothing_else(name: str, private: Host, play: Play) -> None:
    """Its updates run where records are out of reach but for training; losses stay, and what is spent is told."""
    outcome = play(name, rounds=1)
    assert not outcome.journal.failures
    sent = [update for at, update in outcome.journal.updates if at.stage == private_stages(built(name))[-1].name]
    assert sent and all(update.report[EPSILON] > 0 for update in sent)
    assert not any(key.startswith("loss") for update in sent for key in update.report)


def test_what_is_said_of_clients_is_what_is_checked(host: Host) -> None:
    """`befit explain` and the table of docs/privacy.md know no model, and say of every method what a run would."""
    shapes = [backbone.model.shapes for backbone in host.backbones.values()]
    checked = {name: not any(unfit_for_clients(built(name), shapes)) for name in method_names()}
    said = {name: str(describe(built(name))["protects clients"]) for name in method_names()}
    assert {name: text in ("yes", "nothing leaves a client") for name, text in said.items()} == checked
    assert " ".join(sorted(name for name, fits in checked.items() if not fits)) == UNFIT_FOR_CLIENTS


@pytest.mark.parametrize("name", UNFIT)
def test_a_method_that_declares_more_is_stopped_where_it_reads_it(name: str, private: Host) -> None:
    """Its plan is refused; and if it said that it trains alone, the site would be out of reach where it reads more."""
    method, site = built(name), private.site(private.infos[0])
    server = private.install(method)
    (stage, *_) = (one for one in private_stages(method) if isinstance(one.reads, str))
    memory = method.client_init(site)
    with pytest.raises(ConfigError, match=f"stage {stage.name} computes"):
        guarded(method, stage, site, memory, AT)
    simple = built("fedit")
    closed = guarded(simple, private_stages(simple)[0], site, memory, AT).site
    received = stage.exchange.dispatch(method.server_init(server), site.info, AT)
    site.model.reset()
    with pytest.raises(RunError, match=r"otherwise than in training|not what the stage declares"):
        finish(stage.exchange.client_update(memory, received, closed, replace(AT, stage=stage.name)))


def test_the_mechanism_is_what_is_counted(private: Host) -> None:
    """Two passes on one batch have the configuration's noise each; as one release they have 1 / sqrt(2) of it."""
    method, clip = built("ditto"), 0.25
    private.install(method)
    site, (stage, *_) = private.site(private.infos[0]), private_stages(method)
    site = replace(site, privacy=Privacy(replace(SETTINGS, clip=clip), ROUNDS))
    closed = guarded(method, stage, site, Payload(), replace(AT, stage=stage.name))
    mechanism, (spent,) = closed.site.mechanism, closed.spent
    assert mechanism is not None
    assert (mechanism.noise, mechanism.clip) == (pytest.approx(1.0), clip)
    assert mechanism.rate == spent.rate == 10 / len(site.examples("train")) < 1
    assert spent.noise == pytest.approx(2**-0.5)


def test_noise_is_drawn_anew_but_where_a_configuration_wants_it_again(private: Host) -> None:
    method = built("fedit")
    private.install(method)
    site, (stage, *_) = private.site(private.infos[0]), private_stages(method)
    secret = replace(site, privacy=Privacy(replace(SETTINGS, reproducible=False), ROUNDS))

    def drawn(at_site: Site) -> list[float]:
        mechanism = guarded(method, stage, at_site, Payload(), AT).site.mechanism
        assert mechanism is not None
        return mechanism.chance.normal(4).tolist()

    assert drawn(site) == drawn(site) and not {*drawn(secret)} & {*drawn(secret)}


def test_a_private_update_has_its_records_by_no_other_way(private: Host) -> None:
    method = built("fedit")
    private.install(method)
    site, (stage, *_) = private.site(private.infos[0]), private_stages(method)
    closed = guarded(method, stage, replace(site, stream=object()), Payload(), AT).site  # type: ignore[arg-type]
    for records in (closed.examples, closed.common_examples, closed.values):
        assert records is not None
        with pytest.raises(RunError, match="reads train records otherwise than in training"):
            records("train")
    assert len(site.in_part(1, 3).examples("train"))
    with pytest.raises(RunError, match="reads train records otherwise than in training"):
        closed.in_part(1, 3)
    assert closed.others is None and closed.stream is None


def test_what_is_spent_survives_a_crash_and_is_counted_once(private: Host, play: Play) -> None:
    """Stopped after every message: the same numbers to the bit, and each round's release counted once."""
    plain = play("ditto")
    store, journal = ClientStore(None), Memo(stop_after=1)
    for _ in range(2):
        with pytest.raises(Stop):
            play("ditto", store=store, journal=journal)
        journal = Memo(point=journal.completed_points[-1], stop_after=1)
    outcome = play("ditto", store=store, journal=replace(journal, stop_after=None))
    assert outcome.prints() == plain.prints()
    (info, *_) = private.infos
    memory = outcome.store.load(info.id)
    assert memory is not None
    (release,) = spent_of(memory)
    assert release.count == 3 * 2 and release.noise == pytest.approx(2**-0.5)  # rounds, steps; two passes a batch
    assert release.rate == pytest.approx(min(1.0, 10 / info.num_examples))
    told = [update.report[EPSILON] for _, update in plain.journal.updates if update.client.id == info.id]
    assert told == sorted(told) and told[-1] == epsilon((release,), 1e-3, "rdp")


def test_a_round_that_would_overspend_is_not_started(host: Host, play: Play) -> None:
    """With a budget for two rounds of three, the third fails at every client before it trains."""
    spent = epsilon(tuple(spent_after(host, play, 2)), 1e-3, "rdp")
    before = host.experiment
    host.experiment = replace(before, privacy=replace(SETTINGS, epsilon=spent))
    try:
        with pytest.raises(NotEnoughReplies, match="round 3 of stage federate is not started"):
            play("fedit", journal=(journal := Memo()))
    finally:
        host.experiment = before
    assert {at.round for at, _ in journal.updates} == {1, 2}


def test_a_round_of_which_nobody_is_goes_on_with_noise(host: Host, play: Play) -> None:
    """With a client in a round in a few hundred, these have none: each moves the server all the same."""
    settings = PrivacySettings("client", delta=1e-1, noise_multiplier=1.0, reproducible=True)
    plan = ClientPlan(settings, 3, 1e-3, 2)
    outcome = play("fedit", rounds=2, clients_plan=plan)
    assert outcome.journal.forced == 2  # what went out with noise is never made anew
    assert not outcome.journal.updates and len(outcome.journal.completed_points) == 2
    first, second = (point.server.arrays["shared/block.00.q_proj/B"] for point in outcome.journal.completed_points)
    assert float(first.std()) > 0 and not first.equal(second)


class Uninvited(LocalEngine):
    """Everybody answers, whoever was asked."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        return super().exchange({info.id: requests[info.id] for info in self.clients()}, at)


def test_a_reply_of_a_client_that_was_not_drawn_is_not_used(play: Play) -> None:
    """What the noise hides is counted by how often a client is drawn."""
    settings = PrivacySettings("client", delta=1e-1, noise_multiplier=1.0, reproducible=True)
    outcome = play("fedit", rounds=1, clients_plan=ClientPlan(settings, 3, 1e-3, 1), engine_class=Uninvited)
    assert not outcome.journal.updates and len(outcome.journal.failures) == 3
    assert all("a reply that nobody asked for" in failure.reason for failure in outcome.journal.failures)


class Boasting(LocalEngine):
    """client-01 sends a thousand times as much."""

    def exchange(self, requests: Mapping[str, Payload], at: Tick) -> Iterator[Update | Failure]:
        for reply in super().exchange(requests, at):
            if isinstance(reply, Update) and reply.client.id == "client-01":
                reply = replace(reply, payload=Payload(scale(reply.payload.arrays, 1e3)))
            yield reply


@pytest.mark.parametrize("rule", ["none", "krum"])
def test_no_clients_reply_decides_whether_anothers_counts(rule: str, play: Play) -> None:
    """What the noise is measured by is the clip alone. The guard, which compares replies, would refuse the long one and
    take the most central of the others for all."""
    settings = PrivacySettings("client", delta=1e-1, noise_multiplier=1e-6, reproducible=True, clip=0.1)
    guard = GuardSettings(rule=rule, attackers=1 if rule == "krum" else 0)  # type: ignore[arg-type]
    outcome = play("fedit", rounds=1, clients_plan=ClientPlan(settings, 3, 1.0, 1), engine_class=Boasting, guard=guard)
    assert not outcome.journal.failures and len(outcome.journal.updates) == 3
    starts = outcome.server_site.initial
    changes = [
        {key: value - starts[key] for key, value in update.payload.arrays.items()}
        for _, update in outcome.journal.updates
    ]
    for key, value in outcome.server.arrays.items():
        mean = sum(change[key] * min(1.0, 0.1 / norm(change)) for change in changes) / 3
        torch.testing.assert_close(value, starts[key] + mean, rtol=1e-4, atol=1e-5)


def test_every_client_takes_its_stages_alone_whoever_was_drawn_before(play: Play) -> None:
    settings = PrivacySettings("client", delta=1e-1, noise_multiplier=1.0, reproducible=True)
    outcome = play("feddpa", rounds=1, clients_plan=ClientPlan(settings, 3, 1e-3, 1))
    assert [(at.stage, update.client.id) for at, update in outcome.journal.updates] == [
        ("remember", info.id) for info in outcome.infos
    ]


def test_a_clip_that_follows_the_updates_survives_a_crash(play: Play) -> None:
    settings = PrivacySettings("client", delta=1e-1, noise_multiplier=0.5, quantile=0.5, reproducible=True)
    plan, store, journal = ClientPlan(settings, 3, 1.0, 2), ClientStore(None), Memo(stop_after=1)
    plain = play("fedit", rounds=2, clients_plan=plan)
    with pytest.raises(Stop):
        play("fedit", rounds=2, clients_plan=plan, store=store, journal=journal)
    (point,) = journal.completed_points
    outcome = play("fedit", rounds=2, clients_plan=plan, store=store, journal=Memo(point=point))
    assert point.clip not in (None, 1.0) and outcome.prints() == plain.prints()


def spent_after(host: Host, play: Play, rounds: int) -> list[Release]:
    before = host.experiment
    host.experiment = replace(before, privacy=SETTINGS)
    try:
        store = play("fedit", rounds=rounds).store
    finally:
        host.experiment = before
    smallest = min(host.infos, key=lambda info: info.num_examples)
    memory = store.load(smallest.id)
    assert memory is not None
    return spent_of(memory)
