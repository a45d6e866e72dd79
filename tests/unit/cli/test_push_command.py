"""`befit push` through huggingface_hub itself, against a server on this machine that speaks as much of the hub's
interface as it needs. The real hub has not been asked."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from tests.unit.runs.trained import classifier


class Hub(ThreadingHTTPServer):
    """Takes a commit in which every file comes in the request itself."""

    def __init__(self, refuses: bool = False) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = refuses
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, answer = self.server, dict[str, Any]()
        if hub.refuses:
            return self._answer(403, {"error": "no"})
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            answer = {"url": f"{hub.address}/owner/mine"}
        elif self.path.startswith("/api/models/owner/mine/preupload/"):
            answer = {
                "files": [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
            }
        elif self.path.startswith("/api/models/owner/mine/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"success": True, "commitUrl": f"{hub.address}/owner/mine/commit/1", "commitOid": "1"}
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        else:
            return self._answer(404, {"error": self.path})
        return self._answer(200, answer)

    def _answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_is_sent_privately_with_its_card_or_the_refusal_is_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = classifier(tmp_path).path
    words = ["push", str(run), "--client", "a", "--repo", "owner/mine", "--base", "owner/base"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["address"] == f"{hub.address}/owner/mine"
    assert hub.created[0]["visibility"] == "private" and hub.created[0]["name"] == "mine"
    assert hub.files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "owner/base"
    source = run / "clients" / "a" / "adapter" / "adapter_model.safetensors"
    assert hub.files[source.name] == source.read_bytes()
    assert b"Trained on" in hub.files["README.md"]
    hub.refuses = True
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1 and "the hub did not take owner/mine: " in refused.stderr
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    nobody = CliRunner().invoke(app, words)
    assert nobody.exit_code and "RunError: the hub did not take owner/mine: " in nobody.stderr
