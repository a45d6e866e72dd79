"""The command line: what it prints where, and how it ends."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from befit.cli.inspect import _check_rows
from befit.cli.main import app, exit_code, explain_error
from befit.cli.output import make_table, print_json, progress_to, say, screen, show_table, training, warnings_to
from befit.core.errors import ConfigError, DataError, NotEnoughReplies, PayloadMismatch, RunError
from befit.core.text import PROGRESS
from befit.report.table import Table
from befit.runs.provenance import locked
from tests import processes
from tests.unit.models.tiny_models import save_bert

runner = CliRunner()


def call(*arguments, **options):
    return runner.invoke(app, [str(one) for one in arguments], **options)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("method: fedit\nmodel: {id: m}\ndata: {task: causal-lm, clients: {a: a.jsonl}}\n")
    return path


def test_help_loads_nothing_heavy():
    """Of one command after the other, in one new process: what the first of them loads is there for the others."""
    commands = ["", "run", "demo", "check", "explain", "export", "predict", "ablate", "merge", "cost"]
    code = f"""
import sys
from befit.cli.main import app
for command in {commands}:
    try: app([*command.split(), '--help'])
    except SystemExit as end: assert end.code == 0, (command, end.code)
    heavy = {{'torch', 'transformers', 'yaml', 'numpy', 'sklearn', 'matplotlib', 'peft'}} & sys.modules.keys()
    assert not heavy, (command, heavy)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(commands)


def test_every_command_is_listed_with_what_it_does():
    text = call("--help").output
    for command in ("demo", "run", "check", "methods", "benchmarks", "explain", "export", "predict"):
        assert f"│ {command} " in text


def test_help_is_wrapped_by_the_terminal_alone():
    """typer keeps the line ends of all paragraphs but the first, and those of the source are none of a reader's."""
    for command in app.registered_commands:
        assert command.help and not re.search(r"[^\n]\n[^\n]", command.help), command.name


def test_the_version_is_the_package_s():
    from befit.core.version import __version__

    assert call("--version").stdout == f"befit {__version__}\n"


def test_a_user_s_mistake_is_one_message_and_code_2(config):
    done = call("run", config, "train.max_step=3", "method=fedsaa")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"ConfigError: 2 problems in {config}\n")
    assert "train.max_step: unknown key for train. Did you mean: max_steps?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("run",), ("check",), ("compare",), ("ablate", "weights")])
def test_a_key_is_set_once(config, words):
    done = call(*words, config, "method.rank=2", "train.lr=0.1", "method.rank=4")
    assert done.exit_code == 2 and "method.rank: is there twice, as 2 and as 4" in done.stderr


def test_only_a_study_is_checked_without_its_data(config):
    done = call("check", config, "--no-data")
    assert done.exit_code == 2 and "--no-data: is for a study" in done.stderr


def test_a_missing_file_is_a_user_s_mistake(tmp_path):
    done = call("check", tmp_path / "none.yaml")
    assert done.exit_code == 2 and "none.yaml" in done.stderr


def test_an_unknown_command_or_option_is_a_user_s_mistake(config):
    assert call("rnu").exit_code == 2
    assert call("run", config, "--resum").exit_code == 2


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback_wherever_it_stands(tmp_path, place):
    missing = tmp_path / "none.yaml"
    done = call("--debug", "check", missing) if place == "before" else call("check", missing, "--debug")
    assert isinstance(done.exception, ConfigError)


def test_messages_are_not_read_as_markup(config):
    assert 'got "[red]x[/red]"' in call("run", config, "name='[red]x[/red]'").stderr


def test_codes_tell_the_user_s_mistakes_from_the_world_s():
    full_disk = RunError("cannot write")
    full_disk.__cause__ = OSError(28, "No space left on device")
    missing = RunError("no such run")
    missing.__cause__ = FileNotFoundError(2, "No such file")
    codes = [
        exit_code(error)
        for error in (
            ConfigError(["x"]),
            DataError("x"),
            PayloadMismatch("x"),
            RunError("x"),
            missing,
            full_disk,
            NotEnoughReplies("x"),
            OSError(28, "x"),
            ValueError("a defect"),
        )
    ]
    assert codes == [2, 2, 2, 2, 2, 1, 1, 1, 1]


def test_a_full_disk_is_the_world_s(config, monkeypatch):
    import befit.config.load as module

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "load_experiment", full)
    done = call("run", config)
    assert done.exit_code == 1 and "No space left on device" in done.stderr and done.stdout == ""


def test_a_defect_is_said_to_be_one_and_shown_with_debug(config, monkeypatch):
    import befit.config.load as module

    monkeypatch.setattr(module, "load_experiment", lambda *_: 1 / 0)
    done = call("run", config)
    assert done.exit_code == 1 and done.stdout == ""
    assert "ZeroDivisionError" in done.stderr and "--debug" in done.stderr and "Traceback" not in done.stderr
    assert isinstance(call("run", config, "--debug").exception, ZeroDivisionError)


def test_methods_as_json_is_pure_json():
    done = call("methods", "--json")
    methods = {one["name"]: one for one in json.loads(done.stdout)}
    assert {"local", "fedit", "fedsa", "ditto", "fedalt", "potara"} <= methods.keys()
    assert methods["fedsa"]["paper"] == "arXiv:2410.01463"


def test_the_table_of_methods_names_every_one_with_its_paper():
    text = call("methods").stdout
    for word in ("potara", "arXiv:2602.18658", "Ditto", "2021"):
        assert word in text


def test_explain_shows_source_arguments_and_defaults():
    text = call("explain", "potara").stdout
    for word in ("arXiv:2602.18658", "granularity", '"factors"'):
        assert word in text
    assert text.count("rounds_local") == 1  # the table of the docstring is not printed a second time


def test_an_argument_of_a_method_is_explained_with_the_method():
    done = call("explain", "interpolation.w")
    assert done.exit_code == 2 and "interpolation.w: arguments" in done.stderr
    assert "befit explain interpolation" in done.stderr


def test_explain_as_json_has_types_and_defaults():
    parameters = {one["name"]: one for one in json.loads(call("explain", "fedit", "--json").stdout)["parameters"]}
    assert (parameters["rank"]["type"], parameters["rank"]["default"]) == ("a whole number", 8)
    assert parameters["weights"]["type"] == "one of examples, uniform"


def test_explain_says_what_travels_and_what_is_needed():
    told = json.loads(call("explain", "fedalt", "--json").stdout)
    assert set(told["travels"]) >= {"up", "down", "stages"}
    assert "What travels" in call("explain", "fedalt").stdout
    needs = told["needs"]
    assert needs == ["at least 2 clients", "individual updates"]
    assert f"Needs {', '.join(needs)}." in call("explain", "fedalt").stdout


def test_explain_suggests_the_method_that_was_meant():
    done = call("explain", "potarra")
    assert done.exit_code == 2 and "Did you mean: potara?" in done.stderr
    other = call("explain", "ablate")
    assert other.exit_code == 2 and "'ablate' is neither a method nor a key of the configuration" in other.stderr


def test_an_interrupt_says_how_to_go_on(config, tmp_path, monkeypatch):
    import importlib

    running = importlib.import_module("befit.runs.runner")
    out = tmp_path / "my run"

    def interrupted(*_, out, **__):
        out.mkdir()
        (out / "config.yaml").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run", interrupted)
    done = call("run", config, "--out", out, "--json")
    assert done.exit_code == 130 and done.stdout == ""
    assert f"resume with: befit run '{out}/config.yaml' --out '{out}' --resume" in done.stderr


def test_choosing_a_model_says_how_to_go_on_too(config, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("befit.studies.select.choose_models", interrupted)
    done = call("select", config, "--json")
    assert done.exit_code == 130 and done.stdout == ""
    assert "interrupted; the same command continues where it stopped" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_is_an_interrupt_with_its_own_exit_code(number, capsys):
    before = signal.signal(number, signal.SIG_DFL)  # whatever nohup made of it
    with training(False, True, lambda: "go on"):
        assert signal.getsignal(number) is not signal.SIG_DFL
    assert signal.getsignal(number) is signal.SIG_DFL
    with pytest.raises(typer.Exit) as ended, training(False, True, lambda: "go on"):
        os.kill(os.getpid(), number)
        threading.Event().wait(5)
    assert ended.value.exit_code == 128 + number and "go on" in capsys.readouterr().err
    assert signal.signal(number, before) is signal.SIG_DFL


def stopped_twice():
    with training(False, True, lambda: "go on"):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(5)
        finally:  # as long as cleaning up may take
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(5)


def test_a_second_signal_ends_the_process_at_once():
    assert processes.call(stopped_twice).returncode == -signal.SIGTERM


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with training(False, True, lambda: "go on"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_texts_from_files_cannot_act_on_the_terminal(tmp_path, capsys):
    label = "a\x1b[2J\u202eb"
    explain_error(DataError(f"no column {label}\n  there are others"))
    say(f"answer {label}")
    show_table(screen(), Table(label, ["answer"], [[label]]))
    shown = capsys.readouterr()
    for text in (shown.err, shown.out):
        assert "a\\x1b[2J\\u202eb" in text and "\x1b" not in text and "\u202e" not in text
    assert shown.err.endswith("\n  there are others\n")
    print_json({"label": label})
    assert json.loads(capsys.readouterr().out) == {"label": label}


@pytest.mark.parametrize("given", ["", "\n  \n"])
def test_no_inputs_are_a_user_s_mistake(tmp_path, given):
    done = call("predict", tmp_path, "--client", "a", "-", input=given)
    assert done.exit_code == 2 and done.stdout == "" and "standard input" in done.stderr


@pytest.fixture
def repetitive(tmp_path):
    """An experiment whose clients test on what they train on."""
    save_bert(tmp_path / "bert")
    rows = [{"text": f"{word} film", "label": label} for word, label in (("good", "pos"), ("bad", "neg"))] * 10
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {id: ./bert, max_length: 20}\nmethod: {name: fedit}\n"
        "data: {task: text-classification, clients: {a: a.jsonl}}\n"
    )
    return path


def test_warnings_about_the_data_are_part_of_a_check(repetitive):
    done = call("check", repetitive, "--json")
    (warning,) = [one for one in json.loads(done.stdout)["warnings"] if "also in their client's training data" in one]
    assert done.stderr == ""
    assert f"warning: {warning}\n" in call("check", repetitive).stderr


def test_a_check_shows_every_client_s_records_and_classes_in_80_columns(repetitive):
    done = call("check", repetitive, env={"COLUMNS": "80"})
    assert [line.split() for line in done.stdout.splitlines() if line.startswith("a  ")] == [
        ["a", "14", "2", "4", "neg:", "7,", "pos:", "7"]
    ]
    assert max(map(len, done.stdout.splitlines()[2:])) <= 80
    (client,) = json.loads(call("check", repetitive, "--json").stdout)["data"]["clients"]
    assert client["counts"]["train"] == {"pos": 7, "neg": 7}


def test_a_mistake_in_the_settings_is_told_before_any_data_is_read(repetitive):
    (repetitive.parent / "a.jsonl").write_text("no data at all")
    done = call("check", repetitive, "train.learning_rate=1")
    assert done.exit_code == 2 and "write train.lr" in done.stderr and "a.jsonl" not in done.stderr


@pytest.mark.parametrize(
    ("path", "texts"), [("train.lr", ["0.001"]), ("train", ["lr_end", "For example", "max_steps"])]
)
def test_a_key_or_block_is_explained(path, texts):
    done = call("explain", path)
    assert done.exit_code == 0 and all(text in done.stdout for text in texts)
    assert json.loads(call("explain", path, "--json").stdout)["key"] == path


@pytest.mark.parametrize("path", ["train.learning_rate", "learning_rate", "lr"])
def test_a_key_that_is_elsewhere_is_pointed_to(path):
    done = call("explain", path)
    assert done.exit_code == 2 and "write train.lr" in done.stderr


def test_an_unknown_command_is_suggested_once():
    assert call("chekc").stderr.count("Did you mean") == 1


def test_a_folder_that_cannot_be_made_is_named():
    message = r"cannot write /proc/befit: .*; name another folder"
    with pytest.raises(RunError, match=message), locked(Path("/proc/befit")):
        pass


def test_what_takes_long_is_said_only_while_somebody_looks():
    console, logger = Console(file=io.StringIO(), width=80), logging.getLogger(PROGRESS)
    with progress_to(console):
        logger.info("reading %s", "north")
    logger.info("reading %s", "south")
    assert console.file.getvalue() == "reading north\n"  # type: ignore[attr-defined]


def test_the_schema_is_json():
    assert json.loads(call("schema").stdout)["properties"]["train"]


def test_warnings_about_the_data_stand_beside_a_refusal(repetitive):
    done = call("check", repetitive, "model.max_length=1", "--json")
    assert done.exit_code == 2 and json.loads(done.stdout).keys() == {"error"}
    first, second, *_ = done.stderr.splitlines()
    assert first.startswith("warning: ") and second.startswith("ConfigError: ")


def test_a_warning_is_shown_once_and_not_where_progress_shows_it():
    console = Console(file=io.StringIO(), width=80)
    with warnings_to(console, but=("befit.runs.journal",)):
        for _ in range(3):
            logging.getLogger("befit.methods.potara").warning("client %s is small", "[b]c0")
        logging.getLogger("befit.runs.journal").warning("left out")
        logging.getLogger("befit.models").info("a detail")
    logging.getLogger("befit").warning("after")
    assert console.file.getvalue() == "warning: client [b]c0 is small\n"  # type: ignore[attr-defined]


def test_json_has_no_nan(capsys):
    print_json({"loss": float("nan"), "rows": [float("inf"), 1.5, (1, "x")]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "rows": [None, 1.5, [1, "x"]]}


def printed(table, width=80, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(make_table(table, width=width, **options))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_long_text_wraps_without_being_asked_to_so_that_the_table_stays_in_one_piece():
    names = ["above-both", "shown"]
    lines = printed(
        Table("", ["claim", "contrast", "mean", "verdict"], [[names[0], "merged - other " * 5, 1.5, names[1]]])
    )
    assert sum(line.startswith("claim") for line in lines) == 1 and max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count("merged") == 5


def test_a_text_that_begins_with_a_number_is_set_to_the_left_where_it_wraps():
    table = Table("", ["client", "label in train"], [["north", "8 21, 4 11"], ["south", "7 8"]])
    assert printed(table, wrap=1)[-1] == "south   7 8"
    assert printed(table)[-1] == "south              7 8"


@pytest.mark.parametrize("width", [72, 80, 120])
def test_a_table_keeps_every_cell_whole(width):
    headers = ["", "mean accuracy", "std", "worst client", "FedIT's gain", "clients ahead", "client time"]
    cells = ["Local", "81.3%", "6.2", "71.4% (client-04)", "-14.1 ± 1.9", "0 of 10", "2.1 s"]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(make_table(Table("", headers, [cells]), width=width))
    *_, row = console.export_text().splitlines()
    assert row.split() == " ".join(cells).split()


@pytest.mark.parametrize("width", [24, 60, 80])
def test_columns_that_do_not_fit_go_below_with_the_names_before_them_again(width):
    headers = ["client", "language", *(f"LoRA {k}" for k in range(9)), "saved"]
    rows = [["ar-0", "ar", *(f"{3_212_749_824 + k:,}" for k in range(9)), "100.0 %"], ["ar-1", "ar", *"123456789", "-"]]
    console = Console(width=width, record=True, file=io.StringIO())
    show_table(console, Table("Clients", headers, rows))
    lines = console.export_text().splitlines()
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and lines[0].split() == ["Clients"]
    for number in rows[0][2:]:
        (line,) = [one for one in lines if number in one]
        assert line.split()[0] == "ar-0"
    assert text.count("ar-0") == text.count("ar-1") == sum(set(line) == {"─"} for line in lines)
    assert {f"LoRA{k}" for k in range(9)} <= {one.strip() for one in text.replace("LoRA ", "LoRA").split()}


def test_a_name_longer_than_the_terminal_is_whole():
    console = Console(width=30, record=True, file=io.StringIO())
    show_table(console, Table("", ["client", "score"], [("client-" * 6, "81.25 %")]))
    assert "client-" * 6 + "  81.25 %" in console.export_text()


def test_a_client_s_name_is_not_markup():
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(make_table(Table("", ["client", "score"], [("[red]c[/red]", "0.5")])))
    assert "[red]c[/red]" in console.export_text()


def test_bytes_of_a_clients_run_are_those_of_every_round_which_a_cohort_does_not_have():
    found = {
        "method": "fedit",
        "baselines": [],
        "clients": 3,
        "cohort": 2,
        "train_examples": 9,
        "families": [],
        "model": "m",
        "backbone_parameters": 1,
        "trainable_parameters": 1,
        "adapted_modules": 1,
        "memory_mib": 1.0,
        "memory_parts_mib": {},
        "opening_mib": 0.0,
        "privacy": {},
        "bytes_up_per_round": 1,
        "bytes_down_per_round": 1,
        "bytes_up_total": 2,
        "bytes_down_total": 2,
    }
    assert dict(_check_rows(found))["a client's run"].endswith("down, if it takes part in every round")
    assert dict(_check_rows({**found, "cohort": None}))["a client's run"].endswith("down")


@pytest.mark.parametrize("words", [("run",), ("check",), ("compare",), ("partition",), ("explain",)])
def test_with_json_an_error_is_an_object_and_the_code_is_kept(tmp_path, words):
    done = call(*words, tmp_path / "none.yaml", "--json")
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == 2 and error["kind"] and error["message"] in done.stderr
    refused = call(*words, tmp_path / "none.yaml", "--json", "--no-such-option")
    assert refused.exit_code == 2
    error = json.loads(refused.stdout)["error"]
    assert "--no-such-option" in error["message"] and error["problems"] == [error["message"]]


def test_problems_of_a_configuration_are_a_list_in_json(config):
    done = call("run", config, "train.max_step=3", "method=fedsaa", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "ConfigError" and len(error["problems"]) == 2
    assert error["problems"][1] in error["message"]


def test_a_study_is_for_compare(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("study: {title: x}\nbase: {method: fedit}\nruns: {A: local}\n")
    done = call("run", path)
    assert done.exit_code == 2 and f"this is a study, which names runs to compare: befit compare {path}" in done.stderr
