"""What `befit.run` and `befit.compare` show of themselves in Python, and what their results look like there."""

from __future__ import annotations

import pytest

import befit

CONFIG = {
    "name": "short",
    "benchmark": {"name": "digits", "clients": 2},
    "limit": {"records": 24},
    "method": {"name": "fedit", "rank": 2},
    "baselines": ["local"],
    "federation": {"rounds": 1},
    "train": {"max_steps": 1},
    "report": {"plots": False},
}
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}  # as rich asks for it


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return befit.run(CONFIG, out=tmp_path_factory.mktemp("run") / "run")


def test_a_run_shows_its_progress_in_a_terminal_only_unless_it_is_to_be_quiet(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    befit.run(CONFIG, out=tmp_path / "no-terminal")
    assert capfd.readouterr() == ("", "")
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
    befit.run(CONFIG, out=tmp_path / "quiet", quiet=True)
    befit.run(CONFIG, out=tmp_path / "observed", observer=lambda event: None)
    assert capfd.readouterr() == ("", "")
    befit.run(CONFIG, out=tmp_path / "terminal")
    out, shown = capfd.readouterr()
    assert out == "" and all(word in shown for word in ("fedit", "local", "done", "100%", "elapsed"))


def test_a_comparison_shows_its_progress_in_a_terminal_only_unless_it_is_to_be_quiet(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    befit.compare(CONFIG, out=tmp_path, seeds=[0])
    assert capfd.readouterr() == ("", "")
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)
    befit.compare(CONFIG, out=tmp_path, seeds=[0], quiet=True)  # its runs are there already
    assert capfd.readouterr() == ("", "")
    compared = befit.compare(CONFIG, out=tmp_path, seeds=[0])
    out, shown = capfd.readouterr()
    assert out == "" and "2 of 2" in shown and "elapsed" in shown
    lines = repr(compared).splitlines()
    assert lines[0].startswith("run ") and len(lines) == 5 and lines[-1] == f"page: {tmp_path / 'compare.html'}"
    assert compared._repr_html_().count("<tr>") == 3


def test_a_run_is_a_short_table_with_the_way_to_its_report(done):
    header, alone, own, empty, last = repr(done).splitlines()
    assert header.split("  ")[0] == "method" and "clients that gained" in header
    assert alone.startswith("Local ") and alone.rstrip().endswith("of 2")
    assert own.startswith("FedIT ") and f"{100 * done.results['summary']['mean']:.1f}%" in own
    assert not empty and last == f"report: {done.path / 'report.html'}"
    assert done._repr_html_().count("<tr>") == 3


def test_a_run_by_itself_has_nobody_to_gain_on(tmp_path):
    shown = repr(befit.run({**CONFIG, "baselines": []}, out=tmp_path))
    assert "gain" not in shown and len(shown.splitlines()) == 4
