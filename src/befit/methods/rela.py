"""RELA (FedMosaic, Seo et al.): the others' adapters, weighed by how alike their data's gradients are."""

from typing import Literal

from befit.adapters.gates import make_gate
from befit.adapters.layout import Layout, Slot
from befit.core.errors import ConfigError
from befit.methods.parts.mosaic.mixing import Relevance, chosen, needless
from befit.methods.parts.mosaic.mosaic import BOTH, Mosaic
from befit.methods.parts.mosaic.options import relevance_problems
from befit.methods.parts.mosaic.sketch import Sketch
from befit.protocol.registry import register


@register("rela", title="RELA", paper="arXiv:2506.11024", year=2026)
def rela(
    rank: int = 8,
    alpha: float = 16.0,
    mixing: Literal["relevance", "equal", "nash"] = "relevance",
    temperature: float = 0.5,
    similarity: Literal["flat", "colmean"] = "flat",
    include_self: bool = False,
    every: int = 10,
    ema: float = 0.5,
    noise: float = 1e-4,
    noise_at: Literal["gradient", "upload"] = "gradient",
    share: float = 0.4,
    mask: Literal["random", "rows"] = "random",
    gate: Literal["scalar", "input", "noisy-input"] = "scalar",
) -> Mosaic:
    """Train an adapter beside a frozen mixture of relevant others' adapters, with a gate at every layer.

    rank          rank of both adapters
    alpha         their scaling: delta = alpha / rank * B A
    mixing        weights by "relevance", "equal" ones, or those of the "nash" bargaining solution, the same for all
    temperature   tau of the softmax over cosines
    similarity    cosine of whole gradients ("flat", the paper) or mean over their columns ("colmean", the code)
    include_self  the own adapter is part of the mixture, as in equation 4; the code leaves it out
    every         the frozen model's gradient is taken at every so many steps
    ema           weight of a round's mean gradient in the running one
    noise         standard deviation of the noise on gradients
    noise_at      on every "gradient" before their mean (algorithm 1), or on the running mean at every "upload" (eq. 3)
    share         share of the gradient's entries that travel
    mask          which: "random" ones, the same for all (the paper), or the first "rows" (the code)
    gate          "scalar", one number per layer; "input", by token; "noisy-input", disturbed in training (the code)

    `h = W x + (1 - b) h_own + b h_mixture`, `b = sigmoid(beta)`; `w_ij = softmax_j(cos(g_i, g_j) / tau)`, `g` the
    gradient of the last projection of the smallest frozen backbone, or of `common_model`.
    up = down = r(d_in + d_out) per module, and up the entries of the gradient. What the paper calls its homogeneous
    mode; clients with other backbones mix within their own.

    Source: Seo et al. 2026, eqs. 1 to 4 and 7; Seo et al. 2026, Algorithm 1; snumprlab/fedmosaic,
    federated_methods/fedmosaic.py; docs/methods/rela.md.
    """
    problems = relevance_problems(temperature, every, ema, noise, share, similarity, mask)
    asked = Relevance(temperature, similarity, include_self, every, ema, noise, noise_at)
    if problems := problems or needless(mixing, asked, Sketch(share, mask)):
        raise ConfigError(problems, "rela")
    mixed, sketch = chosen(mixing, asked, Sketch(share, mask))
    slots = tuple(Slot(name, rank, alpha) for name in BOTH)
    return Mosaic(Layout(slots, BOTH, gate=make_gate(gate), extras=(sketch,) if sketch else ()), mixed, sketch)
