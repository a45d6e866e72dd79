"""How Flower's processes are started, as the pages, the service files and the command line say it alike."""

from __future__ import annotations

from pathlib import Path


def superlink(host: str, port: int | str, *more: str) -> list[str]:
    """The server's process, in the folder that holds `certificates`."""
    folder = "certificates"
    return [
        *("flower-superlink", "--ssl-ca-certfile", f"{folder}/ca.crt", "--ssl-certfile", f"{folder}/server.crt"),
        *("--ssl-keyfile", f"{folder}/server.key", "--enable-supernode-auth", "--host", host, "--port", str(port)),
        *("--disable-runtime-dependency-installation", *more),
    ]


def supernode(site: Path | str, server: str, port: int = 9094) -> list[str]:
    """A site's process, in the folder that holds ca.crt and keys. `site` is the absolute path of the site's file."""
    return [
        *("flower-supernode", "--superlink", server, "--root-certificates", "ca.crt"),
        *("--auth-supernode-private-key", "keys/site.key", "--host", "127.0.0.1", "--port", str(port)),
        *("--node-config", f'site="{site}"'),
    ]
