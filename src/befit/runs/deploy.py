"""What every client deploys where `federation.deploy` is best: of all that a run trained for it, the model that its own
held-out examples prefer.

The choice is made where the client is, from files that stay there; see docs/decisions/0016-deploy-best.md.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from befit.core.names import folder_name
from befit.core.storage import read_json, write_json
from befit.protocol.method import Deployment
from befit.protocol.serve import held_out_loss
from befit.protocol.site import Site
from befit.runs.results import over_rows

CHOICE = "held-out choice"  # what the run of the deployed models is called
DEPLOYED = "deployed"  # folder of the models that clients prefer
_HELD_OUT, _CHOSEN = "held_out.json", "chosen.json"
_SPENT = ("updates", "bytes_up", "bytes_down", "bytes_scoring", "seconds", "cpu_seconds")


def note_held_out(folder: Path, deployed: Deployment, site: Site, batch_size: int) -> float | None:
    """Measure a client's model on its held-out examples, and keep the number in the client's own folder; None where it
    is not finite, and the model is no choice."""
    measured = held_out_loss(site, deployed, batch_size)
    loss = measured if math.isfinite(measured) else None
    write_json(folder / _HELD_OUT, {"loss": loss, "examples": len(site.examples("val"))})
    return loss


def choose(run: Path, labels: Sequence[str]) -> str | None:
    """At a client's own place: which of a run's methods it deploys, by what `note_held_out` kept in the folder of each.
    None until all of them are exported. The choice is noted there in chosen.json."""
    notes = {label: run / label / _HELD_OUT for label in labels}
    if not all(path.exists() for path in notes.values()):
        return None
    losses = {label: read_json(path)["loss"] for label, path in notes.items()}
    if (label := preferred(losses)) is not None:
        write_json(run / _CHOSEN, {"run": label, "held_out": losses})
    return label


def preferred(losses: Mapping[str, float | None]) -> str | None:
    """The label of the least loss, the first of several; None without any.

    >>> preferred({"local": 0.4, "fedit": 0.3, "potara": None}), preferred({})
    ('fedit', None)
    """
    known = {label: loss for label, loss in losses.items() if loss is not None}
    return min(known, key=lambda label: known[label]) if known else None


def deployed_results(results: Mapping[str, dict[str, Any]], metric: str) -> dict[str, Any]:
    """The results of a run whose clients deploy what they prefer, from those of all its methods, in order.

    Every client's row is that of the run it prefers, with `deployed`, its label, and `held_out`, the losses it is
    preferred by, where they are known here. What it spent is the sum over all runs, for it took part in all of them.
    """
    clients = list(next(iter(results.values()))["clients"])
    rows: dict[str, dict[str, Any]] = {}
    for client in clients:
        of = {label: of_run["clients"][client] for label, of_run in results.items()}
        losses = {label: row["held_out_loss"] for label, row in of.items() if row.get("held_out_loss") is not None}
        deployed = [row["deployed"] for row in of.values() if row.get("deployed")]
        label = deployed[-1] if deployed else preferred(losses)
        row = dict(of[label]) if label is not None else {**next(iter(of.values())), metric: None, "adapter": None}
        row |= {key: sum(of_run[key] for of_run in of.values()) for key in _SPENT}
        row |= {"deployed": label, "held_out": losses}
        row.pop("held_out_loss", None)
        if label is not None and row.get("adapter"):
            row["adapter"] = f"{DEPLOYED}/{folder_name(client)}/{Path(row['adapter']).name}"
        rows[client] = row
    summaries = [of_run["summary"] for of_run in results.values()]
    spent = [key for key in summaries[0] if key in _SPENT or key in ("server_cpu_seconds", "opening_cpu_seconds")]
    peaks = [key for key in summaries[0] if key.endswith("peak_memory_mib")]
    summary = {
        **over_rows(rows, metric),
        **{key: sum(of_run[key] for of_run in summaries) for key in spent},
        **{key: max(of_run[key] for of_run in summaries) for key in peaks},
        "over_time": {},
    }
    return {"clients": rows, "summary": summary, "curve": [], "failures": []}


def put_deployed(path: Path, folders: Mapping[str, Path], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Put what every client prefers into `deployed/`, as links where the file system has them.

    folders  of the runs, by label
    """
    for client, row in rows.items():
        if not (label := row["deployed"]):
            continue
        source, target = folders[label] / "clients" / folder_name(client), path / DEPLOYED / folder_name(client)
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, copy_function=_linked)
            write_json(target / _CHOSEN, {"run": label, "held_out": row["held_out"]})


def chosen_run(folder: Path) -> str | None:
    """The run that a folder in `deployed/` is from; None for any other folder."""
    path = folder / _CHOSEN
    return read_json(path)["run"] if path.exists() else None


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
