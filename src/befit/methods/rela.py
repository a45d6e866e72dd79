"""RELA (FedMosaic, Seo et al.): the others' adapters, weighed by how alike their data's gradients are."""

from typing import Annotated, Literal

from befit.adapters.gates import make_gate
from befit.adapters.layout import Layout, Slot
from befit.core.schema import POSITIVE
from befit.methods.parts.mosaic.mixing import Relevance, make_mixing
from befit.methods.parts.mosaic.mosaic import BOTH, Mosaic
from befit.protocol.registry import register


@register("rela", title="RELA", paper="arXiv:2506.11024", year=2026)
def rela(
    rank: int = 8,
    alpha: float = 16.0,
    mixing: Literal["relevance", "equal", "nash"] = "relevance",
    relevance: Relevance = Relevance(),  # noqa: B008 frozen
    gate: Literal["scalar", "input", "noisy-input"] = "scalar",
    gate_rate: Annotated[float, POSITIVE] = 1.0,
) -> Mosaic:
    """Train an adapter beside a frozen mixture of relevant others' adapters, with a gate at every layer.

    rank          rank of both adapters
    alpha         their scaling: delta = alpha / rank * B A
    mixing        weights by "relevance", "equal" ones, or those of the "nash" bargaining solution, the same for all
    relevance     how data are compared, see `Relevance`
    gate          "scalar", one number per layer; "input", by token; "noisy-input", disturbed in training (the code)
    gate_rate     learning rate of the gates, as a multiple of train.lr

    `h = W x + (1 - b) h_own + b h_mixture`, `b = sigmoid(beta)`; `w_ij = softmax_j(cos(g_i, g_j) / tau)`, `g` the
    gradient of the last projection of the smallest frozen backbone, or of `common_model`.
    up = down = r(d_in + d_out) per module, and up the entries of the gradient. What the paper calls its homogeneous
    mode; clients with other backbones mix within their own.

    Source: Seo et al. 2026, eqs. 1 to 4 and 7; Seo et al. 2026, Algorithm 1; snumprlab/fedmosaic,
    federated_methods/fedmosaic.py; docs/methods/rela.md.
    """
    weights, sketch = make_mixing(mixing, relevance)
    slots = tuple(Slot(name, rank, alpha) for name in BOTH)
    layout = Layout(slots, BOTH, gate=make_gate(gate), extras=(sketch,) if sketch else ())
    return Mosaic(layout, weights, sketch, gate_rate=gate_rate)
