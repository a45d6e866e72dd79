"""Random numbers of several clients in one forward pass, each client's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from befit.core.errors import NotDivisible
from befit.train.rows import Bucket, Step

_OTHERS = frozenset(
    f"{name}{end}"
    for name in (
        *("bernoulli", "binomial", "cauchy", "dropout", "exponential", "geometric", "gumbel_softmax", "log_normal"),
        *("multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "random"),
        *("randperm", "uniform"),
    )
    for end in ("", "_")
)
_IN_TRAINING = (
    *(F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(F.rrelu, F.multi_head_attention_forward),
)


class Draws(TorchFunctionMode):
    """Draws random numbers as every client alone would: with its own generator, for its batch alone, in its order.

    Dropout, the dropout of attention and the noise of gates are drawn for whole batches, and each bucket takes its rows
    of them. So they are those of training alone to the bit on a CPU, and on any device those that a client has whoever
    else is there.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self._generators = generators
        self._step: Step | None = None
        self._bucket: Bucket | None = None
        self._drawn: list[Tensor] = []  # for all rows of the step, in the order in which a forward pass asks
        self._asked = 0
        self.used = False  # whether the bucket drew any

    def begin(self, step: Step) -> None:
        """A pass over a new batch."""
        self._step, self._drawn = step, []

    @contextmanager
    def on(self, bucket: Bucket) -> Iterator[None]:
        self._bucket, self._asked, self.used = bucket, 0, False
        with self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0):
            return self._attention(*args, **kwargs)
        if func is torch.randn_like:
            return self._noise(*args)
        if getattr(func, "__name__", "") in _OTHERS or (func in _IN_TRAINING and _drops(func, args, kwargs)):
            raise NotDivisible(
                f"the model draws random numbers by {func.__name__}, which cannot be told apart by client"
            )
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        kept = self._take(x, lambda shape, generator: _dropout_mask(shape, p, generator).to(x.dtype))
        return x.mul_(kept) if inplace else x * kept

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) for tensor in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            allowed = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if allowed else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value

    def _noise(self, like: Tensor) -> Tensor:
        assert self._bucket is not None
        rows = like.reshape(len(self._bucket.places), -1, like.shape[-1])  # a gate sees stretches
        if rows.shape[1] == 1 != self._bucket.width:  # but one of a head sees one for each row
            rows = rows.flatten(1)
        drawn = self._take(rows, lambda shape, generator: torch.randn(shape, generator=generator, device=like.device))
        return drawn.reshape(like.shape).to(like.dtype)

    def _take(self, like: Tensor, draw: Callable[[Sequence[int], torch.Generator], Tensor]) -> Tensor:
        """What this bucket's rows get of numbers drawn for each client's batch."""
        step, bucket, self.used = self._step, self._bucket, True
        assert step is not None and bucket is not None
        tokens = {3: (1,), 4: (2, 3)}.get(like.dim(), ()) if bucket.width else ()
        copies, left = divmod(len(like), len(bucket.places))
        if left or any(like.shape[axis] != bucket.width for axis in tokens):
            raise NotDivisible(f"random numbers of shape {tuple(like.shape)} cannot be told apart by client")
        if self._asked == len(self._drawn):
            self._drawn.append(torch.cat(list(self._of_lanes(like, copies, tokens, draw)), 1))
        drawn = self._drawn[self._asked][:, bucket.places]
        self._asked += 1
        for axis in tokens:
            drawn = drawn.narrow(axis + 1, 0, bucket.width)
        return drawn.flatten(0, 1)

    def _of_lanes(
        self,
        like: Tensor,
        copies: int,
        tokens: Sequence[int],
        draw: Callable[[Sequence[int], torch.Generator], Tensor],
    ) -> Iterator[Tensor]:
        """(copies, rows, …) of each lane's batch, as wide as the widest."""
        assert self._step is not None
        for size, width, generator in zip(self._step.sizes, self._step.widths, self._generators, strict=True):
            shape = [width if axis in tokens else extent for axis, extent in enumerate(like.shape)]
            drawn = draw((copies * size, *shape[1:]), generator)
            more = self._step.width - width if tokens else 0
            ends = [more * (axis in tokens) for axis in reversed(range(like.dim()))]
            yield F.pad(drawn, [end for last in ends for end in (0, last)]).unflatten(0, (copies, size))


def _drops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    return bool(given["training"] and given.get("p", given.get("dropout_p", 1.0)))


def _dropout_mask(shape: Sequence[int], p: float, generator: torch.Generator) -> Tensor:
    kept = torch.empty(shape, device=generator.device).bernoulli_(1 - p, generator=generator)
    return kept.div_(1 - p)
