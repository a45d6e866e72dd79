"""Where the ranks of clients' adapters are, as a file beside each; and how unlike their scales are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from befit.adapters.keys import split
from befit.storage import read_json, write_json

if TYPE_CHECKING:
    from befit.method import Deployment

__all__ = ["FILE", "Structure", "distances", "read_structures", "structure_of", "write_structure"]

FILE = "ranks.json"


@dataclass(frozen=True)
class Structure:
    """One client's adapter.

    modules  names of all target modules, in the model's order
    ranks    by budget, "" for the one that is deployed: rank of every module
    scales   all learnt scales, (L r_init,), or nothing
    """

    modules: tuple[str, ...]
    ranks: Mapping[str, tuple[int, ...]]
    scales: tuple[float, ...] = ()


def structure_of(deployed: Deployment) -> Structure | None:
    """Of an adapter whose ranks have scales, zero for those it left out; None for any other."""
    counted = {name: _ranks(one) for name, one in {"": deployed, **deployed.others}.items()}
    if not counted[""]:
        return None
    scales = next(iter(deployed.about.values()), torch.empty(0)).flatten().tolist()
    ranks = {name: tuple(found.values()) for name, found in counted.items()}
    return Structure(tuple(counted[""]), ranks, tuple(float(f"{one:.6g}") for one in scales))


def _ranks(deployed: Deployment) -> dict[str, int]:
    found = {
        split(key)[1]: int((value != 0).sum()) for key, value in deployed.arrays.items() if split(key)[2] == "lambda"
    }
    return dict(sorted(found.items()))  # as the model has them, in whichever order they came from a worker


def write_structure(folder: Path, deployed: Deployment) -> None:
    """Write `ranks.json` into a client's folder, if its adapter has ranks to tell of."""
    found = structure_of(deployed)
    if found is not None:
        write_json(folder / FILE, {"modules": found.modules, "ranks": found.ranks, "scales": found.scales})


def read_structures(folder: Path, clients: Sequence[str]) -> dict[str, Structure]:
    """Of the clients in whose folders there is one."""
    files = {client: folder / client / FILE for client in clients}
    held: dict[str, Any] = {client: read_json(file) for client, file in files.items() if file.is_file()}
    return {
        client: Structure(
            tuple(one["modules"]), {name: tuple(row) for name, row in one["ranks"].items()}, tuple(one["scales"])
        )
        for client, one in held.items()
    }


def distances(scales: Mapping[str, Tensor], groups: Mapping[str, Sequence[str]]) -> Tensor:
    """How unlike the scales of groups of clients are, (groups, groups): FedP2EFT specification, section 7.

    `d(j, k)` is the mean of `||lambda_a - lambda_b||_2` over all pairs of a client a of group j and another b of group
    k; the cell is `log(d(j, k) / sqrt(d(j, j) d(k, k)))`, symmetric, with a diagonal of zero; smaller is more alike.
    NaN for a group of one client, and where two clients of a group have the same scales.
    """
    found = torch.full((len(groups), len(groups)), math.nan, dtype=torch.float64)
    for j, first in enumerate(groups.values()):
        for k, second in enumerate(groups.values()):
            pairs = [torch.dist(scales[a].double(), scales[b].double()) for a in first for b in second if a != b]
            if pairs:
                found[j, k] = torch.stack(pairs).mean()
    inner = found.diagonal().clone()
    inner[inner == 0] = math.nan
    cells = (found / (inner[:, None] * inner[None, :]).sqrt()).log()
    return torch.where(torch.eye(len(groups), dtype=torch.bool) & inner.isfinite()[:, None], 0.0, cells)
