"""Writes the method table of README.md from the registry: `python scripts/update_readme.py`."""

from __future__ import annotations

from pathlib import Path

from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import describe
from befit.protocol.registry import build_method, get_method, method_names

ROOT = Path(__file__).parents[1]
START, END = "<!-- methods -->\n", "<!-- /methods -->"


def method_table() -> str:
    """One row per registered method; a golden test is a file tests/golden/test_<name>*.py."""
    lines = ["| name | method | source | kind | needs | travels | golden test |", "|---|---|---|---|---|---|---|"]
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
        paper = entry.paper.removeprefix("arXiv:")
        source = f"[arXiv:{paper}](https://arxiv.org/abs/{paper}) ({entry.year})" if paper else "-"
        golden = "yes" if list((ROOT / "tests" / "golden").glob(f"test_{name}*.py")) else "no"
        kind = "recipe" if isinstance(method, Recipe) else "class"
        travels = "nothing" if up == "nothing" else f"up {up}; down {down}"
        lines.append(
            f"| `{name}` | {entry.title} | {source} | {kind} | {', '.join(needs) or '-'} | {travels} | {golden} |"
        )
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """README.md with the table of now."""
    return text[: text.index(START) + len(START)] + method_table() + text[text.index(END) :]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
