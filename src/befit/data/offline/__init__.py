"""Benchmarks that are made without a network; every file registers what it defines."""

__all__: list[str] = []
