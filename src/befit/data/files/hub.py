"""Records of a dataset on the Hugging Face hub, by the `datasets` library."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from befit.core.errors import DataError, brief

if TYPE_CHECKING:
    from befit.data.files.readers import Row


@dataclass(frozen=True)
class HubSettings:
    """Which part of a dataset of the hub holds everybody's records; `data.clients` is its id.

    revision  the commit, or a tag: data that change under a name would be another run's
    config    the dataset's configuration; null: its only one
    train     the split to train on; such as train[:5000], as `datasets` cuts them
    val       the split for validation; null: held out from train
    test      the split to be measured on; null: held out from train
    """

    revision: str
    config: str | None = None
    train: str = "train"
    val: str | None = None
    test: str | None = None

    @property
    def splits(self) -> dict[str, str]:
        """befit's name of a split to the dataset's."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {split: name for split, name in named.items() if name is not None}


def hub_rows(name: str, hub: HubSettings, columns: Collection[str]) -> dict[str, list[Row]]:
    """The rows of every split that the settings name.

    name  id on the hub, or a folder that `datasets.load_dataset` reads
    Raises DataError, in one sentence, for whatever keeps the library from loading it.
    """
    import datasets

    from befit.data.files.readers import table_rows

    rows: dict[str, list[Row]] = {}
    for split, there in hub.splits.items():
        where = f"{name}@{hub.revision}, {f'{hub.config}, ' if hub.config else ''}{there}"
        try:
            loaded = datasets.load_dataset(name, hub.config, revision=hub.revision, split=there)
            table = loaded.with_format("arrow")[:]
        except Exception as error:  # whatever a library and a network may raise
            raise DataError(
                f"data.clients: {where} cannot be loaded with datasets.load_dataset ({type(error).__name__}: "
                f"{brief(error)}); without a network, name a copy of its folder here, or its files without data.hub"
            ) from error
        rows[split] = table_rows(table, Path(where), columns)
    return rows
