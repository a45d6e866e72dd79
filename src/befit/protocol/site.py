"""Sites: everything that a method may touch, on a client and on the server."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from befit.adapters.model import AdaptedModel
from befit.core.errors import DataError
from befit.core.values import ClientInfo, State, Tick
from befit.tasks.base import to_device

if TYPE_CHECKING:
    from befit.data.streams import Stream
    from befit.protocol.mechanism import Mechanism, Privacy
    from befit.protocol.settings import TrainSettings
    from befit.tasks.base import Batch, Examples, Task


@dataclass(frozen=True)
class Backbone:
    """A model with places for adapters, the task in its terms (tokenizer, image processor), and who it is.

    name         of its family in the configuration; "model" for the configuration's own
    fingerprint  of its weights
    """

    name: str
    fingerprint: str
    model: AdaptedModel
    task: Task

    @property
    def key(self) -> str:
        """What `ClientInfo.backbone` says of a client that has it."""
        return self.fingerprint[:16]

    @property
    def parameters(self) -> int:
        return self.model.parameters_of_backbone


@dataclass
class Site:
    """One client: its model, task, data and budget. Random draws take a seed from a `Tick`.

    report           numbers for the log that `client_update` may add; they leave the client, by name
    asked            the trainings that the present update has asked for
    steps            of those that have begun
    common           the bare model that all clients have: `common_model` of the configuration, or the smallest backbone
    common_examples  this client's records, by split, in that backbone's terms
    public           the federation's public records, in the terms of this client's model
    stream           where training data arrives over time, what a round's batches are made of
    values           what the field that `evaluate.by` names says of each example of a split; nothing without it
    others           the other clients' examples by client, of a split, where all are on this machine; for scores alone
    parts            makes this site one without a part of its training examples, see `in_part`
    privacy          what protects single examples in what leaves; None where nothing does
    mechanism        in a private stage, what training goes through to reach the records, which nothing else can
    """

    info: ClientInfo
    model: AdaptedModel
    task: Task
    budget: TrainSettings
    examples: Callable[[str], Examples]
    report: dict[str, float] = field(default_factory=dict)
    common: Backbone | None = None
    common_examples: Callable[[str], Examples] | None = None
    public: Callable[[], Examples] | None = None
    stream: Stream | None = None
    values: Callable[[str], Sequence[str]] = lambda split: ()
    others: Callable[[str], Mapping[str, Examples]] | None = None
    parts: Callable[[Site, int, int], Site] | None = None
    privacy: Privacy | None = None
    mechanism: Mechanism | None = None
    asked: list[Generator[Any, Any, Any]] = field(default_factory=list[Generator[Any, Any, Any]])
    steps: list[int] = field(default_factory=list[int])

    def in_part(self, number: int, of: int) -> Site:
        """The same site with part `number`, from 1, of `of` equal parts of its training examples held out: these are
        its validation examples then, and those it has are left aside. What it reports and asks for is this site's.
        """
        assert self.parts is not None, "this site's records cannot be divided"
        return self.parts(self, number, of)

    def batches(self, split: str, steps: int, at: Tick) -> Iterator[Batch]:
        """`steps` mini-batches: epochs without replacement, shuffled anew each time, by a seed of this client and tick.

        A client with fewer examples than a batch gives all of them each time. Training data that arrives over time
        comes as its stream says.
        """
        examples = self.examples(split)
        for indices in self.indices(split, steps, at):
            yield self.to_device(examples.batch(indices))

    def indices(self, split: str, steps: int, at: Tick) -> Iterator[Tensor]:
        """Which examples are in each of those batches, by their place in the split."""
        count = len(self.examples(split))
        if not count:
            raise DataError(f"client {self.info.id} has no {split} examples")
        if self.stream is not None and split == "train":
            return self.stream.batches(steps, self.budget.batch_size, at)
        generator = torch.Generator().manual_seed(at.seed_for(self.info.id, "batches"))
        return shuffled_batches(count, self.budget.batch_size, steps, generator)

    def to_device(self, batch: Batch) -> Batch:
        return to_device(batch, self.model.device)

    def logits(self, batch: Batch) -> Tensor:
        return self.task.logits(self.model.backbone, batch)

    def loss(self, batch: Batch) -> Tensor:
        return self.task.loss(self.logits(batch), batch)


@dataclass(frozen=True)
class ServerSite:
    """The server: the initial adapters of the common seed, and who the clients are. It holds no private data.

    starts     initial adapters by backbone (`ClientInfo.backbone`); one where all clients share it
    backbones  the models themselves, by the same names, for methods that need them at the server
    public     the federation's public records in the terms of one backbone
    budget     the configuration's settings of training, for methods that train at the server
    common     the bare model that all clients have, see `Site`
    """

    starts: Mapping[str, State]
    clients: tuple[ClientInfo, ...]
    backbones: Mapping[str, Backbone] = field(default_factory=dict[str, "Backbone"])
    public: Callable[[str], Examples] | None = None
    budget: TrainSettings | None = None
    common: Backbone | None = None

    @property
    def initial(self) -> State:
        """The initial adapters of the only backbone. Raises ValueError where there are several."""
        if len(self.starts) != 1:
            raise ValueError(f"expected one backbone, found {len(self.starts)}")
        (only,) = self.starts.values()
        return only

    @property
    def families(self) -> tuple[str, ...]:
        """The backbones of the clients, in the order of their first clients."""
        return tuple(self.starts)

    def only(self, family: str) -> ServerSite:
        """The server as one family sees it."""
        clients = tuple(info for info in self.clients if info.backbone == family)
        backbones = {key: backbone for key, backbone in self.backbones.items() if key == family}
        return replace(self, starts={family: self.starts[family]}, clients=clients, backbones=backbones)


def shuffled_batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of `steps` batches of at most `size`; an epoch's remainder is a batch of its own.

    >>> [len(batch) for batch in shuffled_batches(5, 2, 4, torch.Generator().manual_seed(0))]
    [2, 2, 1, 2]
    """
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if not len(order):
            order = torch.randperm(count, generator=generator)
        batch, order = order[:size], order[size:]
        yield batch
