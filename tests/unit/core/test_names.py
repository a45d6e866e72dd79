"""Ids of clients and the folders behind them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from befit.core.errors import DataError
from befit.core.names import LONGEST, folder_name, id_problems, is_id
from befit.core.text import visible
from befit.core.yamlfile import parse_yaml
from befit.runs.artifacts import predict
from befit.runs.exporting import export
from befit.runs.peft_io import _card
from befit.runs.runner import run
from tests.files import load_files
from tests.unit.models.tiny_models import save_bert

IDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=LONGEST).filter(is_id)


@given(IDS, IDS)
def test_different_ids_have_different_safe_names(one: str, other: str) -> None:
    assert (folder_name(one) == folder_name(other)) == (one == other)
    assert re.fullmatch(r"[A-Za-z0-9_%-][A-Za-z0-9._%+-]*", name := folder_name(one)) and not name.endswith(".")
    assert len(name) <= 150


@given(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,147}[A-Za-z0-9_-]", fullmatch=True))
def test_a_plain_id_is_its_own_name(plain: str) -> None:
    assert folder_name(plain) == plain


def test_long_ids_that_differ_at_the_end_alone_have_different_names() -> None:
    names = {folder_name("ü" * 199 + letter) for letter in "abc"} | {folder_name("ü" * 199)}
    assert len(names) == 4 and {len(name) for name in names} == {150}


@pytest.mark.parametrize(
    "ids, words",
    [
        ([""], ["'' is no client's id: it must be a printable name of at most 200 letters"]),
        (["a\x1b[2J"], ["'a\\x1b[2J' is no client's id"]),
        (["a\u202eb"], ["'a\\u202eb' is no client's id"]),
        (["a ", " a"], ["'a ' is no client's id", "' a' is no client's id"]),
        (["x" * 201], ["'xxxxxxxxxxxxxxxxxxxx'… (201 letters) is no client's id"]),
        (["Straße", "STRASSE"], ["'Straße' and 'STRASSE' are the same name but for case"]),
        (["Zo\u00eb", "Zoe\u0308"], ["are the same name but for case or the way of writing accents"]),
        (["a", "b", "a/b", "..", "x" * 200], []),
    ],
)
def test_ids_that_cannot_be_are_refused_with_one_sentence(ids: list[str], words: list[str]) -> None:
    problems = id_problems(ids)
    assert len(problems) == len(words) and all(word in problem for word, problem in zip(words, problems, strict=True))


def test_nothing_visible_is_changed_and_nothing_else_is_left() -> None:
    kept = "naïve\u00a0東京 می\u200cخواهم 👩\u200d🔬\n\tend"
    assert visible(kept) == kept
    assert visible("\x1b\x9b\x07\u202e\u2066\u2028\ufeff") == r"\x1b\x9b\x07\u202e\u2066\u2028\ufeff"


def test_a_client_may_not_have_the_name_of_the_public_records(tmp_path: Path) -> None:
    write(tmp_path / "public records.jsonl")
    with pytest.raises(DataError, match="client public records: this is what befit calls"):
        load_files(tmp_path, task="text-classification")


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": f"{word} {number}", "label": word} for word in ("good", "bad``` `x`") for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_card_is_of_the_base_model_whatever_that_is_called() -> None:
    name = "a: b #c\n---\n"
    _, head, _ = _card(name, "note", "AutoModel", []).split("---\n", 2)
    assert parse_yaml(head)["base_model"] == name


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_whose_clients_have_any_names(store: str, tmp_path: Path) -> None:
    """From their files to their adapters, also when it is stopped and resumed. What an adapter's card says of the names
    ends no block of code, and tells no place of this machine."""
    names = ["東京/病院 [3]", "all", "../Köln", "+1", "n" * 200]
    newcomer = "*neu* <b>"
    config: dict[str, Any] = {
        "name": "names",
        "model": {"id": str(save_bert(tmp_path / "secret" / "bert"))},
        "data": {
            "task": "text-classification",
            "clients": {name: str(write(tmp_path / "data" / f"{place}.jsonl")) for place, name in enumerate(names)},
            "newcomers": {newcomer: str(write(tmp_path / "data" / "new.jsonl"))},
        },
        "method": "potara",
        "baselines": [],
        "train": {"max_steps": 1},
        "federation": {"rounds": 2},
        "evaluate": {"newcomers": True},
        "engine": {"store": store},
        "checkpoint": {"every_s": 0},
        "report": {"plots": False},
    }

    def stop(event: dict[str, Any]) -> None:
        if (event["kind"], event.get("round"), event.get("done")) == ("client", 2, 3):
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config, out=out, observer=stop)
    done = run(config, out=out, resume=True)
    assert list(done.results["clients"]) == names
    folders = {path.parent for path in out.rglob("deployment.safetensors")}
    assert folders == {out / "clients" / folder_name(name) for name in names} | {
        out / "newcomers" / folder_name(newcomer)
    }
    for client in (names[0], names[-1], newcomer):
        assert len(predict(out, client, ["good 1"])) == 1
        card = (export(out, client, tmp_path / folder_name(client)) / "README.md").read_text()
        assert card.count("```") == 2 and "secret" not in card and "<b>" not in card
    config_of = json.loads((tmp_path / folder_name(newcomer) / "adapter_config.json").read_text())
    assert config_of["base_model_name_or_path"] == "bert"
