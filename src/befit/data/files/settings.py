"""The user's own files as a configuration names them: its block `data`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from befit.core.names import LONGEST_CLASS, is_class
from befit.core.schema import Rule, between
from befit.data.files.divide import PartitionSettings
from befit.data.files.hub import HubSettings

CLASSES = Rule(
    lambda value: 2 <= len(value) == len(set(value)) and all(map(is_class, value)),
    f"must be two or more different names of classes in printable letters, {LONGEST_CLASS} each at most, or null",
)


@dataclass(frozen=True)
class ClientSettings:
    """One client's files, where there is more to say than a path. Each is a file, or a folder of classes.

    train    training records; val and test are held out from them where they have no file
    val      validation records
    test     test records
    columns  befit's name of a field to its name in this client's files, over those of data.columns
    """

    train: str | None = None
    val: str | None = None
    test: str | None = None
    columns: dict[str, str] = field(default_factory=dict)


Clients = str | dict[str, str | dict[str, str | dict[str, str]]]


@dataclass(frozen=True)
class DataSettings:
    """The user's own files.

    clients          a folder with a file or folder for each client; or a mapping from client to its file or folder, or
                     to {train, val, test, columns}; or with `partition` the file or folder that holds everybody's,
                     and with `hub` a dataset's id there
    task             what is learned: text-classification, image-classification, causal-lm, preference or vqa
    columns          befit's name of a field to its name in the files. Beside the task's own fields: id, which names
                     records, and group, such as a patient: what is held out for val and test is whole groups. A
                     causal-lm's are instruction, perhaps input, and output; or messages; or prompt and completion; or
                     text (docs/skills.md)
    label_names      names of the classes in order; null collects them from the training files
    partition        how the records of one place are divided over clients; null: every client has its own files
    hub              the part of a dataset on the Hugging Face hub that is read; null: `clients` are files
    val_fraction     share of the training records held out where a client has no validation file
    test_fraction    share of all records held out where a client has no test file
    missing          records without a value in a field that the task needs: refuse is an error, drop leaves them out
    drop_duplicates  leave out records that their client has already, those of train first, then those of val
    newcomers        clients that take no part in training, in the same form; they may have a test file alone
    public           a file of records in the clients' form that server and all clients may see, for methods that need
                     any
    """

    clients: Clients
    task: str
    columns: dict[str, str] = field(default_factory=dict)
    label_names: Annotated[list[str] | None, CLASSES] = None
    partition: PartitionSettings | None = None
    hub: HubSettings | None = None
    val_fraction: Annotated[float, between(0, 1)] = 0.1
    test_fraction: Annotated[float, between(0, 1)] = 0.2
    missing: Literal["refuse", "drop"] = "refuse"
    drop_duplicates: bool = False
    newcomers: Clients | None = None
    public: str | None = None
