"""`befit merge` on checkpoints of a large model: seconds and peak memory, ten adapters of Llama-3.1-8B's shape.

Adapters have rank 16 on every linear layer of the 32 blocks: 41.9 million numbers each, in bfloat16. Every merge is the
command itself, in a process of its own; the files were just written, so they come from the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common import peak_mib, publish

# The command, which at its end tells what it held at most.
BEFIT = """
import atexit
atexit.register(lambda: print(open("/proc/self/status").read()))
from befit.cli.main import main
main()
"""
SHAPES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
MERGES = [
    ("factors", "mean"),
    ("factors", "ties"),
    ("factors", "dare"),
    ("knots", "mean"),
    ("knots", "task-arithmetic"),
    ("knots", "ties"),
    ("knots", "dare-ties"),
    ("knots", "iso-c"),
    ("delta", "mean"),
]


def write_adapter(folder: Path, seed: int, layers: int, rank: int) -> None:
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, (d_out, d_in) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            A = torch.randn(rank, d_in, generator=random) / d_in**0.5
            B = 0.01 * torch.randn(d_out, rank, generator=random)
            tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = A.bfloat16(), B.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.split(".")[1] for name in SHAPES],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merge(folders: list[Path], out: Path, space: str, rule: str) -> dict[str, Any]:
    words = ["merge", *map(str, folders), "--out", str(out), "--space", space, "--rule", rule, "--json"]
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", BEFIT, *words], stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"befit {' '.join(words)} ended with {done.returncode}")
    return {"space": space, "rule": rule, "seconds": seconds, "peak_mib": peak_mib(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / f"client-{index}" for index in range(options.adapters)]
        for seed, folder in enumerate(folders):
            write_adapter(folder, seed, options.layers, options.rank)
        size = (folders[0] / "adapter_model.safetensors").stat().st_size
        found = []
        for index, (space, rule) in enumerate(MERGES):
            found.append(merge(folders, Path(place) / f"merged-{index}", space, rule))
            print(found[-1], flush=True)
    if (options.adapters, options.rank, options.layers) != (10, 16, 32):
        return
    publish(
        "merge_files",
        "Merging checkpoints of a large model",
        f"`befit merge` of ten rank-16 adapters with the shapes of Llama-3.1-8B, all linear layers, bfloat16, "
        f"{size / 1e6:.0f} MB each; the whole command, from starting Python to the merged checkpoint.",
        ["space", "rule", "seconds", "peak (MiB)"],
        [[row["space"], row["rule"], f"{row['seconds']:.1f}", f"{row['peak_mib']:.0f}"] for row in found],
        found,
    )


if __name__ == "__main__":
    main()
