"""One request at a site: to the worker that is resident there, and without one to a desk in this process."""

from __future__ import annotations

from befit.flower.site_file import SiteFile

__all__ = ["call"]


def call(site: SiteFile, request: bytes) -> bytes:
    from befit.flower.desk import Desk

    return Desk(site).answer(request)
