"""A method of your own in one function: a frozen shared adapter, a personal one, and a gate between the two.

Round by round the shared adapter is the mean of everybody's personal ones; the gate learns, for every token and layer,
how much of each to use, and never leaves its client.
"""

import tempfile
from pathlib import Path

import befit
from befit import LeaveOneOut, Pass, Recipe, Use, factor, lora, register, slot


@register("my_gate", title="My gate")
def my_gate(rank: int = 4, alpha: float = 8.0) -> Recipe:
    """Share A and B of the personal adapter; the head and the gate stay (up = down = r(d_in + d_out) per module).

    rank   rank of both adapters
    alpha  their scaling
    """
    slots = ("shared", "personal")
    return Recipe(
        layout=lora(rank, alpha, slots=slots, gated=slots),
        passes=(Pass(trainable=slot("personal", "gate"), active=slots, mixer="gate"),),
        share=slot("personal") & factor("A", "B"),
        route=LeaveOneOut(to="shared"),
        use=Use(slots, mixer="gate"),
    )


config = {
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
    "method": "my_gate",
    "baselines": [],
    "federation": {"rounds": 10},
}
with tempfile.TemporaryDirectory() as folder:
    run = befit.run(config, out=Path(folder) / "run")
    for client, row in run.results["clients"].items():
        print(f"{client}: accuracy {row['accuracy']:.3f}, sent {row['bytes_up']:,} bytes")
