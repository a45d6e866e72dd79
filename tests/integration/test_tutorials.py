"""Every tutorial leads from an empty folder to a result, as it stands on its page."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.flower_network import BIN, FLAGS, free_ports
from tests.pages import follow

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
SHORTER = ("limit.rounds=2", "report.plots=false")


def test_texts_of_ones_own(tmp_path: Path) -> None:
    follow(PAGES / "own-text.md", tmp_path, shorter=SHORTER)
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 121
    assert (tmp_path / "for-london" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_pictures_of_ones_own(tmp_path: Path) -> None:
    """The site that differs deploys its own model."""
    follow(PAGES / "images.md", tmp_path)
    clients = json.loads((tmp_path / "runs" / "first" / "results.json").read_text())["clients"]
    assert clients["osaka"]["deployed"] == "local"
    assert (tmp_path / "for-osaka" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_chat_model(tmp_path: Path) -> None:
    follow(PAGES / "chat.md", tmp_path)
    assert {path.parent.name for path in (tmp_path / "served").glob("*/adapter_config.json")} == {
        "airport",
        "hotel",
        "station",
    }


def test_a_method_of_ones_own(tmp_path: Path) -> None:
    """What travels is what it declares: A stays at its site."""
    # In fewer rounds the columns of bytes have another width, and the table breaks its head elsewhere.
    follow(PAGES / "own-method.md", tmp_path, shorter=("limit={rounds: 4, records: 40}", "report.plots=false"))
    left = json.loads((tmp_path / "runs" / "first" / "outbound.json").read_text())
    assert {row["name"].split("/")[2] for rows in left.values() for row in rows if row["shape"]} == {"B"}


@pytest.mark.slow
def test_three_sites_on_flower(tmp_path: Path) -> None:
    def elsewhere(path: Path) -> None:
        if path.name == "consortium.yaml":
            free_ports(path)

    environment = {**os.environ, **FLAGS, "PATH": f"{BIN}:{os.environ['PATH']}"}
    follow(PAGES / "flower.md", tmp_path, written=elsewhere, environment=environment)
    (results,) = (tmp_path / "federation" / "runs").glob("*/results.json")
    assert json.loads(results.read_text())["clients"].keys() == {"london", "berlin", "boston"}
