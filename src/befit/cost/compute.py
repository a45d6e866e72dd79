"""What a step of training computes and holds, relative to training one adapter alone, from shapes alone.

The unit is one parameter met by one token: a forward pass costs N + the entries of the active adapters; a backward pass
the same for the gradients of activations, and the trained entries once more for their own. N counts every parameter of
the backbone, embeddings and vision tower too, as if each token met it. The convention is found from Table 15 of Seo et
al. 2026 (FedMosaic), which it reproduces: docs/methods/fedmosaic.md, What it costs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from befit.adapters.keys import NOTHING, Selector, slot, slot_of, split
from befit.core.values import TensorSpec
from befit.protocol.work import PublicWork, Work


def count(specs: Mapping[str, TensorSpec], chosen: Selector | None = None) -> int:
    """Entries of the chosen arrays, of all without a choice."""
    return sum(prod(spec.shape) for key, spec in specs.items() if chosen is None or chosen(key))


def slot_sizes(specs: Mapping[str, TensorSpec], heads: Collection[str]) -> dict[str, dict[str, int]]:
    """By slot: entries of `A`, `B`, `head`, of other factors under their own name where there are any, and `total`.

    specs  all arrays of an installed layout
    heads  names of the modules of the task head, whose weights and biases make up `head`
    """
    sizes: dict[str, dict[str, int]] = {}
    for key, spec in specs.items():
        part = "head" if is_of_head(key, heads) else split(key)[2]
        size = sizes.setdefault(slot_of(key), {"A": 0, "B": 0, "head": 0})
        size[part] = size.get(part, 0) + prod(spec.shape)
    return {name: {**size, "total": sum(size.values())} for name, size in sizes.items()}


def is_of_head(key: str, heads: Collection[str]) -> bool:
    """Whether an array is a dense update of a module of the task head."""
    _, module, factor = split(key)
    return module in heads and factor in ("weight", "bias")


def step_cost(
    work: Sequence[Work], specs: Mapping[str, TensorSpec], backbone: int, smallest: int | None = None
) -> float:
    """Units of one step on one token.

    specs     all arrays of the layout
    backbone  parameters of the frozen model
    smallest  those of the smallest backbone of the federation, where it is another
    """
    total = 0.0
    for part in work:
        met = smallest if part.smallest and smallest is not None else backbone
        forward = met + count(specs, slot(*part.active))
        trained = count(specs, part.trainable) if part.trainable != NOTHING else None
        total += part.times * (forward if trained is None else 2 * forward + trained)
    return total


def alone(
    specs: Mapping[str, TensorSpec], trainable: Selector, backbone: int, plain: int | None = None
) -> tuple[float, float]:
    """Units of a step of plain fine-tuning of the first slot that is trained, 2 N + 3 n, and what it holds, N + n.

    plain  n, where the slot is no plain adapter
    """
    first = next((slot_of(key) for key in specs if trainable(key)), None)
    entries = plain if plain is not None else count(specs, slot(first)) if first else 0
    return 2.0 * backbone + 3 * entries, float(backbone + entries)


def relative_compute(
    work: Sequence[Work],
    specs: Mapping[str, TensorSpec],
    trainable: Selector,
    backbone: int,
    plain: int | None = None,
    smallest: int | None = None,
) -> float | None:
    """A step's units over those of plain fine-tuning; None where the method does not say what it computes.

    plain     as for `alone`
    smallest  as for `step_cost`

    >>> from befit.adapters.keys import EVERYTHING
    >>> specs = {"shared/x/A": TensorSpec((1, 10)), "personal/x/A": TensorSpec((1, 10))}
    >>> ditto = [Work(("shared",), slot("shared")), Work(("personal",), slot("personal"))]
    >>> relative_compute(ditto, specs, EVERYTHING, 1000)
    2.0
    """
    if not work:
        return None
    return step_cost(work, specs, backbone, smallest) / alone(specs, trainable, backbone, plain)[0]


def public_records(
    work: PublicWork,
    specs: Mapping[str, TensorSpec],
    trainable: Selector,
    backbone: int,
    plain: int | None = None,
    pivot: int | None = None,
) -> dict[str, float] | None:
    """A round's units on public records, in records of plain fine-tuning of the same length; None without any.

    pivot    parameters of the clients' smallest backbone, where it is another
    client   at every client
    server   at the server, and `each` for each client that replies
    opening  at the server before the first round, where there is any and backbones differ

    >>> from befit.adapters.keys import EVERYTHING
    >>> specs = {"shared/x/A": TensorSpec((1, 10))}
    >>> public_records(PublicWork(server=(Work(("shared",), slot("shared"), 80),)), specs, EVERYTHING, 1000)
    {'client': 0.0, 'server': 80.0, 'each': 0.0}
    """
    unit, _ = alone(specs, trainable, backbone, plain)
    parts = {"client": work.client, "server": work.server, "each": work.each}
    records = {name: step_cost(part, specs, backbone) / unit for name, part in parts.items()}
    if work.opening and pivot not in (None, backbone):
        records["opening"] = step_cost(work.opening, specs, backbone, pivot) / unit
    return records if any(records.values()) else None


def relative_memory(
    specs: Mapping[str, TensorSpec], trainable: Selector, backbone: int, plain: int | None = None
) -> float:
    """Parameters held, backbone and every slot, over those of plain fine-tuning; optimisers and activations aside."""
    return (backbone + count(specs)) / alone(specs, trainable, backbone, plain)[1]
