"""What a client's update asks for in the middle: work that one client's model does, or several clients' at once.

An update that is a generator yields jobs and is sent their results:

    def client_update(self, client, received, site, at):
        site.model.load(received.arrays)
        report = yield from training(site, self.passes, at)
        return client, Payload(site.model.dump(slot("shared")))

While it waits, the model may serve other clients. It comes back as the update left it, so that an update may rely on
the values in the model, but neither on a reference to one of its tensors nor on a `with` around the `yield`.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from befit.core.values import Payload

if TYPE_CHECKING:
    from befit.adapters.model import AdaptedModel

Result = TypeVar("Result")


class Job(Protocol):
    """One thing that an update asks for.

    model  that it is done with
    kin    jobs of equal kin can be done together; None for one that cannot be done with any other
    """

    @property
    def model(self) -> AdaptedModel: ...

    @property
    def kin(self) -> Hashable: ...

    def alone(self) -> Any:
        """Do it on the model as it stands."""
        ...

    def together(self, others: Sequence[Any], starts: Sequence[Tensor], draws: Sequence[Tensor]) -> Sequence[Done]:
        """Do it and jobs of its kin at once; what became of each, this one first.

        starts  each client's model, as `AdaptedModel.snapshot` gives it
        draws   the state of each client's random numbers
        """
        ...


Done = tuple[Any, Tensor, Tensor]  # a result or the error in its place, the model after it, and the random numbers
Steps = Generator[Job, Any, Result]


def finish(update: Steps[Result] | Result) -> Result:
    """The result of an update, all of its jobs done by this client alone."""
    if not isinstance(update, Generator):
        return update
    try:
        job = next(update)
        while True:
            job = done_alone(update, job)
    except StopIteration as over:
        return over.value


def done_alone(update: Steps[Result], job: Job) -> Job:
    """Do an update's job by itself, and hand the update its result, or the error; returns its next job."""
    try:
        if not hasattr(job, "alone"):
            raise TypeError(f"an update yields a {type(job).__name__}: ask for training by yield from training(…)")
        result = job.alone()
    except Exception as error:
        return update.throw(error)
    return update.send(result)


def steps_of(update: Steps[Result] | Result) -> Steps[Result]:
    """An update as a generator, whether it is one or not: for one within another."""
    if not isinstance(update, Generator):
        return update
    return (yield from update)


Updated = tuple[Payload, Payload]  # a client's new memory, and its reply


def random_state(device: torch.device) -> Tensor:
    """Of the generator that dropout draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
