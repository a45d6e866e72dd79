"""What methods share."""

__all__: list[str] = []
