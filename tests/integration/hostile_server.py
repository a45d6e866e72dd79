"""A hostile server: Flower's ServerApp that begins an honest run at a site, and then sends it what no server should."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from befit.core.values import State
from befit.flower.engine import ask
from befit.flower.frame import from_content, to_content, unpack
from tests.security.requests import CASES, frame, header_of, honest

CHOSEN = CASES[:: len(CASES) // 20][:20]
SERVER = """import sys

sys.path.insert(0, {root!r})

from pathlib import Path

from tests.integration.hostile_server import hostile_app

app = hostile_app(Path({out!r}))
"""


def hostile_app(out: Path) -> ServerApp:
    """The app; what the site answered is in `out`, a JSON list, once it is over."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.1)
        attack(lambda frames: _answers(grid, nodes[0], frames), out)

    return app


def attack(send: Callable[[Sequence[bytes]], list[bytes]], out: Path) -> None:
    """An honest hello and round, the hostile requests, and the run's next round."""
    said: list[dict[str, Any]] = []

    def answers(*frames: bytes) -> State:
        arrays: State = {}
        for reply in send(frames):
            header, arrays = unpack(reply, "a reply")
            said.append({"kind": header["kind"], "reason": header.get("reason", ""), "arrays": len(arrays)})
        return arrays

    answers(ask("hello", header_of(honest(), "hello"), {}))
    download = answers(ask("train", header_of(honest(), "train"), {}))
    answers(*(frame(case, download) for case in CHOSEN))
    header = header_of(honest(), "train")
    answers(ask("train", {**header, "at": {**header["at"], "round": 2}}, download))
    out.write_text(json.dumps(said))


def _answers(grid: Grid, node: int, frames: Sequence[bytes]) -> list[bytes]:
    messages = [Message(to_content(one), node, "query", ttl=600, group_id="hostile") for one in frames]
    numbers, replies = list(grid.push_messages(messages)), dict[str, bytes]()
    while len(replies) < len(numbers):
        for reply in grid.pull_messages([number for number in numbers if number not in replies]):
            replies[reply.metadata.reply_to_message_id] = from_content(reply.content)
        time.sleep(0.1)
    return [replies[number] for number in numbers]
