"""Writes what pages have from the code, and the schemas: `python scripts/update_readme.py`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

from befit.adapters.whole_model import Whole
from befit.config.experiment import Experiment
from befit.config.reference import json_schema, page
from befit.flower.checklist import listed
from befit.flower.own_slots import own_slots, sent_slots
from befit.protocol.check import unsummed
from befit.protocol.describe import describe
from befit.protocol.method import Method
from befit.protocol.registry import build_method, get_method, method_names
from befit.studies.compare.study import StudyFile

ROOT = Path(__file__).parents[1]
PAGES = ("docs/methods/README.md", "docs/security.md", "docs/privacy.md", "docs/configuration.md")
SCHEMAS = {"configs/schema.json": Experiment, "studies/schema.json": StudyFile}
# By slot, what an array of it reveals to whoever gets it. A slot that is not here is a KeyError: somebody has to say.
REVEALS = {
    "shared": "what the site's records teach the common adapter",
    "personal": "all that the site's own adapter has learnt from its records",
    "gate": "which inputs at the site call for which adapter",
    "choice": "which group's adapter fits the site's records best",
    "control": "the direction of the site's gradients",
    "generator": "which modules the site's records need, and how they weigh",
    "rates": "which rates suit the site's records",
    "validation": "the loss on its validation records",
    "knowledge": "what its model predicts on public records, and so whether it has seen similar ones",
    "sketch": "a gradient of a few of its records: often what they are about, and for one record its answer",
}
WHOLE = "what the site's records teach all weights of the model"


def checked_against() -> dict[str, list[str]]:
    """By method: what its numbers were compared with, each with a link to the test.

    A golden test says so in a constant, `CHECKED = {"fedit": "by hand"}`, which is read without importing the test.
    """
    links: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests" / "golden").glob("test_*.py")):
        for line in ast.parse(path.read_text()).body:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "CHECKED":
                for name, oracle in ast.literal_eval(line.value).items():
                    links.setdefault(name, []).append(f"[{oracle}](../../{path.relative_to(ROOT).as_posix()})")
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
        cells = (
            f"[`{name}`]({name}.md)",
            entry.title,
            source,
            kind,
            ", ".join(needs) or "-",
            travels,
            ", ".join(links[name]),
        )
        lines.append(table_row(cells))
    return "\n".join(lines) + "\n"


def table_row(cells: Iterable[object]) -> str:
    """A row in Markdown, with the bars within cells written so that they end none."""
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def reveals(method: Method) -> str:
    """What the arrays that a method sends up tell."""
    whole = any(isinstance(slot.form, Whole) for slot in method.layout.slots)
    words = [WHOLE if whole and slot == "shared" else REVEALS[slot] for slot in sent_slots(method)]
    return "; ".join(words) or "nothing but scores"


def sums(method: Method) -> str:
    """Whether the server can do with the sum of the clients' updates."""
    sends = any(stage.federated for stage in method.plan())
    return "-" if not sends else "no" if unsummed(method) else "yes"


def travel_table() -> str:
    """One row per registered method: what leaves a site and what comes in, and what that asks for."""
    header = ("method", "leaves the site", "comes in", "secure sums", "`shares`", "what it reveals")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name in method_names():
        method = build_method(name)
        described, own = describe(method), own_slots(method)
        shares = f"`[{', '.join(own)}]`" if own else "-"
        cells = (
            f"[`{name}`](methods/{name}.md)",
            described["up"],
            described["down"],
            sums(method),
            shares,
            reveals(method),
        )
        lines.append(table_row(cells))
    return "\n".join(lines) + "\n"


def privacy_table() -> str:
    """One row per registered method: whether it can protect examples and clients, and what secure sums hide, with its
    default arguments."""
    lines = ["| method | `unit: example` | `unit: client` | secure sums |", "|---|---|---|---|"]
    for name in method_names():
        method = build_method(name)
        told = describe(method)
        cells = f"[`{name}`](methods/{name}.md)", told["protects examples"], told["protects clients"], sums(method)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def schema_text(name: str) -> str:
    """A JSON Schema, as `befit schema` prints it."""
    return json.dumps(json_schema(SCHEMAS[name]), indent=2, ensure_ascii=False) + "\n"


TABLES = {
    "methods": method_table,
    "travels": travel_table,
    "privacy": privacy_table,
    "checklist": lambda: "\n".join(listed()),
    "configuration": page,
}


def updated(text: str) -> str:
    """A page with the tables of now, each between `<!-- NAME -->` and `<!-- /NAME -->`."""
    for name, table in TABLES.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        if start:
            text = before + start + table() + rest[rest.index(f"<!-- /{name} -->") :]
    return text


if __name__ == "__main__":
    for name in SCHEMAS:
        (ROOT / name).write_text(schema_text(name))
    for name in PAGES:
        path = ROOT / name
        path.write_text(updated(path.read_text()))
