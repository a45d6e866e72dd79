"""The version of this befit."""

__all__ = ["__version__"]

__version__ = "0.1.0"
