"""`skills`: what docs/skills.md says of its tasks, words and clients, and the backbones that ship."""

import importlib
import sys
from itertools import islice

import pytest

from befit.config.experiment import ModelSettings
from befit.core.errors import ConfigError, DataError
from befit.data import registry
from befit.data.offline import skills as skills_words
from befit.data.offline.skills import english_words, halves, skills
from befit.data.offline.skills_tasks import ALLOWED_PAIRS, CLIENT_PAIRS, HELD_OUT, OPERATIONS, answer, generated_records
from befit.models import load_backbone
from befit.tasks import make_task
from befit.zoo import zoo_names, zoo_path

# Of who holds which word with seed 0: another Python or Babel must not change it.
PARTITION = "d77b4b3714e825109397e079c8267f7276ba7cad2080b19d0559e6088d83d32e"
AVOID = {word.lower() for word in english_words()}
# Name to parameters, accuracy on text of its own kind at least, and accuracy on the clients' tasks.
BACKBONES = {
    "skills-llama": (452_736, 0.92, 0.34),
    "skills-llama-lower": (452_736, 0.92, 0.07),
    "skills-llama-s": (207_616, 0.70, 0.13),
}


@pytest.fixture(scope="module")
def federation():
    return skills()


def everyone(federation):
    return (*federation.clients, *federation.newcomers)


def words(client, *splits):
    return [record["input"] for split in splits for record in getattr(client, split)]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("copy", "Ukraine"),
        ("reverse", "eniarkU"),
        ("upper", "UKRAINE"),
        ("first three", "Ukr"),
        ("last three", "ine"),
        ("double", "UUkkrraaiinnee"),
        ("swap ends", "ekrainU"),
        ("drop first", "kraine"),
        ("drop last", "Ukrain"),
        ("twice", "Ukraine Ukraine"),
        ("star vowels", "*kr**n*"),
        ("count", "7 Ukraine"),
        ("reverse, upper", "ENIARKU"),
        ("drop first, reverse", "eniark"),
        ("star vowels, reverse", "*n**rk*"),
        ("upper, swap ends", "EKRAINU"),
        ("last three, double", "iinnee"),
        ("first three, reverse", "rkU"),
        ("drop last, twice", "Ukrain Ukrain"),
        ("swap ends, star vowels", "*kr**n*"),
        ("double, drop first", "Ukkrraaiinnee"),
        ("count, upper", "7 UKRAINE"),
    ],
)
def test_every_task_answers_as_by_hand(instruction, expected):
    """Written by hand for one word; in a pair the operation that is named first comes first."""
    assert answer(instruction, "Ukraine") == expected


def test_eight_pairs_are_clients_two_are_newcomers_and_none_is_trained_on(federation):
    """12 x 11 ordered pairs, less ten."""
    assert [client.info["task"] for client in federation.clients] == list(CLIENT_PAIRS)
    assert [client.id for client in federation.newcomers] == ["double.drop-first", "count.upper"]
    assert len(OPERATIONS) == 12 and len(ALLOWED_PAIRS) == 122 and not set(ALLOWED_PAIRS) & set(HELD_OUT)


def test_every_client_has_its_sizes_and_the_answers_that_its_task_gives(federation):
    for client in everyone(federation):
        assert [len(client.train), len(client.val), len(client.test)] == [128, 60, 200]
        for record in (*client.train, *client.val, *client.test):
            assert record["instruction"] == client.info["task"]
            assert record["output"] == answer(record["instruction"], record["input"])
    held = [record["id"] for client in everyone(federation) for record in (*client.train, *client.val, *client.test)]
    assert len(held) == len(set(held))


def test_no_word_is_tested_on_that_anyone_has_learnt_from(federation):
    learnt = {word.casefold() for client in everyone(federation) for word in words(client, "train", "val")}
    tested = {word.casefold() for client in everyone(federation) for word in words(client, "test")}
    assert learnt and tested and not learnt & tested
    for client in everyone(federation):
        assert not set(words(client, "train")) & set(words(client, "val"))


def test_the_words_are_771_names_in_two_halves():
    """The count of the pinned Babel; half of them, rounded up, to learn from."""
    first, second = halves()
    assert [len(english_words()), len(first), len(second)] == [771, 386, 385]
    assert set(first) | set(second) == set(english_words()) and not set(first) & set(second)
    assert all(word.isascii() and word.isalpha() and 4 <= len(word) <= 12 for word in english_words())


@pytest.mark.parametrize("mixed_case", [False, True])
def test_backbones_learn_from_no_task_and_no_word_of_a_client(mixed_case):
    """40 % single operations, give or take 4 standard errors of 1 point; a tenth capitalised, a tenth in capitals."""
    records = list(islice(generated_records(5, AVOID, mixed_case), 3000))
    assert not {record["instruction"] for record in records} & set(HELD_OUT)
    assert {record["instruction"] for record in records} == {*OPERATIONS, *ALLOWED_PAIRS}
    assert not {record["input"].lower() for record in records} & AVOID
    assert {len(record["input"]) for record in records} == {4, 5, 6, 7, 8}
    assert sum("," not in record["instruction"] for record in records) / 3000 == pytest.approx(0.4, abs=0.04)
    cases = [
        sum(record["input"] == change(record["input"]) for record in records) / 3000
        for change in (str.capitalize, str.upper)
    ]
    assert cases == pytest.approx([0.1, 0.1] if mixed_case else [0, 0], abs=0.025)


def test_a_word_that_a_client_holds_is_drawn_again():
    plain = [record["input"] for record in islice(generated_records(0, (), False), 50)]
    assert plain[3] not in [record["input"] for record in islice(generated_records(0, {plain[3]}, False), 50)]


def test_public_records_are_of_the_backbones_kind_and_others_than_those_it_saw(federation):
    assert len(federation.public) == 5000
    assert not {record["instruction"] for record in federation.public} & set(HELD_OUT)
    seen = {(record["instruction"], record["input"]) for record in islice(generated_records(0, AVOID, False), 5000)}
    assert sum((record["instruction"], record["input"]) in seen for record in federation.public) < 10


def test_the_same_seed_gives_the_same_words_and_another_one_others(federation):
    assert federation.manifest["partition"]["sha256"] == PARTITION
    other = skills(seed=1)
    assert other.manifest["partition"]["sha256"] != PARTITION
    assert words(other.clients[0], "train") != words(federation.clients[0], "train")
    assert set(words(other.clients[0], "test")) <= set(halves()[1])


def test_low_has_the_first_twelve_training_words_and_all_else_as_it_was(federation):
    for few, many in zip(everyone(registry.build("skills-low", None, {})), everyone(federation), strict=True):
        assert (few.train, few.val, few.test) == (many.train[:12], many.val, many.test)


def test_ten_has_the_newcomers_as_clients_and_shift_another_backbone(federation):
    ten = registry.build("skills-10", None, {})
    assert ten.clients == everyone(federation) and not ten.newcomers
    assert registry.build("skills-shift", None, {}).clients == federation.clients
    assert registry.get("skills-shift").default_model == "skills-llama-lower"
    assert {registry.get(name).default_model for name in ("skills", "skills-10", "skills-low")} == {"skills-llama"}
    assert [client.id for client in skills(clients=2).clients] == ["reverse.upper", "drop-first.reverse"]


def test_preferences_are_of_the_same_words_and_each_rejected_answer_is_wrong(federation):
    pairs = registry.build("skills-preference", None, {})
    assert pairs.task == "preference" and pairs.manifest["partition"]["sha256"] == PARTITION
    for mine, theirs in zip(everyone(pairs), everyone(federation), strict=True):
        assert [row["chosen"] for row in mine.test] == [row["output"] for row in theirs.test]
        assert all(row["rejected"] != row["chosen"] for row in (*mine.train, *mine.val, *mine.test))


def test_sizes_that_cannot_be_are_named_together():
    with pytest.raises(ConfigError) as caught:
        skills(clients=9, train=330, test=386)
    assert caught.value.problems == (
        "benchmark.clients: must be 1 to 8, got 9",
        "benchmark.train: 330 and val 60 words are more than the 386 of their half",
        "benchmark.test: there are 385 words to test on, not 386",
    )
    with pytest.raises(ConfigError, match=r"benchmark\.train: must be 1 or more, got 0"):
        skills(train=0)


def test_other_words_than_the_recorded_ones_and_a_missing_babel_are_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(skills_words, "WORDS_SHA256", "0" * 64)
        with pytest.raises(DataError, match="recorded is 000000000000; install Babel anew"):
            skills()
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(DataError, match=r"skills is built from the Babel package.*'\.\[benchmarks\]'"):
        skills()


def loaded(name, **options):
    backbone = load_backbone(ModelSettings(name), "causal-lm", (), 0)
    return backbone.model, make_task("causal-lm", backbone.processor, max_length=128, max_new_tokens=40, **options)


@pytest.fixture(scope="module", params=BACKBONES)
def backbone(request):
    return request.param, *loaded(request.param, metrics=["exact_match"])


def test_backbones_ship_small_and_pinned(backbone):
    """Embedding 99 x 96; four layers of 4 x 96^2 + 3 x 96 x 256 + 2 x 96; the last norm of 96: 452,736. The small one
    has 64 and 176 in place of 96 and 256: 207,616."""
    name, model, _ = backbone
    assert name in zoo_names()
    folder = zoo_path(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == BACKBONES[name][0]
    assert (folder / "model.safetensors").stat().st_size < 3_000_000
    assert {path.suffix for path in folder.iterdir()} == {".json", ".jinja", ".safetensors"}


def test_the_script_makes_the_tokenizer_that_ships(backbone):
    script = importlib.import_module("scripts.zoo.skills_llama")
    made, shipped = script.character_tokenizer(), backbone[2].tokenizer
    text = "\n" + "".join(map(chr, range(32, 127)))
    tokens = shipped(text, add_special_tokens=False)["input_ids"]
    assert tokens == list(range(96)) == made(text, add_special_tokens=False)["input_ids"]
    assert shipped.decode(tokens) == text and len(shipped) == 99
    assert shipped.chat_template == made.chat_template
    assert [shipped.pad_token_id, shipped.bos_token_id, shipped.eos_token_id] == [96, 97, 98]


def test_the_prompt_is_as_documented_and_a_foreign_letter_is_read_as_a_question_mark(backbone):
    _, _, task = backbone
    prompt = task.prompt_tokens({"instruction": "reverse, upper", "input": "Laos"})
    assert task.tokenizer.decode(prompt) == "reverse, upper: Laos\n"
    prompt = task.prompt_tokens({"instruction": "copy", "input": "Réunion"})
    assert task.tokenizer.decode(prompt) == "copy: R?union\n"


def test_a_backbone_knows_its_operations_but_not_the_clients_pairs(backbone, federation):
    """Own kind of text: random words, of any case but for the one that has seen no capital letters."""
    name, model, task = backbone
    kind = generated_records(9, AVOID, mixed_case=name != "skills-llama-lower")
    own = task.evaluate(model, task.prepare(list(islice(kind, 200))), 200, "cpu")["exact_match"]
    asked = [record for client in federation.clients for record in client.test[:40]]
    new = task.evaluate(model, task.prepare(asked), 160, "cpu")["exact_match"]
    _, least, expected = BACKBONES[name]
    assert own > least
    assert new == pytest.approx(expected, abs=0.05)


def test_answers_do_not_depend_on_the_batch(backbone, federation):
    """Prompts of many lengths, of all clients: one at a time, in fives, and together."""
    _, model, task = backbone
    records = [client.test[number] for client in federation.clients for number in (0, 1)]
    alone = [task.predict(model, [record])[0] for record in records]
    assert task.predict(model, records, batch_size=5) == task.predict(model, records, batch_size=16) == alone
    assert len({answer["answer"] for answer in alone}) > 12


def test_clients_can_have_fewer_tasks_than_they_are_in_turn():
    federation = skills(clients=5, tasks=2, train=8, val=4, test=10)
    first, second = CLIENT_PAIRS[:2]
    assert [client.info["task"] for client in federation.clients] == [first, second, first, second, first]
    ids = [client.id for client in federation.clients]
    assert ids[0::2] == ["reverse.upper", "reverse.upper-2", "reverse.upper-3"]
    assert words(federation.clients[0], "train") != words(federation.clients[2], "train")
    assert federation.manifest["partition"]["args"]["tasks"] == 2
    assert [client.train for client in skills(tasks=8).clients] == [client.train for client in skills().clients]
    with pytest.raises(ConfigError, match="must be 1 to the number of clients, 5, got 6"):
        skills(clients=5, tasks=6)
