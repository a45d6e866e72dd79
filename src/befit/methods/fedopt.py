"""Server optimisers on FedIT: FedAvgM (Hsu et al. 2019), FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021)."""

from typing import Annotated, Literal

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.core.schema import Mark
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.merge.server_opt import ServerOptimiser
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass

Variant = Annotated[Literal["paper", "reference"], Mark.SERVER]
AtServer = Annotated[float, Mark.SERVER]


def _fedit_with(after: ServerOptimiser, rank: int, alpha: float, weights: ClientWeights) -> Recipe:
    return Recipe(
        layout=lora(rank, alpha),
        passes=(Pass(slot("shared"), ("shared",)),),
        share=slot("shared"),
        merge=Merge(weights),
        after=after,
        use=Use(("shared",)),
    )


@register("fedavgm", title="FedAvgM", paper="arXiv:1909.06335", year=2019)
def fedavgm(
    rank: int = 8,
    alpha: float = 16.0,
    server_lr: AtServer = 1.0,
    momentum: AtServer = 0.9,
    variant: Variant = "paper",
    weights: ClientWeights = "examples",
) -> Recipe:
    """FedIT with momentum at the server: `v = momentum v + D`, `theta += server_lr v`, D the mean change.

    rank       rank of the adapter
    alpha      its scaling: delta = alpha / rank * B A
    server_lr  step of the server
    momentum   share of the last v that stays; 0 with server_lr 1 is FedIT
    variant    "reference" averages, `v = momentum v + (1 - momentum) D`, starting at D
    weights    how the server averages: "examples" or "uniform"

    up = down = r(d_in + d_out) per module.

    Source: Hsu et al. 2019, section 4.2 and Figure 5; docs/methods/fedavgm.md.
    """
    return _fedit_with(ServerOptimiser("avgm", server_lr, momentum, variant=variant), rank, alpha, weights)


@register("fedadagrad", title="FedAdagrad", paper="arXiv:2003.00295", year=2021)
def fedadagrad(
    rank: int = 8,
    alpha: float = 16.0,
    server_lr: AtServer = 1e-3,
    tau: AtServer = 1e-3,
    weights: ClientWeights = "uniform",
) -> Recipe:
    """FedIT with Adagrad at the server: `u += D^2`, `theta += server_lr D / (sqrt(u) + tau)`, D the mean change.

    rank       rank of the adapter
    alpha      its scaling: delta = alpha / rank * B A
    server_lr  step of the server
    tau        keeps the quotient finite; u starts at tau^2
    weights    how the server averages: "uniform" or "examples"

    up = down = r(d_in + d_out) per module.

    Source: Reddi et al. 2021, Algorithm 2; docs/methods/fedadagrad.md.
    """
    return _fedit_with(ServerOptimiser("adagrad", server_lr, tau=tau), rank, alpha, weights)


@register("fedadam", title="FedAdam", paper="arXiv:2003.00295", year=2021)
def fedadam(
    rank: int = 8,
    alpha: float = 16.0,
    server_lr: AtServer = 1e-3,
    beta1: AtServer = 0.9,
    beta2: AtServer = 0.99,
    tau: AtServer = 1e-3,
    variant: Variant = "paper",
    weights: ClientWeights = "uniform",
) -> Recipe:
    """FedIT with Adam at the server: `theta += server_lr m / (sqrt(u) + tau)`, running averages of D and D^2.

    rank       rank of the adapter
    alpha      its scaling: delta = alpha / rank * B A
    server_lr  step of the server
    beta1      share of m that stays
    beta2      share of u that stays
    tau        keeps the quotient finite; u starts at tau^2
    variant    "reference" squares m in place of D, and starts m at D
    weights    how the server averages: "uniform" or "examples"

    up = down = r(d_in + d_out) per module.

    Source: Reddi et al. 2021, Algorithm 2; docs/methods/fedadam.md.
    """
    return _fedit_with(ServerOptimiser("adam", server_lr, beta1, beta2, tau, variant), rank, alpha, weights)


@register("fedyogi", title="FedYogi", paper="arXiv:2003.00295", year=2021)
def fedyogi(
    rank: int = 8,
    alpha: float = 16.0,
    server_lr: AtServer = 1e-3,
    beta1: AtServer = 0.9,
    beta2: AtServer = 0.99,
    tau: AtServer = 1e-3,
    variant: Variant = "paper",
    weights: ClientWeights = "uniform",
) -> Recipe:
    """FedIT with Yogi at the server: as FedAdam, with `u -= (1 - beta2) D^2 sign(u - D^2)`.

    rank       rank of the adapter
    alpha      its scaling: delta = alpha / rank * B A
    server_lr  step of the server
    beta1      share of m that stays
    beta2      how slowly u follows D^2
    tau        keeps the quotient finite; u starts at tau^2
    variant    "reference" squares m in place of D, and starts m at D
    weights    how the server averages: "uniform" or "examples"

    up = down = r(d_in + d_out) per module.

    Source: Reddi et al. 2021, Algorithm 2; docs/methods/fedyogi.md.
    """
    return _fedit_with(ServerOptimiser("yogi", server_lr, beta1, beta2, tau, variant), rank, alpha, weights)
