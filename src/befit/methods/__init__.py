"""The methods, one file each; every file registers what it defines. What several share is in `parts`."""

__all__: list[str] = []
