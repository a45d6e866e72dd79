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
        self.refuses, self.private = refuses, True
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
                elif line["key"] == "deletedFile":
                    del hub.files[line["value"]["path"]]
            answer = {"success": True, "commitUrl": f"{hub.address}/owner/mine/commit/1", "commitOid": "1"}
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        else:
            return self._answer(404, {"error": self.path})
        return self._answer(200, answer)

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            empty = {"type": "file", "oid": "1", "size": 1}
            return self._answer(200, [{**empty, "path": name} for name in self.server.files])
        return self._answer(200, {"id": "owner/mine", "private": self.server.private, "siblings": []})

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
    hub.files |= {"pictures.md": b"", "model-00001-of-00002.safetensors": b"", "config.json": b"{}"}
    assert CliRunner().invoke(app, words).exit_code == 0  # in place of a merged model that was there
    assert hub.files.keys() == {"pictures.md", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    hub.refuses = True
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 1 and "the hub did not take owner/mine: " in refused.stderr
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    nobody = CliRunner().invoke(app, words)
    assert nobody.exit_code == 1 and "RunError: the hub did not take owner/mine: " in nobody.stderr
    words[words.index("owner/mine")] = "owner/no such name"
    assert CliRunner().invoke(app, words).exit_code == 2


def test_a_repository_that_is_there_gets_nothing_unless_it_is_as_private_as_asked(hub: Hub, tmp_path: Path) -> None:
    hub.private = False
    words = ["push", str(classifier(tmp_path).path), "--client", "a", "--repo", "owner/mine", "--base", "o/b"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and "owner/mine is there and public" in refused.stderr and not hub.files
    assert CliRunner().invoke(app, [*words, "--public"]).exit_code == 0 and hub.files
    hub.private, hub.files = True, {}
    private = CliRunner().invoke(app, [*words, "--public"])
    assert private.exit_code == 2 and "owner/mine is there and private" in private.stderr and not hub.files
