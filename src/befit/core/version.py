"""The version of this befit."""

__version__ = "0.1.0"
