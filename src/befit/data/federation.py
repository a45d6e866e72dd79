"""A federation as data: its clients and their records."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from befit.core.errors import DataError
from befit.core.names import several

Record = Mapping[str, Any]


SPLITS = ("train", "val", "test")
# The field of a record that says to what it belongs, such as a patient. No column of a file has this name.
GROUP = "columns.group"


@dataclass(frozen=True)
class ClientData:
    """One client's records, split for training, validation and test. `info` describes it (language, task, …)."""

    id: str
    train: Sequence[Record]
    val: Sequence[Record] = ()
    test: Sequence[Record] = ()
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """How many records each split has."""
        return {split: len(getattr(self, split)) for split in SPLITS}


@dataclass(frozen=True)
class Federation:
    """Clients in order, newcomers that never train, and public records that the server may see.

    task         one of `befit.tasks.task_names()`
    label_names  names of the classes; empty for tasks without any
    manifest     where the data came from and how it was divided, with the partition's SHA-256

    Raises DataError where two clients, or two newcomers, have one id.
    """

    name: str
    version: str
    task: str
    clients: tuple[ClientData, ...]
    label_names: tuple[str, ...] = ()
    newcomers: tuple[ClientData, ...] = ()
    public: Sequence[Record] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        several(label_names=self.label_names)
        for what, group in (("clients", self.clients), ("newcomers", self.newcomers)):
            if twice := [name for name, count in Counter(client.id for client in group).items() if count > 1]:
                raise DataError(f"benchmark {self.name}: {what} need ids of their own; more than one has {twice[0]!r}")

    @property
    def has_all_clients(self) -> bool:
        """No limit (`limit.clients`) left clients out, so that a pattern that fits none of these is a mistake."""
        return self.manifest.get("limit", {}).get("clients") is None
