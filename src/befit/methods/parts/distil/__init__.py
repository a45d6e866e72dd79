"""Learning from other models' answers to public records: at the server, and at clients from what the server sends."""

__all__: list[str] = []
