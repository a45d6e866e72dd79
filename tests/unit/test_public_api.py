"""What `import befit` gives, what every package says is public, and what importing them does not load."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import befit
from befit.core.lazy import lazy

ROOT = Path(__file__).parents[2]
PACKAGES = ["befit", *(one.name for one in pkgutil.walk_packages(befit.__path__, "befit.") if one.ispkg)]
# What people do, and what a method, a benchmark or a task is written with.
PROMISED = re.findall(
    r"\w+",
    """
    run check compare predict export adapt select merge_checkpoints Experiment load_experiment load_federation Run
    register build_method benchmark register_task Federation ClientData
    Recipe Pass Use Merge LocalTraining Remember Adopt Broadcast LeaveOneOut two_branches
    L2 ProductDistance Distil Tilt Term Laned
    lora whole Layout Slot slot factor module block Selector
    Method Exchange Stage Personal Gradients Needs Deployment Payload Update Tick ClientInfo TensorSpec Site ServerSite
    train_client training Work
    weighted_mean interpolate add scale norm cosine rename select_state
    BefitError ConfigError DataError ModelError PayloadMismatch IncompatibleAdapters NotTrained
    NotEnoughReplies RunError
    """,
)


def test_befit_has_what_is_promised_and_shows_it() -> None:
    assert set(PROMISED) <= set(befit.__all__)
    assert set(befit.__all__) <= set(dir(befit))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_is_public_and_each_name_is_there_with_its_documentation(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__
    assert isinstance(module.__all__, list) and len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismodule(value):
            assert value.__doc__, f"{package}.{name} has no docstring"
            assert not value.__doc__.startswith(f"{name}("), f"{package}.{name} has only a dataclass's own docstring"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_is_lost_when_a_module_of_the_same_name_is_imported(package: str) -> None:
    """Importing `befit.merge` sets the attribute `merge` of befit: a function of that name would be gone."""
    module = importlib.import_module(package)
    below = {one.name for one in pkgutil.iter_modules(module.__path__)}
    find = vars(module).get("__getattr__", partial(getattr, module))  # and not what an import has put in its place
    clashing = {name for name in module.__all__ if name in below and not inspect.ismodule(find(name))}
    assert clashing == set()


def typed_names(module: ModuleType) -> Iterator[str]:
    """What editors and pyright see of a package: the imports under TYPE_CHECKING."""
    assert module.__file__
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                yield from (alias.asname or alias.name for alias in line.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_editors_see_is_what_is_there(package: str) -> None:
    module = importlib.import_module(package)
    eager = {name for name in vars(module) if not isinstance(vars(module)[name], ModuleType)}
    if "__getattr__" in eager:
        assert set(module.__all__) - eager <= set(typed_names(module)) <= set(module.__all__)


def test_a_name_that_is_nowhere_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'befit' has no attribute 'runn'"):
        befit.runn  # type: ignore[attr-defined]  # noqa: B018


def test_a_lazy_name_may_be_called_otherwise_than_in_its_module(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(
        "if TYPE_CHECKING:\n    from befit import core\n    from befit.core.errors import did_you_mean as suggest\n"
    )
    find, _ = lazy("befit", str(tmp_path / "__init__.py"))
    assert find("suggest").__name__ == "did_you_mean"
    assert find("core") is importlib.import_module("befit.core")
    with pytest.raises(AttributeError):
        find("did_you_mean")


def test_run_is_a_function_before_and_after_its_module_is_loaded() -> None:
    first = befit.run
    module = importlib.import_module("befit.runs.runner")
    assert callable(first)
    assert befit.run is first is module.run


def test_importing_befit_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, befit; dir(befit); befit.ConfigError\n"
        "print([name for name in ('torch', 'transformers', 'peft', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def befit_imports(code: str) -> Iterator[str]:
    """Everything of befit that a piece of Python imports, as it is written."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] == "befit")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "befit":
            yield f"from {node.module} import …"


def shown_code() -> dict[str, str]:
    """Every Python block of README and docs, and every example, by where it is."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = {
        f"{page.relative_to(ROOT)}, block {number}": block
        for page in pages
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL), start=1)
    }
    return blocks | {f"examples/{path.name}": path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}


@pytest.mark.parametrize("where", shown_code())
def test_what_people_are_shown_imports_befit_alone(where: str) -> None:
    allowed = {"import befit", "from befit import …"}
    assert set(befit_imports(shown_code()[where])) <= allowed


def test_there_is_code_to_look_at_and_a_deep_import_in_it_would_be_found() -> None:
    assert {
        "README.md, block 1",
        "docs/tutorials/own-method.md, block 1",
        "examples/02_fedit.py",
    } <= shown_code().keys()
    assert set(befit_imports("import befit.runs\nfrom befit.train.loop import Pass")) == {
        "import befit.runs",
        "from befit.train.loop import …",
    }


NAME = re.compile(r"(?<![\w./-])befit(?:\.[A-Za-z_]\w*)+")
GROUP = "befit.benchmarks"  # of entry points, and not a name of Python
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in [*sorted(ROOT.glob("*.md")), *(ROOT / "docs").rglob("*.md")]
    if page.name not in ("start.md", "cli.md", "python.md")  # what docs/conf.py writes from others
}
CONTRIBUTORS = ("CONTRIBUTING.md", "docs/architecture.md", "docs/decisions/")


def names_of(page: str) -> set[str]:
    """Every dotted name of befit on a page, in code, in a block or in a sentence."""
    return set(NAME.findall(page))


def is_public(name: str) -> bool:
    """Whether `import befit` is enough for a name: every package on the way says that it has the next."""
    value: object = befit
    for part in name.split(".")[1:]:
        if isinstance(value, ModuleType) and part not in getattr(value, "__all__", vars(value)):
            return False
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def is_there(name: str) -> bool:
    """Whether a name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def wrong_names(page: str, for_contributors: bool) -> set[str]:
    """Names that are nowhere and, on a page for users, those for which `import befit` is not enough; a page may still
    speak of `the module befit.a.b`."""
    modules = set(re.findall(rf"the module\s+`({NAME.pattern})`", page))
    names = {name for name in names_of(page) - {GROUP} if not is_public(name)}
    return {name for name in names if not (is_there(name) and (for_contributors or name in modules))}


@pytest.mark.parametrize("where", PAGES)
def test_every_name_on_a_page_is_there_and_a_user_needs_befit_alone(where: str) -> None:
    for_contributors = where.startswith(CONTRIBUTORS)
    assert wrong_names(PAGES[where], for_contributors) == set()
    if not for_contributors:
        assert re.findall(r"(?:from|import) befit\.\w[\w.]*", PAGES[where]) == []


def test_names_that_are_nowhere_and_names_of_modules_below_are_found() -> None:
    page = "`befit.run({})`, `help(befit.Laned)`, `befit.studies.selection`, `befit.train.terms.Lane`, src/befit/y,\n"
    page += "`befit.train.terms.Laned`, the module\n`befit.train.passes`, `befit.nothing`; groups of `befit.benchmarks`"
    nowhere = {"befit.studies.selection", "befit.train.terms.Lane", "befit.nothing"}
    assert wrong_names(page, for_contributors=True) == nowhere
    assert wrong_names(page, for_contributors=False) == nowhere | {"befit.train.terms.Laned"}
    assert PAGES.keys() >= {"README.md", "CHANGELOG.md", "docs/plugins.md", "docs/methods/potara.md"}


def test_no_file_of_the_package_can_unpickle() -> None:
    """Safetensors and JSON only: no pickle, no torch.load, no numpy pickles, anywhere in the package."""
    forbidden = re.compile(
        r"import pickle|pickle\.|(?<!safetensors\.)torch\.load\(|allow_pickle=True|joblib|dill|shelve|marshal"
    )
    package = Path(befit.__file__).parent
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if forbidden.search(line.replace("without pickle.", ""))
    ]
    assert found == []


def test_a_federation_is_loaded_from_whatever_a_run_is_made_of(tmp_path: Path) -> None:
    values = {"benchmark": {"name": "digits", "clients": 2, "alpha": 10.0}, "method": "fedit"}
    (tmp_path / "run.yaml").write_text("benchmark: {name: digits, clients: 2, alpha: 10.0}\nmethod: fedit\n")
    ways = [values, tmp_path / "run.yaml", str(tmp_path / "run.yaml"), befit.load_experiment(values)]
    assert {len(befit.load_federation(way).clients) for way in ways} == {2}
