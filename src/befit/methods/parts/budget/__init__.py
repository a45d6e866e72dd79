"""Budgeted personalisation: BayesTune's rank scales, a generator that predicts them, and what a budget keeps."""

__all__: list[str] = []
