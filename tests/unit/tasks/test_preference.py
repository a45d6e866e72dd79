"""Preferences: what rows become, what a pair's tokens are, the reference, and runs of methods that differ in what they
ask of a task. Loss, gradients and scores are compared with TRL's in tests/golden/test_dpo_of_trl.py."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import slot
from befit.adapters.layout import lora
from befit.adapters.mixers import ByInput
from befit.config.experiment import ModelSettings
from befit.config.load import load_experiment
from befit.core.chance import Chance
from befit.core.errors import ConfigError, DataError, ModelError
from befit.core.values import Tick
from befit.models import load_backbone
from befit.protocol.privacy import Mechanism
from befit.protocol.stage import Gradients
from befit.runs.exporting import ExportForm, _Scores, export
from befit.runs.host import Host, shared
from befit.runs.runner import run
from befit.tasks import make_task
from befit.tasks.causal_lm import per_sample, token_losses
from befit.tasks.lm_records import lm_input
from befit.tasks.preference_records import preference_record
from befit.train.loop import training
from befit.train.passes import Pass
from befit.train.private import Private
from tests.tiny import random_state
from tests.unit.models.tiny_models import Settings, save_llama
from tests.unit.tasks.test_causal_lm import MARKED

ASK, RIGHT, WRONG = (
    {"role": role, "content": text} for role, text in (("user", "copy a"), ("assistant", "a"), ("assistant", "b c"))
)
SMALL = {"name": "skills-preference", "clients": 2, "train": 6, "val": 2, "test": 6}
# PEFT asks transformers by a name that transformers 5 calls old.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]},
        {"prompt": "copy a", "chosen": [RIGHT], "rejected": [WRONG]},
        {"prompt": "copy a", "chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]},
        {"chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]},
    ],
)
def test_all_forms_of_a_conversation_become_one_record(row: dict[str, Any]) -> None:
    assert preference_record(row, {}, "row 1") == {"messages": [ASK], "chosen": "a", "rejected": "b c"}


def test_texts_have_their_prompt_apart_or_in_front_of_both() -> None:
    """The blank between prompt and answers is the answers', as in TRL's extract_prompt."""
    apart = {"question": "It is", "chosen": " good", "rejected": " bad"}
    assert preference_record(apart, {"prompt": "question"}, "row 1") == {
        "prompt": "It is",
        "chosen": " good",
        "rejected": " bad",
    }
    assert preference_record({"chosen": "It is good", "rejected": "It is bad"}, {}, "row 1") == {
        "prompt": "It is",
        "chosen": " good",
        "rejected": " bad",
    }
    longer = preference_record({"chosen": "It is", "rejected": "It is not"}, {}, "row 1")
    assert longer == {"prompt": "It is", "chosen": "", "rejected": " not"}
    assert preference_record({"instruction": "Say it.", "chosen": "good", "rejected": "bad"}, {}, "row 1") is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 1: rejected must be a text"),
        ({"prompt": "a", "chosen": "b", "rejected": [WRONG]}, "row 1: rejected must be a text that is not empty, or"),
        ({"chosen": "good", "rejected": "bad"}, "row 1: needs instruction or prompt, or a column that data"),
        ({"chosen": [ASK, RIGHT], "rejected": [WRONG, RIGHT]}, "row 1: rejected has no message of the user"),
        ({"chosen": [ASK, RIGHT], "rejected": [ASK, ASK]}, "row 1: chosen and rejected must be the same conversation"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        preference_record(row, {}, "row 1")


def test_a_pair_is_two_rows_in_which_the_last_answers_are_learnt(tmp_path: Path) -> None:
    """user : copy a # assistant : | a <eos>, or | b c <eos>; the earlier answer of a conversation is not learnt."""
    save_llama(tmp_path, MARKED)
    task: Any = make_task("preference", load_backbone(Settings(str(tmp_path)), "preference", (), 0).processor)
    talk = [ASK, {"role": "assistant", "content": "d"}, ASK]
    examples = task.prepare(
        [
            {"prompt": "a b", "chosen": "c", "rejected": "d e"},
            {"messages": talk, "chosen": "a", "rejected": "b c"},
        ]
    )
    with pytest.raises(DataError, match="the record at position 1: chosen and rejected are the same"):
        task.prepare([{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "c", "rejected": "c"}])
    batch = examples.batch([1, 0])
    asked = [19, 18, 22, 9, 21]
    before = [*asked, 20, 18, 12, 3, 21, *asked, 20, 18]
    none = len(before) * [-100]
    assert batch["input_ids"][0].tolist() == [*before, 9, 3, 0]
    assert batch["labels"][:2].tolist() == [[*none, 9, 3, -100], [*none, 10, 11, 3]]
    assert batch["input_ids"][2:, :7].tolist() == [[2, 9, 10, 11, 3, 0, 0], [2, 9, 10, 12, 13, 3, 0]]
    assert batch["labels"][2:, :7].tolist() == [[-100] * 3 + [11, 3, -100, -100], [-100] * 3 + [12, 13, 3, -100]]
    assert (task.terms(batch).tolist(), task.positions(batch).tolist()) == ([1, 1], [2 + 3, 2 + 3])


def test_the_reference_is_the_bare_backbone_whatever_is_active_when_it_is_computed() -> None:
    """Examples are prepared when they are first needed, which may be within the scoring of a mixture of adapters."""
    host = Host(load_experiment({"benchmark": SMALL, "method": "feddpa"}))
    task, model = host.task, host.model
    client = host.infos[0].id
    bare = host.examples(client, "test").batch(range(6))
    model.install(lora(2, 4.0, slots=("shared", "personal")), 0)
    with torch.no_grad():
        sums = per_sample(token_losses(task.logits(model.backbone, bare), bare), bare)
    torch.testing.assert_close(bare["reference"], sums[1::2] - sums[::2])
    host._prepared.clear()
    model.load(random_state(model))
    with model.active("shared", "personal", mixer=ByInput(0.5, "similar")):
        assert torch.equal(host.examples(client, "test").batch(range(6))["reference"], bare["reference"])


def test_labels_are_drawn_by_the_probability_that_the_loss_is_of() -> None:
    """A margin of 2 prefers the chosen answer with probability sigmoid(2): drawn are losses of margin 2 and of -2."""
    task: Any = Host(load_experiment({"benchmark": SMALL, "method": "fedit", "train": {"dpo_beta": 1.0}})).task
    batch = {"labels": torch.tensor([[-100, 1], [-100, 0]] * 4000), "reference": torch.full((4000,), -2.0)}
    logits = torch.zeros(8000, 2)
    drawn = task.draw_labels(logits, batch, torch.Generator().manual_seed(0))
    losses = task.sample_losses(logits, drawn)
    right = math.log1p(math.exp(-2))
    assert sorted(set(losses.tolist())) == pytest.approx([right, right + 2])
    assert float((losses < 1).float().mean()) == pytest.approx(1 / (1 + math.exp(-2)), abs=0.02)


def test_a_pair_is_clipped_as_one_example_in_one_pass_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private training from one backward pass is that of single pairs."""
    host = Host(load_experiment({"benchmark": SMALL, "method": "fedit", "train": {"max_steps": 1}}))
    host.install(host.build({"name": "fedit", "rank": 2}))
    site, trained = host.site(host.infos[0]), list[dict[str, torch.Tensor]]()
    start = random_state(host.model)
    for at_once in (True, False):
        host.model.load(start)
        mechanism = Mechanism(0.5, 0.1, 0.5, Chance(b"k"), site.examples, Gradients(), left=1)
        asked = next(
            training(replace(site, mechanism=mechanism), [Pass(slot("shared"), ("shared",))], Tick("federate", 1, 1, 0))
        )
        learner = Private(asked, mechanism)
        assert learner._hooked == [True]
        learner._hooked = [at_once]
        with monkeypatch.context() as only:
            if at_once:
                only.setattr(Private, "_one_by_one", None)  # which is not called then
            asked.run(asked.optimisers(), learner)
        trained.append(host.model.dump(slot("shared")))
    for key, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][key], rtol=1e-4, atol=1e-5)


def test_a_comparison_gives_runs_with_another_beta_another_task() -> None:
    one, other = (load_experiment({"benchmark": SMALL, "method": "fedit", "train": {"dpo_beta": b}}) for b in (0.1, 1))
    assert shared(one) != shared(other)
    with pytest.raises(ConfigError, match=r"train\.dpo_beta: causal-lm has no such setting"):
        Host(load_experiment({"benchmark": "skills", "method": "fedit", "train": {"dpo_beta": 1.0}}))


def test_examples_without_a_reference_are_refused() -> None:
    host = Host(load_experiment({"benchmark": SMALL, "method": "fedit"}))
    batch = host.task.prepare(host.federation.clients[0].train).batch([0])
    with pytest.raises(ModelError, match="give them to the task's refer"):
        host.task.loss(host.task.logits(host.model.backbone, batch), batch)


def test_methods_learn_preferences_and_what_they_deploy_is_an_adapter(tmp_path: Path) -> None:
    """Statistics of single examples (Potara), weights by input (FedDPA), one adapter for all (FedIT), half of one
    (FedSA); engine.fleet has no effect. PEFT scores what is exported as befit does."""
    config = {
        "benchmark": SMALL,
        "method": {"name": "potara", "rank": 2},
        "baselines": [{"name": name, "rank": 2} for name in ("fedit", "feddpa", "fedsa")],
        "train": {"max_steps": 3, "batch_size": 3, "lr": 0.02},
        "federation": {"rounds": 2},
        "evaluate": {"metrics": ["preference_accuracy", "exact_match"], "max_new_tokens": 2, "newcomers": False},
        "engine": {"fleet": 2},
        "report": {"plots": False},
    }
    done = run(config, out=tmp_path / "run")
    rows = done.results["clients"]
    losses: dict[str, list[float]] = {}
    for line in map(json.loads, (done.path / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] == "train":
            losses.setdefault(line.get("method", "potara"), []).append(line["loss"])
    assert min(loss for each in losses.values() for loss in each) < math.log(2)
    for client, row in rows.items():
        assert {0 <= row[name] <= 1 for name in ("preference_accuracy", "exact_match")} == {True}, client
    client = next(iter(rows))
    adapter = export(done.path, client, tmp_path / "adapter", method="fedit")
    measured = _Scores(done.path, ExportForm(method="fedit")).measured(client, adapter, ModelSettings("skills-llama"))
    assert measured == pytest.approx(rows[client]["baselines"]["fedit"])


def test_a_prompt_of_messages_is_an_input_too() -> None:
    asked = [{"role": "user", "content": "reverse: ba"}]
    assert lm_input({"prompt": asked}, {}, "input 1") == {"messages": asked}
    assert lm_input({"prompt": "reverse: ba"}, {}, "input 1") == {"prompt": "reverse: ba"}
    with pytest.raises(DataError, match="prompt must be a text that is not empty, got 3"):
        lm_input({"prompt": 3}, {}, "input 1")
    with pytest.raises(DataError, match="input 1: text must be a text"):
        lm_input({"text": asked}, {}, "input 1")
