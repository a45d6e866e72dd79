"""The user's own files as a federation."""

__all__: list[str] = []
