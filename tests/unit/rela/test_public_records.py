"""`befit check` refuses FedMosaic with two backbones and no public records; with one backbone it needs none."""

from __future__ import annotations

from dataclasses import replace

from befit.benchmarks.registry import build
from befit.host import check_needs
from befit.registry import build_method


def test_two_backbones_without_public_records_are_refused_before_anything_is_trained() -> None:
    federation = build("skills", None, {"clients": 4})
    bare = replace(federation, public=())
    ids = [client.id for client in federation.clients]
    two = {client: ("small", "model")[place % 2] for place, client in enumerate(ids)}
    method = build_method("fedmosaic")
    (problem,) = check_needs("fedmosaic", method, bare, two)
    assert (
        "needs public records to let clients of different backbones learn from each other, and skills has none"
        in problem
    )
    assert not check_needs("fedmosaic", method, federation, two)
    assert not check_needs("fedmosaic", method, bare, dict.fromkeys(ids, "model"))
    assert not check_needs("rela", build_method("rela"), bare, two)
