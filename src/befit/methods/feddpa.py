"""FedDPA (Yang et al. 2024): a shared and a personal adapter, weighed for every input by its likeness to own data."""

from typing import Literal

from befit.adapters.keys import slot
from befit.adapters.layout import Layout, Slot
from befit.errors import ConfigError
from befit.merge.merge import Merge
from befit.recipe.personal import Adopt, LocalTraining, Remember, Use
from befit.recipe.recipe import Recipe
from befit.registry import register
from befit.train.loop import Pass


@register("feddpa", title="FedDPA", paper="arXiv:2403.19211", year=2024)
def feddpa(
    rank: int = 8,
    alpha: float = 16.0,
    variant: Literal["T", "F"] = "T",
    train_weight: float = 0.5,
    max_weight: float = 0.5,
    instances: int = 5,
    direction: Literal["similar", "reference"] = "similar",
    rounds_local: int | None = None,
    weights: Literal["uniform", "examples"] = "uniform",
) -> Recipe:
    """Train a shared and a personal adapter; at use, an input that looks like the client's own gets more of the latter.

    rank          rank of both adapters
    alpha         their scaling: delta = alpha / rank * B A
    variant       "T" trains both in every round; "F" trains the personal one from the shared one, after FedIT
    train_weight  T: weight of the personal adapter while it is trained beside the frozen shared one
    max_weight    largest weight of the personal adapter at use
    instances     training examples that each input is compared with
    direction     "similar" gives an alike input more of the personal adapter, "reference" of the shared one
    rounds_local  F: how many times train.max_steps to train the personal adapter; default federation.rounds
    weights       how the server averages: "uniform" or "examples"

    At use `y = W x + (1 - omega) s B_g A_g x + omega s B_l A_l x`, with
    `omega = max_weight * mean_s max(0, cos(h_x, h_s))` for each input. T: a round first trains the personal adapter
    (from round 2 on), then the shared one alone, so it takes twice the steps.
    up = down = r(d_in + d_out) per module; F takes one more download. The personal adapter and the hidden states `h_s`
    never leave the client. Source: specification potara.md, section 5.5. Deviation: `h` is taken under the personal
    adapter; an encoder has no last token, so its first stands for the input. The weights depend on the input, so the
    deployed model cannot be one PEFT adapter.
    """
    shares = {"train_weight": train_weight, "max_weight": max_weight}
    problems = [f"{name}: must be from 0 to 1, got {value}" for name, value in shares.items() if not 0 <= value <= 1]
    problems += [f"instances: must be at least 1, got {instances}"] * (instances < 1)
    problems += ["rounds_local: has no meaning for variant T"] * (variant == "T" and rounds_local is not None)
    if problems:
        raise ConfigError(problems, "feddpa")
    both = ("shared", "personal")
    shared = Pass(slot("shared"), ("shared",), name="shared")
    beside = Pass(
        slot("personal"), both, mixer=f"weighted {1 - train_weight:g} {train_weight:g}", name="personal",
        keep_optimiser=True, first_round=2,
    )  # fmt: skip
    alone = Pass(slot("personal"), ("personal",), name="personal", keep_optimiser=True)
    after = (Adopt("shared", into="personal"), LocalTraining((alone,), rounds=rounds_local)) if variant == "F" else ()
    return Recipe(
        layout=Layout(tuple(Slot(name, rank, alpha) for name in both), references=instances),
        passes=(beside, shared) if variant == "T" else (shared,),
        in_sequence=True,
        share=slot("shared"),
        merge=Merge(weights),
        then=(*after, Remember(instances, under="personal")),
        use=Use(both, f"instance {max_weight:g} {direction}"),
    )
