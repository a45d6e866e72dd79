"""One state folder, one site: two of them in one would answer for each other."""

from __future__ import annotations

import os
from pathlib import Path

from befit.core.errors import RunError
from befit.flower.site_file import SiteFile

__all__ = ["claim", "owner"]

_MARK = "client"  # holds the id of the client whose folder it is


def claim(site: SiteFile) -> Path:
    """The site's state folder, which is made and marked as its own by the first who comes.

    Raises RunError where it is another site's, or cannot be written.
    """
    folder = Path(site.state)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if owner(folder) is None:
            _mark(folder, site.client)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error} (state)") from error
    if (held := owner(folder)) != site.client:
        raise RunError(
            f"state: {folder} is the folder of site {held}, and this is site {site.client}. Give it one of "
            f"its own, such as state: state-{site.client}; or, if the site has a new name and no run of "
            f"the old one goes on, remove {folder / _MARK}"
        )
    return folder


def owner(folder: Path) -> str | None:
    """The client whose state is in a folder; None where it is nobody's yet."""
    try:
        return (folder / _MARK).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def _mark(folder: Path, client: str) -> None:
    """Whole or not at all, and never over another's: a link fails where a file is."""
    written = folder / f".{_MARK}.{os.getpid()}"
    try:
        written.write_text(f"{client}\n", encoding="utf-8")
        os.link(written, folder / _MARK)
    except FileExistsError:
        pass
    finally:
        written.unlink(missing_ok=True)
