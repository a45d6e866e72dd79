"""The last uploads of all clients, stacked: one array for each key, with a row for each client.

A group is the clients of one family (of one backbone), or everybody. Arrays of a family are stacked over that family,
the cores of PQ modules over everybody, as `own/K.projection/P`: what lies at the same place of two backbones meets
there, and nothing else does. Rows are in the order of client ids, so the order of replies does not matter. Mixtures are
made of these rows when a client asks for its own, with weights that lie beside them:
`befit.methods.parts.mosaic.relevance`.

The server's memory has these parts: `groups`, by group the stacks `own/module/factor` and the weights; `clients` and
`sites`, by family the ids of its rows and where its PQ modules are; `bases`, by family its aligned basis.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from befit.adapters.keys import join, slot_of, split
from befit.adapters.pq import pq_modules
from befit.core.errors import ModelError
from befit.core.values import Payload, Scalar, State, Update
from befit.methods.parts.mosaic.mixing import ServerBank
from befit.methods.parts.mosaic.relevance import mixture
from befit.methods.parts.mosaic.sketch import SKETCH

_LOG = logging.getLogger(__name__)

Members = dict[str, list[str]]
Stacks = dict[str, State]
BASES, GROUPS, _CLIENTS, _PLACES = "bases", "groups", "clients", "sites"
EVERYBODY = "everybody"
WEIGHTS = "relevance/clients/weights"  # (M, M)
_CORES = ("P", "Q")


def members(server: Payload) -> Members:
    """Ids of the clients with a row, by group."""
    families = {family: [str(id_) for id_ in ids] for family, ids in _lists(server.part(_CLIENTS)).items()}
    return {EVERYBODY: sorted(id_ for ids in families.values() for id_ in ids), **families}


def _lists(payload: Payload) -> dict[str, list[str]]:
    return {name: list(map(str, value)) for name, value in payload.scalars.items() if isinstance(value, list)}


def described(starts: Mapping[str, State], blocks: int) -> Payload:
    """A memory that says where the PQ modules are in each family, from its initial adapters: "K.projection module".

    Raises ModelError where families do not have their PQ modules at the same places.
    """
    places: dict[str, Scalar] = {}
    names: dict[str, set[str]] = {}
    for family, start in starts.items():
        modules = dict.fromkeys(split(key)[1] for key in start if split(key)[0] == "personal")
        at = {module: f"{k}.{rest}" for module, (k, rest) in pq_modules(modules, blocks).items()}
        if blocks and len(at) == sum(module.startswith("block.") for module in modules):
            _LOG.warning(
                "every block of the backbone %s carries PQ-LoRA (blocks: %d): all that its clients train are "
                "r x r cores between random factors; fewer blocks leave plain LoRA in the others",
                family,
                blocks,
            )
        places[family] = [f"{place} {module}" for module, place in at.items()]
        names[family] = set(at.values())
    if reasons := differing(names):
        raise ModelError(reasons[0])
    return Payload().with_part(_PLACES, Payload({}, places))


def differing(names: Mapping[str, Collection[str]]) -> list[str]:
    """Why models cannot share cores, from the names of their PQ modules by family: nothing where all have the same."""
    first, *others = names
    return [
        f"the backbones {first} and {family} differ in their PQ modules: {min(different)} is in one of them; set "
        "adapter.targets to projections that both have"
        for family in others
        if (different := {*names[first]} ^ {*names[family]})
    ]


def _modules_of(server: Payload, family: str) -> dict[str, str]:
    """By place "K.projection": the PQ module there in this family."""
    return dict(pair.split(" ", 1) for pair in _lists(server.part(_PLACES))[family])


def absorb(server: Payload, updates: Sequence[Update]) -> tuple[Stacks, Members]:
    """By group the stacks with these updates' rows, and whose rows they are. Goes through the updates once.

    Takes the stacks out of `server`, which whoever aggregates hands over, and writes into them: with another set beside
    them a thousand adapters would be in memory twice. Where somebody new comes, one stack at a time is made larger.
    """
    before = members(server)
    after = {group: list(ids) for group, ids in before.items()}
    for update in updates:
        for group in (EVERYBODY, update.client.backbone):
            after.setdefault(group, []).append(update.client.id)
    after = {group: sorted(set(ids)) for group, ids in after.items()}
    rows = {group: {id_: row for row, id_ in enumerate(ids)} for group, ids in after.items()}
    groups = server.take_part(GROUPS)
    stacks: Stacks = {group: groups.take_part(group).arrays for group in after}
    for group, ids in before.items():
        stacks[group].pop(WEIGHTS, None)
        for name in list(stacks[group]) if ids != after[group] else ():
            places = [rows[group][id_] for id_ in ids]
            stacks[group][name] = _grown(stacks[group].pop(name), places, len(after[group]))
    modules: dict[str, dict[str, str]] = {}
    for update in updates:
        family = update.client.backbone
        if family not in modules:
            modules[family] = {name: place for place, name in _modules_of(server, family).items()}
        for key, tensor in update.payload.arrays.items():
            name, group = _place(key, family, modules[family])
            if name not in stacks[group]:
                stacks[group][name] = torch.zeros(len(after[group]), *tensor.shape)
            stacks[group][name][rows[group][update.client.id]] = tensor
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
    assert module not in modules, f"{key}: the frozen factors of a PQ module must not be sent"
    return join("own", module, factor), family


def server_bank(stacks: Stacks, whose: Members, before: Mapping[str, State]) -> ServerBank:
    """The stacks in the terms of a mixing: who is in which group, which arrays a group shares, and what it had before.

    before  as `received_before` says, for a mixing that compares with it
    """
    order = {id_: place for place, id_ in enumerate(whose[EVERYBODY])}
    groups = {group: [order[id_] for id_ in ids] for group, ids in whose.items()}
    shared = {group: {name: stack[name] for name in sorted(stack) if name != SKETCH} for group, stack in stacks.items()}
    return ServerBank(shared, groups, before, stacks[EVERYBODY].get(SKETCH))


def remembered(server: Payload, stacks: Stacks, whose: Members, weights: Mapping[str, torch.Tensor]) -> Payload:
    """The server's memory with these stacks, whose rows they are, and the weights of each group."""
    groups = Payload.of_parts({group: Payload({**stack, WEIGHTS: weights[group]}) for group, stack in stacks.items()})
    clients: dict[str, Scalar] = {family: ids for family, ids in whose.items() if family != EVERYBODY}
    return server.with_part(GROUPS, groups).with_part(_CLIENTS, Payload({}, clients))


def received_before(server: Payload, starts: Mapping[str, State]) -> Stacks:
    """By group and a stack's name, what the group's first client received last; the initial value before any mixture.

    starts  initial adapters by family
    """
    received: Stacks = {}
    for family, start in starts.items():
        modules = {name: place for place, name in _modules_of(server, family).items()}
        for key, value in start.items():
            if slot_of(key) == "personal":
                name, group = _place(key, family, modules)
                received.setdefault(group, {})[name] = value
    for group, arrays in received.items():
        memory = server.part(GROUPS, group).arrays
        arrays |= {name: mixture(memory[WEIGHTS], memory[name], 0).clone() for name in arrays if name in memory}
    return received


def received_by(server: Payload, client: str, family: str, slot: str) -> State:
    """One client's mixture of every stack that it is in, in the terms of its backbone; nothing before it has a row.

    The weights of a family's arrays run over the family alone, and whoever is the only one of a family gets its own
    back (docs/methods/fedmosaic.md).
    """
    whose = members(server)
    if client not in whose.get(family, ()):
        return {}
    weights = {group: server.part(GROUPS, group).arrays.get(WEIGHTS) for group in (EVERYBODY, family)}
    mixtures: State = {}
    for key, group, stack in _in_terms_of(server, family, slot):
        group_weights = weights[group]
        assert group_weights is not None
        mixtures[key] = mixture(group_weights, stack, whose[group].index(client))
    return mixtures


def weights_of(server: Payload) -> dict[str, dict[str, float]]:
    """By client, its weight for each client that it is mixed with: over everybody where there are cores, which all
    share, and else over its family. Within a family the other arrays have the same weights, made to sum to 1."""
    whose = members(server)
    cores = any(_lists(server.part(_PLACES)).values())
    rows: dict[str, dict[str, float]] = {}
    for group, ids in whose.items():
        if (group == EVERYBODY) == cores and WEIGHTS in (memory := server.part(GROUPS, group).arrays):
            rows |= {
                id_: dict(zip(ids, row, strict=True)) for id_, row in zip(ids, memory[WEIGHTS].tolist(), strict=True)
            }
    return rows


def mixed(server: Payload, family: str, slot: str, weights: Mapping[str, torch.Tensor]) -> State:
    """A mixture of all clients that matter to a backbone, in its terms, with given weights (M,) by group."""
    return {key: torch.tensordot(weights[group], stack, 1) for key, group, stack in _in_terms_of(server, family, slot)}


def _in_terms_of(server: Payload, family: str, slot: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What the clients of a backbone have sent, and of cores all clients: key in its terms, group, and stack."""
    modules = _modules_of(server, family)
    for group in (EVERYBODY, family):
        for key, stack in server.part(GROUPS, group).arrays.items():
            slot_name, module, factor = split(key)
            if slot_name == "own":
                yield join(slot, modules[module] if group == EVERYBODY else module, factor), group, stack
