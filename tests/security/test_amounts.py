"""What a server tried to get out of one site, and plant in it, from its first hello on: it gets what was agreed to."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from befit.adapters.keys import select, slot
from befit.adapters.layout import Slot
from befit.config.experiment import EngineSettings, Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError
from befit.core.values import State
from befit.data import registry
from befit.flower.agreement import AGAIN, TRIES
from befit.flower.amounts import HARMLESS, MOST, exceeded, size_of
from befit.flower.consent import terms
from befit.flower.engine import ask
from befit.flower.frame import unpack
from befit.flower.own_slots import own_slots
from befit.flower.policy import TRAVELS, experiment_here, method_of, settings_of
from befit.flower.server_app import run_over
from befit.flower.service import SiteService
from befit.flower.site_file import Limits, SiteFile
from befit.flower.site_hosts import SiteHosts
from befit.flower.site_reply import rounded, told_numbers
from befit.protocol.registry import build_method, method_names
from befit.protocol.store import read_payload
from befit.runs.loading import load_federation
from tests.security.requests import SITE, changed, header_of, honest
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.test_policy import fields

BERT, LLAMA = "names-bert-fl", "skills-llama-s"
VALUES = [f"diagnosis {number}" for number in range(14)]


def site_of(folder: Path, rows: int = 40, **more: Any) -> SiteFile:
    """A site with a table of its own: texts, two classes, and a column that is nobody's business."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"name {number},{'ab'[number % 2]},{VALUES[number % 14]}" for number in range(rows)]
    (folder / "data.csv").write_text("\n".join(["text,label,ssn", *lines]))
    values: dict[str, Any] = {"data": str(folder / "data.csv"), "models": {BERT: BERT}, "state": str(folder / "state")}
    return SiteFile("north", **values | more)


def wants(run: str = "r", method: Any = "fedit", **settings: Any) -> Experiment:
    """What a server asks of such sites."""
    values: dict[str, Any] = {
        "name": run,
        "model": {"id": BERT},
        "data": {"clients": {"north": "there"}, "task": "text-classification", "label_names": ["a", "b"]},
        "method": method,
        "baselines": [],
        "train": {"max_steps": 2},
        "federation": {"rounds": 2},
        "engine": {"kind": "flower"},
    }
    for block, changes in settings.items():
        values[block] = {**values.get(block, {}), **changes}
    return load_experiment(values)


def answer(
    service: SiteService, do: str, experiment: Experiment, run: str = "r", arrays: State | None = None, **change: Any
) -> tuple[dict[str, Any], State]:
    label = experiment.method["name"]
    header = changed(header_of(experiment, do, label, run, service.site.client), change)
    if do == "hello":  # as a server of an older befit asks
        header = {**header, "method": experiment.method, "baselines": experiment.baselines}
    return unpack(service.answer(ask(do, header, arrays or {})), "a reply")


def asked(service: SiteService, **settings: Any) -> dict[str, Any]:
    """What a site says to a hello of a run of its own."""
    experiment = wants(**settings)
    run = f"run-{abs(hash(json.dumps(settings, sort_keys=True)))}"
    return answer(service, "hello", experiment, run)[0]


def test_a_personal_adapter_is_not_had_by_naming_another_method(tmp_path: Path) -> None:
    """Rounds of `local`, in which nothing travels, and then one request for all that was learnt in them."""
    service = SiteService(SiteFile(**SITE, state=str(tmp_path), errors="text"))
    experiment = honest()
    header = header_of(experiment, "hello")
    service.answer(ask("hello", {**header, "method": experiment.method, "baselines": experiment.baselines}, {}))
    service.answer(ask("train", header_of(experiment, "train", "local"), {}))
    thief = {"name": "ditto", "legacy_average_personal": True}
    at = {"stage": "federate", "round": 2, "rounds": 3, "seed": 0, "span": 1}
    for label in ("local", "ditto", "more"):
        stolen = {**header_of(experiment, "train", "ditto"), "label": label, "method": thief, "at": at}
        said, arrays = unpack(service.answer(ask("train", stolen, {})), "a reply")
        assert said["kind"] == "failure" and not arrays
    sent = json.loads(next(tmp_path.rglob("local/outbound.json")).read_text())["client-00"]
    assert not any(row["shape"] for row in sent)


def test_nothing_can_be_planted_in_a_personal_adapter(tmp_path: Path) -> None:
    service = SiteService(SiteFile(**SITE, state=str(tmp_path)))
    experiment = honest()
    header = header_of(experiment, "hello")
    service.answer(ask("hello", {**header, "method": experiment.method, "baselines": experiment.baselines}, {}))
    for label in ("ditto", "local"):
        _, download = unpack(service.answer(ask("train", header_of(experiment, "train", label), {})), "a reply")
        (memory,) = tmp_path.rglob(f"{label}/memory.*")
        before, own = memory.read_bytes(), select(read_payload(memory).arrays, slot("personal"))
        planted = {**download, **{key: torch.full_like(value, 7.0) for key, value in own.items()}}
        assert own
        at = {"round": 2, "rounds": 3, "seed": 0, "span": 1, "stage": "local" if label == "local" else "federate"}
        for do in ("train", "score", "export"):
            header = {**header_of(experiment, do, label), "at": at}
            assert unpack(service.answer(ask(do, header, planted)), "a reply")[0]["kind"] == "failure"
        assert [path.read_bytes() for path in tmp_path.rglob(f"{label}/memory.*")] == [before]
        assert not list(tmp_path.rglob(f"{label}/adapter"))


def test_no_question_tells_whether_a_site_has_a_column(tmp_path: Path) -> None:
    service = SiteService(site_of(tmp_path))
    answers = {
        column: asked(service, data={"columns": {"label": column}, "label_names": VALUES})["reason"]
        for column in ("ssn", "label", "nothing")
    }
    assert len(set(answers.values())) == 1 and "data.columns.label" in answers["ssn"]


def test_no_server_lists_the_values_of_a_column(tmp_path: Path) -> None:
    """By one guess after the other: each is answered alike, after three no more at all, and nobody else is let down."""
    service = SiteService(site_of(tmp_path))
    guesses = [["a", f"class {max(0, number - TRIES)}"] for number in range(TRIES + 8)]  # the first again and again
    replies = [asked(service, data={"label_names": guess}) for guess in guesses]
    assert [said["error"] for said in replies] == ["DataError"] * 2 * TRIES + ["ConfigError"] * (8 - TRIES)
    assert len({said["reason"] for said in replies[: 2 * TRIES]}) == 1
    told = asked(service, data={"label_names": guesses[0]})  # again: the same answer, and no new one
    assert told["error"] == "DataError"
    assert asked(service)["error"] == "ConfigError"  # also the right question, until the operator has looked
    service.site = site_of(tmp_path, label_names=["a", "b"])
    assert asked(service)["kind"] == "hello"


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_no_server_finds_out_how_long_a_prompt_is(split: str, tmp_path: Path) -> None:
    """By trying lengths: a site says whether its records fit before the run, and after three that did not no more."""
    data = {}
    for name in ("train", "val", "test"):
        asks = ["a b c"] * 20 + ["a b c d e f a b c d e f"] * (name == split)
        data[name] = str(tmp_path / f"{name}.jsonl")
        rows = [json.dumps({"instruction": text, "output": "a"}) for text in asks]
        Path(data[name]).write_text("\n".join(rows))
    service = SiteService(site_of(tmp_path, data=data, models={LLAMA: LLAMA}))
    replies = [
        asked(service, model={"id": LLAMA, "max_length": length}, data={"task": "causal-lm", "label_names": None})
        for length in (64, 20, 19, 18, 17)
    ]
    assert [said["kind"] for said in replies] == ["hello"] + ["failure"] * 4
    assert [said["error"] for said in replies[1:]] == ["DataError"] * TRIES + ["ConfigError"]
    assert len({said["reason"] for said in replies[1:4]}) == 1


def test_what_tells_nothing_of_the_data_may_be_asked_as_often_as_a_server_likes(tmp_path: Path) -> None:
    service = SiteService(site_of(tmp_path))
    for number in range(TRIES + 1):
        assert asked(service, adapter={"targets": [f"module {number}"]})["error"] in ("ConfigError", "ModelError")
    assert asked(service)["kind"] == "hello"


@pytest.mark.parametrize("guess", [["a", "c"], ["x", "y"], ["b", "c", "d"]])
def test_with_label_names_of_its_own_a_site_tells_nothing_of_its_data(guess: list[str], tmp_path: Path) -> None:
    """Two sites of the same file and other data answer alike; and a longer list is looked at without the data."""
    told = []
    for name, rows in (("full", 40), ("nearly-empty", 1)):
        service = SiteService(site_of(tmp_path / name, rows, label_names=["a", "b"]))
        told.append(asked(service, data={"label_names": guess})["reason"])
    assert told[0] == told[1] and "data.label_names: " in told[0]


def test_a_class_that_the_site_does_not_list_is_refused_whatever_the_server_lists(tmp_path: Path) -> None:
    """Otherwise a longer list, which is allowed, would ask whether the data has what it adds."""
    lists = (["a", "b"], ["a", "b", "diagnosis 1"], ["a", "b", *VALUES])
    service = SiteService(site_of(tmp_path, columns={"label": "ssn"}, label_names=["a", "b"]))
    assert {asked(service, data={"label_names": names})["error"] for names in lists} == {"DataError"}
    service = SiteService(site_of(tmp_path / "right", label_names=["a", "b"]))
    assert {asked(service, data={"label_names": names})["kind"] for names in lists} == {"hello"}


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_class_that_the_site_does_not_list_is_refused_in_every_split(split: str, tmp_path: Path) -> None:
    data = {}
    for name in ("train", "val", "test"):
        rows = [f"name {number},{'ab'[number % 2]}" for number in range(20)] + ["name 20,c"] * (name == split)
        data[name] = str(tmp_path / f"{name}.csv")
        Path(data[name]).write_text("\n".join(["text,label", *rows]))
    service = SiteService(site_of(tmp_path, data=data, label_names=["a", "b"]))
    assert asked(service, data={"label_names": ["a", "b", "c"]})["error"] == "DataError"


def test_a_task_that_the_site_does_not_list_is_refused(tmp_path: Path) -> None:
    service = SiteService(site_of(tmp_path, tasks=["causal-lm"]))
    assert "data.task: text-classification is not among the site's tasks" in asked(service)["reason"]


def test_a_server_that_guesses_the_data_cannot_tell_from_the_hash(tmp_path: Path) -> None:
    """Two sites with the same records say different hashes; one site says the same one each time."""
    one, other = (SiteService(site_of(tmp_path / name)) for name in ("one", "other"))
    first, again, elsewhere = (asked(service)["data"] for service in (one, one, other))
    assert first == again != elsewhere and len(first) == 64
    shorter = asked(one, limit={"records": 12})["data"]
    assert shorter == first  # of the whole, as in a local run
    key = tmp_path / "one" / "state" / "data.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_bytes()) == 32
    key.write_bytes(b"")
    assert asked(one, federation={"rounds": 1})["kind"] == "failure"


def test_the_hash_of_a_public_benchmark_is_the_servers(tmp_path: Path) -> None:
    services = [SiteService(SiteFile(**SITE, state=str(tmp_path / name))) for name in "ab"]
    hashes = {unpack(one.answer(ask("hello", header_of(honest(), "hello"), {})), "")[0]["data"] for one in services}
    assert len(hashes) == 1


def test_no_update_is_of_one_record(tmp_path: Path) -> None:
    service = SiteService(site_of(tmp_path))
    one = {"max_steps": 1, "batch_size": 1}
    assert "limits.min_records" in asked(service, limit={"records": 1}, train=one)["reason"]
    assert "limits.min_batch" in asked(service, train=one)["reason"]
    assert "limits.min_records" in asked(service, train={"max_steps": 1, "batch_size": 2})["reason"]
    few = SiteService(site_of(tmp_path / "few", rows=12))
    assert "fewer train records than the site allows, 10" in asked(few)["reason"]
    assert asked(service, train={"max_steps": 5, "batch_size": 2})["kind"] == "hello"


@pytest.mark.parametrize(("validation", "fits"), [(0.1, False), (0.2, True), (0.8, True), (0.9, False)])
def test_each_part_of_records_that_a_method_divides_is_of_enough(validation: float, fits: bool, tmp_path: Path) -> None:
    """Of 72 train records 7, 14, 58 and 65 are for hypergradients, and the rest for training."""
    said = asked(SiteService(site_of(tmp_path, rows=100)), method={"name": "fedl2p", "validation": validation})
    assert said.get("examples", [0])[0] == 72 if fits else "fewer train records than the site allows" in said["reason"]


def test_the_last_batch_of_a_pass_is_a_step_too(tmp_path: Path) -> None:
    """36 train records in batches of 10 are 4 steps, so three passes are 12."""
    train = {"epochs": 3, "batch_size": 10}
    for most, kind in ((12, "hello"), (11, "failure")):
        service = SiteService(site_of(tmp_path / str(most), rows=50, limits=Limits(max_steps=most)))
        said = asked(service, train=train)
        assert said["kind"] == kind, said
    assert "train.epochs: the steps of 3 passes: 12 is more than the site allows, 11" in said["reason"]


@pytest.mark.parametrize(
    ("method", "most"),
    [("fedit", 20), ({"name": "potara"}, 9), ({"name": "potara", "rounds_local": 16}, 3), ("local", 20)],
)
def test_rounds_are_limited_over_all_stages_of_a_method(method: Any, most: int, tmp_path: Path) -> None:
    """So a plan of many stages gets no more updates than one of a single stage."""
    site = site_of(tmp_path, limits=Limits(max_rounds=20))
    service, block = SiteService(site), method_of(load_experiment({"benchmark": "digits", "method": method}).method)
    assert terms("m", block, site).updates == (0 if method == "local" else 20) >= terms("m", block, site, most).updates
    enough = asked(service, method=method, federation={"rounds": most})
    assert enough["kind"] == "hello", enough
    more = asked(service, method=method, federation={"rounds": most + 1})
    assert "limits.max_rounds" in more["reason"] and "the rounds of" in more["reason"]


def test_a_score_of_few_records_is_not_told(tmp_path: Path) -> None:
    """And one of enough has three digits, unless the site says otherwise."""
    service = SiteService(site_of(tmp_path, rows=50))
    experiment = wants()
    assert answer(service, "hello", experiment)[0]["examples"] == [36, 4, 10]
    update, arrays = answer(service, "train", experiment)
    loss = update["report"]["loss"]
    assert loss == rounded(loss) and update["report"]["steps"] == 2
    said, _ = answer(service, "score", experiment, arrays=arrays, split="val")
    assert said["kind"] == "failure" and "4 records are too few" in said["reason"]
    metrics = answer(service, "score", experiment, arrays=arrays)[0]["metrics"]
    assert all(value == rounded(value) for value in metrics.values())
    service.site = site_of(tmp_path, rows=50, scores="exact")
    exact = answer(service, "score", experiment, arrays=arrays)[0]["metrics"]
    assert metrics["loss"] == rounded(exact["loss"]) != exact["loss"]
    service.site = site_of(tmp_path, rows=50, scores="none")
    said, _ = answer(service, "score", experiment, arrays=arrays)
    assert said["kind"] == "failure" and "scores: none" in said["reason"]
    update, _ = answer(service, "train", experiment, arrays=arrays, at={**NOW, "round": 2})
    assert update["kind"] == "update" and update["report"] == {}


NOW = {"stage": "federate", "round": 1, "rounds": 2, "seed": 0, "span": 1}


def test_a_run_that_begins_is_of_the_data_as_it_is_then(tmp_path: Path) -> None:
    """The same settings as before, in a service that still has what it read for them."""
    service = SiteService(site_of(tmp_path, rows=50))
    before, _ = answer(service, "hello", wants(), "first")
    site_of(tmp_path, rows=100)
    after, _ = answer(service, "hello", wants(), "second")
    assert [said["examples"] for said in (before, after)] == [[36, 4, 10], [72, 8, 20]]
    assert before["data"] != after["data"]


def test_steps_are_told_as_they_are_and_losses_to_three_digits(tmp_path: Path) -> None:
    site, experiment = site_of(tmp_path), wants()
    host = SiteHosts().of(site, {}, experiment_here(settings_of(experiment), method_of(experiment.method), site))
    assert told_numbers(site, {"steps": 1234.0, "loss": 1.23456}, host) == {"steps": 1234.0, "loss": 1.23}


def test_a_training_that_fails_is_an_answer_too(tmp_path: Path) -> None:
    """Else a server could ask for ever whether the records make a training diverge. The same request counts once."""
    service, experiment = SiteService(site_of(tmp_path)), wants()
    assert answer(service, "hello", experiment)[0]["kind"] == "hello"
    _, sent = answer(service, "train", experiment)
    errors = []
    for number in range(AGAIN + 1):
        arrays = {key: torch.full_like(value, 1e30 + number * 1e28) for key, value in sent.items()}
        for _ in range(2):
            said, _ = answer(service, "train", experiment, arrays=arrays, at={**NOW, "round": 2})
            errors.append(said["error"])
    assert errors == ["TrainingDiverged"] * 2 * AGAIN + ["PayloadMismatch"] * 2
    assert answer(service, "train", experiment, arrays=sent, at={**NOW, "round": 2})[0]["kind"] == "failure"


def test_hellos_leave_no_more_folders_than_the_site_allows(tmp_path: Path) -> None:
    """Thirty of them, of which two are of a run; and a site that is full says so to its operator."""
    service = SiteService(site_of(tmp_path, limits=Limits(max_runs=2)))
    for number in range(30):
        said, _ = answer(service, "hello", wants(), f"run-{number}")
        assert said["kind"] == ("hello" if number < 2 else "failure")
    assert "limits.max_runs" in said["reason"] and str(tmp_path) not in said["reason"]
    assert sorted(path.name for path in (tmp_path / "state" / "runs").iterdir()) == ["run-0", "run-1"]
    assert answer(service, "hello", wants(), "run-1")[0]["kind"] == "hello"  # a run that is there goes on


def test_a_run_that_needs_more_than_its_room_is_refused(tmp_path: Path) -> None:
    service = SiteService(site_of(tmp_path, limits=Limits(max_state_gib=1e-6)))
    assert "limits.max_state_gib" in asked(service)["reason"]
    assert not (tmp_path / "state" / "runs").exists()


def test_a_site_whose_runs_have_filled_its_room_begins_and_trains_nothing_more(tmp_path: Path) -> None:
    service = SiteService(site_of(tmp_path, limits=Limits(max_state_gib=0.25)))
    experiment = wants()
    assert answer(service, "hello", experiment)[0]["kind"] == "hello"
    old = tmp_path / "state" / "runs" / "old" / "memory"
    old.parent.mkdir()
    with old.open("wb") as file:
        file.truncate(2**28)  # which takes none of this disk
    for said in (answer(service, "train", experiment)[0], answer(service, "hello", experiment, "another")[0]):
        assert said["kind"] == "failure" and "limits.max_state_gib" in said["reason"]
    old.unlink()
    assert answer(service, "train", experiment)[0]["kind"] == "update"


def test_what_clients_owe_on_the_wire_is_counted_too(tmp_path: Path) -> None:
    site = site_of(tmp_path)
    host = SiteHosts().of(site, {}, experiment_here(settings_of(wants()), method_of(wants().method), site))
    adapter = size_of(build_method("fedit").layout.specs(host.model.shapes)) / 2**30
    service = SiteService(replace(site, limits=Limits(max_state_gib=1.5 * adapter)))
    assert "limits.max_state_gib" in asked(service, wire={"dtype": "int8"})["reason"]
    assert asked(service)["kind"] == "hello"


@pytest.mark.parametrize("name", ["a\x1fexample 0", "a\x1b[2J", "\u202eb", "a\nb", " ", "a" * 1001])
def test_names_of_classes_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    """befit's own marks, what a terminal or a page takes for its own, and nothing at all."""
    wanted = header_of(wants(), "hello", "fedit")
    service = SiteService(site_of(tmp_path))
    header = changed(wanted, {"settings.data.label_names": ["a", "b", name]})
    said, _ = unpack(service.answer(ask("hello", header, {})), "a reply")
    assert said["kind"] == "failure" and "data.label_names: must be two or more different names" in said["reason"]


def test_a_refused_hello_leaves_nothing_of_the_run_nor_what_a_kill_left(tmp_path: Path) -> None:
    service = SiteService(site_of(tmp_path))
    for left in (tmp_path / "state" / ".outbound.json.x.tmp", tmp_path / "state" / "runs" / "old" / ".memory.x.tmp"):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.touch()
    for number in range(5):
        answer(service, "hello", wants(train={"batch_size": 1}), f"run-{number}")
    there = {path.name for path in (tmp_path / "state").iterdir()}
    assert there == {"client", ".lock", "outbound.json", ".outbound.json", "runs"}
    assert not [*(tmp_path / "state" / "runs" / "old").iterdir()]


def test_every_number_that_travels_has_a_limit() -> None:
    """Fails for a new setting that is a whole number: put it into befit.flower.amounts."""
    whole = {path for path, kind in fields() if path in TRAVELS and kind in (int, int | None)}
    assert whole == {*MOST, *HARMLESS, "train.batch_size", "train.epochs"}  # see `_too_few` and `too_many_passes`


OF_THE_CLIENTS_OWN = {"fdlora", "fedalt", "fedmosaic", "guidance", "rela", "relora"}


@pytest.mark.parametrize("name", method_names())
def test_the_shortest_site_file_runs_every_method_but_those_that_take_the_clients_own_adapter(name: str) -> None:
    """With the defaults of all limits, and of every setting and argument. The others need `shares`."""
    settings, site = settings_of(honest()), SiteFile(**SITE)
    method = method_of(load_experiment({"benchmark": "digits", "method": name}).method)
    if name in OF_THE_CLIENTS_OWN:
        with pytest.raises(ConfigError, match=rf"method: {name} .* slot personal.* shares"):
            experiment_here(settings, method, site)
        site = SiteFile(**SITE, shares=["personal"])
    if name in ("fedmosaic", "rela"):  # which take gradients of a few records too
        with pytest.raises(ConfigError, match=rf"method: {name} .* slot sketch.* shares"):
            experiment_here(settings, method, site)
        site = SiteFile(**SITE, shares=["personal", "sketch"])
    assert experiment_here(settings, method, site).method["name"] == name


@pytest.mark.parametrize("name", registry.names())
def test_no_benchmark_is_too_much_as_it_comes(name: str) -> None:
    values = {"benchmark": name, "model": {"id": "digits-vit"}, "method": "fedit", "engine": {"kind": "local"}}
    assert not [*exceeded(load_experiment(values), build_method("fedit"), Limits())]


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"name": "digits", "clients": 500_000}, True),
        ({"name": "digits", "clients": 500_001}, False),
        ({"name": "skills", "clients": 10**3, "train": 10**3 - 200, "val": 100, "test": 100}, True),
        ({"name": "skills", "clients": 10**3, "train": 10**3 - 199, "val": 100, "test": 100}, False),
    ],
)
def test_clients_times_records_of_a_benchmark_are_limited(arguments: dict[str, Any], fits: bool) -> None:
    values = {"benchmark": arguments, "model": {"id": "digits-vit"}, "method": "fedit"}
    problems = [*exceeded(load_experiment(values), build_method("fedit"), Limits())]
    assert not problems if fits else problems[0].startswith("benchmark: ")


@pytest.mark.parametrize(("ranks", "named"), [((4, 64), ["personal"]), ((64, 4), ["shared"]), ((32, 32), [])])
def test_the_rank_of_every_slot_is_limited(ranks: tuple[int, int], named: list[str]) -> None:
    slots = [Slot(name, rank, 8.0) for name, rank in zip(("shared", "personal"), ranks, strict=True)]
    method: Any = build_method("feddpa")
    layout = replace(method.layout, slots=tuple(slots))
    problems = [*exceeded(honest(), replace(method, layout=layout), Limits(max_rank=32))]
    assert problems == [
        f"method: the rank of slot {name}: 64 is more than the site allows, 32 (limits.max_rank)" for name in named
    ]


def test_ranks_are_limited_as_ranks_and_not_as_steps() -> None:
    values = {"benchmark": "digits", "method": {"name": "fedit", "rank": 8}, "train": {"max_steps": 2}}
    experiment, method = load_experiment(values), build_method({"name": "fedit", "rank": 8})
    assert not [*exceeded(experiment, method, Limits(max_steps=5))]
    assert all(problem.endswith("(limits.max_rank)") for problem in exceeded(experiment, method, Limits(max_rank=4)))


def test_a_number_that_only_limits_work_may_be_of_any_size() -> None:
    values = {"benchmark": "digits", "method": {"name": "fedp2eft", "parameters": 10**9}}
    assert not [*exceeded(load_experiment(values), build_method(values["method"]), Limits())]


def test_an_argument_that_makes_a_personal_adapter_travel_needs_it_too() -> None:
    leaky = {"name": "ditto", "legacy_average_personal": True}
    assert own_slots(build_method(leaky)) == ["personal"]
    assert own_slots(build_method({"name": "fedp2eft", "base": leaky})) == ["personal"]


def test_a_run_whose_sites_tell_no_scores_is_finished(tmp_path: Path) -> None:
    """One tells none, the other what few records give; then none of them: the server has their updates and a report."""
    sites = []
    for client, more in (("north", "scores: none\n"), ("south", "limits: {min_records: 1}\nscores: exact\n")):
        site = site_of(tmp_path / client, rows=20)
        sites.append(tmp_path / client / "site.yaml")
        sites[-1].write_text(f"client: {client}\ndata: {site.data}\nmodels: {{{BERT}: {BERT}}}\n{more}")
    data = {"clients": {"north": "there", "south": "there"}}
    done = run_over(LoopbackGrid(sites), wants(data=data, report={"plots": False}), tmp_path / "run", poll_s=0.01)
    rows = done.results["clients"]
    assert rows["north"]["accuracy"] is None and rows["north"]["updates"] == 2
    assert rows["south"]["accuracy"] is not None
    assert "scores: none" in (tmp_path / "run" / "report.html").read_text()
    sites[1].write_text(sites[1].read_text().replace("exact", "none"))
    done = run_over(LoopbackGrid(sites), wants(data=data, report={"plots": False}), tmp_path / "none", poll_s=0.01)
    assert done.results["summary"]["mean"] is None and (tmp_path / "none" / "report.html").exists()


def test_sizes_of_splits_do_not_tell_whether_a_guessed_record_is_there(tmp_path: Path) -> None:
    """With `unit: example` each record is held out by a draw of its own. The server chooses seed and fraction: of two
    fractions, one on each side of a record's draw, sizes would differ by it if the server could compute the draw."""
    rows = "".join(f"patient {number},{'ab'[number % 2]}\n" for number in range(120))
    (tmp_path / "all.csv").write_text(f"text,label\n{rows}")

    def asked(fraction: float, place: str = "there") -> Experiment:
        data = {"clients": {"north": place}, "val_fraction": 0.0, "test_fraction": fraction}
        return wants(data=data, privacy={"unit": "example", "noise_multiplier": 1.0, "delta": 1e-5})

    def computed(fraction: float) -> int:
        here = replace(asked(fraction, str(tmp_path / "all.csv")), engine=EngineSettings())
        return len(load_federation(here).clients[0].test)

    low, high = 0.3, 0.4
    assert computed(low) < computed(high)
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if computed(middle) > computed(low) else (middle, high)
    assert computed(low) + 1 == computed(high)
    data = str(tmp_path / "all.csv")
    labels, tasks = ["a", "b"], ["text-classification"]
    site = SiteFile("north", data=data, models={BERT: BERT}, label_names=labels, tasks=tasks, state=str(tmp_path / "s"))
    said = [answer(SiteService(site), "hello", asked(fraction), run=f"r{fraction}")[0] for fraction in (low, high)]
    sizes = [one["examples"] for one in said]
    assert sizes[0] == sizes[1] and sizes[0][2] > 0 and sum(sizes[0]) == 120
