"""Every download is checked at the client before its method sees it: nothing but what the stage declares may arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from befit.adapters.keys import split
from befit.core.errors import PayloadMismatch
from befit.core.values import Payload, TensorSpec, dtype_name
from befit.protocol.stage import Pieces, Stage

_RANKS = {"A": 0, "B": 1}  # which side of a factor is its rank


def check_download(
    client: str, stages: Sequence[Stage], received: Payload, layout: Mapping[str, TensorSpec], whole: bool = False
) -> None:
    """Raise PayloadMismatch unless what a client received is declared as the `down` of one of these stages.

    layout  every array of the installed layout, which gives the declared arrays their shapes and dtypes
    whole   a round has been aggregated, so that nothing of it may be missing

    Less than what is declared is allowed in a first round; an array or a plain number of another name, shape or dtype
    never is. So no server can put anything into a slot that is the client's own, and none can forget what it holds.
    """
    messages = [stage.down for stage in stages]
    for stage in stages if whole else ():
        if lost := stage.down.whole(layout) - received.arrays.keys():
            raise PayloadMismatch(
                f"client {client} was not sent {min(lost)!r}, one of {len(lost)} arrays that are missing of what its "
                f"method declares as a download of stage {stage.name}; the server has to keep them from round to round"
            )
    declared: dict[str, TensorSpec] = {}
    for message in messages:
        declared |= message.plain.specs(layout) | {key: layout[key] for key in message.besides.of(layout)}
    rest = Payload({key: value for key, value in received.arrays.items() if key not in declared})
    for message in messages:
        if message.pieces is not None:
            rest = _without_pieces(client, message.pieces, rest, layout)
    if rest.arrays:
        names = ", ".join(dict.fromkeys(stage.name for stage in stages))
        raise PayloadMismatch(
            f"client {client} was sent {len(rest.arrays)} arrays that its method does not declare as a download of "
            f"stage {names}, first {min(rest.arrays)!r}"
        )
    for key, tensor in received.arrays.items():
        if key in declared:
            _check_spec(client, key, tensor, declared[key])
    if unknown := received.scalars.keys() - {name for message in messages for name in message.numbers}:
        raise PayloadMismatch(f"client {client} was sent the plain number {min(unknown)!r}, which is not declared")


def _without_pieces(client: str, pieces: Pieces, received: Payload, layout: Mapping[str, TensorSpec]) -> Payload:
    """The payload without the message's numbered parts. Raises PayloadMismatch for one that is not as declared."""
    declared = pieces.specs(layout, 1)
    for number, part in received.part(pieces.name).parts().items():
        for key, tensor in part.arrays.items():
            if not number.isdecimal() or key not in declared:
                raise PayloadMismatch(f"client {client} was sent {key!r} in part {number!r}, which is not declared")
            _check_spec(client, key, tensor, declared[key], _RANKS.get(split(key)[2]))
    _, others = received.split([pieces.name])
    return others


def _check_spec(client: str, key: str, tensor: Tensor, spec: TensorSpec, free: int | None = None) -> None:
    """Raise PayloadMismatch for another shape or dtype than the declared one; side `free` may have any length."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    fits = shape == spec.shape or (
        len(shape) == len(spec.shape)
        and all(length == spec.shape[side] or side == free for side, length in enumerate(shape))
    )
    if not fits or dtype != spec.dtype:
        raise PayloadMismatch(
            f"client {client} was sent {key} with shape {shape}, {dtype}; declared is {spec.shape}, {spec.dtype}"
        )
