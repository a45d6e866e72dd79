"""Distances of scales, and maps of ranks and scales (Lee et al. 2025a, Figures 4 to 15)."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
import torch

from befit.adapters.keys import join
from befit.adapters.model import AdaptedModel, in_order
from befit.core.schema import plain
from befit.methods.parts.budget.stages import TIES
from befit.protocol.method import Deployment
from befit.report.headline import headline_sentences
from befit.report.numbers import MINUS
from befit.report.rank_maps import client_ranks, mean_ranks, scale_distances
from befit.report.structure import Structure, distances, structure_of
from befit.runs.groups import by_budget, by_group
from tests.tiny import tiny_model


def test_distances_of_groups_are_by_hand() -> None:
    """Within en 3, within de 4; across (5, sqrt(34), 4, 5), whose mean over sqrt(12) has the logarithm."""
    scales = {
        "a": torch.tensor([0.0, 0.0]),
        "b": torch.tensor([3.0, 0.0]),
        "c": torch.tensor([3.0, 4.0]),
        "d": torch.tensor([3.0, 8.0]),
    }
    found = distances(scales, {"en": ["a", "b"], "de": ["c", "d"]})
    across = (5 + math.sqrt(9 + 64) + 4 + 8) / 4
    assert found[0, 1].item() == pytest.approx(math.log(across / math.sqrt(3 * 4)))


def test_the_map_of_distances_is_symmetric_with_a_diagonal_of_zero_and_blank_for_single_clients() -> None:
    torch.manual_seed(0)
    scales = {name: torch.rand(20) for name in "abcdefg"}
    found = distances(scales, {"en": ["a", "b", "c"], "de": ["d", "e"], "fi": ["f", "g"]})
    assert torch.equal(found, found.T) and torch.equal(found.diagonal(), torch.zeros(3, dtype=torch.float64))
    single = distances(scales, {"en": ["a", "b"], "de": ["c"]})
    assert single[1].isnan().all() and single[0, 0] == 0
    same = distances(
        {"a": torch.ones(3), "b": torch.ones(3), "c": torch.zeros(3), "d": torch.ones(3)},
        {"en": ["a", "b"], "de": ["c", "d"]},
    )
    assert same[0].isnan().all() and same[1, 1] == 0


def test_a_structure_counts_the_ranks_that_have_scales() -> None:
    def of(*kept: int) -> dict[str, torch.Tensor]:
        return {join("budgeted", f"m{i}", "lambda"): (torch.arange(4) < n).float() for i, n in enumerate(kept)}

    about = {"learnt/all/lambda": torch.rand(2, 4)}
    found = structure_of(Deployment(of(3, 0), ("budgeted",), "sum", {"r2": Deployment(of(4, 1), ("budgeted",))}, about))
    assert found is not None and found.modules == ("m0", "m1")
    assert found.ranks == {"": (3, 0), "r2": (4, 1)} and len(found.scales) == 8
    assert structure_of(Deployment({"shared/m0/A": torch.ones(2, 3)}, ("shared",))) is None


def test_a_scale_below_zero_is_a_rank_and_a_module_without_an_adapter_is_none() -> None:
    arrays = {join("budgeted", "m0", "lambda"): torch.tensor([0.5, -0.5, 0.0])}
    found = structure_of(Deployment(arrays, ("budgeted",)), ["m1", "m0"])
    assert found is not None and found.modules == ("m0",) and found.ranks == {"": (2,)}


def test_where_no_rank_is_left_the_order_of_modules_decided_nothing() -> None:
    assert Structure(("m0",), {"": (0,)}, (0.0, 0.0)).by_order == 0


@pytest.mark.parametrize("clients", [1, 2, 40, 41])
def test_maps_are_drawn_for_as_many_clients_as_have_room(clients: int) -> None:
    modules = ("block.00.q_proj", "block.00.up_proj", "block.01.q_proj", "pooler.dense")
    found = {f"c{i}": Structure(modules, {"": (1, 0, 2, 1)}, (0.1 * i, 0.2, 0.3)) for i in range(clients)}
    infos = {client: {"language": "en" if int(client[1:]) % 2 else "de"} for client in found}
    mean, by_client = mean_ranks(found), client_ranks(found)
    assert mean is not None and ">q_proj<" in mean.svg and mean.svg.count(">other<") == 1
    assert "<image" not in mean.svg  # which the page's policy would not show
    assert (by_client is not None) == (1 < clients <= 40)
    assert (scale_distances(found, infos) is not None) == (clients > 1)
    assert (scale_distances(found, {}) is not None) == (1 < clients <= 40)


def read_map(svg: str) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Names of rows from top to bottom, of columns from left to right, and the numbers in the cells between them.

    Columns have turned names, rows such as end at the map, and cells the small numbers that are centred.
    """
    rows: dict[float, str] = {}
    columns: dict[float, str] = {}
    cells: list[tuple[float, float, float]] = []
    for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        text, style, turned = one.text or "", one.get("style", ""), one.get("transform", "")
        x, y = float(one.get("x", "nan")), float(one.get("y", "nan"))
        if found := re.match(r"translate\(([\d.]+) .* rotate\(-90\)", turned):
            columns[float(found[1])] = text
        elif "text-anchor: end" in style:
            rows[y] = text
        elif "font-size: 7px" in style:
            cells.append((x, y, float(text.replace(MINUS, "-"))))
    grid: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for x, y, value in cells:
        row, column = (
            min(range(len(places)), key=lambda i: abs(sorted(places)[i] - at))
            for places, at in ((rows, y), (columns, x))
        )
        assert grid[row][column] is None
        grid[row][column] = value
    return [rows[y] for y in sorted(rows)], [columns[x] for x in sorted(columns)], grid


def test_the_map_of_ranks_has_the_mean_of_each_module_in_the_cell_of_its_block_and_kind() -> None:
    """Three clients; blocks down and kinds across, each as they come; modules of one cell are together."""
    modules = (
        "block.00.q_proj",
        "block.00.up_proj",
        "block.01.up_proj",
        "block.01.q_proj",
        "pooler.dense",
        "head.dense",
        "block.02.q_proj",
    )
    ranks = ((1, 0, 9, 4, 1, 3, 0), (2, 0, 0, 5, 1, 0, 0), (3, 6, 0, 9, 1, 0, 0))
    found = {f"c{i}": Structure(modules, {"": row}) for i, row in enumerate(ranks)}
    mean, by_client = mean_ranks(found), client_ranks(found)
    assert mean is not None and by_client is not None
    expected = [[2, 2, None], [6, 3, None], [None, None, 2], [None, None, None]]
    assert read_map(mean.svg) == (["0", "1", "other", "2"], ["q_proj", "up_proj", "dense"], expected)
    names = [name.replace("block.", "") for name in modules]
    assert read_map(by_client.svg) == ([*found], names, [[rank or None for rank in row] for row in ranks])


def test_the_map_of_distances_draws_the_matrix_that_is_computed() -> None:
    """Of languages in the order in which they come, and of single clients where nothing is known of them."""
    torch.manual_seed(0)
    sizes = {"fi": 1.0, "en": 0.5, "de": 2.0}
    scales = {f"{language}-{i}": size * torch.rand(20) for language, size in sizes.items() for i in range(3)}
    scales["sw-0"] = torch.rand(20)
    found = {name: Structure(("m",), {"": (1,)}, tuple(values.tolist())) for name, values in scales.items()}
    groups = {language: [name for name in found if name.startswith(language)] for language in (*sizes, "sw")}
    plots = scale_distances(found, {name: {"language": name[:2]} for name in found}), scale_distances(found, {})
    between = [[math.nan if a is b else float((a - b).norm()) for b in scales.values()] for a in scales.values()]
    matrices = distances(scales, groups).tolist(), between
    for plot, matrix, names, rounding in zip(plots, matrices, (groups, scales), (6e-3, 0.06), strict=True):
        assert plot is not None
        rows, columns, cells = read_map(plot.svg)
        assert rows == columns == [*names]
        for row, values in zip(cells, matrix, strict=True):
            assert row == [None if math.isnan(value) else pytest.approx(value, abs=rounding) for value in values]


def test_a_budget_is_compared_among_the_runs_that_have_it_and_ties_are_nobodys() -> None:
    """At r2 the two are level in en and x leads in de; at r4 lora, of rank 4, leads everywhere."""
    x = {
        "a": {"m": 0.5, "m r2": 0.5, "m r4": 0.6, "examples": 9},
        "b": {"m": 0.7, "m r2": 0.7, "m r4": 0.1, "examples": 9},
    }
    y = {"a": {"m": 0.5, "m r2": 0.5, "examples": 9}, "b": {"m": 0.2, "m r2": 0.2, "examples": 9}}
    lora = {"a": {"m": 0.8, "examples": 9}, "b": {"m": 0.8, "examples": 9}}
    there = by_budget({"x": x, "y": y, "lora": lora}, {"x": 2, "y": 2, "lora": 4}, ["m"])
    infos = {"a": {"language": "en"}, "b": {"language": "de"}}
    wins = {name: by_group(runs, infos, "language", ["m"])["wins"] for name, runs in there.items()}
    assert wins == {"r2": {"x": 1, "y": 0}, "r4": {"x": 0, "lora": 2}}
    assert by_budget({"lora": lora}, {"lora": 4}, ["m"]) == {}


def test_scales_that_only_rounding_tells_apart_are_ties_and_give_no_map() -> None:
    near, infos = (0.5, 0.5000003, 0.4999998), {"a": {"language": "en"}, "b": {"language": "en"}}
    found = {client: Structure(("m",), {"": (3,)}, near[at:] + near[:at]) for at, client in enumerate("abcd")}
    assert all(one.tied for one in found.values()) and not Structure(("m",), {"": (1,)}, (0.5, 0.6)).tied
    assert scale_distances(found, infos | {"c": {"language": "de"}}) is scale_distances(found, {}) is None
    mean, by_client = mean_ranks(found), client_ranks(found)
    assert mean is not None and by_client is not None
    assert "scales of 4 of 4 clients are equal to 1e-05" in mean.note and "ties" in by_client.note
    same = found | {"e": Structure(("m",), {"": (1,)}, (1e-4, 1e-4))}
    mixed = mean_ranks(same)
    assert mixed is not None and "The scales of 4 of 5 clients are equal to 1e-05: their ranks are ties, broken" in (
        mixed.note
    )
    assert "The scales of 1 of 5 clients are all the same: their ranks are ties, which the order of the" in mixed.note
    rows = {client: {"accuracy": 0.5, "diagnostics": {"scale_spread": 1e-6}} for client in found}
    results = {"method": "fedp2eft", "metric": "accuracy", "clients": rows, "summary": {"mean": 0.5}}
    results["diagnostics"] = plain([TIES])
    assert any("equal to 1e-05 for 4 of 4 clients" in sentence for sentence in headline_sentences(results))


def test_ranks_that_equal_one_left_out_are_counted_and_told() -> None:
    """Of five kept, the two at the cut equal a third one that was left out."""
    scales = (0.9, 0.8, 0.7, 0.5, 0.5, 0.5, 0.1)
    one = Structure(("m", "n"), {"": (3, 2)}, scales)
    assert one.by_order == pytest.approx(2 / 5) and not one.tied
    assert Structure(("m", "n"), {"": (3, 3)}, scales).by_order == 0.0
    assert Structure(("m", "n"), {"": (4, 3)}, scales).by_order == Structure(("m",), {"": (3,)}).by_order == 0.0
    mean = mean_ranks({"a": one, "b": Structure(("m", "n"), {"": (3, 3)}, scales)})
    assert mean is not None and "For 1 of 2 clients up to 40% of the ranks" in mean.note


def test_a_budget_that_some_clients_have_keeps_its_panel_beside_what_is_deployed() -> None:
    found = {"a": Structure(("m", "n"), {"": (1, 0)}), "b": Structure(("m", "n"), {"": (2, 2), "r2": (2, 2)})}
    plot = mean_ranks(found)
    assert plot is not None and "budget r = 2, 1 of 2 clients" in plot.svg and ">deployed<" in plot.svg
    assert "got none" in plot.note


def test_modules_are_in_the_order_of_the_model() -> None:
    order = in_order(AdaptedModel(tiny_model("bert"), ["all"]))
    assert [name for name in order if name.startswith("block.00.")] == [
        f"block.00.{kind}" for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    ]
    arrays = {join("budgeted", name, "lambda"): torch.ones(2) for name in sorted(order)}
    found = structure_of(Deployment(arrays, ("budgeted",)), order)
    assert found is not None and found.modules == tuple(order)
