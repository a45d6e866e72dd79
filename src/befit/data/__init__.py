"""Federations as data: benchmarks by name, the user's own files, and training data that arrives over time.

federation       clients with their records
registry         benchmarks by name; `offline` has those that ship with befit, `papers` those whose data a user brings
files            a federation from the user's own files: whose they are, how they are read
records          rows of any source as records of a task
partition        rules that divide records among clients; `partition_sizes` those that decide how many each gets
streams          records that arrive round by round
limit            few clients and records, for a trial
long_prompts     training records that are left out for their length
record_counts    what every client has, for `befit partition`
"""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.data import partition, partition_sizes
    from befit.data.federation import ClientData, Federation
    from befit.data.registry import Benchmark, benchmark
    from befit.data.streams import ReplayMemory, by_task, dynamic_slices, memory_batches, static_slices

__all__ = [
    "Benchmark",
    "ClientData",
    "Federation",
    "ReplayMemory",
    "benchmark",
    "by_task",
    "dynamic_slices",
    "memory_batches",
    "partition",
    "partition_sizes",
    "static_slices",
]

__getattr__, __dir__ = lazy(__name__, __file__)
