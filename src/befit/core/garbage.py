"""How often Python looks through all that a process of befit's own holds for objects that only refer to each other."""

from __future__ import annotations

import gc

_OLD = 100  # collections of younger objects between two of all; Python's own is 10


def collect_seldom() -> None:
    """Have Python do that a tenth as often as usual.

    PyTorch and transformers come with some half a million objects that stay to the end. While they are loaded, Python
    goes through all of them eight times, which takes an eighth of the processor time of a short run.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _OLD)  # Python 3.14, which collects a little at a time, may ignore it
