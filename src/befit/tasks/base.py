"""Tasks: what a model is trained for. A task owns preparation, collation, loss, metrics and prediction.

Methods and the training loop see only `Task` and `Examples`, so that methods times tasks never multiply.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from befit.core.errors import DataError
from befit.core.metrics import EXAMPLES, OVER_TOKENS, Measure
from befit.tasks.answers import ANSWERS, answer_places

Batch = dict[str, Tensor]
Record = Mapping[str, Any]
Reduction = Literal["mean", "sum"]


TOKENS = 1024  # of a batch of texts that a CPU scores: more no longer fit its caches, fewer are mostly calls


class Examples(Protocol):
    """Prepared records of one client and split: tokenised or stacked once, then indexed cheaply.

    Texts have `lengths` too, (examples,) int64: their tokens, by which they are put into batches to be scored.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | Tensor) -> Batch:
        """The examples at `indices`, in that order, as CPU tensors whose first axis is the batch; the images of
        conversations follow one another."""
        ...


class Task(ABC):
    """One kind of problem.

    name         as it is registered, see `befit.tasks.TaskKind`
    metric       the headline number among those of `evaluate`; higher is better
    label_names  the classes in order, where there are any
    rows_each    rows of a batch that one sample has, one after another
    """

    name: ClassVar[str]
    rows_each: ClassVar[int] = 1
    metric: str
    label_names: tuple[str, ...] = ()

    @abstractmethod
    def prepare(self, records: Sequence[Record]) -> Examples:
        """Read, tokenise or stack records once. Raises DataError that names the first record that cannot be used."""

    def check(self, records: Sequence[Record]) -> None:
        """Raise what `prepare` would raise, without opening an image."""
        self.prepare(records)

    def refer(self, model: nn.Module, examples: Examples, batch_size: int, device: torch.device | str) -> Examples:
        """The examples with what the bare backbone makes of them, for a task whose loss compares with it.

        model  without any adapter that takes part
        """
        return examples

    def trains_on(self, record: Record, where: str) -> bool:
        """Whether a record is learnt from; those that a setting leaves out are only measured on."""
        return True

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """One forward pass: (batch, classes), or of a language model those the loss is of, (answers, vocabulary)."""

    @abstractmethod
    def sample_losses(self, logits: Tensor, batch: Batch, reduction: Reduction = "mean") -> Tensor:
        """(batch,) float32: one loss per sample; a language model's is the mean or sum over the answer's tokens."""

    @abstractmethod
    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The scalar to train on, float32: mean over samples, or over all answer tokens of the batch."""

    def terms(self, batch: Batch) -> Tensor:
        """(batch,) how many terms of equal weight each sample has in `loss`: its sum of `sample_losses` over all terms
        of the batch is `loss`."""
        raise NotImplementedError

    def positions(self, batch: Batch) -> Tensor:
        """(batch,) how many rows of `judged` each sample has: its terms, as if all classes weighed the same."""
        return self.terms({name: values for name, values in batch.items() if name != "weights"})

    @property
    def padding(self) -> Mapping[str, int] | None:
        """What stands in each array of a batch, (batch, tokens), beyond a sample's end: nothing where all samples have
        one size. None where the batches of several clients cannot be one; a task that says otherwise has `terms`."""
        return None

    def part(self, batch: Batch, places: Tensor) -> Batch:
        """The samples at these places of a batch on the CPU, (samples,) int64, in that order; one may come twice."""
        return {name: values[places] for name, values in batch.items()}

    @abstractmethod
    def judged(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits that the loss is of, (rows, classes), and the sample that each row belongs to, (rows,) int64."""

    @abstractmethod
    def draw_labels(self, logits: Tensor, batch: Batch, generator: torch.Generator) -> Batch:
        """The batch with the labels that the model itself gives, drawn from its probabilities.

        The uniform numbers come from `generator` alone, one for each label, so that two models that are given equal
        generators draw as alike as they are.
        """

    @abstractmethod
    def evaluate(
        self,
        model: nn.Module,
        examples: Examples,
        batch_size: int,
        device: torch.device | str,
        values: Sequence[str] = (),
    ) -> dict[str, float]:
        """Metrics over all examples, without gradients. Each module's training flag is left as found.

        values  one for every example, such as its language: what is better when higher is measured of the examples of
                each value too, in the same pass, see `by_value`

        Deterministic; independent of `batch_size` up to rounding. Raises DataError when there are no examples.
        """

    def headline(self, model: nn.Module, examples: Examples, batch_size: int, device: torch.device | str) -> float:
        """The metric called `metric` alone, as `evaluate` has it; a task that can have it for less overrides this."""
        return self.evaluate(model, examples, batch_size, device)[self.metric]

    def total_loss(self, model: nn.Module, examples: Examples, batch_size: int, device: torch.device | str) -> float:
        """Minus the log-likelihood of all examples: `sample_losses` by "sum", summed in float64."""
        with inference(model):
            parts = [
                self.sample_losses(self.logits(model, batch), batch, "sum").double().sum()
                for _, batch in batches(examples, batch_size, device)
            ]
        return float(torch.stack(parts).sum())

    @abstractmethod
    def predict(
        self, model: nn.Module, inputs: Sequence[Any], batch_size: int = 32, device: torch.device | str | None = None
    ) -> list[dict[str, Any]]:
        """One plain-data answer per input, in order; `device` is the model's own unless it is given."""


def by_value(
    values: Sequence[str],
    measured: Callable[[list[int]], Mapping[str, float]],
    single: Callable[[int], Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """`<metric> of <value>` for every value, in order of appearance, and how many examples it has.

    measured  the metrics of the examples at these places
    single    those of one example that `one_by_one` asks for; None: as of any

    >>> by_value(["de", "fr", "de"], lambda rows: {"accuracy": rows[0] / 2})
    {'examples of de': 2, 'accuracy of de': 0.0, 'examples of fr': 1, 'accuracy of fr': 0.5}
    """
    places: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        for part in _split_each(value):
            places.setdefault(part, []).append(row)
    return {
        str(Measure(metric, where=value)): number
        for value, rows in places.items()
        for metric, number in {
            EXAMPLES: len(rows),
            **(single(rows[0]) if single is not None and _EACH in value else measured(rows)),
        }.items()
    }


_EACH = "\x1fexample "  # in no record's text
LABEL, ANSWER = "label", "answer"  # of a single example, as numbers of classes


def one_by_one(values: Sequence[str], count: int) -> list[str]:
    """Values for `Task.evaluate` by which every example is measured by itself too, beside its value where it has one;
    `take_singles` takes these numbers out again."""
    return [f"{value}{_EACH}{row}" for row, value in enumerate(values or [""] * count)]


def take_singles(metrics: dict[str, float], metric: str) -> dict[str, tuple[float, ...]]:
    """Take the measurements of single examples out of `metrics`; returns them by metric, in the order of examples.

    Those of `metric`, the headline, are left out where their mean is not the headline itself, as of a mean over tasks.
    Those of a mean over tokens always are: it is one over examples only where all happen to have equally many.

    >>> measured = {"accuracy": 0.5, **by_value(one_by_one([], 2), lambda rows: {"accuracy": float(rows[0])})}
    >>> take_singles(measured, "accuracy"), measured
    ({'accuracy': (0.0, 1.0)}, {'accuracy': 0.5})
    """
    singles: dict[str, list[float]] = {}
    for name in [name for name in metrics if _EACH in name]:
        singles.setdefault(Measure.named(name).metric, []).append(metrics.pop(name))
    by_metric = {name: tuple(values) for name, values in singles.items() if name not in (EXAMPLES, *OVER_TOKENS)}
    scores = by_metric.get(metric, ())
    mean = sum(scores) / len(scores) if scores else math.nan
    if not math.isclose(mean, metrics[metric], rel_tol=1e-9, abs_tol=1e-9):
        by_metric.pop(metric, None)
    return by_metric


def _split_each(value: str) -> list[str]:
    text, marker, row = value.rpartition(_EACH)
    return [value] if not marker else [*[text][: bool(text)], marker + row]


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One class per row of logits (rows, classes): (rows,) int64, where the cumulated probability passes a number from
    [0, 1) of the CPU generator."""
    uniform = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64).to(logits.device)
    passed = logits.double().softmax(-1).cumsum(-1) <= uniform
    return passed.sum(-1).clamp_max(logits.shape[-1] - 1)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module's training flag is what it was before."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


def batches(examples: Examples, batch_size: int, device: torch.device | str) -> Iterator[tuple[Tensor, Batch]]:
    """All examples to be scored: in each batch at most `batch_size`, with their places, (batch,) int64, on `device`.

    Texts come by length, see `by_length`, all else in order. Raises DataError when there are none: a score of nothing
    is not a number.
    """
    if not len(examples):
        raise DataError("there are no examples to evaluate; give the split records, or evaluate another split")
    lengths = getattr(examples, "lengths", None)
    order = torch.arange(len(examples)).split(batch_size) if lengths is None else by_length(lengths, batch_size, device)
    for places in order:
        yield places, to_device(examples.batch(places), device)


def by_length(lengths: Tensor, batch_size: int, device: torch.device | str) -> Iterator[Tensor]:
    """Places of texts of these lengths in batches with little padding, the longest first.

    A batch has at most `batch_size` texts; on a CPU it has no more than `TOKENS` tokens either, but one text.

    >>> [places.tolist() for places in by_length(torch.tensor([3, 9, 8, 4]), 2, "cpu")]
    [[1, 2], [3, 0]]
    """
    order = lengths.argsort(descending=True, stable=True)
    on_cpu = torch.device(device).type == "cpu"
    while len(order):
        size = max(1, min(batch_size, TOKENS // int(lengths[order[0]]))) if on_cpu else batch_size
        yield order[:size]
        order = order[size:]


def in_order(places: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """What was found batch by batch, (examples, …), each at its place.

    >>> in_order([torch.tensor([2, 0]), torch.tensor([1])], [torch.tensor([7, 5]), torch.tensor([6])])
    tensor([5, 6, 7])
    """
    return torch.cat(list(values))[torch.cat(list(places)).argsort()]


def scored(
    model: nn.Module,
    examples: Examples,
    batch_size: int,
    device: torch.device | str,
    of: Callable[[Batch], tuple[Tensor, ...]],
) -> list[Tensor]:
    """What `of` finds in every batch without gradients, (batch, …) each: of all examples, in their order, on the CPU.

    Raises DataError where there are no examples.
    """
    order, found = list[Tensor](), list[tuple[Tensor, ...]]()
    with inference(model):
        for places, batch in batches(examples, batch_size, device):
            order.append(places)
            found.append(tuple(values.cpu() for values in of(batch)))
    return [in_order(order, values) for values in zip(*found, strict=True)]


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """A batch from the CPU; on another device it has the places of a language model's answers with it, which could only
    be found there by waiting for it."""
    if torch.device(device).type == "cpu":
        return batch
    labels = batch.get("labels")
    if labels is not None and labels.dim() == 2 and ANSWERS not in batch:
        batch = {**batch, ANSWERS: answer_places(labels)}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def model_device(model: nn.Module) -> torch.device:
    """Where the first parameter lives. Models that are spread over several devices are not supported."""
    return next(model.parameters()).device


def record_name(record: Record, position: int) -> str:
    """How an error names a record.

    >>> record_name({"id": "a1"}, 7), record_name({}, 7)
    ("record 'a1' (position 7)", 'the record at position 7')
    """
    return f"record {record['id']!r} (position {position})" if "id" in record else f"the record at position {position}"
