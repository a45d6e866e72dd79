"""FedDAT (Chen et al. 2024): a shared adapter and a dual one, of frozen shared and personal, that teach each other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.adapters.mixers import Mix, Weighted
from befit.core.schema import POSITIVE
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.protocol.work import Work
from befit.train.blend import Fixed
from befit.train.passes import Pass
from befit.train.terms import Guide, Laned

if TYPE_CHECKING:
    from befit.protocol.site import Site
    from befit.tasks.base import Batch

_DUAL = ("frozen", "personal")
_HALVES = Weighted((0.5, 0.5))


@register("feddat", title="FedDAT", paper="arXiv:2308.12305", year=2024)
def feddat(
    rank: int = 8,
    alpha: float = 16.0,
    temperature: Annotated[float, POSITIVE] = 2.0,
    weights: ClientWeights = "uniform",
) -> Recipe:
    """Two steps a batch: the shared adapter learns from the task and the dual one, the personal from task and shared.

    rank         rank of the adapters
    alpha        their scaling: delta = alpha / rank * B A
    temperature  T of the distillation in both directions
    weights      how the server averages: "uniform" or "examples"

    Dual output `(h_frozen + h_personal) / 2`, frozen the shared adapter as received. `loss_shared = (CE(shared) +
    KL_T(dual -> shared)) / 2`, `loss_personal = (CE(dual) + KL_T(shared -> dual)) / 2`, teachers without gradient,
    `KL_T(t -> s) = T^2 mean KL(softmax(t / T) || softmax(s / T))` over the positions of the task's loss.
    up = down = r(d_in + d_out) per module. Deviation: what is deployed is the dual adapter with the newest shared one.

    Source: Chen et al. 2024, mutual knowledge distillation; snumprlab/fedmosaic, federated_methods/feddat.py;
    docs/methods/feddat.md.
    """
    return Recipe(
        layout=lora(rank, alpha, slots=("shared", *_DUAL)),
        passes=(
            Pass(slot("shared"), ("shared",), (Learn(_DUAL, _HALVES, temperature),), name="shared", blend=Fixed(0.5)),
            Pass(
                slot("personal"),
                _DUAL,
                (Learn(("shared",), "sum", temperature),),
                mixer=_HALVES,
                name="personal",
                keep_optimiser=True,
                blend=Fixed(0.5),
            ),
        ),
        share=slot("shared"),
        merge=Merge(weights),
        start=("shared", "frozen"),
        use=Use(("shared", "personal"), _HALVES),
    )


@dataclass(frozen=True)
class Learn(Laned):
    """`KL_T(teacher -> own)`, which the passes blend with the task's loss, half of each.

    slots, mixer  the teacher; it gets no gradient and no dropout
    """

    slots: tuple[str, ...]
    mixer: Mix
    temperature: float
    of_weights: ClassVar[bool] = False
    of_positions: ClassVar[bool] = True

    @property
    def work(self) -> tuple[Work, ...]:
        return (Work(self.slots),)

    def bind(self, site: "Site") -> Guide:
        def divergence(batch: "Batch", logits: Tensor) -> Tensor:
            model, T = site.model, self.temperature
            with torch.no_grad(), model.training(False), model.active(*self.slots, mixer=self.mixer):
                teacher, _ = site.task.judged(site.logits(batch), batch)
            own, samples = site.task.judged(logits, batch)
            student, rows = (own.float() / T).log_softmax(-1), model.rows
            reduction = "batchmean" if rows is None else "none"
            kl = F.kl_div(student, (teacher.float() / T).log_softmax(-1), reduction=reduction, log_target=True)
            if rows is not None:
                kl = rows.sum(kl.sum(-1), samples) / rows.judged
            return T**2 * kl

        return divergence
