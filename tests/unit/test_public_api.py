"""What `import befit` gives, and what it does not load."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import befit


def test_run_is_a_function_before_and_after_its_module_is_loaded() -> None:
    first = befit.run
    module = importlib.import_module("befit.runs.runner")
    assert callable(first)
    assert befit.run is first is module.run


def test_importing_befit_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, befit; print([name for name in ('torch', 'transformers', 'peft', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
