"""What a site tells: its replies as frames, the numbers in them, and the list of all that left."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from befit.core.storage import read_sealed, write_json, write_sealed
from befit.core.text import readable
from befit.core.values import Cost, Failure, Score, State, Tick, Update
from befit.core.wire_form import Wire
from befit.flower.budget import Account
from befit.flower.frame import PROTOCOL, pack
from befit.flower.replies import COSTS
from befit.flower.requests import is_name
from befit.flower.site_file import SiteFile, claim
from befit.protocol.method import Method
from befit.protocol.privacy import EPSILON, hides
from befit.protocol.serve import stage_named
from befit.runs.host import Host
from befit.runs.outbound import Outbound

Header = dict[str, Any]
_MOST_LINES = 100  # of a traceback in the log
_STEPS = "steps"  # of training, which the server set
WITHHELD = "the text is in the site's log (errors: kind in its file)"
NOT_WRITTEN = {"kind": "failure", "error": "RunError", "reason": "the site cannot use its state folder; see its log"}


class Reply:
    """One reply: its frame, and the list of what left, in the folder of its run."""

    def __init__(self, folder: Path, site: SiteFile, header: Header, request: str) -> None:
        self._folder, self._site = folder, site
        client = site.client
        self._echo = {key: header.get(key) for key in ("run", "label", "at")} | {"client": client, "request": request}

    def frame(self, values: Header, arrays: State) -> bytes:
        """Names the request that it answers, so that no other request can be answered with it."""
        return pack({"protocol": PROTOCOL, **self._echo, **values}, arrays)

    def numbers(self, stage: str, values: Mapping[str, Any]) -> None:
        self._write(lambda outbound, client: outbound.numbers(client, stage, values))

    def note(self, stage: str, reply: Update | Score | Failure, wire: Wire = Wire()) -> None:  # noqa: B008 frozen
        self._write(lambda outbound, client: outbound.note(reply, stage, wire))

    def _write(self, note: Any) -> None:
        """outbound.json for people; .outbound.json, which the next one goes on from."""
        claim(self._site)
        kept = self._folder / ".outbound.json"
        outbound = Outbound(read_sealed(kept) if kept.exists() else None)
        note(outbound, self._site.client)
        write_sealed(kept, outbound.saved())
        write_json(self._folder / "outbound.json", outbound.as_dict())


def told_numbers(site: SiteFile, numbers: Mapping[str, float], host: Host, exact: bool = False) -> dict[str, float]:
    """Losses, diagnostics and metrics as the site tells them: those of a public benchmark as they are."""
    if site.scores == "none":
        return {}
    exact = exact or site.scores == "exact" or host.experiment.benchmark is not None
    return {name: value if exact or name == _STEPS else rounded(value) for name, value in numbers.items()}


def told_report(
    site: SiteFile, header: Header, update: Update, host: Host, method: Method, at: Tick
) -> dict[str, float]:
    """What the site tells of an update. Where single records are protected: of a private stage, all as it is, for it
    comes from noise, and epsilon by the site's own account; of any other, nothing."""
    if (privacy := host.context.privacy) is None or not privacy.by_example:
        return told_numbers(site, update.report, host)
    if not hides(privacy, method, stage_named(method, at.stage)):
        return {}
    epsilon = privacy.spends(Account(site).released(header["run"], header["label"]))
    return told_numbers(site, {**update.report, EPSILON: epsilon}, host, exact=True)


def tells_nothing(host: Host, method: Method, at: Tick) -> bool:
    """Where single records are protected, of a stage without noise: not even whether it failed."""
    privacy, stage = host.context.privacy, stage_named(method, at.stage)
    return privacy is not None and privacy.by_example and not stage.federated and not hides(privacy, method, stage)


def stage_of(header: Header) -> str:
    """What the request is for, in the words in which the server lists its answer; it may be any request."""
    if header.get("do") in ("hello", "export"):
        return str(header["do"])
    at = header.get("at")
    stage = at.get("stage") if isinstance(at, dict) else None
    return stage if isinstance(stage, str) and is_name(stage) else "request"


def measured(cost: Cost) -> Header:
    """What a site says of what a request took; bytes the server counts itself."""
    return {key: getattr(cost, key) for key in COSTS}


def traced(error: Exception) -> str:
    """The traceback for the site's log, in printable letters: a server may have written the error's text, or the key
    that it names, and it may be of any length."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES // 2], "…", *lines[-_MOST_LINES // 2 :]]
    return "\n".join("  " + readable(line) for line in lines)


def rounded(value: float) -> float:
    """Three significant digits, which are enough to compare methods by, and too few to read a record out of.

    >>> rounded(0.123456), rounded(1234.5)
    (0.123, 1230.0)
    """
    return float(f"{value:.3g}")
