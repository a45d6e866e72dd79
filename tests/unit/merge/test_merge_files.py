"""`befit merge` on PEFT checkpoints: what PEFT makes of the result, what is refused and how, what is written."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import ConfigError, PayloadMismatch, RunError
from befit.merge import writing
from befit.merge.checkpoint import open_checkpoint
from befit.merge.files import merge_checkpoints
from befit.merge.merge import Merge
from befit.merge.writing import SafetensorsFile
from tests.tiny import tiny_model

# PEFT asks transformers by a name that transformers 5 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"]}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SAVED: dict[str, dict[str, bytes]] = {}  # the files of every adapter that PEFT has saved for these tests


def make_adapter(folder: Path, seed: int, kind: str = "llama", rank: int = 3, alpha: float = 6, **options: Any) -> Path:
    """A random adapter of a tiny model, saved by PEFT."""
    options = {"target_modules": TARGETS[kind], "fan_in_fan_out": kind == "gpt2", **options}
    wanted = repr((seed, kind, rank, alpha, sorted(options.items())))
    if wanted not in SAVED:
        save_adapter(folder, seed, kind, rank, alpha, options)
        SAVED[wanted] = {path.name: path.read_bytes() for path in folder.iterdir()}
    else:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in SAVED[wanted].items():
            (folder / name).write_bytes(content)
    return folder


def save_adapter(folder: Path, seed: int, kind: str, rank: int, alpha: float, options: dict[str, Any]) -> None:
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, **options)  # type: ignore[arg-type]
    model = peft.get_peft_model(tiny_model(kind), config)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=random)
    model.peft_config["default"].base_model_name_or_path = f"tiny-{kind}"
    model.save_pretrained(folder, save_embedding_layers=False)  # asked for "auto", PEFT looks at the hub


def loaded(folder: Path, kind: str = "llama") -> nn.Module:
    return peft.PeftModel.from_pretrained(tiny_model(kind), folder).eval()  # type: ignore[arg-type]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).view(2, 6) + 2).logits


def dense_updates(folder: Path) -> dict[str, Tensor]:
    """`scale B A` of every module, as PEFT reads a checkpoint."""
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    found: dict[str, Tensor] = {}
    for key, A in tensors.items():
        if key.endswith("lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            alpha = next((v for k, v in config["alpha_pattern"].items() if name.endswith(k)), config["lora_alpha"])
            scale = alpha / (math.sqrt(len(A)) if config["use_rslora"] else len(A))
            found[name] = scale * tensors[key.replace("lora_A", "lora_B")].double() @ A.double()
    return found


def with_deltas(updates: dict[str, Tensor], kind: str = "llama") -> nn.Module:
    """The base model with dense updates added to its weights."""
    model = tiny_model(kind)
    for name, delta in updates.items():
        weight = model.get_submodule(name).weight
        weight.data += (delta.T if kind == "gpt2" else delta).float()
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_full_rank_mean_is_the_model_with_the_mean_update(tmp_path: Path, kind: str) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k, kind, rank=r, alpha=a) for k, (r, a) in enumerate([(3, 6), (2, 8)])]
    merge_checkpoints(folders, tmp_path / "out", Merge(space="delta"), weights=[1, 3], full=True)
    first, second = map(dense_updates, folders)
    expected = with_deltas({name: 0.25 * first[name] + 0.75 * second[name] for name in first}, kind)
    torch.testing.assert_close(logits(loaded(tmp_path / "out", kind)), logits(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", ["factors", "knots", "delta"])
@pytest.mark.parametrize("rule", ["mean", "task-arithmetic", "ties", "dare", "dare-ties", "iso-c", "magnitude"])
def test_every_rule_in_every_space_loads_and_one_adapter_alone_stays_itself(
    tmp_path: Path, space: Any, rule: Any
) -> None:
    """With density 1 all rules but Iso-C give one adapter back; Iso-C gives one with equal singular values."""
    folder = make_adapter(tmp_path / "one", 1)
    density = {} if rule in ("mean", "task-arithmetic", "iso-c") else {"density": 1.0}
    report = merge_checkpoints([folder], tmp_path / "out", Merge(space=space, rule=rule, **density))
    found = logits(loaded(tmp_path / "out"))
    if rule != "iso-c":
        torch.testing.assert_close(found, logits(loaded(folder)), rtol=1e-4, atol=1e-5)
    elif space != "factors":
        for delta in dense_updates(tmp_path / "out").values():
            sigma = torch.linalg.svdvals(delta)[:3]
            torch.testing.assert_close(sigma, sigma.mean().expand(3), rtol=1e-5, atol=0)
    assert [one.rank for one in report.modules] == [3] * 6
    assert all(one.energy == pytest.approx(1) and one.filled == 0 for one in report.modules)
    for one in report.modules:
        assert one.norms == pytest.approx([float(dense_updates(folder)[one.name].norm())], rel=1e-5)


def test_two_adapters_merged_by_ties_answer_as_the_textbook_update_does(tmp_path: Path) -> None:
    from tests.unit.merge import oracle

    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(3)]
    how = Merge(space="delta", rule="ties", density=0.4, scale=0.7)
    merge_checkpoints(folders, tmp_path / "out", how, weights=[2, 1, 1], full=True)
    parts = [dense_updates(folder) for folder in folders]
    merged = {
        name: 0.7 * torch.from_numpy(oracle.ties([p[name].numpy() for p in parts], [2, 1, 1], 0.4)) for name in parts[0]
    }
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), logits(with_deltas(merged)), rtol=1e-3, atol=1e-4)


def test_ranks_alphas_and_scalings_of_every_kind_are_respected(tmp_path: Path) -> None:
    folders = [
        make_adapter(tmp_path / "plain", 0),
        make_adapter(tmp_path / "root", 1, rank=4, alpha=3, use_rslora=True),
        make_adapter(tmp_path / "pattern", 2, rank_pattern={"v_proj": 5}, alpha_pattern={"q_proj": 20}),
    ]
    for k in range(3):  # whichever is first gives its own scales to the result
        order = folders[k:] + folders[:k]
        report = merge_checkpoints(order, tmp_path / f"out{k}", Merge(space="knots"), full=True)
        parts = [dense_updates(folder) for folder in folders]
        expected = with_deltas({name: sum(p[name] for p in parts) / 3 for name in parts[0]})  # type: ignore[misc]
        torch.testing.assert_close(logits(loaded(tmp_path / f"out{k}")), logits(expected), rtol=1e-4, atol=1e-5)
        assert {one.rank for one in report.modules} == {10, 12}
    config = json.loads((tmp_path / "out1" / CONFIG).read_text())
    assert config["use_rslora"] and config["rank_pattern"] and config["alpha_pattern"]


def test_the_merged_rank_is_the_largest_or_the_one_asked_for(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / "a", 0), make_adapter(tmp_path / "b", 1, rank=5)]
    report = merge_checkpoints(folders, tmp_path / "out", Merge(space="delta"))
    assert {one.rank for one in report.modules} == {5} and all(0 < one.energy < 1 for one in report.modules)
    report = merge_checkpoints(folders, tmp_path / "small", Merge(space="delta", rank=1))
    assert load_file(tmp_path / "small" / WEIGHTS)["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (1, 24)  # fmt: skip # noqa: E501
    loaded(tmp_path / "small")
    report = merge_checkpoints(folders, tmp_path / "large", Merge(space="delta", rank=12))
    assert {one.filled for one in report.modules} == {4}
    torch.testing.assert_close(
        logits(loaded(tmp_path / "large")),
        logits(with_deltas({k: (v + dense_updates(folders[1])[k]) / 2 for k, v in dense_updates(folders[0]).items()})),
        rtol=1e-4,
        atol=1e-5,
    )


def test_trimming_whole_adapters_takes_from_small_modules_first(tmp_path: Path) -> None:
    """With one module a hundred times larger, a global cut of 10 % leaves little of the others; one per tensor 10 %."""
    folder = make_adapter(tmp_path / "one", 0, target_modules=["q_proj"])
    tensors = load_file(folder / WEIGHTS)
    grown = {k: v * (100 if "layers.1" in k else 1) for k, v in tensors.items()}
    save_file(grown, folder / WEIGHTS)
    for space in ("factors", "knots"):
        norms: dict[str, float] = {}
        for scope in ("tensor", "global"):
            how = Merge(space=space, rule="magnitude", density=0.1, trim_scope=scope)  # type: ignore[arg-type]
            report = merge_checkpoints([folder], tmp_path / f"{space}-{scope}", how)
            norms[scope] = next(one.norm for one in report.modules if "layers.0" in one.name)
        assert norms["tensor"] > 0 and norms["global"] == 0


def test_modules_to_save_are_averaged_and_load(tmp_path: Path) -> None:
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
    folders = [make_adapter(tmp_path / f"{k}", k, "bert", **options) for k in range(2)]
    report = merge_checkpoints(folders, tmp_path / "out", Merge(space="knots", rule="ties"), weights=[3, 1])
    assert report.averaged == ("base_model.model.classifier.bias", "base_model.model.classifier.weight")
    name = "base_model.model.classifier.weight"
    one, two, out = (load_file(folder / WEIGHTS)[name] for folder in (*folders, tmp_path / "out"))
    torch.testing.assert_close(out, 0.75 * one + 0.25 * two)
    torch.testing.assert_close(loaded(tmp_path / "out", "bert").base_model.model.classifier.modules_to_save["default"].weight, out)  # type: ignore[union-attr] # fmt: skip # noqa: E501


def test_large_arrays_are_averaged_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
    folders = [make_adapter(tmp_path / f"{k}", k, "bert", **options) for k in range(2)]
    merge_checkpoints(folders, tmp_path / "whole", Merge())
    monkeypatch.setattr("befit.merge.files._ROWS", 20)
    merge_checkpoints(folders, tmp_path / "rows", Merge())
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (tmp_path / "rows" / WEIGHTS).read_bytes()


def test_the_result_has_the_first_adapters_type_or_the_one_asked_for(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    half = {k: v.bfloat16() for k, v in load_file(folders[0] / WEIGHTS).items()}
    save_file(half, folders[0] / WEIGHTS)
    merge_checkpoints(folders, tmp_path / "first", Merge(space="knots"))
    assert {t.dtype for t in load_file(tmp_path / "first" / WEIGHTS).values()} == {torch.bfloat16}
    merge_checkpoints(folders, tmp_path / "asked", Merge(space="knots"), dtype=torch.float32)
    assert {t.dtype for t in load_file(tmp_path / "asked" / WEIGHTS).values()} == {torch.float32}
    with pytest.raises(PayloadMismatch, match="does not fit into float16"):
        merge_checkpoints(folders, tmp_path / "x", Merge(scale=1e9), dtype=torch.float16)
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".x*"))


def test_task_arithmetic_subtracts_and_means_do_not(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    how = Merge(space="delta", rule="task-arithmetic")
    merge_checkpoints(folders, tmp_path / "out", how, weights=[1, -0.5], full=True)
    one, two, out = map(dense_updates, (*folders, tmp_path / "out"))
    for name, delta in out.items():
        torch.testing.assert_close(delta, one[name] - 0.5 * two[name], rtol=1e-5, atol=1e-5)
    for weights, words in (
        ([1, -1], "task-arithmetic can subtract"),
        ([0, 0], "not all zero"),
        ([1], "one for each"),
        ([1, math.nan], "finite"),
    ):
        with pytest.raises(ConfigError, match=words):
            merge_checkpoints(folders, tmp_path / "no", Merge(), weights=weights)


def test_folders_can_be_texts_and_types_that_hold_no_update_are_refused(tmp_path: Path) -> None:
    folders = [str(make_adapter(tmp_path / f"{k}", k)) for k in range(2)]
    assert (
        merge_checkpoints(folders, str(tmp_path / "out"), Merge(space="knots"), dtype=torch.float16).dtype == "float16"
    )
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(ConfigError, match=r"dtype: must be one of torch\.float64, .*, got "):
            merge_checkpoints(folders, tmp_path / "no", Merge(), dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights: an adapter does not say how many examples"):
        merge_checkpoints(folders, tmp_path / "no", Merge(weights="uniform"))
    assert not (tmp_path / "no").exists()


def test_an_adapter_in_several_files_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "0", 0)
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00001.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="the list of several files: save it again as one"):
        merge_checkpoints([folder], tmp_path / "out", Merge())


def test_dare_repeats_for_a_seed(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    how = Merge(space="knots", rule="dare", density=0.5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        merge_checkpoints(folders, tmp_path / f"out-{name}", how, seed=seed)
    a, b, c = ((tmp_path / f"out-{name}" / WEIGHTS).read_bytes() for name in "abc")
    assert a == b != c


# --- what is refused -------------------------------------------------------------------------------------------------


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_model_name_or_path": "other"}, "base_model_name_or_path is 'other'"),
        ({"revision": "v2"}, "revision is 'v2'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config is"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"target_parameters": ["experts"]}, "target_parameters is"),
        ({"a_feature_of_tomorrow": 3}, "a_feature_of_tomorrow is 3"),
        ({"r": 4}, "has rank 3, adapter_config.json says 4"),
        ({"r": "3"}, "r must be a whole number"),
        ({"lora_alpha": 0}, "lora_alpha must be positive"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern must map"),
    ],
)
def test_a_field_that_forbids_merging_is_named_with_its_file(tmp_path: Path, fields: Any, words: str) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    change(folders[1], **fields)
    with pytest.raises(ConfigError, match=words) as caught:
        merge_checkpoints(folders, tmp_path / "out", Merge(space="knots"))
    assert len(caught.value.problems) == (6 if "r" in fields and fields["r"] == 4 else 1)
    assert all(str(folders[1]) in problem for problem in caught.value.problems)
    assert not (tmp_path / "out").exists()


def test_real_dora_and_embedding_adapters_are_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path / "dora", 0, use_dora=True)
    make_adapter(tmp_path / "embedding", 0, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(ConfigError, match="use_dora"):
        open_checkpoint(tmp_path / "dora")
    with pytest.raises(ConfigError, match="lora_embedding_A"):
        open_checkpoint(tmp_path / "embedding")


def test_a_base_of_another_name_can_be_declared_the_same(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    change(folders[1], base_model_name_or_path="/somewhere/else")
    merge_checkpoints(folders, tmp_path / "out", Merge(), base="the-base")
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["base_model_name_or_path"] == "the-base"


def test_targets_widths_and_ranks_that_differ_are_all_named_at_once(tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "first", 0)
    fewer = make_adapter(tmp_path / "fewer", 1, target_modules=["q_proj", "v_proj"])
    wider = make_adapter(tmp_path / "wider", 2)
    tensors = load_file(wider / WEIGHTS)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name: torch.zeros(3, 99)}, wider / WEIGHTS)
    with pytest.raises(ConfigError) as caught:
        merge_checkpoints([first, fewer, wider], tmp_path / "out", Merge(space="knots"))
    problems = caught.value.problems
    assert len(problems) == 2
    assert str(fewer) in problems[0] and "down_proj" in problems[0] and "differ in 2 places" in problems[0]
    assert str(wider) in problems[1] and "(16, 99)" in problems[1] and "q_proj" in problems[1]
    other = make_adapter(tmp_path / "other", 2, rank=2)
    with pytest.raises(ConfigError, match=r"has rank 2.*--space knots or delta"):
        merge_checkpoints([first, other], tmp_path / "out", Merge())


def test_damaged_and_missing_files_are_named_together(tmp_path: Path) -> None:
    good, torn, odd, pickled = (make_adapter(tmp_path / name, 0) for name in ("good", "torn", "odd", "pickled"))
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:-100])
    (odd / CONFIG).write_text("{not json")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        merge_checkpoints([good, torn, odd, pickled, tmp_path / "empty", tmp_path / "no"], tmp_path / "out", Merge())
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    for words in ("damaged or no safetensors", "is not JSON", "a pickle", f"no {CONFIG}", "no such folder"):
        assert words in text


def test_factors_without_their_other_half_and_empty_files_are_damaged(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "one", 0)
    tensors = load_file(folder / WEIGHTS)
    half = {k: v for k, v in tensors.items() if not k.endswith("layers.0.mlp.down_proj.lora_B.weight")}
    save_file(half, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj has no lora_B"):
        open_checkpoint(folder)
    save_file({"base_model.model.score.weight": torch.ones(2)}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match="holds no LoRA factors"):
        open_checkpoint(folder)


def test_numbers_that_are_not_finite_are_named_and_leave_nothing(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    tensors = load_file(folders[1] / WEIGHTS)
    name = sorted(tensors)[-1]
    tensors[name][0, 0] = math.nan
    save_file(tensors, folders[1] / WEIGHTS)
    with pytest.raises(PayloadMismatch, match=f"{folders[1]}.*{name}"):
        merge_checkpoints(folders, tmp_path / "out", Merge(space="knots"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_options_that_files_cannot_serve_are_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "one", 0)
    for how, full, words in (
        (Merge(rule="ties", delta_reference="round_start"), False, "delta_reference"),
        (Merge(space="knots", split="B"), True, "split: the whole update is not decomposed"),
        (Merge(), True, "use knots or delta"),
        (Merge(space="knots", rank=2), True, "not both"),
    ):
        with pytest.raises(ConfigError, match=words):
            merge_checkpoints([folder], tmp_path / "out", how, full=full)
    with pytest.raises(ConfigError, match="no adapters"):
        merge_checkpoints([], tmp_path / "out", Merge())


@pytest.mark.parametrize(("space", "rule"), [("factors", "ties"), ("knots", "mean"), ("knots", "iso-c")])
def test_numbers_that_are_not_finite_are_refused_with_the_name_of_their_file(
    tmp_path: Path, space: Any, rule: Any
) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    arrays = load_file(folders[1] / WEIGHTS)
    name = next(name for name in arrays if name.endswith("lora_B.weight"))
    arrays[name][0, 0] = float("nan")
    save_file(arrays, folders[1] / WEIGHTS)
    with pytest.raises(
        PayloadMismatch, match=rf"{re.escape(str(folders[1]))}.*{re.escape(name)} holds numbers that are not finite"
    ):
        merge_checkpoints(folders, tmp_path / "out", Merge(space=space, rule=rule))
    assert not (tmp_path / "out").exists()


# --- what is written -------------------------------------------------------------------------------------------------


def test_an_adapter_is_replaced_only_by_force_and_other_folders_never(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    out = make_adapter(tmp_path / "out", 5)
    (out / "notes.txt").write_text("mine")
    before = (out / WEIGHTS).read_bytes()
    with pytest.raises(ConfigError, match="--force replaces it"):
        merge_checkpoints(folders, out, Merge())
    assert (out / WEIGHTS).read_bytes() == before
    merge_checkpoints(folders, out, Merge(), force=True)
    assert (out / WEIGHTS).read_bytes() != before and (out / "notes.txt").read_text() == "mine"
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.tex").write_text("x")
    for place, words in (
        (tmp_path / "documents", "will not be replaced"),
        (folders[0], "one of the adapters"),
        (tmp_path / "documents" / "thesis.tex", "is a file"),
    ):
        with pytest.raises(ConfigError, match=words):
            merge_checkpoints(folders, place, Merge(), force=True)


def test_a_full_disk_leaves_the_old_adapter_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    out = make_adapter(tmp_path / "out", 5)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        merge_checkpoints(folders, out, Merge(), force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "out"]


def test_an_appended_file_is_what_safetensors_reads_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(writing.os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_size))
    arrays = {"a": torch.randn(3, 4).bfloat16(), "b": torch.tensor(7), 'é"': torch.randn(5, 2), "n": torch.empty(0, 2)}
    with SafetensorsFile(tmp_path / "x.safetensors", list(arrays)) as file:
        for name, tensor in arrays.items():
            file.append(name, tensor[:2] if name == 'é"' else tensor, tuple(tensor.shape))
            if name == 'é"':
                file.more(name, tensor[2:])
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys() and flushed == [(tmp_path / "x.safetensors").stat().st_size]
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in arrays.items()
    )


def test_the_file_of_a_merge_is_readable_by_anybody_and_says_how_it_was_made(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    merge_checkpoints(folders, tmp_path / "new" / "out", Merge(space="knots", rule="ties", density=0.3), seed=4)
    out = tmp_path / "new" / "out"
    assert out.stat().st_mode & 0o777 == 0o755
    card = (out / "README.md").read_text()
    assert '"rule": "ties"' in card and '"density": 0.3' in card and '"seed": 4' in card and "tiny-llama" in card


# --- the command -----------------------------------------------------------------------------------------------------


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


def test_the_command_prints_a_table_or_json_and_nothing_else(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k, rank=2 + k) for k in range(2)]
    told = call(*folders, "--out", tmp_path / "a", "--rule", "ties", "--density", "0.5", "--weights", "1,2")
    assert told.exit_code == 0, told.output
    assert "module of model.layers" in told.stdout and "1.self_attn.v_proj" in told.stdout
    assert "ties of 2 adapters in knots" in told.stdout
    told = call(
        *folders, "--out", tmp_path / "b", "--rank", "full", "--space", "delta", "--json", "--dtype", "bfloat16"
    )
    report = json.loads(told.stdout)
    assert report["dtype"] == "bfloat16" and report["merge"]["space"] == "delta"
    assert [module["rank"] for module in report["modules"]] == [5] * 6
    assert report["modules"][0].keys() == {"name", "rank", "scale", "energy", "norm", "norms", "filled", "seconds"}
    assert peft.PeftConfig.from_pretrained(tmp_path / "b").r == 5  # type: ignore[attr-defined]


def test_the_command_takes_every_option_of_a_merge(tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / f"{k}", k) for k in range(2)]
    done = call(
        *folders, "--out", tmp_path / "a", "--rule", "iso-c", "--set", "iso_mean=full", "--set", "split=B", "--json"
    )
    assert done.exit_code == 0, done.output
    assert {key: json.loads(done.stdout)["merge"][key] for key in ("iso_mean", "split")} == {
        "iso_mean": "full",
        "split": "B",
    }
    twice = call(*folders, "--out", tmp_path / "b", "--density", "0.3", "--set", "density=0.4")
    assert twice.exit_code == 2 and "--set density: this is what --density says; give that alone" in twice.stderr
    wrong = call(*folders, "--out", tmp_path / "b", "--set", "iso_mean=foo", "--set", "splitt=B")
    assert wrong.exit_code == 2 and not (tmp_path / "b").exists()
    assert "--set iso_mean" in wrong.stderr and "Did you mean: split" in wrong.stderr


def test_many_modules_are_shown_by_what_they_are_called_in_their_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("befit.cli.merge.SHOWN_MODULES", 2)
    told = call(make_adapter(tmp_path / "0", 0), "--out", tmp_path / "out")
    row = next(line for line in told.stdout.splitlines() if line.startswith("self_attn.q_proj"))
    assert row.split()[1] == "2" and "model.layers.*" in told.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rank", "0"), "--rank: must be a whole number from 1 on, or full, got '0'"),
        (("--rank", "all"), "got 'all'"),
        (("--weights", "1;2"), "numbers with commas between"),
        (("--density", "0.5"), "density: applies to "),
        (("--rule", "ties", "--density", "2"), "--density: must be above 0 and at most 1"),
        (("--scale", "-1"), "--scale: must be 0 or more"),
        (("--set", "weights=uniform"), "--set weights: this is what --weights says"),
        (("--rule", "tise"), "tise"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    told = call(make_adapter(tmp_path / "0", 0), "--out", tmp_path / "out", *options)
    assert told.exit_code == 2 and words in told.stderr and "Traceback" not in told.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", ["0,0", "1e308,1e308", "inf,1", "nan,1"])
def test_weights_without_a_finite_share_are_refused(weights: str, tmp_path: Path) -> None:
    folders = [make_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    told = call(*folders, "--out", tmp_path / "out", "--weights", weights)
    assert told.exit_code == 2 and "weights: must be finite, with a finite sum, and not all zero" in told.stderr
    assert not (tmp_path / "out").exists()


def test_a_smaller_update_than_the_rank_is_told(tmp_path: Path) -> None:
    told = call(make_adapter(tmp_path / "0", 0), "--out", tmp_path / "out", "--rank", "8")
    assert told.exit_code == 0 and "6 modules have a smaller update than the rank" in " ".join(told.stderr.split())


def test_dense_merges_of_wide_modules_say_what_they_take_and_low_rank_ones_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("befit.merge.files._WIDE", 16)
    folder = make_adapter(tmp_path / "0", 0)
    told = call(folder, "--out", tmp_path / "a", "--space", "delta", "--rule", "ties")
    assert told.exit_code == 0 and "forms updates of 16 x 24" in " ".join(told.stderr.split())
    for number, options in enumerate(
        [("--space", "delta"), ("--rule", "ties"), ("--space", "delta", "--rule", "iso-c")]
    ):
        told = call(folder, "--out", tmp_path / f"b{number}", *options)
        assert told.exit_code == 0 and "forms updates" not in told.stderr
