"""Training as one against training alone: the same numbers but for rounding, whoever else is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from befit.adapters.bayestune import Budgeted
from befit.adapters.forms import DENSE
from befit.adapters.keys import EVERYTHING, Selector, factor, slot
from befit.adapters.lanes import Lanes
from befit.adapters.layout import Layout, Slot, lora
from befit.adapters.mixers import ByInput
from befit.adapters.model import AdaptedModel
from befit.core.errors import NotDivisible, TrainingDiverged
from befit.core.values import Payload, Tick
from befit.methods.feddat import feddat
from befit.models.backbone import checkpoint_activations
from befit.protocol.jobs import random_state
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.tasks.examples import PaddedExamples, StackedExamples, balanced
from befit.train import fleet, rows
from befit.train.fleet import at_once, forget_most, most_at_once, train_together
from befit.train.loop import Training, training
from befit.train.passes import Pass, Stateful
from befit.train.terms import L2, Guide, ProductDistance
from tests.tiny import make_site, tiny_model
from tests.tiny import random_state as random_arrays

AT = Tick("federate", 1, 2, 0)
SHARED = Pass(slot("shared"), ("shared",))
# SGD moves by the gradient itself; AdamW turns an error of 1e-8 at a gradient of 0 into one of a whole step.
SGD = TrainSettings(max_steps=3, batch_size=4, lr=5e-2, optimiser="sgd", momentum=0.9, grad_clip=0.5)
BOTH = lora(rank=2, alpha=4.0, slots=("shared", "personal"))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What was too much for a model is its own."""
    yield
    forget_most()


def clients(
    kind: str, rows: Sequence[int], layout: Layout | None = None, budget: TrainSettings = SGD, **how: Any
) -> list[Site]:
    """Clients with one model, with data of their own and as many examples as `rows` say."""
    head, dropout = kind in ("vit", "bert"), how.pop("adapter_dropout", 0.0)
    model = AdaptedModel(tiny_model(kind, how.pop("dropout", 0.0)), "auto", head=head, dropout=dropout)
    first = make_site(kind, layout, rows=rows[0], model=model, budget=budget, client="client-0")
    others = [
        make_site(kind, layout, rows=count, model=model, budget=budget, client=f"client-{place}", data_seed=place)
        for place, count in enumerate(rows[1:], start=1)
    ]
    return [first, *(replace(site, task=first.task) for site in others)]


def starts(sites: Sequence[Site]) -> list[Tensor]:
    """Arrays of its own for each client."""
    model, found = sites[0].model, []
    for place in range(len(sites)):
        model.load(random_arrays(model, seed=place))
        found.append(model.snapshot())
    return found


def draws(sites: Sequence[Site]) -> list[Tensor]:
    return [torch.Generator().manual_seed(AT.seed_for(site.info.id, "dropout")).get_state() for site in sites]


def asked(site: Site, passes: Sequence[Pass], memory: Payload | None = None, at: Tick = AT, **how: Any) -> Training:
    return next(training(site, passes, at, memory=memory, **how))


@dataclass
class Ended:
    """What training came to: arrays, losses and kept averages by client, and the state of its random numbers."""

    results: list[Any]
    arrays: list[Tensor]
    draws: list[Tensor]


def both_ways(
    sites: Sequence[Site], passes: Sequence[Pass], begin: Sequence[Tensor] | None = None, **how: Any
) -> tuple[Ended, Ended]:
    """Alone, and as one."""
    begin = starts(sites) if begin is None else begin
    found = []
    for groups in ([[place] for place in range(len(sites))], [list(range(len(sites)))]):
        ended = []
        for group in groups:
            wanted = []
            for place in group:  # what a client asks for depends on the model as it stands
                sites[place].model.fill(begin[place])
                wanted.append(asked(sites[place], passes, **how))
            assert wanted[0].kin is not None
            assert len({one.kin for one in wanted}) == 1
            random = draws([sites[place] for place in group])
            train = at_once if len(group) > 1 else train_together  # which would fall back in silence
            ended += train(wanted, [begin[place] for place in group], random)
        found.append(Ended(*map(list, zip(*ended, strict=True))))
    return found[0], found[1]


def assert_alike(alone: Ended, together: Ended, rtol: float = 2e-5) -> None:
    for mine, theirs in zip(alone.arrays, together.arrays, strict=True):
        assert float((mine - theirs).norm() / mine.norm()) < rtol
    for mine, theirs in zip(alone.results, together.results, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-4)
        assert mine.moments.keys() == theirs.moments.keys()
        for key, value in mine.moments.items():
            torch.testing.assert_close(value, theirs.moments[key], rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(alone.draws, together.draws, strict=True):
        assert torch.equal(mine, theirs)


def test_a_fleet_trains_every_client_to_what_it_is_alone(kind: str) -> None:
    """Unequal numbers of examples, texts of unequal lengths, clipping, and dropout of adapters and backbone."""
    dropout = 0.0 if kind == "llama" else 0.1  # which has none
    sites = clients(kind, (12, 7, 12, 12, 5), adapter_dropout=0.2, dropout=dropout)
    alone, together = both_ways(sites, [SHARED])
    assert_alike(alone, together)
    begin = starts(sites)
    assert all(float((end - start).norm()) > 1e-2 for end, start in zip(together.arrays, begin, strict=True))
    assert len({float(report.losses["train"]) for report in together.results}) == 5


@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_examples_of_rare_classes_weigh_more_in_a_fleet_too(kind: str) -> None:
    sites = [
        replace(site, examples=lambda split, own=site.examples: balanced(own(split)))
        for site in clients(kind, (12, 7, 9))
    ]
    weighted, _ = both_ways(sites, [SHARED])
    assert_alike(*both_ways(sites, [SHARED]))
    plain, _ = both_ways(clients(kind, (12, 7, 9)), [SHARED])
    assert not torch.allclose(plain.arrays[0], weighted.arrays[0], rtol=1e-3)


def test_weights_of_classes_are_the_tasks_and_not_those_of_what_adapters_teach_each_other() -> None:
    layout, passes = lora(2, 4.0, slots=("shared", "frozen", "personal")), feddat(rank=2, alpha=4.0).passes
    sites = [
        replace(site, examples=lambda split, own=site.examples: balanced(own(split)))
        for site in clients("vit", (12, 7, 9), layout)
    ]
    assert_alike(*both_ways(sites, passes))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_dropout_of_attention_is_each_clients_own(implementation: str) -> None:
    sites = clients("bert", (8, 8), dropout=0.3)
    sites[0].model.backbone.set_attn_implementation(implementation)  # type: ignore[operator]
    assert_alike(*both_ways(sites, [SHARED]))


@pytest.mark.parametrize("most", [8, 20])
def test_buckets_of_rows_add_up_to_the_whole_batch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of a few rows, of which clients have unequal numbers: each row is multiplied by its own arrays."""
    monkeypatch.setitem(rows.TOKENS, "cpu", most)
    widths: list[int] = []
    for kind in ("bert", "gpt2"):
        sites = clients(kind, (12, 12, 7), BOTH, adapter_dropout=0.2, dropout=0.1)
        hook = sites[0].model.backbone.register_forward_pre_hook(
            lambda _, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        penalised = Pass(slot("personal"), ("personal",), (L2("personal", to="shared", weight=0.1),), name="personal")
        alone, together = both_ways(sites, [SHARED, penalised])
        hook.remove()
        assert_alike(alone, together)
    assert sum(1 for width in widths if width <= most) > 20


def test_kept_averages_and_rates_of_parts_are_each_clients_own() -> None:
    """Two rounds with AdamW, whose averages each client keeps, two passes and a part at a tenth of the rate."""
    budget = TrainSettings(max_steps=2, batch_size=4, lr=1e-2, weight_decay=0.1, schedule="cosine", warmup_steps=1)
    sites = clients("vit", (12, 12, 12), BOTH, budget)
    slow = ((slot("personal"), 0.1),)
    passes = [SHARED, Pass(slot("personal", "shared"), ("personal",), name="personal", keep_optimiser=True, rates=slow)]
    first, _ = both_ways(sites, passes)
    ended = []
    for groups in ([[0], [1], [2]], [[0, 1, 2]]):
        random, found = draws(sites), []
        for group in groups:
            wanted = []
            for place in group:
                sites[place].model.fill(first.arrays[place])
                wanted.append(asked(sites[place], passes, first.results[place].memory, replace(AT, round=2)))
            assert len({one.kin for one in wanted}) == 1
            train = at_once if len(group) > 1 else train_together
            found += train(wanted, [first.arrays[place] for place in group], [random[place] for place in group])
        ended.append(Ended(*map(list, zip(*found, strict=True))))
    assert_alike(*ended, rtol=1e-4)
    assert {float(value) for key, value in ended[1].results[0].moments.items() if key.endswith("step")} == {4.0}


def test_clients_whose_optimisers_have_seen_different_numbers_of_steps_are_no_fleet() -> None:
    sites = clients("vit", (8, 8))
    kept = [replace(SHARED, keep_optimiser=True)]
    memory = training(sites[0], kept, AT)
    report = next(memory).alone()
    new, old = asked(sites[0], kept), asked(sites[1], kept, report.memory)
    assert new.kin is not None and old.kin is not None
    assert new.kin != old.kin


def test_a_client_that_diverges_leaves_the_others_as_they_are() -> None:
    sites = clients("vit", (8, 8, 8))
    begin = starts(sites)
    alone, _ = both_ways(sites, [SHARED], begin)
    begin[1] = begin[1] * 1e38
    together = train_together([asked(site, [SHARED]) for site in sites], begin, draws(sites))
    assert isinstance(together[1][0], TrainingDiverged)
    for place in (0, 2):
        assert not isinstance(together[place][0], Exception)
        torch.testing.assert_close(together[place][1], alone.arrays[place], rtol=2e-5, atol=1e-6)


def test_what_is_too_much_for_the_memory_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    sites = clients("vit", (8, 8, 8, 8, 8))
    begin, sizes = starts(sites), list[int]()
    alone, _ = both_ways(sites, [SHARED], begin)

    def allocate(_: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        sizes.append(len(kwargs["pixel_values"]))
        if sizes[-1] > 8:
            raise torch.OutOfMemoryError("the card is full")

    sites[0].model.backbone.register_forward_pre_hook(allocate, with_kwargs=True)
    ended = train_together([asked(site, [SHARED]) for site in sites], begin, draws(sites))
    assert [size for size in sizes if size > 8] == [20, 12]  # five, then three of which two
    assert 8 in sizes
    assert 4 in sizes
    for (_, arrays, _), mine in zip(ended, alone.arrays, strict=True):
        torch.testing.assert_close(arrays, mine, rtol=2e-5, atol=1e-6)
    assert "OutOfMemoryError: the card is full" in caplog.text
    caplog.clear()
    tried = len(sizes)
    again = train_together([asked(site, [SHARED]) for site in sites], begin, draws(sites))
    assert max(sizes[tried:]) <= 8 and not caplog.text  # what was too much is not tried again
    assert all(torch.equal(one[1], other[1]) for one, other in zip(again, ended, strict=True))
    assert most_at_once() == 2
    forget_most()
    assert most_at_once() is None


ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5)
DRAWN: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda pixels: torch.rand(2),
    lambda pixels: torch.empty(2).normal_(),
    lambda pixels: nn.functional.dropout2d(pixels, 0.5),
    lambda pixels: nn.functional.rrelu(pixels, training=True),
    lambda pixels: ATTENTION(*[pixels.reshape(-1, 4)] * 3)[0],
    lambda pixels: nn.functional.dropout(pixels[:3], 0.5),  # of a shape that is no client's batch
)


@pytest.mark.parametrize("draw", DRAWN, ids=["rand", "normal_", "dropout2d", "rrelu", "attention", "rows"])
def test_random_numbers_of_no_client_are_told_of_once_and_clients_train_one_by_one(
    draw: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    sites = clients("vit", (8, 8, 8))
    begin, sizes = starts(sites), list[int]()

    def drawing(_: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        sizes.append(len(kwargs["pixel_values"]))
        draw(kwargs["pixel_values"])

    sites[0].model.backbone.register_forward_pre_hook(drawing, with_kwargs=True)
    for _ in range(2):
        ended = train_together([asked(site, [SHARED]) for site in sites], begin, draws(sites))
        assert not any(isinstance(result, Exception) for result, _, _ in ended)
    assert [size for size in sizes if size > 4] == [12] and most_at_once() == 1
    assert caplog.text.count("cannot be told apart by client") == 1


def test_a_dropout_that_drops_nothing_is_no_drawing() -> None:
    sites = clients("vit", (8, 8))

    def idle(_: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        nn.functional.dropout2d(kwargs["pixel_values"], 0.5, training=False)
        nn.functional.alpha_dropout(kwargs["pixel_values"], 0.0, True)
        nn.functional.rrelu(kwargs["pixel_values"])

    sites[0].model.backbone.register_forward_pre_hook(idle, with_kwargs=True)
    assert_alike(*both_ways(sites, [SHARED]))


def test_a_model_that_draws_in_some_batches_alone_is_seen_to_draw() -> None:
    """As the tower of a model of images and texts may: the first batch of texts without images draws nothing."""
    sites = clients("bert", (8, 8))
    batches = iter(range(100))

    def drawing(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> None:
        if "pixel_values" in kwargs:
            torch.rand(2)

    class Sometimes(PaddedExamples):
        def batch(self, indices: Sequence[int] | Tensor) -> dict[str, Tensor]:
            images = {"pixel_values": torch.zeros(len(indices), 1)} if next(batches) > 1 else {}
            return {**super().batch(indices), **images}

    def with_images(site: Site) -> Site:
        whole: Any = site.examples("train")
        examples = Sometimes(whole.sequences, whole.lengths, whole.columns)
        return replace(site, examples=lambda split: examples)

    model = sites[0].model.backbone
    forward = model.forward
    model.forward = lambda pixel_values=None, **how: forward(**how)
    model.register_forward_pre_hook(drawing, with_kwargs=True)
    sites = [with_images(site) for site in sites]
    with pytest.raises(NotDivisible, match="draws random numbers by rand"):
        at_once([asked(site, [SHARED]) for site in sites], starts(sites), draws(sites))


def test_a_client_that_cannot_train_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    sites = clients("vit", (8, 8, 8))
    sites[1] = replace(sites[1], examples=lambda split: StackedExamples({"labels": torch.zeros(0)}))
    ended = train_together([asked(site, [SHARED]) for site in sites], starts(sites), draws(sites))
    assert "client-1 has no train examples" in str(ended[1][0])
    assert [isinstance(result, Exception) for result, _, _ in ended] == [False, True, False]
    assert not caplog.text  # the client's own error says it


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_who_else_is_in_a_fleet_makes_no_difference(kind: str) -> None:
    sites = clients(kind, (12, 7, 9, 12), adapter_dropout=0.3, dropout=0.2)
    begin, random = starts(sites), draws(sites)
    found = []
    for others in ((1,), (2, 3), (1, 2, 3)):
        places = (0, *others)
        wanted = [asked(sites[place], [SHARED]) for place in places]
        ended = at_once(wanted, [begin[place] for place in places], [random[place] for place in places])
        found.append(ended[0][1])
    for other in found[1:]:
        assert float((found[0] - other).norm() / found[0].norm()) < 2e-5


def test_frozen_arrays_that_are_the_same_everywhere_are_held_once() -> None:
    layout = Layout((Slot("base", 2, 4.0, form=DENSE), Slot("personal", 2, 4.0)))
    sites = clients("vit", (8, 8, 8), layout)
    begin, model = starts(sites), sites[0].model
    size = sum(value.numel() for key, value in model.leaves(slot("base")).items())
    base = begin[0][:size].clone()
    for start in begin:
        start[:size] = base
    passes = [Pass(slot("personal"), ("base", "personal"))]
    lanes = Lanes(model.specs, begin, slot("personal"), model.device)
    shapes = {key: leaf.dim() - len(model.specs[key].shape) for key, leaf in lanes.state.leaves.items()}
    assert {key.partition("/")[0]: more for key, more in shapes.items()} == {"base": 0, "personal": 1}
    assert_alike(*both_ways(sites, passes, begin))


@pytest.mark.parametrize("trained", [slot("budgeted") & ~factor("lambda"), slot("budgeted") & factor("B")])
def test_ranks_that_all_lanes_dropped_are_the_same_in_each(trained: Selector) -> None:
    """Kept scales that nobody trains are held once, beside factors that are held lane by lane."""
    layout = Layout((Slot("budgeted", 4, 4.0, form=Budgeted()),))
    sites = clients("vit", (8, 8, 8), layout)
    model, begin = sites[0].model, []
    for place in range(len(sites)):
        arrays = random_arrays(model, seed=place)
        for key in arrays:
            if not trained(key):
                arrays[key] = torch.full_like(arrays[key], 0.2)
            if key.endswith("/lambda"):
                arrays[key] = torch.tensor([0.0, 0.5, 0.0, 2.0])
        model.load(arrays)
        begin.append(model.snapshot())
    assert_alike(*both_ways(sites, [Pass(trained, ("budgeted",))], begin))


@dataclass(frozen=True)
class Own:
    """A term as somebody writes it who knows nothing of lanes."""

    def bind(self, site: Site) -> Guide:
        return lambda batch, logits: logits.square().mean()


def test_what_is_written_for_one_client_trains_alone() -> None:
    (site,) = clients("vit", (8,))
    assert asked(site, [SHARED]).kin is not None
    assert asked(site, [replace(SHARED, terms=(Own(),))]).kin is None
    assert "its term Own " in replace(SHARED, terms=(Own(),)).lone
    assert asked(site, [replace(SHARED, mixer=ByInput(0.5, "similar"))]).kin is None
    site.model.backbone.register_module("norm", nn.BatchNorm1d(3, track_running_stats=False))
    again = make_site("vit", model=AdaptedModel(site.model.unwrap(), head=True))
    assert asked(again, [SHARED]).kin is None


def test_batch_normalisation_keeps_the_statistics_of_the_backbone() -> None:
    """Else a client's numbers would depend on who trained with the model before."""
    sites = clients("vit", (8, 12))
    bare: Any = sites[0].model.unwrap()
    bare.classifier = nn.Sequential(nn.BatchNorm1d(16), bare.classifier).train()
    model = AdaptedModel(bare)
    model.install(lora(rank=2, alpha=4.0), seed=0)
    sites = [replace(site, model=model) for site in sites]
    before = {name: value.clone() for name, value in bare.named_buffers()}
    assert_alike(*both_ways(sites, [SHARED]))
    after = dict(bare.named_buffers())
    assert "classifier.0.running_mean" in before
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_activations_are_computed_anew_in_a_fleet_unless_anything_is_drawn() -> None:
    sites = clients("bert", (8, 8))
    checkpoint_activations(sites[0].model.backbone, "bert")
    assert_alike(*both_ways(sites, [SHARED]))
    with sites[0].model.dropping(0.1):
        assert asked(sites[0], [SHARED]).kin is None
    sites = clients("bert", (8, 8), dropout=0.1)
    assert asked(sites[0], [SHARED]).kin is not None
    checkpoint_activations(sites[0].model.backbone, "bert")
    assert asked(sites[0], [SHARED]).kin is None


def test_a_fleet_leaves_the_model_as_it_found_it() -> None:
    sites = clients("vit", (8, 8))
    before, numbers = sites[0].model.dump(EVERYTHING), random_state(torch.device("cpu"))
    train_together([asked(site, [SHARED]) for site in sites], starts(sites), draws(sites))
    model = sites[0].model
    assert model.lane_count is None and model.rows is None and not model.backbone.training
    assert {key: leaf.shape for key, leaf in model.leaves(EVERYTHING).items()} == {
        key: value.shape for key, value in before.items()
    }
    assert torch.equal(numbers, random_state(torch.device("cpu")))
    sites[0].model.reset()
    assert asked(sites[0], [SHARED]).alone().steps == 3


@pytest.mark.parametrize("rank", [2, 3])
def test_a_distance_of_products_is_one_of_each_lane_whatever_the_rank(rank: int) -> None:
    """Its target is one for all lanes where it is no client's own."""
    layout = lora(rank, 4.0, slots=("shared", "personal"))
    sites = clients("vit", [8, 8, 8], layout)
    term = ProductDistance("personal", to="shared", weight=0.1)
    step = Pass(slot("personal"), ("personal",), (term,))
    asked = [Training(site, (step,), (None,), AT, 3, Payload(), "train", False, 0.0) for site in sites]
    model = sites[0].model
    model.load(random_arrays(model, seed=0))
    same, draws = model.snapshot(), random_state(model.device)
    together = at_once(asked, [same] * 3, [draws] * 3)
    for request, (report, arrays, _) in zip(asked, together, strict=True):
        ((expected, alone, _),) = train_together([request], [same], [draws])
        assert not isinstance(report, Exception) and not isinstance(expected, Exception)
        assert torch.allclose(arrays, alone, rtol=1e-4, atol=1e-6)


def test_what_a_failed_fleet_changed_after_its_steps_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Stateful):
        def __init__(self) -> None:
            self.steps = torch.zeros(1)

        def __call__(self, step: int, leaves: Any) -> None:
            self.steps += 1

    sites, counting = clients("vit", [8, 8]), [Counting(), Counting()]
    asked = [
        Training(site, (replace(SHARED, after=after),), (None,), AT, 3, Payload(), "train", False, 0.0)
        for site, after in zip(sites, counting, strict=True)
    ]
    real, calls = fleet.at_once, [0]

    def failing(*given: Any) -> Any:
        real(*given)
        calls[0] += 1
        raise MemoryError

    monkeypatch.setattr(fleet, "at_once", failing)
    train_together(asked, starts(sites), [random_state(sites[0].model.device)] * 2)
    forget_most()
    assert calls[0] == 1 and [float(after.steps) for after in counting] == [3.0, 3.0]
