"""Time of Potara's statistics and weights on all clients over its training, in configs/digits-potara.yaml."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from befit.config.load import load_experiment
from befit.runs.directory import read_lines
from befit.runs.runner import run
from common import HERE, publish, spread

CONFIG = HERE.parent / "configs" / "digits-potara.yaml"
PAPER = {
    "CIFAR-100, ViT-B/16": 52.06 / (0.83 * 3600),
    "Commonsense, Llama-3.2-3B": 0.46 / 5.92,
    "FLAN, Qwen3-4B": 1.18 / 6.83,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            run(load_experiment(CONFIG, ["baselines=[]", "evaluate.every=0"]), out=Path(folder) / "run")
            ledger = [line for line in read_lines(Path(folder) / "run" / "ledger.jsonl") if line["purpose"] == "train"]
        weights = sum(line["cpu_seconds"] for line in ledger if line["stage"] == "merge")
        training = sum(line["cpu_seconds"] for line in ledger if line["stage"] != "merge")
        found.append({"weights_s": weights, "training_s": training, "ratio": weights / training})
        print(found[-1], flush=True)
    ratio, weights, training = (spread([one[key] for one in found]) for key in ("ratio", "weights_s", "training_s"))
    rows = [
        [
            "befit, digits, 10 clients",
            f"{training['median']:.1f}",
            f"{weights['median']:.3f}",
            f"**{100 * ratio['median']:.2f} %** ({100 * ratio['min']:.2f}-{100 * ratio['max']:.2f})",
        ],
        *([f"paper, {name}", "", "", f"{100 * share:.1f} %"] for name, share in PAPER.items()),
    ]
    publish(
        "mixing_weights",
        "Mixing weights",
        "Statistics, weight and merge on all clients (stage `merge`) over the training of both branches, at the "
        "settings of `configs/digits-potara.yaml`, in processor time; medians of three runs. The paper's figures are "
        "from its own backbones and hardware.",
        ["run", "training (s)", "weights (s)", "ratio"],
        rows,
        found,
    )


if __name__ == "__main__":
    main()
