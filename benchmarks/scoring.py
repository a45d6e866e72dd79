"""Scoring one client's model: adapters folded into the weights beside adapters that are computed at each layer.

One process, one thread; both ways in turns on the same examples, adapters with random values. Processor time.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from befit.adapters.keys import EVERYTHING
from befit.runs.host import Host
from common import experiment, publish, spread

WAYS = ("active", "scoring")
SUITES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "digits": ("digits", {"name": "fedit"}, {}),
    "names": ("names", {"name": "fedit"}, {}),
    "skills": ("skills", {"name": "fedit"}, {"evaluate": {"metrics": ["exact_match"], "max_new_tokens": 28}}),
    "questions about pictures": ("vqa", {"name": "fedit"}, {}),
    "the same, two adapters with a gate": ("vqa", {"name": "fedmosaic", "blocks": 1}, {}),
}


def measure(kind: str, method: dict[str, Any], changes: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds by way, the number of examples, and the loss by way."""
    host = Host(experiment(kind, method, **changes))
    built = host.build(host.experiment.method)
    host.install(built)
    site = host.site(host.infos[0])
    torch.manual_seed(0)
    for leaf in site.model.leaves(EVERYTHING).values():
        leaf.data.normal_(0, 0.02)
    examples, use = site.examples("test"), built.use
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, float] = {}
    for turn in range(repeats + 1):
        for way in WAYS:
            began = time.process_time()
            with getattr(site.model, way)(*use.slots, mixer=use.mixer):
                metrics = site.task.evaluate(site.model.backbone, examples, 64, "cpu")
            if turn:  # the first fills buffers
                seconds[way].append(time.process_time() - began)
            losses[way] = metrics["loss"]
    return {"examples": len(examples), "layers": len(site.model.layers), "seconds": seconds, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    found = {name: measure(*suite, repeats) for name, suite in SUITES.items()}
    rows = []
    for name, one in found.items():
        beside, folded = (spread(one["seconds"][way]) for way in WAYS)
        apart = abs(one["losses"]["scoring"] / one["losses"]["active"] - 1)
        rows.append(
            [
                name,
                str(one["examples"]),
                str(one["layers"]),
                *(
                    f"{1e3 * way['median']:.0f} ({1e3 * way['min']:.0f}-{1e3 * way['max']:.0f})"
                    for way in (beside, folded)
                ),
                f"**{folded['median'] / beside['median']:.2f}**",
                f"{apart:.0e}",
            ]
        )
    publish(
        "scoring",
        "Scoring",
        "One client's model on its test examples, on one thread: with adapters computed at each layer beside the "
        "backbone's product, and with adapters folded into one weight while the model is scored. A run folds on "
        "backbones below ten million parameters where adapters have the same weights for every input. Milliseconds "
        "of the processor, medians and ranges of turns; the last column is the relative difference of the two "
        "losses.",
        ["suite", "examples", "adapted layers", "beside (ms)", "folded (ms)", "ratio", "relative difference"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
