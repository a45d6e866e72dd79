"""Relevance-guided aggregation: which clients' knowledge is worth how much to which client."""

__all__: list[str] = []
