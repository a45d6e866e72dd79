"""How several updates become one: rules in spaces, low-rank throughout, and PEFT checkpoints on a disk."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.merge.clients import MergeContext
    from befit.merge.files import merge_checkpoints
    from befit.merge.merge import Merge
    from befit.merge.spaces import ModuleUpdates, merge_updates
    from befit.merge.update import finish

__all__ = [
    "Merge",
    "MergeContext",
    "ModuleUpdates",
    "finish",
    "merge_checkpoints",
    "merge_updates",
]

__getattr__, __dir__ = lazy(__name__, __file__)
