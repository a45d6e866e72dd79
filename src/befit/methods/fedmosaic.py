"""FedMosaic (Seo et al.): clients with different data, and different models, that learn from whom it helps."""

from typing import Annotated, Literal

from befit.adapters.gates import make_gate
from befit.adapters.layout import Layout, Slot
from befit.adapters.pq import BASIS, Basis, PQLora
from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE
from befit.methods.parts.mosaic.align.settings import Alignment
from befit.methods.parts.mosaic.mixing import Relevance, make_mixing
from befit.methods.parts.mosaic.mosaic import BOTH, Mosaic
from befit.protocol.method import Needs
from befit.protocol.registry import register


@register("fedmosaic", title="FedMosaic", paper="arXiv:2506.11024", year=2026)
def fedmosaic(
    rank: int = 8,
    alpha: float = 16.0,
    blocks: int = 4,
    pq_rate: Annotated[float, POSITIVE] = 2.5,
    mixing: Literal["relevance", "equal", "nash"] = "relevance",
    relevance: Relevance = Relevance(),  # noqa: B008 frozen
    gate: Literal["scalar", "input", "noisy-input"] = "scalar",
    gate_rate: Annotated[float, POSITIVE] = 1.0,
    align: Alignment = Alignment(),  # noqa: B008 frozen
) -> Mosaic:
    """RELA over PQ-LoRA: in some blocks only r x r cores are trained, which clients of all backbones share.

    rank          rank of both adapters, the same for every backbone
    alpha         their scaling: delta = alpha / rank * B A
    blocks        N_B, how many blocks carry PQ-LoRA
    pq_rate       learning rate of P and Q, as a multiple of train.lr
    mixing        weights by "relevance", "equal" ones, or those of the "nash" bargaining solution, the same for all
    relevance     how data are compared, see `Relevance`
    gate          "scalar", one number per layer; "input", by token; "noisy-input", disturbed in training (the code)
    gate_rate     learning rate of the gates, as a multiple of train.lr
    align         how A and B of different backbones are aligned, see `Alignment`

    In a PQ block `h_own = s B (P A x + Q)` with frozen orthonormal A and B, elsewhere `h_own = s B A x`;
    `h = W x + (1 - b) h_own + b h_mixture`, `b = sigmoid(beta)`.
    up = down = r(d_in + d_out) per module outside the PQ blocks and r^2 + r inside, and up the entries of the gradient.
    Without PQ blocks it is the method rela.

    Source: Seo et al. 2026, eqs. 1 to 8 and 18 to 23; Seo et al. 2026, Algorithms 1 to 4; snumprlab/fedmosaic,
    federated_methods/fedmosaic.py and train_abalign.py; docs/methods/fedmosaic.md.
    """
    if blocks < 1:
        problem = f"blocks: must be at least 1, got {blocks}; without PQ blocks take the method rela"
        raise ConfigError([problem], "fedmosaic")
    weights, sketch = make_mixing(mixing, relevance)
    slots = (
        Slot(BASIS, rank, alpha, head=False, form=Basis(blocks)),
        *(Slot(name, rank, alpha, form=PQLora(blocks)) for name in BOTH),
    )
    return Mosaic(
        Layout(slots, BOTH, gate=make_gate(gate), extras=(sketch,) if sketch else ()),
        weights,
        sketch,
        blocks,
        pq_rate,
        gate_rate,
        align,
        Needs(individual_updates=True, mixed=True, public_mixed=True),
    )
