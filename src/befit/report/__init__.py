"""What a run says when it is done: tables for every medium, report.md, and a self-contained report.html."""

from befit.report.write import write_report

__all__ = ["write_report"]
