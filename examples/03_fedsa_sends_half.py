"""FedSA-LoRA shares the factor A alone: what that saves on the way up, and what it costs in accuracy."""

import tempfile
from pathlib import Path

import befit

METHODS = {"fedit": "A and B", "fedsa": "A alone"}  # befit explain fedsa says what travels

with tempfile.TemporaryDirectory() as folder:
    sent = {}
    for method, shared in METHODS.items():
        config = {
            "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
            "method": {"name": method, "rank": 4},
            "baselines": [],
            "federation": {"rounds": 10},
        }
        run = befit.run(config, out=Path(folder) / method)
        sent[method] = run.results["summary"]["bytes_up"]
        print(f"{method} shares {shared}: mean accuracy {run.results['summary']['mean']:.3f}")
        for client, row in run.results["clients"].items():
            print(f"  {client}: accuracy {row['accuracy']:.3f}, sent {row['bytes_up']:,} bytes")

print(f"fedsa sends {sent['fedsa'] / sent['fedit']:.0%} of fedit's bytes")
assert sent["fedsa"] < sent["fedit"]
