"""What the repository cites of itself is there: pages, headings of pages, and nothing that readers cannot open."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "docs", "tests", "scripts", "studies", "configs", "examples", "benchmarks")
KINDS = {".py", ".md", ".yaml", ".toml", ".j2", ".jinja"}
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in KINDS]
FILES += sorted(ROOT.glob("*.md"))
PAGE = r"(?<![\w/.])((?:docs|studies|tests|examples)/[\w/.-]+\.md)"
UNKNOWN = (
    r"[\w-]+\.md,? (?:sections? )?\d[\d.]*|\(sections? \d[\d.]*|[Ss]pecification(?:\W+\w+){0,4}\W+sections?"
    r"|\.\./shared|/work\b/|[Tt]he\s+brief\b|\b[Ii]ssues?\s+#?\d+"
)
AUTHORS = r"[A-Z][a-z]\w*(?: et al\.| and [A-Z][a-z]\w*)"
CITED = rf"({AUTHORS}),? \(?((?:19|20)\d\d[a-z]?)\b|[(;] ?([A-Z][a-z]+) ((?:19|20)\d\d)(?=[;,)])"
WHERE = r"arXiv:\d{4}\.\d{4,5}|doi:\S+|aclanthology\.org/\S+|[^:]+ [\d-]+"  # the last: a book, a volume


def offences(found: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """File -> what is wrong there; the text is given on one line, without the marks of comments."""
    texts = {path: re.sub(r"\s*\n\s*#?\s*", " ", path.read_text(encoding="utf-8")) for path in FILES}
    return {str(path.relative_to(ROOT)): wrong for path, text in texts.items() if (wrong := found(text))}


@cache
def headings(page: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


def test_pages_that_are_cited_are_in_the_repository() -> None:
    assert offences(lambda text: [page for page in re.findall(PAGE, text) if not (ROOT / page).is_file()]) == {}


def test_a_heading_that_is_cited_is_on_its_page() -> None:
    """As in `docs/methods/guidance.md, Merging`."""

    def missing(text: str) -> list[str]:
        cited = re.findall(PAGE + r", ([A-Z][a-z]+(?: [a-z]+)*)", text)
        return [f"{page}, {words}" for page, words in cited if not any(words.startswith(h) for h in headings(page))]

    assert offences(missing) == {}


def test_sections_are_of_papers_and_not_of_pages_that_readers_do_not_have() -> None:
    """Papers have numbered sections and equations; pages have headings; nobody has a specification."""
    assert offences(lambda text: re.findall(UNKNOWN, text)) == {}


def test_every_paper_that_is_cited_is_listed_with_its_address() -> None:
    """On docs/sources.md, as `- Bell et al. 2020, doi:10.1145/3372297.3417885: ...`, or on the page of a method."""
    lines = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8").split("\n- ")[1:]
    listed = [match[1] for line in lines if (match := re.match(rf"([^,]+ \d{{4}}[a-z]?), (?:{WHERE}): \w", line))]
    assert len(listed) == len(lines) == len(set(listed)) and listed == sorted(listed)
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        listed += re.findall(rf"({AUTHORS} \d{{4}}[a-z]?), (?:[^*]+\*\* \()?(?:arXiv:|openreview\.net)", text)

    def unlisted(text: str) -> list[str]:
        cited = {" ".join(filter(None, parts)) for parts in re.findall(CITED, text)}
        return sorted(cited - set(listed))

    assert offences(unlisted) == {}


def test_links_lead_somewhere() -> None:
    for path in (path for path in FILES if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
            assert "://" in target or (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"
