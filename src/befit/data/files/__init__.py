"""The user's own files as a federation: `client_files` says whose they are, `readers` reads, `load` puts together."""

__all__: list[str] = []
