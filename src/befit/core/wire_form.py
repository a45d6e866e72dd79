"""The form that arrays take on the wire: as they are, in a narrower dtype, as 8-bit integers, or the largest entries.

Every engine uses the same four functions: `down` and `up` encode, `received` and `replied` read what they encoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from befit.core.errors import PayloadMismatch
from befit.core.shares import rounded_up
from befit.core.values import Payload, State, TensorSpec, dtype_name
from befit.core.wire import cast

_VALUES, _SCALE, _PLACES = "values", "scale", "places"  # the parts that an encoded array travels as
_LARGEST = 127  # of the 8-bit integers, which are symmetric: -128 is not used

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Wire:
    """How the arrays of one method travel.

    dtype    of floating-point arrays that travel whole; they are float32 on both ends
    int8     updates, and the downloads that they start from, are 8-bit integers with one scale for each row of the
             shorter axis: symmetric, rounded to nearest
    top_k    share of the entries of an update that is sent, the largest ones, as values and places; None: all
    updates  arrays that are compressed: what is sent up is their change from the download. All others travel whole

    What an update leaves out is owed: the client keeps it and adds it to its next update (error feedback, Seide et al.
    2014; Karimireddy et al. 2019, algorithm 2). The server adds a change to what it holds itself and not to what
    rounding made of that on the way down, so that rounding of downloads does not pile up from round to round (the
    preserved central model of Philippenko and Dieuleveut 2021).
    """

    dtype: torch.dtype = torch.float32
    int8: bool = False
    top_k: float | None = None
    updates: frozenset[str] = frozenset()

    def down(self, payload: Payload) -> Payload:
        """What the server sends, as it travels. A payload that is encoded already comes back as it is."""
        narrow = self._narrow_down & payload.arrays.keys()
        return self._encoded(payload, {key: self._encode(payload.arrays[key], None) for key in narrow})

    def received(self, encoded: Payload) -> Payload:
        """What a client reads of it, in float32. Raises PayloadMismatch for what is in no form of this wire."""
        whole, parts = self._parted(encoded, self._narrow_down)
        return _with(whole, {key: self._decode(key, compressed, None, None) for key, compressed in parts.items()})

    def up(self, reply: Payload, received: Payload, owed: State) -> tuple[Payload, State]:
        """A client's reply as it travels, and what it owes from now on.

        received  what it read of its download
        owed      what it owes from its updates so far, by name

        Raises PayloadMismatch where the download lacks an array of which an update is to be sent.
        """
        parts: dict[str, Parts] = {}
        left = dict(owed)
        for key in sorted(self.updates & reply.arrays.keys()):
            if key not in received.arrays:
                raise PayloadMismatch(f"the server did not send {key!r}, from which its update would be taken (wire)")
            change = reply.arrays[key] - received.arrays[key]
            if key in owed:
                change += owed[key]
            parts[key] = self._encode(change, self.top_k)
            left[key] = change - self._decode(key, parts[key], change.shape, self.top_k)
        return self._encoded(reply, parts), left

    def replied(self, encoded: Payload, sent: Payload) -> Payload:
        """A reply as the server's methods see it, in float32.

        sent  what the client was sent, before it was encoded

        Raises PayloadMismatch for what is in no form of this wire.
        """
        whole, parts = self._parted(encoded, self.updates)
        arrays: State = {}
        for key, compressed in parts.items():
            if key not in sent.arrays:
                raise PayloadMismatch(f"{key!r} is an update of something that was not sent")
            start = sent.arrays[key]
            arrays[key] = start + self._decode(key, compressed, start.shape, self.top_k)
        return _with(whole, arrays)

    def sent_up(self, key: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Names, shapes and dtypes of what travels for one array of a reply."""
        return self._travels(key, spec, self.top_k, key in self.updates)

    def sent_down(self, key: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """The same of a download."""
        return self._travels(key, spec, None, key in self._narrow_down)

    def _travels(self, key: str, spec: TensorSpec, top_k: float | None, narrowed: bool) -> dict[str, TensorSpec]:
        if narrowed:
            return {f"{part}@{key}": part_spec for part, part_spec in self._form(spec.shape, top_k).items()}
        floats = getattr(torch, spec.dtype).is_floating_point
        return {key: TensorSpec(spec.shape, dtype_name(self.dtype)) if floats else spec}

    @property
    def _narrow_down(self) -> frozenset[str]:
        """What is compressed on its way down."""
        return self.updates if self.int8 else frozenset()

    def _encoded(self, payload: Payload, parts: Mapping[str, Parts]) -> Payload:
        if not parts:
            return cast(payload, self.dtype)
        whole = {key: value for key, value in payload.arrays.items() if key not in parts}
        narrow = {f"{part}@{key}": parts[key][part] for key in payload.arrays if key in parts for part in parts[key]}
        return _with(cast(Payload(whole, payload.scalars), self.dtype), narrow)

    def _parted(self, encoded: Payload, narrow: frozenset[str]) -> tuple[Payload, dict[str, Parts]]:
        """What travelled whole, in float32, and the parts of what is to be compressed."""
        if not narrow:
            for name, value in encoded.arrays.items():
                self._check_type(name, value)
            return cast(encoded, torch.float32), {}
        whole: State = {}
        parts: dict[str, Parts] = {}
        for name, value in encoded.arrays.items():
            part, _, key = name.partition("@")
            if name in narrow:
                raise PayloadMismatch(f"{name!r} came whole, and this wire's form compresses it")
            if key in narrow:
                parts.setdefault(key, {})[part] = value
            else:
                self._check_type(name, value)
                whole[name] = value
        return cast(Payload(whole, encoded.scalars), torch.float32), parts

    def _check_type(self, name: str, value: Tensor) -> None:
        if value.is_floating_point() and value.dtype != self.dtype:
            raise PayloadMismatch(f"{name!r} is of {value.dtype}; the run's wire.dtype is {dtype_name(self.dtype)}")

    def _form(self, shape: tuple[int, ...], top_k: float | None) -> dict[str, TensorSpec]:
        """The parts of an array of this shape."""
        sent = shape if top_k is None else (_count_of_top(shape, top_k),)
        form = {_VALUES: TensorSpec(sent, "int8" if self.int8 else dtype_name(self.dtype))}
        if self.int8:
            form[_SCALE] = TensorSpec((_rows(sent),))
        if top_k is not None:
            form[_PLACES] = TensorSpec(sent, "int32")
        return form

    def _encode(self, array: Tensor, top_k: float | None) -> Parts:
        parts: Parts = {}
        if top_k is not None:
            places = _largest(array, _count_of_top(array.shape, top_k))
            parts[_PLACES], array = places.to(torch.int32), array.reshape(-1)[places]
        if not self.int8:
            return {_VALUES: array.to(self.dtype), **parts}
        rows = _as_rows(array)
        scale = rows.abs().amax(1) / _LARGEST
        steps = (rows / torch.where(scale > 0, scale, 1.0)[:, None]).round().clamp(-_LARGEST, _LARGEST)
        return {_VALUES: _from_rows(steps.to(torch.int8), array.shape), _SCALE: scale, **parts}

    def _decode(self, key: str, parts: Parts, shape: tuple[int, ...] | None, top_k: float | None) -> Tensor:
        """The array of these parts, of this shape; None: of that of its values. Raises PayloadMismatch for parts that
        are not of the form."""
        if shape is None:
            shape = parts[_VALUES].shape if _VALUES in parts else ()
        specs = {part: TensorSpec(tuple(value.shape), dtype_name(value.dtype)) for part, value in parts.items()}
        if specs != (form := self._form(tuple(shape), top_k)):
            raise PayloadMismatch(f"{key!r} came as {_shown(specs)}; the form of this wire is {_shown(form)}")
        values = parts[_VALUES].to(torch.float32)
        if self.int8:
            values = _from_rows(_as_rows(values) * parts[_SCALE][:, None], values.shape)
        if top_k is None:
            return values
        places, size = parts[_PLACES].to(torch.int64), math.prod(shape)
        if places[0] < 0 or places[-1] >= size or (places.diff() <= 0).any():
            raise PayloadMismatch(f"the places of {key!r} are not {len(places)} different ones of {size}, in order")
        return torch.zeros(size).scatter_(0, places, values).reshape(shape)


def _with(payload: Payload, arrays: State) -> Payload:
    return Payload({**payload.arrays, **arrays}, payload.scalars)


def _shown(form: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"{part} {spec.shape} {spec.dtype}" for part, spec in form.items()) or "nothing"


def _count_of_top(shape: tuple[int, ...], top_k: float) -> int:
    return max(1, rounded_up(top_k, math.prod(shape)))


def _largest(array: Tensor, count: int) -> Tensor:
    """Places of the entries that are largest in magnitude, in order; of equal ones the first."""
    sizes = array.reshape(-1).abs()
    least = sizes.kthvalue(len(sizes) - count + 1).values
    above, equal = (sizes > least).nonzero()[:, 0], (sizes == least).nonzero()[:, 0]
    return torch.cat([above, equal[: count - len(above)]]).sort().values


def _rows(shape: tuple[int, ...]) -> int:
    """How many rows `_as_rows` gives."""
    return min(shape[0], math.prod(shape[1:])) if len(shape) > 1 else 1


def _as_rows(array: Tensor) -> Tensor:
    """A matrix with its shorter axis first: of a factor A (r, d) or B (d, r) one row for each of its r directions."""
    matrix = array.reshape(1, -1) if array.dim() < 2 else array.flatten(1)
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _from_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The array of this shape of which `_as_rows` made these rows."""
    turned = len(shape) > 1 and shape[0] > math.prod(shape[1:])
    return (rows.T if turned else rows).reshape(shape).contiguous()
