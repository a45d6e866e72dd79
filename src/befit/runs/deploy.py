"""What every client deploys where `federation.deploy` is best: of all that a run trained for it, the model that its own
held-out examples prefer.

The choice is made where the client is, from files that stay there; see docs/decisions/0016-deploy-best.md.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from befit.core.names import folder_name
from befit.core.storage import read_json, read_sealed, write_json, write_sealed
from befit.protocol.method import Deployment
from befit.protocol.serve import held_out_loss
from befit.protocol.site import Site
from befit.runs.results import over_rows, unscored_row

CHOICE = "held-out choice"  # what the run of the deployed models is called
DEPLOYED = "deployed"  # folder of the models that clients prefer
HELD_OUT, _CHOSEN = "held_out.json", "chosen.json"
_SPENT = ("updates", "bytes_up", "bytes_down", "bytes_scoring", "seconds", "cpu_seconds")


@dataclass(frozen=True)
class Choice:
    """What a client deploys: the label of a run, None where no model has a finite loss; and the mean loss of each."""

    label: str | None
    held_out: dict[str, float]


def note_held_out(folder: Path, deployed: Deployment | None, site: Site, batch_size: int, alone: bool) -> None:
    """Measure a client's model on its held-out examples, and keep the number in the client's own folder: null where it
    is not finite, or there is no model, and this run is no choice.

    alone  the client had nothing from others in its training
    """
    loss = None if deployed is None else held_out_loss(site, deployed, batch_size)
    write_sealed(folder / HELD_OUT, {"alone": alone, "loss": loss, "examples": len(site.examples("val"))})


def choose(folders: Mapping[str, Path], margin: float) -> Choice:
    """At a client's own place: which of a run's methods it deploys, by what `note_held_out` kept.

    folders  its own of each method, by label; one without a note is no choice
    margin   `federation.deploy_margin`
    """
    notes = {label: read_sealed(path) for label, of in folders.items() if (path := of / HELD_OUT).exists()}
    losses = {label: note["loss"] for label, note in notes.items() if note["loss"] is not None}
    return Choice(preferred(losses, [label for label in losses if notes[label]["alone"]], margin), losses)


def choices_of(folders: Mapping[str, Path], clients: Collection[str], margin: float) -> dict[str, Choice]:
    """By client, what it chooses of the runs in these folders, by label."""
    return {
        client: choose({label: folder / "clients" / folder_name(client) for label, folder in folders.items()}, margin)
        for client in clients
    }


def choose_once_exported(run: Path, folders: Mapping[str, Path], awaited: Collection[str], margin: float) -> str | None:
    """The label of the method that a site deploys, with the choice kept in `run`, in chosen.json; None until it has
    exported all that are awaited, and where no model has a finite loss.

    folders  its own of every method, by label
    """
    if not all((folders[label] / HELD_OUT).exists() for label in awaited):
        return None
    choice = choose(folders, margin)
    _note_choice(run, choice.label, choice.held_out, margin)
    return choice.label


def preferred(losses: Mapping[str, float], alone: Collection[str], margin: float) -> str | None:
    """The label of the least loss, the first of several; None without any.

    losses  by label, the mean over held-out examples
    alone   labels of what the client trained alone, which give way only to a loss that is lower by more than `margin`
    margin  as a share of their loss

    >>> losses = {"local": 0.40, "fedit": 0.37}
    >>> preferred(losses, ["local"], 0.0), preferred(losses, ["local"], 0.1)
    ('fedit', 'local')
    """
    best = min(losses, key=losses.__getitem__, default=None)
    own = min((label for label in losses if label in alone), key=losses.__getitem__, default=None)
    return own if best is not None and own is not None and losses[best] >= (1 - margin) * losses[own] else best


def deployed_results(
    results: Mapping[str, dict[str, Any]], metric: str, choices: Mapping[str, Choice]
) -> dict[str, Any]:
    """The results of a run whose clients deploy what they prefer, from those of all its methods, in order.

    Every client's row is that of the run it prefers, with `deployed`, its label, and `held_out`, the losses it is
    preferred by, where they are known here. What it spent is the sum over all runs, for it took part in all of them.

    choices  of the clients that chose on this machine
    """
    clients = list(next(iter(results.values()))["clients"])
    rows: dict[str, dict[str, Any]] = {}
    for client in clients:
        of = {label: of_run["clients"][client] for label, of_run in results.items()}
        told = next((row["deployed"] for row in reversed(of.values()) if row.get("deployed")), None)
        label, losses = (choice.label, choice.held_out) if (choice := choices.get(client)) else (told, {})
        if label is not None:
            row = dict(of[label])
        else:
            examples = next(iter(of.values()))["train_examples"]
            row = {**unscored_row(metric, examples), "adapter": None, "over_time": {}}
        row |= {key: sum(of_run[key] for of_run in of.values()) for key in _SPENT}
        row |= {"deployed": label, "held_out": losses}
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


def put_deployed(path: Path, folders: Mapping[str, Path], rows: Mapping[str, Mapping[str, Any]], margin: float) -> None:
    """Put what every client prefers into `deployed/`, as links where the file system has them.

    folders  of the runs, by label
    margin   `federation.deploy_margin`, by which they were chosen
    """
    for client, row in rows.items():
        if not (label := row["deployed"]):
            continue
        source, target = folders[label] / "clients" / folder_name(client), path / DEPLOYED / folder_name(client)
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, copy_function=_linked)
            _note_choice(target, label, row["held_out"], margin)


def _note_choice(folder: Path, label: str | None, losses: Mapping[str, float], margin: float) -> None:
    write_json(folder / _CHOSEN, {"run": label, "held_out": dict(losses), "margin": margin})


def has_chosen(run: Path) -> bool:
    """Whether a site has chosen what it deploys of a run."""
    return (run / _CHOSEN).exists()


def chosen_run(folder: Path) -> str | None:
    """The run that a folder in `deployed/` is from; None for any other folder."""
    path = folder / _CHOSEN
    return read_json(path)["run"] if path.exists() else None


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
