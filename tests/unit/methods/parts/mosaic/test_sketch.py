"""The gradient of the last layer of a frozen model (FedMosaic, eqs. 1 to 3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from befit.adapters.keys import slot
from befit.adapters.layout import ModelShapes, lora
from befit.adapters.model import last_projection
from befit.core.errors import ConfigError, DataError, ModelError
from befit.core.values import Tick
from befit.methods.parts.mosaic.sketch import SKETCH, Sketch, last_gradient, mean_sketch, newcomer_sketch
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Backbone, Site
from befit.runs.runner import check, run
from tests.tiny import MakeSite, make_site, random_state, tiny_examples, tiny_task

AT = Tick("federate", 1, 4, 7)


def seen_by_small(
    kind: str = "llama", *, client: str = "client-01", steps: int = 3, data_seed: int = 0, rows: int = 12
) -> Site:
    budget = TrainSettings(max_steps=steps, batch_size=4)
    site = make_site(kind, client=client, budget=budget, data_seed=data_seed, rows=rows)
    small = Backbone("small", "f" * 64, site.model, tiny_task(kind))
    return replace(site, common=small, common_examples=site.examples)


def small_of(site: Site) -> Backbone:
    assert site.common is not None
    return site.common


def batch_of(kind: str, rows: int = 5) -> dict[str, torch.Tensor]:
    return tiny_examples(kind, 12).batch(range(rows))


def test_it_is_what_autograd_finds_for_that_weight(kind: str) -> None:
    site = seen_by_small(kind)
    batch = batch_of(kind)
    found = last_gradient(small_of(site), batch)
    projection = last_projection(site.model.backbone)
    weight: torch.Tensor = getattr(projection, "base", projection).weight.requires_grad_(True)  # type: ignore[assignment]
    (expected,) = torch.autograd.grad(site.loss(batch), weight)
    weight.requires_grad_(False)
    if kind == "gpt2":  # whose weight lies transposed
        expected = expected.T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert found.shape == site.model.shapes.last and found.norm() > 1e-4


def test_the_closed_form_gives_the_same() -> None:
    """`G = sum_t gh_t u_t^T` with the whole Jacobian of the final RMSNorm, written out, in float64."""
    site = seen_by_small("llama")
    model = site.model.backbone.double()
    batch = batch_of("llama")
    projection, inputs, hidden = last_projection(model), [], []
    handles = [
        projection.register_forward_hook(lambda module, args, output: inputs.append(args[0])),
        model.model.norm.register_forward_hook(lambda module, args, output: hidden.append(args[0])),  # type: ignore[union-attr]
    ]
    with torch.no_grad():
        logits = site.logits(batch)
    for handle in handles:
        handle.remove()
    learnt = batch["labels"][:, 1:] != -100
    h, u = (value[:, :-1][learnt] for value in (hidden[0], inputs[0]))
    delta = logits.softmax(-1)
    delta[torch.arange(len(delta)), batch["labels"][:, 1:][learnt]] -= 1
    g = (delta / len(delta)) @ model.lm_head.weight  # type: ignore[union-attr, operator]
    v, d = model.model.norm.weight, h.shape[1]  # type: ignore[union-attr]
    inverse = (h.square().mean(1, keepdim=True) + model.config.rms_norm_eps).rsqrt()  # type: ignore[union-attr]
    vg = v * g  # type: ignore[operator]
    gh = inverse * vg - inverse**3 / d * h * (h * vg).sum(1, keepdim=True)
    found = last_gradient(small_of(site), batch)
    model.float()
    torch.testing.assert_close(found.double(), (gh.T @ u).detach(), rtol=1e-4, atol=1e-7)


def test_adapters_of_the_client_do_not_enter_and_nothing_of_the_model_changes(kind: str) -> None:
    site = seen_by_small(kind)
    bare = last_gradient(small_of(site), batch_of(kind))
    site.model.load(random_state(site.model))
    before = {key: value.clone() for key, value in site.model.backbone.state_dict().items()}
    with site.model.active("shared"):
        assert torch.equal(last_gradient(small_of(site), batch_of(kind)), bare)
    assert all(torch.equal(value, before[key]) for key, value in site.model.backbone.state_dict().items())
    assert not any(p.requires_grad for p in site.model.backbone.parameters())


def test_padding_adds_nothing() -> None:
    site, batch = seen_by_small("llama"), batch_of("llama")
    more = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    padded = {key: torch.nn.functional.pad(value, (0, 3), value=more[key]) for key, value in batch.items()}
    found, expected = (last_gradient(small_of(site), one) for one in (padded, batch))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_all_clients_and_rounds_take_the_same_entries_and_another_run_others() -> None:
    gradient = torch.arange(60.0).view(6, 10)
    sketch = Sketch(0.4)
    taken = sketch.take(gradient, 7)
    assert taken.shape == (24,) and len(set(taken.tolist())) == 24
    assert torch.equal(taken, sketch.take(gradient, 7)) and not torch.equal(taken, sketch.take(gradient, 8))
    assert torch.equal(Sketch(0.4, "rows").take(gradient, 7), gradient[:2])
    assert Sketch(0.4, "rows").shape((2048, 8192)) == (819, 8192) and Sketch(0.4).shape((2048, 8192)) == (6710886,)


def test_a_common_mask_keeps_the_cosine_and_masks_of_ones_own_shrink_it_to_their_share() -> None:
    """0.60 stays near 0.60, and becomes about 0.4 * 0.60 = 0.24."""
    draw = torch.Generator().manual_seed(0)
    first, other = torch.randn(2, 100, 400, generator=draw)
    second = 0.6 * first + 0.8 * other
    sketch = Sketch(0.4)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(a, b, dim=0))

    assert cosine(sketch.take(first, 1), sketch.take(second, 1)) == pytest.approx(0.6, abs=0.03)
    spread = []
    for gradient, seed in ((first, 1), (second, 2)):
        mask = torch.zeros(100 * 400)
        mask[sketch.take(torch.arange(40000.0).view(100, 400), seed).long()] = 1
        spread.append(gradient.flatten() * mask)
    assert cosine(*spread) == pytest.approx(0.24, abs=0.03)


def test_it_is_the_mean_over_every_so_many_of_the_batches_that_training_sees() -> None:
    site = seen_by_small(steps=5)
    batches = list(site.batches("train", 5, AT))
    sketch = Sketch(1.0, "rows")
    expected = torch.stack([last_gradient(small_of(site), batches[step]) for step in (0, 2, 4)]).mean(0)
    torch.testing.assert_close(mean_sketch(site, AT, sketch, 2, 0.0), expected, rtol=1e-5, atol=1e-8)


def test_clients_and_rounds_send_the_same_random_entries_of_their_gradients() -> None:
    """The entries that the run's seed draws, of each one's whole gradient: a cosine compares place with place."""
    sketch, places = Sketch(0.3), set[tuple[int, ...]]()
    for client, at in (("client-01", AT), ("client-02", AT), ("client-01", replace(AT, round=2))):
        site = seen_by_small(client=client)
        whole = mean_sketch(site, at, Sketch(1.0, "rows"), 1, 0.0).flatten()
        sent = mean_sketch(site, at, sketch, 1, 0.0)
        where = tuple(int((whole - value).abs().argmin()) for value in sent if value)
        places.add(where)
        assert 0.2 * len(whole) < len(set(where)) == len(where)
    (only,) = places
    assert list(only) == sorted(only)


def test_noise_is_fresh_for_every_gradient_and_client_and_as_large_as_it_says() -> None:
    """Three gradients: the noise of their mean has the standard deviation 0.5 / sqrt(3)."""
    sketch = Sketch(1.0)
    clean = mean_sketch(seen_by_small(), AT, sketch, 1, 0.0)
    noises = {}
    for client, at in (("client-01", AT), ("client-02", AT), ("client-01", replace(AT, round=2))):
        site = seen_by_small(client=client)
        noises[client, at.round] = mean_sketch(site, at, sketch, 1, 0.5) - mean_sketch(site, at, sketch, 1, 0.0)
    for noise in noises.values():
        assert float(noise.std()) == pytest.approx(0.5 / 3**0.5, rel=0.15)
    values = list(noises.values())
    assert clean.shape == values[0].shape and all(
        abs(float(torch.corrcoef(torch.stack([values[i], values[j]]))[0, 1])) < 0.2 for i, j in ((0, 1), (0, 2), (1, 2))
    )


@pytest.mark.parametrize("rows", [12, 7])
def test_a_newcomers_gradient_is_the_mean_over_twenty_batches(rows: int) -> None:
    """80 records of batches of 4, however few steps a round has, and all of its data is in them."""
    site = seen_by_small(steps=1, rows=rows)
    batches = [site.examples("train").batch(indices) for indices in site.indices("train", 20, AT)]
    expected = torch.stack([last_gradient(small_of(site), batch) for batch in batches]).mean(0)
    found = newcomer_sketch(site, AT, Sketch(1.0, "rows"), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def test_training_flags_are_as_before(site: MakeSite) -> None:
    one = seen_by_small("bert")
    one.model.backbone.train()
    last_gradient(small_of(one), batch_of("bert"))
    assert one.model.backbone.training


def test_a_site_without_the_common_model_and_a_model_without_blocks_are_refused() -> None:
    with pytest.raises(DataError, match="client-01 has no small common model"):
        mean_sketch(make_site("llama"), AT, Sketch(), 1, 0.0)
    with pytest.raises(ModelError, match="transformer blocks"):
        Sketch().specs(ModelShapes({}))
    with pytest.raises(ModelError, match="Linear has no"):
        last_projection(torch.nn.Linear(2, 2))


def test_a_share_is_that_of_the_decimals() -> None:
    """In binary 0.58 of 50 is 28.99..."""
    assert (Sketch(0.58, "rows").shape((50, 3)), Sketch(0.58).shape((10, 5))) == ((29, 3), (29,))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share: must be above 0 and at most 1"):
        Sketch(share)


def test_the_layout_declares_it_by_the_shape_of_the_smallest_model() -> None:
    site = make_site("llama")
    site.model.shapes = replace(site.model.shapes, last=(4, 5))
    site.model.install(replace(lora(2, 4.0), extras=(Sketch(0.5),)), 0)
    assert site.model.specs[SKETCH].shape == (10,)
    assert not site.model.dump(slot("sketch"))[SKETCH].any()


@pytest.mark.parametrize(
    ("train", "every", "behind"),
    [({"max_steps": 5, "batch_size": 8}, 10, 8), ({"max_steps": 40, "batch_size": 10}, 10, None)],
)
def test_a_warning_says_how_few_records_stand_behind_an_upload(train, every, behind):
    config = {"benchmark": {"name": "digits", "clients": 3}, "train": train, "federation": {"rounds": 2}}
    warned = check({**config, "method": {"name": "rela", "relevance": {"every": every}}})["warnings"]
    about = [text for text in warned if "gradient of" in text]
    assert [f"gradient of {behind} records" in text for text in about] == ([] if behind is None else [True])
    equal = check({**config, "method": {"name": "rela", "mixing": "equal"}})["warnings"]
    assert not any("relevance.every" in text for text in equal)


@pytest.mark.parametrize(
    ("steps", "every", "instead"), [(8, 10, "1 for 8"), (40, 40, "4 for 10"), (11, 10, ""), (1, 10, "")]
)
def test_a_round_that_takes_one_gradient_says_what_takes_more(steps, every, instead, tmp_path, caplog):
    """The check tells it, and so does a run before its first step."""
    config = {
        "benchmark": {"name": "digits", "clients": 3},
        "train": {"max_steps": steps},
        "federation": {"rounds": 1},
        "method": {"name": "rela", "relevance": {"every": every}},
        "baselines": [],
    }
    told = [text for text in check(config)["warnings"] if "takes one gradient" in text]
    assert len(told) == bool(instead) and all(f"set relevance.every: {instead}, where" in text for text in told)
    if steps == 8:
        run({**config, "report": {"plots": False}}, out=tmp_path / "run")
        assert told[0] in caplog.text
