"""The commands on a real, very short run."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.cli.run import other_seeds
from befit.config.experiment import to_dict
from befit.config.load import load_experiment
from befit.core.storage import read_sealed
from befit.core.yamlfile import parse_yaml
from befit.report import write_report
from befit.report.numbers import gain_text

CONFIGS = Path(__file__).parents[3] / "configs"
DEMO = Path(__file__).parents[3] / "src" / "befit" / "cli" / "demo.yaml"
SHORT = (
    "limit.clients=4",
    "limit.records=24",
    "federation.rounds=2",
    "method.rounds_local=1",
    "baselines=[local]",
    "baselines.0.rounds=1",
    "evaluate.every=1",
)

runner = CliRunner()


def call(*words):
    return runner.invoke(app, [str(one) for one in words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run through the command line, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "short"
    done = call("run", CONFIGS / "digits-potara.yaml", *SHORT, "--out", out, "--json")
    assert done.exit_code == 0, done.stderr
    return out, done


def test_a_run_prints_its_results_and_nothing_else(finished):
    out, done = finished
    printed = json.loads(done.stdout)
    assert printed["path"] == str(out)
    assert printed["results"] == read_sealed(out / "results.json")
    assert len(printed["results"]["clients"]) == 4
    assert "potara" in done.stderr and "elapsed" in done.stderr


def test_a_finished_directory_is_not_overwritten_but_resumes_to_itself(finished):
    out, done = finished
    words = ("run", CONFIGS / "digits-potara.yaml", *SHORT, "--out", out)
    before = (out / "results.json").read_bytes()
    again = call(*words)
    assert again.exit_code == 2 and "--resume" in again.stderr
    resumed = call(*words, "--resume", "--json")
    assert json.loads(resumed.stdout) == json.loads(done.stdout) and "from nothing" not in resumed.stderr
    assert (out / "results.json").read_bytes() == before


def test_resuming_what_was_never_begun_says_that_it_starts(finished, tmp_path):
    words = (
        "run",
        CONFIGS / "digits-potara.yaml",
        "limit.records=24",
        "federation.rounds=2",
        "method=fedit",
        "baselines=[]",
    )
    words = (*words, "evaluate.every=1", "limit.clients=2")
    begun = call(*words, "--out", tmp_path / "typo", "--resume", "--json")
    assert begun.exit_code == 0 and "typo holds no run to go on with: it starts from nothing" in begun.stderr


def test_the_hint_after_an_interrupt_resumes_the_run(finished):
    """The saved configuration counts as the same one, from any folder."""
    out, done = finished
    again = call("run", out / "config.yaml", "--out", out, "--resume", "--json", "--quiet")
    assert json.loads(again.stdout) == json.loads(done.stdout)


def test_a_baseline_that_is_finished_is_shown_as_done_after_resuming(finished, tmp_path):
    out, done = finished
    unfinished = tmp_path / "unfinished"
    shutil.copytree(out, unfinished)
    for name in ("report.html", "results.json", "method.json"):
        (unfinished / name).unlink()
    again = call("run", unfinished / "config.yaml", "--out", unfinished, "--resume", "--json")
    assert again.exit_code == 0 and "local · done, by an earlier process" in again.stderr
    scores = [one["results"]["summary"]["mean"] for one in (json.loads(again.stdout), json.loads(done.stdout))]
    assert scores[0] == scores[1]


def test_a_report_is_written_again_with_its_plots(finished, tmp_path):
    """To the same bytes, whether the run drew them or not."""
    out, _ = finished
    again = tmp_path / "again"
    shutil.copytree(out, again)
    write_report(again, plots=False)
    assert "<svg" not in (again / "report.html").read_text()
    done = call("report", again)
    assert done.exit_code == 0 and "report.html" in done.stdout.replace("\n", "")
    assert (again / "report.html").read_bytes() == (out / "report.html").read_bytes()
    assert call("report", tmp_path / "none").exit_code == 2


def test_people_get_tables_a_headline_and_paths(finished):
    out, _ = finished
    text = call("run", out / "config.yaml", "--out", out, "--resume", "--quiet").stdout
    for word in ("client-00", "client-03", "report.html", "results.json", "adapter"):
        assert word in text.replace("\n", "")


def test_an_adapter_is_exported_and_answers(finished, tmp_path):
    import numpy as np

    out, _ = finished
    target = tmp_path / "adapter"
    exported = call("export", out, "--client", "client-03", "--out", target, "--json")
    assert json.loads(exported.stdout)["path"] == str(target)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {one.name for one in target.iterdir()}
    assert call("export", out, "--client", "client-03", "--out", target).exit_code == 2
    image = tmp_path / "digit.npy"
    np.save(image, np.zeros((8, 8), np.float32))
    (answer,) = json.loads(call("predict", out, "--client", "client-03", image, "--json").stdout)
    assert str(answer["answer"]) in "0123456789"


@pytest.mark.parametrize("command", ["export", "predict"])
def test_an_unknown_client_is_named_with_the_one_that_was_meant(finished, tmp_path, command):
    out, _ = finished
    words = ("--out", tmp_path / "x") if command == "export" else ("text",)
    done = call(command, out, "--client", "client-3", *words)
    assert done.exit_code == 2 and "Did you mean: client-03?" in done.stderr


def test_check_estimates_without_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(call("check", CONFIGS / "digits-potara.yaml", "--json").stdout)
    assert found["clients"] == 10 and found["baselines"] == ["local", "fedit"]
    assert [(one["run"], one["rounds"]) for one in found["stages"] if one["uplink"]] == [("potara", 60), ("fedit", 60)]
    text = call("check", CONFIGS / "digits-potara.yaml").stdout
    assert "no mistakes" in text and f"{found['trainable_parameters']:,} parameters" in text
    assert list(tmp_path.iterdir()) == []


def test_benchmarks_are_listed_with_their_arguments():
    listed = {one["name"]: one for one in json.loads(call("benchmarks", "--json").stdout)}
    arguments = {one["name"]: one for one in listed["digits"]["arguments"]}
    assert arguments["clients"]["default"] == 10
    assert call("benchmarks", "").exit_code == 2
    every = call("benchmarks").stdout
    assert all(name in every for name in listed)  # no name is cut, however narrow the terminal
    one = call("benchmarks", "digits").stdout
    assert "clients" in one and "digits-vit" in one and "skills" not in one
    assert call("benchmarks", "digit").exit_code == 2


def test_benchmark_arguments_are_checked_with_the_rest():
    done = call(
        "check",
        CONFIGS / "digits-potara.yaml",
        "benchmark.cleints=3",
        "benchmark.alpha=a",
        "train.lr=0",
        "benchmark.version=99",
    )
    assert done.exit_code == 2
    for problem in (
        "4 problems",
        "benchmark.cleints: unknown key for digits. Did you mean: clients?",
        'benchmark.alpha: must be a number, got "a"',
        "benchmark.version: digits is at version",
        "train.lr: must be",
    ):
        assert problem in done.stderr


def test_the_demo_is_the_documented_experiment():
    shipped = load_experiment(parse_yaml(DEMO.read_text()), ["name=same"])
    assert shipped == load_experiment(CONFIGS / "scanners.yaml", ["name=same"])


def test_what_the_demo_says_of_other_seeds_is_the_published_study_of_its_settings():
    """Study and demo have the same blocks; the sentence has the study's numbers."""
    root = Path(__file__).parents[3]
    demo, study = (parse_yaml(path.read_text()) for path in (DEMO, root / "studies" / "offline" / "scanners.yaml"))
    for block in ("model", "train"):
        assert demo[block] == study["base"][block]
    assert {**demo["benchmark"], "seed": None} == {**study["base"]["benchmark"], "seed": None}
    assert demo["federation"]["rounds"] == study["base"]["federation"]["rounds"]
    rows = [study["runs"][label] for label in ("Local", "FedIT", "Potara")]
    assert demo["baselines"] == [{"name": row} if isinstance(row, str) else row["method"] for row in rows]
    assert demo["method"] == {**study["base"]["method"], "name": study["runs"]["FedDPA"]}
    assert demo["benchmark"]["seed"] not in study["seeds"]
    published = json.loads((root / "benchmarks" / "results" / "offline_scanners.json").read_text())
    against = {run["label"]: run["against"] for run in published["runs"]}
    said = other_seeds()
    assert published["seeds"] == study["seeds"] and "over 20 other seeds (1 to 20)" in said
    for label in ("FedIT", "Potara", "FedDPA"):
        assert f"{label} {gain_text(against[label]['t']['mean'], 'accuracy')} points" in said
        assert f"{against[label]['signed']['better'] / 20:.1f} of 10 sites gained" in said


def test_the_demo_goes_on_where_it_was_interrupted_and_shows_a_finished_one_again(finished, tmp_path, monkeypatch):
    """The same command each time; another seed is another run. The experiment is a short one in place of the demo's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "befit.cli.run.demo_config",
        lambda seed: to_dict(load_experiment(CONFIGS / "digits-potara.yaml", [*SHORT, f"federation.seed={seed}"])),
    )
    shutil.copytree(finished[0], "runs/demo")
    whole = read_sealed(Path("runs/demo/results.json"))
    for name in ("report.html", "results.json", "method.json"):
        Path("runs/demo", name).unlink()
    on = call("demo")
    assert on.exit_code == 0 and read_sealed(Path("runs/demo/results.json"))["clients"] == whole["clients"]
    assert "already" not in on.stderr and other_seeds()[:30] in on.stdout
    again = call("demo")
    assert again.stdout == on.stdout and "runs/demo holds this run already" in again.stderr

    monkeypatch.setattr("befit.runs.runner.run", interrupt)
    stopped = call("demo", "--seed", "3")
    assert stopped.exit_code == 130 and "nothing was saved in runs/demo-3 yet" in stopped.stderr
    stopped = call("demo", "--out", "runs/demo", "-q")
    assert stopped.exit_code == 130 and "resume with: befit demo --out runs/demo\n" in stopped.stderr


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_the_report_of_a_comparison_is_its_own_page(tmp_path):
    (tmp_path / "compare.html").write_text("")
    told = call("report", tmp_path)
    assert told.exit_code == 2 and f"open {tmp_path / 'compare.html'}" in told.stderr.replace("\n  ", " ")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_of_the_repository_is_accepted(path):
    experiment = load_experiment(path)
    assert load_experiment(experiment) == experiment
    to_be_copied = {"files-example": "my-clients", "choices-example": "my-questions"}
    assert experiment.name == to_be_copied.get(path.stem, path.stem)


def test_what_is_found_wrong_after_a_configuration_was_read_names_its_file_too(tmp_path):
    mine = tmp_path / "mine.yaml"
    shutil.copy(CONFIGS / "digits-potara.yaml", mine)
    for command in ("run", "check"):
        done = call(command, mine, "federation.min_replies=50")
        assert done.exit_code == 2 and f"1 problem in {mine}\n  federation.min_replies: " in done.stderr


def test_a_trial_of_a_study_is_sent_to_the_command_with_its_option():
    study = Path(__file__).parents[3] / "studies" / "offline" / "digits.yaml"
    done = call("run", study, "--trial")
    assert done.exit_code != 0 and f"befit compare {study} --trial" in " ".join(done.stderr.split())


@pytest.mark.parametrize("words", [("run", "method=local"), ("compare", "--methods", "local,fedit", "--seeds", "0")])
def test_a_directory_below_a_file_is_refused_by_name(words, tmp_path):
    (tmp_path / "notes").write_text("mine")
    name, *more = words
    done = call(name, CONFIGS / "digits-potara.yaml", *more, "--out", tmp_path / "notes" / "run")
    assert done.exit_code == 2, done.output
    said = done.stderr.replace("\n", "")
    assert str(tmp_path / "notes") in said and str(tmp_path / "notes" / "run") not in said
    assert (tmp_path / "notes").read_text() == "mine"
