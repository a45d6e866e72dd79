"""FedDPA (Yang et al. 2024): a shared and a personal adapter, weighed for every input by its likeness to own data."""

from dataclasses import replace
from typing import Annotated, Literal

from befit.adapters.keys import slot
from befit.adapters.layout import Layout, Slot
from befit.adapters.mixers import ByInput, Weighted
from befit.core.errors import ConfigError
from befit.core.schema import POSITIVE, within
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.personal import OMEGA, Adopt, LocalTraining, Remember
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("feddpa", title="FedDPA", paper="arXiv:2403.19211", year=2024)
def feddpa(
    rank: int = 8,
    alpha: float = 16.0,
    variant: Literal["T", "F", "halves"] = "T",
    train_weight: Annotated[float, within(0, 1)] = 0.5,
    max_weight: Annotated[float, within(0, 1)] = 0.5,
    instances: Annotated[int, POSITIVE] = 5,
    direction: Literal["similar", "reference"] = "similar",
    rounds_local: Annotated[int | None, POSITIVE] = None,
    weights: ClientWeights = "uniform",
    legacy_average_personal: bool = False,
) -> Recipe:
    """Train a shared and a personal adapter; at use, an input that looks like the client's own gets more of the latter.

    rank          rank of both adapters
    alpha         their scaling: delta = alpha / rank * B A
    variant       "T" trains both in every round; "F" trains the personal one from the shared one, after FedIT; "halves"
                  trains both, the shared one first, and uses both at fixed weights, as FedMosaic's authors run it
    train_weight  weight of the personal adapter in its training beside the frozen shared one; halves: at use too
    max_weight    largest weight of the personal adapter at use
    instances     training examples that each input is compared with
    direction     "similar" gives an alike input more of the personal adapter, "reference" of the shared one
    rounds_local  F: how many times train.max_steps to train the personal adapter; default federation.rounds
    weights       how the server averages: "uniform" or "examples"
    legacy_average_personal  halves: average the personal adapter too, as FedMosaic's released code does by mistake

    At use `y = W x + (1 - omega) s B_g A_g x + omega s B_l A_l x`, with
    `omega = max_weight * mean_s max(0, cos(h_x, h_s))` for each input. T: a round first trains the personal adapter
    (from round 2 on), then the shared one alone, so it takes twice the steps. Halves: `omega = train_weight` for every
    input, and a round first trains the shared adapter alone, then the personal one beside it, from round 1 on.
    up = down = r(d_in + d_out) per module; F takes one more download. The personal adapter and the hidden states `h_s`
    never leave the client, but for the legacy flag. Deviation: `h` is taken under the personal adapter; an encoder has
    no last token, so its first stands for the input. Where the weights depend on the input, the deployed model cannot
    be one PEFT adapter.

    Source: Yang et al. 2024, Figure 1; Lydia-yang/FedDPA, code/GlobalModel_generated.py and code/fed_utils/client.py;
    snumprlab/fedmosaic, federated_methods/feddpa.py; docs/methods/feddpa.md.
    """
    problems = [f"rounds_local: has no meaning for variant {variant}"] * (variant != "F" and rounds_local is not None)
    if legacy_average_personal and variant != "halves":
        problems.append(f"legacy_average_personal: has no meaning for variant {variant}")
    if problems:
        raise ConfigError(problems, "feddpa")
    both = ("shared", "personal")
    fixed = Weighted((_rounded(1 - train_weight), _rounded(train_weight)))
    shared = Pass(slot("shared"), ("shared",), name="shared")
    beside = Pass(slot("personal"), both, mixer=fixed, name="personal", keep_optimiser=True)
    alone = Pass(slot("personal"), ("personal",), name="personal", keep_optimiser=True)
    passes = {"T": (replace(beside, first_round=2), shared), "F": (shared,), "halves": (shared, beside)}
    after = (Adopt("shared", into="personal"), LocalTraining((alone,), rounds=rounds_local)) if variant == "F" else ()
    by_input = variant != "halves"
    return Recipe(
        layout=Layout(tuple(Slot(name, rank, alpha) for name in both), references=instances if by_input else 0),
        passes=passes[variant],
        in_sequence=True,
        share=slot(*both) if legacy_average_personal else slot("shared"),
        merge=Merge(weights),
        then=(*after, Remember(instances, under="personal", limit=_rounded(max_weight))) if by_input else (),
        use=Use(both, ByInput(_rounded(max_weight), direction) if by_input else fixed),
        diagnostics=OMEGA if by_input else (),
    )


def _rounded(weight: float) -> float:
    """To six digits, so that 1 - 0.9 is 0.1."""
    return float(f"{weight:g}")
