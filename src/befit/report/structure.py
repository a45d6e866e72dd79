"""The ranks of clients' adapters by module, as a file beside each adapter, and the distances of their scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from befit.adapters.keys import split
from befit.core.metrics import TIED, relative_range
from befit.core.names import folder_name
from befit.core.storage import read_json, write_json

if TYPE_CHECKING:
    from befit.protocol.method import Deployment

FILE = "ranks.json"


@dataclass(frozen=True)
class Structure:
    """One client's adapter.

    modules  names of all target modules, in the order in which the model has them
    ranks    by budget, "" for the one that is deployed: rank of every module
    scales   all learnt scales, (L r_init,), or nothing
    """

    modules: tuple[str, ...]
    ranks: Mapping[str, tuple[int, ...]]
    scales: tuple[float, ...] = ()

    @property
    def tied(self) -> bool:
        """Whether all scales are equal up to rounding."""
        return bool(self.scales) and relative_range(self.scales) <= TIED

    @property
    def by_order(self) -> float:
        """Share of the deployed ranks that tie with a left-out one, so that the order of modules decided."""
        kept = sum(self.ranks[""])
        if not 0 < kept < len(self.scales):
            return 0.0
        sorted_ = sorted(self.scales, reverse=True)
        return sum(relative_range([scale, sorted_[kept]]) <= TIED for scale in sorted_[:kept]) / kept


def structure_of(deployed: Deployment, order: Sequence[str] = ()) -> Structure | None:
    """The structure of an adapter whose ranks have scales, zero for left-out ranks; None for any other adapter.

    order  the modules as the model has them; those it does not name follow in the order of their names
    """
    counted = {name: _ranks(deployment, order) for name, deployment in {"": deployed, **deployed.others}.items()}
    if not counted[""]:
        return None
    scales = next(iter(deployed.about.values()), torch.empty(0)).flatten().tolist()
    ranks = {name: tuple(by_module.values()) for name, by_module in counted.items()}
    return Structure(tuple(counted[""]), ranks, tuple(float(f"{scale:.6g}") for scale in scales))


def _ranks(deployed: Deployment, order: Sequence[str]) -> dict[str, int]:
    ranks = {
        split(key)[1]: int((value != 0).sum()) for key, value in deployed.arrays.items() if split(key)[2] == "lambda"
    }
    ordered = [name for name in order if name in ranks]  # in whichever order they came from a worker
    return {name: ranks[name] for name in (*ordered, *sorted(ranks.keys() - {*ordered}))}


def write_structure(folder: Path, deployed: Deployment, order: Sequence[str]) -> None:
    """Write `ranks.json` into a client's folder, if its adapter has ranks to tell of. `order` as in `structure_of`."""
    structure = structure_of(deployed, order)
    if structure is not None:
        write_json(folder / FILE, {"modules": structure.modules, "ranks": structure.ranks, "scales": structure.scales})


def read_structures(folder: Path, clients: Sequence[str]) -> dict[str, Structure]:
    """Of the clients in whose folders there is one."""
    files = {client: folder / folder_name(client) / FILE for client in clients}
    contents: dict[str, Any] = {client: read_json(file) for client, file in files.items() if file.is_file()}
    return {
        client: Structure(
            tuple(content["modules"]),
            {name: tuple(row) for name, row in content["ranks"].items()},
            tuple(content["scales"]),
        )
        for client, content in contents.items()
    }


def between(scales: Iterable[Tensor]) -> Tensor:
    """The Euclidean distances of every two clients' scales; 0 where rounding alone tells them apart."""
    rows = torch.stack([*scales]).double()
    lengths = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    norms = rows.norm(dim=1)
    return lengths.where(lengths > TIED * torch.maximum(norms[:, None], norms), 0.0)


def distances(scales: Mapping[str, Tensor], groups: Mapping[str, Sequence[str]]) -> Tensor:
    """How unlike the scales of groups of clients are, (groups, groups): Lee et al. 2025a, Figures 4 and 5.

    `d(j, k)` is the mean of `||lambda_a - lambda_b||_2` over all pairs of a client a of group j and another b of group
    k; the cell is `log(d(j, k) / sqrt(d(j, j) d(k, k)))`, symmetric, with a diagonal of zero; smaller is more alike.
    NaN for a group of one client, and for one whose clients have the same scales; scales that are equal to `TIED` are
    the same.
    """
    result = torch.full((len(groups), len(groups)), math.nan, dtype=torch.float64)
    place, lengths = {client: number for number, client in enumerate(scales)}, between(scales.values())
    for j, first in enumerate(groups.values()):
        for k, second in enumerate(groups.values()):
            pairs = [(place[a], place[b]) for a in first for b in second if a != b]
            if pairs:
                result[j, k] = lengths[tuple(zip(*pairs, strict=True))].mean()
    inner = result.diagonal().clone()
    inner[inner == 0] = math.nan
    cells = (result / (inner[:, None] * inner[None, :]).sqrt()).log()
    return torch.where(torch.eye(len(groups), dtype=torch.bool) & inner.isfinite()[:, None], 0.0, cells)
