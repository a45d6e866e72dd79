"""Training records that a setting leaves out, such as those with prompts too long to be learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from befit.core.errors import DataError
from befit.data.federation import Federation

if TYPE_CHECKING:
    from befit.tasks.base import Task


def without_left_out(federation: Federation, tasks: Mapping[str, Task]) -> Federation:
    """The federation with the training records that the clients' tasks learn from; the manifest counts the others.

    tasks  of every client and newcomer that takes part, by id, in the terms of its backbone; all others stay whole

    Validation, test and public records stay. A newcomer may be left without any to train on, as one may come; raises
    DataError for other clients.
    """
    from befit.tasks.base import record_name  # which brings PyTorch, and reports need the sentence alone

    counts: dict[str, int] = {}
    total = 0
    members = []
    for client in (*federation.clients, *federation.newcomers):
        if (task := tasks.get(client.id)) is None:
            members.append(client)
            continue
        try:
            kept = [
                record for row, record in enumerate(client.train) if task.trains_on(record, record_name(record, row))
            ]
        except DataError as error:
            raise DataError(f"client {client.id}, train: {error}") from error
        counts[client.id], total = len(client.train) - len(kept), total + len(client.train)
        members.append(replace(client, train=tuple(kept)))
    number = len(federation.clients)
    if empty := [member.id for member in members[:number] if not len(member.train)]:
        raise DataError(
            f"{federation.name}: model.long_prompts leaves client {empty[0]} none of its "
            f"{counts[empty[0]]} training examples; raise model.max_length"
        )
    shorter = {client: count for client, count in counts.items() if count}
    left_out = {"records": sum(counts.values()), "of": total, "clients": shorter}
    return replace(
        federation,
        clients=tuple(members[:number]),
        newcomers=tuple(members[number:]),
        manifest={**federation.manifest, "left_out": left_out},
    )


def left_out_sentence(left_out: Mapping[str, Any]) -> str:
    """
    >>> left_out_sentence({"records": 3, "of": 1200, "clients": {"a": 1, "b": 2}})
    '3 of 1200 training records, of 2 clients, are left out: their prompts are too long (model.long_prompts)'
    """
    count, total, clients = left_out["records"], left_out["of"], len(left_out["clients"])
    if not count:
        return f"none of {total} training records is left out for the length of its prompt (model.long_prompts)"
    return (
        f"{count} of {total} training records, of {clients} client{'s' * (clients != 1)}, are left out: their "
        "prompts are too long (model.long_prompts)"
    )
