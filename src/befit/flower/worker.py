"""The resident worker of a site: holds the backbone, so that a round does not begin with loading it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from befit.core.errors import RunError
from befit.core.plugins import ignore_entry_points, load_plugins
from befit.core.version import __version__
from befit.flower.call import worker_file
from befit.flower.service import SiteService
from befit.flower.site_file import SiteFile, claim, load_site

_LOG = logging.getLogger(__name__)
_PREFIX = "befit-worker-"  # of the folder with its socket


def serve_site(path: Path, ready: Callable[[str], None] = lambda address: None) -> None:
    """Answer one request after the other until SIGTERM or SIGINT.

    path   the site's file; read again for every request, so that a change counts at once
    ready  called with the socket's address once requests are answered

    The socket takes whoever knows the token in `<state>/worker.json`, which only this user can read. Raises RunError if
    another worker is there.
    """
    ignore_entry_points()
    site = load_site(path)
    load_plugins(site.plugins)
    service = SiteService(site)
    with _stoppable(), tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        address, token = str(Path(folder) / "socket"), secrets.token_bytes(32)
        with Listener(address, "AF_UNIX", authkey=token) as listener, _announced(site, address, token):
            ready(address)
            while True:
                try:
                    line = listener.accept()
                except (AuthenticationError, EOFError, ConnectionError) as error:
                    _LOG.warning("somebody without the token was turned away: %r", error)
                    continue
                with line:
                    service = _serve(line, path, service)


def _serve(line: Connection, path: Path, service: SiteService) -> SiteService:
    """Answer one request; returns the service for the next one. Whoever gets no answer works on it alone."""
    try:
        request = line.recv_bytes()
        now = load_site(path)
        if now != service.site:
            service = SiteService(now)
        line.send_bytes(service.answer(request))
    except (EOFError, ConnectionError):
        pass  # who hung up asks again
    except Exception:
        _LOG.exception("a request is left unanswered; the worker goes on")
    return service


@contextlib.contextmanager
def _announced(site: SiteFile, address: str, token: bytes) -> Iterator[None]:
    path = worker_file(site)
    claim(site)
    if path.exists() and _alive(path):
        raise RunError(f"a worker of site {site.client} is running already ({path}); stop it first")
    _remove_folder(path)
    path.unlink(missing_ok=True)
    values = {"address": address, "token": token.hex(), "pid": os.getpid(), "version": __version__}
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w") as file:
            json.dump(values, file)
        yield
    finally:
        path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    """What a worker that was killed has left of its socket."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        folder = Path(json.loads(path.read_text())["address"]).parent
        if folder.name.startswith(_PREFIX) and folder.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(folder)


def _alive(path: Path) -> bool:
    """Whether somebody answers where a worker said that it does. Its process's number tells nothing: after a restart,
    above all of a container, it is another's, or that of the worker that looks."""
    try:
        address = json.loads(path.read_text())["address"]
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1)
            line.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, ValueError, KeyError, TypeError):
        return False
    except OSError:
        return True  # such as one with no place left among those who wait
    return True


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM, SIGINT and SIGHUP end the loop cleanly, unless nohup or a shell ignores them: the announcement and
    the socket are removed."""

    class Stop(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    signals = signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in signals if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    except Stop:
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
