"""What is generated and documented asks for TLS and known keys; less takes a flag, and altered messages are refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from befit.config.experiment import Experiment
from befit.core.errors import ConfigError
from befit.flower.app_folder import write_app
from befit.flower.commands import superlink, supernode
from befit.flower.server_app import run_over
from befit.flower.simulation import simulated_app
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.test_simulation import SimulatedGrid

Make = Callable[..., Experiment]
PAGE = Path(__file__).parents[3] / "docs" / "flower.md"


@pytest.mark.parametrize(("option", "insecure"), [("", False), ("insecure", True), ("simulation", True)])
def test_an_app_pins_clients_to_their_keys_unless_it_is_told_not_to(
    option: str, insecure: bool, experiment: Make, tmp_path: Path
) -> None:
    write_app(experiment(), tmp_path / "app", tmp_path / "run", **{option: True} if option else {})
    settings = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert settings["insecure"] is insecure


def test_no_insecure_command_is_documented_but_for_one_machine_and_none_is_written() -> None:
    """Of the commands that others can reach, the server's demands keys and has a certificate; the site's checks it."""
    commands = [
        line
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if not language
    ]
    assert all("--simulation" in line and "--host 127.0.0.1" in line for line in commands if "--insecure" in line)
    link, node = superlink("0.0.0.0", 8000), supernode("/site.yaml", "server.example:8000")
    assert {"--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--enable-supernode-auth"} <= set(link)
    assert {"--root-certificates", "--auth-supernode-private-key"} <= set(node)
    assert "--insecure" not in {*link, *node}
    script = files("befit.flower").joinpath("templates", "run-here.sh").read_text()
    assert "--insecure" not in script and "--root-certificates ca.crt" in script


def test_a_request_that_was_altered_on_the_way_is_refused_by_the_site(
    grid: LoopbackGrid, experiment: Make, tmp_path: Path
) -> None:
    """One bit of the adapter that goes to client-01 in round 1; the site trains on the next round's."""
    answer = grid.answer

    def flip(message: Message, node: int) -> Message:
        if node == 12 and message.metadata.message_type == "train" and message.metadata.group_id.endswith(" 1"):
            array = message.content.array_records["frame"]["frame"]
            array.data = array.data[:-1] + bytes([array.data[-1] ^ 1])
        return answer(message, node)

    grid.answer = flip  # type: ignore[method-assign]
    done = run_over(grid, experiment(), tmp_path / "run", poll_s=0.01)
    (failure,) = json.loads((done.path / "results.json").read_text())["failures"]
    assert failure["client"] == "client-01" and "altered on the way" in failure["reason"]


def test_a_site_does_not_run_a_simulation_and_reads_nothing_for_it(experiment: Make, tmp_path: Path) -> None:
    """Its configuration names folders of the machine that simulates; at a site it has no say."""
    nowhere = tmp_path / "nowhere.yaml"  # opening it would fail in another way
    grid = SimulatedGrid(nowhere, tmp_path / "run", 2)
    app = simulated_app(nowhere)

    def at_a_site(message: Message, node: int) -> Message:
        return app(message, Context(1, node, {"site": "site.yaml"}, RecordDict(), {"out": str(tmp_path / "run")}))

    grid.answer = at_a_site  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="--simulation"):
        run_over(grid, experiment(), tmp_path / "run", pinned=False, poll_s=0.01)
