"""`befit partition`: the counts it shows, its JSON, its pictures, and what it refuses."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from befit.cli.main import app
from befit.data.federation import ClientData, Federation
from befit.data.record_counts import count_records
from befit.data.registry import build
from befit.report.partition_map import partition_page, partition_png


def call(*arguments, code=0):
    found = CliRunner().invoke(app, ["partition", *map(str, arguments)])
    assert found.exit_code == code, found.output
    return found


def small():
    a = tuple({"id": f"a{i}", "text": "t", "label": label} for i, label in enumerate([0, 0, 0, 1]))
    b = tuple({"id": f"b{i}", "text": "t", "label": 1} for i in range(2))
    return Federation(
        "two <b>",
        "1",
        "text-classification",
        (ClientData("a", a, (), b), ClientData("b", b)),
        label_names=("no", "yes"),
        newcomers=(ClientData("c", (), (), a),),
    )


def test_counts_are_by_label_and_split():
    seen = count_records(small())
    assert seen.kind == "label" and seen.names == ("no", "yes")
    assert seen.clients[0].counts["train"] == {"no": 3, "yes": 1} and seen.clients[0].largest_share("train") == 0.75
    assert seen.clients[0].sizes == {"train": 4, "val": 0, "test": 2}
    assert seen.newcomers[0].largest_share("train") is None


def test_without_labels_records_are_counted_by_task_or_language_or_not_at_all():
    def made(*records):
        return count_records(Federation("x", "1", "causal-lm", (ClientData("a", records),)))

    assert made({"task": "t", "language": "l"}, {"task": "u", "language": "l"}).names == ("t", "u")
    assert made({"language": "l"}, {"language": "m", "task": "only here"}).kind == "language"
    assert made({"output": "x"}).kind == "records"


def test_json_has_the_counts_of_the_benchmark_itself():
    found = json.loads(call("digits", "alpha=0.1", "--json").stdout)
    expected = build("digits", None, {"alpha": 0.1})
    assert found["partition"]["sha256"] == expected.manifest["partition"]["sha256"]
    for row, client in zip(found["clients"], expected.clients, strict=True):
        labels = np.bincount([record["label"] for record in client.train], minlength=10)
        assert [row["counts"]["train"].get(str(digit), 0) for digit in range(10)] == labels.tolist()


def test_the_table_shows_every_client_with_its_sizes():
    text = call("digits", "alpha=0.1").stdout
    assert re.search(r"client-00 +64 +15 +85 +48% +0 +2 +0 +0 +3 +0 +0 +31 +23 +5", text)
    assert "divided by dirichlet, seed 0, SHA-256 e05bcf13f5ccfad3" in text


def test_a_configuration_gives_the_partition_of_its_run(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{benchmark: {name: digits, clients: 3, alpha: 10.0}, method: fedit}\n")
    found = json.loads(call(path, "benchmark.seed=0", "--json").stdout)
    assert len(found["clients"]) == 3 and found["partition"]["args"]["alpha"] == 10.0


def test_the_page_holds_everything_and_escapes_names(tmp_path):
    page = partition_page(count_records(small()))
    assert "two &lt;b&gt; 1" in page and "<h2>Newcomers</h2>" in page and page.count("<svg") == 2
    assert "75%" in page and not re.search(r'(src|href)="(https?:)?//', page)
    call("digits", "--out", tmp_path / "map.html")
    assert "client-09 (" in (tmp_path / "map.html").read_text()


def test_the_picture_is_darker_where_a_client_has_more(tmp_path):
    """A cell with everything is drawn dark blue, an empty one white."""
    rows = [tuple({"id": f"{i}", "text": "t", "label": at} for i in range(3)) for at in range(2)]
    made = Federation(
        "x",
        "1",
        "text-classification",
        tuple(ClientData(str(at), row) for at, row in enumerate(rows)),
        label_names=("no", "yes"),
    )
    pixels = np.asarray(Image.open(io.BytesIO(partition_png(count_records(made)))).convert("RGB")).astype(int)
    assert (np.abs(pixels - [8, 48, 107]).sum(axis=2) < 12).sum() > 1000  # the darkest of matplotlib's Blues
    call("digits", "--out", tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.format == "PNG"


def test_many_clients_are_cut_in_the_table_and_whole_in_json():
    many = tuple(ClientData(f"c{at}", ({"id": "1", "output": "x"},)) for at in range(100))
    seen = count_records(Federation("x", "1", "causal-lm", many))
    assert len(seen.as_dict()["clients"]) == 100 and partition_png(seen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("digit",), "unknown benchmark 'digit'. Did you mean: digits?"),
        (("digits", "alpah=1"), "benchmark.alpah: unknown key for digits. Did you mean: alpha?"),
        (("digits", "--out", "map.pdf"), "--out: must end in .html or .png, got map.pdf"),
        (("cifar100-10",), "hf download uoft-cs/cifar100"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(arguments, words):
    assert words in " ".join(call(*arguments, code=2).stderr.split())
