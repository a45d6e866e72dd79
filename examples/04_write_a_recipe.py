"""A method composed of parts: a shared adapter, and a personal one that is pulled towards it (Ditto, Li et al. 2021).

Saved as a file of its own, `befit run my.yaml --import ditto_of_a.py` runs it too: see docs/plugins.md.
"""

import tempfile
from pathlib import Path

import befit
from befit import L2, Pass, Recipe, Use, factor, lora, register, slot


@register("ditto_of_a", title="Ditto that shares A alone")
def ditto_of_a(rank: int = 4, alpha: float = 8.0, mu: float = 0.1) -> Recipe:
    """Two passes per batch; the personal adapter never travels (up = down = r d_in per module).

    rank   rank of both adapters
    alpha  their scaling
    mu     how strongly the personal adapter is pulled towards the shared one
    """
    return Recipe(
        layout=lora(rank, alpha, slots=("shared", "personal")),
        passes=(
            Pass(slot("shared"), active=("shared",), name="shared"),
            Pass(slot("personal"), active=("personal",), terms=(L2("personal", to="shared", weight=mu),)),
        ),
        share=slot("shared") & factor("A"),
        use=Use(("personal",)),
    )


config = {
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
    "method": {"name": "ditto_of_a", "mu": 0.01},  # the signature is the schema
    "baselines": ["local"],
    "federation": {"rounds": 10},
}
with tempfile.TemporaryDirectory() as folder:
    run = befit.run(config, out=Path(folder) / "run")
    for client, row in run.results["clients"].items():
        print(f"{client}: alone {row['baselines']['local']:.3f}, with others {row['accuracy']:.3f}")
