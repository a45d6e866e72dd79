"""What a finished run left: the server's memory, the clients' memories and their adapters, as bytes."""

from __future__ import annotations

import json
from pathlib import Path

from befit.core.values import Payload
from befit.protocol.store import read_payload

__all__ = ["adapters", "local_memories", "same", "server_memory", "site_folder", "site_memories"]


def server_memory(run: Path) -> Payload:
    return read_payload(run / "state" / json.loads((run / "checkpoint.json").read_text())["server"])


def local_memories(run: Path) -> dict[str, Payload]:
    """Of a local run with engine.store: disk."""
    files = json.loads((run / "checkpoint.json").read_text())["clients"]
    return {client: read_payload(run / "state" / "clients" / name) for client, name in files.items()}


def site_folder(run: Path, site: Path, label: str) -> Path:
    """Where a site keeps what belongs to a run of one method."""
    name = json.loads((run / ".sites.json").read_text())["run"]
    return site.parent / "state" / "runs" / name / label


def site_memories(run: Path, sites: dict[str, Path], label: str) -> dict[str, Payload]:
    found = {}
    for client, site in sites.items():
        folder = site_folder(run, site, label)
        found[client] = read_payload(folder / json.loads((folder / "stamp.json").read_text())["files"]["after"])
    return found


def adapters(folders: dict[str, Path]) -> dict[str, bytes]:
    """What each client deploys: an adapter, or a model where all weights were trained, and the deployment in full.

    folders  by client, that of a method's run, here or at its site
    """
    found: dict[str, bytes] = {}
    for client, of_run in folders.items():
        folder = of_run / "clients" / client
        paths = [*folder.glob("adapter*/**/*.safetensors"), *folder.glob("model*/**/*.safetensors")]
        assert paths, f"nothing was exported to {folder}"
        found[client] = b"".join(one.read_bytes() for one in [*sorted(paths), folder / "deployment.safetensors"])
    return found


def same(one: Payload, other: Payload) -> bool:
    """Bit by bit: names, dtypes and every number."""
    return (
        one.scalars == other.scalars
        and one.arrays.keys() == other.arrays.keys()
        and all(
            value.dtype == other.arrays[key].dtype and value.numpy().tobytes() == other.arrays[key].numpy().tobytes()
            for key, value in one.arrays.items()
        )
    )
