"""Five methods over two seeds, each an ordinary run, and one table: who is better than alone, and is it shown?"""

import tempfile
from pathlib import Path

import befit

config = {
    "benchmark": {"name": "digits", "clients": 3, "alpha": 1.0},
    "method": {"name": "potara", "rank": 4},
    "federation": {"rounds": 3},
    "train": {"max_steps": 2},
    "report": {"plots": False},
}
methods = ["local", "fedit", "ffa_lora", "fedsa", "potara"]

with tempfile.TemporaryDirectory() as folder:
    compared = befit.compare(config, methods=methods, seeds=[0, 1], jobs=1, out=Path(folder) / "compared")
    print((compared.path / "compare.md").read_text())
    print("written:", ", ".join(sorted(path.name for path in compared.path.iterdir() if path.is_file())))
