"""Adapters of several clients side by side, so that one forward and backward pass serves them all.

A *lane* is one client's adapters: every array has one dimension more, in front, and `linear` multiplies lane by lane.
Frozen arrays that are equal in all lanes are held once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from befit.adapters.flat import FlatState
from befit.adapters.keys import Selector
from befit.core.values import State, TensorSpec


@dataclass(frozen=True)
class Rows:
    """Whose the rows of a batch are.

    owner    (rows,) int64, the lane of each
    real     (rows,) 1, or 0 for a copy that only fills up a stretch
    each     rows of a stretch: so many in a row belong to one lane
    lanes    (stretches,) int64, the lane of each stretch; None: every lane has one, in their order
    samples  (lanes,) rows of each lane in the whole step, of which these may be a part
    terms    (lanes,) terms of each lane's loss in the whole step, as classes weigh
    judged   (lanes,) rows of logits that each lane's loss is of in the whole step: the same where classes do not weigh
    """

    owner: Tensor
    real: Tensor
    each: int
    lanes: Tensor | None
    samples: Tensor
    terms: Tensor
    judged: Tensor

    def sum(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """(lanes,), each lane's sum of `values`: one of each row, or of the row that `rows` says."""
        owner, real = (self.owner, self.real) if rows is None else (self.owner[rows], self.real[rows])
        # Accumulated rather than multiplied by a matrix: nothing of a lane that is no number reaches another one.
        return values.new_zeros(len(self.samples)).index_put((owner,), values * real, accumulate=True)


class Lanes:
    """The lanes of `starts`: flat copies of one model's adapters, as `AdaptedModel.snapshot` gives them.

    specs    of the model's arrays
    trained  what gets gradients; frozen arrays are held once if they are the same everywhere
    state    the arrays, (lanes, …) or as they are
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], starts: Sequence[Tensor], trained: Selector, device: torch.device
    ) -> None:
        self.count, self._starts = len(starts), torch.stack(list(starts))
        self._sizes = {key: int(torch.Size(spec.shape).numel()) for key, spec in specs.items()}
        differ = (self._starts != self._starts[0]).any(0).cpu().split(list(self._sizes.values()))
        self._shared = {
            key for key, some in zip(specs, differ, strict=True) if not trained(key) and not bool(some.any())
        }
        wide = {
            key: spec if key in self._shared else TensorSpec((self.count, *spec.shape)) for key, spec in specs.items()
        }
        self.state = FlatState(wide, device)
        with torch.no_grad():
            for (key, leaf), values in zip(self.state.leaves.items(), self._split(self._starts), strict=True):
                leaf.copy_(values[0].view(leaf.shape) if key in self._shared else values.view(leaf.shape))

    def arrays_for(self, rows: Rows) -> dict[str, Tensor]:
        """The arrays for the stretches of these rows: those of the lane of each."""
        leaves = self.state.leaves
        if rows.lanes is None:
            return leaves
        return {key: leaf if key in self._shared else leaf[rows.lanes] for key, leaf in leaves.items()}

    def snapshots(self) -> list[Tensor]:
        """Each lane's arrays, as `starts` had them."""
        arrays = self._starts.clone()
        for (key, leaf), values in zip(self.state.leaves.items(), self._split(arrays), strict=True):
            if key not in self._shared:
                values.copy_(leaf.detach().view(self.count, -1))
        return list(arrays.unbind())

    def leaves(self, lane: int, chosen: Selector) -> dict[str, Tensor]:
        """One lane's arrays, and their gradients, as views."""
        views = {}
        for key, leaf in self.state.leaves.items():
            if chosen(key):
                views[key] = leaf.detach()[lane]
                views[key].grad = None if leaf.grad is None else leaf.grad[lane]
        return views

    def beside(self, states: Sequence[State], places: Mapping[str, Sequence[int]]) -> State:
        """Each lane's vectors as one, in the order of the parameters that `state` gives; what is one number is the same
        in all lanes.

        places  by the beginning of a vector's name, the sizes of the arrays that it runs over, see `FlatState.sizes`
        """
        joined: State = {}
        for key, value in states[0].items():
            if value.dim():
                rows = torch.stack([state[key] for state in states])
                value = torch.cat([piece.reshape(-1) for piece in rows.split(list(self._of(key, places)), 1)])
            joined[key] = value
        return joined

    def apart(self, state: State, places: Mapping[str, Sequence[int]]) -> list[State]:
        """The other way round."""
        states: list[State] = [{} for _ in range(self.count)]
        for key, value in state.items():
            rows = [value] * self.count
            if value.dim():
                pieces = value.split([self.count * size for size in self._of(key, places)])
                rows = list(torch.cat([piece.view(self.count, -1) for piece in pieces], 1).unbind())
            for of_lane, row in zip(states, rows, strict=True):
                of_lane[key] = row.clone()
        return states

    def clip(self, chosen: Selector, limit: float) -> None:
        """Scale each lane's gradients of these arrays to a norm of at most `limit`."""
        of_leaves = [leaf.grad for key, leaf in self.state.leaves.items() if chosen(key)]
        gradients = [gradient.view(self.count, -1) for gradient in of_leaves if gradient is not None]
        norms = torch.stack([gradient.norm(dim=1) for gradient in gradients]).norm(dim=0)  # (lanes,)
        factors = (limit / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors[:, None])

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split(list(self._sizes.values()), 1)

    def _of(self, key: str, places: Mapping[str, Sequence[int]]) -> Sequence[int]:
        return places[key.rpartition("/")[0]]
