"""Causal language modelling: what is learnt, how it is scored, and generation."""

import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from befit.adapters.layer import SlotLinear
from befit.adapters.model import AdaptedModel
from befit.core.errors import DataError, ModelError
from befit.models import load_backbone
from befit.tasks import make_task
from befit.tasks.answers import ANSWERS, answer_places
from befit.tasks.generation import greedy
from befit.tasks.lm_records import lm_input, lm_record
from befit.tasks.prompts import chat_text, prompt_problem
from befit.tasks.text_metrics import compare, parsed_choice
from tests.unit.models.tiny_models import Settings, save_gpt2, save_llama

# <pad> <unk> <bos> <eos> good bad film very book a b c d e Instruction Response Input ### : user assistant # ...
RECORDS = [
    {"instruction": "copy", "input": "a b", "output": "a b"},
    {"instruction": "reverse", "input": "c", "output": "c d e very good film"},
    {"instruction": "copy", "output": "d"},
]
CHAT = "{% for m in messages %}{{ m.role }} : {{ m.content }} #{% endfor %}{% if add_generation_prompt %} assistant :{% endif %}"  # noqa: E501


def load(path, **options):
    backbone = load_backbone(Settings(str(path)), "causal-lm", (), 0)
    return backbone.model, make_task("causal-lm", backbone.processor, **options)


@pytest.fixture(params=[save_llama, save_gpt2])
def language(request, tmp_path):
    request.param(tmp_path)
    return load(tmp_path)


def test_the_prompt_is_masked_and_the_answer_with_its_end_is_learnt(tmp_path):
    """<bos> ### Instruction : copy ### Response : | d <eos>"""
    save_llama(tmp_path)
    _, task = load(tmp_path)
    batch = task.prepare(RECORDS).batch([2])
    assert batch["input_ids"].tolist() == [[2, 17, 14, 18, 22, 17, 15, 18, 12, 3]]
    assert batch["labels"].tolist() == [[-100] * 8 + [12, 3]]
    assert batch["attention_mask"].tolist() == [[1] * 10]


def test_a_chat_template_is_used_where_there_is_one(tmp_path):
    """user : copy <blank line> a b # assistant : | a b <eos>"""
    save_llama(tmp_path, CHAT)
    _, task = load(tmp_path)
    batch = task.prepare(RECORDS).batch([0])
    assert batch["input_ids"].tolist() == [[19, 18, 22, 9, 10, 21, 20, 18, 9, 10, 3]]
    assert batch["labels"].tolist() == [[-100] * 8 + [9, 10, 3]]


def test_a_template_that_writes_the_date_writes_the_same_one_every_day(tmp_path):
    """Llama 3.2's does, unless it is told which: the prompts of a run that goes on tomorrow must be the same."""
    dated = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y %f') %}{% endif %}"
        "{{ date_string }} "
    )
    save_llama(tmp_path, dated + CHAT)
    _, task = load(tmp_path)
    read = task.tokenizer.decode(task.prompt_tokens(RECORDS[2]))
    assert task.prompt_tokens(RECORDS[2]) == task._tokens("26 Jul 2024 user : copy # assistant :"), read


@pytest.mark.parametrize("template", [CHAT, "{% generation %}{% endgeneration %}" + CHAT])
def test_a_template_that_asks_for_todays_date_gets_the_same_one_in_its_own_form(tmp_path, template):
    """SmolLM3's, Granite's and gpt-oss's do, whatever they are told."""
    save_llama(tmp_path, "{{ strftime_now('%Y-%m-%d') }} " + template)
    _, task = load(tmp_path)
    expected = task._tokens("2024-07-26 user : copy # assistant :")
    assert task.prompt_tokens(RECORDS[2]) == expected
    assert task.prompt_tokens({"messages": [{"role": "user", "content": "copy"}]}) == expected
    assert chat_text(task.tokenizer, TURNS[:1]).startswith("2024-07-26 ")


def test_a_template_that_begins_a_sequence_itself_begins_it_once(tmp_path):
    """The released code of FedP2EFT has the beginning-of-sequence token twice, from the template and the tokenizer."""
    save_llama(tmp_path, "{{ bos_token }} " + CHAT)
    _, task = load(tmp_path)
    assert task.tokenizer("copy")["input_ids"][0] == 2  # the tokenizer would add it
    once = task.prepare(RECORDS).batch([0])
    assert once["input_ids"].tolist() == [[2, 19, 18, 22, 9, 10, 21, 20, 18, 9, 10, 3]]
    _, as_released = load(tmp_path, prompt="chat-bos")
    twice = as_released.prepare(RECORDS).batch([0])
    assert twice["input_ids"].tolist() == [[2, *once["input_ids"][0].tolist()]]
    assert twice["labels"].tolist() == [[-100, *once["labels"][0].tolist()]]


def everywhere(model, batch):
    """(batch, tokens, vocabulary), prompts and padding included, as transformers computes them with a mask."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_the_loss_equals_a_hand_computation_over_answer_tokens(language):
    model, task = language
    batch = task.prepare(RECORDS).batch([0, 1, 2])
    logits = task.logits(model, batch)
    log_p = F.log_softmax(everywhere(model, batch).double(), dim=-1)
    terms = [
        [
            -float(log_p[row, t - 1, batch["labels"][row, t]])
            for t in range(1, batch["labels"].shape[1])
            if batch["labels"][row, t] != -100
        ]
        for row in range(3)
    ]
    assert [len(row) for row in terms] == [3, 7, 2]
    flat = [term for row in terms for term in row]
    assert float(task.loss(logits, batch)) == pytest.approx(sum(flat) / 12, abs=1e-5)
    assert task.sample_losses(logits, batch, "sum").tolist() == pytest.approx([sum(r) for r in terms], abs=1e-5)
    assert task.sample_losses(logits, batch).tolist() == pytest.approx([sum(r) / len(r) for r in terms], abs=1e-5)
    with_labels = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    assert float(task.loss(logits, batch)) == pytest.approx(float(with_labels.loss), abs=1e-5)


@torch.no_grad()
def test_the_output_embedding_sees_answer_tokens_alone(language):
    """3 + 7 + 2 of 3 x 17 tokens; the logits are those of the whole batch, and of any other way to make the batch."""
    model, task = language
    batch = task.prepare(RECORDS).batch([0, 1, 2])
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    logits = task.logits(model, batch)
    hook.remove()
    assert seen == [(1, 12, logits.shape[1])]
    learnt = batch["labels"][:, 1:] != -100
    torch.testing.assert_close(logits, everywhere(model, batch)[:, :-1][learnt])
    rows, samples = task.judged(logits, batch)
    assert rows is logits and samples.tolist() == [0] * 3 + [1] * 7 + [2] * 2
    elsewhere = {**batch, "labels": torch.zeros_like(batch["labels"]), ANSWERS: answer_places(batch["labels"])}
    torch.testing.assert_close(task.logits(model, elsewhere), logits)
    assert len(task.logits(model, {name: batch[name] for name in ("input_ids", "attention_mask")})) == 0


@torch.no_grad()
def test_where_the_output_embedding_is_adapted_or_not_called_logits_are_chosen_behind_it(language, monkeypatch):
    model, task = language
    batch = task.prepare(RECORDS).batch([0, 1, 2])
    expected = task.logits(model, batch)
    adapted = AdaptedModel(model, targets=("lm_head",), head=False)
    assert isinstance(model.get_output_embeddings(), SlotLinear)
    torch.testing.assert_close(task.logits(model, batch), expected)
    assert adapted.unwrap() is model
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    torch.testing.assert_close(task.logits(model, batch), expected)


def test_labels_are_drawn_for_answer_tokens_alone(language):
    """From logits that leave no choice."""
    _, task = language
    batch = task.prepare(RECORDS).batch([0, 1, 2])
    drawn = task.draw_labels(F.one_hot(torch.arange(12), 24) * 1e4, batch, torch.Generator().manual_seed(0))
    learnt = batch["labels"] != -100
    assert drawn["labels"][learnt].tolist() == list(range(12)) and drawn["labels"][~learnt].eq(-100).all()
    assert not torch.equal(batch["labels"], drawn["labels"])


def test_gradients_of_summed_sample_losses_are_those_of_the_sum(language):
    model, task = language
    batch = task.prepare(RECORDS).batch([0, 1])
    logits = task.logits(model, batch).detach().requires_grad_(True)
    by_sample = torch.autograd.grad(task.sample_losses(logits, batch, "sum").sum(), logits)[0]
    by_mean = torch.autograd.grad(task.loss(logits, batch), logits)[0]
    torch.testing.assert_close(by_sample, by_mean * 10)  # 3 + 7 answer tokens


def test_padding_changes_no_loss(language):
    model, task = language
    examples = task.prepare(RECORDS)
    together = examples.batch([0, 1, 2])
    losses = task.sample_losses(task.logits(model, together), together)
    for row in range(3):
        alone = examples.batch([row])
        assert alone["input_ids"].shape[1] <= together["input_ids"].shape[1]
        torch.testing.assert_close(losses[row : row + 1], task.sample_losses(task.logits(model, alone), alone))


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_token_accuracy_and_loss_are_over_all_answer_tokens(language, batch_size):
    model, task = language
    examples = task.prepare(RECORDS)
    metrics = task.evaluate(model, examples, batch_size, "cpu")
    batch = examples.batch([0, 1, 2])
    logits = task.logits(model, batch)
    learnt = batch["labels"][:, 1:] != -100
    right = (everywhere(model, batch)[:, :-1].argmax(-1) == batch["labels"][:, 1:])[learnt]
    assert set(metrics) == {"token_accuracy", "loss"}
    assert metrics["token_accuracy"] == pytest.approx(float(right.float().mean()))
    assert metrics["loss"] == pytest.approx(float(task.loss(logits, batch)), abs=1e-5)


def test_an_answer_that_is_cut_is_counted_and_one_that_vanishes_is_refused(tmp_path, caplog):
    save_llama(tmp_path)
    _, task = load(tmp_path, max_length=10)
    with caplog.at_level(logging.WARNING, logger="befit"):
        batch = task.prepare([RECORDS[2], {"instruction": "copy", "output": "a b c"}]).batch([0, 1])
        task.prepare([{"instruction": "copy", "output": "a b c"}])
    assert batch["labels"][1, -2:].tolist() == [9, 10]
    assert task.truncated == 2
    assert [record.getMessage()[:33] for record in caplog.records] == ["1 of 2 answers were cut at 10 tok"]
    with pytest.raises(DataError, match=r"record 'long' \(position 1\): its prompt has 11 tokens.* within 10"):
        task.prepare([RECORDS[2], {"id": "long", "instruction": "copy a b c", "output": "a"}])


def test_a_long_prompt_is_not_trained_on_and_read_whole_where_it_is_measured(tmp_path, caplog):
    """<bos> ### Instruction : copy a b c ### Response : are 11 tokens; the model has positions for 16."""
    save_llama(tmp_path, max_position_embeddings=16)
    model, task = load(tmp_path, max_length=10, long_prompts="drop", metrics=["exact_match"])
    just, long = ({"instruction": f"copy{text}", "output": "a b c"} for text in ("", " a b"))
    beyond = {"instruction": "copy" + " a" * 12, "output": "a"}
    assert [task.trains_on(one, "") for one in (just, long, beyond)] == [True, False, False]
    with caplog.at_level(logging.WARNING, logger="befit"):
        examples = task.prepare([just, long, beyond])
    batch = examples.batch([0, 1, 2])
    learnt = [row[row != -100].tolist() for row in batch["labels"]]
    assert learnt == [[9, 10], [9, 10, 11, 3], []]  # cut at 10, whole, and no room within 16
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "1 of 3 answers were cut at 10 tokens (said once)",
        "1 of 3 prompts fill the 16 tokens that the model takes (said once)",
    ]
    losses = task.sample_losses(task.logits(model, batch), batch)
    assert losses[2] == 0 and torch.isfinite(losses).all()
    readable = task.evaluate(model, task.prepare([just, long]), 2, "cpu")
    scored = task.evaluate(model, examples, 2, "cpu")
    assert scored["loss"] == pytest.approx(readable["loss"])  # the prompt that cannot be read has no tokens to count
    assert task.compared(["a b c", "a b c", ""], examples, range(3))["exact_match"] == pytest.approx(2 / 3)
    assert task.headline(model, examples, 2, "cpu") == scored["exact_match"]
    with pytest.raises(DataError, match="prompts of all 1 examples fill the 16 tokens"):
        task.evaluate(model, task.prepare([beyond]), 2, "cpu")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "", "output": "a"}, "position 0: instruction must be a non-empty string"),
        ({"output": "a"}, "instruction must be a non-empty string, got None"),
        ({"instruction": "a", "input": None, "output": "a"}, "input must be a string, got None"),
        ({"instruction": "a"}, "output must be a string, got None"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(language, record, message):
    with pytest.raises(DataError, match=message):
        language[1].prepare([record])


def test_greedy_answers_are_those_of_transformers_whatever_the_batch(language):
    """One prompt at a time through `generate` against ours in one left-padded batch."""
    model, task = language
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # so that answers differ between prompts
    inputs = [{key: r[key] for key in r if key != "output"} for r in RECORDS] + ["good film", "very bad book a b c"]
    task.max_new_tokens = 12
    ours = [answer["answer"] for answer in task.predict(model, inputs)]
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=task.tokenizer.pad_token_id,
        eos_token_id=task.tokenizer.eos_token_id,
        bos_token_id=task.tokenizer.bos_token_id,
    )
    theirs = []
    for value in inputs:
        prompt = torch.tensor([task.prompt_tokens({"instruction": value} if isinstance(value, str) else value)])
        full = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[0]
        theirs.append(task.tokenizer.decode(full[prompt.shape[1] :], skip_special_tokens=True))
    assert ours == theirs
    assert len(set(ours)) > 1
    assert [answer["answer"] for answer in task.predict(model, inputs, batch_size=2)] == ours


def test_answers_end_at_the_last_position_of_the_model_whatever_the_batch(language):
    """64 positions and 128 tokens wanted: each row stops for itself, and a row that is done holds up no other."""
    model, task = language
    model.generation_config.eos_token_id = None
    task.tokenizer.eos_token = None  # nothing else ends these answers
    prompts = [task.prompt_tokens({"instruction": text}) for text in ("a", "a b c d e " * 5)]
    short, long = (len(prompt) for prompt in prompts)
    answers = task.predict(model, ["a", "a b c d e " * 5])
    assert task.predict(model, ["a"]) == answers[:1]
    tokens = [greedy(model, [prompt], (), 0, 128, 64, "cpu")[0] for prompt in prompts]
    assert [len(row) for row in tokens] == [64 - short, 64 - long]
    assert greedy(model, prompts, (), 0, 128, 64, "cpu") == tokens
    assert [len(row) for row in greedy(model, prompts, (), 0, 3, 64, "cpu")] == [3, 3]
    with pytest.raises(DataError, match="the model takes 64 with the answer"):
        task.predict(model, ["a " * 70])


def test_exact_match_and_rouge_follow_what_a_trained_model_answers(tmp_path):
    """A model that has learnt two of three answers by heart scores 2/3."""
    save_llama(tmp_path)
    model, task = load(tmp_path, generate=True, max_new_tokens=8)
    learnt = task.prepare([RECORDS[0], RECORDS[2]])
    model.requires_grad_(True)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = learnt.batch([0, 1])
    for _ in range(60):
        optimiser.zero_grad()
        task.loss(task.logits(model, batch), batch).backward()
        optimiser.step()
    model.train()
    wrong = {**RECORDS[1], "output": "book book book book book"}
    metrics = task.evaluate(model, task.prepare([RECORDS[0], RECORDS[2], wrong]), 2, "cpu")
    assert task.metric == "exact_match"
    assert metrics["exact_match"] == pytest.approx(2 / 3)
    assert metrics["rougeL"] == pytest.approx(2 / 3)
    assert 5 / 11 <= metrics["token_accuracy"] < 1
    assert model.training
    assert task.predict(model, [{"instruction": "copy", "input": "a b"}]) == [{"answer": "a b"}]


def test_generation_stops_at_the_end_token_of_the_checkpoint_too(tmp_path):
    """Instruct models end a turn with a token of their own, named in generation_config.json."""
    save_llama(tmp_path)
    model, task = load(tmp_path, max_new_tokens=5)
    prompt = "copy"
    [free] = task.predict(model, [prompt])
    first = task.tokenizer(free["answer"], add_special_tokens=False)["input_ids"][0]
    model.generation_config.eos_token_id = [3, first]
    assert task.predict(model, [prompt]) == [{"answer": ""}]


def test_prompts_follow_the_setting(tmp_path):
    """Own templates put both fields in place and leave other braces alone; chat needs a template."""
    save_llama(tmp_path)
    backbone = load_backbone(Settings(str(tmp_path)), "causal-lm", (), 0)

    def prompt(setting, **record):
        task = make_task("causal-lm", backbone.processor, prompt=setting)
        return task.tokenizer.convert_ids_to_tokens(task.prompt_tokens(record))

    assert prompt("very {instruction} : {input} {film}", instruction="copy", input="a b") == [
        "<bos>",
        "very",
        "copy",
        ":",
        "a",
        "b",
        "<unk>",
        "film",
        "<unk>",
    ]
    assert prompt("plain", instruction="copy") == prompt("auto", instruction="copy")
    assert prompt("alpaca", instruction="copy")[-7:] == prompt("plain", instruction="copy")[-7:]
    assert len(prompt("alpaca", instruction="copy")) > len(prompt("plain", instruction="copy"))
    with pytest.raises(DataError, match=r"has an input, for which model\.prompt has no place"):
        prompt("# {instruction}", instruction="copy", input="a")
    with pytest.raises(
        ModelError, match=r"model\.prompt is chat, and the tokenizer of this model has no chat template"
    ):
        prompt("chat", instruction="copy")
    assert prompt_problem("chat") == "" and "or a text with {instruction}" in prompt_problem("chatt")


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "value"),
    [
        ("exact_match", " \N{FULLWIDTH LATIN CAPITAL LETTER A}B ", "ab", 1),
        ("token_f1", "the red house", "a red house", 2 / 3),
        ("rouge1", "running dogs", "runs dog", 0),
        ("rouge1_stem", "running dogs", "runs dog", 1),
        ("rougeL", "b a c", "a b c", 2 / 3),
        ("rouge2", "a b d c", "a b c", 2 / 5),  # one pair of three and of two
        ("rouge2_unicode", "中 文 字", "中 文", 2 / 3),
        ("rougeL", "中文", "中文", 0),
        ("rougeL_unicode", "中文", "中国", 1 / 2),
        ("rouge1_unicode", "हिन्दी Café!", "हिन्दी CAFÉ", 1),
        ("rougeL_char", "abcd", "abd", 6 / 7),
        ("rougeL_char", "AB", "ab", 0),
    ],
)
def test_metrics_of_one_answer(metric, answer, reference, value):
    """F = 2PR / (P + R): "b a c" shares "a c", 2 of 3; 中文 and 中国 one of two; abd lies in abcd, P 3/4 and R 1."""
    assert compare([answer], [(reference,)], [metric]) == {metric: pytest.approx(value)}


def test_the_best_reference_counts_and_answers_are_averaged():
    """(max(0, 1) + 0) / 2."""
    found = compare(["yes", "perhaps"], [("no", "yes"), ("no",)], ["exact_match", "rouge1"])
    assert found == {"exact_match": 0.5, "rouge1": 0.5}
    with pytest.raises(DataError, match="no answers to compare"):
        compare([], [])


def test_the_first_choice_in_an_answer_counts_the_longest_of_those_at_one_place():
    choices = ("answer1", "answer10", "answer2")
    assert parsed_choice("It is Answer10, not answer2", choices) == "answer10"
    assert parsed_choice("answer2 or answer1", choices) == "answer2"
    assert parsed_choice("no idea", choices) is None
    found = compare(["answer1 .", "?"], [("answer1",), ("answer2",)], ["choice_parse"], [choices, choices])
    assert found == {"choice_parse": 0.5, "unparsable": 0.5}


def test_a_choice_is_a_word_of_its_own_and_scripts_without_blanks_have_none():
    letters = ["I choose a", "I choose b"]
    assert parsed_choice("The answer is b", letters, ["a", "b"]) == "I choose b"
    assert parsed_choice("I know it: yes", ["yes", "no"]) == "yes"
    assert parsed_choice("答案是猫。", ["狗", "猫"]) == "猫"
    assert parsed_choice("C++ it is", ["C", "C++"]) == "C++"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The answer for a patient is B", "B"),
        ("A patient like this needs b.", "B"),
        (" A giraffe", None),
        ("No. A giraffe is taller", None),
        ("I'm sure that I would say it is a", "A"),
        ("Option A is better than B", "A"),
        ("A is better than B", "A"),
        ("A\nIt is not B", "A"),
        ("'A' it is", "A"),
        ("(a) giraffe", "A"),
        ("A. Giraffe", "A"),
        ("A", "A"),
        ("i", "I"),
    ],
)
def test_an_article_or_pronoun_is_no_choice_of_its_letter(answer, expected):
    assert parsed_choice(answer, ["A", "B", "I"]) == expected


def choice(output, *choices, instruction="copy"):
    return {"instruction": instruction, "output": output, "choices": list(choices)}


QUESTIONS = [
    choice("a b", "a b", "good film", "c"),
    choice("very bad book a", "very bad book a", "d"),
    choice("e", "a", "e", "b c d e", instruction="reverse"),
    choice("b", "good", "b"),
]
CHOICES = ["choice_sum", "choice_per_token", "choice_per_char"]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_choices_score_by_their_own_tokens_alone(tmp_path, batch_size):
    """Against one forward pass per choice, without padding: the sum of log p of its tokens, end token left out."""
    save_llama(tmp_path)
    model, task = load(tmp_path, metrics=CHOICES)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    correct = dict.fromkeys(CHOICES, 0)
    best = set()
    for record in QUESTIONS:
        scores = {name: [] for name in CHOICES}
        prompt = task.prompt_tokens(record)
        for text in record["choices"]:
            tokens = task.tokenizer(text, add_special_tokens=False)["input_ids"]
            log_p = model(input_ids=torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
            total = sum(float(log_p[len(prompt) + place - 1, token]) for place, token in enumerate(tokens))
            for name, divisor in zip(CHOICES, (1, len(tokens), len(text)), strict=True):
                scores[name].append(total / divisor)
        for name in CHOICES:
            correct[name] += record["choices"][scores[name].index(max(scores[name]))] == record["output"]
            best.add((name, scores[name].index(max(scores[name]))))
    metrics = task.evaluate(model, task.prepare(QUESTIONS), batch_size, "cpu")
    assert {name: metrics[name] for name in CHOICES} == {name: correct[name] / 4 for name in CHOICES}
    assert task.metric == "choice_sum" and "exact_match" not in metrics
    assert len({place for _, place in best}) > 1  # the right answers are not all of one place


def test_ties_go_to_the_first_choice_and_are_counted(tmp_path):
    """A model of zeros finds all tokens equally likely: per token every choice ties, and the sum prefers short ones."""
    save_llama(tmp_path)
    model, task = load(tmp_path, metrics=["choice_per_token", "choice_sum"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    metrics = task.evaluate(model, task.prepare(QUESTIONS), 8, "cpu")
    assert metrics["choice_per_token"] == 0.5 and metrics["choice_per_token_ties"] == 1
    assert metrics["choice_sum"] == 0 and metrics["choice_sum_ties"] == 0.5


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "copy", "output": "a"}, "evaluate.metrics asks for choices, .* got None"),
        (choice("a", "a"), "choices must be at least two different texts"),
        (choice("a", "a", " a "), "choices must be at least two different texts"),
        (choice("a", "b", "c"), r"its output 'a' is not among its choices \['b', 'c'\]"),
        (choice("a", "a", ""), "prompt and choice '' have 8 and 0 tokens"),
        (
            choice("a", "a", "b " * 60),
            "prompt and choice .* have 8 and 60 tokens; a choice needs one, and both have to fit 64",
        ),
        ({**choice("a", "a", "b"), "choice_names": "ab"}, "choice_names must be a list of strings, got 'ab'"),
        ({**choice("a", "a", "b"), "choice_names": ["x"]}, "choice_names must be 2 different texts, one for each"),
        ({**choice("a", "a", "b"), "choice_names": ["x", " x"]}, "choice_names must be 2 different texts"),
        ({**choice("a", "a", "b"), "references": "a"}, "references must be a list of strings, got 'a'"),
    ],
)
def test_choices_that_cannot_be_scored_are_named(tmp_path, record, message):
    save_llama(tmp_path)
    _, task = load(tmp_path, metrics=["choice_sum"])
    with pytest.raises(DataError, match=f"position 1.*{message}"):
        task.prepare([QUESTIONS[0], record])


def test_choices_are_as_long_as_what_is_done_with_them_allows(tmp_path):
    """A generated answer is looked up among their texts, whatever their tokens; and what is not trained on for its
    length is measured as long as the model has positions."""
    save_llama(tmp_path)
    long = choice("a", "a", "b " * 60)
    model, task = load(tmp_path, metrics=["choice_parse"], max_new_tokens=3)
    assert 0 <= task.evaluate(model, task.prepare([QUESTIONS[0], long]), 2, "cpu")["choice_parse"] <= 1
    model, task = load(tmp_path, max_length=8, long_prompts="drop", metrics=["choice_sum"])
    short = choice("a", "a", "b c")
    assert not task.trains_on(short, "")
    assert task.evaluate(model, task.prepare([short]), 2, "cpu")["choice_sum"] in (0.0, 1.0)
    with pytest.raises(DataError, match="both have to fit 64"):
        task.prepare([long])


def test_metrics_of_text_and_of_likelihood_can_be_asked_for_together(tmp_path):
    """The headline is the first; only what is asked for is measured."""
    save_llama(tmp_path)
    model, task = load(tmp_path, metrics=["rouge1", "choice_sum", "choice_parse"], max_new_tokens=3)
    metrics = task.evaluate(model, task.prepare(QUESTIONS), 2, "cpu")
    assert task.metric == "rouge1"
    assert {"token_accuracy", "loss", "rouge1", "choice_sum", "choice_parse", "unparsable"} == set(metrics)
    assert next(iter(metrics)) == "rouge1"


@pytest.mark.parametrize(
    ("metrics", "passes"), [(["rouge1", "choice_sum"], 3), (["choice_sum", "rouge1"], None), ([], None)]
)
def test_the_headline_alone_is_that_of_all_metrics(tmp_path, metrics, passes):
    """Where it is of generated answers, prompts are read once: as many passes as the longest answer has tokens."""
    save_llama(tmp_path)
    model, task = load(tmp_path, metrics=metrics, max_new_tokens=3)
    examples = task.prepare(QUESTIONS)
    model.generation_config.eos_token_id = None
    task.tokenizer.eos_token = None  # so that answers have all three tokens
    shapes = []
    handle = model.register_forward_hook(lambda _model, _inputs, output: shapes.append(output.logits.shape[1]))
    found = task.headline(model, examples, len(QUESTIONS), "cpu")
    handle.remove()
    assert found == task.evaluate(model, examples, len(QUESTIONS), "cpu")[task.metric]
    if passes is not None:
        assert shapes == [1] * passes  # and of a prompt only the last position's logits are made


# The marks of what the assistant writes, and the same template without them.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %} assistant : "
    "{% generation %}{{ m.content }} <eos>{% endgeneration %} #{% else %}{{ m.role }} : {{ m.content }} #{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant :{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# The mark of SmolLM3's template holds what makes the assistant answer, too.
HEADED = MARKED.replace(" assistant : {% generation %}", "{% generation %} assistant : ")
HOLLOW = MARKED.replace("{{ m.content }} <eos>{% endgeneration %}", "{% endgeneration %}{{ m.content }} <eos>")
# A thought without content, which Qwen3's template writes before an answer that has none of its own.
THOUGHT = ("{{ m.content }} <eos>", "{% if 'very' not in m.content %}very good {% endif %}{{ m.content }} <eos>")
TURNS = [
    {"role": "user", "content": "copy a"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "copy b"},
    {"role": "assistant", "content": "b"},
]


@pytest.mark.parametrize("template", [MARKED, UNMARKED, HEADED, HOLLOW])
def test_every_answer_of_a_conversation_is_learnt_and_the_last_one_measured(tmp_path, template):
    """user : copy a # assistant : | a <eos> | # user : copy b # assistant : | b <eos>, marked or not: nobody writes the
    # after an end token, and a score would count it as right."""
    save_llama(tmp_path, template)
    model, task = load(tmp_path)
    examples = task.prepare([lm_record({"messages": TURNS}, {}, "row")])
    batch = examples.batch([0])
    first, second = [19, 18, 22, 9, 21, 20, 18], [21, 19, 18, 22, 10, 21, 20, 18]
    answers = [[9, 3], [10, 3]]
    assert batch["input_ids"].tolist() == [[*first, *answers[0], *second, *answers[1]]]
    assert batch["labels"].tolist() == [[*[-100] * len(first), *answers[0], *[-100] * len(second), *answers[1]]]
    whole = task.tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=template == MARKED)
    assert whole["input_ids"][: batch["input_ids"].shape[1]] == batch["input_ids"][0].tolist()
    if template == MARKED:
        learnt = [token for token, mask in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if mask]
        assert learnt == [token for token in batch["labels"][0].tolist() if token != -100]
    # Measured: the last answer after everything before it, also where answers are generated.
    logits = model(batch["input_ids"]).logits.double()
    count = len(answers[1])
    expected = F.cross_entropy(logits[0, -count - 1 : -1], torch.tensor(answers[1]))
    found = task.evaluate(model, examples, 4, "cpu")
    assert found["loss"] == pytest.approx(float(expected), abs=1e-5)
    _, generating = load(tmp_path, generate=True, max_new_tokens=3)
    both = generating.evaluate(model, generating.prepare([lm_record({"messages": TURNS}, {}, "row")]), 4, "cpu")
    assert both["loss"] == pytest.approx(found["loss"], abs=1e-5)
    answer = greedy(model, [batch["input_ids"][0, :-count].tolist()], {3}, 0, 3, 64, "cpu")[0]
    for given in (TURNS, TURNS[:-1]):
        (told,) = generating.predict(model, [lm_input({"messages": given}, {}, "row")])
        assert told["answer"] == task.tokenizer.decode(answer, skip_special_tokens=True)
    # Trained: the mean over the tokens of both answers, as transformers computes it.
    with_labels = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    assert float(task.loss(task.logits(model, batch), batch)) == pytest.approx(float(with_labels), abs=1e-5)


@pytest.mark.parametrize("template", [UNMARKED, MARKED, HEADED])
def test_what_a_template_writes_before_every_answer_is_part_of_the_prompt(tmp_path, template):
    """user : copy a # assistant : very good | a <eos>: learnt is what is compared, the same of each form."""
    save_llama(tmp_path, template.replace(*THOUGHT))
    _, task = load(tmp_path)
    asked = [19, 18, 22, 9, 21, 20, 18, *task._tokens("very good")]
    told = lm_record({"messages": TURNS[:2]}, {}, "row")
    prompt, answer, labels = task._prompt_and_answer(told, "row")
    assert (prompt, answer[:2], labels) == (asked, [9, 3], [-100] * len(asked))
    given = {"instruction": "copy a", "output": "a"}
    assert task._prompt_and_answer(given, "row") == (asked, [9, 3], labels)
    assert task.prompt_tokens(lm_input({"messages": TURNS[:1]}, {}, "row")) == asked
    # An answer with a thought of its own is learnt with it.
    own = [TURNS[0], {"role": "assistant", "content": "very bad a"}]
    prompt, answer, _ = task._prompt_and_answer(lm_record({"messages": own}, {}, "row"), "row")
    assert (prompt, answer[:4]) == (asked[:-2], [*task._tokens("very bad a"), 3])


LAST = "loop.last and not add_generation_prompt"


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        # An empty thought before the last answer alone, as Qwen3's writes it.
        (UNMARKED.replace("assistant : ", f"assistant : {{% if {LAST} %}}very good {{% endif %}}"), ["a <eos>"]),
        # Another end after the last answer, as gpt-oss's: that of earlier ones is not what the model is to write.
        (UNMARKED.replace("<eos>", f"{{% if {LAST} %}}<eos>{{% else %}}good{{% endif %}}"), ["a"]),
    ],
)
def test_earlier_answers_are_learnt_as_they_stand_before_the_last_where_a_template_rewrites_them(
    tmp_path, template, learnt
):
    save_llama(tmp_path, template)
    _, task = load(tmp_path)
    batch = task.prepare([lm_record({"messages": TURNS}, {}, "row")]).batch([0])
    tokens, labels = batch["input_ids"][0].tolist(), batch["labels"][0]
    assert [*tokens, *task._tokens("#")] == task.tokenizer.apply_chat_template(TURNS)["input_ids"]
    assert labels[labels != -100].tolist() == [token for text in [*learnt, "b <eos>"] for token in task._tokens(text)]
    # The same before a question that has no answer yet, and the prompt is what the template asks with.
    asked = task.prompt_tokens(lm_input({"messages": TURNS[:-1]}, {}, "row"))
    assert asked == tokens[: len(tokens) - len(task._tokens("b <eos>"))]


def test_the_thought_of_an_earlier_answer_is_not_learnt_where_a_template_drops_it(tmp_path):
    dropping = f"{{{{ m.content if {LAST} else m.content.replace('very good ', '') }}}} <eos>"
    save_llama(tmp_path, UNMARKED.replace("{{ m.content }} <eos>", dropping))
    _, task = load(tmp_path)
    turns = [TURNS[0], {"role": "assistant", "content": "very good a"}, *TURNS[2:]]
    batch = task.prepare([lm_record({"messages": turns}, {}, "row")]).batch([0])
    labels = batch["labels"][0]
    read = [*batch["input_ids"][0].tolist(), *task._tokens("#")]
    assert read == task.tokenizer.apply_chat_template(turns)["input_ids"]
    assert labels[labels != -100].tolist() == task._tokens("a <eos>") + task._tokens("b <eos>")


def test_a_conversation_that_the_assistant_begins_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="row: messages begins with the assistant's message"):
        lm_record({"messages": TURNS[1:]}, {}, "row")
    save_llama(tmp_path, UNMARKED)
    _, task = load(tmp_path)
    with pytest.raises(DataError, match=r"position 0.* refuses it: Cannot apply chat template to an empty"):
        task.prepare([{"messages": TURNS[1:], "output": "b"}])


def test_a_system_message_stands_first_and_what_a_template_refuses_is_named(tmp_path):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + UNMARKED
    save_llama(tmp_path, refusing)
    _, task = load(tmp_path)
    system = [{"role": "system", "content": "copy"}, *TURNS]
    with pytest.raises(DataError, match="the chat template of this model refuses it: no system here"):
        task.prepare([lm_record({"messages": system}, {}, "row")])
    save_llama(tmp_path / "b", UNMARKED)
    _, task = load(tmp_path / "b")
    assert task.prepare([lm_record({"messages": system}, {}, "row")]).batch([0])["input_ids"][0, :4].tolist() == [
        1, 18, 22, 21
    ]  # fmt: skip
    save_llama(tmp_path / "c", UNMARKED.replace("in messages", "in messages[-3:]"))
    _, forgetting = load(tmp_path / "c")  # what is too long ago
    with pytest.raises(DataError, match=r"position 0: .*{% generation %}"):
        forgetting.prepare([lm_record({"messages": [*TURNS, *TURNS]}, {}, "row")])
    save_llama(tmp_path / "d")
    _, plain = load(tmp_path / "d")
    with pytest.raises(DataError, match=r"position 0.* prompt and completion"):
        plain.prepare([lm_record({"messages": TURNS}, {}, "row")])
    _, alpaca = load(tmp_path / "b", prompt="alpaca")
    with pytest.raises(DataError, match=r"model\.prompt is alpaca, set it to chat"):
        alpaca.prepare([lm_record({"messages": TURNS}, {}, "row")])


def test_prompt_and_completion_are_read_as_they_stand_and_a_text_is_learnt_as_a_whole(tmp_path):
    """<bos> copy a | b <eos>, and <bos> | a b <eos>; in text, the first token has nothing before it."""
    save_llama(tmp_path, CHAT)
    model, task = load(tmp_path)
    examples = task.prepare([lm_record({"prompt": "copy a", "completion": "b"}, {}, "row")])
    assert examples.batch([0])["input_ids"].tolist() == [[2, 22, 9, 10, 3]]
    assert examples.batch([0])["labels"].tolist() == [[-100, -100, -100, 10, 3]]
    examples = task.prepare([lm_record({"text": "a b"}, {}, "row")])
    batch = examples.batch([0])
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[2, 9, 10, 3]], [[-100, 9, 10, 3]])
    expected = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    assert task.evaluate(model, examples, 4, "cpu")["loss"] == pytest.approx(float(expected), abs=1e-5)
    (told,) = task.predict(model, [lm_input({"text": "a b"}, {}, "row")])
    assert told == task.predict(model, [lm_input({"prompt": "a b"}, {}, "row")])[0]
    _, generating = load(tmp_path, generate=True)
    with pytest.raises(DataError, match=r"position 0 has a text .*evaluate\.generate"):
        generating.prepare([lm_record({"text": "a b"}, {}, "row")])
