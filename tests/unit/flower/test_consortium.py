"""A federation from one file: what is written, who can read it, what stays, and what is refused."""

from __future__ import annotations

import configparser
import json
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.config.load import load_experiment
from befit.core.errors import ConfigError, RunError
from befit.core.yamlfile import read_yaml
from befit.flower.consent import refused_run
from befit.flower.consortium import load_consortium
from befit.flower.consortium_folder import write_consortium
from befit.flower.doctor import data_seen, examine
from befit.flower.doctor_server import names_in
from befit.flower.keys import write_site_keys
from befit.flower.service import SiteService
from befit.flower.site_file import load_site

RUN = """
  name: wards
  model: {id: names-bert-fl}
  data: {task: text-classification, columns: {text: note, label: ward}, label_names: [a, b]}
  method: {name: ditto}
"""
LEAST = "limits.min_records, 10, so it tells no score"


FAMILIES = """
  families: {large: {clients: [north], model: {id: names-bert-mlm}}}"""


def records(path: Path, count: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("note,ward\n" + "".join(f"words {number},{'ab'[number % 2]}\n" for number in range(count)))


def write(folder: Path, sites: str, server: str = "{host: server.example}", run: str = RUN) -> Path:
    (folder / "consortium.yaml").write_text(f"server: {server}\nsites:\n{sites}\nrun: {run}\n")
    return folder / "consortium.yaml"


def made(source: Path, out: Path) -> None:
    write_consortium(load_consortium(source), out)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def unit(path: Path) -> tuple[str, list[str]]:
    """A service's folder and command."""
    read = configparser.RawConfigParser(strict=False)
    read.read(path)
    return read["Service"]["WorkingDirectory"], shlex.split(read["Service"]["ExecStart"])


def test_the_example_becomes_a_federation_that_is_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor and the site's own refusals judge what was written; secrets are for this user alone."""
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["flower", "init"]).exit_code == 0
    again = CliRunner().invoke(app, ["flower", "init"])
    assert again.exit_code == 2 and "exists already" in again.stderr
    done = CliRunner().invoke(app, ["flower", "init", "consortium.yaml", "--json"])
    assert done.exit_code == 0, done.output
    assert all(Path(part).exists() for part in json.loads(done.stdout))
    out, experiment = Path("federation"), load_experiment(Path("federation/app/befit_app/experiment.yaml"))
    for number in range(3):
        site = out / "sites" / f"client-0{number}"
        assert not refused_run(load_site(site / "site.yaml"), experiment)
        key = site / "keys" / "site.key"
        assert not [one for one in examine(site / "site.yaml", None, site / "ca.crt", key) if one.mend]
        assert (mode(site), mode(key)) == (0o700, 0o600)
        assert experiment.engine.keys[f"client-0{number}"] == (site / "keys" / "site.pub").read_text().strip()
    certificates = out / "server" / "certificates"
    assert not [one for one in examine(None, None, key, key, certificates, out / "app") if one.mend]
    assert mode(certificates / "server.key") == 0o600 and mode(out / "run-here.sh") == 0o755
    assert mode(out / "server") == mode(out / "runs") == 0o700
    for script in out.rglob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
    assert all(read_yaml(path)["services"] for path in out.rglob("compose.yaml"))
    folder, command = unit(out / "sites" / "client-01" / "befit-supernode.service")
    assert (Path(folder) / "site.yaml").samefile(out / "sites" / "client-01" / "site.yaml")
    assert command[command.index("--node-config") + 1] == f'site="{folder}/site.yaml"' and "9095" in command
    _, command = unit(out / "server" / "befit-superlink.service")
    assert {"--enable-supernode-auth", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"} <= set(command)
    services = [path.read_text().splitlines() for path in out.rglob("*.service")]
    assert len(services) == 1 + 2 * 3 and all("UMask=0077" in lines for lines in services)
    assert "umask 077" in (out / "run-here.sh").read_text().splitlines()


def test_every_site_lists_the_model_of_its_family(tmp_path: Path) -> None:
    for client in ("north", "south"):
        records(tmp_path / f"{client}.csv")
    source = write(tmp_path, "  north: {data: north.csv}\n  south: {data: south.csv}", run=RUN.rstrip() + FAMILIES)
    made(source, tmp_path / "out")
    models = {client: load_site(tmp_path / f"out/sites/{client}/site.yaml").models for client in ("north", "south")}
    assert models == {"north": {"names-bert-mlm": "names-bert-mlm"}, "south": {"names-bert-fl": "names-bert-fl"}}


AWAY_TOO = "  here: {data: a.csv}\n  away: {host: away.example, data: data/notes.csv}"


@pytest.mark.parametrize(
    ("sites", "listen", "opens", "near"),
    [
        ("  here: {data: a.csv}", "", "127.0.0.1", "127.0.0.1"),
        (AWAY_TOO, "", "0.0.0.0", "127.0.0.1"),
        (AWAY_TOO, ", listen: 127.0.0.1", "127.0.0.1", "127.0.0.1"),
        (AWAY_TOO, ", listen: 10.0.0.7", "10.0.0.7", "10.0.0.7"),
    ],
)
def test_the_servers_port_opens_where_it_has_to_and_no_further(
    sites: str, listen: str, opens: str, near: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records(tmp_path / "a.csv")
    source, out = write(tmp_path, sites, f"{{host: server.example, port: 8123{listen}}}"), tmp_path / "out"
    made(source, out)
    _, command = unit(out / "server" / "befit-superlink.service")
    assert command[command.index("--host") + 1] == opens
    (service,) = read_yaml(out / "server" / "compose.yaml")["services"].values()
    assert service["ports"] == [f"{opens}:8123:8123"]
    assert service["command"][service["command"].index("--host") + 1] == "0.0.0.0"  # of its container's own network
    assert f'address = "{near}:8123"' in (out / "server" / "flwr" / "config.toml").read_text()
    assert near in names_in(out / "server" / "certificates" / "server.crt")
    for site, server in [("here", near), ("away", "server.example")][: sites.count("data:")]:
        _, command = unit(out / "sites" / site / "befit-supernode.service")
        assert command[command.index("--superlink") + 1] == f"{server}:8123"
    assert ("port 8123 opens to all networks" in caplog.text) == (opens == "0.0.0.0")


@pytest.mark.parametrize("listen", ["everywhere", "256.0.0.1", "10.0.0"])
def test_an_address_to_listen_at_that_is_none_is_refused(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"listen: must be an address of this machine"):
        load_consortium(write(tmp_path, "  client-00:", f"{{host: server.example, listen: {listen}}}"))


def test_a_second_call_keeps_keys_and_certificates_and_renews_the_rest(tmp_path: Path) -> None:
    sites = "  south: {data: south.csv}\n  Haus 3: {data: north.csv}"
    records(tmp_path / "north.csv")
    records(tmp_path / "south.csv")
    out = tmp_path / "out"
    made(write(tmp_path, sites), out)
    secrets = {path: path.read_bytes() for path in out.rglob("*") if path.suffix in (".key", ".pub", ".crt")}
    assert len(secrets) == 3 + 2 * 3
    made(
        write(
            tmp_path, sites + "\n  west: {data: west.csv, limits: {max_rounds: 20}}".replace("west.csv", "south.csv")
        ),
        out,
    )
    assert all(path.read_bytes() == data for path, data in secrets.items())
    assert load_site(out / "sites" / "west" / "site.yaml").limits.max_rounds == 20
    assert list(load_experiment(out / "app" / "befit_app" / "experiment.yaml").engine.keys) == [
        "south",
        "Haus 3",
        "west",
    ]
    site = load_site(out / "sites" / "Haus%203" / "site.yaml")
    assert (site.data, site.methods, site.tasks) == (
        str(tmp_path / "north.csv"),
        ["ditto", "local"],
        ["text-classification"],
    )
    assert "Haus%%203" in (out / "sites" / "Haus%203" / "befit-worker.service").read_text()
    with pytest.raises(ConfigError, match=r"server\.host: .*server\.crt lacks the name other\.example"):
        made(write(tmp_path, sites, "{host: other.example}"), out)
    assert all(path.read_bytes() == data for path, data in secrets.items())


def test_a_file_that_somebody_has_changed_stays_and_the_new_one_is_beside_it(tmp_path: Path) -> None:
    """Twice, as what was left once is still the site's own; once it is the new one, it is renewed like any other."""
    records(tmp_path / "south.csv")
    out, names = tmp_path / "out", ("sites/south/site.yaml", "sites/south/befit-worker.service")
    made(write(tmp_path, "  south: {data: south.csv}"), out)
    own = {name: (out / name).read_text() + "# ours\n" for name in names}
    for name, text in own.items():
        (out / name).write_text(text)
    for rounds in (20, 30):
        source = write(tmp_path, f"  south: {{data: south.csv, limits: {{max_rounds: {rounds}}}}}")
        parts = dict(write_consortium(load_consortium(source), out))
        assert [part for part in parts if part.endswith(".new")] == [f"{name}.new" for name in names]
        assert {name: (out / name).read_text() for name in names} == own
        assert load_site(out / "sites" / "south" / "site.yaml.new").limits.max_rounds == rounds
    (out / names[0]).write_bytes((out / f"{names[0]}.new").read_bytes())
    made(write(tmp_path, "  south: {data: south.csv}"), out)
    assert load_site(out / names[0]).limits.max_rounds == 1000 and not (out / f"{names[0]}.new").exists()


def test_a_site_elsewhere_keeps_its_private_key_and_its_paths(tmp_path: Path) -> None:
    records(tmp_path / "north.csv")
    write_site_keys(tmp_path / "from-away")
    sites = (
        "  north: {data: north.csv}\n"
        "  away: {host: away.example, key: from-away/site.pub, data: data/notes.csv, models: {names-bert-fl: models/b}}"
    )
    made(write(tmp_path, sites), tmp_path / "out")
    away = tmp_path / "out" / "sites" / "away"
    assert [path.name for path in (away / "keys").iterdir()] == ["site.pub"]
    assert (away / "keys" / "site.pub").read_text() == (tmp_path / "from-away" / "site.pub").read_text()
    written = read_yaml(away / "site.yaml")
    assert (written["data"], written["models"]) == ("data/notes.csv", {"names-bert-fl": "models/b"})
    assert unit(away / "befit-worker.service") == (
        "/srv/befit",
        ["/srv/befit/.venv/bin/befit", "worker", "site.yaml"],
    )
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "rsync -a --exclude state sites/away/ away.example:/srv/befit/" in readme
    assert "rsync -a --exclude state --exclude site.yaml sites/away/ away.example:/srv/befit/" in readme
    assert "useradd --system --user-group --home-dir /srv/befit" in readme and "chown -R befit: /srv/befit" in readme
    done = subprocess.run([tmp_path / "out" / "run-here.sh"], capture_output=True, text=True)
    assert done.returncode == 1 and "sites/away/keys/site.key is not here" in done.stderr
    write_site_keys(tmp_path / "other")
    with pytest.raises(RunError, match="another key"):
        made(write(tmp_path, sites.replace("from-away", "other")), tmp_path / "out")


def test_where_the_run_has_secure_sums_each_site_demands_them_and_knows_the_others(tmp_path: Path) -> None:
    write_site_keys(tmp_path / "from-away")
    sites = "  client-00:\n  client-01: {require_secure_sums: false}\n"
    sites += "  client-02: {host: away.example, key: from-away/site.pub}"
    run = "{benchmark: {name: digits, clients: 3}, method: fedit, federation: {secure_sums: {clip: 10}}}"
    made(write(tmp_path, sites, run=run), out := tmp_path / "out")
    public = {n: (out / "sites" / f"client-0{n}" / "keys" / "site.pub").read_text().strip() for n in range(3)}
    for number in range(3):
        folder = out / "sites" / f"client-0{number}"
        site = load_site(folder / "site.yaml")
        assert site.peers == {f"client-0{n}": key for n, key in public.items() if n != number}
        assert site.key == str(folder / "keys" / "site.key")
        assert site.require_secure_sums == (number != 1)
        if number != 2:  # whose private key is where it was made
            assert SiteService(site) and mode(folder / "keys" / "site.key") == 0o600
    for key in out.rglob("site.key"):
        secret = key.read_bytes().splitlines()[-3]  # the first lines are the same of all
        assert not [path for path in out.rglob("*") if path.is_file() and path != key and secret in path.read_bytes()]


def test_methods_that_every_site_would_refuse_together_are_refused_here(tmp_path: Path) -> None:
    run = "{benchmark: {name: digits, clients: 3}, method: fedavgm, baselines: [{name: fedavgm, momentum: 0.5}], "
    sites, sums = "  client-00:\n  client-01:\n  client-02:", "federation: {secure_sums: {clip: 10}}}"
    assert load_consortium(write(tmp_path, sites, run=f"{run}name: open}}"))
    with pytest.raises(ConfigError, match=r"sites\.client-02\.methods: .* and .* are the same"):
        load_consortium(write(tmp_path, sites, run=run + sums))


def test_all_mistakes_are_named_at_once_with_key_and_file(tmp_path: Path) -> None:
    records(tmp_path / "south.csv")
    records(tmp_path / "few.csv", 4)
    sites = (
        "  north: {data: gone.csv, port: 8000}\n"
        "  south: {data: south.csv, columns: {text: nope, label: ward}}\n"
        "  east: {data: few.csv, methods: [local]}\n"
        "  west: {data: few.csv, key: south.csv}\n"
        "  away: {host: away.example, limits: {max_rounds: 1}}\n"
        "  typo: {dta: x}"
    )
    with pytest.raises(ConfigError) as refused:
        load_consortium(write(tmp_path, sites))
    told = "\n".join(refused.value.problems)
    for words in (
        f"sites.north.data: there is no {tmp_path / 'gone.csv'}",
        "sites.north.port: 8000 is server.port too",
        "sites.south.data: ",
        "there is no nope; the columns are note, ward",
        "sites.east.method.name: ditto is not among the site's methods: local",
        "sites.west.key: ",
        "sites.away.data: is needed where it is on another machine",
        "sites.away.method: the rounds of ditto (federate)",
        "sites.typo.dta: unknown key for a site. Did you mean: data?",
    ):
        assert words in told, words
    assert str(refused.value).startswith(f"{len(refused.value.problems)} problems in {tmp_path}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sites", "run", "problem"),
    [
        (
            "  client-00:\n  client-02:",
            "{benchmark: {name: digits, clients: 2}, method: fedit}",
            "client-01: is missing",
        ),
        (
            "  client-00:\n  client-02:",
            "{benchmark: {name: digits, clients: 2}, method: fedit}",
            "client-02: is no client",
        ),
        ("  a:\n  A:", "{benchmark: digits, method: fedit}", "the same name but for case"),
        ("  a:", "{benchmark: digits, method: fedid}", "run: method.name: unknown method"),
        ("  a:", "gone.yaml", "run, gone.yaml: there is no file"),
        (
            "  a:",
            "{model: {id: no/where}, data: {task: causal-lm}, method: fedit}",
            "the server needs the model itself",
        ),
        ("  {}", "{benchmark: digits, method: fedit}", "sites: must name at least one"),
        ("  a:", RUN, "sites.a.data: is needed here"),
        ("  a:", f"{RUN}  federation: {{cohort: 2}}", "run: federation.cohort: 2 is more than there are clients, 1"),
        ("  a:", RUN.replace("[a, b]}", "[a, b], public: gone.csv}"), "run: data.public: "),
        ("  a:", RUN.replace("ditto", "fedmkt"), "run: method fedmkt: "),
    ],
)
def test_sites_that_are_not_the_runs_clients_are_refused(sites: str, run: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_consortium(write(tmp_path, sites, run=run))
    assert problem in str(refused.value)


def test_a_runs_own_entry_of_a_client_becomes_its_sites_files_and_columns(tmp_path: Path) -> None:
    """The form of a local run's configuration: a client's columns beside its files, over those of all."""
    records(tmp_path / "a.csv")
    records(tmp_path / "b.csv")
    (tmp_path / "b.csv").write_text((tmp_path / "b.csv").read_text().replace("note,ward", "note,Station"))
    clients = "clients: {a: a.csv, b: {train: b.csv, test: a.csv, columns: {label: Station}}, c: {columns: {text: x}}}"
    run = RUN.replace("text-classification,", f"text-classification, {clients},")
    whole = "  a: {}\n  b: {}\n  c: {data: a.csv, columns: {text: note, label: ward}}"
    with pytest.raises(ConfigError, match=r"sites\.b\.data: .*a\.csv, line 2: there is no Station"):
        load_consortium(write(tmp_path, whole, run=run))
    run = run.replace("test: a.csv, ", "")
    made(write(tmp_path, whole, run=run), tmp_path / "out")
    sites = {name: load_site(tmp_path / "out" / "sites" / name / "site.yaml") for name in "abc"}
    assert sites["b"].data == {"train": str(tmp_path / "b.csv")}
    assert sites["b"].columns == {"text": "note", "label": "Station"}
    assert sites["a"].columns == sites["c"].columns == {"text": "note", "label": "ward"}
    with pytest.raises(ConfigError, match=r"sites\.c\.data: is needed here"):
        load_consortium(write(tmp_path, "  a: {}\n  b: {}\n  c: {}", run=run))


def test_records_without_a_value_are_judged_as_the_run_reads_them(tmp_path: Path) -> None:
    """What `missing: drop` leaves out locally is no reason to refuse a site; the doctor, who knows no run, says so."""
    records(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open("a") as file:
        file.write("no ward,\n")
    sites = "  a: {data: a.csv}"
    with pytest.raises(ConfigError, match=r"sites\.a\.data: .*line 32: ward must be a class"):
        load_consortium(write(tmp_path, sites))
    (site,) = load_consortium(
        write(tmp_path, sites, run=RUN.replace("label_names", "missing: drop, label_names"))
    ).sites
    (seen,) = data_seen(site.file)
    assert not seen.mend and seen.found.startswith("30 train records; a run has to say data.missing: drop")


def test_a_site_with_too_few_records_for_a_score_is_named_before_a_run_shows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the run reads them: with its share held out, and without repeats. A private run tells no scores anyway."""
    records(tmp_path / "a.csv", 30)
    records(tmp_path / "b.csv", 60)
    with (tmp_path / "b.csv").open("a") as file:
        file.write("words 0,a\n" * 60)
    sites = "  a: {data: a.csv}\n  b: {data: b.csv}"
    run = RUN.replace("label_names", "drop_duplicates: true, test_fraction: 0.3, label_names")
    said = [f"site a: 9 of its 30 records would be test (data.test_fraction of the run): fewer than {LEAST}"]
    load_consortium(write(tmp_path, sites, run=run))
    assert [line for line in caplog.messages if "tells no score" in line] == said
    caplog.clear()
    made(write(tmp_path, sites, run=run.replace("0.3", "0.1")), out := tmp_path / "out")
    said = [line for line in caplog.messages if "tells no score" in line]
    assert [line[:31] for line in said] == ["site a: 3 of its 30 records wou", "site b: 6 of its 60 records wou"]
    asked = ["flower", "node-config", str(out / "sites" / "b" / "site.yaml"), "--run", str(out / "app"), "--json"]
    done = CliRunner().invoke(app, asked)
    assert json.loads(done.stdout)["consent"]["untold"].startswith("6 of its 60 records would be test")
    caplog.clear()
    private = f"{run}  privacy: {{unit: example, epsilon: 8, delta: 1.0e-3}}\n"
    load_consortium(write(tmp_path, sites, run=private))
    assert "tells no score" not in caplog.text


def test_a_site_with_too_few_records_for_an_update_is_told_so_before_the_run(tmp_path: Path) -> None:
    """Of thirty records twenty-two are left to train on."""
    for client in "ab":
        records(tmp_path / f"{client}.csv", 30)
    run = RUN.replace("label_names", "test_fraction: 0.2, val_fraction: 0.1, label_names")

    def source(least: int) -> Path:
        return write(tmp_path, f"  a: {{data: a.csv, limits: {{min_records: {least}}}}}\n  b: {{data: b.csv}}", run=run)

    made(source(22), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"sites\.a\.ditto, local: an update would be of fewer train") as error:
        load_consortium(source(23))
    assert len(error.value.problems) == 1
    site = tmp_path / "out" / "sites" / "a" / "site.yaml"
    site.write_text(site.read_text().replace("min_records: 22", "min_records: 23"))
    done = CliRunner().invoke(app, ["flower", "node-config", str(site), "--run", str(tmp_path / "out" / "app")])
    assert done.exit_code == 2 and "would refuse" in done.stdout and "ditto, local: an update would" in done.stdout


def test_run_here_refuses_a_port_that_is_taken(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = "{benchmark: {name: digits, clients: 2}, method: fedit}"
        made(write(tmp_path, "  client-00:\n  client-01:", f"{{host: localhost, port: {port}}}", run), tmp_path / "out")
        done = subprocess.run([tmp_path / "out" / "run-here.sh"], capture_output=True, text=True)
    assert done.returncode == 1 and f"port {port} is in use" in done.stderr
    for site, told in (
        ("north", "there is no site 'north'; there are client-00 client-01"),
        ("client-00", "nothing runs"),
    ):
        done = subprocess.run([tmp_path / "out" / "run-here.sh", "stop", site], capture_output=True, text=True)
        assert done.returncode == 1 and told in done.stderr
