"""A smaller backbone than those that ship, for tests of what does not depend on how deep it is: methods, engines,
studies, and what is sent, kept and resumed."""

from __future__ import annotations

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from transformers import ViTForImageClassification

from befit.zoo import FOLDER
from tests.quicker import UNCHANGED

__all__ = ["short_vit"]


@cache
def short_vit(blocks: int = 1) -> str:
    """A folder with the first of the four blocks of `digits-vit`, which is removed when the process ends."""
    parent = Path(mkdtemp(prefix="befit-short-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    model = ViTForImageClassification.from_pretrained(FOLDER / "digits-vit", num_hidden_layers=blocks)
    model.save_pretrained(parent / "digits-vit-short")
    UNCHANGED.add(parent)
    return str(parent / "digits-vit-short")
