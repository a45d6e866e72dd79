"""A method and a benchmark in a user's own file, wherever befit works: commands, processes, resumed runs, sites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from befit.config.load import load_experiment
from befit.core import plugins
from befit.core.yamlfile import parse_yaml
from befit.data.registry import BENCHMARKS
from befit.protocol.registry import METHODS
from befit.runs.runner import run
from tests.pages import blocks
from tests.processes import befit, call, fork_workers

PLUGIN = '''
"""One method and one benchmark; writes down which process loaded it."""
import os
from pathlib import Path

import befit

with (Path(__file__).parent / "loaded.txt").open("a") as file:
    file.write(f"{os.getpid()}\\n")


@befit.register("half_b", title="Half of B")
def half_b(rank: int = 4, alpha: float = 8.0) -> befit.Recipe:
    """Train A and B, share B.

    rank   rank of the adapter
    alpha  its scaling
    """
    return befit.Recipe(
        layout=befit.lora(rank, alpha),
        passes=(befit.Pass(befit.slot("shared"), ("shared",)),),
        share=befit.slot("shared") & befit.factor("B"),
        use=befit.Use(("shared",)),
    )


@befit.benchmark(
    "few_digits", "1", summary="No digits", default_model="digits-vit", task="image-classification", seeded=False
)
def few_digits(clients: int = 2, each: int = 12) -> befit.Federation:
    """Images of noise, one after the other.

    clients  how many
    each     images per client and split
    """
    import numpy as np

    images = np.random.default_rng(0).random((3 * clients * each, 8, 8), "float32")
    records = [{"id": str(n), "image": image, "label": n % 10} for n, image in enumerate(images)]
    parts = [records[n * each : (n + 1) * each] for n in range(3 * clients)]
    return befit.Federation(
        "few_digits", "1", "image-classification",
        tuple(befit.ClientData(f"c-{n}", *parts[3 * n : 3 * n + 3]) for n in range(clients)),
        label_names=tuple("0123456789"),
        manifest={"partition": {"sha256": f"{clients} x {each}"}},
    )
'''
CONFIG = """
benchmark: few_digits
method: half_b
baselines: []
train: {max_steps: 1}
federation: {rounds: 2}
report: {plots: false}
"""
SITE = "client: c-{}\nmodels: {{digits-vit: digits-vit}}\nbenchmarks: [few_digits]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "mine.py").write_text(PLUGIN)
    (tmp_path / "mine.yaml").write_text(f"plugins: [lab/mine.py]\n{CONFIG}")
    (tmp_path / "bare.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test registers in this process is unknown to the next."""
    yield
    del METHODS["half_b"], BENCHMARKS["few_digits"]


def loads(folder: Path) -> list[str]:
    path = folder / "lab" / "loaded.txt"
    return path.read_text().split() if path.exists() else []


def ok(*words: str, cwd: Path) -> str:
    done = call(befit, *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run.glob("clients/*/adapter/adapter_model.safetensors"))]


def test_commands_know_what_import_names(folder: Path) -> None:
    option = ("--import", "lab/mine.py")
    assert "half_b" in ok("methods", *option, cwd=folder)
    explained = json.loads(ok("explain", "half_b", *option, "--json", cwd=folder))
    assert explained["travels"]["up"] == "slot(shared) & factor(B)"
    assert "few_digits" in ok("benchmarks", *option, cwd=folder)
    assert '"half_b"' in ok("schema", *option, cwd=folder)
    table = json.loads(ok("partition", "few_digits", *option, "--json", cwd=folder))
    assert "c-1" in json.dumps(table)
    checked = json.loads(ok("check", "bare.yaml", *option, "--json", cwd=folder))
    assert checked["method"] == "half_b" and checked["clients"] == 2
    costs = json.loads(ok("cost", "--model", "llama-3.2-3b", "--method", "half_b", *option, "--json", cwd=folder))
    assert costs["upload_bytes_total"] > 0
    unknown = call(befit, "check", "bare.yaml", cwd=folder)
    assert unknown.returncode == 2 and "unknown method 'half_b'" in unknown.stderr and "--import" in unknown.stderr


def test_a_plugin_that_fails_is_a_message_and_no_traceback(folder: Path) -> None:
    (folder / "lab" / "mine.py").write_text("import befit\n1 / 0\n")
    for words in (("check", "mine.yaml"), ("methods", "--import", "lab/mine.py")):
        done = call(befit, *words, cwd=folder)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"{folder / 'lab' / 'mine.py'}: ZeroDivisionError: division by zero, line 2" in done.stderr.replace(
            "\n", ""
        )


FAULTS = """
import befit

@befit.register("fails")
def fails() -> befit.Recipe:
    "Fails when it is made."
    return [][3]

@befit.register("exits")
def exits() -> befit.Recipe:
    "Ends the process as if all was well."
    raise SystemExit(0)

@befit.register("useless")
class Useless(befit.Method):
    "Gives no client a model."
    layout, use = befit.lora(2, 4.0), befit.Use(("shared",))

    def plan(self):
        return [befit.Stage("alone", Alone(), rounds=1)]

    def server_init(self, site):
        return befit.Payload()

    def deploy(self, client, received, site):
        raise RuntimeError("nothing to deploy")

class Alone(befit.Personal):
    def client_update(self, client, received, site, at):
        return client, befit.Payload()

@befit.benchmark("nothing", "1", summary="Returns nothing", default_model="digits-vit", task="image-classification")
def nothing() -> befit.Federation:
    "Returns nothing."

@befit.benchmark("no_labels", "1", summary="No labels", default_model="digits-vit", task="image-classification")
def no_labels() -> befit.Federation:
    "Images without labels."
    import numpy as np

    records = [{"id": str(n), "image": np.zeros((8, 8), "float32")} for n in range(4)]
    clients = tuple(befit.ClientData(f"c-{n}", records, records, records) for n in range(2))
    return befit.Federation("no_labels", "1", "image-classification", clients, label_names=("a", "b"))
"""


def test_what_is_wrong_within_a_plugin_is_told_with_its_place_before_a_run(folder: Path) -> None:
    """And is not said to be befit's own failure."""
    plugin = folder / "lab" / "faults.py"
    plugin.write_text(FAULTS)
    cases = {
        ("few_digits", "fails"): f"a plugin failed: IndexError: list index out of range ({plugin}, line 7)",
        ("few_digits", "exits"): f"a plugin failed: SystemExit: 0 ({plugin}, line 12)",
        ("nothing", "fedit"): f"nothing of {plugin} returns nothing; it must return a Federation",
        ("no_labels", "fedit"): "client c-0, train: record '0' (position 0) has no label; its fields are id, image",
    }
    for (data, method), text in cases.items():
        config = CONFIG.replace("few_digits", data).replace("half_b", method)
        (folder / "faults.yaml").write_text(f"plugins: [lab/mine.py, lab/faults.py]\n{config}")
        done = call(befit, "check", "faults.yaml", cwd=folder)
        told = " ".join(done.stderr.split())
        assert done.returncode == 2 and text in told and "should not" not in told, told
    (folder / "faults.yaml").write_text(config.replace("no_labels", "few_digits").replace("fedit", "useless"))
    done = call(befit, "run", "faults.yaml", "--import", "lab/mine.py", "--import", "lab/faults.py", cwd=folder)
    assert done.returncode == 1 and "no client has a model that could be scored" in done.stderr
    assert f"nothing to deploy ({plugin}, line" in done.stderr


def test_worker_processes_have_it_and_give_the_numbers_of_one_process(
    folder: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("run", "mine.yaml", "--out", "one", "-q", cwd=folder)
    before = len(loads(folder))
    fork_workers(monkeypatch)
    run(load_experiment(folder / "mine.yaml", ["engine.workers=2"]), out=folder / "two")
    assert len(loads(folder)) == before + 3, "the run's process and two workers"
    assert weights(folder / "one") == weights(folder / "two") != []


def test_a_run_goes_on_from_its_own_directory_and_not_with_a_plugin_that_changed(folder: Path) -> None:
    """Killed after a round, from another folder than it was started in; the plugin's path was relative then."""
    ok("run", "bare.yaml", "--import", "lab/mine.py", "--out", "whole", "-q", cwd=folder)
    ok("run", "bare.yaml", "--import", "lab/mine.py", "--out", "cut", "-q", cwd=folder)
    cut = folder / "cut"
    for name in ("report.html", "results.json", "method.json"):
        (cut / name).unlink()
    assert parse_yaml((cut / "config.yaml").read_text())["plugins"] == [str(folder / "lab" / "mine.py")]
    again = ("run", str(cut / "config.yaml"), "--out", str(cut), "--resume", "-q")
    (folder / "lab" / "mine.py").write_text(PLUGIN.replace("Half of B", "Half of b"))
    changed = call(befit, *again, cwd=folder / "lab")
    assert changed.returncode == 2 and "lab/mine.py) changed since" in changed.stderr
    assert not (cut / "results.json").exists()
    (folder / "lab" / "mine.py").write_text(PLUGIN)
    ok(*again, cwd=folder / "lab")
    assert weights(cut) == weights(folder / "whole")
    # What is finished is not shown as if the plugin of today had made it either.
    (folder / "lab" / "mine.py").write_text(PLUGIN.replace("Half of B", "Half of b"))
    changed = call(befit, *again, cwd=folder / "lab")
    assert changed.returncode == 2 and "lab/mine.py) changed since" in changed.stderr


@pytest.mark.slow
def test_comparisons_share_it_among_their_processes_and_run_again_what_it_changed(folder: Path) -> None:
    (folder / "lab" / "study.yaml").write_text(
        "study: {title: Mine}\nplugins: [mine.py]\nbase: ../bare.yaml\nseeds: [0, 1]\n"
        "runs: {Mine: half_b, FedIT: {method: fedit}}\n"
    )
    words = ("compare", "lab/study.yaml", "--jobs", "2", "--out", "compared", "-q", "--json")
    results = json.loads(ok(*words, cwd=folder))["results"]
    assert len(list((folder / "compared" / "runs").iterdir())) == 4 and results
    assert len(set(loads(folder))) == 3, "the command and two workers"
    ok(*words, cwd=folder)
    assert len(list((folder / "compared" / "runs").iterdir())) == 4, "finished runs are used again"
    (folder / "lab" / "mine.py").write_text(PLUGIN + "\n# a comment\n")
    ok(*words, cwd=folder)
    assert len(list((folder / "compared" / "runs").iterdir())) == 8
    checked = json.loads(ok("check", "lab/study.yaml", "--json", cwd=folder))
    assert [run["method"]["name"] for run in checked["runs"]] == ["half_b", "fedit"]


def test_a_configuration_is_compared_with_a_method_that_import_names(folder: Path) -> None:
    (folder / "digits.yaml").write_text(CONFIG.replace("half_b", "fedit"))
    words = ("compare", "digits.yaml", "--import", "lab/mine.py", "--methods", "fedit,half_b", "--out", "c", "-q")
    ok(*words, "--json", cwd=folder)
    assert len(list((folder / "c" / "runs").iterdir())) == 2


def test_the_plugins_that_the_page_shows_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "plugins.md"
    method, task = [block for language, block in blocks(page) if language == "python"]
    (tmp_path / "ours.py").write_text(method)
    (tmp_path / "stars.py").write_text(task)
    config = CONFIG.replace("few_digits", "{name: threes, clients: 2}").replace("half_b", "ours")
    (tmp_path / "mine.yaml").write_text(f"plugins: [ours.py, stars.py]\n{config}")
    ok("run", "mine.yaml", "--out", "run", "-q", cwd=tmp_path)
    assert len(weights(tmp_path / "run")) == 2


def distribution(folder: Path, module: str) -> dict[str, str]:
    """The environment of a process where a distribution with an entry point is installed."""
    info = folder / "lab" / "befit_lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: befit-lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[befit.methods]\nlab = {module}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "lab"), os.environ.get("PYTHONPATH", "")])}


def test_an_installed_distribution_brings_its_methods_by_an_entry_point(folder: Path) -> None:
    command = [sys.executable, "-m", "befit", "methods", "--json"]
    done = subprocess.run(command, env=distribution(folder, "mine"), capture_output=True, text=True, check=True)
    assert "half_b" in {one["name"] for one in json.loads(done.stdout)}


def befit_with(place: str, *words: str) -> None:
    """`befit` where this folder has a distribution too: entry points are looked for as in a new process."""
    sys.path.insert(0, place)
    plugins._groups_loaded.clear()
    befit(*words)


def test_an_entry_point_that_cannot_be_loaded_is_named_with_its_distribution(folder: Path) -> None:
    distribution(folder, "gone")
    done = call(befit_with, str(folder / "lab"), "methods")
    assert done.returncode == 2 and "befit-lab: lab = gone: Python finds no module gone" in done.stderr


def test_what_a_site_runs_to_look_at_a_server_or_itself_loads_nothing_but_its_own_plugins(folder: Path) -> None:
    """Neither the plugins of the server's file nor an installed distribution, as when the site takes part."""
    pytest.importorskip("flwr")
    distribution(folder, "mine")
    (folder / "own.py").write_text(PLUGIN.replace("half_b", "own").replace("few_digits", "own_digits"))
    server = (folder / "mine.yaml").read_text()
    (folder / "server.yaml").write_text(server.replace("few_digits", "digits").replace("half_b", "own"))
    site = "client: client-00\nmodels: {digits-vit: digits-vit}\nbenchmarks: [digits]\n"
    (folder / "site.yaml").write_text(f"{site}methods: [own, half_b]\nplugins: [own.py]\n")
    place = str(folder / "lab")
    looked = call(befit_with, place, "flower", "node-config", "site.yaml", "--run", "server.yaml", "--json", cwd=folder)
    assert looked.returncode == 0, looked.stderr
    consent = json.loads(looked.stdout)["consent"]
    assert [terms["method"] for terms in consent["methods"]] == ["own"]
    (folder / "site.yaml").write_text(f"{site}methods: [half_b]\n")
    ill = call(befit_with, place, "doctor", "site.yaml", "--json", cwd=folder)
    assert [finding["found"] for finding in json.loads(ill.stdout)["findings"] if finding["what"] == "methods"] == [
        "befit has none called half_b"
    ]
    assert loads(folder) == [], "nothing of the server or of the distribution has run"


def hello(config: Path, request: Path) -> None:
    """What the server of a configuration asks first, in a process that has its plugins."""
    from befit.config.load import load_experiment
    from befit.flower.at_sites import hello as question

    request.write_bytes(question(load_experiment(config, ["engine.kind=flower", "model.id=digits-vit"]), "trial"))


def answer(site: Path, request: Path) -> None:
    """A site's answer, in a process of its own."""
    from befit.core.plugins import ignore_entry_points
    from befit.flower.call import call as ask_site
    from befit.flower.frame import unpack
    from befit.flower.site_file import load_site

    ignore_entry_points()
    header, _ = unpack(ask_site(load_site(site), request.read_bytes()), "the reply")
    print(json.dumps({key: header.get(key) for key in ("kind", "client", "error", "reason")}))


def test_a_site_loads_what_its_own_file_names_and_nothing_that_a_server_does(folder: Path) -> None:
    assert call(hello, folder / "mine.yaml", folder / "request", cwd=folder).returncode == 0
    assert str(folder).encode() not in (folder / "request").read_bytes(), "no path of the server's travels"
    (folder / "site.yaml").write_text(SITE.format(0))
    before = loads(folder)
    told = json.loads(call(answer, folder / "site.yaml", folder / "request", cwd=folder).stdout)
    assert told["kind"] == "failure" and "unknown method 'half_b'" in told["reason"]
    assert loads(folder) == before, "the site imported nothing"
    (folder / "site.yaml").write_text(SITE.format(0) + "plugins: [lab/mine.py]\n")
    told = json.loads(call(answer, folder / "site.yaml", folder / "request", cwd=folder).stdout)
    assert told == {"kind": "hello", "client": "c-0", "error": None, "reason": None}
    assert len(loads(folder)) == len(before) + 1


def test_a_server_that_sends_plugins_is_refused_before_anything_is_loaded(folder: Path) -> None:
    from befit.core.errors import ConfigError
    from befit.flower.policy import experiment_here
    from befit.flower.site_file import SiteFile

    site = SiteFile("c-0", models={"digits-vit": "digits-vit"}, benchmarks=["digits"])
    settings = {"model": {"id": "digits-vit"}, "plugins": [str(folder / "lab" / "mine.py")]}
    with pytest.raises(ConfigError, match="plugins: a site loads those of its own file"):
        experiment_here(settings, {"name": "fedit"}, site)
    assert loads(folder) == []


def at_sites(folder: Path) -> None:
    from befit.config.load import load_experiment
    from befit.flower.server_app import run_over
    from tests.unit.flower.loopback import LoopbackGrid

    sites = [folder / f"site-{number}" / "site.yaml" for number in range(2)]
    for number, path in enumerate(sites):
        path.parent.mkdir()
        path.write_text(SITE.format(number) + "plugins: [../lab/mine.py]\n")
    experiment = load_experiment(folder / "mine.yaml", ["engine.kind=flower"])
    run_over(LoopbackGrid(sites), experiment, folder / "remote", poll_s=0.01)


def test_a_run_at_sites_with_plugins_is_the_local_one_bit_by_bit(folder: Path) -> None:
    done = call(at_sites, folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    ok("run", "mine.yaml", "--out", "local", "-q", cwd=folder)
    exported = sorted(folder.glob("site-*/state/**/adapter_model.safetensors"))
    assert [path.read_bytes() for path in exported] == weights(folder / "local") != []
