"""The command line: one file per command, and what they print."""

__all__: list[str] = []
