"""A federation of two shipped backbones through the kernels, with alignment on the benchmark's public records."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from befit.adapters.keys import split
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, RunError
from befit.core.storage import read_sealed, write_sealed
from befit.core.values import Payload, Tick
from befit.methods.parts.mosaic.align.features import Paired
from befit.methods.parts.mosaic.bank import BASES, EVERYBODY, GROUPS, WEIGHTS
from befit.methods.parts.mosaic.relevance import relevance, similarities
from befit.methods.parts.mosaic.sketch import SKETCH, Sketch, last_gradient
from befit.protocol.jobs import finish
from befit.protocol.site import Backbone
from befit.protocol.store import ClientStore
from befit.runs.host import Host
from befit.runs.loading import load_federation
from befit.runs.local import LocalEngine
from befit.runs.runner import run
from tests.federation import AsBytes, Federation, Memo
from tests.tiny import federated
from tests.unit.models.tiny_models import save_speller

METHOD = {"name": "fedmosaic", "rank": 4, "blocks": 2, "relevance": {"every": 1}, "align": {"samples": 40}}


@pytest.fixture(scope="module")
def host() -> Host:
    settings = {
        "name": "mixed",
        "benchmark": {"name": "skills", "clients": 4, "train": 8, "val": 1, "test": 2},
        "model": {"id": "skills-llama", "max_length": 96},
        "adapter": {"targets": ["q_proj", "down_proj"]},
        "families": {"small": {"clients": ["reverse.upper", "star-vowels.reverse"], "model": {"id": "skills-llama-s"}}},
        "method": METHOD,
        "baselines": [],
        "train": {"max_steps": 2, "batch_size": 2},
        "federation": {"rounds": 2},
        "evaluate": {"metrics": ["token_accuracy"]},
    }
    return Host(load_experiment(settings))


@pytest.mark.parametrize("as_bytes", [False, True])
def test_clients_with_two_backbones_learn_from_each_other(host: Host, as_bytes: bool, tmp_path: Path) -> None:
    """Both see gradients of one small model, get cores of both, and the larger backbone its basis once."""
    store, memo = ClientStore(None if not as_bytes else tmp_path / "state", resident=not as_bytes), Memo()
    memo.spool = tmp_path / "spool"
    kind = AsBytes if as_bytes else LocalEngine
    played = Federation.on(host, host.build(METHOD), store=store, journal=memo, engine_class=kind)
    server = played.run(2)
    assert len(memo.updates) == 8 and len(memo.scores) == 4 and not memo.failures
    d_out, d_in = host.common.model.shapes.last
    shapes = {tuple(update.payload.arrays[SKETCH].shape) for _, update in memo.updates}
    assert shapes == {(int(0.4 * d_out * d_in),)} and server.part(GROUPS, EVERYBODY).arrays[SKETCH].shape[0] == 4
    assert server.part(GROUPS, EVERYBODY).arrays["own/0.q_proj/P"].shape == (4, 4, 4)
    large = next(info for info in host.infos if info.backbone != host.common.key)
    memory = store.load(large.id)
    assert memory is not None
    basis = {key: value for key, value in memory.arrays.items() if split(key)[0] == "basis"}
    start = played.server_site.starts[large.backbone]
    assert len(basis) == 8 and not any(torch.equal(value, start[key]) for key, value in basis.items())
    if not as_bytes:
        return
    mixture = federated(played.method).dispatch(server, large, memo.updates[-1][0]).arrays
    weights = server.part(GROUPS, EVERYBODY).arrays[WEIGHTS]
    clients = sorted(info.id for info in host.infos)
    last = {update.client.id: update.payload.arrays for at, update in memo.updates if at.round == 2}
    key = "block.03.q_proj/P"
    expected = sum(
        float(weights[clients.index(large.id), place]) * last[client][f"personal/{key}"]
        for place, client in enumerate(clients)
    )
    torch.testing.assert_close(mixture[f"shared/{key}"], expected)


COMMON = {
    "name": "common",
    "benchmark": {"name": "skills", "clients": 2, "train": 8, "val": 1, "test": 2},
    "model": {"id": "skills-llama", "max_length": 96},
    "adapter": {"targets": ["q_proj", "down_proj"]},
    "method": {"name": "rela", "rank": 4, "relevance": {"every": 1, "noise": 0.0}},
    "baselines": [],
    "train": {"max_steps": 2, "batch_size": 2},
    "federation": {"rounds": 1},
    "evaluate": {"metrics": ["token_accuracy"], "newcomers": False},
}


def test_data_are_compared_by_a_model_that_no_client_trains(tmp_path: Path) -> None:
    """Clients send the common model's gradient at their batches, and a run does not go on with another model."""
    settings = {**COMMON, "common_model": {"id": "skills-llama-s"}}
    experiment = load_experiment(settings)
    assert experiment.common_model is not None and experiment.common_model.max_length == 96, "as under model"
    host = Host(experiment)
    assert host.common.fingerprint not in {one.fingerprint for one in host.backbones.values()}
    assert host.common.model.shapes.last != load_host().common.model.shapes.last
    done = run(settings, out=tmp_path / "run", host=host)
    method, site, (info, _) = host.build(experiment.method), host.install(host.build(experiment.method)), host.infos
    at, client = Tick("federate", 1, 0, 0), host.site(info)
    indices = list(client.indices("train", 2, at))
    small = host.examples(info.id, "train", host.common)
    whole = torch.stack([last_gradient(host.common, small.batch(one)) for one in indices]).mean(0)
    received = federated(method).dispatch(method.server_init(site), info, at)
    _, reply = finish(federated(method).client_update(method.client_init(client), received, client, at))
    torch.testing.assert_close(reply.arrays[SKETCH], Sketch().take(whole, 0))
    (done.path / "report.html").unlink()
    basis = read_sealed(done.path / "run.json")
    write_sealed(done.path / "run.json", {**basis, "common_model": "0" * 64})
    with pytest.raises(RunError, match="common_model changed"):
        run(settings, out=tmp_path / "run", resume=True, host=host)


def load_host(**more: object) -> Host:
    return Host(load_experiment({**COMMON, **more}))


def test_a_common_model_that_a_family_has_is_not_loaded_twice() -> None:
    host = load_host(common_model={"id": "skills-llama"})
    assert host.common is next(iter(host.backbones.values()))


def test_a_common_model_without_a_name_or_on_flower_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"common_model\.id: is required"):
        load_experiment({**COMMON, "common_model": {"dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match=r"common_model\.max_length: must be positive"):
        load_experiment({**COMMON, "common_model": {"id": "skills-llama-s", "max_length": 0}})
    with pytest.raises(
        ConfigError, match="common_model: the smallest of the families' models is the one that all sites have"
    ):
        load_experiment({**COMMON, "common_model": {"id": "skills-llama-s"}, "engine": {"kind": "flower"}})


@pytest.fixture(scope="module")
def spellers(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Three backbones of other widths and depths, each with a tokenizer of its own, and as few public records as do."""
    folder = tmp_path_factory.mktemp("spellers")
    wide = save_speller(folder / "wide", 40, hidden_size=24, num_hidden_layers=4)
    small = save_speller(folder / "small", 0)
    third = save_speller(folder / "third", 12, hidden_size=20, num_hidden_layers=3)
    experiment = load_experiment(
        {
            "name": "spellers",
            "benchmark": {"name": "skills", "clients": 4, "train": 8, "val": 1, "test": 2},
            "model": {"id": str(wide), "max_length": 96},
            "adapter": {"targets": ["q_proj", "down_proj"]},
            "families": {
                "small": {"clients": ["reverse.upper"], "model": {"id": str(small), "max_length": 96}},
                "third": {"clients": ["drop-first.reverse"], "model": {"id": str(third), "max_length": 96}},
            },
            "method": METHOD,
            "baselines": [],
            "train": {"max_steps": 2, "batch_size": 2, "lr": 1e-2},
            "evaluate": {"metrics": ["token_accuracy"], "newcomers": False},
        }
    )
    whole = load_federation(experiment)
    return Host(experiment, replace(whole, public=whole.public[:60]))


def test_three_backbones_with_tokenizers_of_their_own_share_cores_and_compare_gradients_of_one_model(
    spellers: Host,
) -> None:
    """What a client sends is the gradient of the small model on its records as the small model reads them; cores mix
    over all, plain factors within the pair that has a backbone in common."""
    config = {**METHOD, "relevance": {"every": 1, "noise": 0.0, "share": 1.0, "mask": "rows", "ema": 1.0}}
    played = Federation.on(spellers, spellers.build(config))
    server, memo = played.run(2), played.journal
    assert not memo.failures and len(memo.updates) == 8 and len(memo.scores) == 4
    lengths = {len(one.task.tokenizer) for one in spellers.backbones.values()}  # type: ignore[attr-defined]
    assert len(spellers.backbones) == len(lengths) == 3
    last = {update.client.id: update.payload.arrays for at, update in memo.updates if at.round == 2}
    at = next(at for at, _ in memo.updates if at.round == 2)
    small = spellers.common
    for info in spellers.infos:
        examples, one = spellers.examples(info.id, "train", small), spellers.site(info)
        batches = [examples.batch(indices) for indices in one.indices("train", 2, at)]
        expected = torch.stack([last_gradient(small, batch) for batch in batches]).mean(0)
        torch.testing.assert_close(last[info.id][SKETCH], expected, rtol=1e-4, atol=1e-8)
    clients = sorted(last)
    W = relevance(similarities(torch.stack([last[one][SKETCH] for one in clients])), 0.5, range(4))
    blocks = {info.id: {4: "01", 3: "00", 2: "00"}[_depth(spellers, info.id)] for info in spellers.infos}
    for info in spellers.infos:
        mixture = federated(played.method).dispatch(server, info, replace(at, round=3)).arrays
        cores = torch.stack([last[one][f"personal/block.{blocks[one]}.q_proj/P"] for one in clients])
        expected = torch.tensordot(W[clients.index(info.id)], cores, 1)
        assert expected.any()
        torch.testing.assert_close(mixture[f"shared/block.{blocks[info.id]}.q_proj/P"], expected)
        peers = [one.id for one in spellers.infos if one.backbone == info.backbone]
        (peer,) = [one for one in peers if one != info.id] or peers  # who is alone gets its own back
        for key in (one for one in mixture if split(one)[2] in ("A", "B")):
            torch.testing.assert_close(mixture[key], last[peer][key.replace("shared", "personal")])
    bases = server.part(BASES).parts()
    assert bases.keys() == spellers.backbones.keys() - {small.key}
    starts = played.server_site.starts
    for family, basis in bases.items():
        assert not any(torch.equal(value, starts[family][key]) for key, value in basis.arrays.items())


def _depth(host: Host, client: str) -> int:
    return int(host.backbone_of(client).model.backbone.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]


def test_backbones_with_other_tokenizers_are_aligned_where_both_cut_an_answer(spellers: Host) -> None:
    """As many pairs of rows as there are common ends of tokens in the answers of the public records: at fewer places
    than the letters of the small model, and at more than the answers."""

    def ends(one: Backbone) -> list[set[int]]:
        tokenizer, examples = one.task.tokenizer, spellers.public(one.key)  # type: ignore[attr-defined]
        found = []
        for record in range(len(examples)):
            learnt = [int(token) for token in examples.batch([record])["labels"][0] if token >= 0]
            pieces = tokenizer.convert_ids_to_tokens(learnt, skip_special_tokens=True)
            found.append(set(accumulate(len(piece) for piece in pieces)))
        return found

    letters = ends(spellers.common)
    for one in spellers.backbones.values():
        if one is not spellers.common:
            common = sum(len(few & all_) for few, all_ in zip(ends(one), letters, strict=True))
            assert len(letters) < common < sum(map(len, letters))
            pairs = Paired.of(spellers.common, one, spellers.public, 2).batches(60, 16, 0)
            assert sum(len(batch["1.down_proj"][1]) for batch in pairs) == common


def test_takfl_teaches_across_tokenizers_what_the_others_clients_say(spellers: Host) -> None:
    """Another answer of one family's clients changes the adapter of every other, and more than rounding does."""
    config = {"name": "takfl", "rank": 2, "distil": {"samples": 4, "top": 8, "lr": 0.05}}
    played = Federation.on(spellers, spellers.build(config))
    server, memo = played.run(1), played.journal
    assert not memo.failures and len(memo.updates) == 4
    (at, *_), updates = zip(*memo.updates, strict=True)
    before = played.method.server_init(played.server_site)
    for family in spellers.backbones:
        louder = [
            replace(one, payload=Payload({key: 4 * value for key, value in one.payload.arrays.items()}))
            if one.client.backbone == family
            else one
            for one in updates
        ]
        found = federated(played.method).aggregate(before, louder, played.server_site, at)
        for other in spellers.backbones.keys() - {family}:
            plain, taught = (one.part(other).arrays for one in (server, found))
            assert max(float((plain[key] - taught[key]).abs().max()) for key in plain) > 1e-3
