"""One backbone with named adapter slots: the only way a method touches a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn

from befit.adapters.flat import FlatState
from befit.adapters.forms import DENSE, ModuleShape
from befit.adapters.keys import EVERYTHING, NOTHING, Selector, canonical_names, in_block, is_named, split
from befit.adapters.lanes import Lanes, Rows
from befit.adapters.layer import Mixer, Recorder, Router, SlotLinear
from befit.adapters.layout import GATE, Layout, ModelShapes
from befit.adapters.mixers import Mix, constant_weights, make_mixer
from befit.adapters.whole_model import Whole, WholeWeights, owners, parameter_shapes
from befit.core.errors import ModelError, did_you_mean
from befit.core.values import State, TensorSpec


class AdaptedModel:
    """A frozen backbone whose target modules carry slots.

    The backbone is never written to. `install` decides which slots exist; `load` and `dump` move their values;
    `active`, `using` and `trainable` say, for the length of a `with`, what takes part in a forward pass and what
    gets gradients. One model serves any number of clients, one after the other.

    backbone  a transformers model (or any module); its parameters are frozen here. On the meta device it serves for
              its shapes and its adapters' initial values
    targets   "auto" (query and value projections), "all" (every linear of the blocks), "all-linear" (as in PEFT every
              linear but the output embedding), or names, see `find_modules`
    head      whether slots carry the task head (a classifier outside the backbone proper) as a dense update, where it
              is no target
    dropout   probability of dropping an input of the low-rank adapters in training; a head's input is never dropped
    native    whether adapters compute in the backbone's dtype instead of float32; they are held, trained and handed out
              in float32 all the same
    new       paths of modules that a checkpoint of this backbone lacks, so that an adapter has to bring them along
    """

    def __init__(
        self,
        backbone: nn.Module,
        targets: Sequence[str] | str = "auto",
        head: bool = True,
        dropout: float = 0.0,
        native: bool = False,
        new: Sequence[str] = (),
    ) -> None:
        self.backbone, self.new = backbone.requires_grad_(False), tuple(new)
        device = next(backbone.parameters()).device
        self.device = torch.device("cpu") if device.type == "meta" else device  # adapters have values without it too
        self._router = Router(dropout=dropout, native=native)
        target_paths, head_paths = find_modules(backbone, targets)
        self.paths = {**target_paths, **(head_paths if head else {})}  # canonical name -> path in the backbone
        self.shapes = model_shapes(backbone, targets, head)
        self._owners = owners(backbone)
        self._whole: WholeWeights | None = None
        self._lanes: Lanes | None = None
        self.layers = {name: self._wrap(name, path) for name, path in self.paths.items()}
        # Collected once, since walking through them takes longer than a small update's checks. What keeps statistics
        # of the batches it sees never trains: the backbone is frozen, and the next client would see this one's.
        self._modules = [module for module in backbone.modules() if not _keeps_statistics(module)]
        for module in filter(_keeps_statistics, backbone.modules()):
            module.eval()
        self.layout = Layout(())
        self.specs: dict[str, TensorSpec] = {}
        self._state = FlatState(self.specs, self.device)
        self._fresh = self._state.snapshot()

    def _wrap(self, name: str, path: str) -> SlotLinear:
        parent_path, _, leaf = path.rpartition(".")
        layer = SlotLinear(self.backbone.get_submodule(path), name, self._router)
        setattr(self.backbone.get_submodule(parent_path), leaf, layer)
        return layer

    def unwrap(self) -> nn.Module:
        """Take all adapters off again and return the bare backbone, which is as it was."""
        for name, path in self.paths.items():
            parent_path, _, leaf = path.rpartition(".")
            setattr(self.backbone.get_submodule(parent_path), leaf, self.layers[name].base)
        return self.backbone

    def install(self, layout: Layout, seed: int) -> None:
        """Replace all slots by those of `layout`, at the initial values that `seed` gives."""
        self.layout = layout
        self.specs = layout.specs(self.shapes)
        self._state = FlatState(self.specs, self.device)
        self._state.load(layout.initial(self.shapes, seed))
        self._fresh = self._state.snapshot()
        for layer in self.layers.values():
            layer.branches = {}
            layer.gate = None
        self._install_whole(self.whole_slots)
        self._attach(self._state.leaves)

    def start_from(self, arrays: State) -> None:
        """Let these values be those of the start, where `reset` goes back to."""
        self._state.load(arrays)
        self._fresh = self._state.snapshot()

    def _attach(self, leaves: Mapping[str, Tensor]) -> None:
        """Let the layers compute with these arrays."""
        slots = {slot.name: slot for slot in self.layout.slots}
        arrays: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, leaf in leaves.items():
            slot, name, factor = split(key)
            if slot == GATE:
                self.layers[name].gate = leaf
            elif slot in slots and not isinstance(slots[slot].form, Whole):
                arrays.setdefault((slot, name), {})[factor] = leaf
        for (slot, name), factors in arrays.items():
            spec = slots[slot]
            form = spec.form if name in spec.adapted(self.shapes) else DENSE
            common = arrays.get((form.basis, name), {})
            self.layers[name].branches[slot] = form.branch({**common, **factors}, spec.scale)

    def _install_whole(self, slots: Sequence[str]) -> None:
        """Let slots of the whole model act on every weight. Raises ModelError where weights are quantised."""
        if self._whole is not None:
            self._whole.remove()
        self._whole = None
        if not slots:
            return
        if lacking := self._owners.keys() - self.shapes.parameters.keys():
            raise ModelError(
                f"{len(lacking)} weights are not floating-point numbers, first {'.'.join(min(lacking))}: "
                "a quantised model cannot be fine-tuned in full. Set model.quantise: none, or take a "
                "method with low-rank adapters"
            )
        leaves: dict[str, dict[tuple[str, str], Tensor]] = {name: {} for name in slots}
        for key, leaf in self._state.leaves.items():
            slot, path, name = split(key)
            if slot in leaves:
                leaves[slot][path, name] = leaf
        self._whole = WholeWeights(self._owners, self._router, leaves)

    def reset(self) -> None:
        """Back to the initial adapters, no slot active, nothing trainable, dropout off."""
        self._state.fill(self._fresh)
        self._state.require_gradients(EVERYTHING, False)
        self._train(False)
        self._router.active, self._router.mixer, self._router.recorder, self._router.folded = (), None, None, {}

    def snapshot(self) -> Tensor:
        """All arrays, as one long copy for `fill`."""
        return self._state.snapshot()

    def fill(self, values: Tensor) -> None:
        """Overwrite all arrays by what `snapshot` gave."""
        self._state.fill(values)

    @contextmanager
    def lanes(self, starts: Sequence[Tensor], trained: Selector) -> Iterator[Lanes]:
        """Hold the arrays of several clients side by side, from snapshots; afterwards the model's own are back.

        trained  as `Lanes` has it

        Forward passes have to be within `rows`. Raises ModelError for what has no lanes, see `lone`.
        """
        if reason := self.lone(*(slot.name for slot in self.layout.slots)):
            raise ModelError(f"{reason}; one client at a time can be trained")
        before, lanes = self._state, Lanes(self.specs, starts, trained, self.device)
        self._lanes, self._state = lanes, lanes.state
        self._attach(lanes.state.leaves)
        try:
            yield lanes
        finally:
            self._lanes, self._state = None, before
            self._attach(before.leaves)

    @contextmanager
    def using_rows(self, rows: Rows) -> Iterator[None]:
        """Say whose the rows of the batches are, while the model has lanes."""
        assert self._lanes is not None
        self._router.rows = rows
        if rows.lanes is not None:
            self._attach(self._lanes.arrays_for(rows))
        try:
            yield
        finally:
            self._router.rows = None
            if rows.lanes is not None:
                self._attach(self._state.leaves)

    @property
    def lane_count(self) -> int | None:
        """How many clients' arrays the model holds side by side; None for one client's, as they are."""
        return None if self._lanes is None else self._lanes.count

    @property
    def rows(self) -> Rows | None:
        """Whose the rows of the present batch are; None where the model is one client's."""
        return self._router.rows

    def lone(self, *slots: str) -> str:
        """Why these slots cannot be those of several clients at once; empty where they can."""
        if self._whole is not None:
            return f"slot {self.whole_slots[0]} changes the backbone's own weights"
        if self.mixes_rows or self.mixes_examples:
            return self.mixes_rows or _MIXED
        branches = [
            branch for layer in self.layers.values() for name, branch in layer.branches.items() if name in slots
        ]
        kinds = {type(part) for part in (*branches, *([self.layout.gate] if self.layout.gated else []))}
        names = sorted(kind.__name__ for kind in kinds if not getattr(kind, "lanes", False))
        return f"{names[0]} is written for one client" if names else ""

    def varies(self, *slots: str) -> str:
        """Why what is computed with these slots differs with what their arrays hold; empty where it does not."""
        branches = (
            branch for layer in self.layers.values() for name, branch in layer.branches.items() if name in slots
        )
        names = sorted({type(branch).__name__ for branch in branches if not getattr(branch, "steady", False)})
        return f"{names[0]} computes other products for other values" if names else ""

    @property
    def flat(self) -> FlatState:
        """Where the arrays lie; another object once other slots are installed."""
        return self._state

    @cached_property
    def mixes_examples(self) -> bool:
        """Whether an example's output depends on the others of its batch: normalised by no statistics but theirs, or in
        LLM.int8, where the columns that any of them has outliers in are computed in full (Dettmers et al. 2022, 3.2;
        on a CPU in scoring alone)."""
        return _mixes_examples(self.backbone) or any(map(_splits_outliers, self.backbone.modules()))

    @property
    def mixes_rows(self) -> str:
        """See `ModelShapes`."""
        return self.shapes.mixes_rows

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed anew in the backward pass."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.backbone.modules())

    @cached_property
    def drops(self) -> bool:
        """Whether the backbone has dropout of its own, as modules or as a number that attention is computed with."""
        return any(map(_drops, self.backbone.modules()))

    @property
    def dropout(self) -> float:
        """The adapters'."""
        return self._router.dropout

    @dropout.setter
    def dropout(self, rate: float) -> None:
        self._router.dropout = rate

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy arrays into their slots; keys that are not given stay. Raises PayloadMismatch for a foreign key."""
        self._state.load(state)

    def dump(self, chosen: Selector) -> State:
        """A copy of the chosen arrays, on the CPU."""
        return self._state.dump(chosen)

    @cached_property
    def parameters_of_backbone(self) -> int:
        """How many there are, quantised or not: two weights of 4 bits are one number in memory."""
        whole = (getattr(parameter, "quant_state", None) or parameter for parameter in self.backbone.parameters())
        return sum(math.prod(parameter.shape) for parameter in whole)

    @property
    def is_small(self) -> bool:
        """Below ten million parameters: activations are no concern, and operations too short to share by threads."""
        return self.parameters_of_backbone < 10_000_000

    @property
    def active_slots(self) -> tuple[str, ...]:
        return self._router.active

    @property
    def mixer(self) -> Mixer | None:
        """What puts the active slots together now."""
        return self._router.mixer

    @property
    def keys(self) -> list[str]:
        return list(self._state.leaves)

    def leaves(self, chosen: Selector) -> dict[str, Tensor]:
        """The live tensors of the chosen keys, for losses that are functions of the weights."""
        return {key: leaf for key, leaf in self._state.leaves.items() if chosen(key)}

    def parameters(self, chosen: Selector) -> list[nn.Parameter]:
        """The chosen arrays as long parameters for an optimiser; see `FlatState`."""
        return self._state.parameters(chosen)

    def zero_gradients(self) -> None:
        self._state.zero_gradients()

    @contextmanager
    def active(self, *slots: str, mixer: Mix = "sum") -> Iterator[None]:
        """Let these slots, and no others, take part in forward passes, put together by `mixer`."""
        known = [slot.name for slot in self.layout.slots]
        for name in slots:
            if name not in known:
                raise ValueError(f"no slot {name!r}; this model has {', '.join(known)}.{did_you_mean(name, known)}")
        gated = self.layout.gated[: len(slots)] if self.layout.gate.fewer else self.layout.gated
        if mixer == "gate" and slots != gated:
            raise ValueError(f"the gate weighs {self.layout.gated}, not {slots}")
        if mixer != "sum" and (whole := [name for name in slots if isinstance(self.layout.slot(name).form, Whole)]):
            raise ValueError(f"slot {whole[0]!r} changes the backbone's own weights and can only be added, not {mixer}")
        router = self._router
        before = router.active, router.mixer, router.folded
        chosen = make_mixer(mixer, self, self.layout.gate)
        router.active, router.mixer, router.folded = slots, chosen, {}
        try:
            with getattr(chosen, "watching", nullcontext)():
                yield
        finally:
            router.active, router.mixer, router.folded = before

    @contextmanager
    def scoring(self, *slots: str, mixer: Mix = "sum") -> Iterator[None]:
        """`active`, for passes over many inputs without gradients and with the values as they are now.

        At a small backbone (`is_small`) whose slots are weighed alike for every input, each layer computes with one
        weight in place of `W` and the branches beside it, `W + sum_s m_s scale_s B_s A_s` (Hu et al. 2021, section
        4.1), which differs by rounding alone. A larger one would need a second copy of its weights, and saves less.
        """
        with self.active(*slots, mixer=mixer):
            alike = constant_weights(mixer, self.layout, slots, self._state.leaves) is not None
            if self.is_small and alike and self._whole is None:
                found = ((name, layer.folded()) for name, layer in self.layers.items())
                self._router.folded = {name: folded for name, folded in found if folded is not None}
            yield

    @contextmanager
    def using(self, state: State, *slots: str, mixer: Mix = "sum") -> Iterator[None]:
        """With these values loaded and these slots active; the values of before come back afterwards."""
        before = self._state.snapshot()
        try:
            self._state.load(state)
            with self.active(*slots, mixer=mixer):
                yield
        finally:
            self._state.fill(before)

    def adapted(self, slot: str) -> Mapping[str, ModuleShape]:
        """The modules at which a slot has low-rank arrays."""
        return self.layout.slot(slot).adapted(self.shapes)

    @property
    def whole_slots(self) -> tuple[str, ...]:
        """The slots that change every weight."""
        return tuple(slot.name for slot in self.layout.slots if isinstance(slot.form, Whole))

    @contextmanager
    def folded(self, state: State, *slots: str) -> Iterator[None]:
        """With the backbone's parameters as these slots of the whole model change them, for what reads the parameters
        of the backbone; its tensors stay as they are."""
        before = self._state.snapshot()
        try:
            self._state.load(state)
            with self._whole.folded(slots) if self._whole is not None else nullcontext():
                yield
        finally:
            self._state.fill(before)

    @contextmanager
    def trainable(self, chosen: Selector) -> Iterator[None]:
        """Let gradients reach the chosen arrays, and only those."""
        self._state.require_gradients(chosen, True)
        try:
            yield
        finally:
            self._state.require_gradients(chosen, False)

    @contextmanager
    def dropping(self, rate: float) -> Iterator[None]:
        """With this probability of dropping an input of the low-rank adapters in training."""
        before, self._router.dropout = self._router.dropout, rate
        try:
            yield
        finally:
            self._router.dropout = before

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Call `recorder(slot/module, branch, input, output gradient)` in every backward pass of an active branch."""
        self._router.recorder = recorder
        try:
            yield
        finally:
            self._router.recorder = None

    @contextmanager
    def training(self, on: bool) -> Iterator[None]:
        """Dropout and the like switched on or off for the length of a `with`."""
        before = self.backbone.training
        self._train(on)
        try:
            yield
        finally:
            self._train(before)

    def _train(self, on: bool) -> None:
        """`backbone.train(on)`, without a module's slow way of setting what may be a parameter."""
        if self.backbone.training != on:
            for module in self._modules:
                module.__dict__["training"] = on

    def count(self, chosen: Selector = NOTHING) -> int:
        return sum(leaf.numel() for key, leaf in self._state.leaves.items() if chosen(key))


def model_shapes(backbone: nn.Module, targets: Sequence[str] | str, head: bool) -> ModelShapes:
    """What a layout needs to know of a backbone; works on the meta device too. Errors as in `find_modules`."""
    target_paths, head_paths = find_modules(backbone, targets)
    head_paths = head_paths if head else {}
    return ModelShapes(
        {name: _shape(backbone, path) for name, path in target_paths.items()},
        {name: _shape(backbone, path) for name, path in head_paths.items()},
        getattr(_text_config(backbone), "hidden_size", 0),
        _last_shape(backbone),
        len(linear_paths(backbone)),
        parameter_shapes(backbone),
        *_outputs(backbone),
        _mixes_rows(backbone, {**target_paths, **head_paths}.values()),
    )


_MIXED = "the backbone mixes the examples of a batch"


def _mixes_rows(backbone: nn.Module, adapted: Iterable[str]) -> str:
    if _mixes_examples(backbone):
        return _MIXED
    inside = _language_model(backbone)
    outside = [path for path in adapted if not path.startswith(inside)]
    return f"{outside[0]} is outside the language model, where rows are images" if outside else ""


def _mixes_examples(backbone: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(part, kind) and not _keeps_statistics(part) for part in backbone.modules())


def _splits_outliers(module: nn.Module) -> bool:
    threshold = getattr(getattr(module, "state", None), "threshold", None)
    return isinstance(threshold, int | float) and threshold > 0


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    rates = (getattr(module, name, None) for name in ("attention_dropout", "dropout"))  # as transformers calls them
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def in_order(model: AdaptedModel) -> list[str]:
    """Canonical names of the target modules in the order in which the backbone has them, which is not that of names."""
    places = {path: place for place, (path, _) in enumerate(model.backbone.named_modules())}
    return sorted(model.shapes.targets, key=lambda name: places[model.paths[name]])


def linear_paths(backbone: nn.Module) -> list[str]:
    """Paths of all linear modules, in the order of `named_modules`; of what adapters wrap, the wrapped module's."""
    return [path for path, module in backbone.named_modules() if _is_linear(module)]


def last_projection(backbone: nn.Module) -> nn.Module:
    """What ends the last transformer block: its down projection, or its last linear module where it has none.

    With adapters around it or bare. Raises ModelError for a model without blocks.
    """
    modules = dict(backbone.named_modules())
    wrappers = {path: module for path, module in modules.items() if isinstance(module, SlotLinear)}
    bare = {path for path, module in modules.items() if _is_linear(module)} - {f"{path}.base" for path in wrappers}
    linears = [path for path in modules if path in bare or path in wrappers]
    inside = _language_model(backbone)
    names = canonical_names(path for path in linears if path.startswith(inside))
    blocks = {path: name for path, name in names.items() if name.startswith("block.")}
    if not blocks:
        raise ModelError(f"{type(backbone).__name__} has no transformer blocks with linear modules")
    last = max(int(name.split(".")[1]) for name in blocks.values())
    ends = [path for path, name in blocks.items() if int(name.split(".")[1]) == last]
    down = [path for path in ends if blocks[path].endswith(".down_proj")]
    return modules[(down or ends)[-1]]


def _outputs(backbone: nn.Module) -> tuple[int, bool]:
    """How many classes there are to choose from, and whether token by token; (0, False) where nothing says."""
    if getattr(backbone, "get_output_embeddings", lambda: None)() is not None:
        return getattr(_text_config(backbone), "vocab_size", 0), True
    return getattr(getattr(backbone, "config", None), "num_labels", 0), False


def _last_shape(backbone: nn.Module) -> tuple[int, int]:
    try:
        module = last_projection(backbone)
    except ModelError:
        return 0, 0  # nothing asks for it but methods that then refuse the model
    module = module.base if isinstance(module, SlotLinear) else module
    return (module.out_features, module.in_features) if hasattr(module, "in_features") else (module.nf, module.nx)  # type: ignore[return-value]


def find_modules(backbone: nn.Module, targets: Sequence[str] | str) -> tuple[dict[str, str], dict[str, str]]:
    """Canonical name -> path of the target modules, and of the linear modules of the task head.

    `targets` names projections canonically (`q_proj`), as the model does (`query`), or by the end of a path
    (`attention.self.query`); "auto" is query and value, "all" every linear module of the blocks, and "all-linear" what
    PEFT calls so: every linear module, of a task head too, but the output embedding. The head is what sits beside the
    backbone proper: the children of the model other than its base model and its output embedding. What only the
    head has must be named by itself (`classifier`), and in a model that also sees, whose targets are those of its
    language model, what only the rest has. Raises ModelError for a target that matches nothing.
    """
    linears = {path: module for path, module in backbone.named_modules() if _is_linear(module)}
    head = {path: path for path in linears if path.split(".")[0] in head_children(backbone)}
    inside = _language_model(backbone)
    others = [path for path in linears if path not in head]
    names = canonical_names(path for path in others if path.startswith(inside))
    outside = {path: path for path in others if not path.startswith(inside)}
    output = getattr(backbone, "get_output_embeddings", lambda: None)()
    auto = targets == "auto"
    if auto:
        targets = ("q_proj", "v_proj") if any(name.endswith(".q_proj") for name in names.values()) else ("qkv_proj",)
    chosen: dict[str, str] = {}
    for target in (targets,) if isinstance(targets, str) else targets:
        if target == "all-linear":
            every = {**{name: path for path, name in names.items()}, **outside, **head}
            matches = {name: path for name, path in every.items() if linears[path] is not output}
        else:
            matches = {name: path for path, name in names.items() if is_named(name, target, path)}
            for paths in (outside, head):  # which have to be named by what the rest does not have
                matches = matches or {path: path for path in paths if is_named(path, target, path)}
        if not matches:
            known = sorted({in_block(name) for name in names.values()} - {""})
            known += head
            sought = "auto finds no query and value projections" if auto else f"no module matches target {target!r}"
            raise ModelError(
                f"adapter.targets: {sought}; the blocks of {type(backbone).__name__} have "
                f"{', '.join(known) or 'no linear modules'}.{did_you_mean(target, known)}"
            )
        chosen.update(matches)
    return dict(sorted(chosen.items())), head


def _language_model(backbone: nn.Module) -> str:
    """Where the language model of a model that also sees begins, with a dot; empty for all others."""
    if not hasattr(getattr(backbone, "config", None), "vision_config"):
        return ""
    decoder = backbone.get_decoder()  # type: ignore[operator]
    path = next(path for path, module in backbone.named_modules() if module is decoder)
    return f"{path}." if path else ""  # an image classifier of CLIP's kin has left its language model behind


def _text_config(backbone: nn.Module) -> object:
    config = getattr(backbone, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]


def base_child(backbone: nn.Module) -> str:
    """Name of the model's child that is the backbone proper; empty for a model without a task head.

    It is what transformers says, or in the image classifiers of CLIP and SigLIP, which have no child of that name, the
    child with the blocks.
    """
    children = dict(backbone.named_children())
    if (said := getattr(backbone, "base_model_prefix", "")) in children:
        return said
    with_blocks = (name for name, child in children.items() if any(in_block(path) for path, _ in child.named_modules()))
    return next(with_blocks, "") if hasattr(backbone, "num_labels") else ""


def head_children(backbone: nn.Module) -> set[str]:
    """Names of the model's children that make up its task head."""
    if not (base := base_child(backbone)):
        return set()
    output = getattr(backbone, "get_output_embeddings", lambda: None)()
    return {name for name, child in backbone.named_children() if name != base and child is not output}


def _keeps_statistics(module: nn.Module) -> bool:
    """A batch or instance normalisation with running statistics, which every forward pass in training would change."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def _is_linear(module: nn.Module) -> bool:
    """Anything with the widths of a linear map: nn.Linear, a quantised linear, or GPT-2's transposed Conv1D."""
    if isinstance(module, SlotLinear):
        return False
    has_widths = hasattr(module, "in_features") and hasattr(module, "out_features")
    return has_widths or (hasattr(module, "nf") and hasattr(module, "nx"))


def _shape(backbone: nn.Module, path: str) -> ModuleShape:
    module = backbone.get_submodule(path)
    bias = getattr(module, "bias", None) is not None
    if hasattr(module, "in_features"):
        return ModuleShape(int(module.in_features), int(module.out_features), bias)  # type: ignore[arg-type]
    return ModuleShape(int(module.nx), int(module.nf), bias)  # type: ignore[arg-type]
