"""What single records of a site may lose over all runs, and what they have lost: the site's own account, which it keeps
in its state folder and no server can change.

Every training in a private stage is charged before it begins, by the request that it answers. Where a request comes
again that was charged and never answered, as after a crash, nothing has left and it is the same release. One that is
trained again after an answer has noise of its own, so it is another release, like anything else that is asked for the
same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from befit.core.errors import ConfigError
from befit.core.storage import read_sealed, write_sealed
from befit.flower.site_file import SiteFile
from befit.protocol.accountant import Release, above, epsilon, together
from befit.protocol.settings import PrivacySettings


class Account:
    """`privacy.json` of a site's state folder: by run, and by method and request, what was released. A request that was
    answered has a number behind it."""

    def __init__(self, site: SiteFile) -> None:
        self._site, self._path = site, Path(site.state) / "privacy.json"
        self._runs: dict[str, dict[str, list[list[float]]]] = {}
        if self._path.exists():
            self._runs = read_sealed(self._path)["runs"]

    def check(self, run: str, more: Sequence[Release], what: str, planned: bool = False) -> None:
        """Raise ConfigError where these releases of a run, with all before them, are more than the site's file allows.

        planned  they are all of the run, those that are charged already included
        """
        budget = self._site.privacy
        if budget is None:
            return
        counted = (requests for name, requests in self._runs.items() if not (planned and name == run))
        before = _releases(rows for requests in counted for rows in requests.values())
        total = above(together([*before, *more]), budget.epsilon, budget.delta)
        if total is not None:
            spent = self._epsilon(before)
            raise ConfigError(
                [
                    f"privacy.epsilon: {what} would bring what this site's records have lost from {spent:.4g} to "
                    f"{total:.4g}, and {budget.epsilon:g} is the site's budget, at delta {budget.delta:g}"
                ],
                f"what the server asks of site {self._site.client}",
            )

    def charge(
        self, run: str, label: str, request: str, releases: Sequence[Release], what: str, agreed: PrivacySettings
    ) -> None:
        """Write down that one of a run's methods is about to be trained for a request. Raises ConfigError, and charges
        nothing, where that is more than the site's budget, or than the run itself says that the method may spend:
        a round may be asked for more than once."""
        key = f"{label} {request}"
        if key in self._runs.get(run, {}):
            return
        self.afford(run, label, releases, what, agreed)
        self._runs.setdefault(run, {})[key] = [[release.rate, release.noise, release.count] for release in releases]
        write_sealed(self._path, {"runs": self._runs})

    def afford(self, run: str, label: str, releases: Sequence[Release], what: str, agreed: PrivacySettings) -> None:
        """Raise ConfigError where `charge` would, for a request that is to come."""
        self.check(run, releases, what)
        of_method = [*self.released(run, label), *releases]
        assert agreed.delta is not None
        of_run = agreed.epsilon
        total = None if of_run is None else above(together(of_method), of_run, agreed.delta, agreed.accountant)
        if total is not None:
            raise ConfigError(
                [
                    f"privacy.epsilon: {what} would bring what {label} has taken of this site's records to "
                    f"{total:.4g}, with what was asked more than once, and the run's budget is {of_run:g}. A new run "
                    "has room for rounds that are trained again with a larger privacy.noise_multiplier beside "
                    "privacy.epsilon; without one the noise is for its own rounds alone"
                ],
                f"what the server asks of site {self._site.client}",
            )

    def answered(self, run: str, label: str, request: str) -> None:
        """Write down that what was charged for a request is about to leave: it pays for no other training."""
        charged = self._runs.get(run, {})
        if (releases := charged.pop(f"{label} {request}", None)) is not None:
            charged[f"{label} {request}+{len(charged)}"] = releases
            write_sealed(self._path, {"runs": self._runs})

    def released(self, run: str, label: str) -> list[Release]:
        """All that was charged for one of a run's methods, also for rounds that were trained more than once, of which
        its client's memory has the last alone."""
        charged = self._runs.get(run, {})
        return _releases(rows for name, rows in charged.items() if name.rpartition(" ")[0] == label)

    def _epsilon(self, releases: Sequence[Release]) -> float:
        budget = self._site.privacy
        return math.inf if budget is None else epsilon(together(releases), budget.delta)


def _releases(requests: Iterable[Sequence[Sequence[float]]]) -> list[Release]:
    return [Release(rate, noise, int(count)) for rows in requests for rate, noise, count in rows]
