"""Loading a backbone: a frozen model, what stands before it, and a fingerprint; or only its skeleton."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from befit.core.errors import ModelError, brief
from befit.core.jsonfile import parse_json
from befit.models.fingerprint import fingerprint
from befit.models.heads import check_causal, check_weights, head_modules, label_config, new_parts
from befit.models.multimodal import load_vqa_processor
from befit.models.processors import image_preprocessor, load_tokenizer
from befit.models.source import find_model, reading
from befit.tasks import get_task

# What a configuration may ask for: transformers makes what it says, layer by layer and label by label.
_MOST = {
    re.compile(r"(.*_)?(layers?|depths?)"): 500,  # layers, but no size of one, such as vocab_size_per_layer_input
    re.compile(r"(num|n)_(.*_)?experts?|(num|n)_experts?(_.*)?"): 100_000,
    re.compile(r"num_labels"): 1_000_000,
}
_MOST_BYTES = 2**24  # of a configuration, which may name many classes
_LOG = logging.getLogger(__name__)
_LARGE = 50_000_000  # parameters of a model that is not copied, twice the largest that was measured
# PEFT imports it wherever it is installed. On some CPUs it then asks for a library of faster kernels, which pack
# weights as `keep_quantised_weights` does not let them.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for each layer that it casts for


class BackboneSettings(Protocol):
    """The fields of `befit.config.experiment.ModelSettings` that are read here."""

    @property
    def id(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    @property
    def quantise(self) -> str: ...


@dataclass(frozen=True)
class LoadedBackbone:
    """A loaded model: frozen, in evaluation mode, on its device.

    processor    a tokenizer, an `ImagePreprocessor` or a `VqaProcessor`: what `make_task` takes
    task         one of `befit.tasks.task_names()`
    fingerprint  see `befit.models.fingerprint`
    source       where the files came from, for people
    notes        decisions that loading took: a new head, a padding token
    new          names of modules whose weights the checkpoint lacks and the seed has drawn
    """

    model: nn.Module
    processor: Any
    task: str
    fingerprint: str
    source: str
    notes: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


def load_backbone(settings: BackboneSettings, task: str, label_names: Sequence[str], seed: int) -> LoadedBackbone:
    """Find (see `befit.models.source.find_model`), load and freeze the model that `settings` names.

    A classification head that the checkpoint lacks, or has for another number of classes, is initialised from `seed`
    and nothing else; the notes, the log and the fingerprint show it. Weights come from safetensors only.
    Raises ModelError when the model, its tokenizer or its device is not there, or its weights are of another
    architecture.
    """
    device = pick_device(settings.device)
    directory, source = find_model(settings.id, settings.revision)
    with reading(f"{source} cannot be loaded for {task}"):
        return _load(settings, task, label_names, seed, device, directory, source)


def _load(
    settings: BackboneSettings,
    task: str,
    label_names: Sequence[str],
    seed: int,
    device: torch.device,
    directory: Path,
    source: str,
) -> LoadedBackbone:
    config = read_config(directory, source)
    check_causal(config, task, source)
    notes = label_config(config, task, label_names, source)
    options: dict[str, Any] = {"dtype": getattr(torch, settings.dtype)}
    check_quantisation(settings)
    if settings.quantise != "none":
        options |= quantisation(settings, device, head_modules(build(config, task, settings.dtype, source)))
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = auto_class(task).from_pretrained(
            directory,
            config=config,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    notes += check_weights(model, info, task, source)
    new = new_parts(model, info)
    model.requires_grad_(False).eval()
    if settings.gradient_checkpointing:
        checkpoint_activations(model, source)
    if settings.quantise == "none":
        model.to(device)
        _leave_the_file(model)
    else:
        keep_quantised_weights(model)
    processor, more = load_processor(task, directory, model, source)
    notes += more
    for note in notes:
        _LOG.info("%s: %s", source, note)
    identity = fingerprint(model, read_values(directory, source))
    return LoadedBackbone(model, processor, task, identity, source, tuple(notes), new)


def _leave_the_file(model: nn.Module) -> None:
    """Copy the weights of a small model on a CPU out of the mapped file, where they lie at any address: a step is two
    to four percent faster, to the same bits. A large model stays there, since processes share a file and no copies."""
    weights = [parameter for parameter in model.parameters() if parameter.device.type == "cpu"]
    if sum(parameter.numel() for parameter in weights) < _LARGE:
        for parameter in weights:
            parameter.data = parameter.data.clone()


def load_shapes(settings: BackboneSettings, task: str, label_names: Sequence[str], identity: str) -> LoadedBackbone:
    """What a machine can have of a backbone without its weights: shapes on the meta device, from config.json, and the
    tokenizer or image processor.

    identity  fingerprint of the weights, as those who have them say

    Raises ModelError as `load_backbone` does, but asks for no weights and for no device.
    """
    model = skeleton(settings, task, label_names)
    directory, source = find_model(settings.id, settings.revision, weights=False)
    processor, notes = load_processor(task, directory, model, source)
    return LoadedBackbone(model, processor, task, identity, source, tuple(notes))


def load_processor(task: str, directory: Path, model: nn.Module, source: str) -> tuple[Any, list[str]]:
    """What stands before the model for a task, and what had to be decided about it; the model may be a skeleton."""
    kind = get_task(task).processor
    if kind == "images":
        return image_preprocessor(directory, model, source), []
    if kind == "images and text":
        return load_vqa_processor(directory, model, source)
    return load_tokenizer(directory, model, source, get_task(task).writes_text)


def skeleton(settings: BackboneSettings, task: str, label_names: Sequence[str]) -> nn.Module:
    """The same architecture on the meta device, from config.json alone: shapes and dtype without values.

    Quantisation is left out: shapes are those of the unquantised model. Raises ModelError as `load_backbone` does.
    """
    directory, source = find_model(settings.id, settings.revision, weights=False)
    with reading(f"{source} cannot be built for {task}"):
        config = read_config(directory, source)
        check_causal(config, task, source)
        label_config(config, task, label_names, source)
    return build(config, task, settings.dtype, source).requires_grad_(False).eval()


def build(config: Any, task: str, dtype: str, source: str) -> nn.Module:
    """The model of a configuration, on the meta device."""
    with reading(f"{source} cannot be built for {task}"), quiet(), torch.device("meta"):
        return auto_class(task).from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)


def auto_class(task: str) -> Any:
    import transformers

    return getattr(transformers, get_task(task).auto_class)


def read_config(directory: Path, source: str) -> Any:
    from transformers import AutoConfig

    _check_values(read_values(directory, source), source)
    with reading(f"{source}: config.json describes no model that transformers knows"), quiet():
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def read_values(directory: Path, source: str) -> dict[str, Any]:
    """What config.json holds, in a directory or itself."""
    with reading(f"{source}: config.json cannot be read"):
        data = (directory if directory.is_file() else directory / "config.json").read_bytes()
    values = parse_json(data, f"{source}: config.json", ModelError, _MOST_BYTES)
    if not isinstance(values, dict):
        raise ModelError(
            f"{source}: config.json describes no model: it must be a mapping, as save_pretrained writes it"
        )
    return values


def _check_values(values: Any, source: str) -> None:
    """Raise ModelError where a configuration names files or code to load, or asks for more than any model has."""
    if isinstance(values, list):
        for value in values:
            _check_values(value, source)
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        # transformers reads `transformers_weights` in place of model.safetensors, pickles among them, and takes a name
        # with a slash for code of the hub.
        code = key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value)
        if key == "transformers_weights" or code:
            raise ModelError(
                f"{source}: config.json has {key}: {brief(repr(value))}, which is not loaded here; remove it"
            )
        most = next((most for name, most in _MOST.items() if name.fullmatch(key)), None)
        for number in value if isinstance(value, list) else [value]:
            if most is not None and isinstance(number, (int, float)) and number > most:
                raise ModelError(f"{source}: config.json has {key}: {number}, and at most {most} are built; correct it")
        _check_values(value, source)


def pick_device(name: str) -> torch.device:
    """ "auto" is the first GPU where there is one. Raises ModelError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"model.device {name!r} is not a device; use cpu, cuda, cuda:N or auto") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"model.device is {name!r} and {torch.cuda.device_count()} GPUs are visible; use cpu or auto")
    return device


def check_quantisation(settings: BackboneSettings) -> None:
    """Raise ModelError where quantised weights are wanted and the library for them is not there."""
    if settings.quantise != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.quantise is {settings.quantise!r} and bitsandbytes is not installed; "
            "run pip install bitsandbytes, or set model.quantise: none"
        )


def quantisation(settings: BackboneSettings, device: torch.device, skip: Sequence[str]) -> dict[str, Any]:
    """Arguments of `from_pretrained` for 8-bit (LLM.int8) or 4-bit (NF4) weights through bitsandbytes.

    skip  modules that stay as they are: the head, which is small, may be new, and is what is trained in full
    """
    from transformers import BitsAndBytesConfig

    if settings.quantise == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(skip))
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=getattr(torch, settings.dtype),
            llm_int8_skip_modules=list(skip),
        )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def keep_quantised_weights(model: nn.Module) -> None:
    """Leave 4-bit weights as they were loaded. On some CPUs bitsandbytes packs them anew, with bfloat16 scales, in the
    first pass without gradients: numbers would depend on what was scored before, and weights whose rows are no
    multiple of 64 cannot be packed at all."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def checkpoint_activations(model: Any, source: str) -> None:
    """Recompute activations in the backward pass. The re-entrant variant would need an input that wants gradients."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ModelError(f"{source}: gradient checkpointing is not supported by {type(model).__name__}") from error
    model.config.use_cache = False  # the two exclude each other in training; generation asks for its cache itself


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no loading report, whose content befit checks and reports itself."""
    from transformers.utils import logging as chatter

    bars = chatter.is_progress_bar_enabled()
    chatter.disable_progress_bar()
    reports = logging.getLogger("transformers.modeling_utils")
    reports.addFilter(is_no_loading_report)
    try:
        yield
    finally:
        reports.removeFilter(is_no_loading_report)
        if bars:
            chatter.enable_progress_bar()


def is_no_loading_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()
