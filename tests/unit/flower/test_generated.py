"""What befit writes for a federation: the app, certificates, keys, and the commands of docs/flower.md."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import shlex
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from befit.cli.main import app
from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, ModelError, RunError
from befit.flower.app_folder import write_app
from befit.flower.consortium import load_consortium
from befit.flower.doctor_server import servers_app
from befit.flower.keys import write_certificates, write_site_keys
from befit.flower.site_file import load_site
from befit.protocol.registry import method_names
from tests.unit.models.tiny_models import save_bert

ROOT = Path(__file__).parents[3]
Make = Callable[..., Experiment]


def invoke(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_app_is_what_flower_accepts_and_holds_the_same_experiment(experiment: Make, tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk  # what `flwr run` does first

    clients = write_app(experiment(), tmp_path / "app", tmp_path / "run")
    assert clients == ["client-00", "client-01"]
    assert build_fab_from_disk(tmp_path / "app")
    held = load_experiment(tmp_path / "app" / "befit_app" / "experiment.yaml")
    assert held.method == experiment().method and held.engine.kind == "flower"
    settings = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert settings == {"out": str(tmp_path / "run"), "resume": False, "insecure": False}


def test_no_path_of_the_users_data_goes_into_the_app(tmp_path: Path) -> None:
    values = {
        "name": "own",
        "model": {"id": "names-bert-fl"},
        "method": "fedit",
        "engine": {"kind": "flower"},
        "data": {"task": "text-classification", "label_names": ["a", "b"], "clients": {"x": "secret/place"}},
    }
    assert write_app(load_experiment(values), tmp_path / "app", tmp_path / "run") == ["x"]
    assert all("secret" not in path.read_text() for path in (tmp_path / "app").rglob("*.*"))


def test_data_that_only_sites_could_list_is_refused(tmp_path: Path) -> None:
    values = {
        "name": "own",
        "model": {"id": "digits-vit"},
        "method": "fedit",
        "engine": {"kind": "flower"},
        "data": {"task": "text-classification", "clients": "data"},
    }
    with pytest.raises(ConfigError) as refused:
        write_app(load_experiment(values), tmp_path / "app", tmp_path / "run")
    assert [problem.split(":")[0] for problem in refused.value.problems] == ["data.clients", "data.label_names"]
    assert not (tmp_path / "app").exists()


def test_the_server_has_what_it_reads_of_every_familys_model_or_nothing_starts(tmp_path: Path) -> None:
    values = {"benchmark": "digits-vqa-hetero", "method": "fedit", "engine": {"kind": "flower"}}
    assert len(write_app(load_experiment(values), tmp_path / "app", tmp_path / "run")) == 10
    (finding, *_) = servers_app(tmp_path / "app")
    assert "digits-llava-l" in finding.found and "digits-llava-s" in finding.found
    values |= {"model": {"id": "digits-llava-l"}}
    values |= {"families": {"small": {"clients": ["size=small"], "model": {"id": "./nowhere"}}}}
    with pytest.raises(ModelError, match=r"the server needs the model itself.*nowhere"):
        write_app(load_experiment(values), tmp_path / "other", tmp_path / "run")
    assert not (tmp_path / "other").exists()


def test_a_local_run_of_a_configuration_for_flower_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("benchmark: digits\nmethod: fedit\nengine: {kind: flower}\n")
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(tmp_path / "run")])
    assert done.exit_code == 2 and "befit flower app CONFIG --out DIR" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_certificates_name_the_hosts_and_the_authority_signs_nothing_more(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["server.example", "10.0.0.7"])
    ca, server = (x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in ("ca.crt", "server.crt"))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.7")]
    server.verify_directly_issued_by(ca)
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert server.not_valid_before_utc < datetime.datetime.now(datetime.UTC) < server.not_valid_after_utc
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "server.crt", "server.key"]


def test_keys_belong_together_and_are_never_overwritten(tmp_path: Path) -> None:
    write_site_keys(tmp_path)
    private = load_ssh_private_key((tmp_path / "site.key").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "site.pub").read_bytes())
    assert private.public_key() == public
    assert stat.S_IMODE((tmp_path / "site.key").stat().st_mode) == 0o600
    before = (tmp_path / "site.key").read_bytes()
    with pytest.raises(RunError, match="not overwritten"):
        write_site_keys(tmp_path)
    assert (tmp_path / "site.key").read_bytes() == before


def test_node_config_explains_every_key_and_checks_the_file(sites: list[Path], tmp_path: Path) -> None:
    found = json.loads(invoke("flower", "node-config", str(sites[0]), "--server", "host:1", "--json"))
    assert found["site"]["client"] == "client-00" and all(key["means"] for key in found["keys"].values())
    words = shlex.split(found["command"])
    assert "--insecure" not in words and {"--root-certificates", "--auth-supernode-private-key"} <= set(words)
    sites[0].write_text("client: a\n")
    invoke("flower", "node-config", str(sites[0]), code=2)
    assert "client: hospital-a" in invoke("flower", "node-config", str(tmp_path / "none.yaml"))


def test_node_config_says_in_words_what_a_site_agrees_to(tmp_path: Path) -> None:
    """For every method what leaves and what its file lacks for it; for a run, or its app folder, whether it would take
    part and everything that it would refuse."""
    site, run = tmp_path / "site.yaml", tmp_path / "run.yaml"
    site.write_text("client: client-00\nmodels: {digits-vit: digits-vit}\nbenchmarks: [digits]\n")
    told = json.loads(invoke("flower", "node-config", str(site), "--json"))
    assert told["keys"]["limits.min_records"]["means"] and told["site"]["limits"]["min_records"] == 10
    lacks = {one["method"]: one["mend"] for one in told["consent"]["methods"]}
    assert lacks.keys() == set(method_names()) and lacks["ditto"] == "" and lacks["fedalt"] == "shares: [personal]"
    assert len(told["consent"]["always"]) == 4 and told["consent"]["refused"] == []
    block = "{name: ditto, legacy_average_personal: true}"
    run.write_text(f"benchmark: {{name: digits, clients: 2}}\nmethod: {block}\ntrain: {{max_steps: 20000}}\n")
    told = json.loads(invoke("flower", "node-config", str(site), "--run", str(run), "--json", code=2))["consent"]
    assert [(one["method"], one["updates"]) for one in told["methods"]] == [("ditto", 10), ("local", 0)]
    assert "personal" in told["methods"][0]["leaves"] and told["methods"][1]["leaves"] == "nothing"
    assert [problem.split(":")[0] for problem in told["refused"]] == ["train.max_steps", "method"]
    assert "This site would refuse" in invoke("flower", "node-config", str(site), "--run", str(run), code=2)
    invoke("flower", "app", str(run), "method=fedsa", "train.max_steps=5", "--out", str(tmp_path / "app"))
    assert "would take part in" in invoke("flower", "node-config", str(site), "--run", str(tmp_path / "app"))
    invoke("flower", "node-config", str(tmp_path / "none.yaml"), "--run", str(run), code=2)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("limits: {min_records: 0}", "limits.min_records: must be positive"),
        ("limits: {min_record: 5}", "limits.min_record: unknown key"),
        ("limits: {min_batch: 9, max_batch: 8}", "limits.min_batch: 9 is more than max_batch"),
        ("limits: 5", "limits: must be a mapping"),
        ("scores: some", '"some" is not one of exact, rounded, none'),
        ("label_names: [a, a]", "label_names: must be two or more different names"),
        ("shares: [a/b]", "shares: must name slots"),
        ("tasks: vqa", "tasks: must be a list"),
    ],
)
def test_what_is_wrong_in_a_site_file_is_told_in_a_sentence(text: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"client: a\nmodels: {{m: m}}\ndata: x\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        load_site(tmp_path / "site.yaml")
    assert len(refused.value.problems) == 1 and wrong in refused.value.problems[0]


def test_an_executor_without_its_secret_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, told in (("empty", "is empty"), ("none", "cannot read")):
        done = CliRunner().invoke(app, ["flower", "executor", "--secret", str(tmp_path / name)])
        assert done.exit_code != 0 and told in done.stderr, done.output


SIZES = {"large": {"hidden_size": 32, "num_hidden_layers": 4}, "small": {"num_hidden_layers": 4}}


def test_the_commands_of_the_page_are_those_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """befit's run; of Flower's, every option is one that its own help lists."""
    text = (ROOT / "docs" / "flower.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line) for language, block in blocks if not language for line in block.splitlines()]
    consortium, sizes, site = [block for language, block in blocks if language == "yaml"]
    (tmp_path / "site.yaml").write_text(site)
    assert load_site(tmp_path / "site.yaml").methods == ["fedsa", "potara"]
    own = tmp_path / "own"
    (own / "data").mkdir(parents=True)
    (own / "data" / "a.csv").write_text("text,label\n" + "x,a\ny,b\n" * 15)
    write_site_keys(own / "keys")[1].rename(own / "keys" / "hospital-b.pub")
    names = "{task: text-classification, label_names: [a, b]}"
    (own / "my.yaml").write_text(f"model: {{id: names-bert-fl}}\ndata: {names}\nmethod: fedit\n")
    (own / "consortium.yaml").write_text(consortium)
    here, away = load_consortium(own / "consortium.yaml").sites
    assert here.values["data"] == str(own / "data" / "a.csv") and away.values["data"] == "/data/notes.csv"
    large, small = (str(save_bert(own / "models" / name, **width)) for name, width in SIZES.items())
    (own / "public.jsonl").write_text('{"text": "x", "label": "a"}\n' * 4)
    places = {"hospital": "data/a.csv", "clinic-1": "data/b.csv"}
    sites = {client: {"data": place, "shares": ["personal", "sketch"]} for client, place in places.items()}
    (own / "data" / "b.csv").write_text("text,label\n" + "u,a\nv,b\n" * 15)
    (own / "sizes.yaml").write_text(f"server: {{host: here.example}}\nsites: {json.dumps(sites)}\n{sizes}")
    models = {one.client: [*one.file.models] for one in load_consortium(own / "sizes.yaml").sites}
    assert models == {"hospital": [large, small], "clinic-1": [small]}
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    seen = set()
    for words in commands:
        seen.add(" ".join(words[:2]))
        if words[0] == "befit" and not {"worker", "executor"} & set(words):  # which stay
            invoke(*words[1:])
        elif words[0] in ("flower-superlink", "flower-supernode"):
            binary = Path(sys.executable).parent / words[0]
            known = subprocess.run([binary, "--help"], capture_output=True, text=True, check=True).stdout
            assert all(word in known for word in words if word.startswith("--")), words
    assert {"befit flower", "federation/run-here.sh", "flwr run"} <= seen
    assert (tmp_path / "federation" / "run-here.sh").exists() and (tmp_path / "simulated" / "pyproject.toml").exists()


def test_the_doctor_finds_what_is_wrong_and_says_how_to_mend_it(tmp_path: Path) -> None:
    """A healthy site but for its server; then one mistake at a time, each found where it is and nowhere else."""
    write_certificates(tmp_path, ["127.0.0.1"])
    write_site_keys(tmp_path)
    site, data, state = tmp_path / "site.yaml", tmp_path / "data.jsonl", tmp_path / "state"
    data.write_text("".join(f'{{"text": "a", "label": "{label}"}}\n' for label in "ab" * 5))
    state.mkdir(mode=0o700)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("")
    site.write_text("client: a\ndata: data.jsonl\nmodels: {one: ./model}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{free.getsockname()[1]}"

    def wrong(*more: str) -> list[str]:
        words = ["doctor", str(site), "--ca", str(tmp_path / "ca.crt"), "--key", str(tmp_path / "site.key")]
        done = CliRunner().invoke(app, [*words, *more, "--json"])
        found = [one["what"] for one in json.loads(done.stdout)["findings"] if one["mend"]]
        assert done.exit_code == (2 if found else 0)
        return found

    assert wrong() == []
    assert wrong("--server", server) == ["server"]
    (tmp_path / "site.key").chmod(0o644)
    assert wrong() == ["key"]
    (tmp_path / "site.key").chmod(0o600)
    state.chmod(0o755)
    assert wrong() == ["state"]
    state.chmod(0o700)
    data.unlink()
    assert wrong() == ["data"]
    site.write_text("client: a\nmodels: {one: ./none}\nbenchmarks: [digits]\n")
    assert wrong() == ["model one"]
    site.write_text("client: a/b\n")
    assert wrong() == ["site's file"]
