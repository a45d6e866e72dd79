"""Write what `befit demo` says of other seeds, from the published comparison: `python benchmarks/demo_seeds.py`.

Run it after `benchmarks/offline_results.py OUT/scanners`.
"""

from __future__ import annotations

import json
from typing import Any

from befit.core.storage import write_json
from common import HERE, RESULTS

SAID = HERE.parent / "src" / "befit" / "cli" / "demo_seeds.json"
RUNS = ("FedIT", "Potara", "FedDPA")


def said(results: dict[str, Any]) -> dict[str, Any]:
    """Seeds, and by run the mean gain over the reference with its 95 % interval over seeds, and how many sites of a
    seed are above it on average."""
    runs = {run["label"]: run["against"] for run in results["runs"]}
    seeds = results["seeds"]
    sites = sum(runs[RUNS[0]]["signed"][way] for way in ("better", "ties", "worse")) // len(seeds)
    gains = {
        label: {
            **{key: runs[label]["t"][key] for key in ("mean", "low", "high")},
            "gained": runs[label]["signed"]["better"] / len(seeds),
        }
        for label in RUNS
    }
    return {"metric": results["metric"], "seeds": seeds, "sites": sites, "runs": gains}


if __name__ == "__main__":
    write_json(SAID, said(json.loads((RESULTS / "offline_scanners.json").read_text())))
