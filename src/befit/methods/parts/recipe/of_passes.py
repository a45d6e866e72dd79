"""What follows from a stage's passes: what they train, and whether branches of two recipes are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from befit.adapters.keys import Selector, slot, slot_of, split, union
from befit.adapters.layout import Layout, Slot
from befit.adapters.state import fingerprint
from befit.core.values import State
from befit.train.passes import Pass


def trained(passes: Iterable[Pass]) -> Selector:
    """Everything that some of the passes train."""
    return union(dict.fromkeys(pass_.trainable for pass_ in passes))


def lone(passes: Iterable[Pass]) -> str:
    """Why clients take these passes one by one; empty where several can at once."""
    return next((pass_.lone for pass_ in passes if pass_.lone), "")


def plain_slot(passes: Sequence[Pass]) -> str | None:
    """The slot that is trained, where one pass trains one slot by the task's loss and nothing else; else None."""
    if len(passes) != 1 or len(passes[0].active) != 1:
        return None
    (pass_,), (name,) = passes, passes[0].active
    return name if pass_ == Pass(slot(name), (name,), name=pass_.name, keep_optimiser=pass_.keep_optimiser) else None


def described(trained: Slot, passes: Sequence[Pass]) -> dict[str, Any]:
    """Such a slot and pass, for a hash."""
    return {"slot": repr(trained), "passes": [[pass_.name, pass_.keep_optimiser] for pass_ in passes]}


def start_of(layout: Layout, initial: State, backbone: str) -> str:
    """What two branches must have in common to be merged, field by field, as text: `rank=8; alpha=16; …`."""
    if not initial:
        return ""
    adapter = layout.slot(slot_of(min(initial)))
    modules = {split(key)[1] for key in initial}
    targets = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
    names = hashlib.sha256("\n".join(sorted(modules)).encode()).hexdigest()[:8]
    return (
        f"backbone={backbone}; rank={adapter.rank}; alpha={adapter.alpha:g}; targets={targets}; "
        f"modules={len(modules)} ({names}); initial values={fingerprint(initial)[:16]}"
    )
