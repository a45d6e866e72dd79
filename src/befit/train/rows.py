"""How the batches of several clients go through the model together: their rows, in buckets of like length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from befit.adapters.lanes import Rows
from befit.tasks.base import Batch, Task

TOKENS = {"cpu": 2048, "cuda": 16384}  # of a bucket at most: beyond, nothing is gained but activations
WORTH = {"cpu": 160, "cuda": 2048}  # how many tokens take as long as what a bucket costs by itself


@dataclass(frozen=True)
class Bucket:
    """Some rows of a step, in one forward pass.

    places  (rows,) of each among all rows of the step, lane by lane
    width   tokens of a row; 0 where samples have one size
    """

    batch: Batch
    rows: Rows
    places: Tensor
    width: int


class Step:
    """One batch of each lane, and how they go through the model together. All of it is computed on the CPU."""

    def __init__(self, parts: Sequence[Batch], task: Task, device: torch.device) -> None:
        def there(values: Tensor) -> Tensor:
            return values.to(device, non_blocking=True)  # the device need not have finished what it is doing

        padding = task.padding or {}
        self.sizes = [len(next(iter(part.values()))) for part in parts]
        self.widths = [part["attention_mask"].shape[1] if "attention_mask" in part else 0 for part in parts]
        self.width = max(self.widths)
        whole = {
            key: torch.cat([_padded(part[key], self.width, padding.get(key)) for part in parts if key in part])
            for key in dict.fromkeys(key for part in parts for key in part)  # a batch without images has no pixels
        }
        owner = torch.arange(len(parts)).repeat_interleave(torch.tensor(self.sizes))
        samples = there(torch.tensor(self.sizes, dtype=torch.float32))
        terms, judged = (
            there(torch.stack([of_client.sum() for of_client in counts.split(self.sizes)]))
            for counts in (task.terms(whole), task.positions(whole))
        )
        self.buckets: list[Bucket] = []
        lengths = whole["attention_mask"].sum(1).tolist() if self.width else [0] * len(owner)
        for chosen in cut(lengths, TOKENS[device.type], WORTH[device.type]):
            width = max(lengths[place] for place in chosen)
            places, real, each, lanes = _stretches(chosen, owner.tolist(), len(parts))
            at = torch.tensor(places)
            batch = task.part(whole, at)
            if width:
                batch = {key: value[:, :width] if key in padding else value for key, value in batch.items()}
            rows = Rows(
                there(owner[at]),
                there(torch.tensor(real, dtype=torch.float32)),
                each,
                None if lanes is None else there(torch.tensor(lanes)),
                samples,
                terms,
                judged,
            )
            self.buckets.append(Bucket(batch, rows, there(at), width))


def _padded(value: Tensor, width: int, filler: int | None) -> Tensor:
    return value if filler is None else F.pad(value, (0, width - value.shape[1]), value=filler)


def cut(lengths: Sequence[int], most: int, worth: int) -> list[list[int]]:
    """Rows in buckets, the longest first, that cost least: its tokens with padding, and as much as `worth` tokens for
    each bucket. One that has more than `most` is divided; rows without a length are all one.

    >>> cut([9, 2, 2, 2, 9], 100, worth=5), cut([9, 2, 2, 2, 9], 100, worth=50)
    ([[0, 4], [1, 2, 3]], [[0, 4, 1, 2, 3]])
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    if not any(lengths):
        return [order]
    shorter = [place for place in range(1, len(order)) if lengths[order[place]] < lengths[order[place - 1]]]
    ends = [0, *shorter, len(order)]
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # by its end, the cost of all rows up to it and the last one's start
    for place, end in enumerate(ends[1:], start=1):
        tokens = {start: (end - start) * lengths[order[start]] for start in ends[:place]}
        best[end] = min((best[start][0] + count + worth * -(-count // most), start) for start, count in tokens.items())
    buckets: list[list[int]] = []
    end = len(order)
    while end:
        start = best[end][1]
        rows = max(1, most // lengths[order[start]])
        buckets = [order[first : min(first + rows, end)] for first in range(start, end, rows)] + buckets
        end = start
    return buckets


def _stretches(
    chosen: Sequence[int], owner: Sequence[int], count: int
) -> tuple[list[int], list[int], int, list[int] | None]:
    """The rows lane by lane, as many of each lane: missing ones are copies, up to a quarter of all; else each row is a
    stretch of its own.

    -> places, whether each row is no copy, rows of a stretch, the lane of each stretch (None: all lanes in order)
    """
    by_lane = [list(of_lane) for _, of_lane in groupby(sorted(chosen), key=lambda place: owner[place])]
    lanes = [owner[of_lane[0]] for of_lane in by_lane]
    most = max(map(len, by_lane))
    if 4 * (most * len(by_lane) - len(chosen)) > len(chosen):
        places = sorted(chosen)
        return places, [1] * len(places), 1, [owner[place] for place in places]
    places = [place for of_lane in by_lane for place in (of_lane * most)[:most]]
    real = [int(position < len(of_lane)) for of_lane in by_lane for position in range(most)]
    return places, real, most, None if lanes == list(range(count)) else lanes
