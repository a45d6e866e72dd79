"""Passes a request at a site to the resident worker or, without one, to a service in this process.

Nothing here loads torch: Flower starts a process for every message, and with a worker it only passes bytes on.
"""

from __future__ import annotations

import json
import logging
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

from befit.flower.site_file import SiteFile, owner

_LOG = logging.getLogger(__name__)


def call(site: SiteFile, request: bytes) -> bytes:
    """The site's reply. If the resident worker is unreachable, the request is handled in this process; requests are
    idempotent: one that was completed is answered from the kept reply."""
    path = worker_file(site)
    if path.exists() and owner(path.parent) == site.client:  # else the service says what is wrong
        try:
            return _ask(path, request)
        except (OSError, EOFError, AuthenticationError, ValueError, KeyError) as error:
            _LOG.warning("the worker at %s does not answer (%r): starting cold", path, error)
    from befit.flower.service import SiteService

    return SiteService(site).answer(request)


def worker_file(site: SiteFile) -> Path:
    """Where a worker says how to reach it; only the site's own user can read it."""
    return Path(site.state) / "worker.json"


def _ask(path: Path, request: bytes) -> bytes:
    worker = json.loads(path.read_text())
    with Client(worker["address"], "AF_UNIX", authkey=bytes.fromhex(worker["token"])) as line:
        line.send_bytes(request)
        return line.recv_bytes()
