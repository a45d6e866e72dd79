"""What a hostile site may send instead of its reply: for each lie, how it is made of an honest reply, and what has to
become of it. The corpus is played in `test_replies.py`; `hostile` makes the bytes for whoever plays it elsewhere.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from befit.core.values import State
from befit.core.wire import to_bytes
from befit.flower.frame import PROTOCOL, pack, unpack

Header = dict[str, Any]
Change = Callable[[Header, State], object]
End = Literal["refused", "failure", "used"]

HALF = "\ud800"  # half of a surrogate pair: valid in JSON, in no file
CLEAR = "\x1b[2J"  # clears a terminal
BIDI = "\u202e"  # what follows is shown from right to left
MARK = "INTRUDER"  # in texts of lies, to be looked for in what is kept


@dataclass(frozen=True)
class Lie:
    """One hostile reply.

    to     what it answers: `hello`, `train`, `score` or `export`
    make   the bytes, from those of the honest reply and of an earlier one to the same client
    end    refused: it is this client's failure, of that kind, and nothing of it is kept; failure: so, but in the site's
           own words; used: it is well formed, and whatever it claims disturbs nobody
    words  in the reason of the refusal
    """

    name: str
    to: str
    make: Callable[[bytes, bytes], bytes]
    end: End = "refused"
    words: str = ""


def hostile(name: str, honest: bytes, earlier: bytes = b"") -> bytes:
    """The bytes of one lie of the corpus, from an honest reply to what it answers."""
    (lie,) = (lie for lie in CORPUS if lie.name == name)
    return lie.make(honest, earlier)


def said(change: Change) -> Callable[[bytes, bytes], bytes]:
    """The honest reply after a change of its header or arrays."""

    def make(honest: bytes, earlier: bytes) -> bytes:
        header, arrays = unpack(honest, "an honest reply")
        change(header, arrays)
        return pack(header, arrays)

    return make


def with_value(path: tuple[str, ...], value: Any) -> Callable[[bytes, bytes], bytes]:
    """One entry of the header replaced, or left out where the value is `GONE`."""

    def change(header: Header, arrays: State) -> None:
        for key in path[:-1]:
            header = header[key]
        if value is GONE:
            del header[path[-1]]
        else:
            header[path[-1]] = value

    return said(change)


def text_of(change: Callable[[str], str]) -> Callable[[bytes, bytes], bytes]:
    """The honest reply with another text as its header, which need not be JSON."""

    def make(honest: bytes, earlier: bytes) -> bytes:
        header, arrays = unpack(honest, "an honest reply")
        return to_bytes(arrays, {"header": change(json.dumps(header))})

    return make


def safetensors(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes, bytes], bytes]:
    """The honest reply with another table of its arrays before the same numbers."""

    def make(honest: bytes, earlier: bytes) -> bytes:
        length = int.from_bytes(honest[:8], "little")
        table = json.loads(honest[8 : 8 + length])
        changed = change(table)
        text = changed if isinstance(changed, bytes) else json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + honest[8 + length :]

    return make


def array_entry(**values: Any) -> Callable[[bytes, bytes], bytes]:
    """The first array's entry in that table, changed."""
    return safetensors(lambda table: table[_first(table)].update(values))


def _first(names: Iterable[str]) -> str:
    return min(name for name in names if name != "__metadata__")


def named(name: str) -> Change:
    """The first array under another name."""
    return lambda header, arrays: arrays.update({name: arrays.pop(_first(arrays))})


def first_array(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda header, arrays: arrays.update({_first(arrays): change(arrays[_first(arrays)].clone())})


def poked(number: float) -> Change:
    def change(array: torch.Tensor) -> torch.Tensor:
        array.view(-1)[0] = number
        return array

    return first_array(change)


def every_array(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda header, arrays: arrays.update({name: change(array) for name, array in arrays.items()})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


GONE = object()
WRONG: dict[str, Any] = {
    "left out": GONE,
    "null": None,
    "a text": MARK,
    "half a character": HALF,
    "an escape sequence": f"{CLEAR}{MARK}",
    "from right to left": f"{BIDI}{MARK}",
    "two megabytes of text": MARK * 2**18,
    "a list": [1],
    "a mapping": {MARK: 1},
    "true": True,
    "minus one": -1,
    "an infinite number": float("inf"),
    "no number": float("nan"),
    "1e308": 1e308,
    "a number of 400 digits": 10**400,
}
NUMBERS = ("an infinite number", "no number", "minus one")
TRAIN_FIELDS: dict[tuple[str, ...], tuple[str, ...]] = {  # with the values that are well formed there
    ("protocol",): (),
    ("run",): (),
    ("label",): (),
    ("client",): (),
    ("request",): (),
    ("kind",): (),
    ("at",): (),
    ("at", "round"): (),
    ("at", "stage"): (),
    ("at", "span"): (),
    ("at", "seed"): (),
    ("scalars",): ("a mapping",),  # refused by the guard: no plain number is declared
    ("report",): ("a mapping",),
    ("report", "loss"): ("left out", *NUMBERS),
    ("report", "steps"): ("left out",),
    ("cost",): (),
    ("cost", "seconds"): (),
    ("cost", "peak_memory_mib"): (),
    ("cost", "cpu_seconds"): (),
}
SCORE_FIELDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("kind",): (),
    ("metrics",): (),
    ("metrics", "accuracy"): (),
    ("metrics", "loss"): ("left out", "minus one"),
    ("examples",): (),
    ("cost", "seconds"): (),
}
HELLO_FIELDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("kind",): (),
    ("client",): ("a text",),
    ("backbone",): ("a text",),
    ("data",): ("a text",),
    ("version",): ("a text",),
    ("examples",): (),
}


def _fields(to: str, fields: dict[tuple[str, ...], tuple[str, ...]]) -> list[Lie]:
    return [
        Lie(f"{to}: {'.'.join(path)} is {label}", to, with_value(path, value))
        for path, fine in fields.items()
        for label, value in WRONG.items()
        if label not in fine
    ]


def _lies(to: str, makes: dict[str, Callable[[bytes, bytes], bytes]], end: End = "refused") -> list[Lie]:
    return [Lie(f"{to}: {name}", to, make, end) for name, make in makes.items()]


def _reported(names: Iterable[str]) -> dict[str, Callable[[bytes, bytes], bytes]]:
    return {f"a report of {name[:30]!a}": with_value(("report", name), 1.0) for name in names}


def _failing(**values: Any) -> Callable[[bytes, bytes], bytes]:
    told = {"kind": "failure", "error": "OSError", "reason": "the scanner is offline", **values}
    return said(lambda header, arrays: (header.update(told), arrays.clear()))


NAMES = (
    "",
    " ",
    "<script>alert(1)</script>",
    '=HYPERLINK("http://x","y")',
    "+1",
    "-1",
    "@SUM(A1)",
    "|cmd",
    "a\nb",
    "a\x00b",
    f"{CLEAR}a",
    f"{BIDI}a",
    f"a{HALF}",
    "a" * 101,
    "a" * 10**6,
)
BYTES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "nothing": lambda honest, earlier: b"",
    "a pickle": lambda honest, earlier: pickle.dumps({"loss": 1.0}),
    "a pickle that calls": lambda honest, earlier: b"cos\nsystem\n(S'true'\ntR.",
    "zeros": lambda honest, earlier: bytes(1000),
    "compressed": lambda honest, earlier: gzip.compress(honest),
    "JSON alone": lambda honest, earlier: b'{"kind": "update"}',
    "backwards": lambda honest, earlier: honest[::-1],
    "twice": lambda honest, earlier: honest * 2,
    "with more behind": lambda honest, earlier: honest + b"\x00",
    "without its first byte": lambda honest, earlier: honest[1:],
    "without its last byte": lambda honest, earlier: honest[:-1],
    **{
        f"cut at {part} of 8": lambda honest, earlier, part=part: honest[: len(honest) * part // 8]
        for part in range(1, 8)
    },
    "a table of 2**62 bytes": lambda honest, earlier: (2**62).to_bytes(8, "little") + honest[8:],
    "a table of 2**64 - 1 bytes": lambda honest, earlier: b"\xff" * 8 + honest[8:],
    "a table of no bytes": lambda honest, earlier: bytes(8) + honest[8:],
    "a table of all bytes": lambda honest, earlier: len(honest).to_bytes(8, "little") + honest[8:],
    "a table of five megabytes": safetensors(lambda table: json.dumps(table).encode() + b" " * 5 * 2**20),
    "a table that is a list": safetensors(lambda table: b"[1, 2]"),
    "a table that nests": safetensors(lambda table: b'{"a":' * 10**5 + b"1" + b"}" * 10**5),
    "a table with two arrays of one name": safetensors(
        lambda table: (
            json.dumps(table)[:-1].encode()
            + f", {json.dumps(_first(table))}: {json.dumps(table[_first(table)])}}}".encode()
        )
    ),
    "a table in UTF-16": safetensors(lambda table: json.dumps(table).encode("utf-16")),
    "a table with a broken byte": safetensors(lambda table: json.dumps(table).encode() + b"\xff"),
    "no header": safetensors(lambda table: table.pop("__metadata__")),
    "a header that is no text": safetensors(lambda table: table["__metadata__"].update(header=1)),
    "a header that is no JSON": text_of(lambda text: text[:-1]),
    "a header that is a list": text_of(lambda text: f"[{text}]"),
    "a header that is null": text_of(lambda text: "null"),
    "a header that is a number": text_of(lambda text: "1e308"),
    "a header with a number of 5000 digits": text_of(lambda text: f'{{"n": {"9" * 5000}, {text[1:]}'),
    "a header with two protocols": text_of(lambda text: f'{{"protocol": 1, {text[1:]}'),
    "a header with two reports": text_of(lambda text: f'{{"report": {{"steps": Infinity}}, {text[1:]}'),
    "a header that nests in vain": said(lambda header, arrays: header.update(more=nested(30))),
    "a header that nests without end": text_of(lambda text: '{"a":' * 10**5 + "1" + "}" * 10**5),
    "a header with half a character in vain": said(lambda header, arrays: header.update({MARK: HALF})),
    "a header of three megabytes in vain, and a NUL": text_of(lambda text: text + "\x00" * 3 * 2**20),
    "offsets that overlap": safetensors(
        lambda table: table[_first(table)].update(
            data_offsets=table[max(set(table) - {"__metadata__"})]["data_offsets"]
        )
    ),
    "offsets below zero": array_entry(data_offsets=[-8, 8]),
    "offsets beyond the end": array_entry(data_offsets=[0, 2**40]),
    "offsets backwards": array_entry(data_offsets=[64, 0]),
    "a dtype that nobody has": array_entry(dtype="Q512"),
    "a dtype of eight bits": array_entry(dtype="F8_E4M3"),
    "a shape below zero": array_entry(shape=[-1, 64]),
    "a shape of 2**62": array_entry(shape=[2**62, 2**62]),
    "a shape of nothing times 2**62": array_entry(shape=[0, 2**62], data_offsets=[0, 0]),
    "a shape that is a text": array_entry(shape=MARK),
    "a shape of fractions": array_entry(shape=[0.5, 2]),
}
ARRAYS: dict[str, Change] = {
    "an array left out": lambda header, arrays: arrays.pop(_first(arrays)),
    "no arrays": lambda header, arrays: arrays.clear(),
    "an array more": lambda header, arrays: arrays.update({MARK: torch.ones(2)}),
    "a personal array more": lambda header, arrays: arrays.update({"personal/block.00.q_proj/A": torch.ones(2)}),
    "20,000 empty arrays": lambda header, arrays: arrays.update({f"{MARK}{n}": torch.zeros(0) for n in range(20_000)}),
    "10,000 empty arrays": lambda header, arrays: arrays.update({f"{MARK}{n}": torch.zeros(0) for n in range(10_000)}),
    "an array of a long name": named(MARK * 100),
    "an array of a name of ten megabytes": named(MARK * (10 * 2**20 // len(MARK))),
    "an array without a name": named(""),
    "an array called ../../x": named("../../x"),
    "an array called __class__": named("__class__"),
    "an array with an escape sequence": named(CLEAR),
    "an array from right to left": named(f"{BIDI}shared/block.00.q_proj/A"),
    "an array of a name in another case": lambda header, arrays: arrays.update(
        {_first(arrays).upper(): arrays.pop(_first(arrays))}
    ),
    "a row left out": first_array(lambda array: array[:1].contiguous()),
    "a row more": first_array(lambda array: torch.cat([array, array[:1]])),
    "a matrix on its side": first_array(lambda array: array.T.contiguous()),
    "a matrix in one row": first_array(lambda array: array.reshape(-1)),
    "a matrix of three axes": first_array(lambda array: array[None]),
    "a matrix of twelve axes": first_array(lambda array: array.reshape(*[1] * 10, *array.shape)),
    "one number": first_array(lambda array: array.sum()),
    "an empty array": first_array(lambda array: array[:0]),
    **{
        f"an array of {dtype}": first_array(lambda array, dtype=dtype: array.to(getattr(torch, dtype)))
        for dtype in ("float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
    },
    "all arrays in half precision": every_array(lambda array: array.half()),
    "NaN": poked(float("nan")),
    "NaN everywhere": every_array(lambda array: array * float("nan")),
    "infinity": poked(float("inf")),
    "minus infinity": poked(float("-inf")),
    "one number of 1e30": poked(1e30),
    "one number whose square is too large": poked(3e38),
    "everything a million times": every_array(lambda array: array * 1e6),
    "everything minus a million times": every_array(lambda array: array * -1e6),
}
TRAIN: dict[str, Callable[[bytes, bytes], bytes]] = {
    "the reply to an earlier request": lambda honest, earlier: earlier,
    "protocol as a float": with_value(("protocol",), float(PROTOCOL)),
    "protocol as a text": with_value(("protocol",), str(PROTOCOL)),
    "protocol 1": with_value(("protocol",), 1),
    "the next protocol": with_value(("protocol",), PROTOCOL + 1),
    "another run": with_value(("run",), "another"),
    "another method": with_value(("label",), "another"),
    "another client": with_value(("client",), "client-00"),
    "another request": with_value(("request",), "0" * 64),
    "another stage": with_value(("at", "stage"), "merge"),
    "another round": with_value(("at", "round"), 99),
    "round 1.0": with_value(("at", "round"), 1.0),
    "a time with more in it": with_value(("at", "more"), 1),
    "a score": with_value(("kind",), "score"),
    "a hello": with_value(("kind",), "hello"),
    "an export": with_value(("kind",), "exported"),
    "half a step": with_value(("report", "steps"), 0.5),
    "2**31 + 1 steps": with_value(("report", "steps"), 2**31 + 1),
    "201 names in a report": with_value(("report",), {f"n{n}": 1.0 for n in range(201)}),
    "20,000 names in a report": with_value(("report",), {f"{MARK}{n}": 1.0 for n in range(20_000)}),
    "a report of true": with_value(("report", "w"), True),
    "a report of a text": with_value(("report", "w"), MARK),
    "a report of a list": with_value(("report", "w"), [1.0]),
    "a report of 1e101": with_value(("report", "w"), 1e101),
    "a report of -1e308": with_value(("report", "w"), -1e308),
    "a year and a day": with_value(("cost", "seconds"), 367 * 86400),
    "a year and a day of a processor": with_value(("cost", "cpu_seconds"), 367 * 86400),
    "two pebibytes of memory": with_value(("cost", "peak_memory_mib"), 2**31),
    "a number that is not declared": with_value(("scalars",), {"rank": 8}),
    "a number within numbers": with_value(("scalars",), {"rank": [[8]]}),
    "a number of a long name": with_value(("scalars",), {MARK * 100: 8}),
    **_reported(NAMES),
}
FAILURES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a failure without a kind": _failing(error=None),
    "a failure without a reason": _failing(reason=None),
    "a failure whose reason is a mapping": _failing(reason={MARK: 1}),
    **{
        f"a failure of the server's kind {kind}": _failing(error=kind)
        for kind in ("refused", "late", "offline", "crashed", "app")
    },
    "a failure of a kind with an escape sequence": _failing(error=f"{CLEAR}Error"),
    "a failure of a kind in two words": _failing(error="Two words"),
    "a failure of a kind of a megabyte": _failing(error="E" * 2**20),
    "a failure of a kind with half a character": _failing(error=f"E{HALF}"),
    "a failure whose reason has half a character": _failing(reason=f"{MARK}{HALF}"),
    "a failure that took 1e308 seconds": _failing(cost={"seconds": 1e308, "peak_memory_mib": 1, "cpu_seconds": 1}),
    "a failure that took no number of seconds": _failing(
        cost={"seconds": float("nan"), "peak_memory_mib": 1, "cpu_seconds": 1}
    ),
    "a failure whose cost is a list": _failing(cost=[1]),
}
TOLD: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a failure": _failing(),
    "a failure without a cost": said(
        lambda header, arrays: (header.update(kind="failure", error="E", reason="r"), header.pop("cost"))
    ),
    "a failure with an escape sequence": _failing(reason=f"{CLEAR}gone{BIDI}"),
    "a failure with a reason of a megabyte": _failing(reason="x" * 2**20),
    "a failure in many lines": _failing(reason="\n".join("x" * 100)),
    "a failure with arrays": said(lambda header, arrays: header.update(kind="failure", error="E", reason="r")),
}
USED: dict[str, Callable[[bytes, bytes], bytes]] = {
    "the honest reply": lambda honest, earlier: honest,
    "everything ten times": said(every_array(lambda array: array * 10)),
    "everything with another sign": said(every_array(lambda array: -array)),
    "nothing but zeros": said(every_array(torch.zeros_like)),
    "a report of nothing": with_value(("report",), {}),
    "a loss of -5": with_value(("report", "loss"), -5.0),
    "a loss that is no number": with_value(("report", "loss"), float("nan")),
    "a loss that is infinite": with_value(("report", "loss"), float("inf")),
    "a loss of 1e100": with_value(("report", "loss"), 1e100),
    "a report with a name more": with_value(("report", "gewicht.größe/2"), 1.0),
    "200 names in a report": with_value(("report",), {f"n{n}": 1e100 for n in range(200)}),
    "2**31 steps": with_value(("report", "steps"), 2**31),
    "a year": with_value(("cost", "seconds"), 366 * 86400),
    "a pebibyte of memory": with_value(("cost", "peak_memory_mib"), 2**30),
    "more in its header": said(lambda header, arrays: header.update(more=nested(5))),
    "more in its cost": with_value(("cost", "bytes_up"), 10**15),
}
SCORES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "the reply to an earlier request": lambda honest, earlier: earlier,
    "an update": with_value(("kind",), "update"),
    "an accuracy of -7": with_value(("metrics", "accuracy"), -7.0),
    "an accuracy of 1.001": with_value(("metrics", "accuracy"), 1.001),
    "an accuracy of 85": with_value(("metrics", "accuracy"), 85),
    "a balanced accuracy of 2": with_value(("metrics", "balanced_accuracy"), 2.0),
    "an accuracy of two on some": with_value(("metrics", "accuracy of de"), 2.0),
    "others' accuracy of -1": with_value(("metrics", "others"), -1.0),
    "a loss of 1e101": with_value(("metrics", "loss"), 1e101),
    "no examples": with_value(("examples",), 0),
    "more examples than it has": with_value(("examples",), 10**6),
    "3.0 examples": with_value(("examples",), 3.0),
    "more examples of some than of all": with_value(("metrics", "examples of de"), 10**6),
    "half an example of some": with_value(("metrics", "examples of de"), 0.5),
    "arrays with a score": said(lambda header, arrays: arrays.update({MARK: torch.ones(2)})),
    "1001 metrics": said(lambda header, arrays: header["metrics"].update({f"m{n}": 1 for n in range(1001)})),
    **{
        f"a metric {name[:20]!a}": with_value(("metrics", name), 1.0)
        for name in (*NAMES, "updates", "adapter", "diagnostics", "seconds", "reason", "bytes_up", "a b c")
    },
}
SCORES_USED: dict[str, Callable[[bytes, bytes], bytes]] = {
    "the honest score": lambda honest, earlier: honest,
    "another metric first": said(
        lambda header, arrays: header.update(metrics={"zzz": 3.0, "accuracy": 0.5, "loss": -1e100})
    ),
    "an accuracy of 1": with_value(("metrics", "accuracy"), 1),
    "the headline alone": with_value(("metrics",), {"accuracy": 0.0}),
    "a metric of some": with_value(("metrics", "accuracy of <b>中文</b>"), 0.5),
    "one example": with_value(("examples",), 1),
}
HELLOS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "an update": with_value(("kind",), "update"),
    "a client of 201 letters": with_value(("client",), "a" * 201),
    "a backbone in two words": with_value(("backbone",), "a b"),
    "two counts": with_value(("examples",), [1, 1]),
    "2**31 examples": with_value(("examples",), [2**31, 1, 1]),
    "3.0 examples": with_value(("examples",), [3.0, 1, 1]),
    "true examples": with_value(("examples",), [True, 1, 1]),
    "a version of HTML": with_value(("version",), "<b>1</b>"),
}
EXPORTS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "an update": with_value(("kind",), "update"),
    "another client": with_value(("client",), "client-00"),
    "half a character": with_value(("kind",), HALF),
}

CORPUS: tuple[Lie, ...] = (
    *_lies("train", BYTES),
    *_lies("train", {name: said(change) for name, change in ARRAYS.items()}),
    *_fields("train", TRAIN_FIELDS),
    *_lies("train", TRAIN),
    *_lies("train", FAILURES),
    *_lies("train", TOLD, "failure"),
    *_lies("train", USED, "used"),
    *_fields("score", SCORE_FIELDS),
    *_lies("score", SCORES),
    *_lies("score", SCORES_USED, "used"),
    *_fields("hello", HELLO_FIELDS),
    *_lies("hello", HELLOS),
    *_lies("export", EXPORTS),
)
# One of every sort, for where each of them takes a while.
FEW = (
    "train: a table of five megabytes",
    "train: a header with two protocols",
    "train: a header that nests without end",
    "train: cut at 4 of 8",
    "train: a pickle that calls",
    "train: protocol is half a character",
    "train: protocol is two megabytes of text",
    "train: report.steps is an infinite number",
    "train: report.steps is no number",
    "train: cost.seconds is 1e308",
    "train: the reply to an earlier request",
    "train: another client",
    "train: a score",
    "train: an array of a name of ten megabytes",
    "train: 20,000 empty arrays",
    "train: NaN",
    "train: everything a million times",
    "train: a failure with an escape sequence",
    "score: an accuracy of -7",
    "score: more examples than it has",
)
