"""The worker of a site that lies: `python -m tests.integration.hostile_site SITE`, in the place of `befit worker`.

Its replies are made by befit as it is, and then changed: in every round another lie about the training, and in the
first rounds about the score.
"""

from __future__ import annotations

import sys
from pathlib import Path

from befit.flower import worker
from befit.flower.frame import unpack
from befit.flower.service import SiteService
from tests.security.replies import FEW, hostile

LABEL = "fedit"
TRAIN = [name for name in FEW if name.startswith("train: ")]
SCORE = [name for name in FEW if name.startswith("score: ")]


class HostileService(SiteService):
    earlier = b""

    def answer(self, request: bytes) -> bytes:
        honest = super().answer(request)
        header, _ = unpack(honest, "an honest reply")
        lies = {"update": TRAIN, "score": SCORE}.get(header["kind"], [])
        number = header["at"]["round"] - 1 if lies and header["label"] == LABEL else len(lies)
        if number >= len(lies):
            return honest
        earlier, HostileService.earlier = HostileService.earlier or honest[:-1], honest
        print(f"{header['at']['round']}: {lies[number]}", flush=True)
        return hostile(lies[number], honest, earlier)


if __name__ == "__main__":
    worker.SiteService = HostileService
    worker.serve_site(Path(sys.argv[1]))
