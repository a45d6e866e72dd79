"""How strongly a pass follows its terms: `(1 - beta) task + beta terms` (Piorczynski et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from befit.adapters.keys import join, slot, split, to_slot
from befit.adapters.lowrank import Pair, RankRule, factor_cosine, product_cosine, subspace_alignment
from befit.core.values import Tick

if TYPE_CHECKING:
    from befit.protocol.site import Site


_OWN, _OTHER = "personal", "shared"


@dataclass(frozen=True)
class Fixed:
    """The same beta for every client in every round, the first too; in [0, 1). Nothing to report."""

    beta: float

    def strength(self, site: Site, at: Tick) -> float:
        return self.beta


@dataclass(frozen=True)
class Blend:
    """`beta_k = beta * similarity` of a client's personal slot and the shared one as a round starts; 0 in the first.

    beta        in [0, 1)
    similarity  "fixed" is 1; "cosine" of the adapters; "sar", the subspace alignment ratio; "min" of those two
    cosine_on   "factors" (the paper) or their "product"
    negative    a negative cosine becomes 0 ("clamp"), or every cosine c becomes (1 + c) / 2 ("shift")
    rank_rule   of the subspace alignment, see `subspace_alignment`
    """

    beta: float
    similarity: Literal["fixed", "cosine", "sar", "min"] = "fixed"
    cosine_on: Literal["factors", "product"] = "factors"
    negative: Literal["clamp", "shift"] = "clamp"
    rank_rule: RankRule = "energy"

    def strength(self, site: Site, at: Tick) -> float:
        """This round's beta of this client. Reports it, and the similarity that it came from."""
        if at.round == 1:
            return 0.0
        similarity = self._similarity(site)
        site.report |= {"similarity": similarity, "beta": self.beta * similarity}
        return self.beta * similarity

    def _similarity(self, site: Site) -> float:
        if self.similarity == "fixed":
            return 1.0
        values = []
        if self.similarity in ("cosine", "min"):
            cosine = self._cosine(site)
            values.append((1 + cosine) / 2 if self.negative == "shift" else cosine)
        if self.similarity in ("sar", "min"):
            values.append(subspace_alignment(_pairs(site, _OWN), _pairs(site, _OTHER), self.rank_rule))
        return min(1.0, max(0.0, min(values)))

    def _cosine(self, site: Site) -> float:
        if self.cosine_on == "product":
            return product_cosine(_pairs(site, _OWN), _pairs(site, _OTHER))
        own = {key: value for key, value in site.model.dump(slot(_OWN)).items() if split(key)[2] in ("A", "B")}
        other = site.model.dump(slot(_OTHER))
        return factor_cosine(own, {key: other[to_slot(key, _OTHER)] for key in own})


def _pairs(site: Site, name: str) -> list[Pair]:
    state = site.model.dump(slot(name))
    return [(state[join(name, module, "B")], state[join(name, module, "A")]) for module in site.model.adapted(name)]
