"""FedSim (Pillutla et al. 2022b): a shared and a personal model that answer together and learn at the same time."""

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("fedsim", title="FedSim", paper="arXiv:2204.03809", year=2022)
def fedsim(
    rank: int = 8,
    alpha: float = 16.0,
    weights: ClientWeights = "uniform",
    legacy_average_personal: bool = False,
) -> Recipe:
    """One step a batch of both adapters, on the sum of the logits of two models, one with each of them.

    rank     rank of both adapters
    alpha    their scaling: delta = alpha / rank * B A
    weights  how the server averages: "uniform" or "examples"
    legacy_average_personal  average the personal adapter too, as FedMosaic's released code does by mistake

    `z(x) = z_shared(x) + z_personal(x)`, loss `CE(z)`, gradients to both adapters. Both start from the same values.
    up = down = r(d_in + d_out) per module; twice that where the personal adapter is averaged too.
    Deviation: one optimiser trains both, and stays with the client; the client is scored with the newest shared
    adapter. The sum of two models' logits is not one model, so the deployed model cannot be one PEFT adapter.

    Source: Pillutla et al. 2022b, LocalSim; snumprlab/fedmosaic, federated_methods/fedsim.py and
    models/llava/llava_fedsim.py; docs/methods/fedsim.md.
    """
    both = ("shared", "personal")
    return Recipe(
        layout=lora(rank, alpha, slots=both),
        passes=(Pass(slot(*both), both, mixer="logits", keep_optimiser=True),),
        share=slot(*both) if legacy_average_personal else slot("shared"),
        merge=Merge(weights),
        use=Use(both, "logits"),
    )
