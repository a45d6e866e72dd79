"""What an alignment holds at the server, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping

from befit.adapters.layout import ModelShapes
from befit.adapters.pq import pq_modules
from befit.methods.parts.mosaic.align.settings import Alignment

_SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def alignment_bytes(shapes: Mapping[str, ModelShapes], rank: int, blocks: int, settings: Alignment, tokens: int) -> int:
    """The sums of products of the largest backbone, and two batches of what both models feed their PQ modules.

    shapes  of each family's model
    tokens  of a public record, at most

    Sums are in float64, `C_jj` (d_j, d_j) for every input and `C_ji` (d_j, r) for every PQ module, where A has its
    closed form; activations are in float32, `settings.batch_size * tokens` rows of both models. 0 for one backbone.
    """
    by_family = {family: _inputs(model_shapes, blocks) for family, model_shapes in shapes.items()}
    if len(by_family) < 2:
        return 0
    pivot = min(by_family, key=lambda family: sum(by_family[family].values()))
    rows, sizes = settings.batch_size * tokens, [0]
    for family, inputs in by_family.items():
        if family == pivot:
            continue
        placed = pq_modules(shapes[family].targets, blocks)
        projected = sum(shapes[family].targets[module].d_in for module in placed) * rank
        sums = 8 * (sum(width**2 for width in inputs.values()) + projected) if settings.method == "closed" else 0
        sizes.append(sums + 2 * 4 * rows * (sum(inputs.values()) + sum(by_family[pivot].values())))
    return max(sizes)


def _inputs(shapes: ModelShapes, blocks: int) -> dict[tuple[int, str], int]:
    """Widths of what the PQ modules read, each input once: projections that read the same tensor share it."""
    placed = pq_modules(shapes.targets, blocks)
    return {(k, _SAME_INPUT.get(name, name)): shapes.targets[module].d_in for module, (k, name) in placed.items()}
