"""Parts of the measurement on Flower: a proxy that counts bytes, peaks of processes, a clock, a synthetic Llama."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

__all__ = ["Clock", "CountingProxy", "Peaks", "write_llama", "write_texts"]


class CountingProxy:
    """Passes connections on to a port of this machine, and counts what goes `up` (to it) and `down`, TLS and all."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self._target, self._lock = target, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the SuperLink has stopped, and the sites try on until they are stopped too
                near.close()
                continue
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 18):
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other end hung up
            for end in (source, sink):
                end.close()


class Watch:
    """Calls `look` again and again in a thread of its own, for the length of a `with`."""

    def __init__(self, look: Callable[[], None], every_s: float) -> None:
        self._look, self._every_s, self._over = look, every_s, threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


class Peaks:
    """The largest resident memory of each kind of process below this one, in MiB, as the kernel keeps it."""

    kinds = {
        "ServerApp": "flwr-serverapp",
        "SuperLink": "flower-superlink",
        "SuperNode": "flower-supernode",
        "ClientApp": "flwr-clientapp",
        "worker": "befit worker",
    }

    def __init__(self) -> None:
        self.mib: dict[str, float] = {}

    def watch(self) -> Watch:
        return Watch(self._look, 0.1)

    def _look(self) -> None:
        for number in _below(os.getpid()):
            try:
                command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = Path(f"/proc/{number}/status").read_text()
            except OSError:
                continue  # gone meanwhile
            kind = next((kind for kind, words in self.kinds.items() if words in command), None)
            if kind and "superexec" not in command and (found := re.search(r"VmHWM:\s+(\d+)", status)):
                self.mib[kind] = max(self.mib.get(kind, 0.0), int(found[1]) / 1024)


def _below(parent: int) -> Iterable[int]:
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            children = [int(one) for one in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _below(child)


class Clock:
    """When each round of a run was on the disk, seen from outside, so that every engine has the same clock."""

    def __init__(self, run: Path, clients: int) -> None:
        self._ledger, self._clients = run / "ledger.jsonl", clients
        self.rounds: list[float] = []

    def watch(self) -> Watch:
        return Watch(self._look, 0.02)

    def _look(self) -> None:
        if not self._ledger.exists():
            return
        lines = self._ledger.read_text().count('"purpose": "train"')
        while lines >= self._clients * (len(self.rounds) + 1):
            self.rounds.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of every round but the first, which is over when the clock begins."""
        return [later - earlier for earlier, later in zip(self.rounds, self.rounds[1:], strict=False)]


def write_llama(folder: Path) -> Path:
    """A Llama of 104 million random weights: 8 blocks of width 1024, and a vocabulary of 64 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        intermediate_size=2816,
        max_position_embeddings=64,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    words = ["<pad>", "<unk>", "<bos>", "<eos>", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def write_texts(path: Path) -> Path:
    """Ten records of a few words each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = ({"instruction": f"w{number} w{number + 1}", "output": f"w{number + 2}"} for number in range(10))
    path.write_text("\n".join(map(json.dumps, records)))
    return path
