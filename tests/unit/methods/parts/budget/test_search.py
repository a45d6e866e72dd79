"""Learning the scales against a loop written out; all differences of the parity preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.bayestune import BUDGETED, LOW, SCALES, Scales, clamp_through
from befit.adapters.keys import EVERYTHING, factor, join, select, slot
from befit.core.values import Payload, Tick
from befit.methods.bayestune import BayesTune
from befit.methods.fedp2eft import FedP2EFT
from befit.methods.parts.budget.budget import keep
from befit.methods.parts.budget.features import features
from befit.methods.parts.budget.generator import GENERATOR
from befit.methods.parts.budget.personal import budgeted_layout
from befit.methods.parts.budget.search import Penalty, Prior, Search, column_norms, searching
from befit.methods.parts.budget.stages import load_scales
from befit.protocol.jobs import finish
from befit.protocol.method import Deployment
from befit.protocol.settings import TrainSettings
from befit.runs.peft_io import write_adapter
from tests.federation import Clients
from tests.tiny import assert_same, federated, make_site, random_state, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
AT = Tick("search", 1, 1, 0)
STEPS = 5
BUDGET = TrainSettings(max_steps=STEPS, batch_size=4, lr=1e-2)
SMALL: dict[str, Any] = {"rank": 2, "rank_max": 4}


def prepared(clamped: bool, start: float | None = None):
    site = make_site("vit", budgeted_layout(4, 2.0, clamped), budget=BUDGET)
    names = list(site.model.shapes.targets)
    if start is not None:
        load_scales(site, torch.full((len(names), 4), start))
    return site, names


def written_out(
    clamped: bool,
    accumulate: bool,
    clip: float,
    alpha_s: float = 1e2,
    alpha_p: float = 1e-2,
    examples: int = 12,
    start: float | None = None,
) -> torch.Tensor:
    """The raw scales after STEPS steps, by plain optimisers on single tensors and gradients cleared by hand."""
    site, names = prepared(clamped, start)
    leaves = site.model.leaves(slot(BUDGETED, SCALES))
    scales = [leaves[join(SCALES, name, "lambda")] for name in names]
    weights = [leaf for key, leaf in leaves.items() if not key.endswith("/lambda")]
    fast = torch.optim.AdamW([leaf for leaf in weights], lr=1e-2, weight_decay=0.0)
    slow = torch.optim.AdamW(scales, lr=1e-2, weight_decay=0.0)
    for batch in site.batches("train", STEPS, AT):
        for leaf in weights if accumulate else [*weights, *scales]:
            assert leaf.grad is not None
            leaf.grad.zero_()
        with (
            site.model.active(SCALES),
            site.model.trainable(slot(BUDGETED, SCALES) & ~(slot(BUDGETED) & factor("lambda"))),
        ):
            loss = site.loss(batch)
            for name, raw in zip(names, scales, strict=True):
                lam, n = clamp_through(raw, 1e-4, 1e3), leaves[join(BUDGETED, name, "B")].abs().sum(0)
                loss = loss + (alpha_s * (n / lam).sum() + alpha_p * (lam.log() + 100 * lam).sum()) / examples
            loss.backward()
        # The head of the budgeted slot takes no part in this forward pass, and its gradient is zero.
        torch.nn.utils.clip_grad_norm_(weights, clip)
        fast.step()
        slow.step()
    return torch.stack([raw.detach().clone() for raw in scales])


@pytest.mark.parametrize(("clamped", "accumulate"), [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("clip", [1.0, 1e-3])
def test_a_search_is_the_loop_of_equation_1(clamped: bool, accumulate: bool, clip: float) -> None:
    """Two optimisers, penalties at 1/N in every step, A and B clipped and scales not; and the released variants."""
    site, _ = prepared(clamped)
    how = Search(Prior(), clip=clip, accumulate=accumulate, return_raw=True)
    found, expected = finish(searching(site, AT, how, STEPS)), written_out(clamped, accumulate, clip)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)
    site, _ = prepared(clamped)
    assert torch.equal(finish(searching(site, AT, replace(how, return_raw=False), STEPS)), found.clamp(1e-4, 1e3))


def test_priors_are_divided_by_the_clients_examples_and_not_by_those_of_a_batch() -> None:
    """From scales and with priors that leave the task a say: at the bound Adam takes the same steps whatever N is."""
    site, _ = prepared(True, 0.5)
    found = finish(searching(site, AT, Search(Prior(1e-2, 1e-3), return_raw=True), STEPS))
    expected, other = (written_out(True, False, 1.0, 1e-2, 1e-3, examples, 0.5) for examples in (12, BUDGET.batch_size))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert float((other - found).abs().max()) > 1e-3


def test_released_gradients_of_scales_are_never_cleared_and_end_elsewhere() -> None:
    """Gradients of the scales are never cleared there, so they add up over the steps."""
    assert not torch.allclose(written_out(True, True, 1.0), written_out(True, False, 1.0), rtol=1e-2)


def test_after_one_step_from_B_zero_the_raw_scales_are_negative_and_the_used_ones_the_bound() -> None:
    """The loss sees unclamped scales there: only L_p acts, and Adam moves every scale by its rate: 1e-4 - 1e-2."""
    site, _ = prepared(True)
    raw = finish(searching(site, AT, Search(return_raw=True), 1))
    assert torch.allclose(raw, torch.full_like(raw, LOW - 1e-2), atol=1e-5)
    site, _ = prepared(True)
    assert bool((finish(searching(site, AT, Search(), 1)) == LOW).all())


def test_the_parity_presets_differ_where_the_released_code_does() -> None:
    """Traps 9.1-1 to 9.1-3, and 9.1-5: raw scales in the forward pass, as target, gradients that add up, bfloat16;
    BayesTune clamps."""
    for make in (FedP2EFT, BayesTune):
        forms = [make(preset=preset).layout.slot(SCALES).form for preset in ("recommended", "parity")]
        assert forms == [Scales(clamped=True), Scales(clamped=False)]
    ours, released = FedP2EFT().searching, FedP2EFT(preset="parity").searching
    assert (ours.accumulate, ours.return_raw) == (False, False)
    assert (released.accumulate, released.return_raw) == (True, True)
    assert (ours.precision, released.precision) == (torch.float32, torch.bfloat16)
    alone = {preset: BayesTune(preset=preset).plan()[0].exchange.how for preset in ("recommended", "parity")}  # type: ignore[attr-defined]
    assert [alone[p].accumulate for p in alone] == [False, True]
    assert [alone[p].precision for p in alone] == [torch.float32, torch.bfloat16] and not any(
        how.return_raw for how in alone.values()
    )


def test_scales_held_in_bfloat16_take_the_steps_of_an_optimiser_that_knows_no_more() -> None:
    """bfloat16: from one scale and one gradient a step: a parameter, gradients and both moments of 8 bits each."""
    site, _ = prepared(True, 0.5)
    found = finish(searching(site, AT, Search(Prior(1e-2, 1e-3), return_raw=True, precision=torch.bfloat16), STEPS))
    assert torch.equal(found, found.bfloat16().float())
    site, _ = prepared(True, 0.5)
    full = finish(searching(site, AT, Search(Prior(1e-2, 1e-3), return_raw=True), STEPS))
    assert not torch.equal(full, full.bfloat16().float())
    # A step of 0.01 from 0.5 moves by two or three of bfloat16's steps there, 2^-9 below one half and 2^-8 above.
    assert 0 < float((found - full).abs().max()) <= STEPS * 2**-8


def test_an_unclamped_forward_pass_uses_negative_scales() -> None:
    x = torch.randn(3, 16)
    outputs = {}
    for clamped in (True, False):
        site, names = prepared(clamped)
        B = torch.ones(16, 4)
        site.model.load({join(BUDGETED, names[0], "B"): B, join(SCALES, names[0], "lambda"): torch.full((4,), -0.01)})
        layer, A = site.model.layers[names[0]], site.model.dump(slot(BUDGETED))[join(BUDGETED, names[0], "A")]
        with site.model.active(SCALES):
            outputs[clamped] = layer(x)
        lam = LOW if clamped else -0.01
        assert torch.allclose(outputs[clamped], layer.base(x) + 2 * lam * x @ A.T @ B.T, atol=1e-5)
    assert not torch.allclose(outputs[True], outputs[False])


def test_a_parity_round_fits_the_generator_to_unclamped_scales() -> None:
    """Unclamped scales are returned there; after a single step: the mean of what the generator is fitted to."""
    means = {}
    for preset in ("recommended", "parity"):
        method = FedP2EFT(**SMALL, preset=preset)
        clients = Clients(method)
        site = replace(clients.fresh("a"), budget=replace(BUDGET, max_steps=1))
        received = Payload(select(clients.initial, slot(GENERATOR)))
        finish(federated(method).client_update(Payload(), received, site, Tick("generate", 1, 2, 0)))
        means[preset] = site.report["scale_mean"]
    coarse = float((torch.tensor(LOW).bfloat16() - 1e-2).float())  # the released code's scales have 8 bits
    assert means == pytest.approx({"recommended": LOW, "parity": coarse}, rel=4e-3)


def test_gradients_of_the_penalties_are_those_by_hand() -> None:
    """dL_s/dlam = -n / lam^2, dL_p/dlam = 1 / lam + 100, dL_s/dB[j, k] = sign(B[j, k]) / lam[k], zero at B = 0."""
    B = torch.tensor([[1.0, -4.0], [0.0, 2.0]], requires_grad=True)
    lam = torch.tensor([[0.5, 2.0]], requires_grad=True)
    (by_B, by_lam) = torch.autograd.grad(Prior().sparsity(column_norms([B]), lam), [B, lam])
    assert by_B.tolist() == [[2.0, -0.5], [0.0, 0.5]] and by_lam.tolist() == [[-4.0, -1.5]]
    (by_lam,) = torch.autograd.grad(Prior().spread(lam), [lam])
    assert by_lam.tolist() == [[102.0, 100.5]]


def test_the_task_gives_scales_no_gradient_while_B_is_zero_and_then_that_of_the_layers_output() -> None:
    """dL/dlam[k] = s sum_t (B[:, k] g_t) (A[k] x_t), with g_t the gradient of the layer's output."""
    site, names = prepared(True)
    layer, key = site.model.layers[names[0]], join(SCALES, names[0], "lambda")
    x, g = torch.randn(5, 16), torch.randn(5, 16)
    A = site.model.dump(slot(BUDGETED))[join(BUDGETED, names[0], "A")]
    for B in (torch.zeros(16, 4), torch.randn(16, 4)):
        site.model.load({join(BUDGETED, names[0], "B"): B})
        with site.model.active(SCALES), site.model.trainable(slot(SCALES)):
            site.model.zero_gradients()
            layer(x).backward(g)
        found = site.model.leaves(slot(SCALES))[key].grad
        assert found is not None
        assert torch.allclose(found, 2 * ((g @ B) * (x @ A.T)).sum(0), atol=1e-4)


def test_modules_that_cannot_matter_get_the_smaller_share_of_a_budget() -> None:
    """Property 20: what attention says in the first block is multiplied by zero, so q and v there move nothing."""
    site = make_site("vit", budgeted_layout(8, 2.0, True), budget=replace(BUDGET, max_steps=40))
    modules = dict(site.model.backbone.named_modules())
    dead = next(path for path in modules if path.endswith(("0.attention.output.dense", "0.attention.o_proj")))
    with torch.no_grad():
        modules[dead].weight.zero_()  # type: ignore[union-attr,operator]
    scales = finish(searching(site, AT, Search(), 40))
    kept = (keep(scales, 2 * len(scales)) != 0).sum(1).tolist()
    ranks = dict(zip(site.model.shapes.targets, kept, strict=True))
    first, second = (sum(r for name, r in ranks.items() if name.startswith(f"block.0{b}")) for b in (0, 1))
    assert first + second == 8 and second > 4 > first


def test_features_do_not_depend_on_the_order_of_examples() -> None:
    site = make_site("vit")
    examples = site.examples("train")

    class Backwards:
        def __len__(self) -> int:
            return len(examples)

        def batch(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
            return examples.batch(len(examples) - 1 - torch.as_tensor(indices))

    assert torch.allclose(features(replace(site, examples=lambda split: Backwards())), features(site), atol=1e-6)


def test_a_round_gives_the_received_generator_no_gradient_and_leaves_it() -> None:
    method = FedP2EFT(**SMALL)
    clients = Clients(method)
    sent = {key: value.clone() for key, value in select(clients.initial, slot(GENERATOR)).items()}
    received = Payload({key: value.clone() for key, value in sent.items()})
    _, reply = finish(
        federated(method).client_update(Payload(), received, clients.fresh("a"), Tick("generate", 1, 2, 0))
    )
    assert_same(received.arrays, sent)
    assert all(value.grad is None and not value.requires_grad for value in received.arrays.values())
    assert sum(value.numel() for value in reply.arrays.values()) * 4 == sum(
        4 * value.numel() for value in sent.values()
    )
    assert reply.arrays.keys() == sent.keys() and not reply.scalars


def test_an_adapter_merged_by_PEFT_says_the_same_and_leaves_modules_without_ranks_bit_for_bit(tmp_path: Path) -> None:
    """Properties 1 and 7: lambda is folded in, and only modules with ranks are targets of the checkpoint."""
    import peft

    site = make_site("vit", budgeted_layout(4, 2.0, True))
    arrays, names = site.model.dump(slot(BUDGETED)), list(site.model.shapes.targets)
    ranks = dict(zip(names, (0, 1, 3, 0), strict=True))
    for name, rank in ranks.items():
        arrays[join(BUDGETED, name, "B")] += torch.randn(16, 4)
        arrays[join(BUDGETED, name, "lambda")][:rank] = torch.tensor([0.5, 0.2, 2.0])[:rank]
    deployed = Deployment(arrays, (BUDGETED,))
    write_adapter(tmp_path / "adapter", deployed, site.model, base="tiny", task="image-classification")
    loaded = peft.PeftModel.from_pretrained(tiny_model("vit"), str(tmp_path / "adapter")).merge_and_unload()
    merged, bare = (dict(model.named_parameters()) for model in (loaded, tiny_model("vit")))
    for name, rank in ranks.items():
        path = f"{site.model.paths[name]}.weight"
        assert torch.equal(merged[path], bare[path]) == (rank == 0), name
    batch = site.examples("test").batch(torch.arange(4))
    site.model.load(arrays)
    with torch.no_grad():
        without = site.logits(batch)
        with site.model.active(BUDGETED):
            ours = site.logits(batch)
        theirs = site.task.logits(loaded.eval(), batch)
    assert torch.allclose(ours, theirs, atol=1e-5) and not torch.allclose(ours, without, atol=1e-2)


def test_clients_that_search_at_once_each_have_the_prior_of_their_own_examples() -> None:
    site = make_site("vit", budgeted_layout(4, 2.0, True))
    model, starts, alone = site.model, [], []
    terms = [Penalty(Prior(), (10,)), Penalty(Prior(), (40,))]
    for seed, term in enumerate(terms):
        model.load({key: value.abs() + 0.1 for key, value in random_state(model, seed).items()})
        starts.append(model.snapshot())
        alone.append(term.bind(site)({}, torch.empty(0)))
    assert terms[0].alike == terms[1].alike
    with model.lanes(starts, EVERYTHING):
        together = terms[0].joined(terms[1:]).bind(site)({}, torch.empty(0))
    torch.testing.assert_close(together, torch.stack(alone))
    assert not torch.isclose(alone[0], alone[1], rtol=0.5)
