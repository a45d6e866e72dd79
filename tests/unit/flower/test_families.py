"""Sites with backbones of several sizes: their numbers are those of one machine, and a site holds its own family's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTForImageClassification

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, DataError, ModelError, NotEnoughReplies, RunError
from befit.flower.app_folder import write_app
from befit.flower.policy import settings_of
from befit.flower.server_app import run_over
from befit.flower.simulation import sites_of as simulated_sites
from befit.runs.loading import load_federation, resolve_model
from befit.runs.runner import run
from tests.contract.conftest import LITTLE
from tests.quicker import UNCHANGED
from tests.unit.flower.loopback import LoopbackGrid
from tests.unit.flower.states import adapters, local_memories, same, server_memory, site_folder, site_memories
from tests.unit.models.tiny_models import save_vit

FLOWER = {"kind": "flower", "wait_s": 0.3}
LARGE, SMALL = "digits-llava-l", "digits-llava-s"


@dataclass(frozen=True)
class Pictures:
    """Sites with pictures of their own, on two models: north has the wide one, the others have the narrow one.

    files, sites  every client's records, and its site's file
    public        records that the server has
    """

    files: dict[str, str]
    sites: dict[str, Path]
    models: dict[str, str]
    public: str

    def experiment(self, clients: dict[str, str], method: Any = "fedit", **more: Any) -> Experiment:
        values = {
            "model": {"id": self.models["narrow"]},
            "families": {"wide": {"clients": ["nor*"], "model": {"id": self.models["wide"]}}},
            "data": {
                "task": "image-classification",
                "label_names": ["a", "b", "c"],
                "clients": clients,
                "public": self.public,
            },
            "method": method,
            "train": {"max_steps": 2, "batch_size": 8},
            "federation": {"rounds": 2},
            "checkpoint": {"every_s": 0},
            "report": {"plots": False},
            **more,
        }
        return load_experiment(values)

    @property
    def distant(self) -> Experiment:
        return self.experiment(dict.fromkeys(self.files, "its-site"), engine=FLOWER)


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    rng, files, sites = np.random.default_rng(0), dict[str, str](), dict[str, Path]()
    models = {name: str(save_vit(tmp_path / name, width=width)) for name, width in (("wide", 24), ("narrow", 16))}
    UNCHANGED.add(tmp_path)
    for client in ("north", "south", "west", "public"):
        folder = tmp_path / client
        folder.mkdir()
        lines = []
        for number in range(30):
            Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
            lines.append(json.dumps({"image": f"{number}.png", "label": "abc"[number % 3]}))
        (folder / "data.jsonl").write_text("\n".join(lines))
        files[client], sites[client] = str(folder / "data.jsonl"), folder / "site.yaml"
        held = [models["wide"], models["narrow"]] if client == "north" else [models["narrow"]]
        sites[client].write_text(
            f"client: {client}\ndata: data.jsonl\nmodels: {json.dumps({name: name for name in held})}\n"
            "limits: {min_records: 5}\nshares: [personal, sketch]\n"
        )
    public = files.pop("public")
    del sites["public"]
    return Pictures(files, sites, models, public)


def over(grid: LoopbackGrid, experiment: Experiment, out: Path, **more: Any) -> Path:
    return run_over(grid, experiment, out, poll_s=0.01, **more).path


def assert_alike(remote: Path, local: Path, sites: dict[str, Path], method: str) -> None:
    assert same(server_memory(remote), server_memory(local))
    here, there = local_memories(local), site_memories(remote, sites, method)
    assert here.keys() == there.keys() and all(same(here[client], there[client]) for client in here)
    assert adapters({client: site_folder(remote, site, method) for client, site in sites.items()}) == adapters(
        dict.fromkeys(sites, local)
    )


def hetero(method: str, engine: dict[str, Any], **more: Any) -> Experiment:
    values = {
        "benchmark": "digits-vqa-hetero",
        "limit": {"clients": 1, "records": 2},
        "method": {"name": method, **LITTLE.get(method, {})},
        "train": {"max_steps": 2, "batch_size": 2},
        "federation": {"rounds": 2},
        "evaluate": {"newcomers": False, "max_new_tokens": 2},
        "checkpoint": {"every_s": 0},
        "report": {"plots": False},
        "engine": engine,
        **more,
    }
    return load_experiment(values)


def sites_of(experiment: Experiment, folder: Path) -> dict[str, Path]:
    """A site's file for each client, which lists its own family's model and no other."""
    sites: dict[str, Path] = {}
    for client in load_federation(experiment).clients:
        model = SMALL if client.info["size"] == "small" else LARGE
        path = sites[client.id] = folder / client.id / "site.yaml"
        path.parent.mkdir()
        path.write_text(
            f"client: {client.id}\nmodels: {{{model}: {model}}}\nbenchmarks: [digits-vqa-hetero]\n"
            "limits: {min_records: 1}\nshares: [personal, sketch]\n"
        )
    return sites


def test_a_benchmark_of_two_sizes_has_the_numbers_of_one_machine(tmp_path: Path) -> None:
    """FedMKT's clients and its server all run their backbones on the benchmark's public records."""
    distant = hetero("fedmkt", FLOWER)
    sites = sites_of(distant, tmp_path)
    assert len(sites) == 2
    remote = over(LoopbackGrid(sites.values()), distant, tmp_path / "remote")
    local = run(hetero("fedmkt", {"store": "disk"}), out=tmp_path / "local").path
    assert_alike(remote, local, sites, "fedmkt")
    rows = [json.loads((path / "results.json").read_text())["clients"] for path in (remote, local)]
    assert not json.loads((remote / "results.json").read_text())["failures"]
    for client in sites:
        assert rows[0][client]["exact_match"] == rows[1][client]["exact_match"]
        assert rows[0][client].get("weights") == rows[1][client].get("weights")


@pytest.mark.parametrize("method", ["potara", "perada", "fedmosaic"])
def test_sites_with_their_own_pictures_have_the_numbers_of_one_machine_also_after_a_resume(
    method: str, pictures: Pictures, tmp_path: Path
) -> None:
    """Potara serves each family by itself. The others have families learn from each other on the public records, which
    only the server reads; the clients of FedMosaic compare gradients of the smallest model, which all need for that."""
    block = {"name": method, **LITTLE.get(method, {})}
    distant = pictures.experiment(dict.fromkeys(pictures.files, "its-site"), block, engine=FLOWER)
    local = run(pictures.experiment(pictures.files, block, engine={"store": "disk"}), out=tmp_path / "local").path
    remote = over(LoopbackGrid(pictures.sites.values()), distant, tmp_path / "remote")
    assert_alike(remote, local, pictures.sites, method)
    kept = server_memory(remote)
    for gone in ("report.html", "method.json", "results.json"):
        (remote / gone).unlink()
    over(LoopbackGrid(pictures.sites.values()), distant, remote, resume=True)
    assert same(server_memory(remote), kept) and (remote / "results.json").exists()
    wide, narrow = (json.loads((remote / "outbound.json").read_text())[client] for client in ("north", "south"))
    assert {tuple(row["shape"]) for row in wide} != {tuple(row["shape"]) for row in narrow}


def test_a_resumed_run_notices_other_public_records(pictures: Pictures, tmp_path: Path) -> None:
    distant = pictures.experiment(dict.fromkeys(pictures.files, "its-site"), engine=FLOWER)
    done = over(LoopbackGrid(pictures.sites.values()), distant, tmp_path / "run")
    for gone in ("report.html", "method.json", "results.json"):
        (done / gone).unlink()
    lines = Path(pictures.public).read_text().splitlines()
    Path(pictures.public).write_text("\n".join(lines[:-1]))
    with pytest.raises(RunError, match="data changed since"):
        over(LoopbackGrid(pictures.sites.values()), distant, done, resume=True)


def test_a_resumed_run_notices_other_pictures_behind_the_same_public_records(
    pictures: Pictures, tmp_path: Path
) -> None:
    done = over(LoopbackGrid(pictures.sites.values()), pictures.distant, tmp_path / "run")
    for gone in ("report.html", "method.json", "results.json"):
        (done / gone).unlink()
    folder = Path(pictures.public).parent
    (folder / "1.png").write_bytes((folder / "0.png").read_bytes())
    with pytest.raises(RunError, match="data changed since"):
        over(LoopbackGrid(pictures.sites.values()), pictures.distant, done, resume=True)


def test_no_family_has_the_name_of_those_that_have_none(pictures: Pictures) -> None:
    named = {"families": {"model": {"clients": ["north"], "model": {"id": pictures.models["wide"]}}}}
    with pytest.raises(ConfigError, match=r"families\.model: is what clients of no family have"):
        pictures.experiment(pictures.files, **named)


def test_a_simulation_of_a_folder_knows_whose_family_a_pattern_names(pictures: Pictures, tmp_path: Path) -> None:
    here = {"data": {"task": "image-classification", "clients": pictures.files}}
    assert write_app(
        pictures.experiment({}, **here, engine=FLOWER), tmp_path / "app", tmp_path / "run", simulation=True
    )
    app = load_experiment(tmp_path / "app" / "befit_app" / "experiment.yaml")
    assert [list(site.models) for site in simulated_sites(app, tmp_path / "run")] == [
        [pictures.models[name]] for name in ("wide", "narrow", "narrow")
    ]
    missing = {"data": {**here["data"], "label_names": ["a", "b"], "public": str(tmp_path / "gone.csv")}}
    with pytest.raises(DataError, match=r"data\.public: .*gone\.csv"):
        write_app(pictures.experiment({}, **missing, engine=FLOWER), tmp_path / "other", tmp_path / "run")


def test_a_run_begins_once_a_site_of_every_family_is_there(pictures: Pictures, tmp_path: Path) -> None:
    """The server has shapes alone; which weights a family has only one of its sites can say."""
    grid = LoopbackGrid(pictures.sites.values())
    grid.online = {12, 13}
    with pytest.raises(NotEnoughReplies, match=r"no site of family wide has come, .*; missing: north"):
        over(grid, pictures.distant, tmp_path / "run")
    grid.online = {11, 12}
    rows = json.loads((over(grid, pictures.distant, tmp_path / "later") / "results.json").read_text())["clients"]
    assert {client: row["updates"] for client, row in rows.items()} == {"north": 2, "south": 2, "west": 0}


def test_a_site_with_the_model_of_another_family_is_left_out(pictures: Pictures, tmp_path: Path) -> None:
    """West says that its model is where the wide one's weights are: they do not fit its family."""
    text = pictures.sites["west"].read_text()
    narrow, wide = pictures.models["narrow"], pictures.models["wide"]
    pictures.sites["west"].write_text(text.replace(f'"{narrow}": "{narrow}"', f'"{narrow}": "{wide}"'))
    done = over(LoopbackGrid(pictures.sites.values()), pictures.distant, tmp_path / "run")
    failures = json.loads((done / "results.json").read_text())["failures"]
    assert {failure["client"] for failure in failures} == {"west"}
    assert "site west has another backbone: fingerprint" in failures[0]["reason"]
    # A site that does not list its family's model says so, and says nothing of the others'.
    text = pictures.sites["north"].read_text()
    pictures.sites["north"].write_text(text.replace(f'"{wide}": "{wide}", ', ""))
    refused = rf"(?s)client north: .*model\.id: {wide} is not among the site's models: {narrow}"
    with pytest.raises(ConfigError, match=refused) as error:
        over(LoopbackGrid(pictures.sites.values()), pictures.distant, tmp_path / "other")
    assert "no site of family wide has come" in str(error.value)


def give_other_narrow_weights(pictures: Pictures, client: str, other: Path) -> None:
    narrow = pictures.models["narrow"]
    model = ViTForImageClassification.from_pretrained(narrow)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    model.save_pretrained(other)
    text = pictures.sites[client].read_text()
    pictures.sites[client].write_text(text.replace(f'"{narrow}": "{narrow}"', f'"{narrow}": "{other}"'))


def test_where_the_server_runs_the_models_other_weights_are_refused_as_their_site_comes(
    pictures: Pictures, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    give_other_narrow_weights(pictures, "west", tmp_path / "other")
    distant = pictures.experiment(dict.fromkeys(pictures.files, "its-site"), "perada", engine=FLOWER)
    with caplog.at_level("INFO", logger="befit"):
        over(LoopbackGrid(pictures.sites.values()), distant, tmp_path / "run")
    assert "the run starts: 2 of 3 sites are here; refused: west" in caplog.messages
    (refusal,) = [line for line in caplog.messages if line.startswith("client west does not take part")]
    assert "another backbone" in refusal and "the server's" in refusal


def test_where_clients_compare_gradients_of_the_smallest_model_every_site_needs_it(tmp_path: Path) -> None:
    distant = hetero("rela", FLOWER)
    sites = sites_of(distant, tmp_path)
    with pytest.raises(ConfigError, match=f"common_model.id: {SMALL} is not among the site's models: {LARGE}"):
        over(LoopbackGrid(sites.values()), distant, tmp_path / "run")


def test_a_site_whose_smallest_model_is_another_is_refused_before_anything_is_trained(
    pictures: Pictures, tmp_path: Path
) -> None:
    give_other_narrow_weights(pictures, "north", tmp_path / "other")
    distant = pictures.experiment(dict.fromkeys(pictures.files, "its-site"), "rela", engine=FLOWER)
    grid = LoopbackGrid(pictures.sites.values())
    words = r"client north: site north has another smallest backbone, which a method has every client run: fingerprint"
    with pytest.raises(ConfigError, match=words):
        over(grid, distant, tmp_path / "run")
    assert {kind for _, kind in grid.sent} == {"query"}
    over(grid, pictures.distant, tmp_path / "without")  # FedIT needs nobody's but a site's own


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"federation": {"cohort": 4}}, "federation.cohort: 4 is more than there are clients, 3"),
        ({"federation": {"min_replies": 4}}, "federation.min_replies: 4 is more than there are clients"),
        ({"federation": {"secure_sums": {"clip": 1.0}}}, "clients of different backbones have no sum"),
        ({"method": {"name": "fedmosaic", "blocks": 9}}, "method fedmosaic: .*blocks"),
        ({"method": "perada", "public": None}, "method perada: needs public records"),
        ({"adapter": {"targets": ["nowhere"]}}, "nowhere"),
        ({"federation": {"deploy": "best"}, "baselines": []}, "there are no baselines"),
    ],
)
def test_what_does_not_fit_models_and_clients_is_told_before_any_site_has_a_file(
    more: dict[str, Any], problem: str, pictures: Pictures, tmp_path: Path
) -> None:
    public = more.pop("public", pictures.public)
    distant = pictures.experiment(dict.fromkeys(pictures.files, "its-site"), engine=FLOWER, **more)
    assert distant.data is not None
    distant = replace(distant, data=replace(distant.data, public=public))
    with pytest.raises((ConfigError, ModelError), match=problem):
        write_app(distant, tmp_path / "app", tmp_path / "runs")
    assert not (tmp_path / "app").exists()


def test_what_travels_names_ids_and_models_and_no_pattern(pictures: Pictures, tmp_path: Path) -> None:
    told = settings_of(pictures.distant)
    assert told["families"] == {
        "wide": {"clients": ["north"], "model": {**told["model"], "id": pictures.models["wide"]}}
    }
    assert "common_model" not in told and "public" not in told["data"]
    limited = settings_of(resolve_model(hetero("rela", FLOWER)))
    assert limited["common_model"]["id"] == SMALL and limited["limit"] == {
        "clients": None,
        "records": 2,
        "rounds": None,
    }
    assert "device" not in limited["common_model"]
    typo = {"families": {"wide": {"clients": ["nort"], "model": {"id": pictures.models["wide"]}}}}
    with pytest.raises(ConfigError, match="nort is no client"):
        settings_of(pictures.experiment(dict.fromkeys(pictures.files, "its-site"), engine=FLOWER, **typo))
    drops = {"families": {"wide": {"clients": ["north"], "model": {"id": "m", "long_prompts": "drop"}}}}
    with pytest.raises(ConfigError, match=r"families\.wide\.model\.long_prompts: no site leaves records out"):
        settings_of(pictures.experiment(dict.fromkeys(pictures.files, "its-site"), engine=FLOWER, **drops))


def test_a_method_whose_clients_need_public_records_is_refused_where_only_the_server_has_them(
    pictures: Pictures,
) -> None:
    distant = pictures.experiment(dict.fromkeys(pictures.files, "its-site"), "fedmkt", engine=FLOWER)
    with pytest.raises(
        ConfigError, match="method fedmkt: its clients need the public records, which only the server has"
    ):
        settings_of(distant)
