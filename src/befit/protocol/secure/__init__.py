"""Sums of clients' vectors of which nobody sees a single one (Bonawitz et al. 2017; Bell et al. 2020).

Nothing here knows a method, a model or a transport. See docs/secure_sums.md for who is trusted with what.
"""

__all__: list[str] = []
