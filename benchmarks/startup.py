"""How long the smallest run takes to start, beside the imports that it cannot do without.

Each line is a process of its own, in turns, after one that fills the caches of the disk and of compiled sources.
Processor time of the process and its children.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import publish, spread

IMPORTS = {
    "torch and transformers": "import torch, transformers",
    "the same, and the model's class": "import torch, transformers; transformers.ViTForImageClassification",
    "the same, and PEFT": "import torch, transformers, peft; transformers.ViTForImageClassification",
}


def seconds(command: list[str]) -> float:
    """Of the processor, for one process and what it starts."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "one.yaml"
        config.write_text(
            "benchmark: digits\nmethod: fedit\nbaselines: []\ntrain: {max_steps: 1}\nfederation: {rounds: 1}\n"
        )

        def run(number: int, *more: str) -> list[str]:
            out = str(Path(folder) / f"run-{number}-{len(more)}")
            return [sys.executable, "-m", "befit", "run", str(config), *more, "--quiet", "--out", out]

        times: dict[str, list[float]] = {}
        for turn in range(repeats + 1):
            commands = {name: [sys.executable, "-c", code] for name, code in IMPORTS.items()}
            commands |= {"a run of one step, no plots": run(turn, "report.plots=false"), "with plots": run(turn)}
            for name, command in commands.items():
                taken = seconds(command)
                if turn:
                    times.setdefault(name, []).append(taken)
    first = spread(times["torch and transformers"])["median"]
    rows = []
    for name, values in times.items():
        one = spread(values)
        rows.append(
            [name, f"{one['median']:.2f} ({one['min']:.2f}-{one['max']:.2f})", f"**{one['median'] / first:.2f}**"]
        )
    publish(
        "startup",
        "Start-up",
        "A run of FedIT on the digits with one step at each of ten clients, from starting Python to the report, "
        "beside the imports that it needs. transformers' own code of the model is most of what comes on top of "
        "PyTorch. A run does not import PEFT, which imports bitsandbytes where that is installed "
        "(`befit[quantised]`), and PyTorch's compiler with it. Seconds of the processor, medians and ranges of "
        "processes that take turns.",
        ["process", "seconds", "times the first"],
        rows,
        times,
    )


if __name__ == "__main__":
    main()
