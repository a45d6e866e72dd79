"""Heat maps of ranks over blocks and modules and over clients, and of the distances of clients' scales."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from befit.core.metrics import TIED, group_keys
from befit.report.client_maps import client_map
from befit.report.drawing import MANY, Plot
from befit.report.heat import MARKED, Grid, heat
from befit.report.numbers import plain
from befit.report.structure import Structure, between, distances
from befit.report.svg import draw

NOTABLE = 0.1  # share of ranks decided by ties from which the note mentions it


def mean_ranks(structures: Mapping[str, Structure]) -> Plot | None:
    """The mean over clients of every module's rank, a panel for each budget: blocks down, kinds of modules across."""
    if not structures:
        return None
    first = next(iter(structures.values()))
    budgets = _budgets(structures)
    blocks, kinds = _axes(first.modules)
    having = {name: [structure for structure in structures.values() if name in structure.ranks] for name in budgets}
    titles = {name: _budget_title(name, len(having[name]), len(structures)) for name in budgets}
    grids = [_by_block(having[name], name, blocks, kinds) for name in budgets]
    columns = min(len(grids), 4)
    rows = -(-len(grids) // columns)
    height = rows * (1.3 + max(len(kinds) * 0.1, min(8.0, 0.3 * len(blocks)))) + 0.3

    def paint(figure: Figure) -> None:
        panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        for panel in panels[len(grids) :]:
            panel.set_visible(False)
        for index, (panel, name, grid) in enumerate(zip(panels, budgets, grids, strict=False)):
            heat(panel, grid, _show(grid), figure)
            panel.set_title(titles[name], fontsize=10)
            panel.set_xticks(range(len(kinds)), kinds, rotation=90, fontsize=8)
            panel.set_yticks(range(len(blocks)), blocks if index % columns == 0 else [""] * len(blocks), fontsize=8)

    note = (
        f"Mean over {len(structures)} clients of each module's rank: blocks down, kinds of modules across. Each panel "
        "has a colour scale of its own. Blank cells have no rank: the module got none, is not adapted, or "
        f"is not there.{_ties(structures)}"
    )
    wide = len(grids) * len(kinds) > 7
    return Plot("Ranks by block and module", draw("ranks", note, 9.4 if wide else 5.0, height, paint), note, wide)


def client_ranks(structures: Mapping[str, Structure]) -> Plot | None:
    """Every client's rank at every module of the deployed adapter; nothing for more clients than have room."""
    if not structures:
        return None
    modules = next(iter(structures.values())).modules
    ranks = {client: structure.ranks[""] for client, structure in structures.items()}
    same = " All clients have the same ranks." if len({*map(tuple, ranks.values())}) == 1 else ""
    note = f"Rank of each module (block and kind) in each client's deployed adapter; none is blank.{same}"
    rows = {client: dict(zip(modules, of_client, strict=True)) for client, of_client in ranks.items()}
    return client_map("Ranks by client", "client-ranks", note + _ties(structures), rows, modules, "Blues")


def scale_distances(structures: Mapping[str, Structure], infos: Mapping[str, Mapping[str, str]]) -> Plot | None:
    """How unlike the learnt scales are: of groups where clients have known groups of several, else of clients."""
    scales = {client: torch.tensor(structure.scales) for client, structure in structures.items() if structure.scales}
    known_infos = {client: infos.get(client, {}) for client in scales}
    keys = group_keys(known_infos)
    if len(scales) < 2 or (not keys and len(scales) > MANY):
        return None
    what = plain(keys[0]) if keys else "client"
    groups: dict[str, list[str]] = {}
    for client in scales:
        groups.setdefault(known_infos[client].get(keys[0], "?") if keys else client, []).append(client)
    # A client's own distance to itself is blank, or it would fill the colour scale.
    cells = distances(scales, groups) if keys else between(scales.values()).fill_diagonal_(torch.nan)
    if not (cells.nan_to_num() != 0).any():  # the same scales everywhere, but for rounding
        return None
    grid: Grid = cells.numpy()
    names = [plain(name) for name in groups]
    size = max(3.6, min(9.0, 1.8 + 0.3 * len(names)))

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        heat(axes, grid, len(names) <= 15, figure, "viridis")
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)

    grouped = (
        "log d(j, k) / sqrt(d(j, j) d(k, k)), with d the mean distance of the scales of two different clients: "
        "0 is as unlike as within a group, less is more alike. A group of one client is blank, and "
        "one whose clients have the same scales."
    )
    note = grouped if keys else "Euclidean distance of the scales of two clients."
    title = f"How unlike the scales are, by {what}"
    return Plot(title, draw("distances", note, size + 0.8, size, paint), note, size > 5.5)


def _axes(modules: Sequence[str]) -> tuple[list[str], list[str]]:
    """Blocks and kinds of modules in the order in which they come; what is in no block has a row of its own."""
    places = [_place(name) for name in modules]
    return list(dict.fromkeys(block for block, _ in places)), list(dict.fromkeys(kind for _, kind in places))


def _place(name: str) -> tuple[str, str]:
    match = re.match(r"block\.(\d+)\.(.+)$", name)
    return (str(int(match[1])), plain(match[2])) if match else ("other", plain(name.rpartition(".")[2]))


def _by_block(structures: Any, budget: str, blocks: Sequence[str], kinds: Sequence[str]) -> Grid:
    grid: Grid = np.full((len(blocks), len(kinds)), np.nan)
    rows = [(structure.modules, structure.ranks[budget]) for structure in structures]
    means = np.mean([ranks for _, ranks in rows], axis=0)
    for name, mean in zip(rows[0][0], means, strict=True):
        block, kind = _place(name)
        row, column = blocks.index(block), kinds.index(kind)
        grid[row, column] = mean if np.isnan(grid[row, column]) else grid[row, column] + mean
    return grid


def _budgets(structures: Mapping[str, Structure]) -> list[str]:
    """All budgets that some client has; and what is deployed, where that is a client's own limit or nothing else is."""
    most = sorted(structures.values(), key=lambda structure: -len(structure.ranks))
    names = list(dict.fromkeys(name for structure in most for name in structure.ranks if name))
    return names if names and all({*names} <= structure.ranks.keys() for structure in most) else [*names, ""]


def _budget_title(name: str, clients: int, total: int) -> str:
    title = f"budget r = {name[1:]}" if re.fullmatch(r"r\d+", name) else "deployed"
    return title if clients == total else f"{title}, {clients} of {total} clients"


def _ties(structures: Mapping[str, Structure]) -> str:
    """Sentences about clients whose ranks are decided by ties between scales."""
    tied = [structure for structure in structures.values() if structure.tied]
    same = sum(min(structure.scales) == max(structure.scales) for structure in tied)
    text = ""
    for count, how, decides in (
        (len(tied) - same, f"equal to {TIED:.0e}", "broken by rounding"),
        (same, "all the same", "which the order of the modules' names decides"),
    ):
        if count:
            text += f" The scales of {count} of {len(structures)} clients are {how}: their ranks are ties, {decides}."
    shares = [s.by_order for s in structures.values() if not s.tied and s.by_order >= NOTABLE]
    if shares:
        text += (
            f" For {len(shares)} of {len(structures)} clients up to {max(shares):.0%} of the ranks that are deployed "
            "equal one that was left out: there the order of modules decided."
        )
    return text


def _show(grid: Grid) -> bool:
    return grid.size <= MARKED // 2 and grid.shape[1] <= 8
