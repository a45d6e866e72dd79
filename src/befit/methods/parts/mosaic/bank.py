"""The last uploads of all clients, stacked: one array for each key, with a row for each client.

Arrays of a family (clients of one backbone) are stacked over that family, under `own:FAMILY/module/factor`; the cores
of PQ sites over all clients, under `own/K.projection/P`: what lies at the same place of two backbones meets there, and
nothing else does. Rows are in the order of client ids, so nothing depends on who answers first. Mixtures are made of
these rows when a client asks for its own, with weights that lie beside them: `befit.methods.parts.mosaic.blocks`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from befit.adapters.keys import join, split
from befit.adapters.pq import sites
from befit.core.errors import ModelError
from befit.core.values import Payload, Scalar, State, Update
from befit.methods.parts.mosaic.blocks import mixture
from befit.methods.parts.mosaic.mixing import ServerBank
from befit.methods.parts.mosaic.sketch import SKETCH

__all__ = [
    "absorb",
    "described",
    "differing",
    "held_by",
    "members",
    "mixed",
    "received_before",
    "received_by",
    "weights_key",
]

_LOG = logging.getLogger(__name__)

Members = dict[str, list[str]]
EVERYBODY = ""
_CORES = ("P", "Q")


def members(scalars: Mapping[str, Scalar]) -> Members:
    """Ids of the clients with a row, by family, and under "" of all of them."""
    found = {key.removeprefix("clients:"): list(value) for key, value in scalars.items() if key.startswith("clients:")}  # type: ignore[arg-type]
    return {EVERYBODY: sorted(id_ for ids in found.values() for id_ in ids), **found}


def described(starts: Mapping[str, State], blocks: int) -> dict[str, Scalar]:
    """Where the PQ sites are in each family, from its initial adapters: `sites:FAMILY`, as "K.projection module".

    Raises ModelError where families do not have the same sites.
    """
    found: dict[str, Scalar] = {}
    names: dict[str, set[str]] = {}
    for family, start in starts.items():
        modules = dict.fromkeys(split(key)[1] for key in start if split(key)[0] == "personal")
        at = {module: f"{k}.{rest}" for module, (k, rest) in sites(modules, blocks).items()}
        if blocks and len(at) == sum(module.startswith("block.") for module in modules):
            _LOG.warning(
                "every block of the backbone %s carries PQ-LoRA (blocks: %d): all that its clients train are "
                "r x r cores between random factors; fewer blocks leave plain LoRA in the others",
                family,
                blocks,
            )
        found[f"sites:{family}"] = [f"{site} {module}" for module, site in at.items()]
        names[family] = set(at.values())
    if reasons := differing(names):
        raise ModelError(reasons[0])
    return found


def differing(names: Mapping[str, Collection[str]]) -> list[str]:
    """Why models cannot share cores, from the names of their PQ sites by family: nothing where all have the same."""
    first, *others = names
    return [
        f"the backbones {first} and {family} differ in their PQ sites: {min(different)} is in one of them; set "
        "adapter.targets to projections that both have"
        for family in others
        if (different := {*names[first]} ^ {*names[family]})
    ]


def _sites_of(scalars: Mapping[str, Scalar], family: str) -> dict[str, str]:
    """Module of each PQ site in this family."""
    pairs: list[str] = scalars[f"sites:{family}"]  # type: ignore[assignment]
    return dict(pair.split(" ", 1) for pair in pairs)


def absorb(server: Payload, updates: Sequence[Update]) -> tuple[State, Members]:
    """The stacks with these updates' rows, and whose rows they are. Goes through the updates once.

    Takes the stacks out of `server`, which whoever aggregates hands over, and writes into them: with another set beside
    them a thousand adapters would be in memory twice. Where somebody new comes, one stack at a time is made larger.
    """
    before = members(server.scalars)
    after = {key: list(ids) for key, ids in before.items()}
    for update in updates:
        for group in (EVERYBODY, update.client.backbone):
            after.setdefault(group, []).append(update.client.id)
    after = {group: sorted(set(ids)) for group, ids in after.items()}
    stacks = {key: server.arrays.pop(key) for key in [*server.arrays] if key == SKETCH or _slot(key) == "own"}
    rows = {group: {id_: row for row, id_ in enumerate(ids)} for group, ids in after.items()}
    for name in list(stacks):
        group = _group(name)
        if before[group] != after[group]:
            stacks[name] = _grown(stacks.pop(name), [rows[group][id_] for id_ in before[group]], len(after[group]))
    modules: dict[str, dict[str, str]] = {}
    for update in updates:
        family = update.client.backbone
        if family not in modules:
            modules[family] = {name: site for site, name in _sites_of(server.scalars, family).items()}
        for key, tensor in update.payload.arrays.items():
            name, group = _place(key, family, modules[family])
            if name not in stacks:
                stacks[name] = torch.zeros(len(after[group]), *tensor.shape)
            stacks[name][rows[group][update.client.id]] = tensor
    return stacks, after


def _grown(stack: torch.Tensor, places: Sequence[int], count: int) -> torch.Tensor:
    """A stack of `count` rows, with those of `stack` at these places."""
    larger = torch.zeros(count, *stack.shape[1:])
    larger[list(places)] = stack
    return larger


def _place(key: str, family: str, modules: Mapping[str, str]) -> tuple[str, str]:
    """Where an uploaded array is stacked, and over whom."""
    _, module, factor = split(key)
    if key == SKETCH:
        return key, EVERYBODY
    if factor in _CORES:
        return join("own", modules[module], factor), EVERYBODY
    assert module not in modules, f"{key}: the frozen factors of a PQ site are nobody's to send"
    return join(f"own:{family}", module, factor), family


def _slot(key: str) -> str:
    return split(key)[0].partition(":")[0]


def _group(key: str) -> str:
    return split(key)[0].partition(":")[2]


def weights_key(group: str) -> str:
    """Where a group's weights (M, M) are in the server's memory."""
    return join(f"relevance:{group}" if group else "relevance", "clients", "weights")


def held_by(stacks: State, whose: Members, before: State) -> ServerBank:
    """The stacks in the terms of a mixing: who is in which group, which arrays a group shares, and what it had before.

    before  as `received_before` says, for a mixing that compares with it
    """
    order = {id_: place for place, id_ in enumerate(whose[EVERYBODY])}
    owners: dict[str, list[str]] = {group: [] for group in whose}
    for name in sorted(stacks):  # sums over them come out the same after a resumption
        if _slot(name) == "own":
            owners[_group(name)].append(name)
    return ServerBank(stacks, {group: [order[id_] for id_ in ids] for group, ids in whose.items()}, owners, before)


def received_before(server: Payload, starts: Mapping[str, State]) -> State:
    """What the first client of every group received last, by a stack's name; the initial value before any mixture.

    starts  initial adapters by family
    """
    found: State = {}
    for family, start in starts.items():
        modules = {name: site for site, name in _sites_of(server.scalars, family).items()}
        own = {key: value for key, value in start.items() if _slot(key) == "personal"}
        found |= {_place(key, family, modules)[0]: value for key, value in own.items()}
    for name in found:
        if name in server.arrays:
            found[name] = mixture(server.arrays[weights_key(_group(name))], server.arrays[name], 0).clone()
    return found


def received_by(server: Payload, client: str, family: str, slot: str) -> State:
    """One client's mixture of every stack that it is in, in the terms of its backbone; nothing before it has a row.

    The weights of a family's arrays run over the family alone, and whoever is the only one of a family gets its own
    back (docs/methods/fedmosaic.md).
    """
    whose = members(server.scalars)
    if client not in whose.get(family, ()):
        return {}
    rows = {group: whose[group].index(client) for group in (EVERYBODY, family)}
    return {
        key: mixture(server.arrays[weights_key(group)], stack, rows[group])
        for key, group, stack in _in_terms_of(server, family, slot)
    }


def mixed(server: Payload, family: str, slot: str, weights: Mapping[str, torch.Tensor]) -> State:
    """A mixture of all clients that matter to a backbone, in its terms, with given weights (M,) by group."""
    return {key: torch.tensordot(weights[group], stack, 1) for key, group, stack in _in_terms_of(server, family, slot)}


def _in_terms_of(server: Payload, family: str, slot: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What the clients of a backbone have sent, and of cores all clients: key in its terms, group, and stack."""
    modules = _sites_of(server.scalars, family)
    for key, stack in server.arrays.items():
        group = _group(key)
        if _slot(key) == "own" and group in (EVERYBODY, family):
            _, module, factor = split(key)
            yield join(slot, modules[module] if group == EVERYBODY else module, factor), group, stack
