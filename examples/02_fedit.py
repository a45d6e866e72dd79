"""FedIT on three clients with real digits, next to training alone: who gained?"""

import tempfile
from pathlib import Path

import befit

config = {
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
    "method": {"name": "fedit", "rank": 4},
    "baselines": ["local"],
    "federation": {"rounds": 10},
}

with tempfile.TemporaryDirectory() as folder:
    run = befit.run(config, out=Path(folder) / "run")
    for client, row in run.results["clients"].items():
        print(f"{client}: alone {row['baselines']['local']:.3f}, federated {row['accuracy']:.3f}")
    summary = run.results["summary"]
    print(f"mean {summary['mean']:.3f}, worst {summary['worst']}, sent {summary['bytes_up']:,} bytes")
    print("written:", ", ".join(sorted(path.name for path in run.path.iterdir() if path.is_file())))
