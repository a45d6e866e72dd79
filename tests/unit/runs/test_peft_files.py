"""Checkpoints that PEFT reads: a stranger with the backbone and the folder has the client's model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    CLIPConfig,
    CLIPForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from befit.adapters.forms import DENSE
from befit.adapters.keys import slot
from befit.adapters.layout import Layout, Slot, lora
from befit.adapters.model import AdaptedModel
from befit.config.experiment import ModelSettings
from befit.core.errors import ConfigError, ModelError, PayloadMismatch
from befit.core.wire import from_bytes, to_bytes
from befit.methods.potara import merge_pair
from befit.models.backbone import load_backbone
from befit.protocol.method import Deployment
from befit.protocol.site import Site
from befit.runs.artifacts import read_deployment
from befit.runs.peft_io import write_adapter
from befit.runs.peft_start import read_adapter
from befit.runs.runner import run
from befit.zoo import zoo_path
from tests.processes import call, fork_workers, program
from tests.tiny import assert_near, assert_same, make_site, random_state, tiny_model

# PEFT asks transformers by a name that transformers 5 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TASKS = {"vit": "image-classification", "bert": "text-classification", "llama": "causal-lm", "gpt2": "causal-lm"}
DIFFERENT_RANKS = Layout((Slot("shared", 2, 6.0), Slot("personal", 3, 4.0)))


def write(site: Site, deployed: Deployment, folder: Path, kind: str) -> Path:
    write_adapter(folder, deployed, site.model, base="tiny", task=TASKS[kind])
    return folder


def logits_here(site: Site, deployed: Deployment) -> torch.Tensor:
    batch = site.examples("test").batch(range(6))
    with site.model.using(deployed.arrays, *deployed.slots, mixer=deployed.mixer), torch.no_grad():
        return site.logits(batch)


def logits_there(site: Site, folder: Path, kind: str) -> torch.Tensor:
    loaded = peft.PeftModel.from_pretrained(tiny_model(kind), str(folder)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        return site.task.logits(loaded, site.examples("test").batch(range(6)))


@pytest.mark.parametrize(
    ("layout", "slots"),
    [
        (lora(2, 6.0), ("shared",)),
        (DIFFERENT_RANKS, ("shared",)),
        (DIFFERENT_RANKS, ("shared", "personal")),
        (Layout((Slot("shared", 2, 3.0), Slot("personal", 4, 5.5, head=False))), ("shared", "personal")),
    ],
    ids=["one", "one of two", "two of different rank", "head in one only"],
)
def test_peft_computes_what_was_deployed(kind: str, layout: Layout, slots: tuple[str, ...], tmp_path: Path) -> None:
    site = make_site(kind, layout, targets="all")
    state = random_state(site.model)
    site.model.load(state)
    deployed = Deployment(site.model.dump(slot(*slots)), slots)
    here = logits_here(site, deployed)
    torch.testing.assert_close(
        logits_there(site, write(site, deployed, tmp_path, kind), kind), here, rtol=1e-4, atol=1e-5
    )
    with torch.no_grad():
        assert not torch.allclose(site.logits(site.examples("test").batch(range(6))), here, atol=1e-2)


@pytest.mark.parametrize("space", ["factors", "product", "product-truncated"])
def test_peft_computes_a_merged_adapter_of_any_space(kind: str, space: str, tmp_path: Path) -> None:
    rank = 4 if space == "product" else 2
    site = make_site(kind, Layout((Slot("shared", 2, 6.0), Slot("personal", 2, 6.0), Slot("merged", rank, 3.0 * rank))))
    site.model.load(random_state(site.model))
    merged = merge_pair(site.model.dump(slot("shared")), site.model.dump(slot("personal")), {"": 0.3}, space)
    deployed = Deployment(merged, ("merged",))
    here = logits_here(site, deployed)
    torch.testing.assert_close(
        logits_there(site, write(site, deployed, tmp_path, kind), kind), here, rtol=1e-4, atol=1e-5
    )


def test_a_slot_comes_back_from_its_files(kind: str, tmp_path: Path) -> None:
    """A and B bit for bit; a head to one rounding of the backbone's weights, to which its change was added."""
    site = make_site(kind, lora(4, 6.0))
    state = random_state(site.model)
    write(site, Deployment(state, ("shared",)), tmp_path, kind)
    found = read_adapter(tmp_path, site.model, "shared")
    low_rank = [key for key in state if key.endswith(("/A", "/B"))]
    assert_same({key: found[key] for key in low_rank}, {key: state[key] for key in low_rank})
    assert_near(found, state, atol=1e-6)


def check_in_peft(fresh: Callable[[], nn.Module], task: str, heads: list[str], folder: Path, **inputs: Tensor) -> None:
    """PEFT has befit's logits with an adapter of random numbers, which also comes back from its files."""
    model = AdaptedModel(fresh())
    assert list(model.shapes.heads) == heads
    model.install(lora(2, 6.0), seed=0)
    state = random_state(model)
    with model.using(state, "shared"), torch.no_grad():
        here = model.backbone(**inputs).logits
    write_adapter(folder, Deployment(state, ("shared",)), model, base="tiny", task=task)
    loaded = peft.PeftModel.from_pretrained(fresh(), str(folder)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, here, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(fresh()(**inputs).logits, here, atol=1e-2)
    assert_near(read_adapter(folder, model, "shared"), state)


def test_a_classifier_of_two_layers_is_loaded_by_peft_too(tmp_path: Path) -> None:
    """PEFT keeps a child of the model whole: `classifier`, not `classifier.dense` and `classifier.out_proj`."""

    def fresh() -> RobertaForSequenceClassification:
        torch.manual_seed(0)
        config = RobertaConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=20,
            initializer_range=0.3,
            id2label={0: "a", 1: "b", 2: "c"},
        )
        return RobertaForSequenceClassification(config).eval()

    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
    heads = ["classifier.dense", "classifier.out_proj"]
    check_in_peft(fresh, "text-classification", heads, tmp_path, input_ids=tokens)


def test_peft_computes_what_an_image_classifier_of_clip_does(tmp_path: Path) -> None:
    """Whose backbone is no child of the name that transformers gives it."""

    def fresh() -> CLIPForImageClassification:
        torch.manual_seed(0)
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = CLIPConfig(vision_config={**vision, "image_size": 8, "patch_size": 4}, id2label={0: "a", 1: "b"})
        return CLIPForImageClassification(config).eval()

    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    check_in_peft(fresh, "image-classification", ["classifier"], tmp_path, pixel_values=pixels)


def test_peft_loads_a_classifier_whose_head_was_not_trained(tmp_path: Path) -> None:
    site = make_site("bert", Layout((Slot("shared", 2, 6.0, head=False),)))
    deployed = Deployment(random_state(site.model), ("shared",))
    write(site, deployed, tmp_path, "bert")
    torch.testing.assert_close(logits_there(site, tmp_path, "bert"), logits_here(site, deployed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 3),
        ("lora_alpha", 5),
        ("use_rslora", True),
        ("use_dora", True),
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 1}),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused_by_the_name_of_the_field(
    field: str, value: Any, tmp_path: Path
) -> None:
    site = make_site("llama")
    write(site, Deployment(random_state(site.model), ("shared",)), tmp_path, "llama")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises((ConfigError, PayloadMismatch), match=field):
        read_adapter(tmp_path, site.model, "shared")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_slot_comes_back_from_files_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """With what no slot trains in a module that PEFT saves whole: if that is not this model's, it is another head."""
    loaded = load_backbone(ModelSettings("names-bert-mlm"), "text-classification", ("a", "b"), 3)
    model = AdaptedModel(loaded.model, new=loaded.new)
    model.install(lora(2, 6.0), seed=0)
    state = random_state(model)
    write_adapter(tmp_path, Deployment(state, ("shared",)), model, base="tiny", task="text-classification")
    path = tmp_path / "adapter_model.safetensors"
    tensors, _ = from_bytes(path.read_bytes())
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    path.write_bytes(to_bytes(tensors, {"format": "pt"}))
    assert_near(read_adapter(tmp_path, model, "shared"), state, atol=0.05)
    frozen = next(name for name in tensors if "pooler" in name and name.endswith(".bias"))
    path.write_bytes(to_bytes({**tensors, frozen: tensors[frozen] + 1}, {"format": "pt"}))
    with pytest.raises(PayloadMismatch, match=f"{re.escape(frozen)}, which no slot trains, is not what it is"):
        read_adapter(tmp_path, model, "shared")


@pytest.mark.parametrize(("mine", "theirs"), [("auto", "all"), ("all", "auto")])
def test_a_checkpoint_of_other_targets_is_refused(mine: str, theirs: str, tmp_path: Path) -> None:
    writer, reader = make_site("llama", targets=theirs), make_site("llama", targets=mine)
    write(writer, Deployment(random_state(writer.model), ("shared",)), tmp_path, "llama")
    with pytest.raises(PayloadMismatch, match=rf"{re.escape(str(tmp_path))}: it .*; its targets differ"):
        read_adapter(tmp_path, reader.model, "shared")


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    site = make_site("llama")
    write(site, Deployment(random_state(site.model), ("shared",)), tmp_path, "llama")
    path = tmp_path / "adapter_model.safetensors"
    tensors, _ = from_bytes(path.read_bytes())
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    path.write_bytes(to_bytes(tensors, {"format": "pt"}))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.q_proj has no lora_B"):
        read_adapter(tmp_path, site.model, "shared")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_not_written(number: float, tmp_path: Path) -> None:
    site = make_site("bert")
    state = random_state(site.model)
    state["shared/block.01.v_proj/B"][0, 0] = number
    with pytest.raises(ModelError, match=r"encoder\.layer\.1\.attention\.self\.value\.lora_B.* not finite"):
        write(site, Deployment(state, ("shared",)), tmp_path, "bert")
    assert not list(tmp_path.iterdir())


def test_a_gated_deployment_exports_the_own_slot_and_says_so(tmp_path: Path) -> None:
    slots = ("shared", "personal")
    site = make_site("bert", lora(2, 6.0, slots=slots, gated=slots))
    site.model.load(random_state(site.model))
    write(site, Deployment(site.model.dump(slot(*slots, "gate")), slots, "gate"), tmp_path, "bert")
    own = Deployment(site.model.dump(slot("personal")), ("personal",))
    torch.testing.assert_close(logits_there(site, tmp_path, "bert"), logits_here(site, own), rtol=1e-4, atol=1e-5)
    card = (tmp_path / "README.md").read_text()
    assert "depend on the input" in card and "'personal' alone" in card


@pytest.mark.parametrize(
    ("method", "workers", "own", "others"),
    [
        ({"name": "fedlease", "experts": 2, "rounds_local": 1}, 1, "shared", "other-1"),
        ({"name": "fedlease", "experts": 2, "rounds_local": 1}, 2, "shared", "other-1"),
        ({"name": "rela", "gate": "input"}, 1, "personal", "shared"),
        ({"name": "fedmosaic", "blocks": 1, "gate": "noisy-input"}, 1, "personal", "shared"),
    ],
)
def test_a_run_with_a_gate_by_input_exports_what_the_client_trained(
    method: dict[str, Any],
    workers: int,
    own: str,
    others: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it stands among the slots of its deployment, and whichever process has the client."""
    fork_workers(monkeypatch)
    values = {
        "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
        "limit": {"records": 24},
        "method": {"rank": 2, "alpha": 4.0, **method},
        "baselines": [],
        "train": {"max_steps": 2, "lr": 0.01},
        "federation": {"rounds": 2},
        "engine": {"workers": workers},
        "report": {"plots": False},
    }
    folder = run(values, out=tmp_path / "run", quiet=True).path / "clients" / "client-00"
    arrays = read_deployment(folder).arrays
    tensors, _ = from_bytes((folder / "adapter" / "adapter_model.safetensors").read_bytes())
    written, key = tensors["base_model.model.vit.layers.0.attention.q_proj.lora_A.weight"], "block.00.q_proj/A"
    assert torch.equal(written, arrays[f"{own}/{key}"]) and not torch.equal(written, arrays[f"{others}/{key}"])
    assert f"'{own}' alone" in (folder / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_dense_slot_becomes_an_adapter_of_full_rank_that_peft_runs_alike(kind: str, tmp_path: Path) -> None:
    site = make_site(kind, Layout((Slot("merged", 2, 6.0, form=DENSE),)), targets="all")
    site.model.load(random_state(site.model))
    deployed = Deployment(site.model.dump(slot("merged")), ("merged",))
    write(site, deployed, tmp_path, kind)
    torch.testing.assert_close(logits_there(site, tmp_path, kind), logits_here(site, deployed), rtol=1e-4, atol=1e-5)
    tensors, _ = from_bytes((tmp_path / "adapter_model.safetensors").read_bytes())
    smaller = {name: min(shape.d_in, shape.d_out) for name, shape in site.model.shapes.targets.items()}
    for name, size in smaller.items():
        assert len(tensors[f"base_model.model.{site.model.paths[name]}.lora_A.weight"]) == size


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "classifier"), ("classifier",)])
def test_peft_has_the_logits_of_a_classifier_that_is_a_target(targets: str | tuple[str, ...], tmp_path: Path) -> None:
    """Whatever classifier a stranger's copy of the backbone starts with: it is saved whole."""
    site = make_site("bert", Layout((Slot("shared", 2, 6.0),)), targets=targets)
    deployed = Deployment(random_state(site.model), ("shared",))
    assert "shared/classifier/A" in deployed.arrays
    write(site, deployed, tmp_path, "bert")
    there = tiny_model("bert")
    there.classifier.reset_parameters()  # type: ignore[union-attr, operator]
    loaded = peft.PeftModel.from_pretrained(there, str(tmp_path)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        logits = site.task.logits(loaded, site.examples("test").batch(range(6)))
    torch.testing.assert_close(logits, logits_here(site, deployed), rtol=1e-4, atol=1e-5)


def test_a_base_on_fewer_modules_and_a_dense_head_is_folded_with_a_head_of_low_rank(tmp_path: Path) -> None:
    layout = Layout((Slot("shared", 3, 4.0, targets=("query", "value")), Slot("budgeted", 2, 6.0)))
    site = make_site("bert", layout, targets="all-linear")
    deployed = Deployment(random_state(site.model), ("shared", "budgeted"))
    assert "shared/classifier/weight" in deployed.arrays and "budgeted/classifier/A" in deployed.arrays
    write(site, deployed, tmp_path, "bert")
    torch.testing.assert_close(logits_there(site, tmp_path, "bert"), logits_here(site, deployed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [lora(2, 6.0), Layout((Slot("shared", 1, 2.0, targets=()),))], ids=["LoRA", "head"])
def test_a_configuration_is_what_peft_would_write_without_its_defaults(layout: Layout, tmp_path: Path) -> None:
    site = make_site("bert", layout)
    write(site, Deployment(random_state(site.model), ("shared",)), tmp_path, "bert")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    as_peft = peft.LoraConfig.from_pretrained(str(tmp_path)).to_dict()
    assert written.keys() <= as_peft.keys() and "peft_version" not in written
    for key, value in written.items():
        assert sorted(value) == sorted(as_peft[key]) if key == "target_modules" else value == as_peft[key], key
    if layout.slots[0].targets == ():
        assert written["target_modules"] == DUMMY_TARGET_MODULES


def test_a_run_imports_no_peft(tmp_path: Path) -> None:
    values = {
        "benchmark": {"name": "digits", "clients": 2},
        "method": "fedit",
        "train": {"max_steps": 1},
        "federation": {"rounds": 1},
        "report": {"plots": False},
    }
    # A forked process has both; a befit that is imported anew imports again what it needs.
    forget = "[sys.modules.pop(one) for one in [*sys.modules] if one.partition('.')[0] in ('befit', 'peft')]"
    begin = f"import sys; {forget}; import befit"
    code = f"{begin}; befit.run({values!r}, out='run', quiet=True); print('peft' in sys.modules)"
    done = call(program, code, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert len(list(tmp_path.glob("run/clients/*/adapter/adapter_config.json"))) == 2


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_head_alone_is_an_adapter_that_peft_loads(kind: str, tmp_path: Path) -> None:
    site = make_site(kind, Layout((Slot("budgeted", 1, 2.0, targets=()),)))
    deployed = Deployment(random_state(site.model), ("budgeted",))
    assert {key.split("/")[1] for key in deployed.arrays} == {"classifier"}
    write(site, deployed, tmp_path, kind)
    torch.testing.assert_close(logits_there(site, tmp_path, kind), logits_here(site, deployed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("targets", "head"), [("auto", True), ("all-linear", True), ("auto", False)])
def test_an_adapter_brings_what_the_checkpoint_lacks_and_the_seed_has_drawn(
    tmp_path: Path, targets: str, head: bool
) -> None:
    """A masked language model is saved without a pooler: whoever loads the adapter draws another one."""
    classes = ("es", "fi", "zh")
    loaded = load_backbone(ModelSettings("names-bert-mlm"), "text-classification", classes, 3)
    assert loaded.new == ("bert.pooler", "classifier")
    model = AdaptedModel(loaded.model, targets, head=head, new=loaded.new)
    model.install(Layout((Slot("shared", 2, 4.0, head=head),)), 0)
    state = random_state(model, size=0.1)
    model.load(state)
    write_adapter(tmp_path, Deployment(state, ("shared",)), model, base="x", task="text-classification")
    tokens = loaded.processor("Virtanen", return_tensors="pt")
    with torch.no_grad(), model.active("shared"):
        here = model.backbone(**tokens).logits
    torch.manual_seed(99)  # a stranger's
    other = AutoModelForSequenceClassification.from_pretrained(str(zoo_path("names-bert-mlm")), num_labels=3)
    with torch.no_grad():
        there = peft.PeftModel.from_pretrained(other, str(tmp_path)).eval()(**tokens).logits
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
