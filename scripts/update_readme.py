"""Writes the method table of README.md from the registry: `python scripts/update_readme.py`."""

from __future__ import annotations

import ast
from pathlib import Path

from befit.protocol.method import describe
from befit.protocol.registry import build_method, get_method, method_names

ROOT = Path(__file__).parents[1]
START, END = "<!-- methods -->\n", "<!-- /methods -->"


def checked_against() -> dict[str, list[str]]:
    """By method: what its numbers were compared with, each with a link to the test.

    A golden test says so in a constant, `CHECKED = {"fedit": "by hand"}`, which is read without importing the test.
    """
    links: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests" / "golden").glob("test_*.py")):
        for line in ast.parse(path.read_text()).body:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "CHECKED":
                for name, oracle in ast.literal_eval(line.value).items():
                    links.setdefault(name, []).append(f"[{oracle}]({path.relative_to(ROOT).as_posix()})")
    return links


def method_table() -> str:
    """One row per registered method. Raises KeyError for one that no golden test checks."""
    lines = ["| name | method | source | kind | needs | travels | checked against |", "|---|---|---|---|---|---|---|"]
    links = checked_against()
    for name in method_names():
        entry, method = get_method(name), build_method(name)
        needs = []
        if method.needs.min_clients > 1:
            needs.append(f"{method.needs.min_clients} clients")
        if method.needs.individual_updates:
            needs.append("individual updates")
        if method.needs.public:
            needs.append("public records")
        if method.needs.server_model:
            needs.append("models at the server")
        described = describe(method)
        up, down = described["up"], described["down"]
        label = "OpenReview" if entry.paper.startswith("openreview.net/") else entry.paper
        source = f"[{label}]({entry.paper_url}) ({entry.year})" if label else "-"
        kind = "class" if isinstance(entry.factory, type) else "recipe"
        travels = "nothing" if up == "nothing" else f"up {up}; down {down}"
        cells = (f"`{name}`", entry.title, source, kind, ", ".join(needs) or "-", travels, ", ".join(links[name]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """README.md with the table of now."""
    return text[: text.index(START) + len(START)] + method_table() + text[text.index(END) :]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
