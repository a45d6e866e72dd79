"""docs/flower.md as a reader follows it: its own commands and files, on one machine, from empty folders to a result."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from befit.config.experiment import load_experiment
from befit.runs.runner import run
from tests.integration.flower_network import BIN, Network, free_port, wait_for
from tests.processes import PATIENCE
from tests.unit.flower.states import same, server_memory

ROOT = Path(__file__).parents[2]
STAY = ("flower-superlink", "flower-supernode", "befit worker")  # what goes on until it is stopped
CONFIG = "configs/digits-flower.yaml"


class Reader(Network):
    """Follows the page. What differs from two machines: the address, ports, and one round instead of five."""

    def secure(self) -> str:
        return ""  # the page makes the certificates

    def blocks(self, heading: str) -> list[tuple[str, str]]:
        """Language and text of the section's blocks, as they are to be used here."""
        text = (ROOT / "docs" / "flower.md").read_text()
        section = re.split(r"^## ", text, flags=re.MULTILINE)
        (wanted,) = [one for one in section if one.startswith(heading)]
        changes = {
            "HOST:8000": self.address,
            "HOST": "127.0.0.1",
            "0.0.0.0": "127.0.0.1",
            "--port 8000": f"--port {self.port}",
            CONFIG: f"{CONFIG} federation.rounds=1",
        }
        for words, here in changes.items():
            wanted = wanted.replace(words, here)
        return re.findall(r"^```(\w*)\n(.*?)^```$", wanted, flags=re.DOTALL | re.MULTILINE)

    def follow(self, block: str, where: Path) -> None:
        """Run a block's commands one after the other, in a folder; those that stay, in the background."""
        for line in block.splitlines():
            words = shlex.split(line.replace("/absolute/path/to", str(where)).replace("9094", str(free_port())))
            if line.startswith(STAY):
                self.start(f"{where.name}-{words[0]}-{words[1]}", [*words], where)
                continue
            words = ["python", "-m", *words] if words[0] == "befit" else words
            done = subprocess.run(
                [BIN / words[0], *words[1:]],
                cwd=where,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"

    def healthy(self) -> bool:
        self.ca = self.folder / "server" / "certificates" / "ca.crt"
        return super().healthy()


@pytest.mark.slow
def test_the_page_leads_from_empty_folders_to_the_local_runs_numbers(tmp_path: Path) -> None:
    network, server = Reader(tmp_path), tmp_path / "server"
    server.mkdir()
    (server / "configs").symlink_to(ROOT / "configs")
    try:
        (_, start), (_, known) = network.blocks("2.")
        network.follow(start, server)
        (network.home / "config.toml").write_text(known.replace("/absolute/path/to", str(server)))
        wait_for("a healthy SuperLink", network.healthy)
        (_, prepare), _, (_, file), (_, register), (_, connect) = network.blocks("3.")
        for number in range(2):
            site = tmp_path / f"site-{number}"
            site.mkdir()
            (site / "site.yaml").write_text(file.replace("client-00", f"client-0{number}"))
            shutil.copy(server / "certificates" / "ca.crt", site)
            network.follow(prepare, site)
            shutil.copytree(site / "keys", server / "keys", dirs_exist_ok=True)
            network.follow(register, server)
            network.follow(connect, site)
        ((_, go),) = network.blocks("4.")
        network.follow(go, server)
    finally:
        network.__exit__()
    remote = server / "runs" / "digits"
    wanted = load_experiment(ROOT / CONFIG, ["federation.rounds=1", "engine={store: disk}"])
    assert json.loads((remote / "results.json").read_text())["status"] == "complete"
    assert same(server_memory(remote), server_memory(run(wanted, out=tmp_path / "local").path))
    for number in range(2):
        assert list((tmp_path / f"site-{number}" / "state" / "runs").glob("*/fedsa/adapter/*.safetensors"))
