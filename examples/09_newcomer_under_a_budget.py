"""A client that comes after the training gets an adapter of the ranks that it can afford (FedP2EFT, Lee et al. 2025a).

The clients train a generator that says which modules deserve ranks; a newcomer keeps the best `rank` a module
on average, and trains only those, without another round. The benchmark `names` needs `pip install '.[benchmarks]'`.
"""

import tempfile
from pathlib import Path

import befit

config = {
    "benchmark": {"name": "names", "languages": ["en", "zh"], "clients_per_language": 1},
    "model": {"id": "names-bert-mlm", "max_length": 64},
    "adapter": {"targets": ["query", "key", "value", "dense"]},
    "limit": {"records": 40},
    "method": {"name": "fedp2eft", "rank": 2, "budgets": [4], "epochs": None},
    "baselines": [],
    "train": {"max_steps": 2, "batch_size": 8},
    "federation": {"rounds": 1},
    "report": {"plots": False},
}

with tempfile.TemporaryDirectory() as folder:
    run = befit.run(config, out=Path(folder) / "run")
    print("trained together:", ", ".join(run.results["clients"]))
    newcomer, row = next(iter(run.results["newcomers"]["clients"].items()))
    for budget in (2, 4):
        adapter = befit.export(run.path, newcomer, Path(folder) / f"rank-{budget}", budget=budget)
        size = (adapter / "adapter_model.safetensors").stat().st_size
        print(f"newcomer {newcomer} at budget {budget}: accuracy {row[f'accuracy r{budget}']:.3f}, {size:,} bytes")
