"""Questions about images: what is read, learnt, generated and scored, against the model itself and by hand."""

import copy
import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from befit.adapters.forms import DENSE
from befit.adapters.keys import slot
from befit.adapters.layout import Layout, Slot, lora
from befit.adapters.model import AdaptedModel, find_modules
from befit.core.errors import ConfigError, DataError, ModelError
from befit.core.values import ClientInfo, Payload, Tick
from befit.methods.fisher_merging import FisherMerge
from befit.models import load_backbone
from befit.models.backbone import load_processor, skeleton
from befit.protocol.registry import build_method
from befit.protocol.settings import TrainSettings
from befit.protocol.site import Site
from befit.tasks import make_task
from befit.tasks.images import ImagePreprocessor, squared
from befit.tasks.vqa_metrics import Answered, answered_choice, pooled_f1, task_scores, vqa_metrics
from befit.tasks.vqa_prompts import as_record, checked_turns, dialogue
from befit.train.paired_fisher import Damping, Statistics
from befit.train.persample import sample_gradients
from tests.unit.models.tiny_models import Settings, save_llama, word_tokenizer

PATCHES = 4  # of a 4 x 4 image in patches of 2 x 2
WORDS = ["what", "which", "is", "it", "a", "b", "yes", "no", "zero", "one", "two", "USER", "BOT", ":", "?", "\n"]
TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER : ' + m.content + ' BOT : ' }}"
    "{% else %}{{ m.content + ' <eos> ' }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER : ' }}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<image> ' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{{ ' BOT : ' }}"
    "{% else %}{{ m.content }}{% if not m.content is string %}{% endif %}{{ ' <eos> ' }}{% endif %}{% endfor %}"
)


def save_llava(path, chat_template=TURNS, channels=1, **changes):
    """A random model whose logits are far from uniform, with images of 4 x 4 pixels."""
    torch.manual_seed(0)
    specials = ["<pad>", "<unk>", "<bos>", "<eos>", "<image>"]
    tokenizer = word_tokenizer(specials, WORDS, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = chat_template
    text = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=0.3,
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_channels=channels,
        image_size=4,
        patch_size=2,
    )
    config = LlavaConfig(
        text_config=text, vision_config=vision, **{"image_token_index": 4, "vision_feature_layer": -1, **changes}
    )
    model = LlavaForConditionalGeneration(config)
    for parameter in model.model.multi_modal_projector.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_backbone(Settings(str(save_llava(tmp_path_factory.mktemp("models") / "llava"))), "vqa", (), 0)


@pytest.fixture(scope="module")
def task(backbone):
    return make_task("vqa", backbone.processor, max_new_tokens=6)


def picture(seed):
    return np.random.default_rng(seed).random((4, 4)).astype(np.float32)


def record(*turns, images=(), **more):
    roles = ("user", "assistant")
    talk = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"images": [picture(seed) for seed in images], "conversation": talk, **more}


def ids(task, text):
    return task.tokenizer(text, add_special_tokens=False)["input_ids"]


# What is read


def test_an_image_takes_its_places_and_only_answers_and_their_ends_are_learnt(task):
    """Two questions, two answers: <bos> USER : [4] what ? BOT : a <eos> USER : which [4] ? BOT : one <eos>."""
    made = task.prepare([record("<image> what ?", "a", "which <image> ?", "one", images=(0, 1))])
    batch = made.batch([0])
    image = [4] * PATCHES
    asked = [2, *ids(task, "USER :"), *image, *ids(task, "what ? BOT :")]
    again = [*ids(task, "USER : which"), *image, *ids(task, "? BOT :")]
    tokens = [*asked, *ids(task, "a"), 3, *again, *ids(task, "one"), 3]
    assert batch["input_ids"][0].tolist() == tokens
    labels = [-100] * len(asked) + [*ids(task, "a"), 3] + [-100] * len(again) + [*ids(task, "one"), 3]
    assert batch["labels"][0].tolist() == labels
    assert batch["pixel_values"].shape == (2, 1, 4, 4)


def test_a_template_that_takes_parts_gives_the_same_tokens_as_one_that_takes_text(task, tmp_path):
    other = load_backbone(Settings(str(save_llava(tmp_path, PARTS))), "vqa", (), 0)
    given = [record("<image>what ?", "a", images=(0,))]
    expected = task.prepare(given).batch([0])["input_ids"]
    assert make_task("vqa", other.processor).prepare(given).batch([0])["input_ids"].tolist() == expected.tolist()


# As Gemma's, which ends a turn with a token that is not the end of the sequence.
OTHER_END = TURNS.replace("<eos>", "<bos>")
# As Phi's, which ends the sequence where the conversation ends, and nowhere else.
LAST_END = TURNS.replace("' <eos> '", "(' <eos> ' if loop.last else ' : ')")


@pytest.mark.parametrize(
    ("template", "middle", "end"),
    [(OTHER_END, "<bos>", "<bos> <eos>"), (LAST_END, "<eos> :", "<eos>"), (TURNS, "<eos>", "<eos>")],
)
def test_every_answer_ends_as_the_chat_template_ends_it(task, template, middle, end):
    own = copy.copy(task)
    own.tokenizer = copy.deepcopy(task.tokenizer)
    own.tokenizer.chat_template = template
    tokens, labels, first = own._tell(record("what ?", "a", "which ?", "b"), "here")
    asked, again = ids(own, "<bos> USER : what ? BOT :"), ids(own, "USER : which ? BOT :")
    assert (tokens, first) == ([*asked, *ids(own, f"a {middle}"), *again, *ids(own, f"b {end}")], len(asked))
    learnt = ids(own, "a " + middle.removesuffix(" :"))
    unlearnt = [-100] * (len(tokens) - len(asked) - len(learnt) - len(ids(own, f"b {end}")))
    assert labels == [-100] * len(asked) + learnt + unlearnt + ids(own, f"b {end}")


def test_a_template_of_ones_own_renders_every_question(task, backbone):
    own = make_task("vqa", backbone.processor, prompt="USER {instruction} BOT")
    made = own.prepare([record("<image> is it ?", "yes", "a ?", "b", images=(3,))])
    text = "USER <image> is it ? BOT yes <eos> USER a ? BOT b <eos>"
    tokens = [2, *ids(own, text)]
    assert made.batch([0])["input_ids"][0].tolist() == tokens[:2] + [4] * PATCHES + tokens[3:]


def test_batches_hold_the_images_of_their_records_in_order(task):
    made = task.prepare(
        [record("<image> a", "b", images=(0,)), record("<image><image> a", "b", images=(1, 2)), record("a", "b")]
    )
    batch = made.batch([1, 2, 0])
    assert torch.equal(
        batch["pixel_values"], torch.stack([torch.from_numpy(picture(seed))[None] for seed in (1, 2, 0)])
    )
    assert "pixel_values" not in made.batch([2])


@pytest.mark.parametrize("places", [[2, 1, 0, 1], [2]])
def test_a_part_of_a_batch_has_the_images_of_its_records(task, places):
    """Of records with one image, two and none; one comes twice."""
    made = task.prepare(
        [record("<image> a", "b", images=(0,)), record("<image><image> a", "b", images=(1, 2)), record("a", "b")]
    )
    found, expected = task.part(made.batch([0, 1, 2]), torch.tensor(places)), made.batch(places)
    width = expected["input_ids"].shape[1]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name] if name == "pixel_values" else found[name][:, :width], values)


def test_images_that_are_not_square_are_padded_and_not_cropped(task):
    """A 2 x 4 image lies in the middle of a black 4 x 4 one; with a checkpoint's mean colour, in that."""
    wide = np.ones((2, 4), np.float32)
    made = task.prepare([{**record("<image> a", "b"), "images": [wide]}])
    assert made.images[0].pixels[0, 0].tolist() == [[0] * 4, [1] * 4, [1] * 4, [0] * 4]

    class Processor:
        do_normalize, image_mean = True, [0.5, 0.25, 0.75]

    colour = squared(np.ones((1, 3, 3), np.float32), ImagePreprocessor(3, 3, 3, Processor()))
    assert colour[0, 0].tolist() == [0.5, 0.25, 0.75] and colour[1].min() == 1 and colour.shape == (3, 3, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (record("<image> a", "b"), "1 marks <image> for 0 images"),
        (record("a", "b", images=(0,)), "0 marks <image> for 1 images"),
        (record("a", "<image>", images=(0,)), "turn 2, an answer, has the mark"),
        (record("a"), "has no answer to learn"),
        ({"images": [], "conversation": [{"role": "assistant", "content": "a"}]}, "turn 1 .* must be {role: user"),
        ({"images": [], "conversation": "a"}, "must be a list of turns"),
        (record("a", "b", form="either"), "form must be choice or open"),
        (record("a", "b", form="choice", choices=["c", "d"]), "among them its answer 'b'"),
        (record("a", "b", choices=["b", "b "]), "two or more different ones"),
        (record("a", "b", metric="accuracy"), "metric must be one of exact_match"),
        (record("<image> " * 16 + "a", "b", images=range(16)), "its first question has 70 tokens"),
        (record("a", "b", "<image> " * 14, "c", images=range(14)), "an image cannot be cut"),
        (
            {"images": ["none.png"], "conversation": record("<image> a", "b")["conversation"]},
            "image 1: there is no file",
        ),
    ],
)
def test_records_that_cannot_be_used_are_refused_by_name(task, given, message):
    with pytest.raises(DataError, match=f"record 'odd' .position 1.*{message}"):
        task.prepare([record("a", "b"), {**given, "id": "odd"}])


def test_answers_that_are_too_long_are_cut_and_counted(backbone):
    short = make_task("vqa", backbone.processor, max_length=8)
    made = short.prepare([record("what ?", "a b a b")])
    assert int(made.lengths[0]) == 8 and short.truncated == 1


def test_a_template_that_forgets_the_conversation_is_refused(task):
    forgetful = copy.deepcopy(task.tokenizer)
    forgetful.chat_template = "{{ messages[-1].content }}"
    turns = record("a ?", "b", "which ?", "a")["conversation"]
    assert dialogue(turns[:2], "chat", forgetful, "<image>", "here") == [("a ?", "b", "")]
    with pytest.raises(DataError, match="does not repeat the conversation so far before turn 3"):
        dialogue(turns, "chat", forgetful, "<image>", "here")
    assert checked_turns(turns, 0, "here") == turns


# What the model sees


def test_logits_are_the_models_own_whatever_is_beside_a_record(task, backbone):
    """A batch of three with 2, 0 and 1 images against each alone through transformers' own forward pass."""
    records = [
        record("<image><image> what ?", "a b", images=(1, 2)),
        record("which ?", "one two a"),
        record("<image> is it ?", "yes", images=(3,)),
    ]
    made = task.prepare(records)
    with torch.no_grad():
        together, samples = task.judged(task.logits(backbone.model, made.batch([0, 1, 2])), made.batch([0, 1, 2]))
        for row, one in enumerate(records):
            batch = made.batch([row])
            images = [torch.from_numpy(image)[None] for image in one["images"]]
            seen = {"pixel_values": torch.stack(images)} if images else {}
            alone = backbone.model(input_ids=batch["input_ids"], **seen).logits[0, :-1][batch["labels"][0, 1:] != -100]
            torch.testing.assert_close(together[samples == row], alone, rtol=1e-4, atol=1e-5)


def test_images_and_their_order_matter(task, backbone):
    pair, swapped = (task.prepare([record("<image><image> what ?", "a", images=two)]) for two in ((1, 2), (2, 1)))
    with torch.no_grad():
        first, second = (task.logits(backbone.model, made.batch([0])) for made in (pair, swapped))
    assert (first - second).abs().max() > 0.01


def test_the_loss_is_the_mean_over_answer_tokens(task, backbone):
    made = task.prepare([record("<image> what ?", "a b", images=(1,)), record("which ?", "one")])
    batch = made.batch([0, 1])
    with torch.no_grad():
        logits = task.logits(backbone.model, batch)
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "answers")}
        log_p = backbone.model(**inputs).logits[:, :-1].log_softmax(-1)
    target = batch["labels"][:, 1:]
    terms = [-log_p[row, at, target[row, at]] for row, at in (target != -100).nonzero().tolist()]
    assert len(terms) == 3 + 2
    assert float(task.loss(logits, batch)) == pytest.approx(float(torch.stack(terms).mean()), rel=1e-5)


def test_greedy_answers_are_those_of_transformers_alone_and_in_a_batch(task, backbone):
    """Left padding, images and caches against `generate` on each prompt by itself."""
    records = [
        record("<image><image> what ?", "a", images=(1, 2)),
        record("which ?", "a"),
        record("<image> is it a ?", "a", images=(4,)),
    ]
    made = task.prepare(records)
    found = task._answers(backbone.model, made.prompts, 3, "cpu")
    for one, answer in zip(made.prompts, found, strict=True):
        seen = {"pixel_values": one.images.pixels} if len(one.images.pixels) else {}
        tokens = torch.tensor([list(one.tokens)])
        out = backbone.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=6,
            pad_token_id=0,
            **seen,
        )
        assert answer == task.tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)
    assert len(set(found)) > 1
    assert task._answers(backbone.model, made.prompts, 1, "cpu") == found


def test_only_the_first_answer_is_generated_and_with_the_images_before_it(task, backbone):
    one = record("<image> what ?", "a", "and <image>", "b", images=(1, 2))
    (prompt,) = task.prepare([one]).prompts
    assert len(prompt.images.pixels) == 1 and list(prompt.tokens).count(4) == PATCHES
    first = record("<image> what ?", "a", images=(1,))
    both = task._answers(backbone.model, task.prepare([one, first]).prompts, 2, "cpu")
    assert both[0] == both[1]


def test_a_prediction_takes_a_question_a_record_or_a_text(task, backbone):
    asked = record("<image> what ?", images=(1,))
    told = {**asked, "conversation": [*asked["conversation"], {"role": "assistant", "content": "a"}]}
    given = [told, asked, {"images": asked["images"], "question": " what ?"}, "which ?"]
    answers = task.predict(backbone.model, given)
    assert answers[0] == answers[1] == answers[2] != {}
    assert answers[3] == {
        "answer": task._answers(backbone.model, task.prepare([record("which ?", "a")]).prompts, 1, "cpu")[0]
    }
    with pytest.raises(DataError, match=r"conversation must be .*, got None"):
        task.predict(backbone.model, [{"images": []}])
    assert as_record({"images": [1], "question": "a <image> b"})["conversation"][0]["content"] == "a <image> b"


# Scores


@pytest.mark.parametrize(
    ("answer", "choices", "expected"),
    [
        ("It is Even.", ["even", "odd"], "even"),
        ("not odd but even", ["even", "odd"], "odd"),
        ("answer10", ["answer1", "answer10"], "answer10"),
        ("B", ["cat", "dog"], "dog"),
        ("(b). because", ["cat", "dog"], "dog"),
        ("c", ["cat", "dog"], None),
        ("bird", ["cat", "dog"], None),
        ("A giraffe", ["cat", "dog"], None),
        ("a: giraffe", ["cat", "dog"], "cat"),
        ("A", ["cat", "dog"], "cat"),
        ("", ["cat", "dog"], None),
    ],
)
def test_a_choice_is_read_out_of_an_answer_by_its_text_and_else_by_its_letter(answer, choices, expected):
    assert answered_choice(answer, choices) == expected


def test_pooled_f1_is_over_sets_of_all_questions_together():
    """p & g: 1 + 0, |p|: 2 + 1, |g|: 1 + 3, so 2 * 1 / (3 + 4); a mean of per-question values would be 1/3."""
    pairs = [(frozenset({1, 2}), frozenset({1})), (frozenset({9}), frozenset({3, 4, 5}))]
    assert pooled_f1(pairs) == pytest.approx(2 / 7)
    assert pooled_f1([(frozenset(), frozenset())]) == 1.0 and pooled_f1([(frozenset({1}), frozenset())]) == 0.0


def answered(task, answer, expected, **more):
    return Answered(task, answer, (expected,), **more)


def test_the_score_is_the_mean_over_tasks_each_by_its_own_metric():
    """Choices: 1 of 2. Exact match: 1 of 3, "1 0" being no "10". Pooled F1: 2 / (2 + 1). Mean (1/2 + 1/3 + 2/3) / 3."""
    given = [
        answered("parity", "Odd", "odd", choices=("even", "odd")),
        answered("parity", "?", "odd", choices=("even", "odd")),
        *(answered("sum", text, "10") for text in ("10", "1 0", "11")),
        answered("say", "ab", "a", metric="token_f1_pooled", ids=str.encode),
    ]
    scores = task_scores(given)
    assert list(scores) == ["parity", "sum", "say"]
    assert list(scores.values()) == pytest.approx([1 / 2, 1 / 3, 2 / 3])
    found = vqa_metrics(given, ["vqa_score", "choice_parse", "exact_match", "token_f1_pooled"])
    assert found["vqa_score"] == pytest.approx(1 / 2)
    assert (found["choice_parse"], found["unparsable"]) == (0.5, 0.5)
    assert found["exact_match"] == pytest.approx(2 / 6)


def test_a_wrong_answer_that_names_the_right_choice_first_counts_and_the_other_way_round_does_not():
    yes = answered("t", "yes, no", "yes", choices=("yes", "no"))
    no = answered("t", "no, yes", "yes", choices=("yes", "no"))
    assert task_scores([yes])["t"] == 1.0 and task_scores([no])["t"] == 0.0


def test_evaluation_scores_what_the_model_says(task, backbone):
    """Gold answers that are the model's own give 1 in all metrics; others 0, and the headline comes first."""
    asked = [record("<image> what ?", "a", images=(1,), task="x"), record("which ?", "a", task="y")]
    said = task._answers(backbone.model, task.prepare(asked).prompts, 2, "cpu")
    right = [
        {**one, "conversation": [one["conversation"][0], {"role": "assistant", "content": text}]}
        for one, text in zip(asked, said, strict=True)
    ]
    found = task.evaluate(backbone.model, task.prepare(right), 2, "cpu")
    assert next(iter(found)) == task.metric == "vqa_score"
    assert (found["vqa_score"], found["exact_match"]) == (1.0, 1.0) and 0 < found["token_accuracy"] <= 1
    mixed = task.prepare([right[0], {**asked[1], "references": ["never"]}])
    assert task.evaluate(backbone.model, mixed, 2, "cpu")["vqa_score"] == 0.5


def test_the_loss_beside_generated_answers_is_of_all_answers_with_all_images(task, backbone):
    """Two questions of one conversation, each with an image, of which only the first is answered."""
    asked = [
        record("<image> what ?", "a", "and <image>", "b yes", images=(1, 2)),
        record("which ?", "a"),
        record("<image> is it a ?", "yes", images=(4,)),
    ]
    examples = task.prepare(asked)
    found = task.evaluate(backbone.model, examples, 3, "cpu")
    batch = examples.batch([0, 1, 2])
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(task.loss(task.logits(backbone.model, batch), batch)), rel=1e-5)
    assert found["vqa_score"] == task.headline(backbone.model, examples, 3, "cpu")


def test_choices_are_compared_by_their_likelihood_with_the_images_in_view(backbone):
    """Against the sum of log-probabilities of each choice, one forward pass each."""
    judge = make_task("vqa", backbone.processor, metrics=["choice_sum"])
    records = [
        record("<image> what ?", gold, images=(seed,), choices=["a b", "yes"])
        for seed, gold in ((1, "a b"), (2, "yes"), (3, "a b"))
    ]
    correct = 0
    for one in records:
        sums = []
        for choice in one["choices"]:
            tokens = ids(judge, f"USER : <image> what ? BOT : {choice}")
            row = torch.tensor([[2, *tokens[:2], *[4] * PATCHES, *tokens[3:]]])
            with torch.no_grad():
                log_p = backbone.model(
                    input_ids=row, pixel_values=torch.from_numpy(one["images"][0])[None, None]
                ).logits.log_softmax(-1)
            many = len(ids(judge, choice))
            sums.append(sum(float(log_p[0, -many - 1 + k, row[0, -many + k]]) for k in range(many)))
        correct += one["choices"][int(np.argmax(sums))] == one["conversation"][1]["content"]
    assert judge.evaluate(backbone.model, judge.prepare(records), 4, "cpu")["choice_sum"] == correct / 3


def test_a_headline_that_no_question_has_is_refused_and_another_metric_left_out(backbone):
    judge = make_task("vqa", backbone.processor, metrics=["choice_parse"], max_new_tokens=2)
    with pytest.raises(DataError, match="begins with choice_parse, and no question here has choices"):
        judge.evaluate(backbone.model, judge.prepare([record("a", "b")]), 4, "cpu")
    beside = make_task("vqa", backbone.processor, metrics=["exact_match", "choice_parse"], max_new_tokens=2)
    assert "choice_parse" not in beside.evaluate(backbone.model, beside.prepare([record("a", "b")]), 4, "cpu")


# Adapters


def test_adapters_sit_on_the_language_model_alone_under_the_names_of_a_text_model(backbone, tmp_path):
    text = load_backbone(Settings(str(save_llama(tmp_path))), "causal-lm", (), 0).model
    for targets, count in (("auto", 4), ("all", 14), (("k_proj",), 2)):
        found, head = find_modules(backbone.model, targets)
        assert len(found) == count and not head
        assert all(path.startswith("model.language_model.layers.") for path in found.values())
        assert list(found) == list(find_modules(text, targets)[0])


def test_the_tower_and_the_projector_are_adapted_only_where_they_are_named(backbone):
    assert list(find_modules(backbone.model, ("multi_modal_projector.linear_1",))[0].values()) == [
        "model.multi_modal_projector.linear_1"
    ]
    tower, _ = find_modules(backbone.model, ("fc1",))
    assert len(tower) == 2 and all("vision_tower" in path for path in tower.values())
    with pytest.raises(ModelError, match="no module matches target 'fc9'"):
        find_modules(backbone.model, ("fc9",))
    model = AdaptedModel(copy.deepcopy(backbone.model), ("q_proj", "linear_1"))
    assert "linear_1 is outside the language model" in model.lone()  # no fleet, in which an image has to be a client's


@pytest.fixture
def site(backbone, task):
    return site_of(
        backbone,
        task,
        lora(rank=2, alpha=4.0),
        record("<image><image> what ?", "a b", images=(1, 2)),
        record("which ?", "one two"),
        record("<image> is it ?", "yes", images=(3,)),
    )


def site_of(backbone, task, layout, *records, targets="auto"):
    """A client with these records."""
    model = AdaptedModel(copy.deepcopy(backbone.model), targets, head=False)
    model.install(layout, seed=0)
    made = task.prepare(records)
    return Site(ClientInfo("c", "b", len(records)), model, task, TrainSettings(), lambda split: made)


def test_gradients_of_every_sample_are_those_of_the_sample_alone(site):
    """Also where samples have different numbers of images."""
    values = {key: 0.3 * torch.randn(spec.shape) for key, spec in site.model.specs.items()}
    site.model.load(values)
    made = site.examples("train")
    together = sample_gradients(site, made.batch([0, 1, 2]), "shared")
    for row in range(3):
        alone = sample_gradients(site, made.batch([row]), "shared")
        for key, gradient in alone.items():
            torch.testing.assert_close(together[key][row], gradient[0], rtol=1e-3, atol=1e-5)


IMAGES = (
    record("which ?", "one two"),
    record("<image><image> what ?", "a b", images=(1, 2)),
    record("<image> is it ?", "yes", images=(3,)),
)  # none, two and one


def with_projector(backbone, task, count=3):
    """A client that trains a projector too, with some of these records and adapters that are not zero."""
    layout = Layout((Slot("shared", 2, 4.0), Slot("personal", 2, 4.0), Slot("merged", 2, 4.0, form=DENSE)))
    made = site_of(backbone, task, layout, *IMAGES[:count], targets=("q_proj", "linear_1"))
    made.model.load({key: 0.3 * torch.randn(spec.shape) for key, spec in made.model.specs.items()})
    return made


def test_an_image_counts_for_its_own_sample_only_where_samples_come_one_by_one(backbone, task):
    """There are as many images as samples, which says nothing of whose they are: the gradient of each is that of its
    own loss, and zero at the projector for the sample without images."""
    site, chosen = with_projector(backbone, task), slot("shared")
    made = site.examples("train")
    with pytest.raises(ModelError, match=r"linear_1 is outside the language model.* one sample at a time .* got 3"):
        sample_gradients(site, made.batch([0, 1, 2]), "shared")
    for row in range(3):
        found = sample_gradients(site, made.batch([row]), "shared")
        site.model.zero_gradients()
        with site.model.active("shared"), site.model.trainable(chosen):
            site.loss(made.batch([row])).backward()
        leaves = site.model.leaves(chosen)
        assert found.keys() == leaves.keys()
        for key, leaf in leaves.items():
            torch.testing.assert_close(found[key][0], leaf.grad, rtol=1e-3, atol=1e-5)
            assert bool(found[key].any()) == (row > 0 or "linear_1" not in key)


@pytest.mark.parametrize("space", ["dense", "lora"])
@pytest.mark.parametrize("samples", [1, 3])
def test_information_of_a_projector_is_zero_where_no_sample_has_an_image(backbone, task, space, samples):
    """Its entries then get the mean of both models. With images it is that of the samples one by one."""
    site = with_projector(backbone, task, samples)
    fed, local = (site.model.dump(slot(name)) for name in ("shared", "personal"))
    merged, _ = FisherMerge(space, Statistics(samples), Damping())(site, Tick("merge", 1, 1, 0), Payload())
    name = next(name for name in site.model.adapted("shared") if "linear_1" in name)
    if space == "lora":
        means = {
            f"{name}/{part}": (fed[f"shared/{name}/{part}"] + local[f"personal/{name}/{part}"]) / 2 for part in "AB"
        }
    else:
        both = ((fed, "shared"), (local, "personal"))
        products = [2.0 * state[f"{own}/{name}/B"] @ state[f"{own}/{name}/A"] for state, own in both]
        means = {f"{name}/weight": sum(products) / 2}
    for key, mean in means.items():
        assert torch.allclose(merged[f"merged/{key}"], mean, atol=1e-6) == (samples == 1)


@pytest.mark.parametrize("records", [1, 3])
def test_the_first_step_of_fed_sb_is_zero_at_a_projector_that_no_record_reaches(backbone, task, records):
    method = build_method({"name": "fed_sb", "rank": 2, "estimate_batches": 1})
    site = site_of(backbone, task, method.layout, *IMAGES[:records], targets=("q_proj", "linear_1"))
    stage = method.plan()[0]
    _, sent = stage.exchange.client_update(Payload(), Payload(), site, Tick(stage.name, 1, 1, 0))
    assert sent.arrays.keys() == {key for key in site.model.specs if not key.endswith("/R")}
    for key, array in sent.arrays.items():
        assert bool(array.any()) == (records > 1 or "linear_1" not in key)


def test_hidden_states_have_the_width_of_the_language_model(backbone):
    assert AdaptedModel(copy.deepcopy(backbone.model), "auto", head=False).shapes.hidden == 16


# Loading


def test_the_places_of_an_image_are_counted_on_a_skeleton_as_on_the_model(tmp_path):
    """4 patches; with the class token kept, 5."""
    for strategy, count in (("default", 4), ("full", 5)):
        path = save_llava(tmp_path / strategy, vision_feature_select_strategy=strategy)
        settings = Settings(str(path))
        loaded = load_backbone(settings, "vqa", (), 0).processor
        bare, _ = load_processor("vqa", path, skeleton(settings, "vqa", ()), "here")
        assert loaded.tokens_per_image == bare.tokens_per_image == count
        assert (loaded.images.height, loaded.images.channels, loaded.image_token) == (4, 1, 4)


def test_a_picture_file_is_read_in_the_models_colours_and_size(tmp_path):
    made = load_backbone(Settings(str(save_llava(tmp_path / "rgb", channels=3))), "vqa", (), 0)
    Image.new("RGB", (8, 8), (255, 0, 51)).save(tmp_path / "a.png")
    one = {**record("<image> a", "b"), "images": [str(tmp_path / "a.png")]}
    pixels = make_task("vqa", made.processor).prepare([one]).images[0].pixels
    assert pixels.shape == (1, 3, 4, 4)
    assert pixels[0, :, 0, 0].tolist() == pytest.approx([1, 0, 0.2])


def test_tokens_and_pixels_are_those_of_transformers_own_processor(tmp_path):
    """A checkpoint with CLIP's preprocessing and LLaVA's processor: what it makes of a text and two square pictures is
    what the task gives to the model."""
    path = save_llava(tmp_path, channels=3)
    size = {"do_resize": True, "size": {"shortest_edge": 4}, "crop_size": {"height": 4, "width": 4}}
    images = CLIPImageProcessor(**size)
    processor = LlavaProcessor(
        images,
        AutoTokenizer.from_pretrained(path),
        patch_size=2,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    images.save_pretrained(path)
    pictures = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (8, 8, 3), np.uint8)) for n in (0, 1)]
    text = "USER : <image> what <image> ? BOT : "
    wanted = processor(text=text, images=pictures, return_tensors="pt")
    loaded = load_backbone(Settings(str(path)), "vqa", (), 0).processor
    made = make_task("vqa", loaded).prepare([{**record("<image> what <image> ?", "a"), "images": pictures}])
    assert list(made.prompts[0].tokens) == wanted["input_ids"][0].tolist()
    torch.testing.assert_close(made.prompts[0].images.pixels, wanted["pixel_values"], atol=1e-5, rtol=1e-5)


def test_the_chat_template_of_an_older_checkpoints_processor_is_used(tmp_path):
    path = save_llava(tmp_path, chat_template=None)
    plain = load_backbone(Settings(str(path)), "vqa", (), 0)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    chat = load_backbone(Settings(str(path)), "vqa", (), 0)
    assert (make_task("vqa", plain.processor).prompt, make_task("vqa", chat.processor).prompt) == ("plain", "chat")
    with pytest.raises(ModelError, match=r"model\.prompt: chat-bos"):
        make_task("vqa", chat.processor, prompt="chat-bos")
    assert any("chat_template.json" in note for note in chat.notes)


def test_models_that_do_not_see_are_refused(tmp_path):
    with pytest.raises(ModelError, match="for vqa"):
        load_backbone(Settings(str(save_llama(tmp_path / "llama"))), "vqa", (), 0)
    path = save_llava(tmp_path / "odd", image_token_index=23)
    with pytest.raises(ModelError, match="its image token 23 is none of the 21 of its tokenizer"):
        load_backbone(Settings(str(path)), "vqa", (), 0)


def test_a_task_needs_its_processor(task):
    with pytest.raises(ConfigError, match="images and text need a VqaProcessor"):
        make_task("vqa", task.tokenizer)
    with pytest.raises(ConfigError, match=r"label_names: vqa .* a, b"):
        make_task("vqa", task.processor, ["a", "b"])
