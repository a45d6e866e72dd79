"""Sphinx settings of the documentation: `make docs` writes it to build/docs and fails on any warning."""

from __future__ import annotations

import os
import re
from pathlib import Path

import typer.cli
import typer.main

import befit
from befit.cli.main import app as befit_command
from befit.core.version import __version__

HERE = Path(__file__).parent
GROUPS = {  # the heading of the Python reference under which a package's public names stand
    "befit.runs": "Runs",
    "befit.config": "Runs",
    "befit.studies": "Comparing and choosing",
    "befit.merge": "Merging",
    "befit.data": "Data and tasks",
    "befit.tasks": "Data and tasks",
    "befit.methods": "Methods of your own",
    "befit.protocol": "Methods of your own",
    "befit.train": "Methods of your own",
    "befit.adapters": "Methods of your own",
    "befit.core": "Values and errors",
}

project = "befit"
author = "the befit authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"befit {__version__}"
html_copy_source = False
exclude_patterns = ["figures"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
smartquotes = False  # options start with two dashes
autodoc_preserve_defaults = True
suppress_warnings = ["myst.header"]  # pages of tables start sections where their generators put them

_TERM = re.compile(r"^(?P<names>[\w.*]+(?:, [\w.*]+)*)  +(?P<says>\S.*)$")


def as_rst(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn our docstrings, plain text whose lists of names have a column of descriptions, into reStructuredText."""
    made: list[str] = []
    example = item = False
    for line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        example = text.startswith((">>>", "...")) or (example and bool(text))
        found = None if example or indent else _TERM.match(line)
        if found:
            made += ["", f"``{found['names']}``", f"    {_escaped(found['says'])}"]
            item = True
        elif not text:
            made, item = [*made, ""], False
        elif example:
            made.append(text)
        elif item:
            made.append(f"    {_escaped(text)}")
        elif indent:
            made += (
                ["", f"    {_escaped(text)}", ""] if not made or not made[-1].startswith("    ") else [_escaped(line)]
            )
        else:
            made.append(_escaped(text))
    lines[:] = [*made, ""]


def _escaped(text: str) -> str:
    """Code stays code; what means something in reStructuredText alone means nothing."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"`{part}`" if index % 2 else re.sub(r"([*_|\\])", r"\\\1", part) for index, part in enumerate(parts)
    )


def write_pages() -> None:
    """The pages that are made anew: README as the first, all commands with their options, all public names."""
    readme = (HERE.parent / "README.md").read_text().partition("<!-- start -->")[2]
    links = re.sub(r"\]\((?!docs/|#|\w+:)", "](../", readme).replace("](docs/", "](")
    (HERE / "start.md").write_text("# Start\n\n" + links)
    command = typer.main.get_command(befit_command)
    context = command.make_context("befit", [], resilient_parsing=True)
    says = typer.cli.get_docs_for_click(obj=command, ctx=context, name="befit", title="Commands")
    (HERE / "cli.md").write_text(re.sub(r"\[(required|default: [^\]]*|env var: [^\]]*)\]", r"\\[\1\]", says))
    groups: dict[str, list[str]] = {title: [] for title in dict.fromkeys(GROUPS.values())}
    for name in sorted(befit.__all__):
        value = getattr(befit, name)
        package = ".".join(getattr(value, "__module__", "").split(".")[:2])
        if package in GROUPS:
            kind = "autoclass" if isinstance(value, type) else "autofunction"
            members = "\n   :members:" if kind == "autoclass" and not issubclass(value, Exception) else ""
            groups[GROUPS[package]].append(f".. {kind}:: befit.{name}{members}\n")
    parts = [f"## {title}\n\n```{{eval-rst}}\n" + "\n".join(names) + "```" for title, names in groups.items()]
    (HERE / "python.md").write_text("# Python\n\n`import befit` gives these names.\n\n" + "\n\n".join(parts) + "\n")


def without_outside(app: object, name: str, source: list[str]) -> None:
    """Links to files of the repository that are no pages become their text; README is the page `start`."""
    folder = (HERE / name).parent

    def text(link: re.Match[str]) -> str:
        path, mark, anchor = link["target"].partition("#")
        target = (folder / path).resolve()
        if target == HERE.parent / "README.md":
            return f"[{link['text']}]({os.path.relpath(HERE / 'start.md', folder)}{mark}{anchor})"
        outside = not target.is_relative_to(HERE) or target.is_dir() or target.suffix not in (".md", ".svg")
        return link["text"] if outside and target.exists() and "://" not in link["target"] else link[0]

    source[0] = re.sub(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", text, source[0])


write_pages()


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", as_rst)  # type: ignore[attr-defined]
    app.connect("source-read", without_outside)  # type: ignore[attr-defined]
