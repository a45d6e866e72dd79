"""Hostile files, each with the one sentence that refuses it: in time, without a traceback, without a pickle opened."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file

from befit.config.load import load_experiment
from befit.core.storage import read_json
from befit.core.wire import from_bytes
from befit.core.yamlfile import parse_yaml
from befit.data.files.readers import read_rows
from befit.data.files.records import items_of
from befit.merge.checkpoint import open_checkpoint
from befit.merge.files import merge_checkpoints
from befit.merge.merge import Merge
from befit.models.backbone import load_backbone, load_shapes
from befit.runs.inputs import read_inputs
from befit.tasks.images import ImagePreprocessor
from tests.security.fuzz import Opened, feed, watched
from tests.unit.models.tiny_models import Settings, save_bert, save_vit


def outcome(read: Callable[[], object]) -> tuple[str, str]:
    with watched():
        return feed(lambda files: read() and None, {}, 20)


def refused(read: Callable[[], object], *words: str) -> None:
    """It is refused in time, by an error of befit's that says these words and not much else."""
    became, text = outcome(read)
    assert became == "refused", text
    for each in words:
        assert each in text
    assert len(text) < 1500 and text.replace("\n", " ").isprintable()


# --- YAML


def bomb(value: str, key: str = "a", levels: int = 9) -> str:
    """Nine lines, each of which repeats the line before nine times."""
    lines = [f"{key}0: &n0 {value}"]
    for level in range(1, levels):
        names = ", ".join([f"*n{level - 1}"] * 9)
        inner = f"[{names}]" if value.startswith("[") else f"{{<<: [{names}], k{level}: 1}}"
        lines.append(f"{key}{level}: &n{level} {inner}")
    return "\n".join(lines) + f"\nbaselines: *n{levels - 1}\n"


YAML = {
    "aliases of aliases": (bomb("[x]"), "more than 30000 values"),
    "merges of merges": (bomb("{x: 1}"), "more than 30000 values"),
    "an alias within what it names": ("a: &a [*a]", "the alias *a stands within what it names"),
    "900 lists": ("a: " + "[" * 900 + "]" * 900, "line 1, column 67: is nested more than 64 levels deep"),
    "5000 lists": ("[" * 5000 + "]" * 5000, "nested more than 64 levels"),
    "5000 dashes": ("- " * 5000 + "x", "nested more than 64 levels"),
    "900 lines, each deeper": ("\n".join(" " * n + "-" for n in range(900)), "nested more than 64 levels"),
    "3000 mappings": ("{a: " * 3000 + "1" + "}" * 3000, "nested more than 64 levels"),
    "5000 digits": ("a: " + "1" * 5000, "line 1, column 4: holds a whole number of 5000 digits"),
    "two million characters": ("# " + "x" * 2_000_000, "more than 1000000 characters"),
    "40,000 values": ("[" + "1," * 40_000 + "]", "more than 30000 values"),
    "a key twice": ("a: 1\na: 2", "line 2, column 1: the key 'a' appears twice"),
    "an anchor twice": ("a: &a 1\nb: &a 2", "the anchor &a names two values"),
    "a tag that runs code": ("a: !!python/object/apply:os.system [x]", "the tag tag:yaml.org,2002:python/object"),
    "a number that is none": ("a: !!int x", "the tag tag:yaml.org,2002:int is not read here"),
    "a date that is none": ("a: !!timestamp x", "the tag tag:yaml.org,2002:timestamp is not read here"),
    "a bool that is none": ("a: !!bool x", "the tag tag:yaml.org,2002:bool is not read here"),
    "half a surrogate pair": (r'a: "\ud800"', "line 1, column 7: found invalid Unicode character"),
    "a character beyond Unicode": (r'a: "\U00ffffff"', "line 1, column 7: found invalid Unicode character"),
    "NUL, escaped": (r'a: "\0"', r"line 1, column 4: holds \u0000, which is no text"),
    "NUL": ("ä: ääää\nb: \0\nc:\nd:\ne:\n", r"line 2: holds \u0000, which is no text"),
    "half a surrogate pair as it is": ("a: ä\nb: \ud800", r"line 2: holds \ud800, which is no text"),
    "a tab before a key": ("a:\n\tb: 1", "line 2, column 1: a tab, where YAML takes blanks alone"),
    "a long alias of nothing": ("a: *" + "z" * 100_000, "found undefined alias"),
    "a list as a key": ("? [a, b]\n: 1", "the key of a sequence is not text"),
}


@pytest.mark.parametrize("name", YAML)
def test_yaml(name: str) -> None:
    text, words = YAML[name]
    refused(lambda: parse_yaml(text), "ConfigError: 1 problem in the configuration\n  ", words)


def test_a_configuration_that_is_no_utf_8_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"name: \xff")
    refused(lambda: load_experiment(tmp_path / "a.yaml"), "a.yaml\n  cannot be read as UTF-8 text")


def test_what_people_write_stays_readable() -> None:
    """Anchors, merges, and a client for each of five thousand lines."""
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}") == {"a": {"x": 1}, "b": {"x": 1, "y": [{"x": 1}] * 2}}
    assert parse_yaml("[" * 64 + "]" * 64) and parse_yaml(f"a: {'9' * 100}") == {"a": int("9" * 100)}
    clients = {f"client-{number}": f"data/{number}.jsonl" for number in range(5000)}
    assert parse_yaml("".join(f"{key}: {value}\n" for key, value in clients.items())) == clients


# --- JSON

JSON = {
    "100,000 lists": (b"[" * 100_000, "is not JSON"),
    "900 mappings": (b'{"a":' * 900 + b"1" + b"}" * 900, "nested more than 64 levels"),
    "65 lists": (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 levels"),
    "5000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "a whole number of 5000 digits"),
    "400 digits": (b'{"a": 1' + b"0" * 400 + b"}", "a whole number of 401 digits"),
    "no UTF-8": (b'{"a": "\xff"}', "is not UTF-8 text"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text"),
    "NUL": (b'{"a": "\0"}', "is not JSON (Invalid control character"),
    "nothing": (b"", "is not JSON"),
}


@pytest.mark.parametrize("name", JSON)
def test_json_of_every_reader(name: str, tmp_path: Path) -> None:
    """A file of a run, records as lines and as a list, and inputs to predict from."""
    data, words = JSON[name]
    deep = b"[" * 100_000
    words = "nested more than 64 levels" if data == deep else words
    for file in ("run.json", "a.json", "a.jsonl"):
        (tmp_path / file).write_bytes(data)
    refused(lambda: read_json(tmp_path / "run.json"), f"RunError: {tmp_path / 'run.json'}: ", words)
    if data:
        refused(lambda: read_rows(tmp_path / "a.json", ()), f"DataError: {tmp_path / 'a.json'}: ")
        refused(lambda: read_rows(tmp_path / "a.jsonl", ()), f"DataError: {tmp_path / 'a.jsonl'}, line 1: {words}"[:60])
        refused(lambda: read_inputs([tmp_path / "a.jsonl"], "text-classification", {}), "DataError: ")


def test_half_a_surrogate_pair_is_refused_where_it_would_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"a": "\\ud800"}')
    refused(lambda: read_json(tmp_path / "run.json"), r"holds \ud800, half of a surrogate pair")
    (tmp_path / "run.json").write_bytes(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "run.json") == {"a": "\N{GRINNING FACE}"}


# --- records


def test_a_gzip_bomb_is_refused_and_ordinary_records_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"0" * 30_000_000 + b'"}', 1))
    refused(
        lambda: read_rows(path, ("text",)),
        f"{path} unpacks to more than 100 times its size",
        "run gunzip and name the unpacked file",
    )
    rows = [{"text": f"the film is {number} times as good as the book", "label": number % 2} for number in range(5_000)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode(), 9))
    assert len(read_rows(path, ("text",))) == 5_000


def test_a_file_of_mistakes_is_given_up_after_a_thousand(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[]\n" * 1_000_000)
    refused(lambda: read_rows(path, ()), "reading stopped here")


def parquet_with(path: Path, column: pyarrow.Array, name: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({name: column}), path)
    return path


def test_parquet_whose_text_is_no_utf_8_is_named_with_its_column(tmp_path: Path) -> None:
    broken = pyarrow.array([b"sound", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    path = parquet_with(tmp_path / "a.parquet", broken)
    refused(lambda: read_rows(path, ("text",)), f"DataError: {path}: its column text cannot be read")
    assert len(read_rows(path, ())) == 2  # a column that nobody asks for may be broken


def test_parquet_of_more_rows_than_a_file_of_its_size_has_is_refused(tmp_path: Path) -> None:
    path = parquet_with(tmp_path / "a.parquet", pyarrow.nulls(3_000_000, pyarrow.int8()))
    refused(lambda: read_rows(path, ("text",)), "save it as .jsonl")
    numbers = pyarrow.array([0] * 20_000, pyarrow.int32())
    repeated = pyarrow.DictionaryArray.from_arrays(numbers, ["x" * 20_000])
    for column in (repeated, repeated.dictionary_decode()):
        parquet_with(path, column)
        refused(lambda: read_rows(path, ("text",)), "unpacks to more than 100 times its size")


@pytest.mark.parametrize("damage", ["cut", "page", "footer"])
def test_damaged_parquet_is_one_sentence(damage: str, tmp_path: Path) -> None:
    path = parquet_with(tmp_path / "a.parquet", pyarrow.array([f"text {n}" for n in range(2000)]))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        at = 40 if damage == "page" else len(data) - 60
        data[at : at + 30] = b"\xff" * 30
    path.write_bytes(data)
    refused(lambda: read_rows(path, ("text",)), f"DataError: {path}")


@pytest.mark.parametrize(
    "notes", ["[]", '{"info": 3}', '{"info": {"features": {"text": {"_type": "ClassLabel"}}}}', "{" * 1000, "\\ud800"]
)
def test_damaged_notes_of_datasets_in_parquet(notes: str, tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a"]}).replace_schema_metadata({"huggingface": notes})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    refused(lambda: read_rows(tmp_path / "a.parquet", ("text",)), "notes of datasets")


def test_a_thousand_columns_make_a_short_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",".join(f"{'c' * 500}{n}" for n in range(1000)) + "\n" + ",".join(["1"] * 1000))
    rows = read_rows(path, ("text",))
    became, text = outcome(lambda: items_of(rows, "text-classification", {}))
    assert became == "refused" and "and 980 more" in text and len(text) < 10_000


CSV = {
    "a quote that is not closed": b'text,label\n"a,1\nb,2\n',
    "no UTF-8 in a name": b"te\xffxt,label\na,1\n",
    "no UTF-8 in a value": b"text,label\n\xff,1\n",
    "rows of different length": b"text,label\na\n",
}


@pytest.mark.parametrize("name", CSV)
def test_csv(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(CSV[name])
    refused(lambda: read_rows(tmp_path / "a.csv", ("text", "label")), f"DataError: {tmp_path / 'a.csv'}")


@pytest.mark.parametrize("value", ["[1]", "{}", "null", "1.5", '""', '{"a": [[]]}', '"\\ud800"'])
def test_labels_of_odd_types_are_named_with_their_line(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x", "label": {value}}}\n')
    rows = read_rows(tmp_path / "a.jsonl", ())
    refused(lambda: items_of(rows, "text-classification", {}), f"DataError: {tmp_path / 'a.jsonl'}, line 1: ")


@pytest.mark.parametrize(
    "fields",
    [
        {"conversations": []},
        {"conversations": "x" * 10_000},
        {"conversations": [{"from": ["human"], "value": "a"}]},
        {"conversations": [{"role": {}, "content": "a"}]},
        {"conversations": [[]]},
        {"messages": [{"from": "human", "value": 1}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "choices": [1]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "metric": [1]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "form": {}},
        {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}], "image": "\0"},
        {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}], "image": {"path": 3}},
    ],
)
def test_questions_of_odd_types_are_named_with_their_line(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(fields))
    rows = read_rows(tmp_path / "a.jsonl", ())
    refused(lambda: items_of(rows, "vqa", {}), f"DataError: {tmp_path / 'a.jsonl'}, line 1: ")


# --- pictures


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


PICTURES: dict[str, Callable[[], bytes]] = {
    "60 million pixels in 170 kB": lambda: encoded(Image.new("L", (8000, 7500))),
    "200 million pixels": lambda: encoded(Image.new("1", (20_000, 10_000))),
    "half a PNG": lambda: encoded(Image.effect_noise((64, 64), 50))[:2000],
    "half a JPEG": lambda: encoded(Image.effect_noise((64, 64), 50), "JPEG")[:600],
    "PostScript, which needs an interpreter": lambda: encoded(Image.new("L", (8, 8)), "EPS"),
    "text": lambda: b"no picture",
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    data = PICTURES[name]()
    refused(lambda: ImagePreprocessor(3, 8, 8)(data, "a.jsonl, line 1"), "DataError: a.jsonl, line 1: cannot read")


def npy(header: str, body: bytes = b"\0" * 64) -> bytes:
    text = header.encode().ljust(118 - 10 + 9) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


ARRAYS = {
    "a terabyte": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000), }"),
    "objects, which are pickles": npy("{'descr': '|O', 'fortran_order': False, 'shape': (8, 8), }", pickle.dumps([1])),
    "a header of brackets": npy("(" * 5000),
    "a negative shape": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 4), }"),
    "nothing": b"",
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(ARRAYS[name])
    refused(lambda: ImagePreprocessor(1, 8, 8)(str(tmp_path / "a.npy"), "line 1"), "DataError: line 1: ")


# --- adapters

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny", "target_modules": ["q"]}
FACTORS = {"base_model.model.q.lora_A.weight": torch.ones(2, 4), "base_model.model.q.lora_B.weight": torch.ones(4, 2)}


def adapter(folder: Path, config: dict[str, Any] | bytes | None = None, weights: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps({**LORA, **(config or {})}).encode()
    (folder / "adapter_config.json").write_bytes(text)
    data = weights if isinstance(weights, bytes) else save({**FACTORS, **(weights or {})})
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder


CONFIGS: dict[str, tuple[Any, str]] = {
    "a pattern with an open group": ({"rank_pattern": {"(": 4}}, "rank_pattern: the pattern '(' has a ( without its )"),
    "a pattern that takes for ever": (
        {"rank_pattern": {"(([a-z.0-9_])+)+!": 4}},
        "rank_pattern: the pattern '(([a-z.0-9_])+)+!' has a repetition within another",
    ),
    "a back reference": ({"alpha_pattern": {r"(a)\1": 4}}, "alpha_pattern: the pattern"),
    "a pattern of a thousand groups": ({"rank_pattern": {"(" * 200 + ")" * 200: 4}}, "has more than 20 groups"),
    "a pattern of 9000 characters": ({"rank_pattern": {"q" * 9000: 4}}, "has 9000 characters"),
    "an alpha of 401 digits": ({"lora_alpha": 10**400}, "a whole number of 401 digits"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha must be positive"),
    "an infinite alpha of a module": (
        {"alpha_pattern": {"q": float("inf")}},
        "alpha_pattern must map names to positive",
    ),
    "a rank that is no number": ({"r": float("nan")}, "r must be a whole number from 1 on"),
    "a negative rank": ({"r": -2}, "r must be a whole number from 1 on"),
    "a configuration of 900 levels": (b'{"a":' * 900 + b"1" + b"}" * 900, "nested more than 64 levels"),
    "a configuration of 8 MiB": (b" " * 2**23, "8388608 bytes"),
    "a list": (b"[]", "must hold a mapping"),
    "no UTF-8": (b"\xff", "is not UTF-8 text"),
    "long values": ({"use_dora": "x" * 10_000}, "use_dora is"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_of_adapters(name: str, tmp_path: Path) -> None:
    config, words = CONFIGS[name]
    folder = adapter(tmp_path / "a", config)
    refused(lambda: open_checkpoint(folder), words)
    refused(lambda: open_checkpoint(folder), str(folder))


WEIGHTS: dict[str, tuple[Any, str]] = {
    "a header of 2^63 bytes": ((2**63 - 1).to_bytes(8, "little") + b"{}", "no safetensors file"),
    "an array beyond the file": (
        (lambda h: len(h).to_bytes(8, "little") + h)(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
        "no safetensors file",
    ),
    "an absurd shape": (
        (lambda h: len(h).to_bytes(8, "little") + h)(
            b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,0]}}' % 2**62
        ),
        "no safetensors file",
    ),
    "a pickle": (pickle.dumps(FACTORS["base_model.model.q.lora_A.weight"]), "no safetensors file"),
    "factors that do not multiply": (
        {"base_model.model.q.lora_A.weight": torch.ones(3, 4)},
        "only matrices that multiply",
    ),
    "factors of whole numbers": (
        {"base_model.model.q.lora_A.weight": torch.ones(2, 4, dtype=torch.int8)},
        "is of type I8; convert it to F64, F32, F16, BF16",
    ),
    "factors of 8 bits": (
        {"base_model.model.q.lora_A.weight": torch.ones(2, 4).to(torch.float8_e4m3fn)},
        "is of type F8_E4M3; convert it",
    ),
    "a rank that the configuration denies": (
        {"base_model.model.q.lora_A.weight": torch.ones(3, 4), "base_model.model.q.lora_B.weight": torch.ones(4, 3)},
        "has rank 3, adapter_config.json says 2",
    ),
    "a hundred arrays of no adapter": ({f"lora_{n}": torch.ones(1) for n in range(100)}, "and 80 more"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_adapters(name: str, tmp_path: Path) -> None:
    weights, words = WEIGHTS[name]
    folder = adapter(tmp_path / "a", weights=weights)
    became, text = outcome(lambda: open_checkpoint(folder))
    assert became == "refused" and words in text and str(folder) in text


def test_numbers_whose_product_is_not_finite_are_one_sentence(tmp_path: Path) -> None:
    """Such as those of an alpha of 1e308, which is finite, and no float32."""
    folders = [adapter(tmp_path / "a", {"lora_alpha": 1e308}), adapter(tmp_path / "b")]
    refused(lambda: merge_checkpoints(folders, tmp_path / "out", Merge(space="knots")), "too large to multiply", "a: ")


def test_many_patterns_for_many_modules_are_refused_before_they_are_matched(tmp_path: Path) -> None:
    weights = {
        f"base_model.model.{'a.' * 40}{n}.lora_{side}.weight": torch.ones(*shape, 1)[..., 0]
        for n in range(500)
        for side, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    folder = adapter(tmp_path / "a", {"rank_pattern": {"a." * 40 + f"x{n}": 4 for n in range(5000)}}, save(weights))
    refused(lambda: open_checkpoint(folder), "5000 patterns for 500 modules take too long to match")


# --- frames


def framed(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def test_a_frame_without_metadata_is_read_as_one() -> None:
    """An older library writes null for none."""
    assert from_bytes(framed(b'{"__metadata__":null}')) == ({}, {})


FRAMES = {
    "900 lists": framed(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
    "an unknown type": framed(b'{"a":{"dtype":"X9","shape":[0],"data_offsets":[0,0]}}'),
    "a type that torch has not": framed(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"\0"),
    "a length of 2^64": b"\xff" * 8 + b"{}",
    "nothing": b"",
    "metadata of a number": framed(b'{"__metadata__":{"header":1}}'),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames(name: str) -> None:
    refused(lambda: from_bytes(FRAMES[name], "a reply"), "PayloadMismatch: a reply is not a readable safetensors file")


# --- models


class Canary:
    """A pickle that writes a file where it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def index(folder: Path, name: Any) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    names = dict.fromkeys(load_file(folder / "one.safetensors"), "one.safetensors")
    names[min(names)] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def config(**values: Any) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder / "config.json", lambda said: said.update(values))


def with_file(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def embedded_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**LORA, "base_model_name_or_path": str(folder.parent)}))
    (folder / "adapter_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes())


def own_index(folder: Path) -> None:
    index(folder, "evil.bin")
    (folder / "model.safetensors.index.json").rename(folder / "own.safetensors.index.json")
    (folder / "one.safetensors").rename(folder / "model.safetensors")
    config(transformers_weights="own.safetensors.index.json")(folder)


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "pytorch_model.bin").read_bytes())


def not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(
        {key: value * float("nan") for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"] = torch.ones(3, 5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
AUTO = {"AutoConfig": "evil.C", "AutoModelForSequenceClassification": "evil.M", "AutoTokenizer": ["evil.T", None]}
# What is done to a sound folder, and words of the refusal; None where the hostile part is ignored.
MODELS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "a pickle beside the weights": (lambda folder: None, None),
    "a pickle alone": (only_pickle, "cannot be read safely"),
    "a pickle called model.safetensors": (pickled_weights, "cannot be loaded"),
    "an index that names a pickle": (lambda folder: index(folder, "evil.bin"), "names 'evil.bin'; weights must be"),
    "an index that names the folder above": (lambda f: index(f, "../x.safetensors"), "names '../x.safetensors'"),
    "an index that names a folder below": (lambda f: index(f, "sub/x.safetensors"), "names 'sub/x.safetensors'"),
    "an index that names any place": (lambda f: index(f, str(f / "one.safetensors")), "weights must be .safetensors"),
    "an index that names a number": (lambda folder: index(folder, 3), "names 3; weights must be"),
    "an index of 5000 levels": (
        lambda f: (only_pickle(f), with_file("model.safetensors.index.json", DEEP)(f)),
        "has a damaged model.safetensors.index.json",
    ),
    "a configuration of 16 MiB and a byte": (with_file("config.json", b" " * (2**24 + 1)), "at most 16777216 are read"),
    "code for the configuration": (config(auto_map=AUTO), None),
    "code for an unknown type": (config(auto_map=AUTO, model_type="evil"), "config.json describes no model"),
    "code for the tokenizer": (
        lambda f: rewrite(f / "tokenizer_config.json", lambda said: said.update(auto_map=AUTO, tokenizer_class="T")),
        None,
    ),
    "a configuration that names a pickle": (
        config(transformers_weights="adapter_model.bin"),
        "has transformers_weights",
    ),
    "a configuration that names an index": (own_index, "has transformers_weights"),
    "a configuration that names code of the hub": (config(attn_implementation="evil/kernel"), "attn_implementation"),
    "an adapter within": (embedded_adapter, "has adapter_config.json"),
    "weights that are not finite": (not_finite, None),
    "weights of other shapes": (other_shapes, "are absent or of another shape"),
    "a configuration of 5000 levels": (with_file("config.json", DEEP), "config.json: is nested more than 64 levels"),
    "a configuration that is a list": (with_file("config.json", b"[]"), "it must be a mapping"),
    "a configuration that is no text": (with_file("config.json", b"\xff"), "config.json: is not UTF-8 text"),
    "5000 digits": (with_file("config.json", b'{"hidden_size": ' + b"1" * 5000 + b"}"), "5000 digits"),
    "a size that is text": (config(hidden_size="many"), "hidden_size"),
    "a size that is a list": (config(hidden_size=[16]), "hidden_size"),
    "labels that are a list": (config(id2label=["a", "b"]), ""),
    "labels of no number": (config(id2label={"a": "b"}), ""),
    "a type that is a number": (config(model_type=3), ""),
    "a type that is a list": (config(model_type=["bert"]), ""),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers: 1000000000, and at most 500 are built"),
    "a billion labels": (config(num_labels=10**9), "num_labels: 1000000000, and at most 1000000 are built"),
    "heads that do not divide": (config(num_attention_heads=0), "cannot be"),
    "a tokenizer of 5000 levels": (with_file("tokenizer.json", DEEP), "its tokenizer cannot be loaded"),
    "a tokenizer of another kind": (with_file("tokenizer.json", b'{"model": {"type": "X"}}'), "its tokenizer cannot"),
    "settings of the tokenizer that are a list": (with_file("tokenizer_config.json", b"[]"), "its tokenizer cannot"),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save_bert(tmp_path_factory.mktemp("bert"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", MODELS)
def test_model_folders(name: str, bert: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder has pickles and code that write a file when they are opened or run."""

    def opened(*arguments: Any, **named: Any) -> None:
        raise Opened

    change, words = MODELS[name]
    canary, folder = tmp_path / "canary", tmp_path / "model"
    folder.mkdir()
    for file, data in bert.items():
        (folder / file).write_bytes(data)
    for file in ("pytorch_model.bin", "evil.bin", "training_args.bin"):
        torch.save(Canary(canary), folder / file)
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    change(folder)
    for module, function in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, function, opened)
    settings = Settings(str(folder))
    became, text = outcome(lambda: load_backbone(settings, "text-classification", ("neg", "pos"), 0))
    assert not canary.exists()
    assert became == ("accepted" if words is None else "refused"), text
    if words is not None:
        assert text.startswith("ModelError: ") and str(folder) in text and words in text and len(text) < 1500
        became, text = outcome(lambda: load_shapes(settings, "text-classification", ("neg", "pos"), "id"))
        assert became in ("accepted", "refused"), text


@pytest.mark.parametrize("data", [DEEP, b"[]", b"\xff", b'{"size": "large"}', b'{"image_processor_type": 3}'])
def test_image_processors(data: bytes, tmp_path: Path) -> None:
    folder = save_vit(tmp_path / "vit")
    (folder / "preprocessor_config.json").write_bytes(data)
    became, text = outcome(lambda: load_backbone(Settings(str(folder)), "image-classification", ("a", "b"), 0))
    assert became == "refused" and f"{folder}: its image processor" in text, text
