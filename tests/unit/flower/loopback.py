"""Flower's Grid without a network: every node is the real ClientApp with a site's file, called in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from befit.flower.client_app import app
from tests.backbones import short_vit

__all__ = ["LoopbackGrid", "write_site"]


_PATIENCE = 300  # questions in a row whether anything is new, a hundredth of a second or more apart


class LoopbackGrid(Grid):
    """Nodes are numbered from `first`. `tamper` may change a reply on its way, or return None to lose it.

    A server that waits for what nobody will ever send fails the test, whatever its own patience is."""

    def __init__(self, sites: Iterable[Path], first: int = 11) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.sites = {first + index: path for index, path in enumerate(sites)}
        self.online = set(self.sites)
        self.keys: dict[int, bytes] = {}  # of nodes, as `flwr supernode register` takes them
        self.replies: dict[str, Message] = {}
        self.sent: list[tuple[int, str]] = []
        self.tamper: Callable[[Message, int], Message | None] = lambda reply, node: reply
        self._idle = 0

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    @property
    def run(self) -> object:
        raise NotImplementedError

    def create_message(self, *arguments: object, **named: object) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *arguments: object, **named: object) -> list[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        self._idle += 1
        assert self._idle < _PATIENCE, "the server waits, and nothing is under way"
        return sorted(self.online)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        number, node = f"message-{len(self.sent)}", message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = number
        self._idle = 0
        self.sent.append((node, message.metadata.message_type))
        try:
            reply = self.answer(message, node)
        except Exception as error:  # as Flower's process does
            reply = Message(Error(2, repr(error)), reply_to=message)
        if (reply := self.tamper(reply, node)) is not None:
            self.replies[number] = reply
        return number

    def answer(self, message: Message, node: int) -> Message:
        return app(message, Context(1, node, {"site": str(self.sites[node])}, RecordDict(), {}))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self._idle += 1
        assert self._idle < _PATIENCE, "the server waits, and nothing is under way"
        return [self.replies.pop(number) for number in list(message_ids) if number in self.replies]


def write_site(folder: Path, client: str, more: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "site.yaml"
    models = f"{{digits-vit: digits-vit, {short_vit()}: {short_vit()}}}"
    path.write_text(f"client: {client}\nmodels: {models}\nbenchmarks: [digits]\n{more}")
    return path
