"""The benchmarks of the four papers, read from a hub, from `datasets` directories or from their authors' files."""

__all__: list[str] = []
