"""Reports of finished runs: every number of a run directory that a person needs, as Markdown and as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.report.results import RunResults

__all__ = ["RunResults", "write_report"]

__getattr__, __dir__ = lazy(__name__, __file__)


def write_report(run_dir: Path, plots: bool = True) -> None:
    """Read a run directory and write `report.md` and `report.html` into it.

    plots  draw the page's plots, which is most of the time that it takes

    The same directory gives the same bytes. Needs results.json; whatever else is missing is named in the report.
    Raises RunError for a directory without results, or that cannot be written.
    """
    # Imported here: the tables alone, which the command line prints, need neither matplotlib nor jinja2.
    from befit.core.storage import atomic_write
    from befit.report.markdown import render_markdown
    from befit.report.page import render_page
    from befit.report.record import read_record

    record = read_record(Path(run_dir))
    atomic_write(record.path / "report.md", render_markdown(record).encode())
    atomic_write(record.path / "report.html", render_page(record, plots).encode())
