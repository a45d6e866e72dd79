"""The engine over Flower's records gives the local engine's numbers, bit by bit, for methods of every pattern."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from befit.config.experiment import Experiment
from befit.flower.server_app import run_over
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.registry import build_method, register
from befit.runs.artifacts import predict
from befit.runs.runner import run
from tests.contract.conftest import LITTLE, METHODS_BY_PATTERN
from tests.unit.flower.loopback import LoopbackGrid, write_site
from tests.unit.flower.states import adapters, local_memories, same, server_memory, site_folder, site_memories
from tests.unit.models.tiny_models import save_llama


@pytest.mark.parametrize("method", METHODS_BY_PATTERN)
def test_a_run_at_sites_is_the_local_run_bit_by_bit(
    method: str, grid: LoopbackGrid, sites: list[Path], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    block = {"name": method, **LITTLE.get(method, {})}
    for site in sites:
        site.write_text(f"{site.read_text()}limits: {{min_records: 1}}\n")  # little methods draw single records
    remote = run_over(grid, experiment(block), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment(block, {"store": "disk"}), out=tmp_path / "local").path
    by_client = {f"client-0{number}": site for number, site in enumerate(sites)}
    assert same(server_memory(remote), server_memory(local))
    here, there = local_memories(local), site_memories(remote, by_client, method)
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)
    assert adapters({client: site_folder(remote, site, method) for client, site in by_client.items()}) == adapters(
        dict.fromkeys(by_client, local)
    )
    scores = [json.loads((path / "results.json").read_text())["clients"] for path in (remote, local)]
    for client in by_client:
        assert scores[0][client]["accuracy"] == scores[1][client]["accuracy"]
        assert scores[0][client].get("weights") == scores[1][client].get("weights")  # the server's own
        assert "gates" not in scores[0][client] and "on_others" not in scores[0][client]  # a site's, and nobody's


@pytest.mark.parametrize("deploy", ["method", "best"])
def test_rounds_without_a_server_count_alike_however_they_travel(
    deploy: str, grid: LoopbackGrid, experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """At sites a stage without a server is a message for each score that is due, in process one for each round."""
    settings: dict[str, Any] = {
        "baselines": ["local"],
        "federation": {"rounds": 3, "deploy": deploy},
        "evaluate": {"every": 2},
    }
    remote = run_over(grid, experiment("fedit", **settings), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment("fedit", {"store": "disk"}, **settings), out=tmp_path / "local").path
    for name in ("results.json", "baselines/local/method.json"):
        rows = [json.loads((path / name).read_text())["clients"] for path in (remote, local)]
        counts = [{client: row["updates"] for client, row in of.items()} for of in rows]
        both = 6 if deploy == "best" and name == "results.json" else 3  # of both methods, where a client chooses
        assert counts[0] == counts[1] == {"client-00": both, "client-01": both}
    for folder in (".", "baselines/local"):
        steps = [Counter[str](), Counter[str]()]
        for path, of in zip((remote, local), steps, strict=True):
            for line in map(json.loads, (path / folder / "metrics.jsonl").read_text().splitlines()):
                if line["kind"] == "train":
                    of[line["client"]] += line["steps"]
        assert steps[0] == steps[1] and len(steps[0]) == 2


@pytest.mark.parametrize("wire", [{"dtype": "bfloat16"}, {"dtype": "int8", "top_k": 0.2}], ids=["bfloat16", "top-k"])
def test_numbers_are_the_same_in_every_form_of_the_wire(
    wire: dict[str, Any], grid: LoopbackGrid, sites: list[Path], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Both engines round and leave out alike, a frame keeps what it is given, and a site keeps what its client owes."""
    remote = run_over(grid, experiment("fedit", wire=wire), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment("fedit", {"store": "disk"}, wire=wire), out=tmp_path / "local").path
    assert same(server_memory(remote), server_memory(local))
    by_client = {f"client-0{number}": site for number, site in enumerate(sites)}
    here, there = local_memories(local), site_memories(remote, by_client, "fedit")
    assert all(same(here[client], there[client]) for client in by_client)
    ledgers = [
        [(line["bytes_up"], line["bytes_down"]) for line in map(json.loads, text.splitlines()) if line["client"]]
        for text in ((path / "ledger.jsonl").read_text() for path in (remote, local))
    ]
    assert ledgers[0] == ledgers[1]
    arrays = [
        {client: [row for row in rows if row["shape"]] for client, rows in json.loads(path.read_text()).items()}
        for path in (local / "outbound.json", remote / "outbound.json")
    ]
    kept = site_folder(remote, sites[0], "fedit") / "outbound.json"  # the site's own list, made of what it sent
    assert arrays[0] == arrays[1]
    assert [row for row in json.loads(kept.read_text())["client-00"] if row["shape"]] == arrays[0]["client-00"]


def test_public_records_and_what_is_known_of_clients_are_there_on_flower_too(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Distillation on the benchmark's public records at the server; both engines know the same of clients."""
    values: dict[str, Any] = {
        "benchmark": {"name": "digits-vqa", "clients": 2},
        "model": {"id": "digits-llava-s"},
        "limit": {"records": 2},
        "train": {"max_steps": 1, "batch_size": 2},
        "federation": {"rounds": 1},
        "evaluate": {"newcomers": False},
    }
    sites = {f"client-0{number}": tmp_path / f"site-{number}" / "site.yaml" for number in range(2)}
    for client, path in sites.items():
        write_site(path.parent, client).write_text(
            f"client: {client}\nmodels: {{digits-llava-s: digits-llava-s}}\nbenchmarks: [digits-vqa]\n"
            "limits: {min_records: 1}\n"
        )
    remote = run_over(LoopbackGrid(sites.values()), experiment("perada", **values), tmp_path / "remote", poll_s=0.01)
    local = run(experiment("perada", {"store": "disk"}, **values), out=tmp_path / "local")
    assert same(server_memory(remote.path), server_memory(local.path))
    there = site_memories(remote.path, sites, "perada")
    assert all(same(there[client], memory) for client, memory in local_memories(local.path).items())
    infos = [{client: row["info"] for client, row in done.results["clients"].items()} for done in (remote, local)]
    assert infos[0] == infos[1] and infos[0]["client-00"]


def test_parts_of_the_records_are_the_same_at_sites(
    grid: LoopbackGrid, sites: list[Path], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Each site divides its own; what it owes of one federation on the wire is nothing to the next."""
    block, wire = {"name": "interpolation", "rank": 2, "w": "cross-fitted"}, {"dtype": "int8", "top_k": 0.2}
    remote = run_over(grid, experiment(block, wire=wire), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment(block, {"store": "disk"}, wire=wire), out=tmp_path / "local").path
    assert same(server_memory(remote), server_memory(local))
    by_client = {f"client-0{number}": site for number, site in enumerate(sites)}
    here, there = local_memories(local), site_memories(remote, by_client, "interpolation")
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)


@pytest.mark.parametrize(("kind", "sampling"), [("static", "uniform"), ("dynamic", "frequency")])
def test_data_that_arrives_over_time_arrives_alike(
    kind: str, sampling: str, grid: LoopbackGrid, experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    stream: dict[str, Any] = {"stream": {"kind": kind, "sampling": sampling}, "federation": {"rounds": 3}}
    remote = run_over(grid, experiment("ditto", **stream), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment("ditto", {"store": "disk"}, **stream), out=tmp_path / "local").path
    without = run(experiment("ditto", {"store": "disk"}, federation={"rounds": 3}), out=tmp_path / "without").path
    assert same(server_memory(remote), server_memory(local))
    assert not same(server_memory(remote), server_memory(without))


def test_private_rounds_that_travel_as_one_message_have_the_noise_of_as_many(
    grid: LoopbackGrid, sites: list[Path], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Of Potara's local stage, whose rounds are one message on Flower and one each here, and of its federated one."""
    pytest.importorskip("dp_accounting")
    private: dict[str, Any] = {"unit": "example", "delta": 1e-3, "noise_multiplier": 1.0, "reproducible": True}
    remote = run_over(grid, experiment("potara", privacy=private), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment("potara", {"store": "disk"}, privacy=private), out=tmp_path / "local").path
    assert same(server_memory(remote), server_memory(local))
    there = site_memories(remote, {f"client-0{number}": site for number, site in enumerate(sites)}, "potara")
    assert there and all(same(there[client], memory) for client, memory in local_memories(local).items())


def test_a_round_of_nobody_waits_for_nobody(
    grid: LoopbackGrid, experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Where clients are protected each is drawn by itself, and a round may have none: here the first of two."""
    pytest.importorskip("dp_accounting")
    private: dict[str, Any] = {"unit": "client", "delta": 0.1, "noise_multiplier": 1.0, "reproducible": True}
    drawn: dict[str, Any] = {"privacy": private, "federation": {"rounds": 2, "cohort": 1, "seed": 6}}
    began = time.monotonic()
    engine = {"kind": "flower", "wait_s": (waits := 60)}
    remote = run_over(grid, experiment("fedit", engine, **drawn), tmp_path / "remote", poll_s=0.01)
    assert time.monotonic() - began < waits
    local = run(experiment("fedit", {"store": "disk"}, **drawn), out=tmp_path / "local")
    assert same(server_memory(remote.path), server_memory(local.path))
    assert {row["updates"] for row in remote.results["clients"].values()} == {1}


def test_sites_with_files_of_their_own_give_the_numbers_of_one_machine(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Two files with other column names; at the sites the server knows their ids and nothing else."""
    rng, paths = np.random.default_rng(0), {}
    for client in ("north", "south"):
        (tmp_path / client / "images").mkdir(parents=True)
        lines = []
        for number in range(30):
            picture = rng.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / client / "images" / f"{number}.png")
            lines.append(json.dumps({"image": f"images/{number}.png", "label": str(number % 10)}))
        paths[client] = tmp_path / client / "data.jsonl"
        paths[client].write_text("\n".join(lines))
    data = {"task": "image-classification", "label_names": [str(digit) for digit in range(10)]}
    common: dict[str, Any] = {"benchmark": None}
    sites = {client: write_site(tmp_path / client, client, f"data: {path}\n") for client, path in paths.items()}
    remote_config = experiment("fedsa", data={**data, "clients": dict.fromkeys(paths, "its-site")}, **common)
    remote = run_over(LoopbackGrid(sites.values()), remote_config, tmp_path / "remote", poll_s=0.01).path
    here = {client: str(path) for client, path in paths.items()}
    local = run(
        experiment("fedsa", {"store": "disk"}, data={**data, "clients": here}, **common), out=tmp_path / "local"
    )
    assert same(server_memory(remote), server_memory(local.path))
    there = site_memories(remote, sites, "fedsa")
    assert all(same(there[client], memory) for client, memory in local_memories(local.path).items())
    text = "".join(path.read_text() for path in remote.rglob("*.json*"))
    assert str(paths["north"]) not in text and "data.jsonl" not in text


def test_conversations_at_sites_give_the_numbers_of_one_machine(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Two sites whose messages are in columns of their own names; each reads the one that its file lists."""
    model = str(tmp_path / "model")
    save_llama(
        Path(model),
        "{% for m in messages %}{{ m.role }} : {{ m.content }} # {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}",
    )
    words, sites, here = ["a", "b", "c", "d", "e"], {}, {}
    for number, client in enumerate(("north", "south")):
        (tmp_path / client).mkdir()
        lines = []
        for row in range(24):
            said = [f"{words[row % 5]} {words[(row + number) % 5]}", f"reverse {words[row % 3]}", words[row % 4]]
            roles = ("user", "assistant", "user", "assistant")
            turns = zip(roles, (said[0], said[1], said[2], said[0]), strict=True)
            lines.append(json.dumps({"dialogue": [{"role": role, "content": text} for role, text in turns]}))
        here[client] = str(tmp_path / client / "data.jsonl")
        Path(here[client]).write_text("\n".join(lines))
        path = sites[client] = tmp_path / client / "site.yaml"
        path.write_text(
            f"client: {client}\ndata: data.jsonl\ncolumns: {{messages: dialogue}}\nmodels: {{{model}: {model}}}\n"
            "limits: {min_records: 1}\n"
        )
    data = {"task": "causal-lm", "columns": {"messages": "dialogue"}}
    common: dict[str, Any] = {"benchmark": None, "evaluate": {"newcomers": False, "metrics": ["rougeL"]}}
    remote = run_over(
        LoopbackGrid(sites.values()),
        experiment(
            "fedit",
            data={**data, "columns": {}, "clients": dict.fromkeys(here, "its-site")},
            model={"id": model},
            **common,
        ),
        tmp_path / "remote",
        poll_s=0.01,
    ).path
    local = run(
        experiment("fedit", {"store": "disk"}, data={**data, "clients": here}, model={"id": model}, **common),
        out=tmp_path / "local",
    ).path
    assert same(server_memory(remote), server_memory(local))
    scores = [json.loads((path / "results.json").read_text())["clients"] for path in (remote, local)]
    assert not json.loads((remote / "results.json").read_text())["failures"]
    assert [row["rougeL"] for row in scores[0].values()] == [row["rougeL"] for row in scores[1].values()]
    asked = [{"messages": [{"role": "user", "content": "a b"}]}, {"dialogue": [{"role": "user", "content": "a b"}]}]
    first, second = predict(local, "north", asked)
    assert first == second


def knots_at_sites(rank: int = 4) -> Recipe:
    """FedIT whose server merges with TIES in KnOTS's shared basis (up = down = r(d_in + d_out) per module).

    rank  rank of the adapter
    """
    return replace(build_method({"name": "fedit", "rank": rank}), merge=Merge(space="knots", rule="ties", density=0.3))


def test_a_merge_in_knots_basis_is_the_local_one_bit_by_bit(
    grid: LoopbackGrid, experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    # Here, so that tests of all methods that are collected after this module do not find it.
    register("knots_at_sites", title="FedIT, merged in KnOTS's basis")(knots_at_sites)
    remote = run_over(grid, experiment("knots_at_sites"), tmp_path / "remote", poll_s=0.01).path
    local = run(experiment("knots_at_sites", {"store": "disk"}), out=tmp_path / "local").path
    plain = run(experiment({"name": "fedit", "rank": 4}, {"store": "disk"}), out=tmp_path / "plain").path
    assert same(server_memory(remote), server_memory(local))
    assert not same(server_memory(remote), server_memory(plain))


@pytest.mark.parametrize("cohort", [None, 1])
def test_sites_go_back_to_the_best_round_as_one_machine_does(
    cohort: int | None, grid: LoopbackGrid, sites: list[Path], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    """Of FedDPA, whose last stage goes on from what a site keeps; with cohorts a site may have had no memory then."""
    settings: dict[str, Any] = {
        "train": {"max_steps": 3, "lr": 0.03},
        "federation": {"rounds": 4, "patience": 9, "cohort": cohort},
        "evaluate": {"every": 1},
    }
    block = {"name": "fedit" if cohort else "feddpa", "rank": 2}
    for site in sites:
        site.write_text(f"{site.read_text()}limits: {{min_records: 1}}\n")
    remote = run_over(grid, experiment(block, **settings), tmp_path / "remote", poll_s=0.01)
    local = run(experiment(block, {"store": "disk"}, **settings), out=tmp_path / "local")
    best = local.results["best_rounds"]
    assert remote.results["best_rounds"] == best and best[0]["round"] < 4
    folders = {f"client-0{number}": site_folder(remote.path, site, block["name"]) for number, site in enumerate(sites)}
    assert adapters(folders) == adapters(dict.fromkeys(folders, local.path))
    assert [row["accuracy"] for row in remote.results["clients"].values()] == [
        row["accuracy"] for row in local.results["clients"].values()
    ]
    for folder in folders.values():
        assert len(list(folder.glob("memory.*"))) <= 3  # before and after the last request, and the best round's
