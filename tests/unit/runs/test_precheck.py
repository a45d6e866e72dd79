"""`befit check` refuses what `befit run` would refuse, and warns of what it would do otherwise than asked."""

import json
import re

import pytest
import torch
from PIL import Image

from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError, ModelError
from befit.protocol.registry import get_method, method_names
from befit.runs.runner import check, run
from tests.unit.models.tiny_models import save_bert, save_llama, without_bitsandbytes

SIGNATURES = {name: {one.name for one in get_method(name).parameters} for name in method_names()}
TEXTS = [{"text": f"{word} film", "label": label} for word, label in (("good", "pos"), ("bad", "neg"))] * 10
ANSWERS = [{"instruction": "copy a b c", "output": "a b c"}] * 20


@pytest.fixture
def experiment(tmp_path):
    """Builds an experiment on a tiny model; `task` decides model and data."""

    def build(*overrides, task="text-classification"):
        save = save_llama if task == "causal-lm" else save_bert
        if not (tmp_path / "model").exists():
            save(tmp_path / "model")
        for client in ("a", "b"):
            records = ANSWERS if task == "causal-lm" else TEXTS
            (tmp_path / f"{client}.jsonl").write_text("\n".join(map(json.dumps, records)))
        values = {
            "method": "fedit",
            "baselines": [],
            "federation": {"rounds": 1},
            "train": {"max_steps": 1},
            "model": {"id": str(tmp_path / "model"), "max_length": 20},
            "data": {"task": task, "clients": {client: str(tmp_path / f"{client}.jsonl") for client in ("a", "b")}},
        }
        return load_experiment(values, overrides)

    return build


def of_settings(experiment):
    """The warnings of a check but the one that the data of these tests deserve: four test examples a client."""
    warnings = check(experiment)["warnings"]
    few = (
        "2 clients have fewer test examples than 20 (a has 4, the fewest): each is worth more than 5 points of accuracy"
    )
    assert few in warnings
    return [one for one in warnings if one != few]


def test_a_choice_by_few_examples_is_doubted(experiment):
    chosen = experiment("federation.deploy=best", "baselines=[local]")
    (said,) = (warning for warning in of_settings(chosen) if "validation examples" in warning)
    assert said.endswith("(a has 2, the fewest): what federation.deploy: best chooses by so few is largely chance")


def refusals(experiment, tmp_path):
    """What check and run say."""
    said = []
    for attempt in (lambda: check(experiment), lambda: run(experiment, out=tmp_path / "out")):
        with pytest.raises((ConfigError, DataError, ModelError)) as caught:
            attempt()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_a_directory_with_pickled_weights_only_is_refused(experiment, tmp_path):
    wanted = experiment()
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/pytorch_model.bin")
    checked, ran = refusals(wanted, tmp_path)
    assert checked == ran and "pytorch_model.bin cannot be read safely" in checked


def test_a_text_model_without_a_tokenizer_is_refused(experiment, tmp_path):
    wanted = experiment()
    (tmp_path / "model/tokenizer.json").unlink()
    checked, ran = refusals(wanted, tmp_path)
    assert checked == ran and "tokenizer.json" in checked


def test_a_length_without_room_for_a_token_is_refused(experiment, tmp_path):
    """[CLS] and [SEP] alone are two tokens."""
    checked, ran = refusals(experiment("model.max_length=2"), tmp_path)
    assert checked == ran and "model.max_length: must be at least 3 tokens, got 2" in checked


def test_a_prompt_without_room_for_its_answer_is_refused(experiment, tmp_path):
    with pytest.raises(DataError) as caught:
        check(experiment("model.max_length=4", task="causal-lm"))
    first, *others = str(caught.value).splitlines()
    assert first.startswith("client a, train: ") and "nothing of its answer is left within 4" in first
    assert [line.split(": ")[0].strip() for line in others] == ["client a, test", "client b, train", "client b, test"]


def test_a_common_model_without_room_for_an_answer_is_refused_by_its_own_key(experiment, tmp_path):
    """Clients read their records in its terms in the first round of methods that compare them by it alone."""
    common = f"common_model={{id: {tmp_path / 'model'}, max_length: 4}}"
    with pytest.raises(DataError) as caught:
        check(experiment(common, "method={name: rela}", task="causal-lm"))
    first, *others = str(caught.value).splitlines()
    assert first.startswith("client a, train: ") and "Raise common_model.max_length" in first and len(others) == 1
    check(experiment(common, "method={name: fedit}", task="causal-lm"))


def test_public_records_are_read_as_the_model_will(experiment, tmp_path):
    public = tmp_path / "public.jsonl"
    public.write_text("\n".join(map(json.dumps, [*ANSWERS, {"instruction": "copy " + 20 * "a ", "output": "a"}])))
    wanted = experiment(f"data.public={public}", "method={name: fedmkt}", task="causal-lm")
    checked, ran = refusals(wanted, tmp_path)
    assert checked == ran and checked.startswith("DataError: public records: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(experiment, tmp_path):
    checked, ran = refusals(experiment("model.device=cuda"), tmp_path)
    assert checked == ran and "0 GPUs are visible" in checked


def test_quantisation_without_its_library_is_refused(experiment, tmp_path, monkeypatch):
    without_bitsandbytes(monkeypatch)
    checked, ran = refusals(experiment("model.quantise=int8"), tmp_path)
    assert checked == ran and "model.quantise is 'int8'" in checked


def test_a_bidirectional_encoder_is_refused_as_a_language_model(experiment, tmp_path):
    save_bert(tmp_path / "model", "masked")
    checked, ran = refusals(experiment(task="causal-lm"), tmp_path)
    assert checked == ran and "bert encoder" in checked and "causal-lm" in checked


def test_more_tokens_than_the_model_has_positions_are_a_warning(experiment):
    assert not any("max_length" in warning for warning in check(experiment())["warnings"])
    (warning,) = [one for one in check(experiment("model.max_length=21"))["warnings"] if "max_length" in one]
    assert warning.startswith("model.max_length is 21, but") and "takes 20 tokens" in warning


@pytest.mark.parametrize(("warmup", "warned"), [(7, False), (8, True)])
def test_a_warm_up_as_long_as_the_run_is_told_of(experiment, warmup, warned):
    settings = ("federation.rounds=4", "train.max_steps=2", f"train.warmup_steps={warmup}")
    told = f"train.warmup_steps: {warmup}, and federation.rounds, 4"
    assert any(told in one for one in check(experiment(*settings))["warnings"]) == warned


def test_a_sum_over_the_tokens_of_an_answer_means_nothing_for_classes(experiment):
    found = check(experiment("method={name: potara, statistics: {token_reduction: sum}}"))["warnings"]
    assert any(one.startswith("method.statistics.token_reduction: sum is for causal-lm") for one in found)
    found = check(experiment("method={name: potara, statistics: {token_reduction: mean}}"))["warnings"]
    assert not any("token_reduction" in one for one in found)


def test_data_and_model_are_looked_at_together(experiment, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "x"}')
    data = {"task": "text-classification", "clients": {"b": str(tmp_path / "b.jsonl")}}
    values = {"method": "fedit", "baselines": [], "model": {"id": str(tmp_path / "modle")}, "data": data}
    with pytest.raises(DataError) as caught:
        check(values)
    said = str(caught.value)
    assert "client b" in said and "no label; " in said
    assert "model.id:" in said and "modle" in said


@pytest.mark.parametrize("rank", [0, -3])
@pytest.mark.parametrize("method", [name for name in method_names() if "rank" in SIGNATURES[name]])
def test_a_rank_below_one_is_refused_by_its_key_in_every_method(method, rank):
    """Or below none, where that has a meaning."""
    values = {"benchmark": "digits", "method": {"name": method, "rank": rank}, "baselines": []}
    if (method, rank) == ("lora", 0):
        assert load_experiment(values).method["rank"] == 0
        return
    with pytest.raises(ConfigError, match=rf"method\.rank: must be {int(method != 'lora')} or more, got {rank}"):
        load_experiment(values)


def test_a_rank_above_the_width_of_a_layer_is_warned_of(experiment):
    (warning,) = of_settings(experiment("method.rank=1000"))
    assert warning.startswith("method fedit: rank 1000 is above 16")
    assert not of_settings(experiment("method.rank=4"))


NARROW = "PQ-LoRA of rank 17 needs 17 orthonormal directions"
SHALLOW = "PQ-LoRA in 3 blocks: this model has 2 adapted blocks"


@pytest.mark.parametrize(
    ("asked", "text"), [("blocks: 1, rank: 17", NARROW), ("blocks: 3, rank: 4", SHALLOW)], ids=["wide", "many"]
)
@pytest.mark.parametrize("place", ["method={}", "baselines=[local, {}]"], ids=["method", "baseline"])
def test_adapters_that_the_model_cannot_have_are_refused_before_anything_is_trained(
    experiment, tmp_path, place, asked, text
):
    checked, ran = refusals(experiment(place.format(f"{{name: fedmosaic, {asked}}}")), tmp_path)
    assert checked == ran and f"method fedmosaic: {text}" in checked
    assert not (tmp_path / "out/baselines").exists()
    assert check(experiment(place.format("{name: fedmosaic, blocks: 2, rank: 16}")))


def test_every_method_that_the_model_cannot_have_is_named_as_the_run_names_it(experiment, tmp_path):
    asked = "[{name: fedmosaic, blocks: 2}, {name: fedmosaic, blocks: 3}, {name: fedmosaic, blocks: 1, rank: 17}]"
    with pytest.raises(ConfigError) as caught:
        check(experiment(f"baselines={asked}"))
    found = [one.split(":")[0] for one in caught.value.problems]
    assert found == ["method fedmosaic-blocks-3", "method fedmosaic-rank-17-blocks-1"]


def test_a_baselines_rank_above_the_width_of_a_layer_is_warned_of(experiment):
    warnings = of_settings(experiment("baselines=[local, {name: ditto, rank: 1000}, {name: local, rank: 1000}]"))
    labels = ["ditto", "local-rank-1000"]
    assert [one.split(" is above 16")[0] for one in warnings] == [f"method {one}: rank 1000" for one in labels]


def test_what_a_method_says_of_the_training_is_told_once_before_it(experiment, caplog, tmp_path):
    wanted = experiment("method=scaffold")
    assert [one for one in check(wanted)["warnings"] if "control variates assume plain SGD" in one]
    assert not of_settings(experiment("method=scaffold", "train.optimiser=sgd"))
    run(wanted, out=tmp_path / "out")
    assert len([one for one in caplog.records if "control variates" in one.message]) == 1


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ("{a: {rank: 1}, 'phone-*': {rank: 1}}", "limits.phone-*: phone-* is no client. The clients are a, b"),
        (
            "{a: {rank: 1}, '*': {parameters: 3}}",
            "limits.*: a limit of 3 parameters (1.2e-05 megabytes), as client b "
            "has, holds no rank: the smallest module takes 32 a rank",
        ),
        # Between the widths of its modules: whether 40 hold a rank is known after the search alone.
        (
            "{a: {rank: 1}, b: {parameters: 40}}",
            "limits.b: a limit of 40 parameters (0.00016 megabytes), as client b has, may hold no rank: "
            "block.00.down_proj takes 48, and the scales may put it first. Give it 48 or more",
        ),
    ],
)
def test_limits_that_no_client_or_no_rank_fits_are_refused_before_the_search(experiment, tmp_path, limits, text):
    save_bert(tmp_path / "model", intermediate_size=32)
    wanted = experiment("method=bayestune", f"method.limits={limits}", "adapter.targets=[all]")
    checked, ran = refusals(wanted, tmp_path)
    assert checked == ran and text in checked


def test_a_newcomers_limit_is_looked_at_too(experiment, tmp_path):
    (tmp_path / "late.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    asked = [
        "method=fedp2eft",
        "method.limits={late: {parameters: 3}}",
        f"data.newcomers={{late: {tmp_path}/late.jsonl}}",
    ]
    checked, ran = refusals(experiment(*asked), tmp_path)
    assert checked == ran and "limits.late: a limit of 3 parameters" in checked
    assert check(experiment(*asked, "evaluate.newcomers=false"))


def test_records_with_long_prompts_are_left_out_of_training_alone_and_counted(experiment, tmp_path, caplog):
    """Prompts of 11 and 14 tokens; client b has five long ones to train on and one to be tested on."""
    build = lambda *more: experiment("model.max_length=13", "data.val_fraction=0", *more, task="causal-lm")  # noqa: E731
    build()
    short, long = ANSWERS[0], {"instruction": "copy a b c a b c", "output": "a b c"}
    for name, records in (("train", [short] * 6 + [long] * 5), ("test", [short] * 2 + [long])):
        (tmp_path / f"b-{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    files = {
        "a": str(tmp_path / "a.jsonl"),
        "b": {name: str(tmp_path / f"b-{name}.jsonl") for name in ("train", "test")},
    }
    clients = f"data.clients={json.dumps(files)}"
    with pytest.raises(DataError, match=r"client b, train: .* prompt has 14 tokens.* model\.long_prompts: drop"):
        check(build(clients))
    wanted = build(clients, "model.long_prompts=drop", "report.plots=false")
    caplog.clear()
    sentence = "5 of 27 training records, of 1 client, are left out: their prompts are too long (model.long_prompts)"
    assert sentence in check(wanted)["warnings"]
    results = run(wanted, out=tmp_path / "run").results
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [sentence]
    row = results["clients"]["b"]
    assert (row["train_examples"], row["examples"]) == (6, 3)
    assert results["left_out"] == {"records": 5, "of": 27, "clients": {"b": 5}}
    assert sentence.partition(" (")[0] in (tmp_path / "run/report.md").read_text()
    problem = refusals(build(clients, "model.long_prompts=drop", "model.max_length=11"), tmp_path)
    assert all("leaves client a none of its 16 training examples" in said for said in problem)


def test_only_language_models_leave_long_prompts_out(experiment, tmp_path):
    for said in refusals(experiment("model.long_prompts=drop"), tmp_path):
        assert "model.long_prompts: text-classification has no such setting" in said


def test_weights_by_input_are_refused_where_an_adapted_module_sees_images(tmp_path):
    """Nothing at the projector says whose an image is. Fixed weights need to know nothing."""

    def projector(method):
        return load_experiment(
            {
                "benchmark": {"name": "digits-vqa", "clients": 2, "train": 8, "val": 2, "test": 4},
                "model": {"id": "digits-llava-s", "max_length": 128},
                "adapter": {"targets": ["q_proj", "connector"]},
                "method": method,
                "baselines": [],
                "train": {"max_steps": 1},
                "federation": {"rounds": 1},
            }
        )

    for said in refusals(projector("feddpa"), tmp_path):
        assert re.search(
            r"adapter\.targets: .*linear_\d is outside the language model.* weighs .* for each input", said
        )
    assert check(projector({"name": "feddpa", "variant": "halves"}))["clients"] == 2


def test_a_picture_that_cannot_be_read_is_named_before_the_run(tmp_path):
    for client in ("a", "b"):
        for at in range(20):
            path = tmp_path / "data" / client / "xy"[at % 2] / f"{at}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), at).save(path)
    data = {"task": "image-classification", "clients": str(tmp_path / "data"), "val_fraction": 0}
    values = {"method": "fedit", "model": {"id": "digits-vit"}, "data": data}
    assert check(values)["clients"] == 2
    (tmp_path / "data" / "b" / "x" / "0.png").write_text("no picture")
    with pytest.raises(DataError, match=r"client b, t\w+: record .* cannot read .*0\.png as a picture"):
        check(values)


def test_a_newcomers_record_that_cannot_be_read_is_told_before_training_and_may_be_mended(tmp_path):
    for client in ("a", "b", "late"):
        for number in range(20):
            folder = tmp_path / client / "xy"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 12 * number).save(folder / f"{number}.png")
    values = {
        "method": "fedit",
        "baselines": [],
        "federation": {"rounds": 1},
        "train": {"max_steps": 1},
        "model": {"id": "digits-vit"},
        "data": {
            "task": "image-classification",
            "clients": {client: str(tmp_path / client) for client in ("a", "b")},
            "newcomers": {"late": {"test": str(tmp_path / "late")}},
        },
    }
    broken = tmp_path / "late" / "x" / "0.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:40])
    experiment = load_experiment(values)
    first, second = refusals(experiment, tmp_path)
    assert "newcomer late, test: " in first and "client late, test: " in second
    assert "0.png" in first and "0.png" in second
    assert not list((tmp_path / "out").rglob("metrics.jsonl"))
    broken.write_bytes(whole)
    done = run(experiment, out=tmp_path / "out", resume=True)
    assert set(done.results["newcomers"]["clients"]) == {"late"}
