"""Image and text classification: what goes in, the loss, the metrics and the answers."""

import io
import logging
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.utils.class_weight import compute_class_weight
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from befit.adapters.instance import summaries
from befit.core.errors import ConfigError, DataError
from befit.models import load_backbone
from befit.tasks import make_task
from befit.tasks.examples import StackedExamples, balanced
from befit.tasks.images import ImagePreprocessor, read_image
from tests.unit.models.tiny_models import Settings, save_bert, save_gpt2, save_llama, save_vit

LABELS = ("neg", "pos")
TEXTS = [
    {"id": "r0", "text": "good film", "label": 1},
    {"id": "r1", "text": "very very very bad book", "label": "neg"},
    {"id": "r2", "text": "bad", "label": 0},
]
DIGITS = ("zero", "one", "two")


@pytest.fixture
def text(tmp_path):
    save_bert(tmp_path)
    backbone = load_backbone(Settings(str(tmp_path)), "text-classification", LABELS, 0)
    return backbone.model, make_task("text-classification", backbone.processor, LABELS)


@pytest.fixture
def image(tmp_path):
    save_vit(tmp_path)
    backbone = load_backbone(Settings(str(tmp_path)), "image-classification", DIGITS, 0)
    return backbone.model, make_task("image-classification", backbone.processor, DIGITS)


def pictures(count=5):
    rng = np.random.default_rng(0)
    return [
        {"id": f"i{k}", "image": rng.random((8, 8), dtype=np.float32), "label": np.int64(k % 3)} for k in range(count)
    ]


def test_sample_losses_are_minus_log_probabilities_and_their_mean_is_the_loss(text):
    """-log softmax([0, log 3])[1] = log(4/3), and the same logits with label 0: log 4."""
    _, task = text
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]], dtype=torch.bfloat16)
    batch = {"labels": torch.tensor([1, 0])}
    losses = task.sample_losses(logits, batch)
    torch.testing.assert_close(losses, torch.tensor([math.log(4 / 3), math.log(4)]), rtol=0, atol=5e-3)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(task.loss(logits, batch), losses.mean())
    torch.testing.assert_close(task.sample_losses(logits, batch, "sum"), losses)


def test_a_text_scores_the_same_alone_and_padded_beside_a_longer_one(text):
    model, task = text
    examples = task.prepare(TEXTS)
    together = examples.batch([2, 1])
    assert together["input_ids"].shape == (2, 7)
    assert together["attention_mask"].sum(1).tolist() == [3, 7]
    assert together["labels"].tolist() == [0, 0]
    alone = examples.batch([2])
    assert alone["input_ids"].tolist() == [[2, 5, 3]]
    torch.testing.assert_close(task.logits(model, together)[:1], task.logits(model, alone), rtol=0, atol=1e-6)
    hidden = {**together, "attention_mask": torch.ones_like(together["attention_mask"])}
    assert (task.logits(model, hidden)[:1] - task.logits(model, alone)).abs().max() > 1e-4


@pytest.mark.parametrize("save", [save_gpt2, save_llama])
def test_a_language_model_classifies_by_the_last_real_token(tmp_path, save):
    """Its head reads one position per text; padding beside a longer text must not move it."""
    save(tmp_path)
    backbone = load_backbone(Settings(str(tmp_path)), "text-classification", LABELS, 0)
    task = make_task("text-classification", backbone.processor, LABELS)
    examples = task.prepare(TEXTS)
    together = task.logits(backbone.model, examples.batch([0, 1, 2]))
    alone = torch.cat([task.logits(backbone.model, examples.batch([row])) for row in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    assert (together[0] - together[2]).abs().max() > 1e-4
    assert "score.weight" in " ".join(backbone.notes)


def test_both_texts_of_a_pair_are_read_with_their_types(text):
    _, task = text
    batch = task.prepare([{"text": "good", "text_pair": "bad film", "label": 0}]).batch([0])
    assert batch["input_ids"].tolist() == [[2, 4, 3, 5, 6, 3]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1]]


def test_long_texts_are_cut_counted_and_reported_once(text, caplog):
    task = make_task("text-classification", text[1].tokenizer, LABELS, max_length=4)
    with caplog.at_level(logging.WARNING, logger="befit"):
        examples = task.prepare(TEXTS)
        task.prepare(TEXTS)
    assert examples.batch([1])["input_ids"].tolist() == [[2, 7, 7, 3]]
    assert task.truncated == 2
    assert len(caplog.records) == 1
    assert "1 of 3 texts are longer than 4 tokens" in caplog.text


def test_a_text_is_cut_to_the_positions_of_the_model_whatever_max_length_says(text):
    model, task = text
    examples = task.prepare([{"text": "good " * 50, "label": 0}])
    assert examples.batch([0])["input_ids"].shape == (1, 20)
    assert task.logits(model, examples.batch([0])).isfinite().all()


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_accuracy_and_loss_do_not_depend_on_the_batch_size(image, batch_size):
    model, task = image
    examples = task.prepare(pictures())
    metrics = task.evaluate(model, examples, batch_size, "cpu")
    batch = examples.batch(range(5))
    logits = task.logits(model, batch)
    right = sum(int(row.argmax()) == label for row, label in zip(logits, [0, 1, 2, 0, 1], strict=True))
    assert metrics["accuracy"] == right / 5
    assert metrics["loss"] == pytest.approx(float(task.loss(logits, batch)), abs=1e-6)


def test_texts_that_are_scored_by_length_count_where_they_stand(text):
    """Each value has one text, which is right or wrong."""
    model, task = text
    said = [task.predict(model, [text])[0]["answer"] for text in ("good", "very very bad film", "good bad")]
    other = {LABELS[0]: LABELS[1], LABELS[1]: LABELS[0]}
    texts = [("good", said[0]), ("very very bad film", other[said[1]]), ("good bad", said[2])]
    examples = task.prepare([{"text": text, "label": label} for text, label in texts])
    found = task.evaluate(model, examples, 2, "cpu", ["a", "b", "c"])
    assert [found[f"accuracy of {value}"] for value in "abc"] == [1, 0, 1]


def test_evaluation_leaves_every_training_flag_as_it_was(image):
    model, task = image
    examples = task.prepare(pictures())
    model.train()
    next(model.vit.children()).eval()
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    first = task.evaluate(model, examples, 2, "cpu")
    assert [module.training for module in model.modules()] == before
    assert task.evaluate(model, examples, 2, "cpu") == first
    assert torch.is_grad_enabled()


def test_an_empty_split_has_no_score(image):
    model, task = image
    examples = task.prepare([])
    assert len(examples) == 0
    with pytest.raises(DataError, match="no examples to evaluate"):
        task.evaluate(model, examples, 2, "cpu")


def test_predictions_are_named_probabilities_of_the_same_model(text):
    model, task = text
    answers = task.predict(model, ["good film", {"text": "very very bad"}], batch_size=1)
    logits = task.logits(model, task.prepare(TEXTS).batch([0]))
    expected = logits.softmax(-1)[0].tolist()
    assert list(answers[0]["probabilities"]) == list(LABELS)
    assert list(answers[0]["probabilities"].values()) == pytest.approx(expected, abs=1e-6)
    assert answers[0]["answer"] == LABELS[int(logits.argmax())]
    assert len(answers) == 2
    assert task.predict(model, []) == []


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": "x", "text": "a"}, r"record 'x' \(position 0\) has no label"),
        ({"text": "a", "label": 2}, r"the record at position 0: label 2 is outside 0..1"),
        ({"text": "a", "label": -1}, "label -1 is outside"),
        ({"text": "a", "label": "poss"}, "not one of neg, pos. Did you mean: pos?"),
        ({"text": "a", "label": True}, "must be a class index or name, got True"),
        ({"text": "a", "label": 1.0}, "must be a class index or name"),
        ({"text": 7, "label": 1}, "text must be a string, got 7"),
        ({"label": 1}, "text must be a string, got None"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(text, record, message):
    with pytest.raises(DataError, match=message):
        text[1].prepare([record])


def test_pairs_and_single_texts_are_not_mixed(text):
    with pytest.raises(DataError, match=r"position 1.*every record of a split has a text_pair or none"):
        text[1].prepare([{"text": "a", "text_pair": "b", "label": 0}, {"text": "a", "label": 0}])


def test_an_array_of_the_models_shape_passes_through_bit_for_bit(image):
    _, task = image
    records = pictures(2)
    batch = task.prepare(records).batch(torch.tensor([1]))
    assert batch["pixel_values"].shape == (1, 1, 8, 8)
    assert torch.equal(batch["pixel_values"][0, 0], torch.from_numpy(records[1]["image"]))
    assert batch["labels"].tolist() == [1]


def test_a_picture_file_an_npy_file_its_bytes_and_its_array_are_the_same_image(image, tmp_path):
    model, task = image
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    np.save(tmp_path / "digit.npy", pixels / np.float32(255))
    forms = [
        str(tmp_path / "digit.png"),
        tmp_path / "digit.npy",
        (tmp_path / "digit.png").read_bytes(),
        {"bytes": (tmp_path / "digit.png").read_bytes(), "path": None},
        {"image": pixels},
        Image.fromarray(pixels),
        torch.from_numpy(pixels),
    ]
    answers = task.predict(model, forms)
    expected = task.logits(model, {"pixel_values": torch.from_numpy(pixels / np.float32(255))[None, None]}).softmax(-1)
    assert list(answers[0]["probabilities"].values()) == pytest.approx(expected[0].tolist(), abs=1e-6)
    assert all(answer == answers[0] for answer in answers)


def test_colour_becomes_luma_and_a_larger_picture_is_averaged_down():
    """0.299 of pure red; each target pixel of a 2 x 2 chequerboard of blocks keeps its block's grey."""
    prepare = ImagePreprocessor(channels=1, height=8, width=8)
    red = np.zeros((8, 8, 3), dtype=np.uint8)
    red[..., 0] = 255
    assert torch.allclose(prepare(red), torch.full((1, 8, 8), 0.299))
    assert torch.allclose(prepare(Image.fromarray(red)), torch.full((1, 8, 8), 76 / 255), atol=2e-3)
    fine = np.indices((64, 64)).sum(0) % 2  # alternating pixels: nearest-neighbour sampling would keep 0 or 1
    assert (prepare(fine.astype(np.float32)) - 0.5).abs().max() < 0.05
    assert prepare(np.ones((5, 9), dtype=np.float32)).shape == (1, 8, 8)


def test_grey_is_repeated_for_a_colour_model_and_sixteen_bits_keep_their_precision():
    prepare = ImagePreprocessor(channels=3, height=2, width=2)
    grey = np.array([[0.0, 0.25], [0.5, 1.0]], dtype=np.float32)
    assert torch.equal(prepare(grey), torch.from_numpy(grey).expand(3, 2, 2))
    deep = Image.fromarray(np.array([[0, 257], [32896, 65535]], dtype=np.uint16))
    np.testing.assert_allclose(read_image(deep), np.array([[0, 257], [32896, 65535]]) / 65535, atol=1e-7)


def test_a_picture_is_turned_upright_however_it_is_given(tmp_path):
    wide = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    orientation = Image.Exif()
    orientation[0x0112] = 6  # by a quarter to the right
    wide.save(tmp_path / "a.png", exif=orientation)
    upright = np.rot90(np.arange(24).reshape(4, 6), -1) / 255
    encoded = (tmp_path / "a.png").read_bytes()
    with Image.open(tmp_path / "a.png") as opened:
        for given in (tmp_path / "a.png", encoded, {"bytes": encoded}, opened):
            np.testing.assert_allclose(read_image(given), upright, atol=1e-7)
    with Image.open(io.BytesIO(encoded[:-30])) as cut, pytest.raises(DataError, match="cannot read the PIL image"):
        read_image(cut)


def test_a_checkpoint_that_normalises_does_so_for_every_form_of_an_image(tmp_path):
    """(x - 0.5) / 0.25, also for an array that already has the model's shape."""
    save_vit(tmp_path, channels=3)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, "do_resize": true,'
        ' "do_rescale": true, "do_normalize": true, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}'
    )
    processor = load_backbone(Settings(str(tmp_path)), "image-classification", DIGITS, 0).processor
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    expected = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.5) / 0.25
    for form in (pixels, pixels / np.float32(255), Image.fromarray(pixels)):
        torch.testing.assert_close(processor(form), expected, rtol=0, atol=2e-2)
    assert processor(np.full((20, 30), 0.5, dtype=np.float32)).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((8, 8), 16.0), "floats must lie in \\[0, 1\\], got 16 to 16"),
        (np.full((8, 8), np.nan), "numbers that are not finite"),
        (np.zeros((8, 8), dtype=np.int64), "must hold uint8 or floats"),
        (np.zeros((8,)), "must have shape"),
        (np.zeros((8, 8, 2)), "takes 1 channels and the image has 2"),
        ("missing.png", "there is no file missing.png"),
        ("missing.npy", "cannot read missing.npy as a NumPy array"),
        (b"not a picture", "cannot read the encoded image as a picture"),
        (None, "must be a path, bytes, a PIL image or an array, got NoneType"),
    ],
)
def test_an_unusable_image_is_refused_with_its_record(image, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"record 'x'.*{message}"):
        make_task("image-classification", ImagePreprocessor(1, 8, 8), DIGITS).prepare(
            [{"id": "x", "image": image, "label": 0}]
        )


def test_an_array_file_that_would_run_code_is_refused(tmp_path):
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(DataError, match=r"cannot read .*evil\.npy"):
        read_image(tmp_path / "evil.npy")


def test_an_unknown_task_and_unfit_arguments_are_all_named(text):
    with pytest.raises(ConfigError, match=r"'text-clasification'.* Did you mean: text-classification\?"):
        make_task("text-clasification", None)
    with pytest.raises(ConfigError, match=r"3 problems[\s\S]*processor[\s\S]*label_names[\s\S]*max_length"):
        make_task("text-classification", None, ("one",), max_length=1)
    with pytest.raises(ConfigError, match="label_names: causal-lm "):
        make_task("causal-lm", text[1].tokenizer, LABELS)
    with pytest.raises(ConfigError, match=r"model\.prompt: text-classification has no such setting; leave it out"):
        make_task("text-classification", text[1].tokenizer, LABELS, prompt="chat-bos")
    with pytest.raises(ConfigError, match="need an ImagePreprocessor"):
        make_task("image-classification", text[1].tokenizer, LABELS)


def test_importing_tasks_does_not_import_torch():
    """`befit check` lists tasks; a second for torch would be felt."""
    code = "import sys, befit.tasks; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_balanced_weights_are_those_of_sklearn_and_the_loss_that_of_torch():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 0])
    examples = balanced(StackedExamples({"labels": labels, "x": torch.randn(8, 3)}))
    by_class = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert examples.columns["weights"].tolist() == pytest.approx(by_class[labels.numpy()].tolist())
    task = make_task("image-classification", ImagePreprocessor(1, 8, 8), DIGITS)
    batch, logits = examples.batch([0, 4, 6, 7]), torch.randn(4, 3)
    expected = F.cross_entropy(logits, batch["labels"], weight=torch.tensor(by_class, dtype=torch.float32))
    assert float(task.loss(logits, batch)) == pytest.approx(float(expected), rel=1e-6)
    parts = task.sample_losses(logits, batch, "sum").sum() / task.terms(batch).sum()  # as a fleet, and parts of a batch
    assert float(parts) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", ["grey", "binary", "mode 1"])
@pytest.mark.parametrize(
    "settings",
    [{"do_normalize": True}, {"do_rescale": False}, {"do_normalize": False, "rescale_factor": 1 / 127.5}],
    ids=str,
)
@pytest.mark.parametrize("side", [16, 37])
def test_a_picture_is_to_a_checkpoints_processor_what_it_is_to_transformers(
    kind: str, settings: dict[str, Any], side: int
) -> None:
    """Of black and white alone, too, as scans are: between 0 and 1 they would pass for bytes. `do_rescale: false` and
    a factor of the checkpoint's own are kept, whatever the size."""
    processor = ViTImageProcessorPil(
        size={"height": 16, "width": 16}, **{"image_mean": [0.4] * 3, "image_std": [0.3] * 3, **settings}
    )
    shades = np.random.default_rng(0).integers(0, 256, (side, side), dtype=np.uint8)
    picture = Image.fromarray(shades if kind == "grey" else np.where(shades > 127, 255, 0).astype(np.uint8))
    picture = picture.convert("1") if kind == "mode 1" else picture
    found = ImagePreprocessor(3, 16, 16, processor)(picture)
    expected = processor(images=picture.convert("RGB"), return_tensors="pt")["pixel_values"][0].float()
    spread = float(expected.max() - expected.min())
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * spread)


@pytest.mark.parametrize("save", [save_llama, save_gpt2])
def test_a_decoders_last_token_stands_for_a_text_that_it_classifies(save, tmp_path):
    """Its first has seen no other, and is one and the same for all texts where a tokenizer begins them with a token."""
    save(tmp_path)
    backbone = load_backbone(Settings(str(tmp_path)), "text-classification", LABELS, 0)
    task, model = make_task("text-classification", backbone.processor, LABELS), backbone.model.eval()
    batch = task.prepare(TEXTS).batch([0, 1])
    with torch.no_grad(), summaries(model) as seen:
        task.logits(model, batch)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = model(**inputs, output_hidden_states=True).hidden_states[-1].detach()
    last = batch["attention_mask"].sum(1) - 1
    assert last[0] < last[1]
    torch.testing.assert_close(seen[0], hidden[torch.arange(2), last])
