"""Clients of different strength: small ones with a lower rank (FlexLoRA), then small ones with a smaller model."""

import tempfile
from pathlib import Path

import befit

COMMON = {"baselines": [], "federation": {"rounds": 3}, "train": {"max_steps": 2}}
RANKS = {
    **COMMON,
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
    "method": {"name": "flexlora", "rank": 8, "ranks": {"client-00": 2}},  # by pattern of client ids
}
MODELS = {
    **COMMON,
    "benchmark": "skills",
    "limit": {"clients": 2, "records": 4},
    "model": {"id": "skills-llama", "max_length": 128},
    "families": {"small": {"clients": ["*.reverse", "reverse.*", "upper.*"], "model": {"id": "skills-llama-s"}}},
    "method": {"name": "fedit", "rank": 4},  # serves each family by itself; fedmosaic lets them learn from each other
    "evaluate": {"metrics": ["exact_match"], "max_new_tokens": 8},
}

with tempfile.TemporaryDirectory() as folder:
    run = befit.run(RANKS, out=Path(folder) / "ranks")
    for client, row in run.results["clients"].items():
        rank = 2 if client in RANKS["method"]["ranks"] else 8
        print(f"{client}: rank {rank}, accuracy {row['accuracy']:.3f}")
    run = befit.run(MODELS, out=Path(folder) / "models")
    for client, row in run.results["clients"].items():
        print(f"{client} of the family {row['family']}: sent {row['bytes_up']:,} bytes")
