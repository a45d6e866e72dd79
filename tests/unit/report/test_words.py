"""Small things that a reader of a report trips over."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from befit.core.storage import log_line
from befit.report.drawing import legend
from befit.report.groups import group_tables
from befit.report.numbers import NOTHING
from befit.runs.results import method_results


def test_updates_are_the_rounds_of_exchanges_and_not_those_of_personal_stages(tmp_path: Path) -> None:
    line = {"client": "a", "purpose": "train", "bytes_up": 1, "bytes_down": 1, "seconds": 1.0, "cpu_seconds": 0.5}
    line |= {"peak_memory_mib": 1.0}
    stages = [{"stage": stage, "round": round_} for stage, round_ in (("meet", 1), ("meet", 2), ("own", 1))]
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(log_line({**line, **stage}) for stage in stages))
    found = method_results(tmp_path, ["a"], {"a": 3}, "accuracy", ["meet"], ("own", 1), {"meet"})
    assert found["clients"]["a"]["updates"] == 2 and found["clients"]["a"]["bytes_up"] == 3


def test_a_legend_of_many_runs_stays_in_the_figure() -> None:
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for run in range(5):
        axes.plot([0, 1], [0, run], label=f"A method of a long name {run} (sends nothing)")
    legend(figure, axes, 5)
    (drawn,) = figure.legends
    assert drawn.get_window_extent(FigureCanvasAgg(figure).get_renderer()).width <= figure.bbox.width
    assert len(drawn.get_texts()) == 5


def test_groups_of_newcomers_say_whose_they_are_before_their_budget() -> None:
    one = {"wins": {"fedit": 0}, "groups": {}}
    results = {"metric": "accuracy", "groups": {"language": {**one, "budgets": {"r2": one}}}}
    titles = [table.title for table in group_tables(results, "newcomers")]
    assert titles == ["Language of newcomers", "Language of newcomers, budget r = 2"]


def test_a_run_that_no_group_was_measured_with_has_no_count_of_wins() -> None:
    """Neither did it lose everywhere, nor is the group of a single run one that nobody won."""
    scores = {"local": {"accuracy": 0.5}, "fedit": {"accuracy": 0.6, "macro_f1": None}, "ditto": {"accuracy": None}}
    both = {"clients": 2, "examples": 9, "winner": "fedit", "scores": scores}
    alone = {**both, "winner": None, "scores": {**scores, "fedit": {"accuracy": None}}}
    grouped = {"wins": {"local": 0, "fedit": 1, "ditto": 0}, "groups": {"en": both, "de": alone}}
    (table,) = group_tables({"metric": "accuracy", "groups": {"language": grouped}})
    assert table.texts[-1] == ["wins", "", "", "0", "1", NOTHING, ""]
    assert table.note.endswith("1 group with fewer than two measured runs is left out. Not measured here: Ditto.")
    assert "nobody" not in table.note


def test_a_legend_of_a_hundred_runs_leaves_the_axes_their_room() -> None:
    """Constrained layout warns, and a warning is an error here, where axes have no room left."""
    heights = {}
    for runs in (4, 100):
        figure = Figure(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for index in range(runs):
            axes.plot([0, 1], [0, index], label=f"a method with a long name, number {index}")
        legend(figure, axes, runs)
        figure.draw_without_rendering()
        heights[runs] = axes.get_window_extent().height / figure.dpi
    assert heights[100] > 0.8 * heights[4] > 1
