"""Keys of a state, `slot/module/factor`, and how to select them by meaning.

Module names are canonical: block index and projection, the same for every architecture that calls the same thing by
another name, so that `shared/block.03.q_proj/A` means the same in a BERT, a ViT and a Llama.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from befit.core.values import State


def join(slot: str, module: str, factor: str) -> str:
    return f"{slot}/{module}/{factor}"


def split(key: str) -> tuple[str, str, str]:
    """Slot, module and factor of a key.

    >>> split("shared/block.03.q_proj/A")
    ('shared', 'block.03.q_proj', 'A')
    """
    slot, module, factor = key.split("/")
    return slot, module, factor


def slot_of(key: str) -> str:
    return key.partition("/")[0]


def to_slot(key: str, slot: str) -> str:
    """The same module and factor in another slot.

    >>> to_slot("personal/block.03.q_proj/A", "shared")
    'shared/block.03.q_proj/A'
    """
    return f"{slot}/{key.partition('/')[2]}"


def pairs_of(keys: Iterable[str]) -> list[tuple[str, str]]:
    """The keys of every module's A and B, in the order of the A.

    >>> pairs_of(["shared/block.03.q_proj/B", "shared/block.03.q_proj/A", "shared/classifier/weight"])
    [('shared/block.03.q_proj/A', 'shared/block.03.q_proj/B')]
    """
    return [(key, f"{key.removesuffix('A')}B") for key in keys if split(key)[2] == "A"]


def need_selectors(**selectors: object) -> None:
    """Raise TypeError that names the argument which is no selector.

    >>> need_selectors(share="shared")
    Traceback (most recent call last):
    TypeError: share must be a selector, such as befit.slot('shared'), not 'shared'
    """
    for name, value in selectors.items():
        if not isinstance(value, Selector):
            raise TypeError(f"{name} must be a selector, such as befit.slot('shared'), not {value!r}")


@dataclass(frozen=True)
class Selector:
    """A predicate on keys that combines with `&`, `|` and `~`, prints as text and compares by it.

    slots  the slots that it names, so that one which no layout has can be refused

    >>> chosen = slot("shared") & ~factor("B")
    >>> chosen, chosen("shared/block.00.q_proj/A"), chosen("shared/block.00.q_proj/B")
    (slot(shared) & ~factor(B), True, False)
    """

    text: str
    test: Callable[[str], bool] = field(compare=False)
    slots: frozenset[str] = field(default=frozenset(), compare=False)
    _taken: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict, init=False, compare=False)

    def __call__(self, key: str) -> bool:
        return self.test(key)

    def of(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Those that it takes. Kept for the next time: every message of a run asks the same of the same layout."""
        every = (*keys,)
        if every not in self._taken:
            self._taken[every] = tuple(filter(self.test, every))
        return self._taken[every]

    def __and__(self, other: Selector) -> Selector:
        text, slots = f"{self._wrapped()} & {other._wrapped()}", self.slots | other.slots
        return Selector(text, lambda key: self(key) and other(key), slots)

    def __or__(self, other: Selector) -> Selector:
        text, slots = f"{self._wrapped()} | {other._wrapped()}", self.slots | other.slots
        return Selector(text, lambda key: self(key) or other(key), slots)

    def __invert__(self) -> Selector:
        return Selector(f"~{self._wrapped()}", lambda key: not self(key), self.slots)

    def __repr__(self) -> str:
        return self.text

    def _wrapped(self) -> str:
        return f"({self.text})" if " " in self.text else self.text


EVERYTHING = Selector("everything", lambda key: True)
NOTHING = Selector("nothing", lambda key: False)


def slot(*names: str) -> Selector:
    """The arrays of these slots, such as `slot("shared")`."""
    return Selector(f"slot({', '.join(names)})", lambda key: split(key)[0] in names, frozenset(names))


def factor(*names: str) -> Selector:
    """These factors of every module, such as `factor("A")`; see `befit.adapters.layout` for what there is."""
    return Selector(f"factor({', '.join(names)})", lambda key: split(key)[2] in names)


def module(pattern: str) -> Selector:
    """Modules by canonical name, with `*` and `?` as in file names."""
    return Selector(f"module({pattern})", lambda key: fnmatchcase(split(key)[1], pattern))


def block(start: int, stop: int) -> Selector:
    """Blocks `start` to `stop - 1`."""

    def inside(key: str) -> bool:
        match = re.match(r"block\.(\d+)\.", split(key)[1])
        return match is not None and start <= int(match[1]) < stop

    return Selector(f"block({start}, {stop})", inside)


def union(selectors: Iterable[Selector]) -> Selector:
    """What any of the selectors chooses; nothing without any."""
    first, *others = [*selectors] or [NOTHING]
    for other in others:
        first = first | other
    return first


def select(state: State, chosen: Selector) -> State:
    """The arrays of a state that a selector chooses."""
    return {key: tensor for key, tensor in state.items() if chosen(key)}


# Models have renamed these between releases; papers and configurations keep the old words.
_OLD_NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


def is_named(name: str, target: str, path: str = "") -> bool:
    """Whether `target` names a module: canonically, as the model does, or by the end of its path; "all" names all
    modules of the blocks, "all-linear" all there are, "connector" those between what sees and the language model.

    >>> is_named("block.03.q_proj", "query"), is_named("block.03.q_proj", "block.03.q_proj"), is_named("pooler", "all")
    (True, True, False)
    >>> is_named("encoder.layers.0.fc1", "all", "encoder.layers.0.fc1")
    True
    """
    if target == "all-linear":
        return True
    if target == "all":  # by its path too, which modules of two towers with the same name keep
        return bool(in_block(path or name))
    if target == "connector":
        return not _CONNECTORS.isdisjoint((path or name).split("."))
    target = _OLD_NAMES.get(target, target) if not path.endswith(f".{target}") else target
    return name == target or name.endswith(f".{target}") or path == target or path.endswith(f".{target}")


# Of LLaVA and its kin, of Idefics 3 and SmolVLM, of Qwen-VL, and of Qwen3-VL's deeper layers.
_CONNECTORS = {"multi_modal_projector", "connector", "merger", "deepstack_merger_list"}
# What architectures call the projections of a transformer block, longest ending first where two match.
_ATTENTION = r"(?:attention|attn|self_attn|self_attention)"
_PROJECTIONS = (
    (_ATTENTION + r"(?:\.(?:self|attention|attn))?\.(?:query|query_proj|q_proj|q_lin|q)", "q_proj"),
    (_ATTENTION + r"(?:\.(?:self|attention|attn))?\.(?:key|key_proj|k_proj|k_lin|k)", "k_proj"),
    (_ATTENTION + r"(?:\.(?:self|attention|attn))?\.(?:value|value_proj|v_proj|v_lin|v)", "v_proj"),
    (_ATTENTION + r"\.(?:c_attn|qkv|qkv_proj|query_key_value|Wqkv)", "qkv_proj"),
    (r"(?:attention|attn|self_attn)\.(?:output\.dense|o_proj|c_proj|out_proj|dense)", "o_proj"),
    (r"(?:mlp\.(?:up_proj|fc1|c_fc)|intermediate\.dense|fc1)", "up_proj"),
    (r"mlp\.gate_proj", "gate_proj"),
    (r"(?:mlp\.(?:down_proj|fc2|c_proj)|output\.dense|fc2)", "down_proj"),
)
_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.(.+)$")


def in_block(path: str) -> str:
    """What a module is called within its block; empty outside any.

    >>> in_block("model.layers.3.self_attn.v_proj"), in_block("block.03.v_proj"), in_block("classifier")
    ('self_attn.v_proj', 'v_proj', '')
    """
    match = _BLOCK.search(path)
    return "" if match is None else match[2]


def canonical_names(paths: Iterable[str]) -> dict[str, str]:
    """Canonical name of every module path of one model; a path outside any block keeps its own name.

    Where two paths would get the same name (two towers in one model), both keep their own.

    >>> canonical_names(["bert.encoder.layer.3.attention.self.query", "model.layers.3.self_attn.v_proj", "classifier"])
    {'bert.encoder.layer.3.attention.self.query': 'block.03.q_proj', \
'model.layers.3.self_attn.v_proj': 'block.03.v_proj', 'classifier': 'classifier'}
    """
    names = {path: _canonical(path) for path in paths}
    counts = Counter(names.values())
    return {path: name if counts[name] == 1 else path for path, name in names.items()}


def _canonical(path: str) -> str:
    match = _BLOCK.search(path)
    if match is None:
        return path
    index, rest = match.groups()
    for pattern, projection in _PROJECTIONS:
        if re.fullmatch(pattern, rest):
            rest = projection
            break
    return f"block.{int(index):02d}.{rest}"
