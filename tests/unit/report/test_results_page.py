"""docs/run-directory.md names every key of results.json."""

from __future__ import annotations

import re
from pathlib import Path

from befit.report.results import ClientRow, RunResults, Summary

PAGE = Path(__file__).parents[3] / "docs" / "run-directory.md"


def test_every_key_of_the_results_is_on_the_page_and_no_other() -> None:
    run, client, summary = PAGE.read_text().split("## results.json")[1].split("| key | what it holds |")[1:]
    for text, kind in ((run, RunResults), (client, ClientRow), (summary, Summary)):
        rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|") and "---" not in line]
        named = [name for row in rows for name in re.findall(r"`([^`]+)`", row) if name != "accuracy"]
        assert sorted(named) == sorted(kind.__annotations__), kind
