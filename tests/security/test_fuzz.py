"""A few hundred inputs of every kind: see `fuzz.py`, and `make fuzz MINUTES=10` for more."""

import random
from pathlib import Path

import pytest

from tests.security.fuzz import KINDS, Kind, feed, fuzz, main, watched

INPUTS = {"models": 40}  # the others are a hundred times faster


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_read_is_accepted_or_refused(kind: str, tmp_path: Path) -> None:
    found: list[str] = []
    count = fuzz(kind, 0, 0, lambda done: done < INPUTS.get(kind, 250), tmp_path, found.append, 20)
    assert not found
    assert count.accepted and count.refused and count.accepted + count.refused == count.inputs


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, again = (KINDS["data"](folder) for folder in folders)
    draws = [
        [kind.change(random.Random(f"0 {n}"), kind.seeds[n % 8], kind.seeds) for n in range(40)]
        for kind in (first, again)
    ]
    assert draws[0] == draws[1]


def test_a_crash_a_hang_and_a_pickle_are_found_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Else a fuzz without findings would mean nothing."""
    import torch

    def read(files: dict[str, bytes]) -> None:
        match files["a"]:
            case b"crash":
                raise KeyError("x")
            case b"hang":
                while True:
                    pass
            case b"pickle":
                try:
                    torch.load("x")
                except Exception:
                    return

    monkeypatch.setattr("tests.security.fuzz.SECONDS", 0.05)
    inputs = iter([b"crash", b"hang", b"pickle", b"sound"])
    kind = Kind([{"a": b"seed"}], lambda rng, files, seeds: {"a": next(inputs)}, read)
    monkeypatch.setattr("tests.security.fuzz.KINDS", {"data": lambda folder: kind})
    assert main(["--inputs", "4", "--only", "data", "--out", str(tmp_path)]) == 1
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:6] == ["data", "4", "1", "0", "2", "1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data-0-0", "data-0-1", "data-0-2"]
    assert (tmp_path / "data-0-0/a").read_bytes() == b"crash" and "KeyError" in (
        tmp_path / "data-0-0/why.txt"
    ).read_text()
    with watched():
        assert feed(read, {"a": b"sound"}, 20) == ("accepted", "")
