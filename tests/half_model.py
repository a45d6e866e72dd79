"""A backbone of half the depth, for what does not depend on how deep it is."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from transformers import ViTForImageClassification

from befit.zoo import FOLDER
from tests.quicker import FIXED

__all__ = ["half_a_model"]


@cache
def half_a_model() -> str:
    """A folder with the first two of the four blocks of `digits-vit`, which is removed when the process ends. Call it
    in tests and fixtures: each process that calls it makes one."""
    folder = Path(mkdtemp(prefix="befit-half-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = ViTForImageClassification.from_pretrained(FOLDER / "digits-vit", num_hidden_layers=2)
    model.save_pretrained(folder)
    FIXED.add(folder)
    return str(folder)
