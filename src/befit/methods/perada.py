"""PerAda (Xie et al. 2024): Ditto, and at the server the shared adapter learns from all clients' models together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from befit.adapters.keys import slot
from befit.core.schema import POSITIVE, at_least
from befit.core.values import ClientWeights, Payload, Tick, Update
from befit.methods.ditto import ditto
from befit.methods.parts.distil.ensemble import blend_teachers, lessons, students, with_states
from befit.methods.parts.distil.settings import Distillation
from befit.methods.parts.distil.student import seeded_dropout, soft_loss
from befit.protocol.per_family import ByFamily
from befit.protocol.registry import register
from befit.protocol.site import ServerSite
from befit.protocol.work import PublicWork, Work


@register("perada", title="PerAda", paper="arXiv:2302.06637", year=2024)
def perada(
    rank: int = 8,
    alpha: float = 16.0,
    mu: Annotated[float, at_least(0)] = 0.001,
    weights: ClientWeights = "uniform",
    temperature: Annotated[float, POSITIVE] = 2.0,
    distil: Distillation = Distillation(),  # noqa: B008 frozen
    legacy_average_personal: bool = False,
) -> ByFamily:
    """Two adapters as in Ditto; the average of the shared ones then learns from the mean of all clients' logits.

    rank         rank of both adapters
    alpha        their scaling: delta = alpha / rank * B A
    mu           strength of mu * ||personal - shared||^2, shared as received at the start of the round
    weights      how the server averages: "uniform" or "examples"
    temperature  T of the distillation
    distil       public records, steps and rate of the distillation, see `Distillation`
    legacy_average_personal  average the personal adapter too, as FedMosaic's released code does by mistake

    `loss = mean over answer tokens of KL(softmax(t / T) || softmax(s / T))`, without a factor T^2; t the mean logits of
    all clients' shared adapters, on every backbone; s the average of the family's own.
    up = down = r(d_in + d_out) per module; twice that where the personal adapter is averaged too.
    Deviation: the personal adapter never leaves the client unless asked for, and never teaches; logits of another
    tokenizer are translated and stay probabilities.

    Source: Xie et al. 2024, Algorithm 1; snumprlab/fedmosaic, federated_methods/perada.py and
    federated_methods/feddistill.py; docs/methods/perada.md.
    """
    return ByFamily(ditto(rank, alpha, mu, weights, legacy_average_personal), EnsembleDistillation(temperature, distil))


@dataclass(frozen=True)
class EnsembleDistillation:
    """Every family's shared adapter learns from the mean of all clients' models, of all families, once a round."""

    temperature: float
    settings: Distillation

    @property
    def work(self) -> PublicWork:
        passes = self.settings.passes
        return PublicWork(
            server=(Work(("shared",), slot("shared"), times=passes),), each=(Work(("shared",), times=passes),)
        )

    def __call__(self, server: Payload, updates: Sequence[Update], site: ServerSite, at: Tick) -> Payload:
        learning = students(site, server, updates, self.settings, at)
        T, top = self.temperature, self.settings.top
        with seeded_dropout(site.backbones[next(iter(learning))], at, "server"):
            for taught in lessons(site, updates, self.settings, at):
                teachers = list(taught.values())
                for family, student in learning.items():
                    seen = taught[family].seen
                    student.step(
                        seen,
                        lambda rows, seen=seen, teachers=teachers: soft_loss(
                            blend_teachers(seen, teachers, rows.shape[-1], T, top), rows, T
                        ),
                    )
        return with_states(server, {family: student.state for family, student in learning.items()})
