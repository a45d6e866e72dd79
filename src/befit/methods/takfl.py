"""TAKFL (Morafah et al. 2024): what each family's clients teach is one task vector, and the server adds them up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from torch import Tensor

from befit.adapters.keys import slot
from befit.adapters.state import add, scale
from befit.core.schema import POSITIVE, at_least
from befit.core.values import ClientWeights, Payload, State, Tick, Update
from befit.methods.fedit import fedit
from befit.methods.parts.distil.ensemble import (
    TeacherLogits,
    blend_teachers,
    lessons,
    mean_logits,
    students,
    with_states,
)
from befit.methods.parts.distil.settings import Distillation
from befit.methods.parts.distil.student import Student, seeded_dropout, soft_loss
from befit.protocol.per_family import ByFamily
from befit.protocol.registry import register
from befit.protocol.site import ServerSite
from befit.protocol.work import PublicWork, Work


@register("takfl", title="TAKFL", paper="arXiv:2409.18461", year=2024)
def takfl(
    rank: int = 8,
    alpha: float = 16.0,
    weights: ClientWeights = "uniform",
    temperature: Annotated[float, POSITIVE] = 3.0,
    own_weight: Annotated[float, at_least(0)] = 0.01,
    own_temperature: Annotated[float, POSITIVE] = 20.0,
    strength: Annotated[float, at_least(0)] = 1.0,
    distil: Distillation = Distillation(),  # noqa: B008 frozen
) -> ByFamily:
    """One shared adapter per family, to which the server adds what each family's clients would teach it.

    rank             rank of the adapter
    alpha            its scaling: delta = alpha / rank * B A
    weights          how a family's updates are averaged: "uniform" or "examples"
    temperature      T of learning from a family's clients
    own_weight       how much the average's own answers count beside them
    own_temperature  T of those
    strength         the task vectors' weights together: lambda_k = strength / K for each of K teacher families
    distil           public records, steps and rate of the distillation, see `Distillation`

    For each teacher family k, from the student family's average theta: `theta_k` minimises `KL_T(mean logits of k) +
    own_weight KL_T'(theta)`, both times their T^2, over answer tokens; `theta + sum_k lambda_k (theta_k - theta)`.
    up = down = r(d_in + d_out) per module. Deviation: the formula, where the released code's task vectors are zero;
    logits of another tokenizer are translated and stay probabilities.

    Source: Morafah et al. 2024, Algorithm 1; snumprlab/fedmosaic, federated_methods/takfl.py; docs/methods/takfl.md.
    """
    return ByFamily(
        fedit(rank, alpha, weights), TaskVectors(temperature, own_weight, own_temperature, strength, distil)
    )


@dataclass(frozen=True)
class TaskVectors:
    """The server's side, once a round. Fields as the arguments of the method."""

    temperature: float
    own_weight: float
    own_temperature: float
    strength: float
    settings: Distillation

    @property
    def work(self) -> PublicWork:
        """Of one backbone: its average learns once from its clients, beside its own answers."""
        learning = Work(("shared",), slot("shared"), times=self.settings.passes)
        forward = Work(("shared",), times=self.settings.passes)
        return PublicWork(server=(learning, forward), each=(forward,))

    def __call__(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        families = list(students(site, server, updates, self.settings, at))
        learning = {teacher: students(site, server, updates, self.settings, at) for teacher in families}
        with seeded_dropout(site.backbones[families[0]], at, "server"):
            for taught in lessons(site, updates, self.settings, at):
                for family in families:
                    own = _own_rows(site, family, learning[family][family], taught)
                    for teacher in families:
                        loss = partial(self._loss, taught[family], taught[teacher], own)
                        learning[teacher][family].step(taught[family].seen, loss)
        weight = self.strength / len(families)
        return with_states(
            server,
            {family: _summed([learning[teacher][family] for teacher in families], weight) for family in families},
        )

    def _loss(self, student: TeacherLogits, teacher: TeacherLogits, own: Tensor, rows: Tensor) -> Tensor:
        """`T^2 KL_T(teacher) + own_weight T'^2 KL_T'(own)`, means over answer tokens."""
        T, other = self.temperature, self.own_temperature
        target = blend_teachers(student.seen, [teacher], rows.shape[-1], T, self.settings.top)
        kept = soft_loss((own / other).softmax(-1), rows, other)
        return T**2 * soft_loss(target, rows, T) + self.own_weight * other**2 * kept


def _own_rows(site: ServerSite, family: str, student: Student, taught: Mapping[str, TeacherLogits]) -> Tensor:
    """The logits of the family's average itself for the batch."""
    return mean_logits(site.backbones[family], taught[family].seen, iter([student.start]))


def _summed(students: Sequence[Student], weight: float) -> State:
    """`theta + sum_k weight (theta_k - theta)`."""
    theta = students[0].start
    for student in students:
        theta = add(theta, scale(add(student.state, scale(student.start, -1)), weight))
    return theta
