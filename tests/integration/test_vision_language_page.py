"""The method of docs/vision-language.md shares the projector of a shipped LLaVA and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.pages import blocks
from tests.processes import befit, call

SHORTER = ("evaluate.newcomers=false", "report.plots=false")
PAGE = Path(__file__).parents[2] / "docs" / "vision-language.md"


def test_a_slot_of_its_own_for_the_projector(tmp_path: Path) -> None:
    for _, block in blocks(PAGE):
        if name := re.match(r"# ([\w.]+)\n", block):
            (tmp_path / name[1]).write_text(block)
    done = call(befit, "run", "projector.yaml", *SHORTER, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outbound = json.loads((tmp_path / "run" / "outbound.json").read_text())
    arrays = {row["name"] for rows in outbound.values() for row in rows if row["shape"]}
    modules = {f"joint/model.multi_modal_projector.linear_{number}" for number in (1, 2)}
    assert arrays == {f"{module}/{factor}" for module in modules for factor in "AB"}
