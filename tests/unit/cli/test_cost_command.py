"""`befit cost` as a person or a script calls it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.protocol.registry import method_names

runner = CliRunner()
LLAMA = ("--model", "llama-3.2-3b", "--targets", "q_proj,k_proj,v_proj", "--rank", "8", "--rounds", "600")


def call(*arguments, **options):
    return runner.invoke(app, ["cost", *map(str, arguments)], **options)


def read(*arguments):
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_one_method_is_one_object():
    """Potara on Commonsense (Zou et al. 2026, section 3.5): 50 rounds up, and one download more for the merge."""
    found = read(*LLAMA, "--method", "potara", "--set", "rounds_fedit=50")
    assert found["parameters"] == {"A": 2_064_384, "B": 1_146_880, "head": 0, "total": 3_211_264}
    assert found["upload_bytes_per_round"] == found["download_bytes_per_round"] == 12_845_056
    assert found["upload_bytes_total"] == 642_252_800
    assert found["download_bytes_total"] == 655_097_856
    assert found["backbone_parameters"] == 3_212_749_824
    assert found["adapted_modules"] == 84
    assert (found["dtype"], found["bytes_per_value"]) == ("float32", 4)
    assert found["arguments"]["rounds_fedit"] == 50


def test_the_generator_of_FedP2EFT_has_the_size_that_its_shapes_give():
    """All linear modules of Llama-3.2-3B, 32 ranks each; 4 bytes a number, once either way."""
    words = ("--model", "llama-3.2-3b", "--targets", "all", "--method", "fedp2eft", "--rounds", "150")
    found = read(*words)
    assert found["slots"]["generator"]["total"] == 5_259_869
    assert found["adapted_modules"] == 196 and found["slots"]["budgeted"]["lambda"] == 196 * 32
    assert found["upload_bytes_per_round"] == found["download_bytes_per_round"] == 4 * 5_259_869
    assert "beside it: search 6,272, generator 5,259,869" in call(*words).stdout
    # What an adapter is itself stands beside nothing.
    assert "beside it" not in call("--model", "digits-vit", "--method", "fedavg").stdout


def test_rounds_that_take_turns_are_counted_at_once_however_many_there_are():
    bytes_of = {n: read(*LLAMA[:-1], n, "--method", "rolora")["upload_bytes_total"] for n in (1, 2, 7, 10**12)}
    assert bytes_of[7] == 3 * bytes_of[2] + bytes_of[1] and 0 < bytes_of[1] < bytes_of[2]
    assert bytes_of[10**12] == 10**12 // 2 * bytes_of[2]


def test_several_methods_are_a_list_in_the_order_given():
    found = read(*LLAMA, "--method", "potara", "--method", "fedsa", "--set", "potara.rounds_fedit=50")
    assert [row["method"] for row in found] == ["potara", "fedsa"]
    assert found[1]["upload_saving"] == 1 - 4_954_521_600 / 642_252_800


def test_without_a_method_all_are_listed_the_dearest_first():
    found = read("--model", "digits-vit")
    sent = [row["upload_bytes_total"] for row in found]
    assert sent == sorted(sent, reverse=True)
    assert {"local", "fedit", "potara", "fedsa"} <= {row["method"] for row in found}


def rows_of(*arguments):
    """The rows of the first table by method, with single spaces, on a terminal of 80 columns."""
    done = call(*arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    start = next(index for index, line in enumerate(lines) if line.startswith("─"))
    rows = [" ".join(line.split()) for line in lines[start + 1 : lines.index("", start)]]
    return {row.partition(" ")[0]: row.partition(" ")[2] for row in rows}, done.stdout


def test_a_method_that_sends_more_says_how_many_times_as_much():
    assert " x 2.0 " in rows_of(*LLAMA, "--method", "scaffold")[0]["scaffold"]


def test_a_method_stands_beside_training_alone_the_usual_one_and_the_cheapest():
    rows, text = rows_of(*LLAMA, "--method", "fedsa")
    assert rows == {
        "fedsa": "3.21 M 8.26 MB 8.26 MB 4.95 GB −35.7% 1.00 1.00",
        "local": "3.21 M 0 B 0 B 0 B nothing 1.00 1.00",
        "fedit": "3.21 M 12.8 MB 12.8 MB 7.71 GB same 1.00 1.00",
        "fed_sb": "5.38 k 21.5 kB 21.5 kB 25.7 MB −99.7% 1.00 1.00",
    }
    assert "A 2,064,384, B 1,146,880" in text


def test_uploads_are_compared_by_the_round_where_rounds_differ():
    """The same bytes a round are no saving, though 50 rounds send less than 600."""
    rows, text = rows_of(*LLAMA, "--method", "potara", "--set", "rounds_fedit=50")
    assert rows["potara"] == "6.42 M 12.8 MB 12.8 MB 642 MB same 1.00 1.00"
    words = "Not all in the same number of rounds (potara: 50; others: 600): uploads against fedit are by the round."
    assert words in " ".join(text.split())
    assert "same number of rounds" not in rows_of("--model", "digits-vit", "--method", "potara")[1]


def test_all_methods_are_one_table():
    rows, _ = rows_of("--model", "llama-3.2-3b", "--all")
    assert rows.keys() == set(method_names())
    assert rows["fedavg"] == "3.21 G 12.9 GB 12.9 GB 129 GB x 1,401 2.50 2.00"


def test_a_single_method_shows_its_stages_and_all_clients():
    done = call(
        "--model", "digits-vit", "--method", "potara", "--labels", "10", "--clients", "3", "--set", "rounds_local=7"
    )
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "local 7 0 B 0 B" in lines
    assert "merge 1 0 B 35.4 kB" in lines  # 2 * 4,096 + 650 entries of 4 bytes
    assert "3 clients together" in lines


def test_differing_adapters_get_a_table_of_their_own():
    done = call("--model", "digits-vit", "--method", "fedit", "--method", "fedsa", "--set", "fedsa.rank=2")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["fedit", "4,096", "4,096"] in lines and ["fedsa", "1,024", "1,024"] in lines


def test_mistakes_are_one_message_and_code_2():
    done = call("--rounds", 0, "--clients", 0, "--labels", 0, "--targets", "q_proj,,", "--method", "potra")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("ConfigError: 6 problems in the command\n")
    for words in (
        "--model: is required",
        "--rounds: must be 1 or more, got 0",
        "--clients:",
        "--labels:",
        '--targets: must be names with commas between, such as q_proj,v_proj, got "q_proj,,"',
        "Did you mean: potara?",
    ):
        assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama-3.2-3b", "--labels", "3"), "causal-lm has no task head"),
        (("--model", "vit-b-16", "--head"), "--head: needs --labels"),
        (("--model", "llama-3.2-3b", "--targets", "q_prj"), "Did you mean: q_proj?"),
        (("--model", "no/such"), "nothing is fetched"),
        (("--model", "mbert", "--method", "fedalt", "--clients", "1"), "at least 2, got 1"),
    ],
)
def test_a_mistake_says_what_to_do(arguments, words):
    done = call("--method", "fedit", *arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert words in " ".join(done.stderr.split())


def test_a_language_model_can_be_a_classifier():
    found = read("--model", "qwen2.5-0.5b", "--task", "text-classification", "--labels", "5", "--method", "fedit")
    assert found["parameters"]["head"] == 5 * 896
    # The head takes the place of the output embedding, which is the input embedding anyway.
    assert found["backbone_parameters"] == 494_032_768 + 5 * 896


def test_the_built_in_models_are_listed():
    assert "Qwen/Qwen3-4B-Instruct-2507" in call("--models", env={"COLUMNS": "120"}).stdout
    found = json.loads(call("--models", "--json").stdout)
    assert len(found) == 16
    assert next(one for one in found if one["name"] == "mbert")["config"]["vocab_size"] == 119_547


def test_the_list_of_models_loads_nothing_heavy():
    """What help loads is for test_cli.py."""
    code = (
        "import sys\nfrom befit.cli.main import app\n"
        "try: app(['cost', '--models'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_download_that_grows_with_the_clients_is_said_to():
    llama = ("--model", "llama-3.2-3b", "--method", "flora", "--method", "fedit", "--rounds", "2")
    said = "Downloads of flora grow with the clients that reply in a round, here"
    assert f"{said} one client (see --clients)." in " ".join(call(*llama).stdout.split())
    assert f"{said} all 10 clients." in " ".join(call(*llama, "--clients", "10").stdout.split())
    flora, fedit = read(*llama)
    assert fedit["download_bytes_per_reply"] == 0
    assert flora["download_bytes_per_reply"] == flora["upload_bytes_per_round"]
