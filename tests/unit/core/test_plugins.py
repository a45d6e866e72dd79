"""Plugins: found, run once, run again where they changed, and refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from befit.core.errors import ConfigError, DataError
from befit.core.plugins import came_with, in_plugin, load_plugins, not_returned, plugin_hash, reason_of, resolve_plugins
from befit.data.registry import get as get_benchmark
from befit.protocol.registry import METHODS, get_method, method_names

METHOD = """
from dataclasses import dataclass
import befit

@dataclass(frozen=True)
class Ranks:
    first: int = 2

@befit.register("{name}", title="{title}")
def {name}(rank: int = 4, ranks: Ranks = Ranks()) -> befit.Recipe:
    '''Average. A method of a test.'''
    shared = befit.slot("shared")
    return befit.Recipe(befit.lora(rank, 8.0), befit.Use(("shared",)), (befit.Pass(shared, ("shared",)),), shared)
"""


def write(path: Path, name: str, title: str = "Mine") -> str:
    path.write_text(METHOD.format(name=name, title=title))
    return str(path)


def test_a_file_is_run_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    """Also where the new text is as long as the old one, in the same second."""
    path = tmp_path / "once.py"
    place = write(path, "plugin_once", "First")
    load_plugins([place])
    first = get_method("plugin_once")
    load_plugins([place])
    assert get_method("plugin_once") is first and first.title == "First"
    write(path, "plugin_once", "Other")
    load_plugins([place])
    assert get_method("plugin_once").title == "Other"


def test_a_dataclass_of_a_plugin_is_a_block_of_its_method(tmp_path: Path) -> None:
    load_plugins([write(tmp_path / "block.py", "plugin_block")])
    names = [parameter.name for parameter in get_method("plugin_block").parameters]
    assert names == ["rank", "ranks"]


def test_a_module_is_loaded_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "befit_test_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write(package / "methods.py", "plugin_of_a_lab")
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins(["befit_test_lab.methods"])
    assert "plugin_of_a_lab" in method_names()
    before = plugin_hash("befit_test_lab"), plugin_hash("befit_test_lab.methods")
    (package / "helper.py").write_text("x = 1\n")
    assert plugin_hash("befit_test_lab") != before[0], "a package is hashed with all that is in it"
    assert plugin_hash("befit_test_lab.methods") == before[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import befit_no_such_library\n", "ModuleNotFoundError: No module named 'befit_no_such_library', line 1"),
        ("x = 1\nraise RuntimeError('out of luck')\n", "RuntimeError: out of luck, line 2"),
        ("def broken(:\n", "SyntaxError"),
        ("raise SystemExit('enough')\n", "SystemExit: enough, line 1"),
        (None, "there is no such file"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named_with_the_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_plugins([str(path), str(tmp_path / "absent.py")])
    first, second = caught.value.problems
    assert first.startswith(f"plugins: {path}: {reason}")
    assert second == f"plugins: {tmp_path / 'absent.py'}: there is no such file"


@pytest.mark.parametrize("name", ["befit_no_such_module", "befit_no_such_module.inner"])
def test_a_module_that_is_nowhere_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="Python finds no module befit_no_such_module"):
        load_plugins([name])


def test_what_is_neither_a_file_nor_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plugins: my method: .*dotted name"):
        load_plugins(["my method"])


def test_a_name_of_befit_is_not_taken_from_it_and_both_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "clash.py", "fedit")
    with pytest.raises(ConfigError, match=rf"two methods are called 'fedit': befit\.methods\.fedit and {path}"):
        load_plugins([path])
    assert get_method("fedit").title == "FedIT"


def test_two_plugins_cannot_have_one_name(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.py", "plugin_twin") for name in ("left", "right")]
    with pytest.raises(ConfigError, match=f"two methods are called 'plugin_twin': {paths[0]} and {paths[1]}"):
        load_plugins(paths)


def test_one_plugin_cannot_have_a_name_twice_but_again_after_an_edit(tmp_path: Path) -> None:
    path, text = tmp_path / "copied.py", METHOD.format(name="plugin_copied", title="Copied")
    path.write_text(2 * text)
    with pytest.raises(ConfigError, match="two methods are called 'plugin_copied'"):
        load_plugins([str(path)])
    for edited in (text, f"\n{text}"):
        path.write_text(edited)
        load_plugins([str(path)])


@pytest.mark.parametrize("decorator", ["register", "register_task"])
def test_a_decorator_without_a_name_is_refused_where_it_stands(decorator: str, tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    for line, problem in {f"@befit.{decorator}": "without brackets", f"@befit.{decorator}(5)": "with 5"}.items():
        path.write_text(f"import befit\n{line}\ndef bare(): ...\n")
        with pytest.raises(ConfigError, match=rf"TypeError: @{decorator} stands {problem}.*, line 2"):
            load_plugins([str(path)])


def test_a_benchmark_of_befit_is_not_taken_from_it_either(tmp_path: Path) -> None:
    path = tmp_path / "clash.py"
    path.write_text(
        "import befit\n"
        "@befit.benchmark('digits', '2', summary='', default_model='digits-vit', task='image-classification')\n"
        "def digits() -> befit.Federation: ...\n"
    )
    with pytest.raises(
        ConfigError, match=rf"two benchmarks are called 'digits': befit\.data\.offline\.digits and {path}"
    ):
        load_plugins([str(path)])
    assert get_benchmark("digits").version == "1"


def test_paths_count_from_the_folder_and_modules_stay(tmp_path: Path) -> None:
    assert resolve_plugins(["mine.py", "lab.methods", "./mine.py"], tmp_path) == [
        str(tmp_path / "mine.py"),
        "lab.methods",
    ]


def test_a_plugin_in_a_folder_or_named_by_where_it_lies_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lab = tmp_path / "run", tmp_path / "lab"
    for folder in (run, lab):
        folder.mkdir()
    (run / "befit_test_evil.py").write_text("raise SystemExit")
    (lab / "befit_test_mine.py").write_text("")
    (lab / "evil.py").symlink_to(run / "befit_test_evil.py")
    (tmp_path / "other").symlink_to(run)
    monkeypatch.syspath_prepend(str(run))
    monkeypatch.syspath_prepend(str(lab))
    for name in (str(run / "x.py"), "../evil.py", "evil.py", str(lab / "evil.py"), "befit_test_evil"):
        assert came_with(name, run) and came_with(name, tmp_path / "other")
    for name in (
        str(lab / "mine.py"),
        "befit_test_mine",
        "befit_test_mine.inner",
        "befit_test_absent",
        "my method",
        ".x",
    ):
        assert not came_with(name, run)
    assert "befit_test_evil" not in sys.modules


FAULTY = """
import befit

@befit.register("{name}")
def {name}() -> befit.Recipe:
    return helper()

def helper():
    return {{}}["{name}"]
"""


@pytest.mark.parametrize("kind", ["file", "package"])
def test_an_error_in_a_plugin_names_its_last_line_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"plugin_with_a_faulty_{kind}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text(f"import {name}.inner")
    (package / "inner.py").write_text(FAULTY.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins([str(package / "inner.py") if kind == "file" else name])
    factory = METHODS.pop(name).factory  # which other tests of this process, that make every method, must not meet
    with pytest.raises(KeyError) as caught:
        factory()
    assert in_plugin(caught.value) == f"{package / 'inner.py'}, line 9"
    assert reason_of(caught.value) == f"'{name}' ({package / 'inner.py'}, line 9)"


def test_an_error_that_no_plugin_is_part_of_or_that_is_raised_on_purpose_is_told_as_it_is() -> None:
    with pytest.raises(KeyError) as caught:
        assert {}["nothing"]
    assert in_plugin(caught.value) == "" and reason_of(caught.value) == "'nothing'"
    assert reason_of(DataError("no file")) == "no file"


def test_a_folder_is_no_plugin_and_a_file_in_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "ours.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("lab", str(tmp_path / "lab" / "")):
        with pytest.raises(ConfigError, match=r"is a folder; name a file in it, such as .*lab/ours\.py"):
            load_plugins(resolve_plugins([name], tmp_path))


def test_what_a_factory_returns_in_place_of_what_it_must_is_named() -> None:
    assert not_returned(write, {}, dict) == ""
    assert not_returned(write, 3, dict) == f"write of {__file__} returns a value of type int; it must return a dict"
