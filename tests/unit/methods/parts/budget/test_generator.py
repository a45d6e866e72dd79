"""Features and the generator (Lee et al. 2025a, eq. 6 and Figure 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from befit.adapters.bayestune import LOW
from befit.adapters.keys import EVERYTHING, select, slot
from befit.adapters.layout import Layout, lora
from befit.core.values import Payload, Tick
from befit.methods.fedl2p import FedL2P
from befit.methods.fedp2eft import FedP2EFT
from befit.methods.parts.budget.features import Moments, features, linears
from befit.methods.parts.budget.generator import GENERATOR, Generator, fit, generate
from befit.methods.parts.budget.meta import in_two
from befit.methods.parts.budget.personal import budgeted_layout
from befit.methods.parts.budget.stages import features_of
from befit.protocol.jobs import finish
from befit.protocol.site import ServerSite, Site
from befit.tasks.base import Batch
from tests.tiny import make_site, random_state
from tests.unit.methods.parts.budget.sizes import generator_parameters


def test_pooled_moments_equal_those_of_everything_at_once() -> None:
    values = torch.randn(37, dtype=torch.float64) * 3 + 5
    moments = Moments()
    for piece in values.split([1, 20, 16]):
        moments.add(piece)
    assert float(moments.mean) == pytest.approx(float(values.mean()), rel=1e-12)
    assert float(moments.variance) == pytest.approx(float(values.var()), rel=1e-12)


def by_hand(site: Site, batches: Iterable[Batch]) -> torch.Tensor:
    """Mean and spread of every linear input, with all inputs of all batches kept: 2M numbers, interleaved."""
    inputs: dict[str, list[torch.Tensor]] = {path: [] for path in linears(site.model.backbone)}

    def watch(path: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, given: inputs[path].append(given[0].detach().flatten())

    handles = [module.register_forward_pre_hook(watch(path)) for path, module in linears(site.model.backbone).items()]
    with torch.no_grad():
        for batch in batches:
            site.logits(batch)
    for handle in handles:
        handle.remove()
    together = [torch.cat(pieces) for pieces in inputs.values()]
    return torch.stack([number for h in together for number in (h.mean(), (h.var() + 1e-5).sqrt())])


def test_features_are_mean_and_spread_of_every_linear_input() -> None:
    """Against one pass over all images: 2M numbers, interleaved, in the order of the modules."""
    site = make_site("vit")
    found = features(site)
    assert found.shape == (2 * site.model.shapes.linears,)
    assert torch.allclose(found, by_hand(site, [site.examples("train").batch(torch.arange(12))]), atol=1e-5)


def test_features_of_padded_texts_count_padding_unless_it_is_masked() -> None:
    """As they are by default, of batches of four with each padded to its longest; masked, of every text by itself."""
    site = make_site("bert")
    examples = site.examples("train")
    batches = [examples.batch(torch.arange(start, start + 4)) for start in (0, 4, 8)]
    assert sum(int((batch["attention_mask"] == 0).sum()) for batch in batches) > 10
    padded, masked = features(site), features(site, mask_padding=True)
    assert torch.allclose(padded, by_hand(site, batches), atol=1e-5)
    assert torch.allclose(masked, by_hand(site, (examples.batch([place]) for place in range(12))), atol=1e-5)
    assert float((padded - masked).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["vit", "bert", "llama"])
def test_features_do_not_depend_on_batches_or_on_what_adapters_hold(kind: str) -> None:
    site = make_site(kind)
    masked = kind == "bert"  # texts are padded to the longest of a batch
    found = features(site, mask_padding=masked)
    site.model.load(random_state(site.model))
    assert torch.equal(features(site, mask_padding=masked), found)
    other = features(site, mask_padding=masked, batch_size=5)
    # The pooler and the classifier see one vector per text, and are the same either way.
    assert torch.allclose(other, found, atol=1e-5)


def test_features_are_of_the_base_whatever_scales_and_budgets_hold() -> None:
    """The base's slot takes part in the pass; A, B and both kinds of scales never do."""
    ours = budgeted_layout(4, 2.0, True).slots
    site = make_site("bert", Layout((*lora(2, 6.0).slots, *ours)))
    client = Payload({}, {"fixed@slots": ["shared"]})
    base = select(random_state(site.model, 0), slot("shared"))
    site.model.load(base)
    found, kept = features_of(client, site, False)
    for seed in (1, 2):
        site.model.load({**random_state(site.model, seed), **base})
        assert torch.equal(features_of(client, site, False)[0], found)
    assert [*kept] == ["features/all/f"]
    site.model.load(select(random_state(site.model, 1), slot("shared")))
    assert not torch.allclose(features_of(client, site, False)[0], found, atol=1e-3)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_with_all_padding_features_are_of_texts_at_full_width_and_prompts_at_the_longest_of_four(kind: str) -> None:
    """Against a plain pass over batches that are padded here by hand, with every linear input taken whole."""
    site = make_site(kind)
    examples, task = site.examples("train"), site.task
    if kind == "bert":
        task.max_length = 14  # the tiny model has 16 positions
    pad = task.tokenizer.pad_token_id
    seen: dict[str, list[torch.Tensor]] = {path: [] for path in linears(site.model.backbone)}
    handles = [
        module.register_forward_pre_hook(lambda _, inputs, path=path: seen[path].append(inputs[0].flatten()))
        for path, module in linears(site.model.backbone).items()
    ]
    widths = set()
    with site.model.training(False), site.model.active(), torch.no_grad():
        for start in range(0, len(examples), 4):
            rows = [examples.batch([row]) for row in range(start, min(start + 4, len(examples)))]
            texts = [
                one["input_ids"][0][one["labels"][0] == -100] if kind == "llama" else one["input_ids"][0]
                for one in rows
            ]
            width = max(map(len, texts)) if kind == "llama" else task.max_length
            widths.add(width)
            ids = torch.stack([F.pad(one, (0, width - len(one)), value=pad) for one in texts])
            mask = torch.stack([F.pad(torch.ones_like(one), (0, width - len(one))) for one in texts])
            site.model.backbone(input_ids=ids, attention_mask=mask)
            assert kind == "bert" or int(mask.sum()) < mask.numel()  # or there is nothing to see
    for handle in handles:
        handle.remove()
    inputs = [torch.cat(one).double() for one in seen.values()]
    expected = [number for h in inputs for number in (h.mean(), (h.var() + 1e-5).sqrt())]
    found = features(site, all_padding=True)
    assert torch.allclose(found.double(), torch.stack(expected), atol=1e-5)
    assert not torch.allclose(found, features(site), atol=1e-3)


def test_features_of_a_language_model_ignore_answers() -> None:
    site = make_site("llama")
    found = features(site)
    examples = site.examples("train")

    class Other:
        def __len__(self) -> int:
            return len(examples)

        def batch(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
            batch = dict(examples.batch(indices))
            answers = batch["labels"] != -100
            batch["input_ids"] = torch.where(answers, 7, batch["input_ids"])
            return batch

    assert torch.allclose(features(replace(site, examples=lambda split: Other())), found, atol=1e-6)


def new_generator(kind: str = "vit"):
    site = make_site(kind, Layout(budgeted_layout(8, 2.0, True).slots, extras=(Generator(8),)), targets="all")
    return site, select(site.model.dump(slot(GENERATOR)), slot(GENERATOR))


def test_a_new_generator_says_the_lower_bound_of_everything_and_has_the_stated_size() -> None:
    site, state = new_generator()
    M, L = site.model.shapes.linears, len(site.model.shapes.targets)
    assert sum(value.numel() for value in state.values()) == generator_parameters(M, L, 8)
    out = generate(state, torch.randn(2 * M))
    assert out.shape == (8 * L,) and bool((out >= LOW).all()) and float((out - 1e-4).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("linears", "modules", "rank", "numbers"),
    [
        (74, 74, 32, 747_401),
        (197, 196, 32, 5_259_869),
        (169, 168, 32, 3_868_717),
        (74, 74, 16, 395_753),
        (197, 196, 16, 2_785_565),
    ],
)
def test_generators_of_the_papers_models_have_the_sizes_of_their_shapes(
    linears: int, modules: int, rank: int, numbers: int
) -> None:
    assert generator_parameters(linears, modules, rank) == numbers


def test_fitting_lowers_the_gap_and_moves_outputs_that_sit_at_the_clamp() -> None:
    site, state = new_generator()
    seen = features(site)
    state = {**state, f"{GENERATOR}/second/b": torch.full_like(state[f"{GENERATOR}/second/b"], -1.0)}
    start = {key: value.clone() for key, value in state.items()}
    assert bool((generate(state, seen) == LOW).all())  # every output is clamped
    target = torch.full((len(state[f"{GENERATOR}/second/b"]),), 0.5)
    new, gaps = fit(state, seen, target, steps=40, lr=0.05)
    assert gaps[-1] < gaps[0] and len(gaps) == 41
    assert all(torch.equal(state[key], start[key]) for key in start)
    assert not torch.equal(new[f"{GENERATOR}/second/b"], start[f"{GENERATOR}/second/b"])
    coarse, _ = fit(state, seen, target, steps=4, lr=0.05, precision=torch.bfloat16)
    assert all(torch.equal(one, one.bfloat16().float()) for one in coarse.values())
    oracle = {key: value.bfloat16().requires_grad_(True) for key, value in state.items()}
    adam = torch.optim.Adam(oracle.values(), lr=0.05, foreach=False)
    for _ in range(4):
        adam.zero_grad()
        (generate(oracle, seen, torch.bfloat16) - target).abs().sum().backward()
        adam.step()
    assert all(torch.equal(coarse[key], value.float()) for key, value in oracle.items())
    assert generate(state, seen, torch.bfloat16).dtype == torch.float32
    fresh, shorter = fit(start, seen, torch.full_like(target, 1e-4), 10, 1e-4)
    assert shorter[0] == pytest.approx(0, abs=1e-6) and fresh.keys() == start.keys()


@pytest.mark.parametrize("options", [{}, {"preset": "parity"}, {"preset": "parity", "mask_padding": True}])
@pytest.mark.parametrize("make", [FedP2EFT, FedL2P])
def test_the_parity_preset_counts_padding_unless_it_is_masked_by_name(make: Any, options: dict[str, Any]) -> None:
    """In the round of either method, and in the personal stage that says the scales or rates."""
    little = {"outer": 1, "draws": 1} if make is FedL2P else {}
    method = make(rank=2, **little, **options)
    site = make_site("llama", method.layout, targets="all")
    parts = in_two(site, method.validation, 0) if make is FedL2P else site
    wanted = features(parts, all_padding=options == {"preset": "parity"}, mask_padding="mask_padding" in options)
    server = method.server_init(ServerSite({"tiny": site.model.dump(EVERYTHING)}, (site.info,)))
    for stage in (one for one in method.plan() if one.name in ("generate", "meta", "scales", "rates")):
        at = Tick(stage.name, 1, 1, 0)
        site.model.reset()
        memory, _ = finish(
            stage.exchange.client_update(Payload(), stage.exchange.dispatch(server, site.info, at), site, at)
        )
        assert torch.equal(memory.arrays["features/all/f"], wanted)
