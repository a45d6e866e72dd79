"""What every registered method has to keep, whatever it computes."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod
from pathlib import Path

import pytest
import torch

from befit.adapters.keys import slot_of
from befit.adapters.mixers import constant_weights
from befit.adapters.state import fingerprint
from befit.core.values import Tick
from befit.core.wire_form import Wire
from befit.flower import replies
from befit.protocol.describe import describe
from befit.protocol.federate import final_download
from befit.protocol.method import run_stages
from befit.protocol.registry import get_method, method_names
from befit.protocol.serve import held_out_loss
from befit.protocol.store import ClientStore
from befit.runs.estimate import communication
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from tests.federation import Federation, Memo, Stop

from .conftest import METHODS_BY_PATTERN, ROUNDS, BackToFront, Once, Play, Unmeasured, built

PAGES = Path(__file__).parents[2] / "docs" / "methods"
AUTHORS = r"[A-Z]\w+(?: et al\.| and [A-Z]\w+)"
ADDRESS = r"arXiv:\d{4}\.\d{5}|openreview\.net/forum\?id=\w+"
NUMBERED = r"(eqs?\.|Algorithms?|Tables?|Figures?|sections?|appendix|definitions?|Theorems?) ([A-Z]?\.?\d|[A-Z]\b)"
# Papers of which no part is named by a number, with what stands in for them; the pages say so in one of these words.
UNREAD = ("Of the paper only the abstract was read", "The place in the paper was not looked up")
UNNUMBERED = {
    "arXiv:2502.15436": "Fed-SB: a copy of the authors' code",
    "arXiv:2509.06984": "FediLoRA: the authors' code",
    "arXiv:2111.09832": "Fisher merging: section 4.2 and appendix H of the paper of Potara",
    "arXiv:2308.12305": "FedDAT: the code of FedMosaic's authors, who compare with it",
    "arXiv:2310.02420": "FedL2P: text and code of FedP2EFT, which compare with it",
    "arXiv:2204.03809": "FedSim: the code of FedMosaic's authors, who compare with it",
}
# All tests of one method one after the other, so that what they have in common is on one worker.
EVERY_METHOD = pytest.mark.parametrize("name", method_names(), scope="module")
# The methods whose exchange is of the personal adapters themselves.
OF_PERSONAL_ADAPTERS = {"fdlora", "fedalt", "fedmosaic", "guidance", "rela", "relora"}
OF_GATES = {"fedlease"}  # which are averaged in clusters
# With the papers' server_lr of 1e-3 these learn too, in many more rounds.
TO_LEARN_IN_SIX_ROUNDS = {name: {"server_lr": 1e-2} for name in ("fedadagrad", "fedadam", "fedyogi")}
ROUNDS_TO_LEARN = {"scaffold": 12}


@EVERY_METHOD
def test_however_a_run_is_carried_out_its_numbers_are_the_same_bit_for_bit(
    name: str, play: Play, once: Once, host: Host, tmp_path: Path
) -> None:
    """Messages as bytes, memories on disk, replies in the opposite order, nothing scored but the end, and a crash after
    every message: none of it is in the numbers. And nothing of it changes the backbone.

    If this fails, `play` with each of them alone says which it is.
    """
    weights = {key: value.clone() for key, value in host.model.backbone.state_dict().items()}
    plain = once(name)

    def carry_on(store: ClientStore, journal: Memo) -> Federation:
        return play(name, engine_class=BackToFront, store=store, spool_bytes=0, journal=journal)

    store, journal = ClientStore(tmp_path / "state", resident=False), Memo(stop_after=1)
    for _ in plain.journal.completed_points:
        with pytest.raises(Stop):
            carry_on(store, journal)
        (point,) = journal.completed_points
        files, serial = store.commit(), store.serial
        store, journal = ClientStore(tmp_path / "state", resident=False), Memo(point=point, stop_after=1)
        store.restore(files, serial)
    outcome = carry_on(store, journal)
    assert outcome.prints() == plain.prints()
    for key, value in host.model.backbone.state_dict().items():
        assert torch.equal(value, weights[key]), key


def losses_of_round_one(journal: Memo) -> dict[str, float]:
    """What every client said of the first training of a run."""
    first = journal.updates[0][0]
    told = {update.client.id: update.report for at, update in journal.updates if at == first}
    assert all("loss" in report for report in told.values()), (
        "its updates report no loss: call site.report.update(report.numbers()) after training"
    )
    return {client: report["loss"] for client, report in told.items()}


@EVERY_METHOD
def test_uploads_are_exactly_what_is_declared(name: str, once: Once, host: Host) -> None:
    outcome = once(name)
    method = built(name)
    host.install(method)
    stages = {stage.name: stage for stage in run_stages(method)}
    assert outcome.journal.updates
    for at, update in outcome.journal.updates:
        stage = stages[at.stage]
        declared = stage.reply_in(at.round).specs(host.model.specs)
        assert {key: tuple(t.shape) for key, t in update.payload.arrays.items()} == {
            key: spec.shape for key, spec in declared.items()
        }
        if not stages[at.stage].federated:
            assert not update.payload.arrays and not update.payload.scalars


@EVERY_METHOD
def test_a_clients_own_slots_leave_it_only_in_methods_that_are_about_exchanging_them(name: str, once: Once) -> None:
    sent = {slot_of(key) for _, update in once(name).journal.updates for key in update.payload.arrays}
    assert ("personal" in sent, "gate" in sent) == (name in OF_PERSONAL_ADAPTERS, name in OF_GATES)
    assert "merged" not in sent


@EVERY_METHOD
def test_nothing_but_the_declared_arrays_and_numbers_is_on_the_outbound_list(name: str, once: Once, host: Host) -> None:
    outcome = once(name)
    method = built(name)
    host.install(method)
    stages = {stage.name: stage for stage in run_stages(method)}
    for rows in outcome.journal.outbound.as_dict().values():
        for row in rows:
            if not row["shape"]:
                assert row["bytes"] < 100  # plain numbers
                continue
            stage = stages[row["stage"]]
            assert row["name"] in stage.reply.specs(host.model.specs)
            rounds = [stage.reply_in(number + 1).specs(host.model.specs) for number in range(stage.rounds or ROUNDS)]
            assert row["count"] == sum(row["name"] in sent for sent in rounds)
            assert row["bytes"] == 4 * prod(row["shape"])


@EVERY_METHOD
def test_what_a_client_says_beside_its_arrays_is_what_a_server_takes(name: str, once: Once) -> None:
    """Names and ranges of what it reports and of its scores; over a network anything else is refused."""
    journal = once(name).journal
    for _, update in journal.updates:
        assert replies.report({"report": update.report}) == update.report
        assert replies.scalars({"scalars": update.payload.scalars}) == update.payload.scalars
    for _, score in journal.scores:
        assert replies.metrics({"metrics": score.metrics}, "accuracy", score.examples) == score.metrics


@EVERY_METHOD
def test_what_it_deploys_has_a_loss_on_held_out_examples_and_measuring_it_changes_nothing(
    name: str, once: Once, host: Host
) -> None:
    """What `federation.deploy: best` chooses by, whatever the slots and however they are mixed."""
    outcome, method = once(name), built(name)
    host.install(method)
    before, last = outcome.prints(), run_stages(method)[-1]
    at = Tick(last.name, last.rounds or ROUNDS, last.rounds or ROUNDS, 0)
    info = outcome.engine.clients()[0]
    deployed = outcome.engine.deployment(info.id, final_download(method, outcome.server, info, at), at)
    site = host.site(info)
    loss = held_out_loss(site, deployed, 7)
    assert loss == pytest.approx(held_out_loss(site, deployed, 256), rel=1e-5) and loss > 0
    bare = host.task.evaluate(host.model.backbone, site.examples("val"), 256, "cpu")
    assert outcome.prints() == before and bare["loss"] != pytest.approx(loss, rel=1e-6)


@EVERY_METHOD
def test_what_is_scored_is_the_model_that_was_trained(name: str, once: Once, host: Host) -> None:
    """Scoring folds adapters into the weights wherever these are the same for every input: to the last few bits that
    changes no answer. Within it another model can be asked, such as the backbone alone."""
    outcome, method = once(name), built(name)
    host.install(method)
    last = run_stages(method)[-1]
    at = Tick(last.name, last.rounds or ROUNDS, last.rounds or ROUNDS, 0)
    site = host.site(info := outcome.engine.clients()[0])
    deployed = outcome.engine.deployment(info.id, final_download(method, outcome.server, info, at), at)
    model, examples, calls = site.model, site.examples("test"), list[str]()
    model.reset()
    model.load(deployed.arrays)
    batch = examples.batch(range(len(examples)))
    handles = [
        layer.base.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, layer in model.layers.items()
    ]
    with torch.no_grad():
        with model.active():
            bare = site.logits(batch)
        with model.active(*deployed.slots, mixer=deployed.mixer):
            trained = site.logits(batch)
        with model.scoring(*deployed.slots, mixer=deployed.mixer):
            calls.clear()
            scored, used = site.logits(batch), len(calls)
            with model.active():
                inside = site.logits(batch)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(scored, trained, rtol=1e-4, atol=1e-5)
    assert torch.equal(inside, bare) and not torch.allclose(scored, bare, rtol=1e-4, atol=1e-5)
    alike = constant_weights(deployed.mixer, model.layout, deployed.slots, deployed.arrays) is not None
    assert (used < len(model.layers)) == (alike and not model.whole_slots)  # all but those with nothing to add


@EVERY_METHOD
def test_the_bytes_formula_is_what_the_wire_counts(name: str, once: Once, host: Host) -> None:
    outcome = once(name)
    method = built(name)
    host.install(method)
    expected = communication(method, host.model.specs, ROUNDS, Wire(), replies=len(host.infos))
    first = outcome.engine.clients()[0].id
    arrays = sum(
        tensor.nbytes
        for _, update in outcome.journal.updates
        if update.client.id == first
        for tensor in update.payload.arrays.values()
    )
    counted = sum(update.cost.bytes_up for _, update in outcome.journal.updates if update.client.id == first)
    assert arrays == expected["bytes_up_total"]
    assert counted == arrays
    down = sum(update.cost.bytes_down for _, update in outcome.journal.updates if update.client.id == first)
    # A first round may send less, where there is nothing to send yet, and a few numbers may travel beside the arrays.
    assert expected["bytes_down_total"] - expected["bytes_down_per_round"] <= down
    assert down <= expected["bytes_down_total"] + 200


@EVERY_METHOD
def test_everything_that_a_method_says_it_trains_changes(name: str, once: Once, host: Host) -> None:
    outcome = once(name)
    method = built(name)
    initial = host.install(method).initial
    trained = {key for key in initial if method.trainable()(key)}
    seen: set[str] = set()
    for states in (
        [p.arrays for p in outcome.memories().values() if p],
        [u.payload.arrays for _, u in outcome.journal.updates],
    ):
        for state in states:
            seen |= {key for key in trained & state.keys() if not torch.equal(state[key], initial[key])}
    # A budget of ranks leaves modules out: nobody has an adapter there, and everywhere else somebody's changes.
    held = [memory.arrays for memory in outcome.memories().values() if memory]
    chosen = {key.removesuffix("lambda") for state in held for key, value in state.items() if value.any()}
    left_out = {key.removesuffix("lambda") for key in initial if key.endswith("/lambda")} - chosen
    assert seen == {key for key in trained if f"{key.rpartition('/')[0]}/" not in left_out}


@EVERY_METHOD
def test_with_another_seed_clients_train_otherwise(name: str, play: Play, once: Once) -> None:
    journal = Memo(stop_after=1)
    with pytest.raises(Stop):  # the first training is all that is looked at
        play(name, seed=1, journal=journal)
    ours, others = losses_of_round_one(once(name).journal), losses_of_round_one(journal)
    assert ours.keys() == others.keys() and len(ours) == 3
    assert all(ours[client] != others[client] for client in ours)


@pytest.mark.parametrize("name", METHODS_BY_PATTERN, scope="module")
def test_clients_beat_the_model_they_started_from(name: str, play: Play, host: Host) -> None:
    learning = built(name, **TO_LEARN_IN_SIX_ROUNDS.get(name, {}))
    outcome = play(learning, rounds=ROUNDS_TO_LEARN.get(name, 6), seed=1)
    final = [score.metrics["accuracy"] for _, score in outcome.journal.scores[-len(host.infos) :]]
    with host.model.active():
        bare = [
            host.task.evaluate(host.model.backbone, host.examples(info.id, "test"), 256, "cpu")["accuracy"]
            for info in host.infos
        ]
    assert sum(final) / len(final) > sum(bare) / len(bare) + 0.1


@EVERY_METHOD
def test_one_client_in_a_cohort_leaves_the_others_as_they_were(name: str, play: Play) -> None:
    method = built(name)
    if not any(stage.federated for stage in run_stages(method)) or built(name).needs.min_clients > 1:
        pytest.skip("has no cohorts, or needs company")
    journal = play(name, cohort=1, rounds=3, engine_class=Unmeasured).journal
    stages = {stage.name: stage for stage in run_stages(method)}
    assert not journal.failures
    for number in (1, 2, 3):
        replies = [at.stage for at, _ in journal.updates if stages[at.stage].federated and at.round == number]
        assert replies and len(replies) == len(set(replies))


@pytest.mark.parametrize("name", METHODS_BY_PATTERN, scope="module")
def test_bfloat16_on_the_wire_halves_the_bytes_and_rounds_what_arrives(name: str, play: Play, once: Once) -> None:
    half = play(name, wire=Wire(torch.bfloat16), rounds=1, engine_class=Unmeasured)
    full = {(at.stage, at.round, update.client.id): update for at, update in once(name).journal.updates}
    for at, sent in half.journal.updates:
        same = full[at.stage, 1, sent.client.id]
        assert sent.cost.bytes_up * 2 == same.cost.bytes_up
        assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in sent.payload.arrays.values())
        if sent.payload.arrays:
            assert fingerprint(sent.payload.arrays) != fingerprint(same.payload.arrays)
    assert all(tensor.dtype == torch.float32 for tensor in half.server.arrays.values())


@EVERY_METHOD
def test_the_docstring_names_what_travels(name: str) -> None:
    assert "up = down" in get_method(name).docstring
    described = describe(built(name))
    assert described["up"] and described["down"] and described["stages"]


@EVERY_METHOD
def test_every_source_of_a_docstring_is_on_the_page_of_the_method(name: str) -> None:
    """The last paragraph is `Source: PLACE; PLACE; PAGE.`, and the page says more of each place.

    A place is `AUTHORS YEAR, WHERE`, of a paper whose arXiv id the page has, or `OWNER/REPOSITORY, FILES`, of released
    code. One of the papers is the one the method is registered with, and of the same year.
    """
    entry = get_method(name)
    last = " ".join(entry.docstring.split("\n\n")[-1].split())
    assert last.startswith("Source: ") and last.endswith(f"; docs/methods/{name}.md.")
    on_page = {place: address for place, address, _ in page_sources(name)}
    for place in last.removeprefix("Source: ").split("; ")[:-1]:
        assert place in on_page, place
    if entry.paper:
        years = {re.sub(r"\D+(\d{4}).*", r"\1", place) for place, at in on_page.items() if at == entry.paper}
        assert years == {str(entry.year)}


@EVERY_METHOD
def test_every_source_on_the_page_of_a_method_has_a_place_and_an_address(name: str) -> None:
    """A place in a paper has a number. Where nobody has seen it, the page says what was read."""
    for place, address, taken in page_sources(name):
        code = re.fullmatch(r"([\w-]+/[\w.-]+), \S+\.(py|yaml)( and \S+\.(py|yaml))?", place)
        if code:
            assert address == f"github.com/{code[1]}"
            continue
        paper = re.fullmatch(rf"{AUTHORS} \d{{4}}[a-z]?, (.+)", place)
        assert paper, place
        assert re.fullmatch(ADDRESS, address), address
        assert bool(re.match(NUMBERED, paper[1])) != (address in UNNUMBERED), f"{name}: {place}"
        if address in UNNUMBERED:
            assert any(words in taken for words in UNREAD), f"{name}: {place}"


@EVERY_METHOD
def test_the_page_of_a_method_says_whether_released_code_is_compared(name: str) -> None:
    below = sources_of(name)
    assert ("(github.com/" in below) != ("No released code is compared." in below)


def test_a_paper_has_one_name_and_a_name_one_paper() -> None:
    """On all pages: two papers of the same authors and year are 2025a and 2025b."""
    addresses, names = defaultdict(set), defaultdict(set)
    for path in sorted(PAGES.parent.rglob("*.md")):
        text = " ".join(path.read_text(encoding="utf-8").split())
        for paper, address in re.findall(rf"({AUTHORS} \d{{4}}[a-z]?),(?: [^*]+\*\*)? \(?({ADDRESS})", text):
            addresses[paper].add(address)
            names[address].add(paper)
    assert len(names) > 40
    assert {paper: found for paper, found in addresses.items() if len(found) > 1} == {}
    assert {address: found for address, found in names.items() if len(found) > 1} == {}


def sources_of(name: str) -> str:
    """What stands below "Sources" on the page, on one line."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    return text.split("\n## Sources\n", 1)[1].split("\n## ", 1)[0]


def page_sources(name: str) -> list[tuple[str, str, str]]:
    """Place, address and what is taken from there: `- **PLACE** (ADDRESS): what is taken from there`."""
    items = re.split(r"\n- ", sources_of(name))[1:]
    found = [re.fullmatch(r"\*\*(.+?)\*\* \((\S+)\): (\w.+)", " ".join(item.split())) for item in items]
    assert all(found), items
    return [(match[1], match[2], match[3]) for match in found if match]


class OfThree(LocalEngine):
    """Three rounds that a client takes alone are one message."""

    span = 3


def test_messages_of_several_rounds_end_where_a_score_is_due(play: Play) -> None:
    """With scores after rounds 4 and 8 of 9."""
    done, plain = (play("local", rounds=9, every=4, engine_class=engine) for engine in (OfThree, LocalEngine))
    messages = [(at.round, at.last) for at, update in done.journal.updates if update.client.id == "client-00"]
    assert messages == [(1, 3), (4, 4), (5, 7), (8, 8), (9, 9)]
    scores = [[(at.last, score.client, score.metrics) for at, score in one.journal.scores] for one in (done, plain)]
    assert scores[0] == scores[1] and {round_ for round_, *_ in scores[0]} == {4, 8, 9}
    assert done.prints() == plain.prints()
