"""Feed changed files and frames to every reader of what comes from elsewhere, and count what becomes of them.

    python -m tests.security.fuzz --minutes 10 [--seed 0] [--only frames,yaml] [--inputs N] [--first N] [--out DIR]

Each input is a valid one with some changes, drawn by a generator that the seed and its number decide: the same seed
gives the same inputs, and `--only KIND --first N --inputs 1` repeats one. An input is accepted, or refused with an
error of befit's. Anything else is a defect, and is kept in the folder `--out`: another exception, a refusal too long to
read, more than two seconds of computing, or a pickle that was opened. The exit code is 1 where there is one.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import save
from transformers.utils.logging import disable_progress_bar

from befit.config.load import load_experiment
from befit.core.errors import BefitError, PayloadMismatch
from befit.core.values import ClientInfo, Failure, Payload, Tick
from befit.core.wire_form import Wire
from befit.data.files.readers import read_rows
from befit.data.files.records import items_of
from befit.flower import replies
from befit.flower.engine import RemoteEngine
from befit.flower.frame import PROTOCOL, digest, pack, unpack
from befit.merge.files import merge_checkpoints
from befit.merge.merge import Merge
from befit.models.backbone import load_backbone
from befit.tasks.images import ImagePreprocessor
from tests.unit.models.tiny_models import Settings, save_bert, save_llama, save_vit

SECONDS = 2.0  # of computing for one input, however busy the machine is
LONGEST = 20_000  # characters of a refusal
ROOT = Path(__file__).parents[2]
Files = dict[str, bytes]  # an input: one file, or all of a folder
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
HOSTILE = (
    None, True, False, 0, -1, 2**31, 2**63, 10**50, 10**400, -0.0, 1e308, -1e308, float("nan"), float("inf"), "", "\0",
    "\ud800", "\x1b[2J", "\u202e", "x" * 500, "../../x", "/etc/passwd", "evil.bin", [], {}, [[]], [None] * 50, DEEP,
    {"a": {"b": {}}}, {"": 0}, "[" * 200, "(", "(([a-z.0-9_])+)+!", ".*" * 30, "__proto__", "\N{GREEK SMALL LETTER MU}",
)  # fmt: skip
TOKENS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"'", b"\\", b"\n", b"\r", b"\t", b"\0", b"\xff", b"&a ",
    b"\xef\xbb\xbf", b"*a", b"<<: *a", b"!!python/object/apply:os.system [x]", b"!!int x", b"? ", b"- ", b"| ", b"> ",
    b"%", b"#", b"---\n", b"\\ud800", b"\\u0000", b"[" * 100, b"- " * 100, b"{a: " * 100, b"9" * 50, b"9" * 5000,
    b"1e999", b"-", b".nan", b".inf", b"NaN", b"null", b"true", b"\xed\xa0\x80", b"\xe2\x80\xae", b"{}", b"\x80",
    b"\x1f\x8b", b"9223372036854775808",
)  # fmt: skip


class Hang(BaseException):
    """An input took too long."""


class Opened(BaseException):
    """torch.load or pickle was called: no `except Exception` hides it."""


@dataclass
class Kind:
    """One kind of input: valid ones, how one is changed, and what reads it."""

    seeds: Sequence[Files]
    change: Callable[[random.Random, Files, Sequence[Files]], Files]
    read: Callable[[Files], None]


@dataclass
class Count:
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    slowest: float = 0.0
    first_mib: float = 0.0
    last_mib: float = 0.0


# --- changes


def hostile(rng: random.Random) -> Any:
    """A value of its own: what is put into one input may be changed there."""
    return copy.deepcopy(rng.choice(HOSTILE))


def change_bytes(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to four random edits."""
    value = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted((rng.randint(0, len(value)), rng.randint(0, len(value))))
        match rng.randrange(8):
            case 0 if value:
                value[min(at, len(value) - 1)] ^= 1 << rng.randrange(8)
            case 1 if value:
                value[min(at, len(value) - 1)] = rng.choice((0, 255, 127, 128, 34, 92, 123, 91))
            case 2:
                del value[at : min(end, at + 40)]
            case 3:
                value[at:at] = rng.choice(TOKENS)
            case 4:
                value[at : min(end, at + 12)] = rng.choice(TOKENS)
            case 5:
                value[at:at] = value[at : min(end, at + 200)] * rng.choice((1, 3, 20))
            case 6:
                del value[at:]
            case 7 if others:
                other = rng.choice(others)
                value[at : min(end, at + 100)] = other[rng.randint(0, len(other)) :][:100]
    return bytes(value)


def change_value(rng: random.Random, value: Any) -> Any:
    """A copy with one to three of its nodes exchanged, removed, renamed or repeated."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        here, key = None, None
        inner = value
        while isinstance(inner, (dict, list)) and inner and (here is None or rng.random() < 0.7):
            here = inner
            key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
            inner = here[key]
        if here is None:
            return hostile(rng)
        match rng.randrange(6):
            case 0:
                del here[key]
            case 1 if isinstance(here, dict):
                here[str(hostile(rng))[:400]] = here.pop(key)
            case 2 if isinstance(here, dict):
                here[str(rng.choice(("", "x" * 300, "\x1b[31m", "\ud800", "task", "steps")))] = hostile(rng)
            case 3 if isinstance(inner, (int, float)) and not isinstance(inner, bool):
                here[key] = rng.choice((-inner, inner + 1, inner * 10**6, str(inner), [inner]))
            case _:
                here[key] = hostile(rng)
    return value


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def change_json(rng: random.Random, data: bytes) -> bytes:
    """As a value, most of the time; else as bytes."""
    return as_json(change_value(rng, json.loads(data))) if rng.random() < 0.7 else change_bytes(rng, data)


def change_safetensors(rng: random.Random, data: bytes) -> bytes:
    """The header as a value, with its length put right; else the header's bytes, or any."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    choice = rng.random()
    if choice < 0.4:
        header = as_json(change_value(rng, json.loads(header)))
    elif choice < 0.6:
        header = change_bytes(rng, header)
    elif choice < 0.7:
        return rng.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1, len(data))).to_bytes(8, "little") + data[8:]
    else:
        return change_bytes(rng, data)
    return len(header).to_bytes(8, "little") + header + rest


def change_file(name: str, rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    if name.endswith(".json"):
        return change_json(rng, data)
    if name.endswith(".safetensors"):
        return change_safetensors(rng, data)
    if name.endswith(".gz") and rng.random() < 0.5:
        return gzip.compress(change_bytes(rng, gzip.decompress(data), ()), mtime=0)
    return change_bytes(rng, data, others)


def change_one(rng: random.Random, files: Files, seeds: Sequence[Files]) -> Files:
    """One file of the input changed."""
    name = rng.choice(sorted(files))
    others = [seed[name] for seed in seeds if name in seed]
    return {**files, name: change_file(name, rng, files[name], others)}


# --- kinds


def frames() -> Kind:
    """Replies of a site, from bytes to what the server makes of them: an update, a score, a hello."""
    at, request = Tick("federate", 1, 2, 7), Payload({"shared/a/A": torch.zeros(2, 3)}, {"rank": 2})
    reply: dict[str, bytes] = {}
    sent: dict[str, str] = {}

    class OneReply:
        def deliver(
            self, purpose: str, clients: Sequence[str], frame: Any, group: str, under_way: Any
        ) -> Iterator[tuple[str, bytes]]:
            sent[purpose] = digest(frame("a"))
            yield "a", reply["frame"]

    about = ("run", "method", {"train": {"lr": 0.1}}, {"name": "fedit"}, Wire(), "accuracy")
    engine = RemoteEngine(OneReply(), {"a": ClientInfo("a", "b", 9)}, *about, lambda client, split: 3, 2**20)
    asks: dict[str, Callable[[], Sequence[Any]]] = {
        "update": lambda: list(engine.exchange({"a": request}, at)),
        "score": lambda: list(engine.score({"a": request}, at, "val")),
    }
    reply["frame"] = b""
    for ask in asks.values():
        ask()
    stamp = {"protocol": PROTOCOL, "run": "run", "label": "method", "at": asdict(at), "client": "a", "version": "1"}
    cost = {"seconds": 1.5, "peak_memory_mib": 200.0, "cpu_seconds": 1.5}
    said = {
        "update": {"scalars": {"rank": 2, "names": ["x"]}, "report": {"loss": 0.5, "steps": 5}, "cost": cost},
        "score": {"metrics": {"accuracy": 0.5, "loss": 1.0}, "examples": 3, "cost": cost},
        "failure": {"error": "DataError", "reason": "text"},
        "hello": {"backbone": "b", "data": "d", "examples": [9, 3, 3]},
    }
    requests = {"score": sent["evaluate"]}
    arrays = {"shared/a/A": torch.ones(2, 3), "shared/a/B": torch.ones(3, 2, dtype=torch.bfloat16)}
    seeds = [
        {"kind": kind.encode(), "frame": pack(header, arrays if kind == "update" else {})}
        for kind, values in said.items()
        for header in [{"kind": kind, "request": requests.get(kind, sent["train"]), **stamp, **values}]
    ]

    def change(rng: random.Random, files: Files, seeds: Sequence[Files]) -> Files:
        kind, data = files["kind"], files["frame"]
        if rng.random() < 0.5:
            return {"kind": kind, "frame": change_safetensors(rng, data)}
        size = int.from_bytes(data[:8], "little")
        outer = json.loads(data[8 : 8 + size])
        inner = outer["__metadata__"]
        inner["header"] = change_json(rng, inner["header"].encode()).decode("utf-8", "surrogateescape")
        header = json.dumps(outer).encode()
        return {"kind": kind, "frame": len(header).to_bytes(8, "little") + header + data[8 + size :]}

    def read(files: Files) -> None:
        kind, reply["frame"] = files["kind"].decode(), files["frame"]
        if kind == "hello":
            replies.hello(unpack(files["frame"], "a reply")[0])
            return
        for made in asks["score" if kind == "score" else "update"]():
            if isinstance(made, Failure):
                json.dumps(asdict(made), ensure_ascii=False).encode()  # into the log
                raise PayloadMismatch(made.reason)
            json.dumps([made.cost.seconds, getattr(made, "report", {})], ensure_ascii=False).encode()

    return Kind(seeds, change, read)


def configurations(folder: Path) -> Kind:
    seeds = [{"config.yaml": path.read_bytes()} for path in sorted((ROOT / "configs").glob("*.yaml"))]

    def read(files: Files) -> None:
        (folder / "config.yaml").write_bytes(files["config.yaml"])
        load_experiment(folder / "config.yaml")

    def change(rng: random.Random, files: Files, seeds: Sequence[Files]) -> Files:
        if rng.random() < 0.8:
            return change_one(rng, files, seeds)
        width, depth, value = rng.randint(2, 12), rng.randint(2, 12), rng.choice(("[x]", "{x: 1}"))
        lines = [f"a0: &a0 {value}"]
        for level in range(1, depth):
            names = ", ".join([f"*a{level - 1}"] * width)
            inner = f"[{names}]" if value == "[x]" else f"{{<<: [{names}], k{level}: 1}}"
            lines.append(f"a{level}: &a{level} {inner}")
        key = rng.choice(("baselines", "families", "method", "data", "z"))
        return {"config.yaml": "\n".join([*lines, f"{key}: *a{depth - 1}"]).encode() + b"\n" + files["config.yaml"]}

    return Kind(seeds, change, read)


def records(folder: Path) -> Kind:
    texts = [{"text": f"a good film {n}", "label": n % 2, "id": str(n), "image": "p.png"} for n in range(6)]
    turns = [{"from": "human", "value": "<image> Is it? Choice list:[yes, no]"}, {"from": "gpt", "value": "yes"}]
    questions = [{"conversations": turns, "image": "p.png", "task": "t"}] * 3
    table = pyarrow.Table.from_pylist([*texts] * 4)
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(table, parquet)
    csv = b"text,label,id\n" + b"".join(b'"a film, %d",%d,%d\n' % (n, n % 2, n) for n in range(6))
    lines = [b"\n".join(map(as_json, rows)) for rows in (texts, questions)]
    seeds = [
        {"a.jsonl": lines[0]},
        {"a.jsonl": lines[1]},
        {"a.jsonl.gz": gzip.compress(lines[0], mtime=0)},
        {"a.json": as_json(texts)},
        {"a.csv": csv},
        {"a.tsv": csv.replace(b",", b"\t")},
        {"a.parquet": parquet.getvalue()},
        {"a.parquet": parquet.getvalue()},
    ]
    (folder / "p.png").write_bytes(b"")
    tasks = ("text-classification", "image-classification", "causal-lm", "vqa")
    columns = {"causal-lm": {"instruction": "text", "output": "id"}}

    def read(files: Files) -> None:
        ((name, data),) = files.items()
        (folder / name).write_bytes(data)
        rows = read_rows(folder / name, ("text", "label", "id", "image", "conversations", "task"))
        refusals = []
        for task in tasks:
            try:
                items_of(rows, task, columns.get(task, {}))
            except BefitError as error:
                refusals.append(error)
        if len(refusals) == len(tasks):
            raise refusals[0]

    return Kind(seeds, change_one, read)


def pictures(folder: Path) -> Kind:
    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    seeds: list[Files] = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        file = io.BytesIO()
        picture.save(file, kind)
        seeds.append({f"a.{kind.lower()}": file.getvalue()})
    array = io.BytesIO()
    np.save(array, np.ones((8, 8), dtype=np.float32))
    seeds.append({"a.npy": array.getvalue()})
    prepare = ImagePreprocessor(3, 8, 8)

    def read(files: Files) -> None:
        ((name, data),) = files.items()
        (folder / name).write_bytes(data)
        prepare(str(folder / name))

    return Kind(seeds, change_one, read)


def adapters(folder: Path) -> Kind:
    names = [f"base_model.model.model.layers.{n}.q_proj" for n in range(2)]
    factors = {f"{name}.lora_A.weight": torch.ones(2, 4) for name in names}
    factors |= {f"{name}.lora_B.weight": torch.ones(4, 2) for name in names}
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "task_type": "CAUSAL_LM", "use_rslora": False,
        "base_model_name_or_path": "tiny", "target_modules": ["q_proj"], "rank_pattern": {"layers.1.q_proj": 2},
        "alpha_pattern": {r"layers\.\d+\.q_proj": 8}, "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip
    seed = {"adapter_config.json": as_json(config), "adapter_model.safetensors": save(factors)}
    for name, data in seed.items():
        (folder / "sound").mkdir(exist_ok=True)
        (folder / "sound" / name).write_bytes(data)

    def read(files: Files) -> None:
        (folder / "changed").mkdir(exist_ok=True)
        for name, data in files.items():
            (folder / "changed" / name).write_bytes(data)
        merge_checkpoints([folder / "changed", folder / "sound"], folder / "out", Merge(space="knots"), force=True)

    return Kind([seed], change_one, read)


def models(folder: Path) -> Kind:
    disable_progress_bar()
    made = {
        "text-classification": save_bert(folder / "bert"),
        "causal-lm": save_llama(folder / "llama"),
        "image-classification": save_vit(folder / "vit"),
    }
    seeds = [
        {"task": task.encode(), **{path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}}
        for task, place in made.items()
    ]
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors"}}
    for seed in seeds:
        seed["evil.bin"] = b"\x80\x04]."

    def change(rng: random.Random, files: Files, seeds: Sequence[Files]) -> Files:
        if rng.random() < 0.15:  # weights in parts
            names = {"weight_map": {"a": "one.safetensors", "b": rng.choice(("evil.bin", "../x", "one.safetensors"))}}
            renamed = {"one.safetensors" if n == "model.safetensors" else n: data for n, data in files.items()}
            return {**renamed, "model.safetensors.index.json": change_json(rng, as_json({**index, **names}))}
        weights = {"task": files["task"], "evil.bin": files["evil.bin"]}
        inner = change_one(rng, {name: data for name, data in files.items() if name not in weights}, seeds)
        return {**inner, **weights}

    def read(files: Files) -> None:
        place = folder / "changed"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(data)
        load_backbone(Settings(str(place)), files["task"].decode(), ("neg", "pos"), 0)

    return Kind(seeds, change, read)


KINDS: Mapping[str, Callable[[Path], Kind]] = {
    "frames": lambda folder: frames(),
    "yaml": configurations,
    "data": records,
    "pictures": pictures,
    "adapters": adapters,
    "models": models,
}


# --- the loop


@contextmanager
def watched() -> Iterator[None]:
    """Nothing may be unpickled, nothing is printed, and what computes for too long is interrupted."""

    def opened(*arguments: Any, **named: Any) -> None:
        raise Opened

    def too_long(signum: int, frame: Any) -> None:
        raise Hang

    before, load = signal.signal(signal.SIGPROF, too_long), torch.load
    torch.load = opened
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        torch.load = load
        signal.signal(signal.SIGPROF, before)


def feed(read: Callable[[Files], None], files: Files, seconds: float) -> tuple[str, str]:
    """What becomes of one input (accepted, refused, crash or hang), and why."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        read(files)
        outcome = "accepted", ""
    except BefitError as error:
        text = f"{type(error).__name__}: {error}"
        outcome = ("refused", text) if len(text) <= LONGEST else ("crash", f"{len(text)} characters: {text[:300]}")
    except Hang:
        outcome = "hang", traceback.format_exc()
    except Exception:
        outcome = "crash", traceback.format_exc()
    except Opened:
        outcome = "crash", "a pickle was opened\n" + traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return outcome


def fuzz(
    name: str,
    seed: int,
    first: int,
    go_on: Callable[[int], bool],
    out: Path,
    tell: Callable[[str], None],
    seconds: float,
) -> Count:
    """Inputs from number `first` as long as `go_on` of their count says; what is found goes to `out`."""
    count = Count()
    with tempfile.TemporaryDirectory() as folder, watched():
        kind = KINDS[name](Path(folder))
        for files in kind.seeds:
            outcome, why = feed(kind.read, files, seconds)
            if outcome in ("crash", "hang"):
                raise RuntimeError(f"a valid input of the kind {name} is no longer read: {why}")
        number = first
        while go_on(count.inputs):
            rng = random.Random(f"{seed} {name} {number}")
            files = kind.change(rng, rng.choice(kind.seeds), kind.seeds)
            start = time.process_time()
            outcome, why = feed(kind.read, files, seconds)
            spent = time.process_time() - start
            if outcome in ("accepted", "refused") and spent > seconds:
                outcome, why = "hang", f"{spent:.1f} s of computing that no signal could interrupt"
            count.inputs += 1
            count.slowest = max(count.slowest, spent)
            count.accepted += outcome == "accepted"
            count.refused += outcome == "refused"
            count.crashes += outcome == "crash"
            count.hangs += outcome == "hang"
            if count.inputs == 200 or not count.first_mib:
                count.first_mib = resident_mib()
            if outcome in ("crash", "hang"):
                tell(f"{name} {number}: {outcome}: {why.strip().splitlines()[-1][:200]}")
                if count.crashes + count.hangs <= 100:
                    keep(out / f"{name}-{seed}-{number}", files, why)
            number += 1
        count.last_mib = resident_mib()
    return count


def keep(folder: Path, files: Files, why: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "why.txt").write_text(why, errors="backslashreplace")


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="for all kinds together")
    parser.add_argument("--inputs", type=int, help="of each kind, in place of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder for inputs that are defects")
    given = parser.parse_args(arguments)
    names = given.only.split(",")
    seconds = 60 * given.minutes / len(names)
    found = 0
    print(
        f"{'kind':10}{'inputs':>10}{'accepted':>10}{'refused':>10}{'crashes':>9}{'hangs':>7}{'slowest s':>11}{'MiB':>8}"
    )
    for name in names:
        start = time.monotonic()

        def go_on(count: int, start: float = start) -> bool:
            return count < given.inputs if given.inputs is not None else time.monotonic() - start < seconds

        count = fuzz(name, given.seed, given.first, go_on, given.out, partial(print, file=sys.stderr), SECONDS)
        found += count.crashes + count.hangs
        grown = f"{count.last_mib - count.first_mib:+.1f}"
        numbers = (
            count.inputs,
            count.accepted,
            count.refused,
            count.crashes,
            count.hangs,
            f"{count.slowest:.2f}",
            grown,
        )
        print(
            f"{name:10}" + "".join(f"{n:>{w}}" for n, w in zip(numbers, (10, 10, 10, 9, 7, 11, 8), strict=True)),
            flush=True,
        )
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
