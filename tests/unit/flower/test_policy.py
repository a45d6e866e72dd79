"""What may travel to a site is a list, and everything in a configuration has its place: a new field has to find one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from befit.config.experiment import NOT_AT_SITES, Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.schema import parameters_of
from befit.data import registry
from befit.data.files.settings import DataSettings
from befit.flower.policy import (
    ARGUMENTS,
    AT_SERVER,
    AT_SITE,
    BY_FAMILY,
    TRAVELS,
    experiment_here,
    harmless,
    method_of,
    names_a_place,
    refused_in_method,
    settings_of,
)
from befit.flower.site_file import SiteFile
from befit.protocol.registry import METHODS, MethodEntry, build_method, get_method, method_names

Make = Callable[..., Experiment]
# Text that travels because it names no place: each was looked at.
TEXTS = {
    "model.id",
    "model.revision",  # which the site compares with its own list
    "model.prompt",  # a template; only {instruction} and {input} are replaced
    "data.task",  # a name that is looked up among the tasks that the site has
    "data.columns",
    "data.label_names",
    "adapter.targets",
    "evaluate.metrics",  # names that are looked up
    "benchmark.name",
    "benchmark.version",
}
PLACES = {"hub", "public", "revisions", "root", "scenario", "tasks"}  # arguments of benchmarks


def fields() -> Iterator[tuple[str, Any]]:
    """Path and type of every setting, of all blocks that are not listed as one."""
    for outer in parameters_of(Experiment):
        inner: list[Any] = [one for one in (outer.type, *get_args(outer.type)) if dataclasses.is_dataclass(one)]
        if outer.name in AT_SERVER | BY_FAMILY | NOT_AT_SITES.keys() or not inner:
            yield outer.name, outer.type
        else:
            yield from ((f"{outer.name}.{one.name}", one.type) for one in parameters_of(inner[0]))


def test_every_setting_has_one_place_and_no_place_is_of_a_setting_that_is_gone() -> None:
    """Fails for a new field: put it into befit.flower.policy, among what travels only if it can name no place."""
    known = dict(fields())
    places = [*TRAVELS, *AT_SITE, *AT_SERVER, *BY_FAMILY, *NOT_AT_SITES]
    assert sorted(places) == sorted(known)
    assert {path for path in TRAVELS if not harmless(known[path])} == TEXTS


def test_every_argument_of_a_benchmark_has_one_place() -> None:
    known = {one.name: one for name in registry.names() for one in parameters_of(registry.get(name).build)}
    assert known.keys() == ARGUMENTS | PLACES
    assert {name for name in ARGUMENTS if not harmless(known[name].type)} == {"languages", "looks"}


@pytest.mark.parametrize("name", method_names())
def test_no_server_can_send_a_method_that_takes_any_text(name: str) -> None:
    """Arguments that take any text are refused at a site by their type; those of the server are not sent to it."""
    texts = [one.name for one in get_method(name).parameters if not harmless(one.type)]
    block = {"name": name, **dict.fromkeys(texts, "/etc")}
    assert len(refused_in_method(block, None)) == len(texts)
    assert not refused_in_method(method_of(load_experiment({"benchmark": "digits", "method": name}).method), None)


def test_the_folder_of_an_alignment_stays_at_the_server() -> None:
    block = {"name": "fedmosaic", "align": {"folder": "/etc", "samples": 9}}
    (problem,) = refused_in_method(block, None)
    assert problem.startswith("method.align.folder: takes any text")
    assert method_of(block) == {"name": "fedmosaic", "align": {"samples": 9}}
    inner = {"name": "fedadam", "server_lr": 0.1, "tau": 0.1, "weights": "examples"}
    sent = {"name": "lora", "base": {"name": "fedadam", "weights": "examples"}}
    assert method_of({"name": "lora", "base": inner}) == sent


def test_a_setting_of_no_place_is_refused_at_the_server_too(monkeypatch: pytest.MonkeyPatch, experiment: Make) -> None:
    """As a field would be that somebody adds: with its default it changes nothing, set it cannot run at sites."""
    from befit.flower import policy

    monkeypatch.setattr(policy, "TRAVELS", TRAVELS - {"train.grad_clip"})
    settings_of(experiment())
    with pytest.raises(ConfigError, match=r"train\.grad_clip: cannot be used on Flower"):
        settings_of(experiment(train={"grad_clip": 1.0}))


def family(clients: list[str], **model: str) -> dict[str, Any]:
    """The block of one family as it travels."""
    return {"families": {"x": {"clients": clients, "model": model}}}


def reads(source: str = "") -> Any:
    """A method whose argument is any text."""
    return build_method("local")


SITE = SiteFile(
    "a",
    "/mine",
    models={"m": "digits-vit", "o/m": "o/m", "o/n": "o/n@abc"},
    methods=["fedp2eft"],
    benchmarks=["sni-10", "hflb"],
)
DATA = {"task": "causal-lm"}


def test_a_text_names_a_place_where_a_path_of_the_site_is_in_it() -> None:
    """But not that of a model which the server itself calls so."""
    site = SiteFile(
        "a",
        "/site/data",
        models={"m": "/site/model", "/srv/model": "/srv/model", "o/m": "o/m"},
        benchmarks={"drake": {"root": "/site/drake"}},
        peers={"b": "/site/b.pub"},
        key="/site/key",
        plugins=["/site/plugin.py"],
        state="/site/state",
    )
    for place in ("data", "model", "drake", "b.pub", "key", "plugin.py", "state"):
        assert names_a_place(site, f"cannot read /site/{place}/x: it is not there"), place
    assert names_a_place(dataclasses.replace(site, data={"train": "/site/train"}), "no /site/train")
    for text in ("cannot read /srv/model/config.json", "model.id: o/m is none", "/site is open", ""):
        assert not names_a_place(site, text), text


@pytest.mark.parametrize(
    ("blocks", "method", "reason"),
    [
        ({"data": {**DATA, "newcomers": "/etc"}}, {}, "data.newcomers: the server may not set it"),
        ({"benchmark": {"name": "sni-10", "root": "/etc"}}, {}, "benchmark.root: is for the site to say"),
        ({"benchmark": {"name": "sni-10", "hub": True}}, {}, "benchmark.hub: is for the site to say"),
        ({"benchmark": {"name": "sni-10", "revisions": {"a/b": "evil"}}}, {}, "benchmark.revisions: is for the site"),
        ({"benchmark": {"name": "sni-10", "tasks": ["../../etc/x"]}}, {}, "benchmark.tasks: is for the site to say"),
        ({"benchmark": {"name": "hflb", "scenario": "/etc/passwd"}}, {}, "benchmark.scenario: is for the site to say"),
        ({"benchmark": {"name": "hflb", "public": "../x.json"}}, {}, "benchmark.public: is for the site to say"),
        (family(["a"], id="evil/m"), {}, "model.id: evil/m is not among the site's models"),
        (family(["a"], id="m", device="cuda:7"), {}, "model.device: is for the site to say"),
        (family(["a"], id="m", hub="x"), {}, "model.hub: the server may not set it"),
        ({**family(["a"], id="m"), "common_model": {"id": "evil/m"}}, {}, "common_model.id: evil/m is not"),
        ({"common_model": {"id": "m", "device": "cpu"}}, {}, "common_model.device: is for the site to say"),
        ({"trackers": {"kind": "wandb"}}, {}, "trackers: the server may not set it"),
        ({"evaluate": {"newcomers": True}}, {}, "evaluate.newcomers: the server may not set it"),
        ({"model": {"id": "o/m", "revision": "refs/pr/7"}}, {}, "model.revision: refs/pr/7 is not the one"),
        ({"model": {"id": "o/n", "revision": "main"}}, {}, "model.revision: main is not the one"),
        ({"model": {"id": ["m"]}}, {}, "model.id: ['m'] is not among the site's models"),
        ({"data": {**DATA, "columns": 3}}, {}, "data.columns: must be a mapping"),
        ({}, {"base": {"name": "fedit"}}, "method.base.name: fedit is not among the site's methods"),
        ({}, {"name": "potara"}, "method.name: potara is not among the site's methods: fedp2eft"),
    ],
)
def test_no_server_can_name_a_place_at_a_site(blocks: dict[str, Any], method: dict[str, Any], reason: str) -> None:
    settings = {"model": {"id": "m"}, "federation": {"rounds": 1, "seed": 0}, **blocks}
    with pytest.raises(ConfigError) as refused:
        experiment_here(settings, {"name": "fedp2eft", **method}, SITE)
    assert [problem for problem in refused.value.problems if problem.startswith(reason)], refused.value


def test_the_first_of_a_sites_records_are_not_what_one_record_less_would_give() -> None:
    private = {"unit": "example", "delta": 1e-3, "noise_multiplier": 1.0}
    settings = {
        "model": {"id": "m"},
        "data": DATA,
        "federation": {"rounds": 1, "seed": 0},
        "limit": {"records": 20},
        "privacy": private,
    }
    with pytest.raises(ConfigError, match=r"limit\.records: takes a client's first records"):
        experiment_here(settings, {"name": "fedp2eft"}, SITE)


def test_text_in_a_method_of_no_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "reads", MethodEntry("reads", "", "", None, reads))
    everything = dataclasses.replace(SITE, methods=None)
    settings = {"model": {"id": "m"}, "federation": {"rounds": 1, "seed": 0}}
    with pytest.raises(ConfigError, match=r"method\.source: takes any text"):
        experiment_here(settings, {"name": "reads", "source": "/etc"}, everything)


@pytest.mark.parametrize("settings", [None, [], {"model": "m"}, {"model": {"id": "m"}, "train": 7}])
def test_what_is_no_configuration_is_refused(settings: Any) -> None:
    with pytest.raises(PayloadMismatch, match="no"):
        experiment_here(settings, {"name": "fedp2eft"}, SITE)


def test_the_site_says_where_a_benchmark_reads_and_which_revision_it_takes() -> None:
    site = dataclasses.replace(SITE, benchmarks={"sni-10": {"root": "/mine/sni", "tasks": ["task1"]}})
    settings = {
        "model": {"id": "o/n", "revision": "abc"},
        "federation": {"rounds": 1, "seed": 0},
        "benchmark": {"name": "sni-10", "train": 9},
    }
    mine = experiment_here(settings, {"name": "fedp2eft"}, site)
    assert mine.benchmark is not None
    assert {key: mine.benchmark.arguments[key] for key in ("root", "tasks", "train", "hub")} == {
        "root": "/mine/sni",
        "tasks": ["task1"],
        "train": 9,
        "hub": False,
    }
    assert (mine.model.id, mine.model.revision) == ("o/n", "abc")


def test_a_server_that_names_a_listed_column_gets_the_one_that_the_site_means() -> None:
    site = dataclasses.replace(SITE, columns={"prompt": "question"}, methods=None)
    settings = {"model": {"id": "m"}, "data": {**DATA, "columns": {"prompt": "ssn"}}}
    mine = experiment_here(settings, {"name": "fedit"}, site).data
    assert mine is not None and mine.columns == {"prompt": "question"}


def test_places_of_the_server_are_not_sent(experiment: Make) -> None:
    settings = settings_of(
        load_experiment(
            {
                "benchmark": {"name": "sni-10", "root": "/servers/own", "train": 9},
                "model": {"id": "m"},
                "method": "fedit",
            }
        )
    )
    assert settings["benchmark"] == {
        "name": "sni-10",
        "version": "1",
        "train": 9,
        "val": 50,
        "test": 50,
        "seed": 42,
        "one_per_category": False,
    }
    assert "/servers" not in str(settings)


@pytest.mark.parametrize("change", [{"newcomers": "x"}])
def test_newcomers_of_files_are_refused_at_the_start(change: dict[str, Any]) -> None:
    values = {"model": {"id": "m"}, "method": "fedit", "data": {**DATA, "clients": {"a": "x"}, **change}}
    assert isinstance(load_experiment(values).data, DataSettings)
    with pytest.raises(ConfigError, match=r"data\.newcomers: no site is a newcomer on Flower yet"):
        load_experiment({**values, "engine": {"kind": "flower"}})
