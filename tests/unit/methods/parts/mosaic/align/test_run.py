"""Two Llamas of different depth and width, aligned on public records (FedMosaic, Algorithms 3 and 4)."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from befit.adapters.keys import EVERYTHING, slot, split
from befit.adapters.pq import BASIS
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError, PayloadMismatch, RunError
from befit.core.values import ClientInfo, Payload, State, Tick
from befit.core.wire import from_bytes, to_bytes
from befit.data.registry import build
from befit.methods.parts.mosaic.align import run
from befit.methods.parts.mosaic.align.features import Paired
from befit.methods.parts.mosaic.align.run import Aligned, align, align_or_load, aligned_bases
from befit.methods.parts.mosaic.align.settings import Alignment
from befit.methods.parts.mosaic.bank import BASES
from befit.runs.host import Host
from befit.runs.loading import resolve_model
from befit.tasks.causal_lm import CausalLM
from tests.federation import LARGE, MIDDLE, SMALL, THREE, Families
from tests.tiny import assert_same, federated, tiny_examples
from tests.unit.methods.parts.mosaic.families import start

PUBLIC = tiny_examples("llama", 60, 5)
AT = Tick("federate", 1, 3, 0)


@pytest.fixture(scope="module")
def federation() -> Families:
    return start()


def paired(federation: Families) -> Paired:
    one, other = (federation.backbones[key] for key in (SMALL, LARGE))
    return Paired.of(one, other, lambda key: PUBLIC, 2)


def bases(federation: Families) -> tuple[State, State]:
    return tuple(  # type: ignore[return-value]
        {key: value for key, value in federation.server_site.starts[family].items() if split(key)[0] == "basis"}
        for family in (SMALL, LARGE)
    )


def aligned(federation: Families, **settings: Any) -> Aligned:
    return align(paired(federation), *bases(federation), Alignment(**settings), 0)


def test_pq_modules_of_both_models_are_paired_by_place_and_projection(federation: Families) -> None:
    modules = paired(federation).modules
    assert modules["0.q_proj"] == ("block.00.q_proj", "block.01.q_proj")
    assert modules["1.down_proj"] == ("block.01.down_proj", "block.04.down_proj") and len(modules) == 14


@pytest.mark.parametrize("method", ["closed", "train"])
def test_tokenizers_that_have_no_text_in_common_are_refused(federation: Families, method: str) -> None:
    pair = paired(federation)
    words = {f"z{index}": index for index in range(32)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="z0")), pad_token="z0", eos_token="z1"
    )
    foreign = replace(pair.other, task=CausalLM(tokenizer))
    pair = replace(pair, other=foreign, examples=(PUBLIC, tiny_examples("llama", 60, 6)))
    with pytest.raises(DataError, match="no token of the public answers has the same text for both models"):
        align(pair, *bases(federation), Alignment(method=method), 0)


def test_what_a_site_sees_is_the_input_of_its_bare_module(federation: Families) -> None:
    """All tokens that are not padding, in order, whatever adapters the model holds."""
    pair = paired(federation)
    (found,) = pair.batches(4, 4, 3)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:4]
    batch = PUBLIC.batch(order)
    model = federation.backbones[LARGE].model
    seen: list[torch.Tensor] = []
    handle = model.layers["block.04.down_proj"].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with torch.no_grad():
        model.backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    handle.remove()
    assert torch.equal(found["1.down_proj"][1], seen[0][batch["attention_mask"].bool()])
    assert len(found["1.down_proj"][0]) == int(batch["attention_mask"].sum())


@pytest.mark.parametrize(
    "settings", [{}, {"method": "train", "lr": 0.01, "epochs": 6, "batch_size": 4}], ids=["closed", "train"]
)
def test_aligned_models_see_public_tokens_more_alike(federation: Families, settings: dict[str, Any]) -> None:
    """At every site before the projection, and on average after it, which discards the scale that L2 found."""
    report = aligned(federation, **settings).report
    assert all(row["trained"] < 0.7 * row["start"] for row in report.values())
    means = {name: sum(row[name] for row in report.values()) / len(report) for name in ("start", "projected")}
    assert means["projected"] < 0.6 * means["start"]


def test_aligned_factors_have_the_shapes_of_their_backbone_and_orthonormal_rows(federation: Families) -> None:
    pivot, initial = ({key: value.clone() for key, value in basis.items()} for basis in bases(federation))
    made = aligned(federation)
    assert {key: value.shape for key, value in made.arrays.items()} == {
        key: value.shape for key, value in initial.items()
    }
    for key, value in made.arrays.items():
        if split(key)[2] == "A":
            torch.testing.assert_close(value @ value.T, torch.eye(4), rtol=0, atol=1e-5)
    for held, after in zip((pivot, initial), bases(federation), strict=True):
        assert_same(held, after)
    for one in (SMALL, LARGE):
        model = federation.backbones[one].model
        model.reset()
        assert_same(model.dump(slot(BASIS)), pivot if one == SMALL else initial)


@pytest.mark.parametrize("factors", ["A", "B"])
def test_one_of_the_factors_may_stay_random(federation: Families, factors: str) -> None:
    """Rows of Table 32: A as when both are aligned, since it comes first, or B for an A that is not."""
    made, whole, initial = aligned(federation, factors=factors), aligned(federation), bases(federation)[1]
    for key, value in made.arrays.items():
        left = split(key)[2] != factors
        torch.testing.assert_close(value, initial[key], rtol=0, atol=1e-5) if left else None
        assert left or not torch.allclose(value, initial[key], atol=1e-2)
        if factors == split(key)[2] == "A":
            assert torch.equal(value, whole.arrays[key])
    if factors == "B":
        assert any(not torch.allclose(value, whole.arrays[key], atol=1e-2) for key, value in made.arrays.items())


def test_where_nothing_is_aligned_every_backbone_keeps_its_own_and_no_model_is_run(federation: Families) -> None:
    site = replace(federation.server_site, public=None)
    assert aligned_bases(site, 2, Alignment(factors="none")) == {}


def test_models_for_images_are_aligned_on_records_of_text_alone() -> None:
    """ChatbotIT on DRAKE (Table 27)."""
    text = {
        "conversation": [{"role": "user", "content": "how many are"}, {"role": "assistant", "content": "two of four"}]
    }
    two = build("digits-vqa-hetero", None, {"train": 1, "test": 1})
    settings = {"name": "fedmosaic", "rank": 2, "blocks": 1, "align": {"batch_size": 4}}
    config = {"benchmark": "digits-vqa-hetero", "model": {"max_length": 64}, "method": settings}
    federation = replace(two, public=tuple({"id": f"p{n}", "images": [], "form": "open", **text} for n in range(8)))
    host = Host(resolve_model(load_experiment(config)), federation)
    method = host.build(settings)
    (basis,) = method.server_init(host.install(method)).part(BASES).parts().values()
    large = max(host.backbones.values(), key=lambda one: one.parameters)
    start = large.model.dump(slot(BASIS))
    assert basis.arrays.keys() == start.keys()
    assert all(not torch.allclose(value, start[key], atol=1e-2) for key, value in basis.arrays.items())


def test_a_finish_by_the_polar_factor_is_orthonormal_and_none_need_not_be(federation: Families) -> None:
    def gap(made: Aligned) -> float:
        ups = [value for key, value in made.arrays.items() if split(key)[2] == "B"]
        return max(float((B.T @ B - torch.eye(4)).norm()) for B in ups)

    assert gap(aligned(federation, finish="polar")) < 1e-5 < 0.1 < gap(aligned(federation))


def test_aligning_a_model_to_itself_changes_nothing(federation: Families) -> None:
    one = federation.backbones[SMALL]
    same = Paired.of(one, one, lambda key: PUBLIC, 2)
    pivot, _ = bases(federation)
    made = align(same, pivot, pivot, Alignment(ridge=1e-9), 0)
    for key, value in made.arrays.items():
        torch.testing.assert_close(value, pivot[key], rtol=0, atol=1e-3)


def test_nothing_of_the_models_changes_and_equal_runs_are_equal(federation: Families) -> None:
    models = [one.model for one in federation.backbones.values()]
    before = [{**model.dump(EVERYTHING), **model.backbone.state_dict()} for model in models]
    before = [{key: value.clone() for key, value in state.items()} for state in before]
    first = aligned(federation)
    assert_same(first.arrays, aligned(federation).arrays)
    for model, state in zip(models, before, strict=True):
        assert_same({**model.dump(EVERYTHING), **model.backbone.state_dict()}, state)
        assert not any(layer._forward_pre_hooks for layer in model.layers.values())


def test_a_badly_conditioned_b_is_logged(federation: Families, caplog: pytest.LogCaptureFixture) -> None:
    pair = paired(federation)
    pivot, initial = bases(federation)
    with caplog.at_level(logging.WARNING, logger="befit.methods.parts.mosaic.align.run"):
        small = {key: value * (1e-3 if split(key)[2] == "B" else 1) for key, value in initial.items()}
        align(pair, pivot, small, Alignment(), 0)  # a common factor is no condition
        quiet = len(caplog.records)
        skewed = {
            key: value * torch.tensor([1.0, 1.0, 1.0, 100.0]) if split(key)[2] == "B" else value
            for key, value in initial.items()
        }
        align(pair, pivot, skewed, Alignment(), 0)
    assert len(caplog.records) >= quiet + 14 and "align.finish: polar" in caplog.records[-1].message


def test_only_backbones_other_than_the_smallest_get_a_basis_from_the_server(federation: Families) -> None:
    found = aligned_bases(federation.server_site, 2, Alignment())
    assert found.keys() == {LARGE} and len(found[LARGE]) == 28


def test_every_backbone_is_aligned_to_the_smallest_itself_and_none_by_way_of_another() -> None:
    """A star around the pivot: each as it would be with the pivot alone, whichever comes first; a chain would give the
    last one other factors."""
    federation = start(families=THREE)
    server = federation.server_site
    assert server.public is not None
    assert federation.server.part(BASES).parts().keys() == {MIDDLE, LARGE}
    for family in (MIDDLE, LARGE):
        pair = Paired.of(federation.backbones[SMALL], federation.backbones[family], server.public, 2)
        ends = [
            {key: value for key, value in server.starts[one].items() if split(key)[0] == BASIS}
            for one in (SMALL, family)
        ]
        expected = align(pair, *ends, Alignment(), 0).arrays
        assert_same(federation.server.part(BASES, family).arrays, expected)


def test_a_client_gets_its_aligned_basis_once_and_keeps_it() -> None:
    federation = start()
    expected = federation.server.part(BASES, LARGE).arrays
    first = federated(federation.method).dispatch(federation.server, federation.info("b"), AT).arrays
    assert_same(first, expected)
    assert not federated(federation.method).dispatch(federation.server, federation.info("a"), AT).arrays
    federation.round(1, "ab")
    second = federated(federation.method).dispatch(federation.server, federation.info("b"), replace(AT, round=2)).arrays
    assert {split(key)[0] for key in second} == {"shared"}
    kept = {key: value for key, value in federation.memory("b").arrays.items() if split(key)[0] == "basis"}
    assert_same(kept, expected)
    deployed = federation.method.deploy(federation.memory("b"), Payload(second), federation.fresh("b"))
    assert_same({key: value for key, value in deployed.arrays.items() if split(key)[0] == "basis"}, expected)
    newcomer = ClientInfo("z", LARGE, 3)
    assert_same(federated(federation.method).dispatch(federation.server, newcomer, AT).arrays, expected)


def test_a_folder_keeps_an_alignment_for_everything_that_decides_it(
    federation: Families, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds, settings, public records and bases of their own each get a file, which is found again."""
    pair, (pivot, initial) = paired(federation), bases(federation)
    settings = Alignment(folder=str(tmp_path / "kept"))
    other = Paired.of(pair.pivot, pair.other, lambda key: tiny_examples("llama", 61, 5), 2)
    turned = {key: -value for key, value in pivot.items()}
    calls = [
        (pair, pivot, initial, settings, 0),
        (pair, pivot, initial, settings, 1),
        (pair, pivot, initial, replace(settings, ridge=0.1), 0),
        (other, pivot, initial, settings, 0),
        (pair, turned, initial, settings, 0),
        (pair, pivot, {key: -value for key, value in initial.items()}, settings, 0),
    ]
    made = [align_or_load(*call).arrays for call in calls]
    assert len(list((tmp_path / "kept").iterdir())) == len(calls)
    for one, call in zip(made, calls, strict=True):
        assert_same(one, align(*call).arrays)
    with monkeypatch.context() as patch:
        patch.setattr(run, "align", None)
        for one, call in zip(made, calls, strict=True):
            assert_same(align_or_load(*call).arrays, one)
    path = run.path_of(tmp_path / "kept", run.describe(*calls[0]))
    arrays, metadata = from_bytes(path.read_bytes())
    about = json.loads(metadata["about"])
    assert about["rank"] == 4 and len(about["modules"]) == 14 and len(about["public"]) == 64
    changed = {**arrays, min(arrays): arrays[min(arrays)] + 1}
    foreign = run.path_of(tmp_path / "kept", run.describe(*calls[1])).read_bytes()
    for data in (to_bytes(changed, metadata), foreign):
        path.write_bytes(data)
        with pytest.raises(PayloadMismatch, match=rf"{re.escape(str(path))}: is not the alignment"):
            align_or_load(*calls[0])
    path.write_bytes(foreign[:50])
    with pytest.raises(PayloadMismatch, match=re.escape(str(path))):
        align_or_load(*calls[0])
    (tmp_path / "a file").write_text("mine")
    with pytest.raises(RunError, match=re.escape(str(tmp_path / "a file"))):
        align_or_load(pair, pivot, initial, replace(settings, folder=str(tmp_path / "a file")), 0)


def test_runs_of_several_seeds_share_a_folder_and_each_gets_what_it_would_without(
    federation: Families, tmp_path: Path
) -> None:
    """A run's seed draws the pivot's basis too, and another run's factors are aligned to another one."""
    site, kept = federation.server_site, Alignment(folder=str(tmp_path))
    for seed in (0, 1):
        starts = {}
        for key, one in federation.backbones.items():
            one.model.install(federation.method.layout, seed)
            starts[key] = one.model.dump(EVERYTHING)
        seeded = replace(site, starts=starts)
        assert_same(aligned_bases(seeded, 2, kept)[LARGE], aligned_bases(seeded, 2, Alignment())[LARGE])
    for one in federation.backbones.values():
        one.model.install(federation.method.layout, 0)


def test_what_cannot_be_aligned_is_refused_with_the_reason(federation: Families) -> None:
    site = federation.server_site
    with pytest.raises(ConfigError, match=r"families: .* public records"):
        aligned_bases(replace(site, public=None), 2, Alignment())
    empty = tiny_examples("llama", 1, 0)
    with pytest.raises(DataError, match=r"rank 4 needs at least 40 public tokens, there are \d+; give more"):
        aligned_bases(replace(site, public=lambda key: empty), 2, Alignment())
    with pytest.raises(DataError, match="the same public records for both; there are 1 and 60"):
        Paired.of(
            federation.backbones[SMALL], federation.backbones[LARGE], lambda key: empty if key == SMALL else PUBLIC, 2
        )
    with pytest.raises(ConfigError) as caught:
        Alignment(samples=0, lr=0.0, tie=-1.0, batch_size=0)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["samples", "batch_size", "lr", "tie"]


def test_training_minds_the_weight_of_orthonormal_rows_that_it_is_given(federation: Families) -> None:
    """Rows that have to stay orthonormal fit less well; the fewer steps, the less the projection has to mend."""
    settings = {"method": "train", "lr": 0.05, "epochs": 3, "batch_size": 10}
    free, held = (aligned(federation, **settings, weight=weight).report for weight in (0.0, 1000.0))
    for site in free:
        assert free[site]["trained"] < held[site]["trained"]
    mended = [sum(abs(row["projected"] - row["trained"]) for row in report.values()) for report in (free, held)]
    assert mended[1] < 0.2 * mended[0]
