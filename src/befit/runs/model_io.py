"""A fully fine-tuned backbone as a model directory that transformers loads, and that `model.id` can name."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from befit.adapters.keys import slot_of
from befit.adapters.layer import SlotLinear
from befit.adapters.model import AdaptedModel
from befit.core.storage import atomic_write, read_bytes, write_shared
from befit.core.values import State
from befit.core.wire import to_bytes

if TYPE_CHECKING:
    from befit.protocol.method import Deployment

__all__ = ["folded", "is_whole", "model_weights", "without_whole", "write_model"]

_NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".h5", ".msgpack")


def is_whole(deployed: Deployment, model: AdaptedModel) -> bool:
    """Whether a slot that changes every weight takes part."""
    return any(name in model.whole_slots for name in deployed.slots)


def folded(deployed: Deployment, model: AdaptedModel) -> AbstractContextManager[None]:
    """With the backbone's parameters as the deployment's slots of the whole model change them."""
    slots = [name for name in model.whole_slots if name in deployed.slots]
    return model.folded({key: value for key, value in deployed.arrays.items() if slot_of(key) in slots}, *slots)


def model_weights(model: AdaptedModel, deployed: Deployment) -> State:
    """The backbone's tensors as the deployment's slots of the whole model change them, by the names of its own
    architecture; tied ones once."""
    first: dict[int, str] = {}
    for key, tensor in model.backbone.state_dict(keep_vars=True).items():
        first.setdefault(tensor.data_ptr(), key)
    wrappers = [f"{path}." for path, module in model.backbone.named_modules() if isinstance(module, SlotLinear)]
    weights: State = {}
    with folded(deployed, model):
        for key, tensor in model.backbone.state_dict().items():
            if key not in first.values():
                continue  # another name of the same weights
            outer = next((prefix for prefix in wrappers if key.startswith(f"{prefix}base.")), None)
            weights[key if outer is None else outer + key.removeprefix(f"{outer}base.")] = tensor.detach().cpu()
    return weights


def write_model(folder: Path, deployed: Deployment, model: AdaptedModel, source: Path, pool: Path) -> None:
    """Write the backbone as the deployment's slots of the whole model change it: config.json, weights, tokenizer files.

    source  the directory that the backbone was loaded from, for what is not weights
    pool    where files that are equal for several clients lie
    """
    write_shared(folder / "model.safetensors", to_bytes(model_weights(model, deployed), {"format": "pt"}), pool)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and not file.name.startswith((".", "README")):
            atomic_write(folder / file.name, read_bytes(file))
    atomic_write(folder / "config.json", model.backbone.config.to_json_string().encode())  # type: ignore[union-attr, operator]


def without_whole(deployed: Deployment, model: AdaptedModel) -> Deployment:
    """The rest of a deployment, to be read as adapters of the changed backbone."""
    from befit.protocol.method import Deployment

    kept = tuple(name for name in deployed.slots if name not in model.whole_slots)
    arrays = {key: value for key, value in deployed.arrays.items() if slot_of(key) not in model.whole_slots}
    return Deployment(arrays, kept, deployed.mixer)
