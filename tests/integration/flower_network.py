"""A real Flower federation on loopback: SuperLink and SuperNodes as processes, with TLS and node authentication."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from befit.core.yamlfile import read_yaml, write_yaml
from befit.flower.keys import write_certificates, write_site_keys
from tests.processes import PATIENCE

__all__ = ["Network", "SimulatedNetwork", "free_port", "free_ports", "wait_for"]

BIN = Path(sys.executable).parent
FLAGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # how soon a process starts for a message; one second otherwise
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def free_ports(consortium: Path) -> int:
    """Write free ports of this machine into a consortium's file; returns the server's."""
    values = read_yaml(consortium)
    values["server"] = {"host": "localhost", **values.get("server", {}), "port": free_port()}
    values["sites"] = {site: {**(its or {}), "port": free_port()} for site, its in values["sites"].items()}
    consortium.write_text(write_yaml(values))
    return values["server"]["port"]


def wait_for(what: str, holds) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE} s"
        time.sleep(0.1)


class Network:
    """Processes of one federation, in `folder`; use it in a `with`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.home = folder / "home"
        self.ca = folder / "certificates" / "ca.crt"
        self.home.mkdir()
        connection = f'[superlink.befit]\naddress = "{self.address}"\n{self.secure()}\n'
        (self.home / "config.toml").write_text(f'[superlink]\ndefault = "befit"\n{connection}')

    def secure(self) -> str:
        """Make the server's certificate; returns the line by which `flwr` knows it."""
        write_certificates(self.ca.parent, ["localhost", "127.0.0.1"])
        return f'root-certificates = "{self.ca}"'

    def __enter__(self) -> Network:
        self.start_link()
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self.processes):
            self.stop(name)

    def start_link(self) -> None:
        folder = self.folder / "certificates"
        self.start(
            "link",
            [
                "flower-superlink",
                "--ssl-ca-certfile",
                self.ca,
                "--ssl-certfile",
                folder / "server.crt",
                "--ssl-keyfile",
                folder / "server.key",
                "--enable-supernode-auth",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--database",
                self.folder / "state.db",
                "--disable-runtime-dependency-installation",
            ],
        )
        wait_for("a healthy SuperLink", self.healthy)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"https://{self.address}/health", verify=str(self.ca)).status_code == 200
        except httpx.HTTPError:
            return False

    def register(self, site: Path) -> None:
        """Make a site's keys, and let the SuperLink know the public one."""
        write_site_keys(site.parent / "keys")
        self.flwr("supernode", "register", str(site.parent / "keys" / "site.pub"), "befit")

    def connect(
        self, name: str, site: Path, key: Path | None = None, ca: Path | None = None, executor: bool = False
    ) -> None:
        """Start a SuperNode; with befit's executor for its messages, or with Flower's own."""
        port, secret = str(free_port()), self.folder / f"{name}.secret"
        if executor:
            secret.write_bytes(os.urandom(32))
            words = ["flower", "executor", "--node", f"127.0.0.1:{port}", "--secret", secret]
            self.start(f"{name}-executor", ["python", "-m", "befit", *words])
        self.start(
            name,
            [
                "flower-supernode",
                "--superlink",
                self.address,
                "--root-certificates",
                ca or self.ca,
                "--auth-supernode-private-key",
                key or site.parent / "keys" / "site.key",
                "--host",
                "127.0.0.1",
                "--port",
                port,
                "--node-config",
                f'site="{site}"',
                *(["--isolation", "process", "--superexec-auth-secret-file", secret] if executor else []),
            ],
        )

    def start(self, name: str, command: Sequence[object], where: Path | None = None) -> None:
        first, *rest = map(str, command)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / first, *rest],
                stdout=log,
                stderr=log,
                env=self.environment(),
                cwd=where or self.folder,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        return {**os.environ, **FLAGS, "FLWR_HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a process and those it started: they are a process group of their own."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, how)
            process.wait(timeout=10)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [BIN / "flwr", *arguments], env=self.environment(), cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, app: Path, *settings: str, federation: str = "") -> str:
        """Start a run; returns its id."""
        changes = [word for setting in settings for word in ("--run-config", setting)]
        changes += ["--federation-config", federation] if federation else []
        answer = json.loads(self.flwr("run", str(app), "befit", "--format", "json", *changes))
        assert answer["success"], answer
        return str(answer["run-id"])

    def wait_for_end(self, run: str) -> None:
        """Wait for a run to complete; fails with its log if it failed, or does not end."""
        try:
            wait_for(f"the end of run {run}", lambda: re.search(f"Finished task .* of run {run}", self.log("link")))
        except AssertionError as late:
            logs = [f"{name}:\n{self.log(name)[-2000:]}" for name in self.processes]
            raise AssertionError("\n\n".join([str(late), self.flwr("log", run, "befit", "--show"), *logs])) from None
        answer = json.loads(self.flwr("list", "befit", "--run-id", run, "--format", "json"))
        assert answer["runs"][0]["status"] == "finished:completed", self.flwr("log", run, "befit", "--show")

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


class SimulatedNetwork(Network):
    """A SuperLink that simulates all nodes itself, in Ray's processes; nothing else can reach it."""

    def secure(self) -> str:
        return "insecure = true"

    def start_link(self) -> None:
        self.start(
            "link",
            [
                "flower-superlink",
                "--simulation",
                "--insecure",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--disable-runtime-dependency-installation",
            ],
        )
        wait_for("a healthy SuperLink", self.healthy)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/health").status_code == 200
        except httpx.HTTPError:
            return False
