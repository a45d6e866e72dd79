"""Configurations: what is accepted, what is refused, and how it is said."""

import os
from pathlib import Path

import pytest

from befit.config.experiment import Experiment, to_dict, to_yaml
from befit.config.load import load_experiment
from befit.config.overrides import parse_seeds
from befit.core.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"


def minimal(**changes):
    """The least that makes an experiment, on files, with changes."""
    return {
        "method": "fedit",
        "data": {"clients": {"a": "a.jsonl"}, "task": "text-classification"},
        "model": {"id": "somebody/model"},
        **changes,
    }


def problems_of(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_experiment(source, overrides)
    return caught.value.problems


def test_a_baseline_has_the_rank_and_alpha_of_the_method_unless_it_gives_its_own():
    """As the methods of a comparison do; what a gain is counted from would else be an adapter of another size."""
    baselines = ["local", {"name": "fedsa", "rank": 2}, {"name": "ditto", "alpha": 3.0}, "fedavg", "lora"]
    experiment = load_experiment(minimal(method={"name": "fedit", "rank": 4, "alpha": 6.0}, baselines=baselines))
    found = [(one.get("rank"), one.get("alpha")) for one in experiment.baselines]
    assert found == [(4, 6.0), (2, 6.0), (4, 3.0), (None, None), (4, None)]
    assert load_experiment(to_dict(experiment)).baselines == experiment.baselines
    (mistake,) = problems_of(minimal(method={"name": "fedit", "rank": 0}, baselines=["local"]))
    assert mistake.startswith("method.rank: ")


def test_defaults_fill_everything_that_is_not_said():
    experiment = load_experiment(minimal())
    assert (experiment.train.max_steps, experiment.train.lr, experiment.train.betas) == (5, 1e-3, (0.9, 0.999))
    assert experiment.federation.min_replies == 0.5
    assert [one["name"] for one in experiment.baselines] == ["local"]
    filled = {"name": "fedit", "rank": 8, "alpha": 16.0, "weights": "examples", "keep_optimiser": False}
    assert experiment.method == filled


def test_the_resolved_yaml_makes_an_equal_experiment(tmp_path):
    source = minimal(name="round-trip", baselines=[], federation={"min_replies": 1.0, "cohort": 3})
    experiment = load_experiment(source, ["train.lr=1e-5", "train.betas=[0.8, 0.9]", "evaluate.every=7"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(experiment), encoding="utf-8")
    assert load_experiment(path) == experiment
    assert load_experiment(to_dict(experiment)) == experiment
    assert load_experiment(experiment) == experiment
    assert to_yaml(load_experiment(path)) == to_yaml(experiment)


def test_loading_changes_neither_the_source_nor_shares_with_it():
    source = minimal(method={"name": "fedit", "rank": 2})
    load_experiment(source, ["method.rank=4", "model.max_length=9", "data.clients.b=b.jsonl"])
    assert source == minimal(method={"name": "fedit", "rank": 2})
    first = load_experiment(source)
    second = load_experiment(first, ["method.rank=4"])
    assert (first.method["rank"], second.method["rank"]) == (2, 4)


def test_every_mistake_is_named_at_once():
    problems = problems_of(
        minimal(
            method={"name": "fedit", "rnak": 4, "alpha": "big"},
            baselines=["locl"],
            train={"max_steps": 0, "lr": -1, "momentum": 0.9},
            engine={"kind": "flwr"},
            trian={},
        ),
        ["federation.rouns=3", "nonsense"],
    )
    text = "\n".join(problems)
    for part in (
        '"nonsense": must be key=value',
        "method.rnak: unknown key for fedit. Did you mean: rank?",
        'method.alpha: must be a number, got "big"',
        "baselines.0.name: unknown method 'locl'. Did you mean: local?",
        "train.max_steps: must be positive, got 0",
        "train.lr: must be positive, got -1",
        'engine.kind: "flwr" is not one of local, flower',
        "trian: unknown key. Did you mean: train?",
        "federation.rouns: unknown key for federation. Did you mean: rounds?",
    ):
        assert part in text
    assert len(problems) == 9


def test_what_no_site_can_use_is_refused_before_anything_is_sent():
    changes = ["evaluate.by=language", "model.long_prompts=drop", "evaluate.others=end", "data.newcomers={b: x}"]
    text = "\n".join(problems_of(minimal(), ["engine.kind=flower", *changes]))
    for change in changes:
        assert f"{change.partition('=')[0]}: " in text


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("federation.seed=true", "federation.seed: must be a whole number, got true"),
        ("federation.seed=1.5", "federation.seed: must be a whole number, got 1.5"),
        ("federation.seed='1'", 'federation.seed: must be a whole number, got "1"'),
        ("federation.seed=-1", "federation.seed: must be 0 or more, and below 2^63, got -1"),
        ("federation.cohort=0", "federation.cohort: must be positive, got 0"),
        ("federation.min_replies=2.0", "federation.min_replies: must be a share above 0"),
        ("federation.min_replies=0", "federation.min_replies: must be a share above 0"),
        ("train.lr=.nan", "train.lr: must be finite, got NaN"),
        ("train.lr=.inf", "train.lr: must be finite, got Infinity"),
        ("train.betas=[0.9]", "train.betas: must be a list of 2 numbers, got [0.9]"),
        ("train.betas=[0.9, 1]", "train.betas: must both be at least 0 and below 1"),
        ("train.momentum=0.5", "train.momentum: belongs to sgd"),
        ("train=fast", 'train: must be a mapping, got "fast"'),
        ("train.lr.peak=1", 'train.lr: must be a number, got {"peak": 1}'),
        ("model.device=gpu", "model.device: must be cpu, cuda, cuda:N or auto"),
        ("model.id=", "model.id: must be text, got null"),
        ("model.id=''", "model.id: is required with data"),
        ("adapter.targets=[]", "adapter.targets: must name at least one module"),
        ("data.test_fraction=0.9", "data.test_fraction: 0.9 and val_fraction 0.1 leave nothing to train on"),
        (
            "data.task=text-clasification",
            "data.task: unknown task 'text-clasification'. Did you mean: text-classification?",
        ),
        ("data.clients={}", "data.clients: must name at least one client"),
        ("data.clients={' a': x}", "data.clients: ' a' is no client's id: it must be a printable name"),
        ("data.clients={Köln: x, KÖLN: y}", "data.clients: 'Köln' and 'KÖLN' are the same name but for case"),
        ("name=../up", "name: must be a folder's name"),
        ("method=", "method: is required"),
        ("method=[fedit]", "method: must be a method's name or a mapping"),
        ("method.rank=0", "method.rank: must be 1 or more"),
        ("train.lr_end=1e-5", "train.lr_end: belongs to a schedule that falls"),
        ("train={lr_end: 1, schedule: cosine}", "train.lr_end: a schedule falls from lr,"),
        ("adapter.targets=every", 'adapter.targets: "every" is not one of auto, all, all-linear'),
        ("baselines=local", "baselines: must be a list of methods"),
        ("baselines=[fedit]", "baselines.0: fedit is the method itself"),
        ("baselines=[local, local]", "baselines.1: the same as baselines.0"),
        ("baselines.3.rank=1", "baselines.3.rank: baselines has entries 0 to 0, not 3"),
        ("benchmark=digits", "benchmark: give benchmark or data, not both"),
        ("data=", "benchmark: is required"),
    ],
)
def test_one_mistake_makes_one_message(override, problem):
    (found,) = problems_of(minimal(), [override])
    assert found.startswith(problem) or found.endswith(problem)


def test_what_a_method_refuses_is_told_together_with_the_other_blocks():
    problems = problems_of(
        minimal(method={"name": "potara", "statistics": {"samples": 0}, "correlation": {"shrink": -1.0}}),
        ["model.max_length=0", "data.test_fraction=2", "federation.cohort=0", "evaluate.generate=true"],
    )
    keys = [problem.split(":")[0] for problem in problems]
    assert {
        "method.statistics.samples",
        "method.correlation.shrink",
        "model.max_length",
        "data.test_fraction",
        "federation.cohort",
    } <= {*keys}
    assert len(keys) == len(set(keys))


def test_generation_is_refused_for_a_task_without_texts_to_generate():
    (problem,) = problems_of({"method": "fedit", "benchmark": "digits", "evaluate": {"generate": True}})
    assert (
        problem
        == "evaluate.generate: is for causal-lm, preference, vqa, and the task is image-classification; set it to false"
    )
    assert len(problems_of({"method": "fedit", "benchmark": "digts", "evaluate": {"generate": True}})) == 1
    (problem,) = problems_of({"method": "fedit", "benchmark": "digits", "evaluate": {"metrics": ["rougeL"]}})
    assert problem == (
        "evaluate.metrics: 'rougeL' is not one of those of image-classification: accuracy, balanced_accuracy, "
        "macro_f1, auroc, calibration_error."
    )


def test_an_error_is_no_headline_and_wins_nothing():
    base = {"method": "fedit", "benchmark": "digits"}
    (problem,) = problems_of(base, ["evaluate.metrics=[calibration_error, accuracy]"])
    assert problem.startswith("evaluate.metrics: begins with calibration_error, of which less is better")
    metrics = "evaluate.metrics=[macro_f1, calibration_error]"
    assert load_experiment(base, [metrics]).evaluate.metrics == ["macro_f1", "calibration_error"]
    (problem,) = problems_of(base, [metrics, "evaluate.wins=[calibration_error]"])
    assert problem.startswith("evaluate.wins: begins with calibration_error")


def test_metrics_and_prompts_that_mean_nothing_are_named_together():
    problems = problems_of(
        {"method": "fedit", "benchmark": "skills"},
        ["evaluate.metrics=[rogueL, exact_match, exact_match]", "model.prompt=chatt"],
    )
    keys = sorted(problem.split(":")[0] for problem in problems)
    assert keys == ["evaluate.metrics", "evaluate.metrics", "model.prompt"]
    assert any("'rogueL' is not one of" in problem and "rougeL" in problem for problem in problems)
    assert any("or a text with {instruction}" in problem for problem in problems)
    (problem,) = problems_of(
        {"method": "fedit", "benchmark": "skills"}, ["evaluate.generate=true", "evaluate.metrics=[choice_sum]"]
    )
    assert problem.startswith("evaluate.generate: is true, and no metric of evaluate.metrics is of generated text")


def test_metrics_that_wins_are_counted_by_have_to_be_measured():
    base = {"method": "fedit", "benchmark": "skills"}
    measured = ["evaluate.metrics=[rougeL, exact_match]"]
    (problem,) = problems_of(base, [*measured, "evaluate.wins=[rougel, exact_match]"])
    assert problem.startswith("evaluate.wins: 'rougel' is none of evaluate.metrics, which measures rougeL, exact_match")
    assert problem.endswith("Did you mean: rougeL?")
    (problem,) = problems_of(base, [*measured, "evaluate.wins=[rougeL, rougeL]"])
    assert problem == "evaluate.wins: rougeL is there twice"
    assert problems_of(base, [*measured, "evaluate.wins=[]"]) == (
        "evaluate.wins: must name at least one metric, or be null, got []",
    )
    (problem,) = problems_of({**base, "benchmark": "digits"}, ["evaluate.wins=[accuracy]"])
    assert problem == "evaluate.wins: 'accuracy' is none of evaluate.metrics, which measures null."


def test_whole_numbers_and_shares_of_replies_stay_apart():
    """One reply is not the whole cohort."""
    counted = load_experiment(minimal(), ["federation.min_replies=1"]).federation.min_replies
    share = load_experiment(minimal(), ["federation.min_replies=1.0"]).federation.min_replies
    assert (type(counted), type(share)) == (int, float)


def test_more_replies_than_the_cohort_are_refused():
    (problem,) = problems_of(minimal(), ["federation.cohort=3", "federation.min_replies=4"])
    assert problem == "federation.min_replies: 4 is more than the cohort of 3"


def test_overrides_reach_methods_named_in_short_and_entries_of_lists():
    experiment = load_experiment(
        minimal(baselines=["local", {"name": "fedsa", "rank": 2}]),
        ["method.rank=4", "baselines.0.rank=3", "baselines.1.rank=5", "train.lr=1e-4"],
    )
    assert experiment.method["rank"] == 4
    assert [one["rank"] for one in experiment.baselines] == [3, 5]
    assert experiment.train.lr == 1e-4


def test_local_is_no_baseline_of_itself():
    assert load_experiment(minimal(method="local")).baselines == []
    baselines = load_experiment(minimal(method="local", baselines=["fedit", "local"])).baselines
    assert [one["name"] for one in baselines] == ["fedit"]


def test_one_method_may_be_compared_at_two_settings():
    experiment = load_experiment(minimal(baselines=[{"name": "local", "rank": 2}, {"name": "local", "rank": 4}]))
    assert [one["rank"] for one in experiment.baselines] == [2, 4]


def test_relative_paths_count_from_the_file_and_survive_a_change_of_folder(tmp_path, monkeypatch):
    folder = tmp_path / "experiment"
    (folder / "models" / "base").mkdir(parents=True)
    (folder / "models" / "base" / "config.json").write_text("{}")
    path = folder / "mine.yaml"
    path.write_text(
        "method: fedit\nmodel: {id: models/base}\n"
        "data: {task: causal-lm, clients: {a: d/a.jsonl, b: {train: d/b.jsonl, test: ../t.jsonl}}}\n"
    )
    for file, name in (("für uns.yaml", "f-r-uns"), ("東京.yaml", "fedit")):  # any file's name makes a run's
        assert load_experiment(path.rename(folder / file)).name == name
        (folder / file).rename(path)
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(os.path.join("experiment", "mine.yaml"))
    assert experiment.name == "mine"
    assert experiment.model.id == str(folder / "models" / "base")
    assert experiment.data is not None
    assert experiment.data.clients == {
        "a": str(folder / "d" / "a.jsonl"),
        "b": {"train": str(folder / "d" / "b.jsonl"), "test": str(tmp_path / "t.jsonl")},
    }
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(experiment))
    monkeypatch.chdir("/")
    assert load_experiment(saved) == experiment


def test_hub_ids_and_packages_are_not_taken_for_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("somebody/model", "package:some_package/model", "digits-vit"):
        assert load_experiment(minimal(model={"id": name})).model.id == name
    assert load_experiment(minimal(model={"id": "./digits-vit"})).model.id == str(tmp_path / "digits-vit")
    for name in ("digits-vit", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert load_experiment(minimal(model={"id": "digits-vit"})).model.id == "digits-vit"  # the one that ships
    assert load_experiment(minimal(model={"id": "mine"})).model.id == str(tmp_path / "mine")


def test_a_folder_of_clients_is_one_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(minimal(data={"clients": "parts", "task": "causal-lm"}))
    assert experiment.data is not None and experiment.data.clients == str(tmp_path / "parts")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("method: fedit\nmethod: local\n", "line 2, column 1: the key 'method' appears twice"),
        ("data: {clients: {7: x}}", "line 1, column 18: the key '7' is not text: write it in quotes"),
        ("train: {lr: 1e-3", "line 2, column 1: did not find expected ',' or '}'"),
        ("name: @home", "line 1, column 7: write what starts with @ in quotes"),
        ("- a\n", 'must be a mapping of keys to values; got ["a"]'),
        ("", "must be a mapping of keys to values; it is empty"),
        (
            "method: !!python/object/apply:os.getcwd []",
            "line 1, column 9: the tag tag:yaml.org,2002:python/object/apply:os.getcwd is not read here",
        ),
    ],
)
def test_broken_yaml_is_refused_with_its_place(tmp_path, text, problem):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    (found,) = problems_of(path)
    assert found.startswith(problem)


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, kind):
    path = tmp_path / "config.yaml"
    if kind == "folder":
        path.mkdir()
    if kind == "binary":
        path.write_bytes(b"\xff\xfe\x00method")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_experiment(path)


def test_clients_called_no_or_like_a_number_keep_their_names(tmp_path):
    """YAML 1.1 makes `no` false, `1e3` text and `012` ten."""
    path = tmp_path / "langs.yaml"
    path.write_text(
        "method: fedit\nmodel: {id: m}\ntrain: {lr: 1e-3}\n"
        "data: {task: causal-lm, clients: {no: no, 'on': x, '012': y, '2026-01-01': z}}\n"
    )
    experiment = load_experiment(path)
    assert experiment.data is not None and isinstance(experiment.data.clients, dict)
    assert list(experiment.data.clients) == ["no", "on", "012", "2026-01-01"]
    assert experiment.data.clients["no"] == str(tmp_path / "no")
    path.write_text(to_yaml(experiment))
    assert load_experiment(path) == experiment


def test_an_experiment_cannot_be_changed():
    experiment = load_experiment(minimal())
    with pytest.raises(AttributeError):
        experiment.train.lr = 1.0  # type: ignore[misc]
    assert isinstance(experiment, Experiment)


def test_empty_blocks_mean_their_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("method: fedit\nmodel: {id: m}\ndata: {task: causal-lm, clients: c}\ntrain:\nengine:\n")
    assert load_experiment(path).train == load_experiment(minimal()).train


def test_what_ships_with_an_installation_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_experiment("configs/digits-fedit.yaml").name == "digits-fedit"  # from the clone
    monkeypatch.setattr("befit.config.load._SHIPPED", (tmp_path / "gone", CONFIGS.parent))  # as the wheel has them
    assert load_experiment("configs/digits-fedit.yaml").name == "digits-fedit"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits-fedit.yaml").write_text("{benchmark: digits, method: fedit, name: mine}")
    assert load_experiment("configs/digits-fedit.yaml").name == "mine"


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "0--1", "0-99999999999", "9" * 5000])
def test_seeds_of_a_command_that_are_no_numbers_are_refused(text):
    with pytest.raises(ConfigError, match="--seeds: must be whole numbers with commas between, such as 0,1,2 or 0-9"):
        parse_seeds(text)
