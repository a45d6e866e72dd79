"""Clients' files, read as a configuration's block `data` has them read."""

from typing import Any

from befit.data.federation import Federation
from befit.data.files import load
from befit.data.files.settings import DataSettings


def load_files(
    clients: Any, *, seed: int = 0, by: str | None = None, one_by_one: bool = False, **settings: Any
) -> Federation:
    return load.load_files(DataSettings(clients, **settings), seed, by, one_by_one)
