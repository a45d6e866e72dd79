"""Federations as data: benchmarks by name, the user's own files, and training data that arrives over time."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.data.federation import ClientData, Federation
    from befit.data.registry import Benchmark, benchmark
    from befit.data.streams import Memory, by_task, dynamic_slices, memory_batches, static_slices

__all__ = [
    "Benchmark",
    "ClientData",
    "Federation",
    "Memory",
    "benchmark",
    "by_task",
    "dynamic_slices",
    "memory_batches",
    "static_slices",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "federation": "ClientData Federation",
        "registry": "Benchmark benchmark",
        "streams": "Memory by_task dynamic_slices memory_batches static_slices",
    },
)
