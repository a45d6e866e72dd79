"""Which tokens of two models stand for the same piece of a text (snumprlab/fedmosaic, utils/align_tokens.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from befit.core.errors import ModelError
from befit.core.values import IGNORED
from befit.tasks.base import Batch, Task

Match = tuple[list[int], list[int]]


def match_pieces(first: Sequence[str], second: Sequence[str]) -> list[Match]:
    """Groups of consecutive pieces with the same text, each as short as can be, in order.

    Of all ways to pair the texts without crossing, one that matches the most characters; of those, one with the most
    groups. Pieces that nothing matches, and empty ones, are in no group. O(n m).

    >>> match_pieces(["un", "like", "ly", "!"], ["unlike", "ly", "?"])
    [([0, 1], [0]), ([2], [1])]
    """
    n, m = len(first), len(second)
    best = [[(0, 0)] * (m + 1) for _ in range(n + 1)]  # (characters, groups) from here on
    step: dict[tuple[int, int], tuple[int, int]] = {}
    for a in range(n - 1, -1, -1):
        for b in range(m - 1, -1, -1):
            best[a][b] = max(best[a + 1][b], best[a][b + 1])
            common = _shortest(first, second, a, b)
            if common is not None:
                p, q, size = common
                characters, groups = best[p][q]
                if (characters + size, groups + 1) > best[a][b]:
                    best[a][b], step[a, b] = (characters + size, groups + 1), (p, q)
    matches: list[Match] = []
    a = b = 0
    while a < n and b < m:
        if (a, b) in step:
            p, q = step[a, b]
            matches.append((list(range(a, p)), list(range(b, q))))
            a, b = p, q
        elif best[a][b] == best[a + 1][b]:
            a += 1
        else:
            b += 1
    return matches


def _shortest(first: Sequence[str], second: Sequence[str], a: int, b: int) -> tuple[int, int, int] | None:
    """Where the shortest common text that begins at both places ends in either, and its length."""
    left, right = first[a], second[b]
    a, b = a + 1, b + 1
    while left != right:
        if right.startswith(left) and left and a < len(first):
            left, a = left + first[a], a + 1
        elif left.startswith(right) and right and b < len(second):
            right, b = right + second[b], b + 1
        else:
            return None
    return (a, b, len(left)) if left else None


def matched_rows(batches: tuple[Batch, Batch], tasks: tuple[Task, Task]) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of the flattened (batch, tokens) of either model that belong together, group by group.

    Where both see the same tokens (one tokenizer, or images of one patch size) every token that is not padding is a
    group; else the tokens of the answers, matched by their text. Raises ModelError where neither can be done.
    """
    ids = [batch.get("input_ids") for batch in batches]
    if ids[0] is None or ids[1] is None:
        shapes = {tuple(batch["pixel_values"].shape) for batch in batches if "pixel_values" in batch}
        if len(shapes) != 1 or any("pixel_values" not in batch for batch in batches):
            raise ModelError("two models can only be aligned on inputs that both see as the same tokens or patches")
        return [], []
    if ids[0].shape == ids[1].shape and torch.equal(ids[0], ids[1]):
        mask = batches[0].get("attention_mask", torch.ones_like(ids[0])).flatten().bool()
        rows = [[row] for row in mask.nonzero()[:, 0].tolist()]
        return rows, rows
    if any("labels" not in batch or batch["labels"].shape != batch["input_ids"].shape for batch in batches):
        raise ModelError("the two models have different tokenizers, and this task has no answers to match them by")
    matches: tuple[list[list[int]], list[list[int]]] = ([], [])
    for row, groups in matched_answers(batches, tasks):
        for side, group in enumerate(groups):
            width = batches[side]["input_ids"].shape[1]
            matches[side].append([row * width + place for place in group])
    return matches


def matched_answers(batches: tuple[Batch, Batch], tasks: tuple[Task, Task]) -> Iterator[tuple[int, Match]]:
    """A record of the batch, and the places in either sequence of answer tokens that have the same text, by group."""
    for row in range(len(batches[0]["input_ids"])):
        places = [(batch["labels"][row] != IGNORED).nonzero()[:, 0].tolist() for batch in batches]
        pieces = [
            [piece_of(task, int(batch["input_ids"][row, place])) for place in inside]
            for batch, task, inside in zip(batches, tasks, places, strict=True)
        ]
        for text in pieces:  # some tokenizers begin every text with a space
            text[:1] = [piece.lstrip(" ") for piece in text[:1]]
        for first, second in match_pieces(*pieces):
            yield row, ([places[0][piece] for piece in first], [places[1][piece] for piece in second])


def tokenizer_of(task: Task) -> Any:
    """A text task's tokenizer. Raises AttributeError where it has none."""
    return getattr(task, "tokenizer", None) or task.processor.tokenizer  # type: ignore[attr-defined]


def piece_of(task: Task, token: int) -> str:
    """What a token adds to a text; nothing for a special one."""
    tokenizer = tokenizer_of(task)
    if token in tokenizer.all_special_ids:
        return ""
    piece: str = tokenizer.convert_ids_to_tokens(token)
    return piece.replace("\u2581", " ").replace("\u0120", " ").replace("\u010a", "\n")


class Pooling:
    """(groups, d): the mean row of each group of (…, tokens, d), all rows where there are no groups given.

    What does not depend on a tensor is done once for many of them.
    """

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        sizes = torch.tensor([len(group) for group in groups], dtype=torch.long)
        self._flat = torch.tensor([row for group in groups for row in group], dtype=torch.long, device=device)
        self._owner = torch.arange(len(groups)).repeat_interleave(sizes).to(device)
        self._sizes = sizes[:, None].to(device)
        self._single = bool((sizes == 1).all())

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        if not len(self._sizes):
            return rows
        if self._single:
            return rows[self._flat]
        sums = rows.new_zeros(len(self._sizes), rows.shape[1]).index_add(0, self._owner, rows[self._flat])
        return sums / self._sizes.to(sums.dtype)
